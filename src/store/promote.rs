//! Bringing blocks back from the device: promotion into L1, and reads that go around it (rules R2, R7, R9).
//!
//! Memory is taken before the first read is submitted, and belongs to the block from then on: a second reader
//! waits for the same promotion. Every block is checked against its checksum before anybody sees it, also when only
//! a part of the file is wanted.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use nix::errno::Errno;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::Store;
use super::core::{Core, Effect, HOLE};
use super::hot::{BLOCK, BlockIo, Mem, PendingRead, Place, Via, block_len, blocks_for};
use super::node::{Idx, LOST, NONE, NodeId, SLOT};
use crate::l2::{Class, Direction, Io};
use crate::memory::{AlignedBuf, Span};

/// Blocks that are read and checked together: 1 MiB, as large as a client's read gets.
const GROUP_BLOCKS: usize = 4;
/// Memory for reads that go around L1 at one time; more of them wait their turn.
const AROUND_BYTES_MAX: u64 = 64 << 20;

/// Transfers from the device, to be submitted without the lock.
pub struct Load {
    device: usize,
    parts: Vec<Part>,
    /// Memory of holes inside the file.
    zero: Vec<Span>,
}

struct Part {
    class: Class,
    /// What blocks it has a part of.
    blocks: Range<usize>,
    offset: u64,
    span: Span,
    group: Arc<Group>,
}

/// What must be there before anything of it is used.
pub struct Group {
    id: NodeId,
    checks: Vec<Check>,
    remaining: AtomicU32,
    failed: Mutex<Failed>,
    target: Mutex<Option<Target>>,
}

/// What of a group could not be read, and why not.
#[derive(Default)]
struct Failed {
    error: Option<io::Error>,
    blocks: SmallVec<[Range<usize>; 1]>,
}

/// One block's bytes as they were written, whole pages, and their checksum.
struct Check {
    index: usize,
    /// What the block was when the read began: only that one is what was read. A file may be emptied or written to
    /// meanwhile.
    io: BlockIo,
    version: u32,
    /// Where it was then. A block that was given up is nowhere, though another may have come in its stead.
    place: Place,
    parts: Vec<Span>,
    crc: u32,
}

enum Target {
    L1,
    /// For the file's read of this number, whose bytes begin at `from`. It may have been answered: its time was over.
    Around {
        span: Span,
        from: usize,
        number: u32,
    },
}

/// Bad blocks that have been told of: whoever reads one again gets EIO, and no second line is made of it.
#[derive(Default)]
pub struct BadTold(HashSet<(NodeId, usize, u64)>);

impl BadTold {
    /// Beyond this they are told of again.
    const KEPT: usize = 4096;

    /// Once it is rewritten, a block lies elsewhere, and may go bad again.
    fn is_news(&mut self, id: NodeId, index: usize, place: &Place) -> bool {
        if self.0.len() >= Self::KEPT {
            self.0.clear();
        }
        self.0.insert((id, index, place.first().map_or(0, |extent| extent.start)))
    }
}

/// The blocks that a read touches, first and last.
fn touched(read: &PendingRead) -> (usize, usize) {
    ((read.offset / BLOCK) as usize, ((read.offset + read.len as u64 - 1) / BLOCK) as usize)
}

/// Memory that a read takes to go around L1.
fn bytes_around(read: &PendingRead) -> u64 {
    let (first, last) = touched(read);
    (last - first + 1) as u64 * BLOCK
}

fn place_bytes(place: &Place) -> usize {
    place.iter().map(|extent| extent.blocks as usize * 4096).sum()
}

/// Cuts `place` into reads into `span`, whose start is the block's start. Returns what is to be read, the memory
/// of the bytes that were written, and the memory that stays zero.
fn cut(place: &Place, span: &Span) -> (Vec<(u64, Span)>, Vec<Span>, Vec<Span>) {
    let (mut reads, mut written, mut zero) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = 0;
    for extent in place {
        let len = (extent.blocks as usize * 4096).min(span.len() - at);
        if len == 0 {
            break;
        }
        let part = span.slice(at..at + len);
        if extent.start == HOLE {
            zero.push(part);
        } else {
            written.push(part.clone());
            reads.push((extent.start * 4096, part));
        }
        at += len;
    }
    if at < span.len() {
        zero.push(span.slice(at..span.len()));
    }
    (reads, written, zero)
}

