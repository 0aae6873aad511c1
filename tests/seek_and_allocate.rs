//! Changing a file's length and holes: truncate, fallocate, SEEK_DATA and SEEK_HOLE, appending, copying ranges, fsync.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use common::{Mount, Options, bytes, memory_only};
use nix::libc;
use rustix::fs::{FallocateFlags, SeekFrom as Whence};

const BLOCK: u64 = 256 << 10;

fn errno<T: std::fmt::Debug, E: Into<std::io::Error>>(result: Result<T, E>) -> i32 {
    result.map_err(Into::into).unwrap_err().raw_os_error().unwrap()
}

fn read_write(mount: &Mount, name: &str) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(mount.at(name)).unwrap()
}

/// A mount on which files of more than a few MiB keep their holes.
fn sparse_mount() -> Mount {
    Mount::with(Options::default().arg("--slab-file-max=4MiB"))
}

#[test]
fn a_file_can_be_cut_and_grown_anywhere() {
    let mut mount = Mount::new();
    let mut model = bytes(1, 1_500_000);
    fs::write(mount.at("f"), &model).unwrap();
    let sizes =
        [1_499_999, 1_048_577, 1_048_576, 2_000_000, 300_000, 262_144, 262_145, 70_001, 4096, 5000, 1, 0];
    for (at, size) in sizes.into_iter().enumerate() {
        // By path, by descriptor, and with what is there on the device alone.
        if at % 2 == 0 {
            nix::unistd::truncate(&mount.at("f"), size as i64).unwrap();
        } else {
            OpenOptions::new().write(true).open(mount.at("f")).unwrap().set_len(size as u64).unwrap();
        }
        model.resize(size, 0);
        assert!(fs::read(mount.at("f")).unwrap() == model, "cut to {size}");
        if !memory_only() && at % 4 == 2 {
            mount.restart();
            assert!(fs::read(mount.at("f")).unwrap() == model, "cut to {size}, restarted");
        }
    }
    // What was cut off does not come back.
    let file = read_write(&mount, "g");
    file.write_all_at(&[7; 10_000], 0).unwrap();
    file.set_len(100).unwrap();
    file.set_len(10_000).unwrap();
    let mut read = vec![1; 10_000];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read[..100] == [7; 100] && read[100..].iter().all(|byte| *byte == 0));
    drop(file);
    mount.check_quiet();
}

#[test]
fn allocating_keeps_to_its_modes() {
    let mut mount = sparse_mount();
    let size = 6 << 20;
    let mut model = bytes(2, size);
    let file = read_write(&mount, "f");
    file.write_all_at(&model, 0).unwrap();
    let keep = FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1000).unwrap();
    rustix::fs::fallocate(&file, keep, 0, 10 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), size as u64);
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 6 << 20, 1 << 20).unwrap();
    model.resize(7 << 20, 0);
    assert_eq!(file.metadata().unwrap().len(), 7 << 20);
    for (flags, from, to) in [
        (FallocateFlags::PUNCH_HOLE | keep, 1000, 3_000_001),
        (FallocateFlags::PUNCH_HOLE | keep, (6 << 20) + 5, (6 << 20) + 9),
        (FallocateFlags::PUNCH_HOLE | keep, 6 << 20, 20 << 20),
        (FallocateFlags::ZERO_RANGE, 4_000_000, 4_100_000),
        (FallocateFlags::ZERO_RANGE | keep, 7_000_000, 9_000_000),
        (FallocateFlags::ZERO_RANGE, 7_200_000, 8_000_000),
    ] {
        rustix::fs::fallocate(&file, flags, from as u64, (to - from) as u64).unwrap();
        if !flags.contains(keep) && to > model.len() {
            model.resize(to, 0);
        }
        let end = to.min(model.len());
        model[from..end].fill(0);
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64, "{flags:?}");
        let mut read = vec![1; model.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == model, "{flags:?} {from}..{to}");
    }
    for refused in
        [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE, FallocateFlags::UNSHARE_RANGE]
    {
        let result = rustix::fs::fallocate(&file, refused, 0, 4096);
        assert_eq!(errno(result), libc::EOPNOTSUPP, "{refused:?}");
    }
    assert_eq!(errno(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 0)), libc::EINVAL);
    assert_eq!(errno(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 45)), libc::ENOSPC);
    let reader = File::open(mount.at("f")).unwrap();
    assert_eq!(errno(rustix::fs::fallocate(&reader, FallocateFlags::empty(), 0, 10)), libc::EBADF);
    drop((file, reader));
    assert!(fs::read(mount.at("f")).unwrap() == model);
    if !memory_only() {
        mount.restart();
        assert!(fs::read(mount.at("f")).unwrap() == model);
    }
    mount.check_quiet();
}

