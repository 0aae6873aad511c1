//! What happens at the same time to the same blocks, in many orders: a lease is granted while they are evicted, promoted
//! while they are written, released while a writer waits and its time is over.
//!
//! The store that runs here is the real one, with its threads, and so are the rules; shuttle stands in for locks and threads
//! (`sync.rs`) and decides who goes on whenever somebody takes a lock, gives it back, waits or is called. Each schedule
//! is another order, and whatever comes of it must be right; if all wait for one another, that is found too. The device
//! makes its transfers in any order, and time passes when a test says so.
//!
//! `KVCACHEFS_TEST_SCHEDULES` says how many schedules each test tries, `KVCACHEFS_TEST_SEED` which; a seed makes the same ones
//! each time. `cargo test --lib interleavings` runs them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread::spawn;
use shuttle::{Config, Runner};

use self::rig::{Client, Rig, Runs, Setup, blocks};
use super::device_log::{self, number};
use crate::abi;
use crate::store::Store;
use crate::store::hot::BLOCK;
use crate::store::node::NodeId;
use crate::sync::{advance, now};

pub(super) mod device;
pub(super) mod rig;

/// Schedules that each test tries, half of them at random, half with few changes of who goes on.
const SCHEDULES: usize = 200;
/// Changes of who goes on, in those that have few.
const CHANGES: usize = 4;

const TWO: usize = 2 * BLOCK as usize;

pub(super) fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 512 << 10;
    config.silence_warnings = true;
    config
}

/// Has `scenario` play on a store that has been set up, once in each schedule.
fn in_all_orders(setup: Arc<Setup>, runs: Runs, scenario: fn(&Rig)) {
    let schedules = number("KVCACHEFS_TEST_SCHEDULES", SCHEDULES);
    let seed = number("KVCACHEFS_TEST_SEED", 1) as u64;
    let play = move || {
        let rig = Rig::start(&setup, runs);
        scenario(&rig);
        rig.client(0).assert_no_leases();
        rig.stop();
    };
    let again = play.clone();
    Runner::new(RandomScheduler::new_from_seed(seed, schedules.div_ceil(2)), config()).run(play);
    Runner::new(PctScheduler::new_from_seed(seed, CHANGES, schedules / 2), config()).run(again);
}

/// Two blocks of 1, as a file for shared use or as one with a slab.
fn make(store: &Arc<Store>, path: &str, shared: bool) {
    let flags = if shared { 0 } else { libc::O_EXCL };
    let handle = device_log::rig::create(store, path, flags).unwrap();
    assert_eq!(device_log::rig::write(store, &handle, 0, &[1; TWO]), Ok(TWO as u32));
    device_log::rig::close(store, &handle);
}

/// Brings all of a file into L1, and says which node it is.
fn bring(client: &Client, path: &str) -> u64 {
    let handle = client.open(path, libc::O_RDONLY).unwrap();
    assert_eq!(client.read(&handle, 0, TWO as u64).recv().unwrap(), Ok(vec![1; TWO]));
    client.close(&handle);
    handle.id.0
}

/// Whatever is granted is there: R11 and R12 against eviction from L1 and from the store, and promotions of the same blocks.
#[test]
fn what_is_granted_is_not_evicted() {
    let setup = Setup::new("l1=64MiB,slab-file-max=512KiB", |store| {
        make(store, "shared", true);
        make(store, "slab", false);
    });
    in_all_orders(setup, Runs::Loads, |rig| {
        let first = rig.client(0);
        let nodes = [bring(&first, "shared"), bring(&first, "slab")];
        let holders = nodes.map(|node| {
            let client = rig.client(1 + node as u32 % 1000);
            spawn(move || {
                for dies in [false, true] {
                    let session = client.session();
                    if let Ok(lease) = session.acquire(1, 0, &[blocks(node, 0, 1)]) {
                        client.assert_in_l1(node, 0..1, |_| 1);
                        shuttle::thread::yield_now();
                        client.assert_in_l1(node, 0..1, |_| 1);
                        assert!(client.store.snapshot().leased_bytes >= BLOCK);
                        if !dies {
                            assert_eq!(session.release(lease, &[]).unwrap().state, abi::LEASE_GONE);
                        }
                    }
                    session.close();
                }
            })
        });
        let evicts = rig.client(2001);
        let evicts = spawn(move || {
            for _ in 0..3 {
                evicts.evict();
            }
            evicts.store.with(|core| core.evict_file());
        });
        let reads = rig.client(2002);
        let reads = spawn(move || {
            for path in ["slab", "shared"] {
                let Ok(handle) = reads.open(path, libc::O_RDONLY) else { continue };
                assert_eq!(reads.read(&handle, 0, TWO as u64).recv().unwrap(), Ok(vec![1; TWO]));
                reads.close(&handle);
            }
        });
        holders.into_iter().chain([evicts, reads]).for_each(|task| task.join().unwrap());
        // Nothing keeps anything for long.
        let used = || {
            let pool = first.store.snapshot().pool;
            pool.used_slabs + pool.used_chunks
        };
        // A reader is answered before it lets go; for what never goes there is a limit of steps.
        while used() > 0 {
            first.evict();
            shuttle::thread::yield_now();
        }
    });
}

