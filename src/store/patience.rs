//! Whoever waits until something is durable is answered, come what may (rule R15): nobody can interrupt a request that
//! a FUSE daemon has taken.
//!
//! There are two bounds. As long as the devices move, a long queue is all that is wrong; once they have moved nothing
//! for `--request-deadline`, they are stuck. And `--fsync-deadline` bounds the whole. The answer is ETIMEDOUT: it may
//! become durable yet, and stays in the queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::UnitReply;
use super::core::Core;

/// A reply that is given once, by whoever comes first.
#[derive(Clone)]
pub struct Once(Arc<Mutex<Option<UnitReply>>>);

impl Once {
    fn new(reply: UnitReply) -> Self {
        Self(Arc::new(Mutex::new(Some(reply))))
    }

    pub fn is_given(&self) -> bool {
        self.0.lock().is_none()
    }

    pub fn into_reply(self) -> UnitReply {
        Box::new(move |result| {
            let reply = self.0.lock().take();
            if let Some(reply) = reply {
                reply(result);
            }
        })
    }
}

/// Somebody who waits.
pub struct Patience {
    reply: Once,
    bounds: Bounds,
}

struct Bounds {
    /// The end of all patience.
    end: Instant,
    /// By then something must have moved since.
    next: Instant,
    moved: u64,
}

impl Bounds {
    fn are_over(&mut self, now: Instant, moved: u64, stuck_after: Duration) -> bool {
        if self.next <= now && self.moved < moved {
            (self.moved, self.next) = (moved, now + stuck_after);
        }
        self.end.min(self.next) <= now
    }
}

impl Core {
    /// What has come to the devices so far; only its growth means anything.
    fn moved(&self) -> u64 {
        self.counters.writeback_bytes + self.counters.commits
    }

    /// Has `reply` given at the deadline at the latest.
    pub fn by_deadline(&mut self, reply: UnitReply) -> Once {
        let reply = Once::new(reply);
        let now = Instant::now();
        let far = |wait: Duration| now.checked_add(wait).unwrap_or(now + Duration::from_secs(1 << 32));
        let bounds = Bounds {
            end: far(self.settings.fsync_deadline),
            next: far(self.settings.request_deadline),
            moved: self.moved(),
        };
        self.patience.push(Patience { reply: reply.clone(), bounds });
        reply
    }

    /// Answers those whose patience is at its end.
    pub fn end_patience(&mut self, now: Instant) {
        let (moved, stuck_after) = (self.moved(), self.settings.request_deadline);
        let mut over = Vec::new();
        self.patience.retain_mut(|waiting| {
            let ends = !waiting.reply.is_given() && waiting.bounds.are_over(now, moved, stuck_after);
            if ends {
                over.push(waiting.reply.clone());
            }
            !ends && !waiting.reply.is_given()
        });
        for reply in over {
            self.counters.timeouts += 1;
            self.counters.fsync_timeouts += 1;
            self.event(
                "an fsync or drain waited until its deadline; what it waits for is not durable yet"
                    .to_owned(),
            );
            let reply = reply.into_reply();
            self.reply(move || reply(Err(Errno::ETIMEDOUT)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_moves_is_waited_for_and_what_is_stuck_is_not() {
        let start = Instant::now();
        let bounds = || Bounds { end: start + 100 * SECOND, next: start + 10 * SECOND, moved: 5 };
        let mut stuck = bounds();
        assert!(!stuck.are_over(start + 9 * SECOND, 5, 10 * SECOND));
        assert!(stuck.are_over(start + 10 * SECOND, 5, 10 * SECOND));
        let mut slow = bounds();
        for second in 1..100 {
            assert!(
                !slow.are_over(start + second * SECOND, 5 + u64::from(second) / 9, 10 * SECOND),
                "{second}"
            );
        }
        assert!(slow.are_over(start + 100 * SECOND, 1000, 10 * SECOND), "there is an end");
    }

    #[test]
    fn a_reply_is_given_once() {
        let (tell, told) = std::sync::mpsc::channel();
        let once = Once::new(Box::new(move |result| tell.send(result).expect("a listener")));
        assert!(!once.is_given());
        once.clone().into_reply()(Err(Errno::ETIMEDOUT));
        assert!(once.is_given());
        once.into_reply()(Ok(()));
        assert_eq!(told.iter().collect::<Vec<_>>(), [Err(Errno::ETIMEDOUT)]);
    }
}
