//! Truncation, and what takes bytes away.

use std::ops::Range;
use std::time::Duration;

use nix::errno::Errno;
use smallvec::SmallVec;

use super::again::{Expected, Intent};
use super::attr::{self, Attr};
use super::change::{Hurry, Stop};
use super::core::{Core, now};
use super::hot::{BLOCK, Block, Mem, Phase, Place, block_len};
use super::node::{DURABLE, Idx, Kind, LOST, MOVED, NAMED, NodeId, SLOT};
use super::process::Caller;

/// Whole blocks of zeros that are made while the lock is held.
const ZEROED_A_PASS: usize = 16;

/// A range that shall read as zeros.
#[derive(Clone, Copy, Debug)]
pub struct Zero {
    pub offset: u64,
    pub end: u64,
    /// The file does not get longer by it.
    pub keep_size: bool,
}

impl Zero {
    /// All that it touches.
    fn blocks(&self) -> Range<usize> {
        (self.offset / BLOCK) as usize..self.end.div_ceil(BLOCK) as usize
    }

    /// The first, and the one behind the last.
    fn whole_blocks(&self) -> (usize, usize) {
        (self.offset.div_ceil(BLOCK) as usize, (self.end / BLOCK) as usize)
    }
}

impl Core {
    /// Files beyond the limit are slot files: resident by range, never passthrough. One that was private and is
    /// grown so far without being written becomes visible (rule R1).
    pub fn mark_slot(&mut self, idx: Idx) {
        if self.node(idx).size > self.settings.slab_file_max {
            self.node_mut(idx).set(SLOT, true);
        }
    }

    /// Takes bytes away from `size` on. Everything that can fail has been done.
    pub fn cut(&mut self, idx: Idx, size: u64) {
        let keep = super::hot::blocks_for(size);
        let durable = self.node(idx).has(DURABLE);
        let device = self.node(idx).device;
        let hot = self.hot_mut(idx);
        let gone: Vec<Block> =
            if hot.blocks.len() > keep { hot.blocks.drain(keep..).collect() } else { Vec::new() };
        hot.valid_to = hot.valid_to.min(size);
        hot.taken = hot.taken.min(size.div_ceil(4096));
        hot.size_kept = hot.size_kept.min(size);
        hot.crc_to = usize::MAX;
        if size == 0 {
            // Whoever has seen it, fills it or reads from it right now keeps it as it is.
            let busy = hot.transfers > 0 || hot.pins > 0;
            hot.slab = hot.slab.take().filter(|slab| !busy && !slab.is_lent());
            (hot.crc_block, hot.crc_to, hot.crc) = (0, 0, 0);
        }
        for block in gone {
            self.uncharge(device, block.charge, block.reserved);
            self.retire_place(idx, device, durable, block.place);
        }
    }

    /// Gives up bytes on the device: at once if no record names them, else after the next commit.
    pub fn retire_place(&mut self, idx: Idx, device: u8, durable: bool, place: Place) {
        if place.is_empty() {
            return;
        }
        if durable {
            self.space.on(device).stale += super::core::pages_of(&place);
            self.queue.stale.push((device, place));
            self.changed(idx);
        } else {
            self.free_extents(device, &place);
        }
    }

    /// O_TRUNC on a file that is truncated in place. It cannot wait and need not: none of the bytes are kept. What is on
    /// its way to or from the device finds its blocks gone, and so does a write that is going on.
    pub fn truncate_to_nothing(&mut self, idx: Idx) {
        debug_assert_eq!(self.hot_mut(idx).passthrough_handles(), 0);
        self.spread_layout(idx);
        let hot = self.hot_mut(idx);
        hot.emptied = hot.emptied.wrapping_add(1);
        if hot.sealed() {
            hot.phase = Phase::Open;
            self.start_building(idx);
        }
        self.drop_base(idx);
        self.cut(idx, 0);
        self.resize_noted(idx, 0);
        self.tidy(idx);
    }

