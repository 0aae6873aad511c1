//! One L2 device: a preallocated store file, or a whole block device, opened for this daemon alone.
//!
//! Opening settles, once and with a message that names the remedy, everything that could go wrong later:
//! 1. it belongs to nobody else (`flock`, and for block devices `O_EXCL`, which mounted file systems hold too);
//! 2. its size is as asked, and a file's space is reserved, so that no write meets a full file system;
//! 3. it takes direct I/O at an alignment of at most a page. Where it does not, it works buffered, and says so;
//! 4. an engine runs on it.
#![allow(unsafe_code, reason = "statx has no safe wrapper")]

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{Whence, lseek};

use super::volume::COPY_AT;
use super::{Class, Direction, Engine, EngineOptions, Io, MAGIC, Target, Threads, Uring};
use crate::config::L2_MIN;
use crate::memory::{PAGE, Span};
use crate::units::Bytes;

mod exclusive;

use exclusive::{Opened, open_exclusively};

/// Which engine to use.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum EngineKind {
    /// io_uring where the kernel grants it, otherwise threads.
    #[default]
    Auto,
    /// io_uring, or an error that says why not.
    Uring,
    Threads,
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "io_uring" | "uring" => Ok(Self::Uring),
            "threads" => Ok(Self::Threads),
            _ => Err(format!("'{name}' is no I/O engine: use auto, io_uring or threads")),
        }
    }
}

#[derive(Clone, Default, Debug)]
pub struct DeviceOptions {
    /// Bytes, a multiple of 4096. Needed to create a file; otherwise what the file must have, and at most what
    /// the block device has. `None`: whatever is there.
    pub size: Option<u64>,
    pub kind: EngineKind,
    pub engine: EngineOptions,
}

/// An opened device. Dropping it stops its engine and gives the device free.
pub struct Device {
    path: PathBuf,
    len: u64,
    /// What was there when it was opened.
    found: u64,
    alignment: usize,
    direct: bool,
    notes: Vec<String>,
    engine: Arc<dyn Engine>,
    made: Option<Made>,
    /// Carries the lock.
    file: Arc<File>,
}

/// A store file that opening has made. It goes again, and its space with it, unless somebody keeps it: what a failed
/// start made is of no use, fills the disk, and looks like a store of the wrong size at the next start.
#[derive(Debug)]
pub struct Made {
    path: PathBuf,
    /// Device and inode: what is there later under the same name may be another's.
    identity: (u64, u64),
    kept: bool,
}

impl Made {
    fn new(path: &Path, file: &File) -> Option<Self> {
        let meta = file.metadata().ok()?;
        // From the root: a daemon changes its directory.
        let path = std::path::absolute(path).ok()?;
        Some(Self { path, identity: (meta.dev(), meta.ino()), kept: false })
    }

    /// The start has worked.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let found = || fs::metadata(&self.path).map(|meta| (meta.dev(), meta.ino()));
        if !self.kept && found().is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A device that is ours alone, and has the right size. Nothing has been written to it: who claims it can still look at
/// what is there and leave it, and then it is as it was.
pub struct Claimed {
    path: PathBuf,
    len: u64,
    /// Bytes that are really there: 0 of a file that is to become a store, all of a block device of which less is used.
    end: u64,
    is_block: bool,
    made: Option<Made>,
    /// Carries the lock, and goes last: what was made is removed while nobody else can have it.
    file: File,
}

impl Claimed {
    /// With `remake` the store is made anew, so a file gets the size that is asked for, whatever it has.
    pub fn open(path: &Path, size: Option<u64>, remake: bool) -> Result<Self, DeviceError> {
        let error = |cause| DeviceError { path: path.to_owned(), cause };
        if let Some(size) = size
            && (size == 0 || !size.is_multiple_of(PAGE as u64))
        {
            return Err(error(Cause::OddSize { size }));
        }
        let Opened { mut file, is_block, is_new } = open_exclusively(path, size.is_some()).map_err(error)?;
        let made = is_new.then(|| Made::new(path, &file)).flatten();
        let (len, end) = measure(&mut file, is_block, size, remake).map_err(error)?;
        Ok(Self { path: path.to_owned(), len, end, is_block, made, file })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that are to be used, a multiple of 4096.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that are there.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Fills `buf` from `offset`; behind the end are zeros.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let there = self.end.saturating_sub(offset).min(buf.len() as u64) as usize;
        self.file.read_exact_at(&mut buf[..there], offset)?;
        buf[there..].fill(0);
        Ok(())
    }

