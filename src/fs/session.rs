//! The FUSE session: mounted, served by several threads, ended.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fuser::{BackgroundSession, Config, Session, SessionACL};

use super::{Invalidator, KvFs};
use crate::control::Control;
use crate::store::Store;

/// A mount that is being served.
pub struct Served {
    session: BackgroundSession,
    pub invalidator: Arc<Invalidator>,
}

impl Served {
    /// Waits until the file system has been unmounted and every thread has ended.
    pub fn join(self) -> io::Result<()> {
        let result = self.session.join();
        self.invalidator.stop();
        end_of(result)
    }
}

/// A connection that is over is no failure. It is mostly told by ENODEV, which the session takes for the end; a thread that
/// is just taking a request hears ECONNABORTED.
fn end_of(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => Ok(()),
        result => result,
    }
}

/// Takes over a mounted FUSE device: answers the kernel's INIT, finds out whether passthrough works, and serves.
pub fn serve(
    device: OwnedFd,
    store: &Arc<Store>,
    control: &Arc<Control>,
    threads: usize,
    allow_other: bool,
) -> io::Result<Served> {
    let mut config = Config::default();
    config.n_threads = Some(threads);
    config.clone_fd = true;
    config.acl = if allow_other { SessionACL::All } else { SessionACL::RootAndOwner };
    let acl = config.acl;
    let session = Session::from_fd(KvFs::new(store.clone(), control.clone()), device, acl, config)?;
    if control.wants_passthrough() {
        match probe_passthrough(&session, control) {
            Ok(()) => store.set_passthrough(true),
            Err(why) => {
                log::warn!("no passthrough: {why}; every read goes through the daemon");
                control.without(format!("passthrough ({why}): every read goes through the daemon"));
            }
        }
    } else {
        control.without("passthrough (--read-path daemon): every read goes through the daemon".to_owned());
    }
    let invalidator = Arc::new(Invalidator::start(session.notifier())?);
    store.set_notify(invalidator.clone());
    Ok(Served { session: session.spawn()?, invalidator })
}

/// Whether the kernel takes a memfd of ours as a backing file.
fn probe_passthrough(session: &Session<KvFs>, control: &Control) -> Result<(), String> {
    if !control.kernel_passthrough() {
        return Err("this kernel has none; it came with 6.9".to_owned());
    }
    let probe = nix::sys::memfd::memfd_create(c"kvcachefs-probe", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)
        .map_err(|error| error.to_string())?;
    match fuser::BackingId::create_raw(session.as_fd(), probe.as_fd()) {
        // The id stays for the life of the mount; it costs one descriptor in the kernel.
        Ok(_) => Ok(()),
        Err(error) => Err(format!("the kernel refuses it: {error}; it takes CAP_SYS_ADMIN")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_is_over_is_no_failure() {
        let failed = |errno| Err(io::Error::from_raw_os_error(errno));
        assert!(end_of(failed(libc::ECONNABORTED)).is_ok());
        assert!(end_of(failed(libc::EIO)).is_err());
    }
}
