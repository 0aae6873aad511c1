//! Whatever a crash leaves of the writes, recovery finds a state that was: all that was durable, nothing that never was.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::*;

const SECTOR: usize = 512;
const STORE: [u8; 16] = *b"a store's own id";
const LOG: u64 = 16 * PAGE_U64;

fn region() -> Range<u64> {
    let start = 3 * PAGE_U64;
    start..start + 2 * PAGE_U64 + 2 * CHUNK_BYTES as u64 + LOG
}

struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
    fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.below(at + 1));
        }
    }
}

type Sector = (u64, [u8; SECTOR]);

#[derive(Clone)]
enum Op {
    Write(Vec<Sector>),
    Flush,
}

/// A device with a volatile cache, which can lose its power.
struct Disk(Mutex<State>);

#[derive(Default)]
struct State {
    base: Arc<Vec<u8>>,
    /// What has been flushed, over `base`.
    durable: BTreeMap<u64, [u8; SECTOR]>,
    /// What reads see, over `base`.
    now: BTreeMap<u64, [u8; SECTOR]>,
    pending: Vec<Sector>,
    log: Vec<Op>,
    /// Writes and flushes until everything fails.
    left: Option<usize>,
}

impl State {
    fn spend(&mut self) -> io::Result<()> {
        match &mut self.left {
            Some(0) => Err(io::Error::from_raw_os_error(libc::EIO)),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Disk {
    fn new(base: Arc<Vec<u8>>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { base, ..State::default() })))
    }
    fn blank() -> Arc<Self> {
        // Not zeros: what a device held before must not matter.
        Self::new(Arc::new(vec![0xa5; region().end as usize + PAGE]))
    }
    /// Of a device with this content: some of the sectors written since, in this order.
    fn after(base: &Arc<Vec<u8>>, sectors: &[Sector]) -> Arc<Self> {
        let disk = Self::new(base.clone());
        {
            let mut state = disk.0.lock();
            state.now.extend(sectors.iter().copied());
            state.durable = state.now.clone();
        }
        disk
    }
    fn ops(&self) -> usize {
        self.0.lock().log.len()
    }
    /// Power is lost and comes back: what was not flushed is there sector by sector, or not.
    fn cut(&self, rng: &mut Rng) {
        let mut state = self.0.lock();
        let mut pending = std::mem::take(&mut state.pending);
        let kept = [0, 1, 4, 8][rng.below(4)];
        pending.retain(|_| rng.below(8) < kept);
        if rng.below(2) == 0 {
            rng.shuffle(&mut pending);
        }
        state.durable.extend(pending);
        state.now = state.durable.clone();
        state.left = None;
    }
    fn flip(&self, offset: u64, bit: u8) {
        let mut byte = [0; SECTOR];
        let start = offset / SECTOR as u64 * SECTOR as u64;
        self.read_at(start, &mut byte).unwrap();
        byte[(offset - start) as usize] ^= 1 << bit;
        let mut state = self.0.lock();
        state.now.insert(start, byte);
        state.durable.insert(start, byte);
    }
}

impl Medium for Disk {
    fn len(&self) -> u64 {
        self.0.lock().base.len() as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let state = self.0.lock();
        let from = offset as usize;
        buf.copy_from_slice(&state.base[from..from + buf.len()]);
        for (at, bytes) in state.now.range(offset..offset + buf.len() as u64) {
            let to = (at - offset) as usize;
            buf[to..to + SECTOR].copy_from_slice(bytes);
        }
        Ok(())
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let allowed = region();
        assert!(
            offset >= allowed.start && offset + buf.len() as u64 <= allowed.end,
            "a write outside the region"
        );
        assert!(offset.is_multiple_of(PAGE_U64) && buf.len().is_multiple_of(PAGE), "an unaligned write");
        let mut state = self.0.lock();
        let failed = state.spend();
        let sectors: Vec<Sector> = buf
            .chunks_exact(SECTOR)
            .enumerate()
            .map(|(at, bytes)| (offset + (at * SECTOR) as u64, bytes.try_into().unwrap()))
            .collect();
        // What was in flight when power failed can be torn as well.
        if failed.is_ok() || state.left == Some(0) {
            state.pending.extend(sectors.iter().copied());
            state.now.extend(sectors.iter().copied());
        }
        failed?;
        state.log.push(Op::Write(sectors));
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        state.spend()?;
        let pending = std::mem::take(&mut state.pending);
        state.durable.extend(pending);
        state.log.push(Op::Flush);
        Ok(())
    }
}

