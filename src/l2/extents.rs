//! Which blocks of a device are free.
//!
//! The free space is a set of runs, no two of which touch; it is kept by start, to join what is freed with its
//! neighbours, and by length, to find the best fit. Recovery is different work: it claims millions of extents in
//! any order and asks nothing meanwhile. So a new allocator collects claims in a bitmap (32 KiB per GiB of
//! device), which also shows overlaps, and builds the runs from it at the first other call.
//!
//! Nothing here is on the device: what no catalog entry refers to is free (docs/ON-DISK).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use smallvec::SmallVec;

mod bitmap;

use self::bitmap::Bitmap;

/// The unit of allocation; also the alignment of everything on the device.
pub const BLOCK_BYTES: u64 = 4096;

/// A run of blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Extent {
    /// The first block.
    pub start: u64,
    pub blocks: u32,
}

/// Where one file's bytes are, in their order. Nearly always one extent.
pub type Extents = SmallVec<[Extent; 1]>;

impl Extent {
    /// The block after the last. Saturates, for extents that come from a damaged device.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.blocks.into())
    }

    /// The first byte on the device.
    pub fn offset(&self) -> u64 {
        self.start * BLOCK_BYTES
    }

    pub fn bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_BYTES
    }
}

/// Why an extent cannot be claimed. The catalog entry that names it is not to be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClaimError {
    /// It reaches beyond the device, or is empty.
    Outside { extent: Extent, blocks: u64 },
    /// Some of it belongs to somebody else. Nothing of it was claimed.
    Overlap { extent: Extent },
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { extent, blocks } => {
                write!(
                    f,
                    "extent {}+{} is not inside a device of {blocks} blocks",
                    extent.start, extent.blocks
                )
            }
            Self::Overlap { extent } => {
                write!(f, "extent {}+{} overlaps one that is in use", extent.start, extent.blocks)
            }
        }
    }
}

impl std::error::Error for ClaimError {}

/// The free space of one device.
pub struct Allocator {
    blocks: u64,
    free_blocks: u64,
    state: State,
}

enum State {
    /// Recovery; set bits are claimed.
    Claiming(Bitmap),
    Serving(Runs),
}

impl Allocator {
    /// All of a device of this many blocks is free.
    pub fn new(blocks: u64) -> Self {
        Self { blocks, free_blocks: blocks, state: State::Claiming(Bitmap::new(blocks)) }
    }

    /// Takes a known extent out of the free space. Fast before the first `allocate` or `free`.
    pub fn claim(&mut self, extent: Extent) -> Result<(), ClaimError> {
        if !self.holds(extent) {
            return Err(ClaimError::Outside { extent, blocks: self.blocks });
        }
        let claimed = match &mut self.state {
            State::Claiming(bitmap) => bitmap.claim(extent.start..extent.end()),
            State::Serving(runs) => runs.claim(extent),
        };
        if !claimed {
            return Err(ClaimError::Overlap { extent });
        }
        self.free_blocks -= u64::from(extent.blocks);
        Ok(())
    }

    /// This many blocks, or nothing. In one extent if any run is long enough, and then from the shortest such run;
    /// otherwise in as few extents as possible. No blocks are no extents.
    pub fn allocate(&mut self, blocks: u32) -> Option<Extents> {
        if u64::from(blocks) > self.free_blocks {
            return None;
        }
        let runs = self.serving();
        let mut extents = Extents::new();
        let mut missing = blocks;
        while missing > 0 {
            // `free_blocks` are the sum of the runs, so there is one while anything is missing.
            let run = runs.best_fit(missing).or_else(|| runs.longest())?;
            let taken = u32::try_from(run.len).map_or(missing, |len| len.min(missing));
            runs.take_from_start(run, taken.into());
            extents.push(Extent { start: run.start, blocks: taken });
            missing -= taken;
        }
        self.free_blocks -= u64::from(blocks);
        Some(extents)
    }

    /// Gives an extent back: one that was allocated or claimed, or a part of one.
    ///
    /// What is not in use cannot be freed: that panics in debug builds; in others it is logged and nothing happens,
    /// since space that is lost until the next start is better than space that two files share.
    pub fn free(&mut self, extent: Extent) {
        if extent.blocks == 0 {
            return;
        }
        let freed = self.holds(extent) && self.serving().insert(extent.start, extent.blocks.into());
        debug_assert!(freed, "{extent:?} was freed but was not in use");
        if freed {
            self.free_blocks += u64::from(extent.blocks);
        } else {
            log::error!(
                "L2 extent {extent:?} was freed but was not in use; leaving it out of the free space"
            );
        }
    }

