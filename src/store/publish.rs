//! Publishing: a version under construction becomes visible and sealed (rules R1, R2).

use std::sync::Arc;

use nix::errno::Errno;

use super::core::Core;
use super::hot::{BLOCK, BlockIo, Doom, Hot, Mem, Phase, WriteBack, block_len, blocks_for};
use super::node::{DURABLE, Idx, Kind, LOST, META_DIRTY, MOVED, NAMED, NONE, NodeId};
use super::open::Handle;
use super::{Store, UnitReply};
use crate::writeback::queue::{Asker, Barrier, Work};

/// Old names are looked through, for those that are of no use any more, when there are so many, and each time they have
/// doubled.
const OLD_NAMES_MIN: usize = 64;

impl Core {
    /// The last writable handle of `idx` is gone.
    pub fn complete(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx) else { return };
        match &hot.phase {
            Phase::Private(private) if private.doom.is_some() => {
                let why = match private.doom {
                    Some(Doom::NotStored) => "a part of it could not be stored",
                    _ => "its writer was killed before it closed the file",
                };
                self.discard(idx, Some(why));
            }
            Phase::Private(private) if private.lacks.is_some() => {
                self.discard(idx, Some("a write to it failed, so it is not whole"));
            }
            Phase::Private(private) if !private.opened || private.parent == NONE => self.discard(idx, None),
            // The version of its name that was closed after it is there already (R1: the last complete one wins).
            Phase::Private(private) if private.is_outdated() => {
                self.discard(idx, None);
            }
            Phase::Private(private) => {
                let closed = private.closed;
                // If it could not be shown, it may be gone by now.
                if self.show(idx, closed) {
                    self.seal(idx);
                    self.answer_lookups(idx);
                }
            }
            Phase::Open if hot.base.is_some() => self.undo_copy_on_write(idx),
            Phase::Open => self.seal(idx),
            Phase::Sealed => {}
        }
    }

    /// Gives a private version up: nobody ever saw it. `why`, if its writer expects something else.
    fn discard(&mut self, idx: Idx, why: Option<&str>) {
        // Its maker may have found it just now, before its RELEASE came, and be about to open it. What it asks for before
        // that must not use up the one time that ESTALE is answered, and nobody else's kernel ever knew the name.
        let (parent, name) = self.home(idx);
        let instead = if parent == NONE { None } else { self.tree.child(parent, name) };
        self.remember_name(idx, instead, false);
        self.node_mut(idx).set(MOVED, true);
        let hot = self.hot_mut(idx);
        if let Some(private) = hot.private_mut() {
            let (parent, name) = (private.parent, std::mem::take(&mut private.name));
            private.parent = NONE;
            if parent != NONE {
                // An fsync of whoever still has it open must not say that it is kept.
                hot.failed |= why.is_some();
                self.tree.remove_private(idx, parent, &name);
                if let Some(why) = why {
                    self.counters.discarded += 1;
                    let path = self.tree.path_of(parent, &name);
                    self.event(format!("discarded {path}: {why}"));
                }
            }
        }
        self.answer_lookups(idx);
        self.reap(idx);
    }

    /// The directory `parent` is gone. Files that are being written there have lost the place where they would appear,
    /// and with it their claim to a name: the directory's position will be another's.
    pub fn discard_privates_in(&mut self, parent: Idx) {
        let all: Vec<Idx> = self.tree.privates_in(parent).map(|(idx, _)| idx).collect();
        for idx in all {
            let expected = self.hot(idx).and_then(|hot| hot.private()).is_some_and(|private| private.opened);
            self.discard(idx, expected.then_some("its directory was removed"));
        }
    }

    /// Makes a private version visible under its name, in place of what is there and of what was closed up to `closed`.
    /// Whether it could.
    fn show(&mut self, idx: Idx, closed: u64) -> bool {
        let Some(private) = self.hot(idx).and_then(|hot| hot.private()) else { return true };
        let (parent, name) = (private.parent, private.name.clone());
        let (by, replaces) = (private.uid, private.replaces);
        let target = self.tree.child(parent, &name);
        let refused = target.and_then(|target| {
            if self.node(target).kind() == Kind::Dir {
                return Some("a directory has that name");
            }
            let may = self.may_remove(parent, target, by) || replaces == Some(self.node(target).uid);
            (!may).then_some("a file of another user has that name")
        });
        if refused.is_some() {
            self.discard(idx, refused);
            return false;
        }
        self.tree.remove_private(idx, parent, &name);
        self.outdate(parent, &name, idx, closed, by);
        self.hot_mut(idx).phase = Phase::Open;
        let replaced = target.map(|target| self.node(target).seq);
        if let Some(target) = target {
            self.drop_name(target, Some(idx), true);
        }
        self.tree.link_after(idx, parent, &name, replaced);
        self.let_go(target);
        self.touch_dir(parent);
        self.touch(idx);
        self.counters.published_files += 1;
        self.counters.published_bytes += self.node(idx).size;
        if target.is_some() {
            self.invalidate(idx);
        }
        true
    }

    /// Versions of `name` that were closed by then, and whose RELEASE is still on its way, come too late, as far as the
    /// user `by` may have them removed.
    pub fn outdate(&mut self, parent: Idx, name: &[u8], but: Idx, closed: u64, by: u32) {
        for idx in self.tree.privates(parent, name).to_vec() {
            if idx != but
                && self.may_remove(parent, idx, by)
                && let Some(private) = self.hot_mut(idx).private_mut()
            {
                private.outdated = private.outdated.max(closed);
            }
        }
    }

    /// A private file that is grown beyond the slot limit, or fsynced, is visible from then on. Nothing that was closed
    /// before then takes its place, though its RELEASE may come later.
    pub fn show_early(&mut self, idx: Idx) {
        let waits = self.hot(idx).and_then(|hot| hot.private()).is_some_and(|private| {
            private.parent != NONE
                && private.doom.is_none()
                && private.lacks.is_none()
                && !self.node(idx).has(LOST)
        });
        if waits && self.show(idx, self.closes) {
            self.answer_lookups(idx);
        }
    }

    /// From here on the bytes never change.
    fn seal(&mut self, idx: Idx) {
        let size = self.node(idx).size;
        self.seal_slab(idx, size);
        let hot = self.hot_mut(idx);
        let blocks = blocks_for(size);
        // Behind the end is what was got for a write that failed.
        let beyond = hot.blocks.split_off(blocks.min(hot.blocks.len()));
        let device = self.node(idx).device;
        for block in beyond {
            self.uncharge(device, block.charge, block.reserved);
        }
        let hot = self.hot_mut(idx);
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
                let device = self.node(idx).device;
                self.uncharge(device, charge, reserved);
            }
        }
        self.stop_building(idx);
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
        } else if named || self.would_stand_in(idx) {
            self.store_soon(idx);
        }
        self.let_replaced_go(idx);
        self.tidy(idx);
    }

    /// What this one has replaced need not stand in for it any more. What has no record is of no use then.
    fn let_replaced_go(&mut self, idx: Idx) {
        let replaced = std::mem::take(&mut self.hot_mut(idx).supersedes);
        self.supersede(idx, replaced);
        let mut replaced = std::mem::take(&mut self.hot_mut(idx).supersedes);
        for old in replaced.iter().filter_map(|id| self.by_id(*id)).collect::<Vec<_>>() {
            self.tidy(old);
        }
        replaced.retain(|id| self.by_id(*id).is_some());
        self.hot_mut(idx).supersedes = replaced;
    }

    /// Makes a slab exactly as long as its file, so that the kernel may read from it.
    fn seal_slab(&mut self, idx: Idx, size: u64) {
        let blocks = blocks_for(size);
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
        // What nobody wrote is in the slab, as zeros, and stays a hole on the device: it takes neither credit nor room,
        // which nobody could wait for here.
        for block in hot.blocks.iter_mut().take(blocks).filter(|block| block.mem.is_none()) {
            block.mem = Mem::Slab;
        }
        drop(slab);
        if let Some(slab) = &hot.slab {
            let pages = u32::try_from(size.div_ceil(4096)).unwrap_or(u32::MAX);
            // Pages that somebody is reading stay: the file may have been cut since that read began.
            let unread = hot.pins == 0 || hot.pinned_to <= u64::from(pages) * 4096;
            let fits = slab.pages() == pages || (unread && !slab.is_lent() && slab.resize(pages));
            let cut = fits && slab.set_len(size).is_ok();
            if !cut {
                // The kernel would show its length as the file's.
                log::debug!("a slab of {} pages could not be cut to {size} bytes", slab.pages());
                let (start, end) = (size as usize, size.next_multiple_of(4096) as usize);
                slab.span(start..end).zero(0..end - start);
                hot.mixed = true;
            }
            slab.announce();
            self.counters.slabs_kept_whole += u64::from(!cut);
        }
    }

    /// Puts the file in the publish queue, unless it is there and has not been started.
    pub fn store_soon(&mut self, idx: Idx) -> u64 {
        let id = self.id(idx);
        if let WriteBack::Queued(seq) = self.hot_mut(idx).write_back {
            if self.queue.not_started(seq) {
                return seq;
            }
            // What waits for the entry that is being worked on waits for whoever takes the place of this one, too.
            self.inherit(idx, seq);
        }
        let seq = self.queue.push(Work::File(id));
        self.hot_mut(idx).write_back = WriteBack::Queued(seq);
        self.wakes.writer = true;
        self.wakes.committer = true;
        seq
    }

    /// What is under construction is no part of a drain, but the names it was given are.
    pub fn settle_names_of_unfinished(&mut self) {
        let building: Vec<Idx> = self.building.values().filter_map(|id| self.by_id(*id)).collect();
        for idx in building {
            if self.node(idx).has(NAMED) {
                self.stand_in(idx);
            } else {
                self.leave_old_name(idx);
            }
        }
    }

    /// A version that only its maker sees was renamed, and with it, to its maker, what had its old name, which everybody
    /// saw there: that is gone, though the version may never appear.
    fn leave_old_name(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx).filter(|hot| !hot.supersedes.is_empty()) else { return };
        let Some(private) = hot.private() else { return };
        let place = (private.parent, private.name.clone());
        let (here, elsewhere) = self.take_superseded(idx).into_iter().partition(|id| {
            self.tree.nodes.by_id(*id).is_some_and(|old| old.parent == place.0 && old.name == place.1)
        });
        self.hot_mut(idx).supersedes = here;
        self.remove_records(elsewhere);
    }

    /// The answer to an fsync of a version that is not stored any more, since another has its name: once all that has been
    /// published is durable. Until then a crash would bring back what was there before both.
    pub fn answer_with_successors(&mut self, reply: UnitReply) {
        self.queue.push(Work::Barrier(Barrier { asker: Asker::Fsync(reply), since: None }));
        self.queue.urgent = true;
        self.wakes.writer = true;
        self.wakes.committer = true;
    }

    fn fsync(&mut self, id: NodeId, reply: UnitReply) {
        let Some(idx) = self.by_id(id) else { return self.reply(move || reply(Ok(()))) };
        let lacks =
            self.hot(idx).and_then(|hot| hot.private()).is_some_and(|private| private.lacks.is_some());
        let lost = lacks || self.node(idx).has(LOST);
        if std::mem::take(&mut self.hot_mut(idx).failed) || lost || self.poisoned {
            return self.reply(move || reply(Err(Errno::EIO)));
        }
        self.show_early(idx);
        let Some(idx) = self.by_id(id) else { return self.reply(move || reply(Err(Errno::EIO))) };
        if std::mem::take(&mut self.hot_mut(idx).failed) {
            // It could not be shown.
            return self.reply(move || reply(Err(Errno::EIO)));
        }
        if self.settings.memory_only {
            return self.reply(move || reply(Ok(())));
        }
        if !self.node(idx).has(NAMED) {
            let replaced = self.hot(idx).is_some_and(|hot| hot.heir.is_some());
            if replaced && !self.is_durable(idx) {
                let reply = self.by_deadline(reply).into_reply();
                return self.answer_with_successors(reply);
            }
            return self.reply(move || reply(Ok(())));
        }
        let idx = self.stand_in(idx);
        if self.node(idx).has(LOST) {
            // What it shows could not be stored.
            return self.reply(move || reply(Err(Errno::EIO)));
        }
        if self.is_durable(idx) && !self.node(idx).has(META_DIRTY) {
            return self.reply(move || reply(Ok(())));
        }
        let seq = self.store_soon(idx);
        let reply = self.by_deadline(reply).into_reply();
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

    /// Whose record makes durable what `idx` shows: a copy-on-write version that nobody wrote to has no bytes of its
    /// own, so that is the original's, under the name and with the attributes that it goes by now.
    fn stand_in(&mut self, idx: Idx) -> Idx {
        let base = self.hot(idx).and_then(|hot| hot.base).and_then(|base| self.by_id(base));
        if let Some(base) = base {
            let node = self.node(idx);
            let attributes = (node.mode, node.uid, node.gid, node.atime, node.mtime, node.ctime);
            let xattrs = node.xattrs.clone();
            let node = self.node_mut(base);
            if (node.mode, node.uid, node.gid, node.atime, node.mtime, node.ctime) != attributes
                || node.xattrs != xattrs
            {
                (node.mode, node.uid, node.gid, node.atime, node.mtime, node.ctime) = attributes;
                node.xattrs = xattrs;
                self.changed(base);
            }
        }
        self.settle_names(idx);
        base.unwrap_or(idx)
    }

    /// What a crash brings back for `idx`, which is under construction, goes by the name that this has now: what it was
    /// made of, or else what had this name before, or else what it has replaced last. What else waits for it under a name
    /// that it has left has lost that name.
    pub fn settle_names(&mut self, idx: Idx) {
        if self.hot(idx).is_some_and(|hot| !hot.sealed()) {
            self.take_along(idx);
        }
    }

    /// The same for one that is complete: it keeps for its original the old name until it is stored itself, but only as
    /// long as nobody else takes that.
    pub fn note_old_name(&mut self, idx: Idx) {
        if !self.hot(idx).is_some_and(Hot::sealed) || !self.is_origin_durable(idx) {
            return;
        }
        let Some(origin) = self.hot(idx).and_then(|hot| hot.origin).and_then(|id| self.by_id(id)) else {
            return;
        };
        let node = self.node(origin);
        let place = (NodeId::new(node.parent, node.parent_generation), node.name.clone());
        let id = self.id(idx);
        self.old_names.insert(place, id);
        if self.old_names.len() >= OLD_NAMES_MIN && self.old_names.len().is_power_of_two() {
            let mut names = std::mem::take(&mut self.old_names);
            names.retain(|_, id| self.by_id(*id).is_some_and(|idx| !self.node(idx).has(DURABLE)));
            self.old_names = names;
        }
    }

    /// Something is about to have this name whose record waits for no bytes: another record under it would be taken for
    /// its older version.
    pub fn make_way(&mut self, parent: Idx, name: &[u8]) {
        if self.old_names.is_empty() {
            return;
        }
        let file = self.old_names.remove(&(self.id(parent), name.into()));
        if let Some(idx) = file.and_then(|id| self.by_id(id))
            && !self.node(idx).has(DURABLE)
            && self.is_origin_durable(idx)
        {
            self.take_along(idx);
        }
    }

    fn take_along(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx).filter(|hot| !hot.supersedes.is_empty()) else { return };
        let node = self.node(idx);
        let is_here = |id: &NodeId| self.tree.nodes.by_id(*id).is_some_and(|old| old.is_called_like(node));
        let (here, elsewhere): (Vec<NodeId>, Vec<NodeId>) = hot.supersedes.iter().partition(|id| is_here(id));
        if elsewhere.is_empty() {
            return;
        }
        let origin = hot.origin.filter(|id| elsewhere.contains(id));
        let last = elsewhere.last().copied().filter(|_| here.is_empty());
        let Some(origin) = origin.or(last).and_then(|id| self.by_id(id)) else {
            self.hot_mut(idx).supersedes = here;
            return self.remove_records(elsewhere);
        };
        let (seq, parent, generation) = (node.seq, node.parent, node.parent_generation);
        let name = node.name.clone();
        let node = self.node_mut(origin);
        // The place in the directory, too: among the others there, its own may be another's.
        (node.seq, node.parent, node.parent_generation, node.name) = (seq, parent, generation, name);
        // Where a commit has to be written in parts, a crash may leave both records.
        for idx in self.tree.stay_newer(idx) {
            self.changed(idx);
        }
        let origin_id = self.id(origin);
        self.hot_mut(idx).supersedes = Vec::new();
        self.supersede(idx, vec![origin_id]);
        let others: Vec<NodeId> =
            here.into_iter().chain(elsewhere).filter(|other| *other != origin_id).collect();
        if self.node(origin).has(DURABLE) {
            self.changed(origin);
            self.remove_records(others);
        } else {
            self.supersede(origin, others);
            self.note_old_name(origin);
        }
    }

    /// Whether a file under construction has bytes that could go to the device early.
    pub fn spillable(&self, idx: Idx) -> bool {
        self.hot(idx).is_some_and(|hot| {
            !hot.sealed()
                && !hot.writing
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
                Some(hot) if hot.blocks.get(index).is_some_and(|block| !block.mem.is_none()) => {
                    !self.is_hole_in_slab(target, index)
                }
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

    /// What a write with O_DSYNC asks for. A private file stays as it is: nobody could find it after a crash anyway.
    pub fn fsync_visible(self: &Arc<Self>, handle: &Handle, reply: UnitReply) {
        self.with(|core| {
            let private =
                core.by_id(handle.id).and_then(|idx| core.hot(idx)?.private().map(|_| ())).is_some();
            if private {
                return core.reply(move || reply(Ok(())));
            }
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
