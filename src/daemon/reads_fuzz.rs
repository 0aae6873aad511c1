//! Readers of all kinds against writers, evictions, renames and a device that stalls and errs: every byte that is read
//! is one that the file had. `KVCACHEFS_TEST_SEED` and `KVCACHEFS_TEST_READS` say which runs, `KVCACHEFS_TEST_STATS` has them say what they did.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "mappings are made and read here, as by clients")]

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use nix::errno::Errno;
use parking_lot::Mutex;

use super::device_log::rng::Rng;
use super::tests::Rig;
use super::*;
use crate::l2::{Class, Direction};
use crate::store::node::{NONE, NodeId, ROOT_INO};
use crate::store::{Answer, Caller, Handle, Opened};

const CELL: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(120);

/// What a file may hold: of each cell, all that was ever written to it, and from where on it counts.
#[derive(Clone, Default)]
struct Model {
    size: usize,
    /// Changes of its size so far, begun and done.
    resizes: u32,
    cells: Vec<(Vec<u64>, usize)>,
}

fn word(seed: u64, at: usize) -> u8 {
    if seed == 0 {
        return 0;
    }
    let x = (seed ^ (at as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (x >> ((at % 8) * 8)) as u8 | 1
}

fn bytes(seed: u64, from: usize, to: usize) -> Vec<u8> {
    (from..to).map(|at| word(seed, at)).collect()
}

impl Model {
    fn cover(&mut self, size: usize) {
        while self.cells.len() * CELL < size {
            self.cells.push((vec![0], 0));
        }
    }
}

type Shared = Arc<Mutex<Model>>;

struct World {
    rig: Rig,
    models: Mutex<HashMap<NodeId, Shared>>,
    stop: AtomicBool,
    errs: bool,
    lru: bool,
    /// A directory whose files are written in place.
    plain: u64,
    seed: u64,
    next: AtomicU32,
    counts: [AtomicUsize; 8],
    trace: Mutex<Vec<String>>,
}

fn ask<T: Send + 'static>(what: &str, f: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> T {
    let (tell, told) = channel();
    f(Box::new(move |r| {
        let _ = tell.send(r);
    }));
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} is never answered"))
}

impl World {
    fn note(&self, text: String) {
        self.trace.lock().push(text);
    }
    fn fail(&self, text: &str) -> ! {
        let trace = self.trace.lock();
        let tail: Vec<_> = trace.iter().rev().take(40).rev().cloned().collect();
        panic!("seed {}: {text}\n{}", self.seed, tail.join("\n"));
    }
    fn new_seed(&self) -> u64 {
        u64::from(self.next.fetch_add(1, Ordering::Relaxed)) + 1
    }
    fn find(&self, name: &str, caller: &Caller) -> Result<u64, Errno> {
        let store = self.rig.store();
        match store.lookup(self.parent(name), name.as_bytes(), caller) {
            Answer::Now(found) => found,
            Answer::Wait => {
                ask("a lookup", |reply| store.lookup_later(self.parent(name), name.as_bytes(), caller, reply))
            }
        }
        .map(|entry| entry.attr.ino)
    }
    fn open(&self, name: &str, flags: i32, caller: &Caller) -> Result<Opened, Errno> {
        let mut ino = self.find(name, caller)?;
        // The kernel looks again once.
        match self.rig.store().open(ino, flags, caller) {
            Err(Errno::ESTALE) => {}
            result => return result,
        }
        ino = self.find(name, caller)?;
        self.rig.store().open(ino, flags, caller)
    }
    fn parent(&self, name: &str) -> u64 {
        if name.starts_with('p') { self.plain } else { ROOT_INO }
    }
    fn model(&self, id: NodeId) -> Option<Shared> {
        self.models.lock().get(&id).cloned()
    }
}

/// A handle of a reader, and how it reads.
struct Reader {
    handle: Option<Handle>,
    model: Shared,
    file: Option<File>,
    map: Option<(usize, usize)>,
    plain: bool,
    what: String,
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some((at, len)) = self.map.take() {
            // SAFETY: mapped by this reader with this length, and read by nobody else.
            unsafe { libc::munmap(at as *mut _, len) };
        }
    }
}