/// A range that could never be had was written with zeros, and others left for it, until there was no more room.
#[test]
fn what_can_never_be_allocated_changes_nothing() {
    let mount =
        Mount::with(Options { stripes: Some(1), ..Options::new(64, if memory_only() { 0 } else { 160 }) });
    fs::write(mount.at("other"), bytes(1, 1 << 20)).unwrap();
    let file = read_write(&mount, "f");
    file.write_all_at(b"12345", 0).unwrap();
    let before = file.metadata().unwrap();
    for from in [0, 3, 40 << 20, 300 << 20] {
        let refused = rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, from, 300 << 20);
        assert_eq!(errno(refused), if memory_only() { libc::ENOSPC } else { libc::EFBIG });
        let after = file.metadata().unwrap();
        assert_eq!((after.len(), after.blocks()), (5, before.blocks()), "from {from}");
        assert_eq!(fs::read(mount.at("f")).unwrap(), b"12345");
    }
    assert!(fs::read(mount.at("other")).unwrap() == bytes(1, 1 << 20), "somebody left for it");
    // What is beyond the last block is a hole, which takes nothing.
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 3, 50 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), (50 << 20) + 3);
    assert!(file.metadata().unwrap().blocks() * 512 <= BLOCK);
    drop(file);
    let read = fs::read(mount.at("f")).unwrap();
    assert!(read.starts_with(b"123\0\0") && read[3..].iter().all(|&byte| byte == 0));
    mount.check_quiet();
}

#[test]
fn data_and_holes_are_found() {
    let mut mount = sparse_mount();
    let file = read_write(&mount, "f");
    file.set_len(64 * BLOCK).unwrap();
    for block in [3, 4, 40] {
        file.write_all_at(&bytes(block, 1000), block * BLOCK + 77).unwrap();
    }
    let check = |file: &File| {
        let seek = |whence| rustix::fs::seek(file, whence);
        assert_eq!(seek(Whence::Data(0)).unwrap(), 3 * BLOCK);
        assert_eq!(seek(Whence::Hole(0)).unwrap(), 0);
        assert_eq!(seek(Whence::Data(3 * BLOCK + 9)).unwrap(), 3 * BLOCK + 9);
        assert_eq!(seek(Whence::Hole(3 * BLOCK)).unwrap(), 5 * BLOCK);
        assert_eq!(seek(Whence::Data(5 * BLOCK)).unwrap(), 40 * BLOCK);
        assert_eq!(seek(Whence::Hole(40 * BLOCK + 5)).unwrap(), 41 * BLOCK);
        assert_eq!(seek(Whence::Hole(64 * BLOCK - 1)).unwrap(), 64 * BLOCK - 1);
        assert_eq!(errno(seek(Whence::Data(41 * BLOCK))), libc::ENXIO);
        assert_eq!(errno(seek(Whence::Data(64 * BLOCK))), libc::ENXIO);
        assert_eq!(errno(seek(Whence::Hole(64 * BLOCK))), libc::ENXIO);
        let mut some = [1; 1000];
        file.read_exact_at(&mut some, 40 * BLOCK + 77).unwrap();
        assert!(some[..] == bytes(40, 1000));
        file.read_exact_at(&mut some, 20 * BLOCK).unwrap();
        assert_eq!(some, [0; 1000]);
    };
    check(&file);
    drop(file);
    check(&File::open(mount.at("f")).unwrap());
    // A file without holes is all data, wherever it is.
    fs::write(mount.at("whole"), bytes(9, 1_000_001)).unwrap();
    let whole = |mount: &Mount| {
        let file = File::open(mount.at("whole")).unwrap();
        assert_eq!(rustix::fs::seek(&file, Whence::Data(5)).unwrap(), 5);
        assert_eq!(rustix::fs::seek(&file, Whence::Hole(5)).unwrap(), 1_000_001);
        assert_eq!(errno(rustix::fs::seek(&file, Whence::Data(1_000_001))), libc::ENXIO);
    };
    whole(&mount);
    if !memory_only() {
        mount.push_out_of_l1();
        check(&File::open(mount.at("f")).unwrap());
        whole(&mount);
        mount.restart();
        check(&File::open(mount.at("f")).unwrap());
        whole(&mount);
    }
    mount.check_quiet();
}

#[test]
fn appenders_never_overwrite_each_other() {
    let mount = Mount::new();
    fs::write(mount.at("log"), b"").unwrap();
    let open = || OpenOptions::new().append(true).create(true).open(mount.at("log")).unwrap();
    let (first, second) = (open(), open());
    std::thread::scope(|scope| {
        for (name, file) in [("a", &first), ("b", &second)] {
            scope.spawn(move || {
                let mut file = file;
                for at in 0..500 {
                    file.write_all(format!("{name}{at:07}\n").as_bytes()).unwrap();
                }
            });
        }
    });
    drop((first, second));
    // Another process, another way of appending.
    let mut shell = std::process::Command::new("sh");
    shell.arg("-c").arg("echo c0000000 >> \"$0\"").arg(mount.at("log"));
    assert!(shell.status().unwrap().success());
    let text = fs::read_to_string(mount.at("log")).unwrap();
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    let mut wanted: Vec<_> =
        ["a", "b"].iter().flat_map(|name| (0..500).map(move |at| format!("{name}{at:07}"))).collect();
    wanted.push("c0000000".to_owned());
    lines.sort();
    wanted.sort();
    assert_eq!(lines, wanted);
    mount.check_quiet();
}

