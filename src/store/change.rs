//! Changes to a file's bytes: write, truncate, fallocate.
//!
//! A change first *plans*: under the lock it gets dirty credit, room on the device and memory for every block it
//! touches. What it got it keeps, so that planning again after a wait goes on where it stopped. Then the bytes are
//! copied without the lock, and the change is *noted*. If something is missing, the change waits in the queue of
//! [`Waiter`]s, in order of arrival (rule R7), and the admission thread tries again when something was given back.
//!
//! Credit and room never wait for a file to be closed: under pressure the write-back worker spills blocks of files
//! under construction. So a queue of writers always moves, however many files they have open.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use smallvec::SmallVec;

use super::again::{Expected, Intent};
use super::attr::Attr;
use super::core::{Core, now};
use super::hot::{BLOCK, BLOCK_PAGES, Block, BlockIo, Hot, Mem, Phase, Place, block_len};
use super::node::{DURABLE, Idx, Kind, LOST, MOVED, NAMED, NONE, NodeId, SLOT};
use super::open::Handle;
use super::process::Caller;
use super::{AttrReply, Store, UnitReply, WriteReply};
use crate::memory::Span;

/// A change that waits.
pub struct Waiter {
    pub id: NodeId,
    pub change: Change,
    pub deadline: Instant,
    /// Bytes that the devices had taken when the deadline was set: while they take more, it moves (rule R7).
    pub written: u64,
    /// It waits for a block to come from the device, not for room: others may pass it.
    pub loading: bool,
}

pub enum Change {
    Write {
        offset: u64,
        data: Vec<u8>,
        reply: WriteReply,
    },
    /// Of a path, not of a handle: then the version is kept open for it.
    Truncate {
        size: u64,
        ino: u64,
        by_path: bool,
        reply: AttrReply,
    },
    Zero {
        offset: u64,
        len: u64,
        keep_size: bool,
        reply: UnitReply,
    },
    Extend {
        size: u64,
        reply: UnitReply,
    },
}

/// Why a change cannot go on right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A block has to come from the device first.
    Load,
    /// Credit, room or memory has to be given back first.
    Room,
    /// Nothing is in the way, but there is much to copy: others get their turn at the lock.
    Again,
    Fail(Errno),
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Fail(errno)
    }
}

/// Where the bytes of a planned write go.
struct Copy {
    /// Memory, and which bytes of the write it takes.
    pieces: SmallVec<[(Span, usize, usize); 6]>,
    /// Recycled memory between the old end and this write.
    gap: Option<Span>,
    /// What [`Hot::emptied`] was.
    emptied: u32,
    crc: Option<Running>,
}

/// The running checksum of a file that is written front to back.
#[derive(Clone)]
struct Running {
    block: usize,
    at: usize,
    state: u32,
    /// Blocks that were completed on the way.
    done: SmallVec<[(usize, u32); 6]>,
}

/// Blocks that are copied while the lock is held.
const BLOCKS_A_PASS: usize = 4;
/// Number of zero bytes that one pass of fallocate's zeroing writes.
const ZERO_PASS: u64 = 1 << 20;

const CRC: crc_fast::CrcAlgorithm = crc_fast::CrcAlgorithm::Crc32Iscsi;

fn crc_state(bytes: &[u8], state: Option<u32>) -> u32 {
    let mut digest = match state {
        Some(state) => crc_fast::Digest::new_with_init_state(CRC, u64::from(state)),
        None => crc_fast::Digest::new(CRC),
    };
    digest.update(bytes);
    digest.get_state() as u32
}

fn crc_of_state(state: u32) -> u32 {
    crc_fast::Digest::new_with_init_state(CRC, u64::from(state)).finalize() as u32
}

impl Running {
    fn update(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let (now, rest) = data.split_at(data.len().min(BLOCK as usize - self.at));
            self.state = crc_state(now, (self.at > 0).then_some(self.state));
            self.at += now.len();
            if self.at == BLOCK as usize {
                self.done.push((self.block, crc_of_state(self.state)));
                self.block += 1;
                self.at = 0;
            }
            data = rest;
        }
    }
}

impl Core {
    /// Largest file: what the lower tier can hold, of which a file is on one device.
    fn size_max(&self) -> u64 {
        if self.settings.memory_only {
            return self.pool.stats().budget;
        }
        self.settings.device_pages.iter().max().map_or(0, |pages| pages * 4096)
    }

