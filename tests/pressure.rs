//! Under pressure writers wait, or are told that there is no room; nobody hangs, no bound is passed, no byte is wrong.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "readers map files and look at them")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{Mount, Options, bytes, memory_only};
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use rustix::fs::FallocateFlags;

const MIB: usize = 1 << 20;
const CLIENTS: usize = 64;

fn full() -> bool {
    std::env::var_os("KVCACHEFS_TEST_FULL").is_some()
}

/// Says which bytes are wrong.
fn assert_same(read: &[u8], wanted: &[u8], what: &str) {
    assert_eq!(read.len(), wanted.len(), "length of {what}");
    let wrong: Vec<usize> = (0..read.len()).filter(|&at| read[at] != wanted[at]).collect();
    if let (Some(first), Some(last)) = (wrong.first(), wrong.last()) {
        let start = &read[*first..read.len().min(first + 8)];
        panic!("{what}: {} bytes from {first} to {last} are wrong, {start:x?}", wrong.len());
    }
}

/// Runs every job in a thread of its own. Whoever is still at it after `patience` hangs.
fn all(jobs: Vec<Box<dyn FnOnce() + Send>>, patience: Duration) {
    let (sender, done) = channel();
    let count = jobs.len();
    for (at, job) in jobs.into_iter().enumerate() {
        let sender = sender.clone();
        std::thread::spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            let _ = sender.send((at, result));
        });
    }
    for finished in 0..count {
        match done.recv_timeout(patience) {
            Ok((_, Ok(()))) => {}
            Ok((at, Err(_))) => panic!("client {at} failed"),
            Err(_) => panic!("no client has finished for {patience:?}; {finished} of {count} had"),
        }
    }
}

#[test]
fn sixty_four_writers_finish_under_a_small_dirty_bound() {
    if memory_only() {
        return;
    }
    let (size, dirty, l1) = if full() { (80 * MIB, 256, 1024) } else { (10 * MIB, 32, 64) };
    let l2 = (CLIENTS * size * 5 / 4 / MIB) as u64;
    let mut mount = Mount::with(Options::new(l1, l2).arg("--dirty-limit").arg(&format!("{dirty}MiB")));
    let root = mount.path().to_owned();
    let jobs = (0..CLIENTS).map(|client| {
        let path = root.join(format!("f{client}"));
        Box::new(move || {
            let content = bytes(client as u64, size);
            let mut file = File::create(path).unwrap();
            // Front to back in pieces, so that all are half done when the bound is met.
            for piece in content.chunks(MIB + 4096) {
                file.write_all(piece).unwrap();
            }
        }) as Box<dyn FnOnce() + Send>
    });
    all(jobs.collect(), Duration::from_secs(120));
    assert!(mount.stat("writer_waits") > 0, "nobody met the bound");
    assert!(mount.stat("spilled_bytes") > 0, "private files of {CLIENTS} writers held the bound");
    mount.check_bounds();
    let check = |mount: &Mount, client: usize, when: &str| {
        let read = fs::read(mount.at(&format!("f{client}"))).unwrap();
        assert_same(&read, &bytes(client as u64, size), &format!("file of writer {client} {when}"));
    };
    (0..CLIENTS).step_by(4).for_each(|client| check(&mount, client, "before the restart"));
    assert_eq!(mount.stat("timeouts"), 0);
    mount.check_quiet();
    mount.restart();
    (0..CLIENTS).for_each(|client| check(&mount, client, "after the restart"));
    mount.check_quiet();
}

/// What version `seed` of a file looks like: it begins with its seed, so that a reader knows what must follow.
fn version(seed: u64, len: usize) -> Vec<u8> {
    let mut content = bytes(seed, len);
    content[..8].copy_from_slice(&seed.to_le_bytes());
    content
}

fn check_version(name: usize, content: &[u8], how: &str) {
    let seed = u64::from_le_bytes(content[..8].try_into().unwrap());
    assert_eq!((seed >> 32) as usize, name, "{how} of file {name} shows another file's bytes");
    assert!(content == version(seed, content.len()), "{how} of file {name}, version {seed:#x}");
    assert_eq!(content.len(), size_of_version(seed), "{how} of file {name} is cut off");
}

