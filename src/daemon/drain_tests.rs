//! Drains against a device that is told when to answer, and what (rules R6, R14).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::sync::mpsc::{Receiver, TryRecvError};

use nix::errno::Errno;

use super::stand_in_tests::{after_a_crash, begin_drain, open, rename, write};
use super::tests::Rig;
use super::*;
use crate::l2::{Class, Direction};
use crate::store::Handle;
use crate::store::drain::{DrainId, Progress, Scope};
use crate::store::hot::BLOCK;
use crate::store::node::{NodeId, ROOT_INO};

const SIZE: usize = 300_000;

type Ended = (Result<(), Errno>, Progress);

/// A drain that goes on, or has ended.
struct Drained(DrainId, Receiver<Ended>);

impl Drained {
    fn begin(rig: &Rig, scope: &Scope, timeout: Option<Duration>) -> Self {
        let (tell, told) = channel();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let done = Box::new(move |core: &mut Core, ended, progress| {
            core.reply(move || tell.send((ended, progress)).unwrap());
        });
        Self(rig.store().with(|core| core.begin_drain(scope, deadline, done)), told)
    }

    fn all(rig: &Rig) -> Self {
        Self::begin(rig, &Scope::All, None)
    }

    fn of(rig: &Rig, inos: &[u64]) -> Self {
        Self::begin(rig, &Scope::Of(inos.iter().map(|ino| NodeId(*ino).idx()).collect()), None)
    }

    fn end(&self) -> Ended {
        self.1.recv().unwrap()
    }

    #[track_caller]
    fn assert_goes_on(&self) {
        assert!(matches!(self.1.try_recv(), Err(TryRecvError::Empty)));
    }

    /// It has ended without a failure.
    #[track_caller]
    fn assert_done(&self, files: u64, bytes: usize) {
        let (ended, progress) = self.end();
        let bytes = bytes as u64;
        let all =
            Progress { files, bytes, drained_files: files, drained_bytes: bytes, ..Progress::default() };
        assert_eq!((ended, progress), (Ok(()), all));
    }

    fn abandon(&self, rig: &Rig) {
        rig.store().with(|core| {
            let progress = core.stop_drain(self.0).unwrap();
            core.tell_others(progress);
        });
    }

    fn progress(&self, rig: &Rig) -> Progress {
        rig.store().lock().drain_progress(self.0).unwrap().clone()
    }
}

fn mkdir(rig: &Rig, name: &str) -> u64 {
    rig.store().mkdir(ROOT_INO, name.as_bytes(), 0o755, &Rig::caller()).unwrap().attr.ino
}

/// Publishes a file in a directory.
fn publish_in(rig: &Rig, parent: u64, name: &str, bytes: &[u8]) {
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    let (_, made) = rig.store().create(parent, name.as_bytes(), 0o644, flags, &Rig::caller()).unwrap();
    write(rig, &made.handle, bytes);
    rig.store().release(&made.handle);
}

/// Waits until so many transfers are held; each file of `SIZE` bytes is one.
fn held(rig: &Rig, count: usize) {
    rig.wait(|| rig.faults.held(Class::WriteBack) == count);
}

#[track_caller]
fn assert_holds(rig: &Rig, ino: u64, byte: u8) {
    assert!(rig.read(ino, SIZE + 1).unwrap() == vec![byte; SIZE]);
}

#[test]
fn what_is_published_later_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("one", &[1; SIZE]);
    rig.write("two", &[2; SIZE]);
    held(&rig, 2);
    let drain = Drained::all(&rig);
    rig.write("later", &[3; SIZE]);
    held(&rig, 3);
    assert_eq!(drain.progress(&rig), Progress { files: 2, bytes: 2 * SIZE as u64, ..Progress::default() });
    assert_eq!(rig.store().snapshot().drains_waiting, 1);
    rig.faults.release_some(Class::WriteBack, 1);
    rig.wait(|| drain.progress(&rig).drained_files == 1);
    drain.assert_goes_on();
    rig.faults.release_some(Class::WriteBack, 1);
    drain.assert_done(2, 2 * SIZE);
    assert_eq!(rig.faults.held(Class::WriteBack), 1, "the later one is still on its way");
    after_a_crash(dir.path(), |rig| {
        assert_holds(rig, rig.find("one").unwrap(), 1);
        assert_holds(rig, rig.find("two").unwrap(), 2);
        assert_eq!(rig.find("later"), Err(Errno::ENOENT));
    });
    rig.faults.release(Class::WriteBack);
    let at = rig.store().snapshot();
    assert_eq!((at.drains_waiting, at.counters.drains, at.counters.drained_files), (0, 1, 2));
    rig.stop();
}

