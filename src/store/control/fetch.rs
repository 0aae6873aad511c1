//! How a hint brings its window to L1 (rules R7, R9).
//!
//! It goes through its *pieces* in order: a piece that is in L1 is passed, one that is on its way (whoever asked for it) is waited
//! for, and of the others so many are read at a time as keep a device busy. So a reader who wants a block of the
//! window finds it read soon, or not begun, and then reads it itself, before all hints.
//!
//! What is in L1 of a window that runs is *held*: it does not leave until the hint ends. Memory is taken for each piece before
//! it is read. Who finds none waits for it, and those who began later take none meanwhile; what they hold they let go of, if
//! it is needed, and read it again later. So whoever began first waits for nobody who waits for it. A reader or writer
//! who finds no other memory takes what hints hold, those that began last first.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use nix::errno::Errno;

use super::classify::{Seen, millis};
use super::hints::{Hint, LeaseWanted, Want};
use super::parts::{blocks_of, merged};
use super::tickets::Progress;
use crate::abi;
use crate::l2::Class;
use crate::store::change::Needs;
use crate::store::core::Core;
use crate::store::hot::{Block, block_len};
use crate::store::lists::Droppable;
use crate::store::node::{LOST, NodeId, SLOT};

/// Blocks that are looked at, and read, as one.
const PIECE_BLOCKS: u32 = 16;
/// What one hint has on its way at a time, unless one file is more. Devices are busy with less.
const AHEAD_BYTES: u64 = 16 << 20;
/// Pieces that it waits for at a time.
const AHEAD_PIECES: usize = 128;

#[derive(Clone, Debug)]
struct Piece {
    /// The file whose bytes they are.
    node: NodeId,
    blocks: Range<u32>,
    /// Bytes of it that are read for this hint.
    bytes: u64,
}

/// What has become of a piece.
enum Found {
    There,
    Coming,
    Lacks,
    Gone(Errno),
}

/// A hint that runs.
pub(super) struct Fetch {
    todo: VecDeque<Piece>,
    coming: Vec<Piece>,
    /// Blocks that it keeps in L1, by file.
    held: Vec<(NodeId, Vec<Range<u32>>)>,
    /// It has let go of them for one that began before it.
    yielded: bool,
    /// Since when it has found no memory at all.
    short: Option<Instant>,
}

impl Fetch {
    pub fn is_short(&self) -> bool {
        self.short.is_some()
    }
}

impl Core {
    /// The file of a range as it is now, and whose bytes it shows.
    fn seen_now(&self, want: &Want) -> Result<Seen, Errno> {
        let idx = self.by_id(want.node).ok_or(Errno::ESTALE)?;
        let shown = self.shown(idx);
        let (node, bytes) = (self.node(idx), want.bytes.clone());
        if node.has(LOST) || self.node(shown).has(LOST) {
            return Err(Errno::EIO);
        }
        if bytes.end > node.size {
            return Err(Errno::ERANGE);
        }
        Ok(Seen { idx, shown, bytes })
    }

    /// The blocks of a window by file, each once.
    fn blocks_by_file(&self, wants: &[Want]) -> Vec<(NodeId, Vec<Range<u32>>)> {
        let seen = wants.iter().filter_map(|want| self.seen_now(want).ok());
        let mut all: Vec<(NodeId, Range<u32>)> =
            seen.map(|seen| (self.id(seen.shown), blocks_of(&seen.bytes))).collect();
        // In the order in which they were named: what comes first is used first.
        let mut order: Vec<NodeId> = Vec::new();
        let mut by_file: std::collections::HashMap<NodeId, Vec<Range<u64>>> =
            std::collections::HashMap::new();
        for (node, blocks) in all.drain(..) {
            by_file.entry(node).or_insert_with(|| {
                order.push(node);
                Vec::new()
            });
            if let Some(parts) = by_file.get_mut(&node) {
                parts.push(u64::from(blocks.start)..u64::from(blocks.end));
            }
        }
        let narrow = |part: Range<u64>| part.start as u32..part.end as u32;
        order
            .into_iter()
            .map(|node| {
                let parts = merged(by_file.remove(&node).unwrap_or_default());
                (node, parts.into_iter().map(narrow).collect())
            })
            .collect()
    }

