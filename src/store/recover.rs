//! Building the store's state from the catalog.
//!
//! Records arrive in any order: a directory's may follow those of its files. So they are first put in their places
//! and only then tied together. What does not fit together is dropped and said, never guessed at. Two of one name come
//! from a crash between a checkpoint and the commit that removes the older one, or before the version that replaces both was
//! complete; two files that claim the same blocks and a
//! file without its directory come from none, since commits are whole.

use super::attr::{NAME_MAX, XATTRS_MAX};
use super::core::HOLE;
use super::hot::blocks_for;
use super::node::{
    COMMITTED, Crcs, DURABLE, Detail, Dir, Extents, GENERATION_MAX, Idx, Kind, NAMED, Node, NodeId,
    PLACE_END, ROOT, SEQ_END, SLOT,
};
use super::tree::Tree;
use crate::l2::record::{Put, Record};
use crate::l2::volume::CatalogReader;
use crate::l2::{Allocator, Extent};

/// Why the older of two versions was dropped.
pub const SUPERSEDED: &str = "a newer version has its name";
const NO_DIRECTORY: &str = "its directory is not there";
/// Places in a directory are far from here. What is left above is more than names can come in the life of a mount: so
/// places are counted without a look at their end.
const KNOWN_PLACES: u64 = PLACE_END / 2;

/// The state of a store as its catalog tells it.
pub struct Recovered {
    pub tree: Tree,
    pub allocators: Vec<Allocator>,
    pub allocated_pages: u64,
    /// Files, least recently used first.
    pub by_recency: Vec<Idx>,
    /// Records that were dropped, and why.
    pub dropped: Vec<(NodeId, String)>,
    /// Records that were never taken, since no node can be like that. The next checkpoint is without them.
    pub refused: Refused,
}

#[derive(Default)]
pub struct Refused {
    pub count: u64,
    /// The first of them, and why.
    pub first: Vec<(NodeId, &'static str)>,
}

/// How many refused records are told one by one.
const REFUSED_TOLD: usize = 32;

pub struct Recovery {
    tree: Tree,
    allocators: Vec<Allocator>,
    /// Bytes of data on all devices, and so of the largest file.
    size_max: u64,
    positions_max: u64,
    parents: Vec<(Idx, Idx)>,
    refused: Refused,
}

/// Positions of nodes in a store for this many files: more than files, since who has been removed keeps its own until
/// that is committed. Bounds what a record can make us allocate.
pub fn positions_max(files_max: u64) -> u64 {
    files_max.saturating_mul(2).saturating_add(1 << 16).min(u64::from(u32::MAX))
}

/// What the way from a directory to the root is like.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Unknown,
    /// Being looked at: who comes back here goes in circles.
    Looking,
    Good,
    Bad,
}

impl CatalogReader for Recovery {
    fn devices(&mut self, data_blocks: &[u64], files_max: u64) {
        self.allocators = data_blocks.iter().copied().map(Allocator::new).collect();
        self.size_max = data_blocks.iter().sum::<u64>() * 4096;
        self.positions_max = positions_max(files_max);
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
                match self.flaw(&put) {
                    None => drop(self.tree.nodes.restore(id, node(*put))),
                    Some(why) => {
                        self.refused.count += 1;
                        if self.refused.first.len() < REFUSED_TOLD {
                            self.refused.first.push((id, why));
                        }
                    }
                }
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
        Self {
            tree,
            allocators: Vec::new(),
            size_max: 0,
            positions_max: 0,
            parents: Vec::new(),
            refused: Refused::default(),
        }
    }

