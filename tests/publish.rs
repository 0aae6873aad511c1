//! A new version of a file appears whole or not at all (rule R1): whoever writes it, closes it, dies or executes something.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;
use std::io::ErrorKind;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use client::{Client, Watchdog, fill};
use common::run::wait_until;
use common::{Mount, memory_only};

/// Neither the name nor the listing shows the file.
#[track_caller]
fn assert_hidden(mount: &Mount, name: &str) {
    let found = fs::metadata(mount.at(name)).map(|found| found.len());
    assert!(
        found.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound),
        "{name} shows, or fails otherwise: {found:?}"
    );
    let opened = fs::File::open(mount.at(name)).map(|_| ()).unwrap_err();
    assert_eq!(opened.kind(), ErrorKind::NotFound);
    let listed: Vec<_> =
        fs::read_dir(mount.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!listed.iter().any(|listed| listed == name), "{name} is listed");
}

#[track_caller]
fn assert_holds(mount: &Mount, name: &str, wanted: &[u8]) {
    let found = fs::read(mount.at(name)).unwrap();
    assert_eq!(found.len(), wanted.len(), "size of {name}");
    assert!(found == wanted, "bytes of {name}");
    assert_eq!(fs::metadata(mount.at(name)).unwrap().len(), wanted.len() as u64);
}

/// What a file under construction takes.
fn space(mount: &Mount) -> [(&'static str, u64); 5] {
    ["private_files", "l1_slab_bytes", "l1_chunk_bytes", "l2_used_bytes", "dirty_bytes"]
        .map(|key| (key, mount.stat(key)))
}

#[test]
fn a_killed_writer_leaves_neither_name_nor_bytes() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("old"), fill(1, 300_000)).unwrap();
    mount.drain();
    mount.check_quiet();
    let before = space(&mount);
    let discarded = mount.stat("discarded_files");
    let write = "
name, flags, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
fd = os.open(name, flags | os.O_WRONLY | os.O_CREAT)
write_all(fd, fill(7, size))
";
    let deaths = [
        "step('written')",
        // With a duplicate, and one that was closed.
        "os.close(os.dup(fd)); spare = os.dup(fd); step('written')",
        // In the middle of a write, with several threads.
        "
def more(part):
    while True:
        os.pwrite(fd, fill(part, 50_000), part * 50_000)
for part in range(3):
    threading.Thread(target=more, args=(part,), daemon=True).start()
step('written')",
        // After its name was moved.
        "os.rename(name, 'moved'); os.rename('moved', name); step('written')",
    ];
    let mut killed = 0;
    for death in deaths {
        for (name, flag) in [("new", libc::O_EXCL), ("new", libc::O_TRUNC), ("old", libc::O_TRUNC)] {
            for size in [10_000, 3_000_000, 24_000_000] {
                let script = format!("{write}\n{death}");
                let args = [name, &flag.to_string(), &size.to_string()];
                let mut client = Client::with(&mount, &script, &args);
                client.at("written");
                assert_eq!(mount.stat("private_files"), 1);
                if name == "new" {
                    assert_hidden(&mount, "new");
                }
                client.kill();
                killed += 1;
                for (key, value) in before {
                    mount.wait_for(key, |now| now == value);
                }
                assert_hidden(&mount, "new");
                assert_hidden(&mount, "moved");
                assert_holds(&mount, "old", &fill(1, 300_000));
            }
        }
    }
    assert_eq!(mount.stat("discarded_files") - discarded, killed);
    mount.check_quiet();
}

#[test]
fn death_by_any_signal_discards_and_exit_publishes() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let ends = [
        ("os.abort()", false),
        ("os.kill(os.getpid(), signal.SIGTERM)", false),
        ("os.kill(os.getpid(), signal.SIGSEGV)", false),
        ("os._exit(0)", true),
        ("os._exit(3)", true),
        ("sys.exit(1)", true),
        ("raise ValueError('a writer that fails, on purpose')", true),
        // The thread that ends the process is not the one that wrote.
        ("thread = threading.Thread(target=lambda: os._exit(0)); thread.start(); signal.pause()", true),
        ("thread = threading.Thread(target=os.abort); thread.start(); signal.pause()", false),
    ];
    for (at, (end, publishes)) in ends.into_iter().enumerate() {
        let name = format!("f{at}");
        let script = format!(
            "
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.stderr.close()
fd = os.open(sys.argv[2], PRIVATE)
write_all(fd, fill(2, 1_500_000))
step('written')
{end}"
        );
        let mut client = Client::with(&mount, &script, &[&name]);
        client.at("written");
        assert_hidden(&mount, &name);
        client.go();
        client.wait();
        mount.wait_for("private_files", |files| files == 0);
        if publishes {
            assert_holds(&mount, &name, &fill(2, 1_500_000));
        } else {
            assert_hidden(&mount, &name);
        }
    }
    mount.check_quiet();
}

