//! Hints: windows that are to be brought to L1, and the order in which they are (rule R13).
//!
//! A hint waits in the *queue* or *runs*. Those that run are bounded, in number and in what they bring; how one does is
//! in [`super::fetch`]. Nothing here happens in a client's request but that its hint is put into the queue, or begun: what
//! follows is done in small steps, each when something has come of which one of them may make use
//! ([`Wakes::hints`](crate::store::core::Wakes)).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use super::fetch::Fetch;
use super::leases::Client;
use super::session::Who;
use super::tickets::Progress;
use crate::abi;
use crate::store::core::Core;
use crate::store::node::NodeId;

/// A range of a window: a version of a file, whatever becomes of its name.
#[derive(Clone, Debug)]
pub(super) struct Want {
    pub node: NodeId,
    pub bytes: Range<u64>,
}

/// The lease that is to be granted when all is in L1.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseWanted {
    pub parties: u32,
    pub ttl_ms: u32,
}

/// The number of a hint that has no ticket yet: behind all that have one.
pub(super) const NOT_YET: u64 = u64::MAX;

/// What the highest priority has, of these the earliest deadline, of these the first that came.
type Turn = (Reverse<u8>, bool, Option<Instant>, u64);

pub struct Hint {
    pub(super) who: Arc<Who>,
    pub(super) wants: Vec<Want>,
    pub(super) lease: Option<LeaseWanted>,
    pub(super) priority: u8,
    pub(super) deadline: Option<Instant>,
    /// Ranges that could not be found when it came, and why the first could not.
    pub(super) absent: u64,
    /// Memory that all of it takes, and what of that is to be brought.
    pub(super) memory: u64,
    pub(super) brings: u64,
    /// To be read, and read so far.
    pub(super) bytes_total: u64,
    pub(super) bytes: u64,
    /// It runs.
    pub(super) fetch: Option<Fetch>,
}

impl Hint {
    fn turn(&self, id: u64) -> Turn {
        (Reverse(self.priority), self.deadline.is_none(), self.deadline, id)
    }

    fn left(&self) -> u64 {
        self.bytes_total.saturating_sub(self.bytes)
    }
}

/// All hints that have not ended.
#[derive(Default)]
pub struct Hints {
    pub(super) all: BTreeMap<u64, Hint>,
    queue: BTreeSet<Turn>,
    /// In the order in which they began.
    pub(super) running: Vec<u64>,
    deadlines: BTreeSet<(Instant, u64)>,
    /// One of them waits for memory.
    short: bool,
    /// Memory is being taken for one of them right now.
    pub(super) filling: bool,
}

impl Hints {
    pub fn queued(&self) -> u64 {
        self.queue.len() as u64
    }

    pub fn running(&self) -> u64 {
        self.running.len() as u64
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    fn bringing(&self) -> u64 {
        self.running.iter().filter_map(|id| self.all.get(id)).map(|hint| hint.brings).sum()
    }
}

impl Core {
    /// Something has come, or was given back, of which a hint may make use.
    pub fn kick_hints(&mut self) {
        self.wakes.hints |= !self.control.hints.all.is_empty();
    }

    /// Memory has become free, or can.
    pub fn room_for_hints(&mut self) {
        self.wakes.hints |= self.control.hints.short;
    }

    /// Whether the window has a place for what brings `brings` bytes.
    fn window_has_room(&self, brings: u64) -> bool {
        let hints = &self.control.hints;
        let bytes = hints.bringing().saturating_add(brings) <= self.settings.prefetch_window_bytes;
        hints.running.len() < self.settings.prefetch_window as usize && (hints.running.is_empty() || bytes)
    }

