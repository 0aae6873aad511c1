//! What stat, statfs and the extended attributes say, and that it stays said.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use common::run::wait_until;
use common::{Mode, Mount, Options, bytes, memory_only, mode};
use nix::libc;
use rustix::fs::XattrFlags;

const SIZES: [usize; 9] = [0, 1, 511, 4095, 4096, 4097, (256 << 10) + 1, (1 << 20) - 1, (2 << 20) + 4097];

fn errno<T: Debug>(result: rustix::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error()
}

fn set(path: &Path, name: &str, value: &[u8]) -> rustix::io::Result<()> {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty())
}

fn get(path: &Path, name: &str) -> rustix::io::Result<Vec<u8>> {
    let mut value = vec![0; 64 << 10];
    let len = rustix::fs::getxattr(path, name, &mut value[..])?;
    value.truncate(len);
    Ok(value)
}

fn text(path: &Path, name: &str) -> String {
    String::from_utf8(get(path, name).unwrap()).unwrap()
}

fn list(path: &Path) -> Vec<String> {
    let mut names = vec![0u8; 64 << 10];
    let len = rustix::fs::listxattr(path, &mut names[..]).unwrap();
    let mut names: Vec<_> = names[..len]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8(name.to_vec()).unwrap())
        .collect();
    names.sort();
    names
}

/// CRC-32C, bit by bit: nothing that the daemon could have got wrong in the same way.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut table = [0u32; 256];
    for (at, entry) in table.iter_mut().enumerate() {
        *entry =
            (0..8).fold(at as u32, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 });
    }
    !bytes.iter().fold(u32::MAX, |crc, byte| table[(crc as u8 ^ byte) as usize] ^ crc >> 8)
}

#[test]
fn sizes_are_exact_and_blocks_are_what_is_taken() {
    let mut mount = Mount::new();
    for (at, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&at.to_string()), bytes(at as u64, size)).unwrap();
    }
    let check = |mount: &Mount| {
        for (at, size) in SIZES.into_iter().enumerate() {
            let meta = fs::metadata(mount.at(&at.to_string())).unwrap();
            assert_eq!(meta.len(), size as u64);
            assert_eq!(meta.blocks(), size.div_ceil(4096) as u64 * 8, "{size} bytes");
            assert_eq!((meta.blksize(), meta.nlink()), (4096, 1));
        }
    };
    check(&mount);
    if !memory_only() {
        mount.drain();
        check(&mount);
        mount.push_out_of_l1();
        check(&mount);
        mount.restart();
        check(&mount);
    }
    // Holes take nothing, unless the file is small enough to be one piece in L1.
    let mut mount = Mount::with(Options::default().arg("--slab-file-max=4MiB"));
    let sparse = File::create(mount.at("sparse")).unwrap();
    sparse.set_len(16 << 20).unwrap();
    sparse.write_all_at(b"x", 8 << 20).unwrap();
    drop(sparse);
    let check = |mount: &Mount| {
        let meta = fs::metadata(mount.at("sparse")).unwrap();
        assert_eq!(meta.len(), 16 << 20);
        assert!((8..=512).contains(&meta.blocks()), "{} blocks", meta.blocks());
    };
    check(&mount);
    if !memory_only() {
        mount.restart();
        check(&mount);
    }
    mount.check_quiet();
}

#[test]
fn a_writer_sees_its_file_grow() {
    let mount = Mount::new();
    let mut file = File::create(mount.at("f")).unwrap();
    for at in 1..=40u64 {
        file.write_all(&bytes(at, 10_001)).unwrap();
        assert_eq!(file.metadata().unwrap().len(), at * 10_001);
        assert_eq!(fs::metadata(mount.at("f")).unwrap().len(), at * 10_001);
    }
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 40 * 10_001);
}

