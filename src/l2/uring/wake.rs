//! The bell that wakes the ring's thread.
#![allow(unsafe_code, reason = "eventfd has no safe wrapper in the features that we enable")]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// An eventfd. A read of it through the ring completes after [`Wake::ring`].
pub(super) struct Wake(File);

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        // Not EFD_NONBLOCK: a read through the ring would then fail at once instead of waiting.
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, and known to nobody else.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    pub(super) fn ring(&self) -> io::Result<()> {
        (&self.0).write_all(&1u64.to_ne_bytes())
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
