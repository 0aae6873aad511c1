//! All state behind the store's one lock, and the small moves that everything else is made of.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::again::{Expected, Gone};
use super::change::Waiter;
use super::hot::{BLOCK, Block, BlockIo, Hot, Phase, Place, WriteBack, block_len, blocks_for};
use super::lists::{Droppable, Ends, Recency};
use super::node::{
    ALIAS_BASE, Crcs, DURABLE, Detail, Extents, Idx, Kind, META_DIRTY, MOVED, NAMED, NONE, Node, NodeId,
    ROOT, ROOT_INO,
};
use super::promote::{AroundRead, Load};
use super::read::Served;
use super::tally::Tallies;
use super::tree::Tree;
use crate::l1::{Owner, Pool};
use crate::l2::{Allocator, Extent};
use crate::stats::Counters;
use crate::writeback::queue::PublishQueue;

/// Marks the blocks of an extent as a hole: they read as zeros and take no space.
pub const HOLE: u64 = u64::MAX;

/// What the store was told to do, fixed at start.
#[derive(Clone, Debug)]
pub struct Settings {
    pub passthrough: bool,
    /// There is no L2: what leaves L1 is gone.
    pub memory_only: bool,
    pub evict: bool,
    pub small_file_max: u64,
    pub slab_file_max: u64,
    pub dirty_limit_pages: u64,
    /// Pages of L2 that files may use.
    pub capacity_pages: u64,
    pub files_max: u64,
    pub publish_wait: Duration,
    pub request_deadline: Duration,
}

/// Something to do once the lock is given back.
pub enum Effect {
    Reply(Box<dyn FnOnce() + Send>),
    Invalidate { parent: u64, name: Box<[u8]> },
    Load(Load),
    Serve(Box<Served>),
}

/// When to look at which file again, the earliest first.
#[derive(Default, Debug)]
pub struct Deadlines(BinaryHeap<Reverse<(Instant, NodeId)>>);

impl Deadlines {
    pub fn push(&mut self, (at, id): (Instant, NodeId)) {
        self.0.push(Reverse((at, id)));
    }
    pub fn next(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }
    /// A file whose time has come.
    pub fn due(&mut self, now: Instant) -> Option<NodeId> {
        self.next().filter(|at| *at <= now)?;
        self.0.pop().map(|Reverse((_, id))| id)
    }
}

/// Which threads have something to do.
#[derive(Default, Clone, Copy)]
pub struct Wakes {
    pub writer: bool,
    pub committer: bool,
    pub admission: bool,
    pub timer: bool,
}

/// How often each thread was called, so that a call between looking and waiting is not missed.
#[derive(Default, Clone, Copy)]
pub struct Calls {
    pub writer: u64,
    pub admission: u64,
}

/// What is taken of L2.
#[derive(Default, Debug, Clone, Copy)]
pub struct Space {
    /// Pages in extents that belong to some file, or will be free after the next commit.
    pub allocated: u64,
    /// Pages set aside for dirty blocks that have no extents yet.
    pub reserved: u64,
    /// Pages among `allocated` that become free with the next commits.
    pub leaving: u64,
    pub peak: u64,
}

impl Space {
    pub fn used(&self) -> u64 {
        (self.allocated + self.reserved).saturating_sub(self.leaving)
    }
}

pub struct Core {
    pub tree: Tree,
    pub pool: Arc<Pool>,
    pub settings: Settings,
    pub counters: Counters,
    pub effects: Vec<Effect>,
    /// Lines for `.ctl/events`.
    pub events: Vec<String>,
    pub tallies: Tallies,
    pub wakes: Wakes,
    pub calls: Calls,
    pub droppable: Ends,
    pub recency: Ends,
    /// One for each device of the volume.
    pub allocators: Vec<Allocator>,
    pub space: Space,
    /// Pages written by clients that are not on the device.
    pub dirty_pages: u64,
    /// Changes that wait for something, in order of arrival (rule R7).
    pub waiters: VecDeque<Waiter>,
    pub queue: PublishQueue,
    /// The queue of waiting changes is being tried right now.
    pub admitting: bool,
    /// Files being written that could be spilled, by recency of creation.
    pub building: VecDeque<NodeId>,
    /// Files with lookups or reads that have a deadline.
    pub deadlines: Deadlines,
    /// Memory that reads around L1 hold, and those that wait for some.
    pub around_bytes: u64,
    pub around_waiting: VecDeque<AroundRead>,
    /// Those who were sent to look again, and the names of what they did not find.
    pub expected: Vec<Expected>,
    pub gone: Gone,
    pub aliases: HashMap<u64, NodeId>,
    pub next_alias: u64,
    /// Durability failed once: reads go on, what was published is not stored any more.
    pub poisoned: bool,
    /// Closes of private files so far.
    pub closes: u64,
    pub stopping: bool,
}

