//! L1: pinned memory, handed out as slabs and chunks.
//!
//! A [`Slab`] is one file of memory, mapped once and recycled (facts 1, 4): a file that lies wholly in a slab of its own can be
//! read by the kernel alone, in passthrough. A [`Chunk`] is a piece of a shared arena for what never is: small files,
//! and blocks of files that are written in place. Both are shares: clone them to keep the memory, drop the last to
//! give it back. The [`Pool`] keeps all of it within one budget.

mod chunks;
mod pool;
mod shm;
mod slab;
#[cfg(test)]
mod tests;

pub use self::chunks::{CHUNK_MAX, Chunk};
pub use self::pool::{Owner, Pool, PoolConfig, PoolStats, RegionWatcher};
pub use self::shm::SLAB_PATH;
pub use self::slab::Slab;
