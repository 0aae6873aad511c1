//! Where the blocks of a file lie on its device, and their checksums: one list while it is sealed, block by block while
//! it is written.

use std::ops::Range;

use super::core::{Core, HOLE};
use super::hot::{BLOCK, BLOCK_PAGES, BlockIo, Place, block_len, blocks_for};
use super::node::{Crcs, DURABLE, Extents, Idx};
use crate::l2::Extent;

impl Core {
    /// Whether block `index` has bytes on the device.
    pub fn has_place(&self, idx: Idx, index: usize) -> bool {
        let node = self.node(idx);
        match &node.hot {
            Some(hot) if hot.placed => hot.blocks.get(index).is_some_and(|block| !block.place.is_empty()),
            _ => !Self::place_in(&node.extents, node.size, index).iter().all(|extent| extent.start == HOLE),
        }
    }

    /// The same of several blocks, with one look at the file's list.
    pub fn places_in(&self, idx: Idx, blocks: Range<usize>) -> Vec<bool> {
        let node = self.node(idx);
        let mut places = vec![false; blocks.len()];
        if let Some(hot) = node.hot.as_ref().filter(|hot| hot.placed) {
            for (place, block) in places.iter_mut().zip(hot.blocks.get(blocks.start..).unwrap_or_default()) {
                *place = !block.place.is_empty();
            }
            return places;
        }
        let mut at = 0;
        for extent in node.extents.as_slice() {
            let end = at + u64::from(extent.blocks);
            let touched = (at / BLOCK_PAGES) as usize..end.div_ceil(BLOCK_PAGES) as usize;
            let within = touched.start.max(blocks.start)..touched.end.min(blocks.end);
            if extent.start != HOLE && within.start < within.end {
                places[within.start - blocks.start..within.end - blocks.start].fill(true);
            }
            at = end;
        }
        places
    }

    /// The extents of block `index` in a sealed file's list.
    pub fn place_in(extents: &Extents, size: u64, index: usize) -> Place {
        let mut skip = index as u64 * (BLOCK / 4096);
        let mut want = (block_len(size, index) as u64).div_ceil(4096);
        let mut place = Place::new();
        for extent in extents.as_slice() {
            let blocks = u64::from(extent.blocks);
            if skip >= blocks {
                skip -= blocks;
                continue;
            }
            let take = (blocks - skip).min(want);
            if take == 0 {
                break;
            }
            let start = if extent.start == HOLE { HOLE } else { extent.start + skip };
            place.push(Extent { start, blocks: take as u32 });
            want -= take;
            skip = 0;
        }
        place
    }

    /// Where block `index` is on the device; empty or holes only: nowhere.
    pub fn place(&self, idx: Idx, index: usize) -> Place {
        let node = self.node(idx);
        match &node.hot {
            Some(hot) if hot.placed => {
                hot.blocks.get(index).map(|block| block.place.clone()).unwrap_or_default()
            }
            _ => Self::place_in(&node.extents, node.size, index),
        }
    }

    /// The checksum of what the device has of block `index`.
    pub fn block_crc(&self, idx: Idx, index: usize) -> Option<u32> {
        let node = self.node(idx);
        match &node.hot {
            Some(hot) if hot.placed => {
                hot.blocks.get(index).filter(|block| !block.place.is_empty()).map(|block| block.stored.0)
            }
            _ => node.crcs.as_slice().get(index).copied(),
        }
    }

    /// The size, places and checksums of all blocks as one list, for the record and for a sealed file.
    ///
    /// While a file is written in place, this is what the device has of it: blocks that have changed since are told as
    /// they were stored. What the file has grown by is there as far as it is stored; what it was cut by comes back as long
    /// as the new end is not stored.
    pub fn layout(&self, idx: Idx) -> (u64, Vec<Extent>, Vec<u32>) {
        let node = self.node(idx);
        debug_assert!(
            node.hot.as_ref().is_none_or(|hot| hot.base.is_none()),
            "a version that shows another's bytes has no layout"
        );
        let Some(hot) = node.hot.as_ref().filter(|hot| hot.placed) else {
            return (node.size, node.extents.as_slice().to_vec(), node.crcs.as_slice().to_vec());
        };
        let size = hot.stored_size(node.size);
        let pages = |index| (block_len(size, index) as u64).div_ceil(4096);
        let mut extents: Vec<Extent> = Vec::new();
        let mut crcs = Vec::with_capacity(hot.blocks.len());
        let mut push = |extent: Extent| match extents.last_mut() {
            Some(last)
                if (last.start == HOLE && extent.start == HOLE)
                    || (last.start != HOLE
                        && extent.start != HOLE
                        && last.start + u64::from(last.blocks) == extent.start) =>
            {
                last.blocks += extent.blocks;
            }
            _ => extents.push(extent),
        };
        for (index, block) in hot.blocks.iter().enumerate().take(blocks_for(size)) {
            block.place.iter().for_each(|extent| push(*extent));
            let lacks = pages(index).saturating_sub(in_list(&block.place));
            if lacks > 0 {
                push(Extent { start: HOLE, blocks: lacks as u32 });
            }
            crcs.push(block.stored.0);
        }
        (size, extents, crcs)
    }

    /// Moves places and checksums of a sealed file that is wholly on the device from its blocks to the node.
    pub fn settle_layout(&mut self, idx: Idx) {
        if self.hot(idx).is_some_and(|hot| hot.base.is_some()) {
            // It shows the bytes of another, and what it had itself is given up.
            return;
        }
        let node = self.node(idx);
        let Some(hot) = &node.hot else { return };
        if !hot.placed
            || !hot.sealed()
            || hot.blocks.iter().any(|block| block.dirty || block.io != BlockIo::Idle)
        {
            return;
        }
        let (_, extents, crcs) = self.layout(idx);
        let node = self.node_mut(idx);
        node.extents = Extents::from_slice(&extents);
        node.crcs = Crcs::from_slice(&crcs);
        if let Some(hot) = &mut node.hot {
            hot.placed = false;
            for block in &mut hot.blocks {
                block.place = Place::new();
            }
        }
    }

    /// The other way: each block knows its own place, so that it can be changed alone.
    pub fn spread_layout(&mut self, idx: Idx) {
        self.size_blocks(idx);
        let node = self.node_mut(idx);
        let durable = node.has(DURABLE);
        let (size, extents, crcs) =
            (node.size, std::mem::take(&mut node.extents), std::mem::take(&mut node.crcs));
        let hot = self.hot_mut(idx);
        if hot.placed {
            return;
        }
        hot.placed = true;
        hot.size_kept = if durable { size } else { 0 };
        for (index, block) in hot.blocks.iter_mut().enumerate() {
            let place = Self::place_in(&extents, size, index);
            if !place.iter().all(|extent| extent.start == HOLE) {
                block.place = place;
                block.crc = crcs.as_slice().get(index).copied();
                block.stored = (block.crc.unwrap_or(0), block_len(size, index) as u32);
            }
        }
    }
}

/// Pages that a list of extents stands for, holes included.
fn in_list(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| u64::from(extent.blocks)).sum()
}
