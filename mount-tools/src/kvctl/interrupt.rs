//! Ctrl-C and SIGTERM as something to ask about, so that what was begun is taken back.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvcachefs::error::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Which of the two has come; a second time it ends the program as ever.
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// # Errors
    /// The signals cannot be had.
    pub fn new() -> Result<Self> {
        let came = Arc::new(AtomicUsize::new(0));
        let armed = || -> io::Result<()> {
            for signal in [SIGINT, SIGTERM] {
                signal_hook::flag::register_usize(signal, Arc::clone(&came), signal as usize)?;
            }
            Ok(())
        };
        armed().map_err(|error| Error::caused_by("signals", error))?;
        Ok(Self(came))
    }

    pub fn came(&self) -> Option<i32> {
        i32::try_from(self.0.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
    }

    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
