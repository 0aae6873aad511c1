//! Room: in L1, on the device, and what leaves to make it (rules R7, R8).

use std::cmp::Reverse;

use super::change::Stop;
use super::core::Core;
use super::hot::{Block, BlockIo, Mem, WriteBack};
use super::lists::{Ends, Recency};
use super::node::{COMMITTED, Idx, Kind, LOST, NONE};
use crate::l1::{Chunk, Slab};

/// How many files a search for one of which L1 may drop something looks at. The list has few others.
const SEARCH_MAX: usize = 4096;
/// How many files may be dropped from L1 for one request for memory.
const DROPS_MAX: usize = 4096;
/// How many files that would have to leave are looked at, to compare devices. If these are not enough, it is taken for
/// granted that those behind them would be.
const PRICED_MAX: usize = 4096;
/// How many blocks of one large file are dropped at a time.
const DROP_BLOCKS: usize = 16;

/// When a file was used last: in this run of the daemon, or else what its times say.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct LastUse {
    touched: u32,
    before: i64,
}

impl Core {
    /// A slab of `pages` pages for `idx`, dropping from L1 what it takes.
    pub fn alloc_slab(&mut self, pages: u32, idx: Idx) -> Option<Slab> {
        let owner = self.owner(idx);
        for _ in 0..DROPS_MAX {
            if let Some(slab) = self.pool.slab(pages, owner) {
                return Some(slab);
            }
            if !self.drop_some(idx) {
                return None;
            }
        }
        None
    }

    /// A chunk, dropping from L1 what it takes, but nothing of `keep`.
    pub fn alloc_chunk(&mut self, len: usize, keep: Idx) -> Option<Chunk> {
        for _ in 0..DROPS_MAX {
            if let Some(chunk) = self.pool.chunk(len) {
                return Some(chunk);
            }
            if !self.drop_some(keep) {
                return None;
            }
        }
        None
    }

    /// Drops something from L1, but not what belongs to `keep`. Without L2, that is a whole file.
    pub fn drop_some(&mut self, keep: Idx) -> bool {
        if self.settings.memory_only {
            return self.settings.evict && self.evict_file_but(keep);
        }
        let mut at = self.droppable.back;
        let mut looked = 0;
        while at != NONE && looked < SEARCH_MAX {
            let next = Ends::towards_front::<super::lists::Droppable>(&mut self.tree.nodes, at);
            if at != keep && self.may_drop(at) {
                self.drop_residency(at);
                return true;
            }
            at = next;
            looked += 1;
        }
        false
    }

    /// Whether L1 may drop some of the file right now.
    pub fn may_drop(&self, idx: Idx) -> bool {
        if self.settings.memory_only {
            return false;
        }
        let node = self.node(idx);
        let Some(hot) = &node.hot else { return false };
        if hot.passthrough_handles() > 0 || hot.pins > 0 || !hot.reads.is_empty() {
            return false;
        }
        if self.slab_droppable(idx) {
            return true;
        }
        hot.blocks.iter().enumerate().any(|(index, block)| self.chunk_droppable(idx, index, block))
    }

    /// A slab leaves whole, also that of a file under construction once all of it has been spilled: else files that
    /// wait for room would hold all of L1 between them.
    fn slab_droppable(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        let Some(hot) = &node.hot else { return false };
        // What could not be stored may be here alone.
        if hot.slab.is_none() || hot.transfers > 0 || node.has(LOST) || hot.leases > 0 || hot.hints > 0 {
            return false;
        }
        if hot.sealed() && !hot.mixed {
            return hot.blocks.iter().all(|block| !block.dirty && block.io == BlockIo::Idle)
                && (!hot.placed || hot.blocks.iter().all(|block| !block.place.is_empty()))
                && (hot.placed || !node.extents.as_slice().is_empty());
        }
        // Beside the slab there may be chunks, for what came when the slab could not grow.
        hot.blocks.iter().enumerate().filter(|(_, block)| matches!(block.mem, Mem::Slab)).all(
            |(index, block)| {
                // Without a place and without credit it is a hole, which was in the slab when the file was sealed.
                !block.dirty && block.io == BlockIo::Idle && (block.charge == 0 || self.has_place(idx, index))
            },
        )
    }

    fn chunk_droppable(&self, idx: Idx, index: usize, block: &Block) -> bool {
        matches!(block.mem, Mem::Chunk(_))
            && !block.dirty
            && !block.alone
            && block.io == BlockIo::Idle
            && self.has_place(idx, index)
            && !self.hot(idx).is_some_and(|hot| hot.is_leased(index..index + 1) || hot.is_hinted(index))
    }

