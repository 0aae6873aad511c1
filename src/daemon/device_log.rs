//! S21. Whatever a crash leaves of the writes that a store sends to its devices, the store that is opened from it has
//! all that was durable, byte for byte, and nothing that never was.
//!
//! A kill does not test this: what a killed daemon wrote is there, in order. So clients work on a store whose devices
//! keep a log, of writes, answers and flushes, and of what the clients did and were told. Then, for points of that log,
//! the devices are made as a crash at that moment may leave them: with all writes so far; without some that no flush
//! had covered, with parts of them, in any order. From each such image the store is opened and read to the last byte,
//! changed, and opened once more.
//!
//! `KVCACHEFS_TEST_CUTS` says how many images each test tries (0: all), `KVCACHEFS_TEST_SEED` which. Threads interleave
//! differently each time, so that the same seed makes the same steps, not the same log.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use parking_lot::Mutex;

use self::client::{Client, new_file};
use self::cuts::{Cut, each_cut};
use self::machine::{Entry, Image, Machine};
use self::model::{Found, Model, Thing};
use self::rig::{Rig, Setup, barrier, close, create, find, write};
use self::rng::Rng;

mod client;
mod crash;
mod cuts;
pub(super) mod machine;
mod model;
pub(super) mod rig;
pub(super) mod rng;

const MIB: u64 = 1 << 20;
/// What a recovered store needs for its new files.
const ROOM: u64 = 2 * MIB;
/// What an opening of two devices leaves in the log: six writes and nine flushes.
const ENTRIES_OF_OPENING: usize = 30;
/// Images that a test tries unless it is told otherwise.
const CUTS: usize = 120;

pub(super) fn number(key: &str, otherwise: usize) -> usize {
    std::env::var(key).map_or(otherwise, |text| text.parse().unwrap())
}

/// What a test records.
struct Plan {
    name: &'static str,
    lens: &'static [u64],
    evict: &'static str,
    clients: usize,
    steps: usize,
    /// Times that the daemon is killed, and once more while it opens what is there, before it goes on.
    kills: usize,
}

struct Recording {
    images: Vec<Image>,
    model: Model,
    log: Vec<Entry>,
    checkpoints: u64,
    evictions: u64,
}

fn record(plan: &Plan, dir: &Path, seed: u64) -> Recording {
    let setup = Setup::new(dir, plan.lens, plan.evict);
    let fresh = Machine::new(plan.lens.iter().map(|len| Image::blank(*len)).collect());
    Rig::open(&setup, &fresh).unwrap().stop();
    let images = fresh.images();
    let model = Model::new(plan.evict == "lru");
    let mut machine = Machine::recording(images.clone());
    let mut now = model.clone();
    let mut rng = Rng::new(seed);
    let (mut checkpoints, mut evictions) = (0, 0);
    for session in 0..=plan.kills {
        if session > 0 {
            machine = killed_while_opening(&setup, &machine, &mut rng);
        }
        let rig = Rig::open(&setup, &machine).unwrap();
        let what = format!("{}, seed {seed}, session {session}", plan.name);
        let found = rig.tree().unwrap_or_else(|why| panic!("{what}: {why}"));
        rig.check_accounts().and_then(|()| now.check(&found)).unwrap_or_else(|why| panic!("{what}: {why}"));
        now.adopt(&found, &mut new_file).into_iter().for_each(|mark| machine.mark(mark));
        let start = machine.logged();
        let last = session == plan.kills;
        let killed = std::thread::scope(|scope| {
            for at in 0..plan.clients {
                let seed = seed * 1000 + (session * plan.clients + at) as u64;
                let mut client = Client::new(rig.store(), &machine, &format!("c{at}"), seed, now.clone());
                scope.spawn(move || {
                    client.prepare().unwrap();
                    client.run(plan.steps);
                });
            }
            (!last).then(|| {
                let until = start + 30 + rng.below(plan.steps * 20);
                for _ in 0..30_000 {
                    let now = machine.logged();
                    if now >= until + 200 || (now >= until && (session % 2 == 1 || machine.flushes())) {
                        break;
                    }
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
                machine.kill(&mut rng)
            })
        });
        let counters = rig.store().snapshot().counters;
        checkpoints += counters.checkpoints;
        evictions += counters.evictions_l2;
        // Without a drain: what is on its way when the log ends is not sure.
        rig.stop();
        if let Some(killed) = killed {
            machine = killed;
        }
        now = model.clone();
        for entry in machine.log() {
            if let Entry::Mark(mark) = entry {
                now.apply(&mark);
            }
        }
    }
    Recording { images, model, log: machine.log(), checkpoints, evictions }
}

/// Has a daemon open the store, and kills it while it counts the opening.
fn killed_while_opening(setup: &Setup, machine: &Arc<Machine>, rng: &mut Rng) -> Arc<Machine> {
    let until = machine.logged() + rng.below(ENTRIES_OF_OPENING);
    let opened = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            while machine.logged() < until && !opened.load(Ordering::Acquire) {
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
            machine.kill(rng)
        });
        let rig = Rig::open(setup, machine);
        opened.store(true, Ordering::Release);
        rig.unwrap().stop();
        killer.join().unwrap()
    })
}

