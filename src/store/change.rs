//! Changes to a file's bytes: write, truncate, fallocate.
//!
//! A change first *plans*: under the lock it gets dirty credit, room on the device and memory for every block it
//! touches. What it got it keeps, so that planning again after a wait goes on where it stopped. Then the bytes are
//! copied without the lock, and the change is *noted*. If something is missing, the change waits in the queue of
//! [`Waiter`]s, in order of arrival (rule R7), and the admission thread tries again when something was given back.
//!
//! Credit and room never wait for a file to be closed: under pressure the write-back worker spills blocks of files
//! under construction. So a queue of writers always moves, however many files they have open.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use smallvec::SmallVec;

use super::attr::{self, Attr};
use super::core::{Core, now};
use super::crc::{Running, crc_of_state, crc_state};
use super::hot::{BLOCK, BLOCK_PAGES, BlockIo, Hot, Mem, block_len};
use super::node::{Idx, LOST, NodeId};
use super::open::Handle;
use super::process::Caller;
use super::truncate::Zero;
use super::{AttrReply, Store, UnitReply, WriteReply};
use crate::memory::Span;

/// A change that waits.
pub struct Waiter {
    pub id: NodeId,
    pub change: Change,
    pub deadline: Instant,
    /// Bytes that the devices had taken when the deadline was set: while they take more, it moves (rule R7).
    pub written: u64,
    pub waits_for: Needs,
}

impl Waiter {
    /// What does not wait for room can be passed by others.
    pub fn is_for_room(&self) -> bool {
        self.waits_for == Needs::Room
    }
}

/// What a change waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    Room,
    /// A block that comes from the device.
    Block,
    /// The end of a lease.
    Lease,
}

pub enum Change {
    Write {
        offset: u64,
        data: Vec<u8>,
        hurry: Hurry,
        reply: WriteReply,
    },
    /// Of a path, not of a handle: then the version is kept open for it.
    Truncate {
        size: u64,
        ino: u64,
        by_path: bool,
        /// What else is asked for in the same call.
        more: attr::Change,
        hurry: Hurry,
        reply: AttrReply,
    },
    Zero {
        range: Zero,
        /// All that can fail has been done.
        begun: bool,
        hurry: Hurry,
        reply: UnitReply,
    },
    Extend {
        size: u64,
        hurry: Hurry,
        reply: UnitReply,
    },
}

/// Whether whoever asks for a change waits for leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hurry {
    Waits,
    /// O_NONBLOCK: EAGAIN instead.
    Never,
}

impl Hurry {
    pub fn of(nonblocking: bool) -> Self {
        if nonblocking { Self::Never } else { Self::Waits }
    }
}

/// Why a change cannot go on right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A block has to come from the device first.
    Load,
    /// Credit, room or memory has to be given back first.
    Room,
    /// A lease keeps these bytes as they are.
    Lease,
    /// Nothing is in the way, but there is much to copy: others get their turn at the lock.
    Again,
    Fail(Errno),
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Fail(errno)
    }
}

/// Where the bytes of a planned write go.
struct Copy {
    /// Memory, and which bytes of the write it takes.
    pieces: SmallVec<[(Span, usize, usize); 6]>,
    /// Recycled memory between the old end and this write.
    gap: Option<Span>,
    /// Blocks that are on the device alone, and nobody's until the copy is done.
    blank: Blank,
    /// What [`Hot::emptied`] was.
    emptied: u32,
    crc: Option<Running>,
}

type Blank = SmallVec<[usize; 6]>;

/// Blocks that are copied while the lock is held.
pub const BLOCKS_A_PASS: usize = 4;

impl Core {
    /// Largest file: what the lower tier can hold, of which a file is on one device.
    pub fn size_max(&self) -> u64 {
        if self.settings.memory_only {
            return self.pool.stats().budget;
        }
        self.settings.device_pages.iter().max().map_or(0, |pages| pages * 4096)
    }

