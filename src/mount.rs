//! Mounting and unmounting.
//!
//! fuser mounts with the type `fuse` when it is root, and then neither `findmnt -t fuse.kvcachefs` nor
//! `df -T` nor `umount -t` knows us. So we call mount(2) ourselves and hand fuser the device. Without
//! CAP_SYS_ADMIN the setuid program `fusermount3` does it for us and passes the device back.
//!
//! A daemon that was killed leaves a dead mount behind: every access answers ENOTCONN, and so would the
//! next mkdir or mount. If the mount table says that it was ours, it is detached and replaced. One that was killed in
//! the middle of a notification leaves a mount on which everybody waits; that one is cut off first.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::unistd::{getgid, getuid};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::config::Config;
use crate::error::{Error, Result, one_line};

mod ask;
pub mod connection;
mod serving;
mod table;

pub use ask::within;
pub use serving::is_ending;
pub use table::{Entry, mounted_on, mounts};

/// The type in mount tables.
pub const FSTYPE: &str = "fuse.kvcachefs";

const SUBTYPE: &str = "kvcachefs";

const FUSE_DEVICE: &str = "/dev/fuse";

/// How long a mount that is there already may take to show that it lives. A daemon under full load
/// answers statfs in milliseconds; one that is stopped never does, and we must not hang with it.
const LIFE_SIGN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a daemon that is ending may take for it once its connection is cut. Until then it holds its stores.
const LAST_STEPS: Duration = Duration::from_secs(20);

/// What to mount, and how.
#[derive(Clone, Debug)]
pub struct Request {
    pub mountpoint: PathBuf,
    pub fsname: String,
    pub fuse_device: PathBuf,
    pub read_only: bool,
    pub noexec: bool,
    pub allow_other: bool,
    pub default_permissions: bool,
}

impl From<&Config> for Request {
    fn from(config: &Config) -> Self {
        Self {
            mountpoint: config.mountpoint.clone(),
            fsname: config.fsname.clone(),
            fuse_device: config.fuse_device.clone(),
            read_only: config.read_only,
            noexec: config.noexec,
            allow_other: config.allow_other,
            default_permissions: config.default_permissions,
        }
    }
}

/// A file system that is mounted and waits for its first answer.
///
/// Dropping it does not unmount: from here on the daemon decides when to.
#[derive(Debug)]
pub struct Mounted {
    /// For `fuser::Session::from_fd`.
    pub device: OwnedFd,
    /// The real path, with all links resolved: what [`unmount`] and the mount table know.
    pub mountpoint: PathBuf,
    /// What [`leave`] wants.
    pub number: String,
    pub through: Through,
}

impl Mounted {
    fn new(device: OwnedFd, mountpoint: PathBuf, through: Through) -> Self {
        let number = mounted_on(&mountpoint).ok().flatten().map(|entry| entry.number);
        Self { device, mountpoint, number: number.unwrap_or_default(), through }
    }
}

/// Who called mount(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Through {
    /// We did.
    Kernel,
    /// `fusermount3` did, since we may not. There is no passthrough then either.
    Helper,
}

/// Finds out whether `request` can be fulfilled, without mounting. Replaces a dead mount of ours.
///
/// Answers the real path of the mount point. A daemon asks first of all, before it opens a store.
///
/// # Errors
/// One line: the mount point is missing, no directory, or taken; the FUSE device is missing.
pub fn prepare(request: &Request) -> Result<PathBuf> {
    let mountpoint = check(request)?;
    if fs::read_dir(&mountpoint).is_ok_and(|mut entries| entries.next().is_some()) {
        log::warn!("{} is not empty; what is in it is hidden while mounted", request.mountpoint.display());
    }
    Ok(mountpoint)
}

/// Directories that the machine or its users need, just as they are: what hides them, hides programs, sockets, homes or
/// the way to unmount it again. What is below them may be mounted on, and so may `/mnt`, `/media` and `/srv`.
const NEEDED: [&str; 21] = [
    "/", "/proc", "/sys", "/dev", "/dev/shm", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64",
    "/libx32", "/run", "/var", "/var/tmp", "/tmp", "/boot", "/home", "/root", "/opt",
];

