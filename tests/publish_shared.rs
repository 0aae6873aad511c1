//! What several processes share is seen at once, and a name belongs to one of them at a time (rule R1).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use client::{Client, Watchdog, fill};
use common::{Mount, memory_only};
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

fn missing(mount: &Mount, name: &str) -> bool {
    fs::metadata(mount.at(name)).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

fn create_new(mount: &Mount, name: &str) -> std::io::Result<fs::File> {
    fs::File::options().write(true).create_new(true).open(mount.at(name))
}

#[track_caller]
fn assert_reserved(mount: &Mount, name: &str) {
    let error = create_new(mount, name).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

#[test]
fn an_exclusive_create_reserves_the_name_for_everybody() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
fd = os.open('f', PRIVATE)
assert errno_of(os.open, 'f', PRIVATE) == 'EEXIST'
threading.Thread(target=lambda: say(errno_of(os.open, 'f', PRIVATE))).start()
hear()
child = os.fork()
if child == 0:
    step(errno_of(os.open, 'f', PRIVATE))
    os._exit(0)
os.waitpid(child, 0)
step('open')
if sys.argv[2] == 'unlink':
    os.unlink('f')
    step('unlinked')
os.write(fd, b'mine')
os.close(fd)
assert sys.argv[2] == 'unlink' or errno_of(os.open, 'f', PRIVATE) == 'EEXIST'
step('closed')
";
    for end in ["close", "unlink", "kill"] {
        let mut client = Client::with(&mount, script, &[end]);
        for _ in 0..2 {
            client.at("EEXIST");
            client.go();
        }
        client.at("open");
        assert_reserved(&mount, "f");
        assert!(missing(&mount, "f"), "reserved is not visible");
        if end == "kill" {
            client.kill();
            mount.wait_for("private_files", |files| files == 0);
            drop(create_new(&mount, "f").unwrap());
            fs::remove_file(mount.at("f")).unwrap();
            continue;
        }
        client.go();
        if end == "unlink" {
            client.at("unlinked");
            drop(create_new(&mount, "f").unwrap());
            fs::write(mount.at("f"), "other").unwrap();
            client.go();
            client.at("closed");
            assert_eq!(fs::read(mount.at("f")).unwrap(), b"other");
        } else {
            client.at("closed");
            assert_reserved(&mount, "f");
            assert_eq!(fs::read(mount.at("f")).unwrap(), b"mine");
        }
        client.go();
        client.end();
        fs::remove_file(mount.at("f")).unwrap();
    }
    mount.check_quiet();
}

/// Several processes count in a file outside the mount, each time under a lock that `lock` takes and `unlock` gives.
fn count_under(mount: &Mount, lock: &str, unlock: &str) {
    const PROCESSES: u32 = 4;
    const ROUNDS: u32 = 100;
    let counter = mount.scratch.path().join("counter");
    fs::write(&counter, "0").unwrap();
    let script = format!(
        "
import time
def once():
{lock}
    count = int(open(sys.argv[2]).read())
    time.sleep(0)
    with open(sys.argv[2], 'w') as out:
        out.write(str(count + 1))
{unlock}
step('ready')
for round in range({ROUNDS}):
    once()
"
    );
    let counter_arg = counter.to_str().unwrap().to_owned();
    let mut clients: Vec<Client> =
        (0..PROCESSES).map(|_| Client::with(mount, &script, &[&counter_arg])).collect();
    clients.iter_mut().for_each(|client| client.at("ready"));
    clients.iter_mut().for_each(Client::go);
    clients.into_iter().for_each(Client::end);
    assert_eq!(fs::read_to_string(&counter).unwrap(), (PROCESSES * ROUNDS).to_string());
}

#[test]
fn locks_by_exclusive_create_exclude() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let lock = "
    while True:
        try:
            fd = os.open('lock', os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            time.sleep(0.0002)
";
    // Held open meanwhile, closed before and after the name goes; or closed at once, with the owner's number inside.
    count_under(&mount, lock, "    os.unlink('lock'); os.close(fd)");
    count_under(&mount, lock, "    os.close(fd); os.unlink('lock')");
    let lock = format!("{lock}    os.write(fd, b'%d' % os.getpid()); os.close(fd)\n");
    count_under(
        &mount,
        &lock,
        "    assert open('lock').read() == str(os.getpid()), 'somebody else holds it'; os.unlink('lock')",
    );
    assert!(missing(&mount, "lock"));
    mount.wait_for("private_files", |files| files == 0);
    mount.check_quiet();
}

#[test]
fn locks_by_flock_and_fcntl_exclude() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    for call in ["flock", "lockf"] {
        let lock = format!(
            "    fd = os.open('{call}', os.O_CREAT | os.O_RDWR, 0o666)\n    fcntl.{call}(fd, fcntl.LOCK_EX)"
        );
        count_under(&mount, &lock, &format!("    fcntl.{call}(fd, fcntl.LOCK_UN); os.close(fd)"));
        // Closing gives the lock back, too.
        count_under(&mount, &lock, "    os.close(fd)");
        assert_eq!(fs::metadata(mount.at(call)).unwrap().len(), 0);
    }
    mount.check_quiet();
}