    /// Something was given back that waiting changes may need. While the queue is being tried, whoever is tried is not in it,
    /// and may have looked before.
    pub fn call_waiters(&mut self) {
        self.wakes.admission |= self.admitting || !self.waiters.is_empty();
    }

    /// Who comes anew queues behind those who wait for room (rule R7).
    pub fn wait_in_turn(&self, queued: bool) -> Result<(), Stop> {
        let behind = self.admitting || self.waiters.iter().any(Waiter::is_for_room);
        if behind && !queued { Err(Stop::Room) } else { Ok(()) }
    }

    /// Plans a write. On success the file is pinned until [`Core::note_write`].
    fn plan_write(&mut self, id: NodeId, offset: u64, len: usize, queued: bool) -> Result<Copy, Stop> {
        let idx = self.by_id(id).ok_or(Errno::ESTALE)?;
        let end = offset.checked_add(len as u64).ok_or(Errno::EFBIG)?;
        // Before it takes anything: what waits for a lease holds nobody up.
        self.wait_for_leases(idx, self.blocks_written(idx, offset, end))?;
        self.wait_in_turn(queued)?;
        // What could not be stored is not stored any more: it would hold what may be dirty for as long as it is open.
        if self.poisoned || self.node(idx).has(LOST) {
            return Err(Stop::Fail(Errno::EIO));
        }
        if end > self.size_max() {
            return Err(Stop::Fail(if self.settings.memory_only { self.no_space() } else { Errno::EFBIG }));
        }
        self.lengthen_record(idx, end)?;
        self.one_at_a_time(idx)?;
        self.unseal(idx)?;
        self.copy_base(idx)?;
        self.extend_tail(idx, end)?;
        let size = self.node(idx).size;
        let new_size = size.max(end);
        let (first, last) = ((offset / BLOCK) as usize, ((end - 1) / BLOCK) as usize);
        let mut blank = Blank::new();
        for index in first..=last {
            let start = index as u64 * BLOCK;
            let covered_to = (start + block_len(size, index) as u64).max(start);
            let whole = offset <= start && end >= covered_to;
            if let Err(stop) = self.take_to_write(idx, index, block_len(new_size, index), whole, &mut blank) {
                self.leave_blank(idx, &blank);
                return Err(stop);
            }
        }
        let hot = self.hot_mut(idx);
        if (first..=last).any(|index| hot.span(index).is_none()) {
            // It was dropped for another.
            self.leave_blank(idx, &blank);
            return Err(Stop::Room);
        }
        let mut pieces = SmallVec::new();
        for index in first..=last {
            let start = index as u64 * BLOCK;
            let (from, to) = (offset.max(start), end.min(start + BLOCK));
            let Some(span) = hot.span(index) else { return Err(Stop::Room) };
            let span = span.slice((from - start) as usize..(to - start) as usize);
            pieces.push((span, (from - offset) as usize, (to - offset) as usize));
        }
        // When memory is short, some blocks of a file lie in its slab and others do not.
        let gap = match (&hot.slab, (first..=last).find(|&index| matches!(hot.blocks[index].mem, Mem::Slab)))
        {
            (Some(slab), Some(index)) => {
                let to = offset.max(index as u64 * BLOCK).min(slab.capacity_bytes());
                (hot.valid_to < to).then(|| slab.span(hot.valid_to as usize..to as usize))
            }
            _ => None,
        };
        let at_cursor =
            hot.crc_to < BLOCK as usize && offset == hot.crc_block as u64 * BLOCK + hot.crc_to as u64;
        let crc = if at_cursor {
            Some(Running { block: hot.crc_block, at: hot.crc_to, state: hot.crc, done: SmallVec::new() })
        } else if offset.is_multiple_of(BLOCK) {
            Some(Running { block: first, at: 0, state: 0, done: SmallVec::new() })
        } else {
            None
        };
        hot.pins += 1;
        hot.writing = true;
        let emptied = hot.emptied;
        if let Some(private) = hot.private_mut() {
            private.flushed = false;
        }
        Ok(Copy { pieces, gap, blank, emptied, crc: crc.filter(|_| !self.settings.memory_only) })
    }

