//! Drains of a real mount: by ioctl and by `echo`, of everything and of a part.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use client::{Client, Watchdog};
use common::ctl::{Ctl, header, named, node, node_of, part, parted};
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi::{self, Command as Asked, Range, RangeState, TicketState};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zerocopy::FromBytes;

const SIZE: usize = 300_000;

/// `.ctl/drain`, greeted.
fn drain_file(mount: &Mount) -> Ctl {
    let ctl = Ctl::open(&mount.at(".ctl/drain"));
    assert_ne!(ctl.hello().unwrap().features & abi::FEATURE_DRAIN, 0);
    ctl
}

fn begin(ctl: &Ctl, tag: u64, ranges: &[Range]) -> (abi::Drain, Vec<RangeState>) {
    let head =
        abi::Drain { header: header(0, ranges.len()), tag, timeout_ms: 60_000, ..abi::Drain::default() };
    parted(&ctl.call(Asked::Drain, &head, ranges).unwrap())
}

/// Waits for the end of a ticket.
fn end(ctl: &Ctl) -> TicketState {
    use std::os::fd::AsFd;
    let mut wait = [PollFd::new(ctl.0.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut wait, PollTimeout::NONE), Ok(1));
    let mut said = [0; size_of::<TicketState>()];
    assert_eq!((&ctl.0).read(&mut said).unwrap(), said.len());
    TicketState::read_from_bytes(&said).unwrap()
}

/// Drains `ranges`, or everything.
#[track_caller]
fn drain(ctl: &Ctl, ranges: &[Range]) {
    let (begun, _) = begin(ctl, 0, ranges);
    assert_ne!(begun.ticket, 0);
    let end = end(ctl);
    assert_eq!((end.ticket, end.state, end.status), (begun.ticket, abi::TICKET_DONE, 0));
    assert_eq!((end.files, end.failed), (begun.files, 0));
}

/// What a shell says to a command, and its status.
fn shell(mount: &Mount, command: &str) -> (bool, String) {
    let shell = Command::new("bash").args(["-c", command]).current_dir(mount.path()).output().unwrap();
    (shell.status.success(), String::from_utf8_lossy(&shell.stderr).into_owned())
}

#[track_caller]
fn drained_by(mount: &Mount, command: &str) {
    assert_eq!(shell(mount, command), (true, String::new()), "{command}");
}

#[track_caller]
fn refused(mount: &Mount, command: &str, why: Errno) {
    let (success, said) = shell(mount, command);
    assert!(!success && said.contains(why.desc()), "{command}: {said}");
}

#[test]
fn what_a_drain_has_found_done_survives_a_kill() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let name = |at: u64| format!("d{}/f{at}", at % 3);
    for round in 0..3 {
        for at in 0..3 {
            fs::create_dir_all(mount.at(&format!("d{at}"))).unwrap();
        }
        for at in 0..60 {
            let size = 1 + at as usize * 17_003 % (3 * SIZE);
            fs::write(mount.at(&name(at)), bytes(at + round, size)).unwrap();
        }
        fs::rename(mount.at("d0/f0"), mount.at("d1/moved")).unwrap();
        fs::set_permissions(mount.at("d2"), fs::Permissions::from_mode(0o750)).unwrap();
        match round {
            0 => drain(&drain_file(&mount), &[]),
            1 => drained_by(&mount, "echo > .ctl/drain"),
            _ => drained_by(&mount, "echo d0 d1 d2 > .ctl/drain"),
        }
        mount.kill();
        mount.start();
        for at in 1..60 {
            let size = 1 + at as usize * 17_003 % (3 * SIZE);
            assert!(fs::read(mount.at(&name(at))).unwrap() == bytes(at + round, size), "{}", name(at));
        }
        assert!(fs::read(mount.at("d1/moved")).unwrap() == bytes(round, 1));
        assert!(!mount.at("d0/f0").exists());
        let mode = fs::metadata(mount.at("d2")).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o750);
    }
    mount.check_quiet();
}

#[test]
fn files_and_directories_are_drained_alone() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::create_dir_all(mount.at("a/deep")).unwrap();
    fs::create_dir_all(mount.at("b")).unwrap();
    let ctl = drain_file(&mount);
    for at in 0..20 {
        fs::write(mount.at(&format!("a/deep/{at}")), bytes(at, SIZE)).unwrap();
        fs::write(mount.at(&format!("b/{at}")), bytes(at + 100, SIZE)).unwrap();
    }
    std::os::unix::fs::symlink("a", mount.at("link")).unwrap();
    let names = ctl.ranges(&["a", "b/3", "none", "b/3/none", "link"]);
    let open = File::open(mount.at("b/4")).unwrap();
    let wrong =
        [&names[..], &[part(names[0], 0, 1), part(names[0], 1, 0), Range { unit: 1, ..names[0] }]].concat();
    let (begun, states) = begin(&ctl, 0, &wrong);
    assert_eq!((begun.ticket, begun.files, begun.bytes), (0, 0, 0), "nothing is begun");
    let statuses: Vec<i32> = states.iter().map(|state| -state.status).collect();
    let (absent, invalid) = (libc::ENOENT, libc::EINVAL);
    assert_eq!(statuses, [0, 0, absent, libc::ENOTDIR, libc::ELOOP, invalid, invalid, invalid]);
    drain(&ctl, &[names[0], names[1], node(node_of(&open))]);
    // Nothing of it is on its way any more.
    assert_eq!(begin(&ctl, 9, &[names[0]]).0.files, 0);
    assert_eq!(
        (end(&ctl).tag, (&ctl.0).read(&mut [0; 64]).unwrap_err().raw_os_error()),
        (9, Some(libc::EAGAIN))
    );
    drop(open);
    mount.kill();
    mount.start();
    for at in 0..20 {
        assert!(fs::read(mount.at(&format!("a/deep/{at}"))).unwrap() == bytes(at, SIZE));
    }
    for at in [3, 4] {
        assert!(fs::read(mount.at(&format!("b/{at}"))).unwrap() == bytes(at + 100, SIZE));
    }
}

