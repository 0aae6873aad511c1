//! What an engine asks through `.ctl/lease` and `.ctl/prefetch`: which of its ranges are where, and leases on them.
//!
//! Each open of one of these files is a *session*. It owns the names that it has interned and the leases that it was
//! granted, and all of that goes with it: the kernel releases the handle when the last descriptor is closed, however
//! its process ends (rule R12). Everything here happens under the store's one lock, so an answer about a window is
//! true for one instant, and a lease is granted in the same (rule R11).

mod classify;
mod drains;
mod fetch;
mod hints;
mod holds;
mod leases;
mod names;
mod parts;
mod prefetch;
mod report;
mod session;
mod shares;
mod text;
mod tickets;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

pub use self::hints::Hints;
pub use self::leases::Leases;
use self::session::Session;
pub use self::session::{SessionId, Who};
pub use self::tickets::TICKETS_MAX;
use self::tickets::Tickets;
use super::core::Core;
use super::hot::Then;
use super::node::Idx;
use super::process::Caller;
use super::{Handle, IoctlReply, Store};
use crate::abi::{self, NameList, Request};

/// Names that one session may have interned: with their places in the tree, some 30 MiB.
pub const NAMES_MAX: u32 = 1 << 18;
/// Those of all sessions.
const NAMES_TOTAL_MAX: u64 = 1 << 22;
/// Leases that one session may have shares of.
pub const LEASES_MAX: u32 = 4096;
/// Shares of one lease: the ranks of one request.
pub const PARTIES_MAX: u32 = 1024;

/// All sessions, and what they own.
#[derive(Default)]
pub struct State {
    sessions: HashMap<SessionId, Box<Session>>,
    next_session: u64,
    /// Names that all of them have interned.
    names: u64,
    pub leases: Leases,
    pub(in crate::store) tickets: Tickets,
    drains: drains::Drains,
    pub hints: Hints,
}

impl State {
    pub fn sessions(&self) -> u64 {
        self.sessions.len() as u64
    }

    pub fn names(&self) -> u64 {
        self.names
    }
}

/// Why a name leads nowhere.
enum Miss {
    Fail(Errno),
    /// It is being published: its writer has closed it, and the kernel's RELEASE is on its way (rule R1).
    Releasing(Idx),
}

impl From<Errno> for Miss {
    fn from(errno: Errno) -> Self {
        Self::Fail(errno)
    }
}

/// One request waits for files that are being released only so long, however many there are.
#[derive(Clone, Copy)]
struct Waits {
    are_over: bool,
}

impl Core {
    /// Runs `f` with a session that is taken out of the core meanwhile.
    fn in_session<R>(
        &mut self,
        id: SessionId,
        f: impl FnOnce(&mut Self, &mut Session) -> Result<R, Miss>,
    ) -> Result<R, Miss> {
        let Some(mut session) = self.control.sessions.remove(&id) else { return Err(Errno::EBADF.into()) };
        let result = f(self, &mut session);
        self.control.sessions.insert(id, session);
        result
    }

    /// The answer to a request, which takes the place of the request in the client's memory.
    fn control(&mut self, id: SessionId, request: &Request, waits: Waits) -> Result<Vec<u8>, Miss> {
        if let Request::Hello(hello) = request {
            let hello = self.hello(*hello);
            return self.in_session(id, |_, session| {
                session.greeted = true;
                Ok(abi::encode::<_, u8>(&hello, &[]))
            });
        }
        self.in_session(id, |core, session| {
            if !session.greeted {
                return Err(Errno::EPROTO.into());
            }
            core.answer(id, session, request, waits)
        })
    }

    fn answer(
        &mut self,
        id: SessionId,
        session: &mut Session,
        request: &Request,
        waits: Waits,
    ) -> Result<Vec<u8>, Miss> {
        match request {
            // Answered before it came here; ID is asked of a file.
            Request::Hello(_) | Request::Id(_) => Err(Errno::ENOTTY.into()),
            Request::Names(names) => {
                let batch = session.batch;
                let header = abi::Header { count: batch.count, ..names.header };
                let names = abi::Names { header, first: batch.first, generation: batch.generation };
                Ok(abi::encode::<_, u8>(&names, &[]))
            }
            Request::Intern(intern, list) => {
                let batch = self.intern(session, list)?;
                let intern = abi::Intern { first: batch.first, generation: batch.generation, ..*intern };
                Ok(abi::encode::<_, u8>(&intern, &[]))
            }
            Request::Forget(forget, slots) => {
                let forgotten = session.names.forget(slots);
                self.control.names -= u64::from(forgotten);
                Ok(abi::encode::<_, u8>(&abi::Forget { forgotten, ..*forget }, &[]))
            }
            Request::Lookup(lookup, ranges) => self.look_up(session, *lookup, ranges, waits),
            Request::Classify(classify, ranges) => self.classify(id, session, *classify, ranges, waits),
            Request::Extend(lease) => self.extend_lease(id, session, *lease),
            Request::Release(lease, ranges) => self.release_lease(id, session, *lease, ranges),
            Request::Attach(lease) => self.attach(id, session, *lease),
            Request::Query(lease, room) => self.query(id, session, *lease, *room),
            Request::Cancel(ticket) => self.ask_ticket(id, session, *ticket, true),
            Request::Ticket(ticket) => self.ask_ticket(id, session, *ticket, false),
            Request::Prefetch(prefetch, ranges) => self.prefetch(id, session, *prefetch, ranges, waits),
            Request::Drain(drain, ranges) => self.drain(id, session, *drain, ranges, waits),
            Request::Failures(failures, room) => self.failures(id, *failures, *room),
        }
    }

