//! Hints against what happens at the same time: other hints, stores, failures, deadlines, leases, full memory (rule R13).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::path::Path;

use nix::errno::Errno;
use zerocopy::FromBytes;

use super::lease_tests::{Session, blocks, cold_slots, header, is_quiet, open, read, whole, write};
use super::tests::Rig;
use super::*;
use crate::abi::{self, Request, TicketState};
use crate::l2::{Class, Direction};
use crate::store::hot::BLOCK;
use crate::store::node::ROOT_INO;

const SIZE: usize = 4 * BLOCK as usize;
const MIB: u64 = 1 << 20;

/// What a hint asks for beside its ranges.
#[derive(Clone, Copy, Default)]
pub(super) struct Wish {
    pub flags: u16,
    pub priority: u8,
    pub deadline_ms: u32,
}

const LEASED: Wish = Wish { flags: abi::PREFETCH_LEASE, priority: 0, deadline_ms: 0 };
const PLAIN: Wish = Wish { flags: 0, priority: 0, deadline_ms: 0 };

impl Session<'_> {
    pub fn prefetch(&self, wish: Wish, ranges: &[abi::Range]) -> abi::Prefetch {
        let header = abi::Header { flags: wish.flags, ..header(ranges.len()) };
        let (priority, deadline_ms) = (wish.priority, wish.deadline_ms);
        let head = abi::Prefetch { header, priority, deadline_ms, ..abi::Prefetch::default() };
        let bytes = self.ask(Request::Prefetch(head, ranges.to_vec())).unwrap();
        abi::Prefetch::read_from_prefix(&bytes).unwrap().0
    }

    /// One that must not end at once.
    #[track_caller]
    fn begin(&self, wish: Wish, ranges: &[abi::Range]) -> u64 {
        let head = self.prefetch(wish, ranges);
        assert_ne!(head.ticket, 0, "{head:?}");
        head.ticket
    }

    fn denied(&self, wish: Wish, ranges: &[abi::Range]) -> Errno {
        let head = self.prefetch(wish, ranges);
        assert_eq!((head.state, head.ticket), (abi::TICKET_DENIED, 0), "{head:?}");
        Errno::from_raw(head.status)
    }

    pub fn ticket(&self, ticket: u64) -> Result<abi::Ticket, Errno> {
        self.ask(Request::Ticket(asked(ticket))).map(|bytes| abi::Ticket::read_from_prefix(&bytes).unwrap().0)
    }

    pub fn cancel(&self, ticket: u64) -> Result<abi::Ticket, Errno> {
        self.ask(Request::Cancel(asked(ticket))).map(|bytes| abi::Ticket::read_from_prefix(&bytes).unwrap().0)
    }

    pub fn ended(&self) -> Vec<TicketState> {
        match self.0.store().read_ends(self.1, 1 << 20).unwrap() {
            Ok(bytes) => bytes
                .chunks(size_of::<TicketState>())
                .map(|end| TicketState::read_from_bytes(end).unwrap())
                .collect(),
            Err(errno) => {
                assert_eq!(errno, Errno::EAGAIN);
                Vec::new()
            }
        }
    }

    /// The ends of so many tickets, in order.
    fn wait_for(&self, count: usize) -> Vec<TicketState> {
        let all = std::cell::RefCell::new(Vec::new());
        self.0.wait(|| {
            all.borrow_mut().extend(self.ended());
            all.borrow().len() >= count
        });
        all.into_inner()
    }

    fn end(&self) -> TicketState {
        self.wait_for(1)[0]
    }
}

fn asked(ticket: u64) -> abi::Ticket {
    let state = TicketState { ticket, ..TicketState::default() };
    abi::Ticket { header: header(0), state, ..abi::Ticket::default() }
}

#[track_caller]
fn assert_end(end: &TicketState, ticket: u64, state: u8, status: i32) {
    assert_eq!((end.ticket, end.state, end.status), (ticket, state, status), "{end:?}");
}

/// A store with these files, of so many bytes each, none of which is in L1.
fn cold_with(dir: &Path, options: &str, names: &[&str], size: usize) -> Rig {
    let options = format!("l1=64MiB,l2={}:160MiB,{options}", dir.join("store").display());
    let rig = Rig::with(&options);
    for name in names {
        rig.write(name, &vec![1; size]);
    }
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
    Rig::with(&options)
}

fn cold(dir: &Path, names: &[&str]) -> Rig {
    cold_with(dir, "prefetch_window=2", names, SIZE)
}

fn file(rig: &Rig, name: &str) -> abi::Range {
    whole(rig.find(name).unwrap())
}