type Map = BTreeMap<u32, Vec<u8>>;
type Records = Vec<Vec<u8>>;

fn batch_of(records: &Records) -> Batch {
    let mut batch = Batch::default();
    records.iter().for_each(|record| batch.push(record));
    batch
}

/// Key and value, or a key alone to remove it.
fn apply(map: &mut Map, record: &[u8]) -> Result<(), String> {
    let key = u32::from_le_bytes(record[..4].try_into().unwrap());
    match &record[4..] {
        [] => drop(map.remove(&key)),
        value => drop(map.insert(key, value.to_vec())),
    }
    Ok(())
}

fn open(disk: &Arc<Disk>) -> Result<(Journal, Report, Map), Error> {
    let mut map = Map::new();
    let visit = &mut |record: &[u8]| apply(&mut map, record);
    let (journal, report) = Journal::open(disk.clone(), region(), LOG, &STORE, visit)?;
    Ok((journal, report, map))
}

/// A journal in use, and every state that it was in.
struct Run {
    disk: Arc<Disk>,
    journal: Journal,
    rng: Rng,
    /// The state after each batch; a batch that failed counts too, since it may have got through.
    states: Vec<Map>,
    /// How many states had been submitted, and how many were durable, once the disk had seen this many operations.
    marks: Vec<(usize, usize, usize)>,
    durable: usize,
    version: u32,
}

impl Run {
    fn new(seed: u64) -> Self {
        let disk = Disk::blank();
        let journal = Journal::format(disk.clone(), region(), LOG, &STORE).unwrap();
        let marks = vec![(disk.ops(), 0, 0)];
        Self { disk, journal, rng: Rng::new(seed), states: vec![Map::new()], marks, durable: 0, version: 0 }
    }

    fn mark(&mut self) {
        self.marks.push((self.disk.ops(), self.states.len() - 1, self.durable));
    }

    fn batch(&mut self, records: usize, value_max: usize) -> Records {
        let mut batch = Records::new();
        for _ in 0..records {
            self.version += 1;
            let mut record = (self.rng.below(24) as u32).to_le_bytes().to_vec();
            if self.rng.below(4) > 0 || batch.is_empty() {
                record.extend(self.version.to_le_bytes());
                record.resize(record.len() + self.rng.below(value_max), self.version as u8);
            }
            batch.push(record);
        }
        batch
    }

    fn append(&mut self) -> Result<(), Error> {
        let (records, value_max) = (1 + self.rng.below(4), [40, 400, 3000][self.rng.below(3)]);
        let records = self.batch(records, value_max);
        if self.journal.needs_checkpoint(&batch_of(&records)) && self.rng.below(3) > 0 {
            self.checkpoint()?;
        }
        self.append_batch(&records)
    }

    fn append_batch(&mut self, records: &Records) -> Result<(), Error> {
        let mut state = self.states.last().unwrap().clone();
        records.iter().for_each(|record| apply(&mut state, record).unwrap());
        self.states.push(state);
        self.mark();
        let result = self.journal.append(&batch_of(records));
        match result {
            Ok(()) => self.durable = self.states.len() - 1,
            Err(Error::Full) => drop(self.states.pop()),
            Err(_) => {}
        }
        self.mark();
        result
    }

