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

const SIZE: usize = 300_000;

/// Opens a file to write as the kernel does: by name, and once more if it is sent to look again.
fn open(rig: &Rig, name: &str, flags: i32) -> Handle {
    for _ in 0..3 {
        match rig.store().open(rig.find(name).unwrap(), flags, &Rig::caller()) {
            Ok(opened) => return opened.handle,
            Err(errno) => assert_eq!(errno, Errno::ESTALE),
        }
    }
    panic!("{name} stays stale");
}

fn write(rig: &Rig, handle: &Handle, bytes: &[u8]) {
    let (tell, told) = channel();
    rig.store().write(handle, 0, bytes, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(bytes.len() as u32));
}

fn rename(rig: &Rig, from: &str, to: &str) {
    rig.store().rename(ROOT_INO, from.as_bytes(), ROOT_INO, to.as_bytes(), 0, &Rig::caller()).unwrap();
}

fn begin_drain(rig: &Rig) -> Receiver<Result<(), Errno>> {
    let (tell, told) = channel();
    rig.store().barrier(Box::new(move |result| tell.send(result).unwrap()));
    told
}

/// What another daemon finds in the store as it is on the device now.
fn after_a_crash(dir: &Path, look: impl FnOnce(&Rig)) {
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