/// 4 KiB to 1.4 MiB: some in chunks, most in slabs, of all lengths.
fn size_of_version(seed: u64) -> usize {
    let at = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    4096 + (at as usize * 13) % (1_400_000)
}

/// A file mapped by a reader.
struct Map {
    base: std::ptr::NonNull<std::ffi::c_void>,
    len: usize,
}

impl Map {
    /// Shared where the file allows it: a direct handle can only be mapped privately (ENODEV).
    fn new(file: &File, len: usize) -> io::Result<Self> {
        let length = NonZeroUsize::new(len).unwrap();
        for flags in [MapFlags::MAP_SHARED, MapFlags::MAP_PRIVATE] {
            // SAFETY: a new mapping at an address of the kernel's choice.
            match unsafe { mmap(None, length, ProtFlags::PROT_READ, flags, file, 0) } {
                Ok(base) => return Ok(Self { base, len }),
                Err(nix::errno::Errno::ENODEV) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::from(nix::errno::Errno::ENODEV))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for as long as self lives; the version of a file that is mapped never changes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no slice of it outlives self.
        unsafe { munmap(self.base, self.len) }.unwrap();
    }
}

/// What the writers share.
struct Writers {
    root: PathBuf,
    written: AtomicU64,
    refused: AtomicU64,
}

fn path_of(root: &Path, name: usize) -> PathBuf {
    root.join(format!("d{}/f{name}", name % 16))
}

impl Writers {
    /// Writes one version of `name` in one of the ways in which engines publish.
    fn write(&self, name: usize, turn: u64) -> io::Result<()> {
        let seed = (name as u64) << 32 | turn;
        let content = version(seed, size_of_version(seed));
        let path = path_of(&self.root, name);
        let renamed = path.with_extension(format!("tmp{turn}"));
        let by_rename = turn.is_multiple_of(2);
        let target = if by_rename { &renamed } else { &path };
        let mut file = File::create(target)?;
        let written = content.chunks(300_000).try_for_each(|piece| file.write_all(piece));
        // Renamed while open: what others see is the whole file or none of it. What was refused goes before it is
        // closed, since closing would publish a part of it.
        written.or_else(|error| fs::remove_file(target).and(Err(error)))?;
        if by_rename {
            fs::rename(&renamed, &path)?;
        }
        drop(file);
        self.written.fetch_add(content.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn run(&self, client: usize, total: u64) {
        let mut turn = 0;
        while self.written.load(Ordering::Relaxed) < total {
            // Names of one's own, each written more than once: versions replace what readers hold.
            let name = client * names() + (turn / 2) as usize % names();
            match self.write(name, turn) {
                Ok(()) => {}
                Err(error) if memory_only() && error.raw_os_error() == Some(libc::ENOSPC) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => panic!("writer {client}, turn {turn}: {error}"),
            }
            turn += 1;
        }
    }
}

/// Names of each writer: together their files are more than both tiers hold, and each is written about twice.
fn names() -> usize {
    if full() { 64 } else { 8 }
}

#[derive(Default)]
struct Readers {
    root: PathBuf,
    whole: AtomicU64,
    misses: AtomicU64,
    stale: AtomicU64,
    stop: AtomicBool,
}

impl Readers {
    fn run(&self, client: usize) {
        let mut state = client as u64 + 1;
        let mut held: Option<(usize, Map)> = None;
        while !self.stop.load(Ordering::Acquire) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let name = (state >> 33) as usize % (CLIENTS * names());
            match self.read(name, state >> 20 & 1 == 0, &mut held) {
                Ok(()) => self.whole.fetch_add(1, Ordering::Relaxed),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    self.misses.fetch_add(1, Ordering::Relaxed)
                }
                // Gone twice between a lookup and its open. Here bytes and bounds are looked at.
                Err(error) if error.kind() == ErrorKind::StaleNetworkFileHandle => {
                    self.stale.fetch_add(1, Ordering::Relaxed)
                }
                Err(error) => panic!("reader {client} of file {name}: {error}"),
            };
        }
    }