    /// The next bytes from `offset` on that may be anything but zeros, as far as that is known without reading.
    pub fn data_from(&self, offset: u64) -> Option<Range<u64>> {
        if offset >= self.end {
            return None;
        }
        let all = Some(offset..self.end);
        if self.is_block {
            return all;
        }
        let seek = |at: u64, whence| lseek(&self.file, at as libc::off_t, whence).map(|at| at as u64);
        match seek(offset, Whence::SeekData) {
            Ok(start) => Some(start..seek(start, Whence::SeekHole).unwrap_or(self.end).min(self.end)),
            Err(nix::Error::ENXIO) => None,
            Err(_) => all,
        }
    }

    /// Reserves its space and starts its engine. From here on it may be written to.
    pub fn ready(self, options: &DeviceOptions) -> Result<Device, DeviceError> {
        let Self { path, len, end, is_block, made, file } = self;
        let file = Arc::new(file);
        // Goes before the file, and so before the lock.
        let made = made;
        let mut notes = Vec::new();
        let started = (|| {
            if !is_block {
                // Also for a file of the right length, which may have holes; costs nothing when it has none.
                let found = file.metadata().map_err(Cause::step("measuring it"))?;
                reserve(&file, len, len.saturating_sub(found.blocks() * 512), &mut notes)?;
                if end < len {
                    file.sync_all().map_err(Cause::step("making its size durable"))?;
                    sync_directory_of(&path).map_err(Cause::step("making its name durable"))?;
                }
            }
            let (direct, alignment) = go_direct(&file, &mut notes);
            let label = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
            let target = Target { file: file.clone(), len, grain: if direct { alignment } else { 1 }, label };
            Ok((direct, alignment, start_engine(target, options, &mut notes)?))
        })();
        match started {
            Ok((direct, alignment, engine)) => {
                Ok(Device { path, len, found: end, alignment, direct, notes, engine, made, file })
            }
            Err(cause) => {
                shorten(&file, end);
                Err(DeviceError { path, cause })
            }
        }
    }
}

impl Device {
    pub fn open(path: &Path, options: &DeviceOptions) -> Result<Self, DeviceError> {
        Claimed::open(path, options.size, false)?.ready(options)
    }

    /// What claiming it made. It is the caller's to [`Made::keep`] from now on; what nobody takes is kept.
    pub fn take_made(&mut self) -> Option<Made> {
        self.made.take()
    }

    /// Gives a file back the length that it had. Nothing has been written to it.
    pub fn give_back(&self) {
        shorten(&self.file, self.found);
    }