#[test]
fn ranges_are_copied_between_files() {
    let mount = Mount::new();
    for size in [5000u64, 3 << 20] {
        fs::write(mount.at("from"), bytes(size, size as usize)).unwrap();
        let from = File::open(mount.at("from")).unwrap();
        let to = File::create(mount.at("to")).unwrap();
        let (mut at, mut target) = (100u64, 0u64);
        while at < size {
            let left = (size - at) as usize;
            let copied =
                rustix::fs::copy_file_range(&from, Some(&mut at), &to, Some(&mut target), left).unwrap();
            assert!(copied > 0, "stuck at {at}");
        }
        drop(to);
        assert!(fs::read(mount.at("to")).unwrap() == bytes(size, size as usize)[100..], "{size} bytes");
    }
    assert_eq!(fs::copy(mount.at("from"), mount.at("copy")).unwrap(), 3 << 20);
    assert!(fs::read(mount.at("copy")).unwrap() == bytes(3 << 20, 3 << 20));
    mount.check_quiet();
}

#[test]
fn fsync_makes_durable_what_was_written_so_far() {
    if memory_only() {
        // There is nothing to wait for, and it says so at once.
        let mount = Mount::new();
        File::create(mount.at("f")).unwrap().sync_all().unwrap();
        return;
    }
    let mut mount = Mount::new();
    let mut file = File::create(mount.at("f")).unwrap();
    file.write_all(&bytes(1, 700_000)).unwrap();
    file.sync_data().unwrap();
    let whole = File::create(mount.at("g")).unwrap();
    whole.write_all_at(&bytes(2, 2_000_000), 0).unwrap();
    whole.sync_all().unwrap();
    drop(whole);
    fs::create_dir(mount.at("d")).unwrap();
    File::open(mount.at("d")).unwrap().sync_all().unwrap();
    file.write_all(b"never synced").unwrap();
    mount.kill();
    drop(file);
    mount.start();
    let read = fs::read(mount.at("f")).unwrap();
    assert!(read[..700_000] == bytes(1, 700_000), "what was synced is there");
    assert!(fs::read(mount.at("g")).unwrap() == bytes(2, 2_000_000));
    assert!(mount.at("d").is_dir());
}

#[test]
fn positions_work_as_on_any_file() {
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(3, 400_000)).unwrap();
    let mut file = read_write(&mount, "f");
    assert_eq!(file.seek(SeekFrom::End(-10)).unwrap(), 399_990);
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert!(rest == bytes(3, 400_000)[399_990..]);
    assert_eq!(file.seek(SeekFrom::Current(100)).unwrap(), 400_100);
    assert_eq!(file.read(&mut [0; 10]).unwrap(), 0);
    file.write_all(b"far").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 400_103);
    assert_eq!(errno(file.seek(SeekFrom::End(-1_000_000))), libc::EINVAL);
    let mut gap = [1; 100];
    file.read_exact_at(&mut gap, 400_000).unwrap();
    assert_eq!(gap, [0; 100]);
}

/// A writer's version has the name. Who comes by the inode that had it before must not cut the bytes that the writer
/// sees; and who comes by the name cuts the writer's version, which its handle shows.
#[test]
fn a_path_and_a_writers_handle_name_one_version() {
    for size in [5_000, 300_000, 3_000_000] {
        let mount = Mount::new();
        let (path, content) = (mount.at("f"), bytes(1, size));
        fs::write(&path, &content).unwrap();
        let before = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
        let file = OpenOptions::new().read(true).append(true).open(&path).unwrap();
        let (old, new) = (before.metadata().unwrap().ino(), file.metadata().unwrap().ino());
        assert_ne!(old, new, "a writer of a finished file has a version of its own");

        let by_number = PathBuf::from(format!("/proc/self/fd/{}", before.as_raw_fd()));
        let refused = errno(nix::unistd::truncate(&by_number, 1));
        assert!([libc::ETXTBSY, libc::ESTALE].contains(&refused), "{refused}");
        let mut read = vec![0; size];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == content, "{size} bytes, cut below the writer");
        assert_eq!(rustix::fs::seek(&file, Whence::Hole(0)).unwrap(), size as u64);

        nix::unistd::truncate(&path, 1).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), new);
        assert_eq!(file.metadata().unwrap().len(), 1);
        assert_eq!(rustix::fs::seek(&file, Whence::Hole(0)).unwrap(), 1);
        (&file).write_all(b"appended").unwrap();
        assert_eq!(rustix::fs::seek(&file, Whence::Hole(0)).unwrap(), 9);
        drop(file);
        assert!(fs::read(&path).unwrap() == [&content[..1], b"appended"].concat());
        mount.check_quiet();
    }
}