#[test]
fn writing_changes_mtime_and_reading_changes_atime() {
    let mut mount = Mount::new();
    let old = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 987_654_321);
    for size in [1000, 3 << 20] {
        let path = mount.at(&size.to_string());
        fs::write(&path, bytes(1, size)).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_times(fs::FileTimes::new().set_accessed(old).set_modified(old)).unwrap();
        drop(file);
        let before = fs::metadata(&path).unwrap();
        assert_eq!((before.accessed().unwrap(), before.modified().unwrap()), (old, old));
        let mut read = vec![0; size];
        File::open(&path).unwrap().read_exact(&mut read).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_eq!(after.modified().unwrap(), old, "reading changes no mtime");
        assert!(after.accessed().unwrap().elapsed().unwrap() < Duration::from_secs(60), "atime is now");
    }
    if !memory_only() {
        mount.drain();
        mount.restart();
        for size in [1000, 3 << 20] {
            assert_eq!(fs::metadata(mount.at(&size.to_string())).unwrap().modified().unwrap(), old);
        }
    }
    let path = mount.at("1000");
    fs::write(&path, b"y").unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert!(meta.modified().unwrap().elapsed().unwrap() < Duration::from_secs(60), "mtime is now");
    // chmod changes ctime alone.
    let before = fs::metadata(&path).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert_eq!((after.mtime(), after.mtime_nsec()), (before.mtime(), before.mtime_nsec()));
    assert!((after.ctime(), after.ctime_nsec()) > (before.ctime(), before.ctime_nsec()));
    // A directory's mtime is that of its names.
    fs::create_dir(mount.at("d")).unwrap();
    let dir = File::open(mount.at("d")).unwrap();
    dir.set_times(fs::FileTimes::new().set_modified(old)).unwrap();
    fs::create_dir(mount.at("d/sub")).unwrap();
    assert!(fs::metadata(mount.at("d")).unwrap().modified().unwrap() > old);
}

#[test]
fn statfs_says_what_is_managed() {
    let mount = Mount::new();
    let before = rustix::fs::statvfs(mount.path()).unwrap();
    assert_eq!((before.f_bsize, before.f_frsize, before.f_namemax), (4096, 4096, 255));
    let capacity = if memory_only() { "l1_capacity_bytes" } else { "l2_capacity_bytes" };
    assert_eq!(before.f_blocks * 4096, mount.stat(capacity));
    assert!(before.f_bavail <= before.f_bfree && before.f_bfree <= before.f_blocks);
    fs::write(mount.at("f"), bytes(1, 16 << 20)).unwrap();
    mount.drain();
    let after = rustix::fs::statvfs(mount.path()).unwrap();
    let taken = (before.f_bfree - after.f_bfree) * 4096;
    assert!(((16 << 20)..(20 << 20)).contains(&taken), "{taken} bytes taken by 16 MiB");
    assert_eq!(before.f_ffree - after.f_ffree, 1);
    fs::remove_file(mount.at("f")).unwrap();
    mount.drain();
    let last = rustix::fs::statvfs(mount.path()).unwrap();
    assert_eq!(last.f_ffree, before.f_ffree);
    if !memory_only() {
        assert_eq!(last.f_bfree, before.f_bfree, "the room is back");
    }
}

#[test]
fn extended_attributes_follow_their_rules() {
    let mut mount = Mount::new();
    let (file, dir) = (mount.at("f"), mount.at("d"));
    fs::write(&file, bytes(1, 5000)).unwrap();
    fs::create_dir(&dir).unwrap();
    for path in [&file, &dir] {
        assert_eq!(errno(get(path, "user.a")), libc::ENODATA);
        assert_eq!(errno(rustix::fs::setxattr(path, "user.a", b"1", XattrFlags::REPLACE)), libc::ENODATA);
        rustix::fs::setxattr(path, "user.a", b"1", XattrFlags::CREATE).unwrap();
        assert_eq!(errno(rustix::fs::setxattr(path, "user.a", b"2", XattrFlags::CREATE)), libc::EEXIST);
        assert_eq!(get(path, "user.a").unwrap(), b"1");
        rustix::fs::setxattr(path, "user.a", b"second", XattrFlags::REPLACE).unwrap();
        set(path, "user.empty", b"").unwrap();
        set(path, "user.binary", &[0, 255, 0, 10]).unwrap();
        set(path, "user.gone", b"x").unwrap();
        rustix::fs::removexattr(path, "user.gone").unwrap();
        assert_eq!(errno(rustix::fs::removexattr(path, "user.gone")), libc::ENODATA);
        // Too long a name, too long a value, too small a buffer.
        let longest = format!("user.{}", "n".repeat(250));
        set(path, &longest, &vec![7; 64 << 10]).unwrap();
        assert_eq!(get(path, &longest).unwrap(), vec![7; 64 << 10]);
        assert_eq!(errno(set(path, &format!("{longest}x"), b"1")), libc::ERANGE);
        assert_eq!(errno(set(path, "user.large", &vec![7; (64 << 10) + 1])), libc::E2BIG);
        assert_eq!(errno(rustix::fs::getxattr(path, "user.a", &mut [0u8; 5][..])), libc::ERANGE);
        assert_eq!(errno(rustix::fs::listxattr(path, &mut [0u8; 10][..])), libc::ERANGE);
        assert_eq!(errno(set(path, "user.full", &vec![7; 64 << 10])), libc::ENOSPC);
        rustix::fs::removexattr(path, &*longest).unwrap();
        // Other name spaces than the users' are not there.
        assert_eq!(errno(set(path, "trusted.x", b"1")), libc::EOPNOTSUPP);
    }
    symlink("f", mount.at("l")).unwrap();
    let on_link = rustix::fs::lsetxattr(mount.at("l"), "user.x", b"1", XattrFlags::empty());
    assert_eq!(errno(on_link), libc::EPERM);
    assert_eq!(errno(get(&mount.at("none"), "user.a")), libc::ENOENT);
    let check = |mount: &Mount| {
        for path in [mount.at("f"), mount.at("d")] {
            let theirs: Vec<_> =
                list(&path).into_iter().filter(|name| !name.starts_with("user.kv.")).collect();
            assert_eq!(theirs, ["user.a", "user.binary", "user.empty"]);
            assert_eq!(get(&path, "user.a").unwrap(), b"second");
            assert_eq!(get(&path, "user.empty").unwrap(), b"");
            assert_eq!(get(&path, "user.binary").unwrap(), [0, 255, 0, 10]);
        }
    };
    check(&mount);
    fs::rename(mount.at("f"), mount.at("g")).unwrap();
    fs::rename(mount.at("g"), mount.at("f")).unwrap();
    check(&mount);
    if !memory_only() {
        mount.restart();
        check(&mount);
    }
    // A new version of a file is the same file to whoever has labelled it.
    fs::write(mount.at("f"), b"new").unwrap();
    check(&mount);
}

