//! What takes its time: a window that is brought to L1, or a drain, and how it ends.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcachefs::abi::{self, Command, TicketState};
use nix::errno::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, IntoBytes};

use super::error::{Error, Result};
use super::handle::{Handle, Session};
use super::lease::Lease;
use super::window::{Range, Terms, Tier, Window, millis};
use super::wire::header;

/// Ends that one read asks for.
const ENDS: usize = 64;

/// How a window is wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish {
    lease: Option<Terms>,
    deadline: Option<Duration>,
    priority: u8,
    tag: u64,
}

impl Wish {
    pub fn new() -> Self {
        Self::default()
    }

    /// With a lease, in the step in which all of it is in L1.
    #[must_use]
    pub fn leased(self, terms: Terms) -> Self {
        Self { lease: Some(terms), ..self }
    }

    /// Not after that: from now on, the place in the queue included.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// What is larger goes first.
    #[must_use]
    pub fn priority(self, priority: u8) -> Self {
        Self { priority, ..self }
    }

    /// A number of one's own, which the end has as well.
    #[must_use]
    pub fn tag(self, tag: u64) -> Self {
        Self { tag, ..self }
    }
}

/// Where a window was, and what becomes of it.
#[derive(Debug)]
pub struct Prefetch {
    pub window: Window,
    pub became: Became,
    /// What it would be or is, whatever was begun.
    pub stage: Stage,
    /// What has to be read for it alone.
    pub bytes_to_read: u64,
    /// Tickets that begin before it.
    pub ahead: u32,
    /// Until it is done; none if that is not known yet.
    pub estimate: Option<Duration>,
}

/// What a request for a window has led to.
#[derive(Debug)]
pub enum Became {
    /// All of it is in L1, and leased if that was asked for.
    Here(Option<Lease>),
    Begun(Ticket),
    /// Nothing was begun.
    Denied(Errno),
    /// Nothing was to be begun: it was [`Handle::forecast`].
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    None,
    Queued,
    Running,
    Done,
    Denied,
    Cancelled,
    Failed,
}

impl Stage {
    fn of(number: u8) -> Self {
        match number {
            abi::TICKET_QUEUED => Self::Queued,
            abi::TICKET_RUNNING => Self::Running,
            abi::TICKET_DONE => Self::Done,
            abi::TICKET_DENIED => Self::Denied,
            abi::TICKET_CANCELLED => Self::Cancelled,
            abi::TICKET_FAILED => Self::Failed,
            _ => Self::None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Done => "done",
            Self::Denied => "denied",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// Something that was begun. It is taken back when this is dropped before its end was read.
#[derive(Debug)]
pub struct Ticket {
    session: Arc<Session>,
    number: u64,
}

/// How a ticket ended.
#[derive(Debug)]
pub struct End {
    pub ticket: u64,
    pub tag: u64,
    pub ended: Ended,
    /// Released when the end is dropped, so it is taken out.
    pub lease: Option<Lease>,
    /// Read from the device for it, or drained.
    pub bytes: u64,
    /// Drained.
    pub files: u64,
    /// Ranges that could not be brought, or files that could not be stored.
    pub failed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    /// It was not begun.
    Denied(Errno),
    Cancelled(Errno),
    Failed(Errno),
}

/// How far a ticket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub stage: Stage,
    pub bytes: u64,
    pub bytes_total: u64,
    pub files: u64,
    pub failed: u64,
    pub ahead: u32,
    pub estimate: Option<Duration>,
    pub age: Duration,
}

impl Handle {
    /// Brings a window to L1. What is there already is answered at once.
    ///
    /// # Errors
    /// E2BIG: more ranges than one request may have; a window is one.
    pub fn prefetch(&self, ranges: &[Range], wish: &Wish) -> Result<Prefetch> {
        self.ask(ranges, wish, 0)
    }

    /// What would become of it. Nothing is begun, and no lease granted.
    ///
    /// # Errors
    /// As [`Handle::prefetch`].
    pub fn forecast(&self, ranges: &[Range], wish: &Wish) -> Result<Prefetch> {
        self.ask(ranges, wish, abi::PREFETCH_ASK)
    }

    fn ask(&self, ranges: &[Range], wish: &Wish, flags: u16) -> Result<Prefetch> {
        let flags = if wish.lease.is_some() { flags | abi::PREFETCH_LEASE } else { flags };
        let terms = wish.lease.unwrap_or_default();
        let head = abi::Prefetch {
            header: header(flags, ranges.len()),
            tag: wish.tag,
            deadline_ms: millis(wish.deadline),
            ttl_ms: terms.ttl_ms(),
            parties: terms.parties,
            priority: wish.priority,
            ..abi::Prefetch::default()
        };
        // Held over the call: whoever reads the ticket's end must find it among those that are open.
        let mut tickets = self.session.tickets();
        let (head, states) = self.session.about("prefetch", Command::Prefetch, &head, ranges)?;
        let stage = Stage::of(head.state);
        let became = match (stage, head.ticket) {
            (Stage::Denied, _) => Became::Denied(Errno::from_raw(head.status)),
            (_, ticket) if ticket != 0 => {
                tickets.open.insert(ticket);
                Became::Begun(Ticket { session: Arc::clone(&self.session), number: ticket })
            }
            _ if flags & abi::PREFETCH_ASK != 0 => Became::Nothing,
            _ => Became::Here(
                (head.lease != 0).then(|| Lease::granted(&self.session, head.lease, head.ttl_ms)),
            ),
        };
        let window = Window {
            tier: Tier::of(head.tier),
            absent: head.absent,
            failed: head.failed,
            blocks: head.blocks,
            blocks_l1: head.blocks_l1,
            bytes: head.bytes,
            bytes_l1: head.bytes_l1,
            states,
        };
        let estimate = estimate(head.estimate_ms);
        Ok(Prefetch { window, became, stage, bytes_to_read: head.bytes_to_read, ahead: head.ahead, estimate })
    }

    /// Waits until tickets have ended, and says how: as many as have by then, none if the time is over. None is for ever, and
    /// zero does not wait. Of several threads that wait, each end goes to one.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn ends(&self, timeout: Option<Duration>) -> Result<Vec<End>> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let kept = std::mem::take(&mut self.session.tickets().read);
            let mut ends = kept;
            ends.extend(self.session.read_ends()?);
            if !ends.is_empty() || !self.session.readable(until)? {
                return Ok(ends);
            }
        }
    }
}

