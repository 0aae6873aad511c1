//! Names: directories, links, unlink, rename, listing.
//!
//! None of these waits for L1, L2 or a client (rule R15): the kernel holds directory locks meanwhile.

use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::attr::NAME_MAX;
use super::core::{Core, now};
use super::drain::{Done, Scope};
use super::hot::Then;
use super::node::{DURABLE, Detail, Idx, Kind, NAMED, NO_INO, NONE, ROOT};
use super::patience::Once;
use super::process::Caller;
use super::{Entry, Store};

/// One line of a listing.
#[derive(Debug, Clone)]
pub struct Listed {
    pub ino: u64,
    pub kind: Kind,
    pub name: Box<[u8]>,
    /// Where to go on after this one.
    pub cookie: u64,
}

/// rename2's flags.
pub const NOREPLACE: u32 = 1;

/// Cookies of `.` and `..`; children follow.
const FIRST_CHILD_COOKIE: u64 = 2;

pub fn check_name(name: &[u8]) -> Result<(), Errno> {
    if name.len() > NAME_MAX { Err(Errno::ENAMETOOLONG) } else { Ok(()) }
}

impl Core {
    /// The group and mode bits that a directory hands down (setgid).
    pub fn inherited(&self, parent: Idx, caller: &Caller, mode: u32, dir: bool) -> (u32, u32) {
        let parent = self.node(parent);
        if parent.mode & 0o2000 == 0 {
            return (caller.gid, mode);
        }
        (parent.gid, if dir { mode | 0o2000 } else { mode })
    }

    /// Makes a directory or a link: visible at once, recorded with the next commit.
    fn make(
        &mut self,
        parent: u64,
        name: &[u8],
        detail: Detail,
        mode: u32,
        caller: &Caller,
    ) -> Result<Entry, Errno> {
        check_name(name)?;
        let parent = self.resolve_dir(parent)?;
        if self.tree.child(parent, name).is_some() || self.reserved(parent, name) {
            return Err(Errno::EEXIST);
        }
        let (gid, mode) = self.inherited(parent, caller, mode, matches!(detail, Detail::Dir(_)));
        let target = if let Detail::Symlink(target) = &detail { target.len() } else { 0 };
        let idx = self.new_node(detail, mode, caller.uid, gid, name.len() + target)?;
        self.make_way(parent, name);
        self.tree.link(idx, parent, name);
        self.touch_dir(parent);
        self.record_at_once(idx);
        Ok(self.entry(idx, true))
    }

    /// The private version of `name` that `caller` means: its thread's own, else its process's newest.
    pub fn own_private(&self, parent: Idx, name: &[u8], caller: &Caller, any_unknown: bool) -> Option<Idx> {
        // What was made for an open that has not arrived yet is nobody's, nor is what was closed before the version that
        // everybody sees, unless that was a duplicate.
        let means = |private: &super::hot::Private| {
            private.opened && !(private.is_releasing() && private.is_outdated())
        };
        let all: SmallVec<[Idx; 2]> = self
            .tree
            .privates(parent, name)
            .iter()
            .copied()
            .filter(|&idx| self.hot(idx).and_then(|hot| hot.private()).is_some_and(means))
            .collect();
        let made_by = |idx: &&Idx| {
            self.hot(**idx).and_then(|hot| hot.private()).map(|private| (private.tid, private.tgid))
        };
        if caller.tid == 0 {
            // A process that we cannot see: rename and unlink reach its newest private name, nothing else does.
            return any_unknown.then(|| all.last().copied()).flatten();
        }
        if let Some(idx) = all.iter().rev().find(|idx| made_by(idx).is_some_and(|(tid, _)| tid == caller.tid))
        {
            return Some(*idx);
        }
        all.iter()
            .rev()
            .find(|idx| made_by(idx).is_some_and(|(_, tgid)| super::process::is_thread_of(caller.tid, tgid)))
            .copied()
    }

    /// Versions of `name` that the caller's process made, and that were overtaken before their RELEASE: what it does to the
    /// name, it does to them, too, since they may be open still.
    fn own_outdated(&self, parent: Idx, name: &[u8], caller: &Caller) -> Vec<Idx> {
        let is_own = |idx: &Idx| {
            self.hot(*idx).and_then(|hot| hot.private()).is_some_and(|private| {
                private.opened
                    && private.is_releasing()
                    && private.is_outdated()
                    && caller.tid != 0
                    && (private.tid == caller.tid || super::process::is_thread_of(caller.tid, private.tgid))
            })
        };
        self.tree.privates(parent, name).iter().copied().filter(is_own).collect()
    }

