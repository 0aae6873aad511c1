//! The pool: one budget for everything in L1, and the rules by which a slab may be used again (rule R2).
//!
//! The memory of all slabs, in whatever state, and of all arenas never exceeds the budget. A slab that comes back is
//!
//! * *free* if no client has ever seen it: anybody may have it, if it has the right number of pages;
//! * *resting* if it was read in passthrough: with its pages it goes only to the same owner, when nobody has it open or
//!   mapped and `rest` has passed since its last release. Else its pages are replaced;
//! * *lent* while somebody still maps it: counted, and left alone.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use nix::sys::signal::{SigHandler, Signal};
use parking_lot::Mutex;

use super::chunks::{ARENA_BYTES, Arenas, Chunk};
use super::shm::{HUGE, Shm};
use super::slab::{self, Inner, Lock, Memory, Slab};
use crate::memory::{PAGE, Region, RegionId};
use crate::units::Bytes;

/// How many sizes the pool remembers the demand for, and slabs it makes ahead for each.
const AHEAD_SLABS: usize = 4;
/// How many resting slabs one request looks at, and how many of those in use one tending does.
const LOOK_MAX: usize = 64;

/// Who may lock this much may lock anything.
const NO_LIMIT: usize = 16 << 40;

#[derive(Clone, Debug)]
pub struct PoolConfig {
    pub budget_bytes: u64,
    pub lock: bool,
    pub huge_pages: bool,
    /// How long a slab rests after its last passthrough release before it is used again with its pages.
    pub rest: Duration,
    /// Always replace the pages of what clients have seen.
    pub strict: bool,
    /// Part of the budget that slabs cannot take, so that chunks can always be had.
    pub chunk_reserve_bytes: u64,
    /// Largest slab.
    pub slab_bytes_max: u64,
    /// Most slabs: each takes a descriptor and a mapping.
    pub slabs_max: usize,
}

/// Whose bytes a slab holds: its pages are used again only for the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owner {
    pub uid: u32,
    pub namespace: u64,
}

/// Told of memory that engines may register as fixed buffers.
pub trait RegionWatcher: Send + Sync {
    fn created(&self, region: Region);
    fn destroyed(&self, id: RegionId);
}

/// Sizes in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolStats {
    pub budget: u64,
    /// In use by files.
    pub used_slabs: u64,
    pub used_chunks: u64,
    pub arenas: u64,
    pub free_slabs: u64,
    pub resting: u64,
    pub lent: u64,
    pub total: u64,
    pub peak_total: u64,
    pub slabs: u64,
    pub created: u64,
    pub reused: u64,
    pub resized: u64,
    pub replaced: u64,
    pub refused: u64,
    pub trimmed: u64,
}

#[derive(Default)]
struct State {
    /// Memory of everything that exists.
    total: u64,
    peak: u64,
    live: u64,
    slabs: usize,
    /// By number of pages.
    free: HashMap<u32, Vec<Arc<Memory>>>,
    free_bytes: u64,
    /// What clients have seen, oldest first.
    resting: VecDeque<Arc<Memory>>,
    resting_bytes: u64,
    /// Mapped by somebody when last looked at.
    lent: VecDeque<Arc<Memory>>,
    lent_bytes: u64,
    /// What is in use and clients have opened, least lately looked at first; some of it has come back.
    watched: VecDeque<Weak<Inner>>,
    arenas: Arenas,
    /// Counted no more, and to be freed by [`Pool::bury`].
    doomed: Vec<Slab>,
    /// Demand for page counts since the last tending.
    demand: HashMap<u32, usize>,
    stats: PoolStats,
}

impl State {
    /// There is one slab more, of so many bytes.
    fn count(&mut self, bytes: u64) {
        self.total += bytes;
        self.peak = self.peak.max(self.total);
        self.slabs += 1;
    }

    fn uncount(&mut self, bytes: u64) {
        self.total -= bytes;
        self.slabs -= 1;
    }
}

