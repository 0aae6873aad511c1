//! The worker that starts transfers to the device, and what happens when they end.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::queue::{State, Work};
use crate::l2::Extent;
use crate::l2::{Class, Direction, Io};
use crate::memory::{AlignedBuf, Span};
use crate::store::Store;
use crate::store::change::Waiter;
use crate::store::core::Core;
use crate::store::hot::{BLOCK, BlockIo, Doom, Place, WriteBack, block_len, blocks_for};
use crate::store::node::{DURABLE, Idx, LOST, NodeId};
use crate::store::promote::crc_of;

/// Bytes on their way to the devices at one time: deep enough for the fastest drive, and no more, since what has
/// been submitted stands before every later read.
const IN_FLIGHT_MAX: u64 = 64 << 20;
/// Blocks of a file under construction that are copied and written at a time.
const COPIED_BLOCKS: usize = 16;

/// Transfers of one file, to be submitted without the lock.
struct Job {
    id: NodeId,
    /// The entry of the publish queue this belongs to; none for bytes that are spilled early.
    seq: Option<u64>,
    device: u8,
    blocks: Vec<Piece>,
    bytes: u64,
}

/// One block of a job.
struct Piece {
    index: usize,
    version: u32,
    /// Bytes of the block.
    len: usize,
    /// Whole pages, the rest of the last one zeros.
    span: Span,
    place: Place,
    crc: Option<u32>,
}

enum Next {
    Job(Job),
    /// Nothing can be started until something changes.
    Wait,
    Stop,
}

/// Takes `pages` from the front of `extents`.
fn take(extents: &mut VecDeque<Extent>, mut pages: u32) -> Place {
    let mut place = Place::new();
    while pages > 0 {
        let Some(front) = extents.front_mut() else { break };
        let now = front.blocks.min(pages);
        place.push(Extent { start: front.start, blocks: now });
        front.start += u64::from(now);
        front.blocks -= now;
        pages -= now;
        if front.blocks == 0 {
            extents.pop_front();
        }
    }
    place
}

impl Core {
    fn next_job(&mut self) -> Next {
        if self.queue.in_flight >= IN_FLIGHT_MAX {
            return Next::Wait;
        }
        while let Some(entry) = self.queue.next_to_start() {
            let seq = entry.seq;
            let Work::File(id) = entry.work else { return Next::Wait };
            match self.start(seq, id) {
                Started::Job(job) => return Next::Job(job),
                Started::Nothing => {}
                Started::NoRoom => return self.nothing_to_start(),
            }
        }
        if !self.stopping
            && self.waiters.iter().any(Waiter::is_for_room)
            && let Some(job) = self.spill()
        {
            return Next::Job(job);
        }
        self.nothing_to_start()
    }

    /// Who stops does not wait for what may never come. What is on its way lands in any case.
    fn nothing_to_start(&self) -> Next {
        if self.stopping { Next::Stop } else { Next::Wait }
    }

    fn set_state(&mut self, seq: u64, state: State) {
        if let Some(entry) = self.queue.get_mut(seq) {
            entry.state = state;
        }
        self.wakes.committer = true;
    }

