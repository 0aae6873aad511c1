//! Having a device alone: a lock on it, and for block devices O_EXCL, which mounted file systems hold too.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use super::Cause;

/// How long a lock that no living process has is waited for: the slowest of devices ends what it was told within this.
const GOING: Duration = Duration::from_secs(10);
const GOING_STEP: Duration = Duration::from_millis(5);
/// Of a block device the lock goes a moment before the exclusion does.
const EXCLUSION_TRIES: u32 = 40;

pub struct Opened {
    /// Carries the lock.
    pub file: File,
    pub is_block: bool,
    pub is_new: bool,
}

pub fn open_exclusively(path: &Path, may_create: bool) -> Result<Opened, Cause> {
    let kind = match fs::metadata(path) {
        Ok(found) => Some(found.file_type()),
        Err(error) if error.kind() == io::ErrorKind::NotFound && may_create => None,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Cause::Missing),
        Err(error) => return Err(Cause::step("looking at it")(error)),
    };
    let is_block = kind.is_some_and(|kind| kind.is_block_device());
    if kind.is_some_and(|kind| !kind.is_file() && !kind.is_block_device()) {
        return Err(Cause::WrongKind);
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    if is_block {
        options.custom_flags(libc::O_EXCL); // without O_CREAT: exclusive against mounts and other O_EXCL openers
    } else if kind.is_none() {
        options.create_new(true);
    }
    if is_block {
        // The lock tells more than O_EXCL: who has it, and whether that is on its way out.
        lock(&File::open(path).map_err(Cause::step("opening it"))?)?;
    }
    let mut tries = 0;
    let file = loop {
        match options.open(path) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && tries < EXCLUSION_TRIES => {
                tries += 1;
                std::thread::sleep(GOING_STEP);
            }
            opened => break opened,
        }
    }
    .map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => Cause::Mounted,
        Some(libc::EEXIST) if path.is_symlink() => Cause::LeadsNowhere,
        Some(libc::EEXIST) => Cause::InUse(None), // somebody else made it a moment ago
        _ => Cause::step("opening it")(error),
    })?;
    lock(&file)?;
    Ok(Opened { file, is_block, is_new: kind.is_none() })
}

/// Takes the lock. What a killed daemon had on its way to the device keeps its files open, and so locked, until that has
/// arrived: the kernel takes an io_uring down after its process has ended. That is waited for, not what somebody holds who
/// lives.
fn lock(file: &File) -> Result<(), Cause> {
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(Cause::step("locking it")(error)),
            Err(TryLockError::WouldBlock) => {}
        }
        let holder = holder(file);
        if holder.is_some() || start.elapsed() > GOING {
            return Err(Cause::InUse(holder));
        }
        std::thread::sleep(GOING_STEP);
    }
}

/// The living process that has locked the file, and its name, as /proc/locks tells it:
/// `1: FLOCK  ADVISORY  WRITE 708 00:2f:13 0 EOF`, with the device in hexadecimal and the inode in decimal.
fn holder(file: &File) -> Option<(i32, String)> {
    let meta = file.metadata().ok()?;
    let (major, minor) = (nix::sys::stat::major(meta.dev()), nix::sys::stat::minor(meta.dev()));
    let wanted = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let pid = locks.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let at = fields.iter().position(|field| *field == "FLOCK")?;
        (fields.get(at + 4) == Some(&wanted.as_str())).then(|| fields[at + 3].parse().ok())?
    })?;
    // `708 (name) S 1 …`: Z and X have ended.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, state) = stat.split_once('(')?.1.rsplit_once(") ")?;
    (!state.starts_with(['Z', 'X'])).then(|| (pid, name.to_owned()))
}
