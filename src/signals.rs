//! Signals become messages.
//!
//! The first SIGTERM or SIGINT asks for an orderly stop, every further one for an immediate one; the
//! daemon decides what that means. SIGHUP is logged and otherwise ignored: a terminal that closes is
//! no reason to lose a mount. SIGIO, which the kernel sends when somebody opens a slab that is just
//! being asked for its lease, would kill the process by default and is swallowed. SIGPIPE is ignored
//! by the Rust runtime already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};

use signal_hook::consts::{SIGHUP, SIGINT, SIGIO, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::error::{Error, Result};

/// What somebody outside asks of the daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// Stop accepting, drain, unmount.
    Orderly,
    /// End at once; what is durable stays durable.
    Now,
}

/// The thread that waits for signals; it ends and is joined when this is dropped.
#[derive(Debug)]
pub struct Watch {
    handle: Handle,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Sends a message for every stop signal from now on. `M` is the daemon's own message type, so that one
/// channel carries everything it waits for.
///
/// # Errors
/// The kernel refuses a signal action or a thread.
pub fn watch<M: From<Stop> + Send + 'static>(messages: Sender<M>) -> Result<Watch> {
    let failed = |error| Error::caused_by("signal handling", error);
    // A handler that does next to nothing is the safe way to swallow a signal.
    signal_hook::flag::register(SIGIO, Arc::new(AtomicBool::new(false))).map_err(failed)?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(failed)?;
    let handle = signals.handle();
    let stopped = Arc::new(AtomicBool::new(false));
    let says = stopped.clone();
    let thread = thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut stop = Stop::Orderly;
            for signal in signals.forever() {
                if signal == SIGHUP {
                    log::info!("SIGHUP ignored; options take effect at the next mount");
                    continue;
                }
                log::info!("{} received", if signal == SIGTERM { "SIGTERM" } else { "SIGINT" });
                says.store(true, Ordering::Relaxed);
                if messages.send(M::from(stop)).is_err() {
                    return; // nobody is left to be stopped
                }
                stop = Stop::Now;
            }
        })
        .map_err(failed)?;
    Ok(Watch { handle, stopped, thread: Some(thread) })
}

impl Watch {
    /// Set once a stop has been asked for: for a start that is under way and hears no messages yet.
    pub fn stopped(&self) -> Arc<AtomicBool> {
        self.stopped.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // The thread panics only if logging does, and then there is nothing left to tell.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::getpid;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn the_second_signal_is_more_urgent_and_others_do_no_harm() {
        let (tx, rx) = mpsc::channel::<Stop>();
        let watch = watch(tx).expect("signal handling");
        let wait = Duration::from_secs(10);
        for harmless in [Signal::SIGIO, Signal::SIGHUP, Signal::SIGPIPE] {
            kill(getpid(), harmless).expect("kill");
        }
        kill(getpid(), Signal::SIGTERM).expect("kill");
        assert_eq!(rx.recv_timeout(wait), Ok(Stop::Orderly));
        assert!(watch.stopped().load(Ordering::Relaxed));
        kill(getpid(), Signal::SIGINT).expect("kill");
        assert_eq!(rx.recv_timeout(wait), Ok(Stop::Now));
        drop(watch);
        assert!(rx.recv().is_err(), "the sender went with its thread");
    }
}
