//! One ioctl: a structure with items behind it goes in, what came in its place goes out.
#![allow(unsafe_code, reason = "an ioctl of a size that is known only when it is made has no safe wrapper")]

use std::os::fd::{AsRawFd, BorrowedFd};

use kvcachefs::abi::{Command, Header, IOCTL_BYTES_MAX, VERSION};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub fn header(flags: u16, count: usize) -> Header {
    // Whoever counts more than fits is refused by `call`, or before.
    Header { version: VERSION, flags, count: u32::try_from(count).unwrap_or(u32::MAX) }
}

/// Sends a request, and returns what has taken its place; of a request that failed, too.
pub fn exchange<T, I>(
    fd: BorrowedFd<'_>,
    command: Command,
    head: &T,
    items: &[I],
) -> (Result<(), Errno>, Vec<u8>)
where
    T: IntoBytes + Immutable,
    I: IntoBytes + Immutable,
{
    let mut bytes = [head.as_bytes(), items.as_bytes()].concat();
    if bytes.len() > IOCTL_BYTES_MAX {
        return (Err(Errno::E2BIG), bytes);
    }
    let number = command.number(bytes.len());
    // SAFETY: the number says how many bytes the kernel reads and writes at this address, and that is the length of
    // `bytes`, which nobody else sees and which lives until the call is over. `fd` is borrowed, so it is open until then.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(number), bytes.as_mut_ptr()) };
    (Errno::result(answer).map(drop), bytes)
}

/// As [`exchange`], taken apart.
pub fn call<T, I, O>(
    fd: BorrowedFd<'_>,
    command: Command,
    head: &T,
    items: &[I],
) -> Result<(T, Vec<O>), Errno>
where
    T: FromBytes + IntoBytes + Immutable,
    I: IntoBytes + Immutable,
    O: FromBytes,
{
    let (result, bytes) = exchange(fd, command, head, items);
    result?;
    parted(&bytes)
}

fn parted<T: FromBytes, O: FromBytes>(bytes: &[u8]) -> Result<(T, Vec<O>), Errno> {
    // It is as long as the request was, which began with a `T`.
    let (head, mut rest) = T::read_from_prefix(bytes).map_err(|_| Errno::EPROTO)?;
    let mut items = Vec::new();
    while let Ok((item, more)) = O::read_from_prefix(rest) {
        items.push(item);
        rest = more;
    }
    Ok((head, items))
}
