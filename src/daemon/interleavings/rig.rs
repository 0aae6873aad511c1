//! A daemon without a mount, all of whose threads are tasks of the checker, and its clients.

use std::sync::Arc;

use nix::errno::Errno;
use shuttle::sync::mpsc::{Receiver, channel};
use shuttle::thread::JoinHandle;
use zerocopy::FromBytes;

use super::device::StandIn;
use crate::abi::{self, Request};
use crate::background::Ready;
use crate::config::{Config, Layer};
use crate::daemon::Daemon;
use crate::daemon::device_log::machine::{Image, Machine, plug};
use crate::host::Host;
use crate::l2::volume::Wrap;
use crate::stats::Events;
use crate::store::control::SessionId;
use crate::store::hot::BLOCK;
use crate::store::node::{NONE, NodeId, ROOT_INO};
use crate::store::{Answer, Caller, Handle, Store};

const DEVICE: u64 = 16 << 20;

/// A store, and how it is opened.
pub struct Setup {
    dir: tempfile::TempDir,
    config: Config,
    ready: Ready,
    image: Image,
}

impl Setup {
    /// A store with what `make` makes there, outside of the checker.
    pub fn new(options: &str, make: impl FnOnce(&Arc<Store>)) -> Arc<Self> {
        let dir = tempfile::tempdir().unwrap();
        let l2 = format!("l2={}:{}B", dir.path().join("device").display(), DEVICE);
        let options = format!("lock=false,huge-pages=off,l2-engine=threads,{l2},{options}");
        let flags = Layer::from_fstab(["mountpoint=/mnt/unused", &options]).unwrap();
        let config = Config::resolve(Layer::default(), Layer::default(), flags, &Host::probe()).unwrap();
        let ready = crate::background::start(false, None).unwrap().unwrap();
        let machine = Machine::new(vec![Image::blank(DEVICE)]);
        let setup = Self { dir, config, ready, image: Image::blank(DEVICE) };
        setup.show(&setup.image);
        let mut daemon = machine.opening(|| setup.open(plug));
        daemon.start_threads().unwrap();
        make(&daemon.store);
        daemon.drain_until(std::time::Duration::from_secs(120), || false).unwrap();
        daemon.stop();
        let image = machine.images().remove(0);
        setup.show(&image);
        Arc::new(Self { image, ..setup })
    }

    /// What is looked at before there is an engine.
    fn show(&self, image: &Image) {
        let path = self.dir.path().join("device");
        let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path);
        image.show_in(&file.unwrap()).unwrap();
    }

    fn open(&self, wrap: Wrap) -> Daemon {
        let mut daemon = Daemon::open_on(
            &self.config,
            &Arc::new(Events::default()),
            &self.ready,
            Some(wrap),
            &Arc::default(),
        )
        .unwrap();
        daemon.keep_stores();
        daemon
    }
}

/// The parts of a daemon that a check runs beside the clients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// What is written stays dirty.
    Loads,
    Everything,
}

pub struct Rig {
    daemon: Daemon,
    device: Arc<StandIn>,
    serving: JoinHandle<()>,
}

impl Rig {
    pub fn start(setup: &Setup, runs: Runs) -> Self {
        let device = StandIn::new(setup.image.clone());
        let mut daemon = device.opening(|wrap| setup.open(wrap));
        daemon.store.start_completions(1).unwrap();
        daemon.start_thread("kv-admit", Store::run_admission).unwrap();
        if runs == Runs::Everything {
            daemon.start_thread("kv-write", Store::run_writer).unwrap();
            daemon.start_thread("kv-commit", Store::run_committer).unwrap();
        }
        let works = device.clone();
        let serving = shuttle::thread::spawn(move || works.serve());
        Self { daemon, device, serving }
    }

    /// A thread of a client: those that ask at the same time are different ones.
    pub fn client(&self, number: u32) -> Client {
        let caller = Caller { tid: 5_000_000 + number, uid: 0, gid: 0 };
        Client { store: self.daemon.store.clone(), device: self.device.clone(), caller }
    }

    pub fn stop(self) {
        let Self { daemon, device, serving } = self;
        daemon.stop();
        serving.join().unwrap();
        drop(device);
    }
}

pub type Told<T> = Receiver<Result<T, Errno>>;

fn ask<T: Send + 'static>(f: impl FnOnce(Box<dyn FnOnce(Result<T, Errno>) + Send>)) -> Told<T> {
    let (tell, told) = channel();
    f(Box::new(move |result| drop(tell.send(result))));
    told
}

#[derive(Clone)]
pub struct Client {
    pub store: Arc<Store>,
    pub device: Arc<StandIn>,
    pub caller: Caller,
}

impl Client {
    pub fn find(&self, path: &str) -> Result<u64, Errno> {
        path.split('/').filter(|name| !name.is_empty()).try_fold(ROOT_INO, |parent, name| {
            let name = name.as_bytes();
            let found = match self.store.lookup(parent, name, &self.caller) {
                Answer::Now(found) => found,
                Answer::Wait => {
                    let later = |reply| self.store.lookup_later(parent, name, &self.caller, reply);
                    ask(later).recv().unwrap()
                }
            };
            found.map(|entry| entry.attr.ino)
        })
    }

