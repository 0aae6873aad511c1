//! The replaying client: what an engine's file tier does for each request, with its answers checked.
//!
//! A request is looked up (access(2) on its blocks' names until one is missing), then its steps run in
//! [`Order`]: hits are read whole and every byte is compared, misses are written under a name of their
//! own, closed, and renamed. A file that vanished between lookup and open is a miss and is written again.
//! A block that another request has stored meanwhile is not written twice.
//!
//! Requests start in the trace's order, one per thread, and a turn of a conversation waits for the turn
//! that it continues.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::unistd::{AccessFlags, access};

use crate::bytes::{Difference, Seed};
use crate::failure::{Context, Failure, Result};
use crate::lru::{HitCount, Lru, Order, Step};
use crate::trace::{BlockId, Request, Trace};

/// Buffers start on a page, as O_DIRECT and GPU copies would want it.
const BUFFER_ALIGN_BYTES: usize = 4096;
/// Decimal digits of a latency that are kept: 0.1 % is finer than anything here repeats.
const LATENCY_DIGITS: u8 = 3;
/// Latencies are told apart from 64 ns, about what reading the clock costs, to an hour; beyond they count
/// as an hour.
const LATENCY_NS: (u64, u64) = (64, 3_600_000_000_000);
/// Wrong files that are named; the rest is counted.
const NAMED_WRONG_FILES: usize = 8;
/// How often the caller is told how far the replay is.
const TICK: Duration = Duration::from_millis(200);

/// Where the daemon said that a file was, just before it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    L1,
    Mixed,
    L2,
    /// Not asked, or the file system does not know tiers.
    Unknown,
}

impl Tier {
    pub const ALL: [Self; 4] = [Self::L1, Self::Mixed, Self::L2, Self::Unknown];

    /// Asks for `user.kv.tier`. A file that is gone is Unknown too; the open will find out.
    fn of(path: &Path) -> Self {
        let mut value = [0; 16];
        match rustix::fs::getxattr(path, "user.kv.tier", &mut value).map(|len| &value[..len]) {
            Ok(b"l1") => Self::L1,
            Ok(b"mixed") => Self::Mixed,
            Ok(b"l2") => Self::L2,
            _ => Self::Unknown,
        }
    }
}

/// What to replay, where and how.
#[derive(Debug)]
pub struct Replay<'a> {
    pub trace: &'a Trace,
    /// Directory of the blocks; it holds one directory for each first byte of a name.
    pub root: PathBuf,
    pub block_bytes: usize,
    /// Seed of names and contents.
    pub seed: u64,
    pub in_flight: usize,
    pub order: Order,
    /// Ask for each file's tier before reading it.
    pub ask_tier: bool,
    /// Blocks that the client may keep where the file system evicts nothing itself.
    pub client_capacity: Option<u64>,
    /// Set by a signal: finish the step at hand, then end.
    pub stop: &'a AtomicBool,
}

/// How far the replay is.
#[derive(Default, Debug)]
pub struct Progress {
    pub requests: AtomicU64,
    pub references: AtomicU64,
    pub hits: AtomicU64,
    pub bytes: AtomicU64,
}

/// A file with other bytes than were stored.
#[derive(Debug)]
pub struct WrongFile {
    pub path: PathBuf,
    pub difference: Difference,
}

/// What one thread, and in the end the replay, has seen.
#[derive(Debug)]
pub struct Outcome {
    pub requests: u64,
    pub count: HitCount,
    /// Looked up as present, gone at open.
    pub vanished: u64,
    /// Misses that another request had stored by the time they would have been written.
    pub stored_meanwhile: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Reads that needed more than one read(2) for the file's size.
    pub short_reads: u64,
    pub wrong_files: Vec<WrongFile>,
    pub wrong_bytes: u64,
    /// Nanoseconds of a request's lookup.
    pub lookups: Histogram<u64>,
    /// Nanoseconds from open to the last byte, by [`Tier::ALL`].
    pub loads: [Histogram<u64>; Tier::ALL.len()],
    /// Nanoseconds from create to the end of rename.
    pub stores: Histogram<u64>,
    pub elapsed: Duration,
}

