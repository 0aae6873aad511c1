//! `mount.kvcachefs` (cargo knows it as `mount-kvcachefs`, since it allows no dot): what mount(8) runs for `mount -t kvcachefs SOURCE DIR -o OPTIONS`, and so what an
//! fstab line comes to. Under the name `mount.fuse.kvcachefs` it serves `-t fuse.kvcachefs` as well.
//!
//! SOURCE is a store (`/nvme/kv.store:200GiB`) unless the options name stores themselves; any other word
//! is just the name that mount tables show. A word that looks like a store and is none is refused: as a name it would
//! make a mount without L2, and nobody would notice before the first restart.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use clap::error::ErrorKind;
use kvcachefs::config::{L2Spec, is_mount_option, usage_error};
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
    if let Err(error) = check_stores(&cli) {
        eprintln!("mount.kvcachefs: {error}");
        return USAGE.into();
    }
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

const AS_IN: &str = "/nvme/kv.store:200GiB";

/// Finds what was meant to be a store and has no path, or one that depends on where mount(8) was called.
fn check_stores(cli: &Cli) -> Result<()> {
    let options = options(cli);
    let stores: Vec<_> = options.iter().filter(|word| key(word) == "l2").collect();
    for word in &stores {
        let write = || format!("write it from the root, as in l2={AS_IN}");
        match word.split_once('=').map(|(_, value)| value) {
            None | Some("") => return Err(Error::new("-o l2", "names no store").remedy(write())),
            Some(value) => check_store("-o l2", value, &write)?,
        }
    }
    if cli.source.is_empty() {
        return Err(Error::new("the first field", "is empty").remedy(format!(
            "name a store, as in {AS_IN}, or write any word where l2= names the stores or there are none"
        )));
    }
    if stores.is_empty() && looks_like_a_store(&cli.source) {
        let write = || format!("write it from the root, as in {AS_IN}, or name a store with l2=");
        check_store("the first field", &cli.source, &write)?;
    }
    Ok(())
}

fn check_store(what: &str, value: &str, write: &dyn Fn() -> String) -> Result<()> {
    // A size that is wrong is told of by the daemon, which reads it again.
    let path = value.parse::<L2Spec>().map_or_else(|_| PathBuf::from(value), |spec| spec.path);
    let shown = format!("{what} '{value}'");
    if path.as_os_str().is_empty() {
        return Err(Error::new(shown, "has a size and no path").remedy(write()));
    }
    if path.is_relative() {
        return Err(Error::new(shown, "is a relative path").remedy(write()));
    }
    Ok(())
}

/// A path, or something with a size: no name for a mount.
fn looks_like_a_store(source: &str) -> bool {
    source.contains('/') || source.parse::<L2Spec>().map_or(true, |spec| spec.path != Path::new(source))
}

/// The words that are handed on.
fn options(cli: &Cli) -> Vec<&str> {
    let options = cli.options.iter().flat_map(|list| list.split(',')).map(str::trim);
    options.filter(|word| !word.is_empty() && (!cli.sloppy || is_mount_option(key(word)))).collect()
}

fn words(cli: &Cli) -> Vec<String> {
    let options = options(cli);
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

    fn refusal(words: &[&str]) -> Option<String> {
        let cli = Cli::try_parse_from([&["m"], words].concat()).expect("a command line");
        check_stores(&cli).err().map(|error| error.to_string())
    }

    /// Each of these made a mount without L2, or a store somewhere.
    #[test]
    fn what_looks_like_a_store_and_is_none_is_refused() {
        for (words, expected) in [
            (&["", "/mnt"][..], "the first field: is empty; name a store, as in /nvme/kv.store:200GiB"),
            (&[":1GiB", "/mnt"], "the first field ':1GiB': has a size and no path; write it from the root"),
            (&["kv:1GiB", "/mnt"], "the first field 'kv:1GiB': is a relative path; write it from the root"),
            (&["kv:1", "/mnt"], "the first field 'kv:1': is a relative path"),
            (&["./kv", "/mnt"], "the first field './kv': is a relative path"),
            (&["nvme/kv.store:1GiB", "/mnt"], "is a relative path; write it from the root, as in /nvme"),
            (&["kv", "/mnt", "-o", "ro,l2"], "-o l2: names no store; write it from the root, as in l2=/nvme"),
            (&["kv", "/mnt", "-o", "l2="], "-o l2: names no store"),
            (&["kv", "/mnt", "-o", "l2=:1GiB"], "-o l2 ':1GiB': has a size and no path"),
            (&["kv", "/mnt", "-o", "l2=/s,l2=s:1GiB"], "-o l2 's:1GiB': is a relative path"),
        ] {
            let said = refusal(words).unwrap_or_else(|| panic!("{words:?} is taken"));
            assert!(said.contains(expected), "{words:?}: {said}");
        }
        for words in [
            &["kv", "/mnt"][..],
            &["none", "/mnt"],
            &["kv-2:east", "/mnt"],
            &["/s:1GiB", "/mnt"],
            &["/dev/disk/by-path/pci-0000:01:00.0-nvme-1", "/mnt"],
            &["host:/kv", "/mnt", "-o", "l2=/s"],
        ] {
            assert_eq!(refusal(words), None, "{words:?}");
        }
    }
}
