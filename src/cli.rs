//! The command line. Knows what was typed; what it amounts to is settled in [`crate::config`].

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

use crate::config::{Config, ENV_PREFIX, Layer, fstab_config, usage_error};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::mount::How;

/// A file system that keeps the key/value cache of LLM inference in RAM (L1) and on NVMe (L2).
#[derive(Parser)]
#[command(name = "kvcachefs", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mount a kvcachefs and serve it, in the foreground unless --daemon says otherwise.
    Mount(Box<MountArgs>),
    /// Unmount; the daemon then writes what is not yet on L2 and ends.
    #[command(visible_alias = "unmount")]
    Umount {
        /// The directory on which the file system is mounted.
        #[arg(required_unless_present = "config")]
        mountpoint: Option<PathBuf>,
        /// Detach now, though files are open; it ends when the last of them is closed.
        #[arg(short = 'l', long)]
        lazy: bool,
        /// Only if its daemon is dead or does not answer: cut the connection, so that nobody waits for it any
        /// longer, and detach it. It is no error if nothing is mounted.
        #[arg(short = 'f', long, conflicts_with_all = ["lazy", "dead"])]
        force: bool,
        /// As --force, but not if the daemon is there and merely does not answer. For service managers.
        #[arg(long, conflicts_with = "lazy")]
        dead: bool,
        /// The TOML file that names the mount point.
        #[arg(long, value_name = "FILE", conflicts_with = "mountpoint")]
        config: Option<PathBuf>,
    },
    /// Print the version.
    Version,
    /// What the daemon starts to watch over its mount; see the option --guard.
    #[command(hide = true)]
    Guard { mountpoint: PathBuf, daemon: i32 },
}

/// Options may also stand in a TOML file (`dirty_limit = "2GiB"`) or in the environment
/// (`KVCACHEFS_DIRTY_LIMIT=2GiB`). Options on the command line win, then the environment, then the file.
/// Sizes need a unit (4GiB, 256MiB, 1.5TiB, 4096B; KB, MB, GB and TB are decimal), and so do times
/// (100ms, 5s, 2m).
#[derive(Args)]
struct MountArgs {
    /// A TOML file with options.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Options as in fstab: the same names, with ro and rw, separated by commas.
    #[arg(short = 'o', value_name = "OPTION[=VALUE],...", allow_hyphen_values = true)]
    options: Vec<String>,

    #[command(flatten)]
    layer: Layer,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Action {
    Mount(Box<Config>),
    Unmount {
        mountpoint: PathBuf,
        how: How,
    },
    /// Watch over the mount of the daemon that has started us.
    Guard {
        mountpoint: PathBuf,
        daemon: i32,
    },
    Show(Text),
}

/// Text for standard output: help or version.
#[derive(Debug)]
pub struct Text(clap::Error);

impl Text {
    /// Prints it, in colour if the terminal can.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn show(&self) -> Result<()> {
        self.0.print().map_err(|error| Error::caused_by("standard output", error))
    }
}

/// Understands a command line in its environment.
///
/// # Errors
/// One line that names the word, variable or key that is wrong.
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    vars: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Action> {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(shown) if matches!(shown.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(Action::Show(Text(shown)));
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Err(Error::new("no command given", "").remedy("use mount, umount or version"));
        }
        Err(error) => return Err(usage_error(&error)),
    };
    match cli.command {
        Command::Mount(args) => args.resolve(vars).map(|config| Action::Mount(Box::new(config))),
        Command::Umount { mountpoint, lazy, force, dead, config } => {
            let named = match config {
                Some(file) => Layer::from_file(&file)?.mountpoint,
                None => mountpoint,
            };
            let mountpoint = named.ok_or_else(|| {
                Error::new("--config", "names no mount point").remedy("name it: kvcachefs umount DIR")
            })?;
            let how = if force {
                How::ByForce
            } else if dead {
                How::IfDead
            } else if lazy {
                How::Lazily
            } else {
                How::Politely
            };
            Ok(Action::Unmount { mountpoint, how })
        }
        Command::Guard { mountpoint, daemon } => Ok(Action::Guard { mountpoint, daemon }),
        Command::Version => {
            let version = Cli::try_parse_from(["kvcachefs", "--version"]).err();
            version.map(|text| Action::Show(Text(text))).ok_or_else(|| Error::new("version", "is unknown"))
        }
    }
}

