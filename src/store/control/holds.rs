//! What leases hold, as it is noted with the files: eviction, writers and the end of a file's life look there.
//!
//! Each block counts in how many ranges of leases it is, so that a look at one costs the same however many leases there
//! are; each file, how many leases it is in.

use std::collections::HashMap;
use std::ops::Range;

use super::classify::Seen;
use super::leases::{Client, Item};
use super::parts::{Parts, blocks_of, merged};
use crate::store::core::Core;
use crate::store::hot::Mem;
use crate::store::lists::Droppable;
use crate::store::node::{Idx, NodeId};

/// What a lease has of one file.
#[derive(Default)]
pub(super) struct FileUse {
    /// Its ranges that hold something of it still.
    pub items: u32,
    /// Memory that they keep in L1.
    pub charge: u64,
}

/// The files of one lease.
pub(super) type Files = HashMap<NodeId, FileUse>;

impl Core {
    /// Memory that `blocks` of a file keep in L1: a slab stays whole.
    fn memory_of(&self, idx: Idx, blocks: Parts) -> u64 {
        let Some(hot) = self.hot(idx) else { return 0 };
        let slab = hot.slab.as_ref().map_or(0, |slab| u64::from(slab.pages()) * 4096);
        let blocks = merged(blocks);
        if hot.sealed() && hot.slab.is_some() && !hot.mixed {
            return if blocks.is_empty() { 0 } else { slab };
        }
        let (mut in_slab, mut chunks) = (false, 0);
        for block in blocks.into_iter().flatten() {
            match hot.blocks.get(block as usize).map(|block| &block.mem) {
                Some(Mem::Slab) => in_slab = true,
                Some(Mem::Chunk(chunk)) => chunks += chunk.len() as u64,
                Some(Mem::None) | None => {}
            }
        }
        chunks + if in_slab { slab } else { 0 }
    }

    /// The files of a window, with the memory that all of it keeps in L1: each block once.
    pub(super) fn files_of(&self, window: &[Seen]) -> Files {
        let mut blocks: HashMap<Idx, Parts> = HashMap::new();
        let mut files = Files::new();
        for seen in window {
            let range = seen.blocks();
            blocks.entry(seen.shown).or_default().push(range.start as u64..range.end as u64);
            files.entry(self.id(seen.idx)).or_default().items += 1;
            if seen.shown != seen.idx {
                files.entry(self.id(seen.shown)).or_default().items += 1;
            }
        }
        for (idx, parts) in blocks {
            files.entry(self.id(idx)).or_default().charge = self.memory_of(idx, parts);
        }
        files
    }

    /// Notes a new lease with its files.
    pub(super) fn hold(&mut self, items: &[Item], files: &Files) {
        for item in items {
            self.count_blocks(item, &item.held, true);
        }
        for node in files.keys() {
            let idx = node.idx();
            self.hot_mut(idx).leases += 1;
            self.keep_leased(idx);
        }
    }

    /// Notes that a lease is over.
    pub(super) fn let_go_of(&mut self, items: &[Item], files: &Files) {
        for item in items {
            self.count_blocks(item, &item.held, false);
        }
        for (node, _) in files.iter().filter(|(_, file)| file.items > 0) {
            self.leave(*node);
        }
        files.keys().for_each(|node| self.let_lease_go(*node));
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
        if hot.leases == 0 {
            debug_assert!(hot.leased.iter().all(|count| *count == 0), "a block is leased by nobody");
            hot.leased = Vec::new();
        }
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
        self.wakes.admission |= !self.waiters.is_empty();
        if let Some(idx) = self.by_id(node) {
            self.tidy(idx);
        }
    }

    /// Notes with the files what is still held of these ranges, and what memory that is.
    pub(super) fn refresh(&mut self, id: u64, items: &[u32]) {
        let Some(mut lease) = self.control.leases.all.remove(&id) else { return };
        let mut changed: HashMap<NodeId, Parts> = HashMap::new();
        for &at in items {
            let now: Vec<Range<u32>> = lease.held(at).iter().map(blocks_of).collect();
            let item = &mut lease.items[at as usize];
            let before = std::mem::replace(&mut item.held, now);
            self.count_blocks(item, &item.held, true);
            self.count_blocks(item, &before, false);
            let over = !before.is_empty() && item.held.is_empty();
            let both = [Some(item.node), Some(item.shown).filter(|shown| *shown != item.node)];
            for node in both.into_iter().flatten() {
                changed.entry(node).or_default();
                if over && let Some(file) = lease.files.get_mut(&node) {
                    file.items -= 1;
                    if file.items == 0 {
                        self.leave(node);
                    }
                }
            }
        }
        for item in &lease.items {
            if let Some(parts) = changed.get_mut(&item.shown) {
                parts.extend(item.held.iter().map(|held| u64::from(held.start)..u64::from(held.end)));
            }
        }
        let before = lease.bytes;
        for (node, parts) in changed {
            if let (Some(idx), Some(file)) = (self.by_id(node), lease.files.get_mut(&node)) {
                // It may have moved to other memory meanwhile; nobody is charged more for that.
                let now = self.memory_of(idx, parts).min(file.charge);
                lease.bytes = lease.bytes - file.charge + now;
                file.charge = now;
            }
            self.let_lease_go(node);
        }
        self.control.leases.recount(Client::from(&*lease.who), before, lease.bytes);
        self.control.leases.all.insert(id, lease);
    }
}
