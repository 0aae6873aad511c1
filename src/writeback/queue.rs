//! The publish queue: what is to become durable, in order.

use std::collections::VecDeque;

use crate::store::UnitReply;
use crate::store::hot::Place;
use crate::store::node::NodeId;

pub enum Work {
    File(NodeId),
    Barrier(Barrier),
}

/// Answered when everything before it is durable.
pub struct Barrier {
    pub asker: Asker,
    /// The number of the entry as which it came. It may have to wait for later ones.
    pub since: Option<u64>,
}

pub enum Asker {
    /// It is about one file, and not what failures of others are told to.
    Fsync(UnitReply),
    /// Those that have their place here.
    Drains,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Waiting,
    /// This many transfers are out.
    Writing(u32),
    Written,
    /// Nothing to commit any more.
    Void,
}

pub struct Entry {
    pub seq: u64,
    pub work: Work,
    pub state: State,
    /// Blocks of an unsealed file that are still to be started; the rest of the file is not part of this entry.
    pub todo: Option<VecDeque<u32>>,
}

#[derive(Default)]
pub struct PublishQueue {
    entries: VecDeque<Entry>,
    next_seq: u64,
    /// Entries before this one have been started.
    cursor: u64,
    /// Records to remove with the next commit, and the pages of which device become free by it.
    pub removed: Vec<(NodeId, u8, u64)>,
    /// Records to write anew with the next commit.
    pub changed: Vec<NodeId>,
    /// Extents that no record names after the next commit.
    pub stale: Vec<(u8, Place)>,
    /// Pages among these, and of which device, that are set aside for something else already: they count as leaving.
    pub lent: Vec<(u8, u64)>,
    /// Somebody waits for the next commit.
    pub urgent: bool,
    /// Bytes on their way to the devices.
    pub in_flight: u64,
    pub in_flight_files: u64,
    /// A commit is being written right now.
    pub committing: bool,
}

impl PublishQueue {
    pub fn push(&mut self, work: Work) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        let state = match work {
            Work::File(_) => State::Waiting,
            Work::Barrier(..) => State::Written,
        };
        self.entries.push_back(Entry { seq, work, state, todo: None });
        seq
    }

    pub fn get_mut(&mut self, seq: u64) -> Option<&mut Entry> {
        let first = self.entries.front()?.seq;
        self.entries.get_mut(usize::try_from(seq.checked_sub(first)?).ok()?)
    }

    pub fn get(&self, seq: u64) -> Option<&Entry> {
        let first = self.entries.front()?.seq;
        self.entries.get(usize::try_from(seq.checked_sub(first)?).ok()?)
    }

    pub fn last(&self) -> Option<&Entry> {
        self.entries.back()
    }

    /// All files in the queue, in order: their number, that of the entry, and how far it is.
    pub fn files(&self) -> impl Iterator<Item = (NodeId, u64, State)> {
        self.entries.iter().filter_map(|entry| match entry.work {
            Work::File(id) => Some((id, entry.seq, entry.state)),
            Work::Barrier(_) => None,
        })
    }

    pub fn not_started(&self, seq: u64) -> bool {
        self.get(seq).is_some_and(|entry| entry.state == State::Waiting && entry.todo.is_none())
    }

    /// The next entry that the worker has to start.
    pub fn next_to_start(&mut self) -> Option<&mut Entry> {
        loop {
            let seq = self.cursor.max(self.entries.front()?.seq);
            self.cursor = seq;
            if self.get(seq)?.state == State::Waiting
                || self.get(seq)?.todo.as_ref().is_some_and(|todo| !todo.is_empty())
            {
                return self.get_mut(seq);
            }
            self.cursor = seq + 1;
        }
    }

    /// The front entry, if it is done.
    pub fn pop_done(&mut self) -> Option<Entry> {
        match self.entries.front()?.state {
            State::Written | State::Void => self.entries.pop_front(),
            State::Waiting | State::Writing(_) => None,
        }
    }

    pub fn front_done(&self) -> bool {
        self.entries.front().is_some_and(|entry| matches!(entry.state, State::Written | State::Void))
    }

    /// Whether files are on their way.
    pub fn pending(&self) -> bool {
        self.committing || !self.entries.is_empty() || !self.removed.is_empty()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
