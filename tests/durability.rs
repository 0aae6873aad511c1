//! What fsync and a drain have promised is there after the daemon was killed, and what was removed is not.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use client::{Client, Watchdog, fill};
use common::{Mount, memory_only};

/// There is nothing to wait for, and programs that fsync what they write work all the same.
#[test]
fn without_l2_an_fsync_returns_and_vouches_for_nothing() {
    if !memory_only() {
        return;
    }
    let mount = Mount::new();
    let path = mount.at("f");
    let mut file = fs::File::create_new(&path).unwrap();
    std::io::Write::write_all(&mut file, &fill(1, 300_000)).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mount.drain();
    let mut durable = [0; 8];
    let len = rustix::fs::getxattr(&path, "user.kv.durable", &mut durable[..]).unwrap();
    assert_eq!(&durable[..len], b"0");
    assert!(mount.status().contains("nothing is durable"), "{}", mount.status());
    assert!(fs::read(&path).unwrap() == fill(1, 300_000));
}

/// Opened to write and not written to: a copy-on-write version without bytes of its own. Its fsync must not
/// record it as a file of zeros, in place of the one it shows.
#[test]
fn fsync_of_a_file_that_was_opened_and_not_written_keeps_it() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let sizes = [70_000, 300_000, 3_000_000];
    for (at, size) in sizes.into_iter().enumerate() {
        for name in ["kept", "moved", "changed", "written", "fresh"] {
            fs::write(mount.at(&format!("{name}.{at}")), fill(at as u64, size)).unwrap();
        }
        if at == 0 {
            mount.drain();
        }
    }
    let script = "
held = []
def look(name):
    fd = os.open(name, os.O_RDWR)
    held.append(fd)
    return fd
for at in range(3):
    os.fsync(look('kept.%d' % at))
    fd = look('moved.%d' % at)
    os.rename('moved.%d' % at, 'here.%d' % at)
    if at % 2 == 0:
        os.fsync(fd)
    fd = look('changed.%d' % at)
    os.fchmod(fd, 0o600)
    os.fsync(fd)
    fd = look('written.%d' % at)
    os.fsync(fd)
    os.pwrite(fd, b'new', 10)
    os.fsync(fd)
    fd = look('fresh.%d' % at)
    os.pwrite(fd, b'new', 10)
    os.fsync(fd)
os.fsync(os.open('.', os.O_RDONLY))
step('synced')
";
    let mut client = Client::new(&mount, script);
    client.at("synced");
    mount.kill();
    client.kill();
    mount.start();
    for (at, size) in sizes.into_iter().enumerate() {
        let old = fill(at as u64, size);
        let mut new = old.clone();
        new[10..13].copy_from_slice(b"new");
        for (name, wanted) in
            [("kept", &old), ("here", &old), ("changed", &old), ("written", &new), ("fresh", &new)]
        {
            let path = mount.at(&format!("{name}.{at}"));
            assert!(fs::read(&path).unwrap() == *wanted, "{name}.{at}");
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode == 0o600, name == "changed", "{name}.{at} has mode {mode:o}");
        }
        assert!(!mount.at(&format!("moved.{at}")).exists());
    }
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 15);
    mount.check_quiet();
}

/// A version that was to take the place of a durable file and never did: the file it has replaced stays away.
#[test]
fn what_was_removed_together_with_its_successor_does_not_come_back() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    for name in ["unlinked", "killed"] {
        fs::write(mount.at(name), fill(1, 300_000)).unwrap();
    }
    mount.drain();
    let script = "
name = sys.argv[2]
fd = os.open(name, os.O_WRONLY | os.O_TRUNC)
write_all(fd, fill(2, 100_000))
os.close(os.dup(fd))
if name == 'unlinked':
    os.rename(name, name + '.new')
    # What a rewrite that is open would replace keeps its name.
    say(os.stat(name).st_size)
    os.unlink(name + '.new')
    os.unlink(name)
    os.close(fd)
else:
    os.unlink(name)
step('done')
";
    let mut unlinked = Client::with(&mount, script, &["unlinked"]);
    assert_eq!(unlinked.hear(), "300000");
    unlinked.at("done");
    unlinked.go();
    unlinked.end();
    let mut killed = Client::with(&mount, script, &["killed"]);
    killed.at("done");
    killed.kill();
    mount.wait_for("private_files", |files| files == 0);
    mount.drain();
    assert_eq!(mount.stat("l2_used_bytes"), 0, "room of what is gone");
    let gone = |mount: &Mount| {
        let left: Vec<_> =
            fs::read_dir(mount.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "{left:?}");
    };
    gone(&mount);
    mount.kill();
    mount.start();
    gone(&mount);
}