#[test]
fn our_own_attributes_tell_where_a_file_is() {
    let mut mount = Mount::new();
    let path = mount.at("f");
    fs::write(&path, bytes(3, 3_000_000)).unwrap();
    assert_eq!(text(&path, "user.kv.tier"), "l1");
    assert_eq!(text(&path, "user.kv.blocks"), "12");
    for name in ["user.kv.tier", "user.kv.durable", "user.kv.crc32c", "user.kv.blocks", "user.kv.mine"] {
        assert_eq!(errno(set(&path, name, b"1")), libc::EPERM, "{name}");
        assert_eq!(errno(rustix::fs::removexattr(&path, name)), libc::EPERM, "{name}");
    }
    assert_eq!(errno(get(&path, "user.kv.none")), libc::ENODATA);
    assert_eq!(errno(set(&path, "user.", b"1")), libc::EINVAL, "no name");
    assert_eq!(errno(get(mount.path(), "user.kv.tier")), libc::ENODATA);
    assert_eq!(list(mount.path()), [""; 0]);
    if memory_only() {
        assert_eq!(text(&path, "user.kv.durable"), "0");
        return;
    }
    mount.drain();
    assert_eq!(text(&path, "user.kv.durable"), "1");
    // Whoever copies attributes shall not copy these.
    assert_eq!(list(&path), [""; 0]);
    mount.push_out_of_l1();
    assert_eq!(text(&path, "user.kv.tier"), "l2");
    mount.restart();
    assert_eq!((text(&path, "user.kv.tier"), text(&path, "user.kv.durable")), ("l2".into(), "1".into()));
    assert!(fs::read(&path).unwrap() == bytes(3, 3_000_000));
    mount.wait_for("promotions_in_flight", |count| count == 0);
    assert_eq!(text(&path, "user.kv.tier"), "l1");
    // Only a directory says how its files are published.
    assert_eq!(errno(set(&path, "user.kv.publish", b"posix")), libc::EINVAL);
    assert_eq!(errno(set(mount.path(), "user.kv.publish", b"sometimes")), libc::EINVAL);
    fs::create_dir(mount.at("d")).unwrap();
    set(&mount.at("d"), "user.kv.publish", b"posix").unwrap();
    mount.restart();
    assert_eq!(text(&mount.at("d"), "user.kv.publish"), "posix");
    let _unfinished = File::create(mount.at("d/f")).unwrap();
    assert_eq!(list(&mount.at("d")), ["user.kv.publish"]);
    let seen = std::process::Command::new("/bin/ls").arg(mount.at("d/f")).output().unwrap();
    assert!(seen.status.success(), "another process sees an open file there");
}

