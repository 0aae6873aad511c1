//! A client that changes a few files and looks what became of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::errno::Errno;

use super::change::Change;
use super::file::{File, Writer, difference};
use super::{MIB, Round, Seen, accounts, crash};
use crate::daemon::device_log::rig::{answer, barrier, caller, close, open, read_handle, rename};
use crate::daemon::device_log::rng::Rng;
use crate::l2::Class;
use crate::store::node::{NONE, ROOT_INO};
use crate::store::{Handle, Store};

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Of the steps, those that a failure reports.
const REPORTED: usize = 40;
/// Times that a read may have to wait for too long.
const READS_MAX: usize = 100;

pub struct Client<'a> {
    round: &'a Round,
    store: &'a Arc<Store>,
    rng: Rng,
    seen: &'a Seen,
    files: BTreeMap<&'static str, File>,
    log: Vec<String>,
}

/// A change meets these: there is no room, it would have to wait for too long, no device has so much.
const REFUSALS: [Errno; 3] = [Errno::ENOSPC, Errno::EIO, Errno::EFBIG];
/// No file is so long.
const ALL: usize = 64 * MIB;

type Done = Result<(), String>;

impl<'a> Client<'a> {
    pub fn new(round: &'a Round, rng: Rng, seen: &'a Seen) -> Self {
        let store = round.rig.store();
        Self { round, store, rng, seen, files: BTreeMap::new(), log: Vec::new() }
    }

    pub fn run(mut self, steps: usize) -> Done {
        let done = (0..steps).try_for_each(|_| self.step()).and_then(|()| self.end());
        done.map_err(|why| {
            let steps = &self.log[self.log.len().saturating_sub(REPORTED)..];
            format!("{why}; step {} after {steps:#?}", self.log.len())
        })
    }

    fn step(&mut self) -> Done {
        let name = NAMES[self.rng.below(NAMES.len())];
        if self.rng.percent(6) {
            let to = NAMES[self.rng.below(NAMES.len())];
            return self.rename(name, to);
        }
        let file = self.files.get(name);
        if file.is_none_or(|file| file.writer.is_none()) {
            return match file {
                None => self.create(name),
                Some(_) if self.rng.percent(15) => self.unlink(name),
                Some(_) => self.open(name),
            };
        }
        match self.rng.below(100) {
            0..76 => self.change(name),
            76..80 => self.fsync(name),
            80..84 => self.drain(),
            84..90 => self.compare(name),
            _ => self.close(name),
        }
    }

    fn count(&self, what: &AtomicUsize) {
        what.fetch_add(1, Ordering::Relaxed);
    }

    fn writer_mut(&mut self, name: &str) -> &mut Writer {
        self.files.get_mut(name).and_then(|file| file.writer.as_mut()).unwrap()
    }

    /// Eviction may have taken it, which nobody has open.
    fn has_left(&mut self, name: &str, errno: Errno) -> bool {
        let evicted = self.round.evicting && errno == Errno::ENOENT;
        if evicted {
            self.files.remove(name);
        }
        evicted
    }

    fn create(&mut self, name: &'static str) -> Done {
        let private = self.rng.percent(50);
        let flags = libc::O_RDWR | libc::O_CREAT | if private { libc::O_EXCL } else { 0 };
        self.log.push(format!("create {name}, private {private}"));
        let made = self.store.create(ROOT_INO, name.as_bytes(), 0o644, flags, &caller());
        let (_, opened) = made.map_err(|errno| format!("create: {errno}"))?;
        let writer = Writer { handle: opened.handle, content: Vec::new(), private, incomplete: false };
        self.files.insert(name, File { writer: Some(writer), closed: None });
        Ok(())
    }

    fn open(&mut self, name: &'static str) -> Done {
        let empty = self.rng.percent(33);
        self.log.push(format!("open {name}{}", if empty { " and empty it" } else { "" }));
        let handle = match open(self.store, name, libc::O_RDWR | if empty { libc::O_TRUNC } else { 0 }) {
            Ok(handle) => handle,
            Err(errno) if self.has_left(name, errno) => return Ok(()),
            Err(errno) => return self.refused(errno, &[Errno::ENOSPC, Errno::EIO]),
        };
        let private = self.store.with(|core| core.hot(handle.id.idx()).unwrap().private().is_some());
        let file = self.files.get_mut(name).unwrap();
        let content = if empty { Vec::new() } else { file.closed.clone().unwrap() };
        file.writer = Some(Writer { handle, content, private, incomplete: false });
        Ok(())
    }

