//! Names: the tree that everybody sees, and the private names that only their makers see (rule R1).

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};

use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use super::node::{Arena, Idx, Kind, MOVED, NAMED, NONE, Node, NodeId, PLACE_END, ROOT};
use crate::shown;

/// A directory and a name in it.
type Name = (Idx, Box<[u8]>);

#[derive(Default)]
pub struct Tree {
    pub nodes: Arena,
    /// Every visible name, by parent and name. Holds positions only: the name is in the node.
    names: HashTable<Idx>,
    hasher: DefaultHashBuilder,
    /// Versions under construction, by the name they will have. Newest last.
    privates: HashMap<Name, SmallVec<[Idx; 1]>>,
    pub files: u64,
    pub dirs: u64,
    /// Grows whenever a name appears, goes, or leads to another node.
    pub generation: u64,
    /// Grows with everything that may change which directory a path leads to, and who may search it.
    pub directories: u64,
}

fn hash_of(hasher: &DefaultHashBuilder, parent: Idx, name: &[u8]) -> u64 {
    let mut state = hasher.build_hasher();
    parent.hash(&mut state);
    name.hash(&mut state);
    state.finish()
}

impl Tree {
    pub fn child(&self, parent: Idx, name: &[u8]) -> Option<Idx> {
        let hash = hash_of(&self.hasher, parent, name);
        self.names
            .find(hash, |&idx| {
                let node = &self.nodes[idx];
                node.parent == parent && *node.name == *name
            })
            .copied()
    }

    /// Gives `idx` the name `name` in `parent`, where no such name is.
    ///
    /// # Panics
    /// If `parent` is no directory.
    pub fn link(&mut self, idx: Idx, parent: Idx, name: &[u8]) {
        self.link_after(idx, parent, name, None);
    }

    /// The same for a version that takes the name over from one that had it until now, as `seq` there. It gets its place:
    /// a name that is only ever replaced stays where listings have passed it, or come to it yet.
    ///
    /// # Panics
    /// If `parent` is no directory.
    pub fn link_after(&mut self, idx: Idx, parent: Idx, name: &[u8], seq: Option<u64>) {
        debug_assert!(self.child(parent, name).is_none(), "a name has one node");
        let kind = self.nodes[idx].kind();
        let dir = self.nodes[parent].dir_mut().unwrap_or_else(|| panic!("{parent} is a directory"));
        let seq = match seq {
            Some(before) => dir.seq_after(before),
            None => dir.new_place(),
        };
        let there = dir.children.insert(seq % PLACE_END, idx);
        debug_assert!(there.is_none(), "a place has one name");
        dir.subdirs += u32::from(kind == Kind::Dir);
        let parent_generation = self.nodes[parent].generation;
        let node = &mut self.nodes[idx];
        (node.parent, node.parent_generation) = (parent, parent_generation);
        node.name = name.into();
        node.seq = seq;
        node.set(NAMED, true);
        node.set(MOVED, false);
        match kind {
            Kind::Dir => self.dirs += 1,
            _ => self.files += 1,
        }
        self.note_change(kind);
        self.index(idx);
    }

    fn note_change(&mut self, kind: Kind) {
        self.generation += 1;
        self.directories += u64::from(kind == Kind::Dir);
    }

    /// Gives a node from the catalog back the name and the cookie it had.
    ///
    /// # Panics
    /// If `parent` is no directory.
    pub fn link_restored(&mut self, idx: Idx, parent: Idx) {
        let (kind, place) = (self.nodes[idx].kind(), self.nodes[idx].place());
        let dir = self.nodes[parent].dir_mut().unwrap_or_else(|| panic!("{parent} is a directory"));
        dir.next_place = dir.next_place.max(place + 1);
        dir.children.insert(place, idx);
        dir.subdirs += u32::from(kind == Kind::Dir);
        let parent_generation = self.nodes[parent].generation;
        let node = &mut self.nodes[idx];
        (node.parent, node.parent_generation) = (parent, parent_generation);
        node.set(NAMED, true);
        match kind {
            Kind::Dir => self.dirs += 1,
            _ => self.files += 1,
        }
        self.index(idx);
    }

