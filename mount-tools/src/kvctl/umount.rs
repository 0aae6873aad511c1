//! Unmounting without a loss: first everything becomes durable, then the mount goes, then the daemon.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use kvcachefs::error::{Error, Result};
use kvcachefs::mount::{self, How, Life};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::users;

/// The kernel's name for the daemon's process.
const DAEMON: &str = "kvcachefs";

/// How long the daemon may take to say which process it is.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Unmounts `mountpoint`. Politely: returns when everything is stored and the daemon has ended.
///
/// # Errors
/// Nothing of ours is mounted there, clients use it, or it took longer than `timeout`.
pub fn run(mountpoint: &Path, how: How, timeout: Duration) -> Result<()> {
    let shown = mountpoint.display();
    let real = mount::real_path(mountpoint);
    if !mount::mounted_on(&real)?.is_some_and(|entry| entry.is_ours()) || how != How::Politely {
        return mount::unmount(mountpoint, how); // which knows the words if it is not ours
    }
    let daemon = match mount::life(&real) {
        Life::Dead => None,
        Life::Wedged => {
            return Err(Error::new(&shown, "its daemon was killed and cannot end, so nobody is answered")
                .remedy(format!("cut it off: kvctl umount --force {shown}")));
        }
        Life::Silent => {
            return Err(Error::new(&shown, "its daemon does not answer")
                .remedy(format!("end the daemon, or cut it off: kvctl umount --force {shown}")));
        }
        Life::Alive => {
            // A client that is in the way shows before the work, not after it.
            refuse_if_used(&real, &shown)?;
            drain(&real, timeout)?;
            Daemon::of(&real)
        }
    };
    if let Err(error) = mount::unmount(mountpoint, How::Politely) {
        // Somebody may have come meanwhile.
        refuse_if_used(&real, &shown)?;
        return Err(error);
    }
    daemon.map_or(Ok(()), |daemon| daemon.wait(timeout))
}

fn refuse_if_used(real: &Path, shown: &impl std::fmt::Display) -> Result<()> {
    let users = users::of(real);
    if users.is_empty() {
        return Ok(());
    }
    Err(Error::new(shown, format!("busy: in use by {}", users.join(", ")))
        .remedy("end them, or detach the mount with --lazy"))
}

/// Waits until everything published so far is on the device.
fn drain(real: &Path, timeout: Duration) -> Result<()> {
    let shown = real.display();
    // Not the directory: the kernel would lock it for as long as that takes, and others out.
    let file = real.join(".ctl/version");
    match mount::within(timeout, || File::open(file)?.sync_all().map(|()| Vec::new())) {
        Some(Ok(_)) => Ok(()),
        // The mount keeps everybody out but its owner. The daemon drains on its own when it is unmounted.
        Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Some(Err(error)) if error.kind() == io::ErrorKind::TimedOut => {
            Err(Error::new(&shown, "not everything could be stored before the mount's own deadline")
                .remedy("nothing was unmounted; see .ctl/status, or mount with a longer --fsync-deadline"))
        }
        Some(Err(error)) => {
            eprintln!("kvctl: {shown}: some files could not be stored: {error}; unmounting all the same");
            Ok(())
        }
        None => Err(Error::new(&shown, format!("not everything could be stored within {timeout:?}"))
            .remedy("nothing was unmounted; give a longer --timeout, or see .ctl/status")),
    }
}

/// The process that serves a mount, held so that its number cannot come to mean another.
struct Daemon {
    pid: Pid,
    process: OwnedFd,
}

impl Daemon {
    /// None: it cannot be asked, lives in another pid namespace, or is just ending.
    fn of(mountpoint: &Path) -> Option<Self> {
        let stats = mount::within(ANSWER_LIMIT, || fs::read(mountpoint.join(".ctl/stats")))?.ok()?;
        let stats = String::from_utf8_lossy(&stats);
        let pid = stats.lines().find_map(|line| line.strip_prefix("pid ")?.parse().ok())?;
        let pid = Pid::from_raw(pid)?;
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).ok()?;
        (name.trim_end() == DAEMON).then_some(Self { pid, process })
    }

    fn wait(&self, timeout: Duration) -> Result<()> {
        let limit = Timespec::try_from(timeout).ok();
        // A process descriptor becomes readable when the process has ended.
        match poll(&mut [PollFd::new(&self.process, PollFlags::IN)], limit.as_ref()) {
            Ok(0) => Err(Error::new(
                format!("process {}", self.pid.as_raw_nonzero()),
                format!("unmounted, but the daemon has not ended within {timeout:?}"),
            )
            .remedy("its log says what it waits for")),
            Ok(_) => Ok(()),
            Err(error) => Err(Error::caused_by("waiting for the daemon", io::Error::from(error))),
        }
    }
}
