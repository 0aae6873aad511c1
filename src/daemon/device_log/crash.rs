//! One client that writes, renames, rewrites and removes a few names without a pause, with drains that nobody waits for,
//! and a daemon that is killed in the midst of it: many short lives instead of a long one.
//!
//! Names and what they lead to are looked at together here, which the larger model does name by name: after a crash each
//! name leads to the file that it led to at some moment since the last answered drain, which holds what it held at some
//! such moment, since a rename may overtake bytes; a file that was there all that time is still there, and none is there
//! twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::errno::Errno;

use super::machine::{Image, Machine};
use super::model::Thing;
use super::rig::{Rig, Setup, answer, barrier, caller, close, create, find, open, rename, split, write};
use super::rng::Rng;
use super::{MIB, number};
use crate::store::hot::BLOCK;
use crate::store::{Handle, Store};

const PAGE: usize = 4096;
const BLOCK_PAGES: usize = BLOCK as usize / PAGE;
/// Lives of a daemon that the test looks at unless it is told otherwise.
const LIVES: usize = 600;
const NAMES: [&str; 7] = ["a", "b", "c", "d0/a", "d0/b", "d1/a", "d1/b"];

/// Who wrote each page.
type Content = Vec<u32>;

/// A file, whatever it is called.
#[derive(Clone)]
struct File {
    number: u32,
    /// What may be found in it: the last version that was closed.
    whole: Content,
    /// What it has held since an fsync while somebody writes to it, until the drain after that: each block is stored by
    /// itself then.
    parts: Vec<Content>,
}

impl File {
    fn may_hold(&self, found: &Content) -> bool {
        if self.parts.is_empty() || *found == self.whole {
            return *found == self.whole;
        }
        let blocks = found.len().div_ceil(BLOCK_PAGES);
        self.parts.iter().any(|part| part.len() == found.len())
            && (0..blocks).all(|block| {
                let of = |content: &Content| {
                    content.iter().skip(block * BLOCK_PAGES).take(BLOCK_PAGES).copied().collect::<Content>()
                };
                let here = of(found);
                self.parts.iter().any(|part| {
                    let there = of(part);
                    there.len() >= here.len() && there[..here.len()] == here
                })
            })
    }
}

/// What each name leads to.
type Names = BTreeMap<&'static str, File>;

struct Writer {
    handle: Handle,
    file: u32,
    content: Content,
    changed: bool,
    synced: Vec<Content>,
}

/// A version that nobody else sees yet.
struct Private {
    handle: Handle,
    /// Where it will appear. Until then this client leaves the name alone: to it, it leads here.
    path: &'static str,
    number: u32,
    content: Content,
}

struct Client {
    store: Arc<Store>,
    rng: Rng,
    writers: Vec<Writer>,
    privates: Vec<Private>,
    /// Files whose fsync was answered, and after which state.
    synced: Vec<(u32, usize)>,
    names: Names,
    /// After each step.
    states: Vec<Names>,
    log: Vec<String>,
    /// The last state that a drain has answered for.
    drained: Arc<AtomicUsize>,
    last: u32,
}

type Done = Result<(), Errno>;

fn page(file: u32, version: u32) -> Vec<u8> {
    [file, version].map(u32::to_le_bytes).concat().repeat(PAGE / 8)
}

fn pages(file: u32, versions: &[u32]) -> Vec<u8> {
    versions.iter().flat_map(|version| page(file, *version)).collect()
}

/// Whose file these are the bytes of, and who wrote its pages.
fn parse(bytes: &[u8]) -> Result<(u32, Content), String> {
    let mut file = None;
    let mut content = Vec::new();
    for (at, found) in bytes.chunks(PAGE).enumerate() {
        let [a, b] = [0, 4].map(|from| u32::from_le_bytes(found[from..from + 4].try_into().unwrap()));
        if found != page(a, b) {
            return Err(format!("page {at} is nobody's"));
        }
        if *file.get_or_insert(a) != a {
            return Err(format!("page {at} is of another file"));
        }
        content.push(b);
    }
    file.map(|file| (file, content)).ok_or_else(|| "it is empty".to_owned())
}

impl Client {
    fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    fn is_free(&self, path: &str) -> bool {
        self.privates.iter().all(|private| private.path != path)
    }

