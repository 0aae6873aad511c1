//! The client of `.ctl/lease`, `.ctl/prefetch` and `.ctl/drain`, as docs/CONTROL.md says what they do.
//!
//! A scheduler opens a [`Handle`], interns the names of its ranges once, and then asks about one request at a time:
//!
//! ```no_run
//! # use mount_tools::client::{Became, Handle, Range, Terms, Wish};
//! # fn main() -> mount_tools::client::Result<()> {
//! let handle = Handle::open("/mnt/kv")?;
//! let names = handle.intern(&["qwen3-8b/rank0/3fa9.kv"])?;
//! let window: Vec<Range> = names.into_iter().map(Range::of).collect();
//! let lease = match handle.prefetch(&window, &Wish::new().leased(Terms::shared_by(2)))?.became {
//!     Became::Here(lease) => lease,
//!     Became::Begun(ticket) => ticket.wait(None)?.and_then(|end| end.lease),
//!     Became::Denied(why) => panic!("it is computed instead: {why}"),
//!     Became::Nothing => None,
//! };
//! # Ok(())
//! # }
//! ```
//!
//! What is taken is a guard: a [`Lease`] is given back and a [`Ticket`] is taken back when it is dropped, and all of a
//! handle's go with its last clone, and with the process.

mod drain;
mod error;
mod handle;
mod lease;
mod names;
mod place;
mod ticket;
mod window;
mod wire;

pub use kvcachefs::abi::Slot as Name;
pub use nix::errno::Errno;

pub use self::drain::{Drain, Failures};
pub use self::error::{Error, Result};
pub use self::handle::{Handle, Limits};
pub use self::lease::{Lease, LeaseState, Leased, Life};
pub use self::place::Place;
pub use self::ticket::{Became, End, Ended, Prefetch, Progress, Stage, Ticket, Wish};
pub use self::window::{Found, Id, Lookup, Range, State, Terms, Tier, Window, id};
