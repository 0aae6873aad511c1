//! Listings: cookies stay good while names come and go and while eviction takes files; flat directories may be large.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Write;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Mount, Options, bytes, memory_only};
use rustix::fs::{FileType, RawDir, SeekFrom};

struct Line {
    name: String,
    cookie: u64,
    kind: FileType,
}

/// What one getdents call of `room` bytes tells, from where `dir` stands.
fn some_lines(dir: &File, room: usize) -> Vec<Line> {
    let mut buffer = vec![MaybeUninit::uninit(); room];
    let mut lines = RawDir::new(dir, &mut buffer);
    let mut out = Vec::new();
    while let Some(line) = lines.next() {
        let line = line.unwrap();
        let name = line.file_name().to_str().unwrap().to_owned();
        out.push(Line { name, cookie: line.next_entry_cookie(), kind: line.file_type() });
        if lines.is_buffer_empty() {
            break;
        }
    }
    out
}

/// Everything from where `dir` stands, in calls of `room` bytes.
fn lines(dir: &File, room: usize) -> Vec<Line> {
    let mut out = Vec::new();
    loop {
        let more = some_lines(dir, room);
        if more.is_empty() {
            return out;
        }
        out.extend(more);
    }
}

fn fill(dir: &Path, count: usize) {
    fs::create_dir_all(dir).unwrap();
    for at in 0..count {
        fs::write(dir.join(format!("f{at:05}")), b"x").unwrap();
    }
}

#[test]
fn a_listing_shows_each_name_once_with_its_kind() {
    let mut mount = Mount::new();
    fill(&mount.at("d"), 500);
    fs::create_dir(mount.at("d/sub")).unwrap();
    std::os::unix::fs::symlink("f00000", mount.at("d/link")).unwrap();
    let check = |mount: &Mount| {
        let dir = File::open(mount.at("d")).unwrap();
        for room in [320, 4096, 1 << 16] {
            rustix::fs::seek(&dir, SeekFrom::Start(0)).unwrap();
            let all = lines(&dir, room);
            let names: HashMap<_, _> = all.iter().map(|line| (line.name.as_str(), line.kind)).collect();
            assert_eq!((all.len(), names.len()), (504, 504), "buffers of {room} bytes");
            assert_eq!(names["."], FileType::Directory);
            assert_eq!(names[".."], FileType::Directory);
            assert_eq!(names["sub"], FileType::Directory);
            assert_eq!(names["link"], FileType::Symlink);
            assert_eq!(names["f00499"], FileType::RegularFile);
        }
    };
    check(&mount);
    if !memory_only() {
        mount.restart();
        check(&mount);
    }
}

#[test]
fn every_cookie_leads_back_to_its_place() {
    let mount = Mount::new();
    fill(&mount.at("d"), 200);
    let dir = File::open(mount.at("d")).unwrap();
    let all = lines(&dir, 4096);
    for at in (0..all.len()).rev().step_by(7) {
        rustix::fs::seek(&dir, SeekFrom::Start(all[at].cookie)).unwrap();
        let rest: Vec<_> = lines(&dir, 4096).into_iter().map(|line| line.name).collect();
        let wanted: Vec<_> = all[at + 1..].iter().map(|line| line.name.clone()).collect();
        assert_eq!(rest, wanted, "after {}", all[at].name);
    }
    // Also when the name in front of it, and the one behind it, are gone; in another descriptor of the directory.
    let middle = all.iter().position(|line| line.name == "f00100").unwrap();
    let gone = ["f00099", "f00100", "f00101"];
    for name in gone {
        fs::remove_file(mount.at("d").join(name)).unwrap();
    }
    fs::write(mount.at("d/new"), b"x").unwrap();
    let other = File::open(mount.at("d")).unwrap();
    rustix::fs::seek(&other, SeekFrom::Start(all[middle].cookie)).unwrap();
    let rest: Vec<_> = lines(&other, 4096).into_iter().map(|line| line.name).collect();
    let stays = all[middle + 1..].iter().filter(|line| !gone.contains(&line.name.as_str()));
    let mut wanted: Vec<_> = stays.map(|line| line.name.clone()).collect();
    wanted.push("new".to_owned());
    assert_eq!(rest, wanted);
}