#[test]
fn what_is_published_later_and_fails_is_for_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("one", &[1; SIZE]);
    held(&rig, 1);
    let (drain, plain) = (Drained::all(&rig), begin_drain(&rig));
    rig.write("later", &[2; SIZE]);
    held(&rig, 2);
    rig.faults.hold_syncs();
    rig.faults.release_some(Class::WriteBack, 1);
    rig.faults.wait_for_sync();
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.faults.release(Class::WriteBack);
    rig.wait(|| rig.store().snapshot().counters.store_failures == 1);
    rig.faults.release_syncs();
    drain.assert_done(1, SIZE);
    assert_eq!(plain.recv().unwrap(), Ok(()));
    let (ended, progress) = Drained::all(&rig).end();
    assert_eq!((ended, progress.failures), (Err(Errno::EIO), vec![b"later".as_slice().into()]));
    rig.stop();
}

#[test]
fn a_part_is_drained_without_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let (a, b) = (mkdir(&rig, "a"), mkdir(&rig, "b"));
    let deep = rig.store().mkdir(a, b"deep", 0o755, &Rig::caller()).unwrap().attr.ino;
    Drained::all(&rig).assert_done(0, 0);
    rig.faults.hold(Class::WriteBack);
    publish_in(&rig, deep, "f", &[1; SIZE]);
    publish_in(&rig, a, "g", &[2; SIZE]);
    publish_in(&rig, b, "f", &[3; SIZE]);
    held(&rig, 3);
    let file = Drained::of(&rig, &[rig.find_in(deep, "f").unwrap()]);
    let (part, rest, all) = (Drained::of(&rig, &[a]), Drained::of(&rig, &[b]), Drained::all(&rig));
    assert_eq!([&file, &part, &rest, &all].map(|drain| drain.progress(&rig).files), [1, 2, 1, 3]);
    // Nothing of it is on its way.
    Drained::of(&rig, &[mkdir(&rig, "empty")]).end().0.unwrap();
    rig.faults.release_some(Class::WriteBack, 1);
    file.assert_done(1, SIZE);
    part.assert_goes_on();
    rig.faults.release_some(Class::WriteBack, 1);
    part.assert_done(2, 2 * SIZE);
    rest.assert_goes_on();
    after_a_crash(dir.path(), |rig| {
        let deep = rig.find_in(rig.find("a").unwrap(), "deep").unwrap();
        assert_holds(rig, rig.find_in(deep, "f").unwrap(), 1);
    });
    rig.faults.release(Class::WriteBack);
    rest.assert_done(1, SIZE);
    all.assert_done(3, 3 * SIZE);
    // Everything is durable: answered before the call returns, also of everything.
    assert!(Drained::all(&rig).1.try_recv().is_ok());
    assert!(Drained::of(&rig, &[a, b]).1.try_recv().is_ok());
    rig.stop();
}

