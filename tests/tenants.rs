//! Users and directories that share a mount do not reach each other's files, whatever comes and goes between them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use client::{Client, Watchdog, fill};
use common::{Mount, Options};

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

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

fn shared_mount() -> Mount {
    let mount = Mount::with(Options::default().arg("--allow-other"));
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o777)).unwrap();
    mount
}

#[test]
fn who_keeps_the_inode_of_a_file_that_is_gone_cannot_reach_the_next_one_of_its_name() {
    let mount = shared_mount();
    let _watchdog = Watchdog::new(&mount);
    let script = "
alice, bob = int(sys.argv[2]), int(sys.argv[3])
def be(user):
    os.seteuid(0)
    os.seteuid(user)
def make(name, data, mode):
    fd = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, mode)
    os.write(fd, data)
    os.fchmod(fd, mode)
    os.close(fd)
import time
for owner in [alice, bob]:
    be(alice)
    make('f', b'alice', 0o600)
    kept = os.open('f', os.O_PATH)
    path = f'/proc/self/fd/{kept}'
    os.chmod(path, 0o640)
    be(0)
    os.unlink('f')
    be(owner)
    make('f', b'the next one', 0o600)
    os.setxattr('f', 'user.secret', b'42')
    before = os.stat('f')
    be(alice)
    # The inode lives until the record of its removal is stored.
    while errno_of(os.chmod, path, 0o660) == 'ok':
        time.sleep(0.01)
    for at, call in enumerate([
        lambda: os.chmod(path, 0o666),
        lambda: os.utime(path, (1, 1)),
        lambda: os.setxattr(path, 'user.mine', b'1'),
        lambda: os.removexattr(path, 'user.secret'),
        lambda: os.getxattr(path, 'user.secret'),
        lambda: os.listxattr(path),
    ]):
        found = errno_of(call)
        assert found == 'ESTALE', (at, found)
    if owner == bob:
        assert errno_of(os.truncate, path, 0) == 'ESTALE'
        assert errno_of(os.open, path, os.O_RDONLY) == 'ESTALE'
        # Not even how large it is.
        assert errno_of(os.stat, path) == 'ESTALE' or os.stat(path).st_size != before.st_size
    be(owner)
    after = os.stat('f')
    assert (after.st_mode, after.st_mtime_ns, after.st_ctime_ns, after.st_uid) == (
        before.st_mode, before.st_mtime_ns, before.st_ctime_ns, owner)
    assert os.listxattr('f').count('user.mine') == 0 and os.getxattr('f', 'user.secret') == b'42'
    # By its name everything goes on.
    os.chmod('f', 0o644)
    be(0)
    os.close(kept)
    os.unlink('f')
say('done')
";
    let mut client = Client::with(&mount, script, &[&ALICE.to_string(), &BOB.to_string()]);
    client.at("done");
    client.end();
    mount.check_quiet();
}

/// Writes privately in `t` as the user of the first argument, and does what the second says while others do theirs.
const STICKY: &str = "
os.umask(0)
os.seteuid(int(sys.argv[2]))
fd = os.open('t/x', os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
write_all(fd, fill(1, 300_000))
if sys.argv[3] == 'rename':
    os.close(os.dup(fd))
step('written')
if sys.argv[3] == 'rename':
    os.rename('t/x', 't/y')
elif sys.argv[3] == 'unlink':
    os.unlink('t/x')
elif sys.argv[3] == 'fsync':
    say(errno_of(os.fsync, fd))
os.close(fd)
step('closed')
";

fn sticky(mount: &Mount) {
    fs::create_dir(mount.at("t")).unwrap();
    fs::set_permissions(mount.at("t"), fs::Permissions::from_mode(0o1777)).unwrap();
    std::os::unix::fs::chown(mount.at("t"), Some(7), Some(7)).unwrap();
}

fn publish_as(mount: &Mount, user: u32) {
    let script = "
os.seteuid(int(sys.argv[2]))
fd = os.open('t/x', PRIVATE, 0o644)
os.write(fd, b'the first')
os.close(fd)
say('published')
";
    let mut client = Client::with(mount, script, &[&user.to_string()]);
    client.at("published");
    client.end();
}

#[test]
fn publishing_replaces_only_what_its_writer_might_remove() {
    let mount = shared_mount();
    let _watchdog = Watchdog::new(&mount);
    sticky(&mount);
    let whole = fill(1, 300_000);
    for (user, does, wins) in [
        (BOB, "close", false),
        (BOB, "fsync", false),
        (BOB, "rename", false),
        (BOB, "unlink", false),
        // The same user, the directory's, and root.
        (ALICE, "close", true),
        (7, "close", true),
        (0, "close", true),
        (0, "fsync", true),
    ] {
        let discarded = mount.stat("discarded_files");
        let mut client = Client::with(&mount, STICKY, &[&user.to_string(), does]);
        client.at("written");
        publish_as(&mount, ALICE);
        client.go();
        if does == "fsync" {
            client.at(if wins { "ok" } else { "EIO" });
        }
        client.at("closed");
        client.go();
        client.end();
        let case = format!("{does} by {user}");
        let refused = !wins && matches!(does, "close" | "fsync");
        assert_eq!(mount.stat("discarded_files"), discarded + u64::from(refused), "{case}");
        let (found, owner) =
            (fs::read(mount.at("t/x")).unwrap(), fs::metadata(mount.at("t/x")).unwrap().uid());
        if wins {
            assert!(found == whole && owner == user, "{case}");
        } else {
            assert!(found == b"the first" && owner == ALICE, "{case}: {} bytes of {owner}", found.len());
        }
        if does == "rename" {
            assert!(fs::read(mount.at("t/y")).unwrap() == whole, "what it wrote has its new name");
            fs::remove_file(mount.at("t/y")).unwrap();
        }
        fs::remove_file(mount.at("t/x")).unwrap();
    }
    let refusals = mount.events().matches("discarded t/x: a file of another user has that name").count();
    assert_eq!(refusals, 2, "{}", mount.events());
    mount.check_quiet();
}

#[test]
fn whoever_may_write_a_file_may_truncate_it_in_a_sticky_directory() {
    let mount = shared_mount();
    let _watchdog = Watchdog::new(&mount);
    sticky(&mount);
    publish_as(&mount, ALICE);
    fs::set_permissions(mount.at("t/x"), fs::Permissions::from_mode(0o666)).unwrap();
    let script = "
os.seteuid(int(sys.argv[2]))
fd = os.open('t/x', os.O_TRUNC | os.O_WRONLY)
write_all(fd, fill(1, 300_000))
os.close(fd)
say('closed')
";
    let mut client = Client::with(&mount, script, &[&BOB.to_string()]);
    client.at("closed");
    client.end();
    assert!(fs::read(mount.at("t/x")).unwrap() == fill(1, 300_000));
    assert_eq!(fs::metadata(mount.at("t/x")).unwrap().uid(), ALICE);
    mount.check_quiet();
}

#[test]
fn without_the_kernels_permission_checks_publishing_has_none() {
    let mount = Mount::with(Options::default().arg("--allow-other").arg("--default-permissions=false"));
    let _watchdog = Watchdog::new(&mount);
    sticky(&mount);
    let mut client = Client::with(&mount, STICKY, &[&BOB.to_string(), "close"]);
    client.at("written");
    publish_as(&mount, ALICE);
    client.go();
    client.at("closed");
    client.go();
    client.end();
    assert!(fs::read(mount.at("t/x")).unwrap() == fill(1, 300_000));
    mount.check_quiet();
}
