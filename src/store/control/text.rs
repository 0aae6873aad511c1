//! What a shell asks for by writing paths: hints that outlive its handle.

use std::sync::Arc;

use nix::errno::Errno;

use super::classify::{Seen, Sums};
use super::hints::{Hint, Want};
use super::session::{SessionId, Who};
use super::tickets::Kind;
use crate::store::Store;
use crate::store::core::Core;
use crate::store::node::{Idx, Kind as Of, LOST};

/// Names that one write may lead to: they are looked at in one step.
const FOUND_MAX: usize = 1 << 16;

/// What paths lead to.
#[derive(Default)]
struct Found {
    files: Vec<Idx>,
    /// What may not be read, and the first reason.
    wrong: u64,
    first: Option<Errno>,
    looked: usize,
}

impl Found {
    fn miss(&mut self, errno: Errno) {
        self.wrong += 1;
        self.first.get_or_insert(errno);
    }
}

impl Core {
    /// Adds a file, or all files below a directory. Links are passed by, but for one that was named itself.
    fn gather(&self, who: &Who, top: Idx, found: &mut Found) -> Result<(), Errno> {
        let mut left = vec![top];
        while let Some(idx) = left.pop() {
            found.looked += 1;
            if found.looked > FOUND_MAX {
                return Err(Errno::E2BIG);
            }
            let node = self.node(idx);
            match (node.kind(), node.dir()) {
                (Of::Symlink, _) if idx == top => found.miss(Errno::ELOOP),
                (Of::Symlink, _) => {}
                (Of::File, _) if node.has(LOST) => found.miss(Errno::EIO),
                (Of::File, _) if !self.may(who, idx, 4) => found.miss(Errno::EACCES),
                (Of::File, _) => found.files.push(idx),
                (Of::Dir, _) if !self.may(who, idx, 5) => found.miss(Errno::EACCES),
                // In the order of their names' arrival.
                (Of::Dir, dir) => left.extend(dir.iter().flat_map(|dir| dir.children.values().rev())),
            }
        }
        Ok(())
    }

    fn prefetch_paths(&mut self, who: &Arc<Who>, paths: &[Vec<u8>]) -> Result<(), Errno> {
        let mut found = Found::default();
        for path in paths {
            match self.find_path(who, path) {
                Ok(idx) => self.gather(who, idx, &mut found)?,
                Err(errno) => found.miss(errno),
            }
        }
        let whole = |idx: Idx| Seen { idx, shown: self.shown(idx), bytes: 0..self.node(idx).size };
        let window: Vec<_> = found.files.iter().map(|idx| Ok(whole(*idx))).collect();
        let states = self.states(&window);
        self.counters.hints += 1;
        let bad = states.iter().find(|state| state.status != 0).map(|state| Errno::from_raw(-state.status));
        let sums = Sums::of(&states);
        let result = match found.first.or(bad) {
            Some(errno) if states.iter().all(|state| state.status != 0) => Err(errno),
            _ if sums.blocks == sums.blocks_l1 => {
                self.counters.hints_bypassed += 1;
                return Ok(());
            }
            _ => Ok(()),
        };
        let there = window.iter().flatten().zip(&states).filter(|(_, state)| state.status == 0);
        let wants: Vec<Want> =
            there.map(|(seen, _)| Want { node: self.id(seen.idx), bytes: seen.bytes.clone() }).collect();
        let (memory, brings, reads, joins) = self.demand_of(&wants);
        let hint = Hint {
            who: who.clone(),
            wants,
            lease: None,
            priority: 0,
            deadline: None,
            absent: found.wrong + u64::from(sums.failed),
            memory,
            brings,
            bytes_total: reads,
            bytes: 0,
            fetch: None,
        };
        if let Err(errno) = result.and_then(|()| self.may_hint(&hint)) {
            self.count_denied(errno);
            return Err(errno);
        }
        self.counters.hints_joined += u64::from(joins);
        let ticket = self.new_ticket(Kind::Prefetch, None, who.clone(), 0);
        self.add_hint(ticket, hint);
        Ok(())
    }
}

impl Store {
    /// Brings files, and all files in directories, to L1.
    ///
    /// # Errors
    /// EINVAL: there are none. E2BIG: more than may be looked at in one step. Why the window is denied.
    pub fn prefetch_paths(self: &Arc<Self>, id: SessionId, paths: &[Vec<u8>]) -> Result<(), Errno> {
        if paths.is_empty() {
            return Err(Errno::EINVAL);
        }
        self.with(|core| {
            let who = core.control.sessions.get(&id).ok_or(Errno::EBADF)?.who.clone();
            core.prefetch_paths(&who, paths)
        })
    }
}
