//! A daemon that is killed or stopped at the worst moment: nobody hangs for ever, and whoever comes next can mount.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use common::run::{is_running, kvcachefs, mounts_on, run, wait_until};
use common::wedge::{self, Wedged};
use common::{Mount, Options, memory_only};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn mounted(extra: &[&str]) -> Mount {
    let options =
        wedge::OPTIONS.iter().chain(extra).fold(Options::default(), |options, arg| options.arg(arg));
    Mount::with(options)
}

/// The processes with this name that `daemon` has started.
fn guards(daemon: u32) -> Vec<i32> {
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).unwrap();
    let named = |pid: &&str| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "kvcachefs-guard\n")
    };
    children.split_whitespace().filter(named).map(|pid| pid.parse().unwrap()).collect()
}

fn guard_of(mount: &Mount) -> i32 {
    let mut found = Vec::new();
    wait_until("a guard", || {
        found = guards(mount.pid());
        !found.is_empty()
    });
    assert_eq!(found.len(), 1);
    found[0]
}

fn is_dead(dir: &Path) -> bool {
    fs::read_dir(dir).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
}

#[test]
fn the_guard_frees_the_clients_of_a_daemon_that_was_killed_and_cannot_end() {
    let mut mount = mounted(&[]);
    let guard = guard_of(&mount);
    let daemon = mount.pid() as i32;
    let mut wedged = Wedged::make(mount.path(), daemon);
    mount.signal(Signal::SIGKILL);
    let said = wedged.said();
    assert!(said.contains("not connected") || said.contains("abort"), "{said}");
    mount.ended();
    assert!(is_dead(mount.path()), "what is below it must stay hidden");
    assert_eq!(mounts_on(mount.path()), 1);
    wait_until("the guard goes", || !is_running(guard));
    assert!(mount.log().contains("kvcachefs-guard: the daemon of"), "{}", mount.log());
    mount.start();
    assert_eq!(mounts_on(mount.path()), 1);
    mount.stop();
}

#[test]
fn a_guard_goes_with_its_daemon_and_minds_nobody_else() {
    let mut mount = Mount::new();
    let (guard, daemon) = (guard_of(&mount), mount.pid());
    assert!(mount.status().contains(&format!("guard: process {guard} ")), "{}", mount.status());
    // Nothing of the mount, the stores or the terminal is held by it.
    for entry in fs::read_dir(format!("/proc/{guard}/fd")).unwrap().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        assert!(!target.starts_with(mount.path()) && target != Path::new("/dev/fuse"), "{target:?}");
        assert!(target != mount.store(), "{target:?}");
    }
    assert_eq!(fs::read_link(format!("/proc/{guard}/cwd")).unwrap(), Path::new("/"));
    let stat = fs::read_to_string(format!("/proc/{guard}/stat")).unwrap();
    let session: i32 = stat.rsplit(')').next().unwrap().split_whitespace().nth(3).unwrap().parse().unwrap();
    assert_eq!(session, guard, "a terminal's Ctrl-C reaches it");
    // What a terminal or a service manager sends to everybody, and what would mean that the daemon has died.
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1] {
        kill(Pid::from_raw(guard), signal).unwrap();
    }
    fs::write(mount.at("f"), "x").unwrap();
    assert_eq!(fs::read(mount.at("f")).unwrap(), b"x");
    assert_eq!(guards(daemon), [guard]);
    // A politely unmounted one is not busy because of it, and takes it along.
    run(Command::new("umount").arg(mount.path())).expect_success();
    assert_eq!(mount.ended().code(), Some(0), "{}", mount.log());
    assert!(!is_running(guard), "it outlives a clean end");
    assert!(!mount.log().contains("kvcachefs-guard"), "{}", mount.log());

    mount.start();
    let guard = guard_of(&mount);
    mount.stop();
    assert!(!is_running(guard), "it outlives a clean end");

    mount.start();
    let guard = guard_of(&mount);
    kill(Pid::from_raw(guard), Signal::SIGSTOP).unwrap();
    mount.stop();
    assert!(!is_running(guard), "it outlives a clean end");

    mount.set_extra(&["--guard=false"]);
    mount.start();
    assert_eq!(guards(mount.pid()), [0; 0]);
    assert!(!mount.status().contains("guard: "), "{}", mount.status());
    mount.stop();
}