impl Handle {
    /// Waits until [`Handle::ends`] has something to say, and leaves it there. False: the time is over.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn readable(&self, timeout: Option<Duration>) -> Result<bool> {
        self.session.readable(timeout.map(|timeout| Instant::now() + timeout))
    }
}

impl Ticket {
    pub(super) fn drained(session: &Arc<Session>, number: u64) -> Self {
        Self { session: Arc::clone(session), number }
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    /// How far it is. None: its end has been read.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn progress(&self) -> Result<Option<Progress>> {
        self.call("ticket", Command::Ticket)
    }

    /// Takes it back. Its end is read like any other. None: that has been read.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn cancel(&self) -> Result<Option<Progress>> {
        self.call("cancel", Command::Cancel)
    }

    /// Waits for this one alone; the ends of others are kept for [`Handle::ends`]. So a handle whose ends are waited for by a
    /// poll of one's own is not asked this. None: the time is over, or its end has been read.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<End>> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let ends = self.session.read_ends()?;
            {
                let mut tickets = self.session.tickets();
                tickets.read.extend(ends);
                if let Some(at) = tickets.read.iter().position(|end| end.ticket == self.number) {
                    return Ok(Some(tickets.read.remove(at)));
                }
                if !tickets.open.contains(&self.number) {
                    return Ok(None);
                }
            }
            if !self.session.readable(until)? {
                return Ok(None);
            }
        }
    }

    fn call(&self, doing: &'static str, command: Command) -> Result<Option<Progress>> {
        let state = TicketState { ticket: self.number, ..TicketState::default() };
        let head = abi::Ticket { header: header(0, 0), state, ..abi::Ticket::default() };
        let thing = format_args!("ticket {}", self.number);
        let head = match self.session.call::<_, u8, u8>(doing, &thing, command, &head, &[]) {
            Ok((head, _)) => head,
            Err(error) if error.errno() == Errno::ENOENT => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(Progress {
            stage: Stage::of(head.state.state),
            bytes: head.state.bytes,
            bytes_total: head.bytes_total,
            files: head.state.files,
            failed: head.state.failed,
            ahead: head.ahead,
            estimate: estimate(head.estimate_ms),
            age: Duration::from_millis(u64::from(head.age_ms)),
        }))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.session.is_ours() {
            return;
        }
        {
            let mut tickets = self.session.tickets();
            if !tickets.open.contains(&self.number) {
                return;
            }
            tickets.dropped.insert(self.number);
        }
        let _ = self.cancel();
    }
}

impl Session {
    /// Ends that are there now, but for those that nobody waits for.
    fn read_ends(self: &Arc<Self>) -> Result<Vec<End>> {
        let mut room = [TicketState::default(); ENDS];
        let mut tickets = self.tickets();
        let mut file: &File = self.file();
        let length = match file.read(room.as_mut_bytes()) {
            Ok(length) => length,
            Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => return Ok(Vec::new()),
            Err(error) => {
                let errno = Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EIO as i32));
                return Err(Error::new("reading tickets", self.shown(), errno));
            }
        };
        let mut ends = Vec::new();
        for bytes in room.as_bytes()[..length].chunks_exact(size_of::<TicketState>()) {
            let Ok(state) = TicketState::read_from_bytes(bytes) else { continue };
            tickets.open.remove(&state.ticket);
            let end = self.end(&state);
            if !tickets.dropped.remove(&state.ticket) {
                ends.push(end);
            }
        }
        Ok(ends)
    }

    fn end(self: &Arc<Self>, state: &TicketState) -> End {
        let why = Errno::from_raw(state.status);
        let ended = match Stage::of(state.state) {
            Stage::Done => Ended::Done,
            Stage::Denied => Ended::Denied(why),
            Stage::Cancelled => Ended::Cancelled(why),
            _ => Ended::Failed(why),
        };
        End {
            ticket: state.ticket,
            tag: state.tag,
            ended,
            lease: (state.lease != 0).then(|| Lease::granted(self, state.lease, state.ttl_ms)),
            bytes: state.bytes,
            files: state.files,
            failed: state.failed,
        }
    }

    /// Waits until a ticket has ended. False: the time is over.
    fn readable(&self, until: Option<Instant>) -> Result<bool> {
        let failed = |errno| Error::new("waiting for tickets", self.shown(), errno);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // What does not fit is longer than anybody waits.
            let limit = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [PollFd::from_borrowed_fd(self.file().as_fd(), PollFlags::IN)];
            match poll(&mut fds, limit.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) if fds[0].revents().contains(PollFlags::IN) => return Ok(true),
                Ok(_) => {
                    return Err(failed(Errno::ENOTCONN).remedy("the daemon is gone; mount it again"));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(failed(Errno::from_raw(errno.raw_os_error()))),
            }
        }
    }
}

fn estimate(millis: u32) -> Option<Duration> {
    (millis != 0).then(|| Duration::from_millis(u64::from(millis)))
}