    fn some_name(&mut self) -> &'static str {
        loop {
            let name = NAMES[self.rng.below(NAMES.len())];
            if self.is_free(name) {
                return name;
            }
        }
    }

    fn existing(&mut self) -> Option<&'static str> {
        let all: Vec<_> = self.names.keys().copied().filter(|path| self.is_free(path)).collect();
        (!all.is_empty()).then(|| all[self.rng.below(all.len())])
    }

    fn file_mut(&mut self, number: u32) -> Option<&mut File> {
        self.names.values_mut().find(|file| file.number == number)
    }

    fn count(&mut self) -> usize {
        match self.rng.below(4) {
            0 => 1,
            1 => 63,
            2 => 1 + self.rng.below(80),
            _ => 65 + self.rng.below(20),
        }
    }

    fn create(&self, path: &str) -> Result<Handle, Errno> {
        if self.names.contains_key(path) {
            open(&self.store, path, libc::O_WRONLY | libc::O_TRUNC)
        } else {
            create(&self.store, path, libc::O_EXCL)
        }
    }

    fn make(&mut self, path: &'static str, aside: bool) -> Done {
        let (number, version) = (self.next(), self.next());
        let whole = vec![version; self.count()];
        let handle = self.create(if aside { "aside" } else { path })?;
        write(&self.store, &handle, 0, &pages(number, &whole))?;
        close(&self.store, &handle);
        if aside {
            rename(&self.store, "aside", path)?;
        }
        self.names.insert(path, File { number, whole, parts: Vec::new() });
        self.log.push(format!(
            "{} {path}: file {number} version {version}",
            if aside { "move in" } else { "make" }
        ));
        Ok(())
    }

    /// Begins a version, goes on with it, moves it, or closes it.
    fn build(&mut self) -> Done {
        let (number, version) = (self.next(), self.next());
        if self.privates.is_empty() || (self.privates.len() < 3 && self.rng.percent(30)) {
            let path = self.some_name();
            let handle = self.create(path)?;
            write(&self.store, &handle, 0, &page(number, version))?;
            self.log.push(format!("begin {path}: file {number} version {version}"));
            self.privates.push(Private { handle, path, number, content: vec![version] });
            return Ok(());
        }
        let at = self.rng.below(self.privates.len());
        match self.rng.below(4) {
            0 => {
                let to = self.some_name();
                rename(&self.store, self.privates[at].path, to)?;
                self.log.push(format!("rename unfinished {} to {to}", self.privates[at].path));
                self.privates[at].path = to;
            }
            1 => {
                let private = &mut self.privates[at];
                let more = vec![version; 1 + self.rng.below(70)];
                let from = private.content.len();
                if from > 60 {
                    return Ok(());
                }
                write(&self.store, &private.handle, from * PAGE, &pages(private.number, &more))?;
                private.content.extend(more);
            }
            _ => {
                let Private { handle, path, number, content } = self.privates.swap_remove(at);
                close(&self.store, &handle);
                self.log.push(format!("finish {path}: file {number}"));
                self.names.insert(path, File { number, whole: content, parts: Vec::new() });
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Done {
        let Some(path) = self.existing() else { return Ok(()) };
        let file = self.names[path].clone();
        if self.writers.iter().any(|writer| writer.file == file.number) {
            return Ok(());
        }
        let handle = open(&self.store, path, libc::O_WRONLY)?;
        self.log.push(format!("open {path}: file {}", file.number));
        self.writers.push(Writer {
            handle,
            file: file.number,
            content: file.whole,
            changed: false,
            synced: Vec::new(),
        });
        Ok(())
    }

    fn change(&mut self) -> Done {
        if self.writers.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.writers.len());
        let version = self.next();
        let len = self.writers[at].content.len();
        let from = if self.rng.percent(50) { 0 } else { self.rng.below(len) };
        let to = (from + 1 + self.rng.below(90)).min(100);
        let (file, synced) = {
            let writer = &mut self.writers[at];
            writer.content.resize(len.max(to), version);
            writer.content[from..to].fill(version);
            writer.changed = true;
            if !writer.synced.is_empty() {
                writer.synced.push(writer.content.clone());
            }
            write(&self.store, &writer.handle, from * PAGE, &pages(writer.file, &vec![version; to - from]))?;
            (writer.file, writer.synced.clone())
        };
        if let Some(known) = self.file_mut(file) {
            known.parts.clone_from(&synced);
        }
        self.log.push(format!("write file {file} pages {from}..{to} version {version}"));
        Ok(())
    }

    fn sync(&mut self) -> Done {
        if self.writers.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.writers.len());
        let writer = &mut self.writers[at];
        if writer.changed {
            writer.synced.push(writer.content.clone());
        }
        let (file, synced) = (writer.file, writer.synced.clone());
        if let Some(known) = self.file_mut(file) {
            known.parts = synced;
        }
        self.log.push(format!("fsync file {file}"));
        self.states.push(self.names.clone());
        answer(|reply| self.store.fsync(&self.writers[at].handle, reply))?;
        self.synced.push((file, self.states.len() - 1));
        Ok(())
    }

    fn end(&mut self) -> Done {
        if self.writers.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.writers.len());
        let writer = self.writers.swap_remove(at);
        close(&self.store, &writer.handle);
        if let Some(known) = self.file_mut(writer.file) {
            if !known.parts.is_empty() {
                known.parts.push(writer.content.clone());
            }
            known.whole = writer.content;
        }
        self.log.push(format!("close file {}", writer.file));
        Ok(())
    }

    fn rename(&mut self) -> Done {
        let Some(from) = self.existing() else { return Ok(()) };
        let to = self.some_name();
        if from == to {
            return Ok(());
        }
        rename(&self.store, from, to)?;
        let file = self.names.remove(from).unwrap();
        self.log.push(format!("rename {from} to {to}: file {}", file.number));
        self.names.insert(to, file);
        Ok(())
    }

    fn unlink(&mut self) -> Done {
        let Some(path) = self.existing() else { return Ok(()) };
        let (dir, name) = split(path);
        self.store.unlink(find(&self.store, dir)?, name.as_bytes(), &caller())?;
        self.names.remove(path);
        self.log.push(format!("unlink {path}"));
        Ok(())
    }

    fn drain(&mut self) {
        let open: Vec<u32> = self.writers.iter().map(|writer| writer.file).collect();
        for file in self.names.values_mut().filter(|file| !open.contains(&file.number)) {
            file.parts.clear();
        }
        self.states.push(self.names.clone());
        let (state, drained) = (self.states.len() - 1, self.drained.clone());
        self.log.push("drain".to_owned());
        self.store.barrier(Box::new(move |result| {
            if result.is_ok() {
                drained.fetch_max(state, Ordering::SeqCst);
            }
        }));
    }

    fn step(&mut self) -> Done {
        match self.rng.below(48) {
            0..6 => {
                let path = self.some_name();
                self.make(path, false)
            }
            6..9 => {
                let path = self.some_name();
                self.make(path, true)
            }
            9..15 => self.begin(),
            15..21 => self.change(),
            21..26 => self.end(),
            26..32 => self.rename(),
            32..34 => self.unlink(),
            34 => self.sync(),
            35..38 => {
                self.drain();
                Ok(())
            }
            38..44 => self.build(),
            _ => {
                std::thread::sleep(Duration::from_micros(self.rng.below(4000) as u64));
                Ok(())
            }
        }
    }

    fn run(&mut self, steps: usize) -> Done {
        for _ in 0..steps {
            self.step()?;
            self.states.push(self.names.clone());
            let at = self.states.len() - 1;
            if let Some(last) = self.log.last_mut()
                && !last.starts_with('[')
            {
                *last = format!("[{at}] {last}");
            }
        }
        Ok(())
    }
}