/// R9: what is read for a file that is emptied, written, stored and evicted meanwhile comes late, and is nobody's.
#[test]
fn a_promotion_that_a_newer_store_has_overtaken_is_discarded() {
    let setup = Setup::new("l1=64MiB,small-file-max=64KiB,slab-file-max=64KiB", |store| {
        let root = crate::store::node::ROOT_INO;
        let dir = store.mkdir(root, b"p", 0o755, &device_log::rig::caller()).unwrap().attr.ino;
        store.setxattr(dir, b"user.kv.publish", b"posix", 0).unwrap();
        make(store, "p/f", true);
    });
    in_all_orders(setup, Runs::Everything, |rig| {
        let first = rig.client(0);
        let handle = first.open("p/f", libc::O_RDONLY).unwrap();
        let node = handle.id;
        // Nobody waits for it, as for what is hinted at.
        first.device.put_aside(true);
        assert!(first.store.with(|core| core.load_blocks(node.idx(), 0..2)));
        first.device.put_aside(false);
        assert!(first.device.is_aside() > 0);
        let store = |client: &Client, byte: u8| {
            let writer = client.open("p/f", libc::O_WRONLY | libc::O_TRUNC).unwrap();
            assert_eq!(writer.id, node, "emptied in place");
            assert_eq!(client.write(&writer, 0, &vec![byte; TWO]).recv().unwrap(), Ok(TWO as u32));
            client.close(&writer);
            client.drain();
        };
        store(&first, 2);
        while first.evict() {}
        // Loaded anew, and the old load comes at any time.
        let late = rig.client(1);
        let late = spawn(move || late.device.put_back());
        let reads = |client: Client, opened: crate::store::Handle| {
            spawn(move || {
                for at in [0, BLOCK] {
                    assert_eq!(
                        client.read(&opened, at, BLOCK).recv().unwrap(),
                        Ok(vec![2; BLOCK as usize]),
                        "at {at}"
                    );
                }
                client.close(&opened);
            })
        };
        let reader = first.open("p/f", libc::O_RDONLY).unwrap();
        let reads = reads(rig.client(2), reader);
        let leases = rig.client(3);
        let leases = spawn(move || {
            let session = leases.session();
            for _ in 0..3 {
                if let Ok(lease) = session.acquire(1, 0, &[blocks(node.0, 0, 2)]) {
                    leases.assert_in_l1(node.0, 0..2, |_| 2);
                    session.release(lease, &[]).unwrap();
                }
                shuttle::thread::yield_now();
            }
            session.close();
        });
        let evicts = rig.client(4);
        let evicts = spawn(move || _ = evicts.evict());
        [late, reads, leases, evicts].into_iter().for_each(|task| task.join().unwrap());
        first.close(&handle);
    });
}

