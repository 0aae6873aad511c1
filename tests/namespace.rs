//! Names and permissions: each call does what it does on any file system, and fails with the errno that it has there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;

use common::{Mount, Options, bytes, memory_only};
use nix::libc;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps};

/// Somebody who is not root.
const NOBODY: u32 = 65534;

/// The errno that a call failed with.
fn errno<T: Debug, E: Into<std::io::Error>>(result: Result<T, E>) -> i32 {
    match result {
        Ok(value) => panic!("it worked: {value:?}"),
        Err(error) => error.into().raw_os_error().unwrap(),
    }
}

/// Runs `work` with the file system rights of `uid`, in a thread of its own.
fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            nix::unistd::setfsgid(nix::unistd::Gid::from_raw(uid));
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(uid));
            work()
        });
        worker.join().unwrap()
    })
}

/// A mount that everybody may use.
fn shared_mount() -> Mount {
    let mount = Mount::with(Options::default().arg("--allow-other"));
    fs::set_permissions(mount.scratch.path(), Permissions::from_mode(0o755)).unwrap();
    mount
}

fn rename_with(from: &Path, to: &Path, flags: RenameFlags) -> rustix::io::Result<()> {
    rustix::fs::renameat_with(CWD, from, CWD, to, flags)
}

#[test]
fn directories_are_made_and_removed() {
    let mount = Mount::new();
    let (dir, file) = (mount.at("d"), mount.at("d/f"));
    fs::create_dir(&dir).unwrap();
    assert_eq!(errno(fs::create_dir(&dir)), libc::EEXIST);
    assert_eq!(fs::metadata(&dir).unwrap().nlink(), 2);
    fs::create_dir(mount.at("d/sub")).unwrap();
    assert_eq!(fs::metadata(&dir).unwrap().nlink(), 3);
    fs::write(&file, b"x").unwrap();
    assert_eq!(errno(fs::create_dir(&file)), libc::EEXIST);
    assert_eq!(errno(fs::create_dir(mount.at("d/none/x"))), libc::ENOENT);
    assert_eq!(errno(fs::create_dir(mount.at("d/f/x"))), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_dir(&dir)), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_dir(&file)), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_dir(mount.at("none"))), libc::ENOENT);
    assert_eq!(errno(rustix::fs::rmdir(mount.at("d/."))), libc::EINVAL);
    assert_eq!(errno(rustix::fs::rmdir(mount.at("d/sub/.."))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_file(&dir)), libc::EISDIR);
    assert_eq!(errno(fs::remove_file(mount.at("none"))), libc::ENOENT);
    assert_eq!(errno(fs::remove_dir(mount.path())), libc::EBUSY);
    fs::remove_file(&file).unwrap();
    assert_eq!(errno(fs::remove_dir(&dir)), libc::ENOTEMPTY);
    fs::remove_dir(mount.at("d/sub")).unwrap();
    assert_eq!(fs::metadata(&dir).unwrap().nlink(), 2);
    fs::remove_dir(&dir).unwrap();
    assert_eq!(errno(fs::metadata(&dir)), libc::ENOENT);
}

#[test]
fn nothing_can_be_made_in_a_removed_directory() {
    let mount = Mount::new();
    fs::create_dir(mount.at("d")).unwrap();
    let dir = File::open(mount.at("d")).unwrap();
    fs::remove_dir(mount.at("d")).unwrap();
    let flags = OFlags::CREATE | OFlags::WRONLY;
    assert_eq!(errno(rustix::fs::openat(&dir, "f", flags, Mode::RUSR)), libc::ENOENT);
    assert_eq!(errno(rustix::fs::mkdirat(&dir, "d", Mode::RWXU)), libc::ENOENT);
    assert_eq!(errno(rustix::fs::symlinkat("x", &dir, "l")), libc::ENOENT);
    fs::write(mount.at("f"), b"x").unwrap();
    assert_eq!(errno(rustix::fs::renameat(CWD, mount.at("f"), &dir, "f")), libc::ENOENT);
    assert_eq!(fs::read(mount.at("f")).unwrap(), b"x");
}

