//! Whatever opens are mixed (of files in L1 and in L2, to read, write, replace, map and truncate), none fails: no EIO
//! where modes meet, no ESTALE from a second look (rule R3b). And every version that is opened is whole.
//!
//! The clients are processes, because the threads of one share its unfinished files. 8,000 opens;
//! KVCACHEFS_TEST_FULL=1 makes 160,000. Where the names move and go meanwhile, 30,000; 1,000,000.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "mappings are made and looked at")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use client::Watchdog;
use common::run::wait_until;
use common::{Mode, Mount, Options, bytes, memory_only, mode};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::getpid;

const PROCESSES: u64 = 8;
const PAGE: usize = 4096;
/// Sizes of files: in chunks, around a block, with slabs.
const SIZES: [usize; 5] = [20_480, 262_144, 300_000, 1_050_000, 2_097_152];
/// Files that are used all the time, and those that are mostly in L2.
const WARM: u64 = 40;
const COLD: u64 = 120;

fn opens() -> u64 {
    match std::env::var("KVCACHEFS_TEST_FULL") {
        Ok(full) if full == "1" => 160_000,
        _ => 8_000,
    }
}

fn size_of(file: u64) -> usize {
    SIZES[(file % SIZES.len() as u64) as usize]
}

/// Every page begins with the number of its file; what follows is the version.
fn page(file: u64, version: u64) -> Vec<u8> {
    let mut page = (file + 1).to_le_bytes().to_vec();
    page.resize(PAGE, version as u8);
    page
}

fn content(file: u64, version: u64, size: usize) -> Vec<u8> {
    let mut bytes = page(file, version).repeat(size.div_ceil(PAGE));
    bytes.truncate(size);
    bytes
}

/// Every page is of this file, or was never written; and each page is of one version.
fn check(file: u64, bytes: &[u8], what: &str) {
    for (at, page) in bytes.chunks(PAGE).enumerate() {
        if page.len() < 16 {
            continue;
        }
        let number = u64::from_le_bytes(page[..8].try_into().unwrap());
        assert!(
            number == file + 1 || page.iter().all(|&byte| byte == 0),
            "{what}: file {file}, page {at}: {number}"
        );
    }
}

struct Mapping {
    address: NonNull<c_void>,
    len: usize,
}

impl Mapping {
    fn new(file: &File, len: usize, write: bool) -> io::Result<Self> {
        let size = NonZeroUsize::new(len).unwrap();
        let protection =
            if write { ProtFlags::PROT_READ | ProtFlags::PROT_WRITE } else { ProtFlags::PROT_READ };
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self { address, len })
    }

    fn whole_range(&self) -> RemoteIoVec {
        RemoteIoVec { base: self.address.as_ptr() as usize, len: self.len }
    }

    /// The bytes as they are now; others may be writing. Where a page cannot be had, an error and not a signal.
    fn read(&self) -> io::Result<Vec<u8>> {
        let mut out = vec![0; self.len];
        let read = process_vm_readv(getpid(), &mut [IoSliceMut::new(&mut out)], &[self.whole_range()])?;
        if read == self.len {
            Ok(out)
        } else {
            Err(io::Error::other(format!("no page at {read} of {}", self.len)))
        }
    }

    fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        assert!(at + bytes.len() <= self.len);
        let to = RemoteIoVec { base: self.address.as_ptr() as usize + at, len: bytes.len() };
        process_vm_writev(getpid(), &[IoSlice::new(bytes)], &[to])?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used any more.
        unsafe { munmap(self.address, self.len) }.unwrap();
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// One open of `file` and what its kind of client does with it.
fn one(mount: &Path, file: u64, random: &mut Random) -> Result<(), (&'static str, io::Error)> {
    let path = mount.join(format!("d{}/f{file}", file % 4));
    let (size, version) = (size_of(file), random.below(200) + 1);
    let at = random.below((size / PAGE) as u64) * PAGE as u64;
    let (what, did) = match random.below(12) {
        0..4 => ("read", read_page(&path, file, at)),
        4 => ("read all", fs::read(&path).map(|bytes| check_whole(file, &bytes))),
        5..7 => ("map", map(&path, file)),
        7 => ("write in place", write_page(&path, file, version, at)),
        8 => ("map to write", map_to_write(&path, file, version, at)),
        9 => ("replace", replace(&path, &content(file, version, size))),
        10 => ("create or replace", fs::write(&path, content(file, version, size))),
        // To write, and then nothing is written.
        _ => ("open to write", File::options().write(true).open(&path).map(drop)),
    };
    did.map_err(|error| (what, error))
}