    /// Makes a sealed file one that can be written: nobody reads it, or it is written in place anyway.
    fn unseal(&mut self, idx: Idx) -> Result<(), Stop> {
        if !self.hot_mut(idx).sealed() {
            return Ok(());
        }
        if self.hot_mut(idx).must_not_change() {
            return Err(Stop::Fail(Errno::ETXTBSY));
        }
        if self.hot_mut(idx).blocks.iter().any(|block| block.io != BlockIo::Idle) {
            // The device fills this memory, or reads from it: what is sealed is written without a copy.
            return Err(Stop::Load);
        }
        self.spread_layout(idx);
        let size = self.node(idx).size;
        if self.hot_mut(idx).slab.as_ref().is_some_and(crate::l1::Slab::is_lent) {
            // Somebody may still have these pages mapped or in a pipe: they stay as they are.
            self.leave_lent_slab(idx, size)?;
        }
        let hot = self.hot_mut(idx);
        hot.phase = Phase::Open;
        hot.valid_to = if hot.slab.is_some() { size } else { 0 };
        hot.crc_to = usize::MAX;
        self.start_building(idx);
        self.tidy(idx);
        Ok(())
    }

    /// Moves a file's bytes out of a slab that clients have seen.
    fn leave_lent_slab(&mut self, idx: Idx, size: u64) -> Result<(), Stop> {
        let hot = self.hot_mut(idx);
        let on_device =
            hot.blocks.iter().all(|block| !block.dirty && (block.mem.is_none() || !block.place.is_empty()));
        let Some(old) = hot.slab.clone() else { return Ok(()) };
        match self.alloc_slab(old.pages(), idx) {
            Some(new) => {
                let len = old.capacity_bytes() as usize;
                new.span(0..len).copy_from_span(&old.span(0..len));
                self.hot_mut(idx).slab = Some(new);
            }
            None if on_device => {
                let hot = self.hot_mut(idx);
                hot.slab = None;
                for block in &mut hot.blocks {
                    if matches!(block.mem, Mem::Slab) {
                        block.mem = Mem::None;
                    }
                }
            }
            None => return Err(Stop::Room),
        }
        debug_assert!(size <= old.capacity_bytes());
        Ok(())
    }

    /// Gives a copy-on-write version bytes of its own, up to `keep`.
    fn copy_base(&mut self, idx: Idx, keep: u64) -> Result<(), Stop> {
        let Some(base_id) = self.hot_mut(idx).base else { return Ok(()) };
        let Some(base) = self.by_id(base_id) else {
            self.hot_mut(idx).base = None;
            return Ok(());
        };
        self.size_blocks(idx);
        let size = self.node(idx).size.min(keep);
        let mut copied = 0;
        for index in 0..super::hot::blocks_for(size) {
            // Blocks copied before it had to wait may have been spilled for it meanwhile: those are not copied again.
            let block = &self.hot_mut(idx).blocks[index];
            let done = block.dirty || !block.place.is_empty();
            if done || self.is_hole(base, index) || self.is_hole_in_slab(base, index) {
                continue;
            }
            let len = block_len(size, index);
            let Some(from) = self
                .hot(base)
                .filter(|hot| hot.blocks.get(index).is_some_and(Block::resident))
                .and_then(|hot| hot.span(index))
            else {
                if self.hot(base).is_some_and(|hot| hot.blocks.get(index).is_some_and(|block| block.bad)) {
                    return Err(Stop::Fail(Errno::EIO));
                }
                return Err(self.load_block(base, index));
            };
            if copied == BLOCKS_A_PASS {
                return Err(Stop::Again);
            }
            copied += 1;
            self.take_block(idx, index, len, false)?;
            let hot = self.hot_mut(idx);
            let Some(to) = hot.span(index) else { return Err(Stop::Room) };
            to.copy_from_span(&from.slice(0..len.min(from.len())));
            if matches!(hot.blocks[index].mem, Mem::Slab) {
                let start = index as u64 * BLOCK;
                // A hole in the original is recycled memory here.
                hot.define_to(start);
                hot.valid_to = hot.valid_to.max(start + len as u64);
            }
            hot.rewritten(index..=index);
        }
        self.drop_base(idx);
        Ok(())
    }

    /// Brings a block that a change needs, and says what the change waits for: without memory, that is room, for which
    /// others are spilled.
    fn load_block(&mut self, idx: Idx, index: usize) -> Stop {
        if self.load_blocks(idx, index..index + 1) { Stop::Load } else { Stop::Room }
    }

