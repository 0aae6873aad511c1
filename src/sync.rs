//! The locks, calls, threads and clock of the store.
//!
//! They are parking_lot's and the standard library's. In unit tests they may be shuttle's instead: whatever is made inside
//! of one of its executions waits for, and is scheduled by, the checker, which so decides who comes first
//! (`daemon/interleavings.rs`). What runs outside of one is served as ever.
//!
//! The checker must see every wait for another thread: a lock that is not from here must not be held by who takes one that is,
//! or waits.

#[cfg(test)]
mod checked;

use std::io;
use std::time::Instant;

#[cfg(not(test))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};

#[cfg(test)]
pub use self::checked::{Condvar, Mutex, MutexGuard, advance};

pub struct JoinHandle(Handle);

enum Handle {
    Thread(std::thread::JoinHandle<()>),
    #[cfg(test)]
    Task(shuttle::thread::JoinHandle<()>),
}

impl JoinHandle {
    pub fn join(self) -> std::thread::Result<()> {
        match self.0 {
            Handle::Thread(thread) => thread.join(),
            #[cfg(test)]
            Handle::Task(task) => task.join(),
        }
    }
}

/// Starts a thread that the daemon cannot do without. If it panics a rule was broken: what is durable is durable, nothing
/// else may be promised, and whoever waits for what is not done any more would wait for ever.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle> {
    #[cfg(test)]
    if checked::is_on() {
        // The checker reports panics, and ends tasks by unwinding them.
        let builder = shuttle::thread::Builder::new().name(name.to_owned());
        return builder.spawn(run).map(|task| JoinHandle(Handle::Task(task)));
    }
    let called = name.to_owned();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            log::error!("{called} panicked; ending the daemon");
            std::process::abort();
        }
    })?;
    Ok(JoinHandle(Handle::Thread(thread)))
}

/// The time. To the checker none passes but what a test lets pass.
pub fn now() -> Instant {
    #[cfg(test)]
    if checked::is_on() {
        return checked::now();
    }
    Instant::now()
}