/// Whether mounting there would hide what the machine runs on. Below `/proc` and `/sys` nothing but the kernel makes
/// directories.
fn is_needed(mountpoint: &Path) -> bool {
    NEEDED.iter().any(|needed| mountpoint == real_path(Path::new(needed)))
        || ["/proc", "/sys"].iter().any(|kernel| mountpoint.starts_with(kernel))
}

fn check(request: &Request) -> Result<PathBuf> {
    let mountpoint = real_path(&request.mountpoint);
    if is_needed(&mountpoint) {
        return Err(Error::new(request.mountpoint.display(), "the machine needs what is there")
            .remedy("make a directory to mount on, such as /mnt/kv"));
    }
    clear_dead_mount(&mountpoint)?;
    let shown = request.mountpoint.display();
    // Of another kind, but it may hang in the same way.
    if mounted_on(&mountpoint)?.is_some_and(|entry| entry.fstype.starts_with("fuse"))
        && matches!(life(&mountpoint), Life::Silent | Life::Wedged)
    {
        return Err(Error::new(&shown, "busy: a FUSE mount of another kind is there and does not answer")
            .remedy(format!("end it: umount -f -l {shown}")));
    }
    let meta = match fs::metadata(&mountpoint) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::new(&shown, "the mount point does not exist")
                .remedy(format!("make it: mkdir -p {shown}")));
        }
        Err(error) if error.raw_os_error() == Some(Errno::ENOTCONN as i32) => {
            return Err(Error::new(&shown, "a dead FUSE mount of another kind is there")
                .remedy(format!("detach it: umount -l {shown}")));
        }
        Err(error) => {
            return Err(Error::caused_by(&shown, error).remedy("name a directory that you may enter"));
        }
    };
    if !meta.is_dir() {
        return Err(Error::new(&shown, "is not a directory").remedy("name a directory to mount on"));
    }
    if let Err(error) = fs::metadata(&request.fuse_device) {
        return Err(device_error(&request.fuse_device, error));
    }
    Ok(mountpoint)
}

/// Mounts, by mount(2) or else by `fusermount3`.
///
/// # Errors
/// As [`prepare`]; or neither way is open to us.
pub fn mount(request: &Request) -> Result<Mounted> {
    let mountpoint = check(request)?;
    match OpenOptions::new().read(true).write(true).open(&request.fuse_device) {
        Ok(device) => {
            let device = OwnedFd::from(device);
            match mount_directly(request, &mountpoint, &device) {
                Ok(()) => return Ok(Mounted::new(device, mountpoint, Through::Kernel)),
                Err(Errno::EPERM) => {}
                Err(errno) => return Err(mount_error(request, errno)),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            // Open to root only. The helper is root; in a container that was not given the device it fails too.
            if !getuid().is_root() && request.fuse_device == Path::new(FUSE_DEVICE) {
                log::debug!("{}: {error}; asking fusermount3", request.fuse_device.display());
            } else {
                return Err(device_error(&request.fuse_device, error));
            }
        }
        Err(error) => return Err(device_error(&request.fuse_device, error)),
    }
    let device = mount_by_helper(request, &mountpoint)?;
    Ok(Mounted::new(device, mountpoint, Through::Helper))
}

fn mount_directly(request: &Request, mountpoint: &Path, device: &OwnedFd) -> Result<(), Errno> {
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    flags.set(MsFlags::MS_RDONLY, request.read_only);
    flags.set(MsFlags::MS_NOEXEC, request.noexec);
    let mut data =
        format!("fd={},rootmode=40000,user_id={},group_id={}", device.as_raw_fd(), getuid(), getgid());
    for option in kernel_options(request) {
        data.push(',');
        data.push_str(option);
    }
    nix::mount::mount(Some(request.fsname.as_str()), mountpoint, Some(FSTYPE), flags, Some(data.as_str()))
}

fn kernel_options(request: &Request) -> impl Iterator<Item = &'static str> {
    [(request.allow_other, "allow_other"), (request.default_permissions, "default_permissions")]
        .into_iter()
        .filter_map(|(wanted, name)| wanted.then_some(name))
}

