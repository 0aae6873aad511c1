//! A client that does everything that changes a store, and writes down what that may lead to and what it was told.
//!
//! What a step may lead to is noted before the step; what is durable, after the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;

use super::machine::Machine;
use super::model::{Attributes, Found, Mark, Maybe, Model, Thing, Version};
use super::rig::{
    again, answer, barrier, caller, close, create, find, open, read_handle, rename, split, write,
};
use super::rng::Rng;
use crate::store::hot::BLOCK;
use crate::store::{Handle, Store};

/// Files are named by their makers' counters, so that no two versions are taken for one file.
static FILES: AtomicU64 = AtomicU64::new(1);

pub fn new_file() -> u64 {
    FILES.fetch_add(1, Ordering::Relaxed)
}

/// Files larger than this are slot files (see `rig`).
const SLOT_MIN: usize = 512 << 10;
const FILES_MAX: usize = 4;

pub struct Client {
    store: Arc<Store>,
    machine: Arc<Machine>,
    dir: String,
    rng: Rng,
    model: Model,
    series: usize,
    /// Files held open against eviction.
    held: Vec<(String, Handle)>,
}

type Done = Result<(), Errno>;

impl Client {
    pub fn new(store: &Arc<Store>, machine: &Arc<Machine>, dir: &str, seed: u64, model: Model) -> Self {
        let series = model.below(&format!("{dir}/series")).len();
        Self {
            store: store.clone(),
            machine: machine.clone(),
            dir: dir.to_owned(),
            rng: Rng::new(seed),
            model,
            series,
            held: Vec::new(),
        }
    }

    fn mark(&mut self, mark: Mark) {
        self.model.apply(&mark);
        self.machine.mark(mark);
    }

    fn may(&mut self, path: &str, version: Maybe) {
        self.mark(Mark::May { path: path.to_owned(), version });
    }

    fn at(&self, name: &str) -> String {
        format!("{}/{name}", self.dir)
    }

    fn version(bytes: Vec<u8>, attributes: &Attributes, file: u64, in_place: bool, slot: bool) -> Maybe {
        let slot = slot || bytes.len() > SLOT_MIN;
        let found = Found { thing: Thing::File(Arc::new(bytes)), attributes: attributes.clone() };
        Some(Arc::new(Version { found, file, in_place, slot }))
    }

    /// Directories that everything else is in.
    pub fn prepare(&mut self) -> Done {
        // A crash may have left it there.
        let (from, to) = (self.at("elsewhere"), self.at("d0"));
        if self.model.latest(&from).is_some() {
            self.move_tree(&from, &to)?;
        }
        for path in ["", "d0", "d1", "posix", "series"] {
            let path = if path.is_empty() { self.dir.clone() } else { self.at(path) };
            if self.model.latest(&path).is_none() {
                self.mkdir(&path)?;
            }
        }
        let posix = find(&self.store, &self.at("posix"))?;
        self.store.setxattr(posix, b"user.kv.publish", b"posix", 0)?;
        self.drain()
    }

    fn size(&mut self) -> usize {
        match self.rng.below(10) {
            0..3 => 1 + self.rng.below(9000),
            3..7 => 1 + self.rng.below(300_000),
            7 => BLOCK as usize,
            8 => 270_000 + self.rng.below(250_000),
            _ => 500_000 + self.rng.below(500_000),
        }
    }

    fn is_in_place(&self, path: &str) -> bool {
        self.model.latest(path).is_some_and(|version| {
            version.slot || version.bytes().is_empty() || split(path).0.ends_with("/posix")
        })
    }

    /// A name that no reader of ours holds.
    fn some_name(&mut self) -> String {
        loop {
            let name = self.rng.below(if self.model.evicting { 6 * FILES_MAX } else { FILES_MAX });
            let dir = ["", "", "d0/", "d1/"][self.rng.below(4)];
            let path = self.at(&format!("{dir}n{name}"));
            if self.held.iter().all(|(held, _)| *held != path) {
                return path;
            }
        }
    }