#[track_caller]
fn assert_nothing_left(rig: &Rig) {
    rig.wait(|| is_quiet(rig));
    let at = rig.store().snapshot();
    assert_eq!((at.hints_running, at.hints_queued, at.lease_aside_bytes, at.leases), (0, 0, 0, 0));
    rig.store().with(|core| {
        for idx in 0..core.tree.nodes.end() {
            let hot = core.tree.nodes.get(idx).and_then(|node| node.hot.as_ref());
            assert!(hot.is_none_or(|hot| hot.hints == 0 && hot.hinted.is_empty()), "still held");
        }
    });
    // A reader is answered before it lets go; what is kept for ever is a test that hangs.
    rig.wait(|| {
        rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
        let pool = rig.store().snapshot().pool;
        (pool.used_slabs, pool.used_chunks) == (0, 0)
    });
}

/// Takes the name away from a file, and its record with it: what is left of it is kept by transfers alone.
fn unlink(rig: &Rig, name: &str) {
    let id = crate::store::node::NodeId(rig.find(name).unwrap());
    rig.store().unlink(ROOT_INO, name.as_bytes(), &Rig::caller()).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    rig.wait(|| has_no_record(rig, id));
}

fn has_no_record(rig: &Rig, id: crate::store::node::NodeId) -> bool {
    rig.store().with(|core| core.by_id(id).is_none_or(|idx| !core.node(idx).has(crate::store::node::DURABLE)))
}

#[test]
fn a_window_is_brought_and_its_end_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold(dir.path(), &["f", "g"]);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let window = [file(&rig, "f"), file(&rig, "g")];
    let head = session.prefetch(PLAIN, &window);
    assert_eq!((head.state, head.tier, head.ahead), (abi::TICKET_RUNNING, abi::TIER_L2, 0), "{head:?}");
    assert_eq!((head.bytes_to_read, head.failed), (2 * SIZE as u64, 0));
    assert!(session.ended().is_empty());
    assert_eq!(session.ticket(head.ticket).unwrap().state.state, abi::TICKET_RUNNING);
    assert_eq!(rig.faults.held(Class::Demand), 0, "it waits behind who reads");
    rig.faults.release(Class::Promotion);
    let end = session.end();
    assert_end(&end, head.ticket, abi::TICKET_DONE, 0);
    assert_eq!((end.bytes, end.lease, end.kind), (2 * SIZE as u64, 0, abi::TICKET_PREFETCH));
    assert!(session.ended().is_empty());
    assert_eq!(session.ticket(head.ticket).unwrap_err(), Errno::ENOENT);
    assert_eq!(session.cancel(head.ticket).unwrap_err(), Errno::ENOENT);
    // Now it takes no ticket.
    let head = session.prefetch(LEASED, &window);
    assert_eq!((head.state, head.ticket, head.tier), (abi::TICKET_DONE, 0, abi::TIER_L1));
    assert!(head.lease > 0 && head.ttl_ms == 60_000);
    session.release(head.lease);
    let counters = rig.store().snapshot().counters;
    assert_eq!((counters.hints, counters.hints_done, counters.hints_bypassed), (2, 1, 1));
    assert_eq!(counters.hint_bytes, 2 * SIZE as u64);
    drop(session);
    assert_nothing_left(&rig);
    assert_eq!(rig.store().snapshot().counters.hint_unread_bytes, 2 * SIZE as u64);
    rig.stop();
}

