//! Looking again: what an open that was answered with ESTALE finds the second time (rule R3b).
//!
//! The kernel answers ESTALE once by looking the name up again; a second ESTALE reaches the user. Between that lookup
//! and the open that follows, the name may get another version, once more, by somebody else. So whoever is sent to
//! look again is remembered with the name and with what it wants to do, its next lookup of that name makes what it
//! needs, and that is kept for it until its open arrives: even if the name has moved on by then, as if the open had
//! come a moment earlier.
//!
//! The inode number that failed may be that of a version which is gone. Its name is remembered for a while, too.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use smallvec::SmallVec;

use super::attr::Attr;
use super::core::Core;
use super::hot::Hot;
use super::node::{Idx, Kind, NAMED, NodeId, ROOT};
use super::process::Caller;

/// How long somebody is expected. An open that was sent to look again comes back within microseconds; a process that
/// was stopped in between may get ESTALE.
const EXPECTED: Duration = Duration::from_secs(10);
/// The kernel asks whether the name still means the same, then what it means instead, and starts over when somebody
/// else was told something else meanwhile. An end there must be: whoever gave up shall not see what was made for it.
const LOOKUPS: u8 = 32;
/// Names remembered of versions that are gone.
const GONE_MAX: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Intent {
    Read,
    Write,
    Truncate,
}

impl Intent {
    pub fn of(flags: i32) -> Self {
        match flags & libc::O_ACCMODE {
            _ if flags & libc::O_TRUNC != 0 => Self::Truncate,
            libc::O_RDONLY => Self::Read,
            _ => Self::Write,
        }
    }
}

/// Somebody who was sent to look again.
#[derive(Debug)]
pub struct Expected {
    caller: Caller,
    tgid: u32,
    parent: NodeId,
    name: Box<[u8]>,
    intent: Intent,
    until: Instant,
    lookups: u8,
    /// It has looked something up since it was sent.
    walks: bool,
    /// What its lookups found, kept for it.
    found: SmallVec<[NodeId; 2]>,
}

impl Expected {
    pub fn found(&self, id: NodeId) -> bool {
        self.found.contains(&id)
    }

    /// Without looking anything up: by a descriptor in /proc, not by a name.
    pub fn came_straight_back(&self) -> bool {
        !self.walks
    }

    /// Threads that cannot be told apart are known by what they want.
    fn is(&self, caller: &Caller, intent: Option<Intent>) -> bool {
        self.caller.tid == caller.tid
            && self.caller.uid == caller.uid
            && (caller.tid != 0 || intent.is_none_or(|intent| self.intent == intent))
    }
}

/// What versions were called that have no name any more.
#[derive(Default, Debug)]
pub struct Gone {
    names: HashMap<u64, Former>,
    order: VecDeque<u64>,
}

#[derive(Clone, Debug)]
struct Former {
    parent: NodeId,
    name: Box<[u8]>,
    uid: u32,
    attr: Attr,
    by_us: bool,
    /// The version that took its place, and may have been renamed since: the kernel's name for both was renamed with it.
    successor: Option<NodeId>,
}

/// Versions that took each other's place are followed this far.
const SUCCESSORS: usize = 64;

impl Gone {
    fn push(&mut self, ino: u64, former: Former) {
        if self.names.insert(ino, former).is_none() {
            self.order.push_back(ino);
        }
        if self.order.len() > GONE_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.names.remove(&oldest);
        }
    }
}

impl Hot {
    /// How many are expected who want that.
    fn kept_for(&mut self, intent: Intent) -> &mut u32 {
        match intent {
            Intent::Read => &mut self.held,
            Intent::Write | Intent::Truncate => &mut self.promised,
        }
    }
}

impl Core {
    /// Remembers what `idx` was called, and what takes its place. `by_us`: no client has taken the name away.
    pub fn remember_name(&mut self, idx: Idx, successor: Option<Idx>, by_us: bool) {
        let node = self.node(idx);
        if node.kind() != Kind::File {
            return;
        }
        let (own, shown, uid) = (self.id(idx).0, self.ino(idx), node.uid);
        let Some((parent, name)) = self.place_of(idx) else { return };
        let attr = self.last_attr(idx);
        let successor = successor.map(|idx| self.id(idx));
        let former = Former { parent, name, uid, attr, by_us, successor };
        if shown != own {
            self.gone.push(shown, former.clone());
        }
        self.gone.push(own, former);
    }

    /// What is said of `idx` once it is gone: without a name, and for this once.
    fn last_attr(&self, idx: Idx) -> Attr {
        Attr { nlink: 0, ttl: Duration::ZERO, ..self.attr(idx) }
    }

