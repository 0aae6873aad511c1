//! Slabs are used again under a reader that passed pages on: what it passed on never shows another owner's bytes, shows
//! nothing new at all with `--recycle strict`, and for the same owner not before `--slab-rest` is over.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "pages are mapped and handed to the kernel")]

mod common;

use std::fs::{self, File};
use std::io::{IoSlice, PipeReader, Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::NonNull;

use common::{Mode, Mount, Options, bytes};
use io_uring::{IoUring, opcode, types};
use nix::fcntl::{SpliceFFlags, splice, vmsplice};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::sendfile::sendfile;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

/// A pipe and a socket hold less: what is passed on is the front of the file.
const SIZE: usize = 2 << 20;
const PIPE: usize = 1 << 20;
/// Who owns the files that are read, and somebody else.
const OWNER: u32 = 3001;
const OTHER: u32 = 3002;

/// What holds pages of a file whose descriptor and mapping are gone.
trait Keeper {
    /// What is in those pages now.
    fn look(self: Box<Self>) -> Vec<u8>;
}

struct Piped(PipeReader, usize);

impl Keeper for Piped {
    fn look(mut self: Box<Self>) -> Vec<u8> {
        let mut read = vec![0; self.1];
        self.0.read_exact(&mut read).unwrap();
        read
    }
}

struct Socket(UnixStream, usize);

impl Keeper for Socket {
    fn look(mut self: Box<Self>) -> Vec<u8> {
        let mut read = vec![0; self.1];
        self.0.read_exact(&mut read).unwrap();
        read
    }
}

fn pipe() -> (PipeReader, std::io::PipeWriter) {
    let (from, to) = std::io::pipe().unwrap();
    // SAFETY: F_SETPIPE_SZ takes an integer.
    let size = unsafe { libc::fcntl(to.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE) };
    assert!(size >= PIPE as i32, "no pipe of {PIPE} bytes");
    (from, to)
}

fn by_splice(path: &Path) -> Box<dyn Keeper> {
    let (from, to) = pipe();
    let file = File::open(path).unwrap();
    let count = splice(&file, None, &to, None, PIPE, SpliceFFlags::SPLICE_F_NONBLOCK).unwrap();
    Box::new(Piped(from, count))
}

/// To a socket that nobody reads from.
fn by_sendfile(path: &Path) -> Box<dyn Keeper> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let count = sendfile(&ours, File::open(path).unwrap(), None, PIPE).unwrap();
    Box::new(Socket(theirs, count))
}

struct Map {
    base: NonNull<std::ffi::c_void>,
}

impl Map {
    fn new(path: &Path, protection: ProtFlags, flags: MapFlags) -> Self {
        let length = NonZeroUsize::new(SIZE).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(None, length, protection, flags, File::open(path).unwrap(), 0) }.unwrap();
        Self { base }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for as long as self lives, and never written to through it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), SIZE) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no slice of it outlives self.
        unsafe { munmap(self.base, SIZE) }.unwrap();
    }
}

fn by_vmsplice(path: &Path) -> Box<dyn Keeper> {
    let (from, to) = pipe();
    let map = Map::new(path, ProtFlags::PROT_READ, shared());
    let count =
        vmsplice(&to, &[IoSlice::new(&map.bytes()[..PIPE])], SpliceFFlags::SPLICE_F_NONBLOCK).unwrap();
    drop(map);
    Box::new(Piped(from, count))
}

/// Handles that the daemon serves can be mapped only privately.
fn shared() -> MapFlags {
    if common::mode() == Mode::Daemon { MapFlags::MAP_PRIVATE } else { MapFlags::MAP_SHARED }
}

/// A fixed buffer of an io_uring over a mapping that is gone.
struct Registered {
    ring: IoUring,
    address: *const u8,
    count: usize,
}