#[test]
fn what_is_on_its_way_is_not_read_twice() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold(dir.path(), &["f"]);
    let (one, other) = (Session::new(&rig), Session::new(&rig));
    rig.faults.hold(Class::Promotion);
    let window = [file(&rig, "f")];
    let first = one.begin(LEASED, &window);
    let before = rig.faults.held(Class::Promotion);
    assert!(before > 0);
    let head = other.prefetch(LEASED, &window);
    assert_eq!((head.state, head.bytes_to_read), (abi::TICKET_RUNNING, 0));
    // Nor does who reads it.
    let handle = open(&rig, "f", libc::O_RDONLY);
    let told = read(&rig, &handle, 0, 10);
    assert_eq!((rig.faults.held(Class::Promotion), rig.faults.held(Class::Demand)), (before, 0));
    rig.faults.release(Class::Promotion);
    assert_eq!(told.recv().unwrap(), Ok(vec![1; 10]));
    let (a, b) = (one.end(), other.end());
    assert_end(&a, first, abi::TICKET_DONE, 0);
    assert_end(&b, head.ticket, abi::TICKET_DONE, 0);
    assert_eq!((a.bytes, b.bytes), (SIZE as u64, 0));
    assert!(a.lease > 0 && b.lease > 0);
    let counters = rig.store().snapshot().counters;
    assert_eq!((counters.hints_joined, counters.read_l2_bytes), (1, SIZE as u64));
    rig.store().release(&handle);
    drop((one, other));
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn those_who_wait_begin_by_priority_then_deadline_then_arrival() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["f0", "f1", "f2", "f3", "f4", "f5"];
    let rig = cold_with(dir.path(), "prefetch_window=1,prefetch_queue=5", &names, SIZE);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let hint = |at: usize, priority: u8, deadline_ms: u32| {
        session.prefetch(Wish { flags: 0, priority, deadline_ms }, &[file(&rig, names[at])])
    };
    let first = hint(0, 0, 0);
    assert_eq!(first.state, abi::TICKET_RUNNING);
    let none = hint(1, 0, 0);
    let late = hint(2, 0, 7_200_000);
    let soon = hint(3, 0, 3_600_000);
    let high = hint(4, 9, 0);
    let last = hint(5, 0, 0);
    for (head, ahead) in [(none, 0), (late, 0), (soon, 0), (high, 0), (last, 4)] {
        assert_eq!((head.state, head.ahead), (abi::TICKET_QUEUED, ahead), "{head:?}");
    }
    assert_eq!(session.ticket(none.ticket).unwrap().ahead, 3);
    assert_eq!(hint(0, 255, 0).status, libc::EAGAIN, "no more may wait");
    assert_eq!(rig.store().snapshot().hints_queued, 5);
    // What is given up makes place.
    assert_eq!(session.cancel(late.ticket).unwrap().state.state, abi::TICKET_CANCELLED);
    rig.faults.release(Class::Promotion);
    let ends: Vec<u64> = session.wait_for(6).iter().map(|end| end.ticket).collect();
    let order = [late, first, high, soon, none, last].map(|head| head.ticket);
    assert_eq!(ends, order);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn a_window_that_is_off_answers_what_is_in_l1() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_with(dir.path(), "prefetch_window=0", &["f"], SIZE);
    let session = Session::new(&rig);
    assert_eq!(session.denied(LEASED, &[file(&rig, "f")]), Errno::EOPNOTSUPP);
    rig.write("warm", &[2; SIZE]);
    let head = session.prefetch(LEASED, &[file(&rig, "warm")]);
    assert_eq!((head.state, head.status), (abi::TICKET_DONE, 0));
    assert!(head.lease > 0);
    let ask = Wish { flags: abi::PREFETCH_ASK | abi::PREFETCH_LEASE, ..PLAIN };
    let head = session.prefetch(ask, &[file(&rig, "warm")]);
    assert_eq!((head.state, head.lease), (abi::TICKET_DONE, 0), "nothing is begun");
    assert_eq!(session.denied(ask, &[file(&rig, "f")]), Errno::EOPNOTSUPP);
    drop(session);
    assert_eq!(rig.drain(), Ok(()));
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn who_only_asks_begins_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold(dir.path(), &["f"]);
    let session = Session::new(&rig);
    let ask = Wish { flags: abi::PREFETCH_ASK, ..PLAIN };
    let head = session.prefetch(ask, &[file(&rig, "f")]);
    assert_eq!((head.state, head.ticket, head.status), (abi::TICKET_NONE, 0, 0));
    assert_eq!((head.bytes_to_read, head.estimate_ms), (SIZE as u64, 0), "nothing was ever read");
    assert!(is_quiet(&rig) && rig.store().snapshot().counters.hints == 0);
    session.begin(PLAIN, &[file(&rig, "f")]);
    session.end();
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    assert!(session.prefetch(ask, &[file(&rig, "f")]).estimate_ms > 0);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn what_is_cancelled_goes_on_to_the_end_of_its_read_and_no_further() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..6).map(|at| format!("f{at}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // Of 4 MiB each: not all of them are on their way at a time.
    let rig = cold_with(dir.path(), "prefetch_window=1", &names, 4 << 20);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let window: Vec<abi::Range> = names.iter().map(|name| file(&rig, name)).collect();
    let ticket = session.begin(LEASED, &window);
    let next = session.begin(PLAIN, &[file(&rig, "f5")]);
    assert!(rig.store().snapshot().lease_aside_bytes >= 24 * MIB);
    let at = session.cancel(ticket).unwrap();
    assert_end(&at.state, ticket, abi::TICKET_CANCELLED, libc::ECANCELED);
    assert_eq!(session.cancel(ticket).unwrap().state, at.state, "twice is no error");
    assert_eq!(rig.store().snapshot().lease_aside_bytes, 0);
    rig.faults.release(Class::Promotion);
    let ends = session.wait_for(2);
    assert_end(&ends[0], ticket, abi::TICKET_CANCELLED, libc::ECANCELED);
    assert_end(&ends[1], next, abi::TICKET_DONE, 0);
    rig.wait(|| is_quiet(&rig));
    let (head, _) = session.classify(0, 0, &window);
    assert_eq!(head.tier, abi::TIER_MIXED, "the rest was not begun");
    assert!(head.bytes_l1 >= 4 * MIB);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn who_closes_its_handle_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_with(dir.path(), "prefetch_window=1", &["f", "g"], SIZE);
    let other = Session::new(&rig);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    session.begin(LEASED, &[file(&rig, "f")]);
    session.begin(LEASED, &[file(&rig, "f"), file(&rig, "g")]);
    let ticket = other.begin(PLAIN, &[file(&rig, "g")]);
    assert_eq!(other.ticket(ticket).unwrap().state.state, abi::TICKET_QUEUED);
    drop(session);
    let at = rig.store().snapshot();
    assert_eq!((at.hints_running, at.hints_queued, at.lease_aside_bytes), (1, 0, 0));
    rig.faults.release(Class::Promotion);
    assert_end(&other.end(), ticket, abi::TICKET_DONE, 0);
    drop(other);
    assert_nothing_left(&rig);
    rig.stop();
}

/// Device errors and wrong checksums, with and without a lease.
#[test]
fn what_cannot_be_read_fails_its_hint_and_gives_its_memory_back() {
    for (lease, flip) in [(false, false), (false, true), (true, false), (true, true)] {
        let dir = tempfile::tempdir().unwrap();
        let rig = cold(dir.path(), &["f", "good"]);
        let session = Session::new(&rig);
        let wish = if lease { LEASED } else { PLAIN };
        rig.faults.hold(Class::Promotion);
        let ticket = session.begin(wish, &[file(&rig, "f")]);
        if flip {
            rig.faults.flip_next_reads(1);
        } else {
            rig.faults.fail_next(Direction::Read, 1, libc::EIO);
        }
        rig.faults.release(Class::Promotion);
        let end = session.end();
        assert_end(&end, ticket, abi::TICKET_FAILED, libc::EIO);
        assert_eq!((end.failed, end.lease), (1, 0));
        rig.wait(|| is_quiet(&rig));
        let counters = rig.store().snapshot().counters;
        assert_eq!((counters.hints_failed, counters.promotions_failed > 0), (1, true));
        drop(session);
        assert_eq!(rig.find("f"), Err(Errno::ENOENT));
        assert_nothing_left(&rig);
        rig.stop();
    }
}

#[test]
fn without_a_lease_the_others_are_brought() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold(dir.path(), &["gone", "good", "late"]);
    let session = Session::new(&rig);
    let (gone, good, late) = (file(&rig, "gone"), file(&rig, "good"), file(&rig, "late"));
    unlink(&rig, "gone");
    rig.faults.hold(Class::Promotion);
    assert_eq!(session.denied(LEASED, &[gone, good]), Errno::ESTALE);
    assert_eq!(session.denied(PLAIN, &[gone, gone]), Errno::ESTALE);
    let head = session.prefetch(PLAIN, &[gone, good, late]);
    assert_eq!((head.state, head.failed), (abi::TICKET_RUNNING, 1));
    // It goes while it is read.
    let leased = session.begin(LEASED, &[late]);
    unlink(&rig, "late");
    rig.faults.release(Class::Promotion);
    let mut ends = session.wait_for(2);
    ends.sort_by_key(|end| end.ticket);
    assert_end(&ends[0], head.ticket, abi::TICKET_DONE, 0);
    assert_eq!(ends[0].failed, 2);
    assert_end(&ends[1], leased, abi::TICKET_FAILED, libc::ESTALE);
    let (head, _) = session.classify(0, 0, &[good]);
    assert_eq!(head.tier, abi::TIER_L1);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// R9: what is written while a hint reads is what there is, and what is leased.
#[test]
fn a_store_to_what_is_being_read_wins() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDWR);
    // From here on it is written in place.
    assert_eq!(write(&rig, &handle, 3 * BLOCK, &[5; BLOCK as usize]).recv().unwrap(), Ok(BLOCK as u32));
    rig.faults.hold(Class::Promotion);
    let window = [blocks(handle.id.0, 0, 4)];
    let ticket = session.begin(LEASED, &window);
    rig.wait(|| rig.faults.held(Class::Promotion) > 0);
    let told = write(&rig, &handle, 0, &[2; BLOCK as usize]);
    rig.faults.release_some(Class::Promotion, 1);
    assert_eq!(told.recv().unwrap(), Ok(BLOCK as u32), "it does not wait for all of the hint");
    assert!(session.ended().is_empty());
    rig.faults.release(Class::Promotion);
    let end = session.end();
    assert_end(&end, ticket, abi::TICKET_DONE, 0);
    assert!(end.lease > 0);
    assert_eq!(read(&rig, &handle, 0, 10).recv().unwrap(), Ok(vec![2; 10]));
    assert_eq!(read(&rig, &handle, BLOCK, 10).recv().unwrap(), Ok(vec![1; 10]));
    // And from here on it stays so.
    let told = write(&rig, &handle, 0, &[3; 10]);
    assert!(told.try_recv().is_err());
    session.release(end.lease);
    assert_eq!(told.recv().unwrap(), Ok(10));
    rig.store().release(&handle);
    drop(session);
    assert_eq!(rig.drain(), Ok(()));
    assert_nothing_left(&rig);
    rig.stop();
}

