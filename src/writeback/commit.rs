//! The committer: records of what is on the device, in the order of publishing.
//!
//! One commit takes everything that is ready: the done front of the publish queue, changed attributes and names,
//! removals. Under the lock it turns them into records of the state as it is then; without the lock the devices are
//! flushed and the records written; then what they made free is given back and whoever waited is told.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::queue::{State, Work};
use crate::l2::record::{Put, Record};
use crate::store::core::Core;
use crate::store::hot::{Place, WriteBack};
use crate::store::node::{COMMITTED, DURABLE, Detail, Idx, LOST, META_DIRTY, NAMED, NodeId, ROOT, SLOT};
use crate::store::{Store, UnitReply};

/// How long a commit waits for company, unless somebody waits for it.
const COMMIT_EVERY: Duration = Duration::from_millis(20);
/// Nodes that one step of a checkpoint encodes under the lock.
const CHECKPOINT_STEP: usize = 1024;

/// What one commit does, and what follows from it.
#[derive(Default)]
struct Commit {
    records: Vec<Vec<u8>>,
    /// Whose records these are.
    recorded: Vec<NodeId>,
    files: Vec<NodeId>,
    removed: Vec<(NodeId, u64)>,
    stale: Vec<(u8, Place)>,
    replies: Vec<(UnitReply, Result<(), Errno>)>,
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
            parent: if node.parent == ROOT || idx == ROOT { 0 } else { self.id(node.parent).0 },
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
        let mut commit = Commit { stale: std::mem::take(&mut self.queue.stale), ..Commit::default() };
        let mut put = HashSet::new();
        let mut order = Vec::new();
        while let Some(entry) = self.queue.pop_done() {
            match entry.work {
                Work::Barrier(reply) => {
                    let failed = std::mem::take(&mut self.queue.failures) > 0;
                    let result = if failed { Err(Errno::EIO) } else { Ok(()) };
                    commit.replies.extend(reply.map(|reply| (reply, result)));
                }
                Work::File(id) => {
                    let Some(idx) = self.by_id(id) else { continue };
                    let stored = entry.state == State::Written && self.is_wanted(idx);
                    if stored && self.hot_mut(idx).sealed() && self.hot_mut(idx).dirty_blocks() {
                        // A record must never name less than the whole file. It was written to in place, and sealed
                        // again, after this entry had been written: its next entry stores it.
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
                    let supersedes = if stored { std::mem::take(&mut hot.supersedes) } else { Vec::new() };
                    commit.replies.extend(answered.into_iter().map(|(_, reply)| (reply, Ok(()))));
                    if stored {
                        self.node_mut(idx).set(DURABLE, true);
                        self.remove_records(supersedes);
                        commit.files.push(id);
                        commit.flush = true;
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
        let gone: HashSet<NodeId> = commit.removed.iter().map(|(id, _)| *id).collect();
        // Directories first: a record's parent must be known when it is read back.
        for id in order.into_iter().filter(|id| !gone.contains(id)) {
            let idx = id.idx();
            self.node_mut(idx).set(META_DIRTY, false);
            // An fsync that comes while this record is being written has to wait for it.
            self.node_mut(idx).set(COMMITTED, false);
            commit.recorded.push(id);
            commit.flush |= self.node(idx).dir().is_none();
            commit.records.push(self.record(idx));
        }
        for (id, _) in &commit.removed {
            let mut bytes = Vec::new();
            Record::Remove(id.0).encode(&mut bytes);
            commit.records.push(bytes);
        }
        self.queue.committing = true;
        self.queue.urgent = false;
        commit
    }

    fn is_wanted(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        !node.has(LOST) && (node.has(NAMED) || self.hot(idx).is_some_and(|hot| hot.based > 0))
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
            // Its extents stay taken: what the device holds is not known any more.
            return;
        }
        self.counters.commits += 1;
        self.counters.committed_files += commit.files.len() as u64;
        for (id, pages) in commit.removed {
            self.space.leaving -= pages;
            if let Some(idx) = self.by_id(id) {
                let node = self.node_mut(idx);
                node.set(DURABLE, false);
                node.set(COMMITTED, false);
                self.reap(idx);
            }
        }
        for (device, place) in commit.stale {
            self.free_extents(device, &place);
        }
        for id in commit.recorded {
            if let Some(idx) = self.by_id(id) {
                let durable = self.node(idx).has(DURABLE);
                self.node_mut(idx).set(COMMITTED, durable);
            }
        }
        for id in commit.files {
            if let Some(idx) = self.by_id(id) {
                self.tidy(idx);
            }
        }
        for (reply, result) in commit.replies {
            self.reply(move || reply(result));
        }
        self.wakes.admission = true;
        self.wakes.writer = true;
    }
}

impl Store {
    pub(crate) fn run_committer(self: &Arc<Self>) {
        let Some(volume) = self.volume.clone() else { return };
        let mut last = Instant::now();
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
                && last.elapsed() < COMMIT_EVERY
            {
                if self.wake_committer.wait_until(&mut core, last + COMMIT_EVERY).timed_out() {
                    break;
                }
            }
            let mut commit = core.take_commit();
            self.settle(core);
            last = Instant::now();
            let records = std::mem::take(&mut commit.records);
            let failed = self.write_commit(&volume, &records, commit.flush);
            let mut core = self.lock();
            core.committed(commit, failed);
            self.settle(core);
        }
    }

    fn write_commit(
        self: &Arc<Self>,
        volume: &crate::l2::volume::Volume,
        records: &[Vec<u8>],
        flush: bool,
    ) -> Option<String> {
        if records.is_empty() {
            return None;
        }
        if self.lock().poisoned {
            return Some("an earlier commit failed".to_owned());
        }
        if flush && let Err(error) = volume.flush() {
            return Some(error.to_string());
        }
        if volume.needs_checkpoint(records)
            && let Err(error) = self.checkpoint(volume)
        {
            return Some(error.to_string());
        }
        volume.append(records).err().map(|error| error.to_string())
    }

    /// Writes the whole catalog anew, so that recovery never reads more than that and a bounded log.
    pub(crate) fn checkpoint(self: &Arc<Self>, volume: &crate::l2::volume::Volume) -> std::io::Result<()> {
        volume.checkpoint(&mut |push| {
            let mut at: Idx = 0;
            loop {
                let mut step = Vec::new();
                {
                    let mut core = self.lock();
                    let end = core.tree.nodes.end();
                    while at < end && step.len() < CHECKPOINT_STEP {
                        if core.tree.nodes.get(at).is_some_and(|node| node.has(DURABLE)) {
                            let record = core.record(at);
                            step.push(record);
                        }
                        at += 1;
                    }
                    if step.is_empty() && at >= end {
                        return Ok(());
                    }
                }
                for record in &step {
                    push(record)?;
                }
            }
        })?;
        self.with(|core| core.counters.checkpoints += 1);
        Ok(())
    }
}