    /// All blocks of the device.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    pub fn free_blocks(&self) -> u64 {
        self.free_blocks
    }

    /// Blocks of the longest free run.
    pub fn largest(&self) -> u64 {
        match &self.state {
            State::Claiming(bitmap) => bitmap.clear_runs().map(|run| run.end - run.start).max().unwrap_or(0),
            State::Serving(runs) => runs.longest().map_or(0, |run| run.len),
        }
    }

    fn holds(&self, extent: Extent) -> bool {
        extent.blocks > 0
            && extent.start < self.blocks
            && u64::from(extent.blocks) <= self.blocks - extent.start
    }

    fn serving(&mut self) -> &mut Runs {
        if let State::Claiming(bitmap) = &self.state {
            self.state = State::Serving(Runs::from_clear(bitmap));
        }
        match &mut self.state {
            State::Serving(runs) => runs,
            State::Claiming(_) => unreachable!("replaced above"),
        }
    }
}

/// A free run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    start: u64,
    len: u64,
}

/// The free runs, twice: both sets always hold the same ones.
#[derive(Default)]
struct Runs {
    by_start: BTreeMap<u64, u64>,
    /// (length, start)
    by_len: BTreeSet<(u64, u64)>,
}

impl Runs {
    fn from_clear(bitmap: &Bitmap) -> Self {
        // Collected from sorted input, which the trees build in one pass.
        let by_start: BTreeMap<u64, u64> =
            bitmap.clear_runs().map(|run| (run.start, run.end - run.start)).collect();
        let by_len = by_start.iter().map(|(&start, &len)| (len, start)).collect();
        Self { by_start, by_len }
    }

    fn best_fit(&self, len: u32) -> Option<Run> {
        self.by_len.range((len.into(), 0)..).next().map(|&(len, start)| Run { start, len })
    }

    fn longest(&self) -> Option<Run> {
        self.by_len.last().map(|&(len, start)| Run { start, len })
    }

    fn take_from_start(&mut self, run: Run, len: u64) {
        self.remove(run);
        self.add(Run { start: run.start + len, len: run.len - len });
    }

    /// The run that holds, or last begins before, `block`.
    fn at_or_before(&self, block: u64) -> Option<Run> {
        self.by_start.range(..=block).next_back().map(|(&start, &len)| Run { start, len })
    }

    /// Whether all of the extent was free; then it is not any more.
    fn claim(&mut self, extent: Extent) -> bool {
        let Some(run) = self.at_or_before(extent.start).filter(|run| run.start + run.len >= extent.end())
        else {
            return false;
        };
        self.remove(run);
        self.add(Run { start: run.start, len: extent.start - run.start });
        self.add(Run { start: extent.end(), len: run.start + run.len - extent.end() });
        true
    }

    /// Whether none of it was free; then all of it is, joined with its neighbours.
    fn insert(&mut self, start: u64, len: u64) -> bool {
        let end = start + len;
        let before = self.at_or_before(start);
        let after = self.by_start.range(start + 1..).next().map(|(&start, &len)| Run { start, len });
        if before.is_some_and(|run| run.start + run.len > start) || after.is_some_and(|run| run.start < end) {
            return false;
        }
        let mut joined = Run { start, len };
        if let Some(run) = before.filter(|run| run.start + run.len == start) {
            self.remove(run);
            joined = Run { start: run.start, len: run.len + joined.len };
        }
        if let Some(run) = after.filter(|run| run.start == end) {
            self.remove(run);
            joined.len += run.len;
        }
        self.add(joined);
        true
    }

    fn add(&mut self, run: Run) {
        if run.len > 0 {
            self.by_start.insert(run.start, run.len);
            self.by_len.insert((run.len, run.start));
        }
    }

    fn remove(&mut self, run: Run) {
        self.by_start.remove(&run.start);
        self.by_len.remove(&(run.len, run.start));
    }
}

#[cfg(test)]
mod tests;
