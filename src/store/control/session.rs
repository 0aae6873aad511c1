//! Who has opened a control file, and what belongs to that handle.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::names::{Batch, Slots};
use crate::store::process::{Caller, command_of, groups_of, process_of};

/// An open control file that owns something. Numbers are not used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId(pub u64);

/// Leases whose end a session remembers, so that releasing one twice is no error. Older ones are unknown.
const ENDED_KEPT: usize = 1024;

/// Whoever opened a control file. What it may do is what it might then, as with any descriptor: it can be handed on.
#[derive(Clone, Debug)]
pub struct Who {
    /// The process; 0 where it cannot be known.
    pub tgid: u32,
    pub uid: u32,
    pub gid: u32,
    pub groups: Box<[u32]>,
    /// What the process is called, for people.
    pub command: Box<str>,
}

impl Who {
    pub fn of(caller: &Caller) -> Self {
        let tgid = process_of(caller.tid);
        Self {
            tgid,
            uid: caller.uid,
            gid: caller.gid,
            groups: groups_of(caller.tid),
            command: command_of(tgid),
        }
    }

    pub fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

pub struct Session {
    pub who: Arc<Who>,
    /// It has said HELLO: what it writes are names.
    pub greeted: bool,
    pub names: Slots,
    /// What was interned last.
    pub batch: Batch,
    /// Leases that it has shares of.
    pub leases: BTreeSet<u64>,
    /// Leases that it had shares of, the latest last, and whether their time was over.
    ended: VecDeque<(u64, bool)>,
}

impl Session {
    pub fn new(who: Who) -> Self {
        Self {
            who: Arc::new(who),
            greeted: false,
            names: Slots::default(),
            batch: Batch::default(),
            leases: BTreeSet::new(),
            ended: VecDeque::new(),
        }
    }

    /// A lease of which it has no share any more.
    pub fn lost(&mut self, lease: u64, expired: bool) {
        if self.leases.remove(&lease) {
            if self.ended.len() == ENDED_KEPT {
                self.ended.pop_front();
            }
            self.ended.push_back((lease, expired));
        }
    }

    /// Whether it had shares of this lease, and if so, whether that expired.
    pub fn had(&self, lease: u64) -> Option<bool> {
        self.ended.iter().rev().find(|(id, _)| *id == lease).map(|(_, expired)| *expired)
    }
}