    fn read(&self, name: usize, mapped: bool, held: &mut Option<(usize, Map)>) -> io::Result<()> {
        let mut file = File::open(path_of(&self.root, name))?;
        if mapped {
            let map = Map::new(&file, file.metadata()?.len() as usize)?;
            drop(file);
            check_version(name, map.bytes(), "a mapping");
            // Kept over the next reads, so that eviction meets files that are mapped and closed.
            if let Some((name, old)) = held.replace((name, map)) {
                check_version(name, old.bytes(), "a mapping that was kept");
            }
            return Ok(());
        }
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        check_version(name, &content, "a read");
        Ok(())
    }
}

/// The reading half of [`writers_and_readers_beyond_both_tiers`], in a process of its own: to the writers' own process
/// files under construction would be visible.
#[test]
#[ignore = "started by writers_and_readers_beyond_both_tiers"]
fn readers_of_another_process() {
    let root = PathBuf::from(std::env::var_os("KVCACHEFS_TEST_ROOT").unwrap());
    let readers = Arc::new(Readers { root, ..Readers::default() });
    let stopper = readers.clone();
    std::thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        stopper.stop.store(true, Ordering::Release);
    });
    let jobs = (0..CLIENTS).map(|client| {
        let readers = readers.clone();
        Box::new(move || readers.run(client)) as Box<dyn FnOnce() + Send>
    });
    all(jobs.collect(), Duration::from_secs(600));
    println!(
        "whole {} misses {} stale {}",
        readers.whole.load(Ordering::Relaxed),
        readers.misses.load(Ordering::Relaxed),
        readers.stale.load(Ordering::Relaxed)
    );
    assert!(readers.whole.load(Ordering::Relaxed) > 0, "nothing was ever read");
}

#[test]
fn writers_and_readers_beyond_both_tiers() {
    let l1 = if full() { 1024 } else { 128 };
    let l2 = l1 * 3 / 2;
    let mount = Mount::with(Options::new(l1, l2));
    for directory in 0..16 {
        fs::create_dir(mount.at(&format!("d{directory}"))).unwrap();
    }
    let mut readers = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "readers_of_another_process", "--nocapture"])
        .env("KVCACHEFS_TEST_ROOT", mount.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let writers = Arc::new(Writers {
        root: mount.path().to_owned(),
        written: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    });
    // Three times L1 and twice L2.
    let total = (l1 * 3) << 20;
    let jobs = (0..CLIENTS).map(|client| {
        let writers = writers.clone();
        Box::new(move || writers.run(client, total)) as Box<dyn FnOnce() + Send>
    });
    all(jobs.collect(), Duration::from_secs(120));
    drop(readers.stdin.take());
    let ended = readers.wait().unwrap();
    assert!(ended.success(), "readers: {ended}");
    assert!(mount.stat("evictions_l2") > 0, "nothing left L2");
    if !memory_only() {
        assert!(mount.stat("evictions_l1") > 0, "nothing left L1");
        assert!(mount.stat("read_l2_bytes") > 0, "nothing came back from L2");
    }
    assert_eq!(mount.stat("timeouts"), 0);
    println!(
        "written {} refused {} evicted {} {} promotions {}",
        writers.written.load(Ordering::Relaxed),
        writers.refused.load(Ordering::Relaxed),
        mount.stat("evictions_l1"),
        mount.stat("evictions_l2"),
        mount.stat("promotions")
    );
    mount.check_quiet();
    nothing_is_left(&mount);
}

/// After everything is unlinked, nothing holds memory or room.
fn nothing_is_left(mount: &Mount) {
    for entry in fs::read_dir(mount.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }
    for gauge in ["files", "private_files", "l1_slab_bytes", "l1_chunk_bytes", "l1_lent_bytes", "dirty_bytes"]
    {
        mount.wait_for(gauge, |value| value == 0);
    }
    if !memory_only() {
        mount.drain();
        mount.wait_for("l2_used_bytes", |value| value == 0);
    }
}

