//! Fixed buffers: memory that the kernel has pinned and mapped once, instead of at every operation.
//!
//! The table has a fixed number of slots, empty at first. A region takes one; a span that lies in it is then
//! read and written through that slot. All of it is an optimisation: a region that finds no slot, or that the
//! kernel refuses, is served by plain reads and writes.
//!
//! A slot is emptied only when no operation uses it, and it is not found by new ones from the moment of its
//! removal. The kernel's pin therefore ends a little after `unregister`, never during a transfer.
#![allow(unsafe_code, reason = "registering memory names raw addresses")]

use std::collections::HashMap;
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;

use io_uring::IoUring;

use crate::l2::meters::Meters;
use crate::memory::{Region, RegionId, Span};

/// Slots of the table, the kernel's limit. Regions beyond are served plainly.
const SLOTS: u16 = 16_384;

/// The kernel's limit for one fixed buffer.
const REGION_BYTES_MAX: usize = 1 << 30;

pub(super) struct Fixed {
    label: String,
    by_id: HashMap<RegionId, u16>,
    /// By slot; slots beyond its end were never used.
    entries: Vec<Option<Registered>>,
    free: Vec<u16>,
    /// False if the kernel gave no table: then nothing is ever registered.
    has_table: bool,
    /// A refusal is logged once; the gauge counts them all.
    has_complained: bool,
}

struct Registered {
    region: Region,
    /// Operations in flight that name the slot.
    users: u32,
    leaving: bool,
}

impl Fixed {
    pub(super) fn new(ring: &IoUring, label: &str) -> Self {
        let made = ring.submitter().register_buffers_sparse(SLOTS.into()).or_else(|_| {
            // Before 5.19 an empty table is asked for by empty buffers.
            let empty = vec![libc::iovec { iov_base: null_mut(), iov_len: 0 }; SLOTS.into()];
            // SAFETY: the buffers name no memory.
            unsafe { ring.submitter().register_buffers(&empty) }
        });
        if let Err(error) = &made {
            log::info!("{label}: no fixed buffers ({error}); reads and writes work without");
        }
        Self {
            label: label.to_owned(),
            by_id: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            has_table: made.is_ok(),
            has_complained: made.is_err(),
        }
    }

    pub(super) fn add(&mut self, ring: &IoUring, region: Region, meters: &Meters) {
        if self.by_id.contains_key(&region.id) {
            return;
        }
        let added = self.try_add(ring, region);
        let counter = if added.is_ok() { &meters.fixed_regions } else { &meters.refused_regions };
        counter.fetch_add(1, Relaxed);
        let Err(error) = added else { return };
        if error.raw_os_error() == Some(libc::EFAULT) {
            // Its file has been cut meanwhile; what is left is announced anew, or used without.
            return;
        }
        if !std::mem::replace(&mut self.has_complained, true) {
            log::warn!(
                "{}: a region of {} bytes is no fixed buffer: {error}; I/O works without, raising the locked \
                 memory limit (ulimit -l, LimitMEMLOCK=) may help. Further refusals are only counted",
                self.label,
                region.len
            );
        }
    }

    fn try_add(&mut self, ring: &IoUring, region: Region) -> io::Result<()> {
        if !self.has_table {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if region.len == 0 || region.len > REGION_BYTES_MAX {
            return Err(io::Error::other("fixed buffers have 1 byte to 1 GiB"));
        }
        let slot = match self.free.last() {
            Some(&slot) => slot,
            None if self.entries.len() < SLOTS.into() => self.entries.len() as u16,
            None => return Err(io::Error::other(format!("all {SLOTS} slots are taken"))),
        };
        let buffer = libc::iovec { iov_base: region.base as *mut libc::c_void, iov_len: region.len };
        // SAFETY: the kernel pins the pages that it finds mapped here (EFAULT if there are none) and keeps them
        // itself, so it never follows the address again; `Engine::register` asks for the memory to be mapped, and
        // `slot_of` uses the slot only for spans that name this region, whose ids are never used twice.
        unsafe { ring.submitter().register_buffers_update(slot.into(), &[buffer], None)? };
        if self.free.pop().is_none() {
            self.entries.push(None);
        }
        self.entries[usize::from(slot)] = Some(Registered { region, users: 0, leaving: false });
        self.by_id.insert(region.id, slot);
        Ok(())
    }

    pub(super) fn remove(&mut self, ring: &IoUring, id: RegionId, meters: &Meters) {
        let Some(slot) = self.by_id.remove(&id) else { return };
        let Some(entry) = &mut self.entries[usize::from(slot)] else { return };
        entry.leaving = true;
        self.empty_if_unused(ring, slot, meters);
    }

    /// The slot to use for these bytes of `span`, which counts as a user of it until [`Fixed::used`].
    pub(super) fn slot_of(&mut self, span: &Span, at: usize, len: usize) -> Option<u16> {
        let &slot = self.by_id.get(&span.region()?)?;
        let entry = self.entries[usize::from(slot)].as_mut()?;
        let Region { base, len: region_len, .. } = entry.region;
        let inside = at >= base && at - base <= region_len && len <= region_len - (at - base);
        if !inside {
            return None;
        }
        entry.users += 1;
        Some(slot)
    }

    pub(super) fn used(&mut self, ring: &IoUring, slot: u16, meters: &Meters) {
        let Some(entry) = &mut self.entries[usize::from(slot)] else { return };
        entry.users -= 1;
        if entry.leaving {
            self.empty_if_unused(ring, slot, meters);
        }
    }

    /// Gives the whole table back. Nothing may be in flight.
    pub(super) fn close(&mut self, ring: &IoUring, meters: &Meters) -> io::Result<()> {
        meters.fixed_regions.store(0, Relaxed);
        if std::mem::take(&mut self.has_table) { ring.submitter().unregister_buffers() } else { Ok(()) }
    }

    fn empty_if_unused(&mut self, ring: &IoUring, slot: u16, meters: &Meters) {
        let at = usize::from(slot);
        if self.entries[at].as_ref().is_none_or(|entry| entry.users > 0) {
            return;
        }
        let empty = libc::iovec { iov_base: null_mut(), iov_len: 0 };
        // SAFETY: the new content of the slot names no memory.
        if let Err(error) = unsafe { ring.submitter().register_buffers_update(slot.into(), &[empty], None) } {
            // The slot stays taken, and the pages pinned, until the ring goes.
            log::warn!("{}: giving back a fixed buffer: {error}", self.label);
            return;
        }
        self.entries[at] = None;
        self.free.push(slot);
        meters.fixed_regions.fetch_sub(1, Relaxed);
    }
}
