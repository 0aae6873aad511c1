//! Drains: whoever wants to know when what has been published by now is durable, all of it or a part (rule R14).
//!
//! A drain has a place in the publish queue, behind everything that was published before it. When the committer has come
//! to that place, all of it is durable or has failed: that ends every drain, and what is published later never has to be
//! waited for. Beside that, a drain that wants to tell how far it is knows the files that it waits for, each by the entry of the
//! queue that has the bytes it asked for: a file that is written to again and again is settled with that entry. A drain
//! of a part ends as soon as its own files are settled, since what is before those in the queue is so, too (rule R4).
//!
//! A file that is unlinked meanwhile is settled: there is nothing left to lose. One that is replaced is waited for as
//! its successor, unless it is stored all the same. One that cannot be stored is told to every drain that waits for
//! it; if none does, the next drain of everything, or of a directory that it was in, hears of it (rule R6).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use super::UnitReply;
use super::core::Core;
use super::node::{Idx, NONE, NodeId, ROOT};
use super::patience::Once;
use crate::shown;
use crate::units::counted;
use crate::writeback::queue::{Asker, Barrier, State, Work};

/// Paths of failed files that a drain knows, and that are kept for the next. All are counted.
pub const FAILURES_MAX: usize = 1024;
/// Of these, how many the line in `.ctl/events` has.
const NAMED_IN_EVENT: usize = 3;

/// A drain, for as long as it goes on. Numbers are not used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DrainId(u64);

/// What is to be drained.
#[derive(Clone, Debug)]
pub enum Scope {
    All,
    /// These files, and what is below these directories.
    Of(Vec<Idx>),
}

/// How far a drain has come, or had when it ended.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What it waits for, and what it has waited for.
    pub files: u64,
    pub bytes: u64,
    /// What of it is durable, or was removed.
    pub drained_files: u64,
    pub drained_bytes: u64,
    pub failed: u64,
    /// The first of the failed.
    pub failures: Vec<Arc<[u8]>>,
}

impl Progress {
    fn add_failure(&mut self, path: &Arc<[u8]>) {
        self.failed += 1;
        if self.failures.len() < FAILURES_MAX {
            self.failures.push(path.clone());
        }
    }
}

/// What follows when a drain has ended. Called under the lock.
pub type Done = Box<dyn FnOnce(&mut Core, Result<(), Errno>, Progress) + Send>;

#[derive(Clone, Copy)]
struct Awaited {
    /// The entry of the publish queue that has what was published.
    seq: u64,
    bytes: u64,
}

struct Drain {
    /// The entry of the publish queue behind everything that it waits for.
    place: u64,
    all: bool,
    /// The files that are not settled. A drain that nobody asks how far it is does without.
    awaited: HashMap<NodeId, Awaited>,
    /// The commit with which the changed names and attributes are durable.
    commit: u64,
    progress: Progress,
    deadline: Option<Instant>,
    /// What `done` answers through, if that may have been answered already.
    once: Option<Once>,
    /// It is one of those that are counted.
    counts: bool,
    done: Done,
}

/// Files that could not be stored and that nobody has been told of.
#[derive(Default)]
struct Untold {
    paths: Vec<Arc<[u8]>>,
    /// Those beyond, whose paths are not kept.
    more: u64,
}

impl Untold {
    fn push(&mut self, path: Arc<[u8]>) {
        if self.paths.len() < FAILURES_MAX {
            self.paths.push(path);
        } else {
            self.more += 1;
        }
    }
}

/// All drains that go on.
#[derive(Default)]
pub struct Drains {
    all: BTreeMap<DrainId, Drain>,
    next: u64,
    /// Commits that have ended.
    commits: u64,
    /// What the commit stores that is being written.
    landing: Vec<(NodeId, u64)>,
    untold: Untold,
}

impl Drains {
    pub fn waiting(&self) -> u64 {
        self.all.values().filter(|drain| drain.counts).count() as u64
    }

    /// Whether somebody still waits for the entry `place` of the publish queue.
    pub fn waits_at(&self, place: u64) -> bool {
        let listens = |drain: &Drain| !drain.once.as_ref().is_some_and(Once::is_given);
        self.all.values().any(|drain| drain.place == place && listens(drain))
    }

    /// A commit that stores these, each from this entry of the publish queue, is about to be written.
    pub fn take_off(&mut self, stored: Vec<(NodeId, u64)>) {
        self.landing = stored;
    }

    fn ids(&self) -> Vec<DrainId> {
        self.all.keys().copied().collect()
    }
}

