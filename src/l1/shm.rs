//! Where the memory of slabs comes from: files of a tmpfs of our own that has no mount point, or memfds.
//!
//! The kernel gives memfds huge pages only as `/sys/kernel/mm/transparent_hugepage/shmem_enabled` says, which is
//! `never` nearly everywhere. A tmpfs decides for itself by its mount option `huge=` (only `deny` overrules it), and
//! `within_size` makes no page that reaches past the end of a file, so that what the budget counts is what there is.
//! khugepaged does, for the last part of a file that no whole huge page fits in: such files are memfds. A huge page is
//! taken if one is at hand, and nobody waits for memory to be moved together.
//! With huge pages a read of a slab looks up one folio instead of 512 pages, and a mapping of it takes one fault.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::memfd::{MFdFlags, memfd_create};
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, openat, unlinkat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};

/// How the path of a slab begins in `/proc/PID/fd`, if it lies in a tmpfs.
pub const SLAB_PATH: &str = "/kvcachefs-slab";

static NEXT_NAME: AtomicU64 = AtomicU64::new(0);

/// Pages of 4 KiB in a huge one, where base pages have 4 KiB.
pub(super) const HUGE: u32 = 512;

/// Makes files of memory.
pub(super) struct Shm {
    /// The root of the tmpfs. None: memfds.
    mount: Option<OwnedFd>,
    without: Option<String>,
}

impl Shm {
    pub fn new(huge_pages: bool) -> Self {
        if !huge_pages {
            return Self { mount: None, without: None };
        }
        match huge_tmpfs() {
            Ok(mount) => Self { mount: Some(mount), without: None },
            Err(error) => Self {
                mount: None,
                without: Some(format!("huge pages for L1 (a tmpfs of its own: {error})")),
            },
        }
    }

    /// What was asked for and could not be had.
    pub fn without(&self) -> Option<&str> {
        self.without.as_deref()
    }

    /// An empty file for `pages` pages, which has no name and is open nowhere else, and whether it may have huge pages.
    pub fn file(&self, pages: u32) -> io::Result<(File, bool)> {
        let mount = self.mount.as_ref().filter(|_| pages.is_multiple_of(HUGE));
        let first = match mount {
            Some(mount) => OwnedFd::from(unlinked(mount)?),
            None => memfd_create(c"kvcachefs-slab", MFdFlags::MFD_CLOEXEC)?,
        };
        // A lease on a descriptor counts those who opened the file, and a memfd has been opened by nobody (fact 5).
        let again = format!("/proc/self/fd/{}", first.as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(again)?;
        Ok((file, mount.is_some()))
    }
}

fn huge_tmpfs() -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let context = context.as_fd();
    fsconfig_set_string(context, "source", "kvcachefs-l1")?;
    // The budget bounds them; by default a tmpfs ends at half of the machine's memory and at half as many files.
    fsconfig_set_string(context, "size", "0")?;
    fsconfig_set_string(context, "nr_inodes", "0")?;
    fsconfig_set_string(context, "mode", "0700")?;
    fsconfig_set_string(context, "huge", "within_size")?;
    fsconfig_create(context)?;
    let hidden = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, hidden)?)
}

/// Has a name for a moment, so that lsof and /proc/PID/maps say what it is.
fn unlinked(mount: &OwnedFd) -> io::Result<File> {
    let name = format!("{}-{}", &SLAB_PATH[1..], NEXT_NAME.fetch_add(1, Ordering::Relaxed));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let ours = Mode::RUSR | Mode::WUSR;
    let file = openat(mount, &name, flags, ours)?;
    unlinkat(mount, &name, AtFlags::empty())?;
    // It is opened once more, which a umask must not forbid.
    fchmod(&file, ours)?;
    Ok(File::from(file))
}
