//! Attributes: what stat, utimens, chmod, chown, the xattr calls and statfs see and change.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::core::{Core, now};
use super::hot::{BLOCK, block_len};
use super::node::{COMMITTED, Detail, Idx, Kind, META_DIRTY, NAMED, NO_INO, Node};
use super::{Store, TTL};

/// What stat(2) says.
#[derive(Clone, Copy, Debug)]
pub struct Attr {
    pub ino: u64,
    pub kind: Kind,
    pub size: u64,
    /// In units of 512 bytes.
    pub blocks: u64,
    pub mode: u16,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// Nanoseconds since 1970.
    pub atime: i64,
    pub mtime: i64,
    pub ctime: i64,
    /// How long the kernel may believe it.
    pub ttl: Duration,
}

/// A name's node.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub attr: Attr,
    /// How long the kernel may believe that the name leads here.
    pub ttl: Duration,
}

/// What utimens, chmod and chown may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub atime: Option<i64>,
    pub mtime: Option<i64>,
    pub ctime: Option<i64>,
}

/// What statfs(2) says; sizes in pages.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub pages: u64,
    pub free: u64,
    pub files: u64,
    pub files_free: u64,
}

/// A directory's times change when a file is published in it, of which the kernel does not know; without any time
/// at all, every path walk would ask for the attributes of each directory on its way.
const DIR_TTL: Duration = Duration::from_secs(1);

/// Longest name, as on other file systems.
pub const NAME_MAX: usize = 255;
/// Largest value of an extended attribute (the kernel's own limit, XATTR_SIZE_MAX).
const XATTR_MAX: usize = 64 << 10;
/// All names and values of one node together: they live in RAM and in every record of the node.
pub const XATTRS_MAX: usize = 128 << 10;

/// Set-user-id goes; set-group-id too where it means execution with that group.
fn without_set_id(mode: u16) -> u16 {
    let mode = mode & !0o4000;
    if mode & 0o010 != 0 { mode & !0o2000 } else { mode }
}

impl Core {
    pub fn attr(&self, idx: Idx) -> Attr {
        let node = self.node(idx);
        let (size, blocks, nlink, sealed) = match &node.detail {
            Detail::Dir(dir) => (dir.children.len() as u64 * 32, 0, 2 + dir.subdirs, true),
            Detail::Symlink(target) => (target.len() as u64, 0, 1, true),
            Detail::File => {
                let sealed = node.hot.as_ref().is_none_or(|hot| hot.sealed() && hot.writers == 0);
                (
                    node.size,
                    self.allocated(idx) / 512,
                    u32::from(node.has(NAMED) || self.is_private(idx)),
                    sealed,
                )
            }
        };
        Attr {
            ino: self.ino(idx),
            kind: node.kind(),
            size,
            blocks,
            mode: node.mode,
            nlink,
            uid: node.uid,
            gid: node.gid,
            atime: node.atime,
            mtime: node.mtime,
            ctime: node.ctime,
            ttl: match (sealed, node.kind()) {
                (true, Kind::Dir) => DIR_TTL,
                (true, _) => TTL,
                (false, _) => Duration::ZERO,
            },
        }
    }

    fn is_private(&self, idx: Idx) -> bool {
        self.hot(idx).and_then(|hot| hot.private()).is_some_and(|private| private.parent != super::node::NONE)
    }

    /// Bytes that the file takes, holes apart.
    fn allocated(&self, idx: Idx) -> u64 {
        let node = self.node(idx);
        let Some(hot) = node.hot.as_ref().filter(|hot| hot.placed) else {
            // What is not listed at the end is a hole, too.
            let data = node.extents.as_slice().iter().filter(|extent| extent.start != super::core::HOLE);
            return data.map(|extent| u64::from(extent.blocks) * 4096).sum();
        };
        if hot.base.is_some() {
            return node.size.next_multiple_of(4096);
        }
        hot.blocks
            .iter()
            .enumerate()
            .filter(|(index, block)| {
                !block.place.is_empty()
                    || match block.mem {
                        super::hot::Mem::None => false,
                        super::hot::Mem::Slab if hot.sealed() => !self.is_hole_in_slab(idx, *index),
                        super::hot::Mem::Slab => *index as u64 * BLOCK < hot.valid_to,
                        super::hot::Mem::Chunk(_) => true,
                    }
            })
            .map(|(index, _)| (block_len(node.size, index) as u64).next_multiple_of(4096))
            .sum()
    }

