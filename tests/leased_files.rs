//! What is leased stays in L1, and stays as it is, whatever becomes of its name.
//!
//! A scheduler that was told `l1` starts its request: bytes that have to come from the device then, or that a writer has
//! changed meanwhile, are what leases are there to prevent.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use client::Watchdog;
use common::ctl::{Ctl, item, node, node_of, part};
use common::run::wait_until;
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;

const BLOCK: u64 = 256 << 10;
const MIB: usize = 1 << 20;

/// A file that is written where it is.
fn shared(path: &Path, flags: i32) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(flags)
        .open(path)
        .unwrap()
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_raw(result.unwrap_err().raw_os_error().unwrap())
}

/// Does something in a thread of its own, and tells what came of it.
fn later<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(call()));
    told
}

/// Reads all of a file without anything coming from a device.
#[track_caller]
fn assert_reads_from_l1(mount: &Mount, file: &File, expected: &[u8]) {
    let before = (mount.stat("read_l2_bytes"), mount.stat("read_around_bytes"));
    let mut read = vec![0; expected.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read == expected, "other bytes");
    assert_eq!((mount.stat("read_l2_bytes"), mount.stat("read_around_bytes")), before, "from a device");
}

#[test]
fn a_store_to_leased_bytes_waits_and_goes_on() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let size = 4 * BLOCK as usize;
    let file = shared(&mount.at("s"), 0);
    file.write_all_at(&bytes(1, size), 0).unwrap();
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["s"])[0];
    let lease = ctl.lease(&[part(range, BLOCK, BLOCK)]);
    // Beside it nothing waits.
    file.write_all_at(&[7; 100], 0).unwrap();
    file.write_all_at(&[7; 100], 2 * BLOCK).unwrap();
    file.write_all_at(&[7; 100], size as u64).unwrap();

    let writer = file.try_clone().unwrap();
    let told = later(move || writer.write_all_at(&[9; 10], 2 * BLOCK - 5));
    mount.wait_for("waiting_for_leases", |count| count == 1);
    // Others pass it: those of another file, and, since the kernel lets one write to a file at a time, truly others.
    fs::write(mount.at("other"), bytes(2, MIB)).unwrap();
    let mut read = vec![0; BLOCK as usize];
    file.read_exact_at(&mut read, BLOCK).unwrap();
    assert!(read == bytes(1, size)[BLOCK as usize..2 * BLOCK as usize], "not as it was leased");
    assert_eq!(told.try_recv().unwrap_err(), TryRecvError::Empty);
    assert_eq!(mount.stat("lease_waits"), 1);
    mount.wait_for("waiting_for_leases", |count| count == 1);
    ctl.release(lease).unwrap();
    told.recv().unwrap().unwrap();
    let mut read = [0; 10];
    file.read_exact_at(&mut read, 2 * BLOCK - 5).unwrap();
    assert_eq!(read, [9; 10]);

    // A part that is given back is free at once, and the rest is not.
    let lease = ctl.lease(&[part(range, 0, 3 * BLOCK)]);
    ctl.release_ranges(lease, 0, &[part(item(0), BLOCK, BLOCK)]).unwrap();
    file.write_all_at(&[3; 50], BLOCK + 7).unwrap();
    let writer = file.try_clone().unwrap();
    let told = later(move || writer.write_all_at(&[3; 50], 7));
    mount.wait_for("waiting_for_leases", |count| count == 1);
    // The handle goes, and the lease with it.
    drop(ctl);
    told.recv().unwrap().unwrap();
    drop(file);
    mount.check_quiet();
}

