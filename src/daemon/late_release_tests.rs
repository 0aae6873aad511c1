//! A close whose RELEASE, which publishes, comes after what the next writer of that name did.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use nix::errno::Errno;

use super::tests::Rig;
use super::*;
use crate::store::{Answer, Entry, Handle, Opened};

const ROOT: u64 = crate::store::node::ROOT_INO;

fn begin(rig: &Rig, bytes: &[u8], flags: i32) -> Handle {
    let flags = libc::O_WRONLY | libc::O_CREAT | flags;
    let (_, Opened { handle, .. }) = rig.store().create(ROOT, b"f", 0o644, flags, &Rig::caller()).unwrap();
    let (tell, told) = channel();
    rig.store().write(&handle, 0, bytes, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(bytes.len() as u32));
    handle
}

fn close(rig: &Rig, handle: &Handle) {
    rig.store().flush(handle, &Rig::caller());
}

/// It was: the version that had been closed before took the place of the one that an fsync had answered for.
#[test]
fn what_was_fsynced_is_not_replaced_by_what_was_closed_before() {
    for shown_by_size in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let options = if shown_by_size { ",slab_file_max=1MiB" } else { "" };
        let rig = Rig::with(&format!("l1=64MiB,l2={}:256MiB{options}", dir.path().join("store").display()));
        let first = begin(&rig, &[1; 5000], libc::O_TRUNC);
        close(&rig, &first);
        let second = begin(&rig, &[2; 6000], libc::O_TRUNC);
        if shown_by_size {
            let (tell, told) = channel();
            let grown = Box::new(move |result: Result<_, _>| tell.send(result.map(|_| ())).unwrap());
            rig.store().truncate(second.ino, true, 2 << 20, Default::default(), &Rig::caller(), grown);
            assert_eq!(told.recv().unwrap(), Ok(()));
        } else {
            assert_eq!(rig.fsync(&second), Ok(()));
        }
        rig.store().release(&first);
        close(&rig, &second);
        rig.store().release(&second);
        let found = rig.find("f").unwrap();
        assert_eq!(rig.read(found, 6000), Ok(vec![2; 6000]), "by its size: {shown_by_size}");
        // One that is closed after the fsync comes after it.
        let third = begin(&rig, &[3; 7000], libc::O_TRUNC);
        close(&rig, &third);
        rig.store().release(&third);
        assert_eq!(rig.read(rig.find("f").unwrap(), 7000), Ok(vec![3; 7000]));
        rig.stop();
    }
}

/// A file for shared use that came into being after the close, and was made durable.
#[test]
fn a_shared_file_is_not_replaced_by_what_was_closed_before() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let first = begin(&rig, &[1; 5000], libc::O_TRUNC);
    close(&rig, &first);
    let shared = begin(&rig, &[2; 6000], 0);
    assert_eq!(rig.fsync(&shared), Ok(()));
    rig.store().release(&first);
    assert_eq!(rig.read(rig.find("f").unwrap(), 6000), Ok(vec![2; 6000]));
    rig.store().release(&shared);
    rig.stop();
}

/// The last one wins, also of those that are closed while another is shown by its fsync.
#[test]
fn what_is_closed_after_an_fsync_takes_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let first = begin(&rig, &[1; 5000], libc::O_TRUNC);
    let second = begin(&rig, &[2; 6000], libc::O_TRUNC);
    assert_eq!(rig.fsync(&second), Ok(()));
    close(&rig, &first);
    rig.store().release(&first);
    assert_eq!(rig.read(rig.find("f").unwrap(), 5000), Ok(vec![1; 5000]));
    close(&rig, &second);
    rig.store().release(&second);
    assert_eq!(rig.read(rig.find("f").unwrap(), 5000), Ok(vec![1; 5000]));
    rig.stop();
}

