//! The live state of a file: open handles, blocks in L1, and where it is in its life.
//!
//! A version of a file goes private, visible, sealed (rule R1). While it is being built, each block
//! knows its own memory, checksum and place on the device. Once sealed, checksums and places move to
//! the node, and a block only says whether it is in L1.

use std::ops::{Range, RangeInclusive};
use std::time::Instant;

use nix::errno::Errno;
use smallvec::SmallVec;

use super::node::{Idx, Links, NONE, NodeId};
use super::process::Caller;
use super::{EntryReply, ReadReply, UnitReply};
use crate::l1::{Chunk, Slab};
use crate::l2::Extent;
use crate::memory::{PAGE, Span};

/// The unit of checksums, of residency, and of a slot file's placement (rule R2).
pub const BLOCK: u64 = 256 << 10;
/// Pages in a block.
pub const BLOCK_PAGES: u64 = BLOCK / PAGE as u64;

/// Number of blocks that `size` bytes take.
pub fn blocks_for(size: u64) -> usize {
    size.div_ceil(BLOCK) as usize
}

/// Bytes of block `index` in a file of `size` bytes.
pub fn block_len(size: u64, index: usize) -> usize {
    size.saturating_sub(index as u64 * BLOCK).min(BLOCK) as usize
}

/// Rounded up to whole pages.
pub fn page_round(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE as u64)
}

/// Where a block's bytes are in RAM.
#[derive(Default)]
pub enum Mem {
    #[default]
    None,
    /// In the file's slab, at the block's own offset.
    Slab,
    Chunk(Chunk),
}

impl Mem {
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }
}

/// What the device is doing with a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BlockIo {
    #[default]
    Idle,
    /// Memory is reserved and being filled from L2. The number tells one such transfer from another.
    Reading(u32),
    /// A copy of version `.0` is being written to L2.
    Writing(u32),
}

pub type Place = SmallVec<[Extent; 1]>;

/// One block of a file that is in use.
#[derive(Default)]
pub struct Block {
    pub mem: Mem,
    pub io: BlockIo,
    /// What is being written to the device is this block's memory, not a copy of it.
    pub fixed: bool,
    /// Changed since it was last written to the device.
    pub dirty: bool,
    /// The number of its last change, so that a transfer that overlapped one is not taken for its result.
    pub version: u32,
    /// Pages this block holds of the dirty bound.
    pub charge: u32,
    /// Pages set aside on the device for it, until its extents are allocated.
    pub reserved: u32,
    /// Where it is on the device, and the checksum of what is there: not of what is in memory, if that is newer.
    /// Empty: nowhere, or a hole.
    pub place: Place,
    /// Checksum of the bytes as they are now, if it is known.
    pub crc: Option<u32>,
    /// Checksum and length of what is at `place`: once the block is dirty again, that is something else.
    pub stored: (u32, u32),
    /// It could not be stored, so what is in memory is nowhere else: not at `place` either.
    pub alone: bool,
    /// Its bytes could not be read back, or were wrong: EIO until written again.
    pub bad: bool,
    /// Looked at since the last eviction came by (second chance within large files).
    pub referenced: bool,
}

impl Block {
    /// Whether its bytes are in L1 and whole.
    pub fn resident(&self) -> bool {
        !self.mem.is_none() && !self.is_loading()
    }

    /// Whether it has neither bytes nor anything that was got for some.
    pub fn is_nothing(&self) -> bool {
        self.mem.is_none() && self.place.is_empty() && self.charge == 0 && self.reserved == 0 && !self.bad
    }

    /// Whether its bytes are on their way from L2.
    pub fn is_loading(&self) -> bool {
        matches!(self.io, BlockIo::Reading(_))
    }
}

/// Why a private file will never be published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doom {
    /// Who wrote it was killed by a signal before closing it. Somebody who has it, too, may go on with it.
    Killed,
    /// It could not be stored.
    NotStored,
}

