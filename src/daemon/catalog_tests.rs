//! The catalog while it is written, when it is full, and after it was left in the middle.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::tests::{Rig, faulty};
use super::*;
use crate::l2::{Direction, Engine, EngineGauges, Io};
use crate::store::Opened;
use crate::store::node::ROOT_INO;

/// Where the journal of a store of one path begins: its two headers, a page each.
const HEADERS: std::ops::Range<u64> = 65536..65536 + 8192;

type Call = Box<dyn FnOnce() + Send>;

/// Calls once in the middle of the next checkpoint, and loses the device when that has become the valid one.
#[derive(Default)]
struct Cut {
    in_checkpoint: Option<Call>,
    after_header: bool,
    gone: bool,
}

struct CutOff {
    inner: Arc<dyn Engine>,
    cut: Arc<Mutex<Cut>>,
}

thread_local! {
    static CUT: RefCell<Arc<Mutex<Cut>>> = RefCell::default();
}

fn cut_off(inner: Arc<dyn Engine>) -> Arc<dyn Engine> {
    let cut = CUT.with(|cut| cut.borrow().clone());
    Arc::new(CutOff { inner: faulty(inner), cut })
}

impl Engine for CutOff {
    fn submit(&self, mut io: Io) {
        let write = io.direction == Direction::Write;
        let chunk = write && io.span.with_bytes(|bytes| bytes.starts_with(b"CCVK"));
        let call = if chunk { self.cut.lock().in_checkpoint.take() } else { None };
        if let Some(call) = call {
            call();
        }
        if write && self.cut.lock().gone {
            return (io.done)(Err(std::io::Error::from_raw_os_error(libc::EIO)));
        }
        if write && HEADERS.contains(&io.offset) && self.cut.lock().after_header {
            let (cut, done) = (self.cut.clone(), io.done);
            io.done = Box::new(move |result| {
                cut.lock().gone = true;
                done(result);
            });
        }
        self.inner.submit(io);
    }
    fn register(&self, region: Region) {
        self.inner.register(region);
    }
    fn unregister(&self, id: RegionId) {
        self.inner.unregister(id);
    }
    fn sync_data(&self) -> std::io::Result<()> {
        self.inner.sync_data()
    }
    fn in_flight(&self) -> EngineGauges {
        self.inner.in_flight()
    }
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn stop(&self) {
        self.inner.stop();
    }
}

/// A checkpoint is written bit by bit. What it has of a name at its beginning and of another at its end may never have
/// been together: a file that is durable must not be lost for that.
#[test]
fn names_that_change_during_a_checkpoint_cost_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let cut = CUT.with(|cut| cut.borrow().clone());
    let rig = Rig::start_with(dir.path(), "1GiB", cut_off);
    rig.write("first", &[1; 5000]);
    for at in 0..20 {
        let name = format!("large{at}");
        rig.write(&name, &[2; 100]);
        for attr in ["user.a", "user.b"] {
            rig.store()
                .setxattr(rig.find(&name).unwrap(), attr.as_bytes(), &vec![at as u8; 50_000], 0)
                .unwrap();
        }
    }
    assert_eq!(rig.drain(), Ok(()));
    let store = rig.store().clone();
    *cut.lock() = Cut {
        in_checkpoint: Some(Box::new(move || {
            let caller = Rig::caller();
            store.rename(ROOT_INO, b"first", ROOT_INO, b"second", 0, &caller).unwrap();
            store.mkdir(ROOT_INO, b"first", 0o755, &caller).unwrap();
        })),
        after_header: true,
        gone: false,
    };
    rig.store().commit(rig.daemon.volume.as_ref().unwrap(), true);
    assert!(cut.lock().gone, "there was a checkpoint");
    rig.stop();

    let rig = Rig::start_with(dir.path(), "1GiB", faulty);
    let found = rig.find("second").or_else(|_| rig.find("first")).unwrap();
    assert!(rig.read(found, 5000).is_ok_and(|bytes| bytes == [1; 5000]));
    assert!(!rig.said("dropped"));
    rig.stop();
}

