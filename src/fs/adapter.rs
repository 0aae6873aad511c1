//! One method for each FUSE operation.

use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dashmap::DashMap;
use fuser::{
    AccessFlags, BackingId, BsdFileFlags, CopyFileRangeFlags, Errno as FuseErrno, FileAttr, FileHandle,
    FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner,
    OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use nix::errno::Errno;

use super::ioctl;
use crate::control::{Control, Opened as OpenedControl};
use crate::store::attr::{Attr, Change, Entry, NAME_MAX};
use crate::store::change::Hurry;
use crate::store::core::now;
use crate::store::node::{Kind, ROOT_INO};
use crate::store::{Answer, Caller, Handle, Opened, Store, UnitReply, Wake, WriteReply};

/// Largest write and read in one request.
const TRANSFER_MAX: u32 = 1 << 20;

/// Fewest background requests that the kernel may have given us at a time: asynchronous reads and writes, and RELEASE. It
/// keeps further ones to itself, and a RELEASE that is kept publishes late; so they must not be few.
const BACKGROUND_MIN: u16 = 1024;

/// How many background requests the kernel may have given us at a time. A write that waits for room is held by the daemon
/// with its bytes, so this bounds what a client can make it hold without threads of its own: as much as may be dirty, at
/// least 1 GiB. What is beyond stays in the client's memory.
fn background_max(dirty_limit_bytes: u64) -> u16 {
    u16::try_from(dirty_limit_bytes / u64::from(TRANSFER_MAX)).unwrap_or(u16::MAX).max(BACKGROUND_MIN)
}

pub(super) enum Open {
    File(Arc<Handle>),
    Control(Arc<OpenedControl>),
}

impl Clone for Open {
    fn clone(&self) -> Self {
        match self {
            Self::File(handle) => Self::File(handle.clone()),
            Self::Control(control) => Self::Control(control.clone()),
        }
    }
}

/// The file system as fuser sees it.
pub struct KvFs {
    store: Arc<Store>,
    control: Arc<Control>,
    handles: DashMap<u64, Open>,
    next_handle: AtomicU64,
    /// The kernel has refused a backing file, and it has been said.
    backing_refused: AtomicBool,
}

pub(super) fn fuse_errno(errno: Errno) -> FuseErrno {
    FuseErrno::from_i32(errno as i32)
}

fn caller(req: &Request) -> Caller {
    Caller::new(req.pid(), req.uid(), req.gid())
}

fn time(nanos: i64) -> SystemTime {
    let magnitude = Duration::from_nanos(nanos.unsigned_abs());
    if nanos >= 0 { UNIX_EPOCH + magnitude } else { UNIX_EPOCH - magnitude }
}

/// A time that a request brought. fuser 0.18 takes the nanoseconds of times before 1970 to count backwards; the kernel
/// means them forwards from the second, as always.
fn nanos(time: SystemTime) -> i64 {
    let clamp = |nanos: u128| i64::try_from(nanos).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => clamp(after.as_nanos()),
        Err(before) => {
            let before = before.duration();
            i64::from(before.subsec_nanos()) - clamp(u128::from(before.as_secs()) * 1_000_000_000)
        }
    }
}

fn time_or_now(time: TimeOrNow) -> i64 {
    match time {
        TimeOrNow::SpecificTime(time) => nanos(time),
        TimeOrNow::Now => now(),
    }
}

fn kind(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Dir => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
    }
}

pub(super) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: time(attr.atime),
        mtime: time(attr.mtime),
        ctime: time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind: kind(attr.kind),
        perm: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn reply_entry(reply: ReplyEntry, result: Result<Entry, Errno>) {
    match result {
        Ok(entry) => {
            reply.entry_with_ttls(&entry.attr.ttl, &entry.ttl, &file_attr(&entry.attr), Generation(0))
        }
        Err(errno) => reply.error(fuse_errno(errno)),
    }
}

