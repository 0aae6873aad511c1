//! Leases against what happens at the same time: promotions, eviction, stores, failures, the end of their time.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::sync::mpsc::{Receiver, TryRecvError};

use nix::errno::Errno;
use zerocopy::FromBytes;

use super::tests::Rig;
use super::*;
use crate::abi::{self, Request};
use crate::l2::{Class, Direction};
use crate::store::Handle;
use crate::store::control::SessionId;
use crate::store::hot::BLOCK;
use crate::store::node::ROOT_INO;

const SIZE: usize = 4 * BLOCK as usize;

/// A control file that has said HELLO.
pub(super) struct Session<'r>(pub &'r Rig, pub SessionId);

impl<'r> Session<'r> {
    pub fn new(rig: &'r Rig) -> Self {
        let session = Self(rig, rig.store().open_session(&Rig::caller()));
        session.ask(Request::Hello(abi::Hello { header: header(0), ..abi::Hello::default() })).unwrap();
        session
    }

    pub fn ask(&self, request: Request) -> Result<Vec<u8>, Errno> {
        let (tell, told) = channel();
        self.0.store().control(self.1, request, Box::new(move |said| tell.send(said).unwrap()));
        told.recv().unwrap()
    }

    pub fn classify(
        &self,
        flags: u16,
        ttl_ms: u32,
        ranges: &[abi::Range],
    ) -> (abi::Classify, Vec<abi::RangeState>) {
        let header = abi::Header { flags, ..header(ranges.len()) };
        let head = abi::Classify { header, ttl_ms, ..abi::Classify::default() };
        let bytes = self.ask(Request::Classify(head, ranges.to_vec())).unwrap();
        let (head, mut rest) = abi::Classify::read_from_prefix(&bytes).unwrap();
        let mut states = Vec::new();
        while let Ok((state, more)) = abi::RangeState::read_from_prefix(rest) {
            states.push(state);
            rest = more;
        }
        (head, states)
    }

    /// A lease, or why there is none.
    pub fn acquire(&self, ttl_ms: u32, ranges: &[abi::Range]) -> Result<u64, Errno> {
        let (head, _) = self.classify(abi::CLASSIFY_LEASE, ttl_ms, ranges);
        if head.lease == 0 { Err(Errno::from_raw(head.lease_errno)) } else { Ok(head.lease) }
    }

    pub fn release(&self, lease: u64) -> u32 {
        let head = abi::Lease { header: header(0), lease, ..abi::Lease::default() };
        let bytes = self.ask(Request::Release(head, Vec::new())).unwrap();
        abi::Lease::read_from_prefix(&bytes).unwrap().0.state
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.0.store().close_session(self.1);
    }
}

pub(super) fn header(count: usize) -> abi::Header {
    abi::Header { version: abi::VERSION, flags: 0, count: count as u32 }
}

/// Blocks of a file, by its number.
pub(super) fn blocks(node: u64, first: u64, count: u64) -> abi::Range {
    let (offset, length) = (first * BLOCK, count * BLOCK);
    abi::Range { id: node, offset, length, kind: abi::KIND_NODE, ..abi::Range::default() }
}

pub(super) fn whole(node: u64) -> abi::Range {
    blocks(node, 0, 0)
}

/// Opens a file as the kernel does: by name, and once more if it is sent to look again.
pub(super) fn open(rig: &Rig, name: &str, flags: i32) -> Handle {
    for _ in 0..3 {
        match rig.store().open(rig.find(name).unwrap(), flags, &Rig::caller()) {
            Ok(opened) => return opened.handle,
            Err(errno) => assert_eq!(errno, Errno::ESTALE),
        }
    }
    panic!("{name} stays stale");
}

pub(super) fn write(rig: &Rig, handle: &Handle, at: u64, bytes: &[u8]) -> Receiver<Result<u32, Errno>> {
    let (tell, told) = channel();
    rig.store().write(handle, at, bytes, Box::new(move |result| tell.send(result).unwrap()));
    told
}

pub(super) fn read(rig: &Rig, handle: &Handle, at: u64, len: usize) -> Receiver<Result<Vec<u8>, Errno>> {
    let (tell, told) = channel();
    let reply = Box::new(move |result: Result<&[u8], Errno>| tell.send(result.map(<[u8]>::to_vec)).unwrap());
    rig.store().read(handle, at, len, reply);
    told
}

