//! A store on a device that fails: what cannot be stored or read goes away, and whoever asks is told (rules R2, R6).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::cell::RefCell;
use std::path::Path;

use nix::errno::Errno;

use super::*;
use crate::config::Layer;
use crate::host::Host;
use crate::l2::{Direction, Engine, Faults, Faulty};
use crate::store::node::ROOT_INO;
use crate::store::{Answer, Caller, Handle, Opened};

thread_local! {
    /// The orders for the device that was opened last on this thread.
    static FAULTS: RefCell<Option<Faults>> = const { RefCell::new(None) };
}

pub(super) fn faulty(inner: Arc<dyn Engine>) -> Arc<dyn Engine> {
    let (engine, faults) = Faulty::new(inner);
    FAULTS.with(|at| *at.borrow_mut() = Some(faults));
    Arc::new(engine)
}

pub(super) struct Rig {
    pub daemon: Daemon,
    events: Arc<Events>,
    pub faults: Faults,
}

impl Rig {
    pub fn start(dir: &Path) -> Self {
        Self::start_with(dir, "64MiB", faulty)
    }

    /// With a store of this size (and other options), and something in front of its device.
    pub fn start_with(dir: &Path, size: &str, wrap: Wrap) -> Self {
        Self::wrapped(&format!("l1=64MiB,l2={}:{size}", dir.join("store").display()), wrap)
    }

    /// With these options. The orders are for the last of several devices.
    pub fn with(options: &str) -> Self {
        Self::wrapped(options, faulty)
    }

    fn wrapped(options: &str, wrap: Wrap) -> Self {
        let flags =
            Layer::from_fstab(["mountpoint=/mnt/unused,lock=false,l2-engine=threads", options]).unwrap();
        let config = Config::resolve(Layer::default(), Layer::default(), flags, &Host::probe()).unwrap();
        let ready = crate::background::start(false, None).unwrap().unwrap();
        let events = Arc::new(Events::default());
        let mut daemon = Daemon::start_on(&config, &events, &ready, Some(wrap), &Arc::default()).unwrap();
        daemon.keep_stores();
        let faults = FAULTS.with(|at| at.borrow_mut().take()).unwrap_or_default();
        Self { daemon, events, faults }
    }

    pub fn stop(self) {
        self.daemon.stop();
    }

    pub fn store(&self) -> &Arc<Store> {
        &self.daemon.store
    }

    pub fn caller() -> Caller {
        Caller { tid: nix::unistd::gettid().as_raw() as u32, uid: 0, gid: 0 }
    }

    pub fn create(&self, name: &str, bytes: &[u8]) -> Handle {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let (_, Opened { handle, .. }) =
            self.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, &Self::caller()).unwrap();
        let (tell, told) = channel();
        self.store().write(&handle, 0, bytes, Box::new(move |result| tell.send(result).unwrap()));
        assert_eq!(told.recv().unwrap(), Ok(bytes.len() as u32));
        handle
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        let handle = self.create(name, bytes);
        self.store().release(&handle);
    }

    pub fn fsync(&self, handle: &Handle) -> Result<(), Errno> {
        let (tell, told) = channel();
        self.store().fsync(handle, Box::new(move |result| tell.send(result).unwrap()));
        told.recv().unwrap()
    }

    pub fn drain(&self) -> Result<(), Errno> {
        let (tell, told) = channel();
        self.store().barrier(Box::new(move |result| tell.send(result).unwrap()));
        told.recv().unwrap()
    }

    pub fn find(&self, name: &str) -> Result<u64, Errno> {
        self.find_in(ROOT_INO, name)
    }

    pub fn find_in(&self, parent: u64, name: &str) -> Result<u64, Errno> {
        match self.store().lookup(parent, name.as_bytes(), &Self::caller()) {
            Answer::Now(found) => found.map(|entry| entry.attr.ino),
            Answer::Wait => panic!("nothing is being released"),
        }
    }

    pub fn read(&self, ino: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let opened = self.store().open(ino, libc::O_RDONLY, &Self::caller())?;
        let (tell, told) = channel();
        let reply =
            Box::new(move |result: Result<&[u8], Errno>| tell.send(result.map(<[u8]>::to_vec)).unwrap());
        self.store().read(&opened.handle, 0, len, reply);
        let read = told.recv().unwrap();
        self.store().release(&opened.handle);
        read
    }

    /// Waits until something has come about; what does not come is a test that hangs, and is seen.
    pub fn wait(&self, come: impl Fn() -> bool) {
        while !come() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn said(&self, what: &str) -> bool {
        String::from_utf8(self.events.read(0, 1 << 20)).unwrap().lines().any(|line| line.contains(what))
    }
}