#[test]
fn the_checksum_is_that_of_the_bytes() {
    if memory_only() {
        return;
    }
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let mut mount = Mount::with(Options::default().arg("--slab-file-max=4MiB"));
    for (at, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&at.to_string()), bytes(at as u64, size)).unwrap();
    }
    // One written in pieces, out of order, over itself.
    let pieces = bytes(77, 900_001);
    let file = File::create(mount.at("pieces")).unwrap();
    for at in [700_001, 300_000, 0, 599_877, 123] {
        let end = (at + 300_000).min(pieces.len());
        file.write_all_at(&pieces[at..end], at as u64).unwrap();
    }
    drop(file);
    // And one with holes at its beginning, inside, and at its end.
    let mut sparse = vec![0; (9 << 20) + 5];
    sparse[(1 << 20) + 9..(1 << 20) + 12].copy_from_slice(b"abc");
    let file = File::create(mount.at("sparse")).unwrap();
    file.set_len(sparse.len() as u64).unwrap();
    file.write_all_at(b"abc", (1 << 20) + 9).unwrap();
    drop(file);
    // And one cut within a page.
    fs::write(mount.at("cut"), bytes(78, 600_000)).unwrap();
    nix::unistd::truncate(&mount.at("cut"), 300_001).unwrap();
    for round in 0..2 {
        mount.drain();
        for (at, size) in SIZES.into_iter().enumerate() {
            let crc = text(&mount.at(&at.to_string()), "user.kv.crc32c");
            assert_eq!(crc, format!("{:08x}", crc32c(&bytes(at as u64, size))), "{size} bytes, {round}");
        }
        for (name, content) in
            [("pieces", &pieces), ("sparse", &sparse), ("cut", &bytes(78, 600_000)[..300_001].to_vec())]
        {
            assert!(&fs::read(mount.at(name)).unwrap() == content, "{name}");
            let crc = text(&mount.at(name), "user.kv.crc32c");
            assert_eq!(crc, format!("{:08x}", crc32c(content)), "{name}, {round}");
        }
        mount.restart();
    }
    // A file that can still change has none.
    let open = File::options().append(true).open(mount.at("1")).unwrap();
    (&open).write_all(b"more").unwrap();
    assert_eq!(errno(get(&mount.at("1"), "user.kv.crc32c")), libc::ENODATA);
}

/// A file that came into L1 while somebody reads it through the daemon has a second inode number. What was changed by the
/// one, the kernel did not see by the other for as long as it may believe what it knows.
#[test]
fn attributes_are_those_of_the_file_by_each_of_its_inode_numbers() {
    if mode() == Mode::Daemon {
        return;
    }
    let mount = Mount::new();
    let dir = mount.at("shared");
    fs::create_dir(&dir).unwrap();
    set(&dir, "user.kv.publish", b"posix").unwrap();
    let path = dir.join("f");
    let mut writer = File::create(&path).unwrap();
    writer.write_all(&bytes(1, 3_303_142)).unwrap();
    let first = File::open(&path).unwrap();
    drop(writer);
    let number = || fs::metadata(&path).unwrap().ino();
    // The kernel may forget it again between its two lookups; the next one is made a second later.
    wait_until("an open of the file in L1 gets another number", || {
        drop(File::open(&path).unwrap());
        first.metadata().unwrap().ino() != number()
    });
    // What the kernel knows by both numbers, it may believe for a minute.
    let both = || (first.metadata().unwrap(), fs::metadata(&path).unwrap());
    let same = |what: &str, is: &dyn Fn(&fs::Metadata) -> bool| {
        let asked = Instant::now();
        wait_until(what, || {
            let (by_first, by_path) = both();
            is(&by_first) && is(&by_path)
        });
        assert!(asked.elapsed() < Duration::from_secs(30), "{what}: only once the kernel asked by itself");
        assert_ne!(first.metadata().unwrap().ino(), number(), "{what}: one number is left");
    };
    both();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    same("chmod by the second", &|seen| seen.mode() & 0o777 == 0o600);
    first.set_permissions(Permissions::from_mode(0o640)).unwrap();
    same("chmod by the first", &|seen| seen.mode() & 0o777 == 0o640);
    let touched = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let times = fs::FileTimes::new().set_modified(touched);
    first.set_times(times).unwrap();
    same("times by the first", &|seen| seen.mtime() == 1);
    let before = both().0.ctime_nsec();
    set(&path, "user.q", b"1").unwrap();
    same("an attribute by the second", &|seen| seen.ctime_nsec() != before);
    let before = both().0.ctime_nsec();
    rustix::fs::removexattr(&path, "user.q").unwrap();
    same("an attribute less by the second", &|seen| seen.ctime_nsec() != before);
    // Nobody reads it by passthrough: it is changed where it is.
    nix::unistd::truncate(&path, 1_048_577).unwrap();
    same("a truncation by the second", &|seen| seen.len() == 1_048_577);
    let mut writer = OpenOptions::new().append(true).open(&path).unwrap();
    writer.write_all(b"more").unwrap();
    drop(writer);
    same("a write by the second", &|seen| seen.len() == 1_048_581);
    fs::rename(&path, dir.join("g")).unwrap();
    fs::remove_file(dir.join("g")).unwrap();
    wait_until("its end by the second", || first.metadata().unwrap().nlink() == 0);
    drop(first);
    mount.check_quiet();
}
