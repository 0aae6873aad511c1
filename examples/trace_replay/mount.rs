//! A temporary mount that leaves nothing behind, and the daemon's counters.
//!
//! The daemon is a child in a process group of its own, so that Ctrl-C reaches only the replay, which
//! then stops it. Whatever ends the replay (an error, a panic, a signal), [`Mounted`] asks the daemon to
//! drain and unmount, ends it when it does not, and removes the directory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::failure::{Context, Failure, Result};

/// Creating and preallocating a store of some hundred GiB takes this long on a slow disk.
const MOUNT_DEADLINE: Duration = Duration::from_secs(120);
/// Draining L1's dirty bytes takes seconds; a daemon that needs longer is stuck and is ended.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(60);
/// How often a child's progress is looked at. It costs one stat.
const POLL: Duration = Duration::from_millis(10);

/// What the temporary mount is made of.
#[derive(Debug)]
pub struct Plan<'a> {
    pub daemon: &'a Path,
    pub l1_bytes: u64,
    /// The store file, or none for one beside the mount point.
    pub store: Option<&'a Path>,
    pub l2_bytes: u64,
    pub more_args: &'a [String],
}

/// A running daemon with its mount, store and log in a temporary directory.
#[derive(Debug)]
pub struct Mounted {
    /// Present until the daemon has been waited for.
    daemon: Option<Child>,
    /// A store file outside `home` that this replay created, to be removed with it.
    store: Option<PathBuf>,
    home: TempDir,
    /// The mount outlives the replay.
    kept: bool,
}

impl Mounted {
    /// Mounts and waits until the mount answers.
    pub fn start(plan: &Plan) -> Result<Self> {
        let home = tempfile::Builder::new()
            .prefix("kvcachefs-replay-")
            .tempdir()
            .context(|| format!("cannot make a directory in {}", std::env::temp_dir().display()))?;
        let dir = home.path().join("mnt");
        fs::create_dir(&dir).context(|| format!("cannot make {}", dir.display()))?;
        let log_path = home.path().join("daemon.log");
        let log = File::create(&log_path).context(|| format!("cannot make {}", log_path.display()))?;
        let errors = log.try_clone().context(|| "cannot share the daemon's log".into())?;
        let store = plan.store.map_or_else(|| home.path().join("l2.store"), Path::to_path_buf);
        let device_store = fs::metadata(&store).is_ok_and(|m| m.file_type().is_block_device());
        if store.exists() && !device_store {
            return Err(Failure::new(format!(
                "{} exists already; name a store that the replay may create and remove",
                store.display()
            )));
        }
        let mut l2 = store.clone().into_os_string();
        l2.push(format!(":{}", sized(plan.l2_bytes)));
        let daemon = Command::new(plan.daemon)
            .arg("mount")
            .args(["--l1", &sized(plan.l1_bytes)])
            .arg("--l2")
            .arg(l2)
            .args(plan.more_args)
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context(|| format!("cannot start the daemon {}", plan.daemon.display()))?;
        let store = plan.store.filter(|_| !device_store).map(Path::to_path_buf);
        let mut mounted = Self { daemon: Some(daemon), store, home, kept: false };
        mounted.wait_until_mounted()?;
        Ok(mounted)
    }

    /// The mount point.
    pub fn dir(&self) -> PathBuf {
        self.home.path().join("mnt")
    }

    /// Drains, unmounts and says how long that took.
    pub fn stop(mut self) -> Result<Duration> {
        let start = Instant::now();
        let status = self.end()?;
        if status.success() {
            Ok(start.elapsed())
        } else {
            Err(Failure::new(format!("the daemon ended with {status}: {}", self.last_words())))
        }
    }

    /// Leaves daemon, mount and store as they are.
    pub fn keep(mut self) -> PathBuf {
        self.daemon = None;
        self.store = None;
        self.kept = true;
        self.home.disable_cleanup(true);
        self.dir()
    }

