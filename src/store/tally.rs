//! What happens too often for an event each: files that leave to make room, writers who find none. The first is told
//! at once, what follows in one line a minute.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::core::Core;
use super::node::Idx;
use crate::units::{Bytes, counted};

const TELL_EVERY: Duration = Duration::from_secs(60);

/// What was not told yet, and when something was.
#[derive(Default)]
struct Tally {
    count: u64,
    bytes: u64,
    first: String,
    told: Option<Instant>,
}

impl Tally {
    fn add(&mut self, bytes: u64, first: impl FnOnce() -> String) {
        if self.count == 0 {
            self.first = first();
        }
        self.count += 1;
        self.bytes += bytes;
    }

    /// What has come together, if it is time to tell it.
    fn due(&mut self, now: Instant) -> Option<Self> {
        if self.count == 0 || self.told.is_some_and(|told| now < told + TELL_EVERY) {
            return None;
        }
        Some(std::mem::replace(self, Self { told: Some(now), ..Self::default() }))
    }
}

#[derive(Default)]
pub struct Tallies {
    evicted: Tally,
    refused: Tally,
}

impl Core {
    /// A file is about to leave, to make room.
    pub fn count_eviction(&mut self, idx: Idx, device_pages: u64) {
        self.counters.evictions_l2 += 1;
        self.counters.evicted_bytes += device_pages * 4096;
        let path = || self.tree.path(idx);
        self.tallies.evicted.add(self.tree.nodes[idx].size, path);
    }

    /// What whoever finds no room is answered.
    pub fn no_space(&mut self) -> Errno {
        self.counters.no_space += 1;
        self.tallies.refused.add(0, String::new);
        Errno::ENOSPC
    }

    /// Tells what there is to tell.
    pub fn tell_tallies(&mut self, now: Instant) {
        if let Some(evicted) = self.tallies.evicted.due(now) {
            let (files, bytes) = (counted(evicted.count, "file"), Bytes(evicted.bytes).approx());
            self.event(format!(
                "evicted {files}, {bytes}, the least recently used, to make room; first {}",
                evicted.first
            ));
        }
        if let Some(refused) = self.tallies.refused.due(now) {
            let requests = counted(refused.count, "request");
            self.event(format!(
                "no space: {requests} answered with ENOSPC, since nothing may leave to make room"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_what_follows_together() {
        let mut tally = Tally::default();
        let start = Instant::now();
        assert!(tally.due(start).is_none(), "nothing to tell");
        tally.add(5, || "a".to_owned());
        let told = tally.due(start).map(|told| (told.count, told.bytes, told.first));
        assert_eq!(told, Some((1, 5, "a".to_owned())));
        tally.add(7, || "b".to_owned());
        tally.add(8, || "c".to_owned());
        assert!(tally.due(start + TELL_EVERY / 2).is_none(), "too early");
        let told = tally.due(start + TELL_EVERY).map(|told| (told.count, told.bytes, told.first));
        assert_eq!(told, Some((2, 15, "b".to_owned())));
        assert!(tally.due(start + 3 * TELL_EVERY).is_none(), "told already");
    }
}
