//! What the kernel asks for by the number of a version whose name has gone on meanwhile (rule R3b), step by step.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use nix::errno::Errno;

use super::tests::Rig;
use super::*;
use crate::store::attr::Change;
use crate::store::node::ROOT_INO;
use crate::store::{Answer, Attr, Caller, Handle, Opened};

const SIZE: usize = 300_000;

/// A client of its own. There are no such threads: whoever asks for their process finds none.
fn client(tid: u32, uid: u32) -> Caller {
    Caller { tid: 1 << 30 | tid, uid, gid: uid }
}

fn find(rig: &Rig, name: &str, caller: &Caller) -> Result<u64, Errno> {
    match rig.store().lookup(ROOT_INO, name.as_bytes(), caller) {
        Answer::Now(found) => found.map(|entry| entry.attr.ino),
        Answer::Wait => panic!("nothing is being released"),
    }
}

/// As the kernel does: what is stale is looked up again, once.
fn open(rig: &Rig, name: &str, flags: i32, caller: &Caller) -> Result<Handle, Errno> {
    let store = rig.store();
    let opened = match store.open(find(rig, name, caller)?, flags, caller) {
        Err(Errno::ESTALE) => store.open(find(rig, name, caller)?, flags, caller),
        first => first,
    };
    opened.map(|opened| opened.handle)
}

fn create(rig: &Rig, name: &str, flags: i32, caller: &Caller) -> Result<Handle, Errno> {
    let made = rig.store().create(ROOT_INO, name.as_bytes(), 0o644, flags | libc::O_CREAT, caller);
    made.map(|(entry, Opened { handle, .. })| {
        assert_eq!(entry.attr.ino, handle.ino);
        handle
    })
}

fn truncate(rig: &Rig, ino: u64, size: u64, caller: &Caller) -> Result<Attr, Errno> {
    truncate_and(rig, ino, size, Change::default(), caller)
}

fn truncate_and(rig: &Rig, ino: u64, size: u64, more: Change, caller: &Caller) -> Result<Attr, Errno> {
    let (tell, told) = channel();
    rig.store().truncate(ino, false, size, more, caller, Box::new(move |result| tell.send(result).unwrap()));
    told.recv().unwrap()
}

fn read(rig: &Rig, handle: &Handle) -> Vec<u8> {
    let (tell, told) = channel();
    let reply = Box::new(move |result: Result<&[u8], Errno>| tell.send(result.map(<[u8]>::to_vec)).unwrap());
    rig.store().read(handle, 0, 2 * SIZE, reply);
    told.recv().unwrap().unwrap()
}

fn size(rig: &Rig, ino: u64) -> u64 {
    rig.store().getattr(ino).unwrap().size
}

#[test]
fn a_truncation_by_an_old_number_finds_the_version_that_the_writer_has() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let (writer, other) = (client(1, 0), client(2, 0));
    rig.write("f", &[7; SIZE]);
    let old = find(&rig, "f", &other).unwrap();
    let handle = open(&rig, "f", libc::O_RDWR | libc::O_APPEND, &writer).unwrap();
    assert_ne!(handle.ino, old, "the writer has a version of its own");

    // What the old number leads to are the bytes that the writer sees.
    assert_eq!(truncate(&rig, old, 1, &other).err(), Some(Errno::ESTALE));
    assert_eq!(read(&rig, &handle), [7; SIZE]);
    assert_eq!(rig.store().seek(&handle, 0, libc::SEEK_HOLE), Ok(SIZE as i64));

    assert_eq!(find(&rig, "f", &other), Ok(handle.ino));
    assert_eq!(truncate(&rig, handle.ino, 1, &other).map(|attr| attr.size), Ok(1));
    assert_eq!(size(&rig, handle.ino), 1);
    assert_eq!(rig.store().seek(&handle, 0, libc::SEEK_HOLE), Ok(1));
    assert_eq!(rig.store().seek(&handle, 0, libc::SEEK_DATA), Ok(0));
    assert_eq!(rig.store().seek(&handle, 1, libc::SEEK_HOLE), Err(Errno::ENXIO));
    assert_eq!(read(&rig, &handle), [7]);
    rig.store().release(&handle);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
}

