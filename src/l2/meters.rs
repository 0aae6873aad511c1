//! Counters of an engine.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Class, Direction};

/// What one class has waiting, running and behind it. Counts are of whole transfers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ClassGauges {
    /// Accepted, nothing of it given to the kernel yet.
    pub queued: u64,
    /// Partly or wholly given to the kernel, not answered.
    pub in_flight: u64,
    /// Answered with success.
    pub done: u64,
    /// Answered with an error.
    pub failed: u64,
    /// Bytes of the successful ones.
    pub bytes: u64,
}

/// One reading of an engine's counters. They are read one by one, so sums may be off by what moved meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct EngineGauges {
    classes: [ClassGauges; 3],
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Kernel operations that used a fixed buffer, and those that did not.
    pub fixed_ops: u64,
    pub plain_ops: u64,
    /// Regions now registered as fixed buffers, and registrations that the kernel refused.
    pub fixed_regions: u64,
    pub refused_regions: u64,
}

impl EngineGauges {
    pub fn class(&self, class: Class) -> ClassGauges {
        self.classes[class.index()]
    }

    /// Transfers answered with an error, of all classes.
    pub fn failed(&self) -> u64 {
        self.classes.iter().map(|class| class.failed).sum()
    }

    /// Transfers accepted and not answered, of all classes.
    pub fn outstanding(&self) -> u64 {
        self.classes.iter().map(|class| class.queued + class.in_flight).sum()
    }
}

#[derive(Default)]
struct ClassMeters {
    queued: AtomicU64,
    in_flight: AtomicU64,
    done: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

/// The counters behind [`EngineGauges`].
#[derive(Default)]
pub(super) struct Meters {
    classes: [ClassMeters; 3],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    pub(super) fixed_ops: AtomicU64,
    pub(super) plain_ops: AtomicU64,
    pub(super) fixed_regions: AtomicU64,
    pub(super) refused_regions: AtomicU64,
}

impl Meters {
    pub(super) fn accepted(&self, class: Class) {
        self.classes[class.index()].queued.fetch_add(1, Relaxed);
    }

    pub(super) fn started(&self, class: Class) {
        let meters = &self.classes[class.index()];
        meters.in_flight.fetch_add(1, Relaxed);
        meters.queued.fetch_sub(1, Relaxed);
    }

    pub(super) fn answered(&self, class: Class, direction: Direction, started: bool, bytes: Option<u64>) {
        let meters = &self.classes[class.index()];
        let place = if started { &meters.in_flight } else { &meters.queued };
        place.fetch_sub(1, Relaxed);
        let Some(bytes) = bytes else {
            meters.failed.fetch_add(1, Relaxed);
            return;
        };
        meters.done.fetch_add(1, Relaxed);
        meters.bytes.fetch_add(bytes, Relaxed);
        match direction {
            Direction::Read => self.read_bytes.fetch_add(bytes, Relaxed),
            Direction::Write => self.written_bytes.fetch_add(bytes, Relaxed),
        };
    }

    pub(super) fn gauges(&self) -> EngineGauges {
        EngineGauges {
            classes: [0, 1, 2].map(|index| {
                let meters = &self.classes[index];
                ClassGauges {
                    queued: meters.queued.load(Relaxed),
                    in_flight: meters.in_flight.load(Relaxed),
                    done: meters.done.load(Relaxed),
                    failed: meters.failed.load(Relaxed),
                    bytes: meters.bytes.load(Relaxed),
                }
            }),
            read_bytes: self.read_bytes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            fixed_ops: self.fixed_ops.load(Relaxed),
            plain_ops: self.plain_ops.load(Relaxed),
            fixed_regions: self.fixed_regions.load(Relaxed),
            refused_regions: self.refused_regions.load(Relaxed),
        }
    }
}