pub struct Pool {
    config: PoolConfig,
    shm: Shm,
    lock: Lock,
    watcher: Option<Arc<dyn RegionWatcher>>,
    state: Mutex<State>,
    /// Something is doomed.
    doomed: AtomicBool,
    complained: AtomicU64,
}

impl Pool {
    pub fn new(mut config: PoolConfig, watcher: Option<Arc<dyn RegionWatcher>>) -> io::Result<Arc<Self>> {
        ignore_signals()?;
        // Better now than when the first writers have filled what may be locked.
        let lock = if !config.lock {
            Lock::Nothing
        } else if slab::may_lock(NO_LIMIT) {
            Lock::Reservation
        } else if slab::may_lock(config.budget_bytes as usize) {
            Lock::Pages
        } else {
            return Err(io::Error::other(format!(
                "{} cannot be locked in memory; raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) or use --lock=false",
                Bytes(config.budget_bytes)
            )));
        };
        if lock == Lock::Pages {
            config.slabs_max /= 2; // each takes two mappings
        }
        let shm = Shm::new(config.huge_pages);
        Memory::new(&shm, 1, config.slab_bytes_max as usize, lock)?;
        Ok(Arc::new(Self {
            config,
            shm,
            lock,
            watcher,
            state: Mutex::default(),
            doomed: AtomicBool::new(false),
            complained: AtomicU64::new(0),
        }))
    }

    /// What L1 does without, a sentence for the log and `.ctl/status`.
    pub fn without(&self) -> Option<&str> {
        self.shm.without()
    }

    /// A slab of exactly `pages` pages; its contents are arbitrary. None: it does not fit right now.
    pub fn slab(self: &Arc<Self>, pages: u32, owner: Owner) -> Option<Slab> {
        if pages == 0 || u64::from(pages) * PAGE as u64 > self.config.slab_bytes_max {
            return None;
        }
        let mut state = self.state.lock();
        *state.demand.entry(pages).or_default() += 1;
        let memory = self.reuse(&mut state, pages, owner).or_else(|| self.make(&mut state, pages))?;
        *memory.owner.lock() = Some(owner);
        state.live += memory.bytes();
        drop(state);
        if memory.whole_pages().is_err() {
            self.take_back(memory);
            return None;
        }
        Some(Slab::new(memory, self))
    }

    fn reuse(&self, state: &mut State, pages: u32, owner: Owner) -> Option<Arc<Memory>> {
        if let Some(memory) = state.free.get_mut(&pages).and_then(Vec::pop) {
            state.free_bytes -= memory.bytes();
            state.stats.reused += 1;
            return Some(memory);
        }
        if self.config.strict {
            return None;
        }
        for at in 0..state.resting.len().min(LOOK_MAX) {
            let memory = &state.resting[at];
            let rested = memory.last_release().is_some_and(|at| at.elapsed() >= self.config.rest);
            if memory.pages() != pages || *memory.owner.lock() != Some(owner) || !rested {
                continue;
            }
            if !memory.quiet() {
                state.stats.refused += 1;
                continue;
            }
            if memory.takes_more() {
                // It can be had once it has been cut, for which there is no time here.
                continue;
            }
            let memory = state.resting.remove(at)?;
            state.resting_bytes -= memory.bytes();
            state.stats.reused += 1;
            memory.take_from_rest();
            return Some(memory);
        }
        None
    }

    /// New memory, for which other memory may have to go.
    fn make(&self, state: &mut State, pages: u32) -> Option<Arc<Memory>> {
        let bytes = u64::from(pages) * PAGE as u64;
        if !self.make_room(state, bytes, self.slab_budget(state)) || state.slabs >= self.config.slabs_max {
            return None;
        }
        self.create(state, pages, self.config.slab_bytes_max as usize)
    }