/// The version that a truncation by path works on may be gone as soon as that is over.
#[test]
fn a_truncation_to_the_same_size_has_attributes_to_answer_with() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    rig.write("f", &[7; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let old = find(&rig, "f", &caller).unwrap();
    assert_eq!(truncate(&rig, old, SIZE as u64, &caller).err(), Some(Errno::ESTALE));
    let new = find(&rig, "f", &caller).unwrap();
    let attr = truncate(&rig, new, SIZE as u64, &caller).unwrap();
    assert_eq!((attr.ino, attr.size), (new, SIZE as u64));
    assert_eq!(find(&rig, "f", &caller), Ok(old), "nothing was written");
    rig.stop();
}

#[test]
fn a_create_that_finds_a_file_opens_it() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    rig.write("f", &[7; SIZE]);
    let old = find(&rig, "f", &caller).unwrap();

    let reader = create(&rig, "f", libc::O_RDONLY, &caller).unwrap();
    assert_eq!(reader.ino, old);
    let writer = create(&rig, "f", libc::O_RDWR, &caller).unwrap();
    assert_ne!(writer.ino, old);
    assert_eq!(find(&rig, "f", &caller), Ok(writer.ino));
    assert_eq!(read(&rig, &writer), [7; SIZE]);
    let joined = create(&rig, "f", libc::O_WRONLY, &client(2, 0)).unwrap();
    assert_eq!(joined.ino, writer.ino);
    let emptied = create(&rig, "f", libc::O_RDWR | libc::O_TRUNC, &client(3, 0)).unwrap();
    assert_eq!(size(&rig, emptied.ino), 0);
    assert_eq!(read(&rig, &reader), [7; SIZE]);
    assert_eq!(create(&rig, "f", libc::O_RDWR | libc::O_EXCL, &caller).err(), Some(Errno::EEXIST));

    for handle in [&reader, &writer, &joined, &emptied] {
        rig.store().release(handle);
    }
    assert_eq!(size(&rig, find(&rig, "f", &caller).unwrap()), 0, "the last one that was closed");
    rig.stop();
}

/// The kernel has checked nothing about a file that it did not know of.
#[test]
fn a_create_opens_only_what_the_kernel_would_let_its_caller_open() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let store = rig.store();
    let stranger = client(1, 1000);
    rig.write("f", &[7; SIZE]);
    let ino = find(&rig, "f", &stranger).unwrap();
    let chmod = |ino, mode| {
        let change = crate::store::attr::Change { mode: Some(mode), ..Default::default() };
        store.setattr(ino, change).unwrap();
    };
    let tried = |mode, flags| {
        chmod(ino, mode);
        let opened = create(&rig, "f", flags, &stranger);
        opened.map(|handle| store.release(&handle)).err()
    };
    for (mode, flags) in [
        (0o600, libc::O_RDONLY),
        (0o604, libc::O_RDONLY),
        (0o640, libc::O_RDONLY),
        (0o644, libc::O_WRONLY),
        (0o644, libc::O_RDONLY | libc::O_TRUNC),
        (0o622, libc::O_RDWR),
    ] {
        assert_eq!(tried(mode, flags), Some(Errno::ESTALE), "{mode:o} {flags:o}");
    }
    assert_eq!(tried(0o644, libc::O_RDONLY), None);
    chmod(ROOT_INO, 0o1777);
    assert_eq!(tried(0o644, libc::O_RDONLY), Some(Errno::ESTALE), "in a directory with the sticky bit");
    rig.store().setattr(ino, crate::store::attr::Change { uid: Some(2000), ..Default::default() }).unwrap();
    chmod(ino, 0o666);
    let root = client(2, 0);
    assert_eq!(create(&rig, "f", libc::O_RDWR, &root).err(), Some(Errno::ESTALE), "nor does root");
    chmod(ROOT_INO, 0o755);
    let handle = create(&rig, "f", libc::O_RDONLY, &root).unwrap();
    store.release(&handle);

    // Not even its owner, without leave.
    chmod(ino, 0o400);
    store.setattr(ino, crate::store::attr::Change { uid: Some(1000), ..Default::default() }).unwrap();
    assert_eq!(create(&rig, "f", libc::O_WRONLY, &stranger).err(), Some(Errno::ESTALE));
    rig.stop();
}

/// An open to truncate that was sent to look again and then came to nothing leaves nothing to the next open of its thread.
#[test]
fn what_was_made_for_one_open_is_not_opened_by_another() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    rig.write("f", &[7; SIZE]);
    let truncates = libc::O_WRONLY | libc::O_TRUNC;
    for flags in [libc::O_RDONLY, libc::O_RDWR] {
        let old = find(&rig, "f", &caller).unwrap();
        assert_eq!(rig.store().open(old, truncates, &caller).err(), Some(Errno::ESTALE));
        let handle = open(&rig, "f", flags, &caller).unwrap();
        assert_eq!(read(&rig, &handle), [7; SIZE]);
        rig.store().release(&handle);
    }
    // A rename or a create says that it is over, too.
    let old = find(&rig, "f", &caller).unwrap();
    assert_eq!(rig.store().open(old, truncates, &caller).err(), Some(Errno::ESTALE));
    rig.store().rename(ROOT_INO, b"f", ROOT_INO, b"g", 0, &caller).unwrap();
    assert_eq!(find(&rig, "g", &caller), Ok(old));

    // Kept for a reader, the file is no more to be changed than before.
    let old = find(&rig, "g", &caller).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    rig.store().unlink(ROOT_INO, b"g", &caller).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    assert_eq!(rig.store().open(old, libc::O_RDONLY, &caller).err(), Some(Errno::ESTALE));
    rig.write("g", &[7; SIZE]);
    let new = find(&rig, "g", &caller).unwrap();
    assert_eq!(truncate(&rig, new, 1, &caller).err(), Some(Errno::ESTALE));
    rig.stop();
}