    /// Gets what block `index` needs to be written to. What is overwritten as a whole need not be read back for that; but
    /// if the write comes to nothing it is still what it was, and not what is in the memory that was got for it. So it
    /// counts as on its way until the write is done, and is one of the `blank`.
    fn take_to_write(
        &mut self,
        idx: Idx,
        index: usize,
        len: usize,
        whole: bool,
        blank: &mut Blank,
    ) -> Result<(), Stop> {
        let away = |hot: &Hot| {
            hot.blocks.get(index).is_some_and(|block| block.mem.is_none() && !block.place.is_empty())
        };
        let away = self.hot(idx).is_some_and(away);
        self.take_block(idx, index, len, !whole)?;
        if away {
            let hot = self.hot_mut(idx);
            hot.blocks[index].io = BlockIo::Reading(hot.number());
            blank.push(index);
        }
        Ok(())
    }

    /// The write that these blocks were got for does not come, or not yet: they are on the device alone, as before.
    fn leave_blank(&mut self, idx: Idx, blank: &[usize]) {
        let hot = self.hot_mut(idx);
        for &index in blank {
            let block = &mut hot.blocks[index];
            (block.io, block.mem) = (BlockIo::Idle, Mem::None);
        }
    }

    /// The blocks that a write changes: if it goes beyond the end, also the last, which gets longer.
    fn blocks_written(&self, idx: Idx, offset: u64, end: u64) -> Range<usize> {
        let size = self.node(idx).size;
        let first = if end > size { offset.min(size) } else { offset };
        (first / BLOCK) as usize..end.div_ceil(BLOCK) as usize
    }

    /// The last block of the file grows when something is written behind it: it has to be stored again at its new
    /// length.
    pub fn extend_tail(&mut self, idx: Idx, end: u64) -> Result<(), Stop> {
        let size = self.node(idx).size;
        if size.is_multiple_of(BLOCK) || end <= size {
            return Ok(());
        }
        let tail = (size / BLOCK) as usize;
        if self.is_hole(idx, tail) {
            return Ok(());
        }
        let len = block_len(end, tail);
        self.take_block(idx, tail, len, true)?;
        let hot = self.hot_mut(idx);
        let old = (size - tail as u64 * BLOCK) as usize;
        if let Mem::Chunk(chunk) = &hot.blocks[tail].mem {
            chunk.span().zero(old..len.max(old));
        }
        hot.rewritten(tail..=tail);
        Ok(())
    }

    fn note_write(
        &mut self,
        id: NodeId,
        offset: u64,
        len: usize,
        blank: &[usize],
        emptied: u32,
        crc: Option<Running>,
    ) {
        self.call_waiters();
        let Some(idx) = self.by_id(id) else { return };
        let end = offset + len as u64;
        let hot = self.hot_mut(idx);
        hot.pins -= 1;
        hot.writing = false;
        let hinted = hot.hints > 0;
        self.wakes.hints |= hinted;
        let hot = self.hot_mut(idx);
        if hot.emptied != emptied {
            self.answer_reads(idx);
            self.wake_if_unwritten(idx);
            return self.close_if_done(idx);
        }
        for &index in blank {
            hot.blocks[index].io = BlockIo::Idle;
        }
        let node = self.node_mut(idx);
        node.size = node.size.max(end);
        node.mtime = now();
        node.ctime = node.mtime;
        let hot = self.hot_mut(idx);
        if let Some(private) = hot.private_mut() {
            private.supplied(offset..end);
        }
        let (first, last) = ((offset / BLOCK) as usize, ((end - 1) / BLOCK) as usize);
        hot.rewritten(first..=last);
        hot.blocks[first..=last].iter_mut().for_each(|block| block.bad = false);
        if let Some(index) = (first..=last).rev().find(|&index| matches!(hot.blocks[index].mem, Mem::Slab)) {
            hot.valid_to = hot.valid_to.max(end.min((index as u64 + 1) * BLOCK));
        }
        match crc {
            Some(crc) => {
                for (index, value) in &crc.done {
                    hot.blocks[*index].crc = Some(*value);
                }
                (hot.crc_block, hot.crc_to, hot.crc) = (crc.block, crc.at, crc.state);
            }
            None if (first..=last).contains(&hot.crc_block) => hot.crc_to = usize::MAX,
            None => {}
        }
        self.counters.written_bytes += len as u64;
        self.mark_slot(idx);
        if !blank.is_empty() {
            // Whoever wanted to read them meanwhile.
            self.answer_reads(idx);
        }
        self.wake_if_unwritten(idx);
        self.close_if_done(idx);
    }

