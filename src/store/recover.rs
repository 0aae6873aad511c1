//! Building the store's state from the catalog.
//!
//! Records arrive in any order: a directory's may follow those of its files. So they are first put in their places
//! and only then tied together. What does not fit together is dropped and said, never guessed at. Two of one name come
//! from a crash between a checkpoint and the commit that removes the older one; two files that claim the same blocks and a
//! file without its directory come from none, since commits are whole.

use super::core::HOLE;
use super::node::{COMMITTED, Crcs, DURABLE, Detail, Dir, Extents, Idx, Kind, Node, NodeId, ROOT, SLOT};
use super::tree::Tree;
use crate::l2::record::{Put, Record};
use crate::l2::volume::CatalogReader;
use crate::l2::{Allocator, Extent};

/// The state of a store as its catalog tells it.
pub struct Recovered {
    pub tree: Tree,
    pub allocators: Vec<Allocator>,
    pub allocated_pages: u64,
    /// Files, least recently used first.
    pub by_recency: Vec<Idx>,
    /// Records that were dropped, and why.
    pub dropped: Vec<(NodeId, String)>,
}

pub struct Recovery {
    tree: Tree,
    allocators: Vec<Allocator>,
    parents: Vec<(Idx, u64)>,
}

impl CatalogReader for Recovery {
    fn devices(&mut self, data_blocks: &[u64]) {
        self.allocators = data_blocks.iter().copied().map(Allocator::new).collect();
    }

    fn record(&mut self, record: Record) {
        match record {
            Record::Remove(id) => {
                let id = NodeId(id);
                if self.tree.nodes.by_id(id).is_some() && id.idx() != ROOT {
                    self.tree.nodes.forget(id.idx());
                }
            }
            Record::Put(put) => {
                let id = NodeId(put.id);
                self.tree.nodes.restore(id, node(*put));
            }
        }
    }
}

impl Recovery {
    /// An empty tree, whose root belongs to `uid` and `gid`.
    pub fn new(uid: u32, gid: u32) -> Self {
        let mut tree = Tree::default();
        let mut root = Node::new(Detail::Dir(Box::default()), 0o755, uid, gid, super::core::now());
        root.set(DURABLE | COMMITTED, true);
        tree.nodes.insert(root);
        Self { tree, allocators: Vec::new(), parents: Vec::new() }
    }

    /// Ties everything together.
    pub fn finish(mut self) -> Recovered {
        self.tree.nodes.restored();
        let mut dropped = Vec::new();
        let mut lost = Vec::new();
        self.tree.reserve(self.tree.nodes.count());
        for idx in 1..self.tree.nodes.end() {
            let Some(node) = self.tree.nodes.get(idx) else { continue };
            // Until here, `seq` of the links holds the parent's id: see `node`.
            let parent = NodeId((u64::from(node.recency.prev) << 32) | u64::from(node.recency.next));
            let parent_idx =
                if parent.0 == 0 { Some(ROOT) } else { self.tree.nodes.by_id(parent).map(|_| parent.idx()) };
            match parent_idx.filter(|&at| self.tree.nodes[at].kind() == Kind::Dir) {
                Some(parent) => self.parents.push((idx, u64::from(parent))),
                None => lost.push((idx, "its directory is not there".to_owned())),
            }
        }
        for (idx, _) in &self.parents {
            self.tree.nodes[*idx].recency = super::node::Links::default();
        }
        let parents = std::mem::take(&mut self.parents);
        for (idx, parent) in parents {
            let parent = parent as Idx;
            let name = self.tree.nodes[idx].name.clone();
            if let Some(other) = self.tree.child(parent, &name) {
                // A crash between a checkpoint and the commit that removes the older version.
                let older = if self.tree.nodes[other].seq < self.tree.nodes[idx].seq { other } else { idx };
                lost.push((older, "a newer version has its name".to_owned()));
                if older == idx {
                    continue;
                }
                self.tree.unlink(other);
            }
            self.tree.link_restored(idx, parent);
        }
        // With a directory goes what is below it: its record would name whatever comes to the directory's place.
        while let Some((idx, why)) = lost.pop() {
            if let Some(dir) = self.tree.nodes[idx].dir() {
                let below = || format!("its directory was dropped: {why}");
                lost.extend(dir.children.values().map(|&child| (child, below())));
            }
            dropped.push((self.tree.nodes.id(idx), why));
        }
        let allocated_pages = self.claim(&mut dropped);
        let gone: std::collections::HashSet<Idx> = dropped.iter().map(|(id, _)| id.idx()).collect();
        for &idx in &gone {
            // Its blocks were not claimed: they are nobody's, or somebody else's.
            self.tree.nodes[idx].extents = Extents::None;
            self.tree.unlink(idx);
        }
        let mut by_recency: Vec<Idx> = (1..self.tree.nodes.end())
            .filter(|idx| {
                !gone.contains(idx)
                    && self
                        .tree
                        .nodes
                        .get(*idx)
                        .is_some_and(|node| node.kind() == Kind::File && node.has(super::node::NAMED))
            })
            .collect();
        by_recency.sort_by_key(|&idx| self.tree.nodes[idx].atime.max(self.tree.nodes[idx].mtime));
        Recovered { tree: self.tree, allocators: self.allocators, allocated_pages, by_recency, dropped }
    }