fn reply_attr(reply: ReplyAttr, result: Result<Attr, Errno>) {
    match result {
        Ok(attr) => reply.attr(&attr.ttl, &file_attr(&attr)),
        Err(errno) => reply.error(fuse_errno(errno)),
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(fuse_errno(errno)),
    }
}

impl KvFs {
    pub fn new(store: Arc<Store>, control: Arc<Control>) -> Self {
        Self {
            store,
            control,
            handles: DashMap::new(),
            next_handle: AtomicU64::new(1),
            backing_refused: AtomicBool::new(false),
        }
    }

    fn add(&self, open: Open) -> FileHandle {
        let fh = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.handles.insert(fh, open);
        FileHandle(fh)
    }

    fn get(&self, fh: FileHandle) -> Option<Open> {
        self.handles.get(&fh.0).map(|open| open.clone())
    }

    fn file(&self, fh: FileHandle) -> Result<Arc<Handle>, Errno> {
        match self.get(fh) {
            Some(Open::File(handle)) => Ok(handle),
            _ => Err(Errno::EBADF),
        }
    }

    /// Passthrough worked when the mount was made, and does not for some file. It is read all the same (rule R17).
    fn note_refused_backing(&self, error: &io::Error) {
        if !self.backing_refused.swap(true, Ordering::Relaxed) {
            log::warn!("the kernel refuses passthrough for a file: {error} (said once); the daemon reads it");
            self.control.without(format!(
                "passthrough for some files (the kernel refused it: {error}): reads of them go through the daemon"
            ));
        }
    }

