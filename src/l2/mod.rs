//! L2: block storage.
//!
//! A [`Device`] is one opened file or block device; bytes move to and from it through an [`Engine`],
//! which takes whole transfers and answers each exactly once; an [`Allocator`] knows which of its blocks
//! are free. A [`volume::Volume`] is a store: some devices, and the journal of its catalog on the first. Nothing here
//! knows of names or tiers.

mod device;
mod engine;
mod extents;
mod faulty;
mod foreign;
pub mod journal;
mod lanes;
mod meters;
pub mod record;
mod superblock;
mod threads;
mod transfer;
mod uring;
pub mod volume;

#[cfg(test)]
mod engine_tests;

pub use device::{Claimed, Device, DeviceError, DeviceOptions, EngineKind, Made};
pub use engine::{Class, Direction, Engine, EngineOptions, Io, Target};
pub use extents::{Allocator, BLOCK_BYTES, ClaimError, Extent, Extents};
pub use faulty::{Faults, Faulty, Logged};
pub use meters::{ClassGauges, EngineGauges};
pub use superblock::MAGIC;
pub use threads::Threads;
pub use uring::Uring;