#[test]
fn a_store_that_cannot_wait_is_told_so() {
    let mount = Mount::with(Options::default().arg("--request-deadline=2s"));
    let _watchdog = Watchdog::new(&mount);
    let file = shared(&mount.at("s"), 0);
    file.write_all_at(&bytes(1, MIB + 100), 0).unwrap();
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["s"])[0];
    ctl.lease(&[range]);
    // Ten megabytes reach the device meanwhile: a writer who waits for room may take that for progress.
    let busy = later({
        let path = mount.at("busy");
        move || fs::write(path, bytes(3, 10 * MIB)).unwrap()
    });
    assert_eq!(errno(file.write_at(&[9; 10], 5)), Errno::ETIMEDOUT);
    assert_eq!(errno(file.set_len(BLOCK)), Errno::ETIMEDOUT);
    busy.recv().unwrap();
    assert_eq!(mount.stat("lease_timeouts"), 2);
    let hasty = shared(&mount.at("s"), libc::O_NONBLOCK);
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    assert_eq!(errno(hasty.write_at(&[9; 10], 5)), Errno::EAGAIN);
    assert_eq!(
        errno(hasty.write_at(&[9; 10], MIB as u64 + 100)),
        Errno::EAGAIN,
        "the last block gets longer"
    );
    assert_eq!(errno(hasty.write_at(&[9; 10], 2 * MIB as u64)), Errno::EAGAIN);
    assert_eq!(errno(hasty.set_len(10)), Errno::EAGAIN);
    assert_eq!(errno(hasty.set_len(2 * MIB as u64)), Errno::EAGAIN);
    assert_eq!(fallocate(&hasty, hole, 0, 2 * BLOCK as i64), Err(Errno::EAGAIN));
    assert_eq!(fallocate(&hasty, FallocateFlags::empty(), 0, 2 * MIB as i64), Err(Errno::EAGAIN));
    assert_eq!(mount.stat("lease_timeouts"), 2);
    // What counts is what the descriptor says now.
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
    assert_eq!(errno(file.write_at(&[9; 10], 5)), Errno::EAGAIN);
    assert_reads_from_l1(&mount, &file, &bytes(1, MIB + 100));
    assert_eq!(file.metadata().unwrap().len(), MIB as u64 + 100, "what is refused has changed nothing");
    drop(ctl);
    wait_until("the lease is gone", || mount.stat("leases") == 0);
    hasty.write_all_at(&[9; 10], 5).unwrap();
}

#[test]
fn truncation_and_holes_wait() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let size = 3 * BLOCK + 10;
    type Change = fn(&File, &Path) -> io::Result<()>;
    let changes: [(&str, Change); 5] = [
        ("ftruncate", |file, _| file.set_len(2 * BLOCK)),
        ("truncate", |_, path| nix::unistd::truncate(path, 2 * BLOCK as i64 + 1).map_err(io::Error::from)),
        ("grown", |file, _| file.set_len(5 * BLOCK)),
        ("punched", |file, _| {
            let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(file, hole, 0, 4 * BLOCK as i64).map_err(io::Error::from)
        }),
        ("allocated", |file, _| {
            fallocate(file, FallocateFlags::empty(), 0, 5 * BLOCK as i64).map_err(io::Error::from)
        }),
    ];
    for (name, change) in changes {
        let path = mount.at(name);
        let file = shared(&path, 0);
        file.write_all_at(&bytes(1, size as usize), 0).unwrap();
        let ctl = Ctl::new(&mount);
        let lease = ctl.lease(&[part(ctl.ranges(&[name])[0], 3 * BLOCK, 0)]);
        let (writer, at) = (file.try_clone().unwrap(), path.clone());
        let told = later(move || change(&writer, &at));
        mount.wait_for("waiting_for_leases", |count| count == 1);
        assert!(fs::read(&path).unwrap() == bytes(1, size as usize), "{name}");
        ctl.release(lease).unwrap();
        told.recv().unwrap().unwrap();
        assert!(fs::read(&path).unwrap() != bytes(1, size as usize), "{name} has not happened");
        // What is cut off, or what is far from it, is not looked at.
        let lease = ctl.lease(&[part(ctl.ranges(&[name])[0], 0, 10)]);
        file.set_len(BLOCK).unwrap();
        ctl.release(lease).unwrap();
    }
}