    /// Memory that a window takes in L1, what of that has to be brought, and what has to be read for it alone.
    pub(super) fn demand_of(&self, wants: &[Want]) -> (u64, u64, u64, bool) {
        let (mut memory, mut brings, mut reads, mut joins) = (0, 0, 0, false);
        for (node, parts) in self.blocks_by_file(wants) {
            let idx = node.idx();
            let size = self.node(idx).size;
            let (mut all, mut lacking) = (0, 0);
            for index in parts.iter().cloned().flatten().map(|index| index as usize) {
                let len = block_len(size, index) as u64;
                let block = self.hot(idx).and_then(|hot| hot.blocks.get(index));
                all += len.next_multiple_of(4096);
                if block.is_some_and(Block::resident) || self.is_hole(idx, index) {
                    continue;
                }
                lacking += len.next_multiple_of(4096);
                match block.is_some_and(Block::is_loading) {
                    true => joins = true,
                    false => reads += len,
                }
            }
            let whole =
                self.hot(idx).and_then(|hot| hot.slab.as_ref()).map(|slab| u64::from(slab.pages()) * 4096);
            let fits = size > self.settings.small_file_max && size <= self.settings.slab_file_max;
            if let Some(slab) = whole {
                all = all.max(slab);
            } else if fits && !self.node(idx).has(SLOT) && all > 0 {
                all = size.next_multiple_of(4096);
                lacking = if lacking > 0 { all } else { 0 };
            }
            memory += all;
            brings += lacking;
        }
        (memory, brings, reads, joins)
    }

    pub(super) fn begin_fetch(&mut self, wants: &[Want]) -> Fetch {
        let mut fetch = Fetch {
            todo: VecDeque::new(),
            coming: Vec::new(),
            held: Vec::new(),
            yielded: false,
            short: None,
        };
        self.scan(&mut fetch, wants);
        fetch
    }

    /// Holds what a window has in L1, and notes what it lacks.
    fn scan(&mut self, fetch: &mut Fetch, wants: &[Want]) {
        let blocks = self.blocks_by_file(wants);
        fetch.todo.clear();
        for (node, parts) in &blocks {
            for part in parts {
                let starts = part.clone().step_by(PIECE_BLOCKS as usize);
                fetch.todo.extend(starts.map(|start| Piece {
                    node: *node,
                    blocks: start..part.end.min(start + PIECE_BLOCKS),
                    bytes: 0,
                }));
            }
        }
        let before = std::mem::take(&mut fetch.held);
        self.hold_for_hint(&blocks);
        fetch.held = blocks;
        fetch.yielded = false;
        self.let_go_for_hint(before);
    }

    pub(super) fn end_fetch(&mut self, fetch: Fetch) {
        self.let_go_for_hint(fetch.held);
    }

    fn hold_for_hint(&mut self, held: &[(NodeId, Vec<Range<u32>>)]) {
        for (node, parts) in held {
            let Some(idx) = self.by_id(*node) else { continue };
            let hot = self.hot_mut(idx);
            hot.hints += 1;
            for part in parts {
                if hot.hinted.len() < part.end as usize {
                    hot.hinted.resize(part.end as usize, 0);
                }
                for count in &mut hot.hinted[part.start as usize..part.end as usize] {
                    *count += 1;
                }
            }
            if hot.in_l1_list && !self.may_drop(idx) {
                self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
            }
        }
    }

    fn let_go_for_hint(&mut self, held: Vec<(NodeId, Vec<Range<u32>>)>) {
        for (node, parts) in held {
            let Some(idx) = self.by_id(node) else { continue };
            let hot = self.hot_mut(idx);
            hot.hints -= 1;
            for part in parts {
                for count in &mut hot.hinted[part.start as usize..part.end as usize] {
                    *count -= 1;
                }
            }
            if hot.hints == 0 {
                hot.hinted = Vec::new();
            }
            self.call_waiters();
            self.tidy(idx);
        }
    }

    fn look(&self, piece: &Piece) -> Found {
        let Some(idx) = self.by_id(piece.node) else { return Found::Gone(Errno::ESTALE) };
        if self.node(idx).has(LOST) {
            return Found::Gone(Errno::EIO);
        }
        let mut found = Found::There;
        for index in piece.blocks.clone().map(|index| index as usize) {
            match self.hot(idx).and_then(|hot| hot.blocks.get(index)) {
                Some(block) if block.bad => return Found::Gone(Errno::EIO),
                Some(block) if block.resident() => {}
                Some(block) if block.is_loading() => {
                    found = if matches!(found, Found::Lacks) { found } else { Found::Coming };
                }
                // What was cut off the file is nowhere, as a hole is.
                _ if self.is_hole(idx, index) => {}
                _ => found = Found::Lacks,
            }
        }
        found
    }