    fn create(&self, state: &mut State, pages: u32, reserved: usize) -> Option<Arc<Memory>> {
        let memory = self.fresh(pages, reserved)?;
        state.count(memory.bytes());
        state.stats.created += 1;
        Some(memory)
    }

    /// Memory that has no pages yet and is not counted. It can grow to what is `reserved`.
    fn fresh(&self, pages: u32, reserved: usize) -> Option<Arc<Memory>> {
        match Memory::new(&self.shm, pages, reserved, self.lock) {
            Ok(memory) => Some(Arc::new(memory)),
            Err(error) => {
                if self.complained.fetch_add(1, Ordering::Relaxed) == 0 {
                    log::error!("no memory for a slab of {pages} pages: {error} (said once)");
                }
                None
            }
        }
    }

    pub(super) fn announce(&self, memory: &Memory) {
        if let Some(watcher) = &self.watcher
            && !memory.set_announced(true)
        {
            watcher.created(memory.region());
        }
    }

    fn withdraw(&self, memory: &Memory, id: RegionId) {
        if let Some(watcher) = &self.watcher
            && memory.set_announced(false)
        {
            watcher.destroyed(id);
        }
    }

    /// What slabs may take: the budget without the reserve that chunks have not used yet.
    fn slab_budget(&self, state: &State) -> u64 {
        let arenas = state.arenas.count() as u64 * ARENA_BYTES as u64;
        self.config.budget_bytes
            - self.config.chunk_reserve_bytes.saturating_sub(arenas).min(self.config.budget_bytes)
    }

    /// Frees unused memory until `bytes` more fit in `budget`.
    fn make_room(&self, state: &mut State, bytes: u64, budget: u64) -> bool {
        while state.total + bytes > budget {
            if let Some(&pages) = state.free.iter().find(|(_, list)| !list.is_empty()).map(|(pages, _)| pages)
                && let Some(memory) = state.free.get_mut(&pages).and_then(Vec::pop)
            {
                state.free_bytes -= memory.bytes();
                self.destroy(state, memory);
                continue;
            }
            let quiet = (0..state.resting.len().min(LOOK_MAX)).find(|&at| state.resting[at].quiet());
            if let Some(memory) = quiet.and_then(|at| state.resting.remove(at)) {
                state.resting_bytes -= memory.bytes();
                state.stats.replaced += 1;
                self.destroy(state, memory);
                continue;
            }
            let spare = state.arenas.count() as u64 * ARENA_BYTES as u64 > self.config.chunk_reserve_bytes;
            if spare && let Some(slab) = state.arenas.take_empty() {
                state.uncount(slab.capacity_bytes());
                if let Some(watcher) = &self.watcher {
                    watcher.destroyed(slab.region().id);
                }
                self.doom(state, slab);
                continue;
            }
            return false;
        }
        true
    }

    fn destroy(&self, state: &mut State, memory: Arc<Memory>) {
        state.uncount(memory.bytes());
        self.withdraw(&memory, memory.region().id);
        self.doom(state, Slab::unpooled(memory));
    }

    /// Memory is freed page by page, and whoever asks for other memory in its place may hold a lock that everybody waits
    /// for. So that is done by [`Pool::bury`].
    fn doom(&self, state: &mut State, slab: Slab) {
        if self.lock == Lock::Pages {
            // What takes its place may be locked only once this is not.
            return drop(slab);
        }
        state.doomed.push(slab);
        self.doomed.store(true, Ordering::Relaxed);
    }

    /// Frees what was given up. What took its place has no pages yet, and whoever got that calls this before filling it: so
    /// there is no more memory than is counted, but for the few blocks that the store copies before it lets go of its lock.
    pub fn bury(&self) {
        // Who gave something up is who calls, or somebody does it later. One look is all that it mostly costs.
        if self.doomed.load(Ordering::Relaxed) {
            let doomed = {
                let mut state = self.state.lock();
                self.doomed.store(false, Ordering::Relaxed);
                std::mem::take(&mut state.doomed)
            };
            drop(doomed);
        }
    }