impl Reader {
    fn read(&self, world: &World, offset: usize, len: usize) -> Result<Vec<u8>, Errno> {
        if let Some((at, size)) = self.map {
            let (from, to) = (offset.min(size), (offset + len).min(size));
            // SAFETY: inside the mapping, which lives as long as this reader; nothing may write to what it shows.
            return Ok(unsafe { std::slice::from_raw_parts((at + from) as *const u8, to - from) }.to_vec());
        }
        if let Some(file) = &self.file {
            let mut out = vec![0; len];
            let got = file.read_at(&mut out, offset as u64).unwrap();
            out.truncate(got);
            return Ok(out);
        }
        let handle = self.handle.as_ref().unwrap();
        ask(
            &format!("{} at {offset}+{len}", self.what),
            |reply: Box<dyn FnOnce(Result<Vec<u8>, Errno>) + Send>| {
                world.rig.store().read(
                    handle,
                    offset as u64,
                    len,
                    Box::new(move |result: Result<&[u8], Errno>| reply(result.map(<[u8]>::to_vec))),
                );
            },
        )
    }

    fn check(&self, world: &World, offset: usize, len: usize) {
        let before = self.model.lock().clone();
        let found = match self.read(world, offset, len) {
            Ok(found) => found,
            Err(Errno::EIO) if world.errs => {
                world.counts[7].fetch_add(1, Ordering::Relaxed);
                return;
            }
            Err(error) => world.fail(&format!("{} at {offset}+{len}: {error}", self.what)),
        };
        let after = self.model.lock().clone();
        let what = format!("{} at {offset}+{len} of {}", self.what, before.size);
        let wanted = len.min(before.size.saturating_sub(offset));
        if before.resizes == after.resizes && before.resizes.is_multiple_of(2) && found.len() != wanted {
            world.fail(&format!("{what}: {} bytes instead of {wanted}", found.len()));
        }
        let mut at = 0;
        while at < found.len() {
            let cell = (offset + at) / CELL;
            let end = ((cell + 1) * CELL - offset).min(found.len());
            let floor = before.cells.get(cell).map_or(0, |cell| cell.1);
            let none = vec![0];
            let seeds = after.cells.get(cell).map_or(&none, |cell| &cell.0);
            let part = &found[at..end];
            // Mostly it is one of them as a whole.
            let start = offset + at;
            let whole = |seed: u64| part.iter().enumerate().all(|(i, byte)| *byte == word(seed, start + i));
            if !seeds[floor..].iter().rev().any(|seed| whole(*seed)) {
                for (i, byte) in part.iter().enumerate() {
                    if !seeds[floor..].iter().any(|seed| *byte == word(*seed, start + i)) {
                        let older = seeds.iter().position(|seed| *byte == word(*seed, start + i));
                        world.fail(&format!(
                            "{what}: byte {} is {byte:#x}, of cell {cell} with {} versions from {floor}; as in {older:?}",
                            start + i,
                            seeds.len()
                        ));
                    }
                }
            }
            at = end;
        }
        world.counts[if self.map.is_some() {
            2
        } else if self.file.is_some() {
            1
        } else {
            0
        }]
        .fetch_add(1, Ordering::Relaxed);
    }

    fn close(&mut self, world: &World) {
        self.file = None;
        if let Some(handle) = self.handle.take() {
            world.rig.store().release(&handle);
        }
    }
}

const NAMES: [&str; 8] = ["a0", "a1", "a2", "b0", "b1", "b2", "s", "p"];