    /// Starts entry `seq`, or the next part of it.
    fn start(&mut self, seq: u64, id: NodeId) -> Started {
        let Some(idx) = self.by_id(id).filter(|&idx| self.is_wanted(idx)) else {
            self.forget_entry(seq, id);
            return Started::Nothing;
        };
        let sealed = self.hot_mut(idx).sealed();
        let todo = self.queue.get_mut(seq).and_then(|entry| entry.todo.take());
        let mut todo: VecDeque<u32> = todo.unwrap_or_else(|| {
            let hot = self.hot_mut(idx);
            (0..hot.blocks.len() as u32).filter(|&index| hot.blocks[index as usize].dirty).collect()
        });
        let limit = if sealed { usize::MAX } else { COPIED_BLOCKS };
        let (mut now, mut busy) = (Vec::new(), VecDeque::new());
        while now.len() < limit
            && let Some(index) = todo.pop_front()
        {
            match self.hot_mut(idx).blocks.get(index as usize) {
                Some(block) if block.dirty && !block.mem.is_none() => match block.io {
                    BlockIo::Idle => now.push(index as usize),
                    // An older version of it is on its way (a spill, or an entry before this one).
                    _ => busy.push_back(index),
                },
                _ => {}
            }
        }
        todo.append(&mut busy);
        self.end_claim(idx);
        if !sealed && !now.is_empty() && self.hot_mut(idx).writing {
            // Somebody is copying into it; a copy taken now could be torn. The next writer comes after this.
            self.hot_mut(idx).claimed = true;
            now.iter().rev().for_each(|&index| todo.push_front(index as u32));
            if let Some(entry) = self.queue.get_mut(seq) {
                entry.todo = Some(todo);
            }
            return Started::NoRoom;
        }
        if now.is_empty() {
            let done = todo.is_empty();
            let Some(entry) = self.queue.get_mut(seq) else { return Started::Nothing };
            entry.todo = Some(todo);
            if !done {
                return Started::NoRoom;
            }
            if !matches!(entry.state, State::Writing(left) if left > 0) {
                self.set_state(seq, State::Written);
                // There may have been nothing to write: an empty file, or one of holes alone.
                self.settle_layout(idx);
            }
            return Started::Nothing;
        }
        match self.job(idx, Some(seq), &now, !sealed) {
            Some(job) => {
                if let Some(entry) = self.queue.get_mut(seq) {
                    let out = if let State::Writing(out) = entry.state { out } else { 0 };
                    entry.state = State::Writing(out + 1);
                    entry.todo = Some(todo);
                }
                Started::Job(job)
            }
            None => {
                now.iter().rev().for_each(|&index| todo.push_front(index as u32));
                if let Some(entry) = self.queue.get_mut(seq) {
                    entry.todo = Some(todo);
                }
                // Room is set aside for it, but some of that is not free before the next commit.
                self.queue.urgent = true;
                self.wakes.committer = true;
                Started::NoRoom
            }
        }
    }

    /// The worker has had its turn with a file under construction, or does not want it any more.
    fn end_claim(&mut self, idx: Idx) {
        if std::mem::take(&mut self.hot_mut(idx).claimed) {
            self.wakes.admission = true;
        }
    }

    pub fn forget_entry(&mut self, seq: u64, id: NodeId) {
        if let Some(entry) = self.queue.get_mut(seq) {
            entry.todo = Some(VecDeque::new());
        }
        self.set_state(seq, State::Void);
        if let Some(idx) = self.by_id(id) {
            self.end_claim(idx);
            let hot = self.hot_mut(idx);
            if hot.write_back == WriteBack::Queued(seq) {
                hot.write_back = WriteBack::None;
            }
            self.tidy(idx);
        }
    }

    /// Allocates extents for `indexes` of `idx` and marks them as being written. With `copy`, the bytes are taken
    /// as they are now, since they may change meanwhile.
    fn job(&mut self, idx: Idx, seq: Option<u64>, indexes: &[usize], copy: bool) -> Option<Job> {
        let size = self.node(idx).size;
        let pages_of = |index: usize| (block_len(size, index) as u32).div_ceil(4096);
        let pages: u64 = indexes.iter().map(|&index| u64::from(pages_of(index))).sum();
        // Where the room is that was set aside for it.
        let device = self.node(idx).device;
        let extents = self.allocators.get_mut(usize::from(device))?.allocate(u32::try_from(pages).ok()?)?;
        self.space.on(device).allocated += pages;
        let mut extents: VecDeque<Extent> = extents.into_iter().collect();
        let mut blocks = Vec::with_capacity(indexes.len());
        for &index in indexes {
            let hot = self.hot_mut(idx);
            let len = block_len(size, index);
            let whole = len.next_multiple_of(4096);
            let Some(span) = hot.span(index) else { continue };
            let span = if copy {
                let defined = hot.defined(index, len);
                let copied = AlignedBuf::unwritten(whole);
                copied.copy_from_span(&span.slice(0..defined));
                copied.zero(defined..whole);
                copied
            } else {
                span.slice(0..whole)
            };
            let block = &mut hot.blocks[index];
            block.io = BlockIo::Writing(block.version);
            block.fixed = !copy;
            let reserved = std::mem::take(&mut block.reserved);
            let (version, crc) = (block.version, if copy { None } else { block.crc });
            self.space.on(device).reserved -= u64::from(reserved);
            blocks.push(Piece { index, version, len, span, place: take(&mut extents, pages_of(index)), crc });
        }
        self.space.note_peak();
        let bytes = pages * 4096;
        self.queue.in_flight += bytes;
        self.queue.in_flight_files += 1;
        self.hot_mut(idx).transfers += 1;
        self.droppable.remove::<crate::store::lists::Droppable>(&mut self.tree.nodes, idx);
        Some(Job { id: self.id(idx), seq, device, blocks, bytes })
    }

