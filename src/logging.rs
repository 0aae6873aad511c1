//! Where log lines go: standard error, the journal or a file.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use env_logger::{Builder, Target};
use log::{Level, LevelFilter};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::l2::MAGIC;

/// Starts logging and says what is notable about the configuration.
///
/// # Errors
/// The log file cannot be opened.
pub fn init(config: &Config) -> Result<()> {
    let mut builder = Builder::new();
    builder.filter_level(config.log_level);
    // It calls it an error when whoever asked has gone away meanwhile.
    builder.filter_module("fuser::reply", LevelFilter::Off);
    if let Some(path) = &config.log_file {
        if fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device()) {
            return Err(Error::new(format!("--log-file {}", path.display()), "is a block device")
                .remedy("name a file"));
        }
        if is_store(path) {
            return Err(Error::new(format!("--log-file {}", path.display()), "it is a kvcachefs store")
                .remedy("name a file of its own"));
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|error| {
            Error::caused_by(format!("--log-file {}", path.display()), error)
                .remedy("name a file that can be written")
        })?;
        builder.target(Target::Pipe(Box::new(file)));
    } else if std::env::var_os("JOURNAL_STREAM").is_some() {
        // The journal adds the time itself and takes the level from a prefix, as sd-daemon(3) defines it.
        builder.format(|out, record| writeln!(out, "<{}>{}", priority(record.level()), record.args()));
    }
    // A second start within one process, as tests do it, keeps the first logger.
    let _ = builder.try_init();
    for note in &config.notes {
        log::warn!("{note}");
    }
    Ok(())
}

fn is_store(path: &Path) -> bool {
    let mut start = [0; MAGIC.len()];
    // A pipe or a terminal has nothing to read, and must not hold us up.
    fs::metadata(path).is_ok_and(|meta| meta.is_file())
        && File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && start == *MAGIC
}

/// A panic ends the daemon, and the log says where it was. A thread less, or a state half changed, would be worse than a
/// restart: what is durable stays.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        log::error!("{panic}; this is a fault of kvcachefs: ending at once, what is durable stays");
        log::logger().flush();
        std::process::abort();
    }));
}

const fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}
