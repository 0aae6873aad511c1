//! Handles: lookup, create, open, flush, release.
//!
//! A node's handles are all served in one way, passthrough or direct, from the first OPEN reply to the
//! last RELEASE (rule R3b). Where an open needs the other way, it is answered with ESTALE: the kernel
//! looks the name up again, and finds a fresh identity there. Which identity that is depends on what the
//! open wants:
//!
//! * to write a sealed file that somebody reads: a copy-on-write version takes the name;
//! * to truncate one: a private version that only this process sees;
//! * to read a file that came into L1 while others read it through the daemon: an alias, that is another
//!   inode number for the same file.
//!
//! A second ESTALE would reach the user; `again` keeps what the second look found until the open arrives. A create that
//! finds a file opens it where it stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::again::{Expected, Intent};
use super::attr::Entry;
use super::core::{Alias, Core, now};
use super::hot::{Doom, Hot, Mode, Opened as OpenedIno, PendingLookup, Phase, Private, Then};
use super::lists::Droppable;
use super::names::check_name;
use super::node::{ALIAS_BASE, DURABLE, Detail, Idx, Kind, LOST, MOVED, NAMED, NO_INO, NONE, NodeId, SLOT};
use super::process::{Caller, dying_of, is_there, process_of};
use super::{Answer, EntryReply, Store};
use crate::l1::Slab;

/// At most one alias of a file in this time: far longer than the way from one ESTALE to the next open.
const ALIAS_EVERY: Duration = Duration::from_secs(1);

/// An open file.
#[derive(Debug)]
pub struct Handle {
    pub id: NodeId,
    /// The inode number it was opened under.
    pub ino: u64,
    pub writer: bool,
    pub mode: Mode,
    /// Opened with O_DIRECT: its reads do not bring the file into L1.
    pub uncached: bool,
    /// The process that made the file, if it was made private.
    pub maker: u32,
    /// That was killed, and somebody else has the handle, too.
    orphaned: AtomicBool,
    /// Opened with O_NONBLOCK: what would wait for a lease fails at once.
    pub nonblocking: bool,
}

/// How a file was opened.
pub struct Opened {
    pub handle: Handle,
    /// The slab that the kernel shall read from, in passthrough mode.
    pub slab: Option<Slab>,
}