    /// R7: bytes of files under construction go to the device early when somebody waits for room. Whole blocks
    /// first; a block that is still being filled only if there is nothing else.
    fn spill(&mut self) -> Option<Job> {
        let building: Vec<Idx> = self.building.values().map(|id| id.idx()).collect();
        for whole_only in [true, false] {
            for &idx in &building {
                if !self.spillable(idx) || self.node(idx).has(LOST) {
                    continue;
                }
                let size = self.node(idx).size;
                let hot = self.hot_mut(idx);
                let indexes: Vec<usize> = (0..hot.blocks.len().min(blocks_for(size)))
                    .filter(|&index| {
                        let block = &hot.blocks[index];
                        block.dirty
                            && block.io == BlockIo::Idle
                            && !block.mem.is_none()
                            && (!whole_only || (index as u64 + 1) * BLOCK <= size)
                    })
                    .take(COPIED_BLOCKS)
                    .collect();
                if indexes.is_empty() {
                    continue;
                }
                if let Some(job) = self.job(idx, None, &indexes, true) {
                    self.counters.spilled_bytes += job.bytes;
                    return Some(job);
                }
            }
        }
        None
    }

    /// The transfers of a job have ended.
    fn written(&mut self, job: Job, error: Option<io::Error>) {
        self.queue.in_flight -= job.bytes;
        self.queue.in_flight_files -= 1;
        self.wakes.writer = true;
        self.wakes.admission = true;
        let Some(idx) = self.by_id(job.id) else { return };
        self.hot_mut(idx).transfers -= 1;
        let durable = self.node(idx).has(DURABLE);
        for piece in job.blocks {
            let hot = self.hot_mut(idx);
            let block = hot.blocks.get_mut(piece.index);
            // A block that was cut off, or cut off and written anew, is not the one that was on its way.
            let block = block.filter(|block| block.io == BlockIo::Writing(piece.version));
            if let Some(block) = block {
                block.io = BlockIo::Idle;
                block.fixed = false;
                if error.is_none() {
                    let old = std::mem::replace(&mut block.place, piece.place);
                    block.stored = (piece.crc.unwrap_or(0), piece.len as u32);
                    // If it was changed meanwhile, an fsync before the change has what it wanted, and it stays dirty.
                    if block.version == piece.version {
                        (block.dirty, block.alone) = (false, false);
                        block.crc = piece.crc;
                        let charge = std::mem::take(&mut block.charge);
                        let reserved = std::mem::take(&mut block.reserved);
                        self.uncharge(job.device, charge, reserved);
                    }
                    self.retire_place(idx, job.device, durable, old);
                    if job.seq.is_none() {
                        // What was stored early has no entry in the publish queue that would have it recorded.
                        self.changed(idx);
                    }
                    continue;
                }
            }
            self.free_extents(job.device, &piece.place);
        }
        self.counters.writeback_bytes += job.bytes;
        match error {
            None => {
                if let Some(seq) = job.seq {
                    self.part_written(seq);
                }
            }
            Some(error) => self.store_failed(idx, job.seq, &error),
        }
        if self.tree.nodes.get(idx).is_some() {
            self.settle_layout(idx);
            self.close_if_done(idx);
        }
    }

    fn part_written(&mut self, seq: u64) {
        let Some(entry) = self.queue.get_mut(seq) else { return };
        let State::Writing(out) = entry.state else { return };
        let done = out <= 1 && entry.todo.as_ref().is_none_or(VecDeque::is_empty);
        entry.state = if done { State::Written } else { State::Writing(out - 1) };
        self.wakes.committer = true;
    }

