//! Leases and tickets come and go by the thousand, from several processes, and nothing is left of them: no budget, no
//! gauge, no memory of the daemon's.
//!
//! 8,000 cycles; `KVCACHEFS_TEST_CYCLES=1000000` makes a million.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use client::Watchdog;
use common::ctl::{Ctl, header, parted};
use common::run::wait_until;
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi::{self, Range, TicketState};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

const PROCESSES: u64 = 4;
const WARM: usize = 8;
const COLD: usize = 64;
const SIZE: usize = 1_500_000;

fn cycles() -> u64 {
    std::env::var("KVCACHEFS_TEST_CYCLES").map_or(8_000, |cycles| cycles.parse().unwrap())
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A session, with its windows.
struct Session {
    ctl: Ctl,
    warm: Vec<Range>,
    cold: Vec<Range>,
}

impl Session {
    fn new(mount: &Path) -> Self {
        let ctl = Ctl::open(&mount.join(".ctl/prefetch"));
        ctl.hello().unwrap();
        let name = |kind: &str, at: usize| format!("{kind}{at}");
        let ranges = |kind: &str, count: usize| {
            let names: Vec<String> = (0..count).map(|at| name(kind, at)).collect();
            ctl.ranges(&names.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let (warm, cold) = (ranges("warm", WARM), ranges("cold", COLD));
        Self { ctl, warm, cold }
    }

    fn prefetch(&self, ranges: &[Range], flags: u16, random: &mut Random) -> abi::Prefetch {
        let head = abi::Prefetch {
            header: header(flags, ranges.len()),
            tag: 7,
            deadline_ms: if random.below(8) == 0 { 1 } else { 0 },
            priority: random.below(3) as u8,
            ..abi::Prefetch::default()
        };
        parted::<_, abi::RangeState>(&self.ctl.call(abi::Command::Prefetch, &head, ranges).unwrap()).0
    }

    fn cancel(&self, ticket: u64) {
        let mut head = abi::Ticket { header: header(0, 0), ..abi::Ticket::default() };
        head.state.ticket = ticket;
        self.ctl.call::<_, u8>(abi::Command::Cancel, &head, &[]).unwrap();
    }

    /// Waits until this ticket has ended, and says how.
    fn end(&self, ticket: u64) -> TicketState {
        loop {
            poll(&mut [PollFd::new(self.ctl.0.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
            let mut read = [0; size_of::<TicketState>()];
            assert_eq!((&self.ctl.0).read(&mut read).unwrap(), read.len());
            let end = parted::<TicketState, u8>(&read).0;
            assert_eq!(end.tag, 7);
            if end.ticket == ticket {
                return end;
            }
        }
    }
}

#[test]
#[ignore = "a process of the test below"]
fn client_of_the_soak() {
    let Ok(mount) = std::env::var("SOAK_MOUNT") else { return };
    let mount = PathBuf::from(mount);
    let (seed, cycles): (u64, u64) = (
        std::env::var("SOAK_SEED").unwrap().parse().unwrap(),
        std::env::var("SOAK_CYCLES").unwrap().parse().unwrap(),
    );
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed << 32 | seed);
    let mut session = Session::new(&mount);
    for _ in 0..cycles {
        match random.below(100) {
            // A lease, given back in one of the ways there are, or left to whoever closes the handle.
            0..60 => {
                let from = random.below(WARM as u64) as usize;
                let window = &session.warm[from..WARM.min(from + 2)];
                let parties = 1 + random.below(3) as u32;
                let (head, states) = session.ctl.acquire(window, parties, 0);
                if head.lease == 0 {
                    // Others have what there is.
                    assert_eq!(head.lease_errno, nix::errno::Errno::ENOSPC as i32, "{head:?} {states:?}");
                    continue;
                }
                let flags = if random.below(2) == 0 { abi::RELEASE_ALL_SHARES } else { 0 };
                for _ in 0..=random.below(u64::from(parties)) {
                    session.ctl.release_ranges(head.lease, flags, &[]).unwrap();
                }
                if flags == 0 {
                    session.ctl.release_ranges(head.lease, abi::RELEASE_ALL_SHARES, &[]).unwrap();
                }
            }
            // A hint, with a lease or without, and its end.
            60..98 => {
                let from = random.below(COLD as u64 - 4) as usize;
                let window = session.cold[from..from + 1 + random.below(4) as usize].to_vec();
                let flags = random.below(2) as u16 * abi::PREFETCH_LEASE;
                let said = session.prefetch(&window, flags, &mut random);
                let lease = match said.ticket {
                    0 => said.lease,
                    ticket => {
                        if random.below(2) == 0 {
                            session.cancel(ticket);
                        }
                        let end = session.end(ticket);
                        let states = [abi::TICKET_DONE, abi::TICKET_CANCELLED, abi::TICKET_DENIED];
                        assert!(states.contains(&end.state), "{end:?}");
                        end.lease
                    }
                };
                if lease != 0 {
                    session.ctl.release_ranges(lease, abi::RELEASE_ALL_SHARES, &[]).unwrap();
                }
            }
            // Everything is left to the kernel, with a lease, and a ticket whose end nobody reads.
            _ => {
                session.ctl.acquire(&session.warm[..2], 1, 0);
                session.prefetch(&session.cold[..8], abi::PREFETCH_LEASE, &mut random);
                session = Session::new(&mount);
            }
        }
    }
}

/// What must be as before once nobody asks any more.
const GAUGES: [&str; 7] = [
    "leases",
    "leased_bytes",
    "control_sessions",
    "interned_names",
    "hints_running",
    "hints_queued",
    "promotions_in_flight",
];

fn run(mount: &Mount, cycles: u64, seed: u64) {
    let before = GAUGES.map(|gauge| mount.stat(gauge));
    let process = |at: u64| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "client_of_the_soak", "--nocapture"])
            .env("SOAK_MOUNT", mount.path())
            .env("SOAK_SEED", (seed + at).to_string())
            .env("SOAK_CYCLES", (cycles / PROCESSES).to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let clients: Vec<Child> = (1..=PROCESSES).map(process).collect();
    for mut client in clients {
        assert!(client.wait().unwrap().success());
    }
    for (gauge, before) in GAUGES.into_iter().zip(before) {
        wait_until(&format!("{gauge} is {before} again"), || mount.stat(gauge) == before);
    }
}

fn anonymous_kib(mount: &Mount) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn leases_and_tickets_come_and_go_and_nothing_is_left() {
    // Of the cold files about half have room in L1; without L2 all of them.
    let mount = Mount::with(Options::new(if memory_only() { 192 } else { 64 }, 512));
    let _watchdog = Watchdog::within(&mount, Duration::from_secs(if cycles() > 8_000 { 3600 } else { 120 }));
    for at in 0..COLD {
        std::fs::write(mount.at(&format!("cold{at}")), bytes(at as u64, SIZE)).unwrap();
    }
    for at in 0..WARM {
        std::fs::write(mount.at(&format!("warm{at}")), bytes(1000 + at as u64, SIZE)).unwrap();
    }
    mount.drain();
    // These stay in L1.
    let holder = Session::new(mount.path());
    holder.ctl.lease(&holder.warm);
    // What the daemon keeps for good it has after a part of it.
    run(&mount, cycles() / 10, 0);
    let before = anonymous_kib(&mount);
    run(&mount, cycles(), 100);
    let after = anonymous_kib(&mount);
    assert!(after < before + 16_384, "the daemon has grown from {before} KiB to {after} KiB");
    drop(holder);
    mount.check_quiet();
}
