//! Where the ranges of a window are, for one instant (rule R11).

use std::ops::Range;
use std::time::Duration;

use nix::errno::Errno;

use super::session::{Session, SessionId};
use super::{Miss, Waits};
use crate::abi::{self, RangeState, Slot};
use crate::store::core::Core;
use crate::store::hot::{BLOCK, Block, Hot, Mem, WriteBack, blocks_for};
use crate::store::node::{COMMITTED, Idx, LOST, SLOT};

/// Blocks that are looked at one by one for one request: 64 GiB, which takes a few milliseconds, during which nobody else
/// is served. A window that is wholly in slabs, or wholly in L2, takes no such looks.
const LOOKS_MAX: usize = 1 << 18;

/// A range of a window, once it is known of which file.
pub(super) struct Seen {
    pub idx: Idx,
    /// Whose bytes the file shows: its own, but for a copy-on-write version that nobody has written to.
    pub shown: Idx,
    pub bytes: Range<u64>,
}

impl Seen {
    pub fn blocks(&self) -> Range<usize> {
        if self.bytes.is_empty() {
            return 0..0;
        }
        (self.bytes.start / BLOCK) as usize..blocks_for(self.bytes.end)
    }
}

/// A window: of each range its file, or why there is none.
pub(super) type Window = Vec<Result<Seen, Errno>>;

impl Core {
    /// Finds the files of all ranges.
    pub(super) fn window(
        &mut self,
        session: &mut Session,
        ranges: &[abi::Range],
        waits: Waits,
    ) -> Result<Window, Miss> {
        let mut window = Window::with_capacity(ranges.len());
        for range in ranges {
            window.push(match self.see(session, range, waits) {
                Ok(seen) => Ok(seen),
                Err(Miss::Fail(errno)) => Err(errno),
                Err(wait) => return Err(wait),
            });
        }
        Ok(window)
    }

    fn see(&mut self, session: &mut Session, range: &abi::Range, waits: Waits) -> Result<Seen, Miss> {
        if range.reserved != 0 {
            return Err(Errno::EINVAL.into());
        }
        let idx = match (range.kind, u32::try_from(range.id)) {
            (abi::KIND_NAME, Ok(id)) => {
                self.find_name(session, Slot { id, generation: range.generation }, waits)?
            }
            (abi::KIND_NAME, Err(_)) => return Err(Errno::ESTALE.into()),
            (abi::KIND_NODE, _) if range.generation == 0 => self.find_node(&session.who, range.id)?,
            _ => return Err(Errno::EINVAL.into()),
        };
        match range.unit {
            abi::UNIT_BYTES => {}
            // No namespace declares a geometry yet.
            abi::UNIT_BLOCKS => return Err(Errno::EOPNOTSUPP.into()),
            _ => return Err(Errno::EINVAL.into()),
        }
        let node = self.node(idx);
        if node.has(LOST) {
            return Err(Errno::EIO.into());
        }
        let end = match range.length {
            0 => node.size,
            length => range.offset.checked_add(length).ok_or(Errno::EINVAL)?,
        };
        if range.offset > end || end > node.size {
            return Err(Errno::ERANGE.into());
        }
        Ok(Seen { idx, shown: self.shown(idx), bytes: range.offset..end })
    }

    /// Whether all of a file is in L1, if that shows without a look at each block.
    fn is_plainly_resident(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        let plain = node.hot.as_ref().is_some_and(|hot| {
            hot.sealed()
                && hot.slab.is_some()
                && !hot.mixed
                && hot.transfers == 0
                && hot.blocks.len() == blocks_for(node.size)
        }) && !node.has(LOST | SLOT);
        debug_assert!(
            !plain
                || node.hot.as_ref().is_some_and(|hot| {
                    hot.blocks.iter().all(|block| matches!(block.mem, Mem::Slab) && block.resident())
                }),
            "a slab without transfers has all of its file"
        );
        plain
    }

