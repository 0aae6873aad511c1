//! Going into the background, and telling whoever waits that the mount works.
//!
//! `kvcachefs mount --daemon` must return when the mount works and not before, and must say in one line
//! why when it does not. So the process forks first of all, before there is a thread or a CUDA context
//! that a fork would tear apart, and the child reports through a pipe. Until it has reported, the child
//! stays on the terminal and in its process group: warnings are seen, and Ctrl-C ends the whole
//! command. With the report it leaves both.
//!
//! A service manager waits for the same moment, so [`Ready::mounted`] tells systemd as well, and the
//! pid file exists from then on.
#![allow(unsafe_code, reason = "fork(2) has no safe form")]

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{
    AccessFlags, ForkResult, Pid, access, chdir, dup2_stderr, dup2_stdin, dup2_stdout, fork, getpid, pipe2,
    setsid,
};
use sd_notify::NotifyState;

use crate::error::{Error, Result};

/// How long to wait for a pid file that names a running daemon. After an unmount it may still be storing something; its
/// stores are waited for as long.
const PID_FILE_PATIENCE: Duration = Duration::from_secs(5);

/// First byte of a report: the mount works.
const MOUNTED: u8 = b'+';
/// First byte of a report: it does not, and the reason follows.
const FAILED: u8 = b'-';

/// The duty to say when the mount works. Whoever waits is told of a failure too, at the latest when
/// this is dropped.
#[derive(Debug)]
pub struct Ready {
    /// The waiting parent; gone once told, or if there never was one.
    parent: Option<File>,
    pid_path: Option<PathBuf>,
    pid_file: Option<PidFile>,
    /// The terminal is gone, so errors must go to the log.
    detached: bool,
}

/// Forks if `daemon`. `None` in the parent, when the child has reported that the mount works.
///
/// # Errors
/// In the parent: the child's error, word by word. Otherwise: no fork was possible.
pub fn start(daemon: bool, pid_file: Option<&Path>) -> Result<Option<Ready>> {
    if let Some(path) = pid_file {
        PidFile::check_patiently(path)?;
    }
    let ready =
        |parent| Ready { parent, pid_path: pid_file.map(Path::to_owned), pid_file: None, detached: false };
    if !daemon {
        return Ok(Some(ready(None)));
    }
    let failed = |errno: nix::Error| Error::caused_by("--daemon", std::io::Error::from(errno));
    let threads = fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads != 1 {
        return Err(Error::new("--daemon", format!("{threads} threads run already, a fork would lose them")));
    }
    let (from_child, to_parent) = pipe2(OFlag::O_CLOEXEC).map_err(failed)?;
    // SAFETY: the child of a process with other threads may only call async-signal-safe functions. There
    // are none: they were counted just above, and the only thread is the one that is here.
    match unsafe { fork() }.map_err(failed)? {
        ForkResult::Child => {
            drop(from_child);
            Ok(Some(ready(Some(File::from(to_parent)))))
        }
        ForkResult::Parent { child } => {
            drop(to_parent);
            await_report(File::from(from_child), child).map(|()| None)
        }
    }
}

/// Waits for as long as it takes: opening a store of ten million files takes a while, and a child that
/// dies closes the pipe.
fn await_report(mut from_child: File, child: Pid) -> Result<()> {
    let mut report = Vec::new();
    from_child.read_to_end(&mut report).map_err(|error| Error::caused_by("--daemon", error))?;
    match report.split_first() {
        Some((&MOUNTED, _)) => Ok(()),
        Some((_, reason)) => Err(Error::new(String::from_utf8_lossy(reason), "")),
        None => {
            let how = match waitpid(child, None) {
                Ok(WaitStatus::Exited(_, code)) => format!("ended with exit code {code}"),
                Ok(WaitStatus::Signaled(_, signal, _)) => format!("was ended by {signal}"),
                _ => "ended".to_owned(),
            };
            Err(Error::new("daemon", format!("{how} before the mount worked"))
                .remedy("run it without --daemon to see more"))
        }
    }
}

impl Ready {
    /// Says that the mount works, and leaves the terminal if there is a parent that waits.
    ///
    /// # Errors
    /// The pid file cannot be written, or the terminal cannot be left. Nobody has been told then.
    pub fn mounted(&mut self) -> Result<()> {
        self.pid_file = self.pid_path.take().map(PidFile::write).transpose()?;
        if let Some(mut parent) = self.parent.take() {
            leave_terminal().map_err(|errno| Error::caused_by("--daemon", std::io::Error::from(errno)))?;
            // A parent that went away was killed on purpose, but the mount was asked for and works.
            let _ = parent.write_all(&[MOUNTED]);
            self.detached = true;
        }
        self.notify(NotifyState::Ready);
        Ok(())
    }

    /// Shows `text` in the service manager, while opening a large store takes its time.
    pub fn progress(&self, text: &str) {
        self.notify(NotifyState::Status(text));
    }

