//! Writers that are killed in odd positions (rule R1): with the file closed and mapped still, with a descriptor that is in
//! no table, with a child that goes on; and those who make files that they can only read.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use client::{Client, Watchdog, fill};
use common::{Mount, memory_only};
use io_uring::types::{DestinationSlot, Fd, Fixed};
use io_uring::{IoUring, opcode, squeue};

#[track_caller]
fn assert_holds(mount: &Mount, name: &str, wanted: &[u8]) {
    let found = fs::read(mount.at(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(found == wanted, "{name} has {} bytes, or others", found.len());
}

#[track_caller]
fn assert_none(mount: &Mount, name: &str) {
    let found = fs::metadata(mount.at(name)).map(|found| found.len());
    assert!(found.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound), "{name}: {found:?}");
}

/// Maps a new version of a file, closes it, and writes half of it through the mapping.
const MAPPED: &str = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
name, size = sys.argv[2], 1 << 20
fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.ftruncate(fd, size)
start = libc.mmap(None, size, 3, 1, fd, 0)
assert start != ctypes.c_void_p(-1).value, ctypes.get_errno()
os.close(fd)
ctypes.memset(start, 7, size // 2)
step('written')
";

#[test]
fn who_is_killed_with_a_closed_file_mapped_leaves_nothing_half() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("old"), fill(1, 300_000)).unwrap();
    let discarded = mount.stat("discarded_files");
    for name in ["new", "old"] {
        let mut client = Client::with(&mount, MAPPED, &[name]);
        client.at("written");
        assert_none(&mount, "new");
        client.kill();
        mount.wait_for("private_files", |files| files == 0);
        assert_none(&mount, "new");
        assert_holds(&mount, "old", &fill(1, 300_000));
    }
    assert_eq!(mount.stat("discarded_files") - discarded, 2);
    // Who ends in another way has written what it wanted.
    let mut half = vec![7; 1 << 19];
    half.resize(1 << 20, 0);
    for end in ["os._exit(3)", "libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size)); step('unmapped')"]
    {
        let mut client = Client::with(&mount, &format!("{MAPPED}\n{end}"), &["old"]);
        client.at("written");
        client.go();
        if end.contains("unmapped") {
            client.at("unmapped");
            mount.wait_for("private_files", |files| files == 0);
            assert_holds(&mount, "old", &half);
            client.kill();
        } else {
            assert_eq!(client.wait().code(), Some(3));
            mount.wait_for("private_files", |files| files == 0);
        }
        assert_holds(&mount, "old", &half);
        fs::write(mount.at("old"), fill(1, 300_000)).unwrap();
    }
    mount.check_quiet();
}

const AS_CHILD: &str = "KVCACHEFS_TEST_URING_CHILD";
const LEN: usize = 400_000;

/// Not a test: what the next one runs as a process of its own.
#[test]
#[ignore = "a child of another test"]
fn writes_by_a_direct_descriptor() {
    let Some(path) = std::env::var_os(AS_CHILD) else { return };
    let mut ring = IoUring::new(4).unwrap();
    ring.submitter().register_files_sparse(4).unwrap();
    let name = std::ffi::CString::new(Path::new(&path).as_os_str().as_bytes()).unwrap();
    let content = fill(3, LEN);
    let mut ask = |entry: squeue::Entry| {
        // SAFETY: name and content outlive the ring, and each call waits for its end.
        #[allow(unsafe_code, reason = "a client that uses io_uring")]
        unsafe {
            ring.submission().push(&entry).unwrap();
        }
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    };
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
    let slot = DestinationSlot::try_from_slot_target(1).unwrap();
    let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), name.as_ptr()).flags(flags).mode(0o644);
    assert_eq!(ask(open.file_index(Some(slot)).build()), 0);
    let write = opcode::Write::new(Fixed(1), content.as_ptr(), LEN as u32);
    assert_eq!(ask(write.build()), LEN as i32);
    let mut line = String::new();
    let mut say = |text: &str| {
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        std::io::stdin().read_line(&mut line).unwrap();
    };
    say("w");
    assert_eq!(ask(opcode::Close::new(Fixed(1)).build()), 0);
    say("c");
}

