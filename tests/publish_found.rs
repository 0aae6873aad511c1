//! Another process finds a file the moment that its writer's `close` has returned, and not before (rule R1): thousands
//! of times, under load, and where the daemon cannot know who its callers are.
//!
//! 500 rounds each; KVCACHEFS_TEST_FULL=1 makes 5,000.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "asynchronous reads go through io_uring")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use client::{Client, Watchdog, fill};
use common::{Mount, Options, memory_only};
use io_uring::{IoUring, opcode, types};

fn rounds() -> u64 {
    match std::env::var("KVCACHEFS_TEST_FULL") {
        Ok(full) if full == "1" => 5_000,
        _ => 500,
    }
}

/// Writes files one by one, each in one of the ways in which files are written.
const WRITER: &str = "
size = [0, 1, 5000, 70_000, 262_144, 300_000, 1_100_000]
for round in range(int(sys.argv[2])):
    name, data = 'f%d' % round, fill(round, size[round % len(size)])
    if round % 4 == 0:
        file = open(name, 'wb')
        file.write(data)
        file.flush()
        step(name)
        file.close()
    elif round % 4 == 1:
        fd = os.open(name, PRIVATE)
        write_all(fd, data)
        os.close(os.dup(fd))
        step(name)
        os.close(fd)
    elif round % 4 == 2 and sys.argv[3] == 'known':
        fd = os.open('part', PRIVATE)
        write_all(fd, data)
        os.rename('part', name)
        step(name)
        os.close(fd)
    else:
        with open('part', 'wb') as file:
            file.write(data)
        step(name)
        os.rename('part', name)
    step('closed')
";
const SIZES: [usize; 7] = [0, 1, 5000, 70_000, 262_144, 300_000, 1_100_000];

/// Follows the writer: its files are not there before they are closed, and whole right afterwards.
fn follow(mount: &Mount, caller: &str) {
    let mut writer = Client::with(mount, WRITER, &[&rounds().to_string(), caller]);
    for round in 0..rounds() {
        let name = format!("f{round}");
        writer.at(&name);
        let before = fs::metadata(mount.at(&name)).map(|found| found.len());
        assert!(
            before.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound),
            "{name} before it was closed: {before:?}"
        );
        writer.go();
        writer.at("closed");
        let wanted = fill(round, SIZES[round as usize % SIZES.len()]);
        // In one round the first question is a stat, in another an open, in a third a listing.
        match round % 3 {
            0 => assert_eq!(fs::metadata(mount.at(&name)).unwrap().len(), wanted.len() as u64, "{name}"),
            1 => {}
            _ => {
                let mut names = fs::read_dir(mount.path()).unwrap().map(|entry| entry.unwrap().file_name());
                assert!(names.any(|listed| *listed == *name), "{name} is not listed");
            }
        }
        let found = fs::read(mount.at(&name)).unwrap_or_else(|error| panic!("{name} right after: {error}"));
        assert!(found == wanted, "{name}: {} bytes of {}", found.len(), wanted.len());
        if round >= 8 {
            fs::remove_file(mount.at(&format!("f{}", round - 8))).unwrap();
        }
        writer.go();
    }
    writer.end();
}

#[test]
fn a_file_is_found_right_after_close_and_not_before() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    follow(&mount, "known");
    mount.check_quiet();
}

const IN_FLIGHT: u64 = 256;
const COLD_FILES: u64 = 16;
const COLD_SIZE: u64 = 4 << 20;
const READ: u64 = 256 << 10;

/// Keeps many reads in flight, whose answers come from the device, until told to stop.
fn read_slowly(mount: &Mount, stop: &AtomicBool, reads: &AtomicU64) {
    let files: Vec<File> = (0..COLD_FILES)
        .map(|at| {
            let path = mount.at(&format!("cold/{at}"));
            // What is read with O_DIRECT stays in L2.
            File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
        })
        .collect();
    let wanted: Vec<Vec<u8>> = (0..COLD_FILES).map(|at| fill(at, COLD_SIZE as usize)).collect();
    let mut ring = IoUring::new(IN_FLIGHT as u32).unwrap();
    let mut buffers: Vec<Vec<u8>> = (0..IN_FLIGHT).map(|_| vec![0; READ as usize + 4096]).collect();
    let aligned = |buffer: &mut Vec<u8>| buffer.as_ptr().align_offset(4096);
    let mut places = vec![(0u64, 0u64); IN_FLIGHT as usize];
    let (mut next, mut in_flight) = (0u64, 0u64);
    let mut idle: Vec<u64> = (0..IN_FLIGHT).collect();
    loop {
        while !stop.load(Ordering::Relaxed)
            && let Some(slot) = idle.pop()
        {
            let (file, offset) = (next % COLD_FILES, next * 7 % (COLD_SIZE / READ) * READ);
            next += 1;
            places[slot as usize] = (file, offset);
            let buffer = &mut buffers[slot as usize];
            let from = aligned(buffer);
            let read = opcode::Read::new(
                types::Fd(files[file as usize].as_raw_fd()),
                buffer[from..].as_mut_ptr(),
                READ as u32,
            )
            .offset(offset)
            .build()
            .user_data(slot);
            // SAFETY: the buffer lives until the loop below has seen every completion, and nobody else uses it before.
            unsafe { ring.submission().push(&read) }.unwrap();
            in_flight += 1;
        }
        if in_flight == 0 {
            return;
        }
        ring.submit_and_wait(1).unwrap();
        let done: Vec<(u64, i32)> =
            ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (slot, result) in done {
            let (file, offset) = places[slot as usize];
            let buffer = &mut buffers[slot as usize];
            let from = aligned(buffer);
            let same = result == READ as i32
                && buffer[from..from + READ as usize]
                    == wanted[file as usize][offset as usize..(offset + READ) as usize];
            if !same {
                // The buffers stay until every read is over.
                stop.store(true, Ordering::Relaxed);
                eprintln!("a read of {READ} bytes of cold/{file} at {offset} gave {result}");
                reads.store(u64::MAX >> 1, Ordering::Relaxed);
            }
            reads.fetch_add(1, Ordering::Relaxed);
            in_flight -= 1;
            idle.push(slot);
        }
    }
}

