//! Where are these ranges? One answer for one instant, with everything counted, and nothing hidden behind it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;

use common::ctl::{Ctl, node, node_of, part, status};
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi::{self, Range, RangeState};
use nix::errno::Errno;

const BLOCK: usize = 256 << 10;

/// Blocks, blocks in L1, bytes, bytes in L1.
fn counts(state: &RangeState) -> (u32, u32, u64, u64) {
    (state.blocks, state.blocks_l1, state.bytes, state.bytes_l1)
}

/// A file for shared use, which is in L1 block by block.
fn slot_file(mount: &Mount, name: &str, content: &[u8]) -> File {
    let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(mount.at(name));
    let file = options.unwrap();
    file.write_all_at(content, 0).unwrap();
    file
}

#[test]
fn ranges_are_counted_in_blocks_and_bytes() {
    let mount = Mount::new();
    let len = 3 * BLOCK + 100;
    fs::write(mount.at("f"), bytes(1, len)).unwrap();
    fs::write(mount.at("small"), bytes(2, 10)).unwrap();
    fs::write(mount.at("empty"), b"").unwrap();
    let ctl = Ctl::new(&mount);
    let all = ctl.ranges(&["f", "small", "empty", "none"]);
    let f = all[0];
    let b = BLOCK as u64;
    let window = [
        f,
        part(f, 0, 1),
        part(f, b - 1, 2),
        part(f, b, b),
        part(f, 3 * b, 0),
        part(f, 3 * b + 99, 1),
        part(f, 3 * b + 100, 0),
        all[1],
        all[2],
    ];
    let (head, states) = ctl.classify(&window);
    let expected: [(u32, u64); 9] =
        [(4, 3 * b + 100), (1, 1), (2, 2), (1, b), (1, 100), (1, 1), (0, 0), (1, 10), (0, 0)];
    for ((state, (blocks, bytes)), range) in states.iter().zip(expected).zip(&window) {
        assert_eq!(status(state), Ok(()));
        assert_eq!((state.tier, counts(state)), (abi::TIER_L1, (blocks, blocks, bytes, bytes)), "{range:?}");
    }
    assert_eq!((head.tier, head.absent, head.failed), (abi::TIER_L1, 0, 0));
    assert_eq!((head.blocks, head.blocks_l1), (11, 11));
    assert_eq!(head.bytes, expected.iter().map(|(_, bytes)| bytes).sum::<u64>());
    assert_eq!((head.bytes_l1, head.lease, head.lease_errno), (head.bytes, 0, 0));

    let (head, states) = ctl.classify(&[f, all[3], part(f, u64::MAX / 2, 1)]);
    assert_eq!((head.tier, head.absent, head.failed), (abi::TIER_MIXED, 1, 2), "not all of it is there");
    assert_eq!(states.iter().map(|state| state.tier).collect::<Vec<_>>(), [1, 0, 0]);
    let (head, _) = ctl.classify(&[all[3], all[3]]);
    assert_eq!((head.tier, head.absent, head.failed, head.blocks), (abi::TIER_ABSENT, 2, 2, 0));
    let (head, _) = ctl.classify(&all[2..]);
    assert_eq!((head.tier, head.absent), (abi::TIER_L2, 1), "an empty file is no reason to begin");
}