impl Core {
    /// Starts to bring the blocks `wanted` of `idx` into L1; what is there or on its way is left alone. The rest of a
    /// file that can have a slab comes too, behind what anybody waits for. False: no memory.
    pub fn load_blocks(&mut self, idx: Idx, wanted: Range<usize>) -> bool {
        self.load_blocks_as(idx, wanted, Class::Demand)
    }

    /// The same, with `wanted` among these.
    pub fn load_blocks_as(&mut self, idx: Idx, wanted: Range<usize>, wanted_as: Class) -> bool {
        self.size_blocks(idx);
        let whole = self.take_promotion_slab(idx);
        let range = if whole { 0..blocks_for(self.node(idx).size) } else { wanted.clone() };
        let size = self.node(idx).size;
        // Into the slab only where all of the file is to be in it: under construction it may be smaller than the file.
        let whole = self.hot(idx).is_some_and(|hot| hot.slab.is_some() && hot.sealed() && !hot.mixed);
        let id = self.id(idx);
        let mut load =
            Load { device: usize::from(self.node(idx).device), parts: Vec::new(), zero: Vec::new() };
        let mut complete = true;
        let mut index = range.start;
        while index < range.end {
            let mut checks = Vec::new();
            let mut reads: Vec<(Range<usize>, u64, Span)> = Vec::new();
            // A group does not reach from what is waited for into the rest.
            let edge = [wanted.start, wanted.end].into_iter().find(|&edge| edge > index).unwrap_or(range.end);
            let stop = range.end.min(edge).min(index + if whole { GROUP_BLOCKS } else { 1 });
            let class = if wanted.contains(&index) { wanted_as } else { Class::Promotion };
            for at in index..stop {
                let block = &self.hot_mut(idx).blocks[at];
                let hole = block.mem.is_none() && !self.has_place(idx, at);
                let block = &self.hot_mut(idx).blocks[at];
                if block.resident() || block.is_loading() || block.bad || (hole && !whole) {
                    continue;
                }
                let place = self.place(idx, at);
                if !self.take_load_memory(idx, at, whole, block_len(size, at).max(place_bytes(&place))) {
                    complete = false;
                    continue;
                }
                let Some(span) = self.hot(idx).and_then(|hot| hot.span(at)) else { continue };
                let (to_read, written, zero) = cut(&place, &span);
                if to_read.is_empty() {
                    // It counts as resident from now on.
                    zero.iter().for_each(|span| span.zero(0..span.len()));
                    continue;
                }
                load.zero.extend(zero);
                let hot = self.hot_mut(idx);
                let io = BlockIo::Reading(hot.number());
                hot.blocks[at].io = io;
                let version = hot.blocks[at].version;
                let crc = self.block_crc(idx, at).unwrap_or(0);
                checks.push(Check { index: at, io, version, place, parts: written, crc });
                for (offset, span) in to_read {
                    match reads.last_mut() {
                        Some((blocks, last, before))
                            if *last + before.len() as u64 == offset && before.is_followed_by(&span) =>
                        {
                            *before = before.joined(&span);
                            blocks.end = at + 1;
                        }
                        _ => reads.push((at..at + 1, offset, span)),
                    }
                }
            }
            index = stop;
            if checks.is_empty() {
                continue;
            }
            let group = Arc::new(Group {
                id,
                checks,
                remaining: AtomicU32::new(reads.len() as u32),
                failed: Mutex::default(),
                target: Mutex::new(Some(Target::L1)),
            });
            self.begin_promotion(idx);
            load.parts.extend(reads.into_iter().map(|(blocks, offset, span)| Part {
                class,
                blocks,
                offset,
                span,
                group: group.clone(),
            }));
        }
        if !load.parts.is_empty() || !load.zero.is_empty() {
            self.effects.push(Effect::Load(load));
        }
        self.tidy_list(idx);
        complete
    }