    /// What the kernel is told of a name. It knows the inode number from then on, until it says that it forgets it.
    pub fn entry(&mut self, idx: Idx, shown: bool) -> Entry {
        let mut attr = self.attr(idx);
        // Where a link leads, the kernel finds out without us; a version that is closed may take its place.
        let shown = shown && self.node(idx).kind() != Kind::Symlink;
        if let Some(alias) = self.aliases.get_mut(&attr.ino) {
            alias.lookups += 1;
        }
        if !shown {
            attr.ttl = Duration::ZERO;
        }
        Entry { attr, ttl: if shown { TTL } else { Duration::ZERO } }
    }

    /// Value of one of our own attributes.
    fn own_xattr(&self, idx: Idx, name: &[u8]) -> Option<Vec<u8>> {
        let node = self.node(idx);
        if node.kind() != Kind::File {
            return None;
        }
        let text = match name {
            b"user.kv.tier" => self.tier(idx).to_owned(),
            // Its record may be older than what was stored of it.
            b"user.kv.durable" => u8::from(self.is_durable(idx) && !node.has(META_DIRTY)).to_string(),
            CRC => format!("{:08x}", self.file_crc(idx)?),
            b"user.kv.leases" => node.hot.as_ref().map_or(0, |hot| hot.leases).to_string(),
            b"user.kv.blocks" => super::hot::blocks_for(node.size).to_string(),
            _ => return None,
        };
        Some(text.into_bytes())
    }

    /// `l1`, `mixed` or `l2`: where the file's bytes are right now.
    pub fn tier(&self, idx: Idx) -> &'static str {
        let node = self.node(idx);
        let blocks = super::hot::blocks_for(node.size);
        let Some(hot) = &node.hot else { return if blocks == 0 { "l1" } else { "l2" } };
        if let Some(base) = hot.base.and_then(|base| self.by_id(base)) {
            return self.tier(base);
        }
        let resident = (0..blocks)
            .filter(|&index| {
                hot.blocks.get(index).is_some_and(super::hot::Block::resident) || self.is_hole(idx, index)
            })
            .count();
        match resident {
            all if all == blocks => "l1",
            0 => "l2",
            _ => "mixed",
        }
    }

    pub fn set_attributes(&mut self, idx: Idx, change: &Change) {
        let node = self.node_mut(idx);
        if let Some(mode) = change.mode {
            node.mode = (mode & 0o7777) as u16;
        }
        if (change.uid.is_some() || change.gid.is_some())
            && change.mode.is_none()
            && node.kind() == Kind::File
        {
            node.mode = without_set_id(node.mode);
        }
        node.uid = change.uid.unwrap_or(node.uid);
        node.gid = change.gid.unwrap_or(node.gid);
        if node.kind() == Kind::Dir && (change.mode.is_some() || change.uid.is_some() || change.gid.is_some())
        {
            self.tree.directories += 1;
        }
        let node = self.node_mut(idx);
        node.atime = change.atime.unwrap_or(node.atime);
        node.mtime = change.mtime.unwrap_or(node.mtime);
        node.ctime = change.ctime.unwrap_or_else(now);
        self.changed(idx);
    }

    pub fn is_durable(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        node.has(COMMITTED)
            && node.hot.as_ref().is_none_or(|hot| {
                hot.base.is_none() && !hot.dirty_blocks() && hot.write_back == super::hot::WriteBack::None
            })
    }

    /// Whether every byte of the file has a known checksum and no byte can change any more.
    fn has_crc(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        node.hot.as_ref().is_none_or(|hot| hot.sealed() && hot.base.is_none())
            && (0..super::hot::blocks_for(node.size))
                .all(|index| self.is_zeros(idx, index) || self.block_crc(idx, index).is_some())
    }

    /// Whether a block of a sealed file is a hole, wherever the file is.
    fn is_zeros(&self, idx: Idx, index: usize) -> bool {
        self.is_hole(idx, index)
            || self.is_hole_in_slab(idx, index)
            || (self.hot(idx).is_none() && !self.has_place(idx, index))
    }

    /// Somebody who is not root changes the file's bytes.
    pub fn drop_set_id(&mut self, idx: Idx) {
        let mode = self.node(idx).mode;
        let kept = without_set_id(mode);
        if kept != mode {
            self.node_mut(idx).mode = kept;
            self.attributes_change(idx, NO_INO);
            self.changed(idx);
        }
    }

    /// CRC-32C of the file's bytes from those of its blocks, once all are known.
    fn file_crc(&self, idx: Idx) -> Option<u32> {
        if !self.has_crc(idx) {
            return None;
        }
        let size = self.node(idx).size;
        let mut crc = 0;
        for index in 0..super::hot::blocks_for(size) {
            let len = block_len(size, index) as u64;
            let block = if self.is_zeros(idx, index) {
                crc_of_zeros(len)
            } else {
                without_zeros(self.block_crc(idx, index)?, len.next_multiple_of(4096) - len)
            };
            crc = if index == 0 { block } else { combined(crc, block, len) };
        }
        Some(crc)
    }
}

