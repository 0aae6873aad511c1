//! kvcachefs: a FUSE file system that keeps the key/value cache of LLM inference in RAM and on NVMe.

pub mod l1;
pub mod l2;
pub mod memory;
