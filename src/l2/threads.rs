//! The thread engine: pread and pwrite, for kernels and containers without io_uring.
//!
//! The same lanes and the same promises as the ring, with as many operations at the kernel as there are
//! threads. Fixed buffers mean nothing here.
#![allow(unsafe_code, reason = "pread and pwrite on memory that clients may share")]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::lanes::{Lanes, Next};
use super::meters::Meters;
use super::transfer::{Piece, Step, Transfer};
use super::{Direction, Engine, EngineGauges, EngineOptions, Io, Target};
use crate::memory::{Region, RegionId};

pub struct Threads {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there may be something to take, and when stopping.
    work: Condvar,
    meters: Arc<Meters>,
    target: Target,
}

struct Queue {
    lanes: Lanes,
    stopping: bool,
}

impl Threads {
    pub fn start(target: Target, options: &EngineOptions) -> io::Result<Self> {
        let count = options.threads.max(1);
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue { lanes: Lanes::new(count, options), stopping: false }),
            work: Condvar::new(),
            meters: Arc::default(),
            target,
        });
        // Made before the threads: should one not start, its drop stops those that did.
        let engine = Self { shared, threads: Mutex::default() };
        for number in 0..count {
            let shared = engine.shared.clone();
            let name = format!("l2-io{number}-{}", shared.target.label);
            let thread = thread::Builder::new().name(name).spawn(move || shared.serve())?;
            engine.threads.lock().push(thread);
        }
        Ok(engine)
    }
}

impl Engine for Threads {
    fn submit(&self, io: Io) {
        let transfer = Transfer::accept(io, &self.shared.target, &self.shared.meters);
        let mut queue = self.shared.queue.lock();
        if queue.stopping {
            drop(queue); // the refusal is answered by dropping the transfer, which must not hold the lock
            transfer.fail(io::Error::from_raw_os_error(libc::ESHUTDOWN));
            return;
        }
        queue.lanes.push(transfer);
        self.shared.work.notify_one();
    }

    fn register(&self, _: Region) {}

    fn unregister(&self, _: RegionId) {}

    fn sync_data(&self) -> io::Result<()> {
        self.shared.target.file.sync_data()
    }

    fn in_flight(&self) -> EngineGauges {
        self.shared.meters.gauges()
    }

    fn name(&self) -> &'static str {
        "threads"
    }

    fn stop(&self) {
        self.shared.queue.lock().stopping = true;
        self.shared.work.notify_all();
        let mut threads = self.threads.lock();
        let own = thread::current().id();
        if threads.iter().any(|thread| thread.thread().id() == own) {
            threads.clear(); // the last owner went in a completion; the threads end by themselves
            return;
        }
        for thread in threads.drain(..) {
            if thread.join().is_err() {
                log::error!("{}: an I/O thread panicked", self.shared.target.label);
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn serve(&self) {
        while let Some(next) = self.next() {
            let Next::Piece(mut piece) = next else { continue };
            while piece.step(self.transfer(&piece), self.target.grain) == Step::Rest {}
            self.queue.lock().lanes.landed(&piece);
            drop(piece); // answers, outside the lock; this thread then takes what the landing has made room for
        }
        self.work.notify_all();
    }

    /// The next thing to do, or `None` at the end.
    fn next(&self) -> Option<Next> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(next) = queue.lanes.take() {
                if queue.lanes.is_open() {
                    self.work.notify_one();
                }
                return Some(next);
            }
            if queue.stopping && queue.lanes.is_empty() {
                return None;
            }
            self.work.wait(&mut queue);
        }
    }

    fn transfer(&self, piece: &Piece) -> io::Result<usize> {
        self.meters.plain_ops.fetch_add(1, Relaxed);
        let (fd, at, len) = (self.target.file.as_raw_fd(), piece.as_ptr(), piece.len());
        // Offsets lie inside the device, whose length came from the kernel as an `off_t`.
        let offset = piece.offset() as libc::off_t;
        // SAFETY: the piece holds a share in its span's memory, and is borrowed for as long as the call takes.
        let got = unsafe {
            match piece.direction() {
                Direction::Read => libc::pread(fd, at.cast(), len, offset),
                Direction::Write => libc::pwrite(fd, at.cast_const().cast(), len, offset),
            }
        };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }
}
