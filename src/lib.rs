//! kvcachefs: a FUSE file system that keeps the key/value cache of LLM inference in RAM and on NVMe.

pub mod abi;
pub mod background;
pub mod cli;
pub mod config;
pub mod control;
pub mod daemon;
pub mod error;
pub mod fs;
pub mod guard;
pub mod host;
pub mod l1;
pub mod l2;
pub mod logging;
pub mod memory;
pub mod mount;
pub mod shown;
pub mod signals;
pub mod stats;
pub mod store;
pub mod sync;
pub mod units;
pub mod writeback;
