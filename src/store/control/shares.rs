//! The shares of a lease: who attaches to one, asks after it, extends it, gives back what of it.

use std::collections::HashMap;
use std::ops::Range;

use nix::errno::Errno;

use super::classify::millis;
use super::leases::{Item, Share};
use super::parts::{Parts, without};
use super::session::{Session, SessionId};
use super::{LEASES_MAX, Miss};
use crate::abi;
use crate::store::core::Core;
use crate::sync::now;

/// Pieces of a range that a share may be left with: who gives back every other byte is told to take more at a time.
const PARTS_MAX: usize = 1024;

/// Which part of the range `item` a client means by `range`.
fn meant(range: &abi::Range, item: &Item) -> Range<u64> {
    let end = if range.length == 0 { item.bytes.end } else { range.offset + range.length };
    range.offset.max(item.bytes.start)..end.min(item.bytes.end)
}

impl Core {
    /// Takes `count` shares from a session, or as many as it has. Whether the lease has ended with them.
    fn drop_shares(&mut self, id: u64, session: SessionId, count: usize) -> bool {
        let Some(lease) = self.control.leases.all.get_mut(&id) else { return true };
        let mut left = count;
        lease.shares.retain(|share| {
            let goes = share.session == session && left > 0;
            left -= usize::from(goes);
            !goes
        });
        if lease.shares.is_empty() {
            self.end_lease(id);
            return true;
        }
        let items: Vec<u32> = (0..lease.items.len() as u32).collect();
        self.refresh(id, &items);
        false
    }

    /// All that a session has, which is closed.
    pub(super) fn release_all(&mut self, id: SessionId, session: &Session) {
        for &lease in &session.leases {
            if self.drop_shares(lease, id, usize::MAX) {
                self.counters.leases_closed += 1;
            }
        }
    }

    /// The state of a lease, as the session sees it.
    fn lease_state(&self, id: SessionId, session: &Session, mut answer: abi::Lease) -> abi::Lease {
        let lease =
            self.control.leases.all.get(&answer.lease).filter(|_| session.leases.contains(&answer.lease));
        let Some(lease) = lease else {
            let expired = session.had(answer.lease) == Some(true);
            let state = abi::LEASE_GONE | if expired { abi::LEASE_EXPIRED } else { 0 };
            return abi::Lease { header: answer.header, lease: answer.lease, state, ..abi::Lease::default() };
        };
        answer.ttl_ms = millis(lease.expires.saturating_duration_since(now()));
        answer.parties = lease.shares.len() as u32;
        answer.own = lease.own(id) as u32;
        answer.state = 0;
        answer.bytes = lease.bytes;
        answer.ranges = lease.items.len() as u32;
        answer
    }

    /// Only who has a share may ask.
    fn has_share(&self, session: &Session, lease: u64) -> Result<(), Errno> {
        match (session.leases.contains(&lease), session.had(lease)) {
            (true, _) => Ok(()),
            (false, Some(true)) => Err(Errno::ETIME),
            (false, _) => Err(Errno::ENOENT),
        }
    }

    pub(super) fn extend_lease(
        &mut self,
        id: SessionId,
        session: &mut Session,
        asked: abi::Lease,
    ) -> Result<Vec<u8>, Miss> {
        self.has_share(session, asked.lease)?;
        let expires = now() + self.lease_ttl(asked.ttl_ms);
        let leases = &mut self.control.leases;
        let lease = leases.all.get_mut(&asked.lease).ok_or(Errno::ENOENT)?;
        leases.due.remove(&(lease.due, asked.lease));
        (lease.expires, lease.due) = (expires, expires);
        leases.due.insert((expires, asked.lease));
        Ok(abi::encode::<_, u8>(&self.lease_state(id, session, asked), &[]))
    }

    pub(super) fn attach(
        &mut self,
        id: SessionId,
        session: &mut Session,
        asked: abi::Lease,
    ) -> Result<Vec<u8>, Miss> {
        let Some(lease) = self.control.leases.all.get_mut(&asked.lease) else {
            self.has_share(session, asked.lease)?;
            return Err(Errno::ENOENT.into());
        };
        if session.who.uid != 0 && session.who.uid != lease.who.uid {
            return Err(Errno::EACCES.into());
        }
        let giver = lease.session;
        if giver == id {
            return Err(Errno::EINVAL.into());
        }
        if session.leases.len() >= LEASES_MAX as usize {
            return Err(Errno::EMFILE.into());
        }
        // One of which nothing has been released, if there is one.
        let spare = (0..).zip(&lease.shares).filter(|(_, share)| share.session == giver);
        let at = spare.min_by_key(|(_, share)| share.left.len()).map(|(at, _): (usize, _)| at);
        lease.shares[at.ok_or(Errno::EBUSY)?].session = id;
        session.leases.insert(asked.lease);
        if lease.own(giver) == 0
            && let Some(giver) = self.control.sessions.get_mut(&giver)
        {
            giver.lost(asked.lease, false);
        }
        Ok(abi::encode::<_, u8>(&self.lease_state(id, session, asked), &[]))
    }