    /// A checkpoint of a state that changes while it is written.
    fn checkpoint(&mut self) -> Result<(), Error> {
        let mut checkpoint = self.journal.begin_checkpoint();
        for key in 0..24u32 {
            if self.rng.below(12) == 0 {
                let batch = self.batch(1, 60);
                match self.append_batch(&batch) {
                    Ok(()) | Err(Error::Full) => {}
                    Err(error) => return Err(error),
                }
            }
            if let Some(value) = self.states.last().unwrap().get(&key) {
                checkpoint.push(&[&key.to_le_bytes()[..], value].concat())?;
            }
        }
        self.journal.finish_checkpoint(checkpoint)
    }

    /// What is found must be a state that was, no older than what was durable.
    fn check_found(&self, found: &Map, durable: usize, submitted: usize, what: &str) -> usize {
        (durable..=submitted).find(|&at| self.states[at] == *found).unwrap_or_else(|| {
            let other = self.states.iter().position(|state| state == found);
            panic!("{what}: found state {other:?}, expected one of {durable} to {submitted}")
        })
    }
}

/// How a crash may have left the writes that were not flushed.
fn leftovers(pending: &[Sector], rng: &mut Rng) -> Vec<Vec<Sector>> {
    let mut all = vec![Vec::new(), pending.to_vec()];
    let few = pending.len() <= 16;
    for at in 0..if few { pending.len() } else { 3 } {
        let at = if few { at } else { rng.below(pending.len()) };
        all.push(pending[at..=at].to_vec());
        all.push([&pending[..at], &pending[at + 1..]].concat());
    }
    for kept in [2, 4, 6] {
        let mut some: Vec<Sector> = pending.iter().copied().filter(|_| rng.below(8) < kept).collect();
        rng.shuffle(&mut some);
        all.push(some);
    }
    all
}

#[test]
fn every_prefix_and_torn_subset_of_the_writes_recovers() {
    let (mut images, mut torn) = (0, 0);
    for seed in 0..3 {
        let mut run = Run::new(seed);
        let formatted = run.disk.ops();
        for _ in 0..60 {
            match run.append() {
                Ok(()) => {}
                Err(Error::Full) => run.checkpoint().unwrap(),
                Err(error) => panic!("{error}"),
            }
        }
        let laps = run.journal.end / LOG;
        assert!(laps >= 2, "the log went around {laps} times");
        assert!(run.journal.header.generation > 4);
        let log = run.disk.0.lock().log.clone();
        let mut base = Disk::blank().0.lock().base.clone();
        let mut pending: Vec<Sector> = Vec::new();
        let mut rng = Rng::new(seed + 100);
        for (at, op) in log.iter().enumerate() {
            match op {
                Op::Write(sectors) => pending.extend(sectors),
                Op::Flush => {
                    let bytes = Arc::make_mut(&mut base);
                    for (offset, sector) in pending.drain(..) {
                        bytes[offset as usize..][..SECTOR].copy_from_slice(&sector);
                    }
                }
            }
            if at + 1 < formatted {
                continue;
            }
            // Marks hold from the operation on at which they were made.
            let mark = run.marks.iter().rev().find(|(ops, ..)| *ops <= at + 1).unwrap();
            // A batch is submitted before its first write is recorded.
            let submitted =
                run.marks.iter().filter(|(ops, ..)| *ops <= at).map(|mark| mark.1).max().unwrap_or(0);
            for left in leftovers(&pending, &mut rng) {
                let disk = Disk::after(&base, &left);
                let what =
                    format!("seed {seed}, operation {at}, {} of {} sectors", left.len(), pending.len());
                let (mut journal, _, found) = open(&disk).unwrap_or_else(|error| panic!("{what}: {error}"));
                run.check_found(&found, mark.2, submitted.max(mark.1), &what);
                images += 1;
                torn += u32::from(!left.is_empty() && left.len() < pending.len());
                if images % 16 == 0 {
                    // And it goes on from there.
                    let mut batch = Batch::default();
                    batch.push(&[&9999u32.to_le_bytes()[..], b"next"].concat());
                    match journal.append(&batch) {
                        Ok(()) => {
                            let (.., again) = open(&disk).unwrap_or_else(|error| panic!("{what}: {error}"));
                            assert_eq!(again.get(&9999).map(Vec::as_slice), Some(&b"next"[..]), "{what}");
                            assert_eq!(again.len(), found.len() + 1, "{what}");
                        }
                        Err(Error::Full) => {}
                        Err(error) => panic!("{what}: {error}"),
                    }
                }
            }
        }
    }
    assert!(images > 3000 && torn > 1000, "{images} images, {torn} of them torn");
}