/// Commits on one thread and checkpoints on another, as when the daemon ends.
#[test]
fn commits_and_checkpoints_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                rig.store().commit(rig.daemon.volume.as_ref().unwrap(), true);
            }
        });
        for at in 0..100u32 {
            let name = format!("file{}", at % 10);
            let handle = rig.create(&name, &at.to_le_bytes());
            rig.store().setxattr(handle.ino, b"user.large", &vec![at as u8; 20_000], 0).unwrap();
            assert_eq!(rig.fsync(&handle), Ok(()));
            rig.store().release(&handle);
            if at < 90 {
                rig.store().unlink(ROOT_INO, name.as_bytes(), &Rig::caller()).unwrap();
            }
        }
        done.store(true, Ordering::Release);
    });
    assert!(!rig.store().snapshot().poisoned);
    rig.stop();

    let rig = Rig::start(dir.path());
    for at in 90..100u32 {
        let ino = rig.find(&format!("file{}", at % 10)).unwrap();
        assert_eq!(rig.read(ino, 4), Ok(at.to_le_bytes().to_vec()));
        assert_eq!(rig.store().getxattr(ino, b"user.large"), Ok(vec![at as u8; 20_000]));
    }
    rig.stop();
}

#[test]
fn a_flush_is_done_when_all_that_was_written_before_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    assert_eq!(rig.drain(), Ok(()));
    let volume = rig.daemon.volume.clone().unwrap();
    let flushed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        volume.mark_written(0);
        rig.faults.hold_syncs();
        let first = scope.spawn(|| volume.flush());
        rig.faults.wait_for_sync();
        let second = scope.spawn(|| {
            volume.flush().unwrap();
            flushed.store(true, Ordering::Release);
        });
        std::thread::sleep(Duration::from_millis(50));
        let early = flushed.load(Ordering::Acquire);
        rig.faults.release_syncs();
        first.join().unwrap().unwrap();
        second.join().unwrap();
        assert!(!early, "the second flush ended while the first still waited for the device");
    });
    // What could not be flushed has not been flushed.
    volume.mark_written(0);
    for _ in 0..2 {
        rig.faults.fail_next_syncs(1, libc::EIO);
        assert_eq!(volume.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
    }
    volume.flush().unwrap();
    rig.stop();
}

impl Rig {
    /// A file with `bytes` of attributes, at most 128 KiB.
    fn with_attributes(&self, name: &str, bytes: usize) -> Result<(), Errno> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        let store = self.store();
        let (_, Opened { handle, .. }) =
            store.create(ROOT_INO, name.as_bytes(), 0o644, flags, &Self::caller())?;
        let result = ["user.a", "user.b", "user.c"]
            .iter()
            .try_for_each(|attr| store.setxattr(handle.ino, attr.as_bytes(), &vec![7; bytes / 3], 0));
        store.release(&handle);
        result
    }

    fn unlink(&self, name: &str) {
        self.store().unlink(ROOT_INO, name.as_bytes(), &Self::caller()).unwrap();
    }

    fn checkpoint(&self) {
        self.store().commit(self.daemon.volume.as_ref().unwrap(), true);
        assert!(!self.store().snapshot().poisoned);
    }
}

/// Anybody may set attributes and choose long names. That must not end in a catalog that cannot be written, whatever is
/// tried: what does not fit is refused, and removing always works.
#[test]
fn a_full_catalog_refuses_and_takes_removals() {
    let dir = tempfile::tempdir().unwrap();
    let start = || Rig::start_with(dir.path(), "64MiB,evict=none", faulty);
    let rig = start();
    rig.write("written", &[1; 100]);
    let mut names = Vec::new();
    let refused = loop {
        let name = format!("file{}", names.len());
        let made = rig.with_attributes(&name, 100_000);
        names.push(name);
        if let Err(refused) = made {
            break refused;
        }
        assert!(names.len() < 1000, "it never fills up");
    };
    assert_eq!(refused, Errno::ENOSPC);
    assert!(names.len() > 5, "{} files", names.len());
    // The small ones fill what is left.
    for at in 0..100_000 {
        let name = format!("{at:0200}");
        match rig.with_attributes(&name, 0) {
            Ok(()) => names.push(name),
            Err(error) => {
                assert_eq!(error, Errno::ENOSPC);
                break;
            }
        }
    }
    let snapshot = rig.store().snapshot();
    assert!(snapshot.catalog_used_bytes <= snapshot.catalog_capacity_bytes);
    let caller = Rig::caller();
    let long = "n".repeat(255);
    let rename =
        |to: &str| rig.store().rename(ROOT_INO, names[0].as_bytes(), ROOT_INO, to.as_bytes(), 0, &caller);
    assert_eq!(rename(&long), Err(Errno::ENOSPC));
    assert_eq!(rename("short"), Ok(()));
    assert_eq!(rig.store().mkdir(ROOT_INO, long.as_bytes(), 0o755, &caller).err(), Some(Errno::ENOSPC));
    assert_eq!(rig.drain(), Ok(()));
    let ino = rig.find("written").unwrap();
    for flags in [libc::O_WRONLY, libc::O_WRONLY | libc::O_TRUNC] {
        assert_eq!(rig.store().open(ino, flags, &caller).err(), Some(Errno::ENOSPC));
    }
    for _ in 0..3 {
        rig.checkpoint();
    }
    rig.stop();

    let rig = start();
    let recovered = rig.store().snapshot();
    assert!(recovered.catalog_used_bytes <= recovered.catalog_capacity_bytes);
    assert!(recovered.catalog_used_bytes.abs_diff(snapshot.catalog_used_bytes) < 1000, "counted the same");
    for name in &names[1..] {
        rig.unlink(name);
    }
    rig.unlink("short");
    rig.unlink("written");
    assert_eq!(rig.drain(), Ok(()));
    rig.checkpoint();
    assert!(rig.store().snapshot().catalog_used_bytes < 1000);
    assert_eq!(rig.with_attributes("again", 100_000), Ok(()));
    rig.stop();
}

