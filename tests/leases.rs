//! Leases end with whoever took them, and no client gets more than its part of L1.
//!
//! A lease that outlives its holder would keep memory, and keep writers waiting, for ever: so it belongs to a handle, which
//! the kernel closes however the process ends.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::collections::HashSet;
use std::fs;
use std::process::Command;

use client::{Client, Watchdog};
use common::ctl::{Ctl, PYTHON, item, node, node_of, part};
use common::run::wait_until;
use common::{Mount, Options, bytes};
use kvcachefs::abi::{self, Range};
use nix::errno::Errno;

const MIB: u64 = 1 << 20;

fn python(mount: &Mount, script: &str) -> Client {
    Client::new(mount, &format!("{PYTHON}\n{script}"))
}

fn files(mount: &Mount, count: u64, len: u64) -> Vec<String> {
    let names: Vec<String> = (0..count).map(|at| format!("f{at}")).collect();
    for (at, name) in (0..).zip(&names) {
        fs::write(mount.at(name), bytes(at, len as usize)).unwrap();
    }
    names
}

fn ranges(ctl: &Ctl, names: &[String]) -> Vec<Range> {
    ctl.ranges(&names.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Nothing is left of any lease.
fn check_none_left(mount: &Mount) {
    wait_until("no lease is left", || mount.stat("leases") == 0);
    assert_eq!(mount.stat("leased_bytes"), 0);
    assert_eq!(fs::read_to_string(mount.at(".ctl/leases")).unwrap().lines().count(), 1);
}

fn xattr(mount: &Mount, name: &str) -> String {
    let output = Command::new("getfattr")
        .args(["--only-values", "-n", "user.kv.leases"])
        .arg(mount.at(name))
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_lease_is_granted_shown_and_given_back() {
    let mount = Mount::new();
    let names = files(&mount, 3, MIB);
    let ctl = Ctl::new(&mount);
    let all = ranges(&ctl, &names);
    let (head, _) = ctl.acquire(&[all[0], all[1], part(all[1], 5, 10)], 0, 5_000);
    assert_eq!((head.lease_errno, head.tier, head.ttl_ms), (0, abi::TIER_L1, 5_000));
    assert_eq!(
        (mount.stat("leases"), mount.stat("leased_bytes")),
        (1, 2 * MIB),
        "each block is counted once"
    );
    let (_, states) = ctl.classify(&all);
    assert_eq!(states.iter().map(|state| state.flags & abi::STATE_LEASED).collect::<Vec<_>>(), [2, 2, 0]);
    assert_eq!(names.iter().map(|name| xattr(&mount, name)).collect::<Vec<_>>(), ["1", "1", "0"]);
    let listed = fs::read_to_string(mount.at(".ctl/leases")).unwrap();
    let line: Vec<&str> = listed.lines().nth(1).unwrap().split(' ').collect();
    assert_eq!(line[..2], [head.lease.to_string(), std::process::id().to_string()]);
    assert_eq!(line[5..], ["3", "2MiB", "1/1"], "{listed}");
    assert!(mount.status().contains("leases 1: 2.0MiB of") || mount.status().contains("leases 1: 2MiB of"));

    let (state, leased) = ctl.query(head.lease).unwrap();
    assert_eq!((state.parties, state.own, state.state, state.bytes, state.ranges), (1, 1, 0, 2 * MIB, 3));
    assert!(state.ttl_ms <= 5_000);
    let f1 = node_of(&fs::File::open(mount.at("f1")).unwrap());
    assert_eq!(leased[1], abi::Leased { node: f1, offset: 0, length: MIB, held: MIB });
    assert_eq!(leased[2], abi::Leased { node: f1, offset: 5, length: 10, held: 10 });
    assert!(ctl.extend(head.lease, 500_000).unwrap().ttl_ms > 5_000);

    // A second one on the same files, and one after the other goes.
    let other = ctl.lease(&all[..1]);
    assert_eq!(xattr(&mount, "f0"), "2");
    assert_eq!(mount.stat("leased_bytes"), 3 * MIB);
    let gone = ctl.release(head.lease).unwrap();
    assert_eq!((gone.state, gone.parties, gone.bytes), (abi::LEASE_GONE, 0, 0));
    assert_eq!(xattr(&mount, "f0"), "1");
    // Twice is no error; what never was is one.
    assert_eq!(ctl.release(head.lease), Ok(gone));
    assert_eq!(ctl.release(head.lease + 1000), Err(Errno::ENOENT));
    assert_eq!(ctl.extend(head.lease, 0), Err(Errno::ENOENT));
    assert_eq!(ctl.query(head.lease).unwrap_err(), Errno::ENOENT);
    // Nor is it another session's to give back.
    let stranger = Ctl::new(&mount);
    assert_eq!(stranger.release(other), Err(Errno::ENOENT));
    assert_eq!(stranger.extend(other, 0), Err(Errno::ENOENT));
    ctl.release(other).unwrap();
    check_none_left(&mount);
    assert_eq!(mount.stat("leases_granted"), 2);
}

#[test]
fn what_is_not_all_in_l1_is_not_leased() {
    let mut mount = Mount::new();
    let names = files(&mount, 2, MIB);
    let ctl = Ctl::new(&mount);
    let none = ctl.ranges(&["none"])[0];
    let (head, _) = ctl.acquire(&[ranges(&ctl, &names)[0], none], 1, 0);
    assert_eq!((head.lease, head.lease_errno), (0, Errno::ENOENT as i32));
    let (head, _) = ctl.acquire(&ranges(&ctl, &names), abi::RANGES_MAX * 100, 0);
    assert_eq!((head.lease, head.lease_errno), (0, Errno::EINVAL as i32), "more shares than there may be");
    assert_eq!(mount.stat("leases"), 0);
    drop(ctl);
    if common::memory_only() {
        return;
    }
    mount.drain();
    mount.restart();
    let ctl = Ctl::new(&mount);
    let all = ranges(&ctl, &names);
    assert_eq!(fs::read(mount.at("f0")).unwrap(), bytes(0, MIB as usize));
    mount.wait_for("promotions_in_flight", |count| count == 0);
    let (head, _) = ctl.acquire(&all, 1, 0);
    assert_eq!((head.tier, head.lease, head.lease_errno), (abi::TIER_MIXED, 0, Errno::EAGAIN as i32));
    let (head, _) = ctl.acquire(&all[1..], 1, 0);
    assert_eq!((head.tier, head.lease, head.lease_errno), (abi::TIER_L2, 0, Errno::EAGAIN as i32));
    assert_ne!(ctl.acquire(&all[..1], 1, 0).0.lease, 0);
}

#[test]
fn a_lease_ends_with_the_last_descriptor_of_its_handle() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let names = files(&mount, 2, MIB);
    let ctl = Ctl::new(&mount);
    ctl.lease(&ranges(&ctl, &names));
    let duplicate = ctl.0.try_clone().unwrap();
    drop(ctl);
    assert_eq!(mount.stat("leases"), 1, "a duplicate is left");
    drop(duplicate);
    check_none_left(&mount);
    assert_eq!(mount.stat("leases_closed"), 1);

    // A forked child has the handle, too: it is the last to let go.
    let mut parent = python(
        &mount,
        "ctl = ctl_open()\n\
         assert ctl_lease(ctl, [ctl_range(ctl, 'f0')])[0]\n\
         child = os.fork()\n\
         if child == 0:\n    \
             hear()\n    os._exit(0)\n\
         say(child)",
    );
    let child: i32 = parent.hear().parse().unwrap();
    parent.signal(nix::sys::signal::Signal::SIGKILL);
    let status = format!("/proc/{}/status", parent.pid());
    wait_until("the parent is dead", || fs::read_to_string(&status).unwrap().contains("State:\tZ"));
    assert!(common::run::is_running(child));
    assert_eq!(mount.stat("leases"), 1, "the child still has it");
    parent.go();
    check_none_left(&mount);
}

#[test]
fn a_killed_holder_leaves_nothing_behind() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    files(&mount, 4, 4 * MIB);
    // It is killed while it reads, by threads that never stop.
    let script = "ctl = ctl_open()\n\
         lease = ctl_lease(ctl, [ctl_range(ctl, 'f%d' % at) for at in range(4)])[0]\n\
         assert lease\n\
         def reads(name):\n    \
             fd = os.open(name, os.O_RDONLY)\n    \
             while True:\n        os.pread(fd, 1 << 20, 0)\n\
         for at in range(4):\n    threading.Thread(target=reads, args=('f%d' % at,)).start()\n\
         say('leased')\nsignal.pause()";
    for _ in 0..5 {
        let mut holder = python(&mount, script);
        holder.at("leased");
        assert_eq!((mount.stat("leases"), mount.stat("leased_bytes")), (1, 16 * MIB));
        holder.kill();
        check_none_left(&mount);
    }
    wait_until("no session is left", || mount.stat("control_sessions") == 0);
}

#[test]
fn a_shared_lease_lasts_until_its_last_party() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let names = files(&mount, 2, MIB);
    let scheduler = Ctl::new(&mount);
    let lease = scheduler.lease_for(&ranges(&scheduler, &names), 4);
    let own = |ctl: &Ctl| ctl.query(lease).map(|(state, _)| (state.parties, state.own));
    assert_eq!(own(&scheduler), Ok((4, 4)));
    assert_eq!(scheduler.attach(lease), Err(Errno::EINVAL), "its shares are its own already");
    let rank = "ctl = ctl_open()\nlease = int(hear())\nsay(ctl_attach(ctl, lease)[2])\n";
    let mut killed = python(&mount, &format!("{rank}signal.pause()"));
    let mut releases = python(&mount, &format!("{rank}hear()\nsay(ctl_release(ctl, lease)[3])\nhear()"));
    let mut closes = python(&mount, &format!("{rank}hear()\nos.close(ctl)\nsay('closed')\nhear()"));
    for (rank, left) in [&mut killed, &mut releases, &mut closes].into_iter().zip([3, 2, 1]) {
        rank.say(&lease.to_string());
        assert_eq!(rank.hear(), "1", "a share of its own");
        assert_eq!(own(&scheduler), Ok((4, left)));
    }
    // Its own share, and there is none left for a fifth.
    let late = Ctl::new(&mount);
    assert_eq!(scheduler.release(lease).map(|state| (state.state, state.own)), Ok((abi::LEASE_GONE, 0)));
    assert_eq!(late.attach(lease), Err(Errno::EBUSY));
    assert_eq!(late.attach(lease + 77), Err(Errno::ENOENT));
    assert_eq!((mount.stat("leases"), mount.stat("leased_bytes")), (1, 2 * MIB));
    killed.kill();
    assert_eq!(mount.stat("leases"), 1);
    releases.go();
    assert_eq!(releases.hear(), abi::LEASE_GONE.to_string());
    assert_eq!((mount.stat("leases"), mount.stat("leased_bytes")), (1, 2 * MIB));
    let listed = fs::read_to_string(mount.at(".ctl/leases")).unwrap();
    wait_until("one party is left", || {
        fs::read_to_string(mount.at(".ctl/leases"))
            .unwrap()
            .lines()
            .nth(1)
            .is_some_and(|line| line.ends_with("1/4"))
    });
    assert!(listed.lines().count() == 2, "{listed}");
    closes.go();
    closes.at("closed");
    check_none_left(&mount);

    // All at once.
    let lease = scheduler.lease_for(&ranges(&scheduler, &names), 3);
    late.attach(lease).unwrap();
    let left = scheduler.release_ranges(lease, abi::RELEASE_ALL_SHARES, &[]).unwrap();
    assert_eq!(left.state, abi::LEASE_GONE);
    assert_eq!(late.query(lease).map(|(state, _)| (state.parties, state.own)), Ok((1, 1)));
    late.release(lease).unwrap();
    check_none_left(&mount);
}