    /// Tells the service manager that the end has begun.
    pub fn stopping(&self) {
        self.notify(NotifyState::Stopping);
    }

    /// Hands `outcome` to the parent if it still waits for one; what is left to say goes to the caller.
    ///
    /// # Errors
    /// `outcome`'s own.
    pub fn finish(mut self, outcome: Result<()>) -> Result<()> {
        let Err(error) = &outcome else { return outcome };
        let Some(mut parent) = self.parent.take() else {
            if self.detached {
                log::error!("{error}");
            }
            return outcome;
        };
        let report = [&[FAILED], error.to_string().as_bytes()].concat();
        if parent.write_all(&report).is_err() {
            return outcome;
        }
        drop((parent, self));
        // The parent prints the reason; printed twice it would look like two.
        std::process::exit(1);
    }

    fn notify(&self, state: NotifyState<'_>) {
        if let Err(error) = sd_notify::notify(&[state]) {
            log::debug!("the service manager cannot be told: {error}");
        }
    }
}

/// A session of its own, no directory held busy, no terminal.
fn leave_terminal() -> nix::Result<()> {
    setsid()?;
    chdir("/")?;
    let null = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map_err(|error| nix::Error::from_raw(error.raw_os_error().unwrap_or_default()))?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)
}

/// What is in a file that is to be a pid file.
enum Content {
    Pid(i32),
    Nothing,
    Else,
}

/// A pid file that goes when the daemon does.
#[derive(Debug)]
struct PidFile(PathBuf);

impl PidFile {
    fn check_patiently(path: &Path) -> Result<()> {
        let deadline = Instant::now() + PID_FILE_PATIENCE;
        while Self::owner(path)?.is_some() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        Self::check(path)
    }

    /// Another daemon that runs would lose its own.
    fn check(path: &Path) -> Result<()> {
        match Self::owner(path)? {
            Some(pid) => Err(Error::new(Self::shown(path), format!("belongs to process {pid}, which runs"))
                .remedy("wait if it is stopping, name another file, or stop that one first")),
            None => Ok(()),
        }
    }

    fn shown(path: &Path) -> String {
        format!("--pid-file {}", path.display())
    }

    /// The daemon that runs and has its number there. A process that only has the number of one that ended does not count.
    ///
    /// # Errors
    /// Something else is there, or it cannot be looked at, or there is no place for it.
    fn owner(path: &Path) -> Result<Option<i32>> {
        let name = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).ok();
        let unfit = |error| {
            Error::caused_by(Self::shown(path), error)
                .remedy("name a file that can be written, and no symbolic link")
        };
        let pid = match Self::read(path) {
            Ok(Content::Pid(pid)) => {
                access(path, AccessFlags::W_OK).map_err(|errno| unfit(errno.into()))?;
                pid
            }
            Ok(Content::Nothing) => {
                return access(path, AccessFlags::W_OK).map_err(|errno| unfit(errno.into())).map(|()| None);
            }
            Ok(Content::Else) => {
                return Err(Error::new(Self::shown(path), "it holds something else than a process number")
                    .remedy("name a file of its own: this one would be lost"));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                let parent = parent.unwrap_or(Path::new("."));
                // It is written when the mount works. That it cannot be is said before a store is made.
                return access(parent, AccessFlags::W_OK | AccessFlags::X_OK)
                    .map_err(|errno| unfit(errno.into()))
                    .map(|()| None);
            }
            Err(error) => return Err(unfit(error)),
        };
        let runs = pid != getpid().as_raw()
            && name(&pid.to_string()).is_some_and(|found| Some(found) == name("self"));
        Ok(runs.then_some(pid))
    }

    fn read(path: &Path) -> std::io::Result<Content> {
        // As it is written: not through a link. And a pipe must not hold us up.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        if !file.metadata()?.is_file() {
            return Ok(Content::Else);
        }
        // More than any number has.
        let mut text = Vec::new();
        file.take(64).read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        Ok(match text.trim().parse() {
            Ok(pid) if pid > 0 => Content::Pid(pid),
            _ if text.is_empty() => Content::Nothing,
            _ => Content::Else,
        })
    }

    fn write(path: PathBuf) -> Result<Self> {
        Self::check(&path)?;
        // Where others may make files, a link of theirs must not lead root to another file.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path);
        file.and_then(|mut file| writeln!(file, "{}", getpid())).map_err(|error| {
            Error::caused_by(format!("--pid-file {}", path.display()), error)
                .remedy("name a file that can be written, and no symbolic link")
        })?;
        Ok(Self(path))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // If it is gone already, somebody cleaned up before us; if it names another, it is that one's.
        if matches!(Self::read(&self.0), Ok(Content::Pid(pid)) if pid == getpid().as_raw()) {
            let _ = fs::remove_file(&self.0);
        }
    }
}
