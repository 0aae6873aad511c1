//! The committer: records of what is on the device, in the order of publishing.
//!
//! One commit takes everything that is ready: the done front of the publish queue, changed attributes and names,
//! removals. Under the lock it turns them into records of the state as it is then; without the lock the devices are
//! flushed and the records written; then what they made free is given back and whoever waited is told.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::queue::{Asker, Barrier, State, Work};
use crate::l2::journal::{Checkpoint, Error as JournalError};
use crate::l2::record::{Put, Record};
use crate::l2::volume::Volume;
use crate::store::core::Core;
use crate::store::hot::{Place, WriteBack};
use crate::store::node::{COMMITTED, DURABLE, Detail, Idx, LOST, META_DIRTY, NAMED, NodeId, ROOT, SLOT};
use crate::store::{Store, UnitReply};
use crate::sync::now;

/// How long a commit waits for company, unless somebody waits for it.
const COMMIT_EVERY: Duration = Duration::from_millis(20);
/// Nodes that one step of a checkpoint looks at under the lock, and bytes that it encodes.
const CHECKPOINT_STEP: Idx = 1024;
const CHECKPOINT_STEP_BYTES: usize = 256 << 10;

/// What one commit does, and what follows from it.
#[derive(Default)]
struct Commit {
    records: Vec<Vec<u8>>,
    /// Nodes that the records tell of. Until those are on the device, fsync must not take the nodes for durable.
    recorded: Vec<NodeId>,
    /// How many of them are files stored anew.
    files: u64,
    removed: Vec<(NodeId, u8, u64)>,
    stale: Vec<(u8, Place)>,
    lent: Vec<(u8, u64)>,
    replies: Vec<(UnitReply, Result<(), Errno>)>,
    /// Places in the publish queue that it has come to, where drains wait.
    drains: Vec<u64>,
    /// Bytes of some file are named by a record for the first time.
    flush: bool,
}

impl Core {
    pub fn record(&mut self, idx: Idx) -> Vec<u8> {
        let node = self.node(idx);
        let (size, extents, crcs) = match node.detail {
            Detail::File => self.layout(idx),
            _ => (node.size, Vec::new(), Vec::new()),
        };
        if let Some(hot) = &mut self.node_mut(idx).hot {
            hot.size_kept = size;
        }
        let node = self.node(idx);
        let (kind, target) = match &node.detail {
            Detail::File => (0, Vec::new()),
            Detail::Dir(_) => (1, Vec::new()),
            Detail::Symlink(target) => (2, target.to_vec()),
        };
        let put = Put {
            id: self.id(idx).0,
            kind,
            device: node.device,
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            // For a version that has lost its name and is still needed, this may be a directory that is gone.
            parent: if node.parent == ROOT || idx == ROOT {
                0
            } else {
                NodeId::new(node.parent, node.parent_generation).0
            },
            seq: node.seq,
            size,
            mtime: node.mtime,
            ctime: node.ctime,
            atime: node.atime,
            flags: u8::from(node.has(SLOT)) | u8::from(node.dir().is_some_and(|dir| dir.posix)) << 1,
            name: node.name.to_vec(),
            target,
            extents,
            crcs,
            xattrs: node
                .xattrs
                .iter()
                .flat_map(|list| list.iter())
                .map(|(k, v)| (k.to_vec(), v.to_vec()))
                .collect(),
        };
        let mut out = Vec::new();
        Record::Put(Box::new(put)).encode(&mut out);
        out
    }

    fn commit_ready(&self) -> bool {
        self.queue.front_done() || !self.queue.removed.is_empty() || !self.queue.changed.is_empty()
    }