    /// Opens a file as the kernel does: by name, and once more if it is sent to look again.
    pub fn open(&self, path: &str, flags: i32) -> Result<Handle, Errno> {
        for _ in 0..3 {
            match self.store.open(self.find(path)?, flags, &self.caller) {
                Err(Errno::ESTALE) => {}
                opened => return opened.map(|opened| opened.handle),
            }
        }
        Err(Errno::ESTALE)
    }

    pub fn close(&self, handle: &Handle) {
        self.store.flush(handle, &self.caller);
        self.store.release(handle);
    }

    pub fn read(&self, handle: &Handle, at: u64, len: u64) -> Told<Vec<u8>> {
        ask(|reply: Box<dyn FnOnce(Result<Vec<u8>, Errno>) + Send>| {
            let reply = Box::new(|result: Result<&[u8], Errno>| reply(result.map(<[u8]>::to_vec)));
            self.store.read(handle, at, len as usize, reply);
        })
    }

    pub fn write(&self, handle: &Handle, at: u64, bytes: &[u8]) -> Told<u32> {
        ask(|reply| self.store.write(handle, at, bytes, reply))
    }

    pub fn drain(&self) {
        assert_eq!(ask(|reply| self.store.barrier(reply)).recv().unwrap(), Ok(()));
    }

    /// Has L1 drop something, if it may.
    pub fn evict(&self) -> bool {
        self.store.with(|core| core.drop_some(NONE))
    }

    pub fn session(&self) -> Session {
        let session = Session { client: self.clone(), id: self.store.open_session(&self.caller) };
        let hello = abi::Hello { header: header(0, 0), ..abi::Hello::default() };
        session.ask(Request::Hello(hello)).unwrap();
        session
    }

    /// All of these blocks are in memory, and hold what `byte` says of each.
    #[track_caller]
    pub fn assert_in_l1(&self, node: u64, blocks: std::ops::Range<usize>, byte: impl Fn(usize) -> u8) {
        let core = self.store.lock();
        let idx = core.by_id(NodeId(node)).expect("a leased file is gone");
        let hot = core.hot(core.shown(idx)).expect("nothing of it is in L1");
        for at in blocks {
            assert!(hot.blocks.get(at).is_some_and(|block| block.resident()), "block {at} is not in L1");
            let bytes = hot.span(at).unwrap();
            let right = bytes.with_bytes(|bytes| bytes.iter().all(|found| *found == byte(at)));
            assert!(right, "block {at} is not what was leased");
        }
    }

    #[track_caller]
    pub fn assert_no_leases(&self) {
        let now = self.store.snapshot();
        assert_eq!((now.leases, now.leased_bytes, now.waiting_for_leases), (0, 0, 0));
    }
}

/// A control file that has said HELLO, closed by [`Session::close`].
pub struct Session {
    pub client: Client,
    pub id: SessionId,
}

impl Session {
    pub fn ask(&self, request: Request) -> Result<Vec<u8>, Errno> {
        let store = &self.client.store;
        ask(|reply| store.control(self.id, request, reply)).recv().unwrap()
    }

    /// A lease of `parties` shares, or why there is none.
    pub fn acquire(&self, parties: u32, ttl_ms: u32, ranges: &[abi::Range]) -> Result<u64, Errno> {
        let header = header(abi::CLASSIFY_LEASE, ranges.len());
        let head = abi::Classify { header, ttl_ms, parties, ..abi::Classify::default() };
        let bytes = self.ask(Request::Classify(head, ranges.to_vec()))?;
        let (head, _) = abi::Classify::read_from_prefix(&bytes).unwrap();
        if head.lease == 0 { Err(Errno::from_raw(head.lease_errno)) } else { Ok(head.lease) }
    }

    fn of_lease(&self, request: Request) -> Result<abi::Lease, Errno> {
        let bytes = self.ask(request)?;
        Ok(abi::Lease::read_from_prefix(&bytes).unwrap().0)
    }

    /// Gives back a share, or these ranges of one.
    pub fn release(&self, lease: u64, ranges: &[abi::Range]) -> Result<abi::Lease, Errno> {
        let head = abi::Lease { header: header(0, ranges.len()), lease, ..abi::Lease::default() };
        self.of_lease(Request::Release(head, ranges.to_vec()))
    }

    pub fn attach(&self, lease: u64) -> Result<abi::Lease, Errno> {
        self.of_lease(Request::Attach(abi::Lease { header: header(0, 0), lease, ..abi::Lease::default() }))
    }

    pub fn extend(&self, lease: u64, ttl_ms: u32) -> Result<abi::Lease, Errno> {
        let head = abi::Lease { header: header(0, 0), lease, ttl_ms, ..abi::Lease::default() };
        self.of_lease(Request::Extend(head))
    }

    pub fn close(self) {
        self.client.store.close_session(self.id);
    }
}

fn header(flags: u16, count: usize) -> abi::Header {
    abi::Header { version: abi::VERSION, flags, count: count as u32 }
}

/// Blocks of a file, by its number.
pub fn blocks(node: u64, first: u64, count: u64) -> abi::Range {
    let (offset, length) = (first * BLOCK, count * BLOCK);
    abi::Range { id: node, offset, length, kind: abi::KIND_NODE, ..abi::Range::default() }
}
