//! Files whose sizes lie around the sizes of slabs read back exactly, whichever way the kernel is asked for them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "files are mapped and looked at")]

mod common;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use common::run::wait_until;
use common::{Mode, Mount, Options, bytes, memory_only, mode};
use nix::errno::Errno;
use nix::fcntl::{PosixFadviseAdvice, SpliceFFlags, posix_fadvise, splice};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::sendfile::sendfile;

const PAGE: usize = 4096;
const SMALL: usize = 256 << 10;
/// What a slab has at least while the end of its file is not known.
const FIRST: usize = 4 << 20;
const LARGEST: usize = 8 << 20;

fn mount() -> Mount {
    // Slabs are used again at once, so that what is left in them would show.
    Mount::with(Options::new(64, 256).arg("--slab-file-max").arg("8MiB").arg("--slab-rest").arg("1ms"))
}

/// One byte and one page around `base`, and `base` itself.
fn around(base: usize) -> [usize; 5] {
    [base - PAGE, base - 1, base, base + 1, base + PAGE]
}

fn sizes() -> Vec<usize> {
    [2 * PAGE, SMALL, 1 << 20, FIRST, LARGEST].into_iter().flat_map(around).collect()
}

fn write_all(mount: &Mount, round: u64) {
    for size in sizes() {
        fs::write(mount.at(&format!("f{size}")), bytes(size as u64 + round, size)).unwrap();
    }
}

fn remove_all(mount: &Mount) {
    sizes().iter().for_each(|size| fs::remove_file(mount.at(&format!("f{size}"))).unwrap());
}

/// Reads the file in every way that has an end of its own.
fn check_reads(path: &Path, wanted: &[u8], when: &str) {
    let size = wanted.len();
    let what = format!("file of {size} bytes {when}");
    assert_eq!(fs::metadata(path).unwrap().len(), size as u64, "{what}");
    assert!(fs::read(path).unwrap() == wanted, "{what}, read whole");
    let file = File::open(path).unwrap();
    let mut buffer = vec![0xaa; 3 * PAGE];
    let from = size.saturating_sub(PAGE + 1);
    let count = file.read_at(&mut buffer, from as u64).unwrap();
    assert_eq!(count, size - from, "{what}: a read over the end");
    assert!(buffer[..count] == wanted[from..], "{what}: a read over the end");
    for beyond in [size, size + 1, size.next_multiple_of(PAGE), size + PAGE] {
        assert_eq!(file.read_at(&mut buffer, beyond as u64).unwrap(), 0, "{what}: read at {beyond}");
    }
}

fn check_mapping(path: &Path, wanted: &[u8], when: &str) {
    let size = wanted.len();
    let file = File::open(path).unwrap();
    let whole = NonZeroUsize::new(size.next_multiple_of(PAGE)).unwrap();
    let map = |flags| {
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe { mmap(None, whole, ProtFlags::PROT_READ, flags, &file, 0) }
    };
    // Handles that the daemon serves can be mapped only privately.
    let base = match map(MapFlags::MAP_SHARED) {
        Err(Errno::ENODEV) => map(MapFlags::MAP_PRIVATE).unwrap(),
        other => other.unwrap(),
    };
    // SAFETY: mapped just now, and unmapped below.
    let seen = unsafe { std::slice::from_raw_parts(base.as_ptr().cast::<u8>(), whole.get()) };
    assert!(seen[..size] == *wanted, "mapping of {size} bytes {when}");
    assert!(seen[size..].iter().all(|byte| *byte == 0), "tail of a mapping of {size} bytes {when}");
    // SAFETY: the slice is not used any more.
    unsafe { munmap(base, whole.get()) }.unwrap();
}

fn check_all(mount: &Mount, round: u64, when: &str) {
    for size in sizes() {
        let path = mount.at(&format!("f{size}"));
        let wanted = bytes(size as u64 + round, size);
        check_reads(&path, &wanted, when);
        check_mapping(&path, &wanted, when);
    }
}