    /// Cuts off what a file has beyond the length that is used.
    pub fn cut(&self) -> io::Result<()> {
        let found = self.file.metadata()?;
        if found.is_file() && found.len() > self.len { self.file.set_len(self.len) } else { Ok(()) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes, a multiple of 4096.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What offsets, lengths and addresses of transfers have to be multiples of. At most a page.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Whether transfers bypass the page cache.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// What the device does without, a sentence each, for the log and `.ctl/status`.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    pub fn engine(&self) -> Arc<dyn Engine> {
        self.engine.clone()
    }

    /// Puts another engine in front of this one, such as [`super::Faulty`].
    #[must_use]
    pub fn wrap(mut self, wrapper: impl FnOnce(Arc<dyn Engine>) -> Arc<dyn Engine>) -> Self {
        self.engine = wrapper(self.engine.clone());
        self
    }

    /// Fills `into` from `offset`, and waits for it. Not to be called from a completion, which would wait for itself.
    pub fn read_at(&self, offset: u64, into: &Span) -> io::Result<()> {
        self.transfer(Direction::Read, offset, into)
    }

    /// Writes all of `from` at `offset`, and waits for it; durable only after [`Device::sync_data`]. Not to be
    /// called from a completion.
    pub fn write_at(&self, offset: u64, from: &Span) -> io::Result<()> {
        self.transfer(Direction::Write, offset, from)
    }

    /// Makes every finished write durable.
    pub fn sync_data(&self) -> io::Result<()> {
        self.engine.sync_data()
    }

    fn transfer(&self, direction: Direction, offset: u64, span: &Span) -> io::Result<()> {
        let (tell, told) = sync_channel(1);
        let done = Box::new(move |outcome| {
            let _ = tell.send(outcome); // the receiver below waits for exactly this
        });
        self.engine.submit(Io { direction, class: Class::Demand, offset, span: span.clone(), done });
        told.recv().unwrap_or_else(|_| Err(io::Error::other("the engine dropped a transfer")))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.engine.stop();
        self.made.take().into_iter().for_each(Made::keep);
    }
}

/// How many bytes are to be used, and how many are there. A store that is made anew gets the size that is asked for.
fn measure(file: &mut File, is_block: bool, size: Option<u64>, remake: bool) -> Result<(u64, u64), Cause> {
    if is_block {
        // The end of a block device is its BLKGETSIZE64.
        let has = file.seek(SeekFrom::End(0)).map_err(Cause::step("measuring it"))?;
        let len = size.unwrap_or(has - has % PAGE as u64);
        if len > has || len == 0 {
            return Err(Cause::SmallDevice { asked: len, has });
        }
        return Ok((len, has));
    }
    let has = file.metadata().map_err(Cause::step("measuring it"))?.len();
    let len = match size {
        // An empty file is one that was to become a store when its daemon ended.
        None if has == 0 => return Err(Cause::Missing),
        None => has - has % PAGE as u64,
        // One that is too long is cut when it is certain that the new store can be made.
        Some(size) if has == 0 || remake => size,
        Some(size) if size != has => {
            return Err(Cause::OtherSize { asked: size, has, ours: begins_like_ours(file) });
        }
        Some(size) => size,
    };
    if len == 0 {
        return Err(Cause::OddSize { size: has });
    }
    Ok((len, has))
}

fn reserve(file: &File, len: u64, missing: u64, notes: &mut Vec<String>) -> Result<(), Cause> {
    let disk = fstatvfs(file).map_err(|errno| Cause::step("measuring its file system")(errno.into()))?;
    let free = disk.blocks_available() * disk.fragment_size();
    if missing > free {
        return Err(Cause::NoSpace { missing, free });
    }
    let Ok(end) = libc::off_t::try_from(len) else { return Err(Cause::OddSize { size: len }) };
    match fallocate(file, FallocateFlags::empty(), 0, end) {
        Ok(()) => Ok(()),
        Err(nix::Error::EOPNOTSUPP) => {
            notes
                .push("the file system cannot reserve space (fallocate): writes can meet a full disk".into());
            // Never shorter: `len` is the file's length already, or the file was empty.
            let has = file.metadata().map_err(Cause::step("measuring it"))?.len();
            if has < len { file.set_len(len).map_err(Cause::step("setting its size")) } else { Ok(()) }
        }
        Err(nix::Error::ENOSPC) => Err(Cause::NoSpace { missing, free }),
        Err(nix::Error::EFBIG) => Err(Cause::OddSize { size: len }),
        Err(errno) => Err(Cause::step("reserving its space")(errno.into())),
    }
}

/// What a start that is refused has added to a file would make it look like a store of another size.
fn shorten(file: &File, end: u64) {
    if file.metadata().is_ok_and(|found| found.is_file() && found.len() > end) {
        let _ = file.set_len(end);
    }
}

fn sync_directory_of(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Switches to direct I/O if the device takes it at page alignment: whether, and the alignment to keep.
fn go_direct(file: &File, notes: &mut Vec<String>) -> (bool, usize) {
    let alignment = direct_alignment(file).unwrap_or(PAGE);
    if alignment == 0 || alignment > PAGE {
        notes.push(format!(
            "no direct I/O (its alignment is {alignment}): reads and writes go through the page cache"
        ));
        return (false, PAGE);
    }
    let flags = fcntl(file, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
    match flags.and_then(|flags| fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT))) {
        Ok(_) => (true, alignment),
        Err(errno) => {
            notes.push(format!("no direct I/O ({errno}): reads and writes go through the page cache"));
            (false, PAGE)
        }
    }
}

/// The larger of the alignments of memory and offset; 0 where direct I/O is impossible, `None` where the kernel
/// (before 6.1) or the file system does not say.
fn direct_alignment(file: &File) -> Option<usize> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty C string, and `found` is a writable statx, all zeros, which is a valid one.
    let found = unsafe {
        let fd = file.as_raw_fd();
        if libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, found.as_mut_ptr()) != 0 {
            return None;
        }
        found.assume_init()
    };
    let align = found.stx_dio_mem_align.max(found.stx_dio_offset_align);
    (found.stx_mask & libc::STATX_DIOALIGN != 0).then_some(align as usize)
}

