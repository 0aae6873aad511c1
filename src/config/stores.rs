//! The stores of L2 as they are named: what a word means, and the obvious mistakes.

use std::fmt::{self, Display};
use std::fs;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::L2_MIN;
use crate::error::{Error, Result};
use crate::units::{Bytes, UnitError};

/// One store of L2, as `PATH` or `PATH:SIZE`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct L2Spec {
    pub path: PathBuf,
    /// `None`: all of an existing file or block device.
    pub size: Option<Bytes>,
}

impl FromStr for L2Spec {
    type Err = UnitError;

    /// The last colon splits off a size if a number follows it; other colons belong to the path, as in
    /// `/dev/disk/by-path/pci-0000:01:00.0-nvme-1`.
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let numeric = |tail: &str| {
            let unsigned = tail.strip_prefix('-').unwrap_or(tail);
            let unit = unsigned.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
            unit.len() < unsigned.len() && unit.chars().all(|c| c.is_ascii_alphabetic() || c == ' ')
        };
        let (path, size) = match text.rsplit_once(':') {
            Some((path, tail)) if numeric(tail) => (path, Some(tail.parse()?)),
            _ => (text, None),
        };
        Ok(Self { path: PathBuf::from(path), size })
    }
}

impl Display for L2Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.size {
            Some(size) => write!(f, "{}:{size}", self.path.display()),
            None => write!(f, "{}", self.path.display()),
        }
    }
}

impl L2Spec {
    /// Looks at what is there now, so that the obvious mistakes are found before anything is opened.
    pub(super) fn check(&self, format: bool, read_only: bool) -> Result<()> {
        if self.path.as_os_str().is_empty() {
            return Err(
                Error::new("", "names no path").remedy("write PATH:SIZE, as in /nvme/kv.store:200GiB")
            );
        }
        if let Some(size) = self.size.filter(|size| *size < L2_MIN) {
            return Err(Error::new("", format!("{size} is too small for a store"))
                .remedy(format!("give at least {L2_MIN}")));
        }
        let meta = match fs::metadata(&self.path) {
            Ok(meta) if meta.is_file() && meta.len() == 0 && read_only => {
                return Err(Self::no_store("is empty"));
            }
            Ok(meta) => meta,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && read_only => {
                return Err(Self::no_store("does not exist"));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return self.check_new(),
            Err(error) => return Err(Error::caused_by("", error).remedy("run as a user who may open it")),
        };
        if meta.is_dir() {
            return Err(Error::new("", "is a directory").remedy("name a file in it, with a size"));
        }
        if meta.file_type().is_block_device() {
            let end = fs::File::open(&self.path).and_then(|mut device| device.seek(SeekFrom::End(0)));
            let end =
                end.map_err(|error| Error::caused_by("", error).remedy("run as a user who may open it"))?;
            return match self.size {
                Some(size) if size.get() > end => {
                    Err(Error::new("", format!("the device holds only {}", Bytes(end).approx()))
                        .remedy("give a smaller size, or none to take it whole"))
                }
                _ => Ok(()),
            };
        }
        if !meta.is_file() {
            return Err(Error::new("", "is neither a file nor a block device").remedy("name one of these"));
        }
        if self.size.is_none() && meta.len() < L2_MIN.get() {
            let remedy = if format {
                "give a size: PATH:SIZE"
            } else {
                "give a size and --format to make a store of it"
            };
            return Err(
                Error::new("", format!("holds {} bytes, too few for a store", meta.len())).remedy(remedy)
            );
        }
        self.check_room(&self.path, meta.blocks() * 512)
    }

    fn no_store(why: &str) -> Error {
        Error::new("", format!("{why}, and a read-only mount makes no store"))
            .remedy("name a store that is there, or leave out --read-only")
    }

    fn check_new(&self) -> Result<()> {
        if self.size.is_none() {
            return Err(Error::new("", "does not exist").remedy("give a size to make it, as in PATH:200GiB"));
        }
        let dir = self.path.parent().unwrap_or(Path::new("/"));
        if !dir.is_dir() {
            return Err(Error::new("", format!("the directory {} does not exist", dir.display()))
                .remedy(format!("make it: mkdir -p {}", dir.display())));
        }
        self.check_room(dir, 0)
    }

    /// Stores are allocated whole, so their size must fit beside what they occupy already.
    fn check_room(&self, on: &Path, occupied: u64) -> Result<()> {
        let Some(size) = self.size else { return Ok(()) };
        let stat = nix::sys::statvfs::statvfs(on).map_err(|errno| {
            Error::caused_by(on.display(), std::io::Error::from(errno)).remedy("is it mounted?")
        })?;
        let room = stat.blocks_available().saturating_mul(stat.fragment_size()).saturating_add(occupied);
        if size.get() > room {
            return Err(Error::new("", format!("only {} are free there", Bytes(room).approx()))
                .remedy("give a smaller size or make room"));
        }
        Ok(())
    }
}

/// What makes two paths the same store: the device number, the inode, or for new files the path.
pub(super) fn identity(path: &Path) -> (u64, u64, PathBuf) {
    match fs::metadata(path) {
        Ok(meta) if meta.file_type().is_block_device() => (u64::MAX, meta.rdev(), PathBuf::new()),
        Ok(meta) => (meta.dev(), meta.ino(), PathBuf::new()),
        Err(_) => {
            let parent = path.parent().and_then(|dir| dir.canonicalize().ok());
            let whole = parent.zip(path.file_name()).map(|(dir, name)| dir.join(name));
            (0, 0, whole.unwrap_or_else(|| path.to_owned()))
        }
    }
}