    pub fn resize_noted(&mut self, idx: Idx, size: u64) {
        let node = self.node_mut(idx);
        node.size = size;
        node.mtime = now();
        node.ctime = node.mtime;
        if let Some(private) = node.hot.as_mut().and_then(|hot| hot.private_mut()) {
            // What was cut off is not missed any more.
            private.supplied(size..u64::MAX);
        }
        self.mark_slot(idx);
        self.changed(idx);
    }

    /// Gets the credit and the room for the last block of a file that is cut from what is cut off behind it, if that is
    /// enough, and takes that away. Whether it did: then nothing is missing for the rest of the truncation.
    ///
    /// All this happens in one step, so nobody sees the file with only its whole blocks cut off. What can still keep it from
    /// being cut does so before: the last block cannot be read (EIO), or it is all that is cut, a record names the place
    /// where it is, and there is no room for it beside that (ENOSPC). The file is as it was then.
    fn take_from_cut(&mut self, idx: Idx, tail: usize, len: usize) -> bool {
        let (durable, device) = (self.node(idx).has(DURABLE), self.node(idx).device);
        let hot = self.hot_mut(idx);
        let block = &hot.blocks[tail];
        let resident = block.resident() && hot.span(tail).is_some_and(|span| span.len() >= len);
        let ready = resident && !block.fixed && !block.bad;
        if !ready || self.settings.memory_only {
            return false;
        }
        let hot = self.hot_mut(idx);
        let (charge, reserved) = (hot.blocks[tail].charge, hot.blocks[tail].reserved);
        let (mut charged, mut freed, mut left) = (0, 0, 0);
        for block in &hot.blocks[tail + 1..] {
            charged += u64::from(block.charge);
            freed += u64::from(block.reserved);
            left += super::core::pages_of(&block.place);
        }
        let pages = (len as u32).div_ceil(4096).max(charge);
        let (more, room) = (u64::from(pages - charge), u64::from(pages.saturating_sub(reserved)));
        if self.dirty_pages - charged + more > self.settings.dirty_limit_pages
            || self.space.on(device).free() + freed + left < room
        {
            return false;
        }
        self.cut(idx, tail as u64 * BLOCK + len as u64);
        let space = self.space.on(device);
        let short = room.saturating_sub(space.free());
        if durable && short > 0 {
            // It is free after the next commit, for which the block waits.
            space.stale -= short;
            space.leaving += short;
            self.queue.lent.push((device, short));
        }
        self.space.take(device, room);
        self.dirty_pages += more;
        self.counters.dirty_peak_pages = self.counters.dirty_peak_pages.max(self.dirty_pages);
        let block = &mut self.hot_mut(idx).blocks[tail];
        block.charge = pages;
        block.reserved = block.reserved.max(pages);
        true
    }