impl Outcome {
    fn new() -> Result<Self> {
        let histogram = || {
            Histogram::new_with_bounds(LATENCY_NS.0, LATENCY_NS.1, LATENCY_DIGITS)
                .map_err(|e| Failure::new(format!("cannot make a histogram: {e}")))
        };
        Ok(Self {
            requests: 0,
            count: HitCount::default(),
            vanished: 0,
            stored_meanwhile: 0,
            read_bytes: 0,
            written_bytes: 0,
            short_reads: 0,
            wrong_files: Vec::new(),
            wrong_bytes: 0,
            lookups: histogram()?,
            loads: [histogram()?, histogram()?, histogram()?, histogram()?],
            stores: histogram()?,
            elapsed: Duration::ZERO,
        })
    }

    fn absorb(&mut self, other: Self) -> Result<()> {
        self.requests += other.requests;
        self.count.hits += other.count.hits;
        self.count.references += other.count.references;
        self.vanished += other.vanished;
        self.stored_meanwhile += other.stored_meanwhile;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.short_reads += other.short_reads;
        self.wrong_files.extend(other.wrong_files);
        self.wrong_files.truncate(NAMED_WRONG_FILES);
        self.wrong_bytes += other.wrong_bytes;
        let pairs = self.loads.iter_mut().zip(&other.loads);
        let pairs = pairs.chain([(&mut self.stores, &other.stores), (&mut self.lookups, &other.lookups)]);
        for (mine, theirs) in pairs {
            mine.add(theirs).map_err(|e| Failure::new(format!("cannot add histograms: {e}")))?;
        }
        Ok(())
    }
}

impl Replay<'_> {
    /// Replays the trace. `tick` is called some times a second with the progress so far.
    pub fn run(&self, mut tick: impl FnMut(&Progress)) -> Result<Outcome> {
        self.make_shards()?;
        let shared = Shared {
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            turns: Turns::new(self.trace.requests.len()),
            recency: self.client_capacity.map(|blocks| Mutex::new(Lru::new(blocks))),
            progress: Progress::default(),
        };
        let start = Instant::now();
        let mut total = Outcome::new()?;
        thread::scope(|scope| {
            let (running, all_done) = mpsc::channel::<()>();
            let mut threads = Vec::with_capacity(self.in_flight);
            for number in 0..self.in_flight {
                let shared = &shared;
                let running = running.clone();
                let work = move || {
                    let _running = running;
                    Worker::new(self, shared, number)?.work()
                };
                let spawned =
                    thread::Builder::new().name(format!("replay-{number}")).spawn_scoped(scope, work);
                match spawned {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        shared.failed.store(true, Ordering::Relaxed);
                        return Err(error).context(|| format!("cannot start thread {number}"));
                    }
                }
            }
            drop(running);
            while all_done.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
                tick(&shared.progress);
            }
            tick(&shared.progress);
            for thread in threads {
                let outcome = thread.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked))?;
                total.absorb(outcome)?;
            }
            Ok(())
        })?;
        total.elapsed = start.elapsed();
        Ok(total)
    }

    fn make_shards(&self) -> Result<()> {
        for shard in 0..=u8::MAX {
            let dir = self.root.join(format!("{shard:02x}"));
            fs::create_dir_all(&dir).context(|| format!("cannot make {}", dir.display()))?;
        }
        Ok(())
    }

    fn seed_of(&self, block: BlockId) -> Seed {
        Seed::of(self.seed, block.0)
    }

    fn path_of(&self, block: BlockId) -> PathBuf {
        let name = self.seed_of(block).name();
        self.root.join(format!("{:02x}/{name:016x}.kv", name >> 56))
    }
}

/// What the threads of a replay share.
struct Shared {
    /// The next request to start.
    next: AtomicUsize,
    /// A thread gave up; the others end too.
    failed: AtomicBool,
    turns: Turns,
    /// The client's own LRU, where the file system evicts nothing.
    recency: Option<Mutex<Lru>>,
    progress: Progress,
}

/// Which requests have been answered, for the turns that continue them.
struct Turns {
    answered: Mutex<Vec<bool>>,
    changed: Condvar,
}