fn writes(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

impl Core {
    pub fn lookup(&mut self, parent: u64, name: &[u8], caller: &Caller) -> Answer<Entry> {
        let found = self.find(parent, name, caller);
        match found {
            Err(errno) => Answer::Now(Err(errno)),
            Ok(Found::Node(idx, shown)) => Answer::Now(Ok(self.entry(idx, shown))),
            Ok(Found::Releasing(_)) => Answer::Wait,
        }
    }

    fn find(&mut self, parent: u64, name: &[u8], caller: &Caller) -> Result<Found, Errno> {
        check_name(name)?;
        let parent = self.resolve_dir(parent)?;
        if let Some(idx) = self.look_again(parent, name, caller) {
            return Ok(Found::Node(idx, false));
        }
        let mut shown = true;
        if !self.tree.privates(parent, name).is_empty() {
            shown = false;
            // Once it is closed its maker, too, waits for what its RELEASE makes of it. Opened again before that it would
            // stay private, and be taken for a newer version than the next one.
            let closed = |idx: &Idx| {
                let private = self.hot(*idx).and_then(|hot| hot.private());
                private.is_some_and(super::hot::Private::is_releasing)
            };
            if let Some(idx) = self.own_private(parent, name, caller, false).filter(|idx| !closed(idx)) {
                return Ok(Found::Node(idx, false));
            }
            if let Some(idx) = self.being_released(parent, name) {
                return Ok(Found::Releasing(idx));
            }
        }
        match self.tree.child(parent, name) {
            Some(idx) => Ok(Found::Node(idx, shown)),
            None => Err(Errno::ENOENT),
        }
    }

    /// The version of `name` that somebody has closed, while the kernel's RELEASE is on its way (fact 6). Once, not for
    /// ever: the close may have been that of a duplicate.
    pub fn being_released(&self, parent: Idx, name: &[u8]) -> Option<Idx> {
        self.tree.privates(parent, name).iter().rev().copied().find(|&idx| {
            let private = self.hot(idx).and_then(|hot| hot.private());
            private.is_some_and(|private| private.is_releasing() && !private.is_outdated())
        })
    }

    /// Goes on when `idx` has been released, or after the bounded wait.
    pub fn wait_for_release(&mut self, idx: Idx, then: Then) {
        let deadline = Instant::now() + self.settings.publish_wait;
        let id = self.id(idx);
        self.hot_mut(idx).lookups.push(PendingLookup { then, deadline });
        self.deadlines.push((deadline, id));
        self.counters.publish_waits += 1;
        self.wakes.timer = true;
    }

    /// Answers the lookups that waited for `idx` with what is there now.
    pub fn answer_lookups(&mut self, idx: Idx) {
        let Some(hot) = self.node_mut(idx).hot.as_mut() else { return };
        for PendingLookup { then, .. } in std::mem::take(&mut hot.lookups) {
            let Then::Find { caller, parent, name, reply } = then else {
                self.reply(move || then.end());
                continue;
            };
            let Some(parent) = self.by_id(parent) else {
                self.reply(move || reply(Err(Errno::ENOENT)));
                continue;
            };
            let answer = match self.find(self.ino(parent), &name, &caller) {
                Ok(Found::Node(found, shown)) => Ok(self.entry(found, shown)),
                // One wait is enough, whatever else has been closed meanwhile.
                Ok(Found::Releasing(_)) => match self.tree.child(parent, &name) {
                    Some(found) => Ok(self.entry(found, false)),
                    None => Err(Errno::ENOENT),
                },
                Err(errno) => Err(errno),
            };
            self.reply(move || reply(answer));
        }
    }

    /// A version of `name` that only its maker sees.
    pub fn new_private(
        &mut self,
        parent: Idx,
        name: &[u8],
        mode: u32,
        (uid, gid): (u32, u32),
        caller: &Caller,
        tgid: u32,
        exclusive: bool,
    ) -> Result<Idx, Errno> {
        let idx = self.new_node(Detail::File, mode, uid, gid, name.len())?;
        let private = Private {
            parent,
            name: name.into(),
            tid: caller.tid,
            tgid,
            uid: caller.uid,
            replaces: None,
            exclusive,
            flushed: false,
            closed: 0,
            outdated: 0,
            waited: false,
            doom: None,
            opened: false,
            lacks: None,
        };
        self.node_mut(idx).hot = Some(Box::new(Hot::new(Phase::Private(Box::new(private)))));
        self.tree.add_private(idx, parent, name);
        self.start_building(idx);
        Ok(idx)
    }

    fn create(
        &mut self,
        parent: u64,
        name: &[u8],
        mode: u32,
        flags: i32,
        caller: &Caller,
        tgid: u32,
    ) -> Result<(Entry, Opened), Errno> {
        check_name(name)?;
        self.came_otherwise(caller);
        let parent = self.resolve_dir(parent)?;
        let exclusive = flags & libc::O_EXCL != 0;
        let visible = self.tree.child(parent, name);
        if exclusive && (visible.is_some() || self.reserved(parent, name)) {
            return Err(Errno::EEXIST);
        }
        if let Some(visible) = visible {
            // It came into being since the kernel looked.
            if self.node(visible).kind() == Kind::File && self.surely_may_open(parent, visible, flags, caller)
            {
                return self.open_found(visible, flags, caller, tgid);
            }
            let dir = self.id(parent);
            return Err(self.send_again(dir, name, Intent::of(flags), caller, tgid));
        }
        let (gid, mode) = self.inherited(parent, caller, mode, false);
        let for_sharing = !exclusive && flags & libc::O_TRUNC == 0;
        let shared = for_sharing || self.tree.posix(parent);
        let idx = if shared {
            let idx = self.new_node(Detail::File, mode, caller.uid, gid, name.len())?;
            // Whoever opens it finds this very inode, whatever is in it: locks exclude, writers meet.
            self.node_mut(idx).set(SLOT, for_sharing);
            self.node_mut(idx).hot = Some(Box::new(Hot::new(Phase::Open)));
            self.tree.link(idx, parent, name);
            // What was closed before and has not appeared in time does not take the place of what is made durable here.
            self.outdate(parent, name, idx, self.closes, caller.uid);
            self.touch_dir(parent);
            self.touch(idx);
            self.start_building(idx);
            idx
        } else {
            self.new_private(parent, name, mode, (caller.uid, gid), caller, tgid, exclusive)?
        };
        let shown = shared && self.tree.privates(parent, name).is_empty();
        let handle = self.add_handle(idx, self.ino(idx), flags, Mode::Direct);
        Ok((self.entry(idx, shown), Opened { handle, slab: None }))
    }

    /// Opens a file that everybody sees in the step that found it. No other version can come in between, as it can after
    /// ESTALE; and a create is what the kernel tries last, often when it has been sent to look again before.
    fn open_found(
        &mut self,
        visible: Idx,
        flags: i32,
        caller: &Caller,
        tgid: u32,
    ) -> Result<(Entry, Opened), Errno> {
        let idx = match Intent::of(flags) {
            Intent::Truncate if !self.emptied_in_place(visible, false) => {
                self.empty_version(visible, caller, tgid)?
            }
            Intent::Write if self.needs_version(visible) => self.copy_on_write(visible)?,
            _ => visible,
        };
        let ino = self.ino(idx);
        let opened = match Intent::of(flags) {
            Intent::Truncate => self.open_emptied(idx, ino, flags, caller),
            Intent::Write => self.opened(idx, ino, flags, Mode::Direct),
            Intent::Read => {
                let passthrough = match self.mode_of(idx, ino) {
                    Some(mode) => mode == Mode::Passthrough,
                    None => self.may_passthrough(idx),
                };
                self.open_to_read(idx, ino, flags, if passthrough { Mode::Passthrough } else { Mode::Direct })
            }
        };
        let (parent, name) = self.home(idx);
        let shown = idx == visible && self.tree.privates(parent, name).is_empty();
        Ok((self.entry(idx, shown), opened))
    }

    fn add_handle(&mut self, idx: Idx, ino: u64, flags: i32, mode: Mode) -> Handle {
        let id = self.id(idx);
        let owner = self.owner(idx);
        let hot = self.hot_mut(idx);
        match hot.opened.iter_mut().find(|opened| opened.ino == ino) {
            Some(opened) => opened.handles += 1,
            None => hot.opened.push(OpenedIno { ino, mode, handles: 1 }),
        }
        // Whoever makes a version has it in the making, also one that can only be read: a lock or a marker file.
        let makes = hot.private().is_some_and(|private| !private.opened);
        let writer = writes(flags) || makes;
        hot.writers += u32::from(writer);
        if let Some(private) = hot.private_mut() {
            private.flushed = false;
            private.opened = true;
        }
        let maker = hot.private().map_or(0, |private| private.tgid);
        if mode == Mode::Passthrough {
            if let Some(slab) = &hot.slab {
                slab.mark_lent(owner);
            }
            hot.is_read();
            self.droppable.remove::<Droppable>(&mut self.tree.nodes, idx);
            self.counters.opens_passthrough += 1;
        } else {
            self.counters.opens_direct += 1;
        }
        Handle {
            id,
            ino,
            writer,
            mode,
            uncached: flags & libc::O_DIRECT != 0,
            maker,
            nonblocking: flags & libc::O_NONBLOCK != 0,
            orphaned: AtomicBool::new(false),
        }
    }

    /// A version that shows `old`'s bytes until it is written to, in `old`'s place.
    pub fn copy_on_write(&mut self, old: Idx) -> Result<Idx, Errno> {
        let node = self.node(old);
        let (mode, uid, gid, size) = (u32::from(node.mode), node.uid, node.gid, node.size);
        let (parent, name) = (node.parent, node.name.clone());
        let (times, xattrs) = ((node.atime, node.mtime, node.ctime), node.xattrs.clone());
        // A new node may cost the least recently used file, which must not be this one.
        let bytes = self.record_bytes_like(old);
        self.hot_mut(old).held += 1;
        let new = self.new_node(Detail::File, mode, uid, gid, bytes);
        self.hot_mut(old).held -= 1;
        let new = new?;
        let old_id = self.id(old);
        let node = self.node_mut(new);
        node.size = size;
        (node.atime, node.mtime, node.ctime) = times;
        node.xattrs = xattrs;
        let mut hot = Hot::new(Phase::Open);
        (hot.base, hot.origin) = (Some(old_id), Some(old_id));
        node.hot = Some(Box::new(hot));
        self.hot_mut(old).based += 1;
        let replaced = self.node(old).seq;
        self.drop_name(old, Some(new), true);
        self.tree.link_after(new, parent, &name, Some(replaced));
        self.let_go(Some(old));
        self.touch(new);
        self.start_building(new);
        self.counters.copies_on_write += 1;
        Ok(new)
    }

    /// A copy-on-write version that nobody wrote to: the original gets its name back.
    pub fn undo_copy_on_write(&mut self, new: Idx) {
        let Some(old) = self.hot(new).and_then(|hot| hot.base).and_then(|base| self.by_id(base)) else {
            return;
        };
        let node = self.node(new);
        let (parent, name, named) = (node.parent, node.name.clone(), node.has(NAMED));
        let replaced = node.seq;
        let attributes = (node.mode, node.uid, node.gid, node.atime, node.mtime, node.ctime);
        let xattrs = self.node(new).xattrs.clone();
        let (old_id, new_id) = (self.id(old), self.id(new));
        self.stop_building(new);
        let hot = self.hot_mut(new);
        hot.phase = Phase::Sealed;
        let supersedes: Vec<NodeId> = std::mem::take(&mut hot.supersedes);
        if !named {
            self.remove_records(supersedes);
            return;
        }
        if self.node(old).has(LOST) {
            // It could not be stored, and is gone like any other such file.
            self.hot_mut(new).supersedes = supersedes;
            self.invalidate(new);
            return self.drop_name(new, None, true);
        }
        if let Some(seq) = self.heirs.remove(&new_id) {
            self.inherit(old, seq);
        }
        // Without the version that shows its bytes nothing may be left that keeps the original: no name, no record.
        self.hot_mut(old).held += 1;
        self.drop_name(new, None, true);
        self.hot_mut(old).held -= 1;
        self.supersede(old, supersedes.into_iter().filter(|id| *id != old_id).collect());
        // After the other one, not as before: what that had replaced under another name may have a record still.
        self.tree.link_after(old, parent, &name, Some(replaced));
        let hot = self.hot_mut(old);
        (hot.heir, hot.superseded) = (None, false);
        self.ending.remove(&old_id);
        self.leave_to(new_id, old);
        let node = self.node_mut(old);
        (node.mode, node.uid, node.gid, node.atime, node.mtime, node.ctime) = attributes;
        node.xattrs = xattrs;
        self.attributes_change(old, NO_INO);
        self.recount(old);
        self.changed(old);
        self.touch(old);
        if self.settings.memory_only || self.is_durable(old) {
            // It was committed while its predecessors were the other version's to remove.
            let predecessors = std::mem::take(&mut self.hot_mut(old).supersedes);
            self.remove_records(predecessors);
        } else {
            // Its turn in the publish queue may have come while it had no name.
            self.store_soon(old);
        }
        self.tidy(old);
        self.invalidate(old);
    }

    /// Whether a file that everybody sees is written where it is, even after it was sealed: there is nothing in it yet,
    /// or it is in shared use (rule R1), or somebody has it open to write and will write there: whoever comes then joins.
    pub fn written_in_place(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        node.size == 0
            || node.has(SLOT)
            || (node.has(NAMED) && self.tree.posix(node.parent))
            || self.hot(idx).is_some_and(|hot| hot.writers > 0)
    }

    /// Whether a version has to be made for whoever wants to write this one.
    pub fn needs_version(&mut self, idx: Idx) -> bool {
        let (in_place, stored) = (self.written_in_place(idx), self.is_stored(idx));
        let hot = self.hot_mut(idx);
        hot.sealed() && (hot.must_not_change() || ((hot.handles() > 0 || stored) && !in_place))
    }

    /// Whether O_TRUNC empties this very version. `mine`: a private one was made for that.
    fn emptied_in_place(&mut self, idx: Idx, mine: bool) -> bool {
        let node = self.node(idx);
        let (size, named) = (node.size, node.has(NAMED));
        let posix = named && self.tree.posix(node.parent);
        let hot = self.hot_mut(idx);
        let nameless = !named && hot.private().is_none_or(|private| private.parent == NONE);
        // An open never waits for a lease, which keeps the bytes: another version is empty in its place (rule R12).
        let leased = hot.leases > 0;
        (match &hot.phase {
            Phase::Private(_) => mine && size == 0,
            Phase::Open => (posix && !leased) || size == 0,
            Phase::Sealed => !hot.must_not_change() && ((posix && !leased) || size == 0),
        }) || (nameless && !hot.sealed())
    }

    fn open_emptied(&mut self, idx: Idx, ino: u64, flags: i32, caller: &Caller) -> Opened {
        if caller.uid != 0 {
            self.drop_set_id(idx);
        }
        if self.node(idx).size > 0 {
            self.truncate_to_nothing(idx);
        }
        self.opened(idx, ino, flags, Mode::Direct)
    }

    /// How the handles of this inode number are served, if there are any.
    fn mode_of(&self, idx: Idx, ino: u64) -> Option<Mode> {
        self.hot(idx)?.opened.iter().find(|opened| opened.ino == ino).map(|opened| opened.mode)
    }

    /// Whether this version is on the device or on its way there: then it is what a crash brings back, whole, until
    /// the next one is stored (rule R1). So that next one has to be a version of its own.
    pub fn is_stored(&self, idx: Idx) -> bool {
        // Without a device, being sealed is all there is.
        self.settings.memory_only || self.node(idx).has(DURABLE) || self.in_write_back(idx)
    }

    pub fn may_passthrough(&self, idx: Idx) -> bool {
        let node = self.node(idx);
        self.settings.passthrough
            && !node.has(SLOT | LOST)
            && node.hot.as_ref().is_some_and(|hot| {
                hot.sealed()
                    && hot.writers == 0
                    && hot.promised == 0
                    && hot.base.is_none()
                    && !hot.no_passthrough
                    && hot.whole_slab(node.size)
            })
    }

    fn open(&mut self, ino: u64, flags: i32, caller: &Caller, tgid: u32) -> Result<Opened, Errno> {
        let expected = self.arrived(ino, Intent::of(flags), caller);
        let result = self.open_node(ino, flags, expected.as_ref(), caller, tgid);
        if let Some(expected) = expected {
            self.give_up(expected);
        }
        result
    }

    fn open_node(
        &mut self,
        ino: u64,
        flags: i32,
        expected: Option<&Expected>,
        caller: &Caller,
        tgid: u32,
    ) -> Result<Opened, Errno> {
        let intent = Intent::of(flags);
        let Ok(idx) = self.resolve(ino) else { return Err(self.gone(ino, intent, caller, tgid)) };
        let node = self.node(idx);
        match node.kind() {
            Kind::File => {}
            Kind::Dir => return Err(Errno::EISDIR),
            Kind::Symlink => return Err(Errno::ELOOP),
        }
        let arrived = expected.is_some_and(|expected| expected.found(self.id(idx)));
        if node.has(LOST) || (node.has(MOVED) && !arrived) {
            return Err(self.gone(ino, intent, caller, tgid));
        }
        let named = node.has(NAMED);
        let place = self.place_of(idx);
        let private = self.hot_mut(idx).private();
        let nameless = !named && private.is_none_or(|private| private.parent == NONE);
        let awaited = private.is_some_and(|private| !private.opened);
        if intent == Intent::Truncate {
            let here = self.emptied_in_place(idx, arrived);
            if !here && nameless {
                return Err(self.not_here(ino, intent, expected, caller, tgid));
            }
            if !here {
                let (parent, name) = place.ok_or(Errno::ESTALE)?;
                self.room_for_version(idx)?;
                return Err(self.send_again(parent, &name, intent, caller, tgid));
            }
            return Ok(self.open_emptied(idx, ino, flags, caller));
        }
        if awaited {
            // An empty version, made for somebody else, who cannot be told from this caller; or for an open to truncate
            // that this caller gave up.
            let (parent, name) = place.ok_or(Errno::ESTALE)?;
            return Err(self.send_again(parent, &name, intent, caller, tgid));
        }
        if intent == Intent::Write {
            let fresh = self.needs_version(idx);
            if fresh && named {
                let (parent, name) = place.ok_or(Errno::ESTALE)?;
                self.room_for_version(idx)?;
                return Err(self.send_again(parent, &name, intent, caller, tgid));
            }
            if fresh {
                return Err(self.not_here(ino, intent, expected, caller, tgid));
            }
            return Ok(self.opened(idx, ino, flags, Mode::Direct));
        }
        let eligible = self.may_passthrough(idx);
        let mode = match self.mode_of(idx, ino) {
            Some(Mode::Passthrough) => Mode::Passthrough,
            None if eligible => Mode::Passthrough,
            None => Mode::Direct,
            Some(Mode::Direct) => {
                if eligible
                    && named
                    && expected.is_none()
                    && self.ino(idx) == ino
                    && let Some((parent, name)) = place
                    && self.make_alias(idx)
                {
                    return Err(self.send_again(parent, &name, intent, caller, tgid));
                }
                Mode::Direct
            }
        };
        Ok(self.open_to_read(idx, ino, flags, mode))
    }

    fn open_to_read(&mut self, idx: Idx, ino: u64, flags: i32, mode: Mode) -> Opened {
        match self.tier(idx) {
            "l1" => self.counters.open_hits_l1 += 1,
            "mixed" => self.counters.open_hits_mixed += 1,
            _ => self.counters.open_hits_l2 += 1,
        }
        self.opened(idx, ino, flags, mode)
    }

    /// A sealed file that has lost its name is not changed any more: somebody reads it. Whoever comes by its old name
    /// looks that up again, and finds out; who has come by `/proc/PID/fd` finds this file once more.
    pub fn not_here(
        &mut self,
        ino: u64,
        intent: Intent,
        expected: Option<&Expected>,
        caller: &Caller,
        tgid: u32,
    ) -> Errno {
        match expected {
            Some(expected) if expected.came_straight_back() => Errno::ETXTBSY,
            _ => self.gone(ino, intent, caller, tgid),
        }
    }

    fn opened(&mut self, idx: Idx, ino: u64, flags: i32, mode: Mode) -> Opened {
        self.touch(idx);
        if writes(flags) {
            // While somebody may write it, the kernel is told nothing that it could believe for a while.
            self.attributes_change(idx, ino);
        } else {
            self.node_mut(idx).atime = now();
        }
        let handle = self.add_handle(idx, ino, flags, mode);
        let slab = match mode {
            Mode::Passthrough => self.hot(idx).and_then(|hot| hot.slab.clone()),
            Mode::Direct => None,
        };
        Opened { handle, slab }
    }

    /// Another inode number for `idx`, unless it got one just now.
    fn make_alias(&mut self, idx: Idx) -> bool {
        let id = self.id(idx);
        let at = Instant::now();
        let alias = self.next_alias;
        let hot = self.hot_mut(idx);
        if hot.alias_made.is_some_and(|made| at.duration_since(made) < ALIAS_EVERY) {
            return false;
        }
        let before = hot.alias.replace(alias);
        hot.alias_made = Some(at);
        hot.aliases.push(alias);
        if let Some(before) = before
            && self.aliases.get(&before).is_some_and(|alias| alias.lookups == 0)
        {
            // Whoever was sent to look for it never came.
            self.aliases.remove(&before);
            self.hot_mut(idx).aliases.retain(|number| *number != before);
        }
        self.next_alias = (self.next_alias + 1).max(ALIAS_BASE);
        self.aliases.insert(alias, Alias { id, lookups: 0 });
        self.counters.aliases += 1;
        true
    }

    /// The kernel does not know an inode number any more that it was told `lookups` times.
    fn forget(&mut self, ino: u64, lookups: u64) {
        let Some(alias) = self.aliases.get_mut(&ino) else { return };
        alias.lookups = alias.lookups.saturating_sub(lookups);
        if alias.lookups > 0 {
            return;
        }
        let id = alias.id;
        self.aliases.remove(&ino);
        let Some(idx) = self.by_id(id) else { return };
        if let Some(hot) = self.node_mut(idx).hot.as_mut() {
            hot.aliases.retain(|number| *number != ino);
            hot.alias = hot.alias.filter(|alias| *alias != ino);
            self.tidy(idx);
        }
    }

    fn release(&mut self, handle: &Handle) {
        let Some(idx) = self.by_id(handle.id) else { return };
        let hot = self.hot_mut(idx);
        if let Some(at) = hot.opened.iter().position(|opened| opened.ino == handle.ino) {
            hot.opened[at].handles -= 1;
            if hot.opened[at].handles == 0 {
                hot.opened.swap_remove(at);
            }
        }
        if handle.mode == Mode::Passthrough
            && let Some(slab) = &hot.slab
        {
            slab.touch_release();
        }
        if handle.writer {
            hot.writers -= 1;
        } else {
            self.node_mut(idx).atime = now();
        }
        self.touch(idx);
        self.close_if_done(idx);
    }

    /// After the last writable handle is gone, and no open is on its way, the version is complete.
    pub fn close_if_done(&mut self, idx: Idx) {
        let Some(hot) = self.hot(idx) else { return };
        if hot.writers == 0 && hot.promised == 0 && !hot.writing && !hot.sealed() {
            self.complete(idx);
        }
        if self.tree.nodes.get(idx).is_some() {
            self.tidy(idx);
        }
    }
}

enum Found {
    /// And whether the kernel may remember it.
    Node(Idx, bool),
    Releasing(Idx),
}

impl Store {
    pub fn lookup(self: &Arc<Self>, parent: u64, name: &[u8], caller: &Caller) -> Answer<Entry> {
        self.with(|core| {
            core.counters.lookups += 1;
            let answer = core.lookup(parent, name, caller);
            if let Answer::Now(Err(_)) = answer {
                core.counters.lookup_misses += 1;
            }
            answer
        })
    }

    /// Answers when the file that `lookup` met has been released, or after the bounded wait.
    pub fn lookup_later(self: &Arc<Self>, parent: u64, name: &[u8], caller: &Caller, reply: EntryReply) {
        self.with(|core| match core.find(parent, name, caller) {
            Ok(Found::Releasing(idx)) => {
                let Ok(parent) = core.resolve_dir(parent) else {
                    return core.reply(move || reply(Err(Errno::ENOENT)));
                };
                let parent = core.id(parent);
                let then = Then::Find { caller: *caller, parent, name: name.into(), reply };
                core.wait_for_release(idx, then);
            }
            Ok(Found::Node(idx, shown)) => {
                let entry = core.entry(idx, shown);
                core.reply(move || reply(Ok(entry)));
            }
            Err(errno) => core.reply(move || reply(Err(errno))),
        });
    }

    pub fn create(
        self: &Arc<Self>,
        parent: u64,
        name: &[u8],
        mode: u32,
        flags: i32,
        caller: &Caller,
    ) -> Result<(Entry, Opened), Errno> {
        let tgid = process_of(caller.tid);
        self.with(|core| core.create(parent, name, mode, flags, caller, tgid))
    }

    /// A regular file made by mknod(2): visible at once and empty.
    pub fn mknod(
        self: &Arc<Self>,
        parent: u64,
        name: &[u8],
        mode: u32,
        caller: &Caller,
    ) -> Result<Entry, Errno> {
        if mode & libc::S_IFMT != libc::S_IFREG && mode & libc::S_IFMT != 0 {
            return Err(Errno::EPERM);
        }
        self.with(|core| {
            let visible = core.resolve_dir(parent).ok().and_then(|parent| core.tree.child(parent, name));
            if visible.is_some() {
                return Err(Errno::EEXIST);
            }
            let (_, Opened { handle, .. }) = core.create(parent, name, mode, libc::O_WRONLY, caller, 0)?;
            let idx = handle.id.idx();
            core.release(&handle);
            Ok(core.entry(idx, true))
        })
    }

    pub fn open(self: &Arc<Self>, ino: u64, flags: i32, caller: &Caller) -> Result<Opened, Errno> {
        // Only a truncating open can make a private version, and only then does the process matter.
        let tgid = if flags & libc::O_TRUNC != 0 { process_of(caller.tid) } else { 0 };
        self.with(|core| core.open(ino, flags, caller, tgid))
    }

    /// Whether the handles of the inode number that `handle` was opened under are to be served by passthrough.
    pub fn reads_by_passthrough(self: &Arc<Self>, handle: &Handle) -> bool {
        let core = self.lock();
        let hot = core.by_id(handle.id).and_then(|idx| core.hot(idx));
        hot.is_some_and(|hot| {
            hot.opened.iter().any(|opened| opened.ino == handle.ino && opened.mode == Mode::Passthrough)
        })
    }

    /// A passthrough open, of which the kernel has not been told, that is to be served by the daemon after all. So are
    /// the others under its inode number, which wait for this one, and all that come while the file stays in L1.
    pub fn read_directly(self: &Arc<Self>, handle: &mut Handle) {
        handle.mode = Mode::Direct;
        self.with(|core| {
            core.counters.opens_passthrough -= 1;
            core.counters.opens_direct += 1;
            let Some(idx) = core.by_id(handle.id) else { return };
            let hot = core.hot_mut(idx);
            hot.no_passthrough = true;
            if let Some(opened) = hot.opened.iter_mut().find(|opened| opened.ino == handle.ino) {
                opened.mode = Mode::Direct;
            }
            core.tidy(idx);
        });
    }

    fn private_of<R>(&self, handle: &Handle, look: impl FnOnce(&Hot, &Private) -> R) -> Option<R> {
        let core = self.lock();
        let hot = core.hot(core.by_id(handle.id)?)?;
        hot.private().map(|private| look(hot, private))
    }

    fn doom(self: &Arc<Self>, handle: &Handle) {
        handle.orphaned.store(true, Ordering::Relaxed);
        self.with(|core| {
            let Some(idx) = core.by_id(handle.id) else { return };
            if let Some(private) = core.hot_mut(idx).private_mut() {
                private.doom = private.doom.or(Some(Doom::Killed));
            }
        });
    }

    /// A descriptor of the file was closed. Whether that was its maker dying shows only now.
    pub fn flush(self: &Arc<Self>, handle: &Handle, caller: &Caller) {
        if !handle.writer {
            return;
        }
        let Some(maker) = self.private_of(handle, |_, private| private.tgid) else { return };
        let killed = dying_of(caller.tid).is_some() && maker != 0 && process_of(caller.tid) == maker;
        self.with(|core| {
            let Some(idx) = core.by_id(handle.id) else { return };
            core.closes += 1;
            let closed = core.closes;
            if let Some(private) = core.hot_mut(idx).private_mut() {
                private.flushed = true;
                // Another close, which may be the last: it is waited for like the first.
                private.waited = false;
                private.closed = closed;
            }
        });
        if killed {
            self.doom(handle);
        }
    }

    /// `caller` writes to a file whose maker was killed: it is that one's file now, and its close publishes it.
    pub fn take_over(self: &Arc<Self>, handle: &Handle, caller: &Caller) {
        if !handle.orphaned.load(Ordering::Relaxed) {
            return;
        }
        let writer = process_of(caller.tid);
        self.with(|core| {
            let Some(idx) = core.by_id(handle.id) else { return };
            let Some(private) = core.hot_mut(idx).private_mut() else { return };
            if private.doom == Some(Doom::Killed) && writer != 0 {
                private.doom = None;
                private.tgid = writer;
                handle.orphaned.store(false, Ordering::Relaxed);
            }
        });
    }

    /// Bytes of a mapping were written back. A process that dies has this done before its mappings go, and waits for it:
    /// if it had closed the file before, nothing else tells that it was killed.
    pub fn written_back(self: &Arc<Self>, handle: &Handle) {
        let maker = self.private_of(handle, |_, private| private.tgid);
        if maker.is_some_and(|maker| dying_of(maker).is_some()) {
            self.doom(handle);
        }
    }

    /// Whether the version goes with this handle and its maker did not close it, nor ended in a way that would.
    fn is_abandoned(&self, handle: &Handle) -> bool {
        let unclosed = self.private_of(handle, |hot, private| {
            (hot.writers == 1 && !private.flushed).then_some((private.tgid, private.closed > 0))
        });
        let Some((maker @ 1.., was_closed)) = unclosed.flatten() else { return false };
        // Every process that ends closes its descriptors first. What comes here has been kept by something else, an io_uring
        // or a mapping: of a mapping it is known already how its process ended ([`Store::written_back`]).
        dying_of(maker).is_some() || (!was_closed && !is_there(maker))
    }

    /// The other inode numbers need nobody to remember them.
    pub fn forget(self: &Arc<Self>, ino: u64, lookups: u64) {
        if ino >= ALIAS_BASE {
            self.with(|core| core.forget(ino, lookups));
        }
    }

    pub fn release(self: &Arc<Self>, handle: &Handle) {
        if handle.writer && self.is_abandoned(handle) {
            self.doom(handle);
        }
        self.with(|core| core.release(handle));
    }
}