#[test]
fn clients_left_behind_get_an_error_when_the_daemon_ends_before_them() {
    let mut mount = mounted(&["--drain-timeout=1s"]);
    let guard = guard_of(&mount);
    let mut wedged = Wedged::make(mount.path(), mount.pid() as i32);
    mount.signal(Signal::SIGTERM);
    let said = wedged.said();
    assert!(said.contains("not connected") || said.contains("abort"), "{said}");
    // A file is being closed, it thinks, so it may not vouch for everything; but it has ended.
    assert!(matches!(mount.ended().code(), Some(0 | 1)), "{}", mount.log());
    wait_until("the guard goes", || !is_running(guard));
}

#[test]
fn a_wedged_mount_is_replaced_and_a_stopped_one_is_not() {
    let mut mount = mounted(&["--guard=false"]);
    let shown = mount.path().to_str().unwrap().to_owned();
    let daemon = mount.pid() as i32;
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("d/durable"), "kept").unwrap();
    mount.drain();
    let mut wedged = Wedged::make(mount.path(), daemon);

    // A daemon that was stopped may go on: it is no reason to take its mount away.
    mount.signal(Signal::SIGSTOP);
    let again = ["mount", "--l1=64MiB", "--log-level=error", &shown];
    run(&mut kvcachefs(again)).expect_refusal(&[&shown, "busy", "does not answer", "umount --force"]);
    mount.signal(Signal::SIGCONT);
    assert!(mount.status().starts_with("kvcachefs"), "it was cut off");
    run(&mut kvcachefs(["umount", "--force", &shown])).expect_refusal(&[&shown, "lives and answers"]);
    assert!(wedged.hangs() && mount.status().starts_with("kvcachefs"), "it was cut off");

    mount.signal(Signal::SIGKILL);
    wait_until("the first thread has ended", || !is_running(daemon));
    assert!(wedged.hangs() && mount.is_held(), "it is no wedge");
    mount.forget();
    mount.start();
    let said = wedged.said();
    assert!(said.contains("not connected") || said.contains("abort"), "{said}");
    if !memory_only() {
        assert_eq!(fs::read(mount.at("d/durable")).unwrap(), b"kept");
    }
    assert_eq!(mounts_on(mount.path()), 1);
    mount.stop();
}

#[test]
fn force_ends_what_is_dead_or_silent_and_leaves_the_living() {
    let mut mount = mounted(&["--guard=false"]);
    let shown = mount.path().to_str().unwrap().to_owned();
    let config = mount.scratch.path().join("kv.toml");
    fs::write(&config, format!("mountpoint = {shown:?}\n")).unwrap();
    // As the systemd unit does it.
    let by_config = ["umount", "--dead", "--config", config.to_str().unwrap()];
    run(&mut kvcachefs(by_config)).expect_refusal(&[&shown, "lives and answers"]);
    for wedge in [true, false] {
        let mut wedged = wedge.then(|| Wedged::make(mount.path(), mount.pid() as i32));
        mount.signal(if wedge { Signal::SIGKILL } else { Signal::SIGSTOP });
        if wedge {
            run(&mut kvcachefs(by_config)).expect_success();
        } else {
            run(&mut kvcachefs(by_config)).expect_refusal(&[&shown, "it is there", "--force"]);
            run(&mut kvcachefs(["umount", "--force", &shown])).expect_success();
        }
        assert_eq!(mounts_on(mount.path()), 0);
        if let Some(wedged) = &mut wedged {
            wedged.said();
        } else {
            mount.signal(Signal::SIGKILL);
        }
        mount.ended();
        // The wish is fulfilled.
        run(&mut kvcachefs(by_config)).expect_success();
        mount.start();
    }
    mount.signal(Signal::SIGKILL);
    mount.ended();
    run(&mut kvcachefs(["umount", "--force", &shown])).expect_success();
    assert_eq!(mounts_on(mount.path()), 0);
    run(&mut kvcachefs(["umount", "--force", "/proc"])).expect_refusal(&["/proc", "type proc"]);
}

/// A lazily detached mount has no name any more by which somebody could end it.
#[test]
fn the_guard_frees_the_clients_of_a_detached_mount() {
    let mut mount = mounted(&[]);
    let open = File::open(mount.path()).unwrap();
    let mut wedged = Wedged::make(mount.path(), mount.pid() as i32);
    umount2(mount.path(), MntFlags::MNT_DETACH).unwrap();
    mount.signal(Signal::SIGKILL);
    wedged.said();
    mount.ended();
    drop(open);
}
