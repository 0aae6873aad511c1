//! Users and directories that share a mount do not reach each other's files, whatever comes and goes between them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;

use client::{Client, Watchdog, fill};
use common::Mount;

/// Where a node is kept: what is removed makes its place free for what comes next.
fn place(mount: &Mount, path: &str) -> u32 {
    fs::metadata(mount.at(path)).unwrap().ino() as u32
}

/// Makes a directory that is kept where `old`, which is gone, has been.
fn make_in_place_of(mount: &Mount, old: u32, name: &str) {
    mount.drain();
    fs::create_dir(mount.at(name)).unwrap();
    assert_eq!(place(mount, name), old, "the test needs the place of the removed directory");
}

#[test]
fn a_file_being_written_does_not_move_to_the_directory_that_takes_its_directorys_place() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
fd = os.open('old/x', os.O_CREAT | os.O_WRONLY | int(sys.argv[2]))
write_all(fd, fill(1, 300_000))
step('written')
write_all(fd, fill(2, 300_000))
if sys.argv[3] == 'fsync':
    # What was asked to be kept cannot be.
    assert errno_of(os.fsync, fd) == 'EIO'
os.close(fd)
step('closed')
";
    for (round, (flags, end, way)) in [
        (libc::O_EXCL, "close", "rmdir"),
        (libc::O_TRUNC, "close", "rmdir"),
        (libc::O_EXCL, "fsync", "rmdir"),
        (libc::O_EXCL, "kill", "rmdir"),
        (libc::O_TRUNC, "close", "rename"),
        (libc::O_EXCL, "fsync", "rename"),
    ]
    .into_iter()
    .enumerate()
    {
        if way == "rename" {
            fs::create_dir(mount.at("above")).unwrap();
        }
        fs::create_dir(mount.at("old")).unwrap();
        let old = place(&mount, "old");
        let discarded = mount.stat("discarded_files");
        let mut client = Client::with(&mount, script, &[&flags.to_string(), end]);
        client.at("written");
        if way == "rename" {
            fs::rename(mount.at("above"), mount.at("old")).unwrap();
        } else {
            fs::remove_dir(mount.at("old")).unwrap();
        }
        assert_eq!(mount.stat("private_files"), 0, "nobody waits for a file of a directory that is gone");
        make_in_place_of(&mount, old, "new");
        // Its names are free, and stay whose they are.
        let mut options = fs::File::options();
        drop(options.write(true).create_new(true).open(mount.at("new/x")).unwrap());
        fs::write(mount.at("new/x"), "mine").unwrap();
        if end == "kill" {
            client.kill();
        } else {
            client.go();
            client.at("closed");
            client.go();
            client.end();
        }
        assert_eq!(fs::read(mount.at("new/x")).unwrap(), b"mine", "round {round}");
        assert_eq!(mount.stat("discarded_files"), discarded + 1);
        assert_eq!(mount.events().matches("discarded old/x: its directory was removed").count(), round + 1);
        fs::remove_dir_all(mount.at("new")).unwrap();
        if way == "rename" {
            fs::remove_dir(mount.at("old")).unwrap();
        }
    }
    mount.check_quiet();
}
