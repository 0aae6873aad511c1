//! Making a ring on whatever kernel this is, or saying why there is none.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::{fmt, fs, io};

use io_uring::{IoUring, Probe, opcode, types};

/// The device's place in the table of registered files.
pub(super) const FILE: types::Fixed = types::Fixed(0);

/// Deeper rings gain nothing on one device and cost locked memory.
pub(super) const DEPTH_MAX: u32 = 4096;

/// How completions reach the ring's thread, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::l2) enum Setup {
    /// 6.1: they are worked on when the thread waits for them, and interrupt nothing.
    Deferred,
    /// 5.19: they are worked on at the thread's next system call.
    Cooperative,
    /// They interrupt the thread.
    Plain,
}

impl Setup {
    pub(in crate::l2) const ALL: [Self; 3] = [Self::Deferred, Self::Cooperative, Self::Plain];
}

/// Makes a ring of at least `entries` places with `file` registered, by the first setup that the kernel knows.
/// To be called by the thread that will use it.
pub(super) fn build(entries: u32, setups: &[Setup], file: &File) -> Result<(IoUring, Setup), Unavailable> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for &setup in setups {
        let mut builder = IoUring::builder();
        match setup {
            Setup::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
            }
            Setup::Cooperative => {
                builder.setup_coop_taskrun().setup_submit_all();
            }
            Setup::Plain => {}
        }
        match builder.build(entries) {
            Ok(ring) => return equip(ring, file).map(|ring| (ring, setup)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(Unavailable::ring(error)),
        }
    }
    Err(Unavailable::ring(refused))
}

fn equip(ring: IoUring, file: &File) -> Result<IoUring, Unavailable> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(Unavailable::ring)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
    if !needed.into_iter().all(|code| probe.is_supported(code)) || !ring.params().is_feature_nodrop() {
        return Err(Unavailable::ring(io::Error::from_raw_os_error(libc::ENOSYS)));
    }
    ring.submitter()
        .register_files(&[file.as_raw_fd()])
        .map_err(|error| Unavailable { what: "registering the device with io_uring", error })?;
    Ok(ring)
}

/// Why there is no ring, and what would help.
#[derive(Debug)]
pub struct Unavailable {
    what: &'static str,
    error: io::Error,
}

impl Unavailable {
    fn ring(error: io::Error) -> Self {
        Self { what: "io_uring", error }
    }

    pub(super) fn step(what: &'static str, error: impl Into<io::Error>) -> Self {
        Self { what, error: error.into() }
    }

    pub(super) fn thread(error: io::Error) -> Self {
        Self { what: "starting the io_uring thread", error }
    }

    /// What to do about it. The kernel says EPERM for two reasons, which only the sysctl tells apart.
    fn remedy(&self) -> String {
        let sysctl = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
        remedy(self.error.raw_os_error(), sysctl.trim())
    }
}

fn remedy(errno: Option<i32>, sysctl: &str) -> String {
    match (errno, sysctl) {
        (Some(libc::EPERM | libc::EACCES), "1" | "2") => {
            format!("kernel.io_uring_disabled is {sysctl}: set it to 0 with sysctl")
        }
        (Some(libc::EPERM | libc::EACCES), _) => {
            "a seccomp profile or security module forbids it: allow io_uring_setup, io_uring_enter and \
             io_uring_register in the container's profile"
                .into()
        }
        (Some(libc::ENOSYS | libc::EINVAL), _) => {
            "this kernel is too old or built without: use 5.15 or newer".into()
        }
        (Some(libc::ENOMEM), _) => "raise the locked memory limit (ulimit -l, LimitMEMLOCK=)".into(),
        (Some(libc::EMFILE | libc::ENFILE), _) => {
            "raise the limit of open files (ulimit -n, LimitNOFILE=)".into()
        }
        _ => "see the kernel log".into(),
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is not available ({}): {}, or use --l2-engine threads",
            self.what,
            self.error,
            self.remedy()
        )
    }
}

impl std::error::Error for Unavailable {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_its_own_remedy() {
        assert!(remedy(Some(libc::EPERM), "2").contains("kernel.io_uring_disabled is 2"));
        assert!(remedy(Some(libc::EPERM), "0").contains("seccomp"));
        assert!(remedy(Some(libc::ENOSYS), "").contains("5.15"));
        assert!(remedy(Some(libc::ENOMEM), "0").contains("ulimit -l"));
    }
}