    /// Drops clean blocks of the file; it stays on the device.
    fn drop_residency(&mut self, idx: Idx) {
        self.counters.evictions_l1 += 1;
        let whole = self.slab_droppable(idx);
        let Some(hot) = self.tree.nodes[idx].hot.as_mut() else { return };
        if std::mem::take(&mut hot.promoted_unread) {
            self.counters.promoted_unread += 1;
        }
        let mut bytes = 0;
        if whole {
            bytes = hot.slab.as_ref().map_or(0, crate::l1::Slab::capacity_bytes);
            hot.slab = None;
            hot.valid_to = 0;
            hot.mixed = false;
            hot.no_passthrough = false;
            for block in hot.blocks.iter_mut().filter(|block| matches!(block.mem, Mem::Slab)) {
                block.mem = Mem::None;
            }
        } else {
            let count = hot.blocks.len();
            let mut dropped = 0;
            for _ in 0..2 * count {
                let hot = self.hot_mut(idx);
                let index = hot.clock % count;
                hot.clock = index + 1;
                if std::mem::take(&mut hot.blocks[index].referenced) {
                    continue;
                }
                if self.hot(idx).is_some_and(|hot| self.chunk_droppable(idx, index, &hot.blocks[index])) {
                    if let Mem::Chunk(chunk) = std::mem::take(&mut self.hot_mut(idx).blocks[index].mem) {
                        bytes += chunk.len() as u64;
                    }
                    dropped += 1;
                    if dropped == DROP_BLOCKS {
                        break;
                    }
                }
            }
        }
        let hot = self.hot_mut(idx);
        let unread = hot.hint_unread.min(bytes);
        hot.hint_unread -= unread;
        self.counters.hint_unread_bytes += unread;
        self.tidy(idx);
    }

    /// Sets `pages` of its device aside for a file, which comes to `end` with them. Files that nobody uses leave for it,
    /// the longest unused first.
    ///
    /// A file is on one device, and what is set aside for it is there too. As long as nothing of it is stored, it may
    /// still go to another.
    pub fn reserve(&mut self, idx: Idx, pages: u64, end: u64) -> Result<(), Stop> {
        while self.is_catalog_full() {
            if !self.settings.evict {
                return Err(Stop::Fail(self.no_space()));
            }
            if !self.evict_file() {
                // What is being stored can leave once it is; if nothing is, all that is left is in use.
                let coming = self.queue.pending()
                    || self.space.devices.iter().any(|device| device.leaving > 0)
                    || (0..self.space.devices.len() as u8).any(|device| self.is_ending(device));
                return Err(if coming { Stop::Room } else { Stop::Fail(self.no_space()) });
            }
        }
        let nowhere = self.is_nowhere(idx);
        if nowhere {
            self.hot_mut(idx).taken = 0;
            self.expect(idx, 0);
        }
        let has = self.hot(idx).map_or(0, |hot| hot.taken) + pages;
        let rest = self.rest(idx, has, end);
        if nowhere {
            let device = self.device_for(pages + rest.unwrap_or(0));
            self.set_device(idx, device);
        }
        let device = self.node(idx).device;
        if self.space.on(device).free() < pages {
            self.find_room(idx, pages)?;
        }
        let device = self.node(idx).device;
        self.space.take(device, pages);
        if self.hot(idx).is_some_and(|hot| hot.building.is_some()) {
            self.hot_mut(idx).taken = has;
            self.expect(idx, rest.unwrap_or_else(|| self.ample_pages(has).saturating_sub(has)));
        }
        Ok(())
    }

    /// Pages that a file will take beyond the `has` that it has with those up to `end`, if anything says so: how long the
    /// last files of its directory were, or how long it is itself. What is longer than it has bytes may consist of
    /// holes, so it is taken at its word no further than a file of which nothing is known.
    fn rest(&self, idx: Idx, has: u64, end: u64) -> Option<u64> {
        let guess = self.guess(idx).div_ceil(4096).checked_sub(has.max(end.div_ceil(4096)));
        let size = self.node(idx).size;
        let told = (size >= end).then(|| size.div_ceil(4096).min(self.ample_pages(has)).saturating_sub(has));
        guess.max(told)
    }

    fn ample_pages(&self, has: u64) -> u64 {
        self.ample_size(has * 4096) / 4096
    }

