//! PREFETCH: what becomes of a window, in one step.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::classify::{Seen, Sums, millis};
use super::hints::{Hint, LeaseWanted, NOT_YET, Want};
use super::leases::Client;
use super::session::{Session, SessionId};
use super::tickets::Kind;
use super::{LEASES_MAX, Miss, PARTIES_MAX, Waits};
use crate::abi::{self, RangeState};
use crate::store::core::Core;

/// What becomes of a window.
pub(super) enum Fate {
    /// It is in L1, and leased if that was asked for.
    Done {
        lease: u64,
        ttl: Duration,
    },
    Denied(Errno),
    Begins(Box<Hint>),
}

impl Core {
    pub(super) fn prefetch(
        &mut self,
        id: SessionId,
        session: &mut Session,
        mut asked: abi::Prefetch,
        ranges: &[abi::Range],
        waits: Waits,
    ) -> Result<Vec<u8>, Miss> {
        let window = self.window(session, ranges, waits)?;
        let states = self.states(&window);
        let sums = Sums::of(&states);
        let ask = asked.header.flags & abi::PREFETCH_ASK != 0;
        asked = abi::Prefetch {
            ticket: 0,
            lease: 0,
            status: 0,
            state: abi::TICKET_NONE,
            tier: sums.tier,
            absent: sums.absent,
            failed: sums.failed,
            blocks: sums.blocks,
            blocks_l1: sums.blocks_l1,
            bytes: sums.bytes,
            bytes_l1: sums.bytes_l1,
            bytes_to_read: 0,
            ahead: 0,
            estimate_ms: 0,
            ..asked
        };
        let (ttl_ms, seen) = (std::mem::take(&mut asked.ttl_ms), window.into_iter().flatten().collect());
        match self.fate(id, session, &asked, ttl_ms, seen, &states) {
            Fate::Done { lease, ttl } => {
                (asked.state, asked.lease) = (abi::TICKET_DONE, lease);
                asked.ttl_ms = if lease == 0 { 0 } else { millis(ttl) };
            }
            Fate::Denied(errno) => (asked.state, asked.status) = (abi::TICKET_DENIED, errno as i32),
            Fate::Begins(hint) => {
                asked.bytes_to_read = hint.bytes_total;
                if ask {
                    (asked.ahead, asked.estimate_ms) = self.outlook(&hint, NOT_YET);
                } else {
                    let ticket = self.new_ticket(Kind::Prefetch, Some(id), session.who.clone(), asked.tag);
                    self.add_hint(ticket, *hint);
                    let at = self.hint_progress(ticket);
                    (asked.ticket, asked.state) = (ticket, at.state);
                    (asked.ahead, asked.estimate_ms) = (at.ahead, at.estimate_ms);
                }
            }
        }
        Ok(abi::encode(&asked, &states))
    }

    fn fate(
        &mut self,
        id: SessionId,
        session: &mut Session,
        asked: &abi::Prefetch,
        ttl_ms: u32,
        window: Vec<Seen>,
        states: &[RangeState],
    ) -> Fate {
        let ask = asked.header.flags & abi::PREFETCH_ASK != 0;
        let lease = (asked.header.flags & abi::PREFETCH_LEASE != 0)
            .then_some(LeaseWanted { parties: asked.parties.max(1), ttl_ms });
        if !ask {
            self.counters.hints += 1;
        }
        let wrong = states.iter().find(|state| state.status != 0).map(|state| Errno::from_raw(-state.status));
        let fate = if asked.parties > PARTIES_MAX {
            Fate::Denied(Errno::EINVAL)
        } else if let Some(errno) = wrong.filter(|_| lease.is_some() || window.is_empty()) {
            Fate::Denied(errno)
        } else if asked.blocks == asked.blocks_l1 {
            // It takes no place among those that prefetch, and is answered whether there are any or not.
            let granted = match lease {
                Some(lease) if !ask => self.grant(id, session, window, lease.parties, lease.ttl_ms),
                _ => Ok((0, Duration::ZERO)),
            };
            match granted {
                Ok((lease, ttl)) => {
                    self.counters.hints_bypassed += u64::from(!ask);
                    Fate::Done { lease, ttl }
                }
                Err(errno) => Fate::Denied(errno),
            }
        } else {
            let full = self.has_room_for_ticket(id);
            let leases = || match lease {
                Some(_) if session.leases.len() >= LEASES_MAX as usize => Err(Errno::EMFILE),
                _ => Ok(()),
            };
            let wants = window.iter().map(|seen| Want { node: self.id(seen.idx), bytes: seen.bytes.clone() });
            let hint = self.hint(session, asked, lease, wants.collect());
            match full.and_then(|()| leases()).and_then(|()| self.may_hint(&hint)) {
                Ok(()) => Fate::Begins(Box::new(hint)),
                Err(errno) => Fate::Denied(errno),
            }
        };
        match &fate {
            Fate::Denied(errno) if !ask => self.count_denied(*errno),
            Fate::Begins(hint) if !ask => {
                let (.., joins) = self.demand_of(&hint.wants);
                self.counters.hints_joined += u64::from(joins);
            }
            _ => {}
        }
        fate
    }

    fn hint(
        &self,
        session: &Session,
        asked: &abi::Prefetch,
        lease: Option<LeaseWanted>,
        wants: Vec<Want>,
    ) -> Hint {
        let (memory, brings, reads, _) = self.demand_of(&wants);
        let after = Duration::from_millis(u64::from(asked.deadline_ms));
        Hint {
            who: session.who.clone(),
            wants,
            lease,
            priority: asked.priority,
            deadline: (asked.deadline_ms > 0).then(|| Instant::now() + after),
            absent: u64::from(asked.failed),
            memory,
            brings,
            bytes_total: reads,
            bytes: 0,
            fetch: None,
        }
    }

    /// Whether a hint may wait or begin.
    pub(super) fn may_hint(&self, hint: &Hint) -> Result<(), Errno> {
        if self.settings.prefetch_window == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if hint.memory > self.pool.stats().budget {
            return Err(Errno::ENOSPC);
        }
        if hint.lease.is_some() {
            self.could_lease(hint.memory, hint.wants.len() as u64)?;
        }
        let queued = self.control.hints.queued() >= u64::from(self.settings.prefetch_queue);
        if queued && !self.would_begin(hint) { Err(Errno::EAGAIN) } else { Ok(()) }
    }

    pub(super) fn count_denied(&mut self, errno: Errno) {
        let counters = &mut self.counters;
        *(match errno {
            Errno::EOPNOTSUPP => &mut counters.hints_denied_off,
            Errno::EAGAIN => &mut counters.hints_denied_busy,
            Errno::ENOSPC | Errno::EDQUOT => &mut counters.hints_denied_room,
            Errno::EMFILE => &mut counters.hints_denied_count,
            _ => &mut counters.hints_denied_ranges,
        }) += 1;
    }
}

/// As leases count: of a process, or of a user where processes cannot be told apart.
impl Hint {
    pub(super) fn client(&self) -> Client {
        Client::from(&*self.who)
    }
}
