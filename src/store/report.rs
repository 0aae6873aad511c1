//! One consistent picture of the store, for status, stats and metrics.

use std::sync::Arc;

use super::Store;
use super::change::Needs;
use crate::l1::PoolStats;
use crate::l2::EngineGauges;
use crate::stats::Counters;

/// Everything that the control files tell, at one instant.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub counters: Counters,
    pub pool: PoolStats,
    pub files: u64,
    pub directories: u64,
    pub private_files: u64,
    pub alias_inodes: u64,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    pub used_peak_bytes: u64,
    /// What files under construction will take beyond that, as far as one can tell.
    pub expected_bytes: u64,
    pub catalog_used_bytes: u64,
    pub catalog_capacity_bytes: u64,
    pub dirty_bytes: u64,
    pub dirty_peak_bytes: u64,
    pub dirty_limit_bytes: u64,
    pub queued_files: u64,
    pub waiting_changes: u64,
    /// Bytes of writes that wait.
    pub waiting_bytes: u64,
    pub writeback_in_flight_bytes: u64,
    pub sessions: u64,
    pub interned_names: u64,
    pub leases: u64,
    pub leased_bytes: u64,
    pub lease_max_bytes: u64,
    /// Of what leases may hold, what is set aside for hints.
    pub lease_aside_bytes: u64,
    pub hints_running: u64,
    pub hints_queued: u64,
    /// Changes that wait for a lease.
    pub waiting_for_leases: u64,
    pub poisoned: bool,
    pub passthrough: bool,
    pub memory_only: bool,
    /// One for each device of L2: its path, its engine, and what that is doing.
    pub devices: Vec<(String, &'static str, EngineGauges)>,
}

impl Store {
    pub fn snapshot(self: &Arc<Self>) -> Snapshot {
        let devices = match &self.volume {
            Some(volume) => volume.gauges(),
            None => Vec::new(),
        };
        let core = self.lock();
        Snapshot {
            counters: core.counters.clone(),
            pool: core.pool.stats(),
            files: core.tree.files,
            directories: core.tree.dirs,
            private_files: core.tree.private_count() as u64,
            alias_inodes: core.aliases.len() as u64,
            capacity_bytes: if core.settings.memory_only { 0 } else { core.settings.capacity_pages * 4096 },
            used_bytes: core.space.used() * 4096,
            used_peak_bytes: core.space.peak * 4096,
            expected_bytes: core.space.expected() * 4096,
            catalog_used_bytes: core.catalog.used,
            catalog_capacity_bytes: if core.settings.memory_only { 0 } else { core.catalog.limit },
            dirty_bytes: core.dirty_pages * 4096,
            dirty_peak_bytes: core.counters.dirty_peak_pages * 4096,
            dirty_limit_bytes: core.settings.dirty_limit_pages * 4096,
            queued_files: core.queue.len() as u64,
            waiting_changes: core.waiters.len() as u64,
            waiting_bytes: core.waiters.iter().map(|waiter| waiter.change.held_bytes()).sum(),
            writeback_in_flight_bytes: core.queue.in_flight,
            sessions: core.control.sessions(),
            interned_names: core.control.names(),
            leases: core.control.leases.count(),
            leased_bytes: core.control.leases.bytes(),
            lease_max_bytes: core.settings.lease_max_bytes,
            lease_aside_bytes: core.control.leases.aside(),
            hints_running: core.control.hints.running(),
            hints_queued: core.control.hints.queued(),
            waiting_for_leases: core.waiters.iter().filter(|waiter| waiter.waits_for == Needs::Lease).count()
                as u64,
            poisoned: core.poisoned,
            passthrough: core.settings.passthrough,
            memory_only: core.settings.memory_only,
            devices,
        }
    }

    /// Whether the kernel shall read resident files by itself; decided once, when the mount is made.
    pub fn set_passthrough(self: &Arc<Self>, on: bool) {
        self.with(|core| core.settings.passthrough = on);
    }
}
