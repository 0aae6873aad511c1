//! The daemon killed while it writes: what was durable is there, byte for byte; nothing is there that never was whole.
//!
//! `KVCACHEFS_TEST_KILLS` is the number of kills, `KVCACHEFS_TEST_SEED` makes other ones.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Mount, Options, bytes, memory_only};

const WRITERS: usize = 4;
const NAMES: usize = 10;
/// The last name of a writer is where it builds files before it renames them.
const BUILD: usize = NAMES - 1;

struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// What a file holds. Versions differ in their seed, so also in their bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Version {
    seed: u64,
    len: usize,
    /// Written in place later: offset, seed, length.
    patches: Vec<(usize, u64, usize)>,
}

impl Version {
    fn content(&self) -> Vec<u8> {
        let mut content = bytes(self.seed, self.len);
        for &(at, seed, len) in &self.patches {
            content[at..at + len].copy_from_slice(&bytes(seed, len));
        }
        content
    }
}

/// What may be found under a name.
#[derive(Clone, Default)]
struct Name {
    /// What an fsync or a drain has confirmed, or a restart has found; `None` is no file.
    durable: Option<Version>,
    /// What has been done since, whether or not it got through.
    later: Vec<Option<Version>>,
}

impl Name {
    fn latest(&self) -> Option<&Version> {
        self.later.last().map_or(self.durable.as_ref(), Option::as_ref)
    }
    fn settle(&mut self) {
        if let Some(last) = self.later.pop() {
            self.durable = last;
            self.later.clear();
        }
    }
    fn may_be(&self, found: Option<&Version>) -> bool {
        found == self.durable.as_ref() || self.later.iter().any(|version| version.as_ref() == found)
    }
}

/// A writer, and what it knows of its files.
struct Writer {
    dir: PathBuf,
    rng: Rng,
    names: Vec<Name>,
    /// A durable file that was renamed: from, to, what it is, what was there before. It is in one of the two places.
    moved: Option<(usize, usize, Version, Option<Version>)>,
    next_seed: u64,
    /// Every version that was ever begun, to say what was found where it must not be.
    made: Vec<(usize, Version)>,
    crashed: bool,
}

impl Writer {
    fn new(at: usize, dir: PathBuf, seed: u64) -> Self {
        let names = vec![Name::default(); NAMES];
        let next_seed = (at as u64 + 1) << 32;
        Self { dir, rng: Rng::new(seed), names, moved: None, next_seed, made: Vec::new(), crashed: false }
    }

    fn path(&self, name: usize) -> PathBuf {
        self.dir.join(format!("n{name}"))
    }

    fn version(&mut self) -> Version {
        self.next_seed += 1;
        let len = match self.rng.below(10) {
            0..3 => 16 + self.rng.below(8000),
            3..7 => 16 + self.rng.below(300_000),
            7..9 => 256 << 10,
            _ => 1_000_000 + self.rng.below(1_000_000),
        };
        Version { seed: self.next_seed, len: len as usize, patches: Vec::new() }
    }

    /// Notes what is about to be done: it may get through although the call fails.
    fn note(&mut self, name: usize, version: Option<Version>) {
        if self.moved.as_ref().is_some_and(|(from, to, ..)| [*from, *to].contains(&name)) {
            self.moved = None;
        }
        self.made.extend(version.clone().map(|version| (name, version)));
        self.names[name].later.push(version);
    }

    fn settle(&mut self, name: usize) {
        if self.moved.as_ref().is_some_and(|(_, to, ..)| *to == name) {
            self.moved = None;
        }
        self.names[name].settle();
    }

    /// Writes a file as most programs do: open, several writes, close.
    fn write(&mut self, name: usize, version: &Version) -> io::Result<()> {
        let content = version.content();
        self.made.push((name, version.clone()));
        let mut file = File::create(self.path(name))?;
        for part in content.chunks(1 + self.rng.below(200_000) as usize) {
            file.write_all(part)?;
        }
        // From here on closing it may publish it.
        self.note(name, Some(version.clone()));
        if self.rng.chance(40) {
            file.sync_all()?;
            self.settle(name);
        }
        Ok(())
    }

    fn rename(&mut self, from: usize, to: usize) -> io::Result<()> {
        let version = self.names[from].latest().unwrap().clone();
        let settled = self.names[from].later.is_empty() && self.names[to].later.is_empty();
        let before = self.names[to].latest().cloned();
        self.note(to, Some(version.clone()));
        self.note(from, None);
        if settled {
            self.moved = Some((from, to, version, before));
        }
        fs::rename(self.path(from), self.path(to))
    }