    fn state_of(&self, seen: &Seen, looked: &mut usize) -> Result<RangeState, Errno> {
        let blocks = seen.blocks();
        let bytes = seen.bytes.end - seen.bytes.start;
        let (mut blocks_l1, mut bytes_l1, mut loading) = (blocks.len(), bytes, false);
        match self.hot(seen.shown) {
            _ if self.is_plainly_resident(seen.shown) => {}
            None => (blocks_l1, bytes_l1) = (0, 0),
            Some(hot) => {
                *looked += blocks.len();
                if *looked > LOOKS_MAX {
                    return Err(Errno::E2BIG);
                }
                let mut places: Option<Vec<bool>> = None;
                for index in blocks.clone() {
                    let block = hot.blocks.get(index);
                    if block.is_some_and(|block| block.bad) {
                        return Err(Errno::EIO);
                    }
                    if block.is_some_and(Block::resident) {
                        continue;
                    }
                    let places = places.get_or_insert_with(|| self.places_in(seen.shown, blocks.clone()));
                    if block.is_none_or(|block| block.mem.is_none()) && !places[index - blocks.start] {
                        continue;
                    }
                    loading |= block.is_some_and(Block::is_loading);
                    let start = index as u64 * BLOCK;
                    blocks_l1 -= 1;
                    bytes_l1 -= seen.bytes.end.min(start + BLOCK) - seen.bytes.start.max(start);
                }
            }
        }
        let hot = self.hot(seen.idx);
        let mut flags = self.file_state(seen.idx);
        // Of a file that is in no lease nothing is looked at.
        let is_leased = |hot: &Hot| hot.leases > 0 && hot.is_leased(blocks.clone());
        flags |= if hot.is_some_and(is_leased) { abi::STATE_LEASED } else { 0 };
        flags |= if loading { abi::STATE_LOADING } else { 0 };
        Ok(RangeState {
            status: 0,
            tier: tier(blocks.len() as u64, blocks_l1 as u64),
            flags,
            reserved: 0,
            blocks: blocks.len() as u32,
            blocks_l1: blocks_l1 as u32,
            bytes,
            bytes_l1,
        })
    }

    /// Whether all of these ranges, which are there, is in L1.
    pub(super) fn is_all_in_l1(&self, window: &[Seen]) -> bool {
        let mut looked = 0;
        window.iter().all(|seen| {
            let state = self.state_of(seen, &mut looked);
            state.is_ok_and(|state| state.blocks == state.blocks_l1)
        })
    }

    /// What is so of the file as a whole.
    pub(super) fn file_state(&self, idx: Idx) -> u8 {
        let node = self.node(idx);
        let hot = node.hot.as_ref();
        let open = hot.is_some_and(|hot| hot.writers > 0 || !hot.sealed());
        let durable = node.has(COMMITTED)
            && hot.is_none_or(|hot| {
                // Nothing is dirty of what is sealed and has its places in its record.
                let settled = !hot.placed || (hot.write_back == WriteBack::None && !hot.dirty_blocks());
                hot.sealed() && hot.base.is_none() && settled
            });
        (if durable { abi::STATE_DURABLE } else { 0 }) | (if open { abi::STATE_OPEN } else { 0 })
    }

    pub(super) fn states(&self, window: &Window) -> Vec<RangeState> {
        let mut looked = 0;
        let mut state = |seen: &Result<Seen, Errno>| {
            let state =
                seen.as_ref().map_err(|errno| *errno).and_then(|seen| self.state_of(seen, &mut looked));
            state.unwrap_or_else(|errno| RangeState { status: -(errno as i32), ..RangeState::default() })
        };
        window.iter().map(&mut state).collect()
    }

    pub(super) fn look_up(
        &mut self,
        session: &mut Session,
        mut lookup: abi::Lookup,
        ranges: &[abi::Range],
        waits: Waits,
    ) -> Result<Vec<u8>, Miss> {
        let window = self.window(session, ranges, waits)?;
        let states = self.states(&window);
        let there = |state: &RangeState| state.status == 0;
        lookup.generation = self.tree.generation;
        lookup.prefix = states.iter().take_while(|state| there(state)).count() as u32;
        lookup.present = states.iter().filter(|state| there(state)).count() as u32;
        self.counters.control_lookups += 1;
        Ok(abi::encode(&lookup, &states))
    }

