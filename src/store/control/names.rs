//! Interned names: a number for a path, so that an ioctl carries hundreds of ranges.
//!
//! A name is a path and stays one: what it leads to is found anew for every request, so a file that is replaced is found
//! as it is now. To make that cheap a name remembers its directory for as long as nothing has changed about any
//! directory, and the file that was there last, which is compared and not trusted.

use std::collections::BTreeMap;
use std::sync::Arc;

use nix::errno::Errno;

use super::session::{Session, Who};
use super::{Miss, NAMES_MAX, Waits};
use crate::abi::{Base, NameList, Slot};
use crate::store::core::Core;
use crate::store::node::{Idx, Kind, NAMED, Node, NodeId, ROOT};

/// Names that were interned together: they follow each other from `first` on.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Batch {
    pub first: u32,
    pub count: u32,
    pub generation: u32,
}

struct Name {
    generation: u32,
    /// The path of the directory that it was named from.
    base: Arc<[u8]>,
    path: Box<[u8]>,
    found: Option<Found>,
}

/// What a name led to when it was last asked for.
#[derive(Clone, Copy)]
struct Found {
    /// What `Tree::directories` was: as long as it is that, the directory is this one, and may be searched or not.
    directories: u64,
    parent: Result<Idx, Errno>,
    node: Option<NodeId>,
}

/// The names of one session.
#[derive(Default)]
pub struct Slots {
    all: Vec<Option<Name>>,
    /// Runs of free places: where they begin, and their length.
    free: BTreeMap<u32, u32>,
    count: u32,
    generation: u32,
}

impl Slots {
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Gives all names of a list their numbers.
    ///
    /// # Errors
    /// ESTALE: the base has been forgotten. ENOSPC: more names than a session may have. EOVERFLOW: four thousand million
    /// batches have been interned; a new session begins anew.
    pub fn intern(&mut self, list: &NameList) -> Result<Batch, Errno> {
        let base: Arc<[u8]> = match list.base {
            Base::Root => Arc::default(),
            Base::Name(slot) => self.get(slot).ok_or(Errno::ESTALE)?.whole().into(),
        };
        let count = u32::try_from(list.names.len()).map_err(|_| Errno::ENOSPC)?;
        if count > NAMES_MAX - self.count {
            return Err(Errno::ENOSPC);
        }
        let generation = self.generation.checked_add(1).ok_or(Errno::EOVERFLOW)?;
        self.generation = generation;
        let first = self.take_run(count);
        for (at, path) in (first as usize..).zip(&list.names) {
            self.all[at] = Some(Name { generation, base: base.clone(), path: path.clone(), found: None });
        }
        self.count += count;
        Ok(Batch { first, count, generation })
    }

    /// Forgets names. Those that are not there any more are no error. How many there were.
    pub fn forget(&mut self, slots: &[Slot]) -> u32 {
        let mut forgotten = 0;
        for slot in slots {
            if self.get(*slot).is_some() {
                self.all[slot.id as usize] = None;
                self.give_back(slot.id);
                forgotten += 1;
            }
        }
        self.count -= forgotten;
        if self.count == 0 {
            // A session that begins anew does not keep what it had at its largest.
            self.all = Vec::new();
            self.free = BTreeMap::new();
        }
        forgotten
    }

    /// The first run of free places that is long enough, or one at the end.
    fn take_run(&mut self, count: u32) -> u32 {
        let run = self.free.iter().find(|(_, len)| **len >= count).map(|(start, len)| (*start, *len));
        if let Some((start, len)) = run {
            self.free.remove(&start);
            if len > count {
                self.free.insert(start + count, len - count);
            }
            return start;
        }
        // What is free at the end is used as well.
        let last = self.free.last_key_value().map(|(start, len)| (*start, *len));
        let start = match last {
            Some((start, len)) if (start + len) as usize == self.all.len() => {
                self.free.remove(&start);
                start
            }
            _ => self.all.len() as u32,
        };
        self.all.resize_with((start + count) as usize, || None);
        start
    }

    /// Joins a free place with its neighbours.
    fn give_back(&mut self, id: u32) {
        let (mut start, mut len) = (id, 1);
        if let Some(after) = self.free.remove(&(id + 1)) {
            len += after;
        }
        if let Some((&before, &more)) = self.free.range(..id).next_back()
            && before + more == id
        {
            (start, len) = (before, len + more);
        }
        self.free.insert(start, len);
    }