    /// Gets credit, room and memory for `len` bytes of block `index`. With `keep`, the bytes that are there stay.
    fn take_block(&mut self, idx: Idx, index: usize, len: usize, keep: bool) -> Result<(), Stop> {
        let hot = self.hot_mut(idx);
        if hot.blocks.len() <= index {
            hot.blocks.resize_with(index + 1, Block::default);
        }
        let block = &hot.blocks[index];
        // The device may still be taking the bytes of a version that was sealed: their checksum is known already.
        if block.is_loading() || block.fixed {
            return Err(Stop::Load);
        }
        if block.bad && keep {
            return Err(Stop::Fail(Errno::EIO));
        }
        if keep && block.mem.is_none() && !block.place.is_empty() {
            return Err(self.load_block(idx, index));
        }
        let (charge, reserved) = (block.charge, block.reserved);
        if !self.settings.memory_only {
            let pages = (len as u32).div_ceil(4096).max(charge);
            let more = u64::from(pages - charge);
            if self.dirty_pages + more > self.settings.dirty_limit_pages {
                return Err(Stop::Room);
            }
            let room = u64::from(pages.saturating_sub(reserved));
            if room > 0 {
                self.reserve(idx, room, index as u64 * BLOCK + len as u64)?;
            }
            self.dirty_pages += more;
            self.counters.dirty_peak_pages = self.counters.dirty_peak_pages.max(self.dirty_pages);
            let block = &mut self.hot_mut(idx).blocks[index];
            block.charge = pages;
            block.reserved = block.reserved.max(pages);
        }
        self.take_memory(idx, index, len)
    }

    /// What the directory's last files say about the size of a new one.
    pub fn guess(&self, idx: Idx) -> u64 {
        match self.tree.nodes.get(self.home(idx).0).and_then(|node| node.dir()) {
            Some(dir) if dir.same_size >= 2 => dir.last_size,
            _ => 0,
        }
    }

    /// Twice what is known, for a file whose end is not in sight.
    pub fn ample_size(&self, end: u64) -> u64 {
        (end * 2).max(4 << 20).min(self.settings.slab_file_max)
    }

    fn take_memory(&mut self, idx: Idx, index: usize, len: usize) -> Result<(), Stop> {
        let size = self.node(idx).size;
        let (small, largest) = (self.settings.small_file_max, self.settings.slab_file_max);
        let end = index as u64 * BLOCK + len as u64;
        let hot = self.hot_mut(idx);
        match &hot.blocks[index].mem {
            Mem::Slab if hot.slab.as_ref().is_some_and(|slab| slab.capacity_bytes() >= end) => return Ok(()),
            Mem::Chunk(chunk) if chunk.len() >= len => return Ok(()),
            _ => {}
        }
        let fresh = hot.blocks.iter().all(|block| block.mem.is_none() && block.place.is_empty());
        let only_first = !fresh
            && hot.slab.is_none()
            && hot.blocks.iter().skip(1).all(|block| block.mem.is_none() && block.place.is_empty())
            && matches!(hot.blocks[0].mem, Mem::Chunk(_))
            && index > 0;
        // A block in a chunk stays in chunks: its bytes are there, not in the slab.
        let chunked = matches!(hot.blocks[index].mem, Mem::Chunk(_));
        let expected = if fresh { end.max(size).max(self.guess(idx)) } else { end.max(size) };
        if end <= largest && !chunked && self.hot_mut(idx).slab.is_some() && self.grow_slab(idx, end) {
            self.hot_mut(idx).blocks[index].mem = Mem::Slab;
            return Ok(());
        }
        if (fresh || only_first) && expected > small && end <= largest && expected <= largest {
            // Pages not touched cost nothing.
            let room = if expected > end { expected } else { self.ample_size(end) };
            let slab = self
                .alloc_slab(pages(room), idx)
                .or_else(|| if room > end { self.alloc_slab(pages(end), idx) } else { None });
            if let Some(slab) = slab {
                let hot = self.hot_mut(idx);
                if let Some(from) = hot.span(0).filter(|_| only_first) {
                    let first = block_len(size, 0).min(from.len());
                    slab.span(0..first).copy_from_span(&from.slice(0..first));
                    hot.valid_to = first as u64;
                    hot.blocks[0].mem = Mem::Slab;
                }
                hot.slab = Some(slab);
                hot.blocks[index].mem = Mem::Slab;
                return Ok(());
            }
        }
        self.take_chunk(idx, index, len, end.max(size) <= small)
    }