    /// A version that lacks what its writer wanted in it is not whole: it is given up when it is closed (rule R1), unless
    /// the writer tries again and succeeds.
    fn write_failed(&mut self, id: NodeId, range: Range<u64>) {
        if let Some(private) =
            self.by_id(id).and_then(|idx| self.node_mut(idx).hot.as_mut()).and_then(|hot| hot.private_mut())
        {
            // Whoever closed it before had another descriptor.
            private.flushed = false;
            private.lacks = match private.lacks.take() {
                Some(lacks) => Some(lacks.start.min(range.start)..lacks.end.max(range.end)),
                None => Some(range),
            };
        }
    }

    /// The checksum of block `index`, if the running one has just come to its end.
    pub fn tail_crc(hot: &Hot, index: usize, len: usize) -> Option<u32> {
        if hot.crc_to == usize::MAX || hot.crc_to == 0 || hot.crc_block != index || hot.crc_to != len {
            return None;
        }
        // Checksums cover whole pages: the rest of the last one is zeros.
        let pad = len.next_multiple_of(4096) - len;
        Some(crc_of_state(if pad == 0 { hot.crc } else { crc_state(&[0; 4096][..pad], Some(hot.crc)) }))
    }
}

impl Core {
    /// Answers a change that has waited in vain.
    pub fn give_up_waiting(&mut self, waiter: Waiter, errno: Errno) {
        match waiter.change {
            Change::Truncate { by_path: true, .. } => self.end_truncate(waiter.id),
            Change::Zero { begun, .. } => self.end_zeroing(waiter.id, begun),
            _ => {}
        }
        self.reply(move || waiter.change.fail(errno));
    }
}

/// What came of trying.
enum Tried<T> {
    Done(Result<T, Errno>),
    Wait(Needs),
}

impl Store {
    /// Tries something that may take several passes.
    fn tried<T>(
        self: &Arc<Self>,
        hurry: Hurry,
        mut pass: impl FnMut(&mut Core) -> Result<T, Stop>,
    ) -> Tried<T> {
        loop {
            return match self.with(&mut pass) {
                Ok(value) => Tried::Done(Ok(value)),
                Err(Stop::Again) => continue,
                Err(Stop::Fail(errno)) => Tried::Done(Err(errno)),
                Err(Stop::Load) => Tried::Wait(Needs::Block),
                Err(Stop::Room) => Tried::Wait(Needs::Room),
                Err(Stop::Lease) if hurry == Hurry::Never => Tried::Done(Err(Errno::EAGAIN)),
                Err(Stop::Lease) => Tried::Wait(Needs::Lease),
            };
        }
    }

    pub fn write(self: &Arc<Self>, handle: &Handle, offset: u64, data: &[u8], reply: WriteReply) {
        self.write_with(handle, offset, data, Hurry::Waits, reply);
    }