/// Lets `fusermount3` mount. It gets one end of a socket as its standard input, so that no descriptor
/// has to be inherited by number, and sends the open device through it.
fn mount_by_helper(request: &Request, mountpoint: &Path) -> Result<OwnedFd> {
    let shown = request.mountpoint.display();
    if request.fuse_device != Path::new(FUSE_DEVICE) {
        return Err(Error::new(
            request.fuse_device.display(),
            "CAP_SYS_ADMIN is missing, and fusermount3 knows only /dev/fuse",
        )
        .remedy("run as root or leave out --fuse-device"));
    }
    let mut options = format!("fsname={},subtype={SUBTYPE},nosuid,nodev", escaped(&request.fsname));
    for option in kernel_options(request)
        .chain(request.read_only.then_some("ro"))
        .chain(request.noexec.then_some("noexec"))
    {
        options.push(',');
        options.push_str(option);
    }
    let failed = |error: io::Error| Error::caused_by("fusermount3", error);
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let args: [OsString; 4] = ["-o".into(), options.into(), "--".into(), mountpoint.into()];
    let output = run_helper(&args, Some(theirs.into())).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Error::new(&shown, "CAP_SYS_ADMIN is missing and there is no fusermount3 either")
                .remedy("run as root or install the package fuse3")
        }
        _ => failed(error),
    })?;
    if !output.status.success() {
        let text = one_line(&String::from_utf8_lossy(&output.stderr));
        let remedy = if text.contains("user_allow_other") {
            "add the line user_allow_other to /etc/fuse.conf, or leave out --allow-other"
        } else if text.contains("failed to open /dev/fuse: Permission denied") {
            "mount as root, or open the device to users: chmod 666 /dev/fuse"
        } else if text.contains("modprobe") || text.contains("No such device") {
            "load the kernel module: modprobe fuse"
        } else {
            "mount as root, or on a directory that you own"
        };
        return Err(Error::new(&shown, text).remedy(remedy));
    }
    receive_device(&ours).map_err(failed)?.ok_or_else(|| {
        Error::new("fusermount3", "sent no device").remedy("is it the one of the package fuse3?")
    })
}

/// Takes the one descriptor that waits in the socket.
fn receive_device(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// Runs `fusermount3`, or `fusermount` where only that exists.
fn run_helper(args: &[OsString], socket: Option<OwnedFd>) -> io::Result<Output> {
    let mut missing = io::Error::from(io::ErrorKind::NotFound);
    for program in ["fusermount3", "/usr/bin/fusermount3", "/bin/fusermount3", "fusermount"] {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null());
        if let Some(socket) = &socket {
            command.stdin(socket.try_clone()?).env("_FUSE_COMMFD", "0");
        }
        match command.output() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing = error,
            answer => return answer,
        }
    }
    Err(missing)
}

/// Commas separate options, so a name that contains one needs a backslash.
fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace(',', "\\,")
}

fn device_error(device: &Path, error: io::Error) -> Error {
    let remedy = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOENT | Errno::ENODEV | Errno::ENXIO) => {
            "load the kernel module: modprobe fuse (in a container: --device /dev/fuse)"
        }
        Some(Errno::EPERM | Errno::EACCES) => {
            "run as root (in a container: --device /dev/fuse --cap-add SYS_ADMIN)"
        }
        _ => "is it the FUSE device?",
    };
    Error::caused_by(device.display(), error).remedy(remedy)
}

