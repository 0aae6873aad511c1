//! Tickets: what takes its time is begun by a request, and how it ends is read from the handle (docs/CONTROL.md).
//!
//! What a ticket *does* is kept by its kind, under the ticket's number: hints in [`super::hints`]. Here is what
//! all of them have in common: whose they are, how they end, and how their session learns of it. Ends are kept here and not with the
//! session, since a ticket may end while its session is asking something.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use zerocopy::IntoBytes;

use super::Miss;
use super::classify::millis;
use super::session::{Session, SessionId, Who};
use crate::abi::{self, TicketState};
use crate::store::core::{Core, Effect};
use crate::store::{Store, Wake};

/// Drains of one session whose failures are known still once their end was read.
const TOLD_KEPT: usize = 16;
/// Tickets of one session whose end it has not read.
pub const TICKETS_MAX: u32 = 4096;

/// What a ticket is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Prefetch,
    Drain,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Prefetch => abi::TICKET_PREFETCH,
            Self::Drain => abi::TICKET_DRAIN,
        }
    }
}

/// One that has not ended.
pub struct Ticket {
    pub kind: Kind,
    /// None: of a shell, whose hints outlive its handle.
    pub session: Option<SessionId>,
    pub who: Arc<Who>,
    pub tag: u64,
    pub made: Instant,
}

/// How far a ticket has come, or how it has ended.
#[derive(Clone, Copy, Default, Debug)]
pub struct Progress {
    pub state: u8,
    /// Why it ended otherwise than done.
    pub status: Option<Errno>,
    pub lease: u64,
    pub ttl_ms: u32,
    pub bytes: u64,
    pub files: u64,
    pub failed: u64,
    /// For those that have not ended: what `bytes` will be, how many begin before it, when it is expected to be done.
    pub bytes_total: u64,
    pub ahead: u32,
    pub estimate_ms: u32,
}

/// What a session has of tickets.
#[derive(Default)]
struct Owned {
    live: BTreeSet<u64>,
    ended: VecDeque<TicketState>,
    /// Drains that have failed and whose end was read, the latest last: only then does one know whose failures to ask for.
    told: VecDeque<u64>,
    /// Somebody waits until there is an end to read.
    wake: Option<Wake>,
}

#[derive(Default)]
pub struct Tickets {
    all: HashMap<u64, Ticket>,
    last: u64,
    of: HashMap<SessionId, Owned>,
}

impl Tickets {
    pub fn get(&self, id: u64) -> Option<&Ticket> {
        self.all.get(&id)
    }

    /// Whether a ticket is this session's, and its end has not been read.
    pub fn has(&self, session: SessionId, id: u64) -> bool {
        let is_it =
            |owned: &Owned| owned.live.contains(&id) || owned.ended.iter().any(|end| end.ticket == id);
        self.of.get(&session).is_some_and(is_it)
    }

    /// Whether this session may ask what a drain could not store.
    pub fn has_failures(&self, session: SessionId, id: u64) -> bool {
        let was_told = |owned: &Owned| owned.told.contains(&id);
        self.has(session, id) || self.of.get(&session).is_some_and(was_told)
    }
}

fn state(id: u64, ticket: &Ticket, at: &Progress) -> TicketState {
    TicketState {
        ticket: id,
        tag: ticket.tag,
        lease: at.lease,
        bytes: at.bytes,
        files: at.files,
        failed: at.failed,
        status: at.status.map_or(0, |errno| errno as i32),
        state: at.state,
        kind: ticket.kind.code(),
        reserved: 0,
        ttl_ms: at.ttl_ms,
        reserved_end: 0,
    }
}

impl Core {
    /// Whether a session may have one more ticket.
    pub(super) fn has_room_for_ticket(&self, id: SessionId) -> Result<(), Errno> {
        let has = self.control.tickets.of.get(&id).map_or(0, |owned| owned.live.len() + owned.ended.len());
        if has < TICKETS_MAX as usize { Ok(()) } else { Err(Errno::EMFILE) }
    }

    /// A new ticket. Whoever asks has seen that there is room for it.
    pub(super) fn new_ticket(
        &mut self,
        kind: Kind,
        session: Option<SessionId>,
        who: Arc<Who>,
        tag: u64,
    ) -> u64 {
        let tickets = &mut self.control.tickets;
        tickets.last += 1;
        let id = tickets.last;
        tickets.all.insert(id, Ticket { kind, session, who, tag, made: Instant::now() });
        if let Some(session) = session {
            tickets.of.entry(session).or_default().live.insert(id);
        }
        id
    }

    /// A ticket has ended: its session can read how. What it did is over, and given back, already.
    pub(super) fn end_ticket(&mut self, id: u64, end: &Progress) {
        let tickets = &mut self.control.tickets;
        let Some(ticket) = tickets.all.remove(&id) else { return };
        let Some(owned) = ticket.session.and_then(|session| tickets.of.get_mut(&session)) else { return };
        owned.live.remove(&id);
        owned.ended.push_back(state(id, &ticket, end));
        if let Some(wake) = owned.wake.take() {
            self.effects.push(Effect::Wake(wake));
        }
    }

