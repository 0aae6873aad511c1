//! What happens because time passes: bounded waits end, promises grow old, L1's slabs are tended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::Store;
use super::change::{Needs, Waiter};
use super::core::Core;
use super::node::NodeId;

/// How often L1 is tended when nothing else is due.
const TEND_EVERY: Duration = Duration::from_millis(100);

impl Core {
    fn end_waits(&mut self, id: NodeId, now: Instant) {
        let Some(idx) = self.by_id(id) else { return };
        let Some(hot) = self.node_mut(idx).hot.as_mut() else { return };
        if hot.lookups.iter().any(|lookup| lookup.deadline <= now) {
            if let Some(private) = hot.private_mut() {
                private.waited = true;
            }
            self.answer_lookups(idx);
        }
        let Some(hot) = self.node_mut(idx).hot.as_mut() else { return };
        let (over, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut hot.reads).into_iter().partition(|read| read.deadline <= now);
        hot.reads = waiting;
        let next = hot.reads.iter().map(|read| read.deadline).min();
        if let Some(next) = next {
            self.deadlines.push((next, id));
        }
        for read in over {
            self.counters.timeouts += 1;
            self.reply(move || (read.reply)(Err(Errno::EIO)));
        }
        self.tidy(idx);
    }

    /// Changes that have waited too long. As long as the devices take bytes, a slow device is all that is wrong, and
    /// the writers' turn will come (rule R7); once they take none for a whole deadline, they have failed.
    fn end_changes(&mut self, now: Instant) {
        let (written, more) = (self.counters.writeback_bytes, self.settings.request_deadline);
        let due = |waiter: &&mut Waiter| {
            waiter.deadline <= now && waiter.written < written && waiter.waits_for != Needs::Lease
        };
        for waiter in self.waiters.iter_mut().filter(due) {
            (waiter.written, waiter.deadline) = (written, now + more);
        }
        while let Some(at) = self.waiters.iter().position(|waiter| waiter.deadline <= now) {
            let Some(waiter) = self.waiters.remove(at) else { return };
            self.counters.timeouts += 1;
            if waiter.waits_for == Needs::Lease {
                self.counters.lease_timeouts += 1;
                self.event("a write waited until its deadline for a lease to be released".to_owned());
                self.give_up_waiting(waiter, Errno::ETIMEDOUT);
            } else {
                self.event(
                    "a write waited for room until its deadline, in which the devices took nothing"
                        .to_owned(),
                );
                self.give_up_waiting(waiter, Errno::EIO);
            }
            self.wakes.admission = true;
        }
    }
}

impl Store {
    pub(crate) fn run_timer(self: &Arc<Self>) {
        let mut tend = Instant::now();
        loop {
            let now = Instant::now();
            let mut core = self.lock();
            if core.stopping {
                return;
            }
            let hints = core.control.hints.next_deadline();
            let next = [core.deadlines.next(), hints].into_iter().flatten().fold(tend, Instant::min);
            if next > now {
                self.wake_timer.wait_until(&mut core, next);
                if core.stopping {
                    return;
                }
            }
            let now = Instant::now();
            while let Some(id) = core.deadlines.due(now) {
                core.end_waits(id, now);
            }
            if tend <= now || core.control.hints.next_deadline().is_some_and(|at| at <= now) {
                core.advance_hints(now);
            }
            if tend <= now {
                core.end_leases(now);
                core.end_changes(now);
                core.end_patience(now);
                core.end_expectations(now);
                core.tell_tallies(now);
                if !core.waiters.is_empty() {
                    core.wakes.admission = true;
                    core.wakes.writer = true;
                }
            }
            self.settle(core);
            if tend <= now {
                self.pool.tend();
                tend = Instant::now() + TEND_EVERY;
            }
        }
    }

    /// Tries waiting changes when something they may need was given back.
    pub(crate) fn run_admission(self: &Arc<Self>) {
        loop {
            let mut core = self.lock();
            if core.stopping {
                for waiter in std::mem::take(&mut core.waiters) {
                    core.give_up_waiting(waiter, Errno::EIO);
                }
                self.settle(core);
                return;
            }
            let calls = core.calls.admission;
            drop(core);
            self.admit();
            let mut core = self.lock();
            if core.calls.admission == calls && !core.stopping {
                self.wake_admission.wait(&mut core);
            }
        }
    }
}