    /// Takes everything that is ready.
    fn take_commit(&mut self) -> Commit {
        let mut commit = Commit {
            stale: std::mem::take(&mut self.queue.stale),
            lent: std::mem::take(&mut self.queue.lent),
            ..Commit::default()
        };
        let mut put = HashSet::new();
        let mut goes_on = false;
        let mut order = Vec::new();
        let mut stores = Vec::new();
        while let Some(entry) = self.queue.pop_done() {
            match entry.work {
                Work::Barrier(Barrier { asker, since }) => {
                    let since = since.unwrap_or(entry.seq);
                    if matches!(asker, Asker::Drains) && !self.drains.waits_at(since) {
                        // Nobody is left whom it would be told.
                        commit.drains.push(since);
                        continue;
                    }
                    if self.store_heirs(since) {
                        self.queue.push(Work::Barrier(Barrier { asker, since: Some(since) }));
                        goes_on = true;
                        continue;
                    }
                    match asker {
                        Asker::Fsync(reply) => commit.replies.push((reply, Ok(()))),
                        Asker::Drains => commit.drains.push(since),
                    }
                }
                Work::File(id) => {
                    let Some(idx) = self.by_id(id) else { continue };
                    let stored = entry.state == State::Written && self.is_wanted(idx);
                    if stored && self.hot_mut(idx).sealed() && self.hot_mut(idx).dirty_blocks() {
                        // A record must never name less than the whole file. It was written to in place, and sealed
                        // again, after this entry had been written: its next entry stores it.
                        self.inherit(idx, entry.seq);
                        if self.hot_mut(idx).write_back == WriteBack::Queued(entry.seq) {
                            self.hot_mut(idx).write_back = WriteBack::None;
                        }
                        let seq = match self.hot_mut(idx).write_back {
                            WriteBack::Queued(seq) => seq,
                            WriteBack::None => self.store_soon(idx),
                        };
                        self.hot_mut(idx)
                            .fsyncs
                            .iter_mut()
                            .for_each(|(wanted, _)| *wanted = (*wanted).max(seq));
                        continue;
                    }
                    let hot = self.hot_mut(idx);
                    if hot.write_back == WriteBack::Queued(entry.seq) {
                        hot.write_back = WriteBack::None;
                    }
                    let waiting = std::mem::take(&mut hot.fsyncs);
                    let (answered, later): (Vec<_>, Vec<_>) =
                        waiting.into_iter().partition(|(seq, _)| *seq <= entry.seq);
                    hot.fsyncs = later;
                    let answered = if stored { answered } else { self.pass_on(idx, answered) };
                    if !stored {
                        let heir = self.hot(idx).and_then(|hot| hot.heir);
                        self.passed_over(id, entry.seq, heir);
                    }
                    let hot = self.hot_mut(idx);
                    let supersedes = if stored { std::mem::take(&mut hot.supersedes) } else { Vec::new() };
                    commit.replies.extend(answered.into_iter().map(|(_, reply)| (reply, Ok(()))));
                    if stored {
                        self.heirs.remove(&id);
                        self.node_mut(idx).set(DURABLE, true);
                        self.remove_records(supersedes);
                        self.has_stood_in(idx);
                        commit.files += 1;
                        commit.flush = true;
                        stores.push((id, entry.seq));
                        if put.insert(id) {
                            order.push(id);
                        }
                    } else {
                        self.tidy(idx);
                    }
                }
            }
        }
        for id in std::mem::take(&mut self.queue.changed) {
            let Some(idx) = self.by_id(id) else { continue };
            self.node_mut(idx).set(META_DIRTY, false);
            if self.node(idx).has(DURABLE) && put.insert(id) {
                order.push(id);
            }
        }
        commit.removed = std::mem::take(&mut self.queue.removed);
        let gone: HashSet<NodeId> = commit.removed.iter().map(|(id, ..)| *id).collect();
        // Directories first: a record's parent must be known when it is read back.
        for id in order.into_iter().filter(|id| !gone.contains(id)) {
            let idx = id.idx();
            let node = self.node_mut(idx);
            node.set(META_DIRTY, false);
            node.set(COMMITTED, false);
            commit.recorded.push(id);
            commit.flush |= self.node(idx).dir().is_none();
            self.recount(idx);
            commit.records.push(self.record(idx));
        }
        for (id, ..) in &commit.removed {
            let mut bytes = Vec::new();
            Record::Remove(id.0).encode(&mut bytes);
            commit.records.push(bytes);
        }
        self.drains.take_off(stores);
        self.queue.committing = true;
        self.queue.urgent = goes_on;
        commit
    }

