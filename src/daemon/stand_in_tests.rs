//! While a version that took a name is under construction, a crash brings back the one before it, whole (rule R1).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::path::Path;
use std::sync::mpsc::Receiver;

use nix::errno::Errno;

use super::tests::Rig;
use super::*;
use crate::l2::Class;
use crate::store::node::ROOT_INO;
use crate::store::{Handle, Opened};

pub(super) const SIZE: usize = 300_000;

/// Opens a file to write as the kernel does: by name, and once more if it is sent to look again.
pub(super) fn open(rig: &Rig, name: &str, flags: i32) -> Handle {
    for _ in 0..3 {
        match rig.store().open(rig.find(name).unwrap(), flags, &Rig::caller()) {
            Ok(opened) => return opened.handle,
            Err(errno) => assert_eq!(errno, Errno::ESTALE),
        }
    }
    panic!("{name} stays stale");
}

pub(super) fn write(rig: &Rig, handle: &Handle, bytes: &[u8]) {
    let (tell, told) = channel();
    rig.store().write(handle, 0, bytes, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(bytes.len() as u32));
}

pub(super) fn rename(rig: &Rig, from: &str, to: &str) {
    rig.store().rename(ROOT_INO, from.as_bytes(), ROOT_INO, to.as_bytes(), 0, &Rig::caller()).unwrap();
}

pub(super) fn begin_drain(rig: &Rig) -> Receiver<Result<(), Errno>> {
    let (tell, told) = channel();
    rig.store().barrier(Box::new(move |result| tell.send(result).unwrap()));
    told
}

/// What another daemon finds in the store as it is on the device now.
pub(super) fn after_a_crash(dir: &Path, look: impl FnOnce(&Rig)) {
    let crashed = tempfile::tempdir().unwrap();
    std::fs::copy(dir.join("store"), crashed.path().join("store")).unwrap();
    let rig = Rig::start(crashed.path());
    look(&rig);
    rig.stop();
}

#[track_caller]
fn assert_holds(rig: &Rig, name: &str, byte: u8) {
    let read = rig.read(rig.find(name).unwrap(), SIZE + 1).unwrap();
    assert!(read == vec![byte; SIZE], "{name}: {} bytes that begin with {:?}", read.len(), &read[..4]);
}