impl Turns {
    fn new(requests: usize) -> Self {
        Self { answered: Mutex::new(vec![false; requests]), changed: Condvar::new() }
    }

    /// Waits for the request that `request` continues. That one started earlier and holds nothing that
    /// a waiter has, so the wait ends.
    fn begin(&self, index: usize, request: &Request) -> Turn<'_> {
        let mut answered = lock(&self.answered);
        while request.after.is_some_and(|after| !answered[after]) {
            answered = self.changed.wait(answered).unwrap_or_else(PoisonError::into_inner);
        }
        Turn { turns: self, index }
    }
}

/// A request at work. It counts as answered when this is dropped, on every path, so that nobody waits
/// for a thread that failed.
struct Turn<'a> {
    turns: &'a Turns,
    index: usize,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.turns.answered)[self.index] = true;
        self.turns.changed.notify_all();
    }
}

/// No invariant spans a panic here: the locked values are consistent after each statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What became of an attempt to read a block.
enum Load {
    Read,
    Vanished,
}

struct Worker<'a> {
    replay: &'a Replay<'a>,
    shared: &'a Shared,
    number: usize,
    /// Makes the temporary names of this thread different.
    stores: u64,
    buffer: Buffer,
    seen: Outcome,
}

impl<'a> Worker<'a> {
    fn new(replay: &'a Replay<'a>, shared: &'a Shared, number: usize) -> Result<Self> {
        let buffer = Buffer::new(replay.block_bytes);
        Ok(Self { replay, shared, number, stores: 0, buffer, seen: Outcome::new()? })
    }

    fn work(mut self) -> Result<Outcome> {
        // Also when a panic unwinds through here the others must not go on alone.
        let alarm = Alarm(&self.shared.failed);
        loop {
            let index = self.shared.next.fetch_add(1, Ordering::Relaxed);
            let Some(request) = self.replay.trace.requests.get(index) else { break };
            let _turn = self.shared.turns.begin(index, request);
            self.answer(request)?;
            if self.stopped() {
                break;
            }
        }
        alarm.defuse();
        Ok(self.seen)
    }

    fn stopped(&self) -> bool {
        self.replay.stop.load(Ordering::Relaxed) || self.shared.failed.load(Ordering::Relaxed)
    }