    /// R6: what cannot be stored is not found any more, and whoever asks for durability is told.
    fn store_failed(&mut self, idx: Idx, seq: Option<u64>, error: &io::Error) {
        self.counters.store_failures += 1;
        self.end_claim(idx);
        let hot = self.hot_mut(idx);
        hot.failed = true;
        if let Some(private) = hot.private_mut() {
            private.doom = Some(Doom::NotStored);
        }
        let waiting = std::mem::take(&mut hot.fsyncs);
        let queued = hot.write_back;
        hot.write_back = WriteBack::None;
        let mut freed = (0, 0);
        for block in &mut hot.blocks {
            block.alone |= std::mem::take(&mut block.dirty);
            freed.0 += std::mem::take(&mut block.charge);
            freed.1 += std::mem::take(&mut block.reserved);
        }
        let device = self.node(idx).device;
        self.uncharge(device, freed.0, freed.1);
        for (_, reply) in waiting {
            self.reply(move || reply(Err(Errno::EIO)));
        }
        // The entry it was written for, and a later one, if it has been queued again meanwhile.
        let queued = if let WriteBack::Queued(seq) = queued { Some(seq) } else { None };
        for seq in [seq, queued].into_iter().flatten() {
            self.set_state(seq, State::Void);
            if let Some(entry) = self.queue.get_mut(seq) {
                entry.todo = Some(VecDeque::new());
            }
        }
        let id = self.id(idx);
        let first = [seq, queued, self.heirs.get(&id).copied()].into_iter().flatten().min();
        self.tell_drains(id, first.unwrap_or(u64::MAX));
        self.lose(idx, &format!("storing it on the device failed: {error}"));
    }
}

enum Started {
    Job(Job),
    Nothing,
    NoRoom,
}

impl Store {
    pub(crate) fn run_writer(self: &Arc<Self>) {
        loop {
            let mut core = self.lock();
            match core.next_job() {
                Next::Job(job) => {
                    self.settle(core);
                    self.submit(job);
                }
                Next::Stop => return self.settle(core),
                Next::Wait => {
                    let calls = core.calls.writer;
                    self.settle(core);
                    let mut core = self.lock();
                    if core.calls.writer == calls {
                        self.wake_writer.wait(&mut core);
                    }
                }
            }
        }
    }

    fn submit(self: &Arc<Self>, mut job: Job) {
        let Some(volume) = self.volume.clone() else { return };
        for piece in &mut job.blocks {
            if piece.crc.is_none() {
                piece.crc = Some(crc_of(std::slice::from_ref(&piece.span)));
            }
        }
        let mut parts: Vec<(u64, Span)> = Vec::new();
        for piece in &job.blocks {
            let mut at = 0;
            for extent in &piece.place {
                let len = extent.blocks as usize * 4096;
                let span = piece.span.slice(at..at + len);
                at += len;
                match parts.last_mut() {
                    Some((last, before))
                        if *last + before.len() as u64 == extent.start * 4096
                            && before.is_followed_by(&span) =>
                    {
                        *before = before.joined(&span);
                    }
                    _ => parts.push((extent.start * 4096, span)),
                }
            }
        }
        let device = usize::from(job.device);
        let engine = volume.engine(device);
        let landing = Arc::new(Landing {
            remaining: AtomicU32::new(parts.len() as u32),
            error: Mutex::new(None),
            job: Mutex::new(Some(job)),
        });
        for (offset, span) in parts {
            let (store, volume, landing) = (self.clone(), volume.clone(), landing.clone());
            engine.submit(Io {
                direction: Direction::Write,
                class: Class::WriteBack,
                offset: volume.data_offset(device) + offset,
                span,
                done: Box::new(move |result| {
                    // Not earlier: a flush that began before the write was done does not cover it.
                    volume.mark_written(device);
                    if let Err(error) = result {
                        landing.error.lock().get_or_insert(error);
                    }
                    if landing.remaining.fetch_sub(1, Ordering::AcqRel) == 1
                        && let Some(job) = landing.job.lock().take()
                    {
                        let error = landing.error.lock().take();
                        let at = store.clone();
                        store.completed(Box::new(move || at.with(|core| core.written(job, error))));
                    }
                }),
            });
        }
    }
}

/// The transfers of one job, until the last has come down.
struct Landing {
    remaining: AtomicU32,
    error: Mutex<Option<io::Error>>,
    job: Mutex<Option<Job>>,
}