/// R12: an open never waits. Whoever empties the file gets a version of his own, and the lease keeps the old bytes.
#[test]
fn an_open_that_truncates_does_not_wait() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::create_dir(mount.at("d")).unwrap();
    let posix = std::process::Command::new("setfattr")
        .args(["-n", "user.kv.publish", "-v", "posix"])
        .arg(mount.at("d"))
        .status()
        .unwrap();
    assert!(posix.success());
    let ctl = Ctl::new(&mount);
    for keep_open in [false, true] {
        for (at, name) in ["plain", "d/posix"].into_iter().enumerate() {
            let content = bytes(at as u64, MIB);
            let writer = File::create(mount.at(name)).unwrap();
            writer.write_all_at(&content, 0).unwrap();
            let writer = keep_open.then_some(writer);
            if keep_open {
                writer.as_ref().unwrap().sync_all().unwrap();
            }
            let old = File::open(mount.at(name)).unwrap();
            let lease = ctl.lease(&[node(node_of(&old))]);
            fs::write(mount.at(name), b"new").unwrap();
            wait_until("the new version", || fs::read(mount.at(name)).unwrap() == b"new");
            assert_reads_from_l1(&mount, &old, &content);
            drop(writer);
            ctl.release(lease).unwrap();
            fs::remove_file(mount.at(name)).unwrap();
        }
    }
}

#[test]
fn a_new_version_a_rename_and_an_unlink_leave_the_leased_bytes() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let content = bytes(1, 2 * MIB);
    type Way = fn(&Mount);
    let ways: [(&str, Way); 3] = [
        ("a new version", |mount| fs::write(mount.at("f"), b"new").unwrap()),
        ("a rename", |mount| {
            fs::write(mount.at("g"), b"new").unwrap();
            fs::rename(mount.at("g"), mount.at("f")).unwrap();
        }),
        ("an unlink", |mount| fs::remove_file(mount.at("f")).unwrap()),
    ];
    for (what, way) in ways {
        fs::write(mount.at("f"), &content).unwrap();
        mount.drain();
        let ctl = Ctl::new(&mount);
        let old = File::open(mount.at("f")).unwrap();
        let id = node_of(&old);
        let lease = ctl.lease(&[node(id)]);
        way(&mount);
        if what != "an unlink" {
            wait_until("the new version", || fs::read(mount.at("f")).unwrap() == b"new");
            let (_, states) = ctl.classify(&ctl.ranges(&["f"]));
            assert_eq!((states[0].bytes, states[0].flags & abi::STATE_LEASED), (3, 0), "{what}");
        }
        assert_reads_from_l1(&mount, &old, &content);
        // It is the lease that keeps it, not only the descriptor.
        drop(old);
        let (_, states) = ctl.classify(&[node(id)]);
        assert_eq!((states[0].status, states[0].tier), (0, abi::TIER_L1), "{what}");
        assert_eq!(mount.stat("leased_bytes"), content.len() as u64, "{what}");
        let held = mount.stat("l1_slab_bytes");
        assert!(held >= content.len() as u64, "{what}: {held}");
        ctl.release(lease).unwrap();
        wait_until("the old version goes", || {
            ctl.classify(&[node(id)]).1[0].status == -(Errno::ESTALE as i32)
        });
        wait_until("its memory is back", || mount.stat("l1_slab_bytes") <= held - content.len() as u64);
        let _ = fs::remove_file(mount.at("f"));
        mount.drain();
        wait_until("its room is back", || memory_only() || mount.stat("l2_used_bytes") == 0);
    }
}