#[test]
fn whoever_waits_for_a_file_that_fails_is_told_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let (a, b) = (mkdir(&rig, "a"), mkdir(&rig, "b"));
    Drained::all(&rig).assert_done(0, 0);
    rig.faults.hold(Class::WriteBack);
    publish_in(&rig, a, "lost", &[1; SIZE]);
    publish_in(&rig, a, "kept", &[2; SIZE]);
    publish_in(&rig, b, "kept", &[3; SIZE]);
    held(&rig, 3);
    let (part, other, all) = (Drained::of(&rig, &[a]), Drained::of(&rig, &[b]), Drained::all(&rig));
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.faults.release_some(Class::WriteBack, 1);
    rig.wait(|| part.progress(&rig).failed == 1);
    // Also while it goes on.
    assert_eq!(all.progress(&rig).failures, [b"a/lost".as_slice().into()]);
    rig.faults.release(Class::WriteBack);
    let bytes = SIZE as u64;
    let failed = |files: u64| Progress {
        files,
        bytes: files * bytes,
        drained_files: files - 1,
        drained_bytes: (files - 1) * bytes,
        failed: 1,
        failures: vec![b"a/lost".as_slice().into()],
    };
    assert_eq!(part.end(), (Err(Errno::EIO), failed(2)));
    assert_eq!(all.end(), (Err(Errno::EIO), failed(3)));
    other.assert_done(1, SIZE);
    assert!(rig.said("a drain of 2 files failed: 1 could not be stored: a/lost"));
    // It has been told.
    assert_eq!(rig.drain(), Ok(()));
    Drained::of(&rig, &[a]).assert_done(0, 0);
    let counters = rig.store().snapshot().counters;
    assert_eq!((counters.drains_failed, counters.drain_failures, counters.store_failures), (2, 2, 1));
    rig.stop();
}

/// Nobody waited when it failed: the next one that would have, is told.
#[test]
fn a_failure_is_kept_for_the_next_drain_of_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let (a, ab) = (mkdir(&rig, "a"), mkdir(&rig, "ab"));
    Drained::all(&rig).assert_done(0, 0);
    for (parent, drain) in [(a, Some(a)), (ROOT_INO, None)] {
        rig.faults.fail_next(Direction::Write, 1, libc::EIO);
        publish_in(&rig, parent, "lost", &[1; SIZE]);
        let failures = || rig.store().snapshot().counters.store_failures;
        let before = failures();
        rig.wait(|| failures() > before || rig.find_in(parent, "lost").is_err());
        Drained::of(&rig, &[ab]).assert_done(0, 0);
        let told = drain.map_or_else(|| Drained::all(&rig), |dir| Drained::of(&rig, &[dir]));
        let (ended, progress) = told.end();
        assert_eq!((ended, progress.failed, progress.files), (Err(Errno::EIO), 1, 0));
        Drained::all(&rig).assert_done(0, 0);
    }
    // A drain whose client has gone away before it ended has told nobody.
    rig.faults.hold(Class::WriteBack);
    publish_in(&rig, a, "lost", &[1; SIZE]);
    publish_in(&rig, a, "kept", &[2; SIZE]);
    held(&rig, 2);
    let drain = Drained::all(&rig);
    rig.faults.fail_next(Direction::Write, 1, libc::EIO);
    rig.faults.release_some(Class::WriteBack, 1);
    rig.wait(|| drain.progress(&rig).failed == 1);
    drain.abandon(&rig);
    rig.faults.release(Class::WriteBack);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    assert_eq!(rig.drain(), Ok(()));
    rig.stop();
}

#[test]
fn a_failure_of_the_catalog_fails_all_that_wait() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("two", &[1; SIZE]);
    rig.write("one", &[2; SIZE]);
    held(&rig, 2);
    let (all, part) = (Drained::all(&rig), Drained::of(&rig, &[rig.find("one").unwrap()]));
    rig.faults.fail_next_syncs(1, libc::EIO);
    rig.faults.release(Class::WriteBack);
    let (ended, progress) = all.end();
    assert_eq!((ended, progress.drained_files, progress.failed), (Err(Errno::EIO), 0, 2));
    assert_eq!(progress.failures, [b"one".as_slice().into(), b"two".as_slice().into()]);
    assert_eq!(part.end().0, Err(Errno::EIO));
    assert_eq!(Drained::all(&rig).end().0, Err(Errno::EIO));
    rig.stop();
}