    pub fn write_with(
        self: &Arc<Self>,
        handle: &Handle,
        offset: u64,
        data: &[u8],
        hurry: Hurry,
        reply: WriteReply,
    ) {
        if data.is_empty() {
            return reply(Ok(0));
        }
        let (id, end) = (handle.id, offset.saturating_add(data.len() as u64));
        match self.try_write(id, offset, data, hurry, false) {
            Tried::Done(result) => {
                if result.is_err() {
                    self.with(|core| core.write_failed(id, offset..end));
                }
                reply(result);
            }
            Tried::Wait(needs) => {
                let store = self.clone();
                let reply = Box::new(move |result: Result<u32, Errno>| {
                    if result.is_err() {
                        store.with(|core| core.write_failed(id, offset..end));
                    }
                    reply(result);
                });
                self.wait(id, Change::Write { offset, data: data.to_vec(), hurry, reply }, needs);
            }
        }
    }

    fn try_write(
        self: &Arc<Self>,
        id: NodeId,
        offset: u64,
        data: &[u8],
        hurry: Hurry,
        queued: bool,
    ) -> Tried<u32> {
        let mut plan = match self.tried(hurry, |core| core.plan_write(id, offset, data.len(), queued)) {
            Tried::Done(Ok(plan)) => plan,
            Tried::Done(Err(errno)) => return Tried::Done(Err(errno)),
            Tried::Wait(needs) => return Tried::Wait(needs),
        };
        if let Some(gap) = plan.gap {
            gap.zero(0..gap.len());
        }
        for (span, from, to) in &plan.pieces {
            span.copy_from(0, &data[*from..*to]);
        }
        if let Some(crc) = &mut plan.crc {
            crc.update(data);
        }
        self.with(|core| core.note_write(id, offset, data.len(), &plan.blank, plan.emptied, plan.crc));
        Tried::Done(Ok(data.len() as u32))
    }

    fn wait(self: &Arc<Self>, id: NodeId, change: Change, waits_for: Needs) {
        self.with(|core| {
            let deadline = Instant::now() + core.settings.request_deadline;
            let written = core.counters.writeback_bytes;
            core.waiters.push_back(Waiter { id, change, deadline, written, waits_for });
            core.counters.waits += 1;
            core.counters.lease_waits += u64::from(waits_for == Needs::Lease);
            core.wakes.writer = true;
            core.wakes.admission = true;
            core.wakes.timer = true;
        });
    }

    /// Truncation by path or by handle.
    pub fn truncate(
        self: &Arc<Self>,
        ino: u64,
        with_handle: bool,
        size: u64,
        more: attr::Change,
        caller: &Caller,
        reply: AttrReply,
    ) {
        self.truncate_with(ino, with_handle, size, more, Hurry::Waits, caller, reply);
    }

    pub fn truncate_with(
        self: &Arc<Self>,
        ino: u64,
        with_handle: bool,
        size: u64,
        more: attr::Change,
        hurry: Hurry,
        caller: &Caller,
        reply: AttrReply,
    ) {
        let checked = self.with(|core| {
            let id = core.check_truncate(ino, with_handle, caller)?;
            if caller.uid != 0 {
                core.drop_set_id(id.idx());
            }
            Ok(id)
        });
        let id = match checked {
            Ok(id) => id,
            Err(errno) => return reply(Err(errno)),
        };
        self.change(id, Change::Truncate { size, ino, by_path: !with_handle, more, hurry, reply });
    }

    pub fn fallocate(self: &Arc<Self>, handle: &Handle, offset: u64, len: u64, mode: i32, reply: UnitReply) {
        const KNOWN: i32 =
            libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        let zero = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        if mode & !KNOWN != 0 {
            return reply(Err(Errno::EOPNOTSUPP));
        }
        let Some(end) = offset.checked_add(len) else { return reply(Err(Errno::EFBIG)) };
        let hurry = Hurry::of(handle.nonblocking);
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        if zero {
            let range = Zero { offset, end, keep_size };
            return self.change(handle.id, Change::Zero { range, begun: false, hurry, reply });
        }
        // Room is set aside when bytes are written (every block is new on the device then), so all that
        // fallocate has to do is to grow the file, and to say now if it can never fit.
        let size = {
            let mut core = self.lock();
            if end > core.size_max() {
                let errno = core.no_space();
                drop(core);
                return reply(Err(errno));
            }
            core.by_id(handle.id).map_or(0, |idx| core.node(idx).size)
        };
        if keep_size || end <= size {
            return reply(Ok(()));
        }
        self.change(handle.id, Change::Extend { size: end, hurry, reply });
    }