    /// Gives `idx` the `seq` after `seq`, where it is.
    fn raise(&mut self, idx: Idx, parent: Idx, seq: u64) {
        let (named, before) = (self.nodes[idx].has(NAMED), self.nodes[idx].place());
        let Some(dir) = self.nodes[parent].dir_mut() else { return };
        let seq = dir.seq_after(seq);
        if named {
            dir.children.remove(&before);
            dir.children.insert(seq % PLACE_END, idx);
        }
        self.nodes[idx].seq = seq;
    }

    /// Makes `idx` newer than the one that has been given its `seq`, and what has its name now, if that is another, newer
    /// still. Returns those that were changed.
    pub fn stay_newer(&mut self, idx: Idx) -> SmallVec<[Idx; 2]> {
        let mut changed = SmallVec::new();
        let Some(parent) = self.parent(idx) else { return changed };
        self.raise(idx, parent, self.nodes[idx].seq);
        changed.push(idx);
        if let Some(named) = self.child(parent, &self.nodes[idx].name)
            && named != idx
            && self.nodes[named].rank() <= self.nodes[idx].rank()
        {
            self.raise(named, parent, self.nodes[idx].seq);
            changed.push(named);
        }
        changed
    }

    /// Enters a node that already knows its parent and name into the table.
    fn index(&mut self, idx: Idx) {
        let Self { nodes, names, hasher, .. } = self;
        let node = &nodes[idx];
        let hash = hash_of(hasher, node.parent, &node.name);
        names.insert_unique(hash, idx, |&other| {
            let node = &nodes[other];
            hash_of(hasher, node.parent, &node.name)
        });
    }

    /// Makes room for the names of a store that is being read.
    pub fn reserve(&mut self, names: usize) {
        let Self { nodes, names: table, hasher, .. } = self;
        table.reserve(names, |&other| {
            let node = &nodes[other];
            hash_of(hasher, node.parent, &node.name)
        });
    }

    /// Takes the name away. The node keeps what it was called, for messages and for its record.
    pub fn unlink(&mut self, idx: Idx) {
        let node = &mut self.nodes[idx];
        if !node.has(NAMED) {
            return;
        }
        node.set(NAMED, false);
        let (parent, place, kind) = (node.parent, node.place(), node.kind());
        let hash = hash_of(&self.hasher, parent, &node.name);
        if let Ok(entry) = self.names.find_entry(hash, |&other| other == idx) {
            entry.remove();
        }
        if let Some(dir) = self.nodes.get_mut(parent).and_then(Node::dir_mut) {
            dir.children.remove(&place);
            dir.subdirs -= u32::from(kind == Kind::Dir);
        }
        match kind {
            Kind::Dir => self.dirs -= 1,
            _ => self.files -= 1,
        }
        self.note_change(kind);
    }

    pub fn add_private(&mut self, idx: Idx, parent: Idx, name: &[u8]) {
        self.privates.entry((parent, name.into())).or_default().push(idx);
    }

    pub fn remove_private(&mut self, idx: Idx, parent: Idx, name: &[u8]) {
        let key = (parent, Box::from(name));
        if let Some(list) = self.privates.get_mut(&key) {
            list.retain(|&mut other| other != idx);
            if list.is_empty() {
                self.privates.remove(&key);
            }
        }
    }

    pub fn privates(&self, parent: Idx, name: &[u8]) -> &[Idx] {
        if self.privates.is_empty() {
            return &[];
        }
        // The borrowed form of the key would need an owned name; private names are few and short-lived.
        self.privates.get(&(parent, Box::from(name))).map_or(&[], SmallVec::as_slice)
    }

    /// All private names of one directory.
    pub fn privates_in(&self, parent: Idx) -> impl Iterator<Item = (Idx, &[u8])> {
        self.privates
            .iter()
            .filter(move |((dir, _), _)| *dir == parent)
            .flat_map(|((_, name), all)| all.iter().map(move |idx| (*idx, &**name)))
    }

    pub fn private_count(&self) -> usize {
        self.privates.len()
    }