fn reads(world: &World, number: u32) {
    let mut rng = Rng::new(world.seed * 31 + u64::from(number));
    let caller = Caller { tid: 5_000_000 + number, uid: 0, gid: 0 };
    let mut open: Vec<Reader> = Vec::new();
    while !world.stop.load(Ordering::Acquire) {
        if open.len() < 6 && rng.percent(50) {
            let name = NAMES[rng.below(NAMES.len())];
            let flags = if rng.percent(30) { libc::O_DIRECT } else { 0 };
            let opened = match world.open(name, libc::O_RDONLY | flags, &caller) {
                Ok(opened) => opened,
                Err(Errno::ENOENT) => continue,
                Err(error) => world.fail(&format!("reader {number} opens {name}: {error}")),
            };
            let Some(model) = world.model(opened.handle.id) else {
                world.rig.store().release(&opened.handle);
                world.counts[6].fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let mut what = format!("reader {number} of {name} ({:?}, {flags:o})", opened.handle.id);
            let (mut file, mut map) = (None, None);
            if let Some(slab) = &opened.slab {
                let fd = File::open(format!("/proc/self/fd/{}", slab.backing_fd().as_raw_fd())).unwrap();
                what += " passthrough";
                let len = fd.metadata().unwrap().len() as usize;
                if len != model.lock().size {
                    world.fail(&format!("{what}: the slab has {len} bytes, the file {}", model.lock().size));
                }
                if rng.percent(40) {
                    // SAFETY: a new mapping at an address of the kernel's choice.
                    let at = unsafe {
                        libc::mmap(
                            std::ptr::null_mut(),
                            len,
                            libc::PROT_READ,
                            libc::MAP_SHARED,
                            fd.as_raw_fd(),
                            0,
                        )
                    };
                    assert_ne!(at, libc::MAP_FAILED);
                    map = Some((at as usize, len));
                }
                file = Some(fd);
            }
            open.push(Reader { handle: Some(opened.handle), model, file, map, plain: name == "p", what });
        }
        if open.is_empty() {
            continue;
        }
        let at = rng.below(open.len());
        let reader = &mut open[at];
        match rng.below(10) {
            0 => {
                reader.close(world);
                // What is written in place goes on elsewhere.
                if reader.map.is_none() || reader.plain {
                    open.swap_remove(at);
                }
            }
            1 if reader.handle.is_none() => {
                open.swap_remove(at);
            }
            _ => {
                let size = reader.model.lock().size;
                let from = match rng.below(4) {
                    0 => rng.below(size / (256 << 10) + 1) * (256 << 10),
                    1 => (size / 4096 * 4096).saturating_sub(rng.below(3) * 4096),
                    _ => rng.below(size + 10),
                };
                let len = if rng.percent(20) { 1 << 20 } else { 1 + rng.below(1 << 19) };
                reader.check(world, from, len);
            }
        }
    }
    for mut reader in open {
        let size = reader.model.lock().size;
        reader.check(world, 0, size.min(1 << 20));
        reader.close(world);
    }
}

fn some_size(rng: &mut Rng) -> usize {
    let base = match rng.below(6) {
        0 => 1 + rng.below(70_000),
        1 => (1 + rng.below(20)) * CELL,
        2 => (1 + rng.below(6)) << 18,
        3 => (1 + rng.below(500)) * 4096,
        _ => 1 + rng.below(3 << 20),
    };
    match rng.below(4) {
        0 => base + 1,
        1 => base.max(2) - 1,
        _ => base,
    }
}

impl World {
    /// Writes a part of a file anew, cell by cell of the model.
    fn write(
        &self,
        handle: &Handle,
        model: &Shared,
        from: usize,
        to: usize,
        rng: &mut Rng,
    ) -> Result<(), Errno> {
        let mut at = from;
        while at < to {
            // Some cells at once.
            let end = ((at / CELL + 1 + rng.below(12)) * CELL).min(to);
            let (first, last) = (at / CELL, (end - 1) / CELL);
            let mut data = Vec::new();
            let mut marks = Vec::new();
            {
                let mut model = model.lock();
                model.cover(end);
                model.resizes += 1;
                for cell in first..=last {
                    let seed = self.new_seed();
                    model.cells[cell].0.push(seed);
                    let whole = at <= cell * CELL && end >= model.size.min((cell + 1) * CELL);
                    marks.push((cell, model.cells[cell].0.len() - 1, whole));
                    data.extend(bytes(seed, at.max(cell * CELL), end.min((cell + 1) * CELL)));
                }
            }
            let result: Result<u32, Errno> =
                ask("a write", |reply| self.rig.store().write(handle, at as u64, &data, reply));
            let mut model = model.lock();
            model.resizes += 1;
            result?;
            for (cell, index, whole) in marks {
                if whole {
                    model.cells[cell].1 = index;
                }
            }
            model.size = model.size.max(end);
            drop(model);
            at = end;
        }
        Ok(())
    }

    fn close(&self, handle: &Handle, caller: &Caller) {
        self.rig.store().flush(handle, caller);
        self.rig.store().release(handle);
    }
}

/// Makes, replaces, rewrites, renames and removes whole files.
fn makes(world: &World, letter: &str, steps: usize) -> HashMap<String, NodeId> {
    let mut rng = Rng::new(world.seed * 77 + u64::from(letter.as_bytes()[0]));
    let caller = Rig::caller();
    let store = world.rig.store();
    let mut there: HashMap<String, NodeId> = HashMap::new();
    for step in 0..steps {
        if world.stop.load(Ordering::Acquire) {
            break;
        }
        let name = format!("{letter}{}", rng.below(3));
        let what = format!("step {step} {name}");
        match rng.below(12) {
            0 if there.contains_key(&name) => {
                world.note(format!("{what} unlink"));
                match store.unlink(ROOT_INO, name.as_bytes(), &caller) {
                    Ok(()) => {}
                    Err(Errno::ENOENT) if world.lru || world.errs => {}
                    Err(error) => world.fail(&format!("{what}: unlink: {error}")),
                }
                there.remove(&name);
            }
            1 | 2 if there.contains_key(&name) => {
                let to = format!("{letter}{}", rng.below(3));
                world.note(format!("{what} rename to {to}"));
                match store.rename(ROOT_INO, name.as_bytes(), ROOT_INO, to.as_bytes(), 0, &caller) {
                    Ok(()) => {
                        let id = there.remove(&name).unwrap();
                        there.insert(to, id);
                    }
                    Err(Errno::ENOENT) if world.lru || world.errs => {
                        there.remove(&name);
                    }
                    Err(error) => world.fail(&format!("{what}: rename: {error}")),
                }
            }
            3 | 4 if there.contains_key(&name) => {
                // Rewritten in place, or so it looks.
                let opened = match world.open(&name, libc::O_RDWR, &caller) {
                    Ok(opened) => opened,
                    Err(Errno::ENOENT) if world.lru || world.errs => {
                        there.remove(&name);
                        continue;
                    }
                    Err(error) => world.fail(&format!("{what}: open to write: {error}")),
                };
                let handle = opened.handle;
                let old = world.model(there[&name]).unwrap();
                world.note(format!("{what} rewrite {:?} of {:?}", handle.id, there[&name]));
                let model = if handle.id == there[&name] {
                    old
                } else {
                    // A copy, or again the one that was copied, if nobody wrote to the copy.
                    let copy: Shared = Arc::new(Mutex::new(old.lock().clone()));
                    world.models.lock().entry(handle.id).or_insert(copy).clone()
                };
                let size = model.lock().size;
                let from = rng.below(size);
                let to = (from + 1 + rng.below(1 << 20)).min(if rng.percent(30) {
                    size + (1 << 20)
                } else {
                    size
                });
                if rng.percent(80) {
                    match world.write(&handle, &model, from, to, &mut rng) {
                        Ok(()) => {}
                        Err(Errno::EIO) if world.errs => {}
                        Err(Errno::ENOSPC) => {}
                        Err(error) => world.fail(&format!("{what}: rewrite: {error}")),
                    }
                }
                there.insert(name.clone(), handle.id);
                world.close(&handle, &caller);
            }
            _ => {
                let exists = there.contains_key(&name);
                let flags = libc::O_RDWR | if exists { libc::O_TRUNC } else { libc::O_CREAT | libc::O_EXCL };
                let opened = if exists {
                    world.open(&name, flags, &caller)
                } else {
                    store.create(ROOT_INO, name.as_bytes(), 0o644, flags, &caller).map(|(_, opened)| opened)
                };
                let handle = match opened {
                    Ok(opened) => opened.handle,
                    Err(Errno::ENOENT) if world.lru || world.errs => {
                        there.remove(&name);
                        continue;
                    }
                    Err(error) => world.fail(&format!("{what}: make {exists}: {error}")),
                };
                let model = Shared::default();
                world.models.lock().insert(handle.id, model.clone());
                let size = some_size(&mut rng);
                world.note(format!("{what} make {:?} of {size} bytes", handle.id));
                let done = world.write(&handle, &model, 0, size, &mut rng);
                if rng.percent(10) {
                    let _: Result<(), Errno> = ask("an fsync", |reply| store.fsync(&handle, reply));
                }
                world.close(&handle, &caller);
                match done {
                    Ok(()) => {
                        there.insert(name, handle.id);
                    }
                    Err(Errno::ENOSPC) => {}
                    Err(Errno::EIO) if world.errs => {}
                    Err(error) => world.fail(&format!("{what}: write: {error}")),
                }
            }
        }
        if rng.percent(5) {
            let _: Result<(), Errno> = ask("a drain", |reply| store.barrier(reply));
        }
    }
    there
}

/// Writes a file in shared use, and cuts it.
fn shares(world: &World, name: &str, steps: usize) {
    let mut rng = Rng::new(world.seed * 99 + name.len() as u64 + u64::from(name.as_bytes()[0]));
    let caller = Rig::caller();
    let store = world.rig.store();
    let mut model = Shared::default();
    let mut last: Option<NodeId> = None;
    let mut mine: HashMap<NodeId, Shared> = HashMap::new();
    let mut handle: Option<Handle> = None;
    for step in 0..steps {
        if world.stop.load(Ordering::Acquire) {
            break;
        }
        if handle.is_none() {
            let cut = name == "p" && rng.percent(25);
            if cut {
                // Whichever of its versions it is that has the name.
                for mut model in mine.values().map(|model| model.lock()) {
                    model.resizes += 1;
                    model.cells.iter_mut().for_each(|cell| cell.0.push(0));
                }
            }
            let flags = libc::O_RDWR | if cut { libc::O_TRUNC } else { 0 };
            let opened = world.open(name, flags, &caller).or_else(|error| match error {
                Errno::ENOENT => {
                    last = None;
                    let flags = libc::O_RDWR | libc::O_CREAT | if name == "p" { libc::O_EXCL } else { 0 };
                    store
                        .create(world.parent(name), name.as_bytes(), 0o644, flags, &caller)
                        .map(|(_, opened)| opened)
                }
                error => Err(error),
            });
            if let (true, Ok(opened)) = (cut, &opened)
                && let Some(mut model) = mine.get(&opened.handle.id).map(|model| model.lock())
            {
                model.size = 0;
                model.cells.iter_mut().for_each(|cell| cell.1 = cell.0.len() - 1);
            }
            if cut {
                mine.values().for_each(|model| model.lock().resizes += 1);
            }
            let opened = match opened {
                Ok(opened) => opened,
                Err(Errno::EIO) if world.errs => continue,
                Err(error) => world.fail(&format!("shared {name} open {flags:o}: {error}")),
            };
            let id = opened.handle.id;
            world.note(format!("shared {name} {step} open {id:?} {flags:o} after {last:?}"));
            if let Some(known) = mine.get(&id) {
                // The same, or again the one that was copied, if nobody wrote to the copy.
                model = known.clone();
            } else {
                let before = model.lock().clone();
                let new = if cut || last.is_none() { Model::default() } else { before };
                model = Arc::new(Mutex::new(new));
                mine.insert(id, model.clone());
                world.models.lock().insert(id, model.clone());
            }
            last = Some(id);
            handle = Some(opened.handle);
        }
        let at = handle.as_ref().unwrap();
        let size = model.lock().size;
        match rng.below(14) {
            0 => world.close(&handle.take().unwrap(), &caller),
            13 if name == "p" => world.close(&handle.take().unwrap(), &caller),
            1 | 2 => {
                let _: Result<(), Errno> = ask("an fsync", |reply| store.fsync(at, reply));
            }
            3 | 4 => {
                // To the edge of a cell, so that what is cut off is whole cells.
                let new = rng.below(size / CELL + 1) * CELL;
                world.note(format!("shared {name} {step} cut {size} to {new}"));
                {
                    let mut model = model.lock();
                    model.resizes += 1;
                    for cell in model.cells.iter_mut().skip(new / CELL) {
                        cell.0.push(0);
                    }
                }
                let result: Result<(), Errno> = ask("a truncation", |reply| {
                    store.truncate(
                        at.ino,
                        true,
                        new as u64,
                        Default::default(),
                        &caller,
                        Box::new(move |result| reply(result.map(|_| ()))),
                    );
                });
                let mut model = model.lock();
                model.resizes += 1;
                match result {
                    Ok(()) => {
                        model.size = new;
                        for cell in model.cells.iter_mut().skip(new / CELL) {
                            cell.1 = cell.0.len() - 1;
                        }
                    }
                    Err(Errno::EIO) if world.errs => {}
                    Err(Errno::ENOSPC) => {}
                    Err(error) => world.fail(&format!("shared {name} truncate: {error}")),
                }
            }
            _ => {
                let from = rng.below(size.min(5 << 20) + 1);
                let from = if rng.percent(50) { from / CELL * CELL } else { from };
                let to = from + 1 + rng.below(1 << 20);
                match world.write(at, &model, from, to, &mut rng) {
                    Ok(()) | Err(Errno::ENOSPC) => {}
                    Err(Errno::EIO) if world.errs => {}
                    Err(error) => world.fail(&format!("shared {name} write: {error}")),
                }
            }
        }
    }
    if let Some(handle) = handle {
        world.close(&handle, &caller);
    }
}

fn disturbs(world: &World) {
    let mut rng = Rng::new(world.seed ^ 0x55aa);
    let rig = &world.rig;
    while !world.stop.load(Ordering::Acquire) {
        let class = [Class::WriteBack, Class::Demand, Class::Demand, Class::Promotion][rng.below(4)];
        match rng.below(12) {
            0 | 1 => {
                rig.faults.hold(class);
                for _ in 0..rng.below(10) {
                    std::thread::sleep(Duration::from_micros(rng.below(3000) as u64));
                    rig.faults.release_some(class, 1 + rng.below(4));
                }
                rig.faults.release(class);
            }
            2 => {
                let class = [Class::Demand, Class::Promotion][rng.below(2)];
                rig.faults.hold(class);
                std::thread::sleep(Duration::from_millis(if rng.percent(20) { 60 } else { 4 }));
                rig.faults.release(class);
            }
            3 => {
                // No memory for a while.
                let all: Vec<_> = std::iter::from_fn(|| rig.store().pool.chunk(256 << 10)).collect();
                std::thread::sleep(Duration::from_millis(rng.below(8) as u64));
                drop(all);
                rig.store().with(|core| core.wakes.admission = true);
            }
            4 if world.lru => {
                rig.store().with(|core| core.evict_file());
            }
            5 if world.errs => match rng.below(3) {
                0 => rig.faults.flip_next_reads(1 + rng.below(3)),
                1 => rig.faults.fail_next(Direction::Read, 1, libc::EIO),
                _ => std::thread::sleep(Duration::from_millis(20)),
            },
            6..10 => rig.store().with(|core| {
                for _ in 0..1 + rng.below(8) {
                    if !core.drop_some(NONE) {
                        break;
                    }
                }
            }),
            _ => std::thread::sleep(Duration::from_micros(rng.below(4000) as u64)),
        }
    }
}

fn run(seed: u64, steps: usize) {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(seed);
    let lru = rng.percent(40);
    let errs = rng.percent(35);
    let options = format!(
        "l1=64MiB,slab-rest={}ms,recycle={},slab-file-max={},small-file-max={},evict={},l2={}:{}MiB",
        [0, 5, 50][rng.below(3)],
        if rng.percent(20) { "strict" } else { "owner" },
        ["512KiB", "2MiB", "16MiB"][rng.below(3)],
        ["4KiB", "64KiB", "256KiB"][rng.below(3)],
        if lru { "lru" } else { "none" },
        dir.path().join("store").display(),
        if lru { 40 } else { 160 },
    );
    let rig = Rig::with(&options);
    let passthrough = rng.percent(80);
    let dirty = [8, 16, 32][rng.below(3)];
    // Others have part of L1.
    let taken = rng.below(200);
    let _ballast: Vec<_> = (0..taken).map_while(|_| rig.store().pool.chunk(256 << 10)).collect();
    rig.store().with(|core| {
        core.settings.passthrough = passthrough;
        core.settings.dirty_limit_pages = dirty << 8;
    });
    let plain = rig.store().mkdir(ROOT_INO, b"plain", 0o755, &Rig::caller()).unwrap().attr.ino;
    rig.store().setxattr(plain, b"user.kv.publish", b"posix", 0).unwrap();
    let world = World {
        rig,
        models: Mutex::default(),
        stop: AtomicBool::new(false),
        errs,
        lru,
        plain,
        seed,
        next: AtomicU32::new(1),
        counts: Default::default(),
        trace: Mutex::default(),
    };
    world.note(format!("{options} passthrough {passthrough} errs {errs}"));
    let files = Mutex::new(HashMap::new());
    std::thread::scope(|scope| {
        let (world, files_at) = (&world, &files);
        let guard = |f: Box<dyn FnOnce() + Send + '_>| {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            if let Err(error) = result {
                world.stop.store(true, Ordering::Release);
                Class::ALL.into_iter().for_each(|class| world.rig.faults.release(class));
                std::panic::resume_unwind(error);
            }
        };
        let mut others = Vec::new();
        for number in 0..3 {
            others.push(scope.spawn(move || guard(Box::new(move || reads(world, number)))));
        }
        others.push(scope.spawn(move || guard(Box::new(move || disturbs(world)))));
        let writers: Vec<_> = ["a", "b"]
            .into_iter()
            .map(|letter| {
                scope.spawn(move || {
                    guard(Box::new(move || {
                        let made = makes(world, letter, steps);
                        files_at.lock().extend(made);
                    }))
                })
            })
            .chain(
                ["s", "p"]
                    .map(|name| scope.spawn(move || guard(Box::new(move || shares(world, name, steps * 2))))),
            )
            .collect();
        let results: Vec<_> = writers.into_iter().map(|thread| thread.join()).collect();
        world.stop.store(true, Ordering::Release);
        let results: Vec<_> =
            results.into_iter().chain(others.into_iter().map(|thread| thread.join())).collect();
        for result in results {
            if let Err(error) = result {
                std::panic::resume_unwind(error);
            }
        }
    });
    let files = files.into_inner();
    world.rig.faults.flip_next_reads(0);
    world.rig.faults.fail_next(Direction::Read, 0, 0);
    let drained: Result<(), Errno> = ask("the last drain", |reply| world.rig.store().barrier(reply));
    assert_eq!(drained, Ok(()), "seed {seed}");
    {
        // What is promoted without anybody waiting for it may be on its way still.
        let promoting = || world.rig.store().lock().counters.promoting > 0;
        (0..10_000).take_while(|_| promoting()).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
        let core = world.rig.store().lock();
        assert_eq!((core.dirty_pages, core.around_bytes, core.counters.promoting), (0, 0, 0), "seed {seed}");
        assert!(
            core.around_waiting.is_empty() && core.ending.is_empty(),
            "seed {seed}: {:?} {:?} {:?}",
            core.around_waiting,
            core.ending,
            core.ending
                .iter()
                .map(|id| core
                    .by_id(*id)
                    .map(|idx| (core.node(idx).flags, core.hot(idx).map(|hot| format!("{hot:?}")))))
                .collect::<Vec<_>>()
        );
    }
    if std::env::var("KVCACHEFS_TEST_STATS").is_ok() {
        let counts: Vec<_> = world.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let c = world.rig.store().snapshot().counters;
        eprintln!(
            "seed {seed}: {counts:?} promotions {} around {} aliases {} cow {} evicted {} {} crc {} io {}",
            c.promotions,
            c.read_around_bytes,
            c.aliases,
            c.copies_on_write,
            c.evictions_l1,
            c.evictions_l2,
            c.crc_errors,
            c.read_errors
        );
    }
    recovered(dir.path(), &world, &files);
    world.rig.stop();
}

