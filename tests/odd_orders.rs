//! Orders of calls that nobody plans and busy nodes get: names that go, come and move while files under them are being
//! opened, written and closed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;

use client::{Client, Watchdog, fill};
use common::{Mount, memory_only};

/// The directory of a file that is being written is removed, or its name taken, before it is closed.
#[test]
fn closing_a_file_whose_place_is_gone_discards_it_and_nothing_else() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    // More often than there are threads that could end by it.
    for round in 0..4 {
        for (flag, order) in [("O_EXCL", "rmdir"), ("O_TRUNC", "rmdir"), ("O_TRUNC", "mkdir")] {
            let script = "
flag, order, d = getattr(os, sys.argv[2]), sys.argv[3], sys.argv[4]
os.mkdir(d)
fd = os.open(d + '/f', os.O_CREAT | flag | os.O_WRONLY)
write_all(fd, fill(1, 100_000))
step('open')
os.close(fd)
step('closed')
";
            let dir = format!("{flag}-{order}-{round}");
            let mut client = Client::with(&mount, script, &[flag, order, &dir]);
            client.at("open");
            if order == "rmdir" {
                fs::remove_dir(mount.at(&dir)).unwrap();
            } else {
                fs::create_dir(mount.at(&dir).join("f")).unwrap();
            }
            client.go();
            client.at("closed");
            mount.wait_for("private_files", |files| files == 0);
            assert_eq!(mount.at(&dir).exists(), order == "mkdir");
            assert!(!mount.at(&dir).join("f").is_file());
            client.go();
            client.end();
        }
    }
    assert_eq!(mount.stat("discarded_files"), 12);
    mount.check_quiet();
}

/// A version that somebody reads stays as it is, also when it has no name any more and is opened by its descriptor.
#[test]
fn a_sealed_file_without_a_name_is_neither_truncated_nor_written() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
size = int(sys.argv[2])
fd = os.open('f', os.O_RDONLY)
before = os.pread(fd, size, 0)
if sys.argv[3] == 'unlink':
    os.unlink('f')
else:
    with open('g', 'w') as other:
        other.write('other')
    os.rename('g', 'f')
again = '/proc/self/fd/%d' % fd
for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
    assert errno_of(os.open, again, flags) in ('ETXTBSY', 'ESTALE'), flags
assert os.pread(fd, size + 1, 0) == before and os.fstat(fd).st_size == size
other = os.open(again, os.O_RDONLY) if sys.argv[3] == 'unlink' else fd
assert os.pread(other, size + 1, 0) == before
say('same')
";
    for size in [5_000, 300_000, 3_000_000] {
        for order in ["unlink", "rename"] {
            fs::write(mount.at("f"), fill(1, size)).unwrap();
            let mut client = Client::with(&mount, script, &[&size.to_string(), order]);
            client.at("same");
            client.end();
        }
    }
    mount.check_quiet();
}

/// Writers, readers that hold what they opened, unlinks and renames on the same two names.
#[test]
fn what_is_held_open_never_changes_while_names_are_written_moved_and_removed() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let writer = "
import random
dice, size = random.Random(int(sys.argv[2])), int(sys.argv[3])
for round in range(400):
    name = 'n%d' % dice.randrange(2)
    try:
        fd = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.write(fd, bytes([dice.randrange(256)]) * size)
        os.close(fd)
        if dice.random() < .3:
            os.unlink(name)
        elif dice.random() < .3:
            os.rename(name, 'n%d' % dice.randrange(2))
    except OSError as error:
        assert error.errno == errno.ENOENT, error
say('done')
hear()
";
    let reader = "
import random
dice, size, held = random.Random(int(sys.argv[2])), int(sys.argv[3]), []
seen = 0
while seen < 3000:
    try:
        fd = os.open('n%d' % dice.randrange(2), os.O_RDONLY)
    except OSError as error:
        assert error.errno == errno.ENOENT, error
        seen += 1
        continue
    held.append((fd, os.pread(fd, size + 1, 0)))
    if len(held) > 6:
        fd, before = held.pop(0)
        assert len(before) == size and before == before[:1] * size, 'part of a file'
        assert os.pread(fd, size + 1, 0) == before, 'sealed bytes changed'
        os.close(fd)
        seen += 1
say('done')
hear()
";
    for size in ["5000", "500000"] {
        let mut clients: Vec<Client> = (1..=4)
            .map(|seed| {
                let script = if seed < 3 { writer } else { reader };
                Client::with(&mount, script, &[&seed.to_string(), size])
            })
            .collect();
        for client in &mut clients {
            client.at("done");
        }
        clients.iter_mut().for_each(Client::go);
        clients.into_iter().for_each(Client::end);
        for name in ["n0", "n1"] {
            let _ = fs::remove_file(mount.at(name));
        }
    }
    mount.check_quiet();
}

/// An open to write that writes nothing leaves the file to the version it came from, whatever it is called by then.
#[test]
fn a_file_that_was_opened_to_write_and_renamed_can_be_opened_again() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("a"), fill(1, 10_000)).unwrap();
    let script = "
for round in range(500):
    old, new = ('a', 'b') if round % 2 == 0 else ('b', 'a')
    os.close(os.open(old, os.O_RDWR))
    os.rename(old, new)
    os.close(os.open(new, os.O_RDWR))
say('done')
";
    let mut client = Client::new(&mount, script);
    client.at("done");
    client.end();
    assert!(fs::read(mount.at("a")).unwrap() == fill(1, 10_000));
    mount.check_quiet();
}

/// Two writers of a finished file: the later one to open works on what the earlier one has, or on a version of its own
/// that the earlier one then replaces; neither writes into nothing.
#[test]
fn two_writers_of_a_finished_file_both_write() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    for size in [4_096, 400_000] {
        fs::write(mount.at("f"), fill(1, size)).unwrap();
        let first = "
fd = os.open('f', os.O_RDWR)
step('open')
os.pwrite(fd, fill(3, 300_000), 0)
os.close(fd)
step('closed')
";
        let second = "
fd = os.open('f', os.O_RDWR | os.O_APPEND)
os.write(fd, b'appended')
os.close(fd)
step('closed')
";
        let mut a = Client::new(&mount, first);
        a.at("open");
        let mut b = Client::new(&mount, second);
        b.at("closed");
        a.go();
        a.at("closed");
        let found = fs::read(mount.at("f")).unwrap();
        assert!(found.starts_with(&fill(3, 300_000)), "{} bytes without what was written last", found.len());
        for client in [&mut a, &mut b] {
            client.go();
        }
        a.end();
        b.end();
    }
    mount.check_quiet();
    if memory_only() {
        assert_eq!(mount.stat("store_failures"), 0);
    }
}

/// A file in shared use that is cut short while it is being stored is neither lost nor torn.
#[test]
fn files_cut_while_they_are_stored_stay_whole() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
os.mkdir('d')
os.setxattr('d', 'user.kv.publish', b'posix')
data = fill(1, 2 << 20)
for round in range(60):
    name = 'd/f%d' % (round % 4)
    fd = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    write_all(fd, data)
    os.close(fd)
    os.truncate(name, 90_112)
    with open(name, 'rb') as file:
        assert file.read() == data[:90_112], round
fd = os.open('d', os.O_RDONLY)
os.fsync(fd)
say('done')
";
    let mut client = Client::new(&mount, script);
    client.at("done");
    client.end();
    for at in 0..4 {
        assert!(fs::read(mount.at(&format!("d/f{at}"))).unwrap() == fill(1, 2 << 20)[..90_112]);
    }
    mount.check_quiet();
}
