//! What happens to a file while the device is still at work on an earlier state of it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::sync::mpsc::{Receiver, TryRecvError};

use nix::errno::Errno;

use super::tests::Rig;
use super::*;
use crate::l2::{Class, Direction, Logged};
use crate::store::node::ROOT_INO;
use crate::store::{Handle, Opened};

const SIZE: usize = 300_000;

/// Opens a file as the kernel does: by name, and once more if it is sent to look again.
fn open(rig: &Rig, parent: u64, name: &str, flags: i32) -> Handle {
    for _ in 0..3 {
        let ino = rig.find_in(parent, name).unwrap();
        match rig.store().open(ino, flags, &Rig::caller()) {
            Ok(opened) => return opened.handle,
            Err(errno) => assert_eq!(errno, Errno::ESTALE),
        }
    }
    panic!("{name} stays stale");
}

fn posix_dir(rig: &Rig) -> u64 {
    let dir = rig.store().mkdir(ROOT_INO, b"d", 0o755, &Rig::caller()).unwrap().attr.ino;
    rig.store().setxattr(dir, b"user.kv.publish", b"posix", 0).unwrap();
    dir
}

fn create_in(rig: &Rig, parent: u64, name: &str, bytes: &[u8]) {
    let flags = libc::O_WRONLY | libc::O_CREAT;
    let (_, Opened { handle, .. }) =
        rig.store().create(parent, name.as_bytes(), 0o644, flags, &Rig::caller()).unwrap();
    assert_eq!(write(rig, &handle, bytes).recv().unwrap(), Ok(bytes.len() as u32));
    rig.store().release(&handle);
}

fn write(rig: &Rig, handle: &Handle, bytes: &[u8]) -> Receiver<Result<u32, Errno>> {
    let (tell, told) = channel();
    rig.store().write(handle, 0, bytes, Box::new(move |result| tell.send(result).unwrap()));
    told
}

fn fsync(rig: &Rig, handle: &Handle) -> Receiver<Result<(), Errno>> {
    let (tell, told) = channel();
    rig.store().fsync(handle, Box::new(move |result| tell.send(result).unwrap()));
    told
}

#[track_caller]
fn assert_holds(rig: &Rig, ino: u64, byte: u8) {
    let read = rig.read(ino, SIZE).unwrap();
    assert!(
        read == vec![byte; SIZE],
        "{} bytes that begin with {:?}",
        read.len(),
        &read[..read.len().min(4)]
    );
}

/// What is sealed goes to the device without a copy; a file that is written in place must not change under it.
#[test]
fn a_file_that_is_being_stored_is_not_written_to_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let posix = posix_dir(&rig);
    assert_eq!(rig.drain(), Ok(()));
    rig.faults.start_log();
    rig.faults.hold(Class::WriteBack);
    create_in(&rig, posix, "f", &[1; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
    let handle = open(&rig, posix, "f", libc::O_WRONLY);
    let told = write(&rig, &handle, &[2; SIZE]);
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty), "written into what the device reads");
    rig.faults.release(Class::WriteBack);
    assert_eq!(told.recv().unwrap(), Ok(SIZE as u32));
    rig.store().release(&handle);
    assert_eq!(rig.drain(), Ok(()));
    let mut stored: Vec<u8> = Vec::new();
    for entry in rig.faults.log() {
        if let Logged::Write { bytes, .. } = entry
            && bytes.len() > 4096
            && matches!(bytes[0], 1 | 2)
        {
            let torn = bytes[..bytes.len() - 4096].iter().any(|&byte| byte != bytes[0]);
            assert!(!torn, "a mix of two versions on the device");
            stored.push(bytes[0]);
        }
    }
    assert!(stored.contains(&1) && stored.ends_with(&[2]), "{stored:?}");
    rig.stop();

    let rig = Rig::start(dir.path());
    let ino = rig.find_in(rig.find("d").unwrap(), "f").unwrap();
    assert_holds(&rig, ino, 2);
    rig.stop();
}