#[test]
fn a_file_is_found_right_after_close_while_many_slow_reads_are_in_flight() {
    // A machine that has more to do than these reads may keep the kernel's message from us for longer than the default.
    let mount = Mount::with(Options::default().arg("--publish-wait").arg("100ms"));
    let _watchdog = Watchdog::new(&mount);
    fs::create_dir(mount.at("cold")).unwrap();
    for at in 0..COLD_FILES {
        fs::write(mount.at(&format!("cold/{at}")), fill(at, COLD_SIZE as usize)).unwrap();
    }
    if !memory_only() {
        mount.push_out_of_l1();
    }
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| read_slowly(&mount, &stop, &reads));
        /// Stops the reads also when an assertion fails.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&stop);
        while reads.load(Ordering::Relaxed) < IN_FLIGHT {
            std::thread::yield_now();
        }
        follow(&mount, "known");
    });
    let reads = reads.load(Ordering::Relaxed);
    assert!(reads < u64::MAX >> 1, "a read failed");
    assert!(reads > 2 * IN_FLIGHT, "only {reads} reads went on meanwhile");
    mount.check_quiet();
}

/// A mount whose daemon lives in a pid namespace of its own: whoever is outside has no number there. With the first
/// process of that namespace, without which nothing can live there.
fn in_own_pid_namespace() -> (Child, Mount) {
    // Children of the thread that leaves the namespace are in the new one; the thread itself stays.
    std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWPID).unwrap();
        // Ends with its standard input.
        let first = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        (first, Mount::new())
    })
    .join()
    .unwrap()
}

#[test]
fn a_daemon_in_another_pid_namespace_shows_no_half_file() {
    let (_first, mount) = in_own_pid_namespace();
    let _watchdog = Watchdog::new(&mount);
    // The kernel looks a name up before it renames or removes it, and here nobody finds a private name.
    follow(&mount, "unknown");
    let mut client = Client::new(
        &mount,
        "
fd = os.open('f', PRIVATE)
write_all(fd, fill(1, 900_000))
assert errno_of(os.open, 'f', PRIVATE) == 'EEXIST'
assert errno_of(os.stat, 'f') == 'ENOENT'
os.close(os.dup(fd))
step('half')
os.close(fd)
os.unlink('f')
assert errno_of(os.open, 'f', os.O_RDONLY) == 'ENOENT'
step('unlinked')

# The older version stays until the newer one is whole.
open('f', 'wb').write(fill(2, 400_000))
for round in range(20):
    with open('f', 'r+b') as file:
        file.seek(0)
    file = open('f', 'wb')
    file.write(fill(3, 800_000))
    file.flush()
    if round == 0:
        step('replacing')
    file.close()
step('replaced')
",
    );
    client.at("half");
    assert_eq!(fs::metadata(mount.at("f")).unwrap_err().kind(), ErrorKind::NotFound);
    client.go();
    client.at("unlinked");
    assert_eq!(fs::metadata(mount.at("f")).unwrap_err().kind(), ErrorKind::NotFound);
    client.go();
    client.at("replacing");
    assert!(fs::read(mount.at("f")).unwrap() == fill(2, 400_000));
    client.go();
    client.at("replaced");
    assert!(fs::read(mount.at("f")).unwrap() == fill(3, 800_000));
    client.go();
    client.end();
    mount.wait_for("private_files", |files| files == 0);
    mount.check_quiet();
}

#[test]
fn a_client_beside_a_daemon_in_another_pid_namespace_is_no_other_process() {
    let (_first, mount) = in_own_pid_namespace();
    let _watchdog = Watchdog::new(&mount);
    // The client has a small number in the daemon's namespace; in `/proc` that is somebody else's.
    let mut client = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let namespace = File::open(format!("/proc/{}/ns/pid", mount.pid())).unwrap();
                nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWPID).unwrap();
                Client::new(
                    &mount,
                    "
fd = os.open('f', PRIVATE)
write_all(fd, fill(1, 900_000))
step('half')
os.close(fd)
step('closed')
",
                )
            })
            .join()
            .unwrap()
    });
    client.at("half");
    assert_eq!(fs::metadata(mount.at("f")).unwrap_err().kind(), ErrorKind::NotFound);
    client.go();
    client.at("closed");
    assert!(fs::read(mount.at("f")).unwrap() == fill(1, 900_000));
    client.go();
    client.end();
    mount.check_quiet();
}
