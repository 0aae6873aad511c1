//! What moves bytes between memory and a device.
//!
//! An engine promises, whatever happens to whoever asked:
//! * a transfer is answered exactly once, by calling its `done`, and not before the kernel has let go of
//!   its memory (rule R10);
//! * the answer is `Ok` only for all of the bytes: short transfers are continued, and the end of the device
//!   is an error ([`io::ErrorKind::UnexpectedEof`]);
//! * reads go before write-back, and write-back is never starved (see `lanes`);
//! * `submit` neither blocks nor calls `done` itself, except to refuse after [`Engine::stop`].
//!
//! `done` runs on a thread of the engine. It must be short, and must not wait for other I/O of the same
//! engine: that would be waiting for itself. Submitting more is fine.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::EngineGauges;
use crate::memory::{Region, RegionId, Span};

/// Whom a transfer makes wait; the order of service.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// A client waits for it, or a commit does.
    Demand,
    /// L2 to L1, ahead of need.
    Promotion,
    /// L1 to L2, after publishing. Bounded in what it may have in flight.
    WriteBack,
}

impl Class {
    pub const ALL: [Self; 3] = [Self::Demand, Self::Promotion, Self::WriteBack];

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    Read,
    Write,
}

/// Takes the outcome of a transfer.
pub type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// One transfer between `span` and the device.
pub struct Io {
    pub direction: Direction,
    pub class: Class,
    /// First byte on the device.
    pub offset: u64,
    /// Held until the kernel is done with it, whatever happened to the asker; let go before `done` is called.
    pub span: Span,
    pub done: Done,
}

pub trait Engine: Send + Sync {
    /// Accepts a transfer. Never blocks.
    fn submit(&self, io: Io);

    /// Offers memory for registration as a fixed buffer. Best effort and asynchronous: spans that name the
    /// region work with or without it. The memory has to be mapped until [`Engine::unregister`].
    fn register(&self, region: Region);

    /// Takes a registration back. Transfers submitted from here on do not use it; those in flight finish
    /// first, so it is safe at any time.
    fn unregister(&self, id: RegionId);

    /// Makes every write whose `done` has been called durable. Blocks, for as long as the device takes.
    fn sync_data(&self) -> io::Result<()>;

    fn in_flight(&self) -> EngineGauges;

    fn name(&self) -> &'static str;

    /// Finishes everything accepted and joins the threads. Later submissions are answered with `ESHUTDOWN`.
    fn stop(&self);
}

/// What an engine works on.
#[derive(Clone)]
pub struct Target {
    pub file: Arc<File>,
    /// Bytes. Transfers beyond are refused, so that a write never makes a store file longer.
    pub len: u64,
    /// Where a continued transfer may start: the device's alignment for direct I/O, otherwise 1.
    pub grain: usize,
    /// How logs and threads call it.
    pub label: String,
}

/// Bounds of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Operations at the kernel at once; what is beyond waits in the engine's queue, which takes everything.
    pub depth: u32,
    /// Larger transfers are cut into pieces of this many bytes, rounded to pages.
    pub piece_bytes: u32,
    /// Bytes of write-back at the device at once. A read that arrives waits behind at most these.
    pub write_back_bytes: u64,
    /// Threads of the thread engine.
    pub threads: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { depth: 128, piece_bytes: 1 << 20, write_back_bytes: 16 << 20, threads: 16 }
    }
}
