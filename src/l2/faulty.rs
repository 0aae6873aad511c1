//! A device that fails on command, for tests.
//!
//! [`Faulty`] wraps any engine and keeps every promise of one, so whatever is built on the trait can be run
//! over it. The [`Faults`] handle stays with the test. Faults strike at submission, in this order: held, failed,
//! logged; flips strike when read data has arrived. It is always compiled, so that integration tests and
//! the daemon's hidden fault options can use it; without orders it only counts.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{Class, Direction, Engine, EngineGauges, Io};
use crate::memory::{Region, RegionId, Span};

pub struct Faulty {
    inner: Arc<dyn Engine>,
    faults: Faults,
}

/// Gives orders to a [`Faulty`] engine and shows what it saw. Clones are the same handle.
#[derive(Clone, Default)]
pub struct Faults(Arc<Mutex<Orders>>, Arc<Condvar>);

/// An entry of the write log, in the order of submission.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Logged {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    /// A `sync_data` that succeeded. Writes before it whose `done` had been called survive a power cut.
    Sync,
}

#[derive(Default)]
struct Orders {
    fail_reads: Failing,
    fail_writes: Failing,
    fail_syncs: Failing,
    held: [Hold; 3],
    hold_syncs: bool,
    /// Threads that want to sync, and are held.
    syncs_held: usize,
    flip_reads: usize,
    /// Device offsets of bytes that always come back wrong.
    rotten: BTreeSet<u64>,
    submitted: [u64; 3],
    log: Option<Vec<Logged>>,
    stopped: bool,
}

#[derive(Default)]
struct Hold {
    on: bool,
    waiting: Vec<(Io, Arc<dyn Engine>)>,
}

#[derive(Default)]
struct Failing {
    left: usize,
    errno: i32,
}

impl Failing {
    fn strike(&mut self) -> Option<io::Error> {
        self.left = self.left.checked_sub(1)?;
        Some(io::Error::from_raw_os_error(self.errno))
    }
}

impl Faults {
    /// The next `count` transfers of this direction fail; failed writes do not reach the device.
    pub fn fail_next(&self, direction: Direction, count: usize, errno: i32) {
        let mut orders = self.0.lock();
        let failing = Failing { left: count, errno };
        match direction {
            Direction::Read => orders.fail_reads = failing,
            Direction::Write => orders.fail_writes = failing,
        }
    }

    pub fn fail_next_syncs(&self, count: usize, errno: i32) {
        self.0.lock().fail_syncs = Failing { left: count, errno };
    }

    /// Syncs wait until [`Faults::release_syncs`].
    pub fn hold_syncs(&self) {
        self.0.lock().hold_syncs = true;
    }

    pub fn release_syncs(&self) {
        self.0.lock().hold_syncs = false;
        self.1.notify_all();
    }

    /// Waits until a sync is held.
    pub fn wait_for_sync(&self) {
        let mut orders = self.0.lock();
        while orders.syncs_held == 0 {
            self.1.wait(&mut orders);
        }
    }

    /// Transfers of this class stall, unanswered, until [`Faults::release`].
    pub fn hold(&self, class: Class) {
        self.0.lock().held[class.index()].on = true;
    }

    /// Lets a class go on, what has stalled first.
    pub fn release(&self, class: Class) {
        let stalled = {
            let mut orders = self.0.lock();
            let hold = &mut orders.held[class.index()];
            hold.on = false;
            std::mem::take(&mut hold.waiting)
        };
        for (io, engine) in stalled {
            self.pass(io, &engine);
        }
    }

    /// Lets the first `count` that have stalled go on; the class stays held.
    pub fn release_some(&self, class: Class, count: usize) {
        let stalled: Vec<_> = {
            let waiting = &mut self.0.lock().held[class.index()].waiting;
            waiting.drain(..count.min(waiting.len())).collect()
        };
        for (io, engine) in stalled {
            self.pass(io, &engine);
        }
    }

    /// Transfers of this class that now stall.
    pub fn held(&self, class: Class) -> usize {
        self.0.lock().held[class.index()].waiting.len()
    }

    /// A bit in the middle of the data of the next `count` reads is wrong.
    pub fn flip_next_reads(&self, count: usize) {
        self.0.lock().flip_reads = count;
    }

