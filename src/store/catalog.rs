//! How much of the catalog's room the records take.
//!
//! A checkpoint must hold the record of every node, whatever its name, attributes and blocks make of it: a catalog that
//! cannot be written any more would take nothing, not even that files are removed. So every node is counted with what
//! its record takes, from its making on; what would make records grow beyond half of a checkpoint's area is refused with
//! ENOSPC, unless files may leave for it. The other half is for what cannot be refused: extents that come out in more
//! pieces than expected, records that are on their way out, and the ends of the checkpoint's parts.
//!
//! Removing never asks: a record that will be removed with the next commit does not count any more.

use nix::errno::Errno;

use super::core::Core;
use super::hot::blocks_for;
use super::node::{Detail, Idx, NONE, Node};

/// Bytes of the records of the catalog.
#[derive(Clone, Copy, Debug)]
pub struct CatalogRoom {
    pub used: u64,
    /// What may grow, grows up to here.
    pub limit: u64,
}

/// What every record takes beside its lists and texts, with its length.
pub const RECORD_FIXED: u64 = 90;
const EXTENT: u64 = 12;
const CHECKSUM: u64 = 4;

/// What attributes add to a record.
fn xattr_bytes(name: &[u8], value: &[u8]) -> u64 {
    6 + name.len() as u64 + value.len() as u64
}

pub fn xattrs_bytes(node: &Node) -> u64 {
    node.xattrs.iter().flat_map(|list| list.iter()).map(|(name, value)| xattr_bytes(name, value)).sum()
}

impl Core {
    /// What the record of `idx` takes, or will take once its bytes are stored.
    fn record_bytes(&self, idx: Idx, size: u64) -> u64 {
        let node = self.node(idx);
        let (_, name) = self.home(idx);
        let lists = match &node.detail {
            Detail::Dir(_) => 0,
            Detail::Symlink(target) => target.len() as u64,
            Detail::File => {
                let extents = match node.hot.as_ref().filter(|hot| hot.placed) {
                    Some(hot) => hot.blocks.iter().map(|block| block.place.len()).sum(),
                    None => node.extents.as_slice().len(),
                };
                extents.max(1) as u64 * EXTENT + blocks_for(size) as u64 * CHECKSUM
            }
        };
        RECORD_FIXED + name.len() as u64 + lists + xattrs_bytes(node)
    }

    /// Makes room for `more` bytes of records. Files that nobody uses leave for it, but not `keep`.
    pub fn reserve_record(&mut self, more: u64, keep: Idx) -> Result<(), Errno> {
        while self.catalog.used + more > self.catalog.limit {
            if !self.settings.evict || !self.evict_file_but(keep) {
                return Err(self.no_space());
            }
        }
        Ok(())
    }

    /// Makes room for what `more` bytes of name or attributes add to the record of `idx`.
    pub fn widen_record(&mut self, idx: Idx, more: usize) -> Result<(), Errno> {
        if self.node(idx).cataloged == 0 || more == 0 {
            return Ok(());
        }
        self.reserve_record(more as u64, idx)
    }

    /// The same for the checksums of a file of `size` bytes.
    pub fn lengthen_record(&mut self, idx: Idx, size: u64) -> Result<(), Errno> {
        let (old, new) = (blocks_for(self.node(idx).size), blocks_for(size));
        let counted = u64::from(self.node(idx).cataloged);
        if counted == 0 || new <= old {
            return Ok(());
        }
        let bytes = self.record_bytes(idx, size);
        self.reserve_record(bytes.saturating_sub(counted), idx)?;
        self.count(idx, bytes.max(counted));
        Ok(())
    }

    /// Counts a new node.
    pub fn begin_record(&mut self, idx: Idx, bytes: u64) {
        if !self.settings.memory_only {
            self.count(idx, bytes);
        }
    }

    /// Counts what the record of `idx` takes now.
    pub fn recount(&mut self, idx: Idx) {
        if self.node(idx).cataloged > 0 {
            self.count(idx, self.record_bytes(idx, self.node(idx).size));
        }
    }

    /// The record of `idx` goes with the next commit, or there will never be one.
    pub fn end_record(&mut self, idx: Idx) {
        self.count(idx, 0);
    }

    fn count(&mut self, idx: Idx, bytes: u64) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let before = std::mem::replace(&mut self.node_mut(idx).cataloged, bytes);
        self.catalog.used = self.catalog.used + u64::from(bytes) - u64::from(before);
    }

    /// Counts everything that was read from the catalog.
    pub fn count_all(&mut self) {
        for idx in 0..self.tree.nodes.end() {
            if self.tree.nodes.get(idx).is_some() {
                self.begin_record(idx, self.record_bytes(idx, self.node(idx).size));
            }
        }
    }

    /// Records have grown in a way that nobody could refuse: files have to leave before anything is written.
    pub fn is_catalog_full(&self) -> bool {
        self.catalog.used > self.catalog.limit
    }

    /// Whether there is room for another version of `idx`. Asked before the kernel is sent to look for it: what it finds
    /// missing then, it can only tell as ESTALE.
    pub fn room_for_version(&mut self, idx: Idx) -> Result<(), Errno> {
        if !self.settings.evict && self.tree.nodes.count() as u64 >= self.settings.files_max {
            return Err(self.no_space());
        }
        if self.settings.memory_only {
            return Ok(());
        }
        let bytes = RECORD_FIXED + EXTENT + CHECKSUM + self.record_bytes_like(idx) as u64;
        self.reserve_record(bytes, idx)
    }

    /// Bytes of name, attributes and checksums that a copy of `idx` takes over.
    pub fn record_bytes_like(&self, idx: Idx) -> usize {
        (self.record_bytes(idx, self.node(idx).size) - RECORD_FIXED) as usize
    }

    /// Makes room for the record of a new node with this many bytes of name, target and attributes.
    pub fn reserve_new(&mut self, bytes: usize) -> Result<u64, Errno> {
        let bytes = RECORD_FIXED + EXTENT + CHECKSUM + bytes as u64;
        if !self.settings.memory_only {
            self.reserve_record(bytes, NONE)?;
        }
        Ok(bytes)
    }
}