/// What becomes of the name while a drain waits neither holds it up nor is counted twice.
#[test]
fn files_that_are_renamed_unlinked_or_replaced_meanwhile_are_counted() {
    for part in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        for name in ["renamed", "unlinked", "replaced"] {
            rig.write(name, &[9; SIZE]);
        }
        Drained::all(&rig).end().0.unwrap();
        rig.faults.hold(Class::WriteBack);
        rig.write("first", &[8; SIZE]);
        for (byte, name) in [(1, "renamed"), (2, "unlinked"), (3, "replaced")] {
            rig.write(&format!("{name}.tmp"), &[byte; SIZE]);
            rename(&rig, &format!("{name}.tmp"), name);
        }
        held(&rig, 4);
        let inos = ["renamed", "unlinked", "replaced"].map(|name| rig.find(name).unwrap());
        let drain = if part { Drained::of(&rig, &inos) } else { Drained::all(&rig) };
        rename(&rig, "renamed", "elsewhere");
        rig.store().unlink(ROOT_INO, b"unlinked", &Rig::caller()).unwrap();
        rig.write("new", &[4; SIZE]);
        rename(&rig, "new", "replaced");
        drain.assert_goes_on();
        rig.faults.release_some(Class::WriteBack, 4);
        // The one that was replaced is waited for as its successor.
        let files = if part { 3 } else { 4 };
        let drained = || rig.store().lock().drain_progress(drain.0).map(|at| at.drained_files);
        rig.wait(|| drained().is_none_or(|drained| drained + 1 >= files));
        assert_eq!(drained(), Some(files - 1));
        rig.faults.release(Class::WriteBack);
        drain.assert_done(files, files as usize * SIZE);
        after_a_crash(dir.path(), |rig| {
            assert_holds(rig, rig.find("elsewhere").unwrap(), 1);
            assert_eq!(rig.find("unlinked"), Err(Errno::ENOENT));
            assert_eq!(rig.find("renamed"), Err(Errno::ENOENT));
            assert_holds(rig, rig.find("replaced").unwrap(), 4);
        });
        rig.stop();
    }
}

/// Opens a file in shared use, which is written in place.
fn shared(rig: &Rig, name: &str) -> Handle {
    let flags = libc::O_WRONLY | libc::O_CREAT;
    rig.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, &Rig::caller()).unwrap().1.handle
}

/// What was published of it is stored; what is written since, the drain does not wait for.
#[test]
fn a_file_that_is_written_in_place_without_end_ends_a_drain() {
    const WHOLE: usize = 2 * BLOCK as usize;
    for part in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        rig.faults.hold(Class::WriteBack);
        let handle = shared(&rig, "slots");
        // Rewritten in place, so that it is so when it is opened anew, too.
        write(&rig, &handle, &[0; WHOLE]);
        write(&rig, &handle, &[1; WHOLE]);
        rig.store().release(&handle);
        rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
        let ino = rig.find("slots").unwrap();
        let drain = if part { Drained::of(&rig, &[ino]) } else { Drained::all(&rig) };
        rig.faults.hold_syncs();
        rig.faults.release(Class::WriteBack);
        rig.faults.wait_for_sync();
        rig.faults.hold(Class::WriteBack);
        let writer = open(&rig, "slots", libc::O_WRONLY);
        write(&rig, &writer, &[2; WHOLE]);
        // What it writes is queued, and held: a drain that waited for that would wait for ever.
        let (tell, synced) = channel();
        rig.store().fsync(&writer, Box::new(move |result| tell.send(result).unwrap()));
        rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
        drain.assert_goes_on();
        rig.faults.release_syncs();
        drain.assert_done(1, WHOLE);
        assert!(synced.try_recv().is_err());
        after_a_crash(dir.path(), |rig| {
            let read = rig.read(rig.find("slots").unwrap(), 2 * WHOLE).unwrap();
            assert!(read == [1; WHOLE], "{} bytes", read.len());
        });
        assert!(rig.faults.held(Class::WriteBack) > 0);
        rig.faults.release(Class::WriteBack);
        assert_eq!(synced.recv().unwrap(), Ok(()));
        rig.store().release(&writer);
        rig.stop();
    }
}