    /// A client can map it from now on.
    pub(super) fn watch(&self, lent: Weak<Inner>) {
        let watched = &mut self.state.lock().watched;
        if watched.len() == watched.capacity() {
            // As many as live on, and not all that ever were.
            watched.retain(|slab| slab.strong_count() > 0);
        }
        watched.push_back(lent);
    }

    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.state.lock().watched.len()
    }

    /// The last share of a slab is gone.
    pub(super) fn take_back(&self, memory: Arc<Memory>) {
        let mut state = self.state.lock();
        let bytes = memory.bytes();
        state.live -= bytes;
        if memory.was_seen() {
            state.resting_bytes += bytes;
            state.resting.push_back(memory);
        } else {
            state.free_bytes += bytes;
            state.free.entry(memory.pages()).or_default().push(memory);
        }
    }

    pub(super) fn resize(&self, memory: &Memory, pages: u32) -> bool {
        let mut state = self.state.lock();
        let (old, new) = (memory.bytes(), u64::from(pages) * PAGE as u64);
        if pages == 0
            || new > self.config.slab_bytes_max
            || (new < old && !pages.is_multiple_of(HUGE) && memory.is_pinned_whole())
        {
            return false;
        }
        let budget = self.slab_budget(&state);
        if new > old && !self.make_room(&mut state, new - old, budget) {
            return false;
        }
        let before = memory.region().id;
        if memory.set_pages(pages).is_err() {
            return false;
        }
        state.total = state.total - old + new;
        state.live = state.live - old + new;
        state.peak = state.peak.max(state.total);
        state.stats.resized += 1;
        drop(state);
        self.withdraw(memory, before);
        true
    }

    /// Memory for up to [`super::CHUNK_MAX`] bytes; its contents are arbitrary.
    pub fn chunk(self: &Arc<Self>, len: usize) -> Option<Chunk> {
        if len == 0 || len > super::CHUNK_MAX {
            return None;
        }
        let mut state = self.state.lock();
        let (arena, offset, slab) = match state.arenas.take(len) {
            Some(found) => found,
            None => {
                if !self.make_room(&mut state, ARENA_BYTES as u64, self.config.budget_bytes) {
                    return None;
                }
                let memory = self.create(&mut state, (ARENA_BYTES / PAGE) as u32, ARENA_BYTES)?;
                self.announce(&memory);
                state.arenas.add(Slab::unpooled(memory));
                state.arenas.take(len)?
            }
        };
        drop(state);
        Some(Chunk::new(self, slab, arena, offset, len))
    }

    pub(super) fn give_chunk(&self, arena: usize, offset: u32, len: usize) {
        self.state.lock().arenas.give(arena, offset, len);
    }

    pub fn stats(&self) -> PoolStats {
        let state = self.state.lock();
        PoolStats {
            budget: self.config.budget_bytes,
            used_slabs: state.live,
            used_chunks: state.arenas.used() as u64,
            arenas: state.arenas.count() as u64 * ARENA_BYTES as u64,
            free_slabs: state.free_bytes,
            resting: state.resting_bytes,
            lent: state.lent_bytes,
            total: state.total,
            peak_total: state.peak,
            slabs: state.slabs as u64,
            ..state.stats
        }
    }

    /// Called now and then from a thread that may take its time: looks at what is lent, and makes slabs of the sizes
    /// that are being asked for, so that writers find them ready. Returns how much it did.
    pub fn tend(self: &Arc<Self>) -> usize {
        let mut done = self.look_at_lent() + self.look_at_watched();
        let wanted = {
            let mut state = self.state.lock();
            std::mem::take(&mut state.demand)
        };
        for (pages, asked) in wanted {
            for _ in 0..asked.min(AHEAD_SLABS) {
                if !self.make_ahead(pages) {
                    break;
                }
                done += 1;
            }
        }
        self.bury();
        done
    }

    /// Makes a slab that somebody may soon ask for, without the lock: who asks for others meanwhile does not wait.
    fn make_ahead(&self, pages: u32) -> bool {
        let bytes = u64::from(pages) * PAGE as u64;
        let mut state = self.state.lock();
        let ready = state.free.get(&pages).map_or(0, Vec::len);
        // Only out of what nobody uses: nothing is given up for it.
        if ready >= AHEAD_SLABS
            || state.total + bytes > self.slab_budget(&state)
            || state.slabs >= self.config.slabs_max
        {
            return false;
        }
        state.count(bytes);
        state.live += bytes;
        drop(state);
        let memory = self.fresh(pages, self.config.slab_bytes_max as usize);
        let mut state = self.state.lock();
        let Some(memory) = memory else {
            state.uncount(bytes);
            state.live -= bytes;
            return false;
        };
        state.stats.created += 1;
        drop(state);
        memory.populate();
        self.take_back(memory);
        true
    }

    /// Takes back what clients have made slabs grow by that hold files.
    fn look_at_watched(&self) -> usize {
        let mut state = self.state.lock();
        let mut watched = Vec::new();
        while watched.len() < LOOK_MAX
            && let Some(slab) = state.watched.pop_front()
        {
            watched.extend(slab.upgrade());
        }
        drop(state);
        let trimmed = watched.iter().filter(|slab| slab.trim()).count();
        let mut state = self.state.lock();
        state.stats.trimmed += trimmed as u64;
        state.watched.extend(watched.iter().map(Arc::downgrade));
        drop(state);
        // Who let go of its share meanwhile leaves the last one here, and that takes the lock.
        drop(watched);
        trimmed
    }

    /// Sorts what came back from clients into what is still mapped and what is not, and cuts what takes more than is
    /// counted. That stays where it is meanwhile: it can be given up, but is not used again.
    fn look_at_lent(&self) -> usize {
        let (mut moved, mut swollen) = (0, Vec::new());
        let lent = self.state.lock().lent.len();
        // A few at a time: there may be as many as there are slabs.
        for at in (0..lent).step_by(LOOK_MAX) {
            let mut state = self.state.lock();
            for _ in at..lent.min(at + LOOK_MAX) {
                let Some(memory) = state.lent.pop_front() else { break };
                swollen.extend(memory.start_trim().then(|| memory.clone()));
                if memory.quiet() {
                    moved += 1;
                    state.lent_bytes -= memory.bytes();
                    state.resting_bytes += memory.bytes();
                    memory.note_release();
                    state.resting.push_back(memory);
                } else {
                    state.lent.push_back(memory);
                }
            }
        }
        let mut state = self.state.lock();
        for _ in 0..state.resting.len().min(LOOK_MAX) {
            let Some(memory) = state.resting.pop_front() else { break };
            swollen.extend(memory.start_trim().then(|| memory.clone()));
            if memory.quiet() {
                state.resting.push_back(memory);
            } else {
                moved += 1;
                state.stats.refused += 1;
                state.resting_bytes -= memory.bytes();
                state.lent_bytes += memory.bytes();
                state.lent.push_back(memory);
            }
        }
        drop(state);
        for memory in swollen {
            let trimmed = memory.trim();
            self.state.lock().stats.trimmed += u64::from(trimmed);
            memory.end_trim();
        }
        moved
    }
}

/// An open that meets our write lease would send SIGIO, which ends a process that does not ignore it (fact 5), and so
/// does SIGXFSZ where RLIMIT_FSIZE is less than a slab.
fn ignore_signals() -> io::Result<()> {
    super::slab::set_signal(Signal::SIGXFSZ, SigHandler::SigIgn)?;
    super::slab::set_signal(Signal::SIGIO, SigHandler::SigIgn)
}