    fn existing(&mut self) -> Option<String> {
        (0..8)
            .map(|_| self.some_name())
            .collect::<Vec<_>>()
            .into_iter()
            .find(|path| self.model.latest(path).is_some())
    }

    fn drain(&mut self) -> Done {
        let settled = self.model.settle_below(&self.dir);
        barrier(&self.store)?;
        self.mark(Mark::Settled(settled));
        Ok(())
    }

    fn fsync(&mut self, path: &str, handle: &Handle) -> Done {
        let settled = self.model.settle(path);
        answer(|reply| self.store.fsync(handle, reply))?;
        self.mark(Mark::Settled(settled));
        Ok(())
    }

    fn fsync_path(&mut self, path: &str) -> Done {
        let handle = open(&self.store, path, libc::O_RDONLY)?;
        let result = self.fsync(path, &handle);
        self.store.release(&handle);
        result
    }

    fn sometimes_fsync(&mut self, path: &str) -> Done {
        if self.rng.percent(65) {
            return Ok(());
        }
        // Also while a commit is being written.
        for _ in 0..if self.rng.percent(50) { 100 } else { 0 } {
            if self.machine.flushes() {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.fsync_path(path)
    }

    /// Writes `bytes` at `at` of a file that holds `content`; everybody sees each step if it is `in_place`.
    fn put(&mut self, path: &str, handle: &Handle, open: &mut Open, at: usize, bytes: &[u8]) -> Done {
        let mut done = 0;
        while done < bytes.len() {
            let part = (1 + self.rng.below(250_000)).min(bytes.len() - done);
            let (from, to) = (at + done, at + done + part);
            if open.content.len() < to {
                open.content.resize(to, 0);
            }
            open.content[from..to].copy_from_slice(&bytes[done..done + part]);
            if open.in_place {
                self.may(path, open.version());
            }
            write(&self.store, handle, from, &bytes[done..done + part])?;
            done += part;
        }
        Ok(())
    }

    /// Fills a private version and closes it; sometimes it is made durable, and so visible, on the way.
    fn fill(&mut self, path: &str, handle: &Handle, attributes: Attributes) -> Done {
        let len = self.size();
        let bytes = self.rng.bytes(len);
        let mut open =
            Open { content: Vec::new(), attributes, file: new_file(), in_place: false, slot: false };
        let early = self.rng.percent(15).then(|| self.rng.below(len));
        let cut = early.unwrap_or(len);
        self.put(path, handle, &mut open, 0, &bytes[..cut])?;
        if early.is_some() {
            open.in_place = true;
            self.may(path, open.version());
            self.fsync(path, handle)?;
            self.put(path, handle, &mut open, cut, &bytes[cut..])?;
        } else {
            self.may(path, open.version());
        }
        close(&self.store, handle);
        Ok(())
    }

    /// Under another name, and renamed: replaces what is there.
    fn publish(&mut self) -> Done {
        let path = self.some_name();
        self.publish_at(&path)?;
        self.sometimes_fsync(&path)
    }

    fn publish_at(&mut self, path: &str) -> Done {
        let build = self.at("build");
        if self.model.latest(&build).is_some() {
            self.unlink(&build)?;
        }
        let handle = create(&self.store, &build, libc::O_EXCL)?;
        if self.rng.percent(25) {
            // Before it is closed: then it appears under its new name alone.
            let len = self.size();
            let bytes = self.rng.bytes(len);
            write(&self.store, &handle, 0, &bytes)?;
            self.may(path, Self::version(bytes, &Attributes::new(), new_file(), false, false));
            rename(&self.store, &build, path)?;
            close(&self.store, &handle);
        } else {
            self.fill(&build, &handle, Attributes::new())?;
            self.rename(&build, path)?;
        }
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> Done {
        let (version, before) = (self.model.latest(from), self.model.latest(to));
        // It takes its name along while its bytes are still on their way.
        let file = version.as_ref().map(|version| version.file);
        let same = |version: &Maybe| version.as_ref().map(|version| version.file) == file;
        for version in self.model.possible(from).into_iter().filter(same) {
            self.may(to, version);
        }
        self.may(from, None);
        self.mark(Mark::Moved { from: from.to_owned(), to: to.to_owned() });
        let result = rename(&self.store, from, to);
        if result.is_err() {
            // It was evicted.
            self.may(to, before);
        }
        result
    }

    /// Opened with O_TRUNC, which makes it if it is not there.
    fn overwrite(&mut self) -> Done {
        let path = self.some_name();
        match self.model.latest(&path) {
            Some(_) if self.is_in_place(&path) => return self.change_in_place(&path, true),
            Some(version) => match open(&self.store, &path, libc::O_WRONLY | libc::O_TRUNC) {
                Ok(handle) => self.fill(&path, &handle, version.found.attributes.clone())?,
                Err(errno) => return self.missed(&path, errno),
            },
            None => {
                let handle = create(&self.store, &path, libc::O_TRUNC)?;
                self.fill(&path, &handle, Attributes::new())?;
            }
        }
        self.sometimes_fsync(&path)
    }

    /// It was evicted meanwhile.
    fn missed(&mut self, path: &str, errno: Errno) -> Done {
        if self.model.evicting && errno == Errno::ENOENT {
            self.may(path, None);
        }
        Err(errno)
    }

    /// A part of a file is written anew, or something is written behind its end.
    fn rewrite(&mut self) -> Done {
        let Some(path) = self.existing() else { return Ok(()) };
        if self.is_in_place(&path) {
            return self.change_in_place(&path, false);
        }
        let Some(old) = self.model.latest(&path) else { return Ok(()) };
        let handle = match open(&self.store, &path, libc::O_WRONLY) {
            Ok(handle) => handle,
            Err(errno) => return self.missed(&path, errno),
        };
        let mut open = Open {
            content: old.bytes().to_vec(),
            attributes: old.found.attributes.clone(),
            file: new_file(),
            in_place: false,
            slot: false,
        };
        for _ in 0..1 + self.rng.below(2) {
            let at = self.rng.below(open.content.len() + 1);
            let len = 1 + self.rng.below(200_000);
            let bytes = self.rng.bytes(len);
            self.put(&path, &handle, &mut open, at, &bytes)?;
            if self.rng.percent(15) {
                open.in_place = true;
                self.may(&path, open.version());
                self.fsync(&path, &handle)?;
            }
        }
        self.may(&path, open.version());
        close(&self.store, &handle);
        self.sometimes_fsync(&path)
    }

    fn change_in_place(&mut self, path: &str, truncate: bool) -> Done {
        let Some(old) = self.model.latest(path) else { return Ok(()) };
        let mut open_file = Open {
            content: old.bytes().to_vec(),
            attributes: old.found.attributes.clone(),
            file: old.file,
            in_place: true,
            slot: old.slot,
        };
        let flags = if truncate { libc::O_TRUNC } else { 0 };
        let posix = split(path).0.ends_with("/posix");
        if truncate {
            open_file.content.clear();
            if !posix && !old.bytes().is_empty() {
                // A new version of the name, private like any other.
                return match open(&self.store, path, libc::O_WRONLY | flags) {
                    Ok(handle) => self.fill(path, &handle, open_file.attributes),
                    Err(errno) => self.missed(path, errno),
                };
            }
            self.may(path, open_file.version());
        }
        let handle = match open(&self.store, path, libc::O_WRONLY | flags) {
            Ok(handle) => handle,
            Err(errno) => return self.missed(path, errno),
        };
        self.write_slots(path, &handle, &mut open_file)?;
        close(&self.store, &handle);
        if self.rng.percent(30) {
            // At once, while what was sealed is on its way.
            let handle = match open(&self.store, path, libc::O_WRONLY) {
                Ok(handle) => handle,
                Err(errno) => return self.missed(path, errno),
            };
            self.write_slots(path, &handle, &mut open_file)?;
            close(&self.store, &handle);
        }
        self.sometimes_fsync(path)
    }

    fn write_slots(&mut self, path: &str, handle: &Handle, open: &mut Open) -> Done {
        for _ in 0..1 + self.rng.below(4) {
            match self.rng.below(10) {
                0 => {
                    let size = self.rng.below(open.content.len() + 100_000);
                    open.content.resize(size, 0);
                    self.may(path, open.version());
                    answer(|reply| {
                        self.store.truncate(
                            handle.ino,
                            true,
                            size as u64,
                            Default::default(),
                            &caller(),
                            reply,
                        )
                    })
                    .map(|_| ())?;
                }
                1 if !open.content.is_empty() => {
                    let at = self.rng.below(open.content.len());
                    let len = 1 + self.rng.below(400_000);
                    let end = (at + len).min(open.content.len());
                    open.content[at..end].fill(0);
                    self.may(path, open.version());
                    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    answer(|reply| self.store.fallocate(handle, at as u64, len as u64, mode, reply))?;
                }
                _ => {
                    let at = self.rng.below(open.content.len() + 50_000).min(900_000);
                    let len = 1 + self.rng.below(300_000);
                    let bytes = self.rng.bytes(len);
                    self.put(path, handle, open, at, &bytes)?;
                }
            }
            if self.rng.percent(30) {
                self.fsync(path, handle)?;
            }
        }
        Ok(())
    }

    /// A file in shared use: visible at once, and large enough to stay one that is written in place.
    fn slot_file(&mut self) -> Done {
        let path = if self.rng.percent(50) {
            self.at("slots")
        } else {
            format!("{}/n{}", self.at("posix"), self.rng.below(2))
        };
        if self.model.latest(&path).is_some() {
            if self.is_in_place(&path) {
                let truncate = self.rng.percent(15) && path.contains("/posix/");
                return self.change_in_place(&path, truncate);
            }
            return self.unlink(&path);
        }
        let mut open = Open {
            content: Vec::new(),
            attributes: Attributes::new(),
            file: new_file(),
            in_place: true,
            slot: false,
        };
        self.may(&path, open.version());
        let handle = create(&self.store, &path, 0)?;
        let len = if path.contains("/posix/") { self.size() } else { SLOT_MIN + 1 + self.rng.below(300_000) };
        let bytes = self.rng.bytes(len);
        self.put(&path, &handle, &mut open, 0, &bytes)?;
        self.write_slots(&path, &handle, &mut open)?;
        close(&self.store, &handle);
        Ok(())
    }

    fn truncate(&mut self) -> Done {
        let Some(path) = self.existing() else { return Ok(()) };
        let Some(old) = self.model.latest(&path) else { return Ok(()) };
        let in_place = self.is_in_place(&path);
        let mut content = old.bytes().to_vec();
        let size = if self.rng.percent(10) { 0 } else { self.rng.below(content.len() + 100_000) };
        if size == content.len() {
            return Ok(());
        }
        content.resize(size, 0);
        let file = if in_place { old.file } else { new_file() };
        self.may(&path, Self::version(content, &old.found.attributes, file, in_place, old.slot));
        let store = self.store.clone();
        let result = again(&self.store, &path, &mut |ino| {
            answer(|reply| store.truncate(ino, false, size as u64, Default::default(), &caller(), reply))
        });
        match result {
            Ok(_) => self.sometimes_fsync(&path),
            Err(errno) => self.missed(&path, errno),
        }
    }

    fn unlink(&mut self, path: &str) -> Done {
        self.may(path, None);
        let (dir, name) = split(path);
        let parent = find(&self.store, dir)?;
        self.store.unlink(parent, name.as_bytes(), &caller())
    }

    fn mkdir(&mut self, path: &str) -> Done {
        let found = Found { thing: Thing::Dir, attributes: Attributes::new() };
        self.may(path, Some(Arc::new(Version { found, file: new_file(), in_place: false, slot: false })));
        let (dir, name) = split(path);
        let parent = find(&self.store, dir)?;
        self.store.mkdir(parent, name.as_bytes(), 0o755, &caller()).map(|_| ())
    }

    /// A directory is emptied and removed, and made anew.
    fn remake_dir(&mut self) -> Done {
        let dir = self.at("d1");
        if self.rng.percent(50) {
            // What replaced a file there is elsewhere, and still on its way.
            let (from, to) = (format!("{dir}/n0"), self.at("n0"));
            self.publish_at(&from)?;
            self.rename(&from, &to)?;
        }
        for path in self.model.below(&dir) {
            if self.model.latest(&path).is_some() {
                self.unlink(&path)?;
            }
        }
        self.may(&dir, None);
        self.store.rmdir(find(&self.store, &self.dir)?, b"d1")?;
        if self.rng.percent(30) {
            self.drain()?;
        }
        self.mkdir(&dir)
    }

    fn move_tree(&mut self, from: &str, to: &str) -> Done {
        let mut below = self.model.below(from);
        below.insert(0, from.to_owned());
        for path in &below {
            // Also what has been replaced, as long as its successor is on its way.
            for version in self.model.possible(path) {
                self.may(&format!("{to}{}", &path[from.len()..]), version);
            }
            self.may(path, None);
        }
        rename(&self.store, from, to)
    }

    /// A directory goes away, with all that is in it, and another comes in its place.
    fn move_dir(&mut self) -> Done {
        let (from, to) = (self.at("d0"), self.at("elsewhere"));
        for (from, to) in [(&from, &to), (&to, &from)] {
            self.move_tree(from, to)?;
            match self.rng.below(3) {
                0 => self.drain()?,
                1 => self.series()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn set_attribute(&mut self, path: &str, name: &[u8], value: Vec<u8>) -> Done {
        let Some(old) = self.model.latest(path) else { return Ok(()) };
        let mut version = (*old).clone();
        version.found.attributes.insert(name.to_vec(), value.clone());
        self.may(path, Some(Arc::new(version)));
        self.store.setxattr(find(&self.store, path)?, name, &value, 0)
    }

    fn attribute(&mut self) -> Done {
        let Some(path) = self.existing() else { return Ok(()) };
        let value = self.rng.bytes(20);
        self.set_attribute(&path, b"user.note", value)?;
        self.sometimes_fsync(&path)
    }

    /// Long attributes fill the journal, so that it wraps.
    fn long_attributes(&mut self) -> Done {
        let path = self.at("long");
        if self.model.latest(&path).is_none() {
            let handle = create(&self.store, &path, libc::O_EXCL)?;
            self.fill(&path, &handle, Attributes::new())?;
        }
        for _ in 0..4 {
            for name in [b"user.one", b"user.two"] {
                let value = self.rng.bytes(63 << 10);
                self.set_attribute(&path, name, value)?;
            }
            if self.rng.percent(30) { self.drain()? } else { self.fsync_path(&path)? }
        }
        Ok(())
    }

    fn link(&mut self) -> Done {
        let path = self.at("link");
        if self.model.latest(&path).is_some() {
            return self.unlink(&path);
        }
        let target = format!("target {}", self.rng.next()).into_bytes();
        let found = Found { thing: Thing::Link(target.clone()), attributes: Attributes::new() };
        self.may(&path, Some(Arc::new(Version { found, file: new_file(), in_place: false, slot: false })));
        let parent = find(&self.store, &self.dir)?;
        self.store.symlink(parent, b"link", &target, &caller()).map(|_| ())
    }

    /// Files that stay as they are, published one after the other.
    fn series(&mut self) -> Done {
        for _ in 0..1 + self.rng.below(3) {
            let path = self.at(&format!("series/{:03}", self.series));
            self.series += 1;
            let len = 1 + self.rng.below(60_000);
            let bytes = self.rng.bytes(len);
            let handle = create(&self.store, &path, libc::O_EXCL)?;
            write(&self.store, &handle, 0, &bytes)?;
            self.may(&path, Self::version(bytes, &Attributes::new(), new_file(), false, false));
            close(&self.store, &handle);
        }
        Ok(())
    }

    /// Reads a file back, or holds it open for a while.
    fn read(&mut self) -> Done {
        let Some(path) = self.existing() else { return Ok(()) };
        let Some(version) = self.model.latest(&path) else { return Ok(()) };
        let handle = open(&self.store, &path, libc::O_RDONLY)?;
        let bytes = read_handle(&self.store, &handle, version.bytes().len() + 1);
        if bytes.as_deref() != Ok(version.bytes()) {
            panic!("{path} reads wrong, without any crash");
        }
        if self.model.evicting && self.held.len() < 2 {
            // Only what is stored is sure to be found.
            self.fsync(&path, &handle)?;
            self.mark(Mark::Held { path: path.clone(), held: true });
            self.held.push((path, handle));
        } else {
            self.store.release(&handle);
        }
        Ok(())
    }

    fn let_go(&mut self) {
        for (path, handle) in std::mem::take(&mut self.held) {
            self.mark(Mark::Held { path, held: false });
            self.store.release(&handle);
        }
    }

    fn step(&mut self) -> Done {
        // With what a reader holds open, nothing is done but around it.
        if self.held.len() == 2 || self.rng.percent(20) {
            self.let_go();
        }
        let strict = !self.model.evicting;
        match self.rng.below(100) {
            0..18 => self.publish(),
            18..30 => self.overwrite(),
            30..40 => self.rewrite(),
            40..48 => self.slot_file(),
            48..54 => self.truncate(),
            54..58 => match self.existing() {
                Some(path) => self.unlink(&path),
                None => Ok(()),
            },
            58..63 => match self.existing() {
                Some(from) => {
                    let to = self.some_name();
                    if from == to { Ok(()) } else { self.rename(&from, &to) }
                }
                None => Ok(()),
            },
            63..66 if strict => self.remake_dir(),
            66..70 if strict => self.move_dir(),
            70..76 if strict => self.attribute(),
            76..81 if strict => self.long_attributes(),
            81..83 if strict => self.link(),
            83..89 if strict => self.series(),
            63..89 => self.publish(),
            89..94 => self.read(),
            _ => self.drain(),
        }
    }

    pub fn run(&mut self, steps: usize) {
        for at in 0..steps {
            // Often enough to wrap the journal's ring, whatever chance says.
            let wraps = !self.model.evicting && at % 12 == 5;
            match if wraps { self.long_attributes() } else { self.step() } {
                Ok(()) => {}
                Err(Errno::ENOENT | Errno::ESTALE) if self.model.evicting => {}
                Err(errno) => {
                    let now = self.store.snapshot();
                    panic!(
                        "step {at} of {}: {errno}; {} of {} bytes used",
                        self.dir, now.used_bytes, now.capacity_bytes
                    )
                }
            }
        }
        self.let_go();
    }
}

/// A file that is being written.
struct Open {
    content: Vec<u8>,
    attributes: Attributes,
    file: u64,
    in_place: bool,
    slot: bool,
}

impl Open {
    fn version(&mut self) -> Maybe {
        // Once, and for ever.
        self.slot |= self.content.len() > SLOT_MIN;
        Client::version(self.content.clone(), &self.attributes, self.file, self.in_place, self.slot)
    }
}
