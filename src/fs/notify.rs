//! Telling the kernel that a name, or what it knows of a file's attributes, is not what it was.
//!
//! The kernel takes directory locks while it handles a notification, and a request that holds such a lock may be
//! waiting for us. So notifications go from a thread of their own, which holds no lock and which nobody waits for.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use fuser::{INodeNo, Notifier};
use parking_lot::Mutex;

use crate::shown;
use crate::store::Notify;

enum Stale {
    Name { parent: u64, name: Box<[u8]> },
    Attributes { ino: u64 },
}

/// The sending end: cheap, and never waits.
pub struct Invalidator {
    sender: Mutex<Option<Sender<Stale>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Invalidator {
    pub fn start(notifier: Notifier) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let thread =
            std::thread::Builder::new().name("kv-notify".into()).spawn(move || run(&notifier, &receiver))?;
        Ok(Self { sender: Mutex::new(Some(sender)), thread: Mutex::new(Some(thread)) })
    }

    /// Ends the thread once what was sent has been passed on.
    pub fn stop(&self) {
        self.sender.lock().take();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            log::error!("the notification thread panicked");
        }
    }
}

impl Invalidator {
    fn send(&self, stale: Stale) {
        if let Some(sender) = &*self.sender.lock() {
            // A failed send means that the mount is going away.
            let _ = sender.send(stale);
        }
    }
}

impl Notify for Invalidator {
    fn invalidate(&self, parent: u64, name: &[u8]) {
        self.send(Stale::Name { parent, name: name.into() });
    }

    fn forget_attributes(&self, ino: u64) {
        self.send(Stale::Attributes { ino });
    }
}

fn run(notifier: &Notifier, receiver: &Receiver<Stale>) {
    while let Ok(stale) = receiver.recv() {
        match stale {
            Stale::Name { parent, name } => {
                if let Err(error) = notifier.inval_entry(INodeNo(parent), OsStr::from_bytes(&name)) {
                    // ENODEV and EBADF: unmounted. Opens check for themselves, so the kernel's view ends with its timeout.
                    log::debug!("invalidating {}: {error}", shown::name(&name));
                }
            }
            Stale::Attributes { ino } => {
                // A negative offset leaves the pages alone. ENOENT: the kernel does not know that number.
                if let Err(error) = notifier.inval_inode(INodeNo(ino), -1, 0) {
                    log::debug!("invalidating the attributes of {ino:x}: {error}");
                }
            }
        }
    }
}