fn check_whole(file: u64, bytes: &[u8]) {
    assert_eq!(bytes.len(), size_of(file), "file {file} is not whole");
    check(file, bytes, "all of it");
}

fn read_page(path: &Path, file: u64, at: u64) -> io::Result<()> {
    let mut bytes = vec![0; PAGE];
    File::open(path)?.read_exact_at(&mut bytes, at)?;
    check(file, &bytes, "one page");
    Ok(())
}

fn map(path: &Path, file: u64) -> io::Result<()> {
    let open = File::open(path)?;
    let mapping = Mapping::new(&open, size_of(file), false)?;
    drop(open);
    check_whole(file, &mapping.read()?);
    Ok(())
}

fn write_page(path: &Path, file: u64, version: u64, at: u64) -> io::Result<()> {
    File::options().read(true).write(true).open(path)?.write_all_at(&page(file, version), at)
}

fn map_to_write(path: &Path, file: u64, version: u64, at: u64) -> io::Result<()> {
    let open = File::options().read(true).write(true).open(path)?;
    let mapping = Mapping::new(&open, size_of(file), true)?;
    drop(open);
    mapping.write(at as usize, &page(file, version))
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    File::options().write(true).truncate(true).open(path)?.write_all(bytes)
}

/// The number of files. Without L2, what does not fit is gone.
fn files() -> u64 {
    if memory_only() { WARM } else { WARM + COLD }
}

#[test]
#[ignore = "a process of the test below"]
fn client_of_the_mix() {
    let Ok(mount) = std::env::var("OPENS_MOUNT") else { return };
    let mount = PathBuf::from(mount);
    let seed: u64 = std::env::var("OPENS_SEED").unwrap().parse().unwrap();
    let mut random = Random(0x9e37_79b9_7f4a_7c15 + seed);
    for at in 0..opens() / PROCESSES {
        let warm = random.below(4) > 0 || files() == WARM;
        let file = if warm { random.below(WARM) } else { WARM + random.below(files() - WARM) };
        match one(&mount, file, &mut random) {
            Ok(()) => {}
            Err((_, error))
                if memory_only() && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StorageFull) => {}
            Err((what, error)) => panic!("file {file}, open {at} of client {seed}, {what}: {error}"),
        }
    }
}

#[test]
fn no_mix_of_opens_fails() {
    let mount = Mount::with(Options::new(96, 512));
    let _watchdog = Watchdog::within(&mount, Duration::from_secs(if opens() > 8_000 { 1200 } else { 120 }));
    let files = files();
    for dir in 0..4 {
        fs::create_dir(mount.at(&format!("d{dir}"))).unwrap();
    }
    for file in 0..files {
        let path = mount.at(&format!("d{}/f{file}", file % 4));
        fs::write(path, content(file, 0, size_of(file))).unwrap();
    }
    mount.drain();
    let clients: Vec<Child> = (0..PROCESSES)
        .map(|seed| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "client_of_the_mix", "--nocapture"])
                .env("OPENS_MOUNT", mount.path())
                .env("OPENS_SEED", seed.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    // All of them, before one that failed ends the mount under the others.
    let ends: Vec<ExitStatus> = clients.into_iter().map(|mut client| client.wait().unwrap()).collect();
    assert!(ends.iter().all(ExitStatus::success), "{ends:?}");
    if !memory_only() {
        for file in 0..files {
            let path = mount.at(&format!("d{}/f{file}", file % 4));
            let bytes = fs::read(path).unwrap();
            assert_eq!(bytes.len(), size_of(file), "file {file}");
            check(file, &bytes, "at the end");
        }
        mount.drain();
    }
    assert!(mount.stat("copies_on_write") > 0, "no writer met a reader");
    assert!(memory_only() || mount.stat("promotions") > 0, "nothing came from the device");
    mount.wait_for("private_files", |files| files == 0);
    mount.wait_for("l1_lent_bytes", |bytes| bytes == 0);
    mount.check_quiet();
}