/// Another version takes the name while the old one is read: the hint was for the old one.
#[test]
fn a_new_version_is_not_what_was_hinted() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold(dir.path(), &["f"]);
    let session = Session::new(&rig);
    let old = file(&rig, "f");
    rig.faults.hold(Class::Promotion);
    let ticket = session.begin(LEASED, &[old]);
    rig.write("new", &[2; SIZE]);
    rig.store().rename(ROOT_INO, b"new", ROOT_INO, b"f", 0, &Rig::caller()).unwrap();
    assert_eq!(rig.drain(), Ok(()));
    rig.wait(|| has_no_record(&rig, crate::store::node::NodeId(old.id)));
    rig.faults.release(Class::Promotion);
    assert_end(&session.end(), ticket, abi::TICKET_FAILED, libc::ESTALE);
    assert_eq!(rig.read(rig.find("f").unwrap(), SIZE), Ok(vec![2; SIZE]));
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn a_deadline_denies_who_waits_and_cancels_who_runs() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_with(dir.path(), "prefetch_window=1", &["f", "g"], SIZE);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let wish = Wish { deadline_ms: 3_600_000, ..LEASED };
    let running = session.begin(wish, &[file(&rig, "f")]);
    let queued = session.begin(wish, &[file(&rig, "g")]);
    rig.store().with(|core| core.advance_hints(Instant::now() + Duration::from_secs(3599)));
    assert!(session.ended().is_empty());
    rig.store().with(|core| core.advance_hints(Instant::now() + Duration::from_secs(3601)));
    let ends = session.wait_for(2);
    assert_end(&ends[0], running, abi::TICKET_CANCELLED, libc::ETIMEDOUT);
    assert_end(&ends[1], queued, abi::TICKET_DENIED, libc::ETIMEDOUT);
    // And by itself, without anybody who looks.
    let short = session.begin(Wish { deadline_ms: 1, ..PLAIN }, &[file(&rig, "g")]);
    assert_eq!(session.end().ticket, short);
    rig.faults.release(Class::Promotion);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// Their bytes are set aside when they begin, so the second waits for the first one's lease, and neither for ever.