    fn step(&mut self) -> io::Result<()> {
        let name = self.rng.below(BUILD as u64) as usize;
        let exists = self.names[name].latest().is_some();
        match self.rng.below(100) {
            0..35 => {
                let version = self.version();
                self.write(BUILD, &version)?;
                self.rename(BUILD, name)?;
            }
            35..50 => {
                let version = self.version();
                self.write(name, &version)?;
            }
            50..55 => {
                // Renamed before it is closed, then confirmed.
                let version = self.version();
                if self.names[BUILD].latest().is_some() {
                    self.note(BUILD, None);
                    fs::remove_file(self.path(BUILD))?;
                }
                let mut file = OpenOptions::new().write(true).create_new(true).open(self.path(BUILD))?;
                file.write_all(&version.content())?;
                self.note(name, Some(version));
                fs::rename(self.path(BUILD), self.path(name))?;
                file.sync_all()?;
                self.settle(name);
            }
            55..65 if exists => {
                let mut version = self.names[name].latest().unwrap().clone();
                let len = 1 + self.rng.below(version.len as u64) as usize;
                let at = self.rng.below((version.len - len + 1) as u64) as usize;
                self.next_seed += 1;
                version.patches.push((at, self.next_seed, len));
                let patch = bytes(self.next_seed, len);
                let file = OpenOptions::new().write(true).open(self.path(name))?;
                let cut = self.rng.below(len as u64) as usize;
                file.write_all_at(&patch[..cut], at as u64)?;
                file.write_all_at(&patch[cut..], (at + cut) as u64)?;
                self.note(name, Some(version));
                if self.rng.chance(40) {
                    file.sync_all()?;
                    self.settle(name);
                }
            }
            65..72 if exists => {
                self.note(name, None);
                fs::remove_file(self.path(name))?;
            }
            72..82 if exists => {
                let to = self.rng.below(BUILD as u64) as usize;
                if to != name {
                    self.rename(name, to)?;
                }
            }
            82..90 => {
                // A close that the kernel has not reported yet (RELEASE) is not covered by the directory's fsync.
                for name in (0..NAMES).filter(|&name| !self.names[name].later.is_empty()) {
                    if self.names[name].latest().is_some() {
                        File::open(self.path(name))?.sync_all()?;
                    }
                }
                File::open(&self.dir)?.sync_all()?;
                (0..NAMES).for_each(|name| self.settle(name));
            }
            _ => match fs::read(self.path(name)) {
                Ok(read) => {
                    let expected = self.names[name].latest().map(Version::content);
                    assert!(
                        expected.is_some_and(|bytes| bytes == read),
                        "{} reads wrong",
                        self.path(name).display()
                    );
                }
                Err(error) if !exists && error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            },
        }
        Ok(())
    }