/// Whether an exclusive lock can be had, by a descriptor opened with `flags`.
fn may_lock(path: &Path, flags: i32) -> bool {
    let flags = OFlag::from_bits_truncate(flags);
    let file = nix::fcntl::open(path, flags, Mode::from_bits_truncate(0o666)).unwrap();
    match fs::File::from(file).try_lock() {
        Ok(()) => true,
        Err(fs::TryLockError::WouldBlock) => false,
        Err(fs::TryLockError::Error(error)) => panic!("{}: {error}", path.display()),
    }
}

/// A lock file often holds its owner's number. Who opens it to read and who opens it to write lock the same inode.
#[test]
fn locks_by_flock_exclude_on_files_that_hold_something() {
    let mut mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let made = [("small", 6), ("large", 2 << 20)];
    for (name, size) in made {
        let mut file =
            fs::File::options().write(true).create(true).truncate(false).open(mount.at(name)).unwrap();
        file.write_all(&fill(1, size)).unwrap();
    }
    let script = "
size = int(sys.argv[3])
fd = os.open(sys.argv[2], int(sys.argv[4]))
if os.O_ACCMODE & int(sys.argv[4]) != os.O_WRONLY:
    # So that it is in L1 when the others open it.
    assert os.pread(fd, size, 0) == fill(1, size)
fcntl.flock(fd, fcntl.LOCK_EX)
step('locked')
fcntl.flock(fd, fcntl.LOCK_UN)
step('unlocked')
";
    let ways = [libc::O_RDONLY, libc::O_RDWR, libc::O_WRONLY | libc::O_APPEND, libc::O_RDWR | libc::O_CREAT];
    for restarted in [false, true] {
        if restarted {
            if memory_only() {
                break;
            }
            mount.drain();
            mount.restart();
        }
        for (name, size) in made {
            for way in ways {
                let mut holder = Client::with(&mount, script, &[name, &size.to_string(), &way.to_string()]);
                holder.at("locked");
                for other in ways {
                    assert!(!may_lock(&mount.at(name), other), "{name} {way:o} {other:o}, {restarted}");
                }
                holder.go();
                holder.at("unlocked");
                for other in ways {
                    assert!(may_lock(&mount.at(name), other), "{name} {way:o} {other:o}, {restarted}");
                }
                holder.go();
                holder.end();
            }
        }
    }
    mount.check_quiet();
}