/// A writer waits for all shares, whichever way they go, is called when the last has gone, and changes nothing before. What
/// was leased can be evicted then, and not before.
#[test]
fn the_last_share_lets_the_writer_in() {
    let setup = Setup::new("l1=64MiB,slab-file-max=512KiB", |store| make(store, "f", true));
    in_all_orders(setup, Runs::Loads, |rig| {
        let first = rig.client(0);
        let node = bring(&first, "f");
        let handle = first.open("f", libc::O_RDWR).unwrap();
        let (granted, attached) = (rig.client(1).session(), rig.client(2).session());
        let lease = granted.acquire(2, 0, &[blocks(node, 0, 2)]).unwrap();
        attached.attach(lease).unwrap();
        let dies = thread_rng().gen_bool(0.5);
        let parts = thread_rng().gen_bool(0.5);
        let ranks = [(granted, parts, false), (attached, false, dies)].map(|(session, parts, dies)| {
            spawn(move || {
                session.client.assert_in_l1(node, 0..2, |_| 1);
                if parts {
                    // Of the second block nobody lets go yet: the other has all of its share, or none.
                    session.release(lease, &[blocks(node, 0, 1)]).unwrap();
                    session.client.assert_in_l1(node, 1..2, |_| 1);
                }
                if !dies {
                    assert_eq!(session.release(lease, &[]).unwrap().own, 0);
                }
                session.close();
            })
        });
        let writes = rig.client(3);
        let opened = writes.open("f", libc::O_WRONLY).unwrap();
        let writes = spawn(move || {
            // The write waits in the queue, and this task for that: one that is not called is a deadlock.
            assert_eq!(writes.write(&opened, 0, &[2; TWO]).recv().unwrap(), Ok(TWO as u32));
            writes.assert_no_leases();
            writes.close(&opened);
        });
        let evicts = rig.client(4);
        let evicts = spawn(move || (0..2).for_each(|_| _ = evicts.evict()));
        ranks.into_iter().chain([writes, evicts]).for_each(|task| task.join().unwrap());
        assert_eq!(first.read(&handle, 0, TWO as u64).recv().unwrap(), Ok(vec![2; TWO]));
        first.close(&handle);
    });
}

/// A lease ends once: by its time or by its release, not while a read of its file is under way, and not after it has been
/// extended.
#[test]
fn a_lease_ends_once() {
    let setup = Setup::new("l1=64MiB,slab-file-max=512KiB", |store| make(store, "f", true));
    in_all_orders(setup, Runs::Loads, |rig| {
        let first = rig.client(0);
        let handle = first.open("f", libc::O_RDWR).unwrap();
        let node = handle.id.0;
        // The second block is still on the device.
        assert_eq!(first.read(&handle, 0, BLOCK).recv().unwrap(), Ok(vec![1; BLOCK as usize]));
        let session = Arc::new(rig.client(1).session());
        let lease = session.acquire(1, 10, &[blocks(node, 0, 1)]).unwrap();
        let over = now() + Duration::from_millis(10);
        let (extends, releases) = (session.clone(), session.clone());
        let extends = spawn(move || extends.extend(lease, 60_000));
        let releases = spawn(move || releases.release(lease, &[]).unwrap().state);
        let reads = rig.client(2);
        let told = thread_rng().gen_bool(0.5).then(|| reads.read(&handle, 0, TWO as u64));
        let ends = rig.client(3);
        let ends = spawn(move || {
            for _ in 0..3 {
                ends.store.with(|core| {
                    let hot = core.hot(NodeId(node).idx()).unwrap();
                    let read = hot.pins > 0 || !hot.reads.is_empty();
                    let before = core.control.leases.count();
                    core.end_leases(over);
                    assert!(!read || before == core.control.leases.count(), "ended under a read");
                });
            }
        });
        let writes = rig.client(4);
        let opened = writes.open("f", libc::O_WRONLY).unwrap();
        let writes = spawn(move || {
            assert_eq!(writes.write(&opened, 0, &[2; 10]).recv().unwrap(), Ok(10));
            writes.close(&opened);
        });
        let extended = extends.join().unwrap();
        let state = releases.join().unwrap();
        [ends, writes].into_iter().for_each(|task| task.join().unwrap());
        if let Some(told) = told {
            assert_eq!(told.recv().unwrap().map(|bytes| bytes.len()), Ok(TWO));
        }
        let counters = first.store.snapshot().counters;
        let expired = counters.leases_expired == 1;
        assert_eq!(state, abi::LEASE_GONE | if expired { abi::LEASE_EXPIRED } else { 0 });
        match extended {
            Ok(_) => assert!(!expired, "ended before its time"),
            Err(errno) => assert_eq!(errno, if expired { Errno::ETIME } else { Errno::ENOENT }),
        }
        Arc::into_inner(session).unwrap().close();
        first.close(&handle);
        advance(Duration::from_millis(1));
    });
}