#[test]
fn eviction_passes_by_what_is_leased() {
    let mount = Mount::with(Options::new(64, 192));
    let _watchdog = Watchdog::new(&mount);
    // One in a slab, one in a chunk, one for shared use of which only a part is leased.
    let contents = [bytes(1, 3 * MIB), bytes(2, 100_000), bytes(3, 2 * MIB)];
    fs::write(mount.at("slab"), &contents[0]).unwrap();
    fs::write(mount.at("chunk"), &contents[1]).unwrap();
    shared(&mount.at("slot"), 0).write_all_at(&contents[2], 0).unwrap();
    if !memory_only() {
        mount.drain();
    }
    let ctl = Ctl::new(&mount);
    let all = ctl.ranges(&["slab", "chunk", "slot"]);
    let window = [all[0], all[1], part(all[2], 2 * BLOCK, BLOCK)];
    let lease = ctl.lease(&window);
    // Several times what L1 holds, and more than L2 does: everything else leaves.
    for at in 0..60 {
        fs::write(mount.at(&format!("filler{at}")), bytes(at, 4 * MIB)).unwrap();
        let (head, states) = ctl.classify(&window);
        assert_eq!((head.tier, head.failed), (abi::TIER_L1, 0), "after {at}: {states:?}");
    }
    assert!(mount.stat("evictions_l2") > 0 && (memory_only() || mount.stat("evictions_l1") > 0));
    assert_reads_from_l1(&mount, &File::open(mount.at("slab")).unwrap(), &contents[0]);
    assert_reads_from_l1(&mount, &File::open(mount.at("chunk")).unwrap(), &contents[1]);
    let before = mount.stat("read_l2_bytes");
    let mut read = vec![0; BLOCK as usize];
    File::open(mount.at("slot")).unwrap().read_exact_at(&mut read, 2 * BLOCK).unwrap();
    assert!(read == contents[2][2 * BLOCK as usize..3 * BLOCK as usize]);
    assert_eq!(mount.stat("read_l2_bytes"), before);
    mount.check_bounds();
    // Then they are files like any other.
    ctl.release(lease).unwrap();
    for at in 0..60 {
        fs::write(mount.at(&format!("filler{at}")), bytes(at, 4 * MIB)).unwrap();
    }
    wait_until("they leave", || ctl.classify(&all).0.tier != abi::TIER_L1);
}

/// A lease was granted for the memory that it kept then. What the file grows by is no part of it.
#[test]
fn what_a_leased_file_grows_by_is_not_kept() {
    if memory_only() {
        return;
    }
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::create_dir(mount.at("d")).unwrap();
    let posix = std::process::Command::new("setfattr")
        .args(["-n", "user.kv.publish", "-v", "posix"])
        .arg(mount.at("d"))
        .status()
        .unwrap();
    assert!(posix.success());
    let mut content = bytes(1, 2 * BLOCK as usize);
    let file = File::create(mount.at("d/f")).unwrap();
    file.write_all_at(&content, 0).unwrap();
    drop(file);
    mount.drain();
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["d/f"])[0];
    ctl.lease(&[part(range, 0, BLOCK)]);
    let before = mount.stat("leased_bytes");
    let file = OpenOptions::new().write(true).open(mount.at("d/f")).unwrap();
    content.extend(bytes(2, 12 * MIB));
    file.write_all_at(&content[2 * BLOCK as usize..], 2 * BLOCK).unwrap();
    drop(file);
    mount.drain();
    mount.push_out_of_l1();
    assert_eq!(mount.stat("leased_bytes"), before);
    let (_, states) = ctl.classify(&[part(range, 0, BLOCK), part(range, 2 * BLOCK, 0)]);
    assert_eq!(states[0].tier, abi::TIER_L1);
    assert!(states[1].bytes_l1 < states[1].bytes / 4, "{states:?}");
    assert!(fs::read(mount.at("d/f")).unwrap() == content);
}

/// A lease keeps memory from everybody; whoever wants to store goes on all the same.
#[test]
fn writers_go_on_beside_all_that_may_be_leased() {
    let mount = Mount::with(Options::new(64, 256).arg("--lease-client-max=48MiB"));
    let _watchdog = Watchdog::new(&mount);
    let names: Vec<String> = (0..12).map(|at| format!("leased{at}")).collect();
    let ctl = Ctl::new(&mount);
    for (at, name) in (0..).zip(&names) {
        fs::write(mount.at(name), bytes(at, 4 * MIB)).unwrap();
        mount.drain();
        ctl.lease(&ctl.ranges(&[name]));
    }
    assert_eq!(mount.stat("leased_bytes"), 48 << 20);
    if !memory_only() {
        for at in 0..20 {
            fs::write(mount.at(&format!("f{at}")), bytes(100 + at, 4 * MIB)).unwrap();
        }
        for at in 0..20 {
            assert!(fs::read(mount.at(&format!("f{at}"))).unwrap() == bytes(100 + at, 4 * MIB), "f{at}");
        }
    }
    for (at, name) in (0..).zip(&names) {
        assert_reads_from_l1(&mount, &File::open(mount.at(name)).unwrap(), &bytes(at, 4 * MIB));
    }
    drop(ctl);
    mount.check_quiet();
}