    /// Something failed, in one of the ways that it may.
    fn refused(&mut self, errno: Errno, expected: &[Errno]) -> Done {
        self.count(&self.seen.refused);
        if let Some(last) = self.log.last_mut() {
            *last += &format!(" => {errno:?}");
        }
        if expected.contains(&errno) { Ok(()) } else { Err(format!("it fails with {errno}")) }
    }

    fn change(&mut self, name: &str) -> Done {
        let size = self.writer_mut(name).content.len();
        let change = Change::any(&mut self.rng, size, self.round.longest);
        self.log.push(format!("{name} of {size} bytes: {change}"));
        let store = self.store;
        let writer = self.writer_mut(name);
        match change.ask(store, &writer.handle) {
            Ok(()) => {
                change.apply(&mut writer.content);
                if self.rng.percent(10) { self.compare(name) } else { Ok(()) }
            }
            Err(errno) => {
                writer.incomplete |= writer.private && matches!(change, Change::Write { .. });
                self.refused(errno, &REFUSALS)?;
                if self.rng.percent(20) {
                    self.cut_what_is_away(name)?
                }
                self.compare(name)
            }
        }
    }

    /// After a change that came to nothing halfway: a cut that has to read back first, for longer than it may wait.
    fn cut_what_is_away(&mut self, name: &str) -> Done {
        let (store, faults) = (self.store, &self.round.rig.faults);
        let _calm = self.round.disturbance.pause();
        // What was to make room for the change may be on its way still.
        std::thread::sleep(Duration::from_millis(5));
        while store.lock().drop_some(NONE) {}
        let size = self.writer_mut(name).content.len();
        let cut = Change::Truncate { size: self.rng.below(size + 1) };
        self.log.push(format!("{name} of {size} bytes, which are away: {cut}"));
        let writer = self.writer_mut(name);
        faults.hold(Class::Demand);
        let cut_off = cut.ask(store, &writer.handle);
        faults.release(Class::Demand);
        match cut_off {
            Ok(()) => cut.apply(&mut writer.content),
            Err(errno) => self.refused(errno, &REFUSALS)?,
        }
        Ok(())
    }

    fn fsync(&mut self, name: &str) -> Done {
        self.log.push(format!("fsync {name}"));
        let store = self.store;
        let writer = self.writer_mut(name);
        match answer(|reply| store.fsync(&writer.handle, reply)) {
            Ok(()) => {
                (writer.private, writer.incomplete) = (false, false);
                if self.rng.percent(40) { self.crash_after_fsync(name) } else { Ok(()) }
            }
            Err(errno) => {
                let incomplete = writer.incomplete;
                self.refused(
                    errno,
                    &[Errno::ETIMEDOUT, if incomplete { Errno::EIO } else { Errno::ETIMEDOUT }],
                )?;
                self.compare(name)
            }
        }
    }

    fn crash_after_fsync(&mut self, name: &str) -> Done {
        let Some(device) = &self.round.device else { return Ok(()) };
        self.count(&self.seen.crashes);
        let _calm = self.round.disturbance.pause();
        let content = &self.files[name].writer.as_ref().unwrap().content;
        crash::check(device, &self.round.rig.faults, &[(name, content)], false)
    }

    fn drain(&mut self) -> Done {
        self.log.push("drain".to_owned());
        match barrier(self.store) {
            Ok(()) => Ok(()),
            Err(errno) => self.refused(errno, &[Errno::ETIMEDOUT]),
        }
    }

    fn read(&self, handle: &Handle) -> Result<Vec<u8>, String> {
        // Transfers may be held up for longer than a read waits.
        let mut reads = (0..READS_MAX).map(|_| read_handle(self.store, handle, ALL));
        let read = reads.find(|read| *read != Err(Errno::EIO));
        read.unwrap_or(Err(Errno::EIO)).map_err(|errno| format!("read: {errno}"))
    }