#[test]
fn a_descriptor_that_is_in_no_table_is_closed_or_its_writer_killed() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("old"), fill(1, 300_000)).unwrap();
    for (name, closes) in [("new", false), ("old", false), ("new", true), ("old", true)] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writes_by_a_direct_descriptor", "--ignored", "--nocapture"])
            .env(AS_CHILD, mount.at(name))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = child.stderr.take().unwrap();
        let mut hears = |wanted: u8| {
            let mut word = [0];
            said.read_exact(&mut word).unwrap();
            assert_eq!(word[0], wanted);
        };
        hears(b'w');
        if closes {
            child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
            hears(b'c');
            assert_holds(&mount, name, &fill(3, LEN));
        } else {
            assert_none(&mount, "new");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        mount.wait_for("private_files", |files| files == 0);
        if closes {
            assert_holds(&mount, name, &fill(3, LEN));
        } else {
            assert_none(&mount, "new");
            assert_holds(&mount, "old", &fill(1, 300_000));
        }
    }
    mount.check_quiet();
}

/// As `sh -c 'work > out'` is ended by a signal that its child does not get.
#[test]
fn a_child_that_goes_on_after_its_maker_was_killed_has_the_file() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let script = "
import time
fd = os.open('out', PRIVATE)
write_all(fd, b'made ')
child = os.fork()
if child:
    step(child)
    sys.exit(1)
end, go = sys.argv[2:4]
while not os.path.exists(go):
    time.sleep(0.01)
if end != 'idle':
    write_all(fd, b'continued')
if end == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
";
    for (end, wanted) in [("closes", Some(&b"made continued"[..])), ("killed", None), ("idle", None)] {
        let beside = mount.scratch.path().join(end);
        let mut client = Client::with(&mount, script, &[end, &beside.to_string_lossy()]);
        let child: i32 = client.hear().parse().unwrap();
        client.kill();
        // Its descriptor is closed before it can be waited for.
        assert!(Path::new(&format!("/proc/{child}")).exists());
        assert_none(&mount, "out");
        fs::write(&beside, "").unwrap();
        mount.wait_for("private_files", |files| files == 0);
        match wanted {
            Some(wanted) => {
                assert_holds(&mount, "out", wanted);
                fs::remove_file(mount.at("out")).unwrap();
            }
            None => assert_none(&mount, "out"),
        }
    }
    mount.check_quiet();
}

/// As lock and marker files are made.
#[test]
fn who_makes_a_file_that_it_can_only_read_makes_it_like_others() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::write(mount.at("old"), fill(1, 400_000)).unwrap();
    let script = "
fd = os.open(sys.argv[2], os.O_RDONLY | os.O_CREAT | int(sys.argv[3]))
os.close(os.dup(fd))
step('made')
os.close(fd)
step('closed')
";
    for (name, flag) in [("new", libc::O_EXCL), ("old", libc::O_TRUNC)] {
        let start = || {
            let mut client = Client::with(&mount, script, &[name, &flag.to_string()]);
            client.at("made");
            client
        };
        start().kill();
        mount.wait_for("private_files", |files| files == 0);
        assert_none(&mount, "new");
        assert_holds(&mount, "old", &fill(1, 400_000));
        let mut client = start();
        let reserved = fs::File::create_new(mount.at(name)).unwrap_err();
        assert_eq!(reserved.kind(), ErrorKind::AlreadyExists);
        assert_none(&mount, "new");
        client.go();
        client.at("closed");
        assert_holds(&mount, name, b"");
        client.kill();
        assert_holds(&mount, name, b"");
        if name == "new" {
            fs::remove_file(mount.at("new")).unwrap();
        }
    }
    mount.check_quiet();
}

/// O_SYNC and O_DSYNC at open, and RWF_DSYNC for one write, are as good as an fsync after each.
#[test]
fn a_synchronous_write_of_a_visible_file_is_durable() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let script = "
for name, flag in (('sync', os.O_SYNC), ('dsync', os.O_DSYNC), ('rwf', 0), ('direct', os.O_DIRECT | os.O_DSYNC)):
    fd = os.open(name, os.O_RDWR | os.O_CREAT | flag)
    for seed in (4, 5):
        data = mmap.mmap(-1, 8192)
        data.write(fill(seed, 8192))
        written = os.pwritev(fd, [data], 0, os.RWF_DSYNC) if name == 'rwf' else os.pwrite(fd, data, 0)
        assert written == 8192
        say(os.getxattr(name, 'user.kv.durable').decode())
    # One that nobody can find yet is not shown for that.
    os.open(name + '.private', PRIVATE | flag)
    hidden = os.open(name + '.part', PRIVATE | flag)
    write_all(hidden, fill(6, 4096))
step('written')
";
    let mut client = Client::new(&mount, script);
    for _ in 0..8 {
        client.at("1");
    }
    client.at("written");
    mount.kill();
    client.kill();
    mount.start();
    for name in ["sync", "dsync", "rwf", "direct"] {
        assert_holds(&mount, name, &fill(5, 8192));
        assert_none(&mount, &format!("{name}.part"));
    }
}