/// What another daemon finds after a crash now.
fn recovered(dir: &Path, world: &World, files: &HashMap<String, NodeId>) {
    let copy = tempfile::tempdir().unwrap();
    let to = copy.path().join("store");
    assert!(
        std::process::Command::new("cp")
            .arg("--sparse=always")
            .arg(dir.join("store"))
            .arg(&to)
            .status()
            .unwrap()
            .success()
    );
    let rig = Rig::with(&format!("l1=64MiB,l2={}", to.display()));
    for (name, id) in files {
        let now = rig.find(name);
        if now == Err(Errno::ENOENT) && (world.lru || world.errs) {
            continue;
        }
        let ino = now.unwrap_or_else(|error| world.fail(&format!("after a crash {name}: {error}")));
        let found = rig
            .read(ino, 1 << 26)
            .unwrap_or_else(|error| world.fail(&format!("after a crash {name}: {error}")));
        let model = world.model(*id).unwrap();
        let model = model.lock();
        if found.len() != model.size && !world.errs {
            world.fail(&format!("after a crash {name} has {} bytes of {}", found.len(), model.size));
        }
        for (at, byte) in found.iter().enumerate() {
            let (seeds, floor) = &model.cells[at / CELL];
            if !seeds[*floor..].iter().any(|seed| *byte == word(*seed, at)) {
                world.fail(&format!("after a crash {name} has {byte:#x} at {at} of {}", model.size));
            }
        }
    }
    rig.stop();
}

#[test]
fn every_byte_read_is_one_that_the_file_had() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (from, count) = (number("KVCACHEFS_TEST_SEED", 1), number("KVCACHEFS_TEST_READS", 2));
    let mut failed = 0;
    for seed in from..from + count {
        if std::panic::catch_unwind(|| run(seed, 80)).is_err() {
            eprintln!("=== seed {seed} FAILED");
            failed += 1;
            if failed > 3 {
                break;
            }
        }
    }
    assert_eq!(failed, 0);
}
