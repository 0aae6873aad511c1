//! The io_uring engine: one ring per device, owned by one thread.
//!
//! The thread that makes the ring is the only one to touch it, as `single_issuer` and `defer_taskrun` demand
//! (older kernels get weaker setups, see `setup`). Others push into the lanes and, if the thread sleeps, write
//! to an eventfd. A read of that eventfd is always in the ring, so that one wait covers both new work and
//! completions; nothing polls. Each round of the thread is:
//!
//! 1. under the lock: registrations, then pieces from the lanes up to the depth; none left means asleep;
//! 2. submit all, wait for at least one completion;
//! 3. land what completed. Answers are given here, on this thread: no hop.
//!
//! The ring owns what the kernel can touch: a piece, and through it the memory, sits in [`Flights`] from
//! before it is pushed until its completion has been seen.
#![allow(unsafe_code, reason = "submission entries carry raw addresses")]

mod fixed;
mod flights;
mod setup;
mod wake;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;

use self::fixed::Fixed;
use self::flights::Flights;
pub(super) use self::setup::{Setup, Unavailable};
use self::wake::Wake;
use super::lanes::{Lanes, Next};
use super::meters::Meters;
use super::transfer::{Piece, Step, Transfer};
use super::{Direction, Engine, EngineGauges, EngineOptions, Io, Target};
use crate::memory::{AlignedBuf, Region, RegionId, Span};

/// Marks the completion of the eventfd read; flights have small numbers.
const WAKE: u64 = u64::MAX;

/// How long to leave the kernel alone when it refuses submissions for want of memory and nothing is in flight
/// whose completion could be waited for.
const REFUSED_PAUSE: Duration = Duration::from_millis(5);

pub struct Uring {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: ThreadId,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Wake,
    meters: Arc<Meters>,
    target: Target,
}

/// What others hand to the ring's thread.
struct Queue {
    lanes: Lanes,
    registrations: VecDeque<Registration>,
    /// The thread waits in the kernel, or is about to; whoever clears this writes to the eventfd.
    asleep: bool,
    stopping: bool,
}

enum Registration {
    Add(Region),
    Remove(RegionId),
}

impl Uring {
    /// Starts the ring's thread; returns when the ring exists.
    pub fn start(target: Target, options: &EngineOptions) -> Result<Self, Unavailable> {
        Self::start_with(target, options, &Setup::ALL)
    }

    pub(super) fn start_with(
        target: Target,
        options: &EngineOptions,
        setups: &'static [Setup],
    ) -> Result<Self, Unavailable> {
        let wake = Wake::new().map_err(|error| Unavailable::step("an eventfd", error))?;
        let depth = options.depth.clamp(1, setup::DEPTH_MAX);
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue {
                lanes: Lanes::new(depth as usize, options),
                registrations: VecDeque::new(),
                asleep: false,
                stopping: false,
            }),
            wake,
            meters: Arc::default(),
            target,
        });
        let (ready, is_ready) = sync_channel(1);
        let thread = thread::Builder::new()
            .name(format!("l2-{}", shared.target.label))
            .spawn({
                let shared = shared.clone();
                move || ring_thread(shared, depth, setups, &ready)
            })
            .map_err(Unavailable::thread)?;
        match is_ready.recv() {
            Ok(Ok(())) => {
                Ok(Self { thread_id: thread.thread().id(), shared, thread: Mutex::new(Some(thread)) })
            }
            Ok(Err(unavailable)) => Err(unavailable),
            Err(_) => Err(Unavailable::thread(io::Error::other("the ring's thread panicked"))),
        }
    }

    fn tell(&self, registration: Registration) {
        let mut queue = self.shared.queue.lock();
        if queue.stopping {
            return; // the table goes with the ring
        }
        queue.registrations.push_back(registration);
        self.shared.wake_up(&mut queue);
    }
}

impl Engine for Uring {
    fn submit(&self, io: Io) {
        let transfer = Transfer::accept(io, &self.shared.target, &self.shared.meters);
        let mut queue = self.shared.queue.lock();
        if queue.stopping {
            drop(queue); // the refusal is answered by dropping the transfer, which must not hold the lock
            transfer.fail(io::Error::from_raw_os_error(libc::ESHUTDOWN));
            return;
        }
        queue.lanes.push(transfer);
        self.shared.wake_up(&mut queue);
    }