/// Writes files of `size` bytes until there is no room; says which was refused, and how.
fn fill_from(mount: &Mount, first: usize, size: usize, most: usize) -> (usize, io::Error) {
    for at in first..first + most {
        let path = mount.at(&format!("f{at}"));
        let mut file = OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
        if let Err(error) = bytes(at as u64, size).chunks(MIB / 2).try_for_each(|piece| file.write_all(piece))
        {
            drop(file);
            assert!(!path.exists(), "half a file stays");
            return (at, error);
        }
    }
    panic!("{most} files of {size} bytes fit");
}

#[test]
fn without_eviction_a_full_mount_refuses_writes_and_recovers_after_unlink() {
    let size = 3 * MIB;
    let mount = Mount::with(Options::new(64, 96).arg("--evict").arg("none"));
    let (mut removed, mut next) = (0, 0);
    for round in 0..3 {
        let (count, error) = fill_from(&mount, next, size, 64);
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "round {round}: {error}");
        assert!(count > removed + 20, "round {round}: only files {removed} to {count} fit");
        // A full mount takes nothing away, and is read as ever.
        for at in removed..count {
            let read = fs::read(mount.at(&format!("f{at}"))).unwrap();
            assert!(read == bytes(at as u64, size), "round {round}: file {at}");
        }
        for at in removed..count - 2 {
            fs::remove_file(mount.at(&format!("f{at}"))).unwrap();
        }
        (removed, next) = (count - 2, count);
    }
    assert_eq!(mount.stat("evictions_l2"), 0);
    mount.check_quiet();
    nothing_is_left(&mount);
}

/// A file that is as long as a device and has hardly anything in it made that device look full for as long as it was
/// kept open: files went to the other one alone, and left it long before their turn (rule R8).
#[test]
fn a_held_file_of_holes_does_not_change_which_files_leave() {
    if memory_only() {
        return;
    }
    // Two devices of 64 MiB, eight times as much as both hold.
    let (size, total) = (MIB, 1000);
    // Before anything else is there, and when all is full.
    for held_from in [0, total / 2] {
        let mount = Mount::with(Options { stripes: Some(2), ..Options::new(64, 128) });
        let mut held = None;
        for at in 0..total {
            if at == held_from {
                let mut file = File::create(mount.at("held")).unwrap();
                file.set_len(50 << 20).unwrap();
                file.write_all(b"head").unwrap();
                held = Some(file);
            }
            fs::write(mount.at(&format!("f{at}")), bytes(at, size)).unwrap();
        }
        mount.drain();
        let there: Vec<u64> =
            (0..total).filter(|at| fs::exists(mount.at(&format!("f{at}"))).unwrap()).collect();
        let oldest = there[0];
        let last_gone = (0..total).rev().find(|at| !there.contains(at)).unwrap();
        println!("held from {held_from}: {} stay, from {oldest} on; {last_gone} is gone", there.len());
        // On its device each file leaves in its turn. Which device a file goes to, and so where one leaves for it, is
        // settled when it is begun: if that was the one with the older files then, it may be a few files later no longer,
        // and what is not yet durable cannot leave at all. So the devices differ by what can be under way at one time, the
        // dirty bytes, and not by what anybody holds open.
        let under_way = mount.stat("dirty_limit_bytes") / size as u64;
        assert!(
            last_gone < oldest + under_way,
            "held from {held_from}: {last_gone} has left, but {oldest} has not, with {under_way} under way at most"
        );
        // Both devices are full, but for a remainder on each and what may still be expected of the held file.
        let room = mount.stat("l2_capacity_bytes") / size as u64;
        assert!(there.len() as u64 + 6 >= room, "held from {held_from}: {} in room for {room}", there.len());
        for at in there.iter().step_by(10) {
            let read = fs::read(mount.at(&format!("f{at}"))).unwrap();
            assert!(read == bytes(*at, size), "file {at}");
        }
        assert_eq!(mount.stat("l2_expected_bytes"), 0, "nobody has written to it for long");
        drop(held);
        mount.check_quiet();
    }
}