    /// Whether `uid` may remove `victim` from `parent`: the kernel's check in directories with the sticky bit, which it
    /// cannot make of what has appeared since it looked, or under a name that leads its caller to something else.
    pub fn may_remove(&self, parent: Idx, victim: Idx, uid: u32) -> bool {
        let dir = self.node(parent);
        !self.settings.permissions
            || dir.mode & 0o1000 == 0
            || [0, dir.uid, self.node(victim).uid].contains(&uid)
    }

    /// Whether the kernel would certainly let `caller` open the file `idx` in `parent`. It has not been asked about a file
    /// that came into being since it looked, and knows of groups, of capabilities, and of rules for sticky directories (which
    /// root has to keep, too) that we do not.
    pub fn surely_may_open(&self, parent: Idx, idx: Idx, flags: i32, caller: &Caller) -> bool {
        let node = self.node(idx);
        let own = caller.uid == node.uid;
        if !own && self.node(parent).mode & 0o1000 != 0 {
            return false;
        }
        if !self.settings.permissions {
            return true;
        }
        // For the owner and who has CAP_FOWNER alone.
        if !own && flags & libc::O_NOATIME != 0 {
            return false;
        }
        let bits = match flags & libc::O_ACCMODE {
            libc::O_RDONLY => 0o4,
            libc::O_WRONLY => 0o2,
            _ => 0o6,
        } | if flags & libc::O_TRUNC != 0 { 0o2 } else { 0 };
        let grants = |class: u16| node.mode >> class & bits == bits;
        if own { grants(6) } else { grants(3) && grants(0) }
    }

    /// The kernel moves what it knows by the old name to the new one, and believes in that. It is not what whoever has a
    /// private version under one of them finds there.
    fn forget_entry_of(&mut self, parent: Idx, name: &[u8]) {
        let parent = self.ino(parent);
        self.effects.push(super::core::Effect::Invalidate { parent, name: name.into() });
    }

    fn move_private(&mut self, idx: Idx, parent: Idx, name: &[u8], new_parent: Idx, new_name: &[u8]) {
        self.tree.remove_private(idx, parent, name);
        self.tree.add_private(idx, new_parent, new_name);
        if let Some(private) = self.hot_mut(idx).private_mut() {
            private.parent = new_parent;
            private.name = new_name.into();
        }
        self.recount(idx);
    }

    /// Takes the name from a private version; it goes on as a file without a name.
    fn forget_private(&mut self, idx: Idx) {
        self.remember_name(idx, None, false);
        let Some(private) = self.hot_mut(idx).private_mut() else { return };
        let (parent, name) = (private.parent, std::mem::take(&mut private.name));
        private.parent = NONE;
        self.tree.remove_private(idx, parent, &name);
        self.answer_lookups(idx);
        self.reap(idx);
    }

    fn unlink(&mut self, parent: u64, name: &[u8], caller: &Caller) -> Result<(), Errno> {
        check_name(name)?;
        self.came_otherwise(caller);
        let parent = self.resolve_dir(parent)?;
        let mine = self.own_private(parent, name, caller, true);
        let visible = self
            .tree
            .child(parent, name)
            // What the kernel has checked is the caller's own version.
            .filter(|&idx| mine.is_none() || self.may_remove(parent, idx, caller.uid));
        if mine.is_none() && visible.is_none() {
            return Err(Errno::ENOENT);
        }
        if visible.is_some_and(|idx| self.node(idx).kind() == Kind::Dir) {
            return Err(Errno::EISDIR);
        }
        if let Some(idx) = mine {
            self.forget_private(idx);
        }
        for idx in self.own_outdated(parent, name, caller) {
            self.forget_private(idx);
        }
        self.outdate(parent, name, NONE, self.closes, caller.uid);
        if let Some(idx) = visible {
            self.node_mut(idx).ctime = now();
            self.counters.unlinked += 1;
            self.drop_name(idx, None, false);
        }
        Ok(())
    }

    fn rmdir(&mut self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        check_name(name)?;
        let parent = self.resolve_dir(parent)?;
        let idx = self.tree.child(parent, name).ok_or(Errno::ENOENT)?;
        let dir = self.node(idx).dir().ok_or(Errno::ENOTDIR)?;
        if !dir.children.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.drop_name(idx, None, false);
        Ok(())
    }