#[test]
fn sizes_around_a_slab_read_back_exactly() {
    let mount = mount();
    if memory_only() {
        // They do not all fit at once.
        for round in [0, 1] {
            for size in sizes() {
                let (path, wanted) = (mount.at("f"), bytes(size as u64 + round, size));
                fs::write(&path, &wanted).unwrap();
                check_reads(&path, &wanted, "from L1");
                check_mapping(&path, &wanted, "from L1");
            }
        }
        return mount.check_quiet();
    }
    for round in [0, 1] {
        write_all(&mount, round);
        check_all(&mount, round, "after it was written");
        mount.push_out_of_l1();
        check_all(&mount, round, "from L2");
        check_all(&mount, round, "after it came from L2");
        remove_all(&mount);
    }
    assert!(mount.stat("slabs_reused") > 0, "no slab was used twice");
    mount.check_quiet();
}

#[test]
fn the_tail_of_a_reused_slab_is_zero() {
    let mount = mount();
    let mut ones = vec![0xff; FIRST];
    for round in 0..8 {
        fs::write(mount.at("ones"), &ones).unwrap();
        check_reads(&mount.at("ones"), &ones, "of ones");
        check_mapping(&mount.at("ones"), &ones, "of ones");
        fs::remove_file(mount.at("ones")).unwrap();
        // As many pages, so the same slab will do; but the last is not full.
        let short = bytes(round, FIRST - PAGE + 1 + round as usize * 500);
        fs::write(mount.at("short"), &short).unwrap();
        check_reads(&mount.at("short"), &short, "in a used slab");
        check_mapping(&mount.at("short"), &short, "in a used slab");
        fs::remove_file(mount.at("short")).unwrap();
        ones.rotate_left(1);
    }
    mount.check_quiet();
}

#[test]
fn a_hole_in_a_reused_slab_is_zero() {
    let mount = mount();
    fs::write(mount.at("ones"), vec![0xff; FIRST]).unwrap();
    assert_eq!(fs::read(mount.at("ones")).unwrap().len(), FIRST);
    fs::remove_file(mount.at("ones")).unwrap();
    let file = OpenOptions::new().write(true).create_new(true).open(mount.at("holes")).unwrap();
    let mut wanted = vec![0; FIRST];
    for (seed, offset) in [(1, 100), (2, 700_000), (3, FIRST - 50_000)] {
        let piece = bytes(seed, 50_000);
        file.write_all_at(&piece, offset as u64).unwrap();
        wanted[offset..offset + piece.len()].copy_from_slice(&piece);
    }
    drop(file);
    check_reads(&mount.at("holes"), &wanted, "with holes");
    check_mapping(&mount.at("holes"), &wanted, "with holes");
    if !memory_only() {
        mount.push_out_of_l1();
        check_reads(&mount.at("holes"), &wanted, "with holes from L2");
        check_mapping(&mount.at("holes"), &wanted, "with holes from L2");
    }
    mount.check_quiet();
}

/// Files of these sizes go through the kernel's other ways of reading, from L1 and from L2.
fn each_way(check: impl Fn(&Path, &[u8])) {
    let mount = mount();
    for size in [PAGE + 1, SMALL + 1, (2 << 20) - 1, FIRST + PAGE] {
        let (path, wanted) = (mount.at(&format!("f{size}")), bytes(size as u64, size));
        fs::write(&path, &wanted).unwrap();
        check(&path, &wanted);
        if !memory_only() {
            mount.push_out_of_l1();
            check(&path, &wanted);
            check(&path, &wanted);
        }
    }
    mount.check_quiet();
}