    /// What this daemon allows, in answer to `hello`.
    fn hello(&self, hello: abi::Hello) -> abi::Hello {
        let header = abi::Header { version: abi::VERSION, ..hello.header };
        let millis = |time: std::time::Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        abi::Hello {
            header,
            features: abi::FEATURE_LEASES | abi::FEATURE_PREFETCH | abi::FEATURE_DRAIN,
            names_max: NAMES_MAX,
            names_bytes_max: abi::NAMES_BYTES_MAX,
            ranges_max: abi::RANGES_MAX,
            leases_max: LEASES_MAX,
            lease_bytes_max: self.settings.lease_max_bytes,
            lease_client_bytes_max: self.settings.lease_client_max_bytes,
            block_bytes: super::hot::BLOCK as u32,
            parties_max: PARTIES_MAX,
            ttl_default_ms: millis(self.lease_ttl(0)),
            ttl_max_ms: millis(self.settings.lease_ttl_max),
            prefetch_window: self.settings.prefetch_window,
            prefetch_queue: self.settings.prefetch_queue,
            prefetch_bytes_max: self.settings.prefetch_window_bytes,
            tickets_max: TICKETS_MAX,
            reserved: 0,
        }
    }
}

impl Store {
    /// Somebody has opened a control file that owns something.
    pub fn open_session(self: &Arc<Self>, caller: &Caller) -> SessionId {
        let who = Who::of(caller);
        self.with(|core| {
            core.control.next_session += 1;
            let id = SessionId(core.control.next_session);
            core.control.sessions.insert(id, Box::new(Session::new(who)));
            id
        })
    }

    /// The last descriptor is closed: all that the session owns is given back.
    pub fn close_session(self: &Arc<Self>, id: SessionId) {
        self.with(|core| {
            let Some(session) = core.control.sessions.remove(&id) else { return };
            core.control.names -= u64::from(session.names.count());
            core.release_all(id, &session);
            core.drop_tickets(id);
        });
    }

    /// Whether what is written to a handle are names, and not text.
    pub fn is_greeted(self: &Arc<Self>, id: SessionId) -> bool {
        self.lock().is_greeted(id)
    }

    /// Names that came by write(2): all of them, or none.
    pub fn write_names(self: &Arc<Self>, id: SessionId, data: &[u8]) -> Result<u32, Errno> {
        let list = abi::names_in_write(data)?;
        let len = data.len() as u32;
        self.with(|core| {
            let interned = core.in_session(id, |core, session| Ok(core.intern(session, &list)?));
            match interned {
                Ok(_) => Ok(len),
                Err(Miss::Fail(errno)) => Err(errno),
                Err(Miss::Releasing(_)) => Err(Errno::EIO),
            }
        })
    }

    /// Answers what a session asks. Only a file that is just being published is waited for, as lookups wait for it.
    pub fn control(self: &Arc<Self>, id: SessionId, request: Request, reply: IoctlReply) {
        self.control_until(id, request, None, reply);
    }

    fn control_until(
        self: &Arc<Self>,
        id: SessionId,
        request: Request,
        until: Option<Instant>,
        reply: IoctlReply,
    ) {
        self.with(|core| {
            let now = crate::sync::now();
            let waits = Waits { are_over: until.is_some_and(|until| until <= now) };
            match core.control(id, &request, waits) {
                Ok(answer) => core.reply(move || reply(Ok(answer))),
                Err(Miss::Fail(errno)) => core.reply(move || reply(Err(errno))),
                Err(Miss::Releasing(idx)) => {
                    let until = until.unwrap_or(now + core.settings.publish_wait);
                    let store = self.clone();
                    let again = move || store.control_until(id, request, Some(until), reply);
                    core.wait_for_release(idx, Then::Again(Box::new(again)));
                }
            }
        });
    }

    /// What ID says of an open file.
    pub fn identify(self: &Arc<Self>, handle: &Handle, id: abi::Id) -> Result<Vec<u8>, Errno> {
        let core = self.lock();
        let idx = core.by_id(handle.id).ok_or(Errno::ESTALE)?;
        let header = id.header;
        let (node, size, state) = (handle.id.0, core.node(idx).size, core.file_state(idx));
        Ok(abi::encode::<_, u8>(&abi::Id { header, node, size, state, reserved: [0; 7] }, &[]))
    }

    /// What HELLO says to a client of another version.
    pub fn hello(self: &Arc<Self>) -> Vec<u8> {
        abi::encode::<_, u8>(&self.lock().hello(abi::Hello::default()), &[])
    }
}

impl Core {
    fn is_greeted(&self, id: SessionId) -> bool {
        self.control.sessions.get(&id).is_some_and(|session| session.greeted)
    }

    /// Interns a list for `session`, all of it or nothing.
    fn intern(&mut self, session: &mut Session, list: &NameList) -> Result<names::Batch, Errno> {
        let count = list.names.len() as u64;
        if self.control.names + count > NAMES_TOTAL_MAX {
            return Err(Errno::ENOSPC);
        }
        session.batch = session.names.intern(list)?;
        self.control.names += count;
        Ok(session.batch)
    }
}
