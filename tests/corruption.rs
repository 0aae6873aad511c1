//! A damaged store: wrong bytes are never served, and a store that is not as it was left is refused and left alone.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Mode, Mount, Options, bytes, memory_only, mode};

const SIZES: [usize; 4] = [5000, 200_000, 1 << 20, 3_000_001];
const CHUNK: usize = 8 << 20;

fn name(at: usize) -> String {
    format!("f{at}")
}

fn stores(mount: &Mount) -> Vec<PathBuf> {
    (0..3).map(|at| mount.scratch.path().join(format!("store.{at}"))).filter(|path| path.exists()).collect()
}

/// Where in the store the page that starts with `head` is.
fn find(mount: &Mount, head: &[u8]) -> (PathBuf, u64) {
    for path in stores(mount) {
        let file = File::open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        let mut chunk = vec![0; CHUNK];
        for at in (0..len).step_by(CHUNK) {
            let chunk = &mut chunk[..CHUNK.min((len - at) as usize)];
            file.read_exact_at(chunk, at).unwrap();
            if let Some(page) = chunk.chunks(4096).position(|page| page.starts_with(head)) {
                return (path, at + page as u64 * 4096);
            }
        }
    }
    panic!("the file's bytes are not in the store");
}

fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x08], at).unwrap();
    file.sync_all().unwrap();
}

/// Flips a bit of each damaged file: in its first, a middle or its last page.
fn damage(mount: &Mount, damaged: &[usize]) {
    for &at in damaged {
        let content = bytes(at as u64, SIZES[at]);
        let page = [0, content.len() / 8192, (content.len() - 1) / 4096][at % 3] * 4096;
        let (path, offset) = find(mount, &content[page..(page + 64).min(content.len())]);
        flip(&path, offset + 17);
    }
}

/// What is damaged is a miss, whoever asks and however; what is not damaged is right.
fn check(mount: &Mount, damaged: &[usize]) {
    for (at, size) in SIZES.into_iter().enumerate() {
        let path = mount.at(&name(at));
        if !damaged.contains(&at) {
            assert!(fs::read(&path).unwrap() == bytes(at as u64, size), "file of {size} bytes");
            continue;
        }
        let held = File::open(&path).unwrap();
        let error = fs::read(&path).expect_err("a flipped bit went unnoticed");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "file of {size} bytes: {error}");
        for _ in 0..2 {
            let error = File::open(&path).expect_err("a damaged file is there");
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "file of {size} bytes: {error}");
        }
        let mut all = vec![0; size];
        let error = held.read_exact_at(&mut all, 0).expect_err("an open handle reads on");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "file of {size} bytes: {error}");
        assert!(mount.events().lines().any(|line| line.contains(&format!("lost {}:", name(at)))), "no event");
        assert!(
            mount.log().lines().any(|line| line.contains(&name(at)) && line.contains("checksum")),
            "no log"
        );
    }
    assert_eq!(mount.stat("crc_errors"), damaged.len() as u64);
    let mut left: Vec<String> = fs::read_dir(mount.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let expected: Vec<String> = (0..SIZES.len()).filter(|at| !damaged.contains(at)).map(name).collect();
    assert_eq!(left, expected);
}

fn written() -> Mount {
    let mount = Mount::with(Options::new(64, 192));
    for (at, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&name(at)), bytes(at as u64, size)).unwrap();
    }
    mount.drain();
    mount
}

#[test]
fn a_bit_that_flips_while_unmounted_makes_a_miss() {
    if memory_only() {
        return;
    }
    let mut mount = written();
    mount.stop();
    damage(&mount, &[0, 2, 3]);
    mount.start();
    check(&mount, &[0, 2, 3]);
    // What was lost stays lost, its room is back, and its name can be used again.
    let pages: usize = SIZES[1].div_ceil(4096);
    mount.wait_for("l2_used_bytes", |used| used == pages as u64 * 4096);
    fs::write(mount.at(&name(2)), bytes(99, 70_000)).unwrap();
    mount.restart();
    assert!(fs::read(mount.at(&name(2))).unwrap() == bytes(99, 70_000));
    assert!(!mount.at(&name(0)).exists() && !mount.at(&name(3)).exists());
    mount.check_quiet();
}