    /// Tries a change and answers it. What has to wait comes back, and what for.
    fn attempt(self: &Arc<Self>, id: NodeId, change: Change, queued: bool) -> Option<(Change, Needs)> {
        match change {
            Change::Write { offset, data, hurry, reply } => {
                match self.try_write(id, offset, &data, hurry, queued) {
                    Tried::Done(result) => reply(result),
                    Tried::Wait(needs) => return Some((Change::Write { offset, data, hurry, reply }, needs)),
                }
            }
            Change::Truncate { size, ino, by_path, more, hurry, reply } => {
                match self.tried(hurry, |core| core.try_truncate(id, ino, size, by_path, hurry, &more)) {
                    Tried::Done(result) => reply(result),
                    Tried::Wait(needs) => {
                        return Some((Change::Truncate { size, ino, by_path, more, hurry, reply }, needs));
                    }
                }
            }
            Change::Extend { size, hurry, reply } => match self.tried(hurry, |core| core.extend(id, size)) {
                Tried::Done(result) => reply(result),
                Tried::Wait(needs) => return Some((Change::Extend { size, hurry, reply }, needs)),
            },
            Change::Zero { range, mut begun, hurry, reply } => {
                match self.tried(hurry, |core| core.zero(id, &range, &mut begun, queued)) {
                    Tried::Done(result) => {
                        self.with(|core| core.end_zeroing(id, begun));
                        reply(result);
                    }
                    Tried::Wait(needs) => return Some((Change::Zero { range, begun, hurry, reply }, needs)),
                }
            }
        }
        None
    }

    /// Makes a change now, or when its turn has come.
    fn change(self: &Arc<Self>, id: NodeId, change: Change) {
        if let Some((change, needs)) = self.attempt(id, change, false) {
            self.wait(id, change, needs);
        }
    }

    /// Tries the waiting changes again, in order. What waits for room cannot be passed.
    pub(crate) fn admit(self: &Arc<Self>) {
        let mut passed = Vec::new();
        // Who comes while the queue is being tried has to queue behind it.
        self.lock().admitting = true;
        loop {
            let Some(mut waiter) = self.lock().waiters.pop_front() else { break };
            let Some((change, needs)) = self.attempt(waiter.id, waiter.change, true) else { continue };
            (waiter.change, waiter.waits_for) = (change, needs);
            passed.push(waiter);
            if needs == Needs::Room {
                break;
            }
        }
        let mut core = self.lock();
        core.admitting = false;
        for waiter in passed.into_iter().rev() {
            core.waiters.push_front(waiter);
        }
        // Only now does the worker see who is waiting, and spill for them.
        core.wakes.writer |= core.waiters.iter().any(Waiter::is_for_room);
        self.settle(core);
    }
}

impl Change {
    /// Bytes that are held for it.
    pub fn held_bytes(&self) -> u64 {
        match self {
            Self::Write { data, .. } => data.len() as u64,
            Self::Truncate { .. } | Self::Zero { .. } | Self::Extend { .. } => 0,
        }
    }

    /// The answer to a change whose time is over.
    pub fn fail(self, errno: Errno) {
        match self {
            Self::Write { reply, .. } => reply(Err(errno)),
            Self::Truncate { reply, .. } => reply(Err::<Attr, _>(errno)),
            Self::Zero { reply, .. } | Self::Extend { reply, .. } => reply(Err(errno)),
        }
    }
}

/// The number of pages in a whole block fits its counters.
const _: () = assert!(BLOCK_PAGES < 1 << 16);