#[test]
fn opening_fails_as_on_any_file_system() {
    let mount = Mount::new();
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("f"), b"x").unwrap();
    assert_eq!(errno(File::open(mount.at("none"))), libc::ENOENT);
    assert_eq!(errno(File::open(mount.at("f/x"))), libc::ENOTDIR);
    assert_eq!(errno(File::open(mount.at("f/"))), libc::ENOTDIR);
    assert_eq!(errno(File::create(mount.at("new/"))), libc::EISDIR);
    assert_eq!(errno(File::create_new(mount.at("f"))), libc::EEXIST);
    assert_eq!(errno(File::create_new(mount.at("d"))), libc::EEXIST);
    assert_eq!(errno(OpenOptions::new().write(true).open(mount.at("d"))), libc::EISDIR);
    assert_eq!(errno(File::open(mount.at("d")).unwrap().read(&mut [0; 1])), libc::EISDIR);
    let as_directory = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(mount.at("f"));
    assert_eq!(errno(as_directory), libc::ENOTDIR);
    let nameless = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(mount.at("d"));
    assert_eq!(errno(nameless), libc::EOPNOTSUPP);
    assert_eq!(errno(rustix::fs::chmod(mount.at("none"), Mode::RUSR)), libc::ENOENT);
    assert_eq!(errno(nix::unistd::truncate(&mount.at("d"), 0)), libc::EISDIR);
    assert_eq!(errno(nix::unistd::truncate(&mount.at("none"), 0)), libc::ENOENT);
    let mut reader = File::open(mount.at("f")).unwrap();
    assert_eq!(errno(reader.write(b"y")), libc::EBADF);
    assert_eq!(errno(reader.set_len(0)), libc::EINVAL);
    let mut writer = OpenOptions::new().write(true).open(mount.at("f")).unwrap();
    assert_eq!(errno(writer.read(&mut [0; 1])), libc::EBADF);
    // What no tier can ever hold is said at once, and leaves the file as it was.
    writer.seek(SeekFrom::Start(1 << 50)).unwrap();
    let too_large = errno(writer.write(b"y"));
    assert!([libc::EFBIG, libc::ENOSPC].contains(&too_large), "errno {too_large}");
    assert_eq!(errno(writer.set_len(1 << 50)), libc::EFBIG);
    drop(writer);
    assert_eq!(fs::read(mount.at("f")).unwrap(), b"x");
}

