//! Tickets on a real handle: poll(2) and epoll(7) wait for their ends, each end is read once, and they go with the handle.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::process::{Command, Stdio};

use common::ctl::{Ctl, named};
use common::run::wait_until;
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi::{self, TicketState};
use nix::errno::Errno;
use nix::poll::PollFlags;

const SIZE: usize = 4 << 20;
/// Longer than anything takes that does not hang.
const LONG: u16 = 60_000;

/// A mount with files that are not in L1.
fn cold(options: Options, count: u64) -> (Mount, Vec<String>) {
    let mut mount = Mount::with(options);
    let names: Vec<String> = (0..count).map(|at| format!("f{at}")).collect();
    for (at, name) in (0..).zip(&names) {
        fs::write(mount.at(name), bytes(at, SIZE)).unwrap();
    }
    mount.restart();
    (mount, names)
}

fn open(mount: &Mount) -> Ctl {
    let ctl = Ctl::open(&mount.at(".ctl/prefetch"));
    ctl.hello().unwrap();
    ctl
}

fn ranges(ctl: &Ctl, names: &[String]) -> Vec<abi::Range> {
    ctl.ranges(&names.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The ends of so many tickets, each after a wait.
fn wait_for(ctl: &Ctl, count: usize) -> Vec<TicketState> {
    let mut all = Vec::new();
    while all.len() < count {
        assert!(ctl.poll(LONG).contains(PollFlags::POLLIN), "{all:?} and no more");
        all.extend(ctl.ends(1).unwrap());
    }
    assert_eq!(ctl.ends(1), Err(Errno::EAGAIN), "each is read once");
    all
}

#[test]
fn poll_waits_for_the_end_of_a_ticket() {
    if memory_only() {
        return;
    }
    let (mount, names) = cold(Options::default(), 6);
    let ctl = open(&mount);
    assert_eq!(ctl.ends(1), Err(Errno::EAGAIN));
    assert!(!ctl.poll(0).contains(PollFlags::POLLIN), "there is nothing to read");
    let all = ranges(&ctl, &names);
    for (at, range) in all.iter().enumerate() {
        let head = abi::Prefetch { tag: 100 + at as u64, ..abi::Prefetch::default() };
        let (head, states) = ctl.prefetch_as(head, &[*range]);
        assert!(matches!(head.state, abi::TICKET_RUNNING | abi::TICKET_QUEUED), "{head:?}");
        assert_eq!((head.bytes_to_read, states[0].blocks_l1), (SIZE as u64, 0));
    }
    let mut ends = wait_for(&ctl, 6);
    ends.sort_by_key(|end| end.tag);
    for (at, end) in ends.iter().enumerate() {
        assert_eq!((end.tag, end.state, end.status), (100 + at as u64, abi::TICKET_DONE, 0), "{end:?}");
        assert_eq!((end.bytes, end.kind), (SIZE as u64, abi::TICKET_PREFETCH));
        assert_eq!(ctl.ticket(end.ticket).unwrap_err(), Errno::ENOENT);
    }
    assert_eq!(ctl.classify(&all).0.tier, abi::TIER_L1);
    for (at, name) in (0..).zip(&names) {
        assert!(fs::read(mount.at(name)).unwrap() == bytes(at, SIZE), "{name}");
    }
    assert_eq!(mount.stat("hints_done"), 6);
    assert_eq!(mount.stat("hint_unread_bytes"), 0);
    mount.check_quiet();
}

#[test]
fn epoll_is_woken_whether_by_level_or_by_edge() {
    if memory_only() {
        return;
    }
    for edge in ["0", "select.EPOLLET"] {
        let (mount, _) = cold(Options::default(), 3);
        let script = format!(
            "import fcntl, os, select\n{}\n\
             fd = ctl_open()\n\
             epoll = select.epoll()\n\
             epoll.register(fd, select.EPOLLIN | {edge})\n\
             assert epoll.poll(0) == []\n\
             for at in range(3):\n    \
                 data = struct.pack('HHI', 1, 1, 1) + bytes(104) + ctl_range(fd, 'f%d' % at)\n    \
                 ctl_ioctl(fd, 12, data)\n    \
                 woken = epoll.poll({LONG} / 1000)\n    \
                 assert woken == [(fd, select.EPOLLIN)], woken\n    \
                 end = os.read(fd, 4096)\n    \
                 assert len(end) == 64 and end[52] == 3, end\n    \
                 assert ctl_release(fd, struct.unpack_from('Q', end, 16)[0])[3] == 1\n",
            common::ctl::PYTHON
        );
        let output =
            Command::new("python3").args(["-c", &script]).current_dir(mount.path()).output().unwrap();
        assert!(output.status.success(), "edge {edge}: {}", String::from_utf8_lossy(&output.stderr));
        mount.check_quiet();
    }
}

/// Before HELLO a handle is a file like any other, and so are all others.
#[test]
fn what_has_no_tickets_is_always_ready() {
    let mount = Mount::new();
    fs::write(mount.at("f"), b"x").unwrap();
    for path in ["f", ".ctl/status", ".ctl/prefetch", ".ctl/lease", ".ctl/drain"] {
        let file = Ctl(File::open(mount.at(path)).unwrap());
        assert!(file.poll(0).contains(PollFlags::POLLIN), "{path}");
    }
    let mut text = Vec::new();
    File::open(mount.at(".ctl/prefetch")).unwrap().read_to_end(&mut text).unwrap();
    assert!(text.is_empty());
    let ctl = open(&mount);
    assert!(!ctl.poll(0).contains(PollFlags::POLLIN));
    let mut short = [0; 63];
    assert_eq!((&ctl.0).read(&mut short).unwrap_err().raw_os_error(), Some(Errno::EINVAL as i32));
}

#[test]
fn tickets_are_cancelled_and_go_with_their_handle() {
    if memory_only() {
        return;
    }
    let (mount, names) = cold(Options::default().arg("--prefetch-window=1"), 8);
    let (ctl, other) = (open(&mount), open(&mount));
    let all = ranges(&ctl, &names);
    let (first, next) = (ctl.prefetch(0, &all[..4]), ctl.prefetch(0, &all[4..]));
    assert_eq!(other.cancel(first.ticket).unwrap_err(), Errno::ENOENT, "of another handle");
    let told = ctl.cancel(next.ticket).unwrap().state;
    // It may have been faster.
    assert!(matches!(told.state, abi::TICKET_CANCELLED | abi::TICKET_DONE), "{told:?}");
    let ends = wait_for(&ctl, 2);
    assert!(ends.contains(&told));
    drop((ctl, other));
    wait_until("no session is left", || mount.stat("control_sessions") == 0);
    assert_eq!((mount.stat("hints_running"), mount.stat("hints_queued")), (0, 0));
    mount.check_quiet();
}

#[test]
fn a_killed_client_leaves_no_ticket() {
    if memory_only() {
        return;
    }
    let (mount, _) = cold(Options::default().arg("--prefetch-window=1"), 8);
    let script = format!(
        "import fcntl, os, sys, time\n{}\n\
         fd = ctl_open()\n\
         for at in range(8):\n    \
             data = struct.pack('HHI', 1, 1, 1) + bytes(104) + ctl_range(fd, 'f%d' % at)\n    \
             ctl_ioctl(fd, 12, data)\n\
         print('begun', flush=True)\n\
         time.sleep(600)\n",
        common::ctl::PYTHON
    );
    let mut child = Command::new("python3")
        .args(["-c", &script])
        .current_dir(mount.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 6];
    child.stdout.take().unwrap().read_exact(&mut said).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("no session is left", || mount.stat("control_sessions") == 0);
    for gauge in ["hints_running", "hints_queued", "leases", "leased_bytes", "lease_aside_bytes"] {
        assert_eq!(mount.stat(gauge), 0, "{gauge}");
    }
    mount.check_quiet();
}

#[test]
fn what_cannot_be_is_denied_and_begins_nothing() {
    let options = Options::default().arg("--prefetch-window=0").arg("--lease-max=2MiB");
    let (mount, names) = cold(options, 1);
    if memory_only() {
        return;
    }
    let ctl = open(&mount);
    let hello = ctl.hello().unwrap();
    assert_eq!((hello.prefetch_window, hello.prefetch_queue, hello.tickets_max), (0, 1024, 4096));
    assert_eq!(hello.prefetch_bytes_max, 64 << 20);
    let range = ranges(&ctl, &names)[0];
    let missing = named(ctl.intern(&["missing"])[0]);
    let denied = |flags, parties, ranges: &[abi::Range]| {
        let header = common::ctl::header(flags, 0);
        let (head, _) =
            ctl.prefetch_as(abi::Prefetch { header, parties, ..abi::Prefetch::default() }, ranges);
        assert_eq!((head.state, head.ticket, head.lease), (abi::TICKET_DENIED, 0, 0), "{head:?}");
        Errno::from_raw(head.status)
    };
    assert_eq!(denied(0, 0, &[range]), Errno::EOPNOTSUPP);
    assert_eq!(denied(abi::PREFETCH_ASK, 0, &[range]), Errno::EOPNOTSUPP);
    assert_eq!(denied(0, 1025, &[range]), Errno::EINVAL);
    assert_eq!(denied(0, 0, &[missing]), Errno::ENOENT);
    assert_eq!(denied(abi::PREFETCH_LEASE, 0, &[range, missing]), Errno::ENOENT);
    fs::write(mount.at("warm"), bytes(9, SIZE)).unwrap();
    let warm = ranges(&ctl, &["warm".to_owned()])[0];
    assert_eq!(denied(abi::PREFETCH_LEASE, 0, &[warm]), Errno::EDQUOT, "as by CLASSIFY");
    let head = ctl.prefetch(0, &[warm, missing]);
    assert_eq!((head.state, head.failed, head.absent), (abi::TICKET_DONE, 1, 1));
    assert_eq!(ctl.ends(1), Err(Errno::EAGAIN));
    assert_eq!(mount.stat("hints_denied_off"), 1);
    assert_eq!(mount.stat("read_l2_bytes"), 0);
    mount.check_quiet();
}
