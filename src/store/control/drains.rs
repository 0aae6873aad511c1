//! DRAIN and FAILURES: a drain as a ticket (rule R14). What a drain is, [`crate::store::drain`] knows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::session::{Session, SessionId};
use super::tickets::{self, Kind};
use super::{Miss, Waits};
use crate::abi::{self, RangeState, Slot};
use crate::store::core::Core;
use crate::store::drain::{DrainId, Progress, Scope};
use crate::store::hot::Then;
use crate::store::node::{Idx, LOST, NONE};
use crate::store::{Store, UnitReply};

/// What a ticket's drain is doing. It is kept until the end of the ticket is read, and a while longer if it has failed.
pub(super) enum Drained {
    GoesOn(DrainId),
    Ended(Progress),
}

/// Drains by their tickets.
pub(super) type Drains = HashMap<u64, Drained>;

impl Core {
    pub(super) fn drain(
        &mut self,
        id: SessionId,
        session: &mut Session,
        mut drain: abi::Drain,
        ranges: &[abi::Range],
        waits: Waits,
    ) -> Result<Vec<u8>, Miss> {
        self.await_releases(waits)?;
        let mut parts = Vec::with_capacity(ranges.len());
        let mut states = vec![RangeState::default(); ranges.len()];
        for (range, state) in ranges.iter().zip(&mut states) {
            match self.find_part(session, range, waits) {
                Ok(idx) => parts.push(idx),
                Err(Miss::Fail(errno)) => state.status = -(errno as i32),
                Err(wait) => return Err(wait),
            }
        }
        (drain.ticket, drain.files, drain.bytes) = (0, 0, 0);
        if parts.len() < ranges.len() {
            return Ok(abi::encode(&drain, &states));
        }
        self.has_room_for_ticket(id)?;
        let ticket = self.new_ticket(Kind::Drain, Some(id), session.who.clone(), drain.tag);
        let scope = if ranges.is_empty() { Scope::All } else { Scope::Of(parts) };
        let timeout = Some(drain.timeout_ms).filter(|wanted| *wanted > 0);
        let deadline = self.drain_deadline(timeout.map(|wanted| Duration::from_millis(wanted.into())));
        let done = move |core: &mut Self, ended, progress| core.drain_ended(ticket, ended, progress);
        let begun = self.begin_drain(&scope, deadline, Box::new(done));
        if let Some(at) = self.drain_progress(begun) {
            (drain.files, drain.bytes) = (at.files, at.bytes);
            self.control.drains.insert(ticket, Drained::GoesOn(begun));
        }
        drain.ticket = ticket;
        Ok(abi::encode(&drain, &states))
    }

    /// When a drain is given up that may take so long, or as long as one may by default.
    pub(super) fn drain_deadline(&self, timeout: Option<Duration>) -> Option<Instant> {
        Instant::now().checked_add(timeout.unwrap_or(self.settings.drain_timeout))
    }

    /// A drain covers what has been closed, also if the RELEASE is on its way still.
    pub(super) fn await_releases(&self, waits: Waits) -> Result<(), Miss> {
        let is_releasing = |idx: &Idx| {
            let private = self.hot(*idx).and_then(|hot| hot.private());
            private.is_some_and(|private| private.is_releasing() && private.parent != NONE)
        };
        let mut building = self.building.values().filter_map(|id| self.by_id(*id));
        match building.find(is_releasing).filter(|_| !waits.are_over) {
            Some(idx) => Err(Miss::Releasing(idx)),
            None => Ok(()),
        }
    }

    /// A whole file, or a directory.
    fn find_part(&mut self, session: &mut Session, range: &abi::Range, waits: Waits) -> Result<Idx, Miss> {
        if (range.offset, range.length, range.unit, range.reserved) != (0, 0, abi::UNIT_BYTES, 0) {
            return Err(Errno::EINVAL.into());
        }
        let idx = match (range.kind, u32::try_from(range.id)) {
            (abi::KIND_NAME, Ok(id)) => {
                self.find_entry(session, Slot { id, generation: range.generation }, waits)?
            }
            (abi::KIND_NAME, Err(_)) => return Err(Errno::ESTALE.into()),
            (abi::KIND_NODE, _) if range.generation == 0 => self.find_node(&session.who, range.id)?,
            _ => return Err(Errno::EINVAL.into()),
        };
        if self.node(idx).has(LOST) { Err(Errno::EIO.into()) } else { Ok(idx) }
    }