#[test]
fn in_memory_only_what_leaves_is_gone_cleanly() {
    if !memory_only() {
        return;
    }
    let mount = Mount::with(Options::new(64, 0));
    let size = 2 * MIB + 77;
    for at in 0..100 {
        fs::write(mount.at(&format!("f{at}")), bytes(at, size)).unwrap();
    }
    let mut there = 0;
    for at in 0..100 {
        match fs::read(mount.at(&format!("f{at}"))) {
            Ok(read) => {
                there += 1;
                assert!(read == bytes(at, size), "file {at}");
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "file {at}"),
        }
    }
    assert!(fs::exists(mount.at("f99")).unwrap(), "the newest file has left");
    assert!(there > 10 && there < 32, "{there} files of 2 MiB in 64 MiB");
    let listed = fs::read_dir(mount.path()).unwrap().count();
    assert_eq!(listed, there, "names are listed whose bytes are gone");
    mount.check_quiet();
    nothing_is_left(&mount);
}

#[test]
fn in_memory_only_the_writer_that_does_not_fit_is_refused_and_the_other_goes_on() {
    if !memory_only() {
        return;
    }
    let mount = Mount::with(Options::new(64, 0).arg("--slab-file-max").arg("48MiB"));
    let old_content = bytes(1, 40 * MIB);
    let mut old = File::create(mount.at("old")).unwrap();
    old.write_all(&old_content[..30 * MIB]).unwrap();
    let mut young = File::create(mount.at("young")).unwrap();
    let piece = bytes(2, MIB);
    let refused = (0..64).find_map(|_| young.write_all(&piece).err()).unwrap();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    drop(young);
    assert!(!mount.at("young").exists(), "half a file");
    old.write_all(&old_content[30 * MIB..]).unwrap();
    drop(old);
    assert!(fs::read(mount.at("old")).unwrap() == old_content);
    mount.check_quiet();
    nothing_is_left(&mount);
}