/// Files leave for the records of newer ones as they do for their bytes.
#[test]
fn records_evict_the_longest_unused() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start_with(dir.path(), "64MiB", faulty);
    for at in 0..60 {
        assert_eq!(rig.with_attributes(&format!("file{at}"), 100_000), Ok(()), "file {at}");
        assert_eq!(rig.drain(), Ok(()));
    }
    assert_eq!(rig.find("file0"), Err(Errno::ENOENT));
    assert!(rig.find("file59").is_ok());
    let snapshot = rig.store().snapshot();
    assert!(snapshot.counters.evictions_l2 > 20);
    assert!(snapshot.catalog_used_bytes <= snapshot.catalog_capacity_bytes);
    rig.checkpoint();
    rig.stop();
}

/// Checksums are in the record: also of the holes of a file that is mostly holes, and takes no room.
#[test]
fn long_files_of_nothing_count() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start_with(dir.path(), "1GiB,evict=none", faulty);
    let mut refused = 0;
    for at in 0..2000 {
        let Ok((_, Opened { handle, .. })) = rig.store().create(
            ROOT_INO,
            format!("file{at}").as_bytes(),
            0o644,
            libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL,
            &Rig::caller(),
        ) else {
            refused += 1;
            continue;
        };
        let (tell, told) = channel();
        let caller = Rig::caller();
        rig.store().truncate(
            handle.ino,
            true,
            900 << 20,
            Default::default(),
            &caller,
            Box::new(move |result| tell.send(result).unwrap()),
        );
        match told.recv().unwrap() {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error, Errno::ENOSPC);
                refused += 1;
            }
        }
        rig.store().release(&handle);
    }
    assert!(refused > 0);
    assert_eq!(rig.drain(), Ok(()));
    rig.checkpoint();
    rig.stop();
}

/// More changes between two commits than the log takes at once.
#[test]
fn a_commit_larger_than_the_log_is_written_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start_with(dir.path(), "1GiB,l2-files-max=100000", faulty);
    for at in 0..200 {
        assert_eq!(rig.with_attributes(&format!("file{at}"), 120_000), Ok(()));
    }
    assert_eq!(rig.drain(), Ok(()));
    // While one commit waits for the device, everything changes once more: 24 MB, and the log has 16.
    rig.faults.hold_syncs();
    let change = |at: u32, mode| {
        let ino = rig.find(&format!("file{at}")).unwrap();
        let change = crate::store::attr::Change { mode: Some(mode), ..Default::default() };
        rig.store().setattr(ino, change).unwrap();
    };
    change(0, 0o600);
    rig.faults.wait_for_sync();
    (0..200).for_each(|at| change(at, 0o640));
    rig.faults.release_syncs();
    assert_eq!(rig.drain(), Ok(()));
    assert!(!rig.store().snapshot().poisoned);
    rig.stop();

    let rig = Rig::start_with(dir.path(), "1GiB", faulty);
    for at in 0..200 {
        let ino = rig.find(&format!("file{at}")).unwrap();
        assert_eq!(rig.store().getattr(ino).unwrap().mode, 0o640);
    }
    rig.stop();
}
