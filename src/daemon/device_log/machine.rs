//! A store's devices in memory, and the log of everything that is sent to them.
//!
//! What a client was told is in the same log, so that each point of it has the devices and the promises of one moment.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::model::Mark;
use super::rng::Rng;
use crate::l2::{Direction, Engine, EngineGauges, Io};
use crate::memory::{PAGE, Region, RegionId, Span};

pub type Page = [u8; PAGE];

/// What is on a device. Copies share what they have in common.
#[derive(Clone)]
pub struct Image(Vec<Arc<Page>>);

impl Image {
    pub fn blank(len: u64) -> Self {
        let zeros = Arc::new([0; PAGE]);
        Self((0..len as usize / PAGE).map(|_| zeros.clone()).collect())
    }

    pub fn read(&self, offset: u64, into: &Span) {
        let first = offset as usize / PAGE;
        let pages = &self.0[first..first + into.len() / PAGE];
        pages.iter().enumerate().for_each(|(at, page)| into.copy_from(at * PAGE, &page[..]));
    }

    /// Makes `file` what is looked at before there is an engine: as long as the device, with its superblocks.
    pub fn show_in(&self, file: &File) -> io::Result<()> {
        file.set_len((self.0.len() * PAGE) as u64)?;
        self.0[..2].iter().zip([0, PAGE as u64]).try_for_each(|(page, at)| file.write_all_at(&page[..], at))
    }

    pub fn write(&mut self, write: &Write) {
        let first = write.offset as usize / PAGE;
        self.0[first..first + write.pages.len()].clone_from_slice(&write.pages);
    }

    /// Only those sectors of the write that `keep` wants, each of `sector` bytes.
    pub fn tear(&mut self, write: &Write, sector: usize, keep: &mut dyn FnMut(usize) -> bool) {
        let first = write.offset as usize / PAGE;
        for (at, page) in write.pages.iter().enumerate() {
            for part in (0..PAGE).step_by(sector) {
                if keep((at * PAGE + part) / sector) {
                    let old = Arc::make_mut(&mut self.0[first + at]);
                    old[part..part + sector].copy_from_slice(&page[part..part + sector]);
                }
            }
        }
    }
}

#[derive(Clone)]
pub struct Write {
    pub id: u64,
    pub device: usize,
    pub offset: u64,
    pub pages: Vec<Arc<Page>>,
}

impl Write {
    pub fn sectors(&self, sector: usize) -> usize {
        self.pages.len() * PAGE / sector
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + (self.pages.len() * PAGE) as u64
    }
}

#[derive(Clone)]
pub enum Entry {
    /// Handed to the device.
    Write(Write),
    /// Answered by it: in its cache.
    Done(u64),
    /// Its memory was written to while the device took it.
    Changed(Write),
    /// A flush makes durable what had been answered when it began, once it has ended.
    FlushBegins {
        id: u64,
        device: usize,
    },
    FlushEnds {
        id: u64,
    },
    /// The daemon was killed. These writes never reached the device.
    Killed {
        lost: Vec<u64>,
    },
    Mark(Mark),
}

impl std::fmt::Display for Write {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "write {} at {}:{:#x}+{:#x}", self.id, self.device, self.offset, self.pages.len() * PAGE)
    }
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Write(write) => write.fmt(f),
            Self::Done(id) => write!(f, "{id} done"),
            Self::Changed(write) => write!(f, "{write} changed"),
            Self::FlushBegins { id, device } => write!(f, "flush {id} of {device}"),
            Self::FlushEnds { id } => write!(f, "{id} flushed"),
            Self::Killed { lost } => write!(f, "killed, {lost:?} lost"),
            Self::Mark(Mark::May { path, version }) => {
                write!(f, "{path}: {:?}", version.as_ref().map(|version| &version.found.thing))
            }
            Self::Mark(Mark::Settled(list)) => write!(f, "durable: {list:?}"),
            Self::Mark(Mark::Moved { from, to }) => write!(f, "{from} becomes {to}"),
            Self::Mark(Mark::Held { path, held }) => write!(f, "{path} held: {held}"),
        }
    }
}

struct State {
    images: Vec<Image>,
    log: Option<Vec<Entry>>,
    next: u64,
    in_flight: Vec<Write>,
}