/// Whoever goes on after an error and closes has not written what it wanted to: that is not shown as the file.
#[test]
fn a_file_that_a_write_failed_to_is_not_published_unless_the_writer_makes_up_for_it() {
    let mount = if memory_only() {
        Mount::with(Options::new(64, 0).arg("--slab-file-max").arg("48MiB"))
    } else {
        Mount::with(Options::new(64, 64).arg("--evict").arg("none"))
    };
    fs::write(mount.at("old"), bytes(1, MIB)).unwrap();
    let piece = bytes(2, MIB);
    let fill_up = |file: &mut File| (0..128).find_map(|_| file.write_all(&piece).err()).unwrap();
    // In memory only what does not fit while it is open is refused; on the device, what does not fit. What refuses the
    // last one was let in before: some room is left.
    let mut fillers = Vec::new();
    loop {
        let path = mount.at(&format!("filler{}", fillers.len()));
        let mut file = File::create(&path).unwrap();
        if file.write_all(&piece).is_err() {
            break;
        }
        fillers.push((path, file));
    }

    let mut file = File::create(mount.at("old")).unwrap();
    assert_eq!(fill_up(&mut file).raw_os_error(), Some(libc::ENOSPC));
    assert!(file.sync_all().is_err(), "what is not whole cannot be made durable");
    drop(file);
    let found = fs::read(mount.at("old"));
    assert!(
        found.is_err() && memory_only() || found.unwrap() == bytes(1, MIB),
        "the version before is there"
    );
    assert!(mount.events().contains("old: a write to it failed"), "{}", mount.events());

    let mut file = File::create(mount.at("new")).unwrap();
    assert_eq!(fill_up(&mut file).raw_os_error(), Some(libc::ENOSPC));
    let len = file.metadata().unwrap().len();
    for (path, file) in fillers.drain(..) {
        drop(file);
        fs::remove_file(path).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(error) = file.write_all(&piece) {
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert!(Instant::now() < deadline, "room never comes back");
        file.seek(SeekFrom::Start(len)).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(file);
    let read = fs::read(mount.at("new")).unwrap();
    assert_eq!(read.len() as u64, len + MIB as u64);
    assert!(read.chunks(MIB).all(|chunk| chunk == piece), "made up for, and whole");

    let mut file = File::create(mount.at("cut")).unwrap();
    file.write_all(&piece).unwrap();
    while file.write_all(&piece).is_ok() {}
    file.set_len(MIB as u64).unwrap();
    drop(file);
    assert!(fs::read(mount.at("cut")).unwrap() == piece, "what failed is not wanted any more");
    mount.check_quiet();
    nothing_is_left(&mount);
}

/// A file that fills the device until a write to it fails, and how far it came.
fn fill_the_device(mount: &Mount, name: &str) -> (File, u64) {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(mount.at(name)).unwrap();
    let piece = bytes(3, MIB);
    let mut at = 0;
    while file.write_all_at(&piece, at).is_ok() {
        at += MIB as u64;
    }
    (file, at)
}

/// The last block was stored anew, for which there was no room beside it, before what lay behind it was given back.
#[test]
fn a_file_that_fills_the_device_can_be_cut_anywhere() {
    if memory_only() {
        return;
    }
    let mount = Mount::with(Options { stripes: Some(1), ..Options::new(64, 160) }.arg("--evict").arg("none"));
    let piece = bytes(3, MIB);
    for fsynced in [false, true] {
        for cut in [5, MIB as u64 + 5, (20 << 20) + 4096, (60 << 20) + 7, u64::MAX] {
            let (file, end) = fill_the_device(&mount, "f");
            let cut = if cut == u64::MAX { end } else { cut };
            if fsynced {
                // All of it is in a record, and what is cut off is free only once that is written anew. The failed write has
                // to be made up for, first.
                file.set_len(end).unwrap();
                file.sync_all().unwrap();
            }
            file.set_len(cut).unwrap_or_else(|error| panic!("cut to {cut}, fsynced {fsynced}: {error}"));
            assert_eq!(file.metadata().unwrap().len(), cut);
            file.sync_all().unwrap();
            drop(file);
            let read = fs::read(mount.at("f")).unwrap();
            assert_eq!(read.len() as u64, cut);
            assert!(read.chunks(MIB).all(|chunk| *chunk == piece[..chunk.len()]), "cut to {cut}");
            fs::remove_file(mount.at("f")).unwrap();
            mount.drain();
            mount.check_quiet();
        }
    }
    nothing_is_left(&mount);
}

/// What a file under construction has on a full device gives way to what takes its place.
#[test]
fn a_file_that_fills_the_device_can_be_written_again() {
    if memory_only() {
        return;
    }
    let mount = Mount::with(Options { stripes: Some(1), ..Options::new(64, 160) }.arg("--evict").arg("none"));
    let (file, end) = fill_the_device(&mount, "f");
    file.set_len(end).unwrap();
    let other = bytes(4, MIB);
    let mut model: Vec<u8> = (0..end / MIB as u64).flat_map(|_| bytes(3, MIB)).collect();
    // Whole blocks, parts of one, and the last bytes.
    for (at, len) in [(MIB, MIB), ((9 << 20) + 100, 5000), (end as usize - 10, 10), ((5 << 20) + 7, MIB)] {
        file.write_all_at(&other[..len], at as u64).unwrap_or_else(|error| panic!("{len} at {at}: {error}"));
        model[at..at + len].copy_from_slice(&other[..len]);
    }
    let (from, len) = ((30 << 20) + 77, (2 << 20) + 5);
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, len).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, from << 1, len).unwrap();
    for from in [from, from << 1] {
        model[from as usize..(from + len) as usize].fill(0);
    }
    file.set_len(end - 1).unwrap();
    model.pop();
    file.sync_all().unwrap();
    drop(file);
    assert_same(&fs::read(mount.at("f")).unwrap(), &model, "what was written again");
    mount.check_quiet();
    fs::remove_file(mount.at("f")).unwrap();
    nothing_is_left(&mount);
}