    /// Reads what a piece lacks. False: there is not memory enough.
    fn read_piece(&mut self, piece: &mut Piece) -> bool {
        let idx = piece.node.idx();
        let size = self.node(idx).size;
        let had_slab = self.hot(idx).is_some_and(|hot| hot.slab.is_some());
        let loading = |core: &Self| -> u64 {
            let hot = core.hot(idx);
            let is =
                |index: &usize| hot.is_some_and(|hot| hot.blocks.get(*index).is_some_and(Block::is_loading));
            let blocks = piece.blocks.clone().map(|index| index as usize).filter(is);
            blocks.map(|index| block_len(size, index) as u64).sum()
        };
        let before = loading(self);
        self.control.hints.filling = true;
        let complete = self.load_blocks_as(
            idx,
            piece.blocks.start as usize..piece.blocks.end as usize,
            Class::Promotion,
        );
        self.control.hints.filling = false;
        let has_slab = self.hot(idx).is_some_and(|hot| hot.slab.is_some());
        // All of a file comes with its slab.
        let begun = if has_slab && !had_slab { size } else { loading(self) - before };
        piece.bytes += begun;
        if begun > 0 {
            self.counters.hint_bytes += begun;
            self.hot_mut(idx).hint_unread += begun;
        }
        complete
    }

    /// One step of a hint that runs. Some: it has ended so, but for its lease.
    pub(super) fn step(
        &mut self,
        id: u64,
        hint: &mut Hint,
        may_take: bool,
        now: Instant,
    ) -> Option<Progress> {
        let mut fetch = hint.fetch.take()?;
        let end = self.step_fetch(id, hint, &mut fetch, may_take, now);
        hint.fetch = Some(fetch);
        end
    }

    fn step_fetch(
        &mut self,
        id: u64,
        hint: &mut Hint,
        fetch: &mut Fetch,
        may_take: bool,
        now: Instant,
    ) -> Option<Progress> {
        let mut again = Vec::new();
        let mut wrong = None;
        for piece in std::mem::take(&mut fetch.coming) {
            match self.look(&piece) {
                Found::Coming => fetch.coming.push(piece),
                Found::There | Found::Gone(_) if piece.bytes > 0 => {
                    hint.bytes += piece.bytes;
                    if let Found::Gone(errno) = self.look(&piece) {
                        wrong.get_or_insert(errno);
                    }
                }
                Found::There => {}
                Found::Gone(errno) => {
                    wrong.get_or_insert(errno);
                }
                Found::Lacks => again.push(Piece { bytes: 0, ..piece }),
            }
        }
        for piece in again.into_iter().rev() {
            fetch.todo.push_front(piece);
        }
        if hint.lease.is_some()
            && let Some(errno) = wrong.or_else(|| self.first_wrong(hint))
        {
            return Some(failed(errno, 1));
        }
        if !may_take {
            // It takes nothing now, and what it has somebody needs who began before it.
            fetch.short = None;
            return None;
        }
        if fetch.yielded {
            self.scan(fetch, &hint.wants);
        }
        let begun = self.counters.hint_bytes;
        let short = self.fill(id, fetch);
        let waited = fetch.short.filter(|_| self.counters.hint_bytes == begun);
        fetch.short = short.then(|| waited.unwrap_or(now));
        if fetch.short.is_some_and(|since| since + self.settings.request_deadline <= now) {
            return Some(failed(Errno::ENOSPC, 0));
        }
        if !fetch.todo.is_empty() || !fetch.coming.is_empty() {
            return None;
        }
        if hint.lease.is_none() {
            return Some(self.outcome(hint));
        }
        let window: Vec<Seen> = hint.wants.iter().filter_map(|want| self.seen_now(want).ok()).collect();
        if window.len() < hint.wants.len() {
            return None;
        }
        if !self.is_all_in_l1(&window) {
            if let Some(errno) = hint.wants.iter().find_map(|want| self.wrong_with(want)) {
                return Some(failed(errno, 1));
            }
            // Somebody wrote over some of it, and that left, or another version has it now.
            self.scan(fetch, &hint.wants);
            fetch.short = self.fill(id, fetch).then_some(now);
            return None;
        }
        if self.is_changing(&window) {
            // Until whoever writes is done: a moment.
            return None;
        }
        Some(Progress { state: abi::TICKET_DONE, ..Progress::default() })
    }

