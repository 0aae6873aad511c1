//! `kvctl` on the control files of a real mount: where files are, what is brought, kept and drained.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod place;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use mount_tools::client::Handle;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use place::{Place, kvctl, output, refuses, succeeds, wait_until};
use serde_json::Value;

const BYTES: usize = 3 << 20;

fn json(command: &mut Command) -> Value {
    serde_json::from_str(&succeeds(command)).unwrap()
}

/// `kvctl lease d`, once it is granted.
fn holder(place: &Place, rest: &[&str]) -> (Child, u64) {
    let mut command = kvctl(&["lease", "--json"]);
    command.arg(place.mnt().join("d")).args(rest);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(said["files"], 4);
    (child, said["lease"].as_u64().unwrap())
}

fn none_left(place: &Place) {
    wait_until("no lease is left", || place.stat("leases") == 0);
}

#[test]
fn files_are_shown_brought_and_kept() {
    let place = Place::with_cold_files(4, BYTES);
    let (mnt, dir) = (place.mnt(), place.mnt().join("d"));
    let cold = json(kvctl(&["classify", "--json"]).arg(&dir));
    assert_eq!(
        (&cold["tier"], &cold["bytes_l1"], &cold["files"][3]["tier"]),
        (&"l2".into(), &0.into(), &"l2".into())
    );
    assert_eq!(cold["files"][0]["path"], dir.join("f0000").display().to_string());

    let one = json(kvctl(&["prefetch", "--json"]).arg(dir.join("f0001")));
    assert_eq!((&one["done"], &one["files"], &one["bytes_read"]), (&true.into(), &1.into(), &BYTES.into()));
    assert_eq!(json(kvctl(&["classify", "--json"]).arg(&mnt))["tier"], "mixed");
    // Of one that is named twice, and of one that is missing, beside the others.
    let command = &mut kvctl(&["prefetch", "--priority=3", "--deadline=60s"]);
    refuses(command.arg(&dir).arg(dir.join("f0001")).arg(mnt.join("none")), &["none: No such file"]);
    let warm = json(kvctl(&["classify", "--json"]).arg(&dir));
    assert_eq!((&warm["tier"], &warm["bytes_l1"]), (&"l1".into(), &(4 * BYTES).into()));
    let text = succeeds(kvctl(&["prefetch"]).arg(&dir));
    assert_eq!(text, "4 files, 12MiB in L1, 0B of them read from L2\n");
    let out = output(kvctl(&["classify"]).arg(&dir).arg(mnt.join("none")));
    let shown = String::from_utf8(out.stdout).unwrap();
    assert!(shown.contains("f0003") && shown.ends_with("l1: 4 files, 12MiB of 12MiB in L1\n"), "{shown}");
    assert_eq!(out.status.code(), Some(1));

    let (mut child, lease) = holder(&place, &[]);
    let held = json(kvctl(&["leases", "--json"]).arg(&mnt));
    assert_eq!(
        (&held[0]["id"], &held[0]["command"], &held[0]["ranges"]),
        (&lease.into(), &"kvctl".into(), &4.into())
    );
    assert!(succeeds(kvctl(&["leases"]).arg(&mnt)).contains("1/1"));
    assert_eq!(json(kvctl(&["classify", "--json"]).arg(&dir))["files"][2]["leased"], true);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success(), "the end of standard input ends it");
    assert_eq!(place.stat("leases"), 0);
    assert_eq!(json(kvctl(&["hints", "--json"]).arg(&mnt)), Value::Array(vec![]));
}

#[test]
fn a_hint_outlives_whoever_gave_it() {
    let place = Place::with_cold_files(4, BYTES);
    assert_eq!(succeeds(kvctl(&["prefetch", "--hint"]).arg(place.mnt().join("d"))), "");
    wait_until("all of it is in L1", || {
        json(kvctl(&["classify", "--json"]).arg(place.mnt()))["tier"] == "l1"
    });
    refuses(kvctl(&["prefetch", "--hint"]).arg(place.mnt().join("none")), &["none: No such file"]);
}

#[test]
fn a_lease_is_kept_for_a_command_and_ends_with_it() {
    let place = Place::with_cold_files(4, BYTES);
    let dir = place.mnt().join("d");
    let script =
        "test -n \"$KVCACHEFS_LEASE\" && cat \"$0/.ctl/leases\" | grep -c \"^$KVCACHEFS_LEASE \"; exit 7";
    let out = output(kvctl(&["lease"]).arg(&dir).args(["--", "sh", "-c", script]).arg(place.mnt()));
    assert_eq!((out.status.code(), &*out.stdout), (Some(7), &b"1\n"[..]), "{out:?}");
    assert_eq!(place.stat("leases"), 0);
    let out = output(kvctl(&["lease"]).arg(&dir).args(["--", "/no/program"]));
    assert!(
        out.status.code() == Some(1)
            && String::from_utf8_lossy(&out.stderr).contains("kvctl: /no/program: No such")
    );
    assert_eq!(place.stat("leases"), 0);

    // However it ends.
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let (mut child, lease) = holder(&place, &[]);
        assert!(lease > 0 && place.stat("leases") == 1);
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        assert_eq!(child.wait().unwrap().success(), signal != Signal::SIGKILL, "{signal}");
        none_left(&place);
    }
    // SIGTERM is for the command.
    let (mut child, _) = holder(&place, &["--", "sleep", "600"]);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    none_left(&place);
}

