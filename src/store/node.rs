//! What the store knows about one directory, file or symbolic link.
//!
//! Ten million files must fit in RAM at no more than 256 bytes each (target P10), so a [`Node`]
//! holds only what a cold file needs: attributes, name, place on the device. What is open, in L1, or
//! being written has a [`Hot`](super::hot::Hot) beside it, made when needed and dropped afterwards.

use std::collections::BTreeMap;

use super::hot::Hot;
use crate::l2::Extent;

/// Position of a node in the arena.
pub type Idx = u32;
/// No node.
pub const NONE: Idx = Idx::MAX;
/// The root directory's position.
pub const ROOT: Idx = 0;
/// The inode number that the kernel uses for the root.
pub const ROOT_INO: u64 = 1;
/// No inode number.
pub const NO_INO: u64 = u64::MAX;
/// Inode numbers from here on are aliases: further identities of a file that already has one.
pub const ALIAS_BASE: u64 = 1 << 63;

/// Names a node for ever: its position and how often that position had been used before. This is
/// the number in the catalog and, but for the root, the inode number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u64);

impl NodeId {
    pub fn new(idx: Idx, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(idx))
    }
    pub fn idx(self) -> Idx {
        self.0 as u32
    }
    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    File,
    Dir,
    Symlink,
}

/// Where a file's bytes are on its device, in file order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Extents {
    #[default]
    None,
    One(Extent),
    Many(Box<[Extent]>),
}