/// What a lookup of `f` by its own process finds once `meanwhile` has come.
fn found_after(rig: &Rig, meanwhile: impl FnOnce()) -> u64 {
    assert!(matches!(rig.store().lookup(ROOT, b"f", &Rig::caller()), Answer::Wait));
    let (tell, told) = channel();
    let reply =
        Box::new(move |found: Result<Entry, Errno>| tell.send(found.map(|entry| entry.attr.ino)).unwrap());
    rig.store().lookup_later(ROOT, b"f", &Rig::caller(), reply);
    meanwhile();
    told.recv().unwrap().unwrap()
}

/// What is closed and will be discarded is not found between its close and its RELEASE, not even by its own process: that
/// would open, as what it wrote, something that is not whole or that somebody else has replaced.
#[test]
fn what_will_be_discarded_is_not_found_by_its_maker() {
    for failed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        rig.write("f", &[1; 5000]);
        assert_eq!(rig.drain(), Ok(()));
        let mine = begin(&rig, &[2; 6000], libc::O_TRUNC);
        if failed {
            let (tell, told) = channel();
            rig.store().write(&mine, 1 << 40, &[2], Box::new(move |result| tell.send(result).unwrap()));
            assert_eq!(told.recv().unwrap(), Err(Errno::EFBIG));
        }
        assert_eq!(rig.find("f"), Ok(mine.ino), "it is found while it is written");
        close(&rig, &mine);
        let found = if failed {
            found_after(&rig, || rig.store().release(&mine))
        } else {
            let theirs = begin(&rig, &[1; 5000], libc::O_TRUNC);
            assert_eq!(rig.fsync(&theirs), Ok(()));
            rig.store().release(&theirs);
            let found = rig.find("f").unwrap();
            rig.store().release(&mine);
            found
        };
        assert_eq!(rig.read(found, 6000), Ok(vec![1; 5000]), "failed: {failed}");
        rig.stop();
    }
}

/// Opened again before its RELEASE a version stayed private, although it had been closed: others did not find it, a drain
/// did not cover it, and a rename after the next version moved this one in its place.
#[test]
fn what_is_closed_is_published_before_its_maker_opens_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let first = begin(&rig, &[1; 5000], libc::O_TRUNC);
    close(&rig, &first);
    let found = found_after(&rig, || rig.store().release(&first));
    assert_eq!(found, first.ino);
    let again = match rig.store().open(found, libc::O_RDWR, &Rig::caller()) {
        Err(Errno::ESTALE) => {
            rig.store().open(rig.find("f").unwrap(), libc::O_RDWR, &Rig::caller()).unwrap().handle
        }
        opened => opened.unwrap().handle,
    };
    assert_eq!(rig.drain(), Ok(()));
    let second = begin(&rig, &[2; 6000], libc::O_TRUNC);
    close(&rig, &second);
    rig.store().release(&second);
    rig.store().rename(ROOT, b"f", ROOT, b"g", 0, &Rig::caller()).unwrap();
    assert_eq!(rig.read(rig.find("g").unwrap(), 6000), Ok(vec![2; 6000]));
    assert_eq!(rig.find("f"), Err(Errno::ENOENT));
    rig.store().release(&again);
    rig.stop();
}

/// A duplicate of a descriptor that was closed keeps the old version open: what is renamed is the newer one all the same.
#[test]
fn a_rename_moves_what_was_closed_last() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let first = begin(&rig, &[1; 5000], libc::O_TRUNC);
    close(&rig, &first);
    let second = begin(&rig, &[2; 6000], libc::O_TRUNC);
    close(&rig, &second);
    rig.store().release(&second);
    assert_eq!(rig.find("f"), Ok(second.ino));
    rig.store().rename(ROOT, b"f", ROOT, b"g", 0, &Rig::caller()).unwrap();
    rig.store().release(&first);
    assert_eq!(rig.read(rig.find("g").unwrap(), 6000), Ok(vec![2; 6000]));
    assert_eq!(rig.find("f"), Err(Errno::ENOENT));
    rig.stop();
}