/// It was not: what the next writer had written by then was stored in its place.
#[test]
fn a_drain_stores_what_was_published_and_not_half_of_the_next_version() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("f", &[1; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
    let reader = open(&rig, "f", libc::O_RDONLY);
    let (tell, synced) = channel();
    rig.store().fsync(&reader, Box::new(move |result| tell.send(result).unwrap()));
    let writer = open(&rig, "f", libc::O_WRONLY);
    write(&rig, &writer, &[2; SIZE / 2]);
    let drained = begin_drain(&rig);
    rig.faults.release(Class::WriteBack);
    assert_eq!(drained.recv().unwrap(), Ok(()));
    assert_eq!(synced.recv().unwrap(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_holds(rig, "f", 1));
    // The next version is written further, and takes its place when it is complete.
    write(&rig, &writer, &[2; SIZE]);
    rig.store().release(&writer);
    rig.store().release(&reader);
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_holds(rig, "f", 2));
    rig.wait(|| rig.store().snapshot().used_bytes == SIZE.next_multiple_of(4096) as u64);
    rig.stop();
}

/// The same if it was a rename that put a file under construction there.
#[test]
fn what_was_published_outlives_a_rename_of_an_unfinished_file() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("f", &[1; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
    let flags = libc::O_WRONLY | libc::O_CREAT;
    let (_, Opened { handle: writer, .. }) =
        rig.store().create(ROOT_INO, b"shared", 0o644, flags, &Rig::caller()).unwrap();
    write(&rig, &writer, &[2; SIZE / 2]);
    rename(&rig, "shared", "f");
    let drained = begin_drain(&rig);
    rig.faults.release(Class::WriteBack);
    assert_eq!(drained.recv().unwrap(), Ok(()));
    after_a_crash(dir.path(), |rig| {
        assert_holds(rig, "f", 1);
        assert_eq!(rig.find("shared"), Err(Errno::ENOENT));
    });
    rig.store().unlink(ROOT_INO, b"f", &Rig::caller()).unwrap();
    rig.store().release(&writer);
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_eq!(rig.find("f"), Err(Errno::ENOENT)));
    rig.wait(|| rig.store().snapshot().used_bytes == 0);
    rig.stop();
}

/// A drain answers for names, also for that of a file which is being written: it does not go back to the old one, and
/// what it replaced does not come back.
#[test]
fn a_drain_covers_the_new_name_of_a_file_under_construction() {
    for (written, onto, stored) in [
        (false, false, true),
        (true, false, true),
        (false, true, true),
        (true, true, true),
        (true, true, false),
    ] {
        let what = format!("written {written}, onto another {onto}, stored {stored}");
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        if onto {
            rig.write("to", &[3; SIZE]);
        }
        assert_eq!(rig.drain(), Ok(()));
        if !stored {
            rig.faults.hold(Class::WriteBack);
        }
        rig.write("from", &[1; SIZE]);
        if stored {
            assert_eq!(rig.drain(), Ok(()));
        } else {
            rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
        }
        if onto {
            // Its place in the directory comes after that of the file which is renamed.
            rename(&rig, "to", "later");
            rename(&rig, "later", "to");
        }
        let writer = open(&rig, "from", libc::O_WRONLY);
        if written {
            write(&rig, &writer, &[2; SIZE / 2]);
        }
        rename(&rig, "from", "to");
        let drained = begin_drain(&rig);
        rig.faults.release(Class::WriteBack);
        assert_eq!(drained.recv().unwrap(), Ok(()), "{what}");
        after_a_crash(dir.path(), |rig| {
            assert_eq!(rig.find("from"), Err(Errno::ENOENT), "{what}");
            assert_holds(rig, "to", 1);
            assert_eq!(rig.store().snapshot().used_bytes, SIZE.next_multiple_of(4096) as u64, "{what}");
        });
        write(&rig, &writer, &[2; SIZE]);
        rig.store().release(&writer);
        assert_eq!(rig.drain(), Ok(()), "{what}");
        after_a_crash(dir.path(), |rig| {
            assert_eq!(rig.find("from"), Err(Errno::ENOENT), "{what}");
            assert_holds(rig, "to", 2);
        });
        rig.wait(|| rig.store().snapshot().used_bytes == SIZE.next_multiple_of(4096) as u64);
        rig.stop();
    }
}

/// What is held up is written when it is told; `held` is then on its way.
fn publish_held(rig: &Rig, name: &str, byte: u8) {
    rig.faults.hold(Class::WriteBack);
    rig.write(name, &[byte; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
}

type Answer = Box<dyn FnOnce(Result<(), Errno>) + Send>;

/// The copy of the device is taken when the answer comes, before anything else is committed.
fn crash_at_the_answer(dir: &Path) -> (tempfile::TempDir, Answer, Receiver<Result<(), Errno>>) {
    let crashed = tempfile::tempdir().unwrap();
    let (store, copy) = (dir.join("store"), crashed.path().join("store"));
    let (tell, told) = channel();
    let answer = Box::new(move |result| {
        std::fs::copy(store, copy).unwrap();
        tell.send(result).unwrap();
    });
    (crashed, answer, told)
}

/// It was answered while only what stands in for an unfinished version held what it covers, behind it in the queue.
#[test]
fn a_drain_waits_for_what_stands_in_behind_it() {
    for written in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        publish_held(&rig, "f", 1);
        let (crashed, answer, drained) = crash_at_the_answer(dir.path());
        rig.store().barrier(answer);
        rig.write("tmp", &vec![2; 6 << 20]);
        rename(&rig, "tmp", "f");
        let writer = open(&rig, "f", libc::O_WRONLY);
        if written {
            write(&rig, &writer, &[3; SIZE / 2]);
        }
        rig.faults.release(Class::WriteBack);
        assert_eq!(drained.recv().unwrap(), Ok(()));
        let later = Rig::start(crashed.path());
        let read = later.read(later.find("f").unwrap(), 2 * SIZE).unwrap();
        assert!(read.iter().all(|byte| *byte == read[0]) && [1, 2].contains(&read[0]), "written: {written}");
        later.stop();
        rig.store().release(&writer);
        assert_eq!(rig.drain(), Ok(()));
        rig.stop();
    }
}

/// It stored the unfinished one, which had nothing yet: zeros in place of what had been published.
#[test]
fn an_fsync_of_a_replaced_version_does_not_store_an_unfinished_one() {
    for written in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        publish_held(&rig, "f", 1);
        let reader = open(&rig, "f", libc::O_RDONLY);
        let (crashed, answer, synced) = crash_at_the_answer(dir.path());
        rig.store().fsync(&reader, answer);
        rig.write("tmp", &[2; SIZE]);
        rename(&rig, "tmp", "f");
        let writer = open(&rig, "f", libc::O_WRONLY);
        if written {
            write(&rig, &writer, &[3; SIZE / 2]);
        }
        rig.faults.release(Class::WriteBack);
        assert_eq!(synced.recv().unwrap(), Ok(()));
        let later = Rig::start(crashed.path());
        assert_holds(&later, "f", 2);
        later.stop();
        rig.store().release(&writer);
        rig.store().release(&reader);
        assert_eq!(rig.drain(), Ok(()));
        rig.stop();
    }
}

/// The fsync came after the name had been taken, or what took it was itself replaced meanwhile.
#[test]
fn an_fsync_of_what_has_lost_its_name_waits_for_whoever_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    publish_held(&rig, "other", 9);
    rig.write("tmp", &[2; SIZE]);
    rename(&rig, "tmp", "f");
    let second = open(&rig, "f", libc::O_RDONLY);
    for byte in 3..6 {
        rig.write("tmp", &vec![byte; 6 << 20]);
        rename(&rig, "tmp", "f");
    }
    let (crashed, answer, synced) = crash_at_the_answer(dir.path());
    rig.store().fsync(&second, answer);
    rig.faults.release(Class::WriteBack);
    assert_eq!(synced.recv().unwrap(), Ok(()));
    let later = Rig::start(crashed.path());
    assert_eq!(later.read(later.find("f").unwrap(), 1), Ok(vec![5]));
    later.stop();
    rig.store().release(&second);
    rig.stop();
}

