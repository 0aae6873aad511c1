//! A device that the checker works: which of the transfers that wait is made next, and when, is part of the schedule.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shuttle::rand::{Rng as _, thread_rng};

use crate::daemon::device_log::machine::{Image, Write, pages_of};
use crate::l2::{Class, Direction, Engine, EngineGauges, Io};
use crate::memory::{Region, RegionId};
use crate::sync::{Condvar, Mutex};

pub struct StandIn {
    /// Held for a copy, and never while anything is waited for.
    image: parking_lot::Mutex<Image>,
    /// The store is open: clients' transfers wait for their turn.
    serving: AtomicBool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Io>,
    /// Reads that come are put aside.
    asides: bool,
    aside: Vec<Io>,
    /// Transfers that are being made.
    busy: usize,
    stopping: bool,
}

thread_local! {
    /// What is plugged in where the next device is opened.
    static NEXT: RefCell<Option<Arc<StandIn>>> = const { RefCell::new(None) };
}

struct Front(Arc<StandIn>);

fn plug(inner: Arc<dyn Engine>) -> Arc<dyn Engine> {
    inner.stop();
    NEXT.with(|next| Arc::new(Front(next.borrow_mut().take().unwrap())))
}

impl StandIn {
    pub fn new(image: Image) -> Arc<Self> {
        let (image, serving) = (parking_lot::Mutex::new(image), AtomicBool::new(false));
        Arc::new(Self { image, serving, queue: Mutex::default(), changed: Condvar::new() })
    }

    /// Runs `open`, which opens this device.
    pub fn opening<R>(self: &Arc<Self>, open: impl FnOnce(crate::l2::volume::Wrap) -> R) -> R {
        NEXT.with(|next| *next.borrow_mut() = Some(self.clone()));
        let result = open(plug);
        self.serving.store(true, Ordering::Release);
        result
    }

    /// Makes transfers until it is stopped.
    pub fn serve(&self) {
        let mut queue = self.queue.lock();
        loop {
            if !queue.waiting.is_empty() {
                let at = thread_rng().gen_range(0..queue.waiting.len());
                let io = queue.waiting.swap_remove(at);
                queue.busy += 1;
                drop(queue);
                self.make(io);
                queue = self.queue.lock();
                queue.busy -= 1;
                self.changed.notify_all();
            } else if queue.stopping {
                return;
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }

    fn make(&self, io: Io) {
        let Io { direction, offset, span, done, .. } = io;
        match direction {
            Direction::Read => self.image.lock().read(offset, &span),
            Direction::Write => {
                self.image.lock().write(&Write { id: 0, device: 0, offset, pages: pages_of(&span) });
            }
        }
        drop(span);
        done(Ok(()));
    }

    /// Puts the reads that come aside, or does not any more. Those that are aside stay there.
    pub fn put_aside(&self, on: bool) {
        self.queue.lock().asides = on;
    }

    /// What was put aside waits for its turn like everything else.
    pub fn put_back(&self) {
        let mut queue = self.queue.lock();
        let aside = std::mem::take(&mut queue.aside);
        queue.waiting.extend(aside);
        self.changed.notify_all();
    }

    pub fn is_aside(&self) -> usize {
        self.queue.lock().aside.len()
    }
}

impl Engine for Front {
    fn submit(&self, io: Io) {
        let device = &self.0;
        // The catalog's transfers are waited for by whoever makes them, with locks of its own.
        if !device.serving.load(Ordering::Acquire)
            || (io.direction == Direction::Write && io.class == Class::Demand)
        {
            return device.make(io);
        }
        let mut queue = device.queue.lock();
        if queue.stopping {
            drop(queue);
            return (io.done)(Err(io::Error::from_raw_os_error(libc::ESHUTDOWN)));
        }
        if queue.asides && io.direction == Direction::Read {
            queue.aside.push(io);
        } else {
            queue.waiting.push(io);
            device.changed.notify_all();
        }
    }

    fn register(&self, _: Region) {}

    fn unregister(&self, _: RegionId) {}

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn in_flight(&self) -> EngineGauges {
        EngineGauges::default()
    }

    fn name(&self) -> &'static str {
        "stand-in"
    }

    /// Waits for what was accepted.
    fn stop(&self) {
        if std::thread::panicking() {
            return;
        }
        self.0.put_back();
        let mut queue = self.0.queue.lock();
        queue.stopping = true;
        self.0.changed.notify_all();
        while !queue.waiting.is_empty() || queue.busy > 0 {
            self.0.changed.wait(&mut queue);
        }
    }
}