    fn take_chunk(&mut self, idx: Idx, index: usize, len: usize, small: bool) -> Result<(), Stop> {
        let want = if small { len } else { BLOCK as usize };
        // Making room may drop clean blocks of this very file, if there is nothing else: what moves is held meanwhile.
        let hot = self.hot_mut(idx);
        let from = hot.span(index).map(|span| span.slice(0..hot.defined(index, span.len())));
        let Some(chunk) = self.alloc_chunk(want, idx).or_else(|| self.alloc_chunk(want, NONE)) else {
            return Err(if self.settings.memory_only { Stop::Fail(self.no_space()) } else { Stop::Room });
        };
        let hot = self.hot_mut(idx);
        let to = chunk.span();
        let kept = match from {
            Some(from) => {
                let kept = from.len().min(to.len());
                to.copy_from_span(&from.slice(0..kept));
                kept
            }
            None => 0,
        };
        to.zero(kept..to.len());
        hot.blocks[index].mem = Mem::Chunk(chunk);
        Ok(())
    }

    fn grow_slab(&mut self, idx: Idx, end: u64) -> bool {
        let largest = self.settings.slab_file_max;
        loop {
            let Some(slab) = &self.hot_mut(idx).slab else { return false };
            let capacity = slab.capacity_bytes();
            if capacity >= end {
                return true;
            }
            let ample = (capacity * 2).max(end).min(largest);
            if slab.resize(pages(ample)) || slab.resize(pages(end)) {
                return true;
            }
            if !self.drop_some(idx) {
                return false;
            }
        }
    }

    fn one_at_a_time(&mut self, idx: Idx) -> Result<(), Stop> {
        let hot = self.hot_mut(idx);
        if hot.writing || hot.claimed { Err(Stop::Load) } else { Ok(()) }
    }