    /// Works one request; leaves it half done when the replay is stopped.
    fn answer(&mut self, request: &Request) -> Result<()> {
        if self.stopped() {
            return Ok(());
        }
        let start = Instant::now();
        let hits = self.lookup(&request.blocks);
        self.seen.lookups.saturating_record(nanoseconds(start));
        for step in self.replay.order.steps(&request.blocks, hits) {
            if self.stopped() {
                return Ok(());
            }
            let hit = match step {
                Step::Store(block) => {
                    self.store(block)?;
                    false
                }
                Step::Load(block) => match self.load(block)? {
                    Load::Read => true,
                    Load::Vanished => {
                        self.seen.vanished += 1;
                        self.store(block)?;
                        false
                    }
                },
            };
            self.seen.count.references += 1;
            self.seen.count.hits += u64::from(hit);
            let progress = &self.shared.progress;
            progress.references.fetch_add(1, Ordering::Relaxed);
            progress.hits.fetch_add(u64::from(hit), Ordering::Relaxed);
        }
        self.seen.requests += 1;
        self.shared.progress.requests.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The length of the request's present prefix.
    fn lookup(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().take_while(|&&block| is_present(&self.replay.path_of(block))).count()
    }

    /// Reads a block whole and compares every byte.
    fn load(&mut self, block: BlockId) -> Result<Load> {
        let path = self.replay.path_of(block);
        let tier = if self.replay.ask_tier { Tier::of(&path) } else { Tier::Unknown };
        let start = Instant::now();
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Load::Vanished),
            Err(error) => return Err(error).context(|| format!("cannot open {}", path.display())),
        };
        let size = file.metadata().context(|| format!("cannot stat {}", path.display()))?.len();
        let want = usize::try_from(size).unwrap_or(usize::MAX).min(self.replay.block_bytes);
        let bytes = &mut self.buffer.bytes()[..want];
        let (got, reads) =
            read_whole(&mut file, bytes).context(|| format!("cannot read {}", path.display()))?;
        drop(file);
        self.seen.loads[tier as usize].saturating_record(nanoseconds(start));
        self.seen.short_reads += u64::from(reads > 1);
        self.seen.read_bytes += got as u64;
        self.shared.progress.bytes.fetch_add(got as u64, Ordering::Relaxed);
        self.verify(block, path, size, got);
        if let Some(recency) = &self.shared.recency {
            lock(recency).touch(block);
        }
        Ok(Load::Read)
    }

    /// Compares the `got` bytes in the buffer with the block's; bytes that lack or are too many count as wrong.
    fn verify(&mut self, block: BlockId, path: PathBuf, size: u64, got: usize) {
        let seed = self.replay.seed_of(block);
        let found = seed.compare(&self.buffer.bytes()[..got]);
        let stored = self.replay.block_bytes;
        let beyond = size.saturating_sub(stored as u64);
        let odd = (stored - got) as u64 + beyond;
        if found.is_none() && odd == 0 {
            return;
        }
        let Difference { first, bytes } = found.unwrap_or(Difference { first: got, bytes: 0 });
        let bytes = bytes.saturating_add(usize::try_from(odd).unwrap_or(usize::MAX));
        self.seen.wrong_bytes = self.seen.wrong_bytes.saturating_add(bytes as u64);
        if self.seen.wrong_files.len() < NAMED_WRONG_FILES {
            self.seen.wrong_files.push(WrongFile { path, difference: Difference { first, bytes } });
        }
    }

    /// Writes a block under a name of its own and renames it, unless somebody else has stored it.
    fn store(&mut self, block: BlockId) -> Result<()> {
        let path = self.replay.path_of(block);
        if is_present(&path) {
            self.seen.stored_meanwhile += 1;
            return Ok(());
        }
        self.replay.seed_of(block).fill(self.buffer.bytes());
        let temporary =
            path.with_extension(format!("{}.{}.{}.tmp", std::process::id(), self.number, self.stores));
        self.stores += 1;
        let start = Instant::now();
        let outcome = self.write_and_rename(&temporary, &path);
        if outcome.is_err() {
            // The first error is the one to report.
            let _ = fs::remove_file(&temporary);
        }
        outcome.context(|| format!("cannot store {}", path.display()))?;
        self.seen.stores.saturating_record(nanoseconds(start));
        let written = self.replay.block_bytes as u64;
        self.seen.written_bytes += written;
        self.shared.progress.bytes.fetch_add(written, Ordering::Relaxed);
        self.keep_within_capacity(block)
    }

    fn write_and_rename(&mut self, temporary: &Path, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(temporary)?;
        file.write_all(self.buffer.bytes())?;
        drop(file);
        fs::rename(temporary, path)
    }

    /// Deletes what the client's own LRU drops for `block`. A file system that evicts needs none of this.
    fn keep_within_capacity(&self, block: BlockId) -> Result<()> {
        let Some(recency) = &self.shared.recency else { return Ok(()) };
        let Some(evicted) = lock(recency).insert(block) else { return Ok(()) };
        let path = self.replay.path_of(evicted);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).context(|| format!("cannot delete {}", path.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Tells the other threads to end unless it was defused.
struct Alarm<'a>(&'a AtomicBool);

impl Alarm<'_> {
    fn defuse(self) {
        std::mem::forget(self);
    }
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A page-aligned buffer of one block.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Self {
        let memory = vec![0; len + BUFFER_ALIGN_BYTES];
        let start = memory.as_ptr().align_offset(BUFFER_ALIGN_BYTES).min(BUFFER_ALIGN_BYTES);
        Self { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

fn is_present(path: &Path) -> bool {
    access(path, AccessFlags::F_OK).is_ok()
}

/// Fills `bytes` and says with how many and in how many reads. One is expected.
fn read_whole(file: &mut File, bytes: &mut [u8]) -> io::Result<(usize, u32)> {
    let (mut got, mut reads) = (0, 0);
    while got < bytes.len() {
        match file.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(more) => (got, reads) = (got + more, reads + 1),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((got, reads))
}

fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lru::simulate;

    const BLOCK_BYTES: usize = 4096;

    static NEVER: AtomicBool = AtomicBool::new(false);

    fn replay<'a>(trace: &'a Trace, root: &Path, in_flight: usize, capacity: Option<u64>) -> Replay<'a> {
        Replay {
            trace,
            root: root.join("model"),
            block_bytes: BLOCK_BYTES,
            seed: 7,
            in_flight,
            order: Order::LoadFirst,
            ask_tier: true,
            client_capacity: capacity,
            stop: &NEVER,
        }
    }

    #[test]
    fn one_request_in_flight_hits_exactly_as_simulated() {
        let trace = Trace::excerpt(Some(120)).unwrap();
        for order in [Order::LoadFirst, Order::LastFirst] {
            let dir = tempfile::tempdir().unwrap();
            let replay = Replay { order, ..replay(&trace, dir.path(), 1, Some(300)) };
            let outcome = replay.run(|_| ()).unwrap();
            let expected = simulate(&trace, 300, order);
            assert_eq!(outcome.count, expected);
            assert!(expected.hits > 100);
            assert_eq!(outcome.wrong_bytes, 0);
            assert_eq!(outcome.read_bytes, expected.hits * BLOCK_BYTES as u64);
        }
    }

    #[test]
    fn many_in_flight_leave_no_temporary_names_and_lose_nothing() {
        let trace = Trace::excerpt(Some(120)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let outcome = replay(&trace, dir.path(), 8, None).run(|_| ()).unwrap();
        assert_eq!(outcome.requests, 120);
        assert_eq!(outcome.stores.len(), trace.unique_blocks());
        assert!(outcome.stores.value_at_quantile(0.5) > 1000, "a store takes microseconds at least");
        assert_eq!((outcome.vanished, outcome.wrong_bytes), (0, 0));
        assert_eq!(outcome.count.references, trace.references());
        let shards = fs::read_dir(dir.path().join("model")).unwrap();
        let files: Vec<_> = shards.flat_map(|s| fs::read_dir(s.unwrap().path()).unwrap()).collect();
        assert_eq!(files.len() as u64, trace.unique_blocks());
        assert!(files.iter().all(|f| f.as_ref().unwrap().path().extension().unwrap() == "kv"));
    }

    #[test]
    fn wrong_missing_and_surplus_bytes_are_named() {
        let trace = Trace::excerpt(Some(1)).unwrap();
        let block = trace.requests[0].blocks[0];
        let damages: [fn(&mut Vec<u8>); 3] = [|b| b[100] ^= 1, |b| b.truncate(4000), |b| b.push(0)];
        for (damage, (first, bytes)) in damages.iter().zip([(100, 1), (4000, 96), (4096, 1)]) {
            let dir = tempfile::tempdir().unwrap();
            let replay = replay(&trace, dir.path(), 1, None);
            replay.run(|_| ()).unwrap();
            let path = replay.path_of(block);
            let mut content = fs::read(&path).unwrap();
            damage(&mut content);
            fs::write(&path, content).unwrap();
            let outcome = replay.run(|_| ()).unwrap();
            assert_eq!(outcome.wrong_bytes, bytes as u64);
            assert_eq!(outcome.wrong_files[0].path, path);
            assert_eq!(outcome.wrong_files[0].difference, Difference { first, bytes });
        }
    }

    #[test]
    fn a_failure_ends_all_threads_and_names_the_file() {
        let trace = Trace::excerpt(Some(20)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let replay = replay(&trace, dir.path(), 4, None);
        let name = replay.path_of(trace.requests[0].blocks[0]);
        fs::create_dir_all(&name).unwrap();
        let error = replay.run(|_| ()).unwrap_err().to_string();
        assert!(error.contains(name.to_str().unwrap()), "{error}");
    }

    #[test]
    fn a_stopped_replay_ends_early() {
        let trace = Trace::excerpt(None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(true);
        let replay = Replay { stop: &stop, ..replay(&trace, dir.path(), 3, None) };
        assert_eq!(replay.run(|_| ()).unwrap().requests, 0);
    }
}
