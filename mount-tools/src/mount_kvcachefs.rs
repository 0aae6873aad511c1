//! `mount.kvcachefs` (cargo knows it as `mount-kvcachefs`, since it allows no dot): what mount(8) runs for `mount -t kvcachefs SOURCE DIR -o OPTIONS`, and so what an
//! fstab line comes to. Under the name `mount.fuse.kvcachefs` it serves `-t fuse.kvcachefs` as well.
//!
//! SOURCE is a store (`/nvme/kv.store:200GiB`) unless the options name stores themselves; any other word
//! is just the name that mount tables show.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use clap::error::ErrorKind;
use kvcachefs::config::{is_mount_option, usage_error};
use kvcachefs::error::{Error, Result};

mod program;

/// mount(8) calls these "incorrect invocation" and "mount failure".
const USAGE: u8 = 1;
const FAILED: u8 = 32;

/// Mounts a kvcachefs in the background, on behalf of mount(8).
#[derive(Parser)]
#[command(name = "mount.kvcachefs", version, max_term_width = 100)]
struct Cli {
    /// A store, as PATH or PATH:SIZE, or any name.
    source: String,
    /// The directory on which the file system appears.
    mountpoint: PathBuf,
    /// The options of `kvcachefs mount`, with _ for -, and those of mount(8); separated by commas.
    #[arg(short = 'o', value_name = "OPTION[=VALUE],...", allow_hyphen_values = true)]
    options: Vec<String>,
    /// Ignore options that are unknown.
    #[arg(short = 's')]
    sloppy: bool,
    /// Do everything but mount.
    #[arg(short = 'f')]
    fake: bool,
    /// There is no mtab to write any more.
    #[arg(short = 'n')]
    no_mtab: bool,
    /// Say what is run.
    #[arg(short = 'v')]
    verbose: bool,
    /// The type that mount(8) was asked for.
    #[arg(short = 't', value_name = "TYPE")]
    fstype: Option<String>,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(shown) if matches!(shown.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return if shown.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        Err(error) => {
            eprintln!("mount.kvcachefs: {}", usage_error(&error).remedy("mount.kvcachefs --help shows how"));
            return USAGE.into();
        }
    };
    match mount(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("mount.kvcachefs: {error}");
            FAILED.into()
        }
    }
}

fn mount(cli: &Cli) -> Result<ExitCode> {
    let program = program::daemon()?;
    let mut command = Command::new(&program);
    command.args(words(cli)).arg("--").arg(&cli.mountpoint);
    if cli.verbose {
        println!("{command:?}");
    }
    if cli.fake {
        return Ok(ExitCode::SUCCESS);
    }
    // The daemon goes into the background; the program that we wait for returns when the mount works.
    let status = command.status().map_err(|error| Error::caused_by(program.display(), error))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { FAILED.into() })
}

fn words(cli: &Cli) -> Vec<String> {
    let options = cli.options.iter().flat_map(|list| list.split(',')).map(str::trim);
    let options: Vec<&str> =
        options.filter(|word| !word.is_empty() && (!cli.sloppy || is_mount_option(key(word)))).collect();
    let names = |wanted: &str| options.iter().any(|word| key(word) == wanted);
    let mut words = vec!["mount".to_owned(), "--daemon".to_owned()];
    if !options.is_empty() {
        words.extend(["-o".to_owned(), options.join(",")]);
    }
    if cli.source.starts_with('/') && !names("l2") {
        words.extend(["--l2".to_owned(), cli.source.clone()]);
    }
    // Exactly as in fstab, since that is how `mount -a` finds out that it is mounted already.
    if !names("fsname") {
        words.push(format!("--fsname={}", cli.source));
    }
    words
}

fn key(word: &str) -> &str {
    word.split('=').next().unwrap_or(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(line: &str) -> String {
        words(&Cli::try_parse_from(line.split(' ')).expect("a command line")).join(" ")
    }

    #[test]
    fn a_source_is_a_store_or_a_name() {
        for (line, expected) in [
            ("m /s:1GiB /mnt -o l1=1GiB,ro", "mount --daemon -o l1=1GiB,ro --l2 /s:1GiB --fsname=/s:1GiB"),
            ("m kv /mnt -o rw,l2=/s:1GiB", "mount --daemon -o rw,l2=/s:1GiB --fsname=kv"),
            ("m /s /mnt -o l2=/t -n -t fuse.kvcachefs", "mount --daemon -o l2=/t --fsname=/s"),
            (
                "m kv /mnt -s -o ro,bogus=3,x-systemd.automount,fsname=f",
                "mount --daemon -o ro,x-systemd.automount,fsname=f",
            ),
            ("m kv /mnt", "mount --daemon --fsname=kv"),
        ] {
            assert_eq!(words_of(line), expected, "{line}");
        }
    }
}