/// What is known of whoever created a private file.
#[derive(Debug)]
pub struct Private {
    /// Where the name will appear: a directory that is there (it takes its private files with it when it goes), or
    /// [`NONE`] for a file that has lost its name.
    pub parent: Idx,
    pub name: Box<[u8]>,
    /// Thread and process that created it; 0 where they cannot be known.
    pub tid: u32,
    pub tgid: u32,
    /// The user who created it.
    pub uid: u32,
    /// The owner of the version that it was made to replace, which that user may write.
    pub replaces: Option<u32>,
    /// The name is reserved for everybody (O_EXCL).
    pub exclusive: bool,
    /// Some descriptor of it was closed and no write came since.
    pub flushed: bool,
    /// When its last close began, in the order of all closes; 0 before the first. RELEASE, which publishes, may
    /// overtake that of another file.
    pub closed: u64,
    /// What was closed up to here has been replaced, moved away or unlinked meanwhile.
    pub outdated: u64,
    /// A lookup has waited for its RELEASE in vain: what was closed is taken for a duplicate, until the next close.
    pub waited: bool,
    /// Why it is given up, and not published, when it is closed.
    pub doom: Option<Doom>,
    /// It was opened by whom it was made for.
    pub opened: bool,
    /// From the first to the last byte that a failed write did not bring, as far as no later one has.
    pub lacks: Option<Range<u64>>,
}

impl Private {
    /// Whether another version was published since it was last closed.
    pub fn is_outdated(&self) -> bool {
        self.closed > 0 && self.closed <= self.outdated
    }

    /// Whether it is closed, as far as can be known, and its RELEASE is on its way.
    pub fn is_releasing(&self) -> bool {
        self.flushed && !self.waited
    }

    /// The bytes of `range` are there, or are not wanted any more.
    pub fn supplied(&mut self, range: Range<u64>) {
        let Some(lacks) = &mut self.lacks else { return };
        if range.start <= lacks.start {
            lacks.start = lacks.start.max(range.end);
        } else if range.end >= lacks.end {
            lacks.end = lacks.end.min(range.start);
        }
        if lacks.is_empty() {
            self.lacks = None;
        }
    }
}

#[derive(Debug)]
pub enum Phase {
    Private(Box<Private>),
    /// Visible and not sealed: shared use, slot files, after fsync.
    Open,
    Sealed,
}

/// How the handles of one inode number are served (rule R3b).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Passthrough,
    Direct,
}

/// Open handles of one inode number.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    pub ino: u64,
    pub mode: Mode,
    pub handles: u32,
}

/// Where the file is on its way to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WriteBack {
    #[default]
    None,
    /// In the publish queue under this number.
    Queued(u64),
}

/// How the bytes of a waiting read come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Via {
    /// To L1, from where it is answered.
    L1,
    /// Around L1, once there is memory for that.
    Room,
    /// Around L1, under this number.
    Around(u32),
}

/// A read that waits for blocks. It keeps its file, and has a deadline, whatever it waits for.
pub struct PendingRead {
    pub via: Via,
    pub offset: u64,
    pub len: usize,
    /// What the asker holds, which answers `node` reads for when a copy-on-write base is asked.
    pub reply: ReadReply,
    pub deadline: Instant,
}

/// A lookup that waits for a release.
pub struct PendingLookup {
    pub then: Then,
    pub deadline: Instant,
}

/// What is done once a file that is being released is there, or is not.
pub enum Then {
    Find {
        caller: Caller,
        parent: NodeId,
        name: Box<[u8]>,
        reply: EntryReply,
    },
    /// The whole request is tried again.
    Again(Box<dyn FnOnce() + Send>),
}

impl Then {
    /// There is nothing to wait for any more, and nothing to find.
    pub fn end(self) {
        match self {
            Self::Find { reply, .. } => reply(Err(Errno::ENOENT)),
            Self::Again(again) => again(),
        }
    }
}

