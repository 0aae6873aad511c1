//! The guard: a small process that cuts the mount's connection when the daemon has died.
//!
//! The kernel cuts it by itself when the last descriptor of the device is closed. But a daemon that is killed while it
//! tells the kernel of a changed name may never come to that: the call waits for the lock of a directory, and whoever
//! holds the lock waits for the daemon. Then every client would hang until somebody runs `umount -f`. A large L1 takes
//! seconds to be given back, and a core dump takes longer: until then they would hang as well.
//!
//! The guard is a program of its own (`kvcachefs guard`), not a fork, so that it holds nothing of the daemon's. It has
//! one descriptor that can cut exactly this connection and no other, and that keeps nothing busy. It hears of the
//! daemon's death as the child of its main thread: pipes and locks are held by a thread that cannot end.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, chdir, setsid};

use crate::error::{Error, Result};
use crate::mount::{connection, is_ending};

/// What process lists show; the kernel has room for fifteen letters.
const NAME: &std::ffi::CStr = c"kvcachefs-guard";

/// Said by a daemon that ends as it should.
const FAREWELL: u8 = b'.';

/// The kernel sends it when the daemon's main thread ends.
const DIED: Signal = Signal::SIGUSR1;

/// A main thread that writes a core dump, or gives back a large L1, has not ended yet. So it is looked at now and then.
const LOOK_EVERY_MS: u16 = 1000;

/// How long a guard may take to go. One that was stopped does not.
const LAST_STEPS: Duration = Duration::from_secs(1);

/// The daemon's end of it. It is dismissed when this is dropped, but not by a panic.
#[derive(Debug)]
pub struct Guard(Child);

impl Guard {
    /// Starts the guard of a mount. To be called by the thread that lives as long as the daemon. `speaks`: it may say on
    /// standard error what it does.
    ///
    /// # Errors
    /// The kernel lets us not cut our connection, or there is no process to be had.
    pub fn start(mountpoint: &Path, number: &str, speaks: bool) -> io::Result<Self> {
        let switch = connection::switch(number)?;
        let name = NAME.to_str().unwrap_or_default();
        let mut command = Command::new("/proc/self/exe");
        command.arg0(name).arg("guard").arg(mountpoint).arg(std::process::id().to_string());
        command.stdin(Stdio::piped()).stdout(switch);
        if !speaks {
            command.stderr(Stdio::null());
        }
        command.spawn().map(Self)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// The daemon ends before its mount does: it is cut off then.
    pub fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if let Some(mut line) = self.0.stdin.take() {
            // If it has been ended by somebody, there is nobody to dismiss.
            let _ = line.write_all(&[FAREWELL]);
        }
        let deadline = Instant::now() + LAST_STEPS;
        while matches!(self.0.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.0.kill();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The guard itself: standard input comes from the daemon, standard output cuts the connection.
///
/// # Errors
/// It could not prepare itself; the daemon goes on without it.
pub fn stand(mountpoint: &Path, daemon: i32) -> Result<()> {
    let failed = |errno: Errno| Error::caused_by("guard", io::Error::from(errno));
    let died = prepare(daemon).map_err(failed)?;
    let mut line =
        File::from(io::stdin().as_fd().try_clone_to_owned().map_err(|e| Error::caused_by("guard", e))?);
    if !has_died(&mut line, &died, daemon).map_err(failed)? {
        return Ok(());
    }
    // The descriptor stands for this connection alone: if it is over, nothing happens.
    io::stdout().write_all(b"1").and_then(|()| io::stdout().flush()).map_err(|error| {
        Error::caused_by(mountpoint.display(), error).remedy("cut it off: kvcachefs umount --force")
    })?;
    eprintln!(
        "{}: the daemon of {} is gone; the mount is cut off",
        NAME.to_string_lossy(),
        mountpoint.display()
    );
    Ok(())
}

/// Out of the way of whatever is meant for the daemon, and ready to hear of its death.
fn prepare(daemon: i32) -> std::result::Result<SignalFd, Errno> {
    // No terminal whose Ctrl-C would end it. It is the leader of a group only if it was told so by whoever started it.
    let _ = setsid();
    chdir("/")?;
    prctl::set_name(NAME)?;
    for meant_for_daemon in
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGPIPE]
    {
        // SAFETY: ignoring a signal runs no code.
        #[allow(unsafe_code, reason = "signal(2) is unsafe for the sake of handlers")]
        unsafe {
            signal(meant_for_daemon, SigHandler::SigIgn)?;
        }
    }
    let mut set = SigSet::empty();
    set.add(DIED);
    set.thread_block()?;
    let died = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)?;
    prctl::set_pdeathsig(DIED)?;
    if Pid::parent().as_raw() != daemon {
        // It died before we could ask to be told.
        nix::sys::signal::raise(DIED)?;
    }
    Ok(died)
}

/// Waits for the daemon's end. Whether it died without a farewell.
fn has_died(line: &mut File, died: &SignalFd, daemon: i32) -> std::result::Result<bool, Errno> {
    let mut open = true;
    loop {
        let mut waits = vec![PollFd::new(died.as_fd(), PollFlags::POLLIN)];
        if open {
            waits.push(PollFd::new(line.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut waits, PollTimeout::from(LOOK_EVERY_MS)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        let heard = |at: usize| waits.get(at).and_then(PollFd::any) == Some(true);
        let (signalled, spoken) = (heard(0), heard(1));
        if spoken {
            let mut word = [0];
            match line.read(&mut word) {
                Ok(1) if word[0] == FAREWELL => return Ok(false),
                // Its descriptors are closed: it is on its way out.
                Ok(0) => open = false,
                _ => {}
            }
        }
        if signalled {
            died.read_signal()?;
        }
        // Anybody may send a signal, and a pipe may be closed by mistake: what lives is never cut.
        if is_ending(daemon) || Pid::parent().as_raw() != daemon {
            return Ok(true);
        }
    }
}
