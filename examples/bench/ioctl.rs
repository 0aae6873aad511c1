//! ioctl(2) with a payload.
#![allow(unsafe_code, reason = "an ioctl with a payload of any size has no safe wrapper")]

use std::io;
use std::os::fd::RawFd;

/// Sends `bytes`, whose length `number` says, and leaves the answer in their place.
pub fn ioctl(fd: RawFd, number: u32, bytes: &mut [u8]) -> io::Result<()> {
    assert_eq!(
        number >> 16 & 0x3fff,
        bytes.len() as u32,
        "the kernel touches as many bytes as the number says"
    );
    // SAFETY: the buffer is as long as the number says, is ours alone, and lives until the call is over.
    let said = unsafe { nix::libc::ioctl(fd, u64::from(number), bytes.as_mut_ptr()) };
    nix::errno::Errno::result(said).map(drop).map_err(io::Error::from)
}