mod bounds;

#[test]
fn what_the_device_does_not_take_goes_away_and_whoever_asks_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("kept", &[1; 300_000]);
    assert_eq!(rig.drain(), Ok(()));

    // Nobody waits for it: the next drain says so, once.
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.write("lost", &[2; 300_000]);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    assert_eq!(rig.find("lost"), Err(Errno::ENOENT));
    assert!(rig.said("lost lost: storing it on the device failed"));
    assert_eq!(rig.store().snapshot().counters.store_failures, 1);
    assert_eq!(rig.drain(), Ok(()));

    // The writer waits for it.
    let handle = rig.create("synced", &[3; 70_000]);
    rig.faults.fail_next(Direction::Write, 1, libc::ENOSPC);
    assert_eq!(rig.fsync(&handle), Err(Errno::EIO));
    assert_eq!(rig.find("synced"), Err(Errno::ENOENT));
    rig.store().release(&handle);
    let _ = rig.drain();

    let used = rig.store().snapshot().used_bytes;
    assert_eq!(used, 300_000u64.next_multiple_of(4096), "room of what failed is back");
    assert_eq!(rig.read(rig.find("kept").unwrap(), 300_000), Ok(vec![1; 300_000]));
    rig.stop();

    let rig = Rig::start(dir.path());
    assert_eq!(rig.read(rig.find("kept").unwrap(), 300_000), Ok(vec![1; 300_000]));
    assert_eq!(rig.find("lost"), Err(Errno::ENOENT));
    assert_eq!(rig.find("synced"), Err(Errno::ENOENT));
    rig.stop();
}

#[test]
fn what_cannot_be_read_back_or_reads_wrong_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    for (at, name) in ["unread", "flipped", "right"].into_iter().enumerate() {
        rig.write(name, &vec![at as u8 + 1; 400_000]);
    }
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
    let rig = Rig::start(dir.path());
    let (unread, flipped, right) =
        (rig.find("unread").unwrap(), rig.find("flipped").unwrap(), rig.find("right").unwrap());
    rig.faults.fail_next(Direction::Read, 1, libc::EIO);
    assert_eq!(rig.read(unread, 400_000), Err(Errno::EIO));
    rig.faults.fail_next(Direction::Read, 0, 0);
    rig.faults.flip_next_reads(1);
    assert_eq!(rig.read(flipped, 400_000), Err(Errno::EIO));
    rig.faults.flip_next_reads(0);
    assert_eq!(rig.read(right, 400_000), Ok(vec![3; 400_000]));
    for name in ["unread", "flipped"] {
        assert_eq!(rig.find(name), Err(Errno::ENOENT), "{name}");
        assert!(rig.said(&format!("lost {name}:")), "{name}");
    }
    let counters = rig.store().snapshot().counters;
    assert_eq!((counters.read_errors, counters.crc_errors), (1, 1));
    rig.stop();
}

#[test]
fn a_flush_that_fails_is_told_and_what_was_durable_stays() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("before", &[1; 50_000]);
    assert_eq!(rig.drain(), Ok(()));
    let handle = rig.create("doubtful", &[2; 50_000]);
    rig.faults.fail_next_syncs(1, libc::EIO);
    assert_eq!(rig.fsync(&handle), Err(Errno::EIO));
    rig.store().release(&handle);
    assert!(rig.store().snapshot().poisoned);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    assert!(rig.said("nothing is stored any more"));
    assert_eq!(rig.read(rig.find("before").unwrap(), 50_000), Ok(vec![1; 50_000]));
    rig.stop();

    let rig = Rig::start(dir.path());
    assert_eq!(rig.read(rig.find("before").unwrap(), 50_000), Ok(vec![1; 50_000]));
    match rig.find("doubtful") {
        Err(error) => assert_eq!(error, Errno::ENOENT),
        Ok(ino) => assert_eq!(rig.read(ino, 50_000), Ok(vec![2; 50_000])),
    }
    rig.write("after", &[4; 50_000]);
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
}

