//! Leases: ranges that stay in L1, and as they are, until whoever asked for them is done (rule R12).
//!
//! A lease is granted whole, in the step that has seen all of it in L1, or not at all. Its *shares* are its parties: each
//! gives back its own, range by range or at once, and a range is free when nobody holds it any more. Shares belong to
//! sessions and go with them. What a lease holds is noted with the files ([`Hold`]): that is what eviction, writers and
//! the end of a file's life look at. Memory is counted for each lease on its own, so that the bound holds whatever
//! else is leased.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use smallvec::SmallVec;

use super::classify::Seen;
use super::parts::{Parts, blocks_of, merged};
use super::session::{Session, SessionId, Who};
use super::{LEASES_MAX, PARTIES_MAX};
use crate::store::change::Stop;
use crate::store::core::Core;
use crate::store::hot::{Hold, Mem};
use crate::store::lists::Droppable;
use crate::store::node::{Idx, NodeId};

/// The time to live of who asks for none.
const TTL_DEFAULT: Duration = Duration::from_secs(60);
/// When a lease whose time is over, but which somebody reads from right now, is looked at again.
const STILL_USED: Duration = Duration::from_millis(100);

/// Whose memory it is counted as.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Client {
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
    pub who: Who,
    pub items: Vec<Item>,
    /// What nobody has taken over belongs to `session`.
    pub shares: SmallVec<[Share; 1]>,
    pub parties: u32,
    /// Memory that it holds, and of each file.
    pub bytes: u64,
    charges: HashMap<NodeId, u64>,
    pub granted: Instant,
    pub expires: Instant,
    /// When to look at it: its end, or later, if it is still used then.
    pub due: Instant,
}

/// A range of a lease.
pub(super) struct Item {
    pub node: NodeId,
    /// The file whose bytes that one showed.
    shown: NodeId,
    pub bytes: Range<u64>,
}

pub(super) struct Share {
    pub session: SessionId,
    /// What it still holds of ranges that it has released parts of; all of the others.
    pub left: HashMap<u32, Parts>,
}

/// All leases.
#[derive(Default)]
pub struct Leases {
    pub(super) all: HashMap<u64, Lease>,
    last: u64,
    bytes: u64,
    clients: HashMap<Client, u64>,
    pub(super) due: BTreeSet<(Instant, u64)>,
}

