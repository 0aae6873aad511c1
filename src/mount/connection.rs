//! Cutting a FUSE connection: every request that waits is answered with an error, and so is every later one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// Where the kernel's list of connections is mounted, if it is.
pub const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// The number under which the kernel lists the connection of the mount with this device number.
pub fn minor(number: &str) -> Option<&str> {
    number.strip_prefix("0:").filter(|minor| !minor.is_empty())
}

/// The file of exactly this connection to which something is written to cut it.
///
/// It keeps nothing busy, and it stands for this connection alone: after its end, writing does nothing, though
/// another one may have got its number.
///
/// # Errors
/// The kernel's list is not mounted and may not be by us, or the connection is not ours.
pub fn switch(number: &str) -> io::Result<File> {
    let minor = minor(number).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    let listed = Path::new(CONNECTIONS).join(minor).join("abort");
    match OpenOptions::new().write(true).open(&listed) {
        // Not mounted, or mounted read-only, as in containers. One of our own is seen by nobody.
        Err(_) => Ok(File::from(openat(
            own_list()?,
            format!("{minor}/abort"),
            OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?)),
        opened => opened,
    }
}

fn own_list() -> io::Result<OwnedFd> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}
