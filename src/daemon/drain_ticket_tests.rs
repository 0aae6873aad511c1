//! Tickets of drains against a device that is told when to answer, and what.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use nix::errno::Errno;
use zerocopy::FromBytes;

use super::tests::Rig;
use super::*;
use crate::abi::{self, Request, TicketState};
use crate::l2::{Class, Direction};
use crate::store::control::{SessionId, TICKETS_MAX};

const SIZE: usize = 300_000;

/// `.ctl/drain`, greeted.
struct Session<'r>(&'r Rig, SessionId);

impl<'r> Session<'r> {
    fn new(rig: &'r Rig) -> Self {
        let session = Self(rig, rig.store().open_session(&Rig::caller()));
        let hello = Request::Hello(abi::Hello { header: header(0), ..abi::Hello::default() });
        let hello = abi::Hello::read_from_bytes(&session.ask(hello).unwrap()).unwrap();
        assert_ne!(hello.features & abi::FEATURE_DRAIN, 0);
        session
    }

    fn ask(&self, request: Request) -> Result<Vec<u8>, Errno> {
        let (tell, told) = channel();
        self.0.store().control(self.1, request, Box::new(move |said| tell.send(said).unwrap()));
        told.recv().unwrap()
    }

    fn try_drain(&self, tag: u64, timeout_ms: u32) -> Result<abi::Drain, Errno> {
        let drain = abi::Drain { header: header(0), tag, timeout_ms, ..abi::Drain::default() };
        self.ask(Request::Drain(drain, Vec::new())).map(|said| abi::Drain::read_from_bytes(&said).unwrap())
    }

    fn drain(&self, tag: u64) -> u64 {
        self.try_drain(tag, 3_600_000).unwrap().ticket
    }

    fn ticket(&self, ticket: u64, cancel: bool) -> Result<abi::Ticket, Errno> {
        let state = TicketState { ticket, ..TicketState::default() };
        let asked = abi::Ticket { header: header(0), state, ..abi::Ticket::default() };
        let said = self.ask(if cancel { Request::Cancel(asked) } else { Request::Ticket(asked) });
        said.map(|said| abi::Ticket::read_from_bytes(&said).unwrap())
    }

    /// The paths that failed, from this one on, as far as there is room, and how many are known.
    fn failures(&self, ticket: u64, from: u32, room: usize) -> Result<(Vec<String>, u32), Errno> {
        let asked = abi::Failures { header: header(room), ticket, from, ..abi::Failures::default() };
        let said = self.ask(Request::Failures(asked, room))?;
        let (head, paths) = abi::Failures::read_from_prefix(&said).unwrap();
        assert_eq!(paths.len(), head.bytes as usize);
        let paths: Vec<String> = paths
            .split_inclusive(|byte| *byte == 0)
            .map(|path| String::from_utf8(path[..path.len() - 1].to_vec()).unwrap())
            .collect();
        assert_eq!(paths.len(), head.count as usize);
        Ok((paths, head.known))
    }

    /// The ends that can be read now.
    fn ends(&self) -> Vec<TicketState> {
        let mut ends = Vec::new();
        while let Ok(bytes) = self.0.store().read_ends(self.1, 10 * size_of::<TicketState>()).unwrap() {
            ends.extend(
                bytes.chunks(size_of::<TicketState>()).map(|end| TicketState::read_from_bytes(end).unwrap()),
            );
        }
        ends
    }

    /// Waits for an end.
    fn end(&self) -> TicketState {
        self.0.wait(|| self.0.store().poll_ends(self.1, None));
        let ends = self.ends();
        assert_eq!(ends.len(), 1, "{ends:?}");
        ends[0]
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.0.store().close_session(self.1);
    }
}

fn header(count: usize) -> abi::Header {
    abi::Header { version: abi::VERSION, flags: 0, count: count as u32 }
}

/// So many files are on their way, and held.
fn hold(rig: &Rig, names: &[&str]) {
    rig.faults.hold(Class::WriteBack);
    names.iter().for_each(|name| rig.write(name, &[1; SIZE]));
    rig.wait(|| rig.faults.held(Class::WriteBack) == names.len());
}

