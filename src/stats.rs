//! What is counted, and the events that people follow.

use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use crate::shown;

/// Counters of the store. All are changed and read under the store's lock, so a snapshot is of one instant.
#[derive(Default, Clone, Debug)]
pub struct Counters {
    pub lookups: u64,
    pub lookup_misses: u64,
    pub opens_passthrough: u64,
    pub opens_direct: u64,
    /// Read-only opens by where the file's bytes were.
    pub open_hits_l1: u64,
    pub open_hits_mixed: u64,
    pub open_hits_l2: u64,
    pub read_l1_bytes: u64,
    pub read_l2_bytes: u64,
    pub read_around_bytes: u64,
    pub written_bytes: u64,
    pub published_files: u64,
    pub published_bytes: u64,
    pub publish_waits: u64,
    pub discarded: u64,
    pub unlinked: u64,
    pub copies_on_write: u64,
    pub aliases: u64,
    pub promotions: u64,
    pub promoted_bytes: u64,
    pub promoted_unread: u64,
    /// Groups of blocks on their way from the device.
    pub promoting: u64,
    /// Files that take their slab whole, since it could not be cut to their size.
    pub slabs_kept_whole: u64,
    pub evictions_l1: u64,
    pub evictions_l2: u64,
    pub evicted_bytes: u64,
    /// Requests that found no room.
    pub no_space: u64,
    pub spilled_bytes: u64,
    pub writeback_bytes: u64,
    pub committed_files: u64,
    pub commits: u64,
    pub checkpoints: u64,
    /// What reading the catalog took when the store was opened.
    pub recovery_bytes: u64,
    pub store_failures: u64,
    pub read_errors: u64,
    pub crc_errors: u64,
    /// Files that vanished, since they could not be stored or read back.
    pub lost_files: u64,
    /// Blocks of files that stay, though these cannot be read back.
    pub bad_blocks: u64,
    pub waits: u64,
    pub timeouts: u64,
    pub fsync_timeouts: u64,
    pub dirty_peak_pages: u64,
    pub control_lookups: u64,
    /// Windows that were classified, by what came of it.
    pub classified_l1: u64,
    pub classified_mixed: u64,
    pub classified_l2: u64,
    pub classified_absent: u64,
    pub leases_granted: u64,
    /// For what one process, or all, may have.
    pub leases_denied_client: u64,
    pub leases_denied_full: u64,
    /// For the number of leases of one session.
    pub leases_denied_count: u64,
    /// Since somebody was writing to a file at that moment.
    pub leases_denied_changing: u64,
    pub leases_expired: u64,
    /// Ended with the handle of their last holder.
    pub leases_closed: u64,
    /// Changes that waited for a lease, and those that did so in vain.
    pub lease_waits: u64,
    pub lease_timeouts: u64,
    pub hints: u64,
    /// All in L1 when they came; found something on its way.
    pub hints_bypassed: u64,
    pub hints_joined: u64,
    pub hints_done: u64,
    pub hints_failed: u64,
    pub hints_cancelled: u64,
    /// The window is 0; the queue was full, or somebody was writing; no room; too many; the deadline; what they named.
    pub hints_denied_off: u64,
    pub hints_denied_busy: u64,
    pub hints_denied_room: u64,
    pub hints_denied_count: u64,
    pub hints_denied_deadline: u64,
    pub hints_denied_ranges: u64,
    /// Brought by hints, and of that what left unread.
    pub hint_bytes: u64,
    pub hint_unread_bytes: u64,
    /// Blocks that were read in vain: something newer had come; they could not be read.
    pub promotions_discarded: u64,
    pub promotions_failed: u64,
}

impl Counters {
    pub fn hints_denied(&self) -> u64 {
        self.hints_denied_off
            + self.hints_denied_busy
            + self.hints_denied_room
            + self.hints_denied_count
            + self.hints_denied_deadline
            + self.hints_denied_ranges
    }
}

/// Events kept for readers that come later.
const KEPT: usize = 1024;

#[derive(Default)]
struct Log {
    lines: VecDeque<String>,
    /// Bytes that fell off the front, so that a reader's offset keeps its meaning.
    dropped: u64,
    len: u64,
}

/// The lines of `.ctl/events`.
#[derive(Default)]
pub struct Events {
    log: Mutex<Log>,
    grown: Condvar,
}

impl Events {
    pub fn push(&self, text: String) {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = format!("{}.{:03} {}\n", at.as_secs(), at.subsec_millis(), shown::line(&text));
        let mut log = self.log.lock();
        log.len += line.len() as u64;
        log.lines.push_back(line);
        while log.lines.len() > KEPT {
            if let Some(old) = log.lines.pop_front() {
                log.dropped += old.len() as u64;
            }
        }
        self.grown.notify_all();
    }

    /// Length of everything ever said: the size of the file that `tail -f` watches.
    pub fn len(&self) -> u64 {
        self.log.lock().len
    }

    /// How much of the beginning is gone.
    pub fn forgotten(&self) -> u64 {
        self.log.lock().dropped
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Up to `len` bytes from `offset` on. What has been forgotten reads as blanks, so that offsets stay true.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let log = self.log.lock();
        let end = offset.saturating_add(len as u64).min(log.len);
        let mut out = Vec::new();
        let mut at = offset;
        while at < end.min(log.dropped) {
            out.push(if at + 1 == log.dropped { b'\n' } else { b' ' });
            at += 1;
        }
        let mut start = log.dropped;
        for line in &log.lines {
            let stop = start + line.len() as u64;
            if stop > at && start < end {
                let (from, to) = (at.max(start) - start, end.min(stop) - start);
                out.extend_from_slice(&line.as_bytes()[from as usize..to as usize]);
                at = end.min(stop);
            }
            start = stop;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_from_any_offset() {
        let events = Events::default();
        events.push("one".into());
        let first = events.len();
        events.push("two\nlines".into());
        assert!(events.read(0, 1 << 20).ends_with(b"two lines\n"));
        assert!(String::from_utf8_lossy(&events.read(first, 1 << 20)).ends_with("two lines\n"));
        assert_eq!(events.read(events.len(), 10), b"");
    }

    #[test]
    fn offsets_stay_true_when_old_events_are_forgotten() {
        let events = Events::default();
        for at in 0..KEPT + 10 {
            events.push(format!("event {at}"));
        }
        assert_eq!(events.read(0, usize::MAX >> 1).len() as u64, events.len());
    }
}