    /// Takes a slab for the whole of a sealed file of which nothing is in L1, so that later opens get passthrough.
    fn take_promotion_slab(&mut self, idx: Idx) -> bool {
        let node = self.node(idx);
        let size = node.size;
        let Some(hot) = &node.hot else { return false };
        // What is leased of it, holes, takes no memory, and shall not keep a slab.
        if !hot.sealed()
            || hot.slab.is_some()
            || hot.leases > 0
            || node.has(SLOT | LOST)
            || size <= self.settings.small_file_max
            || size > self.settings.slab_file_max
            || hot.blocks.iter().any(|block| !block.mem.is_none() || block.bad)
        {
            return false;
        }
        let last = blocks_for(size) - 1;
        if place_bytes(&self.place(idx, last)) > (block_len(size, last)).next_multiple_of(4096) {
            return false;
        }
        let Ok(pages) = u32::try_from(size.div_ceil(4096)) else { return false };
        let Some(slab) = self.alloc_slab(pages, idx) else { return false };
        if slab.set_len(size).is_err() {
            return false;
        }
        slab.announce();
        self.hot_mut(idx).slab = Some(slab);
        self.hot_mut(idx).promoted_unread = true;
        self.counters.promotions += 1;
        self.counters.promoted_bytes += size;
        true
    }

    fn begin_promotion(&mut self, idx: Idx) {
        self.counters.promoting += 1;
        self.hot_mut(idx).transfers += 1;
        self.pace.begin(Instant::now());
    }

    fn take_load_memory(&mut self, idx: Idx, index: usize, whole: bool, len: usize) -> bool {
        let mem = if whole {
            Mem::Slab
        } else {
            let Some(chunk) = self.alloc_chunk(len, NONE) else { return false };
            self.counters.promotions += 1;
            self.counters.promoted_bytes += len as u64;
            Mem::Chunk(chunk)
        };
        self.hot_mut(idx).blocks[index].mem = mem;
        true
    }

    fn tidy_list(&mut self, idx: Idx) {
        if self.hot(idx).is_some_and(|hot| hot.in_l1_list) && !self.may_drop(idx) {
            self.droppable.remove::<super::lists::Droppable>(&mut self.tree.nodes, idx);
        }
    }

    /// Reads a range from the device without keeping it, or has the read wait if too many do so.
    pub fn read_around(&mut self, idx: Idx, mut read: PendingRead) {
        let id = self.id(idx);
        read.via = Via::Room;
        self.park(idx, read);
        self.around_waiting.push_back(id);
        self.start_around(idx);
    }

    /// Starts reads that wait for memory to go around L1, in order, as long as there is some. One that needs no transfer
    /// any more ends nothing that the next could wait for.
    fn start_around(&mut self, keep: Idx) {
        while let Some(&id) = self.around_waiting.front() {
            let next = self.by_id(id).and_then(|idx| {
                let reads = &self.hot(idx)?.reads;
                let at = reads.iter().position(|read| read.via == Via::Room)?;
                Some((idx, at, bytes_around(&reads[at])))
            });
            let Some((idx, at, bytes)) = next else {
                // Answered meanwhile.
                self.around_waiting.pop_front();
                continue;
            };
            if self.around_bytes > 0 && self.around_bytes + bytes > AROUND_BYTES_MAX {
                break;
            }
            self.around_waiting.pop_front();
            let read = self.hot_mut(idx).reads.remove(at);
            self.around_now(idx, read);
            if idx != keep {
                // It may have been all that kept the file.
                self.tidy(idx);
            }
        }
    }