#[test]
fn what_is_created_for_sharing_is_seen_at_once() {
    const SLOT: usize = 64 << 10;
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
fd = os.open('slots', os.O_CREAT | os.O_RDWR)
step('open')
mine = int(sys.argv[2])
for round in range(20):
    os.pwrite(fd, fill(mine * 1000 + round, 64 << 10), mine * (64 << 10))
    step('wrote')
os.close(fd)
";
    let mut clients: Vec<Client> =
        (0..3).map(|at| Client::with(&mount, script, &[&at.to_string()])).collect();
    for client in &mut clients {
        client.at("open");
        assert!(fs::metadata(mount.at("slots")).unwrap().is_file());
    }
    let reader = fs::File::open(mount.at("slots")).unwrap();
    for round in 0..20 {
        for (at, client) in clients.iter_mut().enumerate() {
            client.go();
            client.at("wrote");
            let mut found = vec![0; SLOT];
            reader.read_exact_at(&mut found, (at * SLOT) as u64).unwrap();
            assert!(found == fill(at as u64 * 1000 + round, SLOT), "slot {at} in round {round}");
        }
        let all = fs::read(mount.at("slots")).unwrap();
        assert_eq!(all.len(), 3 * SLOT);
        for (at, found) in all.chunks(SLOT).enumerate() {
            assert!(found == fill(at as u64 * 1000 + round, SLOT), "slot {at} by a new open");
        }
    }
    // What a shared writer leaves when it is killed is there: it was visible all the time.
    clients.pop().unwrap().kill();
    for mut client in clients {
        client.go();
        client.end();
    }
    let wanted: Vec<u8> = (0..3).flat_map(|at| fill(at * 1000 + 19, SLOT)).collect();
    assert!(fs::read(mount.at("slots")).unwrap() == wanted);
    mount.check_quiet();
}

#[test]
fn a_directory_can_ask_for_plain_visibility() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let mut client = Client::new(
        &mount,
        "
os.mkdir('plain')
os.setxattr('plain', 'user.kv.publish', b'posix')
os.mkdir('plain/below')
for flags in [os.O_EXCL, os.O_TRUNC]:
    for name in ['plain/f', 'plain/below/f']:
        fd = os.open(name, os.O_CREAT | os.O_WRONLY | flags)
        step(name)
        for part in range(2):
            write_all(fd, fill(part, 300_000))
            step(name)
        os.close(fd)
        os.unlink(name)
os.setxattr('plain', 'user.kv.publish', b'close')
fd = os.open('plain/f', PRIVATE)
step('private again')
os.close(fd)
",
    );
    for _ in 0..2 {
        for name in ["plain/f", "plain/below/f"] {
            for parts in 0..3 {
                client.at(name);
                let wanted: Vec<u8> = (0..parts).flat_map(|part| fill(part, 300_000)).collect();
                assert!(fs::read(mount.at(name)).unwrap() == wanted, "{name} with {parts} parts");
                assert_eq!(fs::metadata(mount.at(name)).unwrap().len(), parts * 300_000);
                client.go();
            }
        }
    }
    client.at("private again");
    assert!(missing(&mount, "plain/f"));
    client.go();
    client.end();
    mount.check_quiet();
}

#[test]
fn a_private_file_is_found_by_its_own_process_alone() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let mut client = Client::new(
        &mount,
        "
fd = os.open('f', PRIVATE)
write_all(fd, fill(1, 500_000))
def look():
    assert os.stat('f').st_size == 500_000
    with open('f', 'rb') as again:
        assert again.read() == fill(1, 500_000)
    assert os.path.samestat(os.stat('f'), os.fstat(fd))
    os.chmod('f', 0o640)
def run(call):
    failed = []
    def guarded():
        try:
            call()
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    assert not failed, failed
look()
run(look)
# By a thread that is gone when the others look.
kept = []
run(lambda: kept.append(os.open('by-thread', PRIVATE)))
os.stat('by-thread')
run(lambda: os.stat('by-thread'))
os.close(kept[0])

child = os.fork()
if child == 0:
    # Another process: the name is not its, the descriptor is.
    for call in [os.stat, lambda name: os.open(name, os.O_RDONLY), os.unlink, lambda name: os.rename(name, 'g')]:
        assert errno_of(call, 'f') == 'ENOENT'
    assert os.fstat(fd).st_size == 500_000
    assert os.pread(fd, 16, 16) == fill(1, 16)
    write_all(fd, fill(2, 100_000))
    step('child')
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.stat('f').st_size == 600_000
# A second writer of the same process, through the name.
with open('f', 'r+b') as again:
    again.seek(600_000)
    again.write(fill(3, 100_000))
step('second writer closed')
os.close(fd)
step('closed')
",
    );
    for step in ["child", "second writer closed"] {
        client.at(step);
        assert!(missing(&mount, "f"), "at {step}");
        client.go();
    }
    client.at("closed");
    let wanted = [fill(1, 500_000), fill(2, 100_000), fill(3, 100_000)].concat();
    assert!(fs::read(mount.at("f")).unwrap() == wanted);
    client.go();
    client.end();
    mount.check_quiet();
}
