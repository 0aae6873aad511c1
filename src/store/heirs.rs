//! What has lost its name while a crash may still bring it back: versions that stand in for those that replaced them
//! (rules R1, R5).
//!
//! A version that takes a name is recorded when it is stored, and the records of what it replaced go with the same commit. Until
//! then these are its `supersedes`, and it is their `heir`. One that was published, and is on its way to the device when the
//! name is taken by a version under construction, stands in: it is stored and recorded all the same, since it is
//! what a drain was promised.

use super::core::Core;
use super::hot::{Phase, WriteBack};
use super::node::{DURABLE, Idx, LOST, NAMED, Node, NodeId};

/// A directory's list of versions that replace others is looked through when it has this length, and twice that, and
/// so on: so it stays as long as what is on its way.
const REPLACING_MIN: usize = 32;

impl Core {
    /// What has lost its name to a successor, which has it now.
    pub fn let_go(&mut self, old: Option<Idx>) {
        if let Some(idx) = old {
            self.reap(idx);
        }
    }

    /// `heir` shall be durable before a drain is answered that came after entry `seq` of the publish queue.
    pub fn inherit(&mut self, heir: Idx, seq: u64) {
        if !self.settings.memory_only {
            let id = self.id(heir);
            self.heirs.entry(id).and_modify(|first| *first = seq.min(*first)).or_insert(seq);
        }
    }

    /// Queues what a drain that came as entry `since` has to wait for still. Whether there is anything.
    pub fn store_heirs(&mut self, since: u64) -> bool {
        let due: Vec<_> = self.heirs.iter().filter(|(_, seq)| **seq < since).map(|(id, _)| *id).collect();
        let mut any = false;
        for id in due {
            let Some(idx) = self.by_id(id).filter(|&idx| !self.node(idx).has(LOST)) else {
                self.heirs.remove(&id);
                continue;
            };
            if !self.node(idx).has(NAMED) {
                // Nobody sees it yet.
                continue;
            }
            if !self.hot_mut(idx).sealed() {
                if self.is_stood_in_for(idx) {
                    any = true;
                    continue;
                }
                if self.hot_mut(idx).base.is_some() {
                    // What it shows could not be stored.
                    continue;
                }
                if self.is_backed(idx) {
                    // That has the name until this one is complete, if not before then with the next commit.
                    self.heirs.remove(&id);
                    continue;
                }
                // It is written in place: there is nothing else that would hold what was published.
            }
            if self.hot_mut(idx).write_back == WriteBack::None {
                self.store_soon(idx);
            }
            any = true;
        }
        any
    }

    /// Whether `idx`, which has lost its name, is what a crash brings back all the same: whole, as it was published,
    /// while the version that took the name is under construction (rule R1).
    pub fn stands_in(&self, idx: Idx) -> bool {
        self.in_write_back(idx) && self.would_stand_in(idx)
    }

    /// The same if it is on its way to the device.
    pub fn would_stand_in(&self, idx: Idx) -> bool {
        let Some(hot) = self.hot(idx).filter(|hot| hot.superseded) else { return false };
        let heir = hot.heir.and_then(|heir| self.tree.nodes.by_id(heir));
        heir.is_some_and(|heir| {
            let built = heir.hot.as_ref().is_some_and(|hot| matches!(hot.phase, Phase::Open));
            built && heir.has(NAMED) && !self.node(idx).has(LOST)
        })
    }

    /// The version that took the name of `idx` is under construction, and what a drain waits for on its account may be done
    /// with this one, which is stored now or lost.
    pub fn has_stood_in(&mut self, idx: Idx) {
        let heir = self.hot(idx).filter(|hot| hot.superseded).and_then(|hot| hot.heir);
        let Some(heir) = heir.and_then(|id| self.by_id(id)) else { return };
        if !self.hot_mut(heir).sealed() && !self.is_stood_in_for(heir) {
            self.heirs.remove(&self.id(heir));
        }
    }

    /// Whether something that this version under construction has replaced is on its way to the device in its place.
    fn is_stood_in_for(&self, idx: Idx) -> bool {
        let replaced = self.hot(idx).map_or(&[][..], |hot| hot.supersedes.as_slice());
        replaced.iter().filter_map(|id| self.by_id(*id)).any(|old| self.stands_in(old))
    }

    /// Whether the version `old`, whose name `new` has, gets a record: it is on its way to the device, and stored in the
    /// place of `new` while that is not complete.
    pub(super) fn may_stand_in(&self, old: Idx, new: Idx) -> bool {
        let built = self.hot(new).is_some_and(|hot| matches!(hot.phase, Phase::Open));
        built && self.in_write_back(old)
    }

    pub fn take_superseded(&mut self, idx: Idx) -> Vec<NodeId> {
        self.node_mut(idx).hot.as_mut().map_or_else(Vec::new, |hot| std::mem::take(&mut hot.supersedes))
    }

