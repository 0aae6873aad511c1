//! Reads that wait while their file changes: each is answered, with bytes that the file had.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::os::fd::AsRawFd;
use std::sync::mpsc::Receiver;

use nix::errno::Errno;

use super::tests::Rig;
use super::*;
use crate::l2::{Class, Direction};
use crate::store::Handle;
use crate::store::node::{NONE, ROOT_INO};

const BLOCK: usize = 256 << 10;
const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

fn answer<T>(told: &Receiver<T>, what: &str) -> T {
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} is never answered"))
}

fn ask(rig: &Rig, handle: &Handle, offset: usize, len: usize) -> Receiver<Result<Vec<u8>, Errno>> {
    let (tell, told) = channel();
    let reply = Box::new(move |result: Result<&[u8], Errno>| {
        let _ = tell.send(result.map(<[u8]>::to_vec));
    });
    rig.store().read(handle, offset as u64, len, reply);
    told
}

fn put(rig: &Rig, handle: &Handle, offset: usize, bytes: &[u8]) -> Receiver<Result<u32, Errno>> {
    let (tell, told) = channel();
    let reply = Box::new(move |result| {
        let _ = tell.send(result);
    });
    rig.store().write(handle, offset as u64, bytes, reply);
    told
}

fn cut(rig: &Rig, handle: &Handle, size: usize) {
    let (tell, told) = channel();
    let reply = Box::new(move |result: Result<crate::store::Attr, Errno>| {
        let _ = tell.send(result.map(|_| ()));
    });
    rig.store().truncate(handle.ino, true, size as u64, Default::default(), &Rig::caller(), reply);
    assert_eq!(answer(&told, "a truncation"), Ok(()));
}

/// A file in shared use of `mib` MiB that is on the device alone, and a handle to write it.
fn shared(rig: &Rig, mib: usize) -> Handle {
    let flags = libc::O_RDWR | libc::O_CREAT;
    let handle = rig.store().create(ROOT_INO, b"file", 0o644, flags, &Rig::caller()).unwrap().1.handle;
    for at in 0..mib {
        let written = put(rig, &handle, at * MIB, &vec![1; MIB]);
        assert_eq!(answer(&written, "a write"), Ok(MIB as u32));
    }
    assert_eq!(rig.fsync(&handle), Ok(()));
    rig.drain().unwrap();
    while rig.store().lock().drop_some(NONE) {}
    handle
}

fn reader(rig: &Rig, flags: i32) -> Handle {
    let ino = rig.find("file").unwrap();
    rig.store().open(ino, libc::O_RDONLY | flags, &Rig::caller()).unwrap().handle
}

/// A read that waited for memory to go around L1 had the length that it was asked with: where the file had been cut
/// meanwhile, it brought bytes of whoever had that memory before.
#[test]
fn a_read_that_waited_for_memory_ends_where_the_file_ends() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let writer = shared(&rig, 8);
    let direct = reader(&rig, libc::O_DIRECT);
    rig.faults.hold(Class::Demand);
    let before: Vec<_> = (0..64).map(|at| ask(&rig, &direct, at % 7 * MIB, MIB)).collect();
    let inside = ask(&rig, &direct, 7 * MIB - BLOCK, MIB);
    let beyond = ask(&rig, &direct, 7 * MIB + BLOCK, BLOCK);
    cut(&rig, &writer, 7 * MIB);
    rig.faults.release(Class::Demand);
    for read in before {
        assert_eq!(answer(&read, "a read").map(|bytes| bytes == vec![1; MIB]), Ok(true));
    }
    let found = answer(&inside, "a read").unwrap();
    assert!(found == vec![1; BLOCK], "{} bytes of {BLOCK}", found.len());
    assert_eq!(answer(&beyond, "a read").map(|bytes| bytes.len()), Ok(0));
    rig.stop();
}

/// What a read went around L1 for was cut off and its place used again. The read asked anew, for blocks that were no
/// more, and took its thread with it.
#[test]
fn a_read_of_what_was_cut_off_asks_anew_for_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let writer = shared(&rig, 2);
    let place = rig.store().with(|core| core.place(writer.id.idx(), 5)[0].start * 4096);
    let at = rig.daemon.volume.as_ref().unwrap().data_offset(0) + place;
    let direct = reader(&rig, libc::O_DIRECT);
    rig.faults.hold(Class::Demand);
    let read = ask(&rig, &direct, 2 * BLOCK, MIB);
    cut(&rig, &writer, 3 * BLOCK);
    rig.faults.rot(at + 100);
    rig.faults.release(Class::Demand);
    let found = answer(&read, "a read").unwrap();
    assert!(found == vec![1; BLOCK], "{} bytes of {BLOCK}", found.len());
    rig.stop();
}

