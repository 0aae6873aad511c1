//! A signal that would end the program has it end like an error instead: mounts, daemons, loop devices and files go.
//!
//! `timeout` sends its signal twice, so the second one is no more urgent than the first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::{Context, Failure, Result};

static WANTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// From now on signals are kept until somebody asks.
pub fn watch() -> Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&WANTED))
            .context(|| format!("cannot handle signal {signal}"))?;
    }
    Ok(())
}

pub fn is_wanted() -> bool {
    WANTED.load(Ordering::Relaxed)
}

/// To be asked wherever something takes long.
///
/// # Errors
/// A signal has come.
pub fn check() -> Result<()> {
    if is_wanted() { Err(Failure::new("interrupted".into())) } else { Ok(()) }
}