#[test]
fn shares_are_for_processes_of_the_same_user() {
    let mount = Mount::with(Options::default().arg("--allow-other"));
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(mount.scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let names = files(&mount, 1, MIB);
    let ctl = Ctl::new(&mount);
    let lease = ctl.lease_for(&ranges(&ctl, &names), 2);
    let mut other = python(
        &mount,
        "os.setreuid(6000, 6000)\nctl = ctl_open()\nsay(errno_of(ctl_attach, ctl, int(hear())))\n\
         say(len(open('.ctl/leases').readlines()))\n\
         say(ctl_lease(ctl, [ctl_range(ctl, 'f0')], parties=2)[0])\n\
         say(len(open('.ctl/leases').readlines()))\nhear()",
    );
    other.say(&lease.to_string());
    assert_eq!(other.hear(), "EACCES");
    assert_eq!(other.hear(), "1", "others' leases are not listed");
    let theirs: u64 = other.hear().parse().unwrap();
    assert_eq!(other.hear(), "2", "but one's own");
    // Root sees all, and may take part in all.
    assert_eq!(fs::read_to_string(mount.at(".ctl/leases")).unwrap().lines().count(), 3);
    assert_eq!(ctl.attach(theirs).map(|state| state.own), Ok(1));
    other.go();
    other.end();
    wait_until("theirs has one party", || ctl.query(theirs).unwrap().0.parties == 1);
}

#[test]
fn ranges_are_given_back_one_by_one() {
    let mount = Mount::new();
    let names = files(&mount, 2, MIB);
    let ctl = Ctl::new(&mount);
    let all = ranges(&ctl, &names);
    let b = 256 << 10;
    let lease = ctl.lease(&[all[0], all[1], part(all[0], b, 2 * b)]);
    let held = |ctl: &Ctl| ctl.query(lease).unwrap().1.iter().map(|range| range.held).collect::<Vec<_>>();
    assert_eq!(held(&ctl), [MIB, MIB, 2 * b]);
    let give = |ranges: &[Range]| ctl.release_ranges(lease, 0, ranges);
    // What is wrong with one is wrong with all, and changes nothing.
    let wrong = [
        item(3),
        item(u64::MAX),
        node(12345),
        all[0],
        part(item(0), 1, u64::MAX),
        Range { unit: 5, ..item(0) },
        Range { reserved: 1, ..item(0) },
        Range { generation: 1, ..item(0) },
    ];
    for range in wrong {
        assert_eq!(give(&[item(1), range]), Err(Errno::EINVAL), "{range:?}");
    }
    assert_eq!(give(&[item(1), Range { unit: abi::UNIT_BLOCKS, ..item(0) }]), Err(Errno::EOPNOTSUPP));
    assert_eq!(held(&ctl), [MIB, MIB, 2 * b]);
    // Of one range, by its place: a hole in the middle, twice, and beyond its end.
    give(&[part(item(0), b, 10), part(item(0), b, 10), part(item(0), MIB, 5)]).unwrap();
    assert_eq!(held(&ctl), [MIB - 10, MIB, 2 * b]);
    // Of all ranges of a file.
    let f0 = ctl.query(lease).unwrap().1[0].node;
    give(&[part(node(f0), 0, 2 * b)]).unwrap();
    assert_eq!(held(&ctl), [2 * b, MIB, b]);
    assert_eq!(mount.stat("leased_bytes"), 2 * MIB, "a slab stays whole");
    give(&[part(node(f0), 0, 0)]).unwrap();
    assert_eq!(held(&ctl), [0, MIB, 0]);
    assert_eq!((mount.stat("leased_bytes"), xattr(&mount, "f0").as_str()), (MIB, "0"));
    let left = give(&[item(1)]).unwrap();
    assert_eq!(left.state, abi::LEASE_GONE, "with the last range the lease goes");
    check_none_left(&mount);

    // A range is free when nobody holds it any more.
    let lease = ctl.lease_for(&all, 2);
    let rank = Ctl::new(&mount);
    rank.attach(lease).unwrap();
    let held = |ctl: &Ctl| ctl.query(lease).unwrap().1.iter().map(|range| range.held).collect::<Vec<_>>();
    ctl.release_ranges(lease, 0, &[item(0), part(item(1), 0, b)]).unwrap();
    assert_eq!(held(&rank), [MIB, MIB]);
    rank.release_ranges(lease, 0, &[part(item(1), b / 2, b)]).unwrap();
    assert_eq!(held(&rank), [MIB, MIB - b / 2]);
    rank.release_ranges(lease, 0, &[item(0)]).unwrap();
    assert_eq!(held(&ctl), [0, MIB - b / 2]);
    // What a party that goes has not given back goes with it.
    drop(rank);
    wait_until("the rank is gone", || held(&ctl) == [0, MIB - b]);
    ctl.release(lease).unwrap();
    check_none_left(&mount);

    // Not in crumbs.
    let lease = ctl.lease(&all[..1]);
    for at in 0..3 {
        let crumbs: Vec<Range> = (0..500).map(|crumb| part(item(0), (at * 500 + crumb) * 2 + 1, 1)).collect();
        let told = ctl.release_ranges(lease, 0, &crumbs);
        let expected = if at < 2 { Ok(()) } else { Err(Errno::E2BIG) };
        assert_eq!(told.map(drop), expected);
    }
    assert_eq!(ctl.query(lease).unwrap().1[0].held, MIB - 1000);
    assert_eq!(ctl.release_ranges(lease, 0, &[item(0)]).map(|left| left.state), Ok(abi::LEASE_GONE));

    // What is empty is given back by its party alone.
    fs::write(mount.at("empty"), b"").unwrap();
    let lease = ctl.lease_for(&ctl.ranges(&["empty"]), 2);
    let rank = Ctl::new(&mount);
    rank.attach(lease).unwrap();
    assert_eq!(rank.release_ranges(lease, 0, &[item(0)]).map(|left| left.state), Ok(abi::LEASE_GONE));
    assert_eq!(ctl.query(lease).map(|(left, _)| (left.parties, left.own)), Ok((1, 1)));
    ctl.release(lease).unwrap();
    check_none_left(&mount);

    // One of several own shares, or all of them.
    let lease = ctl.lease_for(&all, 2);
    let held = || ctl.query(lease).unwrap().1.iter().map(|range| range.held).collect::<Vec<_>>();
    ctl.release_ranges(lease, 0, &[item(0)]).unwrap();
    assert_eq!(held(), [MIB, MIB], "the other share has it");
    ctl.release_ranges(lease, 0, &[item(0)]).unwrap();
    assert_eq!(held(), [0, MIB]);
    ctl.release_ranges(lease, abi::RELEASE_ALL_SHARES, &[item(1)]).unwrap();
    check_none_left(&mount);
}

#[test]
fn no_client_gets_more_than_its_part() {
    let mount = Mount::with(Options::default().arg("--lease-client-max=8MiB").arg("--lease-max=10MiB"));
    let names = files(&mount, 6, 2 * MIB);
    let ctl = Ctl::new(&mount);
    assert_eq!(
        ctl.hello().map(|hello| (hello.lease_bytes_max, hello.lease_client_bytes_max)),
        Ok((10 << 20, 8 << 20))
    );
    let all = ranges(&ctl, &names);
    let errno = |ctl: &Ctl, ranges: &[Range]| Errno::from_raw(ctl.acquire(ranges, 1, 0).0.lease_errno);
    assert_eq!(errno(&ctl, &all[..5]), Errno::EDQUOT, "whole or not at all");
    assert_eq!(mount.stat("leased_bytes"), 0);
    let first = ctl.lease(&all[..4]);
    // Another handle of the same process has the same part.
    let second = Ctl::new(&mount);
    let small = ranges(&second, &names[..1]);
    assert_eq!(errno(&second, &small), Errno::EDQUOT);
    // One block of a slab keeps all of it.
    assert_eq!(errno(&second, &[part(ranges(&second, &names[5..])[0], 0, 1)]), Errno::EDQUOT);
    // Another process has its own part, but all of them not more than there is.
    let mut other = python(
        &mount,
        "ctl = ctl_open()\nsay(ctl_lease(ctl, [ctl_range(ctl, 'f4'), ctl_range(ctl, 'f5')])[1])\n\
         say(ctl_lease(ctl, [ctl_range(ctl, 'f4')])[1])\nhear()",
    );
    assert_eq!(other.hear(), (Errno::ENOSPC as i32).to_string());
    assert_eq!(other.hear(), "0");
    assert_eq!((mount.stat("leases"), mount.stat("leased_bytes")), (2, 10 << 20));
    // With what is given back, one gets something else.
    ctl.release_ranges(first, 0, &[item(0)]).unwrap();
    assert_eq!(errno(&second, &small), Errno::from_raw(0));
    drop(second);
    other.go();
    other.end();
    ctl.release(first).unwrap();
    check_none_left(&mount);
    assert_eq!((mount.stat("leases_denied_client"), mount.stat("leases_denied_full")), (3, 1));
    mount.check_bounds();

    // None at all.
    let mount = Mount::with(Options::default().arg("--lease-max=0B"));
    let names = files(&mount, 1, MIB);
    let ctl = Ctl::new(&mount);
    assert_eq!(errno(&ctl, &ranges(&ctl, &names)), Errno::EDQUOT);
    fs::write(mount.at("empty"), b"").unwrap();
    assert_ne!(ctl.acquire(&ctl.ranges(&["empty"]), 1, 0).0.lease, 0, "nothing costs nothing");
}

#[test]
fn a_session_has_so_many_leases_and_no_more() {
    let mount = Mount::new();
    files(&mount, 1, 100);
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["f0"]);
    let most = ctl.hello().unwrap().leases_max;
    let leases: HashSet<u64> = (0..most).map(|_| ctl.lease(&range)).collect();
    assert_eq!(leases.len() as u32, most);
    let (head, _) = ctl.acquire(&range, 1, 0);
    assert_eq!((head.lease, head.lease_errno), (0, Errno::EMFILE as i32));
    ctl.release(*leases.iter().next().unwrap()).unwrap();
    ctl.lease(&range);
    drop(ctl);
    check_none_left(&mount);

    // And a process has so many ranges of leases, in however many sessions.
    let sessions = [Ctl::new(&mount), Ctl::new(&mount)];
    let windows = sessions.each_ref().map(|ctl| vec![ctl.ranges(&["f0"])[0]; 500]);
    for at in 0..(1 << 17) / 500 {
        sessions[at % 2].lease(&windows[at % 2]);
    }
    let (head, _) = sessions[0].acquire(&windows[0], 1, 0);
    assert_eq!((head.lease, head.lease_errno), (0, Errno::EMFILE as i32));
    sessions[0].lease(&windows[0][..(1 << 17) % 500]);
    let (head, _) = sessions[1].acquire(&windows[1][..1], 1, 0);
    assert_eq!((head.lease, head.lease_errno), (0, Errno::EMFILE as i32));
    drop(sessions);
    check_none_left(&mount);
    assert_eq!(mount.stat("leases_denied_count"), 3);
    let ctl = Ctl::new(&mount);
    ctl.lease(&ctl.ranges(&["f0"]));
}

