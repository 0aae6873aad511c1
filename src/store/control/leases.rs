//! Leases: ranges that stay in L1, and as they are, until whoever asked for them is done (rule R12).
//!
//! A lease is granted whole, in the step that has seen all of it in L1, or not at all. Its *shares* are its parties: each
//! gives back its own, range by range or at once, and a range is free when nobody holds it any more. Shares belong to
//! sessions and go with them. Memory is counted for each lease on its own, so that the bound holds whatever
//! else is leased.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use smallvec::{SmallVec, smallvec};

use super::classify::Seen;
use super::holds::{FileUse, Files, Held};
use super::parts::{Parts, blocks_of, merged};
use super::session::{Session, SessionId, Who};
use super::{LEASES_MAX, PARTIES_MAX};
use crate::store::change::Stop;
use crate::store::core::Core;
use crate::store::node::{Idx, NodeId};
use crate::sync;

/// The time to live of who asks for none.
const TTL_DEFAULT: Duration = Duration::from_secs(60);
/// Ranges that the leases of one process, and all leases, may have: what the daemon keeps of each is no part of L1.
const CLIENT_RANGES_MAX: u64 = 1 << 17;
const RANGES_MAX: u64 = 1 << 20;
/// When a lease whose time is over, but which somebody reads from right now, is looked at again.
const STILL_USED: Duration = Duration::from_millis(100);

/// Whose memory it is counted as.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Client {
    Process(u32),
    /// Of processes that cannot be told apart.
    User(u32),
}

impl From<&Who> for Client {
    fn from(who: &Who) -> Self {
        if who.tgid == 0 { Self::User(who.uid) } else { Self::Process(who.tgid) }
    }
}

pub(super) struct Lease {
    /// Who was granted it.
    pub session: SessionId,
    pub who: Arc<Who>,
    pub items: Vec<Item>,
    /// What nobody has taken over belongs to `session`.
    pub shares: SmallVec<[Share; 1]>,
    pub parties: u32,
    /// Memory that it holds, and of each file.
    pub bytes: u64,
    pub files: Files,
    pub granted: Instant,
    pub expires: Instant,
    /// When to look at it: its end, or later, if it is still used then.
    pub due: Instant,
}

/// A range of a lease.
pub(super) struct Item {
    pub node: NodeId,
    /// The file whose bytes that one showed.
    pub shown: NodeId,
    pub bytes: Range<u64>,
    /// The blocks that somebody still holds: of an empty range, an empty one.
    pub held: Held,
}

pub(super) struct Share {
    pub session: SessionId,
    /// What it still holds of ranges that it has released parts of; all of the others.
    pub left: HashMap<u32, Parts>,
}

/// What the leases of one client have.
#[derive(Default, Clone, Copy)]
struct Used {
    bytes: u64,
    ranges: u64,
}

/// All leases.
#[derive(Default)]
pub struct Leases {
    pub(super) all: HashMap<u64, Lease>,
    last: u64,
    bytes: u64,
    clients: HashMap<Client, Used>,
    ranges: u64,
    /// Of `bytes`: set aside for hints, which have no lease yet.
    aside: u64,
    pub(super) due: BTreeSet<(Instant, u64)>,
}

impl Leases {
    pub fn count(&self) -> u64 {
        self.all.len() as u64
    }

    pub fn bytes(&self) -> u64 {
        self.bytes - self.aside
    }

    /// What is set aside for the leases of hints.
    pub fn aside(&self) -> u64 {
        self.aside
    }

    fn of(&self, client: Client) -> Used {
        self.clients.get(&client).copied().unwrap_or_default()
    }

    pub(super) fn recount(&mut self, client: Client, before: u64, now: u64) {
        self.bytes = self.bytes - before + now;
        let used = self.clients.entry(client).or_default();
        used.bytes = used.bytes - before + now;
    }

    fn add_ranges(&mut self, client: Client, count: u64) {
        self.ranges += count;
        self.clients.entry(client).or_default().ranges += count;
    }

