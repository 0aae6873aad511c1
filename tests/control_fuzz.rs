//! Requests that nobody would send: each is answered with the errno that the rules say, and leaves nothing behind.
//!
//! The rules are written down here once more, by offsets and not by structures, so that a slip in the decoder is not made
//! twice. `KVCACHEFS_TEST_FUZZ` is the number of requests to the decoder (a hundredth of it goes to a mount),
//! `KVCACHEFS_TEST_SEED` makes other ones.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;

use common::ctl::{Ctl, raw_ioctl};
use common::run::wait_until;
use common::{Mount, bytes};
use kvcachefs::abi;
use nix::errno::Errno;

/// Bytes that the structures of commands 1 to 16 have.
const HEADS: [usize; 16] = [88, 16, 32, 16, 32, 24, 80, 48, 48, 48, 48, 112, 96, 96, 48, 32];

fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn requests() -> u64 {
    env("KVCACHEFS_TEST_FUZZ", 300_000)
}

struct Dice(u64);

impl Dice {
    fn new() -> Self {
        let seed = env("KVCACHEFS_TEST_SEED", u64::from(std::process::id()));
        eprintln!("KVCACHEFS_TEST_SEED={seed}");
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.roll() >> 16) % limit.max(1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A number that means something, or is close to one that does, or is anything.
    fn number(&mut self) -> u64 {
        match self.below(9) {
            0 => 0,
            1 => self.below(4),
            2 => self.below(600),
            3 => 1 << self.below(64),
            4 => (1 << self.below(64)) - 1,
            5 => u64::MAX - self.below(3),
            6 => u64::from(u32::MAX) - self.below(2),
            _ => self.roll(),
        }
    }

    /// Names with zero bytes behind them, mostly as they have to be.
    fn names(&mut self) -> (u32, Vec<u8>) {
        let count = 1 + self.below(6);
        let mut list = Vec::new();
        for _ in 0..count {
            for at in 0..1 + self.below(4) {
                if at > 0 {
                    list.push(b'/');
                }
                match self.below(40) {
                    0 => {}
                    1 => list.extend(b"."),
                    2 => list.extend(b".."),
                    3 => list.extend([b'x'; 255]),
                    4 => list.extend([b'x'; 256]),
                    5 => list.extend(b"d/".repeat(2047)),
                    6 => list.push(self.roll() as u8),
                    _ => list.extend([b"f0", b"f1", b"dd"][self.below(3) as usize]),
                }
            }
            list.push(0);
        }
        let count = if self.chance(5) { self.number() as u32 } else { count as u32 };
        (count, list)
    }

    /// CLASSIFY of names that are there, mostly with a lease.
    fn good_request(&mut self) -> (u32, Vec<u8>) {
        let count = 1 + self.below(3) as u32;
        let mut bytes = vec![0; 80];
        bytes[..2].copy_from_slice(&1u16.to_ne_bytes());
        bytes[2] = u8::from(self.chance(80));
        bytes[4..8].copy_from_slice(&count.to_ne_bytes());
        bytes[12..16].copy_from_slice(&(self.below(4) as u32).to_ne_bytes());
        for _ in 0..count {
            let mut range = vec![0; 32];
            range[..8].copy_from_slice(&self.below(4).to_ne_bytes());
            range[24..28].copy_from_slice(&1u32.to_ne_bytes());
            bytes.extend(range);
        }
        (3 << 30 | (bytes.len() as u32) << 16 | 0x4b07, bytes)
    }

    /// One request: its number, and what goes with it.
    fn request(&mut self) -> (u32, Vec<u8>) {
        let nr = if self.chance(3) { self.below(256) as u32 } else { 1 + self.below(16) as u32 };
        let head = HEADS.get(nr.wrapping_sub(1) as usize).copied().unwrap_or(48);
        let mut bytes = vec![0; head];
        for byte in &mut bytes {
            // Mostly zeros, so that what is reserved is so at times.
            if self.chance(4) {
                *byte = self.roll() as u8;
            }
        }
        let set =
            |bytes: &mut Vec<u8>, at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let version: u16 = if self.chance(5) { self.number() as u16 } else { 1 };
        let flags: u16 = if self.chance(10) { self.number() as u16 } else { self.below(3) as u16 };
        set(&mut bytes, 0, &version.to_ne_bytes());
        set(&mut bytes, 2, &flags.to_ne_bytes());
        if self.chance(60) {
            bytes[8..].fill(0);
        }
        let count = match nr {
            3 => {
                let (count, list) = self.names();
                let len = if self.chance(5) { self.number() as u32 } else { list.len() as u32 };
                set(&mut bytes, 16, &len.to_ne_bytes());
                if self.chance(70) {
                    bytes[20] = self.below(3) as u8;
                }
                bytes.extend(list);
                count
            }
            4 => {
                let slots = self.below(4);
                for _ in 0..slots {
                    bytes.extend((self.below(8) as u32).to_ne_bytes());
                    bytes.extend((self.below(8) as u32).to_ne_bytes());
                }
                slots as u32
            }
            6 | 7 | 9 | 11 | 12 | 15 => {
                let ranges = self.below(5);
                for _ in 0..ranges {
                    bytes.extend(self.range());
                }
                ranges as u32
            }
            16 => {
                let room = self.below(100);
                bytes.extend(vec![0; room as usize]);
                room as u32
            }
            _ => 0,
        };
        if matches!(nr, 8..=11 | 13 | 14 | 16) && self.chance(80) {
            set(&mut bytes, 8, &self.below(50).to_ne_bytes());
        }
        let count = if self.chance(10) { self.number() as u32 } else { count };
        set(&mut bytes, 4, &count.to_ne_bytes());
        match self.below(20) {
            0 => bytes.truncate(self.below(bytes.len() as u64 + 1) as usize),
            1 => bytes.extend(vec![self.roll() as u8; self.below(300) as usize]),
            2 => bytes.resize(self.below(16_384) as usize, 0),
            _ => {}
        }
        bytes.truncate(16_383);
        let direction = if self.chance(3) { self.below(4) as u32 } else { 3 };
        (direction << 30 | (bytes.len() as u32) << 16 | 0x4b00 | nr, bytes)
    }

    fn range(&mut self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        let id = if self.chance(80) { self.below(8) } else { self.number() };
        for value in [
            id,
            if self.chance(50) { 0 } else { self.number() },
            if self.chance(50) { 0 } else { self.number() },
        ] {
            out.extend(value.to_ne_bytes());
        }
        let generation = match self.below(4) {
            0 => self.number() as u32,
            1 => self.below(8) as u32,
            _ => 1,
        };
        out.extend(generation.to_ne_bytes());
        out.push(if self.chance(60) { 0 } else { self.below(4) as u8 });
        out.push(if self.chance(90) { 0 } else { self.below(3) as u8 });
        out.extend((if self.chance(95) { 0 } else { self.number() as u16 }).to_ne_bytes());
        out
    }
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(bytes[at..at + 2].try_into().unwrap())
}

/// What is wrong with a list of names.
fn names_error(kind: u8, base: usize, generation: usize, count: usize, list: &[u8]) -> Option<Errno> {
    if kind > 1 || (kind == 0 && (base, generation) != (0, 0)) || list.last() != Some(&0) {
        return Some(Errno::EINVAL);
    }
    let mut names = 0;
    let mut rest = list;
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| *byte == 0).unwrap();
        let name = &rest[..end];
        rest = &rest[end + 1..];
        names += 1;
        if name.len() > 4096 {
            return Some(Errno::ENAMETOOLONG);
        }
        let mut component = 0;
        for at in 0..=name.len() {
            if at < name.len() && name[at] != b'/' {
                continue;
            }
            let part = &name[component..at];
            if part.is_empty() || part == b"." || part == b".." {
                return Some(Errno::EINVAL);
            }
            if part.len() > 255 {
                return Some(Errno::ENAMETOOLONG);
            }
            component = at + 1;
        }
    }
    (names != count).then_some(Errno::EINVAL)
}