    fn around_now(&mut self, idx: Idx, mut read: PendingRead) {
        if !self.cut_read(idx, &mut read) {
            return self.reply(move || (read.reply)(Ok(&[])));
        }
        let (first, last) = touched(&read);
        let bytes = bytes_around(&read);
        let span = AlignedBuf::unwritten(bytes as usize);
        let (mut checks, mut reads) = (Vec::new(), Vec::new());
        for index in first..=last {
            let at = (index - first) * BLOCK as usize;
            let into = span.slice(at..at + BLOCK as usize);
            let hot = self.hot(idx);
            if hot.is_some_and(|hot| hot.blocks.get(index).is_some_and(|block| block.bad)) {
                return self.reply(move || (read.reply)(Err(Errno::EIO)));
            }
            if let Some(from) = hot
                .filter(|hot| hot.blocks.get(index).is_some_and(super::hot::Block::resident))
                .and_then(|hot| hot.span(index))
            {
                let defined = self.hot(idx).map_or(0, |hot| hot.defined(index, from.len()));
                into.copy_from_span(&from.slice(0..defined));
                into.zero(defined..into.len());
                continue;
            }
            let place = self.place(idx, index);
            let (to_read, written, zero) = cut(&place, &into);
            zero.iter().for_each(|part| part.zero(0..part.len()));
            if !to_read.is_empty() {
                let crc = self.block_crc(idx, index).unwrap_or(0);
                let version =
                    self.hot(idx).and_then(|hot| hot.blocks.get(index)).map_or(0, |block| block.version);
                checks.push(Check { index, io: BlockIo::Idle, version, place, parts: written, crc });
                reads.extend(to_read.into_iter().map(|(offset, span)| (index..index + 1, offset, span)));
            }
        }
        let from = (read.offset - first as u64 * BLOCK) as usize;
        if reads.is_empty() {
            let PendingRead { len, reply, .. } = read;
            return self.reply(move || span.slice(from..from + len).with_bytes(|bytes| reply(Ok(bytes))));
        }
        self.around_bytes += bytes;
        let number = self.hot_mut(idx).number();
        read.via = Via::Around(number);
        self.park(idx, read);
        let group = Arc::new(Group {
            id: self.id(idx),
            checks,
            remaining: AtomicU32::new(reads.len() as u32),
            failed: Mutex::default(),
            target: Mutex::new(Some(Target::Around { span, from, number })),
        });
        self.begin_promotion(idx);
        let parts = reads
            .into_iter()
            .map(|(blocks, offset, span)| Part {
                class: Class::Demand,
                blocks,
                offset,
                span,
                group: group.clone(),
            })
            .collect();
        let device = usize::from(self.node(idx).device);
        self.effects.push(Effect::Load(Load { device, parts, zero: Vec::new() }));
        self.tidy_list(idx);
    }