#[test]
fn sendfile_sends_the_whole_file() {
    each_way(|path, wanted| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (file, size) = (File::open(path).unwrap(), wanted.len());
        let reader = std::thread::spawn(move || {
            let mut read = Vec::new();
            theirs.read_to_end(&mut read).unwrap();
            read
        });
        let mut sent = 0;
        // One more than there is: it must end at the end.
        while let count @ 1.. = sendfile(&ours, &file, None, size + 1 - sent).unwrap() {
            sent += count;
        }
        assert_eq!(sent, size);
        drop(ours);
        assert!(reader.join().unwrap() == wanted, "sendfile of {size} bytes");
    });
}

#[test]
fn splice_moves_the_whole_file() {
    each_way(|path, wanted| {
        let (mut from, to) = std::io::pipe().unwrap();
        let (file, size) = (File::open(path).unwrap(), wanted.len());
        let reader = std::thread::spawn(move || {
            let mut read = Vec::new();
            from.read_to_end(&mut read).unwrap();
            read
        });
        let mut offset = 0;
        while splice(&file, Some(&mut offset), &to, None, 1 << 20, SpliceFFlags::empty()).unwrap() > 0 {}
        assert_eq!(offset, size as i64);
        drop(to);
        assert!(reader.join().unwrap() == wanted, "splice of {size} bytes");
    });
}

#[test]
fn o_direct_reads_at_any_alignment() {
    each_way(|path, wanted| {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
        let size = wanted.len();
        for (from, len) in [(0, size), (0, size + PAGE), (1, 4096), (511, 1000), (size - 1, 2), (PAGE - 1, 3)]
        {
            let mut buffer = vec![0xaa; len];
            let mut got = 0;
            while let count @ 1.. = file.read_at(&mut buffer[got..], (from + got) as u64).unwrap() {
                got += count;
            }
            let end = (from + len).min(size);
            assert_eq!(got, end - from, "O_DIRECT read of {len} at {from} of {size}");
            assert!(buffer[..got] == wanted[from..end], "O_DIRECT read of {len} at {from} of {size}");
        }
    });
}

#[test]
fn readahead_advice_changes_nothing() {
    each_way(|path, wanted| {
        let file = File::open(path).unwrap();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_WILLNEED).unwrap();
        check_reads(path, wanted, "after WILLNEED");
        check_mapping(path, wanted, "after WILLNEED");
        let mut read = Vec::new();
        (&file).read_to_end(&mut read).unwrap();
        assert!(read == wanted, "after WILLNEED on the same handle");
    });
}

/// Another thread of this process may hold the file open for a moment, in a child that it has just forked.
fn run(program: &Path, argument: &str) -> String {
    for _ in 0..1000 {
        match Command::new(program).arg(argument).output() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            other => return String::from_utf8(other.unwrap().stdout).unwrap(),
        }
    }
    panic!("{} stays busy", program.display());
}

#[test]
fn a_program_on_the_mount_runs() {
    let mount = mount();
    let program = mount.at("echo");
    let content = fs::read("/bin/echo").unwrap();
    let mut file = File::create(&program).unwrap();
    file.write_all(&content).unwrap();
    file.set_permissions(Permissions::from_mode(0o755)).unwrap();
    drop(file);
    assert_eq!(run(&program, "warm"), "warm\n");
    if !memory_only() {
        mount.push_out_of_l1();
        assert_eq!(run(&program, "cold"), "cold\n");
        assert_eq!(run(&program, "again"), "again\n");
    }
    assert!(fs::read(&program).unwrap() == content);
    mount.check_quiet();
}

