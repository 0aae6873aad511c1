//! Write-back: published bytes go to the device in the order of publishing, and then their record (rules R4, R5, R6).
//!
//! ```text
//! seal -> queue -> worker: extents, checksums, transfers -> committer: flush, then the record -> durable
//! ```
//!
//! Data of several files may be on its way at once; records are committed strictly from the front of the queue. A
//! file that was unlinked meanwhile, or whose bytes could not be stored, is passed over and holds nobody up. A
//! record is written only after the device has confirmed the bytes it points to.

pub mod commit;
pub mod queue;
pub mod worker;