#[test]
fn shell_redirections_publish() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    for (script, wanted) in [
        ("echo hello > f", "hello\n".to_owned()),
        ("(echo a; cat /dev/null; sh -c 'echo b'; echo c) > f", "a\nb\nc\n".to_owned()),
        ("set -C; echo only-new > fresh; cat fresh > f", "hello\n".to_owned()),
        ("echo more >> f; cat f", "a\nb\nc\nmore\n".to_owned()),
        ("yes | head -c 1000000 > f", "y\n".repeat(500_000)),
        ("yes | dd of=f bs=4096 count=300 iflag=fullblock status=none", "y\n".repeat(2048 * 300)),
    ] {
        let status = Command::new("sh").args(["-c", script]).current_dir(mount.path()).status().unwrap();
        if script.starts_with("set -C") {
            assert!(!status.success(), "noclobber must not write an existing file");
            fs::write(mount.at("f"), "a\nb\nc\n").unwrap();
            continue;
        }
        assert!(status.success(), "{script}: {status}");
        assert_holds(&mount, "f", wanted.as_bytes());
    }
    assert_holds(&mount, "fresh", b"only-new\n");
    mount.check_quiet();
}

#[test]
fn closing_duplicates_does_not_publish() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let published = mount.stat("published_files");
    let mut client = Client::new(
        &mount,
        "
fd = os.open('f', PRIVATE)
write_all(fd, fill(0, 1_000_000))
os.close(os.dup(fd))
step('dup')

# What numpy.ndarray.tofile does: flush, duplicate, write through a stdio stream of its own, close that, seek.
file = os.fdopen(fd, 'r+b')
for part in range(1, 4):
    file.flush()
    copy = os.fdopen(os.dup(file.fileno()), 'wb')
    copy.seek(part * 1_000_000)
    copy.write(fill(part, 1_000_000))
    copy.close()
    file.seek((part + 1) * 1_000_000)
    step('stream')

child = os.fork()
if child == 0:
    os.close(fd)
    os._exit(0)
os.waitpid(child, 0)
step('child closed')

child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
step('child ended')

child = os.fork()
if child == 0:
    write_all(fd, fill(4, 1_000_000))
    os.close(fd)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
step('child wrote and was killed')

child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
step('child was killed while it held the file')

file.close()
step('closed')
",
    );
    for step in [
        "dup",
        "stream",
        "stream",
        "stream",
        "child closed",
        "child ended",
        "child wrote and was killed",
        "child was killed while it held the file",
    ] {
        client.at(step);
        assert_hidden(&mount, "f");
        client.go();
    }
    client.at("closed");
    let wanted: Vec<u8> = (0..5).flat_map(|part| fill(part, 1_000_000)).collect();
    assert_holds(&mount, "f", &wanted);
    assert_eq!(mount.stat("published_files") - published, 1);
    client.go();
    client.end();
    mount.check_quiet();
}

#[test]
fn the_last_close_publishes_whoever_closes_last() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let mut client = Client::new(
        &mount,
        "
fd = os.open('f', PRIVATE)
write_all(fd, fill(0, 700_000))
child = os.fork()
if child == 0:
    step('child')
    write_all(fd, fill(1, 700_000))
    os.close(fd)
    step('child closed')
    os._exit(0)
os.close(fd)
os.waitpid(child, 0)
",
    );
    client.at("child");
    assert_hidden(&mount, "f");
    assert_hidden(&mount, "f");
    client.go();
    client.at("child closed");
    assert_holds(&mount, "f", &[fill(0, 700_000), fill(1, 700_000)].concat());
    client.go();
    client.end();
}