    pub fn truncate(&mut self, id: NodeId, size: u64) -> Result<(), Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        if size > self.size_max() {
            return Err(Stop::Fail(Errno::EFBIG));
        }
        self.lengthen_record(idx, size)?;
        let old = self.node(idx).size;
        if size == old {
            if let Some(private) = self.hot_mut(idx).private_mut() {
                // To what did arrive: what did not is not missed any more.
                private.supplied(size..u64::MAX);
            }
            return Ok(());
        }
        self.wait_for_leases(idx, (size.min(old) / BLOCK) as usize..usize::MAX)?;
        self.one_at_a_time(idx)?;
        self.unseal(idx)?;
        if self.hot_mut(idx).blocks.iter().any(Block::is_loading) {
            return Err(Stop::Load);
        }
        if size < old {
            self.copy_from_base(idx, size)?;
            let tail = (size / BLOCK) as usize;
            if !size.is_multiple_of(BLOCK) && !self.is_hole(idx, tail) {
                let len = block_len(size, tail);
                if let Err(stop) = self.take_block(idx, tail, len, true)
                    && !self.take_from_cut(idx, tail, len)
                {
                    // What is on its way gives its room back when it has come.
                    let coming = stop == Stop::Fail(Errno::ENOSPC) && self.hot_mut(idx).transfers > 0;
                    return Err(if coming { Stop::Room } else { stop });
                }
                let hot = self.hot_mut(idx);
                if let Mem::Chunk(chunk) = &hot.blocks[tail].mem {
                    chunk.span().zero(len..chunk.len());
                }
                hot.rewritten(tail..=tail);
            }
            // Nothing is missing any more.
            self.drop_base(idx);
            self.cut(idx, size);
        } else {
            self.copy_base(idx)?;
            self.extend_tail(idx, size)?;
        }
        self.resize_noted(idx, size);
        if size > self.settings.slab_file_max {
            self.show_early(idx);
        }
        self.close_if_done(idx);
        Ok(())
    }

    /// Makes a file as long as that, unless it is longer. Somebody may have written behind the end since that was asked.
    pub fn extend(&mut self, id: NodeId, size: u64) -> Result<(), Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        if size <= self.node(idx).size { Ok(()) } else { self.truncate(id, size) }
    }

    /// Has a range read as zeros. `begun` says how far that has come: first, in one step, comes all that can fail and all
    /// that is not in whole blocks; then these become holes, a few at a time. So what is refused has changed nothing.
    pub fn zero(&mut self, id: NodeId, range: &Zero, begun: &mut bool, queued: bool) -> Result<(), Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        if !*begun {
            self.wait_for_leases(idx, range.blocks())?;
            self.begin_to_zero(idx, range, queued)?;
            *begun = true;
            // From here on it cannot be refused any more, so no lease may come in between.
            self.hot_mut(idx).zeroing += 1;
        }
        self.one_at_a_time(idx)?;
        // Between two passes it can have been closed, and be read.
        self.unseal(idx)?;
        self.copy_base(idx)?;
        let (durable, device) = (self.node(idx).has(DURABLE), self.node(idx).device);
        let hot = self.hot_mut(idx);
        let (first, last) = range.whole_blocks();
        let last = last.min(hot.blocks.len());
        let first = first.min(last);
        // What is on its way from the device finds its block gone.
        let left: Vec<usize> = (first..last).filter(|&index| !hot.blocks[index].is_nothing()).collect();
        let mut gone = Vec::new();
        for &index in left.iter().take(ZEROED_A_PASS) {
            if let Some(slab) = &hot.slab {
                // What is nowhere is read from the slab once the file is sealed.
                let start = index as u64 * BLOCK;
                let end = (start + BLOCK).min(slab.capacity_bytes()).min(hot.valid_to);
                if start < end {
                    slab.span(start as usize..end as usize).zero(0..(end - start) as usize);
                }
            }
            gone.push(std::mem::take(&mut hot.blocks[index]));
        }
        hot.crc_to = usize::MAX;
        for block in gone {
            self.uncharge(device, block.charge, block.reserved);
            self.retire_place(idx, device, durable, block.place);
        }
        // A hole at the end counts for the length, which what was not stored before did not.
        self.changed(idx);
        if left.len() > ZEROED_A_PASS {
            return Err(Stop::Again);
        }
        self.call_waiters();
        self.wake_if_unwritten(idx);
        self.close_if_done(idx);
        Ok(())
    }

    /// A change that has `begun` to make holes is over, well or not.
    pub fn end_zeroing(&mut self, id: NodeId, begun: bool) {
        if let Some(hot) = self.by_id(id).filter(|_| begun).and_then(|idx| self.node_mut(idx).hot.as_mut()) {
            hot.zeroing = hot.zeroing.saturating_sub(1);
            self.kick_hints();
        }
    }

    fn begin_to_zero(&mut self, idx: Idx, range: &Zero, queued: bool) -> Result<(), Stop> {
        let Zero { offset, end, keep_size } = *range;
        let size = self.node(idx).size;
        let grows = end > size && !keep_size;
        if grows && end > self.size_max() {
            return Err(Stop::Fail(if self.settings.memory_only { self.no_space() } else { Errno::EFBIG }));
        }
        if self.poisoned || self.node(idx).has(LOST) {
            return Err(Stop::Fail(Errno::EIO));
        }
        self.wait_in_turn(queued)?;
        self.one_at_a_time(idx)?;
        self.unseal(idx)?;
        self.copy_base(idx)?;
        let (first, last) = range.whole_blocks();
        let within = end.min(size);
        let mut edges: SmallVec<[usize; 2]> = SmallVec::new();
        if offset < within {
            edges.extend([(offset / BLOCK) as usize, ((within - 1) / BLOCK) as usize]);
        }
        edges.dedup();
        edges.retain(|index| !(first..last).contains(index) && !self.is_hole(idx, *index));
        for &index in &edges {
            self.take_block(idx, index, block_len(size, index), true)?;
        }
        if grows {
            self.truncate(self.id(idx), end)?;
        } else {
            let node = self.node_mut(idx);
            node.mtime = now();
            node.ctime = node.mtime;
            self.changed(idx);
        }
        let hot = self.hot_mut(idx);
        for &index in &edges {
            let start = index as u64 * BLOCK;
            let (from, to) = (offset.max(start) - start, within.min(start + BLOCK) - start);
            if let Some(span) = hot.span(index) {
                span.zero(from as usize..(to as usize).min(span.len()));
            }
            hot.rewritten(index..=index);
        }
        hot.crc_to = usize::MAX;
        if let Some(private) = hot.private_mut() {
            private.flushed = false;
            private.supplied(offset..if grows { end } else { within.max(offset) });
        }
        Ok(())
    }

    /// Whether `ino` may be truncated where it is, or has to be looked up again (rule R3b).
    pub fn check_truncate(&mut self, ino: u64, with_handle: bool, caller: &Caller) -> Result<NodeId, Errno> {
        let expected = if with_handle { None } else { self.arrived(ino, Intent::Write, caller) };
        let result = self.may_truncate(ino, with_handle, expected.as_ref(), caller);
        if let Ok(id) = result
            && !with_handle
        {
            self.hot_mut(id.idx()).promised += 1;
        }
        if let Some(expected) = expected {
            self.give_up(expected);
        }
        result
    }

    /// A truncation by path is over, well or not.
    pub fn end_truncate(&mut self, id: NodeId) {
        if let Some(idx) = self.by_id(id) {
            let hot = self.hot_mut(idx);
            hot.promised = hot.promised.saturating_sub(1);
            self.kick_hints();
            self.close_if_done(idx);
        }
    }

    /// What is truncated by path may be gone as soon as that is over: its attributes are what they were then.
    pub fn try_truncate(
        &mut self,
        id: NodeId,
        ino: u64,
        size: u64,
        by_path: bool,
        hurry: Hurry,
        more: &attr::Change,
    ) -> Result<Attr, Stop> {
        let result = self.truncate(id, size).and_then(|()| {
            let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
            if *more != attr::Change::default() {
                self.set_attributes(idx, more);
            }
            self.attributes_change(idx, ino);
            Ok(Attr { ino, ttl: Duration::ZERO, ..self.attr(idx) })
        });
        let is_over = match result {
            Ok(_) | Err(Stop::Fail(_)) => true,
            Err(stop) => stop == Stop::Lease && hurry == Hurry::Never,
        };
        if by_path && is_over {
            self.end_truncate(id);
        }
        result
    }

    pub fn may_truncate(
        &mut self,
        ino: u64,
        with_handle: bool,
        expected: Option<&Expected>,
        caller: &Caller,
    ) -> Result<NodeId, Errno> {
        let Ok(idx) = self.resolve(ino) else { return Err(self.gone(ino, Intent::Write, caller, 0)) };
        if self.node(idx).kind() != Kind::File {
            return Err(if self.node(idx).kind() == Kind::Dir { Errno::EISDIR } else { Errno::EINVAL });
        }
        let id = self.id(idx);
        if with_handle {
            return Ok(id);
        }
        let arrived = expected.is_some_and(|expected| expected.found(id));
        if self.node(idx).has(LOST) || (self.node(idx).has(MOVED) && !arrived) {
            return Err(self.gone(ino, Intent::Write, caller, 0));
        }
        // Also if it was found by a second look: that may have been for an open to read that came to nothing.
        if !self.needs_version(idx) {
            return Ok(id);
        }
        if !self.node(idx).has(NAMED) {
            return Err(self.not_here(ino, Intent::Write, expected, caller, 0));
        }
        let (parent, name) = self.place_of(idx).ok_or(Errno::ESTALE)?;
        Err(self.send_again(parent, &name, Intent::Write, caller, 0))
    }
}