impl Extents {
    pub fn from_slice(list: &[Extent]) -> Self {
        match list {
            [] => Self::None,
            [one] => Self::One(*one),
            many => Self::Many(many.into()),
        }
    }
    pub fn as_slice(&self) -> &[Extent] {
        match self {
            Self::None => &[],
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

/// The checksum of each block of a file. Most small files have one block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Crcs {
    #[default]
    None,
    One(u32),
    Many(Box<[u32]>),
}

impl Crcs {
    pub fn from_slice(list: &[u32]) -> Self {
        match list {
            [] => Self::None,
            [one] => Self::One(*one),
            many => Self::Many(many.into()),
        }
    }
    pub fn as_slice(&self) -> &[u32] {
        match self {
            Self::None => &[],
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

/// What a directory has beside its attributes.
#[derive(Debug, Default)]
pub struct Dir {
    /// Children in order of arrival of their names, by [place](Node::place). That is the readdir cookie: no other name
    /// ever gets it, so a listing goes on at the right place whatever comes and goes meanwhile.
    pub children: BTreeMap<u64, Idx>,
    pub next_place: u64,
    /// Number of children that are directories.
    pub subdirs: u32,
    /// Size of the file last published here, and how many in a row had it: the guess for the next.
    pub last_size: u64,
    pub same_size: u32,
    /// `user.kv.publish=posix`: files are visible at once, as on any file system.
    pub posix: bool,
    /// Versions on their way to the device that took the place of one here, whose record stands until then. Some may
    /// have arrived.
    pub replacing: Vec<NodeId>,
}

impl Dir {
    /// The [`Node::seq`] of a new name, behind all others.
    pub fn new_place(&mut self) -> u64 {
        let place = self.next_place;
        self.next_place += 1;
        place
    }

    /// The [`Node::seq`] of what comes after the version with `seq`: in its place, as long as versions can be counted.
    pub fn seq_after(&mut self, seq: u64) -> u64 {
        let next = seq + PLACE_END;
        if next < SEQ_END { next } else { self.new_place() }
    }
}

/// [`Node::seq`] has the place in the directory in so many low bits, and the version above them.
const PLACE_BITS: u32 = 46;
/// One past the last place.
pub const PLACE_END: u64 = 1 << PLACE_BITS;
/// One past the last `seq`: 16 bits of versions.
pub const SEQ_END: u64 = 1 << 62;

#[derive(Debug)]
pub enum Detail {
    File,
    Dir(Box<Dir>),
    Symlink(Box<[u8]>),
}

/// The node has a name in the tree.
pub const NAMED: u8 = 1;
/// The catalog on the device has a record of it.
pub const DURABLE: u8 = 2;
/// Its record is older than what is here.
pub const META_DIRTY: u8 = 4;
/// It lost its name by our doing (eviction, a newer version): opening it sends the kernel to look again.
pub const MOVED: u8 = 8;
/// In shared use or large: written in place block by block. No passthrough, and a bad block is only that block's loss.
pub const SLOT: u8 = 16;
/// Its bytes went bad or could not be stored; it is being removed.
pub const LOST: u8 = 32;
/// In the list of files by recency.
pub const LISTED: u8 = 64;
/// The commit of its record has been confirmed by the device.
pub const COMMITTED: u8 = 128;

/// Neighbours in an intrusive list.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    pub prev: Idx,
    pub next: Idx,
}

impl Default for Links {
    fn default() -> Self {
        Self { prev: NONE, next: NONE }
    }
}

pub type Xattrs = Vec<(Box<[u8]>, Box<[u8]>)>;

#[derive(Debug)]
pub struct Node {
    pub generation: u32,
    /// The directory that it is or was in. Once it has no name that may be gone, and another directory at its position:
    /// [`Tree::parent`](super::tree::Tree::parent) tells.
    pub parent: Idx,
    pub parent_generation: u32,
    pub name: Box<[u8]>,
    /// Its place among the names of its directory, which it has from the version that it replaced, if there was one; and
    /// above that, how many versions had the place before. Of two records of one name, [`Node::rank`] tells the newer.
    pub seq: u64,
    pub size: u64,
    /// Nanoseconds since 1970.
    pub mtime: i64,
    pub ctime: i64,
    pub atime: i64,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub flags: u8,
    /// Which device of the volume holds the bytes.
    pub device: u8,
    /// Bytes of its record that count against the catalog's room.
    pub cataloged: u32,
    pub detail: Detail,
    pub extents: Extents,
    pub crcs: Crcs,
    pub recency: Links,
    /// When it came to the front of its list, in [`Core::ticks`](super::core::Core::ticks); 0 is never.
    pub touched: u32,
    #[allow(clippy::box_collection, reason = "rare, and a word smaller than the vector itself")]
    pub xattrs: Option<Box<Xattrs>>,
    pub hot: Option<Box<Hot>>,
}

impl Node {
    pub fn new(detail: Detail, mode: u16, uid: u32, gid: u32, now: i64) -> Self {
        Self {
            generation: 0,
            parent: NONE,
            parent_generation: 0,
            name: Box::default(),
            seq: 0,
            size: 0,
            mtime: now,
            ctime: now,
            atime: now,
            uid,
            gid,
            mode,
            flags: 0,
            device: 0,
            cataloged: 0,
            detail,
            extents: Extents::None,
            crcs: Crcs::None,
            recency: Links::default(),
            touched: 0,
            xattrs: None,
            hot: None,
        }
    }

    pub fn kind(&self) -> Kind {
        match self.detail {
            Detail::File => Kind::File,
            Detail::Dir(_) => Kind::Dir,
            Detail::Symlink(_) => Kind::Symlink,
        }
    }
    /// Whether both have, or had last, one name in one directory.
    pub fn is_called_like(&self, other: &Self) -> bool {
        (self.parent, self.parent_generation, &self.name)
            == (other.parent, other.parent_generation, &other.name)
    }
    /// Key in the parent's list of children.
    pub fn place(&self) -> u64 {
        self.seq % PLACE_END
    }
    /// Larger for what came to a name later. The place counts first: a name that went away and came back got a new one,
    /// whatever number of versions the old one had seen.
    pub fn rank(&self) -> (u64, u64) {
        (self.place(), self.seq / PLACE_END)
    }
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
    pub fn set(&mut self, flag: u8, on: bool) {
        if on {
            self.flags |= flag;
        } else {
            self.flags &= !flag;
        }
    }
    pub fn dir(&self) -> Option<&Dir> {
        match &self.detail {
            Detail::Dir(dir) => Some(dir),
            _ => None,
        }
    }
    pub fn dir_mut(&mut self) -> Option<&mut Dir> {
        match &mut self.detail {
            Detail::Dir(dir) => Some(dir),
            _ => None,
        }
    }
    pub fn xattr(&self, name: &[u8]) -> Option<&[u8]> {
        self.xattrs.as_ref()?.iter().find(|(key, _)| &**key == name).map(|(_, value)| &**value)
    }
    pub fn set_xattr(&mut self, name: &[u8], value: &[u8]) {
        let list = self.xattrs.get_or_insert_default();
        match list.iter_mut().find(|(key, _)| &**key == name) {
            Some((_, old)) => *old = value.into(),
            None => list.push((name.into(), value.into())),
        }
    }
    /// Whether there was one.
    pub fn remove_xattr(&mut self, name: &[u8]) -> bool {
        let Some(list) = &mut self.xattrs else { return false };
        let before = list.len();
        list.retain(|(key, _)| &**key != name);
        let removed = list.len() < before;
        if list.is_empty() {
            self.xattrs = None;
        }
        removed
    }
}

/// Generations stay below 2^31, so that an inode number is never that of an alias.
pub const GENERATION_MAX: u32 = 0x7fff_fffe;

/// Nodes a piece: growing by whole pieces never copies what is there and never needs twice the memory.
const PIECE_NODES: usize = 4096;

/// All nodes, by position.
#[derive(Debug, Default)]
pub struct Arena {
    pieces: Vec<Vec<Entry>>,
    free: Vec<Idx>,
    live: usize,
}

#[derive(Debug)]
enum Entry {
    Live(Node),
    /// How often the place has been used.
    Free(u32),
}

impl Arena {
    pub fn count(&self) -> usize {
        self.live
    }

    /// One past the highest position in use.
    pub fn end(&self) -> Idx {
        match self.pieces.last() {
            Some(last) => ((self.pieces.len() - 1) * PIECE_NODES + last.len()) as Idx,
            None => 0,
        }
    }

    fn entry(&self, idx: Idx) -> Option<&Entry> {
        self.pieces.get(idx as usize / PIECE_NODES)?.get(idx as usize % PIECE_NODES)
    }

    fn entry_mut(&mut self, idx: Idx) -> Option<&mut Entry> {
        self.pieces.get_mut(idx as usize / PIECE_NODES)?.get_mut(idx as usize % PIECE_NODES)
    }

    fn push(&mut self, entry: Entry) -> Idx {
        if self.pieces.last().is_none_or(|last| last.len() == PIECE_NODES) {
            self.pieces.push(Vec::with_capacity(PIECE_NODES));
        }
        let idx = self.end();
        if let Some(last) = self.pieces.last_mut() {
            last.push(entry);
        }
        idx
    }

    /// Whether a new node would take a position from `end` on.
    pub fn is_full(&self, end: u64) -> bool {
        self.free.is_empty() && u64::from(self.end()) >= end
    }

    pub fn insert(&mut self, mut node: Node) -> Idx {
        self.live += 1;
        while let Some(idx) = self.free.pop() {
            if let Some(entry @ Entry::Free(_)) = self.entry_mut(idx) {
                if let Entry::Free(used) = entry {
                    node.generation = *used;
                }
                *entry = Entry::Live(node);
                return idx;
            }
        }
        node.generation = 1;
        self.push(Entry::Live(node))
    }

    /// Puts a node from the catalog at its old place. What was there is returned.
    pub fn restore(&mut self, id: NodeId, mut node: Node) -> Option<Node> {
        node.generation = id.generation();
        while self.end() <= id.idx() {
            self.push(Entry::Free(1));
        }
        let entry = self.entry_mut(id.idx())?;
        match std::mem::replace(entry, Entry::Live(node)) {
            Entry::Live(old) => Some(old),
            Entry::Free(_) => {
                self.live += 1;
                None
            }
        }
    }

    /// Takes a node from the catalog away again; its place is made usable by [`Arena::restored`].
    pub fn forget(&mut self, idx: Idx) {
        if self.remove(idx).is_some() {
            self.free.pop();
        }
    }

    /// After the last [`Arena::restore`]: makes the gaps usable.
    pub fn restored(&mut self) {
        self.free =
            (0..self.end()).rev().filter(|&idx| matches!(self.entry(idx), Some(Entry::Free(_)))).collect();
    }

    pub fn remove(&mut self, idx: Idx) -> Option<Node> {
        let entry = self.entry_mut(idx)?;
        let used = match entry {
            Entry::Live(node) => (node.generation % GENERATION_MAX) + 1,
            Entry::Free(_) => return None,
        };
        let Entry::Live(node) = std::mem::replace(entry, Entry::Free(used)) else { return None };
        self.live -= 1;
        self.free.push(idx);
        Some(node)
    }

    pub fn get(&self, idx: Idx) -> Option<&Node> {
        match self.entry(idx)? {
            Entry::Live(node) => Some(node),
            Entry::Free(_) => None,
        }
    }

    pub fn get_mut(&mut self, idx: Idx) -> Option<&mut Node> {
        match self.entry_mut(idx)? {
            Entry::Live(node) => Some(node),
            Entry::Free(_) => None,
        }
    }

    pub fn by_id(&self, id: NodeId) -> Option<&Node> {
        self.get(id.idx()).filter(|node| node.generation == id.generation())
    }

    pub fn id(&self, idx: Idx) -> NodeId {
        NodeId::new(idx, self.get(idx).map_or(0, |node| node.generation))
    }
}

impl std::ops::Index<Idx> for Arena {
    type Output = Node;
    /// # Panics
    /// If there is no such node: whoever holds a position also holds what keeps the node alive.
    fn index(&self, idx: Idx) -> &Node {
        self.get(idx).unwrap_or_else(|| panic!("no node at {idx}"))
    }
}

impl std::ops::IndexMut<Idx> for Arena {
    fn index_mut(&mut self, idx: Idx) -> &mut Node {
        self.get_mut(idx).unwrap_or_else(|| panic!("no node at {idx}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Node {
        Node::new(Detail::File, 0o644, 0, 0, 0)
    }

    #[test]
    fn a_cold_file_fits_its_budget() {
        assert!(
            size_of::<Entry>() <= 208,
            "{} bytes; P10 leaves 256 with its share of the tables",
            size_of::<Entry>()
        );
    }

    #[test]
    fn an_id_is_not_used_twice() {
        let mut arena = Arena::default();
        let first = arena.insert(node());
        let id = arena.id(first);
        arena.remove(first);
        let second = arena.insert(node());
        assert_eq!(first, second);
        assert_ne!(id, arena.id(second));
        assert!(arena.by_id(id).is_none());
    }

    #[test]
    fn restored_nodes_keep_their_ids_and_gaps_are_reused() {
        let mut arena = Arena::default();
        let id = NodeId::new(10_000, 7);
        assert!(arena.restore(id, node()).is_none());
        arena.restored();
        assert!(arena.by_id(id).is_some());
        assert_eq!(arena.insert(node()), 0);
        assert_eq!(arena.count(), 2);
    }
}
