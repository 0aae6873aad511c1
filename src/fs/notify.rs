//! Telling the kernel that a name, or what it knows of a file's attributes, is not what it was, and that a handle that
//! somebody polls can be read.
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
use crate::store::{Notify, Wake};

enum Notice {
    Name { parent: u64, name: Box<[u8]> },
    Attributes { ino: u64 },
    Wake(Wake),
}

/// The sending end: cheap, and never waits.
pub struct Invalidator {
    sender: Mutex<Option<Sender<Notice>>>,
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
    fn send(&self, notice: Notice) {
        if let Some(sender) = &*self.sender.lock() {
            // A failed send means that the mount is going away.
            let _ = sender.send(notice);
        }
    }
}

impl Notify for Invalidator {
    fn invalidate(&self, parent: u64, name: &[u8]) {
        self.send(Notice::Name { parent, name: name.into() });
    }

    fn forget_attributes(&self, ino: u64) {
        self.send(Notice::Attributes { ino });
    }

    fn wake(&self, wake: Wake) {
        self.send(Notice::Wake(wake));
    }
}

fn run(notifier: &Notifier, receiver: &Receiver<Notice>) {
    while let Ok(notice) = receiver.recv() {
        match notice {
            Notice::Name { parent, name } => {
                if let Err(error) = notifier.inval_entry(INodeNo(parent), OsStr::from_bytes(&name)) {
                    // ENODEV and EBADF: unmounted. Opens check for themselves, so the kernel's view ends with its timeout.
                    log::debug!("invalidating {}: {error}", shown::name(&name));
                }
            }
            Notice::Wake(wake) => wake(),
            Notice::Attributes { ino } => {
                // A negative offset leaves the pages alone. ENOENT: the kernel does not know that number.
                if let Err(error) = notifier.inval_inode(INodeNo(ino), -1, 0) {
                    log::debug!("invalidating the attributes of {ino:x}: {error}");
                }
            }
        }
    }
}