    fn wait_until_mounted(&mut self) -> Result<()> {
        let outside = device(self.home.path())?;
        let deadline = Instant::now() + MOUNT_DEADLINE;
        while device(&self.dir())? == outside {
            let ended = match &mut self.daemon {
                Some(daemon) => daemon.try_wait().context(|| "cannot wait for the daemon".into())?,
                None => None,
            };
            if let Some(status) = ended {
                self.daemon = None;
                return Err(Failure::new(format!(
                    "the daemon did not mount ({status}): {}",
                    self.last_words()
                )));
            }
            if Instant::now() >= deadline {
                return Err(Failure::new(format!("no mount within {} s", MOUNT_DEADLINE.as_secs())));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// SIGTERM, then SIGKILL when the deadline has passed.
    fn end(&mut self) -> Result<ExitStatus> {
        let Some(mut daemon) = self.daemon.take() else {
            return Err(Failure::new("the daemon is not running".into()));
        };
        // The child has not been waited for, so its id cannot belong to anybody else; it fits, as ids do.
        let _ = kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM);
        let deadline = Instant::now() + UNMOUNT_DEADLINE;
        loop {
            if let Some(status) = daemon.try_wait().context(|| "cannot wait for the daemon".into())? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                let _ = daemon.kill();
                let _ = daemon.wait();
                return Err(Failure::new(format!(
                    "the daemon did not unmount within {} s and was killed",
                    UNMOUNT_DEADLINE.as_secs()
                )));
            }
            thread::sleep(POLL);
        }
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(self.home.path().join("daemon.log")).unwrap_or_default();
        log.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("it said nothing").to_owned()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.daemon.is_some()
            && let Err(error) = self.end()
        {
            eprintln!("trace_replay: {error}");
        }
        if !self.kept {
            // Fails when the daemon unmounted, as it should; else the directory could not be removed.
            let _ = umount2(&self.dir(), MntFlags::MNT_DETACH);
        }
        if let Some(store) = &self.store {
            let _ = fs::remove_file(store);
        }
    }
}

/// The daemon's counters, as `.ctl/stats` has them.
#[derive(Clone, Default, Debug)]
pub struct Counters(BTreeMap<String, u64>);

impl Counters {
    pub fn read(mount: &Path) -> Result<Self> {
        let path = mount.join(".ctl/stats");
        let text = fs::read_to_string(&path)
            .context(|| format!("cannot read {} (is this a kvcachefs mount?)", path.display()))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let pairs = text.lines().filter_map(|line| {
            let (key, value) = line.split_once(char::is_whitespace)?;
            Some((key.to_owned(), value.trim().parse().ok()?))
        });
        Self(pairs.collect())
    }

    /// What a counter stands at, if the daemon has it.
    pub fn get(&self, key: &str) -> Option<u64> {
        self.0.get(key).copied()
    }

    /// By how much a counter grew since `before`.
    pub fn since(&self, before: &Self, key: &str) -> Option<u64> {
        Some(self.get(key)?.saturating_sub(before.get(key).unwrap_or(0)))
    }
}

/// The bytes that a mount can hold.
pub fn capacity_bytes(mount: &Path) -> Result<u64> {
    let stat = statvfs(mount).context(|| format!("cannot statfs {}", mount.display()))?;
    Ok(stat.blocks() * stat.fragment_size())
}

fn device(path: &Path) -> Result<u64> {
    match fs::metadata(path) {
        Ok(meta) => Ok(meta.dev()),
        Err(error) => Err::<u64, io::Error>(error).context(|| format!("cannot stat {}", path.display())),
    }
}

/// A size as the daemon takes it.
fn sized(bytes: u64) -> String {
    format!("{}KiB", bytes.div_ceil(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_and_subtracted() {
        let before = Counters::parse("evictions_l1 3\nnot_a_number x\n\nopens 1\n");
        let after = Counters::parse("evictions_l1\t10\nopens 1\nnew 4\n");
        assert_eq!(after.since(&before, "evictions_l1"), Some(7));
        assert_eq!(after.since(&before, "new"), Some(4));
        assert_eq!(after.since(&before, "missing"), None);
        assert_eq!(before.get("not_a_number"), None);
    }

    /// What is started here is a program that never mounts; its last line must reach the user.
    #[test]
    fn a_daemon_that_does_not_mount_is_reported() {
        let plan = Plan {
            daemon: Path::new("/bin/false"),
            l1_bytes: 1 << 20,
            store: None,
            l2_bytes: 1 << 20,
            more_args: &[],
        };
        let error = Mounted::start(&plan).unwrap_err().to_string();
        assert!(error.contains("did not mount"), "{error}");
    }
}
