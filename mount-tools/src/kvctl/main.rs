//! `kvctl`: what a person does with a kvcachefs mount, in one program.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::error::{ContextKind, ErrorKind};
use clap::{Parser, Subcommand};
use kvcachefs::config::usage_error;
use kvcachefs::error::{Error, Result};
use kvcachefs::mount::How;
use kvcachefs::units::Period;

mod classify;
mod drain;
mod interrupt;
mod lease;
mod listing;
mod paths;
mod prefetch;
#[path = "../program.rs"]
mod program;
mod progress;
mod show;
mod umount;
mod users;

/// Mounts, unmounts and looks into kvcachefs file systems.
#[derive(Parser)]
#[command(name = "kvctl", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Mount in the background; returns when the mount works. Options are those of `kvcachefs mount`.
    #[command(disable_help_flag = true)]
    Mount {
        /// As after `kvcachefs mount`; --help lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION | MOUNTPOINT")]
        args: Vec<OsString>,
    },
    /// Store everything, unmount, and wait for the daemon to end.
    #[command(visible_alias = "unmount")]
    Umount {
        /// The directory on which the file system is mounted.
        mountpoint: PathBuf,
        /// Detach now, though files are open. The daemon ends when the last of them is closed.
        #[arg(short = 'l', long)]
        lazy: bool,
        /// Only if its daemon is dead or does not answer: cut the connection, so that nobody waits for it any longer,
        /// and detach it. It is no error if nothing is mounted.
        #[arg(short = 'f', long, conflicts_with = "lazy")]
        force: bool,
        /// How long to wait for what is not yet stored, and then for the daemon.
        #[arg(short = 't', long, value_name = "TIME", default_value = "60s")]
        timeout: Period,
    },
    /// Show how a mount is doing, or all of them.
    Status {
        mountpoint: Option<PathBuf>,
        /// For programs: an array with one object for each mount.
        #[arg(long)]
        json: bool,
    },
    /// Print the counters of a mount, one a line.
    Stats { mountpoint: Option<PathBuf> },
    /// Print the counters of a mount as Prometheus reads them.
    Metrics { mountpoint: Option<PathBuf> },
    /// Print what has happened on a mount since it was mounted; times are UTC.
    Events {
        mountpoint: Option<PathBuf>,
        /// Go on until it is unmounted.
        #[arg(short = 'f', long)]
        follow: bool,
    },
    /// Show where files are, L1 or L2, and what holds them there.
    Classify {
        /// Files, and directories for all files below them; of one mount.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
        /// For programs: one object.
        #[arg(long)]
        json: bool,
    },
    /// Bring files to L1, and wait until they are there.
    Prefetch(prefetch::Args),
    /// Keep files in L1 while a command runs; without one, until standard input ends or Ctrl-C.
    Lease(lease::Args),
    /// Wait until what has been written so far is durable.
    Drain {
        /// Files and directories of one mount; all that is in it if there are none. Without any: the only mount.
        paths: Vec<PathBuf>,
        /// How long it may take; what is not stored by then is stored all the same. As long as the mount allows if not given.
        #[arg(short = 't', long, value_name = "TIME")]
        timeout: Option<Period>,
        /// For programs: one object.
        #[arg(long)]
        json: bool,
    },
    /// Show who keeps what in L1.
    Leases {
        mountpoint: Option<PathBuf>,
        /// For programs: an array with one object for each lease.
        #[arg(long)]
        json: bool,
    },
    /// Show what is to be brought to L1.
    Hints {
        mountpoint: Option<PathBuf>,
        /// For programs: an array with one object for each ticket.
        #[arg(long)]
        json: bool,
    },
    /// Print the version.
    Version,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(shown) if matches!(shown.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return if shown.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        Err(error) => return failed(&understood(&error)),
    };
    match act(cli.command) {
        Ok(code) => code,
        Err(error) => failed(&error),
    }
}

fn failed(error: &Error) -> ExitCode {
    eprintln!("kvctl: {error}");
    ExitCode::FAILURE
}

/// The daemon's words for a wrong command line, with this program's remedies.
fn understood(error: &clap::Error) -> Error {
    const COMMANDS: &str = "use mount, umount, status, stats, metrics, events, classify, prefetch, lease, drain, leases, hints or \
         version";
    match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Error::new("no command given", "").remedy(COMMANDS)
        }
        ErrorKind::InvalidSubcommand => usage_error(error).remedy(COMMANDS),
        ErrorKind::UnknownArgument
            if error.get(ContextKind::InvalidArg).is_some_and(|arg| arg.to_string().starts_with('-')) =>
        {
            usage_error(error).remedy("kvctl --help shows how")
        }
        _ => usage_error(error),
    }
}

fn act(command: Cmd) -> Result<ExitCode> {
    let done = match command {
        Cmd::Mount { args } => {
            let program = program::daemon()?;
            let error = Command::new(&program).args(["mount", "--daemon"]).args(args).exec();
            Err(Error::caused_by(program.display(), error))
        }
        Cmd::Umount { mountpoint, lazy, force, timeout } => {
            let how = if force {
                How::ByForce
            } else if lazy {
                How::Lazily
            } else {
                How::Politely
            };
            umount::run(&mountpoint, how, timeout.0)
        }
        Cmd::Status { mountpoint, json } => show::status(mountpoint.as_deref(), json),
        Cmd::Stats { mountpoint } => show::file(mountpoint.as_deref(), "stats"),
        Cmd::Metrics { mountpoint } => show::file(mountpoint.as_deref(), "metrics"),
        Cmd::Events { mountpoint, follow } => show::events(mountpoint.as_deref(), follow),
        Cmd::Classify { paths, json } => classify::run(&paths, json),
        Cmd::Prefetch(args) => prefetch::run(&args),
        Cmd::Lease(args) => return lease::run(&args),
        Cmd::Drain { paths, timeout, json } => drain::run(&paths, timeout.map(|time| time.0), json),
        Cmd::Leases { mountpoint, json } => listing::run(mountpoint.as_deref(), "leases", json),
        Cmd::Hints { mountpoint, json } => listing::run(mountpoint.as_deref(), "hints", json),
        Cmd::Version => print(format!("kvctl {}\n", env!("CARGO_PKG_VERSION")).as_bytes()),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// What the client says is one line already.
fn asked<T>(answer: mount_tools::client::Result<T>) -> Result<T> {
    answer.map_err(|error| Error::new(error, ""))
}

/// Writes to standard output. Whoever closes it early (`| head`) has seen enough.
fn print(text: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        answer => answer.map_err(|error| Error::caused_by("standard output", error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