/// Whether `found` is what a crash after these states may leave.
fn check(
    found: &BTreeMap<String, (u32, Content)>,
    all: &[Names],
    since: usize,
    synced: &[(u32, usize)],
) -> Result<(), String> {
    let states = &all[since..];
    let mut there = BTreeSet::new();
    for (path, (number, content)) in found {
        let is_it = |file: &&File| file.number == *number;
        let led = states.iter().any(|names| names.get(path.as_str()).is_some_and(|file| is_it(&file)));
        let versions = states.iter().filter_map(|names| names.values().find(is_it));
        if !led || !versions.into_iter().any(|file| file.may_hold(content)) {
            return Err(format!("{path} has been file {number} with {:?}, and is not to be", runs(content)));
        }
        if !there.insert(*number) {
            return Err(format!("file {number} is there twice"));
        }
    }
    let always = |number: &u32| states.iter().all(|names| names.values().any(|file| file.number == *number));
    let first: Vec<u32> = states[0].values().map(|file| file.number).collect();
    if let Some(lost) = first.into_iter().filter(always).find(|number| !there.contains(number)) {
        return Err(format!("file {lost} is lost"));
    }
    for (number, since) in synced {
        let stays = |names: &Names| names.values().any(|file| file.number == *number);
        if all[*since..].iter().all(stays) && !there.contains(number) {
            return Err(format!("file {number} is lost, and has been durable since state {since}"));
        }
    }
    let named = |name: &&str| states.iter().all(|names| names.contains_key(name));
    match NAMES.iter().copied().filter(named).find(|name| !found.contains_key(*name)) {
        Some(name) => Err(format!("{name} leads nowhere")),
        None => Ok(()),
    }
}

