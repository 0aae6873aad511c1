//! A device that takes nothing any more: who waits for it is answered (rule R15), and once it goes on nothing is lost.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::stall::Disk;
use common::{Mount, Options, bytes, memory_only};

/// Nothing here takes this long unless it waits for ever.
const LIMIT: Duration = Duration::from_secs(60);

fn mounted(disk: &Disk, args: &[&str]) -> Mount {
    let mut options = args.iter().fold(Options::new(128, 192), |options, arg| options.arg(arg));
    options.store_dir = Some(disk.path());
    Mount::with(options)
}

/// Asks on a thread of its own: without an answer it could not be ended, and the test with it.
fn fsync(file: File) -> Receiver<io::Result<()>> {
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(file.sync_all()));
    told
}

fn written(mount: &Mount, name: &str, seed: u64) -> File {
    let mut file = File::create(mount.at(name)).unwrap();
    file.write_all(&bytes(seed, 300_000)).unwrap();
    file
}

#[test]
fn fsync_and_drain_of_a_stuck_device_time_out_and_later_everything_is_durable() {
    let Some(disk) = (!memory_only()).then(Disk::new).flatten() else { return };
    // Either bound does it: nothing has moved, or it has taken too long.
    for args in
        [["--request-deadline=1s", "--fsync-deadline=1h"], ["--request-deadline=1h", "--fsync-deadline=1s"]]
    {
        let mut mount = mounted(&disk, &args);
        fs::write(mount.at("before"), bytes(0, 300_000)).unwrap();
        mount.drain();
        let frozen = disk.freeze();
        drop(written(&mount, "closed", 1));
        let file = fsync(written(&mount, "synced", 2));
        let control = fsync(File::open(mount.at(".ctl/version")).unwrap());
        let drain = fsync(File::open(mount.path()).unwrap());
        for (what, told) in [("fsync", file), ("drain", drain), ("drain by .ctl", control)] {
            let answer = told.recv_timeout(LIMIT);
            if answer.is_err() {
                drop(frozen);
                panic!("{what}: no answer, {args:?}");
            }
            assert_eq!(answer.unwrap().unwrap_err().kind(), ErrorKind::TimedOut, "{what}, {args:?}");
        }
        assert_eq!((mount.stat("fsync_timeouts"), mount.stat("timeouts")), (3, 3));
        assert!(mount.events().contains("waited until its deadline"), "{}", mount.events());
        // What is in L1 is served meanwhile.
        assert!(fs::read(mount.at("closed")).unwrap() == bytes(1, 300_000));
        drop(frozen);
        // Now it is a matter of time, of which the daemon has plenty: nothing was given up.
        mount.wait_for("dirty_bytes", |dirty| dirty == 0);
        mount.drain();
        assert_eq!(mount.stat("store_failures"), 0);
        mount.kill();
        mount.start();
        for (name, seed) in [("before", 0), ("closed", 1), ("synced", 2)] {
            assert!(fs::read(mount.at(name)).unwrap() == bytes(seed, 300_000), "{name}, {args:?}");
        }
        mount.stop();
        for store in fs::read_dir(disk.path()).unwrap().flatten() {
            let _ = fs::remove_file(store.path());
        }
    }
}