/// A file in shared use of `SIZE` bytes, which is stored and not in L1.
pub(super) fn cold_slots(dir: &std::path::Path, name: &str) -> Rig {
    let rig = Rig::start(dir);
    let flags = libc::O_WRONLY | libc::O_CREAT;
    let (_, opened) = rig.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, &Rig::caller()).unwrap();
    assert_eq!(write(&rig, &opened.handle, 0, &[1; SIZE]).recv().unwrap(), Ok(SIZE as u32));
    rig.store().release(&opened.handle);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
    Rig::start(dir)
}

pub(super) fn is_quiet(rig: &Rig) -> bool {
    let at = rig.store().snapshot();
    at.counters.promoting == 0 && at.devices.iter().all(|(_, _, device)| device.outstanding() == 0)
}

#[track_caller]
fn assert_nothing_left(rig: &Rig) {
    let at = rig.store().snapshot();
    assert_eq!((at.leases, at.leased_bytes, at.waiting_for_leases), (0, 0, 0));
}

#[test]
fn what_is_on_its_way_is_not_in_l1_yet() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();

    let rig = Rig::start(dir.path());
    let session = Session::new(&rig);
    rig.faults.hold(Class::Demand);
    rig.faults.hold(Class::Promotion);
    let handle = open(&rig, "f", libc::O_RDONLY);
    let told = read(&rig, &handle, 0, 10);
    rig.wait(|| rig.faults.held(Class::Demand) > 0);
    let window = [whole(handle.id.0)];
    // Its memory is there already.
    let (head, states) = session.classify(0, 0, &window);
    assert_eq!((head.tier, head.blocks_l1), (abi::TIER_L2, 0));
    assert_eq!(states[0].flags & abi::STATE_LOADING, abi::STATE_LOADING);
    assert_eq!(session.acquire(0, &window), Err(Errno::EAGAIN));
    rig.faults.release(Class::Demand);
    assert_eq!(told.recv().unwrap(), Ok(vec![1; 10]));
    // What was asked for is there, the rest is not.
    let (head, _) = session.classify(0, 0, &window);
    assert_eq!(head.tier, abi::TIER_MIXED);
    assert_eq!(session.acquire(0, &window), Err(Errno::EAGAIN));
    assert!(session.acquire(0, &[blocks(handle.id.0, 0, 1)]).is_ok());
    rig.faults.release(Class::Promotion);
    rig.wait(|| is_quiet(&rig));
    let lease = session.acquire(0, &window).unwrap();
    assert_eq!(session.release(lease), abi::LEASE_GONE);
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// A promotion that fails gives nobody a lease, and takes the file's name.
#[test]
fn what_could_not_be_promoted_is_not_leased() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();

    let rig = Rig::start(dir.path());
    let session = Session::new(&rig);
    let handle = open(&rig, "f", libc::O_RDONLY);
    rig.faults.fail_next(Direction::Read, 1, libc::EIO);
    assert_eq!(read(&rig, &handle, 0, SIZE).recv().unwrap(), Err(Errno::EIO));
    rig.wait(|| is_quiet(&rig));
    let window = [whole(handle.id.0)];
    let (head, states) = session.classify(0, 0, &window);
    assert_eq!((head.tier, states[0].status), (abi::TIER_ABSENT, -libc::EIO));
    assert_eq!(session.acquire(0, &window), Err(Errno::EIO));
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn nothing_that_is_leased_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    for name in ["leased", "other"] {
        rig.write(name, &[1; SIZE]);
    }
    assert_eq!(rig.drain(), Ok(()));
    let session = Session::new(&rig);
    let node = rig.find("leased").unwrap();
    let lease = session.acquire(0, &[blocks(node, 1, 1)]).unwrap();
    // Whatever L1 may drop, and whoever may leave the store.
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    let tier = |name: &str| session.classify(0, 0, &[whole(rig.find(name).unwrap())]).0.tier;
    assert_eq!((tier("leased"), tier("other")), (abi::TIER_L1, abi::TIER_L2));
    rig.store().with(|core| while core.evict_file() {});
    assert_eq!(rig.find("other"), Err(Errno::ENOENT));
    assert_eq!(tier("leased"), abi::TIER_L1);
    // Then it is a file like any other: first its memory goes, then its name.
    session.release(lease);
    assert!(rig.store().with(|core| core.drop_some(crate::store::node::NONE)));
    assert_eq!(tier("leased"), abi::TIER_L2);
    assert!(rig.store().with(|core| core.evict_file()));
    assert_eq!(rig.find("leased"), Err(Errno::ENOENT));
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn a_lease_is_not_granted_while_somebody_writes() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDWR);
    assert_eq!(read(&rig, &handle, 0, SIZE).recv().unwrap(), Ok(vec![1; SIZE]));
    rig.wait(|| is_quiet(&rig));
    let window = [blocks(handle.id.0, 0, 2)];
    // As while a client's bytes are copied, without the lock.
    rig.store().with(|core| core.hot_mut(handle.id.idx()).writing = true);
    let (head, _) = session.classify(abi::CLASSIFY_LEASE, 0, &window);
    assert_eq!((head.tier, head.lease, head.lease_errno), (abi::TIER_L1, 0, libc::EAGAIN));
    rig.store().with(|core| core.hot_mut(handle.id.idx()).writing = false);
    let lease = session.acquire(0, &window).unwrap();
    assert_eq!(rig.store().snapshot().counters.leases_denied_changing, 1);
    session.release(lease);
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// What has begun to make holes is not refused any more, so a lease has to wait for it, not it for the lease.
#[test]
fn holes_that_are_half_made_are_not_leased() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDWR);
    assert_eq!(write(&rig, &handle, 3 * BLOCK, &[2; BLOCK as usize]).recv().unwrap(), Ok(BLOCK as u32));
    let window = [blocks(handle.id.0, 3, 1)];
    // As between two of its passes.
    let zeroing = |count| rig.store().with(|core| core.hot_mut(handle.id.idx()).zeroing = count);
    zeroing(1);
    assert_eq!(session.acquire(0, &window), Err(Errno::EAGAIN));
    zeroing(0);
    let (tell, told) = channel();
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    rig.store().fallocate(&handle, 0, 2 * BLOCK, hole, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(()));
    assert_eq!(rig.store().with(|core| core.hot_mut(handle.id.idx()).zeroing), 0);
    let lease = session.acquire(0, &[blocks(handle.id.0, 0, 2), window[0]]).unwrap();
    assert_eq!(read(&rig, &handle, 0, 10).recv().unwrap(), Ok(vec![0; 10]));
    // What is a hole is leased like anything else, and costs nothing.
    let told = write(&rig, &handle, BLOCK, &[9; 10]);
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty));
    session.release(lease);
    assert_eq!(told.recv().unwrap(), Ok(10));
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// R12: the time to live is a backstop. Whoever reads from a lease right now has not forgotten it.
#[test]
fn time_does_not_end_a_lease_that_is_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDONLY);
    assert_eq!(read(&rig, &handle, 0, 10).recv().unwrap(), Ok(vec![1; 10]));
    rig.wait(|| is_quiet(&rig));
    rig.faults.hold(Class::Demand);
    let told = read(&rig, &handle, 0, 2 * BLOCK as usize);
    rig.wait(|| rig.faults.held(Class::Demand) > 0);
    let lease = session.acquire(1, &[blocks(handle.id.0, 0, 1)]).unwrap();
    let later = Instant::now() + Duration::from_secs(3600);
    for _ in 0..3 {
        rig.store().with(|core| core.end_leases(later));
        assert_eq!(rig.store().snapshot().leases, 1, "ended under a read");
    }
    rig.faults.release(Class::Demand);
    assert_eq!(told.recv().unwrap(), Ok(vec![1; 2 * BLOCK as usize]));
    rig.wait(|| is_quiet(&rig));
    // It may be found in use once more: the reader is answered before it lets go.
    let seconds = std::cell::Cell::new(1);
    rig.wait(|| {
        rig.store().with(|core| core.end_leases(later + Duration::from_secs(seconds.get())));
        seconds.set(seconds.get() + 1);
        rig.store().snapshot().leases == 0
    });
    assert_eq!(session.release(lease), abi::LEASE_GONE | abi::LEASE_EXPIRED);
    assert_eq!(rig.store().snapshot().counters.leases_expired, 1);
    assert!(rig.said(&format!("lease {lease} of process {} (", std::process::id())));
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// A file that could not be stored loses its name; who leased it still reads it, and its memory comes back afterwards.
#[test]
fn a_leased_file_that_cannot_be_stored_stays_until_it_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let session = Session::new(&rig);
    rig.faults.hold(Class::WriteBack);
    rig.write("f", &[1; SIZE]);
    let handle = open(&rig, "f", libc::O_RDONLY);
    let lease = session.acquire(0, &[whole(handle.id.0)]).unwrap();
    rig.faults.fail_next(Direction::Write, 10, libc::EIO);
    rig.faults.release(Class::WriteBack);
    rig.wait(|| rig.find("f") == Err(Errno::ENOENT));
    rig.faults.fail_next(Direction::Write, 0, 0);
    assert_eq!(read(&rig, &handle, 0, SIZE).recv().unwrap(), Ok(vec![1; SIZE]));
    rig.store().release(&handle);
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    assert!(rig.store().with(|core| core.by_id(handle.id).is_some()), "the lease keeps it");
    assert_eq!(session.release(lease), abi::LEASE_GONE);
    rig.wait(|| rig.store().with(|core| core.by_id(handle.id).is_none()));
    drop(session);
    assert_nothing_left(&rig);
    assert_eq!(rig.store().snapshot().used_bytes, 0);
    rig.stop();
}

