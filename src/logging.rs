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
    filters(&mut builder, config.log_level, &std::env::var("RUST_LOG").unwrap_or_default());
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

/// `level` is ours: other crates say what is wrong, and the rest only where `RUST_LOG` names them (`fuser=debug`), since
/// fuser tells of every request. A bare level there is meant for some other program.
fn filters(builder: &mut Builder, level: LevelFilter, named: &str) {
    builder.filter_level(level.min(LevelFilter::Warn)).filter_module("kvcachefs", level);
    // It calls it an error when whoever asked has gone away meanwhile.
    builder.filter_module("fuser::reply", LevelFilter::Off);
    for (module, level) in named.split(',').filter_map(|word| word.split_once('=')) {
        match level.trim().parse() {
            Ok(level) => _ = builder.filter_module(module.trim(), level),
            Err(_) => eprintln!("kvcachefs: RUST_LOG: '{level}' is no log level; ignored"),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use log::{Log, Metadata};

    fn says(level: LevelFilter, named: &str, module: &str, of: Level) -> bool {
        let mut builder = Builder::new();
        filters(&mut builder, level, named);
        builder.build().enabled(&Metadata::builder().target(module).level(of).build())
    }

    #[test]
    fn other_crates_speak_when_they_are_named() {
        let (debug, session) = (LevelFilter::Debug, "fuser::session");
        assert!(says(debug, "", "kvcachefs::store::space", Level::Debug));
        assert!(says(debug, "", session, Level::Warn) && !says(debug, "", session, Level::Info));
        assert!(!says(LevelFilter::Off, "", session, Level::Error));
        assert!(!says(debug, "", "fuser::reply", Level::Error));
        assert!(says(debug, "fuser=debug", session, Level::Debug));
        assert!(says(LevelFilter::Info, "x=off, fuser=trace", session, Level::Trace));
        assert!(!says(debug, "trace", session, Level::Debug), "it is some other program's");
        assert!(!says(LevelFilter::Info, "trace", "kvcachefs::daemon", Level::Debug));
    }
}