/// The state of a file that is in use or in L1.
///
/// What is looked at for each range of a window comes first, so that it is in two or three lines of the processor's caches: a
/// window has hundreds of files, and nearly all that classifying it costs is waiting for memory.
#[repr(C, align(64))]
pub struct Hot {
    pub slab: Option<Slab>,
    pub blocks: Vec<Block>,
    /// How many ranges of leases each block is in, as far as one ever was.
    pub leased: Vec<u32>,
    /// How many leases hold something of it.
    pub leases: u32,
    /// How many hints that run hold something of it, and each block.
    pub hints: u32,
    pub phase: Phase,
    /// In the list of files that L1 may drop.
    pub l1: Links,
    pub write_back: WriteBack,
    /// The version whose bytes this one shows until it is written to (copy-on-write).
    pub base: Option<NodeId>,
    /// Device transfers that are going on.
    pub transfers: u32,
    /// Opens and truncates that were sent to look again and will arrive here to write.
    pub promised: u32,
    /// Changes that have begun to make holes of its blocks: what they have promised they finish, so nothing of it is
    /// leased meanwhile.
    pub zeroing: u32,
    /// Copies between memory and a client that are going on right now.
    pub pins: u32,
    /// Sealed in a slab that is not exactly the file: what comes from the device goes into chunks.
    pub mixed: bool,
    /// One of them is a write. There is only one at a time: it may move the file's memory, define what lay between the
    /// old end and its bytes, and go on with the running checksum. The kernel lets asynchronous direct writes and the
    /// write-back of mappings come side by side.
    pub writing: bool,
    pub in_l1_list: bool,
    /// The blocks, not the node, know where the bytes are on the device and their checksums.
    pub placed: bool,
    /// Storing it on the device failed; the next fsync says so.
    pub failed: bool,
    /// Its record, if it has or gets one, goes when that of its heir is there.
    pub superseded: bool,
    /// Its number among the files under construction.
    pub building: Option<u64>,
    /// Pages of its device that it counts with beyond what it has there, until it is sealed or given up.
    pub expected: u64,
    /// In which period that was said ([`Room`](super::room::Room)).
    pub expected_in: u64,
    /// Pages that it had on its device when its construction began, and those that were set aside for it since.
    pub taken: u64,
    /// The kernel has refused to read from the slab by itself.
    pub no_passthrough: bool,
    /// Bytes of the slab, from its start, whose content is defined. Beyond, up to the file's size, are zeros
    /// that nobody has written into recycled memory yet. Only while unsealed.
    pub valid_to: u64,
    pub opened: SmallVec<[Opened; 1]>,
    /// Handles that can write, of all inode numbers.
    pub writers: u32,
    /// The same to read.
    pub held: u32,
    /// The write-back worker found somebody writing: it is next. Else a file that is written without a pause would hold
    /// up the whole publish queue (rule R4).
    pub claimed: bool,
    /// How far into the file the copies go that are going on, since there was none.
    pub pinned_to: u64,
    /// Times that the file was emptied: a write that was going on then has been before it.
    pub emptied: u32,
    /// The last number given to a change or a transfer of a block. Blocks go and come back; numbers do not.
    numbers: u32,
    /// The size that its record has, or that an fsync was promised: what it has grown by since is in no record before
    /// it is stored.
    pub size_kept: u64,
    /// Durable nodes whose records go when this one's is committed.
    pub supersedes: Vec<NodeId>,
    /// How many copy-on-write versions show this one's bytes.
    pub based: u32,
    /// The version of which this one was made by copy-on-write.
    pub origin: Option<NodeId>,
    /// The version that has taken its name.
    pub heir: Option<NodeId>,
    pub reads: Vec<PendingRead>,
    pub hinted: Vec<u32>,
    /// Bytes that hints brought and that nobody has read since.
    pub hint_unread: u64,
    pub lookups: Vec<PendingLookup>,
    /// fsyncs, each with the number in the publish queue whose commit it waits for.
    pub fsyncs: Vec<(u64, UnitReply)>,
    /// The next block to look at when part of a large file is dropped from L1.
    pub clock: usize,
    /// The running checksum: the block it is in, how far it has come, and its state.
    pub crc_block: usize,
    pub crc_to: usize,
    pub crc: u32,
    /// The inode number that lookups answer, where it is not the node's own.
    pub alias: Option<u64>,
    pub alias_made: Option<Instant>,
    /// All its further inode numbers that the kernel may know, that one among them.
    pub aliases: SmallVec<[u64; 1]>,
    /// Dropped from L1 without ever having been read since promotion counts as waste.
    pub promoted_unread: bool,
}