#[test]
fn a_drain_that_fails_names_the_file_also_when_its_end_was_read() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let session = Session::new(&rig);
    hold(&rig, &["one", "two", "three"]);
    let begun = session.try_drain(7, 0).unwrap();
    assert_eq!((begun.files, begun.bytes), (3, 3 * SIZE as u64));
    let at = session.ticket(begun.ticket, false).unwrap();
    assert_eq!((at.state.state, at.state.files, at.bytes_total), (abi::TICKET_RUNNING, 0, 3 * SIZE as u64));
    assert_eq!(session.failures(begun.ticket, 0, 100), Ok((vec![], 0)));
    rig.faults.fail_next(Direction::Write, 2, libc::EIO);
    rig.faults.release_some(Class::WriteBack, 2);
    // Also while it goes on.
    rig.wait(|| session.ticket(begun.ticket, false).unwrap().state.failed == 2);
    assert_eq!(session.ends(), []);
    rig.faults.release(Class::WriteBack);
    rig.wait(|| rig.store().poll_ends(session.1, None));
    // There is room for one of them.
    let (mut failed, known) = session.failures(begun.ticket, 0, 7).unwrap();
    assert_eq!((failed.len(), known), (1, 2));
    let (more, _) = session.failures(begun.ticket, 1, 8).unwrap();
    failed.extend(more);
    failed.sort();
    assert_eq!(failed, ["one", "two"]);
    assert_eq!(session.failures(begun.ticket, 0, 3), Ok((vec![], 2)), "there is room for none");
    assert_eq!(session.failures(begun.ticket, 2, 8), Ok((vec![], 2)));
    let end = session.end();
    assert_eq!((end.ticket, end.tag, end.kind), (begun.ticket, 7, abi::TICKET_DRAIN));
    assert_eq!((end.state, end.status), (abi::TICKET_FAILED, libc::EIO));
    assert_eq!((end.files, end.bytes, end.failed), (1, SIZE as u64, 2));
    assert_eq!(session.ticket(begun.ticket, false).map(|_| ()), Err(Errno::ENOENT));
    // Of the last sixteen drains that have failed.
    for more in 0..16 {
        assert_eq!(session.failures(begun.ticket, 0, 8).unwrap().1, 2, "{more} later");
        hold(&rig, &["one"]);
        let next = session.drain(1);
        rig.faults.fail_next(Direction::Write, 1, libc::EIO);
        rig.faults.release(Class::WriteBack);
        let end = session.end();
        assert_eq!((end.ticket, end.failed), (next, 1));
        assert_eq!(session.failures(next, 0, 100), Ok((vec!["one".to_owned()], 1)));
    }
    assert_eq!(session.failures(begun.ticket, 0, 8), Err(Errno::ENOENT));
    drop(session);
    assert_eq!(rig.drain(), Ok(()), "it has been told");
    rig.stop();
}

#[test]
fn ends_come_in_order_and_an_end_is_one_sessions_own() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let (session, other) = (Session::new(&rig), Session::new(&rig));
    // Nothing is on its way.
    let clean = session.drain(1);
    let end = session.end();
    assert_eq!((end.ticket, end.state, end.status, end.files), (clean, abi::TICKET_DONE, 0, 0));
    hold(&rig, &["one"]);
    let first = session.drain(2);
    rig.write("two", &[2; SIZE]);
    rig.wait(|| rig.faults.held(Class::WriteBack) == 2);
    let (second, theirs) = (session.drain(3), other.drain(4));
    assert_eq!(session.ticket(theirs, true).map(|_| ()), Err(Errno::ENOENT));
    assert_eq!(session.failures(theirs, 0, 8), Err(Errno::ENOENT));
    assert_eq!((session.ends(), other.ends()), (vec![], vec![]));
    rig.faults.release_some(Class::WriteBack, 1);
    assert_eq!(session.end().ticket, first);
    rig.faults.release(Class::WriteBack);
    let end = session.end();
    assert_eq!((end.ticket, end.state, end.files), (second, abi::TICKET_DONE, 2));
    assert_eq!(other.end().tag, 4);
    drop((session, other));
    rig.stop();
}