    /// The directory that `idx` is in, or was in when it had a name, if that is still there.
    pub fn parent(&self, idx: Idx) -> Option<Idx> {
        let node = self.nodes.get(idx)?;
        self.nodes.by_id(NodeId::new(node.parent, node.parent_generation)).map(|_| node.parent)
    }

    /// The path from the mount point, for people: as [`shown`] shows names.
    pub fn path(&self, idx: Idx) -> String {
        let mut parts = Vec::new();
        let mut at = idx;
        while at != ROOT && at != NONE && parts.len() < 128 {
            let Some(node) = self.nodes.get(at) else { break };
            parts.push(shown::name(&node.name));
            at = self.parent(at).unwrap_or(NONE);
        }
        parts.reverse();
        parts.join("/")
    }

    /// The path of a name in `parent`, whether or not there is such a file.
    pub fn path_of(&self, parent: Idx, name: &[u8]) -> String {
        let mut path = self.path(parent);
        if !path.is_empty() {
            path.push('/');
        }
        path.push_str(&shown::name(name));
        path
    }

    /// Whether `ancestor` is `idx` or above it.
    pub fn is_within(&self, idx: Idx, ancestor: Idx) -> bool {
        let mut at = idx;
        loop {
            if at == ancestor {
                return true;
            }
            if at == ROOT || at == NONE {
                return false;
            }
            at = self.parent(at).unwrap_or(NONE);
        }
    }

    /// The directory right below the root that `parent` is in: tenants and models are kept apart there. None: it is not
    /// in the tree any more.
    pub fn namespace(&self, mut parent: Idx) -> Option<NodeId> {
        let mut below = ROOT;
        while parent != ROOT {
            below = parent;
            parent = self.parent(parent)?;
        }
        Some(self.nodes.id(below))
    }