impl Keeper for Registered {
    fn look(mut self: Box<Self>) -> Vec<u8> {
        let file = tempfile::tempfile().unwrap();
        let write = opcode::WriteFixed::new(types::Fd(file.as_raw_fd()), self.address, self.count as u32, 0)
            .offset(0)
            .build();
        // SAFETY: the kernel pinned the buffer's pages when it was registered; the address only names a place in it.
        unsafe { self.ring.submission().push(&write) }.unwrap();
        self.ring.submit_and_wait(1).unwrap();
        let result = self.ring.completion().next().unwrap().result();
        assert_eq!(result, self.count as i32, "writing from a fixed buffer");
        let mut read = vec![0; self.count];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut read, 0).unwrap();
        read
    }
}

fn by_registration(path: &Path, protection: ProtFlags, flags: MapFlags) -> Option<Box<dyn Keeper>> {
    let ring = IoUring::new(2).ok()?;
    let map = Map::new(path, protection, flags);
    let address = map.base.as_ptr().cast::<u8>();
    let buffers = [libc::iovec { iov_base: address.cast(), iov_len: PIPE }];
    // SAFETY: the range is mapped now; the kernel pins its pages, and they stay pinned when the mapping goes.
    match unsafe { ring.submitter().register_buffers(&buffers) } {
        Ok(()) => Some(Box::new(Registered { ring, address, count: PIPE })),
        // What cannot be written to cannot be registered, so nobody keeps pages that way.
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => None,
        Err(error) => panic!("registering a buffer: {error}"),
    }
}

/// Everything that keeps pages of the file at `path`, by name.
fn keepers(path: &Path) -> Vec<(&'static str, Box<dyn Keeper>)> {
    let mut all = vec![
        ("sendfile to a slow socket", by_sendfile(path)),
        ("splice to a pipe", by_splice(path)),
        ("vmsplice of a mapping", by_vmsplice(path)),
    ];
    for (name, protection, flags) in [
        ("fixed buffer over a shared mapping", ProtFlags::PROT_READ, shared()),
        (
            "fixed buffer over a private mapping",
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_PRIVATE,
        ),
    ] {
        all.extend(by_registration(path, protection, flags).map(|keeper| (name, keeper)));
    }
    all
}

/// Writes a file as `uid`, as a process of that user would.
fn write_as(uid: u32, path: &Path, content: &[u8]) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Only for this thread, which ends here.
            setfsgid(Gid::from_raw(uid));
            setfsuid(Uid::from_raw(uid));
            fs::write(path, content).unwrap();
        });
    });
}

fn mount(rest: &str, strict: bool) -> Mount {
    let mut options = Options::new(64, 512).arg("--allow-other").arg("--slab-rest").arg(rest);
    if strict && common::mode() != Mode::Strict {
        options = options.arg("--recycle").arg("strict");
    }
    let mount = Mount::with(options);
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o777)).unwrap();
    mount
}

/// Passes pages of a file on, lets go of the file, and writes files of as many pages until all of L1 has been used
/// again. Then what was passed on must still be what it was.
fn pages_stay_what_they_were(mount: &Mount, writer: u32) {
    let (path, old) = (mount.at("read"), bytes(1, SIZE));
    write_as(OWNER, &path, &old);
    let held = keepers(&path);
    fs::remove_file(&path).unwrap();
    all_of_l1_is_used_again(mount, mount.path(), writer);
    nothing_has_changed(held, &old);
    mount.check_quiet();
}

fn all_of_l1_is_used_again(mount: &Mount, dir: &Path, writer: u32) {
    let foreign = bytes(2, SIZE);
    for at in 0..2 * (64 << 20) / SIZE {
        let path = dir.join(format!("w{}", at % 4));
        write_as(writer, &path, &foreign);
        // Read in passthrough, so that these slabs rest too.
        assert!(fs::read(&path).unwrap() == foreign);
    }
    let used = mount.stat("slabs_reused") + mount.stat("slabs_replaced");
    assert!(used > 0, "no slab was used again");
}

