//! S11, S22, S27. On a device that is nearly full, a file holds what was written to it, also after a write, a truncation
//! or an fallocate that was refused, or that had to wait in the midst of it; what such a change had got is given back; and
//! what an fsync has answered for is there after a crash.
//!
//! Each round is the life of a store that has a few MiB left. A client changes a few files, and reads them after each
//! error; meanwhile transfers are held up and L1 drops what it may. Now and then, when nothing is under way, the accounts
//! have to add up, and another daemon looks at what a crash at that moment would leave.
//!
//! `KVCACHEFS_TEST_ROUNDS` says how many rounds, `KVCACHEFS_TEST_SEED` which. Threads interleave differently each time, so
//! that the same seed makes the same steps as long as they meet the same errors.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use self::ballast::Ballast;
use self::client::Client;
use self::disturbance::Disturbance;
use super::device_log::number;
use super::device_log::rng::Rng;
use super::tests::Rig;
use crate::l2::Class;

mod accounts;
mod ballast;
mod change;
mod client;
mod crash;
mod disturbance;
mod file;
mod readers;

const MIB: usize = 1 << 20;
/// Rounds of each test unless it is told otherwise.
const ROUNDS: usize = 16;
/// Most of a round is waiting.
const ROUNDS_AT_A_TIME: usize = 4;
const STEPS: usize = 250;
/// What a request waits at most, so that many do.
const REQUEST_DEADLINE: Duration = Duration::from_millis(150);
const FSYNC_DEADLINE: Duration = Duration::from_secs(40);
/// Room for a few blocks of 256 KiB besides those of one write.
const SMALL_DIRTY_LIMIT_PAGES: u64 = 256 + 8 * 64;
/// Classes of transfers that are held up, by how often.
const HELD_UP: [Class; 4] = [Class::WriteBack, Class::Demand, Class::WriteBack, Class::Promotion];

/// What there was to look at.
#[derive(Default, Debug)]
struct Seen {
    refused: AtomicUsize,
    compared: AtomicUsize,
    rests: AtomicUsize,
    crashes: AtomicUsize,
}

/// One life of a store.
struct Round {
    rig: Rig,
    disturbance: Disturbance,
    evicting: bool,
    /// A file of this size may just fit, or just not.
    longest: usize,
    /// The only device there is.
    device: Option<PathBuf>,
}

fn start(dir: &Path, rng: &mut Rng, devices: usize, evicting: bool) -> Rig {
    let slab_file_max = ["512KiB", "4MiB", "16MiB"][rng.below(3)];
    let evict = if evicting { "lru" } else { "none" };
    let mut options = format!(
        "l1=64MiB,dirty_limit=32MiB,slab-file-max={slab_file_max},small-file-max=64KiB,evict={evict}"
    );
    for at in 0..devices {
        options += &format!(",l2={}:{}MiB", device_path(dir, at).display(), 20 + rng.below(20));
    }
    Rig::with(&options)
}

fn device_path(dir: &Path, at: usize) -> PathBuf {
    dir.join(format!("device{at}"))
}

fn round(seed: u64, seen: &Seen) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(seed);
    let evicting = rng.percent(40);
    let devices = 1 + usize::from(rng.percent(30));
    let rig = start(dir.path(), &mut rng, devices, evicting);
    let left: Vec<usize> = (0..devices).map(|_| MIB + rng.below(6 * MIB)).collect();
    let ballast = Ballast::fill(rig.store(), &left, !evicting || rng.percent(60));
    let small_dirty_limit = rng.percent(50);
    rig.store().with(|core| {
        core.settings.request_deadline = REQUEST_DEADLINE;
        core.settings.fsync_deadline = FSYNC_DEADLINE;
        if small_dirty_limit {
            core.settings.dirty_limit_pages = SMALL_DIRTY_LIMIT_PAGES;
        }
    });
    let round = Round {
        rig,
        disturbance: Disturbance::default(),
        evicting,
        longest: left.iter().max().unwrap() * 9 / 8,
        device: (devices == 1).then(|| device_path(dir.path(), 0)),
    };
    let disturbed = rng.percent(70);
    let result = std::thread::scope(|scope| {
        let _until_then = round.disturbance.ends();
        if disturbed {
            let rng = Rng::new(seed + 1);
            scope.spawn(|| round.disturbance.go_on(&round.rig, rng, &HELD_UP));
        }
        Client::new(&round, rng, seen).run(STEPS)
    });
    let result = result.and_then(|()| {
        ballast.remove(round.rig.store());
        accounts::check_empty(round.rig.store())
    });
    round.rig.stop();
    result
}

/// Plays rounds, several at a time, until one fails.
fn play(rounds: usize, round: impl Fn(u64) -> Result<(), String> + Sync) {
    let seed = number("KVCACHEFS_TEST_SEED", 1) as u64 * 100_000;
    let (next, failed) = (AtomicU64::new(seed), Mutex::new(None));
    let play_some = || {
        loop {
            let now = next.fetch_add(1, Ordering::Relaxed);
            if now >= seed + rounds as u64 || failed.lock().is_some() {
                return;
            }
            if let Err(why) = round(now) {
                failed.lock().get_or_insert(format!("round {}: {why}", now - seed));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..ROUNDS_AT_A_TIME {
            scope.spawn(play_some);
        }
    });
    if let Some(why) = failed.into_inner() {
        panic!("seed {}, {why}", seed / 100_000);
    }
}

#[test]
fn files_hold_what_was_written_whatever_is_refused() {
    let rounds = number("KVCACHEFS_TEST_ROUNDS", ROUNDS);
    let seen = Seen::default();
    play(rounds, |seed| round(seed, &seen));
    let counts = [&seen.refused, &seen.compared, &seen.rests, &seen.crashes];
    // How often the devices come to rest depends on how fast they are beside everything else.
    let enough = counts.iter().all(|count| count.load(Ordering::Relaxed) > rounds / 8);
    assert!(enough, "too little to look at: {seen:?} in {rounds} rounds");
}