#[test]
fn a_drain_can_be_cancelled_and_has_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let session = Session::new(&rig);
    hold(&rig, &["one"]);
    let (late, taken_back) = (session.try_drain(1, 1).unwrap().ticket, session.drain(2));
    let end = session.end();
    assert_eq!((end.ticket, end.state, end.status), (late, abi::TICKET_FAILED, libc::ETIMEDOUT));
    let said = session.ticket(taken_back, true).unwrap();
    assert_eq!((said.state.state, said.state.status), (abi::TICKET_CANCELLED, libc::ECANCELED));
    assert_eq!(session.ticket(taken_back, true).unwrap().state, said.state, "twice is no error");
    let end = session.end();
    assert_eq!((end.ticket, end.state), (taken_back, abi::TICKET_CANCELLED));
    assert_eq!(rig.store().snapshot().drains_waiting, 0);
    for tag in 0..u64::from(TICKETS_MAX) {
        session.drain(tag);
    }
    assert_eq!(session.try_drain(0, 0).map(|_| ()), Err(Errno::EMFILE));
    drop(session);
    assert_eq!(rig.store().snapshot().drains_waiting, 0, "they go with their session");
    rig.faults.release(Class::WriteBack);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
}

/// Who has gone away has told nobody, whether the drain had ended or not.
#[test]
fn failures_of_a_session_that_is_closed_are_left_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    for ended in [false, true] {
        let (session, next) = (Session::new(&rig), Session::new(&rig));
        hold(&rig, &["lost", "kept"]);
        let ticket = session.drain(0);
        rig.faults.fail_next(Direction::Write, 1, libc::EIO);
        rig.faults.release_some(Class::WriteBack, 1);
        rig.wait(|| session.ticket(ticket, false).unwrap().state.failed == 1);
        if ended {
            rig.faults.release(Class::WriteBack);
            rig.wait(|| rig.store().poll_ends(session.1, None));
        }
        drop(session);
        rig.faults.release(Class::WriteBack);
        let ticket = next.drain(0);
        rig.wait(|| rig.store().poll_ends(next.1, None));
        assert_eq!(next.failures(ticket, 0, 100), Ok((vec!["lost".to_owned()], 1)), "ended: {ended}");
        assert_eq!((next.end().failed, next.drain(0) > ticket, next.end().failed), (1, true, 0));
        rig.store().unlink(crate::store::node::ROOT_INO, b"kept", &Rig::caller()).unwrap();
    }
    rig.stop();
}

/// What a shell's status is made of.
#[test]
fn a_write_is_answered_when_its_drain_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let shell = rig.store().open_session(&Rig::caller());
    let write = |paths: &[&str], timeout| {
        let (tell, told) = channel();
        let paths = paths.iter().map(|path| path.as_bytes().to_vec()).collect();
        rig.store().drain_paths(shell, paths, timeout, Box::new(move |ended| tell.send(ended).unwrap()));
        told
    };
    hold(&rig, &["lost", "kept"]);
    let (all, kept) = (write(&[], None), write(&["kept", "/kept"], None));
    let late = write(&[], Some(Duration::from_millis(1)));
    assert_eq!(late.recv().unwrap(), Err(Errno::ETIMEDOUT));
    assert_eq!(write(&["kept", "none"], None).recv().unwrap(), Err(Errno::ENOENT));
    assert_eq!(write(&["kept/none"], None).recv().unwrap(), Err(Errno::ENOTDIR));
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.faults.release_some(Class::WriteBack, 1);
    assert!(all.try_recv().is_err() && kept.try_recv().is_err());
    rig.faults.release(Class::WriteBack);
    assert_eq!(all.recv().unwrap(), Err(Errno::EIO));
    assert_eq!(kept.recv().unwrap(), Ok(()));
    assert_eq!(write(&["/"], None).recv().unwrap(), Ok(()));
    rig.store().close_session(shell);
    rig.stop();
}