    fn drain_ended(&mut self, ticket: u64, ended: Result<(), Errno>, progress: Progress) {
        let state = if ended.is_ok() { abi::TICKET_DONE } else { abi::TICKET_FAILED };
        let end = tickets::Progress { state, status: ended.err(), ..told(&progress) };
        self.control.drains.insert(ticket, Drained::Ended(progress));
        self.end_ticket(ticket, &end);
    }

    /// Nobody waits for it any more.
    pub(super) fn stop_drain_of(&mut self, ticket: u64) -> tickets::Progress {
        let Some(Drained::GoesOn(id)) = self.control.drains.get(&ticket) else {
            return tickets::Progress::default();
        };
        let progress = self.stop_drain(*id).unwrap_or_default();
        let at = told(&progress);
        self.control.drains.insert(ticket, Drained::Ended(progress));
        at
    }

    pub(super) fn drain_progress_of(&self, ticket: u64) -> tickets::Progress {
        match self.control.drains.get(&ticket) {
            Some(Drained::GoesOn(id)) => self.drain_progress(*id).map_or_else(Default::default, told),
            Some(Drained::Ended(progress)) => told(progress),
            None => tickets::Progress::default(),
        }
    }

    /// The session of a ticket that has ended is gone without having read how.
    pub(super) fn drain_was_not_told(&mut self, ticket: u64) {
        if let Some(Drained::Ended(progress)) = self.control.drains.remove(&ticket) {
            self.tell_others(progress);
        }
    }

    pub(super) fn failures(
        &mut self,
        id: SessionId,
        mut asked: abi::Failures,
        room: usize,
    ) -> Result<Vec<u8>, Miss> {
        if !self.control.tickets.has_failures(id, asked.ticket) {
            return Err(Errno::ENOENT.into());
        }
        let progress = match self.control.drains.get(&asked.ticket) {
            Some(Drained::GoesOn(id)) => self.drain_progress(*id),
            Some(Drained::Ended(progress)) => Some(progress),
            None => None,
        };
        let known = &progress.ok_or(Errno::ENOENT)?.failures;
        let mut paths = Vec::new();
        asked.count = 0;
        for path in known.iter().skip(asked.from as usize) {
            if paths.len() + path.len() + 1 > room {
                break;
            }
            paths.extend_from_slice(path);
            paths.push(0);
            asked.count += 1;
        }
        (asked.bytes, asked.known) = (paths.len() as u32, known.len() as u32);
        Ok(abi::encode(&asked, &paths))
    }
}

impl Store {
    /// A drain in words: of these paths, or of everything. Answered when it has ended.
    pub fn drain_paths(
        self: &Arc<Self>,
        id: SessionId,
        paths: Vec<Vec<u8>>,
        timeout: Option<Duration>,
        reply: UnitReply,
    ) {
        self.drain_paths_until(id, paths, timeout, None, reply);
    }

    fn drain_paths_until(
        self: &Arc<Self>,
        id: SessionId,
        paths: Vec<Vec<u8>>,
        timeout: Option<Duration>,
        until: Option<Instant>,
        reply: UnitReply,
    ) {
        self.with(|core| {
            let now = Instant::now();
            let waits = Waits { are_over: until.is_some_and(|until| until <= now) };
            match core.scope_of(id, &paths, waits) {
                Ok(scope) => {
                    let deadline = core.drain_deadline(timeout);
                    let done = |core: &mut Core, ended, _| core.reply(move || reply(ended));
                    core.begin_drain(&scope, deadline, Box::new(done));
                }
                Err(Miss::Fail(errno)) => core.reply(move || reply(Err(errno))),
                Err(Miss::Releasing(idx)) => {
                    let until = until.unwrap_or(now + core.settings.publish_wait);
                    let store = self.clone();
                    let again = move || store.drain_paths_until(id, paths, timeout, Some(until), reply);
                    core.wait_for_release(idx, Then::Again(Box::new(again)));
                }
            }
        });
    }
}

impl Core {
    fn scope_of(&self, id: SessionId, paths: &[Vec<u8>], waits: Waits) -> Result<Scope, Miss> {
        self.await_releases(waits)?;
        if paths.is_empty() {
            return Ok(Scope::All);
        }
        let session = self.control.sessions.get(&id).ok_or(Errno::EBADF)?;
        let who = &session.who;
        let parts = paths.iter().map(|path| self.find_path(who, path).and_then(|idx| self.read_by(who, idx)));
        Ok(Scope::Of(parts.collect::<Result<_, _>>()?))
    }
}

fn told(progress: &Progress) -> tickets::Progress {
    tickets::Progress {
        state: abi::TICKET_RUNNING,
        files: progress.drained_files,
        bytes: progress.drained_bytes,
        failed: progress.failed,
        bytes_total: progress.bytes,
        ..tickets::Progress::default()
    }
}