#[test]
fn a_bit_that_flips_under_an_evicted_file_makes_a_miss() {
    if memory_only() {
        return;
    }
    let mount = written();
    mount.push_out_of_l1();
    damage(&mount, &[1, 2, 3]);
    check(&mount, &[1, 2, 3]);
}

#[test]
fn a_part_of_a_damaged_file_is_never_wrong() {
    if memory_only() {
        return;
    }
    let mut mount = written();
    mount.stop();
    let content = bytes(3, SIZES[3]);
    damage(&mount, &[3]);
    mount.start();
    let file = File::open(mount.at(&name(3))).unwrap();
    let (mut right, mut refused) = (0, 0);
    // From the end, so that parts are read before the damage in the first page is met.
    for at in (0..content.len()).step_by(50_000).rev() {
        let mut part = vec![0; 50_000.min(content.len() - at)];
        match file.read_exact_at(&mut part, at as u64) {
            Ok(()) => {
                assert!(part == content[at..at + part.len()], "wrong bytes at {at}");
                right += 1;
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EIO), "at {at}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "{right} parts right, none refused");
}

/// A slot file stays, since only one of its blocks is wrong: that one is an error until it is rewritten, and told of once.
#[test]
fn a_bad_block_of_a_slot_file_is_told_once_and_ends_when_it_is_rewritten() {
    if memory_only() {
        return;
    }
    const BLOCK: usize = 256 << 10;
    let mut mount = Mount::with(Options::new(64, 192));
    let content = bytes(7, 4 * BLOCK);
    // O_CREAT alone.
    let file = OpenOptions::new().create(true).append(true).open(mount.at("slots")).unwrap();
    (&file).write_all(&content).unwrap();
    drop(file);
    mount.drain();
    mount.stop();
    let (path, offset) = find(&mount, &content[2 * BLOCK..2 * BLOCK + 64]);
    flip(&path, offset + 17);
    mount.start();
    let mut block = vec![0; BLOCK];
    for round in 0..3 {
        let file = File::open(mount.at("slots")).unwrap();
        for at in 0..4 {
            match file.read_exact_at(&mut block, (at * BLOCK) as u64) {
                Ok(()) => assert!(at != 2 && block == content[at * BLOCK..(at + 1) * BLOCK], "block {at}"),
                Err(error) => assert_eq!((at, error.raw_os_error()), (2, Some(libc::EIO)), "round {round}"),
            }
        }
        // Closed and out of L1, it is read from the device again.
        drop(file);
        mount.push_out_of_l1();
        let told = format!("bad block in slots, at offset {}: its checksum", 2 * BLOCK);
        for (said, text) in [("event", mount.events()), ("log", mount.log())] {
            assert_eq!(text.matches(&told).count(), 1, "{said} of round {round}:\n{text}");
        }
        assert!(mount.log().lines().any(|line| line.contains("ERROR") && line.contains(&told)));
        assert_eq!(["crc_errors", "bad_blocks", "lost_files"].map(|key| mount.stat(key)), [1, 1, 0]);
    }
    assert!(mount.status().contains("DEGRADED: blocks of some files cannot be read"), "{}", mount.status());
    assert_eq!((mount.stat("healthy"), mount.stat("poisoned")), (0, 0));
    let file = OpenOptions::new().read(true).write(true).open(mount.at("slots")).unwrap();
    file.write_all_at(&content[2 * BLOCK..3 * BLOCK], 2 * BLOCK as u64).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mount.restart();
    assert!(fs::read(mount.at("slots")).unwrap() == content);
    mount.check_quiet();
}

/// Tries to mount the paths `l2` elsewhere: the one line that it is refused with.
fn refused(mount: &Mount, l2: &[String]) -> String {
    let dir = mount.scratch.path().join("other");
    fs::create_dir_all(&dir).unwrap();
    let mut tried = Command::new(common::binary())
        .args(["mount", "--l1", "64MiB"])
        .args(l2.iter().flat_map(|path| ["--l2", path]))
        .arg(&dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = tried.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            tried.kill().unwrap();
            let _ =
                nix::mount::umount2(&dir, nix::mount::MntFlags::MNT_FORCE | nix::mount::MntFlags::MNT_DETACH);
            panic!("{l2:?} was not refused");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let said = io::read_to_string(tried.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    let said = said.lines().filter(|line| !line.contains("names no option")).collect::<Vec<_>>();
    assert_eq!(said.len(), 1, "one line, not {said:#?}");
    said[0].to_owned()
}

/// Length, room taken and content.
fn fingerprint(path: &Path) -> (u64, u64, Vec<u64>) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    let (len, blocks) = (file.metadata().unwrap().len(), file.metadata().unwrap().blocks());
    let mut sums = Vec::new();
    let mut chunk = vec![0; CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let chunk = &mut chunk[..CHUNK.min((len - at) as usize)];
        file.read_exact_at(chunk, at).unwrap();
        sums.push(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, chunk));
    }
    (len, blocks, sums)
}

/// Refused with these words, and not a byte of it is changed.
fn check_refused(mount: &Mount, size: &str, words: &[&str]) {
    let before = fingerprint(&mount.store());
    let said = refused(mount, &[format!("{}{size}", mount.store().display())]);
    for word in words.iter().chain([&"store.0"]) {
        assert!(said.contains(word), "no '{word}' in: {said}");
    }
    assert!(fingerprint(&mount.store()) == before, "the store was changed; {said}");
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_store_that_is_not_as_it_was_left_is_refused_and_untouched() {
    if !matches!(mode(), Mode::Auto | Mode::Threads) {
        return;
    }
    let mut mount = written();
    check_refused(&mount, "", &["in use"]);
    mount.stop();
    let store = mount.store();
    for size in [":256MiB", ":128MiB"] {
        check_refused(&mount, size, &["192MiB", "leave out the size", "--format"]);
    }
    let page = |at: u64| {
        let mut page = [0; 4096];
        File::open(&store).unwrap().read_exact_at(&mut page, at).unwrap();
        page
    };
    let supers = [page(0), page(4096)];
    let restore = || supers.iter().zip([0, 4096]).for_each(|(page, at)| overwrite(&store, at, page));

    [0, 4096].iter().for_each(|at| flip(&store, at + 50));
    check_refused(&mount, "", &["superblock", "damaged", "--format"]);
    restore();
    [0, 4096].iter().for_each(|&at| overwrite(&store, at + 8, &7u32.to_le_bytes()));
    check_refused(&mount, "", &["format 7", "--format"]);
    restore();
    [0, 4096].iter().for_each(|&at| overwrite(&store, at, b"somebody's bytes"));
    check_refused(&mount, "", &["not a kvcachefs store", "--format"]);
    restore();
    OpenOptions::new().write(true).open(&store).unwrap().set_len(100 << 20).unwrap();
    check_refused(&mount, "", &["cut off", "--format"]);
    OpenOptions::new().write(true).open(&store).unwrap().set_len(192 << 20).unwrap();

    // Nothing of this did any harm, and one copy of the superblock is enough.
    for at in [0, 4096] {
        flip(&store, at + 60);
        mount.start();
        for (at, size) in SIZES.into_iter().enumerate() {
            assert!(fs::read(mount.at(&name(at))).unwrap() == bytes(at as u64, size), "file of {size} bytes");
        }
        mount.stop();
        assert!(page(0) == page(4096), "the bad copy was not made good");
    }
}

/// Devices that are whole, but were not left by the same opening.
#[test]
fn an_older_copy_of_one_device_is_refused_and_untouched() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::with(Options { stripes: Some(3), ..Options::new(64, 192) });
    for (at, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&name(at)), bytes(at as u64, size)).unwrap();
    }
    mount.stop();
    let stores = stores(&mount);
    assert_eq!(stores.len(), 3);
    let beside = |path: &Path, name: &str| PathBuf::from(format!("{}.{name}", path.display()));
    for path in &stores {
        fs::copy(path, beside(path, "old")).unwrap();
    }
    // Looking at it does not count.
    let prints = || stores.iter().map(|path| fingerprint(path)).collect::<Vec<_>>();
    let left = prints();
    mount.set_extra(&["--read-only"]);
    mount.start();
    assert!(fs::read(mount.at(&name(1))).unwrap() == bytes(1, SIZES[1]));
    mount.stop();
    mount.set_extra(&[]);
    assert!(prints() == left, "a read-only mount changed the store");

    mount.start();
    for (at, size) in SIZES.into_iter().enumerate() {
        fs::remove_file(mount.at(&name(at))).unwrap();
        fs::write(mount.at(&format!("new{at}")), bytes(10 + at as u64, size)).unwrap();
    }
    mount.stop();
    let l2: Vec<String> = stores.iter().map(|path| path.display().to_string()).collect();
    let swap = |path: &Path, with: &str| {
        fs::rename(path, beside(path, "aside")).unwrap();
        fs::rename(beside(path, with), path).unwrap();
        fs::rename(beside(path, "aside"), beside(path, with)).unwrap();
    };
    for (at, path) in stores.iter().enumerate() {
        swap(path, "old");
        let before = prints();
        for _ in 0..2 {
            let said = refused(&mount, &l2);
            for word in [&*format!("store.{at}"), "an older copy than the others", "put back", "--format"] {
                assert!(said.contains(word), "no '{word}' in: {said}");
            }
        }
        assert!(prints() == before, "store.{at}: the refused store was changed");
        swap(path, "old");
    }
    mount.start();
    for (at, size) in SIZES.into_iter().enumerate() {
        assert!(!mount.at(&name(at)).exists());
        assert!(fs::read(mount.at(&format!("new{at}"))).unwrap() == bytes(10 + at as u64, size));
    }
    mount.stop();
    // Copies of all of them are the store as it was then.
    stores.iter().for_each(|path| swap(path, "old"));
    mount.start();
    for (at, size) in SIZES.into_iter().enumerate() {
        assert!(fs::read(mount.at(&name(at))).unwrap() == bytes(at as u64, size), "file of {size} bytes");
    }
    assert!(!mount.at("new0").exists());
    mount.check_quiet();
}

#[test]
fn somebody_elses_file_is_refused_and_untouched() {
    if !matches!(mode(), Mode::Auto | Mode::Threads) {
        return;
    }
    let mut mount = Mount::with(Options::new(64, 192));
    mount.stop();
    fs::write(mount.store(), bytes(5, 192 << 20)).unwrap();
    check_refused(&mount, ":192MiB", &["not a kvcachefs store", "--format"]);
    check_refused(&mount, "", &["not a kvcachefs store", "--format"]);
    // An image full of holes, whose file system leaves the first 64 KiB alone.
    fs::remove_file(mount.store()).unwrap();
    File::create(mount.store()).unwrap().set_len(192 << 20).unwrap();
    overwrite(&mount.store(), 65600, b"_BHRfS_M");
    for size in ["", ":192MiB"] {
        check_refused(&mount, size, &["not a kvcachefs store", "btrfs", "--format"]);
    }
    fs::write(mount.store(), "a letter to a friend\n").unwrap();
    check_refused(&mount, ":192MiB", &["21B", "--format"]);
    check_refused(&mount, "", &[]);
}