    /// Plans a write. On success the file is pinned until [`Core::note_write`].
    fn plan_write(&mut self, id: NodeId, offset: u64, len: usize, queued: bool) -> Result<Copy, Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        if !queued && (self.admitting || self.waiters.iter().any(|waiter| !waiter.loading)) {
            return Err(Stop::Room);
        }
        if self.poisoned {
            return Err(Stop::Fail(Errno::EIO));
        }
        let end = offset.checked_add(len as u64).ok_or(Errno::EFBIG)?;
        if end > self.size_max() {
            return Err(Stop::Fail(if self.settings.memory_only { self.no_space() } else { Errno::EFBIG }));
        }
        self.lengthen_record(idx, end)?;
        self.one_at_a_time(idx)?;
        self.unseal(idx)?;
        self.copy_base(idx, u64::MAX)?;
        self.extend_tail(idx, end)?;
        let size = self.node(idx).size;
        let new_size = size.max(end);
        let (first, last) = ((offset / BLOCK) as usize, ((end - 1) / BLOCK) as usize);
        for index in first..=last {
            let start = index as u64 * BLOCK;
            let covered_to = (start + block_len(size, index) as u64).max(start);
            let whole = offset <= start && end >= covered_to;
            self.take_block(idx, index, block_len(new_size, index), !whole)?;
        }
        let hot = self.hot_mut(idx);
        let mut pieces = SmallVec::new();
        for index in first..=last {
            let start = index as u64 * BLOCK;
            let (from, to) = (offset.max(start), end.min(start + BLOCK));
            let Some(span) = hot.span(index) else { return Err(Stop::Room) };
            let span = span.slice((from - start) as usize..(to - start) as usize);
            pieces.push((span, (from - offset) as usize, (to - offset) as usize));
        }
        // When memory is short, some blocks of a file lie in its slab and others do not.
        let gap = match (&hot.slab, (first..=last).find(|&index| matches!(hot.blocks[index].mem, Mem::Slab)))
        {
            (Some(slab), Some(index)) => {
                let to = offset.max(index as u64 * BLOCK).min(slab.capacity_bytes());
                (hot.valid_to < to).then(|| slab.span(hot.valid_to as usize..to as usize))
            }
            _ => None,
        };
        let at_cursor =
            hot.crc_to < BLOCK as usize && offset == hot.crc_block as u64 * BLOCK + hot.crc_to as u64;
        let crc = if at_cursor {
            Some(Running { block: hot.crc_block, at: hot.crc_to, state: hot.crc, done: SmallVec::new() })
        } else if offset.is_multiple_of(BLOCK) {
            Some(Running { block: first, at: 0, state: 0, done: SmallVec::new() })
        } else {
            None
        };
        hot.pins += 1;
        hot.writing = true;
        let emptied = hot.emptied;
        if let Some(private) = hot.private_mut() {
            private.flushed = false;
        }
        Ok(Copy { pieces, gap, emptied, crc: crc.filter(|_| !self.settings.memory_only) })
    }

    /// The last block of the file grows when something is written behind it: it has to be stored again at its new
    /// length.
    fn extend_tail(&mut self, idx: Idx, end: u64) -> Result<(), Stop> {
        let size = self.node(idx).size;
        if size.is_multiple_of(BLOCK) || end <= size {
            return Ok(());
        }
        let tail = (size / BLOCK) as usize;
        if self.is_hole(idx, tail) {
            return Ok(());
        }
        let len = block_len(end, tail);
        self.take_block(idx, tail, len, true)?;
        let hot = self.hot_mut(idx);
        let old = (size - tail as u64 * BLOCK) as usize;
        if let Mem::Chunk(chunk) = &hot.blocks[tail].mem {
            chunk.span().zero(old..len.max(old));
        }
        hot.rewritten(tail..=tail);
        Ok(())
    }

    fn note_write(&mut self, id: NodeId, offset: u64, len: usize, emptied: u32, crc: Option<Running>) {
        self.wakes.admission |= !self.waiters.is_empty();
        let Some(idx) = self.by_id(id) else { return };
        let end = offset + len as u64;
        let hot = self.hot_mut(idx);
        hot.pins -= 1;
        hot.writing = false;
        if hot.emptied != emptied {
            self.wake_if_unwritten(idx);
            return self.close_if_done(idx);
        }
        let node = self.node_mut(idx);
        node.size = node.size.max(end);
        node.mtime = now();
        node.ctime = node.mtime;
        let hot = self.hot_mut(idx);
        if let Some(private) = hot.private_mut() {
            private.supplied(offset..end);
        }
        let (first, last) = ((offset / BLOCK) as usize, ((end - 1) / BLOCK) as usize);
        hot.rewritten(first..=last);
        hot.blocks[first..=last].iter_mut().for_each(|block| block.bad = false);
        if let Some(index) = (first..=last).rev().find(|&index| matches!(hot.blocks[index].mem, Mem::Slab)) {
            hot.valid_to = hot.valid_to.max(end.min((index as u64 + 1) * BLOCK));
        }
        match crc {
            Some(crc) => {
                for (index, value) in &crc.done {
                    hot.blocks[*index].crc = Some(*value);
                }
                (hot.crc_block, hot.crc_to, hot.crc) = (crc.block, crc.at, crc.state);
            }
            None if (first..=last).contains(&hot.crc_block) => hot.crc_to = usize::MAX,
            None => {}
        }
        self.counters.written_bytes += len as u64;
        self.mark_slot(idx);
        self.wake_if_unwritten(idx);
        self.close_if_done(idx);
    }

    /// A version that lacks what its writer wanted in it is not whole: it is given up when it is closed (rule R1), unless
    /// the writer tries again and succeeds.
    fn write_failed(&mut self, id: NodeId, range: Range<u64>) {
        if let Some(private) =
            self.by_id(id).and_then(|idx| self.node_mut(idx).hot.as_mut()).and_then(|hot| hot.private_mut())
        {
            private.lacks = match private.lacks.take() {
                Some(lacks) => Some(lacks.start.min(range.start)..lacks.end.max(range.end)),
                None => Some(range),
            };
        }
    }

    /// The checksum of block `index`, if the running one has just come to its end.
    pub fn tail_crc(hot: &Hot, index: usize, len: usize) -> Option<u32> {
        if hot.crc_to == usize::MAX || hot.crc_to == 0 || hot.crc_block != index || hot.crc_to != len {
            return None;
        }
        // Checksums cover whole pages: the rest of the last one is zeros.
        let pad = len.next_multiple_of(4096) - len;
        Some(crc_of_state(if pad == 0 { hot.crc } else { crc_state(&[0; 4096][..pad], Some(hot.crc)) }))
    }

    /// Files beyond the limit are slot files: resident by range, never passthrough. One that was private and is
    /// grown so far without being written becomes visible (rule R1).
    fn mark_slot(&mut self, idx: Idx) {
        if self.node(idx).size > self.settings.slab_file_max {
            self.node_mut(idx).set(SLOT, true);
        }
    }

    /// Takes bytes away from `size` on. Everything that can fail has been done.
    fn cut(&mut self, idx: Idx, size: u64) {
        let keep = super::hot::blocks_for(size);
        let durable = self.node(idx).has(DURABLE);
        let device = self.node(idx).device;
        let hot = self.hot_mut(idx);
        let gone: Vec<Block> =
            if hot.blocks.len() > keep { hot.blocks.drain(keep..).collect() } else { Vec::new() };
        hot.valid_to = hot.valid_to.min(size);
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

    fn resize_noted(&mut self, idx: Idx, size: u64) {
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

    fn truncate(&mut self, id: NodeId, size: u64) -> Result<(), Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        if size > self.size_max() {
            return Err(Stop::Fail(Errno::EFBIG));
        }
        self.lengthen_record(idx, size)?;
        let old = self.node(idx).size;
        if size == old {
            return Ok(());
        }
        self.one_at_a_time(idx)?;
        self.unseal(idx)?;
        if self.hot_mut(idx).blocks.iter().any(Block::is_loading) {
            return Err(Stop::Load);
        }
        self.copy_base(idx, size)?;
        if size < old {
            let tail = (size / BLOCK) as usize;
            if !size.is_multiple_of(BLOCK) && !self.is_hole(idx, tail) {
                let len = block_len(size, tail);
                self.take_block(idx, tail, len, true)?;
                let hot = self.hot_mut(idx);
                if let Mem::Chunk(chunk) = &hot.blocks[tail].mem {
                    chunk.span().zero(len..chunk.len());
                }
                hot.rewritten(tail..=tail);
            }
            self.cut(idx, size);
        } else {
            self.extend_tail(idx, size)?;
        }
        self.resize_noted(idx, size);
        if size > self.settings.slab_file_max {
            self.show_early(idx);
        }
        self.close_if_done(idx);
        Ok(())
    }

    /// Makes whole blocks of the range holes again. The edges are written with zeros by the caller.
    fn punch(&mut self, id: NodeId, offset: u64, end: u64) -> Result<(), Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        self.one_at_a_time(idx)?;
        self.unseal(idx)?;
        self.copy_base(idx, u64::MAX)?;
        let (durable, device) = (self.node(idx).has(DURABLE), self.node(idx).device);
        let hot = self.hot_mut(idx);
        let (first, last) = (offset.div_ceil(BLOCK) as usize, (end / BLOCK) as usize);
        let last = last.min(hot.blocks.len());
        if first >= last || hot.slab.is_some() {
            return Ok(());
        }
        if hot.blocks[first..last].iter().any(Block::is_loading) {
            return Err(Stop::Load);
        }
        let mut gone = Vec::new();
        for block in &mut hot.blocks[first..last] {
            gone.push(std::mem::take(block));
        }
        for block in gone {
            self.uncharge(device, block.charge, block.reserved);
            self.retire_place(idx, device, durable, block.place);
        }
        Ok(())
    }

    /// Whether `ino` may be truncated where it is, or has to be looked up again (rule R3b).
    fn check_truncate(&mut self, ino: u64, with_handle: bool, caller: &Caller) -> Result<NodeId, Errno> {
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
            self.close_if_done(idx);
        }
    }

    /// What is truncated by path may be gone as soon as that is over: its attributes are what they were then.
    fn try_truncate(&mut self, id: NodeId, ino: u64, size: u64, by_path: bool) -> Result<Attr, Stop> {
        let result =
            self.truncate(id, size).map(|()| Attr { ino, ttl: Duration::ZERO, ..self.attr(id.idx()) });
        if by_path && matches!(result, Ok(_) | Err(Stop::Fail(_))) {
            self.end_truncate(id);
        }
        result
    }

    fn may_truncate(
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

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(4096)).unwrap_or(u32::MAX)
}