    fn get(&self, slot: Slot) -> Option<&Name> {
        self.all.get(slot.id as usize)?.as_ref().filter(|name| name.generation == slot.generation)
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut Name> {
        self.all.get_mut(slot.id as usize)?.as_mut().filter(|name| name.generation == slot.generation)
    }
}

impl Name {
    /// The path from the root.
    fn whole(&self) -> Vec<u8> {
        let mut path = self.base.to_vec();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&self.path);
        path
    }
}

/// The components of the directory that `path`, named from `base`, is in, and the last.
fn split<'n>(base: &'n [u8], path: &'n [u8]) -> (impl Iterator<Item = &'n [u8]>, &'n [u8]) {
    let (dir, last) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[][..], path),
    };
    let parts = [base, dir].into_iter().flat_map(|path| path.split(|byte| *byte == b'/'));
    (parts.filter(|part| !part.is_empty()), last)
}

impl Core {
    /// Whether `who` may do what `bits` say (4 read, 1 search) with a node, as far as its owner and mode decide.
    pub(super) fn may(&self, who: &Who, idx: Idx, bits: u16) -> bool {
        if !self.settings.permissions || who.uid == 0 {
            return true;
        }
        let node = self.node(idx);
        let class = match who {
            who if who.uid == node.uid => 6,
            who if who.is_in(node.gid) => 3,
            _ => 0,
        };
        node.mode >> class & bits == bits
    }