impl Core {
    /// Has `done` called when everything in `scope` that is published now is durable, or cannot be; at the latest at
    /// the deadline. Before this returns, if nothing has to be waited for.
    pub fn begin_drain(&mut self, scope: &Scope, deadline: Option<Instant>, done: Done) -> DrainId {
        self.counters.drains += 1;
        self.begin(scope, deadline, None, true, done)
    }

    /// Replies when everything accepted so far is durable. `once` is what `reply` was made of, if it has a deadline.
    pub fn barrier(&mut self, reply: UnitReply, once: Option<Once>) {
        let done: Done = Box::new(move |core, ended, _| core.reply(move || reply(ended)));
        self.begin(&Scope::All, None, once, false, done);
    }

    fn begin(
        &mut self,
        scope: &Scope,
        deadline: Option<Instant>,
        once: Option<Once>,
        counts: bool,
        done: Done,
    ) -> DrainId {
        let id = DrainId(self.drains.next);
        self.drains.next += 1;
        let all = matches!(scope, Scope::All);
        let mut progress = Progress::default();
        if self.settings.memory_only {
            done(self, Ok(()), progress);
            return id;
        }
        self.take_untold(scope, &mut progress);
        if self.poisoned {
            self.counters.drains_failed += u64::from(counts);
            done(self, Err(Errno::EIO), progress);
            return id;
        }
        self.settle_names_of_unfinished();
        let awaited = if counts { self.awaited_in(scope) } else { HashMap::new() };
        progress.files = awaited.len() as u64;
        progress.bytes = awaited.values().map(|file| file.bytes).sum();
        let changed = !self.queue.changed.is_empty() || !self.queue.removed.is_empty();
        let commit = self.drains.commits + u64::from(self.queue.committing) + u64::from(changed);
        let drain = Drain { place: 0, all, awaited, commit, progress, deadline, once, counts, done };
        self.drains.all.insert(id, drain);
        let pending = all && (self.queue.pending() || !self.heirs.is_empty());
        if !pending && self.is_settled(id) {
            self.end_drain(id, None);
            return id;
        }
        let place = self.place_in_queue();
        if let Some(drain) = self.drains.all.get_mut(&id) {
            drain.place = place;
        }
        id
    }

    /// The entry behind everything that has been published. Those who come one after another share it, so that however
    /// often somebody asks, a device that is stuck does not have the queue grow.
    fn place_in_queue(&mut self) -> u64 {
        self.queue.urgent = true;
        self.wakes.writer = true;
        self.wakes.committer = true;
        match self.queue.last() {
            Some(entry)
                if matches!(entry.work, Work::Barrier(Barrier { asker: Asker::Drains, since: None })) =>
            {
                entry.seq
            }
            _ => self.queue.push(Work::Barrier(Barrier { asker: Asker::Drains, since: None })),
        }
    }

    /// The files in `scope` that are on their way to the device.
    fn awaited_in(&self, scope: &Scope) -> HashMap<NodeId, Awaited> {
        let queued = self.queue.files().filter(|(_, _, state)| *state != State::Void);
        let queued = queued.filter_map(|(id, seq, _)| {
            let idx = self.by_id(id).filter(|idx| self.is_wanted(*idx))?;
            Some((idx, id, seq))
        });
        let landing = self.drains.landing.iter().filter_map(|(id, seq)| Some((self.by_id(*id)?, *id, *seq)));
        let parts: HashSet<Idx> = match scope {
            Scope::All => HashSet::new(),
            Scope::Of(parts) => parts.iter().copied().collect(),
        };
        let mut awaited = HashMap::new();
        for (idx, id, seq) in landing.chain(queued) {
            if matches!(scope, Scope::All) || self.is_part(idx, &parts) {
                let bytes = self.node(idx).size;
                let file = awaited.entry(id).or_insert(Awaited { seq, bytes });
                file.seq = file.seq.max(seq);
            }
        }
        awaited
    }

    /// The path of a file, as it is or was, or will be once it is published.
    fn raw_path(&self, idx: Idx) -> Vec<u8> {
        let (mut parent, name) = self.home(idx);
        let mut parts = vec![name];
        while parent != NONE && parent != ROOT {
            let Some(node) = self.tree.nodes.get(parent) else { break };
            parts.push(&node.name);
            parent = self.tree.parent(parent).unwrap_or(NONE);
        }
        parts.reverse();
        parts.join(&b'/')
    }