impl Hot {
    /// A number that no block of this file has had.
    pub fn number(&mut self) -> u32 {
        self.numbers = self.numbers.wrapping_add(1);
        self.numbers
    }

    /// The bytes of these blocks in memory are newer than what the device has, and than any checksum.
    pub fn rewritten(&mut self, indexes: RangeInclusive<usize>) {
        let version = self.number();
        for block in &mut self.blocks[indexes] {
            block.dirty = true;
            block.version = version;
            block.crc = None;
        }
    }

    /// Recycled memory up to `end` reads as zeros from now on, where nobody has written.
    pub fn define_to(&mut self, end: u64) {
        if let Some(slab) = &self.slab
            && self.valid_to < end
        {
            slab.span(self.valid_to as usize..end as usize).zero(0..(end - self.valid_to) as usize);
            self.valid_to = end;
        }
    }

    pub fn new(phase: Phase) -> Self {
        Self {
            phase,
            building: None,
            expected: 0,
            expected_in: 0,
            taken: 0,
            slab: None,
            mixed: false,
            no_passthrough: false,
            valid_to: 0,
            blocks: Vec::new(),
            opened: SmallVec::new(),
            writers: 0,
            promised: 0,
            held: 0,
            pins: 0,
            writing: false,
            claimed: false,
            pinned_to: 0,
            emptied: 0,
            numbers: 0,
            transfers: 0,
            size_kept: 0,
            placed: true,
            write_back: WriteBack::None,
            supersedes: Vec::new(),
            base: None,
            based: 0,
            origin: None,
            heir: None,
            superseded: false,
            reads: Vec::new(),
            leases: 0,
            leased: Vec::new(),
            hints: 0,
            hinted: Vec::new(),
            hint_unread: 0,
            zeroing: 0,
            lookups: Vec::new(),
            fsyncs: Vec::new(),
            l1: Links { prev: NONE, next: NONE },
            in_l1_list: false,
            clock: 0,
            crc_block: 0,
            crc_to: 0,
            crc: 0,
            alias: None,
            alias_made: None,
            aliases: SmallVec::new(),
            failed: false,
            promoted_unread: false,
        }
    }

    /// Somebody has it open, or is about to.
    pub fn kept(&self) -> bool {
        !self.opened.is_empty() || self.promised > 0 || self.held > 0
    }

    /// Somebody uses its bytes, wherever they are: they stay, whatever becomes of its name and its record.
    pub fn is_held(&self) -> bool {
        self.kept()
            || self.pins > 0
            || self.transfers > 0
            || self.based > 0
            || !self.reads.is_empty()
            || self.leases > 0
    }

    /// Whether a lease holds any of these blocks.
    pub fn is_leased(&self, blocks: Range<usize>) -> bool {
        let end = blocks.end.min(self.leased.len());
        blocks.start < end && self.leased[blocks.start..end].iter().any(|count| *count > 0)
    }

    /// Whether a hint that runs keeps this block in L1.
    pub fn is_hinted(&self, index: usize) -> bool {
        self.hinted.get(index).is_some_and(|count| *count > 0)
    }

    /// Somebody reads what was brought.
    pub fn is_read(&mut self) {
        (self.promoted_unread, self.hint_unread) = (false, 0);
    }

    /// How many of a resident block's first `len` bytes somebody wrote: recycled memory behind them shows nothing but
    /// zeros.
    pub fn defined(&self, index: usize, len: usize) -> usize {
        let in_slab = self.blocks.get(index).is_some_and(|block| matches!(block.mem, Mem::Slab));
        if in_slab && !self.sealed() {
            (self.valid_to.saturating_sub(index as u64 * BLOCK) as usize).min(len)
        } else {
            len
        }
    }