    /// Those of the fsyncs of a version that is not stored any more which can be answered: they need not wait for what has
    /// its name now, and it was not lost.
    fn pass_on(&mut self, idx: Idx, fsyncs: Vec<(u64, UnitReply)>) -> Vec<(u64, UnitReply)> {
        if self.node(idx).has(LOST) {
            for (_, reply) in fsyncs {
                self.reply(move || reply(Err(Errno::EIO)));
            }
            return Vec::new();
        }
        if self.hot(idx).is_none_or(|hot| hot.heir.is_none()) {
            return fsyncs;
        }
        for (_, reply) in fsyncs {
            self.answer_with_successors(reply);
        }
        Vec::new()
    }

    /// Whether a file in the publish queue is to be stored.
    pub fn is_wanted(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        !node.has(LOST) && (node.has(NAMED) || self.stands_in(idx))
    }

    /// The records are on the device, or never will be.
    fn committed(&mut self, commit: Commit, failed: Option<String>) {
        self.queue.committing = false;
        if let Some(why) = failed {
            if !self.poisoned {
                log::error!("the catalog cannot be written: {why}; nothing is stored any more");
                self.event(format!("the catalog cannot be written: {why}; nothing is stored any more"));
            }
            self.poisoned = true;
            for (reply, _) in commit.replies {
                self.reply(move || reply(Err(Errno::EIO)));
            }
            self.fail_drains();
            // Its extents stay taken: what the device holds is not known any more.
            return;
        }
        self.counters.commits += 1;
        self.counters.committed_files += commit.files;
        for (id, device, pages) in commit.removed {
            if pages > 0 {
                self.space.on(device).leaving -= pages;
            }
            if let Some(idx) = self.by_id(id) {
                let node = self.node_mut(idx);
                node.set(DURABLE, false);
                node.set(COMMITTED, false);
                self.reap(idx);
            }
        }
        for (device, pages) in commit.lent {
            let space = self.space.on(device);
            space.leaving -= pages;
            space.stale += pages;
        }
        for (device, place) in commit.stale {
            self.space.on(device).stale -= crate::store::core::pages_of(&place);
            self.free_extents(device, &place);
        }
        for id in commit.recorded {
            if let Some(idx) = self.by_id(id) {
                let durable = self.node(idx).has(DURABLE);
                self.node_mut(idx).set(COMMITTED, durable);
                self.tidy(idx);
            }
        }
        for (reply, result) in commit.replies {
            self.reply(move || reply(result));
        }
        self.landed();
        commit.drains.into_iter().for_each(|place| self.reached(place));
        self.wakes.admission = true;
        self.wakes.writer = true;
    }
}

impl Store {
    pub(crate) fn run_committer(self: &Arc<Self>) {
        let Some(volume) = self.volume.clone() else { return };
        let mut last = now();
        loop {
            let mut core = self.lock();
            while !core.commit_ready() && !core.stopping {
                self.wake_committer.wait(&mut core);
            }
            if core.stopping && !core.commit_ready() {
                return self.settle(core);
            }
            // Wait for company, unless somebody waits for us or the writers for room.
            while !core.queue.urgent
                && !core.stopping
                && core.waiters.is_empty()
                && now().saturating_duration_since(last) < COMMIT_EVERY
            {
                if self.wake_committer.wait_until(&mut core, last + COMMIT_EVERY).timed_out() {
                    break;
                }
            }
            self.settle(core);
            last = now();
            self.commit(&volume, false);
        }
    }

