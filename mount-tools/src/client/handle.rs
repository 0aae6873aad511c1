//! An open control file that has been greeted: the session to which names, leases and tickets belong.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvcachefs::abi::{self, Command};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::error::{Error, Result};
use super::ticket::End;
use super::wire;

/// A session with the daemon of one mount. Clones are the same session, which ends with the last of them, and with the
/// last lease and ticket.
///
/// A forked child shares it. What the child drops is not given back: that is the parent's.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) session: Arc<Session>,
}

/// What the daemon allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of one request.
    pub ranges: usize,
    pub names: u32,
    pub names_bytes: usize,
    pub leases: u32,
    pub lease_bytes: u64,
    pub lease_client_bytes: u64,
    pub block_bytes: u32,
    pub parties: u32,
    pub ttl_default: Duration,
    pub ttl_max: Duration,
    /// Windows that are brought at one time, those that may wait for it, and what they may bring to L1.
    pub prefetch_window: u32,
    pub prefetch_queue: u32,
    pub prefetch_bytes: u64,
    pub tickets: u32,
    pub prefetches: bool,
    pub drains: bool,
}

#[derive(Debug)]
pub(super) struct Session {
    file: File,
    mount: PathBuf,
    /// Mounted read-only: names go by ioctl.
    pub read_only: bool,
    pub limits: Limits,
    /// Whoever has forked shares the session, and gives nothing of it back.
    process: u32,
    /// Held from sending names to asking what they became.
    pub naming: Mutex<()>,
    pub tickets: Mutex<Tickets>,
}

/// What is known of the tickets of a session, beside what the daemon knows.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    /// Whose end nobody has read.
    pub open: HashSet<u64>,
    /// Of these, those that nobody waits for any more: their end is thrown away.
    pub dropped: HashSet<u64>,
    /// Ends that were read by somebody who waits for another one.
    pub read: Vec<End>,
}

impl Handle {
    /// Opens a session with the file system that is mounted on `mount`, and agrees with it on the version.
    ///
    /// # Errors
    /// ENOENT: no kvcachefs is mounted there. EPROTO: it speaks another version. EACCES: it is another user's.
    pub fn open(mount: impl AsRef<Path>) -> Result<Self> {
        Self::speaking(mount.as_ref(), abi::VERSION)
    }

    fn speaking(mount: &Path, version: u16) -> Result<Self> {
        let path = mount.join(".ctl/lease");
        let open = |write| OpenOptions::new().read(true).write(write).open(&path);
        let (opened, read_only) = match open(true) {
            Err(error) if error.raw_os_error() == Some(Errno::EROFS as i32) => (open(false), true),
            answer => (answer, false),
        };
        let file = opened.map_err(|error| not_opened(mount, &error))?;
        let header = abi::Header { version, flags: 0, count: 0 };
        let ours = abi::Hello { header, ..abi::Hello::default() };
        let (result, bytes) = wire::exchange::<_, u8>(file.as_fd(), Command::Hello, &ours, &[]);
        let failed = |errno| Error::new("hello", mount.display(), errno);
        let (hello, _) = abi::Hello::read_from_prefix(&bytes).map_err(|_| failed(Errno::EPROTO))?;
        match result {
            Ok(()) => {}
            Err(Errno::EPROTO) => {
                return Err(failed(Errno::EPROTO).remedy(format!(
                    "the daemon speaks version {} and this client version {version}: use those of one release",
                    hello.header.version
                )));
            }
            Err(Errno::ENOTTY) => return Err(failed(Errno::ENOTTY).remedy("no kvcachefs is mounted there")),
            Err(errno) => return Err(failed(errno)),
        }
        Ok(Self {
            session: Arc::new(Session {
                file,
                mount: mount.to_owned(),
                read_only,
                limits: Limits::of(&hello),
                process: std::process::id(),
                naming: Mutex::default(),
                tickets: Mutex::default(),
            }),
        })
    }

    pub fn limits(&self) -> &Limits {
        &self.session.limits
    }

    /// Where it is mounted, as it was given to [`Handle::open`].
    pub fn mount(&self) -> &Path {
        &self.session.mount
    }
}

/// Readable when a ticket has ended: for poll(2) and epoll(7) of one's own.
impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.session.file.as_fd()
    }
}

fn not_opened(mount: &Path, error: &io::Error) -> Error {
    let errno = Errno::from_raw(error.raw_os_error().unwrap_or_default());
    let failed = Error::new("opening .ctl/lease", mount.display(), errno);
    match errno {
        Errno::ENOENT | Errno::ENOTDIR => {
            failed.remedy("no kvcachefs is mounted there; name the directory that it is mounted on")
        }
        Errno::ENOTCONN => failed.remedy("its daemon is gone; mount it again"),
        Errno::EACCES => failed.remedy("mount with allow_other, or ask as the user who mounted"),
        _ => failed,
    }
}

impl Limits {
    fn of(hello: &abi::Hello) -> Self {
        let millis = |value| Duration::from_millis(u64::from(value));
        let has = |feature| hello.features & feature != 0;
        Self {
            ranges: hello.ranges_max as usize,
            names: hello.names_max,
            names_bytes: hello.names_bytes_max as usize,
            leases: hello.leases_max,
            lease_bytes: hello.lease_bytes_max,
            lease_client_bytes: hello.lease_client_bytes_max,
            block_bytes: hello.block_bytes,
            parties: hello.parties_max,
            ttl_default: millis(hello.ttl_default_ms),
            ttl_max: millis(hello.ttl_max_ms),
            prefetch_window: hello.prefetch_window,
            prefetch_queue: hello.prefetch_queue,
            prefetch_bytes: hello.prefetch_bytes_max,
            tickets: hello.tickets_max,
            prefetches: has(abi::FEATURE_PREFETCH),
            drains: has(abi::FEATURE_DRAIN),
        }
    }
}

impl Session {
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Sends a request; `thing` is what it is about.
    pub fn call<T, I, O>(
        &self,
        doing: &'static str,
        thing: &dyn std::fmt::Display,
        command: Command,
        head: &T,
        items: &[I],
    ) -> Result<(T, Vec<O>)>
    where
        T: FromBytes + IntoBytes + Immutable,
        I: IntoBytes + Immutable,
        O: FromBytes,
    {
        wire::call(self.file.as_fd(), command, head, items).map_err(|errno| {
            let failed = Error::new(doing, thing, errno);
            match errno {
                Errno::ENOTCONN | Errno::ECONNABORTED => {
                    failed.remedy("the daemon is gone; open a new handle once it is mounted again")
                }
                Errno::ENOTTY => {
                    failed.remedy("this daemon does not understand that; use one of this client's release")
                }
                _ => failed,
            }
        })
    }

    pub fn shown(&self) -> std::path::Display<'_> {
        self.mount.display()
    }

    pub fn tickets(&self) -> MutexGuard<'_, Tickets> {
        // What it protects is changed in single steps.
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what this process drops is its own to give back.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mount_is_told_from_what_is_no_control_file() {
        let dir = tempfile::tempdir().unwrap();
        let error = Handle::open(dir.path()).unwrap_err();
        assert_eq!(error.errno(), Errno::ENOENT);
        assert!(error.to_string().contains("no kvcachefs is mounted there"), "{error}");
        std::fs::create_dir(dir.path().join(".ctl")).unwrap();
        std::fs::write(dir.path().join(".ctl/lease"), "").unwrap();
        assert_eq!(Handle::open(dir.path()).unwrap_err().errno(), Errno::ENOTTY);
    }
}