    /// Whether `idx`, or what has taken its name, is one of `parts` or below one.
    fn is_part(&self, idx: Idx, parts: &HashSet<Idx>) -> bool {
        let mut at = Some(idx);
        while let Some(here) = at.filter(|here| self.tree.nodes.get(*here).is_some()) {
            if parts.contains(&here) {
                return true;
            }
            at = if here == ROOT { None } else { self.tree.parent(here) };
        }
        let heir = self.hot(idx).and_then(|hot| hot.heir).and_then(|heir| self.by_id(heir));
        heir.is_some_and(|heir| parts.contains(&heir))
    }

    /// Of failures that nobody has been told of, those that a drain of `scope` is told.
    fn take_untold(&mut self, scope: &Scope, progress: &mut Progress) {
        if self.drains.untold.paths.is_empty() {
            return;
        }
        let mut untold = std::mem::take(&mut self.drains.untold);
        match scope {
            Scope::All => {
                untold.paths.drain(..).for_each(|path| progress.add_failure(&path));
                progress.failed += std::mem::take(&mut untold.more);
            }
            Scope::Of(parts) => {
                let dirs = parts.iter().filter(|idx| self.node(**idx).dir().is_some());
                let below: Vec<Vec<u8>> = dirs.map(|idx| self.raw_path(*idx)).collect();
                let is_below = |path: &[u8]| {
                    let within = |dir: &Vec<u8>| {
                        path.strip_prefix(&dir[..])
                            .is_some_and(|rest| dir.is_empty() || rest.first() == Some(&b'/'))
                    };
                    below.iter().any(within)
                };
                let (told, others): (Vec<_>, Vec<_>) =
                    untold.paths.into_iter().partition(|path| is_below(path));
                untold.paths = others;
                told.iter().for_each(|path| progress.add_failure(path));
            }
        }
        self.drains.untold = untold;
    }

    fn is_settled(&self, id: DrainId) -> bool {
        let Some(drain) = self.drains.all.get(&id) else { return false };
        drain.awaited.is_empty() && drain.commit <= self.drains.commits
    }

    /// Ends a drain, if it goes on. `why`, if something else ends it than that everything is settled.
    fn end_drain(&mut self, id: DrainId, why: Option<Errno>) {
        let Some(mut drain) = self.drains.all.remove(&id) else { return };
        if drain.once.as_ref().is_some_and(Once::is_given) {
            // A failure is told to somebody who still listens.
            return self.tell_others(drain.progress);
        }
        let progress = &mut drain.progress;
        if why.is_none() {
            let left = drain.awaited.values();
            (progress.drained_files, progress.drained_bytes) = left
                .fold((progress.drained_files, progress.drained_bytes), |(files, bytes), file| {
                    (files + 1, bytes + file.bytes)
                });
        }
        let ended = match why {
            Some(errno) => Err(errno),
            None if progress.failed > 0 => Err(Errno::EIO),
            None => Ok(()),
        };
        if drain.counts {
            let event = Self::how_it_failed(ended, progress);
            self.counters.drained_files += progress.drained_files;
            self.counters.drained_bytes += progress.drained_bytes;
            self.counters.drain_failures += progress.failed;
            self.counters.drains_failed += u64::from(ended == Err(Errno::EIO));
            self.counters.drain_timeouts += u64::from(ended == Err(Errno::ETIMEDOUT));
            if let Some(event) = event {
                self.event(event);
            }
        }
        (drain.done)(self, ended, drain.progress);
    }

    /// A line for `.ctl/events`.
    fn how_it_failed(ended: Result<(), Errno>, progress: &Progress) -> Option<String> {
        let files = counted(progress.files, "file");
        match ended {
            Err(Errno::EIO) => {
                let first: Vec<_> =
                    progress.failures.iter().take(NAMED_IN_EVENT).map(|path| shown::name(path)).collect();
                let more = if progress.failed > first.len() as u64 { ", ..." } else { "" };
                let named =
                    if first.is_empty() { String::new() } else { format!(": {}{more}", first.join(", ")) };
                Some(format!("a drain of {files} failed: {} could not be stored{named}", progress.failed))
            }
            Err(Errno::ETIMEDOUT) => Some(format!(
                "a drain of {files} timed out: {} were stored by then, the others will be",
                progress.drained_files
            )),
            _ => None,
        }
    }

    /// Nobody has been told of these failures, so the next one is.
    pub fn tell_others(&mut self, progress: Progress) {
        self.drains.untold.more += progress.failed - progress.failures.len() as u64;
        progress.failures.into_iter().for_each(|path| self.drains.untold.push(path));
    }