/// A read that waited for memory to go around L1 lost its place in the queue when another of its file, which took less,
/// got some: nobody started it any more, and it failed at its deadline.
#[test]
fn a_read_that_waits_for_memory_keeps_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let writer = shared(&rig, 2);
    let place = rig.store().with(|core| core.place(writer.id.idx(), 3)[0].start * 4096);
    let at = rig.daemon.volume.as_ref().unwrap().data_offset(0) + place;
    let direct = reader(&rig, libc::O_DIRECT);
    // Nothing gets into L1.
    let full: Vec<_> = std::iter::from_fn(|| rig.store().pool.chunk(BLOCK)).collect();
    rig.faults.hold(Class::Demand);
    let outdated = ask(&rig, &direct, 2 * BLOCK, 2 * BLOCK);
    let mut others: Vec<_> = (0..63).map(|_| ask(&rig, &direct, 0, MIB)).collect();
    others.push(ask(&rig, &direct, 0, BLOCK));
    let waits = ask(&rig, &direct, 0, MIB);
    cut(&rig, &writer, 3 * BLOCK);
    rig.faults.rot(at + 100);
    rig.faults.release_some(Class::Demand, 2);
    let stalled = 63 * 4 + 1;
    rig.wait(|| rig.faults.held(Class::Demand) > stalled);
    rig.faults.release(Class::Demand);
    assert!(answer(&outdated, "a read that asks anew").unwrap() == vec![1; BLOCK]);
    assert!(others.iter().all(|read| answer(read, "a read").is_ok()));
    assert!(answer(&waits, "a read that waits for memory").unwrap() == vec![1; 3 * BLOCK]);
    drop(full);
    rig.stop();
}

/// What was written to a file in shared use and could not be stored left L1 as if it had been: whoever had the file open
/// then read the bytes from before.
#[test]
fn what_could_not_be_stored_is_not_read_as_it_was_before() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let writer = shared(&rig, 1);
    assert_eq!(answer(&put(&rig, &writer, 0, &vec![2; BLOCK]), "a write"), Ok(BLOCK as u32));
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    assert_eq!(rig.fsync(&writer), Err(Errno::EIO));
    assert!(answer(&ask(&rig, &writer, 0, BLOCK), "a read").unwrap() == vec![2; BLOCK]);
    while rig.store().lock().drop_some(NONE) {}
    let found = answer(&ask(&rig, &writer, 0, BLOCK), "a read").unwrap();
    assert!(found == vec![2; BLOCK], "it reads {}", found[0]);
    rig.stop();
}

/// A file that could not be stored took what its writer went on to write, which nothing ever stored: once that was all
/// that may be dirty, nobody could write any more.
#[test]
fn a_file_that_was_lost_takes_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.store().with(|core| core.settings.dirty_limit_pages = 4 << 8);
    let writer = shared(&rig, 1);
    assert_eq!(answer(&put(&rig, &writer, 0, &vec![2; BLOCK]), "a write"), Ok(BLOCK as u32));
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    assert_eq!(rig.fsync(&writer), Err(Errno::EIO));
    let more: Vec<_> = (0..4).map(|at| put(&rig, &writer, at * MIB, &vec![3; MIB])).collect();
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    let other = rig.store().create(ROOT_INO, b"other", 0o644, flags, &Rig::caller()).unwrap().1.handle;
    assert_eq!(answer(&put(&rig, &other, 0, &vec![4; MIB]), "a write to another file"), Ok(MIB as u32));
    assert!(more.iter().all(|written| answer(written, "a write") == Err(Errno::EIO)));
    let (tell, told) = channel();
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    rig.store().fallocate(&writer, 100, 100, mode, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(answer(&told, "punching a hole"), Err(Errno::EIO));
    rig.store().release(&other);
    let _ = rig.drain();
    assert_eq!(rig.read(rig.find("other").unwrap(), MIB), Ok(vec![4; MIB]));
    rig.stop();
}

/// A finished file's slab is a file that ends with the last byte. Written again in place, it has bytes behind that end
/// before it is made longer, of which a kernel may make zeros then.
#[test]
fn a_slab_that_is_written_again_has_whole_pages() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let at = rig.store().mkdir(ROOT_INO, b"plain", 0o755, &Rig::caller()).unwrap().attr.ino;
    rig.store().setxattr(at, b"user.kv.publish", b"posix", 0).unwrap();
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    let first = rig.store().create(at, b"file", 0o644, flags, &Rig::caller()).unwrap().1.handle;
    assert_eq!(answer(&put(&rig, &first, 0, &[1; 300_001]), "a write"), Ok(300_001));
    rig.store().release(&first);
    rig.drain().unwrap();
    let bytes = || {
        let core = rig.store().lock();
        let slab = core.hot(first.id.idx()).unwrap().slab.clone().unwrap();
        std::fs::metadata(format!("/proc/self/fd/{}", slab.backing_fd().as_raw_fd())).unwrap().len()
    };
    assert_eq!(bytes(), 300_001);
    let ino = rig.find_in(at, "file").unwrap();
    let again = rig.store().open(ino, libc::O_RDWR, &Rig::caller()).unwrap().handle;
    assert_eq!(again.id, first.id);
    assert_eq!(answer(&put(&rig, &again, 300_001, &[2; 1000]), "a write"), Ok(1000));
    assert_eq!(bytes(), 300_001u64.next_multiple_of(4096));
    rig.store().release(&again);
    assert_eq!(bytes(), 301_001);
    rig.stop();
}

/// Where one block of a file in shared use could not be read, all that were read with it could not be read any more.
#[test]
fn only_the_block_that_cannot_be_read_is_bad() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let _writer = shared(&rig, 1);
    let direct = reader(&rig, libc::O_DIRECT);
    rig.faults.fail_next(Direction::Read, 1, libc::EIO);
    assert_eq!(answer(&ask(&rig, &direct, 0, MIB), "a read"), Err(Errno::EIO));
    let bad: Vec<usize> =
        (0..4).filter(|at| answer(&ask(&rig, &direct, at * BLOCK, BLOCK), "a read").is_err()).collect();
    assert_eq!(bad, [0]);
    rig.stop();
}