/// A file that is emptied while its old bytes come from the device gets new memory for the new ones.
#[test]
fn a_file_emptied_while_it_is_promoted_keeps_what_is_written_then() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let posix = posix_dir(&rig);
    create_in(&rig, posix, "f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();

    let rig = Rig::start(dir.path());
    let posix = rig.find("d").unwrap();
    rig.faults.hold(Class::Demand);
    let reader = open(&rig, posix, "f", libc::O_RDONLY);
    let (tell, read) = channel();
    let reply = Box::new(move |result: Result<&[u8], Errno>| tell.send(result.map(<[u8]>::len)).unwrap());
    rig.store().read(&reader, 0, SIZE, reply);
    rig.wait(|| rig.faults.held(Class::Demand) > 0);
    let writer = open(&rig, posix, "f", libc::O_WRONLY | libc::O_TRUNC);
    assert_eq!(write(&rig, &writer, &[2; SIZE]).recv().unwrap(), Ok(SIZE as u32));
    rig.faults.release(Class::Demand);
    read.recv().unwrap().unwrap();
    rig.wait(|| rig.store().snapshot().devices.iter().all(|(_, _, at)| at.outstanding() == 0));
    rig.store().release(&reader);
    rig.store().release(&writer);
    let ino = rig.find_in(posix, "f").unwrap();
    assert_holds(&rig, ino, 2);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();

    let rig = Rig::start(dir.path());
    let ino = rig.find_in(rig.find("d").unwrap(), "f").unwrap();
    assert_holds(&rig, ino, 2);
    rig.stop();
}

/// A commit that is on its way has not happened yet, also for a file that was committed before.
#[test]
fn fsync_waits_for_the_commit_that_is_being_written() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("a", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let handle = open(&rig, ROOT_INO, "a", libc::O_RDONLY);
    rig.faults.hold_syncs();
    rig.store().rename(ROOT_INO, b"a", ROOT_INO, b"b", 0, &Rig::caller()).unwrap();
    rig.faults.wait_for_sync();
    let told = fsync(&rig, &handle);
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty), "the record of the new name is not on the device");
    rig.faults.release_syncs();
    assert_eq!(told.recv().unwrap(), Ok(()));
    rig.store().release(&handle);
    rig.stop();
}

/// A barrier with nothing left to store before it, behind a commit that fails.
#[test]
fn a_drain_behind_a_commit_that_fails_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold_syncs();
    rig.write("a", &[1; SIZE]);
    rig.faults.wait_for_sync();
    let (tell, told) = channel();
    rig.store().barrier(Box::new(move |result| tell.send(result).unwrap()));
    rig.faults.fail_next_syncs(1, libc::EIO);
    rig.faults.release_syncs();
    assert_eq!(told.recv().unwrap(), Err(Errno::EIO));
    rig.stop();
}

/// fsync of a file whose bytes could not be stored is refused, and must not make it visible, in place of a good one.
#[test]
fn a_private_file_that_was_lost_is_never_published() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let handle = open(&rig, ROOT_INO, "f", libc::O_WRONLY | libc::O_TRUNC);
    rig.faults.fail_next(Direction::Write, usize::MAX, libc::EIO);
    // Beyond the dirty bound it is spilled.
    let mib = vec![2; 1 << 20];
    for at in 0..80u64 {
        let (tell, told) = channel();
        rig.store().write(&handle, at << 20, &mib, Box::new(move |result| tell.send(result).unwrap()));
        if told.recv().unwrap().is_err() {
            break;
        }
        if rig.store().snapshot().counters.store_failures > 0 {
            break;
        }
    }
    rig.wait(|| rig.store().snapshot().counters.store_failures > 0);
    rig.faults.fail_next(Direction::Write, 0, 0);
    for _ in 0..2 {
        assert_eq!(fsync(&rig, &handle).recv().unwrap(), Err(Errno::EIO));
    }
    rig.store().release(&handle);
    let _ = rig.drain();
    assert_holds(&rig, rig.find("f").unwrap(), 1);
    rig.stop();
}

/// Rule R6: what cannot be stored is not found, and nothing older comes back in its place.
#[test]
fn a_new_version_that_cannot_be_stored_takes_its_name_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    let handle = open(&rig, ROOT_INO, "f", libc::O_WRONLY | libc::O_TRUNC);
    assert_eq!(write(&rig, &handle, &[2; SIZE]).recv().unwrap(), Ok(SIZE as u32));
    rig.store().release(&handle);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    assert_eq!(rig.find("f"), Err(Errno::ENOENT));
    assert_eq!(rig.drain(), Ok(()));
    rig.wait(|| rig.store().snapshot().used_bytes == 0);
    rig.stop();

    let rig = Rig::start(dir.path());
    assert_eq!(rig.find("f"), Err(Errno::ENOENT));
    rig.stop();
}

/// A file that was queued again while it was being stored: when that fails, both its entries are over.
#[test]
fn the_queue_goes_on_after_a_failure_of_what_is_queued_twice() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("f", &[1; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
    let handle = open(&rig, ROOT_INO, "f", libc::O_RDONLY);
    let told = fsync(&rig, &handle);
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.faults.release(Class::WriteBack);
    assert_eq!(told.recv().unwrap(), Err(Errno::EIO));
    rig.store().release(&handle);
    let _ = rig.drain();
    rig.write("g", &[2; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    assert_holds(&rig, rig.find("g").unwrap(), 2);
    rig.stop();
}