#[test]
fn what_stays_is_listed_once_while_other_names_come_and_go() {
    let mount = Mount::new();
    fill(&mount.at("d"), 1000);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Every second of the first names goes and comes back; others are made, moved and removed.
            for round in 0.. {
                for at in (0..400).step_by(2) {
                    let name = mount.at(&format!("d/f{at:05}"));
                    if round % 2 == 0 {
                        fs::remove_file(name).unwrap();
                    } else {
                        fs::write(name, b"x").unwrap();
                    }
                }
                let (from, to) = (mount.at("d/from"), mount.at("d/to"));
                fs::write(&from, b"x").unwrap();
                fs::rename(&from, &to).unwrap();
                fs::remove_file(&to).unwrap();
                if stop.load(Ordering::Relaxed) && round % 2 == 1 {
                    break;
                }
            }
        });
        for _ in 0..30 {
            let dir = File::open(mount.at("d")).unwrap();
            let mut seen: HashMap<String, u32> = HashMap::new();
            for line in lines(&dir, 512) {
                *seen.entry(line.name).or_default() += 1;
            }
            let stays = (0..1000).filter(|at| *at >= 400 || at % 2 == 1);
            for at in stays {
                assert_eq!(seen.get(&format!("f{at:05}")), Some(&1), "f{at:05}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    mount.check_quiet();
}

/// A version that replaced another came to the end of the directory: listings that had passed the one before found it a
/// second time there.
#[test]
fn a_name_that_is_replaced_all_the_time_is_listed_once() {
    const NAMES: usize = 120;
    let mount = Mount::new();
    fill(&mount.at("d"), NAMES);
    let name = |at: usize| mount.at(&format!("d/f{at:05}"));
    let stop = AtomicBool::new(false);
    let names_by = |way: usize| (way..NAMES).step_by(4).cycle().take_while(|_| !stop.load(Ordering::Relaxed));
    let listed = std::thread::scope(|scope| {
        scope.spawn(|| {
            for at in names_by(0) {
                let from = mount.at("d/from");
                fs::write(&from, b"renamed").unwrap();
                fs::rename(&from, name(at)).unwrap();
            }
        });
        scope.spawn(|| names_by(1).for_each(|at| fs::write(name(at), b"truncated").unwrap()));
        scope.spawn(|| {
            for at in names_by(2) {
                // A version that is given up again, and one that stays.
                let open = || fs::OpenOptions::new().write(true).open(name(at)).unwrap();
                drop(open());
                open().write_all(b"written").unwrap();
            }
        });
        let lister = scope.spawn(|| {
            for _ in 0..150 {
                let dir = File::open(mount.at("d")).unwrap();
                let mut seen: HashMap<String, u32> = HashMap::new();
                for line in lines(&dir, 512) {
                    *seen.entry(line.name).or_default() += 1;
                }
                for at in 0..NAMES {
                    assert_eq!(seen.get(&format!("f{at:05}")), Some(&1), "f{at:05}");
                }
            }
        });
        let listed = lister.join();
        // The others go on for ever else, also if that has failed.
        stop.store(true, Ordering::Relaxed);
        listed
    });
    listed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    mount.check_quiet();
    let all = fs::read_dir(mount.at("d")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(all.filter(|name| name != "from").collect::<HashSet<_>>().len(), NAMES);
}

/// A directory that is removed while it is listed, name by name, is empty in the end: what `rm -r` needs.
#[test]
fn names_can_be_removed_while_they_are_listed() {
    let mount = Mount::new();
    fill(&mount.at("d"), 3000);
    let dir = File::open(mount.at("d")).unwrap();
    let mut removed = 0;
    loop {
        let some = some_lines(&dir, 512);
        if some.is_empty() {
            break;
        }
        for line in some.iter().filter(|line| line.kind == FileType::RegularFile) {
            fs::remove_file(mount.at("d").join(&line.name)).unwrap();
            removed += 1;
        }
    }
    assert_eq!(removed, 3000);
    fs::remove_dir(mount.at("d")).unwrap();
}

#[test]
fn a_listing_goes_on_while_eviction_takes_files() {
    let mount = Mount::with(Options::new(64, 64));
    fs::create_dir(mount.at("d")).unwrap();
    fs::create_dir(mount.at("kept")).unwrap();
    // Directories are never evicted, so these must be in every listing.
    for at in 0..200 {
        fs::create_dir(mount.at(&format!("d/dir{at}"))).unwrap();
    }
    let content = bytes(1, 256 << 10);
    let stop = AtomicBool::new(false);
    let listings = std::thread::scope(|scope| {
        let lister = scope.spawn(|| {
            let mut listings = 0;
            while !stop.load(Ordering::Relaxed) || listings < 10 {
                let dir = File::open(mount.at("d")).unwrap();
                let all: Vec<_> = lines(&dir, 400).into_iter().map(|line| line.name).collect();
                let unique: HashSet<_> = all.iter().collect();
                assert_eq!(unique.len(), all.len(), "a name is listed twice");
                assert_eq!(all.iter().filter(|name| name.starts_with("dir")).count(), 200);
                listings += 1;
            }
            listings
        });
        for at in 0..800 {
            fs::write(mount.at(&format!("d/f{at}")), &content).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        lister.join().unwrap()
    });
    assert!(listings >= 10);
    assert!(mount.stat("evictions_l2") > 0, "nothing was evicted");
    // What is listed can be opened, or has been evicted since: never anything else.
    for entry in fs::read_dir(mount.at("d")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            match fs::read(entry.path()) {
                Ok(read) => assert!(read == content),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
            }
        }
    }
    mount.check_bounds();
}

/// What a name costs there is measured by `bench names`.
#[test]
fn a_flat_directory_keeps_many_names() {
    let full = std::env::var_os("KVCACHEFS_TEST_FULL").is_some();
    let (count, options) = if full {
        (1_000_000, Options::new(64, 6 << 10).arg("--l2-files-max=1200000"))
    } else {
        (50_000, Options::new(64, 1 << 10).arg("--l2-files-max=60000"))
    };
    let mut mount = Mount::with(options);
    fs::create_dir(mount.at("d")).unwrap();
    let name = |at: usize| mount.at(&format!("d/{at:08x}-{at}"));
    for at in 0..count {
        std::os::unix::fs::symlink("t", name(at)).unwrap();
    }
    for at in (0..count).step_by(count / 1000) {
        assert!(fs::symlink_metadata(name(at)).unwrap().is_symlink());
        assert!(fs::symlink_metadata(mount.at(&format!("d/none{at}"))).is_err());
    }
    let listed = fs::read_dir(mount.at("d")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(listed.collect::<HashSet<_>>().len(), count);
    if !memory_only() {
        mount.restart();
        assert_eq!(mount.stat("files"), count as u64);
    }
    let name = |at: usize| mount.at(&format!("d/{at:08x}-{at}"));
    let gone = count / 10;
    for at in 0..gone {
        fs::remove_file(name(at)).unwrap();
    }
    fs::write(mount.at("d/file"), b"x").unwrap();
    assert_eq!(fs::read(mount.at("d/file")).unwrap(), b"x");
    assert_eq!(fs::read_dir(mount.at("d")).unwrap().count(), count - gone + 1);
}
