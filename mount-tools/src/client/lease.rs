//! Leases as guards: who drops one has given it back.

use std::sync::Arc;
use std::time::Duration;

use kvcachefs::abi::{self, Command};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::Errno;
use super::error::{Error, Result};
use super::handle::{Handle, Session};
use super::window::{Range, millis};
use super::wire::header;

/// What is kept in L1, until this is dropped.
#[derive(Debug)]
pub struct Lease {
    session: Arc<Session>,
    number: u64,
    ttl: Duration,
    own: Own,
    held: bool,
}

/// What of the shares of a session is behind one guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Own {
    /// It was granted here: all that nobody else has attached to.
    All,
    /// It was attached to.
    One,
}

/// Whether there is still something of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Held,
    /// This session has no share of it (any more).
    Gone,
    /// Its time to live was over.
    Expired,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseState {
    pub life: Life,
    /// What is left.
    pub ttl: Duration,
    /// Shares that anybody has, and this session.
    pub parties: u32,
    pub own: u32,
    /// The memory that it holds.
    pub bytes: u64,
    pub ranges: u32,
}

/// A range of a lease, by the version of the file that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    pub node: u64,
    pub offset: u64,
    pub length: u64,
    /// Bytes of it that are still held.
    pub held: u64,
}

impl LeaseState {
    fn of(answer: &abi::Lease) -> Self {
        let life = match answer.state {
            abi::LEASE_EXPIRED => Life::Expired,
            abi::LEASE_GONE => Life::Gone,
            // An answer that no client of this version knows is one of a lease that is not held.
            0 => Life::Held,
            _ => Life::Gone,
        };
        Self {
            life,
            ttl: Duration::from_millis(u64::from(answer.ttl_ms)),
            parties: answer.parties,
            own: answer.own,
            bytes: answer.bytes,
            ranges: answer.ranges,
        }
    }
}

impl Handle {
    /// Takes a share of a lease that another session of this user was granted, which has told its number.
    ///
    /// # Errors
    /// ENOENT, ETIME: it has ended. EBUSY: no share is left. EACCES: it is another user's. EINVAL: it is this session's own.
    pub fn attach(&self, number: u64) -> Result<Lease> {
        let (state, _) = self.session.on_lease::<u8, u8>("attach", Command::Attach, 0, number, 0, &[])?;
        let ttl = LeaseState::of(&state).ttl;
        Ok(Lease { session: Arc::clone(&self.session), number, ttl, own: Own::One, held: true })
    }
}

impl Lease {
    pub(super) fn granted(session: &Arc<Session>, number: u64, ttl_ms: u32) -> Self {
        let ttl = Duration::from_millis(u64::from(ttl_ms));
        Self { session: Arc::clone(session), number, ttl, own: Own::All, held: true }
    }

    /// What the ranks of the request are told.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The time that it had when it was granted, attached to or last extended.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Begins its time to live anew.
    ///
    /// # Errors
    /// ENOENT, ETIME: it has ended.
    pub fn extend(&mut self, ttl: Option<Duration>) -> Result<LeaseState> {
        let (answer, _) = self.call::<u8, u8>("extend", Command::Extend, 0, millis(ttl), &[])?;
        let state = LeaseState::of(&answer);
        self.ttl = state.ttl;
        Ok(state)
    }

    /// How it is now, and what it holds.
    ///
    /// # Errors
    /// ENOENT, ETIME: it has ended.
    pub fn query(&self) -> Result<(LeaseState, Vec<Leased>)> {
        let room = vec![abi::Leased::default(); self.session.limits.ranges];
        let (answer, mut all) = self.call::<_, abi::Leased>("query", Command::Query, 0, 0, &room)?;
        all.truncate(answer.header.count as usize);
        let all = all.iter().map(|one| Leased {
            node: one.node,
            offset: one.offset,
            length: one.length,
            held: one.held,
        });
        Ok((LeaseState::of(&answer), all.collect()))
    }

    /// Gives it back, and says what became of it. Dropping it does the same and says nothing.
    ///
    /// # Errors
    /// The daemon is gone, and the lease with it.
    pub fn release(mut self) -> Result<LeaseState> {
        self.held = false;
        self.give_back()
    }

    /// Gives back parts, by their place ([`Range::item`]) or version ([`Range::node`]): what has been read is free for
    /// others while the rest is kept.
    ///
    /// # Errors
    /// EINVAL: it has no such range. E2BIG: it would be in too many pieces.
    pub fn release_parts(&self, parts: &[Range]) -> Result<LeaseState> {
        if parts.is_empty() {
            // To the daemon that would be the whole.
            return Err(Error::new("release", format!("lease {}", self.number), Errno::EINVAL)
                .remedy("name a part, or release all of it"));
        }
        let items: Vec<abi::Range> = parts.iter().map(|part| part.0).collect();
        let (answer, _) = self.call::<_, u8>("release", Command::Release, 0, 0, &items)?;
        Ok(LeaseState::of(&answer))
    }

    /// Gives back one share of several.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn release_share(&self) -> Result<LeaseState> {
        let (answer, _) = self.call::<u8, u8>("release", Command::Release, 0, 0, &[])?;
        Ok(LeaseState::of(&answer))
    }

    /// Leaves it to the session, with which it ends, unless its time is over before.
    pub fn keep(mut self) -> u64 {
        self.held = false;
        self.number
    }

    fn give_back(&self) -> Result<LeaseState> {
        let flags = if self.own == Own::All { abi::RELEASE_ALL_SHARES } else { 0 };
        let (answer, _) = self.call::<u8, u8>("release", Command::Release, flags, 0, &[])?;
        Ok(LeaseState::of(&answer))
    }

    fn call<I, O>(
        &self,
        doing: &'static str,
        command: Command,
        flags: u16,
        ttl_ms: u32,
        items: &[I],
    ) -> Result<(abi::Lease, Vec<O>)>
    where
        I: IntoBytes + Immutable,
        O: FromBytes,
    {
        self.session.on_lease(doing, command, flags, self.number, ttl_ms, items)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.held && self.session.is_ours() {
            // If the daemon is gone, so is the lease.
            let _ = self.give_back();
        }
    }
}

impl Session {
    fn on_lease<I, O>(
        &self,
        doing: &'static str,
        command: Command,
        flags: u16,
        lease: u64,
        ttl_ms: u32,
        items: &[I],
    ) -> Result<(abi::Lease, Vec<O>)>
    where
        I: IntoBytes + Immutable,
        O: FromBytes,
    {
        let head = abi::Lease { header: header(flags, items.len()), lease, ttl_ms, ..abi::Lease::default() };
        self.call(doing, &format_args!("lease {lease}"), command, &head, items)
    }
}