    /// Why no node of ours can be like this. A checksum only tells that a record is as it was written, not by whom.
    fn flaw(&self, put: &Put) -> Option<&'static str> {
        let id = NodeId(put.id);
        let is_root = id.idx() == ROOT;
        let blocks = blocks_for(put.size) as u64;
        let name = put.name.as_slice();
        let xattrs: usize = put.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let flaws = [
            (u64::from(id.idx()) >= self.positions_max, "its number is beyond what the store has room for"),
            (!(1..=GENERATION_MAX).contains(&id.generation()), "its generation cannot be"),
            (
                is_root && (put.kind != 1 || put.parent != 0 || id != self.tree.nodes.id(ROOT)),
                "it is no root",
            ),
            (put.mode > 0o7777, "its mode has unknown bits"),
            (
                put.seq >= SEQ_END || put.seq % PLACE_END >= KNOWN_PLACES,
                "its place in the directory cannot be",
            ),
            (put.size > self.size_max, "it is larger than the store"),
            (
                put.kind != 0 && !(put.extents.is_empty() && put.crcs.is_empty()),
                "it has blocks and is no file",
            ),
            (put.kind != 2 && !put.target.is_empty(), "it has a target and is no link"),
            (put.target.len() > libc::PATH_MAX as usize, "its target is too long"),
            (put.extents.iter().any(|extent| extent.blocks == 0), "one of its extents is empty"),
            (put.crcs.len() as u64 > blocks, "it has more checksums than blocks"),
            (
                !put.extents.is_empty() && usize::from(put.device) >= self.allocators.len(),
                "its device is not there",
            ),
            (xattrs > 2 * XATTRS_MAX, "its attributes are too large"),
            (
                is_root != name.is_empty()
                    || name.len() > NAME_MAX
                    || name == b"."
                    || name == b".."
                    || name.iter().any(|byte| matches!(byte, 0 | b'/')),
                "its name cannot be",
            ),
        ];
        flaws.into_iter().find(|(flaw, _)| *flaw).map(|(_, why)| why)
    }

    /// Ties everything together.
    pub fn finish(mut self) -> Recovered {
        self.tree.nodes.restored();
        let mut dropped = Vec::new();
        let mut lost = Vec::new();
        self.tree.reserve(self.tree.nodes.count());
        for idx in 1..self.tree.nodes.end() {
            let Some(node) = self.tree.nodes.get(idx) else { continue };
            // Until here, the links hold the parent's id: see `node`.
            let parent = NodeId((u64::from(node.recency.prev) << 32) | u64::from(node.recency.next));
            let parent_idx =
                if parent.0 == 0 { Some(ROOT) } else { self.tree.nodes.by_id(parent).map(|_| parent.idx()) };
            match parent_idx.filter(|&at| self.tree.nodes[at].kind() == Kind::Dir) {
                Some(parent) => self.parents.push((idx, parent)),
                None => lost.push((idx, NO_DIRECTORY.to_owned())),
            }
        }
        for idx in 0..self.tree.nodes.end() {
            if let Some(node) = self.tree.nodes.get_mut(idx) {
                node.recency = super::node::Links::default();
            }
        }
        let parents = std::mem::take(&mut self.parents);
        for (idx, parent) in parents {
            let name = self.tree.nodes[idx].name.clone();
            let mut instead = None;
            if let Some(other) = self.tree.child(parent, &name) {
                // A crash between a checkpoint and the commit that removes the older version, or while the one that
                // would have removed both was under construction.
                let older =
                    if self.tree.nodes[other].rank() < self.tree.nodes[idx].rank() { other } else { idx };
                lost.push((older, SUPERSEDED.to_owned()));
                if older == idx {
                    continue;
                }
                instead = Some(other);
            }
            let place = self.tree.nodes[idx].place();
            if let Some(other) = instead {
                self.tree.unlink(other);
            }
            if self.tree.nodes[parent].dir().is_some_and(|dir| dir.children.contains_key(&place)) {
                lost.push((idx, "another has its place in the directory".to_owned()));
                continue;
            }
            self.tree.link_restored(idx, parent);
        }
        self.drop_unreachable(&mut lost);
        for (idx, why) in lost {
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
        let Self { tree, allocators, refused, .. } = self;
        Recovered { tree, allocators, allocated_pages, by_recency, dropped, refused }
    }

    /// What hangs below a directory that was dropped, or below itself, goes too: nobody can get at it, and the position
    /// of its directory will be another's.
    fn drop_unreachable(&mut self, lost: &mut Vec<(Idx, String)>) {
        let mut ways = vec![Way::Unknown; self.tree.nodes.end() as usize];
        ways[ROOT as usize] = Way::Good;
        let mut climbed = Vec::new();
        for idx in 1..self.tree.nodes.end() {
            let Some(node) = self.tree.nodes.get(idx).filter(|node| node.has(NAMED)) else { continue };
            let mut at = node.parent;
            while ways[at as usize] == Way::Unknown {
                ways[at as usize] = Way::Looking;
                climbed.push(at);
                at = match self.tree.nodes.get(at).filter(|node| node.has(NAMED)) {
                    Some(node) => node.parent,
                    None => break,
                };
            }
            let way = if ways[at as usize] == Way::Good { Way::Good } else { Way::Bad };
            climbed.drain(..).for_each(|at| ways[at as usize] = way);
            if way == Way::Bad {
                lost.push((idx, NO_DIRECTORY.to_owned()));
            }
        }
        for (idx, _) in lost.iter() {
            self.tree.unlink(*idx);
        }
    }

    /// Marks every extent as taken.
    fn claim(&mut self, dropped: &mut Vec<(NodeId, String)>) -> u64 {
        let gone: std::collections::HashSet<Idx> = dropped.iter().map(|(id, _)| id.idx()).collect();
        let mut pages = 0;
        for idx in 1..self.tree.nodes.end() {
            let Some(node) = self.tree.nodes.get_mut(idx) else { continue };
            let device = usize::from(node.device);
            if device >= self.allocators.len() {
                // Nothing may ask for a device that is not there.
                node.device = 0;
            }
            if gone.contains(&idx) {
                continue;
            }
            let extents: Vec<Extent> =
                node.extents.as_slice().iter().copied().filter(|extent| extent.start != HOLE).collect();
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
mod tests;