    /// The directory that `parts` lead to from the root. Links are not followed.
    fn walk<'p>(&self, who: &Who, parts: impl Iterator<Item = &'p [u8]>) -> Result<Idx, Errno> {
        let search = |at: Idx| if self.may(who, at, 1) { Ok(at) } else { Err(Errno::EACCES) };
        let mut at = search(ROOT)?;
        for part in parts {
            at = self.tree.child(at, part).ok_or(Errno::ENOENT)?;
            match self.node(at).kind() {
                Kind::Dir => at = search(at)?,
                Kind::Symlink => return Err(Errno::ELOOP),
                Kind::File => return Err(Errno::ENOTDIR),
            }
        }
        Ok(at)
    }

    /// The file that an interned name leads to now: one that everybody sees, and `session` may read.
    pub(super) fn find_name(&mut self, session: &mut Session, slot: Slot, waits: Waits) -> Result<Idx, Miss> {
        let Session { names, who, .. } = session;
        let Name { base, path, found, .. } = names.get_mut(slot).ok_or(Errno::ESTALE)?;
        let directories = self.tree.directories;
        let (parts, last) = split(base, path);
        let (parent, hint) = match *found {
            Some(found) if found.directories == directories => (found.parent, found.node),
            _ => (self.walk(who, parts), None),
        };
        let parent = match parent {
            Ok(parent) => parent,
            Err(errno) => {
                *found = Some(Found { directories, parent: Err(errno), node: None });
                return Err(errno.into());
            }
        };
        if !waits.are_over
            && let Some(idx) = self.being_released(parent, last)
        {
            return Err(Miss::Releasing(idx));
        }
        let is_it = |node: &&Node| node.has(NAMED) && node.parent == parent && *node.name == *last;
        let idx = match hint.filter(|id| self.tree.nodes.by_id(*id).as_ref().is_some_and(is_it)) {
            Some(id) => Some(id.idx()),
            None => self.tree.child(parent, last),
        };
        let node = idx.map(|idx| self.id(idx));
        *found = Some(Found { directories, parent: Ok(parent), node });
        let idx = idx.ok_or(Errno::ENOENT)?;
        match self.node(idx).kind() {
            Kind::File if self.may(who, idx, 4) => Ok(idx),
            Kind::File => Err(Errno::EACCES.into()),
            Kind::Dir => Err(Errno::EISDIR.into()),
            Kind::Symlink => Err(Errno::ELOOP.into()),
        }
    }

    /// What a path from the root leads to.
    pub(super) fn find_path(&self, who: &Who, path: &[u8]) -> Result<Idx, Errno> {
        let (parts, last) = split(&[], path);
        let dir = self.walk(who, parts)?;
        if last.is_empty() {
            return Ok(dir);
        }
        self.tree.child(dir, last).ok_or(Errno::ENOENT)
    }

    /// The file that ID named. Who cannot reach it by its name any more could once: it is what it is open for.
    pub(super) fn find_node(&self, who: &Who, id: u64) -> Result<Idx, Errno> {
        let idx = self.by_id(NodeId(id)).filter(|idx| *idx != ROOT).ok_or(Errno::ESTALE)?;
        if self.node(idx).kind() != Kind::File {
            return Err(Errno::ESTALE);
        }
        // As lookups do: others do not even learn that there is something.
        let private = self.hot(idx).and_then(|hot| hot.private());
        if private.is_some_and(|private| who.tgid == 0 || private.tgid != who.tgid) {
            return Err(Errno::ENOENT);
        }
        let mut at = private.map(|private| private.parent).or_else(|| self.tree.parent(idx));
        while let Some(dir) = at.filter(|dir| self.tree.nodes.get(*dir).is_some()) {
            if !self.may(who, dir, 1) {
                return Err(Errno::EACCES);
            }
            at = if dir == ROOT { None } else { self.tree.parent(dir) };
        }
        if self.may(who, idx, 4) { Ok(idx) } else { Err(Errno::EACCES) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(base: Base, names: &[&str]) -> NameList {
        NameList { base, names: names.iter().map(|name| name.as_bytes().into()).collect() }
    }

    fn intern(slots: &mut Slots, count: usize) -> Batch {
        slots.intern(&list(Base::Root, &vec!["n"; count])).expect("room")
    }

    fn slots_of(batch: Batch) -> Vec<Slot> {
        (batch.first..batch.first + batch.count).map(|id| Slot { id, generation: batch.generation }).collect()
    }

    #[test]
    fn a_batch_has_numbers_one_after_another() {
        let mut slots = Slots::default();
        let (a, b) = (intern(&mut slots, 3), intern(&mut slots, 2));
        assert_eq!((a.first, a.count, b.first, b.count), (0, 3, 3, 2));
        assert_ne!(a.generation, b.generation);
        assert_eq!(slots.count(), 5);
    }

    #[test]
    fn what_is_forgotten_is_stale_and_its_numbers_are_used_again() {
        let mut slots = Slots::default();
        let batches: Vec<Batch> = (0..4).map(|_| intern(&mut slots, 4)).collect();
        assert_eq!(slots.forget(&slots_of(batches[1])), 4);
        assert_eq!(slots.forget(&slots_of(batches[1])), 0, "twice is no error");
        assert!(slots_of(batches[1]).iter().all(|slot| slots.get(*slot).is_none()));
        let small = intern(&mut slots, 3);
        assert_eq!(small.first, 4);
        assert!(slots.get(slots_of(batches[1])[0]).is_none(), "an old generation is not the new name");
        // The one place that is left is not enough for two.
        assert_eq!(intern(&mut slots, 2).first, 16);
        assert_eq!(intern(&mut slots, 1).first, 7);
        // Runs that were given back in pieces are one again.
        let order = [batches[2], small, batches[0]];
        order.iter().for_each(|batch| assert_eq!(slots.forget(&slots_of(*batch)), batch.count));
        assert_eq!(intern(&mut slots, 7).first, 0);
    }

    #[test]
    fn all_or_nothing_is_interned() {
        let mut slots = Slots::default();
        let many = vec!["n"; NAMES_MAX as usize];
        assert_eq!(slots.intern(&list(Base::Root, &[&many[..], &["one"]].concat())), Err(Errno::ENOSPC));
        assert_eq!((slots.count(), slots.all.len()), (0, 0));
        let all = slots.intern(&list(Base::Root, &many)).expect("as many as there may be");
        assert_eq!(slots.intern(&list(Base::Root, &["one"])), Err(Errno::ENOSPC));
        assert_eq!(slots.forget(&slots_of(all)), NAMES_MAX);
        assert_eq!((slots.count(), slots.all.len(), slots.free.len()), (0, 0, 0), "nothing is kept");
        assert_eq!(intern(&mut slots, 1).first, 0);
        slots.generation = u32::MAX;
        assert_eq!(slots.intern(&list(Base::Root, &["n"])), Err(Errno::EOVERFLOW));
    }

    #[test]
    fn names_go_on_from_their_base() {
        let mut slots = Slots::default();
        let base = slots.intern(&list(Base::Root, &["model/rank0"])).expect("room");
        let base = slots_of(base)[0];
        let one = slots.intern(&list(Base::Name(base), &["3f/abc"])).expect("room");
        let two = slots.intern(&list(Base::Name(slots_of(one)[0]), &["x"])).expect("room");
        slots.forget(&[base]);
        let name = slots.get(slots_of(two)[0]).expect("it does not need its base any more");
        assert_eq!(name.whole(), b"model/rank0/3f/abc/x");
        let (parts, last) = split(&name.base, &name.path);
        assert_eq!(parts.collect::<Vec<_>>(), [&b"model"[..], b"rank0", b"3f", b"abc"]);
        assert_eq!(last, b"x");
        assert_eq!(slots.intern(&list(Base::Name(base), &["x"])), Err(Errno::ESTALE));
    }
}