fn start_engine(
    target: Target,
    options: &DeviceOptions,
    notes: &mut Vec<String>,
) -> Result<Arc<dyn Engine>, Cause> {
    if options.kind != EngineKind::Threads {
        match Uring::start(target.clone(), &options.engine) {
            Ok(engine) => return Ok(Arc::new(engine)),
            Err(unavailable) if options.kind == EngineKind::Uring => {
                return Err(Cause::NoEngine(unavailable.to_string()));
            }
            Err(unavailable) => {
                notes.push(format!("io_uring: reads and writes go by threads, since {unavailable}"))
            }
        }
    }
    let engine = Threads::start(target, &options.engine).map_err(Cause::step("starting its I/O threads"))?;
    Ok(Arc::new(engine))
}

/// Why a device cannot be used: one line with its path, the cause, and what to do.
#[derive(Debug)]
pub struct DeviceError {
    path: PathBuf,
    cause: Cause,
}

/// Whether one of the two copies of a superblock is there, as far as its first bytes tell.
fn begins_like_ours(file: &File) -> bool {
    let mut start = [0; MAGIC.len()];
    [0, COPY_AT].iter().any(|at| file.read_exact_at(&mut start, *at).is_ok() && start == *MAGIC)
}

#[derive(Debug)]
enum Cause {
    Missing,
    WrongKind,
    /// Who holds it, if the kernel tells.
    InUse(Option<(i32, String)>),
    Mounted,
    LeadsNowhere,
    OddSize {
        size: u64,
    },
    OtherSize {
        asked: u64,
        has: u64,
        /// It is a store, or was one.
        ours: bool,
    },
    SmallDevice {
        asked: u64,
        has: u64,
    },
    NoSpace {
        missing: u64,
        free: u64,
    },
    NoEngine(String),
    Step {
        what: &'static str,
        error: io::Error,
    },
}

impl Cause {
    fn step(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self::Step { what, error }
    }
}

impl DeviceError {
    /// Whether another daemon, or a mount, has the device.
    pub fn is_in_use(&self) -> bool {
        matches!(self.cause, Cause::InUse(_) | Cause::Mounted)
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.cause {
            Cause::Missing => write!(f, "there is no store: give a size to create one"),
            Cause::WrongKind => write!(f, "neither a regular file nor a block device: name one of these"),
            Cause::InUse(None) => {
                write!(f, "in use by another kvcachefs: stop that one, or use another path")
            }
            Cause::InUse(Some((pid, name))) => write!(
                f,
                "in use by {name}, pid {pid}: wait if it is stopping, end it with kill {pid}, or use another path"
            ),
            Cause::Mounted => {
                write!(f, "in use, mounted or held by another program: unmount it, or use another device")
            }
            Cause::LeadsNowhere => {
                write!(f, "it is a symbolic link to what is not there: remove it, or use another path")
            }
            Cause::OddSize { size } => {
                write!(f, "{size} bytes is no size for a store: use a positive multiple of 4096")
            }
            Cause::OtherSize { asked, has, ours: false } => {
                let (has, asked) = (Bytes(*has), Bytes(*asked));
                write!(f, "it has {has} and is not a kvcachefs store: name another path, ")?;
                write!(f, "or give --format to make a new one of {asked}, which loses what is in it")
            }
            Cause::OtherSize { asked, has, ours: true } => {
                let than = if has < asked { "less" } else { "more" };
                let (has, asked) = (Bytes(*has), Bytes(*asked));
                write!(f, "it has {has}, {than} than the {asked} asked for, and a store keeps its size: ")?;
                if has >= L2_MIN {
                    write!(f, "leave out the size to open it as it is, or ")?;
                }
                write!(f, "give --format to make a new one of {asked}, which loses what is in it")
            }
            Cause::SmallDevice { asked, has } => {
                write!(
                    f,
                    "the block device has {}, less than the {} asked for: leave out the size to take it whole",
                    Bytes(*has),
                    Bytes(*asked)
                )
            }
            Cause::NoSpace { missing, free } => write!(
                f,
                "it needs {missing} more bytes and the file system has {free} free: ask for less, or free some"
            ),
            Cause::NoEngine(why) => write!(f, "{why}"),
            Cause::Step { what, error } if error.kind() == io::ErrorKind::PermissionDenied => {
                write!(f, "{what}: {error}: run as a user who may, or change its owner")
            }
            Cause::Step { what, error } => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            Cause::Step { error, .. } => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