/// The checksum of two runs of bytes, one behind the other.
fn combined(first: u32, second: u32, second_len: u64) -> u32 {
    let algorithm = crc_fast::CrcAlgorithm::Crc32Iscsi;
    crc_fast::checksum_combine(algorithm, u64::from(first), u64::from(second), second_len) as u32
}

fn crc_of_zeros(len: u64) -> u32 {
    combined(u32::MAX, 0, len) ^ u32::MAX
}

/// The checksum of bytes, from that of the same bytes followed by `zeros` zero bytes (a block's checksum covers its
/// last page to the end). Appending zeros multiplies by a power of x, and x^(2^31 - 1) is 1 for this polynomial: so
/// what is missing to that power undoes it.
fn without_zeros(crc: u32, zeros: u64) -> u32 {
    const ORDER: u64 = (1 << 31) - 1;
    if zeros == 0 { crc } else { combined(crc ^ crc_of_zeros(zeros), 0, ORDER - zeros) }
}

/// The checksum of the file's bytes, known once they are stored.
const CRC: &[u8] = b"user.kv.crc32c";
/// The attribute by which a directory asks for plain POSIX visibility.
const PUBLISH: &[u8] = b"user.kv.publish";

impl Store {
    pub fn getattr(self: &Arc<Self>, ino: u64) -> Result<Attr, Errno> {
        let core = self.lock();
        let mut attr = match core.resolve(ino) {
            Ok(idx) => core.attr(idx),
            Err(errno) => match core.successor(ino) {
                // For this once: it is not what the kernel has.
                Some(successor) => Attr { ttl: Duration::ZERO, ..core.attr(successor) },
                None => core.former_attr(ino).ok_or(errno)?,
            },
        };
        attr.ino = ino;
        Ok(attr)
    }

    /// Everything but the size.
    pub fn setattr(self: &Arc<Self>, ino: u64, change: Change) -> Result<Attr, Errno> {
        self.with(|core| {
            let idx = core.resolve(ino)?;
            core.set_attributes(idx, &change);
            core.attributes_change(idx, ino);
            Ok(Attr { ino, ..core.attr(idx) })
        })
    }

    /// What a write by somebody who is not root does to the set-id bits (the kernel asks for it).
    pub fn drop_privileges(self: &Arc<Self>, handle: &super::Handle) {
        self.with(|core| {
            if let Some(idx) = core.by_id(handle.id) {
                core.drop_set_id(idx);
            }
        });
    }

    pub fn readlink(self: &Arc<Self>, ino: u64) -> Result<Vec<u8>, Errno> {
        let core = self.lock();
        match &core.node(core.resolve(ino)?).detail {
            Detail::Symlink(target) => Ok(target.to_vec()),
            _ => Err(Errno::EINVAL),
        }
    }

    pub fn getxattr(self: &Arc<Self>, ino: u64, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let core = self.lock();
        let idx = core.resolve(ino)?;
        core.own_xattr(idx, name)
            .or_else(|| core.node(idx).xattr(name).map(<[u8]>::to_vec))
            .ok_or(Errno::ENODATA)
    }