#[test]
fn programs_executed_meanwhile_publish_nothing_half() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    // Children that execute, with the descriptor closed on the way or handed down.
    let mut client = Client::new(
        &mount,
        "
fd = os.open('f', PRIVATE)
write_all(fd, fill(0, 600_000))
for inherited in [False, True]:
    os.set_inheritable(fd, inherited)
    for round in range(20):
        child = os.fork()
        if child == 0:
            os.execvp('true', ['true'])
        os.waitpid(child, 0)
    step('executed')
write_all(fd, fill(1, 600_000))
os.close(fd)
step('closed')
",
    );
    for _ in 0..2 {
        client.at("executed");
        assert_hidden(&mount, "f");
        client.go();
    }
    client.at("closed");
    assert_holds(&mount, "f", &[fill(0, 600_000), fill(1, 600_000)].concat());
    client.go();
    client.end();

    // The maker itself executes another program. A descriptor that closes on the way is closed, and so published.
    let execute = "os.execvp('sh', ['sh', '-c', 'echo executed; read line; true'])";
    let from_thread =
        &format!("thread = threading.Thread(target=lambda: {execute}); thread.start(); signal.pause()");
    for (at, execute) in [execute, from_thread].into_iter().enumerate() {
        for (inherited, end) in [("False", "exit"), ("True", "exit"), ("True", "kill")] {
            let name = format!("{inherited}-{end}-{at}");
            let script = format!(
                "
fd = os.open(sys.argv[2], PRIVATE)
os.set_inheritable(fd, {inherited})
write_all(fd, fill(3, 1_100_000))
{execute}"
            );
            let mut client = Client::with(&mount, &script, &[&name]);
            client.at("executed");
            if inherited == "False" {
                assert_holds(&mount, &name, &fill(3, 1_100_000));
            } else {
                assert_hidden(&mount, &name);
            }
            if end == "kill" {
                client.kill();
            } else {
                client.go();
                client.end();
            }
            mount.wait_for("private_files", |files| files == 0);
            if end == "kill" {
                assert_hidden(&mount, &name);
            } else {
                assert_holds(&mount, &name, &fill(3, 1_100_000));
            }
        }
    }
    mount.check_quiet();
}

#[test]
fn a_rename_by_the_open_writer_moves_the_private_name() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
fd = os.open('part', PRIVATE)
write_all(fd, fill(5, 900_000))
os.rename('part', 'f')
step('renamed')
write_all(fd, fill(6, 900_000))
step('written')
os.close(fd)
step('closed')
";
    let whole = [fill(5, 900_000), fill(6, 900_000)].concat();
    for older in [None, Some(fill(1, 500_000))] {
        match &older {
            Some(older) => fs::write(mount.at("f"), older).unwrap(),
            None => assert_hidden(&mount, "f"),
        }
        let mut client = Client::new(&mount, script);
        for step in ["renamed", "written"] {
            client.at(step);
            assert_hidden(&mount, "part");
            match &older {
                Some(older) => assert_holds(&mount, "f", older),
                None => assert_hidden(&mount, "f"),
            }
            client.go();
        }
        client.at("closed");
        assert_holds(&mount, "f", &whole);
        assert_hidden(&mount, "part");
        client.go();
        client.end();
    }
    // Killed after the rename: what was there stays.
    let mut client = Client::new(&mount, script);
    client.at("renamed");
    client.kill();
    mount.wait_for("private_files", |files| files == 0);
    assert_holds(&mount, "f", &whole);
    // Closed first, as most writers do it.
    Client::new(&mount, "open('part', 'wb').write(fill(9, 800_000)); os.replace('part', 'f')").end();
    assert_holds(&mount, "f", &fill(9, 800_000));
    assert_hidden(&mount, "part");
    mount.check_quiet();
}