    /// Makes room for `pages` more of a file, or takes it to a device where there is room for it as it is.
    fn find_room(&mut self, idx: Idx, pages: u64) -> Result<(), Stop> {
        let device = self.node(idx).device;
        let Some(held) = self.only_reserved(idx) else {
            return if self.make_room(device, pages) { Ok(()) } else { Err(self.why_no_room(device)) };
        };
        let free = |at: &u8| self.space.devices[usize::from(*at)].free();
        let mut others: Vec<u8> = (0..self.space.devices.len() as u8).filter(|&at| at != device).collect();
        others.sort_by_key(|at| Reverse(free(at)));
        // As long as there is room somewhere nobody leaves. Whether there is enough for what is still to come is no
        // reason to stay where there is not even room for this.
        let roomy = others.first().copied().filter(|at| free(at) >= held + pages);
        let chosen = roomy.or_else(|| self.make_room_somewhere(device, pages, &others, held + pages));
        let Some(chosen) = chosen else { return Err(self.why_no_room(device)) };
        self.move_reserved(idx, chosen);
        Ok(())
    }

    /// Makes room for `pages` more at `home`, or for `all` on one of the others, if what has to leave there was not used
    /// since what would have to leave at home (R8).
    fn make_room_somewhere(&mut self, home: u8, pages: u64, others: &[u8], all: u64) -> Option<u8> {
        if !self.settings.evict {
            return None;
        }
        let (mut chosen, mut wanted) = (home, pages);
        let mut price = self.price_of(home, pages);
        for &at in others {
            let other = self.price_of(at, all);
            if other.is_some_and(|other| price.is_none_or(|price| other < price)) {
                (chosen, wanted, price) = (at, all, other);
            }
        }
        self.make_room(chosen, wanted).then_some(chosen)
    }

    /// When the last of those files was used that have to leave so that `pages` of a device are free. None: they will not
    /// be, whatever leaves.
    fn price_of(&mut self, device: u8, pages: u64) -> Option<LastUse> {
        let space = self.space.on(device);
        if pages > space.capacity {
            return None;
        }
        let short = pages.saturating_sub(space.free());
        self.price(device, short)
    }

    /// When the last was used of the files that leave a device first and have `pages` between them: the worst of what
    /// taking these pages costs. None: there are not that many.
    fn price(&mut self, device: u8, pages: u64) -> Option<LastUse> {
        let (mut left, mut used) = (pages, LastUse::default());
        let mut at = self.recency[usize::from(device)].back;
        for _ in 0..PRICED_MAX {
            if left == 0 {
                break;
            }
            at = self.first_to_leave(at, NONE);
            if at == NONE {
                return None;
            }
            left = left.saturating_sub(self.device_pages(at));
            used = used.max(self.last_use(at));
            at = Ends::towards_front::<Recency>(&mut self.tree.nodes, at);
        }
        Some(used)
    }

    /// To compare files of several devices. Times that clients set must not count while there is something better.
    fn last_use(&self, idx: Idx) -> LastUse {
        let node = self.node(idx);
        LastUse { touched: node.touched, before: node.atime.max(node.mtime) }
    }

    /// Where a file goes that will take `pages`: where there will be the most room. If that is nowhere enough, others
    /// leave for it, so it goes where the last of these will have been used least recently (R8). Files that are under
    /// construction there take the first of those that can leave: many that come at once do not crowd where the oldest is.
    fn device_for(&mut self, pages: u64) -> u8 {
        let emptiest = self.space.emptiest();
        let spare = |space: &super::room::Space| space.spare();
        if !self.settings.evict || spare(self.space.on(emptiest)) >= pages as i64 {
            return emptiest;
        }
        let mut best: Option<(LastUse, u8)> = None;
        for device in 0..self.space.devices.len() as u8 {
            let short = pages as i64 - spare(self.space.on(device));
            let price = self.price(device, short.max(0) as u64).map(|price| (price, device));
            best = best.into_iter().chain(price).min();
        }
        best.map_or(emptiest, |(_, device)| device)
    }

    /// Whether nothing ties a file to its device.
    fn is_nowhere(&self, idx: Idx) -> bool {
        self.hot(idx).is_some_and(|hot| {
            hot.placed
                && hot.transfers == 0
                && hot.blocks.iter().all(|block| block.reserved == 0 && block.place.is_empty())
        })
    }

    /// The pages that are set aside for a file, if that is all that ties it to its device.
    fn only_reserved(&self, idx: Idx) -> Option<u64> {
        let hot = self.hot(idx)?;
        let nowhere =
            hot.placed && hot.transfers == 0 && hot.blocks.iter().all(|block| block.place.is_empty());
        nowhere.then(|| hot.blocks.iter().map(|block| u64::from(block.reserved)).sum())
    }