/// An image to be tried.
struct Job {
    images: Vec<Image>,
    model: Model,
    what: String,
}

fn recover(setup: &Setup, job: Job, rng: &mut Rng) -> Result<(), String> {
    let machine = Machine::new(job.images);
    let rig = Rig::open(setup, &machine)?;
    let result = rig
        .tree()
        .and_then(|found| rig.check_accounts().map(|()| found))
        .and_then(|found| job.model.check(&found).map(|()| found))
        .and_then(|found| go_on(&rig, found, rng));
    rig.stop();
    let expected = result?;
    let rig = Rig::open(setup, &machine)?;
    let again = rig.tree().and_then(|found| rig.check_accounts().map(|()| found));
    rig.stop();
    let again = again?;
    if again == expected {
        return Ok(());
    }
    let differs = expected.iter().find(|(path, found)| again.get(*path) != Some(found));
    let more = again.keys().find(|path| !expected.contains_key(*path));
    Err(format!("opened once more, it has not {differs:?}, and has {more:?}"))
}

/// The recovered store takes new files, replaces and removes old ones, and says what it has then.
fn go_on(
    rig: &Rig,
    mut found: BTreeMap<String, Found>,
    rng: &mut Rng,
) -> Result<BTreeMap<String, Found>, String> {
    let store = rig.store();
    let failed = |what: &str, errno| format!("recovered, it does not {what}: {errno}");
    let files: Vec<String> = found
        .iter()
        .filter(|(_, found)| matches!(found.thing, Thing::File(_)))
        .map(|(path, _)| path.clone())
        .collect();
    let remove = |path: &str| {
        let (dir, name) = rig::split(path);
        find(store, dir).and_then(|dir| store.unlink(dir, name.as_bytes(), &rig::caller()))
    };
    // One in any case, and more as long as there is no room.
    for path in &files {
        remove(path).map_err(|errno| failed("unlink", errno))?;
        found.remove(path);
        if store.statfs().free * 4096 > ROOM {
            break;
        }
    }
    let mut replaced: Vec<String> = vec!["new0".into(), "new1".into()];
    // Not where files are written in place: there it would be changed, not replaced.
    let left: Vec<&String> =
        files.iter().filter(|path| found.contains_key(*path) && !path.contains("/posix/")).collect();
    if !left.is_empty() {
        replaced.push(left[rng.below(left.len())].clone());
    }
    for path in replaced {
        let len = 1 + rng.below(400_000);
        let bytes = rng.bytes(len);
        let made = match found.get(&path) {
            Some(_) => rig::open(store, &path, libc::O_WRONLY | libc::O_TRUNC),
            None => create(store, &path, libc::O_EXCL),
        };
        let handle = made.map_err(|errno| failed("make a file", errno))?;
        write(store, &handle, 0, &bytes).map_err(|errno| failed("take a write", errno))?;
        close(store, &handle);
        let attributes = found.get(&path).map(|found| found.attributes.clone()).unwrap_or_default();
        found.insert(path, Found { thing: Thing::File(Arc::new(bytes)), attributes });
    }
    barrier(store).map_err(|errno| failed("drain", errno))?;
    Ok(found)
}

