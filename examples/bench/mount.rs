//! A daemon on a temporary mount: started, asked, stopped, and gone with its files whatever happens.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::cli::Cli;
use crate::failure::{Context, Failure, Result};
use crate::interrupt;

/// Reading a catalog of ten million files takes this long where it is slow.
const MOUNT_DEADLINE: Duration = Duration::from_secs(300);
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(120);
/// Lines of the daemon's log that an error shows.
const LAST_LINES: usize = 6;
/// Fine enough for a time to mount of some ten milliseconds.
const POLL: Duration = Duration::from_millis(1);

/// A running daemon and its mount.
#[derive(Debug)]
pub struct Mount {
    daemon: Child,
    home: TempDir,
    /// From starting the program until the mount answered.
    pub took: Duration,
}

impl Mount {
    pub fn start(cli: &Cli, l1_mib: u64, args: &[String]) -> Result<Self> {
        let binary = daemon_binary(cli)?;
        let home = tempfile::Builder::new()
            .prefix("kvcachefs-bench-")
            .tempdir()
            .context(|| "cannot make a directory for the mount".into())?;
        let dir = home.path().join("mnt");
        fs::create_dir(&dir).context(|| format!("cannot make {}", dir.display()))?;
        let log = File::create(home.path().join("daemon.log")).context(|| "cannot make a log".into())?;
        let outside = device(home.path())?;
        let start = Instant::now();
        let daemon = Command::new(&binary)
            .arg("mount")
            .args(["--l1", &format!("{l1_mib}MiB"), "--log-level", "warn"])
            .args(args)
            .args(&cli.daemon_arg)
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .spawn()
            .context(|| format!("cannot start {}", binary.display()))?;
        let mut mount = Self { daemon, home, took: Duration::ZERO };
        while device(&dir)? == outside {
            interrupt::check()?;
            if let Some(status) = mount.daemon.try_wait().context(|| "cannot wait for the daemon".into())? {
                return Err(Failure::new(format!("the daemon ended with {status}: {}", mount.last_words())));
            }
            if start.elapsed() > MOUNT_DEADLINE {
                return Err(Failure::new("the daemon does not mount".into()));
            }
            thread::sleep(POLL);
        }
        mount.took = start.elapsed();
        Ok(mount)
    }

    pub fn dir(&self) -> PathBuf {
        self.home.path().join("mnt")
    }

    /// Waits until everything that was published is durable.
    pub fn drain(&self) -> Result<()> {
        let dir = self.dir();
        File::open(&dir).and_then(|root| root.sync_all()).context(|| "cannot drain".into())
    }

    pub fn stat(&self, key: &str) -> Result<u64> {
        let path = self.dir().join(".ctl/stats");
        let text = fs::read_to_string(&path).context(|| format!("cannot read {}", path.display()))?;
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok());
        value.ok_or_else(|| Failure::new(format!("no {key} in {}", path.display())))
    }

    /// Processor time that the daemon has used, of all its threads, user and system.
    pub fn cpu(&self) -> Result<Duration> {
        let text = self.proc("stat")?;
        // The name may contain anything but ends with the last parenthesis; 14 and 15 of all fields are wanted.
        let after = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        let ticks: u64 =
            after.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
        Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
    }

    /// Memory of the daemon that is not L1: L1 is shared memory, the rest is not.
    pub fn anonymous_bytes(&self) -> Result<u64> {
        let text = self.proc("status")?;
        let kib = text.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
        let kib: u64 = kib
            .and_then(|kib| kib.trim().parse().ok())
            .ok_or_else(|| Failure::new("no RssAnon in the daemon's status".into()))?;
        Ok(kib * 1024)
    }

    fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.daemon.id());
        fs::read_to_string(&path).context(|| format!("cannot read {path}"))
    }

    /// Drains and unmounts.
    pub fn stop(mut self) -> Result<()> {
        self.end();
        match self.daemon.try_wait().context(|| "cannot wait for the daemon".into())? {
            Some(status) if status.success() => Ok(()),
            status => Err(Failure::new(format!("the daemon ended with {status:?}: {}", self.last_words()))),
        }
    }

    /// SIGTERM, and SIGKILL when it does not help. Does nothing to a daemon that has been waited for.
    fn end(&mut self) {
        if !matches!(self.daemon.try_wait(), Ok(None)) {
            return;
        }
        // Not waited for yet, so the id is the daemon's still.
        let _ = kill(Pid::from_raw(self.daemon.id().cast_signed()), Signal::SIGTERM);
        let deadline = Instant::now() + UNMOUNT_DEADLINE;
        while matches!(self.daemon.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.daemon.kill();
                let _ = self.daemon.wait();
                return;
            }
            thread::sleep(POLL);
        }
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(self.home.path().join("daemon.log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().filter(|line| !line.trim().is_empty()).collect();
        if lines.is_empty() {
            "it said nothing".into()
        } else {
            lines[lines.len().saturating_sub(LAST_LINES)..].join(" / ")
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Ok(Some(status)) = self.daemon.try_wait()
            && !status.success()
        {
            eprintln!("bench: the daemon had ended with {status}: {}", self.last_words());
        }
        self.end();
        // Fails when the daemon has unmounted, as it should.
        let _ = umount2(&self.dir(), MntFlags::MNT_DETACH);
    }
}

fn device(path: &Path) -> Result<u64> {
    fs::metadata(path).map(|meta| meta.dev()).context(|| format!("cannot stat {}", path.display()))
}

fn daemon_binary(cli: &Cli) -> Result<PathBuf> {
    if let Some(path) = &cli.daemon_binary {
        return Ok(path.clone());
    }
    let own = std::env::current_exe().context(|| "cannot find this program's own path".into())?;
    // target/PROFILE/examples/bench
    let path = own.parent().and_then(Path::parent).unwrap_or(Path::new(".")).join("kvcachefs");
    if path.is_file() {
        return Ok(path);
    }
    let built = path.display();
    Err(Failure::new(format!(
        "no daemon at {built}: build it with `cargo build --release`, or name it with --daemon-binary"
    )))
}