/// A copy-on-write version that nobody has written to shows another's bytes: both stay as they are, and both go.
#[test]
fn a_version_that_shows_another_is_leased_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("f", &[1; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    let session = Session::new(&rig);
    let reader = open(&rig, "f", libc::O_RDONLY);
    let writer = open(&rig, "f", libc::O_RDWR);
    assert_ne!(reader.id, writer.id, "a version of its own");
    let lease = session.acquire(0, &[blocks(writer.id.0, 0, 1)]).unwrap();
    assert_eq!(rig.store().snapshot().leased_bytes, SIZE as u64, "its memory is the other's");
    let told = write(&rig, &writer, 5, &[2; 10]);
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty), "written to what is leased");
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    assert_eq!(read(&rig, &reader, 0, SIZE).recv().unwrap(), Ok(vec![1; SIZE]));
    // Beside the lease it is written to, and has bytes of its own from then on.
    assert_eq!(write(&rig, &writer, 2 * BLOCK, &[3; 10]).recv().unwrap(), Ok(10));
    assert_eq!(read(&rig, &writer, 0, 10).recv().unwrap(), Ok(vec![1; 10]));
    session.release(lease);
    assert_eq!(told.recv().unwrap(), Ok(10));
    assert_eq!(read(&rig, &writer, 0, 10).recv().unwrap(), Ok([[1; 5], [2; 5]].concat()));
    assert_eq!(read(&rig, &reader, 0, SIZE).recv().unwrap(), Ok(vec![1; SIZE]));
    for handle in [&reader, &writer] {
        assert_eq!(rig.store().with(|core| core.hot(handle.id.idx()).map_or(0, |hot| hot.leases)), 0);
        rig.store().release(handle);
    }
    assert_eq!(rig.drain(), Ok(()));
    rig.wait(|| rig.store().with(|core| core.by_id(reader.id).is_none()));
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// Whoever waits for a lease does not stand before those who wait for room.
#[test]
fn who_waits_for_a_lease_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDWR);
    assert_eq!(read(&rig, &handle, 0, SIZE).recv().unwrap(), Ok(vec![1; SIZE]));
    rig.wait(|| is_quiet(&rig));
    let lease = session.acquire(0, &[whole(handle.id.0)]).unwrap();
    let told = write(&rig, &handle, 0, &[2; 10]);
    rig.wait(|| rig.store().snapshot().waiting_for_leases == 1);
    // More than may be dirty at a time: each of these waits for room, behind the one that waits for the lease.
    let many: Vec<_> = (0..10).map(|at| rig.create(&format!("f{at}"), &[3; 4 << 20])).collect();
    many.iter().for_each(|handle| rig.store().release(handle));
    assert_eq!(rig.drain(), Ok(()));
    assert_eq!(told.try_recv(), Err(TryRecvError::Empty));
    rig.wait(|| rig.store().snapshot().waiting_for_leases == 1);
    // It goes on when it may, though another lease is taken beside it.
    let beside = session.acquire(0, &[blocks(handle.id.0, 3, 1)]).unwrap();
    session.release(lease);
    assert_eq!(told.recv().unwrap(), Ok(10));
    session.release(beside);
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}