/// S5: the size that it has is what did arrive.
#[test]
fn a_file_that_is_cut_to_the_size_it_has_lacks_nothing() {
    let mount = if memory_only() {
        Mount::with(Options::new(64, 0).arg("--slab-file-max").arg("48MiB"))
    } else {
        Mount::with(Options::new(64, 64).arg("--evict").arg("none"))
    };
    let (file, _) = fill_the_device(&mount, "f");
    let arrived = file.metadata().unwrap().len();
    assert!(file.sync_all().is_err(), "it lacks what failed");
    file.set_len(arrived).unwrap();
    file.sync_all().unwrap();
    drop(file);
    assert_eq!(fs::metadata(mount.at("f")).unwrap().len(), arrived);
    mount.check_quiet();
    fs::remove_file(mount.at("f")).unwrap();
    nothing_is_left(&mount);
}

/// It was zeroed, and the file grown, as far as there was room.
#[test]
fn a_range_that_cannot_be_zeroed_stays_as_it_is() {
    if memory_only() {
        return;
    }
    let mount = Mount::with(Options { stripes: Some(1), ..Options::new(64, 64) }.arg("--evict").arg("none"));
    let rest = File::create(mount.at("rest")).unwrap();
    rest.write_all_at(&bytes(5, 2 * MIB), 0).unwrap();
    let (file, end) = fill_the_device(&mount, "f");
    file.set_len(end).unwrap();
    file.sync_all().unwrap();
    // All of it is in a record now, and the other takes what is left.
    let mut at = 2 * MIB as u64;
    while rest.write_all_at(&[1; 4096], at).is_ok() {
        at += 4096;
    }
    let content: Vec<u8> = (0..end / MIB as u64).flat_map(|_| bytes(3, MIB)).collect();
    let (none, keep) = (FallocateFlags::empty(), FallocateFlags::KEEP_SIZE);
    for (flags, from, len) in [
        (FallocateFlags::PUNCH_HOLE | keep, 5, 2 * MIB as u64),
        (FallocateFlags::ZERO_RANGE, (7 << 20) + 1, 100),
        (FallocateFlags::ZERO_RANGE, end - 10, 100_000),
        (none, 0, 1 << 30),
    ] {
        let error = rustix::fs::fallocate(&file, flags, from, len).unwrap_err();
        assert_eq!(error.raw_os_error(), libc::ENOSPC, "{flags:?} {from}");
        assert_eq!(file.metadata().unwrap().len(), end, "{flags:?} {from}");
        let mut read = vec![0; content.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_same(&read, &content, "what could not be zeroed");
    }
    // There is room for this one.
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | keep, 1 << 20, 1 << 20).unwrap();
    drop((file, rest));
    mount.check_quiet();
}

/// What a write had got before it was refused stayed taken when its file was closed, for good.
#[test]
fn what_a_refused_write_had_got_is_given_back() {
    if memory_only() {
        return;
    }
    let mount = Mount::with(Options::new(64, 64).arg("--evict").arg("none"));
    // So that no other file comes to the size of the device, which is refused at once.
    fs::write(mount.at("other"), bytes(1, 2 * MIB)).unwrap();
    mount.drain();
    let used = mount.stat("l2_used_bytes");
    // The last write finds room for some of its blocks, in one of these rounds at least.
    for round in 0..4 {
        for shared in [true, false] {
            let path = mount.at("f");
            let mut file = OpenOptions::new().write(true).create(true).truncate(!shared).open(&path).unwrap();
            let mut at = round * (256 << 10);
            file.write_all(&bytes(2, at)).unwrap();
            while file.write_all_at(&bytes(3, MIB), at as u64).is_ok() {
                at += MIB;
            }
            if !shared {
                file.set_len(at as u64).unwrap();
            }
            drop(file);
            assert_eq!(fs::metadata(&path).unwrap().len(), at as u64);
            fs::remove_file(path).unwrap();
            mount.drain();
            mount.wait_for("l2_used_bytes", |value| value == used);
        }
    }
    mount.check_quiet();
    fs::remove_file(mount.at("other")).unwrap();
    nothing_is_left(&mount);
}
