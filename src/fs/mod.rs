//! FUSE: the only place that knows the protocol.
//!
//! Every operation unpacks its arguments, calls the store, and replies; nothing is decided here. What may take time
//! (reads from the device, writes that wait for room, fsync) takes the reply along and answers from wherever it
//! ends, so a session thread is never held (rule R15).

mod adapter;
mod ioctl;
mod notify;
mod session;

pub use self::adapter::KvFs;
pub use self::notify::Invalidator;
pub use self::session::{Served, serve};