fn flags_of(nr: usize) -> u16 {
    match nr {
        7 | 9 => 1,
        12 => 3,
        _ => 0,
    }
}

/// What docs/CONTROL.md says is wrong with a request, whoever asks.
fn expected(number: u32, bytes: &[u8]) -> Option<Errno> {
    let nr = (number & 0xff) as usize;
    if number >> 30 != 3 || number >> 8 & 0xff != 0x4b || !(1..=16).contains(&nr) {
        return Some(Errno::ENOTTY);
    }
    let head = HEADS[nr - 1];
    if bytes.len() < head {
        return Some(Errno::EINVAL);
    }
    if nr != 1 && u16_at(bytes, 0) != 1 {
        return Some(Errno::EPROTO);
    }
    if u16_at(bytes, 2) & !flags_of(nr) != 0 {
        return Some(Errno::EINVAL);
    }
    let reserved = match nr {
        3 => [21..24, 0..0, 0..0],
        4 => [12..16, 0..0, 0..0],
        7 => [37..40, 0..0, 0..0],
        8..=11 => [44..48, 0..0, 0..0],
        12 => [29..32, 54..56, 0..0],
        13 | 14 => [62..64, 68..72, 92..96],
        15 => [20..24, 0..0, 0..0],
        _ => [0..0, 0..0, 0..0],
    };
    if reserved.into_iter().any(|place| bytes[place].iter().any(|byte| *byte != 0)) {
        return Some(Errno::EINVAL);
    }
    let (count, behind) = (u32_at(bytes, 4), bytes.len() - head);
    let (most, item) = match nr {
        3 => {
            let len = u32_at(bytes, 16);
            if len > behind {
                return Some(Errno::EINVAL);
            }
            return names_error(bytes[20], u32_at(bytes, 8), u32_at(bytes, 12), count, &bytes[32..32 + len]);
        }
        4 => (2000, 8),
        6 | 7 | 12 if count == 0 => return Some(Errno::EINVAL),
        6 | 7 | 9 | 11 | 12 | 15 => (500, 32),
        16 => (usize::MAX, 1),
        _ => return None,
    };
    if count > most {
        return Some(Errno::E2BIG);
    }
    (count * item > behind).then_some(Errno::EINVAL)
}

