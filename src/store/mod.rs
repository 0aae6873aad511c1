//! The tiering rules: what is visible, what is in L1, what leaves, what waits.
//!
//! All state sits in one [`Core`] behind one lock, never held while a client's bytes are copied in or out, during a
//! system call that can wait, or a transfer. What the store copies for itself (into a copy-on-write version, out of a
//! file under construction that is stored early) it copies in steps of a few blocks. That is what makes every answer true for one instant
//! (rule R11). What has to happen outside the lock (transfers, replies, invalidations) is collected
//! as an [`Effect`] while the lock is held and carried out when it is not: a completion may call back
//! into the store without a thought about locks.
//!
//! The life of a file: `open` makes handles, `change` plans and applies writes (`prepare`: what they need first; `truncate`), `publish` makes
//! versions visible and seals them, `writeback` takes them to the device, `read` and `promote` bring them back,
//! `space` decides what leaves (`room`: what is taken), `heirs` what a crash brings back of what was replaced.

pub mod again;
pub mod attr;
pub mod catalog;
pub mod change;
pub mod control;
pub mod core;
mod crc;
pub mod drain;
mod heirs;
pub mod hot;
mod layout;
pub mod lists;
pub mod names;
pub mod node;
pub mod open;
mod pace;
pub mod patience;
mod prepare;
pub mod process;
pub mod promote;
pub mod publish;
pub mod read;
pub mod recover;
pub mod report;
pub mod room;
pub mod space;
mod tally;
pub mod tree;
mod truncate;

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

pub use self::attr::{Attr, Entry};
pub use self::core::{Core, Effect, Settings};
pub use self::open::{Handle, Opened};
pub use self::process::Caller;
use crate::l1::Pool;
use crate::l2::volume::Volume;
use crate::stats::Events;
use crate::sync::{Condvar, Mutex, MutexGuard};

pub type EntryReply = Box<dyn FnOnce(Result<Entry, Errno>) + Send>;
pub type ReadReply = Box<dyn FnOnce(Result<&[u8], Errno>) + Send>;
pub type UnitReply = Box<dyn FnOnce(Result<(), Errno>) + Send>;
pub type WriteReply = Box<dyn FnOnce(Result<u32, Errno>) + Send>;
pub type IoctlReply = Box<dyn FnOnce(Result<Vec<u8>, Errno>) + Send>;
pub type AttrReply = Box<dyn FnOnce(Result<Attr, Errno>) + Send>;

/// Wakes whoever polls a handle.
pub type Wake = Box<dyn FnOnce() + Send>;

/// The result of something that may have to wait.
pub enum Answer<T> {
    Now(Result<T, Errno>),
    /// Ask again with a way to reply later.
    Wait,
}

/// Where invalidations of the kernel's cached names and attributes go.
pub trait Notify: Send + Sync {
    fn invalidate(&self, parent: u64, name: &[u8]);
    /// Of the attributes alone: what the kernel has of the bytes stays.
    fn forget_attributes(&self, ino: u64);
    /// Somebody who polls a handle is to be woken.
    fn wake(&self, wake: Wake);
}

pub struct Store {
    core: Mutex<Core>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) volume: Option<Arc<Volume>>,
    pub(crate) events: Arc<Events>,
    notify: Mutex<Option<Arc<dyn Notify>>>,
    /// Something for the write-back worker to start.
    pub(crate) wake_writer: Condvar,
    /// Something for the committer to commit.
    pub(crate) wake_committer: Condvar,
    /// Something was given back that a waiting change may need.
    pub(crate) wake_admission: Condvar,
    /// A deadline earlier than the earliest so far.
    pub(crate) wake_timer: Condvar,
    /// Held from taking a commit to its end, checkpoint included.
    pub(crate) committing: Mutex<()>,
    completions: completions::Completions,
}

mod completions;
mod ending;
mod timer;

/// How long the kernel may believe what we said of a sealed file or a directory. What changes without the kernel's
/// doing is invalidated explicitly; this is the backstop.
pub const TTL: Duration = Duration::from_secs(60);

impl Store {
    pub fn new(core: Core, pool: Arc<Pool>, volume: Option<Arc<Volume>>, events: Arc<Events>) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(core),
            pool,
            volume,
            events,
            notify: Mutex::new(None),
            wake_writer: Condvar::new(),
            wake_committer: Condvar::new(),
            wake_admission: Condvar::new(),
            wake_timer: Condvar::new(),
            committing: Mutex::new(()),
            completions: completions::Completions::new(),
        })
    }

    pub fn set_notify(&self, notify: Arc<dyn Notify>) {
        *self.notify.lock() = Some(notify);
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Runs `f` under the lock and then, without it, what `f` left to be done.
    pub(crate) fn with<R>(self: &Arc<Self>, f: impl FnOnce(&mut Core) -> R) -> R {
        let mut core = self.core.lock();
        let result = f(&mut core);
        self.settle(core);
        result
    }

    /// Gives the lock back and carries out what was collected under it.
    pub(crate) fn settle(self: &Arc<Self>, mut core: MutexGuard<'_, Core>) {
        if core.wakes.hints {
            core.advance_hints(Instant::now());
        }
        let wakes = std::mem::take(&mut core.wakes);
        let effects = std::mem::take(&mut core.effects);
        // Before anybody can learn of what happened in another way.
        std::mem::take(&mut core.events).into_iter().for_each(|text| self.events.push(text));
        core.calls.writer += u64::from(wakes.writer);
        core.calls.admission += u64::from(wakes.admission);
        drop(core);
        // Before memory that was got in its place is filled.
        self.pool.bury();
        if wakes.writer {
            self.wake_writer.notify_all();
        }
        if wakes.committer {
            self.wake_committer.notify_all();
        }
        if wakes.admission {
            self.wake_admission.notify_all();
        }
        if wakes.timer {
            self.wake_timer.notify_all();
        }
        for effect in effects {
            self.carry_out(effect);
        }
    }

    pub fn start_completions(&self, threads: usize) -> std::io::Result<()> {
        self.completions.start(threads)
    }

    /// After the engines have stopped.
    pub fn stop_completions(&self) {
        self.completions.stop();
    }

    /// Tells the store's threads to end.
    pub fn stop_threads(self: &Arc<Self>) {
        self.with(|core| {
            core.stopping = true;
            // Counted like any other call: a thread that has just found nothing to do looks again before it waits.
            core.wakes = self::core::Wakes {
                writer: true,
                committer: true,
                admission: true,
                timer: true,
                hints: false,
            };
        });
    }

    /// Hands a finished transfer to the completion threads.
    pub(crate) fn completed(&self, job: Box<dyn FnOnce() + Send>) {
        self.completions.push(job);
    }

    fn carry_out(self: &Arc<Self>, effect: Effect) {
        match effect {
            Effect::Reply(reply) => reply(),
            Effect::Invalidate { parent, name } => {
                let notify = self.notify.lock().clone();
                if let Some(notify) = notify {
                    notify.invalidate(parent, &name);
                }
            }
            Effect::Forget { ino } => {
                let notify = self.notify.lock().clone();
                if let Some(notify) = notify {
                    notify.forget_attributes(ino);
                }
            }
            Effect::Wake(wake) => {
                let notify = self.notify.lock().clone();
                if let Some(notify) = notify {
                    notify.wake(wake);
                }
            }
            Effect::Load(load) => self.submit_load(load),
            Effect::Serve(served) => self.serve(*served),
        }
    }
}
