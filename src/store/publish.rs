//! Publishing: a version under construction becomes visible and sealed (rules R1, R2).

use std::sync::Arc;

use nix::errno::Errno;

use super::core::Core;
use super::hot::{BLOCK, BlockIo, Mem, Phase, WriteBack, block_len, blocks_for};
use super::node::{Idx, Kind, MOVED, NAMED, NONE, NodeId};
use super::open::Handle;
use super::{Store, UnitReply};
use crate::writeback::queue::Work;

impl Core {
    /// The last writable handle of `idx` is gone.
    pub fn complete(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx) else { return };
        match &hot.phase {
            Phase::Private(private) if private.killed || !private.opened || private.parent == NONE => {
                self.discard(idx);
            }
            // The version of its name that was closed after it is there already (R1: the last complete one wins).
            Phase::Private(private) if private.closed > 0 && private.closed <= private.outdated => {
                self.discard(idx);
            }
            Phase::Private(_) => {
                if self.show(idx) {
                    self.seal(idx);
                }
                self.answer_lookups(idx);
            }
            Phase::Open if hot.base.is_some() => self.undo_copy_on_write(idx),
            Phase::Open => self.seal(idx),
            Phase::Sealed => {}
        }
    }

    /// Gives a private version up: nobody ever saw it.
    fn discard(&mut self, idx: Idx) {
        // Its maker may have found it just now, before its RELEASE came, and be about to open it.
        self.remember_name(idx);
        self.node_mut(idx).set(MOVED, true);
        let hot = self.hot_mut(idx);
        if let Some(private) = hot.private_mut() {
            let (parent, name) = (private.parent, std::mem::take(&mut private.name));
            let killed = private.killed;
            private.parent = NONE;
            if parent != NONE {
                self.tree.remove_private(idx, parent, &name);
                if killed {
                    self.counters.discarded += 1;
                    let path = self.tree.path(parent);
                    self.event(format!(
                        "discarded {path}/{}: its writer was killed before it closed the file",
                        String::from_utf8_lossy(&name)
                    ));
                }
            }
        }
        self.answer_lookups(idx);
        self.reap(idx);
    }

    /// Makes a private version visible under its name, in place of what is there. Whether it could.
    fn show(&mut self, idx: Idx) -> bool {
        let hot = self.hot_mut(idx);
        let Some(private) = hot.private_mut() else { return true };
        let (parent, name, closed) = (private.parent, std::mem::take(&mut private.name), private.closed);
        private.parent = NONE;
        self.tree.remove_private(idx, parent, &name);
        self.outdate(parent, &name, idx, closed);
        let alive =
            self.tree.nodes.get(parent).is_some_and(|node| {
                node.kind() == Kind::Dir && (parent == super::node::ROOT || node.has(NAMED))
            });
        let target = self.tree.child(parent, &name);
        let blocked = target.is_some_and(|target| self.node(target).kind() == Kind::Dir);
        if !alive || blocked {
            let why = if alive { "a directory has that name" } else { "its directory is gone" };
            let path = self.tree.path(parent);
            self.event(format!("discarded {path}/{}: {why}", String::from_utf8_lossy(&name)));
            self.counters.discarded += 1;
            self.reap(idx);
            return false;
        }
        self.hot_mut(idx).phase = Phase::Open;
        if let Some(target) = target {
            self.drop_name(target, Some(idx), true);
        }
        self.tree.link(idx, parent, &name);
        self.touch_dir(parent);
        self.touch(idx);
        self.counters.published_files += 1;
        self.counters.published_bytes += self.node(idx).size;
        if target.is_some() {
            self.invalidate(idx);
        }
        true
    }

    /// Versions of `name` that were closed by then, and whose RELEASE is still on its way, come too late.
    pub fn outdate(&mut self, parent: Idx, name: &[u8], but: Idx, closed: u64) {
        for idx in self.tree.privates(parent, name).to_vec() {
            if idx != but
                && let Some(private) = self.hot_mut(idx).private_mut()
            {
                private.outdated = private.outdated.max(closed);
            }
        }
    }

    /// A private file that is grown beyond the slot limit, or fsynced, is visible from then on.
    pub fn show_early(&mut self, idx: Idx) {
        let waits =
            self.hot(idx).is_some_and(|hot| hot.private().is_some_and(|private| private.parent != NONE));
        if waits && self.show(idx) {
            self.answer_lookups(idx);
        }
    }

    /// From here on the bytes never change.
    fn seal(&mut self, idx: Idx) {
        let size = self.node(idx).size;
        self.seal_slab(idx, size);
        let hot = self.hot_mut(idx);
        let blocks = blocks_for(size);
        hot.blocks.truncate(blocks);
        for index in 0..hot.blocks.len() {
            let hot = self.hot_mut(idx);
            let tail = Self::tail_crc(hot, index, block_len(size, index));
            let block = &mut hot.blocks[index];
            if block.crc.is_none() {
                block.crc = tail;
            }
            if !block.dirty {
                // Credit for a write that never came.
                let (charge, reserved) =
                    (std::mem::take(&mut block.charge), std::mem::take(&mut block.reserved));
                self.uncharge(charge, reserved);
            }
        }
        let hot = self.hot_mut(idx);
        hot.phase = Phase::Sealed;
        hot.crc_to = usize::MAX;
        let (parent, named) = (self.node(idx).parent, self.node(idx).has(NAMED));
        if let Some(dir) = self.tree.nodes.get_mut(parent).and_then(|node| node.dir_mut()) {
            dir.same_size = if dir.last_size == size { dir.same_size.saturating_add(1) } else { 1 };
            dir.last_size = size;
        }
        if self.settings.memory_only {
            let hot = self.hot_mut(idx);
            hot.blocks.iter_mut().for_each(|block| block.dirty = false);
            hot.supersedes.clear();
        } else if named {
            self.store_soon(idx);
        }
        self.tidy(idx);
    }

    /// Makes a slab exactly as long as its file, so that the kernel may read from it.
    fn seal_slab(&mut self, idx: Idx, size: u64) {
        let blocks = blocks_for(size);
        let memory_only = self.settings.memory_only;
        let hot = self.hot_mut(idx);
        let Some(slab) = hot.slab.clone() else { return };
        let covered = hot
            .blocks
            .iter()
            .all(|block| matches!(block.mem, Mem::Slab) || (block.mem.is_none() && block.place.is_empty()));
        if size == 0 {
            hot.slab = None;
            return;
        }
        hot.mixed = !covered || slab.capacity_bytes() < size;
        if hot.mixed {
            // What is in the slab is read as it is from now on.
            return hot.define_to(slab.capacity_bytes().min(size.next_multiple_of(4096)));
        }
        hot.define_to(size);
        hot.blocks.resize_with(blocks.max(hot.blocks.len()), Default::default);
        let mut fresh = Vec::new();
        for (index, block) in hot.blocks.iter_mut().enumerate().take(blocks) {
            if block.mem.is_none() {
                block.mem = Mem::Slab;
                block.dirty = true;
                fresh.push(index);
            }
        }
        drop(slab);
        if let Some(slab) = &hot.slab {
            let pages = u32::try_from(size.div_ceil(4096)).unwrap_or(u32::MAX);
            let fits = slab.pages() == pages || (!slab.is_lent() && slab.resize(pages));
            if !fits || slab.set_len(size).is_err() {
                // The kernel would show its length as the file's.
                log::warn!("a slab of {} pages could not be cut to {size} bytes", slab.pages());
                let (start, end) = (size as usize, size.next_multiple_of(4096) as usize);
                slab.span(start..end).zero(0..end - start);
                hot.mixed = true;
            }
            slab.announce();
        }
        if !memory_only {
            // Zeros that nobody wrote: a hole in the middle of the file. They take room like any other bytes.
            for index in fresh {
                let pages = (block_len(size, index) as u32).div_ceil(4096);
                self.dirty_pages += u64::from(pages);
                self.space.reserved += u64::from(pages);
                let block = &mut self.hot_mut(idx).blocks[index];
                block.charge += pages;
                block.reserved += pages;
            }
        }
    }

    /// Puts the file in the publish queue, unless it is there and has not been started.
    pub fn store_soon(&mut self, idx: Idx) -> u64 {
        let id = self.id(idx);
        if let WriteBack::Queued(seq) = self.hot_mut(idx).write_back
            && self.queue.not_started(seq)
        {
            return seq;
        }
        let seq = self.queue.push(Work::File(id));
        self.hot_mut(idx).write_back = WriteBack::Queued(seq);
        self.wakes.writer = true;
        self.wakes.committer = true;
        seq
    }

    /// Replies when everything accepted so far is durable.
    pub fn barrier(&mut self, reply: UnitReply) {
        if self.settings.memory_only {
            return self.reply(move || reply(Ok(())));
        }
        if self.poisoned {
            return self.reply(move || reply(Err(Errno::EIO)));
        }
        self.queue.push(Work::Barrier(Some(reply)));
        self.queue.urgent = true;
        self.wakes.writer = true;
        self.wakes.committer = true;
    }

    fn fsync(&mut self, id: NodeId, reply: UnitReply) {
        let Some(idx) = self.by_id(id) else { return self.reply(move || reply(Ok(()))) };
        self.show_early(idx);
        let Some(idx) = self.by_id(id) else { return self.reply(move || reply(Err(Errno::EIO))) };
        let hot = self.hot_mut(idx);
        if std::mem::take(&mut hot.failed) || self.poisoned {
            return self.reply(move || reply(Err(Errno::EIO)));
        }
        let settled = self.settings.memory_only || !self.node(idx).has(NAMED);
        if settled || (self.is_durable(idx) && !self.node(idx).has(super::node::META_DIRTY)) {
            return self.reply(move || reply(Ok(())));
        }
        let seq = self.store_soon(idx);
        let size = self.node(idx).size;
        let hot = self.hot_mut(idx);
        if blocks_for(size)
            .checked_sub(1)
            .and_then(|last| hot.blocks.get(last))
            .is_none_or(|last| !last.dirty)
        {
            // It ends in a hole, which nothing stores.
            hot.size_kept = size;
        }
        hot.fsyncs.push((seq, reply));
        self.queue.urgent = true;
        self.wakes.committer = true;
        self.wakes.writer = true;
    }

    /// Whether a file under construction has bytes that could go to the device early.
    pub fn spillable(&self, idx: Idx) -> bool {
        self.hot(idx).is_some_and(|hot| {
            !hot.sealed()
                && hot.pins == 0
                && hot
                    .blocks
                    .iter()
                    .any(|block| block.dirty && block.io == BlockIo::Idle && !block.mem.is_none())
        })
    }

    /// SEEK_DATA and SEEK_HOLE, in whole blocks.
    fn seek(&self, idx: Idx, offset: u64, data: bool) -> Result<u64, Errno> {
        let size = self.node(idx).size;
        if offset >= size {
            return Err(Errno::ENXIO);
        }
        let target = self.hot(idx).and_then(|hot| hot.base).and_then(|base| self.by_id(base)).unwrap_or(idx);
        let has_data = |index: usize| {
            let node = self.node(target);
            match &node.hot {
                Some(hot) if hot.blocks.get(index).is_some_and(|block| !block.mem.is_none()) => true,
                Some(hot) if hot.slab.is_some() && !hot.sealed() && (index as u64 * BLOCK) < hot.valid_to => {
                    true
                }
                _ => self.has_place(target, index),
            }
        };
        let first = (offset / BLOCK) as usize;
        for index in first..blocks_for(size) {
            if has_data(index) == data {
                return Ok((index as u64 * BLOCK).max(offset));
            }
        }
        if data { Err(Errno::ENXIO) } else { Ok(size) }
    }
}

impl Store {
    /// Replies when what the file holds now is durable, or cannot be.
    pub fn fsync(self: &Arc<Self>, handle: &Handle, reply: UnitReply) {
        self.with(|core| {
            core.fsync(handle.id, reply);
        });
    }

    pub fn seek(self: &Arc<Self>, handle: &Handle, offset: i64, whence: i32) -> Result<i64, Errno> {
        let core = self.lock();
        let idx = core.by_id(handle.id).ok_or(Errno::ESTALE)?;
        let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        let data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Err(Errno::EINVAL),
        };
        core.seek(idx, offset, data).map(|at| at as i64)
    }
}