    /// How far a drain is, as long as it goes on.
    pub fn drain_progress(&self, id: DrainId) -> Option<&Progress> {
        self.drains.all.get(&id).map(|drain| &drain.progress)
    }

    /// Nobody waits any more, and `done` is not called. What it waits for is stored all the same.
    pub fn stop_drain(&mut self, id: DrainId) -> Option<Progress> {
        self.drains.all.remove(&id).map(|drain| drain.progress)
    }

    /// Ends those whose time is over.
    pub fn end_drains(&mut self, now: Instant) {
        let is_over = |drain: &Drain| drain.deadline.is_some_and(|deadline| deadline <= now);
        let over: Vec<DrainId> =
            self.drains.all.iter().filter(|(_, drain)| is_over(drain)).map(|(id, _)| *id).collect();
        for id in over {
            self.end_drain(id, Some(Errno::ETIMEDOUT));
        }
    }

    /// The committer has come to this entry, and everything before it is on the device.
    pub fn reached(&mut self, place: u64) {
        for id in self.drains.ids() {
            if self.drains.all.get(&id).is_some_and(|drain| drain.place == place) {
                self.end_drain(id, None);
            }
        }
    }

    /// A commit has ended, and what it stored is on the device.
    pub fn landed(&mut self) {
        self.drains.commits += 1;
        for (id, seq) in std::mem::take(&mut self.drains.landing) {
            for drain in self.drains.all.values_mut() {
                if drain.awaited.get(&id).is_some_and(|file| file.seq <= seq)
                    && let Some(file) = drain.awaited.remove(&id)
                {
                    drain.progress.drained_files += 1;
                    drain.progress.drained_bytes += file.bytes;
                }
            }
        }
        self.end_settled();
    }

    fn end_settled(&mut self) {
        for id in self.drains.ids() {
            if self.drains.all.get(&id).is_some_and(|drain| !drain.all) && self.is_settled(id) {
                self.end_drain(id, None);
            }
        }
    }

    /// Entry `seq` of the publish queue came to nothing: the file has lost its name, and is not stored. Who waits for it
    /// waits for what has taken the name.
    pub fn passed_over(&mut self, id: NodeId, seq: u64, heir: Option<NodeId>) {
        if self.drains.all.is_empty() {
            return;
        }
        let heir = heir.filter(|heir| self.by_id(*heir).is_some_and(|idx| !self.is_durable(idx)));
        // Of what is not stored, an older version may have to be removed still.
        let commit = self.drains.commits + 1 + u64::from(self.queue.committing);
        for drain in self.drains.all.values_mut() {
            if drain.awaited.get(&id).is_none_or(|file| file.seq > seq) {
                continue;
            }
            let Some(file) = drain.awaited.remove(&id) else { continue };
            drain.commit = drain.commit.max(commit);
            if let Some(heir) = heir.filter(|heir| !drain.awaited.contains_key(heir)) {
                drain.awaited.insert(heir, Awaited { seq: 0, ..file });
            } else {
                drain.progress.drained_files += 1;
                drain.progress.drained_bytes += file.bytes;
            }
        }
    }

    /// R6: a file could not be stored. `seq` is the first entry of the publish queue that was to have it.
    pub fn tell_drains(&mut self, id: NodeId, seq: u64) {
        let path: Arc<[u8]> = self.raw_path(id.idx()).into();
        let mut told = false;
        for drain in self.drains.all.values_mut() {
            let file = drain.awaited.remove(&id);
            if file.is_some() || drain.all && seq < drain.place {
                drain.progress.add_failure(&path);
                told = true;
            }
        }
        if !told {
            self.drains.untold.push(path);
        }
        self.end_settled();
    }

    /// Nothing is stored any more: all drains have failed, and all that they wait for.
    pub fn fail_drains(&mut self) {
        self.drains.landing = Vec::new();
        for id in self.drains.ids() {
            let awaited: Vec<NodeId> = self
                .drains
                .all
                .get(&id)
                .map_or_else(Vec::new, |drain| drain.awaited.keys().copied().collect());
            let mut paths: Vec<Arc<[u8]>> = awaited
                .into_iter()
                .filter_map(|id| self.by_id(id))
                .map(|idx| self.raw_path(idx).into())
                .collect();
            paths.sort_unstable();
            if let Some(drain) = self.drains.all.get_mut(&id) {
                drain.awaited = HashMap::new();
                paths.iter().for_each(|path| drain.progress.add_failure(path));
            }
            self.end_drain(id, Some(Errno::EIO));
        }
    }
}
