//! What happens to a version whose name another has, on its way to the device or not, and to those who wait for it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use nix::errno::Errno;

use super::stand_in_tests::{SIZE, after_a_crash, begin_drain, open, rename, write};
use super::tests::Rig;
use super::*;
use crate::l2::{Class, Direction};
use crate::store::node::ROOT_INO;
use crate::store::{Caller, Handle, Opened};

fn create_as(rig: &Rig, name: &str, flags: i32, caller: &Caller) -> Handle {
    let flags = libc::O_WRONLY | libc::O_CREAT | flags;
    let made = rig.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, caller);
    let (_, Opened { handle, .. }) = made.unwrap();
    handle
}

/// For everybody to see while it is written.
fn shared(rig: &Rig, name: &str) -> Handle {
    create_as(rig, name, 0, &Rig::caller())
}

fn write_at(rig: &Rig, handle: &Handle, at: u64, bytes: &[u8]) -> Result<u32, Errno> {
    let (tell, told) = channel();
    rig.store().write(handle, at, bytes, Box::new(move |result| tell.send(result).unwrap()));
    told.recv().unwrap()
}

/// The length of a file, and what it begins with.
fn holds(rig: &Rig, name: &str) -> Result<(usize, u8), Errno> {
    rig.read(rig.find(name)?, 4 << 20).map(|bytes| (bytes.len(), bytes[0]))
}

/// Published, and held on its way to the device.
fn publish_held(rig: &Rig, name: &str, byte: u8) {
    rig.faults.hold(Class::WriteBack);
    rig.write(name, &[byte; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
}

/// They stayed, as did their memory, as long as somebody had the other file open.
#[test]
fn what_was_written_to_a_file_that_an_unfinished_one_replaced_keeps_nobody_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let options = format!("l1=64MiB,l2={}:256MiB,dirty_limit=32MiB,request_deadline=2s", store.display());
    let rig = Rig::with(&options);
    let file = shared(&rig, "f");
    write(&rig, &file, &[1; 4096]);
    assert_eq!(rig.fsync(&file), Ok(()));
    for at in 0..32 {
        assert_eq!(write_at(&rig, &file, at << 20, &vec![1; 1 << 20]), Ok(1 << 20));
    }
    let lock = shared(&rig, "lock");
    rename(&rig, "lock", "f");
    rig.store().release(&file);
    let other = create_as(&rig, "other", libc::O_EXCL, &Rig::caller());
    for at in 0..4 {
        assert_eq!(write_at(&rig, &other, at << 20, &vec![2; 1 << 20]), Ok(1 << 20));
    }
    rig.store().release(&other);
    assert_eq!(rig.drain(), Ok(()));
    assert_eq!(rig.store().snapshot().dirty_bytes, 0);
    rig.store().release(&lock);
    rig.stop();
}

/// The wait for what it had been renamed over first was taken for one for its own bytes, of which half were there.
#[test]
fn what_was_renamed_twice_while_it_was_written_is_not_stored_half() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("h", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    publish_held(&rig, "g", 5);
    let half = shared(&rig, "x");
    write(&rig, &half, &[2; SIZE / 2]);
    rename(&rig, "x", "g");
    rename(&rig, "g", "h");
    let drained = begin_drain(&rig);
    rig.faults.release(Class::WriteBack);
    assert_eq!(drained.recv().unwrap(), Ok(()));
    after_a_crash(dir.path(), |rig| {
        assert_eq!(holds(rig, "h"), Ok((SIZE, 1)));
        assert_eq!(rig.find("g"), Err(Errno::ENOENT));
    });
    rig.store().release(&half);
    rig.stop();
}

/// It was freed in the moment between losing its name and the other's getting it.
#[test]
fn what_was_published_outlives_one_that_is_shown_by_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let rig = Rig::with(&format!("l1=64MiB,l2={}:64MiB,slab_file_max=1MiB", store.display()));
    // The device has enough to do for now.
    rig.store().with(|core| core.queue.in_flight += 1 << 30);
    rig.write("f", &[1; SIZE]);
    let drained = begin_drain(&rig);
    let writer = open(&rig, "f", libc::O_WRONLY | libc::O_TRUNC);
    write(&rig, &writer, &[2; 1000]);
    let (tell, told) = channel();
    let grown = Box::new(move |result: Result<_, _>| tell.send(result.map(|_| ())).unwrap());
    rig.store().truncate(writer.ino, true, 2 << 20, Default::default(), &Rig::caller(), grown);
    assert_eq!(told.recv().unwrap(), Ok(()));
    rig.store().with(|core| {
        core.queue.in_flight -= 1 << 30;
        core.wakes.writer = true;
    });
    assert_eq!(drained.recv().unwrap(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_eq!(holds(rig, "f"), Ok((SIZE, 1))));
    rig.store().release(&writer);
    rig.stop();
}

/// A rewrite of which a duplicate was closed, as numpy does, renamed while it is open: the version before kept its record,
/// and came back even after whatever followed it was removed.
#[test]
fn the_old_name_of_a_renamed_private_version_does_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let writer = open(&rig, "f", libc::O_WRONLY | libc::O_TRUNC);
    write(&rig, &writer, &[2; SIZE]);
    rig.store().flush(&writer, &Rig::caller());
    rename(&rig, "f", "g");
    assert_eq!(rig.find("f"), Err(Errno::ENOENT));
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_eq!(rig.find("f"), Err(Errno::ENOENT)));
    rig.write("f", &[3; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.store().unlink(ROOT_INO, b"f", &Rig::caller()).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_eq!(rig.find("f"), Err(Errno::ENOENT)));
    rig.store().release(&writer);
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_eq!(holds(rig, "g"), Ok((SIZE, 2))));
    rig.stop();
}

