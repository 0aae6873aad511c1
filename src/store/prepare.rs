//! What a change needs before it is made: a version of its own, its bytes in L1, credit, room and memory.

use nix::errno::Errno;

use super::change::{BLOCKS_A_PASS, Stop};
use super::core::{Core, pages_of};
use super::hot::{BLOCK, Block, BlockIo, Mem, Phase, WriteBack, block_len};
use super::node::{DURABLE, Idx, NONE};

impl Core {
    /// Makes a sealed file one that can be written: nobody reads it, or it is written in place anyway.
    pub fn unseal(&mut self, idx: Idx) -> Result<(), Stop> {
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
        if let Some(slab) = &self.hot_mut(idx).slab {
            // It ended with the file. What comes behind that is in the slab before it is made longer, and of that a kernel
            // may make zeros.
            slab.set_len(slab.capacity_bytes()).map_err(|_| Errno::EIO)?;
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
    pub fn leave_lent_slab(&mut self, idx: Idx, size: u64) -> Result<(), Stop> {
        let hot = self.hot_mut(idx);
        let on_device =
            hot.blocks.iter().all(|block| !block.dirty && (block.mem.is_none() || !block.place.is_empty()));
        let unleased = hot.leases == 0;
        let Some(old) = hot.slab.clone() else { return Ok(()) };
        match self.alloc_slab(old.pages(), idx) {
            Some(new) => {
                // What left for it is freed before it is filled, which is here.
                self.pool.bury();
                let len = old.capacity_bytes() as usize;
                new.span(0..len).copy_from_span(&old.span(0..len));
                self.hot_mut(idx).slab = Some(new);
            }
            // What is leased stays in L1.
            None if on_device && unleased => {
                let hot = self.hot_mut(idx);
                hot.slab = None;
                for block in &mut hot.blocks {
                    if matches!(block.mem, Mem::Slab) {
                        block.mem = Mem::None;
                    }
                }
            }
            None if !unleased => return Err(Stop::Lease),
            None => return Err(Stop::Room),
        }
        debug_assert!(size <= old.capacity_bytes());
        Ok(())
    }

    /// Gives a copy-on-write version bytes of its own.
    pub fn copy_base(&mut self, idx: Idx) -> Result<(), Stop> {
        self.copy_from_base(idx, u64::MAX)?;
        self.drop_base(idx);
        Ok(())
    }

    /// The same up to `keep`, for a version that is to be cut there: it shows the other's bytes until
    /// [`Core::drop_base`], since what else the cut needs may not be there yet.
    pub fn copy_from_base(&mut self, idx: Idx, keep: u64) -> Result<(), Stop> {
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
        Ok(())
    }

    /// Brings a block that a change needs, and says what the change waits for: without memory, that is room, for which
    /// others are spilled.
    pub fn load_block(&mut self, idx: Idx, index: usize) -> Stop {
        if self.load_blocks(idx, index..index + 1) { Stop::Load } else { Stop::Room }
    }

    /// Gets credit, room and memory for `len` bytes of block `index`. With `keep`, the bytes that are there stay.
    pub fn take_block(&mut self, idx: Idx, index: usize, len: usize, keep: bool) -> Result<(), Stop> {
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
            if room > 0 && !self.give_up_place(idx, index, room) {
                let reserved = self.reserve(idx, room, index as u64 * BLOCK + len as u64);
                if reserved == Err(Stop::Fail(Errno::ENOSPC)) {
                    // A block that is overwritten as a whole need not be here for that, but to give up its place it must.
                    if self.may_give_up_place(idx, index, room) {
                        return Err(self.load_block(idx, index));
                    }
                    // The room that it had has become a place, which it can give up when it is there.
                    if matches!(self.hot_mut(idx).blocks[index].io, BlockIo::Writing(_)) {
                        return Err(Stop::Load);
                    }
                }
                reserved?;
            }
            self.dirty_pages += more;
            self.counters.dirty_peak_pages = self.counters.dirty_peak_pages.max(self.dirty_pages);
            let block = &mut self.hot_mut(idx).blocks[index];
            block.charge = pages;
            block.reserved = block.reserved.max(pages);
        }
        self.take_memory(idx, index, len)
    }

    /// Whether the place of a block, together with what is free, is room enough for the block once it is changed, and no
    /// record and no commit counts with what is there.
    fn may_give_up_place(&self, idx: Idx, index: usize, room: u64) -> bool {
        let node = self.node(idx);
        let Some(hot) = &node.hot else { return false };
        let Some(block) = hot.blocks.get(index) else { return false };
        let device = &self.space.devices[usize::from(node.device)];
        let place = pages_of(&block.place);
        place > 0
            && !block.bad
            && !node.has(DURABLE)
            && hot.write_back == WriteBack::None
            && device.free() + place >= room
    }

    /// Sets the room aside for a block whose bytes are in L1 where these were spilled to, if there is none beside it: a
    /// device that is full of one unfinished file must not keep its writer from changing or cutting that.
    fn give_up_place(&mut self, idx: Idx, index: usize, room: u64) -> bool {
        let device = self.node(idx).device;
        if !self.hot_mut(idx).blocks[index].resident()
            || !self.may_give_up_place(idx, index, room)
            || self.space.on(device).free() >= room
        {
            return false;
        }
        let hot = self.hot_mut(idx);
        // They are nowhere else from here on, whatever becomes of the change.
        let crc = hot.blocks[index].crc;
        hot.rewritten(index..=index);
        hot.blocks[index].crc = crc;
        let place = std::mem::take(&mut hot.blocks[index].place);
        self.free_extents(device, &place);
        self.space.take(device, room);
        true
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

    pub fn take_memory(&mut self, idx: Idx, index: usize, len: usize) -> Result<(), Stop> {
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
            && hot.leases == 0
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

    pub fn take_chunk(&mut self, idx: Idx, index: usize, len: usize, small: bool) -> Result<(), Stop> {
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

    pub fn grow_slab(&mut self, idx: Idx, end: u64) -> bool {
        let largest = self.settings.slab_file_max;
        loop {
            let hot = self.hot_mut(idx);
            let leased = hot.leases > 0;
            let Some(slab) = &hot.slab else { return false };
            let capacity = slab.capacity_bytes();
            if capacity >= end {
                return true;
            }
            if leased {
                // A lease keeps the slab whole, and was granted for what it took then.
                return false;
            }
            if !slab.can_grow_to(pages(end)) {
                // Nobody has to leave for what room would not help.
                return false;
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

    pub fn one_at_a_time(&mut self, idx: Idx) -> Result<(), Stop> {
        let hot = self.hot_mut(idx);
        if hot.writing || hot.claimed { Err(Stop::Load) } else { Ok(()) }
    }
}

pub fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(4096)).unwrap_or(u32::MAX)
}