#[test]
fn files_are_where_the_tiers_have_them() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let (len, slots) = (5 * BLOCK, 6 * BLOCK + 10);
    fs::write(mount.at("cold"), bytes(1, len)).unwrap();
    drop(slot_file(&mount, "slots", &bytes(2, slots)));
    mount.drain();
    mount.restart();
    fs::write(mount.at("warm"), bytes(3, len)).unwrap();
    let ctl = Ctl::new(&mount);
    let all = ctl.ranges(&["warm", "slots", "cold"]);
    let tiers = || {
        let (head, states) = ctl.classify(&all);
        let reads = mount.stat("read_l2_bytes");
        (head.tier, states.iter().map(|state| state.tier).collect::<Vec<_>>(), reads)
    };
    assert_eq!(tiers(), (abi::TIER_MIXED, vec![1, 3, 3], 0), "asking reads nothing");
    assert_eq!(ctl.classify(&all[1..]).0.tier, abi::TIER_L2);

    let file = File::open(mount.at("slots")).unwrap();
    let mut one = [0; 10];
    file.read_exact_at(&mut one, 2 * BLOCK as u64 + 5).unwrap();
    mount.wait_for("promotions_in_flight", |count| count == 0);
    let (head, states) =
        ctl.classify(&[all[1], part(all[1], 2 * BLOCK as u64, 7), part(all[1], 0, BLOCK as u64)]);
    assert_eq!(counts(&states[0]), (7, 1, slots as u64, BLOCK as u64));
    assert_eq!(states.iter().map(|state| state.tier).collect::<Vec<_>>(), [2, 1, 3]);
    assert_eq!((head.blocks, head.blocks_l1, head.tier), (9, 2, abi::TIER_MIXED));
    assert_eq!((head.bytes, head.bytes_l1), (slots as u64 + 7 + BLOCK as u64, BLOCK as u64 + 7));

    assert_eq!(fs::read(mount.at("slots")).unwrap(), bytes(2, slots));
    assert_eq!(fs::read(mount.at("cold")).unwrap(), bytes(1, len));
    mount.wait_for("promotions_in_flight", |count| count == 0);
    assert_eq!(tiers().1, [1, 1, 1]);
    for (key, expected) in [("classified_l1", 1), ("classified_mixed", 2), ("classified_l2", 1)] {
        assert_eq!(mount.stat(key), expected, "{key}");
    }
    // What an extended attribute says of a file and what the ioctl says is one thing.
    for (at, name) in ["warm", "slots", "cold"].into_iter().enumerate() {
        let path = mount.at(name);
        let output = std::process::Command::new("getfattr")
            .args(["--only-values", "-n", "user.kv.tier"])
            .arg(&path)
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "l1", "{name} {}", tiers().1[at]);
    }
}

/// A hole is zeros: it is in L1 as soon as L1 has anything to do with the file.
#[test]
fn holes_need_no_memory() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let file = slot_file(&mount, "s", &bytes(1, BLOCK));
    file.write_all_at(&bytes(2, BLOCK), 5 * BLOCK as u64).unwrap();
    file.set_len(8 * BLOCK as u64 + 10).unwrap();
    drop(file);
    mount.drain();
    mount.restart();
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["s"])[0];
    let len = 8 * BLOCK as u64 + 10;
    let state = |range: Range| counts(&ctl.classify(&[range]).1[0]);
    assert_eq!(state(range), (9, 0, len, 0));
    let file = File::open(mount.at("s")).unwrap();
    file.read_exact_at(&mut [0; 10], 5 * BLOCK as u64).unwrap();
    mount.wait_for("promotions_in_flight", |count| count == 0);
    assert_eq!(state(range), (9, 8, len, len - BLOCK as u64), "all but the first block");
    assert_eq!(state(part(range, BLOCK as u64, 0)), (8, 8, len - BLOCK as u64, len - BLOCK as u64));
    let (head, _) = ctl.acquire(&[part(range, BLOCK as u64, 0)], 1, 0);
    assert_ne!(head.lease, 0);
    // Only the block that has bytes takes memory.
    assert_eq!(mount.stat("leased_bytes"), BLOCK as u64);
}

/// Nobody keeps the daemon from serving others by asking after what is large and nearly nothing.
#[test]
fn a_request_looks_at_so_many_blocks_and_no_more() {
    if memory_only() {
        return;
    }
    // A file lies on one device.
    let mount = Mount::with(Options::new(128, 1536));
    let file = slot_file(&mount, "s", b"x");
    let blocks = 400;
    file.set_len(blocks * BLOCK as u64).unwrap();
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["s"])[0];
    let most = (1 << 18) / blocks as usize;
    let window = vec![range; most.min(abi::RANGES_MAX as usize)];
    assert!(ctl.classify(&window).1.iter().all(|state| state.status == 0));
    let size = 800;
    file.set_len(size * BLOCK as u64).unwrap();
    let most = (1 << 18) / size as usize;
    let (head, states) = ctl.classify(&vec![range; abi::RANGES_MAX as usize]);
    let told: Vec<_> = states.iter().map(status).collect();
    assert!(told[..most].iter().all(Result::is_ok));
    assert!(told[most..].iter().all(|status| *status == Err(Errno::E2BIG)), "{told:?}");
    assert_eq!(head.failed as usize, told.len() - most);
}

#[test]
fn what_is_written_and_what_is_stored_shows() {
    let mount = Mount::new();
    let file = slot_file(&mount, "s", &bytes(1, 2 * BLOCK));
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["s"])[0];
    let flags = || {
        let (_, states) = ctl.classify(&[range]);
        assert_eq!((status(&states[0]), states[0].tier), (Ok(()), abi::TIER_L1));
        states[0].flags
    };
    assert_eq!(flags(), abi::STATE_OPEN);
    assert_eq!(ctl.lookup(&[range]).unwrap().1[0].flags, abi::STATE_OPEN);
    drop(file);
    if !memory_only() {
        mount.drain();
        common::run::wait_until("it is stored", || flags() == abi::STATE_DURABLE);
    }
    let again = OpenOptions::new().write(true).open(mount.at("s")).unwrap();
    assert_eq!(flags() & abi::STATE_OPEN, abi::STATE_OPEN);
    let (_, states) = ctl.classify(&[node(node_of(&again))]);
    assert_eq!(states[0].flags & abi::STATE_OPEN, abi::STATE_OPEN);
}