    /// Stops what a ticket does, and says how far it had come. The ticket is there still.
    fn stop_work(&mut self, id: u64, kind: Kind) -> Progress {
        match kind {
            Kind::Prefetch => self.stop_hint(id),
            Kind::Drain => self.stop_drain_of(id),
        }
    }

    fn progress(&self, id: u64, kind: Kind) -> Progress {
        match kind {
            Kind::Prefetch => self.hint_progress(id),
            Kind::Drain => self.drain_progress_of(id),
        }
    }

    /// Tickets go with their session. Nobody is told.
    pub(super) fn drop_tickets(&mut self, session: SessionId) {
        let Some(owned) = self.control.tickets.of.remove(&session) else { return };
        for id in owned.live {
            if let Some(kind) = self.control.tickets.get(id).map(|ticket| ticket.kind) {
                self.stop_work(id, kind);
                self.control.tickets.all.remove(&id);
                self.drain_was_not_told(id);
            }
        }
        owned.ended.into_iter().for_each(|end| self.drain_was_not_told(end.ticket));
        for id in owned.told {
            self.control.drains.remove(&id);
        }
    }

    /// A session has read how one of its tickets has ended.
    fn end_was_read(&mut self, id: SessionId, end: &TicketState) {
        let control = &mut self.control;
        let Some(owned) = control.tickets.of.get_mut(&id).filter(|_| end.failed > 0) else {
            control.drains.remove(&end.ticket);
            return;
        };
        if control.drains.contains_key(&end.ticket) {
            owned.told.push_back(end.ticket);
        }
        if owned.told.len() > TOLD_KEPT
            && let Some(oldest) = owned.told.pop_front()
        {
            control.drains.remove(&oldest);
        }
    }

    /// CANCEL, or TICKET: how it is now.
    pub(super) fn ask_ticket(
        &mut self,
        id: SessionId,
        _session: &mut Session,
        mut asked: abi::Ticket,
        cancel: bool,
    ) -> Result<Vec<u8>, Miss> {
        let number = asked.state.ticket;
        let owned = self.control.tickets.of.get(&id).ok_or(Errno::ENOENT)?;
        let live = owned.live.contains(&number);
        if let Some(kind) = self.control.tickets.get(number).filter(|_| live && cancel).map(|t| t.kind) {
            let at = self.stop_work(number, kind);
            let end = Progress { state: abi::TICKET_CANCELLED, status: Some(Errno::ECANCELED), ..at };
            self.end_ticket(number, &end);
        }
        let tickets = &self.control.tickets;
        let ended = tickets.of.get(&id).and_then(|owned| owned.ended.iter().find(|end| end.ticket == number));
        (asked.ahead, asked.estimate_ms, asked.age_ms) = (0, 0, 0);
        match (ended, tickets.get(number).filter(|_| live)) {
            (Some(end), _) => (asked.state, asked.bytes_total) = (*end, end.bytes),
            (None, Some(ticket)) => {
                let at = self.progress(number, ticket.kind);
                asked.state = state(number, ticket, &at);
                asked.bytes_total = at.bytes_total;
                (asked.ahead, asked.estimate_ms) = (at.ahead, at.estimate_ms);
                asked.age_ms = millis(ticket.made.elapsed());
            }
            (None, None) => return Err(Errno::ENOENT.into()),
        }
        Ok(abi::encode::<_, u8>(&asked, &[]))
    }
}

impl Store {
    /// What read(2) on a handle gives: the ends of tickets, as many as fit. None: the handle is not greeted, what it says is
    /// text.
    ///
    /// # Errors
    /// EAGAIN: no ticket has ended. EINVAL: there is no room for one.
    pub fn read_ends(
        self: &std::sync::Arc<Self>,
        id: SessionId,
        len: usize,
    ) -> Option<Result<Vec<u8>, Errno>> {
        let mut core = self.lock();
        if !core.is_greeted(id) {
            return None;
        }
        let fit = len / size_of::<TicketState>();
        if fit == 0 {
            return Some(Err(Errno::EINVAL));
        }
        let owned = core.control.tickets.of.get_mut(&id).filter(|owned| !owned.ended.is_empty());
        let Some(owned) = owned else { return Some(Err(Errno::EAGAIN)) };
        let count = fit.min(owned.ended.len());
        let ends: Vec<TicketState> = owned.ended.drain(..count).collect();
        for end in &ends {
            core.end_was_read(id, end);
        }
        Some(Ok(ends.as_bytes().to_vec()))
    }

    /// Whether read(2) on a handle gives something now. If not, `wake` is called once that is so.
    pub fn poll_ends(self: &std::sync::Arc<Self>, id: SessionId, wake: Option<Wake>) -> bool {
        let mut core = self.lock();
        if !core.is_greeted(id) {
            return true;
        }
        let owned = core.control.tickets.of.entry(id).or_default();
        let old = match wake {
            Some(wake) => owned.wake.replace(wake),
            None => None,
        };
        let ready = !owned.ended.is_empty();
        drop(core);
        // The kernel knows a handle by one number, so whoever waited before is woken by the same call.
        drop(old);
        ready
    }
}