    /// Whether a crash brings back something else, whole, under the name of this version under construction.
    fn is_backed(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        let replaced = self.hot(idx).map_or(&[][..], |hot| hot.supersedes.as_slice());
        replaced
            .iter()
            .filter_map(|id| self.tree.nodes.by_id(*id))
            .any(|old| old.has(DURABLE) && !old.has(LOST) && old.is_called_like(node))
    }

    /// Whether a crash brings back what this version was made of by copy-on-write.
    pub fn is_origin_durable(&self, idx: Idx) -> bool {
        self.hot(idx).is_some_and(|hot| {
            let origin = hot.origin.filter(|id| hot.supersedes.contains(id));
            origin.and_then(|id| self.by_id(id)).is_some_and(|origin| self.node(origin).has(DURABLE))
        })
    }

    /// Has the records of `ids` stand until that of `new` is there. What one of them was to remove goes with its own
    /// record, if it gets one, and else with that of `new`.
    pub fn supersede(&mut self, new: Idx, ids: Vec<NodeId>) {
        let new_id = self.id(new);
        let mut ids = ids;
        let mut at = 0;
        while let Some(id) = ids.get(at) {
            at += 1;
            let Some(idx) = self.by_id(*id) else { continue };
            if !self.may_stand_in(idx, new) {
                let made_of = self.hot(idx).and_then(|hot| hot.origin);
                let theirs = self.take_superseded(idx);
                let hot = self.hot_mut(new);
                if hot.origin == Some(*id) && made_of.is_some_and(|id| theirs.contains(&id)) {
                    hot.origin = made_of;
                    let old = *id;
                    self.old_names.values_mut().filter(|file| **file == old).for_each(|file| *file = new_id);
                }
                ids.extend(theirs);
            }
            if let Some(hot) = &mut self.node_mut(idx).hot {
                (hot.heir, hot.superseded) = (Some(new_id), true);
            }
            let parent = self.node(idx).parent;
            let Some(dir) = self.tree.nodes.get_mut(parent).and_then(Node::dir_mut) else { continue };
            if dir.replacing.last() == Some(&new_id) {
                continue;
            }
            dir.replacing.push(new_id);
            if dir.replacing.len() >= REPLACING_MIN && dir.replacing.len().is_power_of_two() {
                let mut list = std::mem::take(&mut dir.replacing);
                let waits = |id: &NodeId| {
                    let hot = self.tree.nodes.by_id(*id).and_then(|node| node.hot.as_ref());
                    *id == new_id || hot.is_some_and(|hot| !hot.supersedes.is_empty())
                };
                list.retain(waits);
                if let Some(dir) = self.tree.nodes.get_mut(parent).and_then(Node::dir_mut) {
                    dir.replacing = list;
                }
            }
        }
        self.hot_mut(new).supersedes.extend(ids);
    }

    /// What has been replaced in directory `idx` and still has a record. A directory that goes away takes it along:
    /// its successor may have got a name elsewhere, and a record without its directory would be that of another
    /// directory once the place is used again.
    pub(super) fn take_replaced(&mut self, idx: Idx) -> Vec<NodeId> {
        let Some(dir) = self.node_mut(idx).dir_mut() else { return Vec::new() };
        let mut taken = Vec::new();
        for id in std::mem::take(&mut dir.replacing) {
            let Some(new) = self.by_id(id) else { continue };
            let Some(hot) = &mut self.node_mut(new).hot else { continue };
            let (here, elsewhere): (Vec<_>, Vec<_>) = std::mem::take(&mut hot.supersedes)
                .into_iter()
                .partition(|old| self.tree.nodes.by_id(*old).is_some_and(|node| node.parent == idx));
            self.hot_mut(new).supersedes = elsewhere;
            taken.extend(here);
        }
        taken
    }

    /// Has the records of `ids` removed with the next commit.
    pub fn remove_records(&mut self, ids: Vec<NodeId>) {
        if ids.is_empty() {
            return;
        }
        let mut ids = ids;
        while let Some(id) = ids.pop() {
            if let Some(idx) = self.by_id(id) {
                ids.extend(self.take_superseded(idx));
            }
            // What is on its way must not be recorded after its record was removed.
            if let Some(idx) = self.by_id(id)
                && let Some(WriteBack::Queued(seq)) = self.hot(idx).map(|hot| hot.write_back)
            {
                self.forget_entry(seq, id);
            }
            if let Some(hot) = self.by_id(id).and_then(|idx| self.node_mut(idx).hot.as_mut()) {
                hot.superseded = false;
            }
            // What is still open keeps its place after the record is gone, so it does not count as leaving.
            let (device, pages) = match self.by_id(id) {
                Some(idx)
                    if self.node(idx).has(DURABLE) && self.hot(idx).is_none_or(|hot| !hot.is_held()) =>
                {
                    (self.node(idx).device, self.device_pages(idx))
                }
                _ => (0, 0),
            };
            if pages > 0 {
                self.space.on(device).leaving += pages;
            }
            if let Some(idx) = self.by_id(id) {
                self.end_record(idx);
            }
            self.queue.removed.push((id, device, pages));
        }
        self.wakes.committer = true;
    }
}