fn mount_error(request: &Request, errno: Errno) -> Error {
    let remedy = match errno {
        Errno::ENODEV => "load the kernel module: modprobe fuse",
        Errno::EINVAL => "is --fuse-device the FUSE device?",
        Errno::EBUSY => "unmount what is there first",
        _ => "the kernel log may say more: dmesg",
    };
    Error::caused_by(request.mountpoint.display(), io::Error::from(errno)).remedy(remedy)
}

/// Whether what is mounted still answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    Alive,
    /// Its daemon is gone.
    Dead,
    /// Its daemon was killed and cannot end: a client waits for it, and it for the client. Nobody will ever answer.
    Wedged,
    /// Its daemon is there, or cannot be seen, and does not answer in time.
    Silent,
}

/// Asks a mount for a sign of life, and if there is none, its daemon's process.
pub fn life(mountpoint: &Path) -> Life {
    let ask = || nix::sys::statfs::statfs(mountpoint).map(|_| Vec::new()).map_err(io::Error::from);
    match within(LIFE_SIGN_TIMEOUT, ask) {
        Some(Err(error)) if is_dead(&error) => Life::Dead,
        Some(_) => Life::Alive,
        None if is_wedged(mountpoint) => Life::Wedged,
        None => Life::Silent,
    }
}

/// Whether a mount that does not answer never will: all who serve it are about to end.
pub fn is_wedged(mountpoint: &Path) -> bool {
    mounted_on(mountpoint).ok().flatten().is_some_and(|entry| dying(&entry).is_some())
}

fn is_dead(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOTCONN | Errno::ECONNABORTED | Errno::ECONNREFUSED))
}

/// The processes that serve a mount, as far as the kernel tells.
fn served_by(entry: &Entry) -> Option<Vec<i32>> {
    let minor = connection::minor(&entry.number)?;
    // Looking at other processes is harmless, but a bound is a bound.
    let seen = within(LIFE_SIGN_TIMEOUT, || {
        let pids = serving::serving(minor).unwrap_or_default();
        Ok(pids.iter().flat_map(|pid| pid.to_ne_bytes()).collect())
    });
    let seen = seen?.ok()?;
    Some(seen.as_chunks().0.iter().map(|pid| i32::from_ne_bytes(*pid)).collect())
}

/// The processes that serve a mount, if there are any and all of them are about to end.
fn dying(entry: &Entry) -> Option<Vec<i32>> {
    served_by(entry).filter(|pids| !pids.is_empty() && pids.iter().all(|pid| is_ending(*pid)))
}

/// Makes way for a new mount: detaches a dead or wedged one of ours, refuses on a living one.
fn clear_dead_mount(mountpoint: &Path) -> Result<()> {
    let shown = mountpoint.display();
    // Mounts may lie on top of one another, so look again after each.
    while let Some(entry) = mounted_on(mountpoint)?.filter(Entry::is_ours) {
        match life(mountpoint) {
            Life::Dead => {
                detach(&entry.mountpoint, How::Lazily)?;
                log::warn!("{shown} held a dead kvcachefs mount, which is now detached");
            }
            Life::Wedged => {
                cut(&entry)?;
                log::warn!(
                    "{shown} held a kvcachefs mount whose daemon could not end; it is cut off and detached"
                );
            }
            Life::Alive => {
                return Err(Error::new(&shown, "busy: a kvcachefs is mounted here already")
                    .remedy(format!("unmount it first: kvcachefs umount {shown}")));
            }
            Life::Silent => {
                return Err(Error::new(
                    &shown,
                    "busy: a kvcachefs is mounted here already and does not answer",
                )
                .remedy(format!("end its daemon, or cut it off: kvcachefs umount --force {shown}")));
            }
        }
    }
    Ok(())
}

/// Ends the connection of a mount, detaches it, and waits for a daemon that could not end before.
fn cut(entry: &Entry) -> Result<()> {
    let ending = dying(entry).unwrap_or_default();
    detach(&entry.mountpoint, How::ByForce)?;
    let deadline = Instant::now() + LAST_STEPS;
    while !ending.iter().all(|pid| serving::is_over(*pid)) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// How to unmount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// Refused while files are open.
    Politely,
    /// Detached now; it ends when the last open file is closed.
    Lazily,
    /// If its daemon is dead or does not answer, its connection is cut: whoever waits for it gets an error.
    ByForce,
    /// The same, but not if the daemon is there and does not answer.
    IfDead,
}