/// What came of trying.
enum Tried<T> {
    Done(Result<T, Errno>),
    Wait { loading: bool },
}

impl Store {
    /// Tries something that may take several passes.
    fn tried<T>(self: &Arc<Self>, mut pass: impl FnMut(&mut Core) -> Result<T, Stop>) -> Tried<T> {
        loop {
            return match self.with(&mut pass) {
                Ok(value) => Tried::Done(Ok(value)),
                Err(Stop::Again) => continue,
                Err(Stop::Fail(errno)) => Tried::Done(Err(errno)),
                Err(stop) => Tried::Wait { loading: stop == Stop::Load },
            };
        }
    }

    pub fn write(self: &Arc<Self>, handle: &Handle, offset: u64, data: &[u8], reply: WriteReply) {
        if data.is_empty() {
            return reply(Ok(0));
        }
        let (id, end) = (handle.id, offset.saturating_add(data.len() as u64));
        match self.try_write(id, offset, data, false) {
            Tried::Done(result) => {
                if result.is_err() {
                    self.with(|core| core.write_failed(id, offset..end));
                }
                reply(result);
            }
            Tried::Wait { loading } => {
                let store = self.clone();
                let reply = Box::new(move |result: Result<u32, Errno>| {
                    if result.is_err() {
                        store.with(|core| core.write_failed(id, offset..end));
                    }
                    reply(result);
                });
                self.wait(id, Change::Write { offset, data: data.to_vec(), reply }, loading);
            }
        }
    }