/// An older state of it lands while it waits: that is not what it waits for.
#[test]
fn a_drain_waits_for_the_last_that_was_published_of_a_file() {
    const WHOLE: usize = 2 * BLOCK as usize;
    for part in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start(dir.path());
        rig.faults.hold_syncs();
        let handle = shared(&rig, "slots");
        write(&rig, &handle, &[0; WHOLE]);
        write(&rig, &handle, &[1; WHOLE]);
        rig.store().release(&handle);
        rig.faults.wait_for_sync();
        rig.faults.hold(Class::WriteBack);
        let writer = open(&rig, "slots", libc::O_WRONLY);
        write(&rig, &writer, &[2; WHOLE]);
        rig.store().release(&writer);
        let ino = rig.find("slots").unwrap();
        let drain = if part { Drained::of(&rig, &[ino]) } else { Drained::all(&rig) };
        rig.faults.release_syncs();
        rig.wait(|| rig.store().snapshot().counters.committed_files == 1);
        assert_eq!(drain.progress(&rig).drained_files, 0);
        drain.assert_goes_on();
        rig.faults.release(Class::WriteBack);
        drain.assert_done(1, WHOLE);
        after_a_crash(dir.path(), |rig| {
            assert!(rig.read(rig.find("slots").unwrap(), 2 * WHOLE).unwrap() == [2; WHOLE]);
        });
        rig.stop();
    }
}

#[test]
fn names_and_attributes_are_drained_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let sub = mkdir(&rig, "sub");
    publish_in(&rig, sub, "f", &[1; SIZE]);
    Drained::all(&rig).end().0.unwrap();
    for (at, scope) in [None, Some(ROOT_INO), Some(sub)].into_iter().enumerate() {
        let (from, to) = (if at == 0 { "f".to_owned() } else { format!("f{at}") }, format!("f{}", at + 1));
        let caller = Rig::caller();
        rig.store().rename(sub, from.as_bytes(), sub, to.as_bytes(), 0, &caller).unwrap();
        mkdir(&rig, &format!("dir{at}"));
        rig.store().setxattr(sub, b"user.at", to.as_bytes(), 0).unwrap();
        let root = |ino| {
            if ino == ROOT_INO {
                Scope::Of(vec![crate::store::node::ROOT])
            } else {
                Scope::Of(vec![NodeId(ino).idx()])
            }
        };
        Drained::begin(&rig, &scope.map_or(Scope::All, root), None).assert_done(0, 0);
        after_a_crash(dir.path(), |rig| {
            let sub = rig.find("sub").unwrap();
            assert_eq!(rig.find_in(sub, &from), Err(Errno::ENOENT));
            assert_holds(rig, rig.find_in(sub, &to).unwrap(), 1);
            rig.find(&format!("dir{at}")).unwrap();
            assert_eq!(rig.store().getxattr(sub, b"user.at").unwrap(), to.as_bytes());
        });
    }
    rig.stop();
}

#[test]
fn a_drain_ends_at_its_deadline_and_what_it_waited_for_is_stored_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    rig.faults.hold(Class::WriteBack);
    rig.write("slow", &[1; SIZE]);
    held(&rig, 1);
    let late = Drained::begin(&rig, &Scope::All, Some(Duration::from_millis(1)));
    let patient = Drained::begin(&rig, &Scope::All, Some(Duration::from_secs(3600)));
    let (ended, progress) = late.end();
    assert_eq!((ended, progress.files, progress.drained_files), (Err(Errno::ETIMEDOUT), 1, 0));
    assert!(rig.said("a drain of 1 file timed out"));
    patient.assert_goes_on();
    // However often one asks, the queue does not grow.
    let queued = rig.store().snapshot().queued_files;
    for _ in 0..100 {
        let drain = Drained::all(&rig);
        drain.abandon(&rig);
    }
    assert_eq!(rig.store().snapshot().queued_files, queued);
    rig.faults.release(Class::WriteBack);
    patient.assert_done(1, SIZE);
    assert_eq!(rig.store().snapshot().counters.drain_timeouts, 1);
    after_a_crash(dir.path(), |rig| assert_holds(rig, rig.find("slow").unwrap(), 1));
    rig.stop();
}