/// Unmounts a kvcachefs. What is dead by the wish of the caller may have gone already.
///
/// # Errors
/// One line: nothing of ours is mounted there, files are open, it lives, or we may not.
pub fn unmount(mountpoint: &Path, how: How) -> Result<()> {
    let real = real_path(mountpoint);
    match mounted_on(&real)? {
        Some(entry) if entry.is_ours() => match how {
            How::Politely | How::Lazily => detach(&real, how),
            How::ByForce | How::IfDead => {
                refuse_if_alive(&entry, how)?;
                cut(&entry)
            }
        },
        Some(entry) => Err(Error::new(
            mountpoint.display(),
            format!("a file system of type {} is mounted there", entry.fstype),
        )
        .remedy("use umount")),
        None if matches!(how, How::ByForce | How::IfDead) => Ok(()),
        None => Err(Error::new(mountpoint.display(), "no kvcachefs is mounted there")
            .remedy("findmnt -t fuse.kvcachefs lists the mounts")),
    }
}

fn refuse_if_alive(entry: &Entry, how: How) -> Result<()> {
    let shown = entry.mountpoint.display();
    match life(&entry.mountpoint) {
        Life::Alive => Err(Error::new(&shown, "busy: its daemon lives and answers")
            .remedy(format!("unmount it: kvcachefs umount {shown} (with --lazy though files are open)"))),
        Life::Silent if how == How::IfDead && !served_by(entry).unwrap_or_default().is_empty() => {
            Err(Error::new(&shown, "busy: its daemon does not answer, but it is there")
                .remedy(format!("end it, or cut it off: kvcachefs umount --force {shown}")))
        }
        _ => Ok(()),
    }
}

/// Whether nobody can have a file of this mount open any more. It may be gone from one place and be mounted in another,
/// or its connection may have been cut (`umount -f`) while clients still hold files.
pub fn is_gone(number: &str) -> bool {
    let mounted = mounts().map_or(true, |all| all.iter().any(|entry| entry.number == number));
    // Where the kernel's list of connections can be seen, ours leaves it with the last user.
    let listed = connection::minor(number)
        .is_some_and(|minor| Path::new(connection::CONNECTIONS).join(minor).exists());
    !mounted && !listed
}

/// Detaches the daemon's own mount, if it is still there. Somebody may have unmounted it long ago, while clients kept
/// it alive, and mounted another: that one is not ours to take away.
///
/// # Errors
/// As [`unmount`].
pub fn leave(mountpoint: &Path, number: &str) -> Result<()> {
    match mounted_on(mountpoint)? {
        Some(entry) if entry.is_ours() && entry.number == number => detach(mountpoint, How::Lazily),
        _ => Ok(()),
    }
}