#[test]
fn a_long_attribute_can_be_replaced_where_two_fit() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.write("file", &[1; 10]);
    let ino = rig.find("file").unwrap();
    for fill in [1, 2] {
        for name in [b"user.one", b"user.two"] {
            assert_eq!(rig.store().setxattr(ino, name, &[fill; 63 << 10], 0), Ok(()));
        }
    }
    assert_eq!(rig.store().setxattr(ino, b"user.three", &[3; 63 << 10], 0), Err(Errno::ENOSPC));
    rig.stop();
}

#[test]
fn a_directory_takes_along_what_was_replaced_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let mkdir =
        |name: &str| rig.store().mkdir(ROOT_INO, name.as_bytes(), 0o755, &Rig::caller()).unwrap().attr.ino;
    let first = mkdir("first");
    let rename = |from: u64, name: &str, to: u64, new_name: &str| {
        let caller = Rig::caller();
        rig.store().rename(from, name.as_bytes(), to, new_name.as_bytes(), 0, &caller).unwrap();
    };
    rig.write("old", &[1; 50_000]);
    rename(ROOT_INO, "old", first, "name");
    assert_eq!(rig.drain(), Ok(()));
    // The one that replaces it gets another name while its bytes are on their way, and the directory goes away.
    rig.faults.hold(crate::l2::Class::WriteBack);
    rig.write("new", &[2; 50_000]);
    rename(ROOT_INO, "new", first, "name");
    rename(first, "name", ROOT_INO, "moved");
    rig.store().rmdir(ROOT_INO, b"first").unwrap();
    let is_gone = || rig.store().lock().by_id(crate::store::node::NodeId(first)).is_none();
    while !is_gone() {
        std::thread::yield_now();
    }
    // It may well be kept where the other was.
    mkdir("second");
    rig.store().commit(rig.daemon.volume.as_ref().unwrap(), true);
    rig.stop();

    let rig = Rig::start(dir.path());
    assert!(!rig.said("dropped"), "{}", String::from_utf8(rig.events.read(0, 1 << 20)).unwrap());
    let second = rig.find("second").unwrap();
    let found = rig.store().lookup(second, b"name", &Rig::caller());
    assert!(matches!(found, Answer::Now(Err(Errno::ENOENT))));
    assert_eq!(rig.find("moved"), Err(Errno::ENOENT));
    assert_eq!(rig.store().snapshot().used_bytes, 0);
    rig.stop();
}

#[test]
fn what_was_removed_while_it_was_on_its_way_does_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let handle = rig.create("name", &[1; 50_000]);
    assert_eq!(rig.fsync(&handle), Ok(()));
    let (tell, told) = channel();
    rig.store().write(&handle, 50_000, &[1; 50_000], Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(told.recv().unwrap(), Ok(50_000));
    rig.faults.hold(crate::l2::Class::WriteBack);
    rig.store().release(&handle);
    // A version that shows its bytes, and loses the name.
    let open = || rig.store().open(rig.find("name").unwrap(), libc::O_WRONLY, &Rig::caller());
    let copy = open().or_else(|_| open()).unwrap();
    rig.store().unlink(ROOT_INO, b"name", &Rig::caller()).unwrap();
    while rig.store().lock().queue.pending() && !rig.store().lock().queue.removed.is_empty() {
        std::thread::yield_now();
    }
    rig.faults.release(crate::l2::Class::WriteBack);
    assert_eq!(rig.drain(), Ok(()));
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
    drop(copy);

    let rig = Rig::start(dir.path());
    assert_eq!(rig.find("name"), Err(Errno::ENOENT));
    rig.stop();
}
