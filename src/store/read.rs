//! Reads that reach the daemon: direct handles, and what the kernel asks for in passthrough mode's stead.

use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use super::core::{Core, Effect};
use super::hot::{BLOCK, Block, PendingRead, Via};
use super::node::{Idx, NodeId};
use super::open::Handle;
use super::{ReadReply, Store};
use crate::memory::Span;

/// Where the bytes of a read come from. Their file is pinned until they have been handed over.
struct Ready {
    id: NodeId,
    pieces: Vec<Piece>,
    len: usize,
    sealed: bool,
}

enum Piece {
    Bytes(Span),
    Zeros(usize),
}

enum Plan {
    Ready(Ready),
    Empty,
    Fail(Errno),
    /// Blocks that are not there yet.
    Lacks,
}

impl Core {
    /// The node whose bytes `idx` shows.
    pub fn shown(&self, idx: Idx) -> Idx {
        self.hot(idx).and_then(|hot| hot.base).and_then(|base| self.by_id(base)).unwrap_or(idx)
    }

    fn plan_read(&mut self, idx: Idx, offset: u64, len: usize) -> Plan {
        let size = self.node(idx).size;
        if offset >= size || len == 0 {
            return Plan::Empty;
        }
        let len = (len as u64).min(size - offset) as usize;
        let end = offset + len as u64;
        let (first, last) = ((offset / BLOCK) as usize, ((end - 1) / BLOCK) as usize);
        let mut pieces: Vec<Piece> = Vec::new();
        for index in first..=last {
            let start = index as u64 * BLOCK;
            let (from, to) =
                ((offset.max(start) - start) as usize, (end.min(start + BLOCK) - start) as usize);
            let Some(hot) = self.hot(idx) else { return Plan::Lacks };
            let block = hot.blocks.get(index);
            if block.is_some_and(|block| block.bad) {
                return Plan::Fail(Errno::EIO);
            }
            if !block.is_some_and(Block::resident) {
                if self.is_hole(idx, index) {
                    pieces.push(Piece::Zeros(to - from));
                    continue;
                }
                return Plan::Lacks;
            }
            let Some(span) = hot.span(index) else { return Plan::Fail(Errno::EIO) };
            let defined = hot.defined(index, span.len());
            let there = to.min(defined).max(from);
            if there > from {
                let bytes = span.slice(from..there);
                match pieces.last_mut() {
                    Some(Piece::Bytes(before)) if before.is_followed_by(&bytes) => {
                        *before = before.joined(&bytes)
                    }
                    _ => pieces.push(Piece::Bytes(bytes)),
                }
            }
            if to > there {
                pieces.push(Piece::Zeros(to - there));
            }
        }
        let id = self.id(idx);
        let hot = self.hot_mut(idx);
        for block in hot.blocks.iter_mut().take(last + 1).skip(first) {
            block.referenced = true;
        }
        hot.is_read();
        hot.pinned_to = if hot.pins == 0 { end } else { hot.pinned_to.max(end) };
        hot.pins += 1;
        let sealed = hot.sealed();
        if hot.in_l1_list {
            self.droppable.remove::<super::lists::Droppable>(&mut self.tree.nodes, idx);
        }
        Plan::Ready(Ready { id, pieces, len, sealed })
    }

    fn read(&mut self, handle: &Handle, offset: u64, len: usize, reply: ReadReply) {
        let Some(idx) = self.by_id(handle.id) else { return self.reply(move || reply(Err(Errno::ESTALE))) };
        let idx = self.shown(idx);
        match self.plan_read(idx, offset, len) {
            Plan::Ready(ready) => {
                self.counters.read_l1_bytes += ready.len as u64;
                self.effects.push(Effect::Serve(Box::new(Served { ready, reply })));
            }
            Plan::Empty => self.reply(move || reply(Ok(&[]))),
            Plan::Fail(errno) => self.reply(move || reply(Err(errno))),
            Plan::Lacks => {
                let size = self.node(idx).size;
                let len = (len as u64).min(size - offset) as usize;
                let last = ((offset + len as u64 - 1) / BLOCK) as usize;
                let range = (offset / BLOCK) as usize..last + 1;
                let reading = |core: &Self| {
                    core.hot(idx).is_some_and(|hot| {
                        range.clone().all(|index| {
                            hot.blocks.get(index).is_some_and(|b| !b.mem.is_none())
                                || core.is_hole(idx, index)
                        })
                    })
                };
                // Whoever bypasses caches does not fill ours, but joins a promotion that is on its way.
                let loading =
                    if handle.uncached { reading(self) } else { self.load_blocks(idx, range.clone()) };
                let deadline = Instant::now() + self.settings.request_deadline;
                let read = PendingRead { via: Via::L1, offset, len, reply, deadline };
                if !loading && !reading(self) {
                    return self.read_around(idx, read);
                }
                self.park(idx, read);
                self.answer_reads(idx);
            }
        }
    }