#[test]
fn two_leased_windows_that_do_not_fit_together_come_one_after_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let options = "prefetch_window=2,lease_max=6MiB,lease_client_max=6MiB";
    let rig = cold_with(dir.path(), options, &["a", "b", "c", "plain"], 4 << 20);
    let session = Session::new(&rig);
    let (a, b, c) = (file(&rig, "a"), file(&rig, "b"), file(&rig, "c"));
    assert_eq!(session.denied(LEASED, &[a, b]), Errno::ENOSPC, "more than there may ever be");
    let first = session.begin(LEASED, &[a]);
    let head = session.prefetch(LEASED, &[b]);
    assert_eq!(head.state, abi::TICKET_QUEUED);
    // Who wants no lease does not wait for it.
    let plain = session.prefetch(PLAIN, &[file(&rig, "plain")]);
    assert_ne!(plain.ticket, 0);
    let mut ends = session.wait_for(2);
    ends.sort_by_key(|end| end.ticket);
    assert_end(&ends[0], first, abi::TICKET_DONE, 0);
    assert_end(&ends[1], plain.ticket, abi::TICKET_DONE, 0);
    assert_eq!(session.ticket(head.ticket).unwrap().state.state, abi::TICKET_QUEUED);
    session.release(ends[0].lease);
    let end = session.end();
    assert_end(&end, head.ticket, abi::TICKET_DONE, 0);
    // What is cancelled gives back what was set aside.
    session.release(end.lease);
    let third = session.begin(LEASED, &[c]);
    session.cancel(third).unwrap();
    assert_eq!(rig.store().snapshot().lease_aside_bytes, 0);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn a_client_waits_for_its_own_leases_and_keeps_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let options = "prefetch_window=2,lease_max=12MiB,lease_client_max=5MiB";
    let rig = cold_with(dir.path(), options, &["a", "b"], 4 << 20);
    let session = Session::new(&rig);
    let (a, b) = (file(&rig, "a"), file(&rig, "b"));
    assert_eq!(session.denied(LEASED, &[a, b]), Errno::EDQUOT);
    session.begin(LEASED, &[a]);
    let lease = session.end().lease;
    let waits = session.begin(LEASED, &[b]);
    assert_eq!(session.ticket(waits).unwrap().state.state, abi::TICKET_QUEUED);
    session.release(lease);
    assert_end(&session.end(), waits, abi::TICKET_DONE, 0);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// L1 is full of what may not leave: hints wait for memory, and whoever reads goes on beside them.
#[test]
fn hints_without_memory_wait_and_nobody_waits_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["k0", "k1", "k2", "k3", "a", "b", "r"];
    let options = "prefetch_window=2,prefetch_window_bytes=60MiB,lease_max=60MiB,lease_client_max=60MiB,chunk_reserve=2MiB";
    let rig = cold_with(dir.path(), options, &names, 12 << 20);
    let session = Session::new(&rig);
    let keep: Vec<abi::Range> = names[..4].iter().map(|name| file(&rig, name)).collect();
    session.begin(LEASED, &keep);
    let lease = session.end().lease;
    // 16 MiB are left: for one of them, and the others come after it.
    let (a, b) = (file(&rig, "a"), file(&rig, "b"));
    let one = session.begin(PLAIN, &[a, b]);
    let two = session.begin(PLAIN, &[b, a]);
    rig.wait(|| rig.store().snapshot().hints_running == 2 && is_quiet(&rig));
    assert!(session.ended().is_empty());
    let handle = open(&rig, "r", libc::O_RDONLY);
    assert_eq!(read(&rig, &handle, 0, 10).recv().unwrap(), Ok(vec![1; 10]));
    rig.store().release(&handle);
    session.release(lease);
    let mut ends = session.wait_for(2);
    ends.sort_by_key(|end| end.ticket);
    assert_end(&ends[0], one, abi::TICKET_DONE, 0);
    assert_end(&ends[1], two, abi::TICKET_DONE, 0);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// The same with nobody who gives anything back: there is an end to waiting.