#[test]
fn the_decoder_says_what_the_rules_say() {
    let mut dice = Dice::new();
    let mut seen: HashSet<(u32, Option<i32>)> = HashSet::new();
    for at in 0..requests() {
        let (number, bytes) = dice.request();
        let expected = expected(number, &bytes);
        assert_eq!(abi::decode(number, &bytes).err(), expected, "request {at}: {number:#x} {bytes:?}");
        seen.insert((number & 0xff, expected.map(|errno| errno as i32)));
    }
    // It has been everywhere.
    for nr in 1..=16 {
        assert!(seen.contains(&(nr, None)), "no request {nr} was right");
        assert!(seen.contains(&(nr, Some(Errno::EINVAL as i32))), "no request {nr} was wrong");
    }
    for (nr, errno) in [
        (3, Errno::ENAMETOOLONG),
        (4, Errno::E2BIG),
        (6, Errno::E2BIG),
        (7, Errno::E2BIG),
        (9, Errno::E2BIG),
        (12, Errno::E2BIG),
        (15, Errno::E2BIG),
    ] {
        assert!(seen.contains(&(nr, Some(errno as i32))), "{nr} never was {errno}");
    }
}

#[test]
fn writes_of_names_are_what_the_rules_say() {
    let mut dice = Dice::new();
    for at in 0..requests() / 10 {
        let (count, list) = dice.names();
        let mut bytes = vec![0; 24];
        bytes[..4].copy_from_slice(b"KVNM");
        bytes[4..6].copy_from_slice(&1u16.to_ne_bytes());
        bytes[6] = dice.below(3) as u8;
        bytes[16..20].copy_from_slice(&count.to_ne_bytes());
        bytes[20..24].copy_from_slice(&(list.len() as u32).to_ne_bytes());
        bytes.extend(list);
        if dice.chance(20) {
            let place = dice.below(24) as usize;
            bytes[place] = dice.roll() as u8;
        }
        if dice.chance(10) {
            bytes.truncate(dice.below(bytes.len() as u64 + 1) as usize);
        }
        let expected = if bytes.len() < 24
            || bytes[..4] != *b"KVNM"
            || bytes[7] != 0
            || u32_at(&bytes, 20) != bytes.len() - 24
        {
            Some(Errno::EINVAL)
        } else if u16_at(&bytes, 4) != 1 {
            Some(Errno::EPROTO)
        } else {
            names_error(bytes[6], u32_at(&bytes, 8), u32_at(&bytes, 12), u32_at(&bytes, 16), &bytes[24..])
        };
        assert_eq!(abi::names_in_write(&bytes).err(), expected, "write {at}: {bytes:?}");
    }
}