    /// A version without a name goes now. It may have been written to since it lost that.
    pub fn remember_end(&mut self, idx: Idx) {
        let numbers = [self.id(idx).0, self.ino(idx)];
        if numbers.iter().any(|number| self.gone.names.contains_key(number)) {
            let attr = self.last_attr(idx);
            for number in numbers {
                if let Some(former) = self.gone.names.get_mut(&number) {
                    former.attr = attr;
                }
            }
        }
    }

    /// The version that was `gone` has left its place to `successor` after all.
    pub fn leave_to(&mut self, gone: NodeId, successor: Idx) {
        let successor = self.id(successor);
        if let Some(former) = self.gone.names.get_mut(&gone.0) {
            former.successor = Some(successor);
        }
    }

    /// Where the name is now that led to `ino`.
    fn former_place(&self, ino: u64) -> Option<(NodeId, Box<[u8]>)> {
        let mut former = self.gone.names.get(&ino)?;
        for _ in 0..SUCCESSORS {
            let Some(successor) = former.successor else { break };
            if let Some(idx) = self.by_id(successor).filter(|&idx| self.node(idx).has(NAMED)) {
                return self.place_of(idx);
            }
            let Some(next) = self.gone.names.get(&successor.0) else { break };
            former = next;
        }
        Some((former.parent, former.name.clone()))
    }

    /// The version that has the name now of one that is gone, by its inode number, if it has the same owner: what asks
    /// for attributes before it opens must not use up the one time that ESTALE is answered.
    ///
    /// For attributes only. The kernel checks what a caller may do against the inode that it has, and somebody may have
    /// kept one whose name is another's file by now: nothing else may be asked of that file, or done to it, under a
    /// number that is not its own.
    pub fn successor(&self, ino: u64) -> Option<Idx> {
        let uid = self.gone.names.get(&ino)?.uid;
        let (parent, name) = self.former_place(ino)?;
        let now = self.tree.child(self.by_id(parent)?, &name)?;
        let node = self.node(now);
        (node.kind() == Kind::File && node.uid == uid).then_some(now)
    }

    /// The attributes that a version had in the end. What a lookup found may be asked for them though it was
    /// unlinked or replaced since, as on any file system: a second ESTALE, after a second lookup, would reach the user.
    /// What has vanished (rules R6, R8) has none: the kernel may believe in its name for a while.
    pub fn former_attr(&self, ino: u64) -> Option<Attr> {
        let first = self.gone.names.get(&ino)?;
        let mut former = first;
        for _ in 0..SUCCESSORS {
            let Some(successor) = former.successor else { break };
            if self.by_id(successor).is_some() {
                return Some(first.attr);
            }
            former = self.gone.names.get(&successor.0)?;
        }
        (!former.by_us).then_some(first.attr)
    }

    /// The answer to an open of a version that is gone.
    pub fn gone(&mut self, ino: u64, intent: Intent, caller: &Caller, tgid: u32) -> Errno {
        match self.former_place(ino) {
            Some((parent, name)) => self.send_again(parent, &name, intent, caller, tgid),
            None => Errno::ESTALE,
        }
    }

    /// ESTALE, with somebody to expect.
    pub fn send_again(
        &mut self,
        parent: NodeId,
        name: &[u8],
        intent: Intent,
        caller: &Caller,
        tgid: u32,
    ) -> Errno {
        self.came_otherwise(caller);
        self.expected.push(Expected {
            caller: *caller,
            tgid,
            parent,
            name: name.into(),
            intent,
            until: Instant::now() + EXPECTED,
            lookups: 0,
            walks: false,
            found: SmallVec::new(),
        });
        Errno::ESTALE
    }

    /// The lookup of somebody who was sent to look again. None: it finds what everybody finds.
    pub fn look_again(&mut self, parent: Idx, name: &[u8], caller: &Caller) -> Option<Idx> {
        if self.expected.is_empty() {
            return None;
        }
        let dir = self.id(parent);
        for expected in self.expected.iter_mut().filter(|expected| expected.is(caller, None)) {
            expected.walks = true;
        }
        let at = self.expected.iter().position(|expected| {
            expected.is(caller, None) && expected.parent == dir && *expected.name == *name
        });
        // What it opened may have been renamed, and it goes by the old name. The first file that a thread looks up after
        // it was sent to look again is what it was sent for: what comes before are directories.
        let at = at.or_else(|| {
            let sees = || self.own_private(parent, name, caller, false);
            let visible = self.tree.child(parent, name).or_else(sees)?;
            let elsewhere = |expected: &Expected| caller.tid != 0 && expected.is(caller, None);
            let at = self.expected.iter().position(elsewhere)?;
            (self.node(visible).kind() == Kind::File && self.expected[at].lookups == 0).then_some(at)
        })?;
        let mut expected = self.expected.swap_remove(at);
        (expected.parent, expected.name) = (dir, name.into());
        if expected.lookups == LOOKUPS {
            // It has come and gone without opening anything.
            self.give_up(expected);
            return None;
        }
        expected.lookups += 1;
        let idx = self.made_for(&expected, parent, name);
        if let Some(idx) = idx {
            let id = self.id(idx);
            if !expected.found(id) {
                *self.hot_mut(idx).kept_for(expected.intent) += 1;
                expected.found.push(id);
                self.tidy(idx);
            }
        }
        self.expected.push(expected);
        idx
    }