/// A killed process leaves its writes in the device's cache, where the next one reads them; then power fails.
#[test]
fn kills_and_power_cuts_in_any_order_lose_nothing_durable() {
    let (mut opens, mut interrupted) = (0, 0);
    for seed in 0..60 {
        let mut run = Run::new(seed);
        for round in 0..12 {
            let budget = run.rng.below(40);
            run.disk.0.lock().left = Some(budget);
            for _ in 0..8 {
                match run.append() {
                    Ok(()) => {}
                    Err(Error::Full) => {
                        if run.checkpoint().is_err() {
                            break;
                        }
                    }
                    Err(_) => {
                        interrupted += 1;
                        break;
                    }
                }
            }
            let durable = run.durable;
            run.disk.0.lock().left = None;
            if run.rng.below(2) == 0 {
                let disk = run.disk.clone();
                disk.cut(&mut run.rng);
            }
            let what = format!("seed {seed}, round {round}");
            let (journal, _, found) = open(&run.disk).unwrap_or_else(|error| panic!("{what}: {error}"));
            let at = run.check_found(&found, durable, run.states.len() - 1, &what);
            // What recovery has shown is what the store goes on from: it must be durable by then.
            run.states.truncate(at + 1);
            run.durable = at;
            run.journal = journal;
            opens += 1;
        }
    }
    assert!(opens == 720 && interrupted > 100, "{opens} opens, {interrupted} of them after a broken write");
}

#[test]
fn a_full_log_takes_nothing_more_and_a_checkpoint_empties_it() {
    let mut run = Run::new(7);
    let full = loop {
        let batch = run.batch(3, 800);
        if let Err(error) = run.append_batch(&batch) {
            break error;
        }
    };
    assert!(matches!(full, Error::Full), "{full}");
    let (_, _, found) = open(&run.disk).unwrap();
    assert!(found == run.states[run.durable]);
    run.checkpoint().unwrap();
    for _ in 0..10 {
        let batch = run.batch(1, 40);
        run.append_batch(&batch).unwrap();
    }
    let (_, _, found) = open(&run.disk).unwrap();
    assert!(found == run.states[run.durable]);

    // A batch that no log of this size can take is refused, and does no harm.
    let mut large = Batch::default();
    large.push(&vec![1; LOG as usize]);
    assert!(matches!(run.journal.append(&large), Err(Error::Full)));
    let (.., found) = open(&run.disk).unwrap();
    assert!(found == run.states[run.durable]);
}

#[test]
fn a_state_too_large_for_a_checkpoint_is_refused_and_the_old_one_stays() {
    let mut run = Run::new(3);
    run.append().unwrap();
    let mut checkpoint = run.journal.begin_checkpoint();
    let mut result = Ok(());
    for key in 0..4000u32 {
        result = checkpoint.push(&[&key.to_le_bytes()[..], &[1; 1000]].concat());
        if result.is_err() {
            break;
        }
    }
    assert!(matches!(result, Err(Error::Full)));
    let (.., found) = open(&run.disk).unwrap();
    assert!(found == run.states[run.durable]);
    run.checkpoint().unwrap();
    run.append().unwrap();
    let (.., found) = open(&run.disk).unwrap();
    assert!(found == run.states[run.durable]);
}