/// What a request that is right as such may fail with.
fn may_fail_with(nr: u32) -> &'static [Errno] {
    match nr {
        1 => &[Errno::EPROTO],
        3 => &[Errno::ESTALE, Errno::ENOSPC],
        // Of a file, not of a handle.
        5 => &[Errno::ENOTTY],
        8 | 11 => &[Errno::ENOENT, Errno::ETIME],
        9 => &[Errno::ENOENT, Errno::EINVAL, Errno::EOPNOTSUPP],
        10 => &[Errno::ENOENT, Errno::ETIME, Errno::EINVAL, Errno::EBUSY, Errno::EMFILE],
        13 | 14 => &[Errno::ENOENT],
        // Not yet.
        15 | 16 => &[Errno::EOPNOTSUPP],
        _ => &[],
    }
}

#[test]
fn a_mount_stands_whatever_it_is_asked() {
    let mount = Mount::new();
    fs::create_dir(mount.at("dd")).unwrap();
    for (at, name) in ["f0", "f1", "dd/f0", "dd/f1"].into_iter().enumerate() {
        fs::write(mount.at(name), bytes(at as u64, 400_000)).unwrap();
    }
    let mut dice = Dice::new();
    let plain = File::open(mount.at("f0")).unwrap();
    // With names that its requests hit at times.
    let open = || {
        let ctl = Ctl::new(&mount);
        ctl.intern(&["f0", "f1", "dd/f0", "dd/f1"]);
        ctl
    };
    let mut handles = [open(), open()];
    let (mut right, mut granted) = (0, 0);
    for at in 0..requests() / 100 {
        if dice.chance(1) {
            handles[dice.below(2) as usize] = open();
        }
        if dice.chance(2) {
            let (count, list) = dice.names();
            let head = abi::NamesHeader {
                magic: abi::NAMES_MAGIC,
                version: 1,
                count,
                bytes: list.len() as u32,
                ..Default::default()
            };
            let message = [zerocopy::IntoBytes::as_bytes(&head), &list].concat();
            let written = (&handles[0].0).write(&message);
            let wrong = names_error(0, 0, 0, count as usize, &list);
            assert_eq!(
                written.err().and_then(|error| error.raw_os_error()).map(Errno::from_raw),
                wrong,
                "{list:?}"
            );
        }
        let (number, bytes) = if dice.chance(10) { dice.good_request() } else { dice.request() };
        let on_file = dice.chance(3);
        let fd = if on_file { plain.as_raw_fd() } else { handles[dice.below(2) as usize].0.as_raw_fd() };
        let (result, back) = raw_ioctl(fd, number, &bytes);
        let nr = number & 0xff;
        let told = result.err();
        match expected(number, &bytes) {
            _ if on_file && (nr != 5 || number >> 30 != 3) => assert_eq!(told, Some(Errno::ENOTTY)),
            None if on_file => assert_eq!(told, None),
            _ if nr == 5 && !on_file => assert_eq!(told, Some(Errno::ENOTTY)),
            Some(errno) => assert_eq!(told, Some(errno), "request {at}: {number:#x} {bytes:?}"),
            None => match told {
                None => right += 1,
                Some(errno) => {
                    assert!(
                        may_fail_with(nr).contains(&errno),
                        "request {at}: {errno} for {number:#x} {bytes:?}"
                    );
                }
            },
        }
        if nr == 12 && told.is_none() {
            // It ended in the call: nothing here is anywhere but in L1.
            assert!(matches!(back[52], 0 | 3 | 4), "request {at}: state {}", back[52]);
        }
        if nr == 7 && told.is_none() {
            granted += u64::from(u64::from_ne_bytes(back[24..32].try_into().unwrap()) != 0);
        }
        if told.is_some() && !(nr == 1 && told == Some(Errno::EPROTO)) {
            assert!(back[..bytes.len()] == bytes, "an error brings no answer");
        }
    }
    assert!(right > 0 && granted > 0, "{right} right, {granted} leases");
    drop((handles, plain));
    wait_until("no session is left", || mount.stat("control_sessions") == 0);
    for gauge in [
        "hints_running",
        "hints_queued",
        "lease_aside_bytes",
        "leases",
        "leased_bytes",
        "interned_names",
        "waiting_for_leases",
    ] {
        assert_eq!(mount.stat(gauge), 0, "{gauge}");
    }
    for (at, name) in ["f0", "f1", "dd/f0", "dd/f1"].into_iter().enumerate() {
        assert!(fs::read(mount.at(name)).unwrap() == bytes(at as u64, 400_000), "{name}");
    }
    mount.check_quiet();
}