    /// The byte at this device offset reads wrong from now on.
    pub fn rot(&self, offset: u64) {
        self.0.lock().rotten.insert(offset);
    }

    /// Transfers of this class that were submitted, held and failed ones included.
    pub fn submitted(&self, class: Class) -> u64 {
        self.0.lock().submitted[class.index()]
    }

    /// Starts an empty write log.
    pub fn start_log(&self) {
        self.0.lock().log = Some(Vec::new());
    }

    /// The log so far; it goes on.
    pub fn log(&self) -> Vec<Logged> {
        self.0.lock().log.clone().unwrap_or_default()
    }

    fn pass(&self, mut io: Io, engine: &Arc<dyn Engine>) {
        let mut orders = self.0.lock();
        let (failing, is_write) = match io.direction {
            Direction::Read => (&mut orders.fail_reads, false),
            Direction::Write => (&mut orders.fail_writes, true),
        };
        if let Some(error) = failing.strike() {
            // An empty transfer, so that the answer comes from the engine's thread like every other.
            let span = io.span.slice(0..0);
            let done = io.done;
            io.done = Box::new(move |_| done(Err(error)));
            io.span = span;
            io.offset = 0;
        } else if is_write {
            if let Some(log) = &mut orders.log {
                let mut bytes = vec![0; io.span.len()];
                io.span.copy_to(0, &mut bytes);
                log.push(Logged::Write { offset: io.offset, bytes });
            }
        } else {
            let flip_middle = orders.flip_reads > 0;
            orders.flip_reads = orders.flip_reads.saturating_sub(1);
            let end = io.offset.saturating_add(io.span.len() as u64);
            let mut wrong: Vec<usize> =
                orders.rotten.range(io.offset..end).map(|at| (at - io.offset) as usize).collect();
            if flip_middle && !io.span.is_empty() {
                wrong.push(io.span.len() / 2);
            }
            if !wrong.is_empty() {
                let (span, done) = (io.span.clone(), io.done);
                io.done = Box::new(move |outcome| {
                    if outcome.is_ok() {
                        wrong.iter().for_each(|&at| flip(&span, at));
                    }
                    drop(span);
                    done(outcome);
                });
            }
        }
        drop(orders);
        engine.submit(io);
    }
}

fn flip(span: &Span, at: usize) {
    let mut byte = [0];
    span.copy_to(at, &mut byte);
    span.copy_from(at, &[byte[0] ^ 1]);
}

impl Faulty {
    pub fn new(inner: Arc<dyn Engine>) -> (Self, Faults) {
        let faults = Faults::default();
        (Self { inner, faults: faults.clone() }, faults)
    }
}

impl Engine for Faulty {
    fn submit(&self, io: Io) {
        {
            let mut orders = self.faults.0.lock();
            let class = io.class.index();
            orders.submitted[class] += 1;
            if orders.held[class].on && !orders.stopped {
                orders.held[class].waiting.push((io, self.inner.clone()));
                return;
            }
        }
        self.faults.pass(io, &self.inner);
    }

    fn register(&self, region: Region) {
        self.inner.register(region);
    }

    fn unregister(&self, id: RegionId) {
        self.inner.unregister(id);
    }

    fn sync_data(&self) -> io::Result<()> {
        {
            let mut orders = self.faults.0.lock();
            orders.syncs_held += 1;
            self.faults.1.notify_all();
            while orders.hold_syncs && !orders.stopped {
                self.faults.1.wait(&mut orders);
            }
            orders.syncs_held -= 1;
            if let Some(error) = orders.fail_syncs.strike() {
                return Err(error);
            }
        }
        self.inner.sync_data()?;
        if let Some(log) = &mut self.faults.0.lock().log {
            log.push(Logged::Sync);
        }
        Ok(())
    }

    fn in_flight(&self) -> EngineGauges {
        self.inner.in_flight()
    }

    fn name(&self) -> &'static str {
        "faulty"
    }

    /// What is held is accepted, so it is released and finished.
    fn stop(&self) {
        self.faults.0.lock().stopped = true;
        self.faults.1.notify_all();
        Class::ALL.into_iter().for_each(|class| self.faults.release(class));
        self.inner.stop();
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.stop();
    }
}