    fn try_write(self: &Arc<Self>, id: NodeId, offset: u64, data: &[u8], queued: bool) -> Tried<u32> {
        let mut plan = match self.tried(|core| core.plan_write(id, offset, data.len(), queued)) {
            Tried::Done(Ok(plan)) => plan,
            Tried::Done(Err(errno)) => return Tried::Done(Err(errno)),
            Tried::Wait { loading } => return Tried::Wait { loading },
        };
        if let Some(gap) = plan.gap {
            gap.zero(0..gap.len());
        }
        for (span, from, to) in &plan.pieces {
            span.copy_from(0, &data[*from..*to]);
        }
        if let Some(crc) = &mut plan.crc {
            crc.update(data);
        }
        self.with(|core| core.note_write(id, offset, data.len(), plan.emptied, plan.crc));
        Tried::Done(Ok(data.len() as u32))
    }

    fn wait(self: &Arc<Self>, id: NodeId, change: Change, loading: bool) {
        self.with(|core| {
            let deadline = Instant::now() + core.settings.request_deadline;
            let written = core.counters.writeback_bytes;
            core.waiters.push_back(Waiter { id, change, deadline, written, loading });
            core.counters.waits += 1;
            core.wakes.writer = true;
            core.wakes.admission = true;
            core.wakes.timer = true;
        });
    }

    /// Truncation by path or by handle.
    pub fn truncate(
        self: &Arc<Self>,
        ino: u64,
        with_handle: bool,
        size: u64,
        caller: &Caller,
        reply: AttrReply,
    ) {
        let checked = self.with(|core| {
            let id = core.check_truncate(ino, with_handle, caller)?;
            if caller.uid != 0 {
                core.drop_set_id(id.idx());
            }
            Ok(id)
        });
        let id = match checked {
            Ok(id) => id,
            Err(errno) => return reply(Err(errno)),
        };
        self.change(id, Change::Truncate { size, ino, by_path: !with_handle, reply });
    }

    pub fn fallocate(self: &Arc<Self>, handle: &Handle, offset: u64, len: u64, mode: i32, reply: UnitReply) {
        const KNOWN: i32 =
            libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        let zero = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        if mode & !KNOWN != 0 {
            return reply(Err(Errno::EOPNOTSUPP));
        }
        let Some(end) = offset.checked_add(len) else { return reply(Err(Errno::EFBIG)) };
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        if zero {
            return self.change(handle.id, Change::Zero { offset, len, keep_size, reply });
        }
        // Room is set aside when bytes are written (every block is new on the device then), so all that
        // fallocate has to do is to grow the file, and to say now if it can never fit.
        let size = {
            let mut core = self.lock();
            if end > core.size_max() {
                let errno = core.no_space();
                drop(core);
                return reply(Err(errno));
            }
            core.by_id(handle.id).map_or(0, |idx| core.node(idx).size)
        };
        if keep_size || end <= size {
            return reply(Ok(()));
        }
        self.change(handle.id, Change::Extend { size: end, reply });
    }