fn detach(mountpoint: &Path, how: How) -> Result<()> {
    let shown = mountpoint.display();
    let busy = || {
        Error::new(shown.to_string(), "busy: files are open there")
            .remedy(format!("close them (fuser -vm {shown} lists who), or detach it with --lazy"))
    };
    let flags = match how {
        How::Politely => MntFlags::empty(),
        How::Lazily => MntFlags::MNT_DETACH,
        How::ByForce | How::IfDead => MntFlags::MNT_FORCE | MntFlags::MNT_DETACH,
    };
    match umount2(mountpoint, flags | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => return Ok(()),
        Err(Errno::EPERM) => {}
        Err(Errno::EBUSY) => return Err(busy()),
        Err(errno) => return Err(Error::caused_by(&shown, io::Error::from(errno))),
    }
    if matches!(how, How::ByForce | How::IfDead) {
        // The helper only detaches. Who has mounted may cut.
        let number = mounted_on(mountpoint)?.map(|entry| entry.number).unwrap_or_default();
        connection::switch(&number)
            .and_then(|mut switch| switch.write_all(b"1"))
            .map_err(|error| Error::caused_by(&shown, error).remedy("cut it off as root"))?;
    }
    let lazily = (how != How::Politely).then(|| OsString::from("-z"));
    let args: Vec<OsString> =
        [OsString::from("-u")].into_iter().chain(lazily).chain(["--".into(), mountpoint.into()]).collect();
    let output = run_helper(&args, None).map_err(|error| {
        Error::caused_by("fusermount3", error).remedy("unmount as root or install the package fuse3")
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = one_line(&String::from_utf8_lossy(&output.stderr));
    if text.contains("busy") {
        return Err(busy());
    }
    Err(Error::new(&shown, text).remedy("unmount as the user who mounted, or as root"))
}

/// Resolves links, without needing the last component to answer: a dead mount does not, and one that hangs must not
/// hold us up.
pub fn real_path(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if mounted_on(&absolute).is_ok_and(|entry| entry.is_some()) {
        return absolute;
    }
    let resolved = |path: &Path| {
        let real =
            within(LIFE_SIGN_TIMEOUT, || path.canonicalize().map(|real| real.into_os_string().into_vec()));
        real.and_then(io::Result::ok).map(|real| PathBuf::from(OsString::from_vec(real)))
    };
    if let Some(real) = resolved(&absolute) {
        return real;
    }
    let parent = absolute.parent().and_then(resolved);
    parent.zip(absolute.file_name()).map_or(absolute.clone(), |(dir, name)| dir.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(mountpoint: &Path) -> Request {
        Request {
            mountpoint: mountpoint.to_owned(),
            fsname: "test".to_owned(),
            fuse_device: PathBuf::from(FUSE_DEVICE),
            read_only: false,
            noexec: false,
            allow_other: false,
            default_permissions: true,
        }
    }

    fn refusal(request: &Request) -> String {
        prepare(request).expect_err("a refusal").to_string()
    }

    #[test]
    fn an_unfit_mount_point_is_named_with_a_remedy() {
        let dir = tempfile::tempdir().expect("a directory");
        let missing = dir.path().join("missing");
        assert!(refusal(&request(&missing)).ends_with(&format!("make it: mkdir -p {}", missing.display())));
        let file = dir.path().join("file");
        fs::write(&file, "").expect("a file");
        assert!(refusal(&request(&file)).contains("file: is not a directory"));
        let needed =
            ["/", "/proc", "/proc/sys", "/usr/../dev", "/bin", "/tmp", "/home/", "/root", "/opt", "/boot"];
        for needed in needed {
            let refused = refusal(&request(Path::new(needed)));
            assert!(refused.starts_with(&format!("{needed}: the machine needs")), "{refused}");
        }
        for fit in ["/mnt", "/srv", "/tmp/kv", "/home/me/kv", "/opt/kv", "/var/lib/kv", "/run/kv"] {
            assert!(!is_needed(&real_path(Path::new(fit))), "{fit}");
        }
        let no_device = Request { fuse_device: dir.path().join("fuse"), ..request(dir.path()) };
        assert!(refusal(&no_device).contains("modprobe fuse"));
    }

    #[test]
    fn what_is_not_ours_is_not_unmounted() {
        let refusal =
            |path: &str| unmount(Path::new(path), How::Politely).expect_err("a refusal").to_string();
        assert!(refusal("/proc").contains("type proc"));
        assert!(refusal("/nowhere").contains("no kvcachefs is mounted there"));
    }

    #[test]
    fn a_descriptor_comes_through_a_socket() {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        drop(theirs);
        assert!(receive_device(&ours).expect("end of stream").is_none());
    }

    #[test]
    fn names_are_escaped_for_the_helper() {
        assert_eq!(escaped(r"a,b\c"), r"a\,b\\c");
    }
}