#[test]
fn a_shell_drains_and_its_status_says_how_it_went() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::create_dir(mount.at("a b")).unwrap();
    fs::write(mount.at("a b/it's"), bytes(1, SIZE)).unwrap();
    fs::write(mount.at("plain"), bytes(2, SIZE)).unwrap();
    for command in [
        "echo > .ctl/drain",
        "echo plain 'a\\ b' > .ctl/drain",
        "printf '%q\\n' 'a b' \"a b/it's\" plain > .ctl/drain",
        "find . -type f -print0 > .ctl/drain",
        "echo timeout=60 plain > .ctl/drain",
        "printf '%q\\n' \"$PWD/a b\" \"$PWD\" > .ctl/drain",
        "sh -c 'echo > .ctl/drain'",
    ] {
        drained_by(&mount, command);
    }
    for (command, why) in [
        ("echo none > .ctl/drain", Errno::ENOENT),
        ("echo plain a > .ctl/drain", Errno::ENOENT),
        ("echo plain/x > .ctl/drain", Errno::ENOTDIR),
        ("echo ../x > .ctl/drain", Errno::EINVAL),
        ("echo \"'plain\" > .ctl/drain", Errno::EINVAL),
        ("echo timeout=soon > .ctl/drain", Errno::EINVAL),
    ] {
        refused(&mount, command, why);
    }
    if !memory_only() {
        // bash writes line by line.
        assert_eq!(mount.stat("drains"), 7 + 2 + 1);
        assert_eq!((mount.stat("drains_waiting"), mount.stat("drains_failed")), (0, 0));
    }
}

/// Publishes new files, replaces one, and rewrites another in place, without a pause.
fn write_without_end(mount: &Mount, stop: &Arc<AtomicBool>) -> Vec<std::thread::JoinHandle<()>> {
    use std::os::unix::fs::FileExt;
    let writer = |write: Box<dyn Fn(u64) + Send>| {
        let stop = stop.clone();
        std::thread::spawn(move || (0..).take_while(|_| !stop.load(Ordering::Relaxed)).for_each(write))
    };
    let (new, other, slots) = (mount.at("new"), mount.path().to_owned(), mount.at("slots"));
    let open = |path: &std::path::Path| {
        OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap()
    };
    open(&slots).set_len(4 << 20).unwrap();
    vec![
        writer(Box::new(move |at| fs::write(new.join((at % 200).to_string()), bytes(at, SIZE)).unwrap())),
        writer(Box::new(move |at| {
            fs::write(other.join("tmp"), bytes(at, SIZE)).unwrap();
            fs::rename(other.join("tmp"), other.join("replaced")).unwrap();
        })),
        writer(Box::new(move |at| {
            open(&slots).write_all_at(&bytes(at, 10_000), at % 64 * 65_536).unwrap();
        })),
    ]
}

#[test]
fn writers_that_never_stop_hold_no_drain_open() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    fs::create_dir(mount.at("new")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writers = write_without_end(&mount, &stop);
    let ctl = drain_file(&mount);
    for at in 0..20 {
        let path = format!("kept{at}");
        fs::write(mount.at(&path), bytes(at, SIZE)).unwrap();
        match at % 4 {
            0 => drain(&ctl, &[]),
            1 => drain(&ctl, &[named(ctl.intern(&[&path])[0])]),
            2 => drained_by(&mount, "echo > .ctl/drain"),
            _ => drained_by(&mount, "echo new slots replaced > .ctl/drain"),
        }
        if at % 4 < 3 && !memory_only() {
            let durable = ctl.classify(&ctl.ranges(&[&path])).1[0].flags & abi::STATE_DURABLE;
            assert_eq!(durable, abi::STATE_DURABLE, "{path}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    drain(&ctl, &[]);
    mount.check_quiet();
}

#[test]
fn only_what_may_be_read_is_drained_by_name() {
    let mount = Mount::with(Options::default().arg("--allow-other"));
    let _watchdog = Watchdog::new(&mount);
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in [("open", 0o755), ("closed", 0o700), ("blind", 0o711)] {
        fs::create_dir(mount.at(name)).unwrap();
        fs::write(mount.at(&format!("{name}/f")), bytes(1, 1000)).unwrap();
        fs::set_permissions(mount.at(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let script = "
os.setgroups([])
os.setegid(4242)
os.seteuid(4242)
def drain(text):
    fd = os.open('.ctl/drain', os.O_WRONLY)
    try:
        return errno_of(os.write, fd, text)
    finally:
        os.close(fd)
for text in [b'open', b'open/f', b'blind/f', b'blind', b'closed', b'closed/f', b'']:
    say(drain(text + b'\\n'))
";
    let mut client = Client::new(&mount, script);
    let said: Vec<String> = (0..7).map(|_| client.hear()).collect();
    assert_eq!(said, ["ok", "ok", "ok", "EACCES", "EACCES", "EACCES", "ok"]);
    client.end();
}

#[test]
fn without_l2_a_drain_is_done_at_once() {
    if !memory_only() {
        return;
    }
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, SIZE)).unwrap();
    let ctl = drain_file(&mount);
    for ranges in [vec![], ctl.ranges(&["f"])] {
        assert_eq!(begin(&ctl, 0, &ranges).0.files, 0);
        assert_eq!(end(&ctl).state, abi::TICKET_DONE);
    }
}