    /// Marks every extent as taken.
    fn claim(&mut self, dropped: &mut Vec<(NodeId, String)>) -> u64 {
        let gone: std::collections::HashSet<Idx> = dropped.iter().map(|(id, _)| id.idx()).collect();
        let mut pages = 0;
        for idx in 1..self.tree.nodes.end() {
            let Some(node) = self.tree.nodes.get(idx) else { continue };
            if gone.contains(&idx) {
                continue;
            }
            let extents: Vec<Extent> =
                node.extents.as_slice().iter().copied().filter(|extent| extent.start != HOLE).collect();
            let device = usize::from(node.device);
            let mut claimed = Vec::new();
            let mut wrong = None;
            for extent in extents {
                match self.allocators.get_mut(device).map(|allocator| allocator.claim(extent)) {
                    Some(Ok(())) => claimed.push(extent),
                    Some(Err(error)) => wrong = Some(error.to_string()),
                    None => wrong = Some(format!("it is on device {device}, which the store does not have")),
                }
            }
            match wrong {
                None => pages += claimed.iter().map(|extent| u64::from(extent.blocks)).sum::<u64>(),
                Some(why) => {
                    for extent in claimed {
                        self.allocators[device].free(extent);
                    }
                    self.tree.nodes[idx].extents = Extents::None;
                    dropped.push((self.tree.nodes.id(idx), why));
                }
            }
        }
        pages
    }
}

fn node(put: Put) -> Node {
    let detail = match put.kind {
        1 => Detail::Dir(Box::new(Dir { posix: put.flags & 2 != 0, ..Dir::default() })),
        2 => Detail::Symlink(put.target.into()),
        _ => Detail::File,
    };
    let mut node = Node::new(detail, put.mode, put.uid, put.gid, 0);
    node.name = put.name.into();
    node.seq = put.seq;
    node.size = put.size;
    node.mtime = put.mtime;
    node.ctime = put.ctime;
    node.atime = put.atime;
    node.device = put.device;
    node.extents = Extents::from_slice(&put.extents);
    node.crcs = Crcs::from_slice(&put.crcs);
    node.set(DURABLE | COMMITTED, true);
    node.set(SLOT, put.flags & 1 != 0);
    if !put.xattrs.is_empty() {
        node.xattrs = Some(Box::new(put.xattrs.into_iter().map(|(k, v)| (k.into(), v.into())).collect()));
    }
    // The parent may not be known yet; its id waits in the links, which nothing uses before `finish`.
    node.recency = super::node::Links { prev: (put.parent >> 32) as u32, next: put.parent as u32 };
    node
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(at: u32, parent: u64, name: &str, kind: u8, seq: u64, extents: Vec<Extent>) -> Record {
        let size = extents.iter().map(Extent::bytes).sum();
        Record::Put(Box::new(Put {
            id: NodeId::new(at, 1).0,
            parent,
            name: name.into(),
            kind,
            seq,
            size,
            extents,
            ..Put::default()
        }))
    }

    /// A checkpoint that was written while a directory was being removed and made anew has both, and what was in it.
    #[test]
    fn what_is_in_a_directory_that_is_dropped_goes_with_it() {
        let mut recovery = Recovery::new(0, 0);
        recovery.devices(&[1000]);
        let id = |at| NodeId::new(at, 1).0;
        recovery.record(put(1, 0, "dir", 1, 1, vec![]));
        recovery.record(put(2, id(1), "inner", 1, 1, vec![]));
        recovery.record(put(3, id(2), "file", 0, 1, vec![Extent { start: 8, blocks: 4 }]));
        recovery.record(put(4, 0, "dir", 1, 2, vec![]));
        let recovered = recovery.finish();
        let mut dropped: Vec<Idx> = recovered.dropped.iter().map(|(id, _)| id.idx()).collect();
        dropped.sort();
        assert_eq!(dropped, [1, 2, 3]);
        assert_eq!((recovered.tree.files, recovered.allocated_pages), (0, 0));
        assert_eq!(recovered.allocators[0].free_blocks(), 1000);
        assert!(recovered.by_recency.is_empty());
        assert_eq!(recovered.tree.child(ROOT, b"dir"), Some(4));
    }
}
