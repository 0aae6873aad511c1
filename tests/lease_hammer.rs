//! Whatever is going on, an answer `l1` with a lease is true until it is given back.
//!
//! Promotions, evictions, new versions and writes in place go on without a pause while windows are classified and leased.
//! For each lease all of that stops twice, at once and after some more of it, and what is leased is read: nothing of it
//! may come from a device, and nothing of it may have changed. `KVCACHEFS_TEST_ROUNDS` is the number of leases.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use client::Watchdog;
use common::ctl::{Ctl, node_of};
use common::run::wait_until;
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi;
use nix::errno::Errno;
use nix::libc;

const FILES: u64 = 6;
const SIZE: usize = 2 << 20;
const BLOCK: usize = 256 << 10;

/// A version of a file begins with what its bytes are made of.
fn version(seed: u64) -> Vec<u8> {
    let mut content = bytes(seed, SIZE);
    content[..8].copy_from_slice(&seed.to_ne_bytes());
    content
}

fn is_whole(content: &[u8]) -> bool {
    content.len() == SIZE && version(u64::from_ne_bytes(content[..8].try_into().unwrap())) == content
}

struct Hammer {
    mount: Mount,
    /// Held by each of those who disturb, for one thing at a time; whoever wants peace takes it alone.
    peace: RwLock<()>,
    over: AtomicBool,
    seed: AtomicU64,
    refused: AtomicU64,
}

impl Hammer {
    fn next(&self) -> u64 {
        self.seed.fetch_add(1, Ordering::Relaxed)
    }

    fn keep_doing(&self, what: impl Fn(u64)) {
        let mut dice = self.next() | 1;
        while !self.over.load(Ordering::Relaxed) {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            let _disturbs = self.peace.read().unwrap();
            what(dice >> 8);
        }
    }

    /// Files come and go: L1 and L2 are never large enough for all.
    fn fill(&self) {
        self.keep_doing(|dice| {
            fs::write(self.mount.at(&format!("filler{}", dice % 40)), vec![7; 4 << 20]).unwrap()
        });
    }

    /// New versions, by rename: what is still being written under a file's own name, this process would find there.
    fn replace(&self) {
        self.keep_doing(|dice| {
            fs::write(self.mount.at("new"), version(self.next())).unwrap();
            // It may have been evicted already.
            let _ = fs::rename(self.mount.at("new"), self.mount.at(&format!("f{}", dice % FILES)));
            std::thread::sleep(Duration::from_millis(5));
        });
    }

    /// Writes in place, which do not wait. The handle is kept: else each write would make another version.
    fn overwrite(&self) {
        let open = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK);
            options.open(self.mount.at("slots")).unwrap()
        };
        let file = std::cell::RefCell::new(open());
        self.keep_doing(|dice| {
            let at = (dice % (SIZE / BLOCK) as u64) * BLOCK as u64;
            match file.borrow().write_at(&[dice as u8; BLOCK], at) {
                Ok(written) => assert_eq!(written, BLOCK),
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => panic!("a write in place: {error}"),
            }
            if dice % 50 == 0 {
                file.replace(open());
            }
        });
    }

    fn read_all(&self) {
        self.keep_doing(|dice| {
            if let Ok(content) = fs::read(self.mount.at(&format!("f{}", dice % FILES))) {
                assert!(is_whole(&content), "a mix of versions");
            }
            // Seldom enough for them to leave L1 in between.
            std::thread::sleep(Duration::from_millis(dice % 100));
        });
    }

    /// Reads what is leased, in peace, without anything from a device. The bytes of each, or none where the name leads to
    /// another version by now.
    fn check(&self, ctl: &Ctl, lease: u64, names: &[String]) -> Vec<Option<Vec<u8>>> {
        let _peace = self.peace.write().unwrap();
        let _ = self.mount.wait_for("promotions_in_flight", |count| count == 0);
        let (state, leased) = ctl.query(lease).unwrap();
        assert_eq!(state.state, 0);
        let nodes: Vec<_> = leased.iter().map(|range| common::ctl::node(range.node)).collect();
        let (head, states) = ctl.classify(&nodes);
        assert_eq!((head.tier, head.failed), (abi::TIER_L1, 0), "what is leased is not in L1: {states:?}");
        let reads = || (self.mount.stat("read_l2_bytes"), self.mount.stat("read_around_bytes"));
        let before = reads();
        let content = |(name, range): (&String, &abi::Leased)| {
            let file = File::open(self.mount.at(name)).ok()?;
            if node_of(&file) != range.node {
                return None;
            }
            let mut content = vec![0; range.length as usize];
            file.read_exact_at(&mut content, range.offset).unwrap();
            Some(content)
        };
        let contents = names.iter().zip(&leased).map(content).collect();
        assert_eq!(reads(), before, "read from a device");
        contents
    }
}