    fn rename(
        &mut self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        flags: u32,
        caller: &Caller,
    ) -> Result<(), Errno> {
        check_name(name)?;
        check_name(new_name)?;
        self.came_otherwise(caller);
        if flags & !NOREPLACE != 0 {
            // RENAME_EXCHANGE and RENAME_WHITEOUT.
            return Err(Errno::EINVAL);
        }
        let (parent, new_parent) = (self.resolve_dir(parent)?, self.resolve_dir(new_parent)?);
        if let Some(idx) =
            self.own_private(parent, name, caller, true).or_else(|| self.tree.child(parent, name))
        {
            self.widen_record(idx, new_name.len().saturating_sub(name.len()))?;
        }
        let target = self.tree.child(new_parent, new_name);
        let reserved = self.reserved(new_parent, new_name);
        if flags & NOREPLACE != 0 && (target.is_some() || reserved) {
            return Err(Errno::EEXIST);
        }
        if let Some(idx) = self.own_private(parent, name, caller, true) {
            if target.is_some_and(|idx| self.node(idx).kind() == Kind::Dir) {
                return Err(Errno::EISDIR);
            }
            self.outdate(parent, name, idx, self.closes, caller.uid);
            self.outdate(new_parent, new_name, idx, self.closes, caller.uid);
            self.move_private(idx, parent, name, new_parent, new_name);
            self.forget_entry_of(parent, name);
            self.forget_entry_of(new_parent, new_name);
            if self.hot(idx).and_then(|hot| hot.private()).is_some_and(super::hot::Private::is_releasing)
                && let Some(older) = self.tree.child(parent, name)
                && self.may_remove(parent, older, caller.uid)
            {
                // To its maker it was what the name led to.
                self.drop_name(older, Some(idx), false);
                self.let_go(Some(older));
            }
            self.node_mut(idx).ctime = now();
            return Ok(());
        }
        let idx = self.tree.child(parent, name).ok_or(Errno::ENOENT)?;
        if target == Some(idx) {
            return Ok(());
        }
        let replaced = target.map(|target| self.node(target).seq);
        let is_dir = self.node(idx).kind() == Kind::Dir;
        if is_dir && self.tree.is_within(new_parent, idx) {
            return Err(Errno::EINVAL);
        }
        if let Some(target) = target {
            match (is_dir, self.node(target).dir()) {
                (true, None) => return Err(Errno::ENOTDIR),
                (false, Some(_)) => return Err(Errno::EISDIR),
                (true, Some(dir)) if !dir.children.is_empty() => return Err(Errno::ENOTEMPTY),
                _ => {}
            }
            // A file whose own record is on the device takes the name in the same commit that removes the
            // old one; otherwise the old record stays until the bytes of the new file are there.
            self.drop_name(target, Some(idx), false);
        }
        for private in self.own_outdated(parent, name, caller) {
            self.move_private(private, parent, name, new_parent, new_name);
        }
        self.outdate(parent, name, idx, self.closes, caller.uid);
        self.outdate(new_parent, new_name, idx, self.closes, caller.uid);
        if self.node(idx).has(DURABLE) || self.hot(idx).is_some_and(|hot| !hot.sealed()) {
            self.make_way(new_parent, new_name);
        }
        // It may have had to stay newer than what another file has just left here; it may be gone by now, too.
        let target_now = target.and_then(|target| self.tree.nodes.get(target));
        let replaced = target_now.map_or(replaced, |target| Some(target.seq));
        self.tree.unlink(idx);
        self.touch_dir(parent);
        self.tree.link_after(idx, new_parent, new_name, replaced);
        self.let_go(target);
        self.recount(idx);
        self.touch_dir(new_parent);
        if !self.tree.privates(new_parent, new_name).is_empty() {
            self.forget_entry_of(new_parent, new_name);
        }
        self.node_mut(idx).ctime = now();
        self.attributes_change(idx, NO_INO);
        self.changed(idx);
        self.settle_names(idx);
        self.note_old_name(idx);
        Ok(())
    }

    /// Whether somebody's O_EXCL create holds the name.
    pub fn reserved(&self, parent: Idx, name: &[u8]) -> bool {
        self.tree
            .privates(parent, name)
            .iter()
            .any(|&idx| self.hot(idx).and_then(|hot| hot.private()).is_some_and(|private| private.exclusive))
    }
}

/// Calls once nobody has a reference any more.
struct OnDrop(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(call) = self.0.get_mut().take() {
            call();
        }
    }
}

impl Store {
    pub fn mkdir(
        self: &Arc<Self>,
        parent: u64,
        name: &[u8],
        mode: u32,
        caller: &Caller,
    ) -> Result<Entry, Errno> {
        self.with(|core| core.make(parent, name, Detail::Dir(Box::default()), mode, caller))
    }