pub fn pages_of(span: &Span) -> Vec<Arc<Page>> {
    let mut bytes = vec![0; span.len()];
    span.copy_to(0, &mut bytes);
    bytes.chunks_exact(PAGE).map(|page| Arc::new(page.try_into().unwrap())).collect()
}

/// Devices that outlive the daemon that works on them.
pub struct Machine {
    state: Mutex<State>,
    /// Transfers take a while, each a different one.
    slow: bool,
}

thread_local! {
    /// Where the devices that are opened next on this thread are plugged in, and how many were.
    static OPENING: RefCell<Option<(Arc<Machine>, usize)>> = const { RefCell::new(None) };
}

/// Puts a device of the thread's machine in the place of the one that was opened.
pub fn plug(inner: Arc<dyn Engine>) -> Arc<dyn Engine> {
    OPENING.with(|at| {
        let mut at = at.borrow_mut();
        let (machine, device) = at.as_mut().unwrap();
        *device += 1;
        Arc::new(Disk::start(machine.clone(), *device - 1, inner))
    })
}

impl Machine {
    pub fn new(images: Vec<Image>) -> Arc<Self> {
        let state = State { images, log: None, next: 0, in_flight: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), slow: false })
    }

    /// One that keeps a log from the start, and whose devices answer in any order.
    pub fn recording(images: Vec<Image>) -> Arc<Self> {
        let state = State { images, log: Some(Vec::new()), next: 0, in_flight: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), slow: true })
    }

    /// Runs `open`, which opens the machine's devices in their order.
    pub fn opening<R>(self: &Arc<Self>, open: impl FnOnce() -> R) -> R {
        OPENING.with(|at| *at.borrow_mut() = Some((self.clone(), 0)));
        let result = open();
        OPENING.with(|at| *at.borrow_mut() = None);
        result
    }

    pub fn mark(&self, mark: Mark) {
        if let Some(log) = &mut self.state.lock().log {
            log.push(Entry::Mark(mark));
        }
    }

    pub fn images(&self) -> Vec<Image> {
        self.state.lock().images.clone()
    }

    pub fn logged(&self) -> usize {
        self.state.lock().log.as_ref().map_or(0, Vec::len)
    }

    /// Whether a flush has just begun: then the device has bytes that are not sure.
    pub fn flushes(&self) -> bool {
        let state = self.state.lock();
        matches!(state.log.as_deref().and_then(<[Entry]>::last), Some(Entry::FlushBegins { .. }))
    }

    pub fn log(&self) -> Vec<Entry> {
        self.state.lock().log.clone().unwrap_or_default()
    }

    /// Kills the daemon: the machine that comes back goes on with the log and with what the devices have; what the
    /// daemon still does, it does to nobody's devices. Of the writes that were in flight some reached the device.
    pub fn kill(&self, rng: &mut Rng) -> Arc<Self> {
        let mut state = self.state.lock();
        let mut images = state.images.clone();
        let mut log = state.log.take().unwrap_or_default();
        let mut lost = Vec::new();
        for write in &state.in_flight {
            if rng.percent(50) {
                images[write.device].write(write);
                log.push(Entry::Done(write.id));
            } else {
                lost.push(write.id);
            }
        }
        log.push(Entry::Killed { lost });
        let state = State { images, log: Some(log), next: state.next, in_flight: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), slow: true })
    }

    fn submitted(&self, device: usize, io: &Io) -> Write {
        assert!(
            io.offset.is_multiple_of(PAGE as u64) && io.span.len().is_multiple_of(PAGE),
            "an unaligned write"
        );
        let pages = pages_of(&io.span);
        let mut state = self.state.lock();
        let write = Write { id: state.next, device, offset: io.offset, pages };
        state.next += 1;
        for other in &state.in_flight {
            let (a, b) = (write.range(), other.range());
            assert!(
                other.device != device || a.end <= b.start || b.end <= a.start,
                "two writes to the same place at one time: {a:?} and {b:?} of device {device}"
            );
        }
        state.in_flight.push(write.clone());
        if let Some(log) = &mut state.log {
            log.push(Entry::Write(write.clone()));
        }
        write
    }

    /// A device takes the bytes at any time until it answers: as they are at the end, if they have changed.
    fn landed(&self, mut write: Write, span: &Span) {
        let pages = pages_of(span);
        let changed = pages != write.pages;
        write.pages = pages;
        let mut state = self.state.lock();
        state.images[write.device].write(&write);
        state.in_flight.retain(|other| other.id != write.id);
        if let Some(log) = &mut state.log {
            log.push(Entry::Done(write.id));
            if changed {
                log.push(Entry::Changed(write));
            }
        }
    }

    fn read(&self, device: usize, io: &Io) {
        let image = self.state.lock().images[device].clone();
        image.read(io.offset, &io.span);
    }

    fn flush(&self, device: usize) {
        let id = {
            let mut state = self.state.lock();
            let id = state.next;
            state.next += 1;
            if let Some(log) = &mut state.log {
                log.push(Entry::FlushBegins { id, device });
            }
            id
        };
        self.take(Duration::from_micros(300));
        if let Some(log) = &mut self.state.lock().log {
            log.push(Entry::FlushEnds { id });
        }
    }

    fn take(&self, time: Duration) {
        if self.slow {
            std::thread::sleep(time);
        }
    }
}