    /// Answers an open with the file that the kernel is to read by itself, or without one.
    fn serve<R>(
        &self,
        Opened { mut handle, slab }: Opened,
        reply: R,
        open_backing: impl FnOnce(&R, BorrowedFd<'_>) -> io::Result<BackingId>,
        answer: impl FnOnce(R, FileHandle, FopenFlags, Option<&BackingId>),
    ) {
        // Only what was written needs to know of each close (fact 6).
        let quiet = if handle.writer { FopenFlags::empty() } else { FopenFlags::FOPEN_NOFLUSH };
        if let Some(slab) = slab {
            let mut backing = slab.backing_slot().lock();
            // Another open of this inode number may have failed meanwhile: all of them are served in one way (rule R3b).
            let passthrough = self.store.reads_by_passthrough(&handle);
            if passthrough && backing.is_none() {
                match open_backing(&reply, slab.backing_fd()) {
                    Ok(id) => *backing = Some(Box::new(id)),
                    Err(error) => self.note_refused_backing(&error),
                }
            }
            match backing.as_ref().filter(|_| passthrough).and_then(|id| id.downcast_ref::<BackingId>()) {
                Some(id) => {
                    let fh = self.add(Open::File(Arc::new(handle)));
                    return answer(reply, fh, quiet, Some(id));
                }
                // No open of this number has been answered with passthrough, so the mode can still be the other.
                None => self.store.read_directly(&mut handle),
            }
        }
        let fh = self.add(Open::File(Arc::new(handle)));
        answer(reply, fh, quiet | FopenFlags::FOPEN_DIRECT_IO, None);
    }

    /// Control files cannot be made, renamed or removed.
    fn guard(&self, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        if self.control.owns(parent.0) || (parent.0 == ROOT_INO && name == Control::NAME) {
            return Err(Errno::EPERM);
        }
        Ok(())
    }
}

impl Filesystem for KvFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_CACHE_SYMLINKS,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                log::info!("this kernel lacks {flag:?}");
            }
        }
        if self.control.wants_passthrough() {
            let granted = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
                && config.set_max_stack_depth(1).is_ok();
            self.control.set_kernel_passthrough(granted);
        }
        // A refused value leaves the kernel's own, which is smaller but works.
        let _ = config.set_max_write(TRANSFER_MAX);
        let background = background_max(self.store.snapshot().dirty_limit_bytes);
        let _ = config.set_max_background(background);
        let _ = config.set_congestion_threshold(background);
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if let Some(result) = self.control.lookup(parent.0, name) {
            return reply_entry(reply, result);
        }
        let (caller, name) = (caller(req), name.as_bytes());
        match self.store.lookup(parent.0, name, &caller) {
            Answer::Now(result) => reply_entry(reply, result),
            Answer::Wait => {
                let reply = Box::new(move |result| reply_entry(reply, result));
                self.store.lookup_later(parent.0, name, &caller, reply);
            }
        }
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        self.store.forget(ino.0, nlookup);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply_attr(reply, self.control.getattr(ino.0).unwrap_or_else(|| self.store.getattr(ino.0)));
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if self.control.owns(ino.0) {
            return reply.error(FuseErrno::EPERM);
        }
        let change = Change {
            mode,
            uid,
            gid,
            atime: atime.map(time_or_now),
            mtime: mtime.map(time_or_now),
            ctime: ctime.map(nanos),
        };
        let Some(size) = size else { return reply_attr(reply, self.store.setattr(ino.0, change)) };
        let nonblocking = fh.and_then(|fh| self.file(fh).ok()).is_some_and(|handle| handle.nonblocking);
        self.store.truncate_with(
            ino.0,
            fh.is_some(),
            size,
            change,
            Hurry::of(nonblocking),
            &caller(req),
            Box::new(move |result| reply_attr(reply, result)),
        );
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.store.readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(fuse_errno(errno)),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let made = self
            .guard(parent, name)
            .and_then(|()| self.store.mknod(parent.0, name.as_bytes(), mode, &caller(req)));
        reply_entry(reply, made);
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        let made = self
            .guard(parent, name)
            .and_then(|()| self.store.mkdir(parent.0, name.as_bytes(), mode, &caller(req)));
        reply_entry(reply, made);
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self
            .guard(parent, name)
            .and_then(|()| self.store.unlink(parent.0, name.as_bytes(), &caller(req)));
        reply_empty(reply, done);
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.guard(parent, name).and_then(|()| self.store.rmdir(parent.0, name.as_bytes()));
        reply_empty(reply, done);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.guard(parent, link_name).and_then(|()| {
            self.store.symlink(parent.0, link_name.as_bytes(), target.as_os_str().as_bytes(), &caller(req))
        });
        reply_entry(reply, made);
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let done = self.guard(parent, name).and_then(|()| self.guard(newparent, newname)).and_then(|()| {
            let (name, newname) = (name.as_bytes(), newname.as_bytes());
            self.store.rename(parent.0, name, newparent.0, newname, flags.bits(), &caller(req))
        });
        reply_empty(reply, done);
    }

    fn link(&self, _req: &Request, _ino: INodeNo, _newparent: INodeNo, _newname: &OsStr, reply: ReplyEntry) {
        // A file has one name: eviction takes the file with its name (rule R8).
        reply.error(FuseErrno::EPERM);
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if let Some(result) = self.control.open(ino.0, flags.0, &caller(req)) {
            return match result {
                Ok(opened) => {
                    let fh = self.add(Open::Control(Arc::new(opened)));
                    reply.opened(fh, FopenFlags::FOPEN_DIRECT_IO);
                }
                Err(errno) => reply.error(fuse_errno(errno)),
            };
        }
        match self.store.open(ino.0, flags.0, &caller(req)) {
            Ok(opened) => {
                self.serve(
                    opened,
                    reply,
                    |reply, fd| reply.open_backing(fd),
                    |reply, fh, flags, backing| match backing {
                        Some(id) => reply.opened_passthrough(fh, flags, id),
                        None => reply.opened(fh, flags),
                    },
                );
            }
            Err(errno) => reply.error(fuse_errno(errno)),
        }
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.get(fh) {
            Some(Open::File(handle)) => self.store.read(
                &handle,
                offset,
                size as usize,
                Box::new(move |result| match result {
                    Ok(bytes) => reply.data(bytes),
                    Err(errno) => reply.error(fuse_errno(errno)),
                }),
            ),
            Some(Open::Control(opened)) => match self.control.read(&opened, offset, size as usize) {
                Ok(bytes) => reply.data(&bytes),
                Err(errno) => reply.error(fuse_errno(errno)),
            },
            None => reply.error(FuseErrno::EBADF),
        }
    }

    fn write(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.get(fh) {
            Some(Open::File(handle)) => {
                if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
                    self.store.drop_privileges(&handle);
                }
                let answer = |reply: ReplyWrite, result| match result {
                    Ok(len) => reply.written(len),
                    Err(errno) => reply.error(fuse_errno(errno)),
                };
                // Of a mapping: it says nothing of who wrote, and msync asks for durability by itself.
                let written_back = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
                let durable = !written_back && flags.0 & libc::O_DSYNC != 0;
                if !written_back {
                    self.store.take_over(&handle, &caller(req));
                }
                let (store, file) = (self.store.clone(), handle.clone());
                let written: WriteReply = Box::new(move |result| {
                    if written_back {
                        store.written_back(&file);
                    }
                    match result {
                        Ok(len) if durable => store.fsync_visible(
                            &file,
                            Box::new(move |result: Result<(), Errno>| answer(reply, result.map(|()| len))),
                        ),
                        result => answer(reply, result),
                    }
                });
                // As they are now: they may have been changed since it was opened.
                let hurry = Hurry::of(flags.0 & libc::O_NONBLOCK != 0);
                self.store.write_with(&handle, offset, data, hurry, written);
            }
            Some(Open::Control(opened)) => match self.control.write(&opened, data) {
                Ok(len) => reply.written(len),
                Err(errno) => reply.error(fuse_errno(errno)),
            },
            None => reply.error(FuseErrno::EBADF),
        }
    }

    fn flush(&self, req: &Request, _ino: INodeNo, fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        if let Some(Open::File(handle)) = self.get(fh) {
            self.store.flush(&handle, &caller(req));
        }
        reply.ok();
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        match self.handles.remove(&fh.0) {
            Some((_, Open::File(handle))) => self.store.release(&handle),
            Some((_, Open::Control(opened))) => self.control.release(&opened),
            None => {}
        }
        reply.ok();
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let answer: UnitReply = Box::new(move |result| reply_empty(reply, result));
        match self.get(fh) {
            Some(Open::File(handle)) => self.store.fsync(&handle, answer),
            // A drain, like the fsync of a directory, for which the kernel locks nothing that others need.
            Some(Open::Control(_)) => self.store.fsync_all(answer),
            None => answer(Err(Errno::EBADF)),
        }
    }

    /// The kernel copies through its own buffers instead, and does not ask again.
    fn copy_file_range(
        &self,
        _req: &Request,
        _ino_in: INodeNo,
        _fh_in: FileHandle,
        _offset_in: u64,
        _ino_out: INodeNo,
        _fh_out: FileHandle,
        _offset_out: u64,
        _len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(FuseErrno::ENOSYS);
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.store.before_listing(ino.0, move || reply.opened(FileHandle(0), FopenFlags::empty()));
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        ioctl::answer(&self.store, self.get(fh), cmd, in_data, reply);
    }

    /// Everything is ready at any time, but for a handle whose tickets have not ended. A file must be answered, too: were the
    /// kernel told that there is no poll, it would ask for no handle any more.
    fn poll(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        ph: PollNotifier,
        _events: PollEvents,
        flags: PollFlags,
        reply: ReplyPoll,
    ) {
        let wake = || -> Wake {
            Box::new(move || {
                if let Err(error) = ph.notify() {
                    // ENODEV and EBADF: unmounted, and ENOENT: nobody polls any more.
                    log::debug!("waking who polls a handle: {error}");
                }
            })
        };
        let ready = match self.get(fh) {
            Some(Open::Control(opened)) => {
                let waits = flags.contains(PollFlags::FUSE_POLL_SCHEDULE_NOTIFY);
                self.control.poll(&opened, waits.then(wake))
            }
            _ => true,
        };
        let read = if ready { PollEvents::POLLIN | PollEvents::POLLRDNORM } else { PollEvents::empty() };
        reply.poll(read | PollEvents::POLLOUT | PollEvents::POLLWRNORM);
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listed = match self.control.readdir(ino.0, offset, &mut |ino, at, entry, name| {
            reply.add(INodeNo(ino), at, kind(entry), name)
        }) {
            Some(()) => Ok(()),
            None => self.store.readdir(ino.0, offset, &mut |entry| {
                !reply.add(INodeNo(entry.ino), entry.cookie, kind(entry.kind), OsStr::from_bytes(&entry.name))
            }),
        };
        match listed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(fuse_errno(errno)),
        }
    }

    fn releasedir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsyncdir(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.store.fsync_all(Box::new(move |result| reply_empty(reply, result)));
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let capacity = self.store.statfs();
        reply.statfs(
            capacity.pages,
            capacity.free,
            capacity.free,
            capacity.files,
            capacity.files_free,
            4096,
            NAME_MAX as u32,
            4096,
        );
    }

    fn setxattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if self.control.owns(ino.0) {
            return reply.error(FuseErrno::EPERM);
        }
        reply_empty(reply, self.store.setxattr(ino.0, name.as_bytes(), value, flags));
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = if self.control.owns(ino.0) {
            Err(Errno::ENODATA)
        } else {
            self.store.getxattr(ino.0, name.as_bytes())
        };
        reply_xattr(reply, value, size);
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let names = if self.control.owns(ino.0) { Ok(Vec::new()) } else { self.store.listxattr(ino.0) };
        reply_xattr(reply, names, size);
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if self.control.owns(ino.0) {
            return reply.error(FuseErrno::EPERM);
        }
        reply_empty(reply, self.store.removexattr(ino.0, name.as_bytes()));
    }

    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // Asked only without default_permissions: then everybody who can reach the mount may do everything.
        reply.ok();
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self
            .guard(parent, name)
            .and_then(|()| self.store.create(parent.0, name.as_bytes(), mode, flags, &caller(req)));
        match made {
            Ok((entry, opened)) => {
                let (attr, generation) = (file_attr(&entry.attr), Generation(0));
                self.serve(
                    opened,
                    reply,
                    |reply, fd| reply.open_backing(fd),
                    |reply, fh, flags, backing| match backing {
                        Some(id) => reply.created_passthrough(&entry.ttl, &attr, generation, fh, flags, id),
                        None => reply.created(&entry.ttl, &attr, generation, fh, flags),
                    },
                );
            }
            Err(errno) => reply.error(fuse_errno(errno)),
        }
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        match self.file(fh) {
            Ok(handle) => {
                let reply = Box::new(move |result| reply_empty(reply, result));
                self.store.fallocate(&handle, offset, length, mode, reply);
            }
            Err(errno) => reply.error(fuse_errno(errno)),
        }
    }

    fn lseek(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let at = match self.get(fh) {
            Some(Open::File(handle)) => self.store.seek(&handle, offset, whence),
            Some(Open::Control(opened)) => self.control.seek(&opened, offset, whence),
            None => Err(Errno::EBADF),
        };
        match at {
            Ok(at) => reply.offset(at),
            Err(errno) => reply.error(fuse_errno(errno)),
        }
    }
}

fn reply_xattr(reply: ReplyXattr, value: Result<Vec<u8>, Errno>, size: u32) {
    match value {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(FuseErrno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(errno) => reply.error(fuse_errno(errno)),
    }
}