/// Threads of one process, which find each other's private versions, as processes do not.
#[test]
fn threads_that_rewrite_and_rename_the_same_names_get_no_estale() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let steps = steps() / 3;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                let mount = &mount;
                scope.spawn(move || {
                    let bytes = bytes(writer, 320_000);
                    for step in 0..steps {
                        let name = format!("k{}", (step + writer) % 2);
                        let len = if step % 2 == 0 { 800 } else { bytes.len() };
                        let mut file = File::create(mount.at(&name)).unwrap_or_else(|error| {
                            panic!("writer {writer}, step {step}, {name}: {error}");
                        });
                        file.write_all(&bytes[..len]).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for (from, to) in [("k0", "k1"), ("k1", "k0")] {
                    match fs::rename(mount.at(from), mount.at(to)) {
                        Ok(()) => {}
                        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{from} to {to}"),
                    }
                }
            }
        });
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    mount.wait_for("private_files", |files| files == 0);
    mount.check_quiet();
}

const MOVERS: u64 = 5;

/// How often each of five processes opens, renames or removes one of two names.
fn steps() -> u64 {
    match std::env::var("KVCACHEFS_TEST_FULL") {
        Ok(full) if full == "1" => 100_000,
        _ => 3_000,
    }
}

/// A version that client `seed` makes in step `at`: each eight bytes tell whose they are and where they belong.
fn version(seed: u64, at: u64, size: usize) -> Vec<u8> {
    (0..size as u64 / 8).flat_map(|word| (seed << 56 | at << 24 | word).to_le_bytes()).collect()
}

/// A truncation leaves so much, and as many zeros where there was nothing.
const CUT: usize = 1000;

/// What is found in a file.
enum Seen {
    /// Each eight bytes are where they belong in a version that some client may have made. Several versions may meet:
    /// what was created with O_CREAT alone is written where it is.
    Written,
    /// So, but for zeros where no client writes any.
    Zeros(usize),
    Foreign(String),
}

/// Looks at what was read. There may be zeros below `may_be_zero`.
fn seen(bytes: &[u8], may_be_zero: usize) -> Seen {
    let mut seen = Seen::Written;
    for (at, word) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        let (seed, step, place) = (word >> 56, (word >> 24) & 0xffff_ffff, word & 0xff_ffff);
        if word == 0 {
            if at * 8 >= may_be_zero {
                seen = Seen::Zeros(at * 8);
            }
        } else if !((1..=MOVERS).contains(&seed) && step < steps() && place == at as u64) {
            return Seen::Foreign(format!("{word:#x} at {} of {}", at * 8, bytes.len()));
        }
    }
    seen
}