#[test]
fn what_was_leased_in_l1_is_read_from_l1_until_it_is_released() {
    let mount = Mount::with(Options::new(64, 128).arg("--request-deadline=60s"));
    let _watchdog = Watchdog::within(&mount, Duration::from_secs(600));
    let rounds: u64 = std::env::var("KVCACHEFS_TEST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(25);
    let hammer = Hammer {
        mount,
        peace: RwLock::new(()),
        over: AtomicBool::new(false),
        seed: AtomicU64::new(1 << 32),
        refused: AtomicU64::new(0),
    };
    let mut names: Vec<String> = (0..FILES).map(|at| format!("f{at}")).collect();
    for name in &names {
        fs::write(hammer.mount.at(name), version(hammer.next())).unwrap();
    }
    names.push("slots".to_owned());
    fs::write(hammer.mount.at("slots"), b"").unwrap();
    let slots = OpenOptions::new().write(true).open(hammer.mount.at("slots")).unwrap();
    slots.write_all_at(&[1; SIZE], 0).unwrap();
    drop(slots);
    let (mut leases, mut same, mut denied) = (0, 0, 0);
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&hammer.over);
        scope.spawn(|| hammer.fill());
        scope.spawn(|| hammer.fill());
        scope.spawn(|| hammer.replace());
        scope.spawn(|| hammer.overwrite());
        scope.spawn(|| hammer.read_all());
        let ctl = Ctl::new(&hammer.mount);
        let slots = ctl.intern(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let mut first = 0;
        while leases < rounds {
            // A window of three that moves.
            first = (first + 1) % names.len();
            let window: Vec<usize> = (0..3).map(|at| (first + at) % names.len()).collect();
            let ranges: Vec<_> = window.iter().map(|&at| common::ctl::named(slots[at])).collect();
            let window: Vec<String> = window.iter().map(|&at| names[at].clone()).collect();
            let (head, states) = ctl.acquire(&ranges, 1, 0);
            if head.lease == 0 {
                let why = Errno::from_raw(head.lease_errno);
                assert!([Errno::EAGAIN, Errno::ENOENT].contains(&why), "{why} {head:?} {states:?}");
                denied += 1;
                for name in &window {
                    let _ = fs::read(hammer.mount.at(name));
                }
                continue;
            }
            leases += 1;
            let at_first = hammer.check(&ctl, head.lease, &window);
            std::thread::sleep(Duration::from_millis(30));
            let later = hammer.check(&ctl, head.lease, &window);
            for (name, (one, other)) in window.iter().zip(at_first.iter().zip(&later)) {
                let (Some(one), Some(other)) = (one, other) else { continue };
                same += 1;
                assert!(one == other, "{name} has changed while it was leased");
                assert!(name == "slots" || is_whole(one), "{name} is a mix of versions");
            }
            ctl.release(head.lease).unwrap();
        }
        drop(stop);
    });
    eprintln!(
        "{leases} leases, {denied} denied, {same} compared, {} writes refused",
        hammer.refused.into_inner()
    );
    assert!(same > 0, "each version was replaced before it could be compared");
    let mount = hammer.mount;
    wait_until("no lease is left", || mount.stat("leases") == 0);
    assert_eq!(mount.stat("leased_bytes"), 0);
    assert!(memory_only() || mount.stat("evictions_l1") > 0);
    mount.check_quiet();
}

/// Ends the others also when this one fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