/// The record of what an open version was made of went with the directory that it had left.
#[test]
fn a_file_that_moved_while_it_was_open_does_not_go_with_its_old_directory() {
    for closed in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        let make = |name: &[u8]| rig.store().mkdir(ROOT_INO, name, 0o755, &Rig::caller()).unwrap().attr.ino;
        let (from, to) = (make(b"from"), make(b"to"));
        rig.write("f", &[1; SIZE]);
        rig.store().rename(ROOT_INO, b"f", from, b"f", 0, &Rig::caller()).unwrap();
        assert_eq!(rig.drain(), Ok(()));
        let ino = rig.find_in(from, "f").unwrap();
        assert_eq!(rig.store().open(ino, libc::O_RDWR, &Rig::caller()).err(), Some(Errno::ESTALE));
        let ino = rig.find_in(from, "f").unwrap();
        let writer = rig.store().open(ino, libc::O_RDWR, &Rig::caller()).unwrap().handle;
        rig.store().rename(from, b"f", to, b"f", 0, &Rig::caller()).unwrap();
        rig.store().rmdir(ROOT_INO, b"from").unwrap();
        if closed {
            rig.store().release(&writer);
        } else {
            assert_eq!(rig.fsync(&writer), Ok(()));
        }
        assert_eq!(rig.drain(), Ok(()));
        after_a_crash(dir.path(), |rig| {
            let found = rig.find_in(rig.find("to").unwrap(), "f").unwrap();
            assert_eq!(rig.read(found, SIZE), Ok(vec![1; SIZE]), "closed: {closed}");
        });
        if !closed {
            rig.store().release(&writer);
        }
        rig.stop();
    }
}