#[test]
fn fsync_shows_the_file_and_its_bytes_survive_the_writer_and_the_daemon() {
    let mut mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    for (name, size) in [("small", 70_000), ("large", 3_300_000)] {
        let mut client = Client::with(
            &mount,
            "
fd = os.open(sys.argv[2], PRIVATE)
write_all(fd, fill(8, int(sys.argv[3])))
step('written')
os.fsync(fd)
step('synced')
write_all(fd, fill(9, 500_000))
step('more')
",
            &[name, &size.to_string()],
        );
        client.at("written");
        assert_hidden(&mount, name);
        client.go();
        client.at("synced");
        assert_holds(&mount, name, &fill(8, size));
        client.go();
        client.at("more");
        client.kill();
        mount.wait_for("private_files", |files| files == 0);
        assert!(fs::read(mount.at(name)).unwrap().starts_with(&fill(8, size)), "{name}");
    }
    if memory_only() {
        return;
    }
    // And a file whose writer has not even ended.
    let mut client = Client::new(
        &mount,
        "
fd = os.open('open', PRIVATE)
write_all(fd, fill(8, 2_000_000))
os.fsync(fd)
step('synced')
",
    );
    client.at("synced");
    mount.kill();
    client.kill();
    mount.start();
    for (name, size) in [("small", 70_000), ("large", 3_300_000), ("open", 2_000_000)] {
        assert!(fs::read(mount.at(name)).unwrap().starts_with(&fill(8, size)), "{name}");
    }
}