/// Wherever the older header is damaged nothing is lost; with the newer one gone, everything is found from the older one
/// and the log, or the loss is told. An old state is never passed off as the newest.
#[test]
fn either_header_may_be_damaged() {
    let (mut whole, mut told) = (0, 0);
    for seed in 0..40 {
        let mut run = Run::new(seed);
        let mut rng = Rng::new(seed + 500);
        while run.journal.header.generation < 2 + seed % 3 {
            run.append().unwrap();
        }
        for _ in 0..rng.below(14) {
            let batch = run.batch(1, 3000);
            if run.append_batch(&batch).is_err() {
                break;
            }
        }
        let newest = run.journal.header.generation % 2;
        for slot in [newest, 1 - newest] {
            let at = region().start + slot * PAGE_U64 + rng.below(PAGE) as u64;
            let bit = rng.below(8) as u8;
            run.disk.flip(at, bit);
            match open(&run.disk) {
                Ok((.., found)) => {
                    assert!(found == run.states[run.durable], "seed {seed}, slot {slot} of {newest}");
                    whole += 1;
                }
                Err(Error::Damaged(_)) if slot == newest => told += 1,
                Err(error) => panic!("seed {seed}, slot {slot} of {newest}: {error}"),
            }
            run.disk.flip(at, bit);
        }
        // Both: there is nothing to go by.
        run.disk.flip(region().start + 100, 0);
        run.disk.flip(region().start + PAGE_U64 + 100, 0);
        assert!(matches!(open(&run.disk), Err(Error::Foreign)), "seed {seed}");
    }
    assert!(whole > 40 && told > 5, "{whole} whole, {told} told");
}

/// A durable record in the middle of the log that cannot be read is a loss, not the end of the log.
#[test]
fn a_damaged_record_before_the_last_is_told() {
    for seed in 0..20 {
        let mut run = Run::new(seed);
        let mut starts = Vec::new();
        for _ in 0..8 {
            starts.push(run.journal.end);
            let records = 1 + run.rng.below(2);
            let batch = run.batch(records, 3000);
            run.append_batch(&batch).unwrap();
        }
        for at in starts.iter().take(7) {
            let bit = region().end - LOG + at % LOG + run.rng.below(FRAME_HEADER + 8) as u64;
            run.disk.flip(bit, 3);
            assert!(matches!(open(&run.disk), Err(Error::Damaged(_))), "seed {seed}, frame at {at}");
            run.disk.flip(bit, 3);
        }
        let (.., found) = open(&run.disk).unwrap();
        assert!(found == run.states[run.durable]);
    }
}

#[test]
fn a_damaged_checkpoint_is_told() {
    let mut run = Run::new(5);
    while run.journal.header.chunks == 0 {
        run.append().unwrap();
    }
    let area = run.journal.layout.area_at(run.journal.header.area);
    for at in [0, 4, 8, 12, 17, 25, 41, 60] {
        run.disk.flip(area + at, 1);
        assert!(matches!(open(&run.disk), Err(Error::Damaged(_))), "byte {at}");
        run.disk.flip(area + at, 1);
    }
    assert!(open(&run.disk).is_ok());
    let other = Journal::open(run.disk.clone(), region(), LOG, b"of another store", &mut |_| Ok(()));
    assert!(matches!(other, Err(Error::Foreign)));
}

/// Recovery reads a checkpoint and at most one lap of the log, however long the journal has been in use.
#[test]
fn what_recovery_reads_is_bounded() {
    let mut run = Run::new(11);
    for _ in 0..400 {
        match run.append() {
            Ok(()) => {}
            Err(Error::Full) => run.checkpoint().unwrap(),
            Err(error) => panic!("{error}"),
        }
        if run.rng.below(20) == 0 {
            let (journal, report, found) = open(&run.disk).unwrap();
            assert!(report.bytes_read <= 2 * PAGE_U64 + CHUNK_BYTES as u64 + 2 * LOG, "{report:?}");
            assert!(found == run.states[run.durable]);
            run.journal = journal;
        }
    }
}