/// Nanoseconds since 1970.
pub fn now() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| i64::try_from(elapsed.as_nanos()).unwrap_or(i64::MAX))
}

impl Core {
    pub fn new(tree: Tree, pool: Arc<Pool>, settings: Settings, allocators: Vec<Allocator>) -> Self {
        Self {
            tree,
            pool,
            settings,
            counters: Counters::default(),
            effects: Vec::new(),
            events: Vec::new(),
            tallies: Tallies::default(),
            wakes: Wakes::default(),
            calls: Calls::default(),
            droppable: Ends::default(),
            recency: Ends::default(),
            allocators,
            space: Space::default(),
            dirty_pages: 0,
            waiters: VecDeque::new(),
            queue: PublishQueue::default(),
            admitting: false,
            building: VecDeque::new(),
            deadlines: Deadlines::default(),
            around_bytes: 0,
            around_waiting: VecDeque::new(),
            expected: Vec::new(),
            gone: Gone::default(),
            aliases: HashMap::new(),
            next_alias: ALIAS_BASE,
            poisoned: false,
            closes: 0,
            stopping: false,
        }
    }

    pub fn node(&self, idx: Idx) -> &Node {
        &self.tree.nodes[idx]
    }

    pub fn node_mut(&mut self, idx: Idx) -> &mut Node {
        &mut self.tree.nodes[idx]
    }

    pub fn id(&self, idx: Idx) -> NodeId {
        self.tree.nodes.id(idx)
    }

    pub fn by_id(&self, id: NodeId) -> Option<Idx> {
        self.tree.nodes.by_id(id).map(|_| id.idx())
    }

    pub fn reply(&mut self, reply: impl FnOnce() + Send + 'static) {
        self.effects.push(Effect::Reply(Box::new(reply)));
    }

    pub fn event(&mut self, text: String) {
        self.events.push(text);
    }

    /// The node behind an inode number. ESTALE sends the kernel to look the name up again.
    pub fn resolve(&self, ino: u64) -> Result<Idx, Errno> {
        if ino == ROOT_INO {
            return Ok(ROOT);
        }
        let id = if ino >= ALIAS_BASE { *self.aliases.get(&ino).ok_or(Errno::ESTALE)? } else { NodeId(ino) };
        self.by_id(id).ok_or(Errno::ESTALE)
    }

    pub fn resolve_dir(&self, ino: u64) -> Result<Idx, Errno> {
        let idx = self.resolve(ino)?;
        let node = self.node(idx);
        if node.kind() != Kind::Dir {
            return Err(Errno::ENOTDIR);
        }
        if idx != ROOT && !node.has(NAMED) {
            return Err(Errno::ENOENT);
        }
        Ok(idx)
    }

    /// The number that the kernel shall know `idx` by from now on.
    pub fn ino(&self, idx: Idx) -> u64 {
        if idx == ROOT {
            return ROOT_INO;
        }
        let node = self.node(idx);
        node.hot.as_ref().and_then(|hot| hot.alias).unwrap_or(NodeId::new(idx, node.generation).0)
    }

    pub fn hot(&self, idx: Idx) -> Option<&Hot> {
        self.node(idx).hot.as_deref()
    }

    /// The live state, made if there was none: then the file is sealed and lies on the device.
    pub fn hot_mut(&mut self, idx: Idx) -> &mut Hot {
        self.node_mut(idx).hot.get_or_insert_with(|| {
            let mut hot = Hot::new(Phase::Sealed);
            hot.placed = false;
            Box::new(hot)
        })
    }