/// Both were answered for: by a barrier that was not about it.
#[test]
fn an_fsync_of_what_shows_lost_bytes_fails() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    publish_held(&rig, "f", 1);
    let writer = open(&rig, "f", libc::O_RDWR);
    let (tell, early) = channel();
    rig.store().fsync(&writer, Box::new(move |result| tell.send(result).unwrap()));
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.faults.release(Class::WriteBack);
    assert_eq!(early.recv().unwrap(), Err(Errno::EIO), "the one that waited");
    assert_eq!(rig.fsync(&writer), Err(Errno::EIO), "one that came after");
    rig.store().release(&writer);
    after_a_crash(dir.path(), |rig| assert_eq!(rig.find("f"), Err(Errno::ENOENT)));
    rig.stop();
}

/// The rename was not yet, and what was there before both would have come back.
#[test]
fn an_fsync_of_what_a_durable_file_was_renamed_over_waits_for_the_rename() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("g", &[1; SIZE]);
    rig.write("x", &[9; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    publish_held(&rig, "tmp", 2);
    rename(&rig, "tmp", "g");
    let reader = open(&rig, "g", libc::O_RDONLY);
    let store = rig.store().clone();
    // No commit comes in between.
    let commits = store.committing.lock();
    rename(&rig, "x", "g");
    let (tell, synced) = channel();
    rig.store().fsync(&reader, Box::new(move |result| tell.send(result).unwrap()));
    assert!(synced.try_recv().is_err(), "answered before anything was written");
    drop(commits);
    rig.faults.release(Class::WriteBack);
    assert_eq!(synced.recv().unwrap(), Ok(()));
    after_a_crash(dir.path(), |rig| {
        assert_eq!(holds(rig, "g"), Ok((SIZE, 9)));
        assert_eq!(rig.find("x"), Err(Errno::ENOENT));
    });
    rig.store().release(&reader);
    rig.stop();
}

/// What its maker does to a name it does to its own version, too, that another has overtaken and that is open still: else
/// the last close would bring the name back.
#[test]
fn a_name_that_its_maker_unlinked_or_moved_does_not_come_back_with_the_last_close() {
    for moved in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        let mine = create_as(&rig, "f", libc::O_TRUNC, &Rig::caller());
        write(&rig, &mine, &[1; SIZE]);
        rig.store().flush(&mine, &Rig::caller());
        // The first process is never this one.
        let another = Caller { tid: 1, uid: 0, gid: 0 };
        let theirs = create_as(&rig, "f", libc::O_TRUNC, &another);
        write(&rig, &theirs, &[2; SIZE]);
        rig.store().flush(&theirs, &another);
        rig.store().release(&theirs);
        if moved {
            rename(&rig, "f", "g");
            assert_eq!(holds(&rig, "g"), Ok((SIZE, 2)));
        } else {
            rig.store().unlink(ROOT_INO, b"f", &Rig::caller()).unwrap();
        }
        rig.store().flush(&mine, &Rig::caller());
        rig.store().release(&mine);
        assert_eq!(rig.find("f"), Err(Errno::ENOENT), "moved: {moved}");
        assert_eq!(holds(&rig, "g"), if moved { Ok((SIZE, 1)) } else { Err(Errno::ENOENT) });
        rig.stop();
    }
}