    pub(super) fn query(
        &mut self,
        id: SessionId,
        session: &mut Session,
        asked: abi::Lease,
        room: usize,
    ) -> Result<Vec<u8>, Miss> {
        self.has_share(session, asked.lease)?;
        let lease = self.control.leases.all.get(&asked.lease).ok_or(Errno::ENOENT)?;
        let leased = |(at, item): (u32, &Item)| abi::Leased {
            node: item.node.0,
            offset: item.bytes.start,
            length: item.bytes.end - item.bytes.start,
            held: lease.held(at).iter().map(|part| part.end - part.start).sum(),
        };
        let ranges: Vec<abi::Leased> = (0..).zip(&lease.items).take(room).map(leased).collect();
        let mut answer = self.lease_state(id, session, asked);
        answer.header.count = ranges.len() as u32;
        Ok(abi::encode(&answer, &ranges))
    }

    /// Gives back a share, or all that the session has: of these ranges, or of everything. What is not there any more is
    /// given back already.
    pub(super) fn release_lease(
        &mut self,
        id: SessionId,
        session: &mut Session,
        asked: abi::Lease,
        ranges: &[abi::Range],
    ) -> Result<Vec<u8>, Miss> {
        let known = session.leases.contains(&asked.lease);
        if !known && session.had(asked.lease).is_none() {
            return Err(Errno::ENOENT.into());
        }
        if known {
            let all = asked.header.flags & abi::RELEASE_ALL_SHARES != 0;
            if ranges.is_empty() {
                self.drop_shares(asked.lease, id, if all { usize::MAX } else { 1 });
            } else {
                self.release_ranges(asked.lease, id, all, ranges)?;
            }
            let left = self.control.leases.all.get(&asked.lease).map_or(0, |lease| lease.own(id));
            if left == 0 {
                session.lost(asked.lease, false);
            }
        }
        Ok(abi::encode::<_, u8>(&self.lease_state(id, session, asked), &[]))
    }

    fn release_ranges(
        &mut self,
        id: u64,
        session: SessionId,
        all: bool,
        ranges: &[abi::Range],
    ) -> Result<(), Errno> {
        let lease = self.control.leases.all.get_mut(&id).ok_or(Errno::ENOENT)?;
        let mut cuts: Vec<(u32, Range<u64>)> = Vec::with_capacity(ranges.len());
        for range in ranges {
            if range.unit == abi::UNIT_BLOCKS {
                return Err(Errno::EOPNOTSUPP);
            }
            let proper = range.unit == abi::UNIT_BYTES && range.reserved == 0 && range.generation == 0;
            if !proper || range.offset.checked_add(range.length).is_none() {
                return Err(Errno::EINVAL);
            }
            let before = cuts.len();
            match range.kind {
                abi::KIND_ITEM => {
                    let at = usize::try_from(range.id).ok().filter(|at| *at < lease.items.len());
                    let at = at.ok_or(Errno::EINVAL)?;
                    cuts.push((at as u32, meant(range, &lease.items[at])));
                }
                abi::KIND_NODE => {
                    let of_node = (0..).zip(&lease.items).filter(|(_, item)| item.node.0 == range.id);
                    cuts.extend(of_node.map(|(at, item)| (at, meant(range, item))));
                }
                // A name may lead elsewhere by now.
                _ => {}
            }
            if cuts.len() == before {
                return Err(Errno::EINVAL);
            }
        }
        let holds = |share: &Share| {
            cuts.iter().any(|(at, cut)| match share.left.get(at) {
                Some(left) => left.iter().any(|part| part.start < cut.end && cut.start < part.end),
                None => true,
            })
        };
        let own = (0..lease.shares.len()).filter(|&at| lease.shares[at].session == session);
        let chosen: Vec<usize> = match all {
            true => own.collect(),
            false => own.filter(|&at| holds(&lease.shares[at])).take(1).collect(),
        };
        let mut left: Vec<HashMap<u32, Parts>> = Vec::with_capacity(chosen.len());
        for &at in &chosen {
            let mut of_share = HashMap::new();
            for (item, cut) in &cuts {
                let before = || {
                    let left = lease.shares[at].left.get(item).cloned();
                    left.unwrap_or_else(|| vec![lease.items[*item as usize].bytes.clone()])
                };
                let parts = of_share.entry(*item).or_insert_with(before);
                *parts = without(parts, cut);
                if parts.len() > PARTS_MAX {
                    return Err(Errno::E2BIG);
                }
            }
            left.push(of_share);
        }
        for (&at, left) in chosen.iter().zip(left) {
            lease.shares[at].left.extend(left);
        }
        for &at in chosen.iter().rev() {
            if lease.is_done(&lease.shares[at]) {
                // Nothing else was left of it.
                lease.shares.remove(at);
            }
        }
        if lease.shares.is_empty() {
            self.end_lease(id);
            return Ok(());
        }
        let mut items: Vec<u32> = cuts.into_iter().map(|(at, _)| at).collect();
        items.sort_unstable();
        items.dedup();
        self.refresh(id, &items);
        Ok(())
    }
}
