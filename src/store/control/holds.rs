//! What leases hold, as it is noted with the files: eviction, writers and the end of a file's life look there.
//!
//! Each block counts in how many ranges of leases it is, so that a look at one costs the same however many leases there
//! are; each file, how many leases it is in.

use std::collections::HashMap;
use std::ops::Range;

use smallvec::SmallVec;

use super::classify::Seen;
use super::leases::{Client, Item};
use super::parts::blocks_of;
use crate::store::core::Core;
use crate::store::hot::Mem;
use crate::store::lists::Droppable;
use crate::store::node::{Idx, NodeId};

/// What a lease has of one file.
pub(super) struct FileUse {
    pub node: NodeId,
    /// Its ranges that hold something of it still.
    pub items: u32,
    /// Memory that they keep in L1.
    pub charge: u64,
}

/// The files of one lease, by node.
pub(super) type Files = Vec<FileUse>;

/// The blocks that an item holds: mostly all of it.
pub(super) type Held = SmallVec<[Range<u32>; 1]>;

fn find(files: &mut Files, node: NodeId) -> Option<&mut FileUse> {
    let at = files.binary_search_by_key(&node, |file| file.node).ok()?;
    files.get_mut(at)
}

impl Core {
    /// Memory that blocks of a file keep in L1: a slab stays whole. The ranges are sorted, and may overlap.
    fn memory_of<'r>(&self, idx: Idx, ranges: impl Iterator<Item = &'r Range<u32>>) -> u64 {
        let Some(hot) = self.hot(idx) else { return 0 };
        let slab = hot.slab.as_ref().map_or(0, |slab| u64::from(slab.pages()) * 4096);
        let whole = hot.sealed() && hot.slab.is_some() && !hot.mixed;
        let (mut in_slab, mut chunks, mut done) = (false, 0, 0);
        for range in ranges.filter(|range| !range.is_empty()) {
            if whole {
                return slab;
            }
            for block in range.start.max(done)..range.end {
                match hot.blocks.get(block as usize).map(|block| &block.mem) {
                    Some(Mem::Slab) => in_slab = true,
                    Some(Mem::Chunk(chunk)) => chunks += chunk.len() as u64,
                    Some(Mem::None) | None => {}
                }
            }
            done = done.max(range.end);
        }
        chunks + if in_slab { slab } else { 0 }
    }

    /// The files of a window, with the memory that all of it keeps in L1: each block once.
    pub(super) fn files_of(&self, window: &[Seen]) -> Files {
        let mut blocks: Vec<(NodeId, Range<u32>)> = Vec::with_capacity(window.len());
        let mut nodes: Vec<NodeId> = Vec::with_capacity(window.len());
        for seen in window {
            let shown = self.id(seen.shown);
            blocks.push((shown, blocks_of(&seen.bytes)));
            nodes.push(shown);
            if seen.shown != seen.idx {
                nodes.push(self.id(seen.idx));
            }
        }
        nodes.sort_unstable();
        blocks.sort_unstable_by_key(|(node, range)| (*node, range.start));
        let same = nodes.chunk_by(|one, other| one == other);
        let mut files: Files =
            same.map(|all| FileUse { node: all[0], items: all.len() as u32, charge: 0 }).collect();
        // Both are sorted, and every shown file is among the files.
        let mut file = files.iter_mut();
        for all in blocks.chunk_by(|(one, _), (other, _)| one == other) {
            let charge = self.memory_of(all[0].0.idx(), all.iter().map(|(_, range)| range));
            if let Some(file) = file.find(|file| file.node == all[0].0) {
                file.charge = charge;
            }
        }
        files
    }

    /// Notes a new lease with its files.
    pub(super) fn hold(&mut self, items: &[Item], files: &Files) {
        for item in items {
            self.count_blocks(item, &item.held, true);
        }
        for file in files {
            let idx = file.node.idx();
            self.hot_mut(idx).leases += 1;
            self.keep_leased(idx);
        }
    }

    /// Notes that a lease is over.
    pub(super) fn let_go_of(&mut self, items: &[Item], files: &Files) {
        for item in items {
            self.count_blocks(item, &item.held, false);
        }
        for file in files.iter().filter(|file| file.items > 0) {
            self.leave(file.node);
        }
        files.iter().for_each(|file| self.let_lease_go(file.node));
    }

    /// One more range of a lease has these blocks of a file, and of that whose bytes it shows; or one less.
    fn count_blocks(&mut self, item: &Item, blocks: &[Range<u32>], more: bool) {
        let both = if item.node == item.shown { &[item.node][..] } else { &[item.node, item.shown][..] };
        for node in both {
            let Some(idx) = self.by_id(*node) else { continue };
            let leased = &mut self.hot_mut(idx).leased;
            for range in blocks {
                if leased.len() < range.end as usize {
                    leased.resize(range.end as usize, 0);
                }
                for count in &mut leased[range.start as usize..range.end as usize] {
                    *count = if more { *count + 1 } else { *count - 1 };
                }
            }
        }
    }

    /// A lease holds nothing of a file any more.
    fn leave(&mut self, node: NodeId) {
        let Some(idx) = self.by_id(node) else { return };
        let hot = self.hot_mut(idx);
        hot.leases -= 1;
        let free = || hot.leases > 0 || hot.leased.iter().all(|count| *count == 0);
        debug_assert!(free(), "a block is leased by nobody");
    }

    /// A file of which nothing may leave L1 is no candidate any more.
    fn keep_leased(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx).filter(|hot| hot.in_l1_list) else { return };
        let whole = hot.slab.is_some() && !hot.mixed;
        if whole || !self.may_drop(idx) {
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
        }
    }

    /// Something of a file is not leased any more.
    fn let_lease_go(&mut self, node: NodeId) {
        self.call_waiters();
        self.kick_hints();
        if let Some(idx) = self.by_id(node) {
            self.tidy(idx);
        }
    }

    /// Notes with the files what is still held of these ranges, and what memory that is.
    pub(super) fn refresh(&mut self, id: u64, items: &[u32]) {
        let Some(mut lease) = self.control.leases.all.remove(&id) else { return };
        let mut changed: HashMap<NodeId, Vec<Range<u32>>> = HashMap::new();
        for &at in items {
            let now: Held = lease.held(at).iter().map(blocks_of).collect();
            let item = &mut lease.items[at as usize];
            let before = std::mem::replace(&mut item.held, now);
            self.count_blocks(item, &item.held, true);
            self.count_blocks(item, &before, false);
            let over = !before.is_empty() && item.held.is_empty();
            let both = [Some(item.node), Some(item.shown).filter(|shown| *shown != item.node)];
            for node in both.into_iter().flatten() {
                changed.entry(node).or_default();
                if over && let Some(file) = find(&mut lease.files, node) {
                    file.items -= 1;
                    if file.items == 0 {
                        self.leave(node);
                    }
                }
            }
        }
        for item in &lease.items {
            if let Some(parts) = changed.get_mut(&item.shown) {
                parts.extend(item.held.iter().cloned());
            }
        }
        let before = lease.bytes;
        for (node, mut parts) in changed {
            parts.sort_unstable_by_key(|part| part.start);
            if let (Some(idx), Some(file)) = (self.by_id(node), find(&mut lease.files, node)) {
                // It may have moved to other memory meanwhile; nobody is charged more for that.
                let now = self.memory_of(idx, parts.iter()).min(file.charge);
                lease.bytes = lease.bytes - file.charge + now;
                file.charge = now;
            }
            self.let_lease_go(node);
        }
        self.control.leases.recount(Client::from(&*lease.who), before, lease.bytes);
        self.control.leases.all.insert(id, lease);
    }
}