/// Tries images of a recording: all of them, or as many as wanted, of each kind the same number.
fn try_all(plan: &Plan, recording: &Recording, seed: u64, wanted: usize) {
    let (images, log) = (&recording.images, &recording.log[..]);
    let mut there = [0; 5];
    each_cut(images.clone(), recording.model.clone(), log, &mut |cut| {
        for variant in cut.variants(&mut Rng::new(0)) {
            there[cut.kind(&variant) as usize] += 1;
        }
    });
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let (sender, jobs) = sync_channel::<Job>(2 * workers);
    let jobs = Mutex::new(jobs);
    let failures = Mutex::new(Vec::new());
    let mut tried = [0; 5];
    std::thread::scope(|scope| {
        for worker in 0..workers {
            let (jobs, failures) = (&jobs, &failures);
            scope.spawn(move || {
                let dir = tempfile::tempdir().unwrap();
                // What is recovered must not be evicted: then it could not be compared.
                let setup = Setup::new(dir.path(), plan.lens, "none");
                let mut rng = Rng::new(seed + worker as u64);
                loop {
                    let job = jobs.lock().recv();
                    let Ok(job) = job else { return };
                    let what = job.what.clone();
                    if failures.lock().len() < 3
                        && let Err(why) = recover(&setup, job, &mut rng)
                    {
                        failures.lock().push(format!("{what}: {why}"));
                    }
                }
            });
        }
        let mut rng = Rng::new(seed);
        each_cut(images.clone(), recording.model.clone(), log, &mut |cut: &Cut| {
            for variant in cut.variants(&mut rng) {
                let kind = cut.kind(&variant) as usize;
                if wanted > 0 && rng.below(there[kind]) >= wanted / there.len() {
                    continue;
                }
                tried[kind] += 1;
                let what = cut.describe(&variant, log);
                let job = Job { images: cut.images(&variant), model: cut.model.clone(), what };
                sender.send(job).unwrap();
            }
        });
        drop(sender);
    });
    let failures = failures.into_inner();
    assert!(failures.is_empty(), "{}, seed {seed}: {}", plan.name, failures.join("\n"));
    let count = |is: fn(&Entry) -> bool| log.iter().filter(|entry| is(entry)).count();
    println!(
        "{}, seed {seed}: {} writes, {} flushes, {} kills, {} checkpoints, {} evictions; there recover {} of {} prefixes, \
         {} of {} images of torn checkpoints, {} of {} of openings, {} of {} of restarts and {} of {} others",
        plan.name,
        count(|entry| matches!(entry, Entry::Write(_))),
        count(|entry| matches!(entry, Entry::FlushEnds { .. })),
        count(|entry| matches!(entry, Entry::Killed { .. })),
        recording.checkpoints,
        recording.evictions,
        tried[0],
        there[0],
        tried[1],
        there[1],
        tried[2],
        there[2],
        tried[3],
        there[3],
        tried[4],
        there[4],
    );
}

fn run(plan: &Plan) {
    let seed = number("KVCACHEFS_TEST_SEED", 1) as u64;
    let dir = tempfile::tempdir().unwrap();
    let recording = record(plan, dir.path(), seed);
    // There is a checkpoint for each half of the journal's ring: after two it wraps.
    let (seen, wanted) =
        if recording.model.evicting { (recording.evictions, 1) } else { (recording.checkpoints, 2) };
    assert!(seen >= wanted, "{}: what it is about did not happen", plan.name);
    try_all(plan, &recording, seed, number("KVCACHEFS_TEST_CUTS", CUTS));
}

#[test]
fn every_prefix_and_torn_subset_of_what_two_clients_wrote_recovers() {
    run(&Plan {
        name: "two devices",
        lens: &[40 * MIB, 34 * MIB],
        evict: "none",
        clients: 2,
        steps: 90,
        kills: 0,
    });
}

#[test]
fn every_prefix_and_torn_subset_under_eviction_recovers() {
    run(&Plan { name: "a small L2", lens: &[20 * MIB], evict: "lru", clients: 2, steps: 110, kills: 0 });
}

#[test]
fn every_prefix_and_torn_subset_of_killed_daemons_recovers() {
    run(&Plan {
        name: "killed",
        lens: &[44 * MIB, 34 * MIB],
        evict: "none",
        clients: 2,
        steps: 40,
        kills: 3,
    });
}