    /// Whether files here are visible at once (`user.kv.publish=posix` on the directory or above it).
    pub fn posix(&self, parent: Idx) -> bool {
        let mut at = parent;
        loop {
            let Some(node) = self.nodes.get(at) else { return false };
            if node.dir().is_some_and(|dir| dir.posix) {
                return true;
            }
            if at == ROOT || at == NONE {
                return false;
            }
            at = self.parent(at).unwrap_or(NONE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::node::{Detail, Dir, SEQ_END};
    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::default();
        tree.nodes.insert(Node::new(Detail::Dir(Box::default()), 0o755, 0, 0, 0));
        tree
    }

    fn file(tree: &mut Tree) -> Idx {
        tree.nodes.insert(Node::new(Detail::File, 0o644, 0, 0, 0))
    }

    #[test]
    fn names_are_found_until_unlinked() {
        let mut tree = tree();
        let a = file(&mut tree);
        tree.link(a, ROOT, b"a");
        assert_eq!(tree.child(ROOT, b"a"), Some(a));
        assert_eq!(tree.child(ROOT, b"b"), None);
        tree.unlink(a);
        assert_eq!(tree.child(ROOT, b"a"), None);
        assert_eq!(tree.files, 0);
    }

    #[test]
    fn many_names_survive_the_table_growing() {
        let mut tree = tree();
        let all: Vec<_> = (0..10_000u32)
            .map(|i| {
                let idx = file(&mut tree);
                tree.link(idx, ROOT, &i.to_le_bytes());
                idx
            })
            .collect();
        for (i, idx) in all.iter().enumerate() {
            assert_eq!(tree.child(ROOT, &(i as u32).to_le_bytes()), Some(*idx));
        }
    }

    #[test]
    fn cookies_are_never_used_again() {
        let mut tree = tree();
        let a = file(&mut tree);
        tree.link(a, ROOT, b"a");
        let first = tree.nodes[a].seq;
        tree.unlink(a);
        tree.link(a, ROOT, b"a");
        assert!(tree.nodes[a].seq > first);
    }

    /// Takes the name of `old` for another.
    fn replace(tree: &mut Tree, old: Idx) -> Idx {
        let (seq, name) = (tree.nodes[old].seq, tree.nodes[old].name.clone());
        let new = file(tree);
        tree.unlink(old);
        tree.link_after(new, ROOT, &name, Some(seq));
        new
    }

    fn listed(tree: &Tree) -> Vec<Idx> {
        tree.nodes[ROOT].dir().unwrap().children.values().copied().collect()
    }

    #[test]
    fn what_replaces_another_has_its_place_and_is_newer() {
        let mut tree = tree();
        let [a, b] = [b"a", b"b"].map(|name| {
            let idx = file(&mut tree);
            tree.link(idx, ROOT, name);
            idx
        });
        let (place, rank) = (tree.nodes[a].place(), tree.nodes[a].rank());
        let second = replace(&mut tree, a);
        let third = replace(&mut tree, second);
        assert_eq!(listed(&tree), [third, b]);
        assert_eq!([second, third].map(|idx| tree.nodes[idx].place()), [place; 2]);
        assert!(rank < tree.nodes[second].rank() && tree.nodes[second].rank() < tree.nodes[third].rank());
        // What has a new name, or comes back to one, does not count from there.
        tree.unlink(third);
        let c = file(&mut tree);
        tree.link(c, ROOT, b"c");
        tree.link(third, ROOT, b"a");
        assert_eq!(listed(&tree), [b, c, third]);
        assert_eq!([b, c, third].map(|idx| tree.nodes[idx].rank()), [(1, 0), (2, 0), (3, 0)]);
    }

    #[test]
    fn a_place_that_has_seen_all_its_versions_is_left_for_a_new_one() {
        let mut tree = tree();
        let a = file(&mut tree);
        tree.link(a, ROOT, b"a");
        tree.nodes[a].seq = SEQ_END - PLACE_END;
        let rank = tree.nodes[a].rank();
        assert_eq!(rank, (0, 0xffff));
        let next = replace(&mut tree, a);
        assert_eq!(tree.nodes[next].rank(), (1, 0));
        assert!(tree.nodes[next].rank() > rank);
        assert_eq!(listed(&tree), [next]);
        tree.unlink(next);
        assert_eq!(listed(&tree), Vec::<Idx>::new());
    }

    #[test]
    fn what_has_the_name_is_the_newest_of_it() {
        for versions in [0, 0xfffe, 0xffff] {
            let mut tree = tree();
            let a = file(&mut tree);
            tree.link(a, ROOT, b"a");
            tree.nodes[a].seq = versions * PLACE_END;
            let before = tree.nodes[a].rank();
            assert_eq!(tree.stay_newer(a).as_slice(), [a]);
            let old = tree.nodes[a].rank();
            assert!(before < old);
            let b = replace(&mut tree, a);
            assert_eq!(tree.stay_newer(a).as_slice(), [a, b]);
            assert!(old < tree.nodes[a].rank());
            assert!(tree.nodes[a].rank() < tree.nodes[b].rank());
            assert_eq!(listed(&tree), [b]);
            tree.unlink(b);
            assert_eq!(listed(&tree), Vec::<Idx>::new());
        }
    }

    #[test]
    fn the_namespace_is_the_directory_below_the_root() {
        let mut tree = tree();
        let dir = || Node::new(Detail::Dir(Box::<Dir>::default()), 0o755, 0, 0, 0);
        let (a, b) = (tree.nodes.insert(dir()), tree.nodes.insert(dir()));
        tree.link(a, ROOT, b"a");
        tree.link(b, a, b"b");
        let first = tree.nodes.id(a);
        assert_eq!(tree.namespace(b), Some(first));
        assert_eq!(tree.namespace(a), Some(first));
        assert_eq!(tree.namespace(ROOT), Some(tree.nodes.id(ROOT)));
        // A directory that takes the place of one that is gone is another one.
        tree.unlink(b);
        tree.unlink(a);
        tree.nodes.remove(a);
        assert_eq!(tree.nodes.insert(dir()), a);
        tree.link(a, ROOT, b"a");
        assert_eq!((tree.parent(b), tree.namespace(b)), (None, None));
        assert_eq!(tree.path(b), "b");
        assert!(tree.namespace(a).is_some_and(|again| again != first));
    }
}
