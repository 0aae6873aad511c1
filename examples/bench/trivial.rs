//! The least that a daemon with passthrough can be: a directory of files that are memfds, looked up and opened.
//!
//! What opening a file through it costs is what the kernel costs (P6). It runs as a process of its own, as ours does.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use fuser::{
    BackingId, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use nix::mount::{MntFlags, umount2};
use nix::sys::memfd::{MFdFlags, memfd_create};
use tempfile::TempDir;

use crate::failure::{Context, Failure, Result};
use crate::interrupt;

/// Names the directory to mount on, in the process that shall be the daemon.
const VARIABLE: &str = "KVCACHEFS_BENCH_TRIVIAL";
const FILES: u64 = 64;
const BYTES: u64 = 1 << 20;
const TTL: Duration = Duration::from_secs(3600);

struct Trivial {
    files: Vec<std::os::fd::OwnedFd>,
    backing: Vec<OnceLock<BackingId>>,
}

fn attr(ino: u64) -> FileAttr {
    let (kind, perm, size) =
        if ino == 1 { (FileType::Directory, 0o755, 0) } else { (FileType::RegularFile, 0o644, BYTES) };
    let then = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size / 512,
        atime: then,
        mtime: then,
        ctime: then,
        crtime: then,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Trivial {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |_| io::Error::from(io::ErrorKind::Unsupported);
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(refused)?;
        config.set_max_stack_depth(1).map(drop).map_err(|_| io::Error::from(io::ErrorKind::Unsupported))
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str().and_then(|name| name.strip_suffix(".kv")?.parse::<u64>().ok()) {
            Some(at) if at < FILES => reply.entry(&TTL, &attr(at + 2), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino.0));
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let at = (ino.0 - 2) as usize;
        if self.backing[at].get().is_none() {
            match reply.open_backing(self.files[at].as_fd()) {
                // Of two threads one keeps its own.
                Ok(id) => drop(self.backing[at].set(id)),
                Err(_) => return reply.error(Errno::EIO),
            }
        }
        match self.backing[at].get() {
            Some(id) => reply.opened_passthrough(FileHandle(0), FopenFlags::FOPEN_NOFLUSH, id),
            None => reply.error(Errno::EIO),
        }
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }
}

/// Is this process to be the daemon? Then it is, until it is unmounted.
pub fn daemon() -> Option<ExitCode> {
    let dir = PathBuf::from(std::env::var_os(VARIABLE)?);
    let file = || -> io::Result<std::os::fd::OwnedFd> {
        let file = std::fs::File::from(memfd_create(c"trivial", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(BYTES)?;
        Ok(file.into())
    };
    let served = (0..FILES).map(|_| file()).collect::<io::Result<Vec<_>>>().and_then(|files| {
        let backing = files.iter().map(|_| OnceLock::new()).collect();
        let mut config = Config::default();
        // As many as ours has by default.
        config.n_threads = Some(std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8));
        config.clone_fd = true;
        fuser::mount(Trivial { files, backing }, &dir, &config)
    });
    match served {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("bench: the trivial daemon: {error}");
            Some(ExitCode::FAILURE)
        }
    }
}

/// The daemon in a process of its own, and its mount.
pub struct Running {
    daemon: Child,
    home: TempDir,
}

impl Running {
    pub fn start() -> Result<Self> {
        let home = tempfile::Builder::new()
            .prefix("kvcachefs-bench-")
            .tempdir()
            .context(|| "cannot make a directory for the trivial daemon".into())?;
        let own = std::env::current_exe().context(|| "cannot find this program's own path".into())?;
        let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev());
        let outside = device(home.path()).context(|| "cannot stat".into())?;
        let daemon = Command::new(own)
            .env(VARIABLE, home.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context(|| "cannot start the trivial daemon".into())?;
        let mut running = Self { daemon, home };
        while device(running.home.path()).is_ok_and(|now| now == outside) {
            interrupt::check()?;
            if let Ok(Some(status)) = running.daemon.try_wait() {
                return Err(Failure::new(format!("the trivial daemon ended with {status}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(running)
    }

    pub fn path(&self, at: usize) -> PathBuf {
        self.home.path().join(format!("{:04}.kv", at as u64 % FILES))
    }

    pub const fn files() -> (u64, u64) {
        (FILES, BYTES)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = umount2(self.home.path(), MntFlags::MNT_DETACH);
        // Its session has ended with the mount.
        let _ = self.daemon.wait();
    }
}