    /// Makes durable what is ready, and writes a checkpoint with it if the log is half full or one is wanted: so that
    /// recovery never reads more than that and a bounded log.
    ///
    /// One at a time: two checkpoints would be written to the same place, and a record that was taken before a
    /// checkpoint and appended after it began would bring back an older state than the checkpoint has.
    pub(crate) fn commit(self: &Arc<Self>, volume: &Volume, checkpoint: bool) {
        let _one = self.committing.lock();
        let mut failed = None;
        let mut begun = None;
        if (checkpoint || volume.needs_checkpoint()) && !self.lock().poisoned {
            match self.write_checkpoint(volume) {
                Ok(written) => begun = Some(written),
                Err(JournalError::Full) => log::warn!("the catalog is too large for a checkpoint"),
                Err(error) => failed = Some(error.to_string()),
            }
        }
        let mut core = self.lock();
        let mut commit = core.take_commit();
        self.settle(core);
        let records = std::mem::take(&mut commit.records);
        let failed = failed.or_else(|| self.write_commit(volume, &records, commit.flush, begun));
        let mut core = self.lock();
        core.committed(commit, failed);
        self.settle(core);
    }

    fn write_commit(
        self: &Arc<Self>,
        volume: &Volume,
        records: &[Vec<u8>],
        flush: bool,
        checkpoint: Option<Checkpoint>,
    ) -> Option<String> {
        if self.lock().poisoned {
            return Some("an earlier commit failed".to_owned());
        }
        if records.is_empty() && checkpoint.is_none() {
            return None;
        }
        if flush && let Err(error) = volume.flush() {
            return Some(error.to_string());
        }
        self.append(volume, records, checkpoint).err().map(|error| error.to_string())
    }

    /// Appends the records, and only then makes the checkpoint that was written before they were taken the valid one. It
    /// was written bit by bit while names and files changed; with everything that has changed since, all of one instant,
    /// recovery finds a state that was.
    fn append(
        self: &Arc<Self>,
        volume: &Volume,
        records: &[Vec<u8>],
        checkpoint: Option<Checkpoint>,
    ) -> Result<(), JournalError> {
        let mut appended = if records.is_empty() { Ok(()) } else { volume.append(records) };
        if matches!(appended, Err(JournalError::Full)) && checkpoint.is_none() {
            self.finish_checkpoint(volume, self.write_checkpoint(volume)?)?;
            appended = volume.append(records);
        }
        if let Some(checkpoint) = checkpoint
            && matches!(appended, Ok(()) | Err(JournalError::Full))
        {
            self.finish_checkpoint(volume, checkpoint)?;
        }
        match appended {
            // More changes at once than the log holds: they cannot become durable together.
            Err(JournalError::Full) => records.iter().try_for_each(|record| {
                let record = std::slice::from_ref(record);
                match volume.append(record) {
                    Err(JournalError::Full) => {
                        self.finish_checkpoint(volume, self.write_checkpoint(volume)?)?;
                        volume.append(record)
                    }
                    appended => appended,
                }
            }),
            appended => appended,
        }
    }

    /// Writes the whole catalog anew.
    fn write_checkpoint(self: &Arc<Self>, volume: &Volume) -> Result<Checkpoint, JournalError> {
        let mut checkpoint = volume.begin_checkpoint();
        let mut at: Idx = 0;
        loop {
            let mut step = Vec::new();
            let mut bytes = 0;
            {
                let mut core = self.lock();
                let end = core.tree.nodes.end().min(at.saturating_add(CHECKPOINT_STEP));
                if at >= end {
                    return Ok(checkpoint);
                }
                while at < end && bytes < CHECKPOINT_STEP_BYTES {
                    if core.tree.nodes.get(at).is_some_and(|node| node.has(DURABLE)) {
                        let record = core.record(at);
                        bytes += record.len();
                        step.push(record);
                    }
                    at += 1;
                }
            }
            for record in &step {
                checkpoint.push(record)?;
            }
        }
    }

    fn finish_checkpoint(
        self: &Arc<Self>,
        volume: &Volume,
        checkpoint: Checkpoint,
    ) -> Result<(), JournalError> {
        volume.finish_checkpoint(checkpoint)?;
        self.with(|core| core.counters.checkpoints += 1);
        Ok(())
    }
}
