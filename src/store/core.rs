//! All state behind the store's one lock, and the small moves that everything else is made of.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::again::{Expected, Gone};
use super::catalog::CatalogRoom;
use super::change::Waiter;
use super::control;
use super::drain::Drains;
use super::hot::{Block, BlockIo, Hot, Phase, WriteBack, blocks_for};
use super::lists::{Droppable, Ends, Recency};
use super::node::{
    ALIAS_BASE, DURABLE, Detail, Idx, Kind, META_DIRTY, MOVED, NAMED, NO_INO, NONE, Node, NodeId, ROOT,
    ROOT_INO,
};
use super::pace::Pace;
use super::patience::Patience;
use super::promote::{BadTold, Load};
use super::read::Served;
use super::room::{Room, Space};
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
    /// Owners and modes count: the kernel checks them (`--default-permissions`).
    pub permissions: bool,
    pub small_file_max: u64,
    pub slab_file_max: u64,
    pub dirty_limit_pages: u64,
    /// Pages of L2 that files may use.
    pub capacity_pages: u64,
    /// Those of each device.
    pub device_pages: Vec<u64>,
    pub files_max: u64,
    /// Recovery would take no node from here on.
    pub positions_max: u64,
    /// Bytes that the records of all files may take.
    pub catalog_bytes_max: u64,
    pub publish_wait: Duration,
    pub request_deadline: Duration,
    pub fsync_deadline: Duration,
    /// How long a drain may take that does not say it.
    pub drain_timeout: Duration,
    /// What all leases may hold of L1, and those of one process.
    pub lease_max_bytes: u64,
    pub lease_client_max_bytes: u64,
    pub lease_ttl_max: Duration,
    /// Hints that may run at one time, what they may bring to L1, and how many may wait.
    pub prefetch_window: u32,
    pub prefetch_window_bytes: u64,
    pub prefetch_queue: u32,
}

/// Something to do once the lock is given back.
pub enum Effect {
    Reply(Box<dyn FnOnce() + Send>),
    Invalidate {
        parent: u64,
        name: Box<[u8]>,
    },
    /// The kernel's attributes of an inode number are not those of the file any more.
    Forget {
        ino: u64,
    },
    Load(Load),
    /// Somebody who polls a handle can read from it.
    Wake(super::Wake),
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
    /// A hint may go on: not a thread's work, but done before the lock is given back.
    pub hints: bool,
}

/// How often each thread was called, so that a call between looking and waiting is not missed.
#[derive(Default, Clone, Copy)]
pub struct Calls {
    pub writer: u64,
    pub admission: u64,
}

/// A further inode number of a file.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    pub id: NodeId,
    /// How often the kernel was told of it and has not forgotten it since.
    pub lookups: u64,
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
    /// Files by recency, those of each device apart: room is made where it is needed.
    pub recency: Vec<Ends>,
    /// One for each device of the volume.
    pub allocators: Vec<Allocator>,
    pub space: Room,
    pub catalog: CatalogRoom,
    /// Pages written by clients that are not on the device.
    pub dirty_pages: u64,
    /// Changes that wait for something, in order of arrival (rule R7).
    pub waiters: VecDeque<Waiter>,
    /// Versions that stand for one which was queued, with this number, and replaced or written to before it was durable.
    /// A drain that came after that one waits for these.
    pub heirs: HashMap<NodeId, u64>,
    /// Names by which a crash brings back what a file was before it was rewritten and renamed, while it is not stored:
    /// directory and name, and the file.
    pub old_names: HashMap<(NodeId, Box<[u8]>), NodeId>,
    /// Open control files, their names and leases.
    pub control: control::State,
    /// Clients that wait until something is durable.
    pub patience: Vec<Patience>,
    pub queue: PublishQueue,
    pub drains: Drains,
    /// The queue of waiting changes is being tried right now.
    pub admitting: bool,
    /// Files under construction, which could be spilled, the oldest first. The key is [`Hot::building`].
    pub building: BTreeMap<u64, NodeId>,
    next_building: u64,
    /// Files with lookups or reads that have a deadline.
    pub deadlines: Deadlines,
    /// Memory that reads around L1 hold, and the files of those that wait for some, in order of arrival.
    pub around_bytes: u64,
    pub around_waiting: VecDeque<NodeId>,
    pub bad_told: BadTold,
    pub pace: Pace,
    /// Those who were sent to look again, and the names of what they did not find.
    pub expected: Vec<Expected>,
    pub gone: Gone,
    pub aliases: HashMap<u64, Alias>,
    pub next_alias: u64,
    /// Versions without name and record that were kept when these went, by transfers at least.
    pub ending: HashSet<NodeId>,
    /// Durability failed once: reads go on, what was published is not stored any more.
    pub poisoned: bool,
    /// Closes of private files so far.
    pub closes: u64,
    pub stopping: bool,
    started: Instant,
}