    /// The last that is done for a lease: a client that has none is forgotten.
    fn remove_ranges(&mut self, client: Client, count: u64) {
        self.ranges -= count;
        if let Some(used) = self.clients.get_mut(&client) {
            used.ranges -= count;
            if used.ranges == 0 {
                debug_assert_eq!(used.bytes, 0, "memory of no range");
                self.clients.remove(&client);
            }
        }
    }
}

impl Lease {
    /// What somebody still holds of a range.
    pub fn held(&self, item: u32) -> Parts {
        let bytes = &self.items[item as usize].bytes;
        let mut all = Parts::new();
        for share in &self.shares {
            match share.left.get(&item) {
                Some(left) => all.extend_from_slice(left),
                None => return vec![bytes.clone()],
            }
        }
        merged(all)
    }

    pub fn is_done(&self, share: &Share) -> bool {
        (0..)
            .zip(&self.items)
            .all(|(at, item)| item.bytes.is_empty() || share.left.get(&at).is_some_and(Vec::is_empty))
    }

    pub fn own(&self, session: SessionId) -> usize {
        self.shares.iter().filter(|share| share.session == session).count()
    }
}

impl Core {
    /// How long a lease lives for which `ms` are wanted.
    pub(super) fn lease_ttl(&self, ms: u32) -> Duration {
        let wanted = if ms == 0 { TTL_DEFAULT } else { Duration::from_millis(u64::from(ms)) };
        wanted.min(self.settings.lease_ttl_max)
    }

    /// A lease of `parties` shares on a window that is in L1, and its time to live.
    pub(super) fn grant(
        &mut self,
        id: SessionId,
        session: &mut Session,
        window: Vec<Seen>,
        parties: u32,
        ttl_ms: u32,
    ) -> Result<(u64, Duration), Errno> {
        if parties > PARTIES_MAX {
            return Err(Errno::EINVAL);
        }
        if session.leases.len() >= LEASES_MAX as usize {
            self.counters.leases_denied_count += 1;
            return Err(Errno::EMFILE);
        }
        if self.is_changing(&window) {
            self.counters.leases_denied_changing += 1;
            return Err(Errno::EAGAIN);
        }
        let client = Client::from(&*session.who);
        let count = window.len() as u64;
        let files = self.files_of(&window);
        let bytes: u64 = files.iter().map(|file| file.charge).sum();
        if let Err(errno) = self.room_for_lease(client, bytes, count) {
            *(match errno {
                Errno::EMFILE => &mut self.counters.leases_denied_count,
                Errno::EDQUOT => &mut self.counters.leases_denied_client,
                _ => &mut self.counters.leases_denied_full,
            }) += 1;
            return Err(errno);
        }
        let item = |seen: Seen| Item {
            node: self.id(seen.idx),
            shown: self.id(seen.shown),
            held: smallvec![blocks_of(&seen.bytes)],
            bytes: seen.bytes,
        };
        let items: Vec<Item> = window.into_iter().map(item).collect();
        self.hold(&items, &files);
        // The first of them leaves last: what follows is of use only together with what is before it.
        let now = self.ticks();
        for item in items.iter().rev() {
            self.touch_at(item.node.idx(), now);
        }
        let leases = &mut self.control.leases;
        leases.last += 1;
        let lease = leases.last;
        leases.recount(client, 0, bytes);
        leases.add_ranges(client, count);
        let (granted, ttl) = (sync::now(), self.lease_ttl(ttl_ms));
        let expires = granted + ttl;
        let share = || Share { session: id, left: HashMap::new() };
        let shares = (0..parties).map(|_| share()).collect();
        let who = session.who.clone();
        let new =
            Lease { session: id, who, items, shares, parties, bytes, files, granted, expires, due: expires };
        self.control.leases.due.insert((expires, lease));
        self.control.leases.all.insert(lease, new);
        session.leases.insert(lease);
        self.counters.leases_granted += 1;
        Ok((lease, ttl))
    }

    /// Bytes are on their way into a file of the window, without the lock: it would not stay as it is. Or somebody has been
    /// sent to look again and will empty it where it is, which cannot wait.
    pub(super) fn is_changing(&self, window: &[Seen]) -> bool {
        let changing = |idx: Idx| {
            let hot = self.hot(idx);
            hot.is_some_and(|hot| hot.writing || hot.zeroing > 0 || hot.promised > 0)
        };
        window.iter().any(|seen| changing(seen.idx) || (seen.shown != seen.idx && changing(seen.shown)))
    }