    pub fn symlink(
        self: &Arc<Self>,
        parent: u64,
        name: &[u8],
        target: &[u8],
        caller: &Caller,
    ) -> Result<Entry, Errno> {
        self.with(|core| core.make(parent, name, Detail::Symlink(target.into()), 0o777, caller))
    }

    pub fn unlink(self: &Arc<Self>, parent: u64, name: &[u8], caller: &Caller) -> Result<(), Errno> {
        self.with(|core| core.unlink(parent, name, caller))
    }

    pub fn rmdir(self: &Arc<Self>, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.with(|core| core.rmdir(parent, name))
    }

    pub fn rename(
        self: &Arc<Self>,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        flags: u32,
        caller: &Caller,
    ) -> Result<(), Errno> {
        self.with(|core| core.rename(parent, name, new_parent, new_name, flags, caller))
    }

    /// Calls `ready` when a listing shows every file whose last close has returned: once those that have been closed
    /// are released, or after the bounded wait. A directory is opened for that, not read: no lock is held meanwhile.
    pub fn before_listing(self: &Arc<Self>, ino: u64, ready: impl FnOnce() + Send + 'static) {
        self.after_releases(
            |core| {
                let parent = core.resolve(ino);
                parent.map_or_else(
                    |_| Vec::new(),
                    |parent| core.tree.privates_in(parent).map(|(idx, _)| idx).collect(),
                )
            },
            ready,
        );
    }

    /// Replies when everything published and every name changed so far is durable: also files whose close has returned
    /// and whose RELEASE is on its way.
    pub fn barrier(self: &Arc<Self>, reply: super::UnitReply) {
        self.barrier_with(reply, None);
    }

    /// The same for a client, who is answered at its deadline at the latest.
    pub fn fsync_all(self: &Arc<Self>, reply: super::UnitReply) {
        let once = self.with(|core| core.by_deadline(reply));
        self.barrier_with(once.clone().into_reply(), Some(once));
    }

    /// A drain of everything, that tells what it has found.
    pub fn drain_all(self: &Arc<Self>, deadline: Option<Instant>, done: Done) {
        let store = self.clone();
        self.after_releases(Self::of_all_unfinished, move || {
            store.with(|core| core.begin_drain(&Scope::All, deadline, done));
        });
    }

    fn of_all_unfinished(core: &Core) -> Vec<Idx> {
        core.building.values().filter_map(|id| core.by_id(*id)).collect()
    }

    fn barrier_with(self: &Arc<Self>, reply: super::UnitReply, once: Option<Once>) {
        let store = self.clone();
        self.after_releases(Self::of_all_unfinished, move || {
            store.with(|core| core.barrier(reply, once));
        });
    }

    /// Calls `ready` once those of the chosen files that have been closed are released, or after the bounded wait.
    fn after_releases(
        self: &Arc<Self>,
        choose: impl FnOnce(&Core) -> Vec<Idx>,
        ready: impl FnOnce() + Send + 'static,
    ) {
        let ready: Arc<OnDrop> = Arc::new(OnDrop(Mutex::new(Some(Box::new(ready)))));
        self.with(|core| {
            for idx in choose(core) {
                let Some(private) = core.hot(idx).and_then(|hot| hot.private()) else { continue };
                if !private.is_releasing() || private.parent == NONE {
                    continue;
                }
                let ready = ready.clone();
                core.wait_for_release(idx, Then::Again(Box::new(move || drop(ready))));
            }
        });
    }

    /// Lists a directory from `cookie` on until `take` says that it has enough.
    pub fn readdir(
        self: &Arc<Self>,
        ino: u64,
        cookie: u64,
        take: &mut dyn FnMut(&Listed) -> bool,
    ) -> Result<(), Errno> {
        let core = self.lock();
        let idx = core.resolve(ino)?;
        let node = core.node(idx);
        let dir = node.dir().ok_or(Errno::ENOTDIR)?;
        let up = if idx == ROOT || !node.has(NAMED) { idx } else { node.parent };
        let dots: [(&[u8], Idx); 2] = [(b".", idx), (b"..", up)];
        for (at, (name, dot)) in (1u64..).zip(dots) {
            if cookie < at
                && !take(&Listed { ino: core.ino(dot), kind: Kind::Dir, name: name.into(), cookie: at })
            {
                return Ok(());
            }
        }
        let from = cookie.saturating_sub(FIRST_CHILD_COOKIE);
        for (&place, &child) in dir.children.range(from..) {
            let node = core.node(child);
            let listed = Listed {
                ino: core.ino(child),
                kind: node.kind(),
                name: node.name.clone(),
                cookie: place + FIRST_CHILD_COOKIE + 1,
            };
            if !take(&listed) {
                break;
            }
        }
        Ok(())
    }
}