/// Nanoseconds since 1970.
pub fn now() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| i64::try_from(elapsed.as_nanos()).unwrap_or(i64::MAX))
}

impl Core {
    pub fn new(tree: Tree, pool: Arc<Pool>, settings: Settings, allocators: Vec<Allocator>) -> Self {
        let catalog = CatalogRoom { used: 0, limit: settings.catalog_bytes_max };
        let taken = |(allocator, &capacity): (&Allocator, &u64)| Space {
            capacity,
            allocated: allocator.blocks() - allocator.free_blocks(),
            ..Space::default()
        };
        let devices = allocators.iter().zip(&settings.device_pages).map(taken).collect();
        let space = Room::new(devices);
        Self {
            tree,
            pool,
            settings,
            catalog,
            counters: Counters::default(),
            effects: Vec::new(),
            events: Vec::new(),
            tallies: Tallies::default(),
            wakes: Wakes::default(),
            calls: Calls::default(),
            droppable: Ends::default(),
            recency: vec![Ends::default(); allocators.len().max(1)],
            allocators,
            space,
            dirty_pages: 0,
            waiters: VecDeque::new(),
            heirs: HashMap::new(),
            old_names: HashMap::new(),
            control: control::State::default(),
            patience: Vec::new(),
            queue: PublishQueue::default(),
            drains: Drains::default(),
            admitting: false,
            building: BTreeMap::new(),
            next_building: 1,
            deadlines: Deadlines::default(),
            around_bytes: 0,
            around_waiting: VecDeque::new(),
            bad_told: BadTold::default(),
            pace: Pace::default(),
            expected: Vec::new(),
            gone: Gone::default(),
            aliases: HashMap::new(),
            next_alias: ALIAS_BASE,
            ending: HashSet::new(),
            poisoned: false,
            closes: 0,
            stopping: false,
            started: Instant::now(),
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
        let id =
            if ino >= ALIAS_BASE { self.aliases.get(&ino).ok_or(Errno::ESTALE)?.id } else { NodeId(ino) };
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

    /// The directory and name that a node has, had, or will have once it is published. [`NONE`]: that directory is gone,
    /// or no name is left that it could get.
    pub fn home(&self, idx: Idx) -> (Idx, &[u8]) {
        let node = self.node(idx);
        match node.hot.as_ref().and_then(|hot| hot.private()) {
            Some(private) => (private.parent, &private.name),
            None => (self.tree.parent(idx).unwrap_or(NONE), &node.name),
        }
    }

    /// Whose bytes `idx` holds. What is nowhere in the tree shares its memory with nothing.
    pub fn owner(&self, idx: Idx) -> Owner {
        let (parent, _) = self.home(idx);
        let namespace = self.tree.namespace(parent).unwrap_or_else(|| self.id(idx));
        Owner { uid: self.node(idx).uid, namespace: namespace.0 }
    }

    /// A version is under construction from here on.
    pub fn start_building(&mut self, idx: Idx) {
        let (number, id) = (self.next_building, self.id(idx));
        if self.hot_mut(idx).building.is_none() {
            let has = self.device_pages(idx);
            let hot = self.hot_mut(idx);
            (hot.building, hot.taken) = (Some(number), has);
            self.building.insert(number, id);
            self.next_building += 1;
        }
    }

    /// It was sealed, or given up.
    pub fn stop_building(&mut self, idx: Idx) {
        if let Some(number) = self.node_mut(idx).hot.as_mut().and_then(|hot| hot.building.take()) {
            self.building.remove(&number);
            self.expect(idx, 0);
        }
    }

    /// Counts a file under construction on its device with `pages` that it will still take.
    pub fn expect(&mut self, idx: Idx, pages: u64) {
        let device = self.node(idx).device;
        let period = self.space.period;
        let hot = self.hot_mut(idx);
        let before = std::mem::replace(&mut hot.expected, pages);
        let since = std::mem::replace(&mut hot.expected_in, period);
        if before == 0 && pages == 0 {
            return;
        }
        let expected = &mut self.space.on(device).expected;
        if let Some(old) = expected.get_mut((period - since) as usize) {
            *old -= before;
        }
        expected[0] += pages;
    }

    /// Pages that a file under construction counts with on its device.
    pub fn expected_of(&self, idx: Idx) -> u64 {
        let counts = |hot: &&Hot| self.space.is_expected_since(hot.expected_in);
        self.hot(idx).filter(counts).map_or(0, |hot| hot.expected)
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
        self.touch_at(idx, self.ticks());
    }

    /// The same of many, with one look at the clock.
    pub fn touch_at(&mut self, idx: Idx, ticks: u32) {
        if self.node(idx).has(NAMED) && self.node(idx).kind() == Kind::File {
            let device = usize::from(self.node(idx).device);
            self.recency[device].push_front::<Recency>(&mut self.tree.nodes, idx);
            self.node_mut(idx).touched = ticks;
        }
    }

    /// The time since the start, in sixteenths of a second, of which 32 bits hold eight years.
    pub fn ticks(&self) -> u32 {
        u32::try_from(self.started.elapsed().as_millis() * 16 / 1000 + 1).unwrap_or(u32::MAX)
    }

    pub fn forget_recency(&mut self, idx: Idx) {
        let device = usize::from(self.node(idx).device);
        self.recency[device].remove::<Recency>(&mut self.tree.nodes, idx);
    }

    /// Which device a file of which nothing has been stored is to lie on.
    pub fn set_device(&mut self, idx: Idx, device: u8) {
        if self.node(idx).device == device {
            return;
        }
        let listed = self.node(idx).has(super::node::LISTED);
        let expected = self.expected_of(idx);
        self.forget_recency(idx);
        self.expect(idx, 0);
        self.node_mut(idx).device = device;
        self.expect(idx, expected);
        if listed {
            self.touch(idx);
        }
    }

    pub fn unlist(&mut self, idx: Idx) {
        self.forget_recency(idx);
        self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
    }

    /// Takes the visible name from `idx`. `successor` is the version that takes its place, if there is one: then
    /// the old record stays on the device until the new one is committed, and `idx` is kept until it is
    /// [let go](Self::let_go), once the successor has the name.
    pub fn drop_name(&mut self, idx: Idx, successor: Option<Idx>, by_us: bool) {
        self.forget_recency(idx);
        self.remember_name(idx, successor, by_us);
        self.attributes_change(idx, NO_INO);
        let inherited = self.heirs.remove(&self.id(idx)).into_iter();
        let queued = match self.hot(idx).map(|hot| hot.write_back) {
            Some(WriteBack::Queued(seq)) => Some(seq),
            _ => None,
        };
        if let (Some(heir), Some(seq)) = (successor, inherited.chain(queued).min())
            && !self.node(heir).has(DURABLE)
        {
            self.inherit(heir, seq);
        }
        let heir = successor.map(|new| self.id(new));
        if let Some(hot) = &mut self.node_mut(idx).hot {
            hot.heir = heir;
        }
        let parent = self.node(idx).parent;
        self.tree.unlink(idx);
        self.node_mut(idx).set(MOVED, by_us);
        self.touch_dir(parent);
        if self.node(idx).kind() == Kind::Dir {
            self.discard_privates_in(idx);
        }
        let mut old = self.take_replaced(idx);
        if self.node(idx).has(DURABLE) || successor.is_some_and(|new| self.may_stand_in(idx, new)) {
            old.push(self.id(idx));
        } else {
            // It never gets a record of its own.
            old.extend(self.take_superseded(idx));
        }
        match successor {
            Some(new) if !self.settings.memory_only && !self.node(new).has(DURABLE) => {
                self.supersede(new, old);
            }
            _ => self.remove_records(old),
        }
        if successor.is_none() {
            self.reap(idx);
        }
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
        if idx == ROOT || node.has(NAMED | DURABLE) || self.stands_in(idx) {
            return;
        }
        if let Some(hot) = &node.hot {
            if hot.private().is_some_and(|private| private.parent != NONE) {
                return;
            }
            if hot.is_held() {
                if hot.transfers > 0 {
                    self.ending.insert(self.id(idx));
                }
                return;
            }
        }
        self.ending.remove(&self.id(idx));
        self.passed_over(self.id(idx), u64::MAX, self.hot(idx).and_then(|hot| hot.heir));
        self.remember_end(idx);
        self.unlist(idx);
        self.stop_building(idx);
        self.drop_base(idx);
        let replaced = self.take_superseded(idx);
        if !replaced.is_empty() {
            // It was to take the place of these, and never will: whoever has its own place does, if it is not there yet.
            let id = self.id(idx);
            let heir = self.hot(idx).and_then(|hot| hot.heir).and_then(|heir| self.by_id(heir));
            let waits = |heir: &Idx| self.hot(*heir).is_some_and(|hot| hot.supersedes.contains(&id));
            match heir.filter(waits) {
                Some(heir) => self.supersede(heir, replaced),
                None => self.remove_records(replaced),
            }
        }
        self.drop_blocks(idx);
        self.end_record(idx);
        let Some(mut node) = self.tree.nodes.remove(idx) else { return };
        if let Some(hot) = &mut node.hot {
            for alias in hot.aliases.drain(..) {
                self.aliases.remove(&alias);
            }
            for (_, reply) in hot.fsyncs.drain(..) {
                if hot.heir.is_some() {
                    self.answer_with_successors(reply);
                    continue;
                }
                // The file is gone; there is nothing left that could be lost.
                self.effects.push(Effect::Reply(Box::new(move || reply(Ok(())))));
            }
            for lookup in hot.lookups.drain(..) {
                self.effects.push(Effect::Reply(Box::new(move || lookup.then.end())));
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
            self.uncharge(device, block.charge, block.reserved);
            self.free_extents(device, &block.place);
        }
    }

    /// Forgets the version whose bytes this one shows.
    pub fn drop_base(&mut self, idx: Idx) {
        let Some(base) = self.node_mut(idx).hot.as_mut().and_then(|hot| hot.base.take()) else { return };
        let Some(base) = self.by_id(base) else { return };
        let hot = self.hot_mut(base);
        hot.based = hot.based.saturating_sub(1);
        self.tidy(base);
    }

    pub fn uncharge(&mut self, device: u8, charge: u32, reserved: u32) {
        self.dirty_pages -= u64::from(charge);
        if reserved > 0 {
            self.space.on(device).reserved -= u64::from(reserved);
        }
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
            self.space.on(device).allocated -= freed;
            self.wakes.admission = true;
            self.wakes.writer = true;
        }
    }

    /// Drops the live state of a file that is sealed, cold and used by nobody, and keeps the list of what L1 may
    /// drop true.
    pub fn tidy(&mut self, idx: Idx) {
        let Some(node) = self.tree.nodes.get(idx) else { return };
        // Also of a cold file: it may have been passed by those who looked for one that can leave while its record was on
        // its way.
        let Some(hot) = &node.hot else { return self.relist(idx) };
        let resident = hot.slab.is_some() || hot.blocks.iter().any(|block| !block.mem.is_none());
        if !resident && !hot.in_use() && !hot.placed && hot.aliases.is_empty() && !hot.failed {
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
            self.node_mut(idx).hot = None;
            self.relist(idx);
            self.reap(idx);
            return;
        }
        self.relist(idx);
        let droppable = self.may_drop(idx);
        let listed = self.hot(idx).is_some_and(|hot| hot.in_l1_list);
        if droppable && !listed {
            self.droppable.push_front::<Droppable>(&mut self.tree.nodes, idx);
            self.call_waiters();
            self.room_for_hints();
        } else if !droppable && listed {
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
        }
        self.reap(idx);
    }

    /// Puts a file that can leave back into the list of files by recency.
    fn relist(&mut self, idx: Idx) {
        if !self.node(idx).has(super::node::LISTED) && self.may_evict(idx) {
            self.touch(idx);
        }
    }

    /// The kernel must not believe in the name any longer.
    pub fn invalidate(&mut self, idx: Idx) {
        let name = self.node(idx).name.clone();
        if let Some(parent) = self.tree.parent(idx).map(|parent| self.ino(parent)) {
            self.effects.push(Effect::Invalidate { parent, name });
        }
    }

    /// What the kernel believes of a file's attributes is true no longer, or for no longer: it is told so for all of its
    /// inode numbers but the one, `known`, by which the change came. That one it knows of itself.
    pub fn attributes_change(&mut self, idx: Idx, known: u64) {
        let Some(hot) = self.hot(idx).filter(|hot| !hot.aliases.is_empty()) else { return };
        let numbers = hot.aliases.iter().copied().chain([self.id(idx).0]);
        let others: Vec<Effect> =
            numbers.filter(|ino| *ino != known).map(|ino| Effect::Forget { ino }).collect();
        self.effects.extend(others);
    }

    /// R2, R6: the file's bytes are wrong or could not be stored. Its name goes away and the log says so.
    pub fn lose(&mut self, idx: Idx, why: &str) {
        let path = self.tree.path(idx);
        self.event(format!("lost {path}: {why}"));
        log::error!("{path}: {why}; the file is gone from the tree");
        self.counters.lost_files += 1;
        self.node_mut(idx).set(super::node::LOST, true);
        self.has_stood_in(idx);
        let node = self.node_mut(idx);
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

    /// Whether a block of a sealed file is zeros in its slab and nowhere on the device, for good.
    pub fn is_hole_in_slab(&self, idx: Idx, index: usize) -> bool {
        !self.settings.memory_only
            && !self.node(idx).has(super::node::LOST)
            && self.hot(idx).is_some_and(|hot| {
                let clean = |block: &Block| !block.dirty && block.io == BlockIo::Idle;
                hot.sealed() && hot.blocks.get(index).is_some_and(clean)
            })
            && !self.has_place(idx, index)
    }

    /// Adds a node without a name. Its record will have `bytes` of name and attributes.
    pub fn new_node(
        &mut self,
        detail: Detail,
        mode: u32,
        uid: u32,
        gid: u32,
        bytes: usize,
    ) -> Result<Idx, Errno> {
        if self.tree.nodes.is_full(self.settings.positions_max) {
            return Err(self.no_space());
        }
        let full = self.tree.nodes.count() as u64 >= self.settings.files_max;
        if full && !(self.settings.evict && self.evict_file()) {
            return Err(self.no_space());
        }
        let bytes = self.reserve_new(bytes)?;
        let node = Node::new(detail, (mode & 0o7777) as u16, uid, gid, now());
        let idx = self.tree.nodes.insert(node);
        self.begin_record(idx, bytes);
        Ok(idx)
    }

    pub fn in_write_back(&self, idx: Idx) -> bool {
        self.hot(idx).is_some_and(|hot| hot.write_back != WriteBack::None)
    }
}

/// Pages that a list of extents takes on the device.
pub fn pages_of(extents: &[Extent]) -> u64 {
    extents.iter().filter(|extent| extent.start != HOLE).map(|extent| u64::from(extent.blocks)).sum()
}