    /// Whether a client may have a lease of so many bytes and ranges beside those there are.
    pub(super) fn room_for_lease(&self, client: Client, bytes: u64, ranges: u64) -> Result<(), Errno> {
        let (leases, used) = (&self.control.leases, self.control.leases.of(client));
        match () {
            () if used.ranges + ranges > CLIENT_RANGES_MAX || leases.ranges + ranges > RANGES_MAX => {
                Err(Errno::EMFILE)
            }
            () if used.bytes + bytes > self.settings.lease_client_max_bytes => Err(Errno::EDQUOT),
            () if leases.bytes + bytes > self.settings.lease_max_bytes => Err(Errno::ENOSPC),
            () => Ok(()),
        }
    }

    /// Whether a client may have such a lease if nobody has another.
    pub(super) fn could_lease(&self, bytes: u64, ranges: u64) -> Result<(), Errno> {
        match () {
            () if ranges > CLIENT_RANGES_MAX => Err(Errno::EMFILE),
            () if bytes > self.settings.lease_max_bytes => Err(Errno::ENOSPC),
            () if bytes > self.settings.lease_client_max_bytes => Err(Errno::EDQUOT),
            () => Ok(()),
        }
    }

    /// Counts what a hint will lease as leased already, so that it is there when all has come.
    pub(super) fn set_aside(&mut self, client: Client, bytes: u64, ranges: u64) {
        let leases = &mut self.control.leases;
        leases.recount(client, 0, bytes);
        leases.add_ranges(client, ranges);
        leases.aside += bytes;
    }

    pub(super) fn give_back_aside(&mut self, client: Client, bytes: u64, ranges: u64) {
        let leases = &mut self.control.leases;
        leases.aside -= bytes;
        leases.recount(client, bytes, 0);
        leases.remove_ranges(client, ranges);
    }

    /// Nobody has a share any more, or its time is over.
    pub(super) fn end_lease(&mut self, id: u64) -> Option<Lease> {
        let lease = self.control.leases.all.remove(&id)?;
        self.control.leases.due.remove(&(lease.due, id));
        let client = Client::from(&*lease.who);
        self.control.leases.recount(client, lease.bytes, 0);
        self.control.leases.remove_ranges(client, lease.items.len() as u64);
        self.let_go_of(&lease.items, &lease.files);
        Some(lease)
    }

    /// Ends leases whose time is over, but for those that somebody reads from right now.
    pub fn end_leases(&mut self, now: Instant) {
        while let Some(&(due, id)) = self.control.leases.due.first().filter(|(due, _)| *due <= now) {
            self.control.leases.due.remove(&(due, id));
            let Some(lease) = self.control.leases.all.get(&id) else { continue };
            let reads = |file: &FileUse| {
                let hot = self.by_id(file.node).and_then(|idx| self.hot(idx));
                hot.is_some_and(|hot| hot.pins > 0 || !hot.reads.is_empty())
            };
            if lease.files.iter().any(reads) {
                let due = now + STILL_USED;
                if let Some(lease) = self.control.leases.all.get_mut(&id) {
                    lease.due = due;
                }
                self.control.leases.due.insert((due, id));
                continue;
            }
            let Some(lease) = self.end_lease(id) else { continue };
            for share in &lease.shares {
                if let Some(session) = self.control.sessions.get_mut(&share.session) {
                    session.lost(id, true);
                }
            }
            self.counters.leases_expired += 1;
            let age = now.saturating_duration_since(lease.granted).as_millis();
            self.event(format!(
                "lease {id} of process {} ({}) ended after {age} ms: it was neither released nor extended",
                lease.who.tgid, lease.who.command
            ));
        }
    }

    /// A change of these blocks waits for as long as one of them is leased.
    pub fn wait_for_leases(&self, idx: Idx, blocks: Range<usize>) -> Result<(), Stop> {
        match self.hot(idx) {
            Some(hot) if hot.is_leased(blocks) => Err(Stop::Lease),
            _ => Ok(()),
        }
    }
}