    /// Makes the list of blocks as long as the file.
    pub fn size_blocks(&mut self, idx: Idx) {
        let blocks = blocks_for(self.node(idx).size);
        let hot = self.hot_mut(idx);
        if hot.blocks.len() < blocks {
            hot.blocks.resize_with(blocks, Block::default);
        }
    }

    /// Whether block `index` has bytes on the device.
    pub fn has_place(&self, idx: Idx, index: usize) -> bool {
        let node = self.node(idx);
        match &node.hot {
            Some(hot) if hot.placed => hot.blocks.get(index).is_some_and(|block| !block.place.is_empty()),
            _ => !Self::place_in(&node.extents, node.size, index).iter().all(|extent| extent.start == HOLE),
        }
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
    /// they were stored. What the file has grown by and was not stored reads as zeros; what it was cut by comes back
    /// as long as the new end is not stored.
    pub fn layout(&self, idx: Idx) -> (u64, Vec<Extent>, Vec<u32>) {
        let node = self.node(idx);
        let Some(hot) = node.hot.as_ref().filter(|hot| hot.placed) else {
            return (node.size, node.extents.as_slice().to_vec(), node.crcs.as_slice().to_vec());
        };
        let pages = |index| (block_len(node.size, index) as u64).div_ceil(4096);
        let last = blocks_for(node.size).saturating_sub(1);
        let size = match hot.blocks.get(last) {
            Some(block) if !block.place.is_empty() => {
                node.size.max(last as u64 * BLOCK + u64::from(block.stored.1))
            }
            _ => node.size,
        };
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
        for (index, block) in hot.blocks.iter().enumerate().take(blocks_for(node.size)) {
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
        let (size, extents, crcs) =
            (node.size, std::mem::take(&mut node.extents), std::mem::take(&mut node.crcs));
        let hot = self.hot_mut(idx);
        if hot.placed {
            return;
        }
        hot.placed = true;
        for (index, block) in hot.blocks.iter_mut().enumerate() {
            let place = Self::place_in(&extents, size, index);
            if !place.iter().all(|extent| extent.start == HOLE) {
                block.place = place;
                block.crc = crcs.as_slice().get(index).copied();
                block.stored = (block.crc.unwrap_or(0), block_len(size, index) as u32);
            }
        }
    }

    /// The directory and name that a node has, or will have once it is published.
    pub fn home(&self, idx: Idx) -> (Idx, &[u8]) {
        let node = self.node(idx);
        match node.hot.as_ref().and_then(|hot| hot.private()) {
            Some(private) => (private.parent, &private.name),
            None => (node.parent, &node.name),
        }
    }

    pub fn owner(&self, idx: Idx) -> Owner {
        let (parent, _) = self.home(idx);
        Owner { uid: self.node(idx).uid, namespace: u64::from(self.tree.namespace(parent)) }
    }

    /// Records that the node's record is older than what is here.
    pub fn changed(&mut self, idx: Idx) {
        let id = self.id(idx);
        let node = self.node_mut(idx);
        if node.has(DURABLE) && !node.has(META_DIRTY) {
            node.set(META_DIRTY, true);
            self.queue.changed.push(id);
            self.wakes.committer = true;
        }
    }

    /// Directories and links have no bytes to wait for: their record goes with the next commit.
    pub fn record_at_once(&mut self, idx: Idx) {
        if self.settings.memory_only {
            return;
        }
        self.node_mut(idx).set(DURABLE, true);
        self.changed(idx);
    }

    pub fn touch(&mut self, idx: Idx) {
        if self.node(idx).has(NAMED) && self.node(idx).kind() == Kind::File {
            self.recency.push_front::<Recency>(&mut self.tree.nodes, idx);
        }
    }

    pub fn unlist(&mut self, idx: Idx) {
        self.recency.remove::<Recency>(&mut self.tree.nodes, idx);
        self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
    }

    /// Takes the visible name from `idx`. `successor` is the version that takes its place, if there is one: then
    /// the old record stays on the device until the new one is committed.
    pub fn drop_name(&mut self, idx: Idx, successor: Option<Idx>, by_us: bool) {
        self.recency.remove::<Recency>(&mut self.tree.nodes, idx);
        self.remember_name(idx);
        let parent = self.node(idx).parent;
        self.tree.unlink(idx);
        self.node_mut(idx).set(MOVED, by_us);
        self.touch_dir(parent);
        let mut old = match &mut self.node_mut(idx).hot {
            Some(hot) => std::mem::take(&mut hot.supersedes),
            None => Vec::new(),
        };
        // What is on its way to the device and still the base of its successor will have a record, too.
        let coming = self.hot(idx).is_some_and(|hot| hot.based > 0) && self.in_write_back(idx);
        if self.node(idx).has(DURABLE) || coming {
            old.push(self.id(idx));
        }
        match successor {
            Some(new) if !self.settings.memory_only => self.hot_mut(new).supersedes.extend(old),
            _ => self.remove_records(old),
        }
        self.reap(idx);
    }

    /// Has the records of `ids` removed with the next commit.
    pub fn remove_records(&mut self, ids: Vec<NodeId>) {
        if ids.is_empty() {
            return;
        }
        for id in ids {
            // What is on its way must not be recorded after its record was removed.
            if let Some(idx) = self.by_id(id)
                && !self.node(idx).has(DURABLE)
                && let Some(WriteBack::Queued(seq)) = self.hot(idx).map(|hot| hot.write_back)
            {
                self.forget_entry(seq, id);
            }
            // What is still open keeps its place after the record is gone, so it does not count as leaving.
            let pages = match self.by_id(id) {
                Some(idx) if self.hot(idx).is_none_or(|hot| !hot.kept()) => self.device_pages(idx),
                _ => 0,
            };
            self.space.leaving += pages;
            self.queue.removed.push((id, pages));
        }
        self.wakes.committer = true;
    }

    /// Pages that a file has on the device.
    pub fn device_pages(&self, idx: Idx) -> u64 {
        let node = self.node(idx);
        match &node.hot {
            Some(hot) if hot.placed => hot.blocks.iter().map(|block| pages_of(&block.place)).sum(),
            _ => pages_of(node.extents.as_slice()),
        }
    }

    /// New mtime and ctime of a directory whose entries changed.
    pub fn touch_dir(&mut self, dir: Idx) {
        if let Some(node) = self.tree.nodes.get_mut(dir) {
            let now = now();
            node.mtime = now;
            node.ctime = now;
        }
    }

    /// Frees a node that nothing refers to any more: no name, no record, nobody who has it open.
    pub fn reap(&mut self, idx: Idx) {
        let Some(node) = self.tree.nodes.get(idx) else { return };
        if idx == ROOT || node.has(NAMED | DURABLE) {
            return;
        }
        if let Some(hot) = &node.hot
            && (hot.kept()
                || hot.pins > 0
                || hot.transfers > 0
                || hot.based > 0
                || hot.private().is_some_and(|private| private.parent != NONE)
                || !hot.reads.is_empty())
        {
            return;
        }
        self.unlist(idx);
        self.drop_base(idx);
        self.drop_blocks(idx);
        let Some(mut node) = self.tree.nodes.remove(idx) else { return };
        if let Some(hot) = &mut node.hot {
            if let Some(alias) = hot.alias {
                self.aliases.remove(&alias);
            }
            for (_, reply) in hot.fsyncs.drain(..) {
                // The file is gone; there is nothing left that could be lost.
                self.effects.push(Effect::Reply(Box::new(move || reply(Ok(())))));
            }
            for lookup in hot.lookups.drain(..) {
                self.effects.push(Effect::Reply(Box::new(move || (lookup.reply)(Err(Errno::ENOENT)))));
            }
        }
        let device = node.device;
        self.free_extents(device, node.extents.as_slice());
    }

    /// Gives back all memory, space and dirty credit of a file's blocks.
    pub fn drop_blocks(&mut self, idx: Idx) {
        let Some(hot) = self.node_mut(idx).hot.as_mut() else { return };
        let blocks = std::mem::take(&mut hot.blocks);
        hot.slab = None;
        hot.valid_to = 0;
        hot.crc_to = 0;
        let device = self.node(idx).device;
        for block in blocks {
            self.uncharge(block.charge, block.reserved);
            self.free_extents(device, &block.place);
        }
    }

    /// Forgets the version whose bytes this one shows.
    pub fn drop_base(&mut self, idx: Idx) {
        let Some(base) = self.node_mut(idx).hot.as_mut().and_then(|hot| hot.base.take()) else { return };
        if let Some(base) = self.by_id(base) {
            let hot = self.hot_mut(base);
            hot.based = hot.based.saturating_sub(1);
            self.reap(base);
        }
    }

    pub fn uncharge(&mut self, charge: u32, reserved: u32) {
        self.dirty_pages -= u64::from(charge);
        self.space.reserved -= u64::from(reserved);
        if charge > 0 || reserved > 0 {
            self.wakes.admission = true;
        }
    }

    pub fn free_extents(&mut self, device: u8, extents: &[Extent]) {
        let mut freed = 0;
        for extent in extents.iter().filter(|extent| extent.start != HOLE) {
            if let Some(allocator) = self.allocators.get_mut(usize::from(device)) {
                allocator.free(*extent);
                freed += u64::from(extent.blocks);
            }
        }
        if freed > 0 {
            self.space.allocated -= freed;
            self.wakes.admission = true;
            self.wakes.writer = true;
        }
    }

    /// Drops the live state of a file that is sealed, cold and used by nobody, and keeps the list of what L1 may
    /// drop true.
    pub fn tidy(&mut self, idx: Idx) {
        let Some(node) = self.tree.nodes.get(idx) else { return };
        let Some(hot) = &node.hot else { return };
        let resident = hot.slab.is_some() || hot.blocks.iter().any(|block| !block.mem.is_none());
        if !resident && !hot.in_use() && !hot.placed && hot.alias.is_none() && !hot.failed {
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
            self.node_mut(idx).hot = None;
            self.reap(idx);
            return;
        }
        let droppable = self.may_drop(idx);
        let listed = self.hot(idx).is_some_and(|hot| hot.in_l1_list);
        if droppable && !listed {
            self.droppable.push_front::<Droppable>(&mut self.tree.nodes, idx);
            self.wakes.admission |= !self.waiters.is_empty();
        } else if !droppable && listed {
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
        }
        self.reap(idx);
    }

    /// The kernel must not believe in the name any longer.
    pub fn invalidate(&mut self, idx: Idx) {
        let node = self.node(idx);
        let (parent, name) = (node.parent, node.name.clone());
        if let Some(parent) = self.tree.nodes.get(parent).map(|_| self.ino(parent)) {
            self.effects.push(Effect::Invalidate { parent, name });
        }
    }

    /// R2, R6: the file's bytes are wrong or could not be stored. Its name goes away and the log says so.
    pub fn lose(&mut self, idx: Idx, why: &str) {
        let path = self.tree.path(idx);
        self.event(format!("lost {path}: {why}"));
        log::error!("{path}: {why}; the file is gone from the tree");
        let node = self.node_mut(idx);
        node.set(super::node::LOST, true);
        if node.has(NAMED) {
            self.invalidate(idx);
            self.drop_name(idx, None, true);
        }
    }

    /// Whether a block that holds nothing at all is all zeros by definition.
    pub fn is_hole(&self, idx: Idx, index: usize) -> bool {
        let node = self.node(idx);
        let Some(hot) = &node.hot else { return false };
        hot.blocks.get(index).is_none_or(|block| block.mem.is_none()) && !self.has_place(idx, index)
    }

    /// Adds a node without a name.
    pub fn new_node(&mut self, detail: Detail, mode: u32, uid: u32, gid: u32) -> Result<Idx, Errno> {
        let full = self.tree.nodes.count() as u64 >= self.settings.files_max;
        if full && !(self.settings.evict && self.evict_file()) {
            return Err(self.no_space());
        }
        let node = Node::new(detail, (mode & 0o7777) as u16, uid, gid, now());
        Ok(self.tree.nodes.insert(node))
    }

    pub fn in_write_back(&self, idx: Idx) -> bool {
        self.hot(idx).is_some_and(|hot| hot.write_back != WriteBack::None)
    }
}

/// Pages that a list of extents stands for, holes included.
fn in_list(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| u64::from(extent.blocks)).sum()
}

/// Pages that a list of extents takes on the device.
pub fn pages_of(extents: &[Extent]) -> u64 {
    extents.iter().filter(|extent| extent.start != HOLE).map(|extent| u64::from(extent.blocks)).sum()
}