    fn register(&self, region: Region) {
        self.tell(Registration::Add(region));
    }

    fn unregister(&self, id: RegionId) {
        self.tell(Registration::Remove(id));
    }

    fn sync_data(&self) -> io::Result<()> {
        self.shared.target.file.sync_data()
    }

    fn in_flight(&self) -> EngineGauges {
        self.shared.meters.gauges()
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn stop(&self) {
        {
            let mut queue = self.shared.queue.lock();
            queue.stopping = true;
            queue.asleep = true; // wake it in any case: the eventfd read in the ring must end too
            self.shared.wake_up(&mut queue);
        }
        if thread::current().id() == self.thread_id {
            return; // the last owner went in a completion; the thread ends by itself
        }
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            log::error!("{}: the io_uring thread panicked", self.shared.target.label);
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn wake_up(&self, queue: &mut Queue) {
        if std::mem::take(&mut queue.asleep)
            && let Err(error) = self.wake.ring()
        {
            log::error!("{}: waking the io_uring thread: {error}", self.target.label);
        }
    }
}

fn ring_thread(
    shared: Arc<Shared>,
    depth: u32,
    setups: &[Setup],
    ready: &SyncSender<Result<(), Unavailable>>,
) {
    // One entry more than the depth: the eventfd read.
    let (ring, setup) = match setup::build(depth + 1, setups, &shared.target.file) {
        Ok(built) => built,
        Err(unavailable) => {
            let _ = ready.send(Err(unavailable));
            return;
        }
    };
    log::debug!("{}: io_uring, depth {depth}, {setup:?}", shared.target.label);
    let fixed = Fixed::new(&ring, &shared.target.label);
    let wake_count = AlignedBuf::zeroed(size_of::<u64>()).into_span();
    let mut ring_loop = Ring {
        flights: Flights::default(),
        fixed,
        wake_count,
        wake_armed: false,
        ring,
        shared,
        completed: Vec::new(),
    };
    let _ = ready.send(Ok(()));
    ring_loop.run();
}

/// What only the ring's thread touches. `flights` comes first: it must be seen to be empty before the ring goes.
struct Ring {
    flights: Flights,
    ring: IoUring,
    fixed: Fixed,
    /// Where the kernel puts the eventfd's count. Nobody reads it.
    wake_count: Span,
    wake_armed: bool,
    shared: Arc<Shared>,
    /// Completions of one round, copied out of the ring. Kept to keep its allocation.
    completed: Vec<(u64, i32)>,
}

impl Drop for Ring {
    /// However the thread ends, nobody may wait for it: what comes from here on is refused, and what a panic left
    /// in the lanes is answered.
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.stopping = true;
        let left = queue.lanes.take_all();
        drop(queue);
        drop(left);
        if self.flights.is_empty() {
            // The kernel takes a ring down in the background, some time after its descriptor is closed. Until then it
            // would hold the device, and with it the lock that the next daemon needs, and the pages of L1.
            let submitter = self.ring.submitter();
            let (files, buffers) =
                (submitter.unregister_files(), self.fixed.close(&self.ring, &self.shared.meters));
            if let Err(error) = files.and(buffers) {
                log::warn!("{}: taking the ring down: {error}", self.shared.target.label);
            }
        }
    }
}

/// What one look into the queue found.
struct Round {
    registrations: VecDeque<Registration>,
    pieces: Vec<Piece>,
    /// Dropped, and thereby answered, after the lock.
    settled: Vec<Arc<Transfer>>,
    stopping: bool,
    drained: bool,
}

impl Ring {
    fn run(&mut self) {
        loop {
            let round = self.look();
            let finished = round.stopping && round.drained;
            for registration in round.registrations {
                match registration {
                    Registration::Add(region) => self.fixed.add(&self.ring, region, &self.shared.meters),
                    Registration::Remove(id) => self.fixed.remove(&self.ring, id, &self.shared.meters),
                }
            }
            for piece in round.pieces {
                self.issue(piece);
            }
            drop(round.settled);
            if round.stopping {
                // Armed reads end by the write that `stop` made; see `wake_up` there.
                if finished && self.flights.is_empty() && !self.wake_armed {
                    return;
                }
            } else if !self.wake_armed {
                self.arm_wake();
            }
            self.wait();
            self.land();
        }
    }