    /// A group has been read and checked; `bad` are the blocks that are not what was written.
    fn loaded(&mut self, group: &Group, target: Target, bad: &[usize], failed: Option<&io::Error>) {
        self.counters.promoting -= 1;
        self.kick_hints();
        let read = group.checks.iter().flat_map(|check| &check.parts).map(Span::len).sum::<usize>();
        self.pace.add(read as u64, self.counters.promoting > 0, Instant::now());
        let Some(idx) = self.by_id(group.id) else { return };
        let size = self.node(idx).size;
        let sealed = self.hot(idx).is_some_and(super::hot::Hot::sealed);
        let hot = self.hot_mut(idx);
        hot.transfers -= 1;
        let in_l1 = matches!(target, Target::L1);
        let gone: SmallVec<[bool; 4]> =
            group.checks.iter().map(|check| !in_l1 && self.place(idx, check.index) != check.place).collect();
        let hot = self.hot_mut(idx);
        // What was written anew while it was read may well not have been what the checksum was of.
        let (mut lost, mut outdated) = (false, false);
        let (mut discarded, mut unusable) = (0, 0);
        let mut lost_blocks: SmallVec<[&Check; 4]> = SmallVec::new();
        for (check, gone) in group.checks.iter().zip(gone) {
            let is_bad = bad.contains(&check.index);
            if gone {
                outdated |= is_bad;
                continue;
            }
            let Some(block) = hot.blocks.get_mut(check.index) else {
                lost |= is_bad && sealed;
                outdated |= is_bad && !sealed;
                discarded += u64::from(in_l1);
                lost_blocks.extend((is_bad && sealed).then_some(check));
                continue;
            };
            if block.version != check.version || (in_l1 && block.io != check.io) {
                outdated |= is_bad;
                discarded += u64::from(in_l1);
                continue;
            }
            lost |= is_bad;
            unusable += u64::from(is_bad && in_l1);
            lost_blocks.extend(is_bad.then_some(check));
            if in_l1 {
                block.io = BlockIo::Idle;
                block.referenced = true;
            }
            if is_bad {
                if in_l1 {
                    block.mem = Mem::None;
                }
                block.bad = true;
            }
        }
        self.counters.promotions_discarded += discarded;
        self.counters.promotions_failed += unusable;
        for check in &group.checks {
            self.counters.read_l2_bytes += block_len(size, check.index) as u64;
        }
        let whole = sealed && !self.node(idx).has(SLOT);
        if !whole {
            lost_blocks.retain(|check| self.bad_told.is_news(group.id, check.index, &check.place));
        }
        if !lost_blocks.is_empty() {
            match failed {
                Some(_) => self.counters.read_errors += 1,
                None if whole => self.counters.crc_errors += 1,
                None => self.counters.crc_errors += lost_blocks.len() as u64,
            }
        }
        if !lost_blocks.is_empty() && !self.node(idx).has(LOST) {
            let why = match failed {
                Some(error) => format!("reading it from the device failed: {error}"),
                None => "its checksum does not match what is on the device".to_owned(),
            };
            if whole {
                self.lose(idx, &why);
            } else {
                let path = self.tree.path(idx);
                for check in lost_blocks {
                    self.counters.bad_blocks += 1;
                    let at = check.index as u64 * BLOCK;
                    self.event(format!("bad block in {path}, at offset {at}: {why}"));
                    log::error!(
                        "bad block in {path}, at offset {at}: {why}; reading it fails until it is rewritten"
                    );
                }
            }
        }
        if let Target::Around { span, from, number } = target {
            self.around_bytes = self.around_bytes.saturating_sub(span.len() as u64);
            let reads = &mut self.hot_mut(idx).reads;
            let at = reads.iter().position(|read| read.via == Via::Around(number));
            if let Some(mut read) = at.map(|at| reads.remove(at)) {
                self.counters.read_around_bytes += read.len as u64;
                if outdated && !lost {
                    read.via = Via::L1;
                    self.park(idx, read);
                } else {
                    self.reply(move || match lost {
                        true => (read.reply)(Err(Errno::EIO)),
                        false => {
                            span.slice(from..from + read.len).with_bytes(|bytes| (read.reply)(Ok(bytes)))
                        }
                    });
                }
            }
            self.start_around(idx);
        }
        if self.tree.nodes.get(idx).is_some() {
            self.answer_reads(idx);
        }
        self.call_waiters();
        if self.tree.nodes.get(idx).is_some() {
            self.close_if_done(idx);
        }
    }
}

impl Store {
    pub(crate) fn submit_load(self: &Arc<Self>, load: Load) {
        for span in &load.zero {
            span.zero(0..span.len());
        }
        let Some(volume) = &self.volume else { return };
        let engine = volume.engine(load.device);
        for part in load.parts {
            let store = self.clone();
            let group = part.group;
            engine.submit(Io {
                direction: Direction::Read,
                class: part.class,
                offset: volume.data_offset(load.device) + part.offset,
                span: part.span,
                done: Box::new(move |result| {
                    if let Err(error) = result {
                        let mut failed = group.failed.lock();
                        failed.error.get_or_insert(error);
                        failed.blocks.push(part.blocks);
                    }
                    if group.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
                        let at = store.clone();
                        store.completions.push(Box::new(move || at.finish_load(&group)));
                    }
                }),
            });
        }
    }

    /// Checks what has come, on a completion thread.
    fn finish_load(self: &Arc<Self>, group: &Group) {
        let Some(target) = group.target.lock().take() else { return };
        let Failed { error: failed, blocks } = std::mem::take(&mut *group.failed.lock());
        let is_bad = |check: &&Check| {
            blocks.iter().any(|blocks| blocks.contains(&check.index)) || crc_of(&check.parts) != check.crc
        };
        let bad: Vec<usize> = group.checks.iter().filter(is_bad).map(|check| check.index).collect();
        self.with(|core| core.loaded(group, target, &bad, failed.as_ref()));
    }
}

/// CRC-32C over spans in order.
pub fn crc_of(parts: &[Span]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        part.with_bytes(|bytes| digest.update(bytes));
    }
    digest.finalize() as u32
}