    pub(super) fn classify(
        &mut self,
        id: SessionId,
        session: &mut Session,
        mut classify: abi::Classify,
        ranges: &[abi::Range],
        waits: Waits,
    ) -> Result<Vec<u8>, Miss> {
        let window = self.window(session, ranges, waits)?;
        let states = self.states(&window);
        let sums = Sums::of(&states);
        classify.generation = self.tree.generation;
        (classify.absent, classify.failed, classify.tier) = (sums.absent, sums.failed, sums.tier);
        (classify.blocks, classify.blocks_l1) = (sums.blocks, sums.blocks_l1);
        (classify.bytes, classify.bytes_l1) = (sums.bytes, sums.bytes_l1);
        match classify.tier {
            abi::TIER_L1 => self.counters.classified_l1 += 1,
            abi::TIER_MIXED => self.counters.classified_mixed += 1,
            abi::TIER_L2 => self.counters.classified_l2 += 1,
            _ => self.counters.classified_absent += 1,
        }
        (classify.lease, classify.lease_errno) = (0, 0);
        if classify.header.flags & abi::CLASSIFY_LEASE != 0 {
            let wrong = states.iter().find(|state| state.status != 0).map(|state| -state.status);
            let granted = match (wrong, classify.tier) {
                (Some(errno), _) => Err(errno),
                (None, abi::TIER_L1) => {
                    let window: Vec<Seen> = window.into_iter().flatten().collect();
                    let parties = classify.parties.max(1);
                    self.grant(id, session, window, parties, classify.ttl_ms).map_err(|errno| errno as i32)
                }
                _ => Err(Errno::EAGAIN as i32),
            };
            match granted {
                Ok((lease, ttl)) => (classify.lease, classify.ttl_ms) = (lease, millis(ttl)),
                Err(errno) => (classify.lease_errno, classify.ttl_ms) = (errno, 0),
            }
        }
        Ok(abi::encode(&classify, &states))
    }
}

/// What there is of a window as a whole.
pub(super) struct Sums {
    pub tier: u8,
    pub absent: u32,
    pub failed: u32,
    pub blocks: u64,
    pub blocks_l1: u64,
    pub bytes: u64,
    pub bytes_l1: u64,
}

impl Sums {
    pub fn of(states: &[RangeState]) -> Self {
        let sum = |count: fn(&RangeState) -> u64| states.iter().map(count).sum::<u64>();
        let failed = states.iter().filter(|state| state.status != 0).count();
        let (blocks, blocks_l1) =
            (sum(|state| u64::from(state.blocks)), sum(|state| u64::from(state.blocks_l1)));
        Self {
            tier: match (failed, tier(blocks, blocks_l1)) {
                (0, tier) => tier,
                (all, _) if all == states.len() => abi::TIER_ABSENT,
                // What there is of it is in L1; all of it is not.
                (_, abi::TIER_L1) if blocks > 0 => abi::TIER_MIXED,
                (_, abi::TIER_L1) => abi::TIER_L2,
                (_, tier) => tier,
            },
            absent: states.iter().filter(|s| s.status == -(Errno::ENOENT as i32)).count() as u32,
            failed: failed as u32,
            blocks,
            blocks_l1,
            bytes: sum(|state| state.bytes),
            bytes_l1: sum(|state| state.bytes_l1),
        }
    }
}

fn tier(blocks: u64, blocks_l1: u64) -> u8 {
    match blocks_l1 {
        all if all == blocks => abi::TIER_L1,
        0 => abi::TIER_L2,
        _ => abi::TIER_MIXED,
    }
}

/// As an answer has it: what is less than one is not over yet.
pub(super) fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}