    fn move_reserved(&mut self, idx: Idx, to: u8) {
        let from = self.node(idx).device;
        let held: u64 = self.hot_mut(idx).blocks.iter().map(|block| u64::from(block.reserved)).sum();
        self.space.on(from).reserved -= held;
        self.space.on(to).reserved += held;
        self.set_device(idx, to);
    }

    /// Has files leave a device until `pages` of it are free. Whether they are.
    fn make_room(&mut self, device: u8, pages: u64) -> bool {
        if self.space.on(device).free() >= pages {
            return true;
        }
        // Nobody leaves for what will not be enough.
        if !self.settings.evict || self.price_of(device, pages).is_none() {
            return false;
        }
        while self.space.on(device).free() < pages {
            if !self.evict_from(device) {
                return false;
            }
        }
        true
    }

    fn why_no_room(&mut self, device: u8) -> Stop {
        // What is being stored can leave once it is; if nothing is, all that is left is in use. What was stored anew is
        // free after the next commit.
        let stale = self.space.on(device).stale > 0;
        let leaves = self.settings.evict && (self.queue.pending() || self.space.on(device).leaving > 0);
        if stale || leaves || self.is_ending(device) { Stop::Room } else { Stop::Fail(self.no_space()) }
    }

    /// Whether something that is gone has room on a device until its transfers end: what was given up while it was spilled.
    fn is_ending(&self, device: u8) -> bool {
        self.ending.iter().filter_map(|id| self.by_id(*id)).any(|idx| {
            let hot = self.hot(idx);
            self.node(idx).device == device
                && hot.is_some_and(|hot| hot.transfers > 0 && !hot.kept() && hot.based == 0)
        })
    }

    /// Has the least recently used file of all leave, for a place among the files.
    pub fn evict_file(&mut self) -> bool {
        self.evict_file_but(NONE)
    }

    /// The same, but never `keep`.
    pub fn evict_file_but(&mut self, keep: Idx) -> bool {
        let mut first: Option<(LastUse, Idx)> = None;
        for device in 0..self.recency.len() {
            let at = self.first_to_leave(self.recency[device].back, keep);
            let candidate = (at != NONE).then(|| (self.last_use(at), at));
            first = first.into_iter().chain(candidate).min();
        }
        let Some((_, idx)) = first else { return false };
        self.evict(idx);
        true
    }

    /// R8: the least recently used file of a device that nobody uses leaves, whole, and its name with it.
    fn evict_from(&mut self, device: u8) -> bool {
        let at = self.first_to_leave(self.recency[usize::from(device)].back, NONE);
        let found = at != NONE;
        if found {
            self.evict(at);
        }
        found
    }

    /// The first file from `at` on, which is in a list of files by recency, that can leave and is not `keep`.
    fn first_to_leave(&mut self, mut at: Idx, keep: Idx) -> Idx {
        while at != NONE && (at == keep || !self.may_evict(at)) {
            let next = Ends::towards_front::<Recency>(&mut self.tree.nodes, at);
            if at != keep {
                // In use, or not yet stored. It comes back once that is over ([`Core::tidy`]): so a search passes it
                // once, however many there are of its kind and however long they stay.
                self.forget_recency(at);
            }
            at = next;
        }
        at
    }

    fn evict(&mut self, idx: Idx) {
        let pages = if self.settings.memory_only { 0 } else { self.device_pages(idx) };
        self.count_eviction(idx, pages);
        log::debug!("evict {}", self.tree.path(idx));
        self.invalidate(idx);
        self.drop_name(idx, None, true);
    }

    /// Whole and never while open, leased, brought to L1 by a hint, or not yet stored.
    pub fn may_evict(&self, idx: Idx) -> bool {
        let memory_only = self.settings.memory_only;
        let node = self.node(idx);
        if node.kind() != Kind::File || node.has(LOST) || (!memory_only && !node.has(COMMITTED)) {
            return false;
        }
        let Some(hot) = &node.hot else { return true };
        hot.sealed()
            && !hot.kept()
            && hot.pins == 0
            && hot.transfers == 0
            && hot.based == 0
            && hot.base.is_none()
            && hot.reads.is_empty()
            && hot.leases == 0
            && hot.hints == 0
            && hot.write_back == WriteBack::None
            && hot.supersedes.is_empty()
            && !hot.dirty_blocks()
    }
}