/// Waits for one of these to be so, on a disk that is frozen.
fn until(mount: &Mount, what: &str, mut holds: impl FnMut(&Mount) -> bool) {
    let deadline = std::time::Instant::now() + LIMIT;
    while !holds(mount) {
        assert!(std::time::Instant::now() < deadline, "{what}: never; status:\n{}", mount.status());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a drain has to wait for may be replaced before it is stored. Then it waits for what has taken its place, which is
/// far behind in the queue.
#[test]
fn a_drain_vouches_for_what_replaces_a_file_meanwhile() {
    let Some(disk) = (!memory_only()).then(Disk::new).flatten() else { return };
    let mut options = Options::new(256, 300).arg("--dirty-limit=200MiB");
    options.store_dir = Some(disk.path());
    let mut mount = Mount::with(options);
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("d/old"), bytes(0, 300_000)).unwrap();
    mount.drain();
    type Replace = fn(&Mount);
    let ways: [(&str, Replace); 3] = [
        ("written anew", |mount| fs::write(mount.at("d/f"), bytes(2, 300_000)).unwrap()),
        ("renamed over", |mount| {
            fs::write(mount.at("d/tmp"), bytes(2, 300_000)).unwrap();
            fs::rename(mount.at("d/tmp"), mount.at("d/f")).unwrap();
        }),
        ("twice", |mount| {
            fs::write(mount.at("d/f"), bytes(3, 300_000)).unwrap();
            fs::write(mount.at("d/f"), bytes(2, 300_000)).unwrap();
        }),
    ];
    for (way, replace) in ways {
        let frozen = disk.freeze();
        fs::write(mount.at("d/f"), bytes(1, 300_000)).unwrap();
        let drain = fsync(File::open(mount.path()).unwrap());
        until(&mount, "everything is queued", |mount| mount.stat("writeback_queued_files") >= 2);
        for at in 0..25 {
            fs::write(mount.at(&format!("d/behind{at}")), vec![at; 4 << 20]).unwrap();
        }
        replace(&mount);
        drop(frozen);
        drain.recv_timeout(LIMIT).unwrap().unwrap();
        mount.kill();
        mount.start();
        let found = fs::read(mount.at("d/f")).unwrap_or_else(|error| panic!("{way}: {error}"));
        assert!(found == bytes(1, 300_000) || found == bytes(2, 300_000), "{way}: neither version");
        assert!(fs::read(mount.at("d/old")).unwrap() == bytes(0, 300_000));
        for entry in fs::read_dir(mount.at("d")).unwrap().flatten() {
            if entry.file_name() != "old" {
                fs::remove_file(entry.path()).unwrap();
            }
        }
        mount.drain();
    }
}

fn xattr(dir: &std::path::Path) {
    let set = std::process::Command::new("setfattr")
        .args(["-n", "user.kv.publish", "-v", "posix"])
        .arg(dir)
        .status();
    assert!(set.unwrap().success());
}

/// The kernel holds a directory's lock while that is fsynced, for as long as it takes.
#[test]
fn an_open_that_has_to_look_again_may_wait_for_a_drain() {
    let Some(disk) = (!memory_only()).then(Disk::new).flatten() else { return };
    let mount = mounted(&disk, &["--request-deadline=12s"]);
    let write = |bytes: &[u8]| {
        let mut file = File::options().write(true).create(true).truncate(false).open(mount.at("f"))?;
        file.write_all(bytes)
    };
    write(b"old").unwrap();
    mount.drain();
    let frozen = disk.freeze();
    fs::write(mount.at("waits"), bytes(1, 300_000)).unwrap();
    let drain = fsync(File::open(mount.path()).unwrap());
    until(&mount, "the drain is queued", |mount| mount.stat("writeback_queued_files") >= 2);
    write(b"new").unwrap();
    assert_eq!(drain.recv_timeout(LIMIT).unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    drop(frozen);
    assert_eq!(fs::read(mount.at("f")).unwrap(), b"new");
}

/// A file in shared use is written where it is, also while its bytes are on their way to the device.
#[test]
fn a_drain_vouches_for_a_file_that_is_rewritten_in_place_meanwhile() {
    use std::os::unix::fs::FileExt;
    let Some(disk) = (!memory_only()).then(Disk::new).flatten() else { return };
    let mut mount = mounted(&disk, &[]);
    // The kernel locks a directory while that is fsynced, so the drain is that of another one.
    fs::create_dir(mount.at("d")).unwrap();
    xattr(&mount.at("d"));
    mount.drain();
    let shared = |mount: &Mount| {
        File::options().read(true).write(true).create(true).truncate(false).open(mount.at("d/f")).unwrap()
    };
    const BLOCK: usize = 256 << 10;
    let (old, new) = (bytes(1, 3 * BLOCK), bytes(2, 3 * BLOCK));
    for close in [false, true] {
        let frozen = disk.freeze();
        shared(&mount).write_all_at(&old, 0).unwrap();
        let drain = fsync(File::open(mount.path()).unwrap());
        until(&mount, "it is on its way", |mount| mount.stat("writeback_in_flight_bytes") > 0);
        let file = shared(&mount);
        let (tell, told) = channel();
        let patch = new[BLOCK..2 * BLOCK].to_vec();
        let kept = file.try_clone().unwrap();
        std::thread::spawn(move || {
            file.write_all_at(&patch, BLOCK as u64).unwrap();
            drop(file);
            tell.send(()).unwrap();
        });
        let mut written = false;
        until(&mount, "it is rewritten, or waits", |mount| {
            written |= told.try_recv().is_ok();
            written || mount.stat("waiting_writers") > 0
        });
        let kept = (!close).then_some(kept);
        drop(frozen);
        drain.recv_timeout(LIMIT).unwrap().unwrap();
        if !written {
            told.recv_timeout(LIMIT).unwrap();
        }
        // That it is stored as a whole is what the drain says, however far the rewriting has come.
        mount.kill();
        drop(kept);
        mount.start();
        let found = fs::read(mount.at("d/f")).unwrap_or_else(|error| panic!("closed {close}: {error}"));
        assert_eq!(found.len(), old.len());
        for (at, block) in found.chunks(BLOCK).enumerate() {
            let range = at * BLOCK..(at + 1) * BLOCK;
            assert!(block == &old[range.clone()] || block == &new[range], "closed {close}: block {at}");
        }
        fs::remove_file(mount.at("d/f")).unwrap();
        mount.drain();
    }
}