    fn run(&mut self, steps: &AtomicU64, killed: &AtomicBool) {
        loop {
            if let Err(error) = self.step() {
                assert!(killed.load(Ordering::SeqCst), "{}: {error}", self.dir.display());
                self.crashed = true;
                return;
            }
            steps.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Compares what is there after a restart with what may be, and goes on from it.
    fn check(&mut self, what: &str) -> (u64, u64) {
        let mut there: HashMap<String, Vec<u8>> = HashMap::new();
        for entry in fs::read_dir(&self.dir).unwrap() {
            let entry = entry.unwrap();
            let content = fs::read(entry.path()).unwrap_or_else(|error| {
                let name = entry.file_name().into_string().unwrap()[1..].parse::<usize>().unwrap();
                let (durable, later) = (&self.names[name].durable, &self.names[name].later);
                panic!("{what}: {entry:?}: {error}; durable was {durable:?}, then {later:?}")
            });
            there.insert(entry.file_name().into_string().unwrap(), content);
        }
        let pages = there.values().map(|content| content.len().div_ceil(4096) as u64).sum();
        let files = there.len() as u64;
        let mut found = Vec::new();
        for (at, name) in self.names.iter().enumerate() {
            let content = there.remove(&format!("n{at}"));
            let known = name.durable.iter().chain(name.later.iter().flatten());
            let version = content.as_ref().map(|content| {
                known.clone().find(|version| version.len == content.len() && version.content() == *content)
            });
            if version == Some(None) {
                let content = content.unwrap();
                let is = self.made.iter().rev().find(|(_, version)| {
                    let whole = version.content();
                    let shared = whole.len().min(content.len()).min(8);
                    whole[..shared] == content[..shared]
                });
                let differs: Vec<_> =
                    known.clone().map(|version| parts_that_differ(&content, &version.content())).collect();
                panic!(
                    "{what}: n{at} of {} has {} bytes that are no version of it, but of {is:?}; it differs from each at {differs:?}; durable was {:?}, then {:?}",
                    self.dir.display(),
                    content.len(),
                    name.durable,
                    name.later
                );
            }
            let version = version.flatten().cloned();
            assert!(
                name.may_be(version.as_ref()),
                "{what}: n{at} of {} is {version:?}; durable was {:?}, then {:?}",
                self.dir.display(),
                name.durable,
                name.later
            );
            found.push(version);
        }
        assert!(there.is_empty(), "{what}: nobody made {:?}", there.keys());
        if let Some((from, to, version, before)) = self.moved.take() {
            let pair = (found[from].as_ref(), found[to].as_ref());
            let either = [(Some(&version), before.as_ref()), (None, Some(&version))];
            assert!(
                either.contains(&pair),
                "{what}: {from} renamed to {to} is torn: {pair:?}, not {either:?}"
            );
        }
        for (name, version) in self.names.iter_mut().zip(found) {
            *name = Name { durable: version, later: Vec::new() };
        }
        (files, pages)
    }
}

/// Where two contents differ, as offset and length, a few equal bytes between two differing ones taken in.
fn parts_that_differ(left: &[u8], right: &[u8]) -> Vec<(usize, usize)> {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for at in (0..left.len().min(right.len())).filter(|&at| left[at] != right[at]) {
        match parts.last_mut() {
            Some((from, len)) if at - (*from + *len) < 16 => *len = at + 1 - *from,
            _ => parts.push((at, 1)),
        }
    }
    parts.truncate(8);
    parts
}

fn number(key: &str, otherwise: u64) -> u64 {
    std::env::var(key).map_or(otherwise, |text| text.parse().unwrap())
}

/// Most that recovery may read: both headers, a checkpoint of one part, the log, and what is looked through behind it.
const RECOVERY_MAX: u64 = 8192 + (1 << 20) + (4 << 20) + (4 << 20);

#[test]
fn what_was_durable_survives_every_kill_and_nothing_else_is_there() {
    let kills = number("KVCACHEFS_TEST_KILLS", if common::mode() == common::Mode::Auto { 20 } else { 6 });
    let seed = number("KVCACHEFS_TEST_SEED", 1);
    // A busy machine shall not make a writer miss its own file while that is being published.
    let mut mount = Mount::with(Options::new(96, 192).arg("--publish-wait").arg("5s"));
    let mut writers: Vec<Writer> = (0..WRITERS)
        .map(|at| Writer::new(at, mount.at(&format!("w{at}")), seed * 1000 + at as u64))
        .collect();
    make_dirs(&mount, &writers);
    let mut rng = Rng::new(seed);
    let (mut checkpoints, mut crashed, mut survived) = (0, 0, 0);
    for round in 0..kills {
        let what = format!("seed {seed}, kill {round}");
        let (steps, killed) = (AtomicU64::new(0), AtomicBool::new(false));
        let wanted = 4 + rng.below(150);
        let pause = rng.below(3000);
        std::thread::scope(|scope| {
            let (steps, killed) = (&steps, &killed);
            let running: Vec<_> =
                writers.iter_mut().map(|writer| scope.spawn(|| writer.run(steps, killed))).collect();
            while steps.load(Ordering::Relaxed) < wanted && !running.iter().any(|thread| thread.is_finished())
            {
                std::thread::yield_now();
            }
            checkpoints += mount.stat("checkpoints");
            // Anywhere within a step, not always at its end.
            let until = std::time::Instant::now() + std::time::Duration::from_micros(pause);
            while std::time::Instant::now() < until {
                std::hint::spin_loop();
            }
            killed.store(true, Ordering::SeqCst);
            mount.kill();
        });
        assert!(writers.iter().all(|writer| writer.crashed), "{what}: somebody did not notice");
        crashed += writers
            .iter()
            .map(|writer| writer.names.iter().map(|name| name.later.len()).sum::<usize>())
            .sum::<usize>();
        mount.start();
        if memory_only() {
            let left: Vec<_> = fs::read_dir(mount.path()).unwrap().collect();
            assert!(left.is_empty(), "{what}: {left:?}");
            writers.iter_mut().for_each(|writer| writer.names.fill_with(Name::default));
            make_dirs(&mount, &writers);
            continue;
        }
        let read = mount.stat("recovery_read_bytes");
        assert!((4096..=RECOVERY_MAX).contains(&read), "{what}: recovery read {read} bytes");
        let (mut files, mut pages) = (0, 0);
        for writer in &mut writers {
            let (some, taken) = writer.check(&what);
            files += some;
            pages += taken;
        }
        survived += files;
        assert_eq!(mount.stat("files"), files, "{what}");
        mount.wait_for("l2_used_bytes", |used| used == pages * 4096);
        let dropped: Vec<_> =
            mount.events().lines().filter(|line| line.contains(" dropped ")).map(str::to_owned).collect();
        assert!(dropped.iter().all(|line| line.contains("a newer version")), "{what}: {dropped:?}");
        mount.check_bounds();
        writers.iter_mut().for_each(|writer| writer.crashed = false);
    }
    if !memory_only() {
        assert!(
            crashed > 0 && survived > 0,
            "the kills met nothing: {crashed} in doubt, {survived} survived"
        );
        println!(
            "{kills} kills: {crashed} versions in doubt, {survived} files found, {checkpoints} checkpoints"
        );
    }
    mount.restart();
}

fn make_dirs(mount: &Mount, writers: &[Writer]) {
    for writer in writers {
        fs::create_dir(&writer.dir).unwrap();
    }
    sync(mount.path());
}

fn sync(dir: &Path) {
    File::open(dir).unwrap().sync_all().unwrap();
}
