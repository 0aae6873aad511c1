//! S11. Who reads a file that is overwritten on a nearly full device sees what was written to it before or what is being
//! written, never the zeros of memory that was got for a block and not filled yet.
//!
//! No zero is ever written to it. One client overwrites parts of it, often several whole blocks, which need not be read
//! back for that; others read it, by way of L1 and around it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::disturbance::{Disturbance, SetWhenDropped};
use super::{FSYNC_DEADLINE, REQUEST_DEADLINE, play, start};
use crate::daemon::device_log::number;
use crate::daemon::device_log::rig::{answer, close, create, open, read_part, write};
use crate::daemon::device_log::rng::Rng;
use crate::daemon::tests::Rig;
use crate::l2::Class;
use crate::store::hot::{BLOCK, BLOCK_PAGES};
use crate::store::{Handle, Store};

const BLOCK_LEN: usize = BLOCK as usize;
/// Rounds of the test unless it is told otherwise.
const ROUNDS: usize = 8;
const STEPS: usize = 300;
const READERS: u64 = 2;
const NAME: &str = "file";
const REPORTED: usize = 20;

struct Shared<'a> {
    store: &'a Arc<Store>,
    size: usize,
    over: AtomicBool,
    wrong: Mutex<Option<String>>,
    reads: &'a AtomicUsize,
}

impl Shared<'_> {
    fn wrong(&self, what: String) {
        self.wrong.lock().get_or_insert(what);
        self.over.store(true, Ordering::Release);
    }

    fn read(&self, mut rng: Rng, flags: i32) {
        while !self.over.load(Ordering::Acquire) {
            let Ok(handle) = open(self.store, NAME, libc::O_RDONLY | flags) else { continue };
            for _ in 0..rng.below(30) {
                let (at, len) = (rng.below(self.size), 1 + rng.below(700_000));
                self.reads.fetch_add(1, Ordering::Relaxed);
                match read_part(self.store, &handle, at, len) {
                    Ok(bytes) => {
                        if let Some(zero) = bytes.iter().position(|byte| *byte == 0) {
                            self.wrong(format!("a read of {len} bytes at {at} has a zero at {}", at + zero));
                        }
                    }
                    // It had to wait for too long.
                    Err(Errno::EIO) => {}
                    Err(errno) => self.wrong(format!("a read fails with {errno}")),
                }
            }
            close(self.store, &handle);
        }
    }
}

/// Who changes the file.
struct Writer<'a> {
    shared: &'a Shared<'a>,
    rng: Rng,
    handle: Option<Handle>,
    log: Vec<String>,
}

impl Writer<'_> {
    fn run(&mut self) {
        for _ in 0..STEPS {
            if self.shared.over.load(Ordering::Acquire) {
                break;
            }
            self.step();
        }
        self.close();
    }

    fn step(&mut self) {
        let store = self.shared.store;
        let Some(handle) = &self.handle else {
            self.handle = open(store, NAME, libc::O_RDWR).ok();
            return;
        };
        match self.rng.below(20) {
            0..2 => self.close(),
            2 => {
                let done: Result<(), Errno> = answer(|reply| store.fsync(handle, reply));
                self.log.push(format!("fsync => {done:?}"));
            }
            3..12 => {
                let at = self.rng.below(self.shared.size / BLOCK_LEN) * BLOCK_LEN;
                self.write(at);
            }
            _ => {
                let at = self.rng.below(self.shared.size);
                self.write(at);
            }
        }
    }

    fn write(&mut self, at: usize) {
        let len = (1 + self.rng.below(900_000)).min(self.shared.size - at);
        let byte = 1 + self.rng.below(255) as u8;
        let done = write(self.shared.store, self.handle.as_ref().unwrap(), at, &vec![byte; len]);
        self.log.push(format!("write {len} bytes at {at} => {done:?}"));
    }

    fn close(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.log.push("close".to_owned());
            close(self.shared.store, &handle);
        }
    }
}

/// A file that is durable, private until then or not.
fn make(store: &Arc<Store>, size: usize, flags: i32) {
    let handle = create(store, NAME, flags).unwrap();
    write(store, &handle, 0, &vec![1; size]).unwrap();
    assert_eq!(answer(|reply| store.fsync(&handle, reply)), Ok(()));
    close(store, &handle);
}

/// Leaves room for `left` blocks, and credit for a few.
fn make_scarce(rig: &Rig, left: u64) {
    let block = BLOCK_PAGES;
    rig.store().with(|core| {
        core.settings.request_deadline = REQUEST_DEADLINE;
        core.settings.fsync_deadline = FSYNC_DEADLINE;
        core.settings.dirty_limit_pages = 10 * block;
        let space = core.space.on(0);
        space.reserved += space.free() - left * block;
    });
}

fn round(seed: u64, reads: &AtomicUsize) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(seed);
    let rig = start(dir.path(), &mut rng, 1, false);
    let size = 5 * BLOCK_LEN + 1000 + rng.below(200_000);
    make(rig.store(), size, if rng.percent(50) { libc::O_EXCL } else { 0 });
    make_scarce(&rig, 6 + rng.below(10) as u64);
    let shared =
        Shared { store: rig.store(), size, over: AtomicBool::new(false), wrong: Mutex::new(None), reads };
    let disturbance = Disturbance::default();
    let mut writer = Writer { shared: &shared, rng, handle: None, log: Vec::new() };
    std::thread::scope(|scope| {
        for at in 0..READERS {
            let (shared, rng) = (&shared, Rng::new(seed * READERS + at));
            scope.spawn(move || shared.read(rng, if at % 2 == 0 { 0 } else { libc::O_DIRECT }));
        }
        let _until_then = (SetWhenDropped(&shared.over), disturbance.ends());
        scope.spawn(|| disturbance.go_on(&rig, Rng::new(seed + 1), &[Class::WriteBack, Class::Promotion]));
        writer.run();
    });
    let log = std::mem::take(&mut writer.log);
    let wrong = shared.wrong.lock().take();
    rig.stop();
    match wrong {
        None => Ok(()),
        Some(what) => Err(format!("{what} after {:#?}", &log[log.len().saturating_sub(REPORTED)..])),
    }
}

#[test]
fn readers_of_a_file_that_is_overwritten_see_no_zeros() {
    let reads = AtomicUsize::new(0);
    let rounds = number("KVCACHEFS_TEST_ROUNDS", ROUNDS);
    play(rounds, |seed| round(seed, &reads));
    let reads = reads.into_inner();
    assert!(reads > 20 * rounds, "only {reads} reads in {rounds} rounds");
}