impl Leases {
    pub fn count(&self) -> u64 {
        self.all.len() as u64
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn of(&self, client: Client) -> u64 {
        self.clients.get(&client).copied().unwrap_or(0)
    }

    fn recount(&mut self, client: Client, before: u64, now: u64) {
        self.bytes = self.bytes - before + now;
        let of_client = self.clients.entry(client).or_default();
        *of_client = *of_client - before + now;
        if *of_client == 0 {
            self.clients.remove(&client);
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

    /// Its files, each once, and those whose bytes they show.
    fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.items.iter().flat_map(|item| [item.node, item.shown]).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }
}

impl Core {
    /// How long a lease lives for which `ms` are wanted.
    pub(super) fn lease_ttl(&self, ms: u32) -> Duration {
        let wanted = if ms == 0 { TTL_DEFAULT } else { Duration::from_millis(u64::from(ms)) };
        wanted.min(self.settings.lease_ttl_max)
    }

    /// Memory that `blocks` of a file keep in L1: a slab stays whole.
    fn memory_of(&self, idx: Idx, blocks: impl Iterator<Item = u32>) -> u64 {
        let Some(hot) = self.hot(idx) else { return 0 };
        let slab = hot.slab.as_ref().map_or(0, |slab| u64::from(slab.pages()) * 4096);
        let mut blocks = blocks.peekable();
        if hot.sealed() && hot.slab.is_some() && !hot.mixed {
            return if blocks.peek().is_some() { slab } else { 0 };
        }
        let (mut in_slab, mut chunks) = (false, 0);
        for block in blocks {
            match hot.blocks.get(block as usize).map(|block| &block.mem) {
                Some(Mem::Slab) => in_slab = true,
                Some(Mem::Chunk(chunk)) => chunks += chunk.len() as u64,
                Some(Mem::None) | None => {}
            }
        }
        chunks + if in_slab { slab } else { 0 }
    }

    /// Memory that all of a window keeps in L1, file by file, each block once.
    fn charges(&self, window: &[Seen]) -> HashMap<NodeId, u64> {
        let mut files: HashMap<Idx, Parts> = HashMap::new();
        for seen in window {
            let blocks = seen.blocks();
            files.entry(seen.shown).or_default().push(blocks.start as u64..blocks.end as u64);
        }
        let charge = |(idx, parts): (Idx, Parts)| {
            let blocks = merged(parts).into_iter().flatten().map(|block| block as u32);
            (self.id(idx), self.memory_of(idx, blocks))
        };
        files.into_iter().map(charge).collect()
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
        // Bytes are on their way into it, without the lock: it would not stay as it is. Or somebody has been sent to look
        // again and will empty it where it is, which cannot wait.
        let changing = |idx: Idx| {
            let hot = self.hot(idx);
            hot.is_some_and(|hot| hot.writing || hot.zeroing > 0 || hot.promised > 0)
        };
        if window.iter().any(|seen| changing(seen.idx) || changing(seen.shown)) {
            self.counters.leases_denied_changing += 1;
            return Err(Errno::EAGAIN);
        }
        let charges = self.charges(&window);
        let bytes: u64 = charges.values().sum();
        let client = Client::from(&session.who);
        let leases = &mut self.control.leases;
        if leases.of(client) + bytes > self.settings.lease_client_max_bytes {
            self.counters.leases_denied_client += 1;
            return Err(Errno::EDQUOT);
        }
        if leases.bytes + bytes > self.settings.lease_max_bytes {
            self.counters.leases_denied_full += 1;
            return Err(Errno::ENOSPC);
        }
        leases.last += 1;
        let lease = leases.last;
        leases.recount(client, 0, bytes);
        for (item, seen) in (0..).zip(&window) {
            let blocks = seen.blocks();
            let hold = Hold { lease, item, blocks: blocks.start as u32..blocks.end as u32 };
            if seen.shown != seen.idx {
                self.hot_mut(seen.shown).leases.push(hold.clone());
            }
            self.hot_mut(seen.idx).leases.push(hold);
        }
        for &node in charges.keys() {
            self.keep_leased(node.idx());
        }
        let item =
            |seen: Seen| Item { node: self.id(seen.idx), shown: self.id(seen.shown), bytes: seen.bytes };
        let items: Vec<Item> = window.into_iter().map(item).collect();
        for item in &items {
            self.touch(item.node.idx());
        }
        let (granted, ttl) = (Instant::now(), self.lease_ttl(ttl_ms));
        let expires = granted + ttl;
        let share = || Share { session: id, left: HashMap::new() };
        let shares = (0..parties).map(|_| share()).collect();
        let who = session.who.clone();
        let new = Lease {
            session: id,
            who,
            items,
            shares,
            parties,
            bytes,
            charges,
            granted,
            expires,
            due: expires,
        };
        self.control.leases.due.insert((expires, lease));
        self.control.leases.all.insert(lease, new);
        session.leases.insert(lease);
        self.counters.leases_granted += 1;
        Ok((lease, ttl))
    }

    /// A file of which nothing may leave L1 is no candidate any more.
    fn keep_leased(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx).filter(|hot| hot.in_l1_list) else { return };
        let whole = hot.slab.is_some() && !hot.mixed;
        if whole || !self.may_drop(idx) {
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
        }
    }

    /// Notes with the files what is still held of these ranges, and what memory that is.
    pub(super) fn refresh(&mut self, id: u64, items: &[u32]) {
        let Some(mut lease) = self.control.leases.all.remove(&id) else { return };
        let mut nodes = Vec::with_capacity(items.len());
        for &at in items {
            let held = lease.held(at);
            let item = &lease.items[at as usize];
            let both = if item.node == item.shown { &[item.node][..] } else { &[item.node, item.shown][..] };
            for node in both {
                let Some(idx) = self.by_id(*node) else { continue };
                let leases = &mut self.hot_mut(idx).leases;
                leases.retain(|hold| hold.lease != id || hold.item != at);
                let holds = held.iter().map(|part| Hold { lease: id, item: at, blocks: blocks_of(part) });
                leases.extend(holds);
            }
            nodes.extend_from_slice(both);
        }
        nodes.sort_unstable();
        nodes.dedup();
        let before = lease.bytes;
        for node in nodes {
            let Some(idx) = self.by_id(node) else { continue };
            if let Some(&charge) = lease.charges.get(&node) {
                let own =
                    self.hot(idx).map_or(&[][..], |hot| &hot.leases).iter().filter(|hold| hold.lease == id);
                let parts =
                    own.map(|hold| u64::from(hold.blocks.start)..u64::from(hold.blocks.end)).collect();
                let now = self.memory_of(idx, merged(parts).into_iter().flatten().map(|block| block as u32));
                // It may have moved to other memory meanwhile; nobody is charged more for that.
                let now = now.min(charge);
                lease.charges.insert(node, now);
                lease.bytes = lease.bytes - charge + now;
            }
            self.let_lease_go(idx);
        }
        self.control.leases.recount(Client::from(&lease.who), before, lease.bytes);
        self.control.leases.all.insert(id, lease);
    }

    /// Something of a file is not leased any more.
    fn let_lease_go(&mut self, idx: Idx) {
        self.wakes.admission |= !self.waiters.is_empty();
        self.tidy(idx);
    }

    /// Nobody has a share any more, or its time is over.
    pub(super) fn end_lease(&mut self, id: u64) -> Option<Lease> {
        let lease = self.control.leases.all.remove(&id)?;
        self.control.leases.due.remove(&(lease.due, id));
        self.control.leases.recount(Client::from(&lease.who), lease.bytes, 0);
        for node in lease.nodes() {
            let Some(idx) = self.by_id(node) else { continue };
            self.hot_mut(idx).leases.retain(|hold| hold.lease != id);
            self.let_lease_go(idx);
        }
        Some(lease)
    }

    /// Ends leases whose time is over, but for those that somebody reads from right now.
    pub fn end_leases(&mut self, now: Instant) {
        while let Some(&(due, id)) = self.control.leases.due.first().filter(|(due, _)| *due <= now) {
            self.control.leases.due.remove(&(due, id));
            let Some(lease) = self.control.leases.all.get(&id) else { continue };
            let reads = |node: &NodeId| {
                let hot = self.by_id(*node).and_then(|idx| self.hot(idx));
                hot.is_some_and(|hot| hot.pins > 0 || !hot.reads.is_empty())
            };
            if lease.nodes().iter().any(reads) {
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
            let age = lease.granted.elapsed().as_millis();
            self.event(format!(
                "lease {id} of process {} ({}) ended after {age} ms: it was neither released nor extended",
                lease.who.tgid, lease.who.command
            ));
        }
    }

    /// How many leases hold something of a file.
    pub fn leases_of(&self, idx: Idx) -> usize {
        let mut leases: Vec<u64> =
            self.hot(idx).map_or_else(Vec::new, |hot| hot.leases.iter().map(|hold| hold.lease).collect());
        leases.sort_unstable();
        leases.dedup();
        leases.len()
    }

    /// A change of these blocks waits for as long as one of them is leased.
    pub fn wait_for_leases(&self, idx: Idx, blocks: Range<usize>) -> Result<(), Stop> {
        match self.hot(idx) {
            Some(hot) if hot.is_leased(blocks) => Err(Stop::Lease),
            _ => Ok(()),
        }
    }
}