#[test]
fn a_rank_attaches_to_what_kvctl_holds() {
    let place = Place::with_cold_files(4, BYTES);
    let (mut child, lease) = holder(&place, &[]);
    let rank = Handle::open(place.mnt()).unwrap();
    let share = rank.attach(lease).unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(place.stat("leases"), 1, "the share of the rank");
    drop(share);
    none_left(&place);
}

#[test]
fn what_cannot_be_is_one_line_with_a_remedy() {
    let (place, other) = (Place::with_cold_files(2, 1000), Place::new());
    other.mount();
    let (dir, elsewhere) = (place.mnt().join("d"), other.mnt().display().to_string());
    fs::write(other.mnt().join("f"), "x").unwrap();
    for command in ["classify", "prefetch", "lease", "drain"] {
        refuses(kvctl(&[command]).arg(&dir).arg(other.mnt().join("f")), &[&elsewhere, "is in", "one mount"]);
        refuses(kvctl(&[command]).arg(place.0.path()), &["no kvcachefs is mounted there", "kvctl status"]);
    }
    fs::create_dir(place.mnt().join("empty")).unwrap();
    refuses(kvctl(&["prefetch"]).arg(place.mnt().join("empty")), &["empty", "there is no file in it"]);
    refuses(kvctl(&["lease"]).arg(dir.join("none")), &["none: No such file"]);
    refuses(&mut kvctl(&["lease"]), &["PATHS", "is missing"]);
    refuses(kvctl(&["prefetch", "--deadline=5"]).arg(&dir), &["--deadline", "'5' has no unit"]);
    let many = place.mnt().join("many");
    fs::create_dir(&many).unwrap();
    for at in 0..501 {
        fs::write(many.join(at.to_string()), "x").unwrap();
    }
    refuses(
        kvctl(&["lease"]).arg(&many),
        &["many", "501 files are more than one lease may have", "at most 500"],
    );
    assert_eq!(json(kvctl(&["prefetch", "--json"]).arg(&many))["files"], 501);
    assert_eq!(json(kvctl(&["classify", "--json"]).arg(&many))["tier"], "l1");
    // A mount that does not prefetch still says what is there, and leases it.
    succeeds(kvctl(&["umount"]).arg(other.mnt()));
    let store = other.store();
    let options = ["mount", "--l1=64MiB", "--log-level=error", "--prefetch-window=0", "--l2", &store];
    succeeds(kvctl(&options).arg(other.mnt()));
    refuses(kvctl(&["prefetch"]).arg(other.mnt()), &["this mount does not prefetch", "--prefetch-window"]);
    fs::read(other.mnt().join("f")).unwrap();
    wait_until("promoted", || json(kvctl(&["classify", "--json"]).arg(other.mnt()))["tier"] == "l1");
    succeeds(kvctl(&["lease"]).arg(other.mnt()).args(["--", "true"]));
    // Nobody hangs with a daemon that is stopped.
    let daemon = Pid::from_raw(other.pid());
    kill(daemon, Signal::SIGSTOP).unwrap();
    let stopped = output(kvctl(&["classify"]).arg(other.mnt().join("f")));
    let said = String::from_utf8(stopped.stderr).unwrap();
    kill(daemon, Signal::SIGCONT).unwrap();
    assert!(said.contains("no answer within"), "{said}");
}

#[test]
fn a_drain_says_what_it_has_stored() {
    let place = Place::new();
    place.mount();
    fs::create_dir(place.mnt().join("d")).unwrap();
    fs::write(place.mnt().join("d/f"), vec![7; BYTES]).unwrap();
    let first = json(kvctl(&["drain", "--json", "--timeout=60s"]).arg(place.mnt().join("d")));
    assert_eq!((&first["done"], &first["failed"]), (&true.into(), &0.into()));
    let file = json(kvctl(&["classify", "--json"]).arg(place.mnt()));
    assert_eq!(file["files"][0]["durable"], true);
    assert_eq!(succeeds(kvctl(&["drain"]).arg(place.mnt())), "0 files, 0B stored\n");
    refuses(
        kvctl(&["drain"]).arg(place.mnt().join("d")).arg(place.mnt().join("none")),
        &["none: No such file"],
    );
}