#[test]
fn rename_moves_and_replaces() {
    let mount = Mount::new();
    let at = |path: &str| mount.at(path);
    fs::write(at("a"), bytes(1, 300_000)).unwrap();
    fs::write(at("b"), bytes(2, 70_000)).unwrap();
    let mut old = File::open(at("b")).unwrap();
    fs::rename(at("a"), at("b")).unwrap();
    assert_eq!(errno(fs::metadata(at("a"))), libc::ENOENT);
    assert!(fs::read(at("b")).unwrap() == bytes(1, 300_000));
    let mut read = Vec::new();
    old.read_to_end(&mut read).unwrap();
    assert!(read == bytes(2, 70_000), "an open reader keeps what was replaced");
    assert_eq!(old.metadata().unwrap().nlink(), 0);
    drop(old);
    fs::rename(at("b"), at("b")).unwrap();
    assert_eq!(errno(fs::rename(at("a"), at("c"))), libc::ENOENT);
    assert_eq!(errno(fs::rename(at("b"), at("none/b"))), libc::ENOENT);
    assert_eq!(errno(fs::rename(at("b"), at("b/c"))), libc::ENOTDIR);

    fs::create_dir_all(at("d/e")).unwrap();
    fs::write(at("d/e/f"), b"deep").unwrap();
    assert_eq!(errno(fs::rename(at("d"), at("d/e/d"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(at("d"), at("d/d"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(at("d/e"), at("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::rename(at("b"), at("d"))), libc::EISDIR);
    assert_eq!(errno(fs::rename(at("d"), at("b"))), libc::ENOTDIR);
    fs::create_dir(at("other")).unwrap();
    assert_eq!(errno(fs::rename(at("other"), at("d"))), libc::ENOTEMPTY);
    let before = fs::metadata(mount.path()).unwrap().nlink();
    fs::rename(at("d"), at("other")).unwrap();
    assert_eq!(fs::read(at("other/e/f")).unwrap(), b"deep");
    assert_eq!(errno(fs::metadata(at("d"))), libc::ENOENT);
    assert_eq!(fs::metadata(mount.path()).unwrap().nlink(), before - 1);
    fs::rename(at("other/e"), at("e")).unwrap();
    assert_eq!(fs::metadata(at("e/..")).unwrap().ino(), fs::metadata(mount.path()).unwrap().ino());
    assert_eq!(fs::metadata(at("other")).unwrap().nlink(), 2);
    fs::rename(at("b"), at("e/f")).unwrap();
    assert!(fs::read(at("e/f")).unwrap() == bytes(1, 300_000));
    mount.check_quiet();
}

#[test]
fn rename_flags_are_honoured_or_refused() {
    let mount = Mount::new();
    let (a, b) = (mount.at("a"), mount.at("b"));
    fs::write(&a, b"a").unwrap();
    fs::write(&b, b"b").unwrap();
    assert_eq!(errno(rename_with(&a, &b, RenameFlags::NOREPLACE)), libc::EEXIST);
    for refused in [RenameFlags::EXCHANGE, RenameFlags::WHITEOUT] {
        assert_eq!(errno(rename_with(&a, &b, refused)), libc::EINVAL, "{refused:?}");
    }
    assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"a".to_vec(), b"b".to_vec()));
    rename_with(&a, &mount.at("c"), RenameFlags::NOREPLACE).unwrap();
    assert_eq!(fs::read(mount.at("c")).unwrap(), b"a");
    assert_eq!(errno(fs::metadata(&a)), libc::ENOENT);
}

#[test]
fn what_is_open_survives_its_name() {
    let mount = Mount::new();
    let path = mount.at("f");
    for size in [1, 70_000, 2 << 20] {
        fs::write(&path, bytes(size as u64, size)).unwrap();
        let mut reader = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(errno(File::open(&path)), libc::ENOENT);
        fs::write(&path, b"another").unwrap();
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert!(read == bytes(size as u64, size), "{size} bytes");
        let meta = reader.metadata().unwrap();
        assert_eq!((meta.nlink(), meta.len()), (0, size as u64));
        assert_eq!(fs::read(&path).unwrap(), b"another");
        fs::remove_file(&path).unwrap();
    }
    // A file that is removed while it is written never comes back, and its descriptor goes on.
    let mut both = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    both.write_all(b"one ").unwrap();
    fs::remove_file(&path).unwrap();
    both.write_all(b"two").unwrap();
    both.seek(SeekFrom::Start(0)).unwrap();
    let mut read = String::new();
    both.read_to_string(&mut read).unwrap();
    assert_eq!(read, "one two");
    drop(both);
    assert_eq!(errno(fs::metadata(&path)), libc::ENOENT);
    assert_eq!(mount.stat("files"), 0);
    mount.wait_for("private_files", |files| files == 0);
    mount.check_quiet();
}

#[test]
fn names_have_up_to_255_bytes_of_any_kind() {
    let mut mount = Mount::new();
    let long = "n".repeat(255);
    let longer = mount.at(&"n".repeat(256));
    fs::write(mount.at("f"), b"x").unwrap();
    for result in [
        fs::write(&longer, b"x"),
        fs::read(&longer).map(|_| ()),
        fs::metadata(&longer).map(|_| ()),
        fs::create_dir(&longer),
        fs::remove_file(&longer),
        fs::remove_dir(&longer),
        symlink("f", &longer),
        fs::rename(mount.at("f"), &longer),
        fs::rename(&longer, mount.at("f")),
        File::create_new(&longer).map(|_| ()),
    ] {
        assert_eq!(errno(result), libc::ENAMETOOLONG);
    }
    // Every byte that a name may have, alone and in company.
    let mut names: Vec<Vec<u8>> =
        (1..=255u8).filter(|byte| !b"/.".contains(byte)).map(|byte| vec![byte]).collect();
    names.push((1..=255).filter(|byte| *byte != b'/').collect());
    names.extend([b"\xff\xfe\x80".to_vec(), "\u{1f980}\u{e9}".into(), b"new\nline".to_vec()]);
    fs::create_dir(mount.at(&long)).unwrap();
    for name in &names {
        fs::write(mount.at(&long).join(OsStr::from_bytes(name)), name).unwrap();
    }
    fs::write(mount.at(&long).join(&long), b"both long").unwrap();
    let check = |mount: &Mount| {
        let mut listed: Vec<_> = fs::read_dir(mount.at(&long))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().as_bytes().to_vec())
            .collect();
        let mut wanted = names.clone();
        wanted.push(long.clone().into_bytes());
        listed.sort();
        wanted.sort();
        assert!(listed == wanted);
        for name in &names {
            assert_eq!(&fs::read(mount.at(&long).join(OsStr::from_bytes(name))).unwrap(), name);
        }
        assert_eq!(fs::read(mount.at(&long).join(&long)).unwrap(), b"both long");
    };
    check(&mount);
    if !memory_only() {
        mount.restart();
        check(&mount);
    }
}

#[test]
fn symbolic_links_work_and_other_kinds_are_refused() {
    let mut mount = Mount::new();
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("d/f"), b"target").unwrap();
    symlink("d/f", mount.at("l")).unwrap();
    symlink("nowhere", mount.at("dangling")).unwrap();
    symlink("loop", mount.at("loop")).unwrap();
    let long = "t".repeat(4095);
    symlink(&long, mount.at("long")).unwrap();
    if !memory_only() {
        mount.restart();
    }
    assert_eq!(fs::read(mount.at("l")).unwrap(), b"target");
    assert_eq!(fs::read_link(mount.at("long")).unwrap().as_os_str(), OsStr::new(&long));
    let meta = fs::symlink_metadata(mount.at("l")).unwrap();
    assert!(meta.is_symlink());
    assert_eq!((meta.len(), meta.mode() & 0o777), (3, 0o777));
    assert_eq!(errno(fs::read(mount.at("dangling"))), libc::ENOENT);
    assert_eq!(errno(fs::read(mount.at("loop"))), libc::ELOOP);
    let unfollowed = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(mount.at("l"));
    assert_eq!(errno(unfollowed), libc::ELOOP);
    assert_eq!(errno(symlink("x", mount.at("l"))), libc::EEXIST);
    assert_eq!(errno(fs::read_link(mount.at("d/f"))), libc::EINVAL);
    // Writing through a dangling link makes its target.
    fs::write(mount.at("dangling"), b"made").unwrap();
    assert_eq!(fs::read(mount.at("nowhere")).unwrap(), b"made");
    fs::rename(mount.at("l"), mount.at("moved")).unwrap();
    assert_eq!(fs::read(mount.at("moved")).unwrap(), b"target");
    fs::remove_file(mount.at("moved")).unwrap();
    assert_eq!(fs::read(mount.at("d/f")).unwrap(), b"target");
    // A file leaves with its name, so it has one name.
    assert_eq!(errno(fs::hard_link(mount.at("d/f"), mount.at("second"))), libc::EPERM);
    for kind in [FileType::Fifo, FileType::Socket, FileType::CharacterDevice, FileType::BlockDevice] {
        let made = rustix::fs::mknodat(CWD, mount.at("special"), kind, Mode::RUSR, 0);
        assert_eq!(errno(made), libc::EPERM, "{kind:?}");
    }
    let (regular, mode) = (FileType::RegularFile, Mode::RUSR | Mode::WUSR);
    rustix::fs::mknodat(CWD, mount.at("node"), regular, mode, 0).unwrap();
    assert_eq!(errno(rustix::fs::mknodat(CWD, mount.at("node"), regular, mode, 0)), libc::EEXIST);
    let meta = fs::metadata(mount.at("node")).unwrap();
    assert!(meta.is_file() && !meta.file_type().is_fifo());
    assert_eq!((meta.len(), meta.nlink()), (0, 1));
}

#[test]
fn others_may_do_what_the_modes_allow() {
    let mount = shared_mount();
    let at = |path: &str| mount.at(path);
    fs::create_dir(at("closed")).unwrap();
    fs::set_permissions(at("closed"), Permissions::from_mode(0o700)).unwrap();
    fs::write(at("closed/f"), b"x").unwrap();
    fs::create_dir(at("shown")).unwrap();
    fs::set_permissions(at("shown"), Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in [("secret", 0o600), ("readable", 0o644), ("writable", 0o606)] {
        fs::write(at("shown").join(name), name).unwrap();
        fs::set_permissions(at("shown").join(name), Permissions::from_mode(mode)).unwrap();
    }
    fs::create_dir(at("open")).unwrap();
    fs::set_permissions(at("open"), Permissions::from_mode(0o777)).unwrap();
    fs::write(at("open/roots"), b"r").unwrap();
    as_user(NOBODY, || {
        for refused in [
            fs::read(at("closed/f")).map(|_| ()),
            fs::read_dir(at("closed")).map(|_| ()),
            fs::read(at("shown/secret")).map(|_| ()),
            fs::write(at("shown/readable"), b"y"),
            fs::write(at("shown/new"), b"y"),
            fs::create_dir(at("shown/new")),
            symlink("x", at("shown/new")),
            fs::remove_file(at("shown/writable")),
            fs::remove_dir(at("closed")),
            fs::rename(at("shown/writable"), at("open/stolen")),
            fs::rename(at("open/roots"), at("shown/writable")),
            OpenOptions::new().append(true).open(at("shown/readable")).map(|_| ()),
        ] {
            assert_eq!(errno(refused), libc::EACCES);
        }
        assert_eq!(errno(nix::unistd::truncate(&at("shown/readable"), 0)), libc::EACCES);
        for refused in [
            fs::set_permissions(at("shown/writable"), Permissions::from_mode(0o777)),
            chown(at("shown/writable"), Some(NOBODY), None),
            File::options()
                .write(true)
                .open(at("shown/writable"))
                .unwrap()
                .set_modified(std::time::UNIX_EPOCH),
        ] {
            assert_eq!(errno(refused), libc::EPERM);
        }
        assert_eq!(fs::read(at("shown/readable")).unwrap(), b"readable");
        fs::write(at("shown/writable"), b"changed").unwrap();
        // In an open directory everybody may make, move and remove.
        fs::write(at("open/mine"), b"m").unwrap();
        let meta = fs::metadata(at("open/mine")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (NOBODY, NOBODY));
        fs::remove_file(at("open/roots")).unwrap();
        fs::create_dir(at("open/dir")).unwrap();
        assert_eq!(fs::metadata(at("open/dir")).unwrap().uid(), NOBODY);
        // Nobody gives files away, and nobody reads his own file against its mode.
        assert_eq!(errno(chown(at("open/mine"), Some(0), None)), libc::EPERM);
        fs::set_permissions(at("open/mine"), Permissions::from_mode(0o000)).unwrap();
        assert_eq!(errno(fs::read(at("open/mine"))), libc::EACCES);
    });
    let meta = fs::metadata(at("shown/writable")).unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o7777), (0, 0o606), "who writes does not own");
    assert_eq!(fs::read(at("shown/writable")).unwrap(), b"changed");
    assert_eq!(fs::read(at("open/mine")).unwrap(), b"m", "root reads against the mode");
}

#[test]
fn sticky_and_setgid_directories_keep_their_meaning() {
    let mut mount = shared_mount();
    fs::create_dir(mount.at("tmp")).unwrap();
    fs::set_permissions(mount.at("tmp"), Permissions::from_mode(0o1777)).unwrap();
    fs::write(mount.at("tmp/roots"), b"r").unwrap();
    fs::create_dir(mount.at("group")).unwrap();
    chown(mount.at("group"), None, Some(4242)).unwrap();
    fs::set_permissions(mount.at("group"), Permissions::from_mode(0o2777)).unwrap();
    if !memory_only() {
        mount.restart();
    }
    let at = |path: &str| mount.at(path);
    as_user(NOBODY, || {
        assert_eq!(errno(fs::remove_file(at("tmp/roots"))), libc::EPERM);
        assert_eq!(errno(fs::rename(at("tmp/roots"), at("tmp/x"))), libc::EPERM);
        fs::write(at("tmp/mine"), b"m").unwrap();
        assert_eq!(errno(fs::rename(at("tmp/mine"), at("tmp/roots"))), libc::EPERM);
        fs::rename(at("tmp/mine"), at("tmp/moved")).unwrap();
        fs::write(at("group/f"), b"g").unwrap();
        fs::create_dir(at("group/d")).unwrap();
        symlink("f", at("group/l")).unwrap();
    });
    as_user(NOBODY - 1, || assert_eq!(errno(fs::remove_file(at("tmp/moved"))), libc::EPERM));
    as_user(NOBODY, || fs::remove_file(at("tmp/moved")).unwrap());
    let file = fs::metadata(at("group/f")).unwrap();
    assert_eq!((file.uid(), file.gid(), file.mode() & 0o2000), (NOBODY, 4242, 0));
    let dir = fs::metadata(at("group/d")).unwrap();
    assert_eq!((dir.gid(), dir.mode() & 0o2000), (4242, 0o2000));
    assert_eq!(fs::symlink_metadata(at("group/l")).unwrap().gid(), 4242);
}

#[test]
fn without_allow_other_others_see_nothing() {
    let mount = Mount::new();
    fs::set_permissions(mount.scratch.path(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(mount.path(), Permissions::from_mode(0o777)).unwrap();
    use std::os::unix::process::CommandExt;
    let output = Command::new("/bin/ls").arg(mount.path()).uid(NOBODY).gid(NOBODY).output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("Permission denied"), "{text}");
}

#[test]
fn modes_owners_and_times_are_kept() {
    let mut mount = shared_mount();
    fs::write(mount.at("f"), b"x").unwrap();
    fs::create_dir(mount.at("d")).unwrap();
    symlink("f", mount.at("l")).unwrap();
    let stamp = |seconds, nanos| Timespec { tv_sec: seconds, tv_nsec: nanos };
    // Before 1970, with nanoseconds, and after 2038.
    let times =
        Timestamps { last_access: stamp(-86_400, 123_456_789), last_modification: stamp(5_000_000_000, 1) };
    let names = [("f", 0o4751), ("d", 0o3770)];
    for (name, mode) in names {
        chown(mount.at(name), Some(1234), Some(5678)).unwrap();
        fs::set_permissions(mount.at(name), Permissions::from_mode(mode)).unwrap();
        rustix::fs::utimensat(CWD, mount.at(name), &times, AtFlags::empty()).unwrap();
    }
    rustix::fs::chownat(
        CWD,
        mount.at("l"),
        Some(rustix::fs::Uid::from_raw(77)),
        None,
        AtFlags::SYMLINK_NOFOLLOW,
    )
    .unwrap();
    fs::set_permissions(mount.path(), Permissions::from_mode(0o711)).unwrap();
    let check = |mount: &Mount| {
        for (name, mode) in names {
            let meta = fs::metadata(mount.at(name)).unwrap();
            assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (mode, 1234, 5678), "{name}");
            assert_eq!((meta.mtime(), meta.mtime_nsec()), (5_000_000_000, 1), "{name}");
            assert_eq!((meta.atime(), meta.atime_nsec()), (-86_400, 123_456_789), "{name}");
        }
        assert_eq!(fs::symlink_metadata(mount.at("l")).unwrap().uid(), 77);
        assert_eq!(fs::metadata(mount.at("f")).unwrap().len(), 1);
        assert_eq!(fs::metadata(mount.path()).unwrap().mode() & 0o7777, 0o711);
    };
    check(&mount);
    if !memory_only() {
        mount.restart();
        check(&mount);
    }
    // One time alone, and the clock's.
    let only_one =
        Timestamps { last_access: stamp(0, libc::UTIME_OMIT), last_modification: stamp(0, libc::UTIME_NOW) };
    rustix::fs::utimensat(CWD, mount.at("f"), &only_one, AtFlags::empty()).unwrap();
    let meta = fs::metadata(mount.at("f")).unwrap();
    assert_eq!(meta.atime(), -86_400);
    let age = meta.modified().unwrap().elapsed().unwrap();
    assert!(age.as_secs() < 60, "{age:?}");
}

#[test]
fn a_changed_file_does_not_keep_its_set_id_bits() {
    let mount = shared_mount();
    let at = |path: &str| mount.at(path);
    fs::set_permissions(mount.path(), Permissions::from_mode(0o777)).unwrap();
    let fresh = |mode| {
        let _ = fs::remove_file(at("f"));
        fs::write(at("f"), b"#!/bin/sh\n").unwrap();
        fs::set_permissions(at("f"), Permissions::from_mode(mode)).unwrap();
    };
    let mode = || fs::metadata(at("f")).unwrap().mode() & 0o7777;
    fresh(0o6777);
    chown(at("f"), Some(NOBODY), None).unwrap();
    assert_eq!(mode(), 0o777, "chown");
    fresh(0o6777);
    as_user(NOBODY, || OpenOptions::new().append(true).open(at("f")).unwrap().write_all(b"x").unwrap());
    assert_eq!(mode(), 0o777, "write");
    fresh(0o6777);
    as_user(NOBODY, || fs::write(at("f"), b"y").unwrap());
    assert_eq!(mode(), 0o777, "truncating open");
    fresh(0o6777);
    as_user(NOBODY, || nix::unistd::truncate(&at("f"), 3).unwrap());
    assert_eq!(mode(), 0o777, "truncate");
    fresh(0o6777);
    OpenOptions::new().append(true).open(at("f")).unwrap().write_all(b"x").unwrap();
    assert_eq!(mode(), 0o6777, "root may keep them");
}

#[test]
fn a_read_only_mount_changes_nothing() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("f"), bytes(5, 700_000)).unwrap();
    mount.restart_with(&["--read-only"]);
    let at = |path: &str| mount.at(path);
    assert!(fs::read(at("f")).unwrap() == bytes(5, 700_000));
    for refused in [
        fs::write(at("new"), b"x"),
        fs::write(at("f"), b"x"),
        OpenOptions::new().append(true).open(at("f")).map(|_| ()),
        fs::create_dir(at("e")),
        fs::remove_dir(at("d")),
        fs::remove_file(at("f")),
        fs::rename(at("f"), at("g")),
        symlink("f", at("l")),
        fs::set_permissions(at("f"), Permissions::from_mode(0o600)),
        chown(at("f"), Some(1), None),
        File::open(at("f")).unwrap().set_modified(std::time::UNIX_EPOCH),
        rustix::fs::setxattr(at("f"), "user.x", b"1", rustix::fs::XattrFlags::empty()).map_err(Into::into),
        nix::unistd::truncate(&at("f"), 0).map_err(Into::into),
    ] {
        assert_eq!(errno(refused), libc::EROFS);
    }
    assert_eq!(fs::metadata(at("f")).unwrap().len(), 700_000);
    assert!(at("d").is_dir());
}