/// Looks until there are no zeros. A look that a truncation overtakes, as on any file system, may find them behind the
/// new end; but not again and again.
fn look(mut read: impl FnMut() -> io::Result<Seen>) -> io::Result<Result<(), String>> {
    let mut last = 0;
    for _ in 0..100 {
        match read()? {
            Seen::Written => return Ok(Ok(())),
            Seen::Foreign(what) => return Ok(Err(what)),
            Seen::Zeros(at) => last = at,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Err(format!("zeros at {last} stay")))
}

/// Reads all that there is in one request.
fn read_version(path: &Path, size: usize) -> io::Result<Result<(), String>> {
    let file = File::open(path)?;
    let mut bytes = vec![0xff; size + 8];
    look(|| {
        let len = file.read_at(&mut bytes, 0)?;
        if ![0, CUT, size].contains(&len) {
            return Ok(Seen::Foreign(format!("{len} bytes")));
        }
        Ok(seen(&bytes[..len], CUT))
    })
}

/// Maps it, and looks at the pages that there are. Behind the end of a file that was cut its page is zero.
fn map_version(path: &Path, size: usize) -> io::Result<Result<(), String>> {
    let mapping = Mapping::new(&File::open(path)?, size, false)?;
    let mut bytes = vec![0xff; size];
    look(|| {
        let to = &mut [IoSliceMut::new(&mut bytes)];
        let len = match process_vm_readv(getpid(), to, &[mapping.whole_range()]) {
            Err(nix::errno::Errno::EFAULT) => 0,
            read => read?,
        };
        Ok(seen(&bytes[..len], PAGE))
    })
}

/// One step of whoever opens, renames and removes names without a pause. What went wrong in it.
fn step(dir: &Path, size: usize, (seed, at): (u64, u64), random: &mut Random) -> Option<String> {
    let name = |random: &mut Random| dir.join(["n0", "n1"][random.below(2) as usize]);
    let path = name(random);
    let bytes = || version(seed, at, size);
    let write = |options: &mut fs::OpenOptions| {
        options.open(&path).and_then(|file| file.write_all_at(&bytes(), 0)).map(Ok)
    };
    let (what, creates, did) = match random.below(12) {
        0 => ("rename", false, fs::rename(&path, name(random)).map(Ok)),
        1 => ("unlink", false, fs::remove_file(&path).map(Ok)),
        2 => ("create or write", true, write(File::options().create(true).read(true).write(true))),
        3 => {
            let opened = File::options().create(true).append(true).open(&path);
            ("create or open to write", true, opened.map(|_| Ok(())))
        }
        4 => ("create or replace", true, fs::write(&path, bytes()).map(Ok)),
        5 => ("replace", false, write(File::options().write(true).truncate(true))),
        6 => ("write", false, write(File::options().read(true).write(true))),
        7 => ("open to write", false, File::options().write(true).open(&path).map(|_| Ok(()))),
        8 => {
            let cut = nix::unistd::truncate(&path, CUT as i64).map_err(io::Error::from);
            ("truncate", false, cut.map(Ok))
        }
        9 => ("read", false, read_version(&path, size)),
        10 => ("map", false, map_version(&path, size)),
        _ => ("stat", false, fs::metadata(&path).map(|_| Ok(()))),
    };
    match did {
        Ok(Ok(())) => None,
        Ok(Err(wrong)) => Some(format!("{what}: {wrong}")),
        // A name may have gone. Who creates what is not there never finds that it is not.
        Err(error) if error.kind() == ErrorKind::NotFound && !creates => None,
        Err(error) => Some(format!("{what}: {error}")),
    }
}

#[test]
#[ignore = "a process of the test below"]
fn client_of_the_moving_names() {
    let Ok(mount) = std::env::var("OPENS_MOUNT") else { return };
    let seed: u64 = std::env::var("OPENS_SEED").unwrap().parse().unwrap();
    let size: usize = std::env::var("OPENS_SIZE").unwrap().parse().unwrap();
    let mut random = Random(0x9e37_79b9_7f4a_7c15 + seed);
    let mut failed = Vec::new();
    for at in 0..steps() {
        let wrong = step(Path::new(&mount), size, (seed, at), &mut random);
        failed.extend(wrong.map(|wrong| format!("step {at}, {wrong}")));
    }
    assert!(failed.is_empty(), "client {seed} failed {} times: {failed:?}", failed.len());
}

/// Five processes rename and remove the very names that they open. What a lookup found can be opened, whatever its name
/// leads to by then, and holds what somebody wrote there.
#[test]
fn names_that_move_and_go_are_stale_to_nobody() {
    for size in [5_000, 400_000] {
        let mount = Mount::new();
        let _watchdog =
            Watchdog::within(&mount, Duration::from_secs(if steps() > 3_000 { 1200 } else { 120 }));
        let clients: Vec<Child> = (1..=MOVERS)
            .map(|seed| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--ignored", "--exact", "client_of_the_moving_names", "--nocapture"])
                    .env("OPENS_MOUNT", mount.path())
                    .env("OPENS_SEED", seed.to_string())
                    .env("OPENS_SIZE", size.to_string())
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let ends: Vec<ExitStatus> = clients.into_iter().map(|mut client| client.wait().unwrap()).collect();
        assert!(ends.iter().all(ExitStatus::success), "{ends:?}");
        mount.wait_for("private_files", |files| files == 0);
        mount.check_quiet();
    }
}

/// A file that comes into L1 while somebody reads it through the daemon gets another inode number. That goes when the
/// kernel forgets it, not only with the file.
#[test]
fn further_inode_numbers_go_when_the_kernel_forgets_them() {
    if memory_only() || mode() == Mode::Daemon {
        return;
    }
    let mount = Mount::with(Options::new(64, 512));
    let _watchdog = Watchdog::new(&mount);
    let (path, content) = (mount.at("f"), content(1, 1, 2 << 20));
    fs::write(&path, &content).unwrap();
    for round in 1..4 {
        mount.push_out_of_l1();
        let through_the_daemon = File::open(&path).unwrap();
        wait_until("an open of the file in L1 gets another number", || {
            let mut bytes = vec![0; content.len()];
            through_the_daemon.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == content);
            drop(File::open(&path).unwrap());
            mount.stat("aliases") == round
        });
        assert!(fs::read(&path).unwrap() == content);
    }
    // What its name leads to is all that the kernel still knows.
    mount.wait_for("alias_inodes", |known| known <= 1);
    fs::remove_file(&path).unwrap();
    mount.wait_for("alias_inodes", |known| known == 0);
    mount.check_quiet();
}