    /// The names that somebody set. Those that are computed are not among them, or whoever copies attributes
    /// (`rsync -X`, `cp -a`) would try to set them, and where it can they would say what is not so.
    pub fn listxattr(self: &Arc<Self>, ino: u64) -> Result<Vec<u8>, Errno> {
        let core = self.lock();
        let idx = core.resolve(ino)?;
        let names = core.node(idx).xattrs.iter().flat_map(|list| list.iter().map(|(name, _)| &**name));
        Ok(names.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    pub fn setxattr(self: &Arc<Self>, ino: u64, name: &[u8], value: &[u8], flags: i32) -> Result<(), Errno> {
        if !name.starts_with(b"user.") {
            return Err(Errno::EOPNOTSUPP);
        }
        if name == b"user." {
            return Err(Errno::EINVAL);
        }
        if name.len() > NAME_MAX {
            return Err(Errno::ERANGE);
        }
        if value.len() > XATTR_MAX {
            return Err(Errno::E2BIG);
        }
        self.with(|core| {
            let idx = core.resolve(ino)?;
            Self::check_own(core.node(idx), name, Some(value))?;
            let node = core.node_mut(idx);
            let exists = node.xattr(name).is_some();
            if flags & libc::XATTR_CREATE != 0 && exists {
                return Err(Errno::EEXIST);
            }
            if flags & libc::XATTR_REPLACE != 0 && !exists {
                return Err(Errno::ENODATA);
            }
            let others: usize = node
                .xattrs
                .iter()
                .flat_map(|list| list.iter())
                .filter(|(other, _)| **other != *name)
                .map(|(k, v)| k.len() + v.len())
                .sum();
            if others + name.len() + value.len() > XATTRS_MAX {
                return Err(Errno::ENOSPC);
            }
            let more = (6 + name.len() + value.len())
                .saturating_sub(node.xattr(name).map_or(0, |old| 6 + name.len() + old.len()));
            core.widen_record(idx, more)?;
            let node = core.node_mut(idx);
            node.set_xattr(name, value);
            node.ctime = now();
            if name == PUBLISH
                && let Some(dir) = node.dir_mut()
            {
                dir.posix = value == b"posix";
            }
            core.recount(idx);
            core.attributes_change(idx, ino);
            core.changed(idx);
            Ok(())
        })
    }

    pub fn removexattr(self: &Arc<Self>, ino: u64, name: &[u8]) -> Result<(), Errno> {
        self.with(|core| {
            let idx = core.resolve(ino)?;
            Self::check_own(core.node(idx), name, None)?;
            let node = core.node_mut(idx);
            if !node.remove_xattr(name) {
                return Err(Errno::ENODATA);
            }
            node.ctime = now();
            if name == PUBLISH
                && let Some(dir) = node.dir_mut()
            {
                dir.posix = false;
            }
            core.recount(idx);
            core.attributes_change(idx, ino);
            core.changed(idx);
            Ok(())
        })
    }

    /// `user.kv.*` is ours: only `user.kv.publish` on a directory can be set.
    fn check_own(node: &Node, name: &[u8], value: Option<&[u8]>) -> Result<(), Errno> {
        if !name.starts_with(b"user.kv.") {
            return Ok(());
        }
        match (name, value) {
            (PUBLISH, _) if node.kind() != Kind::Dir => Err(Errno::EINVAL),
            (PUBLISH, None | Some(b"posix" | b"close")) => Ok(()),
            (PUBLISH, Some(_)) => Err(Errno::EINVAL),
            _ => Err(Errno::EPERM),
        }
    }

    pub fn statfs(self: &Arc<Self>) -> Capacity {
        let core = self.lock();
        let (pages, used) = if core.settings.memory_only {
            let stats = core.pool.stats();
            (stats.budget / 4096, (stats.used_slabs + stats.used_chunks) / 4096)
        } else {
            (core.settings.capacity_pages, core.space.used())
        };
        let live = core.tree.nodes.count() as u64;
        Capacity {
            pages,
            free: pages.saturating_sub(used),
            files: core.settings.files_max,
            files_free: core.settings.files_max.saturating_sub(live),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crc(bytes: &[u8]) -> u32 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
    }

    #[test]
    fn the_padding_of_the_last_page_is_taken_out_of_a_checksum() {
        let bytes: Vec<u8> = (0..9000u32).map(|at| (at * 7 % 251) as u8).collect();
        for len in [1, 2, 4095, 4096, 4097, 8191, 9000] {
            let mut padded = bytes[..len].to_vec();
            padded.resize(len.next_multiple_of(4096), 0);
            let zeros = (padded.len() - len) as u64;
            assert_eq!(without_zeros(crc(&padded), zeros), crc(&bytes[..len]), "{len} bytes");
            assert_eq!(crc_of_zeros(len as u64), crc(&vec![0; len]), "{len} zeros");
        }
    }
}