fn nothing_has_changed(held: Vec<(&'static str, Box<dyn Keeper>)>, old: &[u8]) {
    for (name, keeper) in held {
        let seen = keeper.look();
        assert!(!seen.is_empty(), "{name} kept nothing");
        let changed = (0..seen.len()).filter(|&at| seen[at] != old[at]).count();
        assert_eq!(changed, 0, "{name}: of {} bytes so many are another file's", seen.len());
    }
}

#[test]
fn another_owner_never_gets_pages_that_were_read() {
    pages_stay_what_they_were(&mount("0s", false), OTHER);
}

/// The same user's files in another directory below the root, also where that has the removed one's place.
#[test]
fn another_namespace_never_gets_pages_that_were_read() {
    let mount = mount("0s", false);
    let namespace = |name: &str| {
        fs::create_dir(mount.at(name)).unwrap();
        std::os::unix::fs::chown(mount.at(name), Some(OWNER), Some(OWNER)).unwrap();
        fs::metadata(mount.at(name)).unwrap().ino() as u32
    };
    let gone = namespace("gone");
    let (path, old) = (mount.at("gone/read"), bytes(1, SIZE));
    write_as(OWNER, &path, &old);
    let held = keepers(&path);
    fs::remove_file(&path).unwrap();
    mount.drain();
    fs::remove_dir(mount.at("gone")).unwrap();
    mount.drain();
    assert_eq!(namespace("next"), gone, "the test needs the place of the removed directory");
    all_of_l1_is_used_again(&mount, &mount.at("next"), OWNER);
    nothing_has_changed(held, &old);
    mount.check_quiet();
}

/// What is written to a file without a name belongs to no namespace any more, not to the root's.
#[test]
fn a_file_without_a_name_gets_no_pages_that_were_read() {
    let mount = mount("0s", false);
    // As many pages as a file is given that begins to be written.
    let (path, old) = (mount.at("read"), bytes(1, 4 << 20));
    write_as(OWNER, &path, &old);
    let held = keepers(&path);
    fs::remove_file(&path).unwrap();
    mount.drain();
    fs::create_dir(mount.at("space")).unwrap();
    fs::set_permissions(mount.at("space"), fs::Permissions::from_mode(0o777)).unwrap();
    let foreign = bytes(2, PIPE);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            setfsgid(Gid::from_raw(OWNER));
            setfsuid(Uid::from_raw(OWNER));
            let mut open = Vec::new();
            for _ in 0..10 {
                let path = mount.at("space/nameless");
                let mut file = File::create_new(&path).unwrap();
                fs::remove_file(&path).unwrap();
                file.write_all(&foreign).unwrap();
                open.push(file);
            }
        });
    });
    nothing_has_changed(held, &old);
    mount.check_quiet();
}

#[test]
fn strict_recycling_never_reuses_pages_that_were_read() {
    let mount = mount("0s", true);
    pages_stay_what_they_were(&mount, OWNER);
}

#[test]
fn the_same_owner_gets_pages_back_only_after_the_rest() {
    pages_stay_what_they_were(&mount("1h", false), OWNER);
}

#[test]
fn a_file_that_was_given_away_does_not_lend_its_pages_to_its_maker() {
    let mount = mount("0s", false);
    let (path, old) = (mount.at("given"), bytes(1, SIZE));
    write_as(OWNER, &path, &old);
    nix::unistd::chown(&path, Some(Uid::from_raw(OTHER)), None).unwrap();
    let held = keepers(&path);
    fs::remove_file(&path).unwrap();
    let foreign = bytes(2, SIZE);
    for at in 0..2 * (64 << 20) / SIZE {
        write_as(OWNER, &mount.at(&format!("w{}", at % 4)), &foreign);
    }
    for (name, keeper) in held {
        let seen = keeper.look();
        let changed = (0..seen.len()).filter(|&at| seen[at] != old[at]).count();
        assert_eq!(changed, 0, "{name}: of {} bytes so many are another owner's", seen.len());
    }
    mount.check_quiet();
}