    /// Whether its writer reads what was written.
    fn compare(&mut self, name: &str) -> Done {
        self.count(&self.seen.compared);
        let writer = self.files[name].writer.as_ref().unwrap();
        let found = self.read(&writer.handle)?;
        if found == writer.content {
            return Ok(());
        }
        Err(format!("{name} is not what was written to it: {}", difference(&found, &writer.content)))
    }

    fn close(&mut self, name: &'static str) -> Done {
        self.log.push(format!("close {name}"));
        let file = self.files.get_mut(name).unwrap();
        let writer = file.writer.take().unwrap();
        let before = file.closed.take();
        close(self.store, &writer.handle);
        let found = self.published(name)?;
        let evicted = self.round.evicting && found.is_none();
        if !evicted && !writer.may_leave(found.as_ref(), before.as_ref()) {
            let found = found.map_or("nothing".into(), |found| difference(&found, &writer.content));
            return Err(format!("{name} is not what was closed: {found}; incomplete {}", writer.incomplete));
        }
        if found.is_none() {
            self.files.remove(name);
        } else {
            self.files.get_mut(name).unwrap().closed = found;
        }
        let all_closed = self.files.values().all(|file| file.writer.is_none());
        if all_closed && self.rng.percent(40) { self.rest() } else { Ok(()) }
    }

    /// What others find under the name.
    fn published(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        let handle = match open(self.store, name, libc::O_RDONLY) {
            Err(Errno::ENOENT) => return Ok(None),
            opened => opened.map_err(|errno| format!("open: {errno}"))?,
        };
        let found = self.read(&handle);
        close(self.store, &handle);
        found.map(Some)
    }

    /// Nobody has a file open, and nothing is held up.
    fn rest(&mut self) -> Done {
        self.log.push("rest".to_owned());
        self.count(&self.seen.rests);
        let _calm = self.round.disturbance.pause();
        accounts::check_at_rest(self.store)?;
        let Some(device) = self.round.device.as_ref().filter(|_| self.rng.percent(40)) else { return Ok(()) };
        self.count(&self.seen.crashes);
        let wanted: Vec<_> =
            self.files.iter().filter_map(|(name, file)| Some((*name, file.closed.as_ref()?))).collect();
        crash::check(device, &self.round.rig.faults, &wanted, self.round.evicting)
    }

    fn rename(&mut self, from: &'static str, to: &'static str) -> Done {
        let private = |name: &str| self.files.get(name).map(File::is_private);
        if from == to || private(from) != Some(false) || private(to) == Some(true) {
            return Ok(());
        }
        // Else it loses its name while somebody writes to it.
        if self.files.get(to).is_some_and(|file| file.writer.is_some()) && self.rng.percent(50) {
            self.close(to)?;
        }
        self.log.push(format!("rename {from} to {to}"));
        match rename(self.store, from, to) {
            Ok(()) => {}
            Err(errno) if self.has_left(from, errno) => return Ok(()),
            Err(errno) => return Err(format!("rename: {errno}")),
        }
        let file = self.files.remove(from).unwrap();
        if let Some(writer) = self.files.insert(to, file).and_then(|replaced| replaced.writer) {
            close(self.store, &writer.handle);
        }
        Ok(())
    }

    fn unlink(&mut self, name: &'static str) -> Done {
        self.log.push(format!("unlink {name}"));
        match self.store.unlink(ROOT_INO, name.as_bytes(), &caller()) {
            Ok(()) => {}
            Err(errno) if self.has_left(name, errno) => {}
            Err(errno) => return Err(format!("unlink: {errno}")),
        }
        self.files.remove(name);
        Ok(())
    }

    /// Closes everything and removes it.
    fn end(&mut self) -> Done {
        for name in NAMES {
            if self.files.get(name).is_some_and(|file| file.writer.is_some()) {
                self.close(name)?;
            }
            if self.files.contains_key(name) {
                self.unlink(name)?;
            }
        }
        Ok(())
    }
}