/// An engine that works on an image.
struct Disk {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    inner: Arc<dyn Engine>,
}

struct Shared {
    machine: Arc<Machine>,
    device: usize,
    queue: Mutex<Queue>,
    work: Condvar,
}

struct Queue {
    waiting: Vec<(Option<Write>, Io)>,
    rng: Rng,
    stopping: bool,
}

impl Disk {
    fn start(machine: Arc<Machine>, device: usize, inner: Arc<dyn Engine>) -> Self {
        let threads = if machine.slow { 3 } else { 1 };
        let queue = Queue { waiting: Vec::new(), rng: Rng::new(device as u64), stopping: false };
        let shared = Arc::new(Shared { machine, device, queue: Mutex::new(queue), work: Condvar::new() });
        let threads = (0..threads)
            .map(|_| {
                let shared = shared.clone();
                std::thread::spawn(move || while shared.serve() {})
            })
            .collect();
        Self { shared, threads: Mutex::new(threads), inner }
    }
}

impl Shared {
    /// Makes one transfer, whichever. False at the end.
    fn serve(&self) -> bool {
        let ((write, io), pause) = {
            let mut queue = self.queue.lock();
            while queue.waiting.is_empty() {
                if queue.stopping {
                    return false;
                }
                self.work.wait(&mut queue);
            }
            let count = queue.waiting.len();
            let at = queue.rng.below(count);
            let pause = if queue.rng.percent(40) { queue.rng.below(1500) as u64 } else { 0 };
            (queue.waiting.swap_remove(at), pause)
        };
        match write {
            Some(write) => {
                if pause > 0 {
                    self.machine.take(Duration::from_micros(pause));
                }
                self.machine.landed(write, &io.span);
            }
            None => self.machine.read(self.device, &io),
        }
        let Io { span, done, .. } = io;
        drop(span);
        done(Ok(()));
        true
    }
}

impl Engine for Disk {
    fn submit(&self, io: Io) {
        if self.shared.queue.lock().stopping {
            return (io.done)(Err(io::Error::from_raw_os_error(libc::ESHUTDOWN)));
        }
        let write = (io.direction == Direction::Write)
            .then(|| self.shared.machine.submitted(self.shared.device, &io));
        self.shared.queue.lock().waiting.push((write, io));
        self.shared.work.notify_one();
    }

    fn register(&self, _: Region) {}

    fn unregister(&self, _: RegionId) {}

    fn sync_data(&self) -> io::Result<()> {
        self.shared.machine.flush(self.shared.device);
        Ok(())
    }

    fn in_flight(&self) -> EngineGauges {
        EngineGauges::default()
    }

    fn name(&self) -> &'static str {
        "memory"
    }

    fn stop(&self) {
        self.shared.queue.lock().stopping = true;
        self.shared.work.notify_all();
        let own = std::thread::current().id();
        for thread in self.threads.lock().drain(..) {
            // The last owner may have gone in a completion.
            if thread.thread().id() != own {
                thread.join().unwrap();
            }
        }
        self.inner.stop();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.stop();
    }
}