/// A huge page that an engine has pinned cannot be split, so a slab that was used before is not cut inside one.
#[test]
fn a_file_whose_slab_cannot_be_cut_is_whole_and_counted() {
    let mount = Mount::new();
    let can_be_cut = memory_only() || mount.status().contains("without: huge pages");
    for seed in 0..8 {
        fs::write(mount.at(&format!("full{seed}")), bytes(seed, FIRST)).unwrap();
    }
    assert_eq!(mount.stat("slabs_kept_whole"), 0);
    mount.drain();
    for seed in 0..8 {
        fs::remove_file(mount.at(&format!("full{seed}"))).unwrap();
    }
    for seed in 0..8 {
        let (path, wanted) = (mount.at(&format!("d{seed}/f")), bytes(seed, FIRST - SMALL - 1));
        fs::create_dir(path.parent().unwrap()).unwrap();
        fs::write(&path, &wanted).unwrap();
        check_reads(&path, &wanted, "in a slab that was used before");
        check_mapping(&path, &wanted, "in a slab that was used before");
    }
    let whole = mount.stat("slabs_kept_whole");
    if can_be_cut {
        assert_eq!(whole, 0, "{}", mount.status());
    } else if whole == 0 {
        // Whether the kernel had huge pages to give, and an engine one of them pinned just then, is a matter of chance.
        eprintln!("not tested: every slab could be cut");
    } else {
        assert!(whole <= 8, "{}", mount.status());
    }
    mount.check_quiet();
}

/// Why nobody can make huge pages of shared memory on this machine.
fn without_collapse() -> Option<String> {
    let knob = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Ok(enabled) = fs::read_to_string(knob) else { return Some(format!("there is no {knob}")) };
    if enabled.contains("[deny]") {
        return Some(format!("{knob} says deny"));
    }
    let release = nix::sys::utsname::uname().unwrap().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (version < (6, 1)).then(|| format!("kernel {release} has no MADV_COLLAPSE"))
}

/// MADV_COLLAPSE makes huge pages that reach past the end of a file, whatever the file system wants.
#[test]
fn what_a_client_makes_of_its_mapping_is_cut_again() {
    const MADV_COLLAPSE: i32 = 25;
    const HUGE: usize = 2 << 20;
    if let Some(why) = without_collapse() {
        return eprintln!("NOT TESTED: {why}");
    }
    let mut options = Options::new(64, 256);
    if !memory_only() && mode() != Mode::Threads {
        // The ring would have the slab pinned as a fixed buffer, whose pages stay where they are.
        options = options.arg("--l2-engine").arg("threads");
    }
    let mount = Mount::with(options);
    if mount.stat("passthrough") == 0 {
        return eprintln!("not tested: without passthrough nobody maps a slab");
    }
    let size = HUGE + SMALL + 1;
    let (path, wanted) = (mount.at("f"), bytes(1, size));
    fs::write(&path, &wanted).unwrap();
    let file = File::open(&path).unwrap();
    let (room, whole) = (NonZeroUsize::new(3 * HUGE).unwrap(), NonZeroUsize::new(2 * HUGE).unwrap());
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { mmap_anonymous(None, room, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) }.unwrap();
    let aligned = NonZeroUsize::new((base.as_ptr() as usize).next_multiple_of(HUGE));
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: it takes the place of a part of the mapping above, which nobody uses.
    let mapped = unsafe { mmap(aligned, whole, ProtFlags::PROT_READ, flags, &file, 0) }.unwrap();
    wait_until("the kernel makes huge pages, which the test needs", || {
        // SAFETY: advice for our own mapping; it changes no contents.
        if unsafe { libc::madvise(mapped.as_ptr(), whole.get(), MADV_COLLAPSE) } == 0 {
            return true;
        }
        // Somebody looks at a page in passing: the device takes it, or the kernel moves memory together.
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
        false
    });
    mount.wait_for("slabs_trimmed", |trimmed| trimmed >= 1);
    // SAFETY: mapped above, as far as the file goes and further, and unmapped below.
    let seen = unsafe { std::slice::from_raw_parts(mapped.as_ptr().cast::<u8>(), size) };
    assert!(seen == wanted);
    check_reads(&path, &wanted, "after it was collapsed and cut");
    // SAFETY: the slice is not used any more.
    unsafe { munmap(base, room.get()) }.unwrap();
    mount.check_quiet();
}