    fn made_for(&mut self, expected: &Expected, parent: Idx, name: &[u8]) -> Option<Idx> {
        let visible = self.tree.child(parent, name).filter(|&idx| self.node(idx).kind() == Kind::File);
        let mine = expected.found.iter().rev().find_map(|&id| self.by_id(id));
        if let Some(idx) = mine
            && (Some(idx) == visible || self.hot(idx).is_some_and(|hot| hot.private().is_some()))
        {
            return Some(idx);
        }
        // Before its RELEASE has come, what this process has just closed is still its private version.
        let visible = visible.or_else(|| self.own_private(parent, name, &expected.caller, false))?;
        let (posix, in_place) = (self.tree.posix(parent), self.written_in_place(visible));
        let hot = self.hot_mut(visible);
        let (sealed, fixed, leased) = (hot.sealed(), hot.must_not_change(), hot.leases > 0);
        match expected.intent {
            Intent::Read => Some(visible),
            Intent::Write if sealed && (fixed || !in_place) => self.copy_on_write(visible).ok(),
            Intent::Write => Some(visible),
            Intent::Truncate if posix && !fixed && !leased => Some(visible),
            Intent::Truncate => self.empty_version(visible, &expected.caller, expected.tgid).ok(),
        }
    }

    /// The open that was expected, if this is one.
    pub fn arrived(&mut self, ino: u64, intent: Intent, caller: &Caller) -> Option<Expected> {
        if self.expected.is_empty() {
            return None;
        }
        let id = self.resolve(ino).map(|idx| self.id(idx));
        let at = self.expected.iter().position(|expected| {
            expected.is(caller, Some(intent)) && (caller.tid != 0 || id.is_ok_and(|id| expected.found(id)))
        })?;
        let expected = self.expected.swap_remove(at);
        if expected.lookups > 0 && expected.found.is_empty() {
            // It found nothing when it looked again, and that was its answer. This is about something else.
            return None;
        }
        Some(expected)
    }

    /// A thread makes one call at a time: one that was sent to look again and now does something else has opened nothing.
    pub fn came_otherwise(&mut self, caller: &Caller) {
        if caller.tid != 0
            && let Some(at) = self.expected.iter().position(|expected| expected.is(caller, None))
        {
            let over = self.expected.swap_remove(at);
            self.give_up(over);
        }
    }

    /// What was kept for somebody is not needed any longer.
    pub fn give_up(&mut self, expected: Expected) {
        for id in expected.found {
            let Some(idx) = self.by_id(id) else { continue };
            let kept = self.hot_mut(idx).kept_for(expected.intent);
            *kept = kept.saturating_sub(1);
            self.close_if_done(idx);
        }
    }

    /// Those who did not come in time.
    pub fn end_expectations(&mut self, now: Instant) {
        // The kernel holds a directory's lock while that is fsynced, and whoever looks again waits for it.
        if !self.patience.is_empty() {
            self.expected.iter_mut().for_each(|expected| expected.until = now + EXPECTED);
        }
        while let Some(at) = self.expected.iter().position(|expected| expected.until <= now) {
            let late = self.expected.swap_remove(at);
            self.give_up(late);
        }
    }

    /// A private version, empty, that will take the place of `visible`.
    pub fn empty_version(&mut self, visible: Idx, caller: &Caller, tgid: u32) -> Result<Idx, Errno> {
        let node = self.node(visible);
        let (parent, name) = self.home(visible);
        let name: Box<[u8]> = name.into();
        let (mode, owner, xattrs) = (u32::from(node.mode), (node.uid, node.gid), node.xattrs.clone());
        let more = super::catalog::xattrs_bytes(node) as usize;
        self.widen_record(visible, more)?;
        let new = self.new_private(parent, &name, mode, owner, caller, tgid, false)?;
        self.node_mut(new).xattrs = xattrs;
        if let Some(private) = self.hot_mut(new).private_mut() {
            private.replaces = Some(owner.0);
        }
        self.recount(new);
        Ok(new)
    }

    /// Where to look for a node again: its home, if that is still there.
    pub fn place_of(&self, idx: Idx) -> Option<(NodeId, Box<[u8]>)> {
        let (parent, name) = self.home(idx);
        let dir = self.tree.nodes.get(parent)?;
        (parent == ROOT || dir.has(NAMED)).then(|| (self.id(parent), name.into()))
    }
}