/// The kernel asks for attributes before it opens: what a lookup found has some, also if it is gone by then.
#[test]
fn what_is_gone_has_the_attributes_that_it_had() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    rig.write("f", &[7; SIZE]);
    let ino = find(&rig, "f", &caller).unwrap();
    rig.store().unlink(ROOT_INO, b"f", &caller).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    let attr = rig.store().getattr(ino).unwrap();
    assert_eq!((attr.ino, attr.size, attr.nlink, attr.ttl), (ino, SIZE as u64, 0, Duration::ZERO));
    assert_eq!(rig.store().open(ino, libc::O_RDONLY, &caller).err(), Some(Errno::ESTALE));
    assert_eq!(find(&rig, "f", &caller), Err(Errno::ENOENT));
    rig.stop();
}

/// A file without a name may be written to until it is closed: it does not go back to what it was before.
#[test]
fn what_is_gone_has_the_attributes_that_it_had_in_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    let handle = create(&rig, "f", libc::O_RDWR, &caller).unwrap();
    rig.store().unlink(ROOT_INO, b"f", &caller).unwrap();
    let (tell, told) = channel();
    rig.store().write(&handle, 0, &[7; SIZE], Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(SIZE as u32));
    let mode = Change { mode: Some(0o600), ..Change::default() };
    rig.store().setattr(handle.ino, mode).unwrap();
    let last = rig.store().getattr(handle.ino).unwrap();
    rig.store().release(&handle);
    assert_eq!(rig.store().snapshot().files, 0);
    let after = rig.store().getattr(handle.ino).unwrap();
    assert_eq!((after.size, after.mode, after.mtime), (SIZE as u64, 0o600, last.mtime));
    rig.stop();
}

/// Of what was replaced by something that has vanished, nothing is said either: the kernel may believe in the name still.
#[test]
fn what_vanished_with_its_successor_has_no_attributes() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    rig.write("f", &[7; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let first = find(&rig, "f", &caller).unwrap();
    rig.faults.fail_next(crate::l2::Direction::Write, 1, libc::EIO);
    let handle = open(&rig, "f", libc::O_WRONLY | libc::O_TRUNC, &caller).unwrap();
    let (tell, told) = channel();
    rig.store().write(&handle, 0, &[8; SIZE], Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(SIZE as u32));
    rig.store().release(&handle);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    assert_eq!(rig.drain(), Ok(()));
    assert_eq!(find(&rig, "f", &caller), Err(Errno::ENOENT));
    assert_eq!(rig.store().getattr(first).err(), Some(Errno::ESTALE));
    rig.stop();
}

/// The version that a truncation by path was made for may be over with it, as where it kept its size; what else was to
/// change does not get lost.
#[test]
fn what_changes_with_a_truncation_stays_changed() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let caller = client(1, 0);
    rig.write("f", &[7; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let reader = open(&rig, "f", libc::O_RDONLY, &caller).unwrap();
    for (size, mode) in [(SIZE as u64, 0o600), (100, 0o640)] {
        let more = Change { mode: Some(mode), ..Change::default() };
        let mut cut = truncate_and(&rig, find(&rig, "f", &caller).unwrap(), size, more, &caller);
        if cut.err() == Some(Errno::ESTALE) {
            cut = truncate_and(&rig, find(&rig, "f", &caller).unwrap(), size, more, &caller);
        }
        assert_eq!(cut.map(|attr| (attr.size, attr.mode)), Ok((size, mode as u16)));
        let attr = rig.store().getattr(find(&rig, "f", &caller).unwrap()).unwrap();
        assert_eq!((attr.size, attr.mode), (size, mode as u16));
    }
    rig.store().release(&reader);
    rig.stop();
}

/// A private version that its process found before it closed it, and that was discarded then.
#[test]
fn what_was_discarded_has_the_attributes_that_it_had() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let (caller, other) = (Rig::caller(), client(2, 0));
    let mine = create(&rig, "f", libc::O_WRONLY | libc::O_TRUNC, &caller).unwrap();
    assert_eq!(find(&rig, "f", &caller), Ok(mine.ino));
    rig.store().flush(&mine, &caller);
    let theirs = create(&rig, "f", libc::O_WRONLY | libc::O_TRUNC, &other).unwrap();
    assert_eq!(rig.fsync(&theirs), Ok(()));
    rig.store().unlink(ROOT_INO, b"f", &other).unwrap();
    rig.store().release(&mine);
    assert_eq!(rig.store().getattr(mine.ino).map(|attr| attr.nlink), Ok(0));
    rig.store().release(&theirs);
    rig.stop();
}