    fn look(&self) -> Round {
        let mut queue = self.shared.queue.lock();
        let (mut pieces, mut settled) = (Vec::new(), Vec::new());
        while let Some(next) = queue.lanes.take() {
            match next {
                Next::Piece(piece) => pieces.push(piece),
                Next::Settled(transfer) => settled.push(transfer),
            }
        }
        // Whatever comes from here on finds the thread asleep and writes to the eventfd, whose read is in the ring.
        queue.asleep = true;
        Round {
            registrations: std::mem::take(&mut queue.registrations),
            pieces,
            settled,
            stopping: queue.stopping,
            drained: queue.lanes.is_empty(),
        }
    }

    fn issue(&mut self, piece: Piece) {
        let fixed = self.fixed.slot_of(piece.span(), piece.as_ptr() as usize, piece.len());
        let (at, len) = (piece.as_ptr(), piece.len() as u32);
        let offset = piece.offset();
        let entry = match (piece.direction(), fixed) {
            (Direction::Read, None) => opcode::Read::new(setup::FILE, at, len).offset(offset).build(),
            (Direction::Write, None) => opcode::Write::new(setup::FILE, at, len).offset(offset).build(),
            (Direction::Read, Some(slot)) => {
                opcode::ReadFixed::new(setup::FILE, at, len, slot).offset(offset).build()
            }
            (Direction::Write, Some(slot)) => {
                opcode::WriteFixed::new(setup::FILE, at, len, slot).offset(offset).build()
            }
        };
        let meters = &self.shared.meters;
        let counter = if fixed.is_some() { &meters.fixed_ops } else { &meters.plain_ops };
        counter.fetch_add(1, Relaxed);
        let number = self.flights.take_off(piece, fixed);
        self.push(entry.user_data(number));
    }

    fn arm_wake(&mut self) {
        let fd = types::Fd(self.shared.wake.fd());
        let len = self.wake_count.len() as u32;
        self.push(opcode::Read::new(fd, self.wake_count.as_ptr(), len).build().user_data(WAKE));
        self.wake_armed = true;
    }

    fn push(&mut self, entry: Entry) {
        // SAFETY: the entry's memory is either `wake_count`, which `run` does not return before its read has
        // completed, or a piece that `flights` holds until its completion; `Flights` ends the process rather
        // than let go earlier. The descriptors are the registered file and the eventfd, both owned by `shared`.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The queue has an entry for each place of the depth and one for the eventfd, and each of these is in it
        // at most once.
        assert!(pushed.is_ok(), "the submission queue is smaller than the depth");
    }

    fn wait(&mut self) {
        let Err(error) = self.ring.submit_and_wait(1) else { return };
        match error.raw_os_error() {
            // EBUSY: completions overflowed and must be taken first. That comes next.
            Some(libc::EINTR | libc::EBUSY) => {}
            _ => {
                log::warn!(
                    "{}: io_uring takes no submissions: {error}; trying again",
                    self.shared.target.label
                );
                thread::sleep(REFUSED_PAUSE);
            }
        }
    }

    fn land(&mut self) {
        let mut completed = std::mem::take(&mut self.completed);
        completed.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        let mut landed = Vec::new();
        for (number, result) in completed.drain(..) {
            if number == WAKE {
                self.wake_armed = false;
                continue;
            }
            let (mut piece, slot) = self.flights.touch_down(number);
            if let Some(slot) = slot {
                self.fixed.used(&self.ring, slot, &self.shared.meters);
            }
            let answer = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            match piece.step(answer, self.shared.target.grain) {
                Step::Rest => self.issue(piece),
                Step::Landed => landed.push(piece),
            }
        }
        self.completed = completed;
        if !landed.is_empty() {
            let mut queue = self.shared.queue.lock();
            landed.iter().for_each(|piece| queue.lanes.landed(piece));
            // This thread looks into the queue again before it sleeps: nobody needs to wake it meanwhile.
            queue.asleep = false;
        }
        drop(landed); // answers, outside the lock
    }
}