#[test]
fn a_window_is_as_long_as_an_ioctl_carries() {
    let mount = Mount::new();
    let names: Vec<String> = (0..abi::RANGES_MAX).map(|at| format!("f{at:03}")).collect();
    for (at, name) in names.iter().enumerate().filter(|(at, _)| at % 7 != 6) {
        fs::write(mount.at(name), bytes(at as u64, at)).unwrap();
    }
    let ctl = Ctl::new(&mount);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let ranges: Vec<Range> =
        ctl.write_names(None, &names).unwrap().into_iter().map(common::ctl::named).collect();
    let (head, states) = ctl.lookup(&ranges).unwrap();
    assert_eq!((head.prefix, head.present), (6, abi::RANGES_MAX - abi::RANGES_MAX / 7));
    for (at, state) in states.iter().enumerate().take(ranges.len()) {
        let expected = if at % 7 == 6 { Err(Errno::ENOENT) } else { Ok(at as u64) };
        assert_eq!(status(state).map(|()| state.bytes), expected, "{at}");
    }
    let (head, _) = ctl.classify(&ranges);
    assert_eq!(head.absent, abi::RANGES_MAX / 7);
}

/// A store that has returned is found by whoever asks then: the kernel sends the RELEASE that publishes it without
/// waiting for the answer.
#[test]
fn whoever_asks_after_a_close_finds_the_file() {
    let mount = Mount::new();
    let ctl = Ctl::new(&mount);
    for at in 0..300 {
        let name = format!("f{at}");
        let range = ctl.ranges(&[&name])[0];
        let mut file = OpenOptions::new().write(true).create_new(true).open(mount.at(&name)).unwrap();
        file.write_all(b"x").unwrap();
        assert_eq!(status(&ctl.lookup(&[range]).unwrap().1[0]), Err(Errno::ENOENT));
        drop(file);
        assert_eq!(ctl.lookup(&[range]).unwrap().0.present, 1, "{name}");
    }
}

/// A descriptor that is kept open by a duplicate is waited for, but not for ever, and not once for each range.
#[test]
fn a_file_that_stays_open_is_not_waited_for_again_and_again() {
    let mount = Mount::with(Options::default().arg("--publish-wait=1s"));
    let ctl = Ctl::new(&mount);
    let names: Vec<String> = (0..20).map(|at| format!("f{at}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let ranges = ctl.ranges(&names);
    let mut kept = Vec::new();
    for name in &names {
        let file = OpenOptions::new().write(true).create_new(true).open(mount.at(name)).unwrap();
        drop(file.try_clone().unwrap());
        kept.push(file);
    }
    let before = mount.stat("publish_waits");
    assert_eq!(ctl.lookup(&ranges).unwrap().0.present, 0);
    let waits = mount.stat("publish_waits") - before;
    assert!((1..=2).contains(&waits), "{waits} waits for twenty files");
    drop(kept);
    common::run::wait_until("the files", || ctl.lookup(&ranges).unwrap().0.present == 20);
}

#[test]
fn one_generation_is_one_answer() {
    let mount = Mount::new();
    fs::create_dir(mount.at("d")).unwrap();
    for at in 0..8 {
        fs::write(mount.at(&format!("d/{at}")), b"x").unwrap();
    }
    let names: Vec<String> = (0..8).map(|at| format!("d/{at}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let sessions = [Ctl::new(&mount), Ctl::new(&mount)];
    let windows = sessions.each_ref().map(|ctl| ctl.ranges(&names));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut at = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let path = mount.at(&format!("d/{}", at % 8));
                if fs::remove_file(&path).is_err() {
                    fs::write(&path, b"y").unwrap();
                }
                at += 3;
            }
        });
        let (mut same, mut other) = (0, 0);
        while same < 20 || other < 20 {
            let said = [0, 1].map(|at| sessions[at].lookup(&windows[at]).unwrap());
            if said[0].0.generation == said[1].0.generation {
                same += 1;
                let there = |states: &[RangeState]| states.iter().map(status).collect::<Vec<_>>();
                assert_eq!(there(&said[0].1), there(&said[1].1));
                assert_eq!(said[0].0.prefix, said[1].0.prefix);
            } else {
                other += 1;
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