fn runs(content: &Content) -> Vec<(u32, usize)> {
    content.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect()
}

/// What there was to look at.
#[derive(Default, Debug)]
struct Seen {
    found: usize,
    durable: usize,
}

fn live(setup: &Setup, fresh: &[Image], seed: u64, seen: &mut Seen) -> Result<(), String> {
    let machine = Machine::recording(fresh.to_vec());
    let rig = Rig::open(setup, &machine)?;
    let mut rng = Rng::new(seed);
    let steps = 5 + rng.below(50);
    let drained = Arc::new(AtomicUsize::new(0));
    let mut client = Client {
        store: rig.store().clone(),
        rng,
        writers: Vec::new(),
        privates: Vec::new(),
        synced: Vec::new(),
        names: Names::new(),
        states: vec![Names::new()],
        log: Vec::new(),
        drained: drained.clone(),
        last: 0,
    };
    for dir in ["d0", "d1"] {
        client.store.mkdir(find(&client.store, "").unwrap(), dir.as_bytes(), 0o755, &caller()).unwrap();
    }
    barrier(&client.store).unwrap();
    let ran = client.run(steps);
    if client.rng.percent(50) {
        std::thread::sleep(Duration::from_micros(client.rng.below(8000) as u64));
    }
    let since = drained.load(Ordering::SeqCst);
    let killed = machine.kill(&mut client.rng);
    let Client { store, writers, privates, states, synced, log, .. } = client;
    for handle in
        writers.iter().map(|writer| &writer.handle).chain(privates.iter().map(|private| &private.handle))
    {
        store.release(handle);
    }
    drop(store);
    rig.stop();
    ran.map_err(|errno| format!("{errno} after {log:#?}"))?;
    let rig = Rig::open(setup, &Machine::new(killed.images()))?;
    let result = rig.check_accounts().and_then(|()| rig.tree()).and_then(|tree| {
        let mut found = BTreeMap::new();
        for (path, thing) in tree.into_iter().filter(|(path, _)| path != "aside") {
            if let Thing::File(bytes) = thing.thing {
                found.insert(path.clone(), parse(&bytes).map_err(|why| format!("{path}: {why}"))?);
            }
        }
        seen.found += found.len();
        seen.durable += states[since].len();
        check(&found, &states, since, &synced).map_err(|why| {
            let list: Vec<_> = found
                .iter()
                .map(|(path, (number, c))| format!("{path}: file {number} {:?}", runs(c)))
                .collect();
            format!("{why}; there is {list:?}; durable is state {since}; {log:#?}")
        })
    });
    rig.stop();
    result
}

#[test]
fn renamed_and_rewritten_files_survive_any_end() {
    let seed = number("KVCACHEFS_TEST_SEED", 1) as u64;
    let lives = number("KVCACHEFS_TEST_LIVES", LIVES) as u64;
    let mut seen = Seen::default();
    for (at, lens) in [&[24 * MIB][..], &[20 * MIB, 18 * MIB]].into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let setup = Setup::new(dir.path(), lens, "none");
        let machine = Machine::new(lens.iter().map(|len| Image::blank(*len)).collect());
        Rig::open(&setup, &machine).unwrap().stop();
        let fresh = machine.images();
        for life in (0..lives).filter(|life| *life as usize % 2 == at) {
            let seed = seed * 100_000 + life;
            if let Err(why) = live(&setup, &fresh, seed, &mut seen) {
                panic!("seed {seed}: {why}");
            }
        }
    }
    assert!(seen.found as u64 > lives && seen.durable as u64 > lives, "too little to look at: {seen:?}");
}