#[test]
fn what_is_neither_released_nor_extended_ends() {
    let mount = Mount::with(Options::default().arg("--lease-ttl-max=10m"));
    let names = files(&mount, 2, MIB);
    let ctl = Ctl::new(&mount);
    let all = ranges(&ctl, &names);
    let long = ctl.acquire(&all[..1], 1, u32::MAX).0;
    assert_eq!(long.ttl_ms, 600_000, "no longer than one may");
    let rank = Ctl::new(&mount);
    let short = ctl.acquire(&all, 2, 1).0.lease;
    let attached = rank.attach(short);
    wait_until("its time is over", || mount.stat("leases_expired") == 1);
    assert_eq!((mount.stat("leases"), mount.stat("leased_bytes")), (1, MIB));
    let expired = abi::LEASE_GONE | abi::LEASE_EXPIRED;
    assert_eq!(ctl.extend(short, 0), Err(Errno::ETIME));
    assert_eq!(ctl.query(short).unwrap_err(), Errno::ETIME);
    assert_eq!(ctl.release(short).map(|state| state.state), Ok(expired));
    if attached.is_ok() {
        assert_eq!(rank.release(short).map(|state| state.state), Ok(expired));
    }
    let line = format!("lease {short} of process {} (", std::process::id());
    assert!(mount.events().contains(&line), "{}", mount.events());
    // One that is extended in time lives.
    let kept = ctl.acquire(&all, 1, 30_000).0.lease;
    assert!(ctl.extend(kept, 500_000).unwrap().ttl_ms > 30_000);
    assert!(ctl.extend(kept, 0).unwrap().ttl_ms <= 60_000);
    drop((ctl, rank));
    check_none_left(&mount);
}

#[test]
fn many_leases_come_and_go_and_nothing_is_left() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    files(&mount, 8, 300_000);
    let script = "ctl = ctl_open()\n\
         ranges = [ctl_range(ctl, 'f%d' % at) for at in range(8)]\n\
         for at in range(2000):\n    \
             lease, error = ctl_lease(ctl, ranges[at % 7:], parties=1 + at % 3)\n    \
             assert lease, error\n    \
             for _ in range(at % 4): ctl_release(ctl, lease)\n    \
             if at % 400: ctl_release(ctl, lease, 1)\n\
         os.close(ctl)\nsay('done')";
    let mut clients: Vec<Client> = (0..3).map(|_| python(&mount, script)).collect();
    clients.iter_mut().for_each(|client| client.at("done"));
    check_none_left(&mount);
    assert_eq!(mount.stat("leases_granted"), 6000);
    assert_eq!(mount.stat("interned_names"), 0);
}