    /// The first in the queue that can begin. Who is too large for what is left of the window waits for it, and all
    /// behind it. Who waits for a lease to end holds up only those who want one as well: of the same client, if it is what that
    /// one may have.
    fn next_to_begin<'h>(&self, queue: impl Iterator<Item = (u64, &'h Hint)>) -> Option<u64> {
        let mut full = false;
        let mut clients: HashSet<Client> = HashSet::new();
        for (id, hint) in queue {
            if !self.window_has_room(hint.brings) {
                return None;
            }
            if hint.lease.is_none() {
                return Some(id);
            }
            let client = hint.client();
            if full || clients.contains(&client) {
                continue;
            }
            match self.room_for_lease(client, hint.memory, hint.wants.len() as u64) {
                Ok(()) => return Some(id),
                Err(Errno::EDQUOT) => {
                    clients.insert(client);
                }
                Err(_) => full = true,
            }
        }
        None
    }

    /// Whether a hint that came now would begin at once: those that can have begun.
    pub(super) fn would_begin(&self, hint: &Hint) -> bool {
        let hints = &self.control.hints;
        let known = |turn: &Turn| Some((turn.3, hints.all.get(&turn.3)?));
        let turn = hint.turn(NOT_YET);
        let before = hints.queue.range(..turn).filter_map(known);
        let behind = hints.queue.range(turn..).filter_map(known);
        self.next_to_begin(before.chain([(NOT_YET, hint)]).chain(behind)) == Some(NOT_YET)
    }

    /// Tickets that begin before one, and when it will be done, in ms (0: not known).
    pub(super) fn outlook(&self, hint: &Hint, id: u64) -> (u32, u32) {
        let hints = &self.control.hints;
        let running = hint.fetch.is_some();
        let before = || hints.queue.range(..hint.turn(id)).filter_map(|turn| hints.all.get(&turn.3));
        let (mut ahead, mut bytes) = (0, hint.left());
        if !running {
            ahead = before().count() as u32;
            bytes += before().map(Hint::left).sum::<u64>();
        }
        let others = hints.running.iter().filter(|other| **other != id);
        bytes += others.filter_map(|other| hints.all.get(other)).map(Hint::left).sum::<u64>();
        (ahead, self.pace.millis_for(bytes))
    }

    /// Puts a hint with this ticket in its place, and begins what can be begun.
    pub(super) fn add_hint(&mut self, id: u64, hint: Hint) {
        let hints = &mut self.control.hints;
        hints.queue.insert(hint.turn(id));
        if let Some(deadline) = hint.deadline {
            hints.deadlines.insert((deadline, id));
            self.wakes.timer = true;
        }
        hints.all.insert(id, hint);
        self.begin_hints();
        self.wakes.hints = true;
    }

    fn begin_hints(&mut self) {
        loop {
            let hints = &self.control.hints;
            let queue = hints.queue.iter().filter_map(|turn| Some((turn.3, hints.all.get(&turn.3)?)));
            let Some(id) = self.next_to_begin(queue) else { return };
            let Some(mut hint) = self.control.hints.all.remove(&id) else { return };
            self.control.hints.queue.remove(&hint.turn(id));
            if hint.lease.is_some() {
                self.set_aside(hint.client(), hint.memory, hint.wants.len() as u64);
            }
            hint.fetch = Some(self.begin_fetch(&hint.wants));
            self.control.hints.running.push(id);
            self.control.hints.all.insert(id, hint);
        }
    }

    /// Takes a hint from among those that have not ended, with all that it has.
    fn take_hint(&mut self, id: u64) -> Option<Hint> {
        let mut hint = self.control.hints.all.remove(&id)?;
        let hints = &mut self.control.hints;
        hints.queue.remove(&hint.turn(id));
        hints.running.retain(|other| *other != id);
        if let Some(deadline) = hint.deadline {
            hints.deadlines.remove(&(deadline, id));
        }
        if let Some(fetch) = hint.fetch.take() {
            self.end_fetch(fetch);
            if hint.lease.is_some() {
                self.give_back_aside(hint.client(), hint.memory, hint.wants.len() as u64);
            }
        }
        // The next may begin.
        self.wakes.hints = true;
        Some(hint)
    }

    /// Nothing more is begun for a hint: its client wants it no more, or is gone.
    pub(super) fn stop_hint(&mut self, id: u64) -> Progress {
        let Some(hint) = self.take_hint(id) else { return Progress::default() };
        self.counters.hints_cancelled += 1;
        Progress { bytes: hint.bytes, failed: hint.absent, ..Progress::default() }
    }

    pub(super) fn hint_progress(&self, id: u64) -> Progress {
        let Some(hint) = self.control.hints.all.get(&id) else { return Progress::default() };
        let (ahead, estimate_ms) = self.outlook(hint, id);
        Progress {
            state: if hint.fetch.is_some() { abi::TICKET_RUNNING } else { abi::TICKET_QUEUED },
            bytes: hint.bytes,
            bytes_total: hint.bytes_total,
            failed: hint.absent,
            ahead,
            estimate_ms,
            ..Progress::default()
        }
    }

    /// Goes on with all hints as far as is possible now.
    pub fn advance_hints(&mut self, now: Instant) {
        self.end_late_hints(now);
        loop {
            let before = self.control.hints.all.len();
            self.begin_hints();
            let mut short = false;
            for id in self.control.hints.running.clone() {
                short |= self.advance_hint(id, short, now);
            }
            self.control.hints.short = short;
            if self.control.hints.all.len() == before {
                break;
            }
            // Where one has ended there is room for others.
        }
        self.wakes.hints = false;
    }

    fn end_late_hints(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.control.hints.deadlines.first().filter(|(at, _)| *at <= now) {
            self.control.hints.deadlines.remove(&(at, id));
            let ran = self.control.hints.all.get(&id).is_some_and(|hint| hint.fetch.is_some());
            let Some(hint) = self.take_hint(id) else { continue };
            let state = if ran { abi::TICKET_CANCELLED } else { abi::TICKET_DENIED };
            self.counters.hints_cancelled += u64::from(ran);
            self.counters.hints_denied_deadline += u64::from(!ran);
            let status = Some(Errno::ETIMEDOUT);
            let end =
                Progress { state, status, bytes: hint.bytes, failed: hint.absent, ..Progress::default() };
            self.end_ticket(id, &end);
        }
    }

    /// Goes on with one that runs; without taking memory, if one that began before it is `short` of it. Whether it is.
    fn advance_hint(&mut self, id: u64, short: bool, now: Instant) -> bool {
        let Some(mut hint) = self.control.hints.all.remove(&id) else { return false };
        let end = self.step(id, &mut hint, !short, now);
        let short = hint.fetch.as_ref().is_some_and(Fetch::is_short);
        self.control.hints.all.insert(id, hint);
        let Some(end) = end else { return short };
        let Some(hint) = self.take_hint(id) else { return false };
        let mut end = Progress { bytes: hint.bytes, ..end };
        if let (abi::TICKET_DONE, Some(lease)) = (end.state, hint.lease) {
            // What was set aside has just been given back, and nobody else has been here since.
            match self.grant_to(id, &hint, lease) {
                Ok((lease, ttl_ms)) => (end.lease, end.ttl_ms) = (lease, ttl_ms),
                Err(errno) => (end.state, end.status) = (abi::TICKET_FAILED, Some(errno)),
            }
        }
        match end.state {
            abi::TICKET_DONE => self.counters.hints_done += 1,
            _ => self.counters.hints_failed += 1,
        }
        self.end_ticket(id, &end);
        false
    }
}