/// A rename is one step, also of a file that is open to write: what takes the old name does not take its bytes along.
#[test]
fn a_new_file_under_the_old_name_leaves_a_renamed_open_one_alone() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let writer = open(&rig, "f", libc::O_RDWR);
    write(&rig, &writer, &[2; SIZE / 2]);
    rename(&rig, "f", "g");
    let fresh = rig.create("f", &[3; SIZE]);
    assert_eq!(rig.fsync(&fresh), Ok(()));
    after_a_crash(dir.path(), |rig| {
        assert_holds(rig, "g", 1);
        assert_holds(rig, "f", 3);
    });
    rig.store().release(&fresh);
    rig.store().release(&writer);
    rig.stop();
}

/// What is replaced over and over before it can be stored is freed, not kept until its turn.
#[test]
fn what_is_replaced_before_it_is_stored_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    // Nothing is sent to the device: it has enough to do.
    rig.store().with(|core| core.queue.in_flight += 1 << 30);
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
    for byte in 0..60 {
        let (_, Opened { handle, .. }) =
            rig.store().create(ROOT_INO, b"f", 0o644, flags, &Rig::caller()).unwrap();
        write(&rig, &handle, &[byte; SIZE]);
        rig.store().release(&handle);
    }
    assert_eq!(rig.store().snapshot().dirty_bytes, SIZE.next_multiple_of(4096) as u64);
    rig.store().with(|core| {
        let replaced = core.tree.child(0, b"f").and_then(|idx| core.hot(idx)).map(|hot| hot.supersedes.len());
        assert_eq!(replaced, Some(0), "nothing that it replaced has a record");
        core.queue.in_flight -= 1 << 30;
        core.wakes.writer = true;
    });
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| assert_holds(rig, "f", 59));
    rig.stop();
}

/// What could not be stored is gone, though somebody had it open to write and did not.
#[test]
fn what_was_lost_does_not_come_back_when_its_writer_closes() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    publish_held(&rig, "f", 1);
    let writer = open(&rig, "f", libc::O_WRONLY);
    rig.faults.fail_next(crate::l2::Direction::Write, 1, libc::EIO);
    rig.faults.release(Class::WriteBack);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    rig.store().release(&writer);
    assert_eq!(rig.find("f"), Err(Errno::ENOENT));
    assert_eq!(rig.drain(), Ok(()));
    rig.wait(|| rig.store().snapshot().used_bytes == 0);
    rig.stop();
}

/// In another directory its old place may be that of a neighbour, who must not be lost for it.
#[test]
fn a_file_under_construction_takes_nobodys_place_in_another_directory() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let there = rig.store().mkdir(ROOT_INO, b"d", 0o755, &Rig::caller()).unwrap().attr.ino;
    rig.write("f", &[1; SIZE]);
    for at in 0..4 {
        let name = format!("n{at}");
        rig.write(&name, &[7; 10]);
        rig.store().rename(ROOT_INO, name.as_bytes(), there, name.as_bytes(), 0, &Rig::caller()).unwrap();
    }
    assert_eq!(rig.drain(), Ok(()));
    let writer = open(&rig, "f", libc::O_WRONLY);
    rig.store().rename(ROOT_INO, b"f", there, b"f", 0, &Rig::caller()).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| {
        let there = rig.find("d").unwrap();
        assert_eq!(rig.store().snapshot().files, 5);
        assert_eq!(rig.read(rig.find_in(there, "f").unwrap(), SIZE), Ok(vec![1; SIZE]));
    });
    write(&rig, &writer, &[2; SIZE]);
    rig.store().release(&writer);
    rig.stop();
}