#[test]
fn of_two_writers_the_last_complete_one_wins() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
fd = os.open('f', os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
step('open')
data = fill(int(sys.argv[2]), int(sys.argv[3]))
write_all(fd, data[:len(data) // 2])
step('half')
write_all(fd, data[len(data) // 2:])
os.close(fd)
step('closed')
";
    // Sizes on both sides of what has a slab of its own, the longer first and last.
    for (first, second) in [(90_000, 40_000), (40_000, 2_000_000), (5_000_000, 100), (2_500_000, 2_500_000)] {
        let _ = fs::remove_file(mount.at("f"));
        let mut a = Client::with(&mount, script, &["1", &first.to_string()]);
        a.at("open");
        let mut b = Client::with(&mount, script, &["2", &second.to_string()]);
        b.at("open");
        a.go();
        a.at("half");
        b.go();
        b.at("half");
        assert_hidden(&mount, "f");
        b.go();
        b.at("closed");
        assert_holds(&mount, "f", &fill(2, second));
        a.go();
        a.at("closed");
        assert_holds(&mount, "f", &fill(1, first));
        a.go();
        b.go();
        a.end();
        b.end();
    }
    mount.check_quiet();
}

/// A mapping keeps the RELEASE of a closed file back. Its version loses meanwhile to one that was closed later, and
/// whoever has found it under its name, and not opened it yet, still gets an answer.
#[test]
fn a_version_that_came_too_late_is_stale_to_nobody() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
import ctypes
fd = os.open('f', os.O_CREAT | os.O_TRUNC | os.O_RDWR)
write_all(fd, fill(1, 300_000))
# Python's own would duplicate the descriptor, and close it once more.
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
mapped = libc.mmap(None, ctypes.c_size_t(300_000), 1, mmap.MAP_PRIVATE, fd, ctypes.c_long(0))
assert mapped != ctypes.c_void_p(-1).value, ctypes.get_errno()
os.close(fd)
step('closed')
path = os.open('f', os.O_PATH)
say(os.fstat(path).st_size)
assert libc.munmap(ctypes.c_void_p(mapped), ctypes.c_size_t(300_000)) == 0
step('released')
say(errno_of(os.fstat, path))
say(os.fstat(path).st_size)
say(errno_of(os.open, 'f', os.O_RDONLY))
";
    fs::write(mount.at("f"), fill(0, 10_000)).unwrap();
    let mut late = Client::with(&mount, script, &[]);
    late.at("closed");
    fs::write(mount.at("f"), fill(2, 20_000)).unwrap();
    late.go();
    // Before its RELEASE, its maker still finds its own.
    assert_eq!(late.hear(), "300000");
    late.at("released");
    mount.wait_for("private_files", |files| files == 0);
    late.go();
    assert_eq!(late.hear(), "ok");
    assert_eq!(late.hear(), "20000");
    assert_eq!(late.hear(), "ok");
    late.end();
    assert_holds(&mount, "f", &fill(2, 20_000));
    mount.check_quiet();
}

/// A close of a duplicate, or a child that ends, is no close: the file before stays for everybody, whatever the writer
/// does to its own version.
#[test]
fn a_closed_duplicate_costs_nobody_the_file_before() {
    for close in
        ["os.close(os.dup(fd))", "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)"]
    {
        let mount = Mount::new();
        let _watchdog = Watchdog::new(&mount);
        fs::write(mount.at("f"), fill(0, 2_000_000)).unwrap();
        let script = format!(
            "
fd = os.open('f', os.O_WRONLY | os.O_TRUNC)
write_all(fd, fill(1, 500_000))
{close}
os.rename('f', 'g')
step('renamed')
"
        );
        let mut writer = Client::with(&mount, &script, &[]);
        writer.at("renamed");
        assert_holds(&mount, "f", &fill(0, 2_000_000));
        assert_hidden(&mount, "g");
        writer.kill();
        mount.wait_for("private_files", |files| files == 0);
        assert_holds(&mount, "f", &fill(0, 2_000_000));
        assert_hidden(&mount, "g");
        mount.check_quiet();
    }
}

/// Its maker goes on finding what it has open, of which a duplicate was closed, whatever others publish under that name.
#[test]
fn a_version_that_is_open_still_is_found_by_its_maker_whatever_others_publish() {
    for unlinked in [false, true] {
        let mount = Mount::new();
        let _watchdog = Watchdog::new(&mount);
        let script = "
fd = os.open('f', os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
write_all(fd, fill(1, 5000))
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
step('open')
say(os.stat('f').st_size)
os.unlink('f')
os.close(fd)
step('closed')
";
        let mut mine = Client::with(&mount, script, &[]);
        mine.at("open");
        fs::write(mount.at("f"), fill(2, 6000)).unwrap();
        if unlinked {
            fs::remove_file(mount.at("f")).unwrap();
        }
        mine.go();
        assert_eq!(mine.hear(), "5000");
        mine.at("closed");
        mount.wait_for("private_files", |files| files == 0);
        assert_hidden(&mount, "f");
        mine.go();
        mine.end();
        mount.check_quiet();
    }
}

/// The kernel moves with a name what it knows by it: where somebody has a version of his own there, that is not what
/// was moved. It was found under both names then, and what was appended to the one landed in the other.
#[test]
fn a_rename_under_a_private_version_makes_no_second_name() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("visible"), "V").unwrap();
    let script = "
fd = os.open('f', os.O_CREAT | os.O_TRUNC | os.O_RDWR)
write_all(fd, fill(1, 5000))
step('open')
# The kernel is told right after the rename; by itself it would believe for a minute.
import time
told = time.monotonic() + 20
while os.stat('f').st_size != 5000:
    assert time.monotonic() < told, 'the kernel still leads to what was moved'
os.rename('f', 'g')
step('renamed')
os.close(fd)
";
    let mut mine = Client::with(&mount, script, &[]);
    mine.at("open");
    fs::rename(mount.at("visible"), mount.at("f")).unwrap();
    assert_holds(&mount, "f", b"V");
    mine.go();
    mine.at("renamed");
    wait_until("the kernel forgets what it moved", || fs::metadata(mount.at("g")).is_err());
    assert_holds(&mount, "f", b"V");
    mine.go();
    mine.end();
    mount.wait_for("private_files", |files| files == 0);
    assert_holds(&mount, "g", &fill(1, 5000));
    assert_holds(&mount, "f", b"V");
    mount.check_quiet();
}

#[test]
fn many_writers_of_one_name_never_mix() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("f"), fill(0, 10_000)).unwrap();
    let sizes = [10_000, 300_000, 1_100_000, 20_000];
    let mut writers: Vec<Client> = (1..sizes.len())
        .map(|seed| {
            let script = "
seed, size = int(sys.argv[2]), int(sys.argv[3])
data = fill(seed, size)
for round in range(150):
    fd = os.open('f', os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for at in range(0, size, 64 << 10):
        write_all(fd, data[at:at + (64 << 10)])
    os.close(fd)
say('done')
";
            Client::with(&mount, script, &[&seed.to_string(), &sizes[seed].to_string()])
        })
        .collect();
    let versions: Vec<Vec<u8>> =
        sizes.iter().enumerate().map(|(seed, &size)| fill(seed as u64, size)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let found = fs::read(mount.at("f")).unwrap();
                    assert!(versions.contains(&found), "a mix of {} bytes", found.len());
                }
            });
        }
        let heard: Vec<String> = writers.iter_mut().map(Client::last_words).collect();
        done.store(true, Ordering::Relaxed);
        assert!(heard.iter().all(|heard| heard == "done"), "{heard:?}");
    });
    writers.into_iter().for_each(Client::end);
    assert!(versions[1..].contains(&fs::read(mount.at("f")).unwrap()));
    mount.check_quiet();
}