#[test]
fn a_hint_that_never_gets_memory_fails() {
    let dir = tempfile::tempdir().unwrap();
    let options = "lease_max=60MiB,lease_client_max=60MiB,chunk_reserve=2MiB";
    let names = ["k0", "k1", "k2", "k3", "a", "b"];
    let rig = cold_with(dir.path(), options, &names, 12 << 20);
    let session = Session::new(&rig);
    let keep: Vec<abi::Range> = names[..4].iter().map(|name| file(&rig, name)).collect();
    session.begin(LEASED, &keep);
    session.end();
    let ticket = session.begin(PLAIN, &[file(&rig, "a"), file(&rig, "b")]);
    rig.wait(|| rig.store().snapshot().hints_running == 1 && is_quiet(&rig));
    assert!(session.ended().is_empty());
    rig.store().with(|core| core.advance_hints(Instant::now() + Duration::from_secs(3600)));
    assert_end(&session.end(), ticket, abi::TICKET_FAILED, libc::ENOSPC);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn what_does_not_fit_into_l1_is_denied() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c", "d", "e", "f"];
    let rig = cold_with(dir.path(), "prefetch_window=2", &names, 12 << 20);
    let session = Session::new(&rig);
    let window: Vec<abi::Range> = names.iter().map(|name| file(&rig, name)).collect();
    assert_eq!(session.denied(PLAIN, &window), Errno::ENOSPC);
    assert_eq!(session.denied(LEASED, &window), Errno::ENOSPC);
    assert_eq!(rig.store().snapshot().counters.hints_denied_room, 2);
    // More than the window: it runs alone.
    let large = session.begin(PLAIN, &window[..4]);
    let small = session.prefetch(PLAIN, &window[4..5]);
    assert_eq!(small.state, abi::TICKET_QUEUED);
    let ends: Vec<u64> = session.wait_for(2).iter().map(|end| end.ticket).collect();
    assert_eq!(ends, [large, small.ticket]);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn a_session_has_so_many_tickets_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_with(dir.path(), "prefetch_queue=8192", &["f"], SIZE);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let window = [file(&rig, "f")];
    let most = crate::store::control::TICKETS_MAX;
    for _ in 0..most {
        session.begin(PLAIN, &window);
    }
    assert_eq!(session.denied(PLAIN, &window), Errno::EMFILE);
    rig.faults.release(Class::Promotion);
    rig.wait(|| rig.store().snapshot().hints_queued == 0 && rig.store().snapshot().hints_running == 0);
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    assert_eq!(session.denied(PLAIN, &window), Errno::EMFILE, "they count until they are read");
    assert_eq!(session.ended().len(), most as usize);
    session.begin(PLAIN, &window);
    session.end();
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// Of a large file, no more than a part is on its way: who reads another part does not wait for it.
#[test]
fn a_reader_does_not_wait_behind_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..3).map(|at| format!("f{at}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let rig = cold_with(dir.path(), "prefetch_window=1", &names, 10 << 20);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let window: Vec<abi::Range> = names.iter().map(|name| file(&rig, name)).collect();
    let ticket = session.begin(PLAIN, &window);
    let handle = open(&rig, "f2", libc::O_RDONLY);
    assert_eq!(read(&rig, &handle, 0, 10).recv().unwrap(), Ok(vec![1; 10]));
    assert!(session.ended().is_empty());
    rig.faults.release(Class::Promotion);
    assert_end(&session.end(), ticket, abi::TICKET_DONE, 0);
    rig.store().release(&handle);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// A sealed file is written to when nothing of it is being read, and a hint that reads all of it makes a pause for that.
#[test]
fn a_writer_does_not_wait_behind_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_with(dir.path(), "prefetch_window=1", &["large"], 24 << 20);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let handle = open(&rig, "large", libc::O_RDWR);
    let ticket = session.begin(PLAIN, &[whole(handle.id.0)]);
    let told = write(&rig, &handle, 95 * BLOCK, &[2; BLOCK as usize]);
    assert!(told.try_recv().is_err());
    // What is held now, and not what the hint would begin then.
    rig.faults.release_some(Class::Promotion, rig.faults.held(Class::Promotion));
    assert_eq!(told.recv().unwrap(), Ok(BLOCK as u32));
    assert!(session.ended().is_empty());
    rig.faults.release(Class::Promotion);
    assert_end(&session.end(), ticket, abi::TICKET_DONE, 0);
    assert_eq!(read(&rig, &handle, 95 * BLOCK, 10).recv().unwrap(), Ok(vec![2; 10]));
    rig.store().release(&handle);
    drop(session);
    assert_eq!(rig.drain(), Ok(()));
    assert_nothing_left(&rig);
    rig.stop();
}

/// R7, R13: what hints hold is for readers and writers, if there is nothing else; the hint brings it again.
#[test]
fn hints_let_go_of_what_others_need() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["k0", "k1", "k2", "k3", "a", "b"];
    let options = "lease_max=60MiB,lease_client_max=60MiB,chunk_reserve=2MiB,prefetch_window=1";
    let rig = cold_with(dir.path(), options, &names, 12 << 20);
    let session = Session::new(&rig);
    let keep: Vec<abi::Range> = names[..4].iter().map(|name| file(&rig, name)).collect();
    session.begin(LEASED, &keep);
    let lease = session.end().lease;
    // It holds all that is left, and wants more.
    let ticket = session.begin(PLAIN, &[file(&rig, "a"), file(&rig, "b")]);
    rig.wait(|| rig.store().snapshot().hints_running == 1 && is_quiet(&rig));
    let held = rig.store().snapshot().pool;
    assert!(held.used_slabs + held.used_chunks > 58 << 20, "{held:?}");
    rig.write("written", &vec![3; 10 << 20]);
    assert_eq!(rig.drain(), Ok(()));
    assert_eq!(rig.read(rig.find("written").unwrap(), 10 << 20), Ok(vec![3; 10 << 20]));
    assert_eq!(rig.store().snapshot().counters.timeouts, 0);
    assert_eq!(rig.store().snapshot().leases, 1);
    session.release(lease);
    assert_end(&session.end(), ticket, abi::TICKET_DONE, 0);
    assert_eq!(session.classify(0, 0, &[file(&rig, "a"), file(&rig, "b")]).0.tier, abi::TIER_L1);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// What is written over while a lease is wanted is leased as it is then, whatever L1 had to give up meanwhile.
#[test]
fn what_was_written_over_is_leased_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    rig.write("other", &[7; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDWR);
    assert_eq!(write(&rig, &handle, 3 * BLOCK, &[5; BLOCK as usize]).recv().unwrap(), Ok(BLOCK as u32));
    rig.faults.hold(Class::Promotion);
    let window = [blocks(handle.id.0, 0, 2), file(&rig, "other")];
    let ticket = session.begin(LEASED, &window);
    rig.faults.release_some(Class::Promotion, 1);
    assert_eq!(write(&rig, &handle, 0, &[6; BLOCK as usize]).recv().unwrap(), Ok(BLOCK as u32));
    assert_eq!(rig.drain(), Ok(()));
    // Somebody needs all that L1 can give, and gets what the hint holds too.
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    rig.faults.release(Class::Promotion);
    let end = session.end();
    assert_end(&end, ticket, abi::TICKET_DONE, 0);
    assert_eq!(session.classify(0, 0, &window).0.tier, abi::TIER_L1);
    assert_eq!(read(&rig, &handle, 0, 10).recv().unwrap(), Ok(vec![6; 10]));
    rig.store().release(&handle);
    drop(session);
    assert_eq!(rig.drain(), Ok(()));
    assert_nothing_left(&rig);
    rig.stop();
}

#[test]
fn what_has_come_stays_while_the_rest_comes() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold(dir.path(), &["f", "g", "other"]);
    let session = Session::new(&rig);
    rig.faults.hold(Class::Promotion);
    let ticket = session.begin(PLAIN, &[file(&rig, "f"), file(&rig, "g")]);
    let tier = |name: &str| session.classify(0, 0, &[file(&rig, name)]).0.tier;
    rig.faults.release_some(Class::Promotion, 1);
    rig.wait(|| tier("f") == abi::TIER_L1);
    let ino = rig.find("other").unwrap();
    assert_eq!(rig.read(ino, SIZE), Ok(vec![1; SIZE]));
    // It was used later than the other, and leaves all the same. A reader is answered before it lets go.
    rig.wait(|| rig.store().with(|core| core.may_drop(crate::store::node::NodeId(ino).idx())));
    assert!(rig.store().with(|core| core.drop_some(crate::store::node::NONE)));
    assert_eq!((tier("f"), tier("other")), (abi::TIER_L1, abi::TIER_L2));
    rig.faults.release(Class::Promotion);
    assert_end(&session.end(), ticket, abi::TICKET_DONE, 0);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// One holds what the other lacks, and wants more itself: that which began first gets it, and then the other.
#[test]
fn two_hints_do_not_wait_for_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["k0", "k1", "a", "b", "c", "d", "e"];
    let options = "prefetch_window=2,prefetch_window_bytes=63MiB,chunk_reserve=2MiB";
    let rig = cold_with(dir.path(), options, &names, 12 << 20);
    let session = Session::new(&rig);
    let ranges: Vec<abi::Range> = names.iter().map(|name| file(&rig, name)).collect();
    session.begin(LEASED, &ranges[..2]);
    session.end();
    rig.faults.hold(Class::Promotion);
    let first = session.begin(PLAIN, &ranges[2..5]);
    let second = session.begin(PLAIN, &ranges[5..]);
    assert_eq!(rig.store().snapshot().hints_running, 2);
    rig.faults.release(Class::Promotion);
    // Nobody gives anything back meanwhile.
    let ends = session.wait_for(2);
    assert_end(&ends[0], first, abi::TICKET_DONE, 0);
    assert_end(&ends[1], second, abi::TICKET_DONE, 0);
    assert_eq!(rig.store().snapshot().leases, 1);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// Who waits for a lease to end takes a place in the queue, and not that of who wants none.
#[test]
fn a_full_queue_keeps_nobody_who_could_begin() {
    let dir = tempfile::tempdir().unwrap();
    let options = "prefetch_window=2,prefetch_queue=1,lease_max=5MiB,lease_client_max=5MiB";
    let rig = cold_with(dir.path(), options, &["a", "b", "c"], 4 << 20);
    let session = Session::new(&rig);
    let (a, b, c) = (file(&rig, "a"), file(&rig, "b"), file(&rig, "c"));
    session.begin(LEASED, &[a]);
    let lease = session.end().lease;
    rig.faults.hold(Class::Promotion);
    let waits = session.prefetch(LEASED, &[b]);
    assert_eq!(waits.state, abi::TICKET_QUEUED);
    assert_eq!(session.denied(LEASED, &[c]), Errno::EAGAIN);
    let plain = session.prefetch(PLAIN, &[c]);
    assert_eq!(plain.state, abi::TICKET_RUNNING);
    rig.faults.release(Class::Promotion);
    assert_end(&session.end(), plain.ticket, abi::TICKET_DONE, 0);
    session.release(lease);
    assert_end(&session.end(), waits.ticket, abi::TICKET_DONE, 0);
    drop(session);
    assert_nothing_left(&rig);
    rig.stop();
}

/// In a file that is written in place only a block is bad, and only the range that has it fails.
#[test]
fn a_bad_block_fails_the_range_that_it_is_in() {
    for wish in [PLAIN, LEASED] {
        let dir = tempfile::tempdir().unwrap();
        let rig = cold_slots(dir.path(), "s");
        let session = Session::new(&rig);
        let handle = open(&rig, "s", libc::O_RDWR);
        assert_eq!(write(&rig, &handle, 3 * BLOCK, &[5; BLOCK as usize]).recv().unwrap(), Ok(BLOCK as u32));
        rig.faults.hold(Class::Promotion);
        let window = [blocks(handle.id.0, 0, 1), blocks(handle.id.0, 1, 3)];
        let ticket = session.begin(wish, &window);
        rig.faults.flip_next_reads(1);
        rig.faults.release(Class::Promotion);
        let end = session.end();
        let (state, status) = match wish.flags {
            0 => (abi::TICKET_DONE, 0),
            _ => (abi::TICKET_FAILED, libc::EIO),
        };
        assert_end(&end, ticket, state, status);
        assert_eq!((end.failed, end.lease), (1, 0));
        rig.store().release(&handle);
        drop(session);
        let _ = rig.drain();
        assert_nothing_left(&rig);
        rig.stop();
    }
}

/// Whatever takes a block from L1 before all have come: it is read again, and then there is a lease.
#[test]
fn what_has_left_is_read_again_before_it_is_leased() {
    let dir = tempfile::tempdir().unwrap();
    let rig = cold_slots(dir.path(), "s");
    rig.write("other", &[7; SIZE]);
    assert_eq!(rig.drain(), Ok(()));
    rig.store().with(|core| while core.drop_some(crate::store::node::NONE) {});
    let session = Session::new(&rig);
    let handle = open(&rig, "s", libc::O_RDWR);
    assert_eq!(write(&rig, &handle, 3 * BLOCK, &[5; BLOCK as usize]).recv().unwrap(), Ok(BLOCK as u32));
    rig.faults.hold(Class::Promotion);
    let window = [blocks(handle.id.0, 0, 1), file(&rig, "other")];
    let ticket = session.begin(LEASED, &window);
    let resident =
        |core: &mut crate::store::Core, at: usize| core.hot_mut(handle.id.idx()).blocks[at].resident();
    rig.faults.release_some(Class::Promotion, 1);
    rig.wait(|| rig.store().with(|core| resident(core, 0)));
    rig.store().with(|core| core.hot_mut(handle.id.idx()).blocks[0].mem = crate::store::hot::Mem::None);
    rig.faults.release(Class::Promotion);
    let end = session.end();
    assert_end(&end, ticket, abi::TICKET_DONE, 0);
    assert!(end.lease > 0 && rig.store().with(|core| resident(core, 0)));
    session.release(end.lease);
    rig.store().release(&handle);
    drop(session);
    assert_eq!(rig.drain(), Ok(()));
    assert_nothing_left(&rig);
    rig.stop();
}