/// fsync of a version that is not stored any more, since a newer one has its name, waits for that one: otherwise what
/// was there before both would come back.
#[test]
fn an_fsync_of_a_replaced_version_waits_for_the_one_that_replaced_it() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.faults.hold(Class::WriteBack);
    rig.write("second", &[2; SIZE]);
    rename(&rig, "second", "f");
    let second = open(&rig, "f", libc::O_RDONLY);
    let crashed = tempfile::tempdir().unwrap();
    let (store, copy) = (dir.path().join("store"), crashed.path().join("store"));
    let (tell, synced) = channel();
    // The crash comes with the answer, before another commit.
    let answer = move |result| tell.send((result, std::fs::copy(store, copy).is_ok())).unwrap();
    rig.store().fsync(&second, Box::new(answer));
    // Long enough on its way to the device for the other one to be answered first.
    rig.write("third", &vec![3; 24 << 20]);
    rename(&rig, "third", "f");
    rig.faults.release(Class::WriteBack);
    assert_eq!(synced.recv().unwrap(), (Ok(()), true));
    rig.store().release(&second);
    rig.stop();

    let rig = Rig::start(crashed.path());
    let read = rig.read(rig.find("f").unwrap(), SIZE).unwrap();
    assert!(read[0] != 1, "the version before the one that was fsynced came back");
    rig.stop();
}

/// A version that nobody wrote to had shown its bytes to somebody who still reads: it was stored, and nobody was left who
/// would have removed its record.
#[test]
fn what_was_removed_does_not_come_back_for_a_reader() {
    for stored in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        publish_held(&rig, "f", 1);
        if stored {
            rig.faults.release(Class::WriteBack);
            assert_eq!(rig.drain(), Ok(()));
        }
        let writer = open(&rig, "f", libc::O_RDWR);
        let reader = open(&rig, "f", libc::O_RDONLY);
        rig.store().release(&writer);
        rig.store().unlink(ROOT_INO, b"f", &Rig::caller()).unwrap();
        rig.faults.release(Class::WriteBack);
        assert_eq!(rig.drain(), Ok(()));
        after_a_crash(dir.path(), |rig| assert_eq!(rig.find("f"), Err(Errno::ENOENT), "stored: {stored}"));
        let (tell, told) = channel();
        let reply = Box::new(move |read: Result<&[u8], Errno>| tell.send(read.map(<[u8]>::to_vec)).unwrap());
        rig.store().read(&reader, 0, SIZE, reply);
        assert!(told.recv().unwrap() == Ok(vec![1; SIZE]), "its reader keeps it");
        rig.store().release(&reader);
        assert_eq!(rig.drain(), Ok(()));
        rig.wait(|| rig.store().snapshot().used_bytes == 0);
        assert_eq!(rig.store().snapshot().dirty_bytes, 0);
        rig.stop();
    }
}

/// What took the name meanwhile does not come back when the renamed one returns to it.
#[test]
fn a_file_under_construction_can_go_away_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let writer = open(&rig, "f", libc::O_RDWR);
    rename(&rig, "f", "g");
    rig.write("f", &[2; SIZE]);
    rename(&rig, "g", "f");
    assert_eq!(rig.fsync(&writer), Ok(()));
    after_a_crash(dir.path(), |rig| assert_holds(rig, "f", 1));
    assert_eq!(rig.drain(), Ok(()));
    after_a_crash(dir.path(), |rig| {
        assert_holds(rig, "f", 1);
        assert_eq!(rig.find("g"), Err(Errno::ENOENT));
    });
    rig.store().release(&writer);
    rig.stop();
}