impl MountArgs {
    fn resolve(self, vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Config> {
        let vars: Vec<_> = vars.into_iter().collect();
        let options = || self.options.iter().map(String::as_str);
        let variable = format!("{ENV_PREFIX}CONFIG");
        let from_variable = || {
            vars.iter().find(|(name, value)| *name == *variable && !value.is_empty()).map(|(_, v)| v.into())
        };
        let file = self.config.clone().or_else(|| fstab_config(options())).or_else(from_variable);
        let file = file.map_or_else(|| Ok(Layer::default()), |path: PathBuf| Layer::from_file(&path))?;
        let fstab = Layer::from_fstab(options())?;
        let (env, unknown) = Layer::from_env(vars)?;
        let mut config = Config::resolve(file, env, self.layer.over(fstab), &Host::probe())?;
        config.notes.extend(unknown.iter().map(|name| format!("{name} is set and names no option; ignored")));
        Ok(config)
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

    fn error(args: &[&str]) -> String {
        let words = ["kvcachefs"].iter().chain(args).map(OsString::from);
        parse(words, []).expect_err("a usage error").to_string()
    }

    #[test]
    fn usage_errors_are_one_line_and_name_the_word() {
        for (args, expected) in [
            (&["mount", "--lazy-bones", "/mnt"][..], "--lazy-bones: unknown option"),
            (&["mount", "--l3", "4GiB", "/mnt"], "--l3: unknown option"),
            (&["mount", "--l1", "4", "/mnt"], "--l1: size '4' has no unit; write 4GiB"),
            (&["mount", "--l1"], "--l1: has no value"),
            (&["mount", ""], "MOUNTPOINT: is empty; name a directory"),
            (&["umount", ""], "MOUNTPOINT: is empty; name a directory"),
            (&["mount", "--l1", "1GiB", "--l1", "2GiB"], "--l1: is given twice"),
            (&["mount", "--slab-rest", "5", "/mnt"], "--slab-rest: duration '5' has no unit"),
            (&["mount", "--policy", "s3fifo", "/mnt"], "--policy: policy 's3fifo' is unknown; use lru"),
            (&["mount", "--lock=maybe", "/mnt"], "--lock"),
            (&["mount", "--threads=many", "/mnt"], "--threads"),
            (&["mount", "--log-level", "loud", "/mnt"], "--log-level: log level 'loud' is unknown"),
            (&["mount", "-o", "ro,dirty=1GiB", "/mnt"], "-o dirty: unknown option"),
            (
                &["mount", "-o", "dirty_limits=1GiB", "/mnt"],
                "-o dirty_limits: unknown option; did you mean dirty_limit?",
            ),
            (
                &["mount", "-o", "remount,ro", "/mnt"],
                "-o remount: is not supported; unmount, and mount again",
            ),
            (&["mount", "-o", "format", "/mnt"], "-o format: would empty the stores at every start"),
            (&["mount", "-o", "l1=4", "/mnt"], "-o l1: size '4' has no unit"),
            (&["mount", "/a", "/b"], "/b: a second mount point; give one"),
            (&["version", "/b"], "/b: is not expected here"),
            (&["mount"], "MOUNTPOINT: is missing"),
            (&["umount"], "<MOUNTPOINT>: is missing; kvcachefs umount --help shows how"),
            (&["dismount"], "dismount: unknown command"),
            (&[], "no command given"),
        ] {
            let text = error(args);
            assert!(text.contains(expected) && !text.contains('\n'), "{args:?}: {text}");
        }
    }
}