    /// Begins to read as much as may be on its way. Whether memory is short.
    fn fill(&mut self, id: u64, fetch: &mut Fetch) -> bool {
        loop {
            let coming: u64 = fetch.coming.iter().map(|piece| piece.bytes).sum();
            if coming >= AHEAD_BYTES || fetch.coming.len() >= AHEAD_PIECES {
                return false;
            }
            let Some(mut piece) = fetch.todo.pop_front() else { return false };
            match self.look(&piece) {
                Found::There | Found::Gone(_) => {}
                Found::Coming => fetch.coming.push(piece),
                Found::Lacks if self.is_waited_for(piece.node) => {
                    fetch.todo.push_front(piece);
                    return false;
                }
                Found::Lacks => {
                    let complete = self.read_piece(&mut piece)
                        || (self.make_others_yield(id) && self.read_piece(&mut piece));
                    if complete {
                        fetch.coming.push(piece);
                        continue;
                    }
                    if matches!(self.look(&piece), Found::Coming) || piece.bytes > 0 {
                        // Some of it has memory; the rest is lacking when that has come.
                        fetch.coming.push(piece.clone());
                    }
                    fetch.todo.push_front(Piece { bytes: 0, ..piece });
                    return true;
                }
            }
        }
    }

    /// The hint that began last lets go of what it holds, for a reader or a writer: hints never hurt. Whether one did.
    pub fn make_a_hint_yield(&mut self) -> bool {
        let hints = &mut self.control.hints;
        if hints.filling {
            // It is a hint itself that wants memory.
            return false;
        }
        let held = hints.running.iter().rev().find_map(|id| {
            let fetch = hints.all.get_mut(id)?.fetch.as_mut()?;
            if fetch.yielded {
                return None;
            }
            fetch.yielded = true;
            Some(std::mem::take(&mut fetch.held))
        });
        let any = held.is_some();
        self.let_go_for_hint(held.unwrap_or_default());
        any
    }

    /// A change waits until nothing of a sealed file is being read. It shall not wait for all of a hint.
    fn is_waited_for(&self, node: NodeId) -> bool {
        self.waiters.iter().any(|waiter| waiter.id == node && waiter.waits_for == Needs::Block)
    }

    /// Those that began later let go of what they hold, for what began before them. Whether any held something.
    fn make_others_yield(&mut self, id: u64) -> bool {
        let running = &self.control.hints.running;
        let later: Vec<u64> = running.iter().skip_while(|other| **other != id).skip(1).copied().collect();
        let mut any = false;
        for other in later {
            let fetch = self.control.hints.all.get_mut(&other).and_then(|hint| hint.fetch.as_mut());
            let Some(fetch) = fetch.filter(|fetch| !fetch.yielded) else { continue };
            (fetch.yielded, any) = (true, true);
            let held = std::mem::take(&mut fetch.held);
            self.let_go_for_hint(held);
        }
        any
    }

    fn wrong_with(&self, want: &Want) -> Option<Errno> {
        let seen = match self.seen_now(want) {
            Ok(seen) => seen,
            Err(errno) => return Some(errno),
        };
        let hot = self.hot(seen.shown)?;
        let bad = seen.blocks().any(|index| hot.blocks.get(index).is_some_and(|block| block.bad));
        bad.then_some(Errno::EIO)
    }

    fn first_wrong(&self, hint: &Hint) -> Option<Errno> {
        hint.wants.iter().find_map(|want| self.seen_now(want).err())
    }

    /// How a hint without a lease ends that has nothing more to do.
    fn outcome(&self, hint: &Hint) -> Progress {
        let wrong: Vec<Errno> = hint.wants.iter().filter_map(|want| self.wrong_with(want)).collect();
        let count = hint.absent + wrong.len() as u64;
        match wrong.first() {
            Some(errno) if wrong.len() == hint.wants.len() => failed(*errno, count),
            _ => Progress { state: abi::TICKET_DONE, failed: count, ..Progress::default() },
        }
    }

    /// The lease of a hint that is all in L1.
    pub(super) fn grant_to(&mut self, id: u64, hint: &Hint, lease: LeaseWanted) -> Result<(u64, u32), Errno> {
        let owner = self.control.tickets.get(id).and_then(|ticket| ticket.session).ok_or(Errno::EBADF)?;
        let window: Vec<Seen> =
            hint.wants.iter().map(|want| self.seen_now(want)).collect::<Result<_, Errno>>()?;
        let mut session = self.control.sessions.remove(&owner).ok_or(Errno::EBADF)?;
        let granted = self.grant(owner, &mut session, window, lease.parties, lease.ttl_ms);
        self.control.sessions.insert(owner, session);
        granted.map(|(lease, ttl)| (lease, millis(ttl)))
    }
}

fn failed(errno: Errno, failed: u64) -> Progress {
    Progress { state: abi::TICKET_FAILED, status: Some(errno), failed, ..Progress::default() }
}