    /// Zeros a range, a pass at a time. If it has to wait, `offset` and `len` tell what is left.
    fn try_zero(
        self: &Arc<Self>,
        id: NodeId,
        offset: &mut u64,
        len: &mut u64,
        keep_size: bool,
        queued: bool,
    ) -> Tried<()> {
        let mut end = *offset + *len;
        if keep_size {
            let core = self.lock();
            end = end.min(core.by_id(id).map_or(0, |idx| core.node(idx).size));
        }
        match self.tried(|core| core.punch(id, *offset, end)) {
            Tried::Done(Ok(())) => {}
            other => return other,
        }
        let zeros = vec![0; ZERO_PASS.min((*len).max(1)) as usize];
        while *offset < end {
            let at = *offset;
            let stop = (at / ZERO_PASS + 1) * ZERO_PASS;
            let now = ((end.min(stop) - at) as usize).min(zeros.len());
            let hole = {
                let core = self.lock();
                core.by_id(id).is_some_and(|idx| {
                    ((at / BLOCK) as usize..=((at + now as u64 - 1) / BLOCK) as usize)
                        .all(|index| core.is_hole(idx, index) && at + now as u64 <= core.node(idx).size)
                })
            };
            if !hole {
                match self.try_write(id, at, &zeros[..now], queued) {
                    Tried::Done(Ok(_)) => {}
                    Tried::Done(Err(errno)) => return Tried::Done(Err(errno)),
                    Tried::Wait { loading } => return Tried::Wait { loading },
                }
            }
            *offset += now as u64;
            *len = len.saturating_sub(now as u64);
        }
        Tried::Done(Ok(()))
    }

    /// Tries a change and answers it. What has to wait comes back, and whether that is for the device alone.
    fn attempt(self: &Arc<Self>, id: NodeId, change: Change, queued: bool) -> Option<(Change, bool)> {
        match change {
            Change::Write { offset, data, reply } => match self.try_write(id, offset, &data, queued) {
                Tried::Done(result) => reply(result),
                Tried::Wait { loading } => return Some((Change::Write { offset, data, reply }, loading)),
            },
            Change::Truncate { size, ino, by_path, reply } => {
                match self.tried(|core| core.try_truncate(id, ino, size, by_path)) {
                    Tried::Done(result) => reply(result),
                    Tried::Wait { loading } => {
                        return Some((Change::Truncate { size, ino, by_path, reply }, loading));
                    }
                }
            }
            Change::Extend { size, reply } => match self.tried(|core| core.truncate(id, size)) {
                Tried::Done(result) => reply(result),
                Tried::Wait { loading } => return Some((Change::Extend { size, reply }, loading)),
            },
            Change::Zero { mut offset, mut len, keep_size, reply } => {
                match self.try_zero(id, &mut offset, &mut len, keep_size, queued) {
                    Tried::Done(result) => reply(result),
                    Tried::Wait { loading } => {
                        return Some((Change::Zero { offset, len, keep_size, reply }, loading));
                    }
                }
            }
        }
        None
    }

    /// Makes a change now, or when its turn has come.
    fn change(self: &Arc<Self>, id: NodeId, change: Change) {
        if let Some((change, loading)) = self.attempt(id, change, false) {
            self.wait(id, change, loading);
        }
    }

    /// Tries the waiting changes again, in order. Only what waits for the device can be passed.
    pub(crate) fn admit(self: &Arc<Self>) {
        let mut passed = Vec::new();
        // Who comes while the queue is being tried has to queue behind it.
        self.lock().admitting = true;
        loop {
            let Some(mut waiter) = self.lock().waiters.pop_front() else { break };
            let Some((change, loading)) = self.attempt(waiter.id, waiter.change, true) else { continue };
            (waiter.change, waiter.loading) = (change, loading);
            passed.push(waiter);
            if !loading {
                break;
            }
        }
        let mut core = self.lock();
        core.admitting = false;
        for waiter in passed.into_iter().rev() {
            core.waiters.push_front(waiter);
        }
        // Only now does the worker see who is waiting, and spill for them.
        core.wakes.writer |= core.waiters.iter().any(|waiter| !waiter.loading);
        self.settle(core);
    }
}

impl Change {
    /// Bytes that are held for it.
    pub fn held_bytes(&self) -> u64 {
        match self {
            Self::Write { data, .. } => data.len() as u64,
            Self::Truncate { .. } | Self::Zero { .. } | Self::Extend { .. } => 0,
        }
    }

    /// The answer to a change whose time is over.
    pub fn fail(self, errno: Errno) {
        match self {
            Self::Write { reply, .. } => reply(Err(errno)),
            Self::Truncate { reply, .. } => reply(Err::<Attr, _>(errno)),
            Self::Zero { reply, .. } | Self::Extend { reply, .. } => reply(Err(errno)),
        }
    }
}

/// The number of pages in a whole block fits its counters.
const _: () = assert!(BLOCK_PAGES < 1 << 16);
