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
        let drain = fsync(File::open(mount.path()).unwrap());
        for (what, told) in [("fsync", file), ("drain", drain)] {
            let answer = told.recv_timeout(LIMIT);
            if answer.is_err() {
                drop(frozen);
                panic!("{what}: no answer, {args:?}");
            }
            assert_eq!(answer.unwrap().unwrap_err().kind(), ErrorKind::TimedOut, "{what}, {args:?}");
        }
        assert_eq!((mount.stat("fsync_timeouts"), mount.stat("timeouts")), (2, 2));
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