    /// Has a read wait, at most until its deadline.
    pub fn park(&mut self, idx: Idx, read: PendingRead) {
        let id = self.id(idx);
        let hot = self.hot_mut(idx);
        let first = hot.reads.iter().all(|other| other.deadline > read.deadline);
        let deadline = read.deadline;
        hot.reads.push(read);
        if first {
            self.deadlines.push((deadline, id));
        }
    }

    /// Hands over what has come to the reads that waited for it.
    pub fn answer_reads(&mut self, idx: Idx) {
        let Some(hot) = self.node_mut(idx).hot.as_mut() else { return };
        let mut lacking = Vec::new();
        for mut read in std::mem::take(&mut hot.reads) {
            if matches!(read.via, Via::Around(_)) {
                self.hot_mut(idx).reads.push(read);
                continue;
            }
            match self.plan_read(idx, read.offset, read.len) {
                Plan::Ready(ready) => {
                    self.effects.push(Effect::Serve(Box::new(Served { ready, reply: read.reply })));
                }
                Plan::Empty => self.reply(move || (read.reply)(Ok(&[]))),
                Plan::Fail(errno) => self.reply(move || (read.reply)(Err(errno))),
                Plan::Lacks => {
                    self.cut_read(idx, &mut read);
                    if read.via == Via::Room {
                        self.hot_mut(idx).reads.push(read);
                    } else {
                        lacking.push(read);
                    }
                }
            }
        }
        // Only now: memory to go around L1 is for whoever of those above has waited for it longest.
        for read in lacking {
            let last = ((read.offset + read.len as u64 - 1) / BLOCK) as usize;
            if self.load_blocks(idx, (read.offset / BLOCK) as usize..last + 1) {
                self.hot_mut(idx).reads.push(read);
            } else {
                self.read_around(idx, read);
            }
        }
    }

    /// A read that waits wants no more than its file has now: it may have been cut meanwhile. Whether there is anything
    /// left to read.
    pub fn cut_read(&self, idx: Idx, read: &mut PendingRead) -> bool {
        let left = self.node(idx).size.saturating_sub(read.offset);
        read.len = (read.len as u64).min(left) as usize;
        read.len > 0
    }

    fn unpin(&mut self, id: NodeId) {
        if let Some(idx) = self.by_id(id) {
            self.hot_mut(idx).pins -= 1;
            self.close_if_done(idx);
        }
    }

    /// The worker copies from a file under construction only while nobody writes to it; it may have found somebody.
    pub fn wake_if_unwritten(&mut self, idx: Idx) {
        if !self.hot_mut(idx).sealed() {
            self.wakes.writer |= !self.queue.is_empty() || !self.waiters.is_empty();
        }
    }
}

/// A read that can be answered, without the lock.
pub struct Served {
    ready: Ready,
    reply: ReadReply,
}

impl Store {
    pub fn read(self: &Arc<Self>, handle: &Handle, offset: u64, len: usize, reply: ReadReply) {
        self.with(|core| core.read(handle, offset, len, reply));
    }

    pub(crate) fn serve(self: &Arc<Self>, served: Served) {
        let Served { ready, reply } = served;
        match &ready.pieces[..] {
            [Piece::Bytes(span)] if ready.sealed => span.with_bytes(|bytes| reply(Ok(bytes))),
            pieces => {
                let mut out = vec![0; ready.len];
                let mut at = 0;
                for piece in pieces {
                    match piece {
                        Piece::Bytes(span) => {
                            span.copy_to(0, &mut out[at..at + span.len()]);
                            at += span.len();
                        }
                        Piece::Zeros(len) => at += len,
                    }
                }
                reply(Ok(&out));
            }
        }
        self.with(|core| core.unpin(ready.id));
    }
}