    /// How long the file is on the device, which is `size` once everything is stored.
    ///
    /// An end that was written and is not stored is left out: after a crash there would be zeros that nobody wrote. But
    /// not beyond what is promised already.
    pub fn stored_size(&self, size: u64) -> u64 {
        let mut end = size;
        while end > self.size_kept.min(size) {
            let index = blocks_for(end) - 1;
            let Some(block) = self.blocks.get(index).filter(|block| block.dirty) else { break };
            let stored = if block.place.is_empty() { 0 } else { u64::from(block.stored.1) };
            end = end.min(index as u64 * BLOCK + stored).max(self.size_kept.min(size));
            if stored > 0 {
                break;
            }
        }
        // Cut off, and not stored at its new length: a block is checked as a whole.
        match end.checked_sub(1).and_then(|last| self.blocks.get((last / BLOCK) as usize)) {
            Some(block) if !block.place.is_empty() => {
                end.max((end - 1) / BLOCK * BLOCK + u64::from(block.stored.1))
            }
            _ => end,
        }
    }

    pub fn handles(&self) -> u32 {
        self.opened.iter().map(|opened| opened.handles).sum()
    }

    /// Whatever its directory or kind allows: the kernel reads these bytes by itself, or another version shows them.
    pub fn must_not_change(&self) -> bool {
        self.passthrough_handles() > 0 || self.based > 0
    }

    pub fn passthrough_handles(&self) -> u32 {
        self.opened
            .iter()
            .filter(|opened| opened.mode == Mode::Passthrough)
            .map(|opened| opened.handles)
            .sum()
    }

    pub fn sealed(&self) -> bool {
        matches!(self.phase, Phase::Sealed)
    }

    pub fn private(&self) -> Option<&Private> {
        match &self.phase {
            Phase::Private(private) => Some(private),
            _ => None,
        }
    }

    pub fn private_mut(&mut self) -> Option<&mut Private> {
        match &mut self.phase {
            Phase::Private(private) => Some(private),
            _ => None,
        }
    }

    /// The memory of block `index`, if it has any.
    pub fn span(&self, index: usize) -> Option<Span> {
        let block = self.blocks.get(index)?;
        match &block.mem {
            Mem::None => None,
            Mem::Chunk(chunk) => Some(chunk.span()),
            Mem::Slab => {
                let slab = self.slab.as_ref()?;
                let start = index * BLOCK as usize;
                let end = (start + BLOCK as usize).min(slab.capacity_bytes() as usize);
                (start < end).then(|| slab.span(start..end))
            }
        }
    }

    /// Whether every block is in L1, in one slab: what passthrough needs.
    pub fn whole_slab(&self, size: u64) -> bool {
        self.slab.is_some()
            && !self.mixed
            && size > 0
            && self.blocks.len() == blocks_for(size)
            && self.blocks.iter().all(|block| matches!(block.mem, Mem::Slab) && block.resident())
    }

    pub fn dirty_blocks(&self) -> bool {
        self.blocks.iter().any(|block| block.dirty)
    }

    /// Whether anything but L1 residency keeps this state alive.
    pub fn in_use(&self) -> bool {
        self.kept()
            || self.pins > 0
            || self.transfers > 0
            || self.based > 0
            || self.base.is_some()
            || !self.reads.is_empty()
            || self.leases > 0
            || self.hints > 0
            || !self.lookups.is_empty()
            || !self.fsyncs.is_empty()
            || self.write_back != WriteBack::None
            || !self.sealed()
            || !self.supersedes.is_empty()
            || self.blocks.iter().any(|block| block.dirty || block.charge > 0 || block.io != BlockIo::Idle)
    }
}

impl std::fmt::Debug for Hot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hot")
            .field("phase", &self.phase)
            .field("opened", &self.opened)
            .field("writers", &self.writers)
            .field("pins", &self.pins)
            .field("transfers", &self.transfers)
            .finish_non_exhaustive()
    }
}
