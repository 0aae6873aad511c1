//! The tools on real mounts: what `kvctl` says and does, and what mount(8) makes of an fstab-like line.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use place::{KVCTL, Place, is_running, kvctl, output, refuses, succeeds, wait_until};

mod place;
#[path = "../../tests/common/stall.rs"]
mod stall;
#[path = "../../tests/common/wedge.rs"]
mod wedge;

const HELPER: &str = env!("CARGO_BIN_EXE_mount-kvcachefs");

#[test]
fn kvctl_mounts_shows_and_unmounts() {
    let place = Place::new();
    let first = place.mount();
    let shown = place.mnt().display().to_string();
    fs::write(place.mnt().join("f"), "kept").unwrap();
    let status = succeeds(kvctl(&["status"]).arg(place.mnt()));
    assert!(status.starts_with(&shown) && status.contains(&format!("pid {first}")), "{status}");
    // Others may be mounted, or dead, beside ours.
    let all = String::from_utf8(output(&mut kvctl(&["status"])).stdout).unwrap();
    assert!(all.lines().any(|line| line.starts_with(&shown)), "{all}");
    let json = succeeds(kvctl(&["status", "--json"]).arg(place.mnt()));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json[0]["mountpoint"], &json[0]["alive"]), (&shown.clone().into(), &true.into()));
    assert_eq!(json[0]["stats"]["files"], 1);
    assert_eq!((&json[0]["health"], &json[0]["version"]), (&"ok".into(), &env!("CARGO_PKG_VERSION").into()));
    assert!(json[0]["uptime_seconds"].as_u64().is_some_and(|up| up < 86_400), "{json}");
    let devices = json[0]["devices"].as_array().unwrap();
    let path = place.0.path().join("store").display().to_string();
    assert_eq!((devices.len(), &devices[0]["path"]), (1, &path.into()), "{json}");
    for number in ["capacity_bytes", "written_bytes"] {
        assert!(devices[0][number].as_u64().is_some_and(|number| number > 0), "{number}: {json}");
    }
    assert!(succeeds(kvctl(&["metrics"]).arg(place.mnt())).contains("kvcachefs_healthy{mount="));
    let events = succeeds(kvctl(&["events"]).arg(place.mnt()));
    let (at, said) = events.split_once(' ').unwrap();
    assert!(said.starts_with("mounted at") && at.starts_with("20") && at.ends_with('Z'), "{events}");

    succeeds(kvctl(&["umount"]).arg(place.mnt()));
    assert!(!place.is_mounted() && !is_running(first), "it returned before the end");
    let second = place.mount();
    assert_ne!(second, first);
    assert_eq!(fs::read_to_string(place.mnt().join("f")).unwrap(), "kept");
    refuses(kvctl(&["mount", "--l1=64MiB", "--log-level=error"]).arg(place.mnt()), &[&shown, "busy"]);
    succeeds(kvctl(&["umount"]).arg(place.mnt()));
}

#[test]
fn kvctl_names_who_is_in_the_way() {
    let place = Place::new();
    let daemon = place.mount();
    let file = place.mnt().join("f");
    fs::write(&file, vec![7; 1 << 20]).unwrap();
    let mut sleeping = Command::new("sleep");
    let with_directory = |client: &mut Command| client.current_dir(place.mnt()).arg("600").spawn().unwrap();
    let mut client = with_directory(&mut sleeping);
    let named = format!("{} (sleep)", client.id());
    refuses(kvctl(&["umount"]).arg(place.mnt()), &["busy: in use by", &named, "--lazy"]);
    assert!(place.is_mounted() && fs::read(&file).unwrap().len() == 1 << 20);
    client.kill().unwrap();
    client.wait().unwrap();

    let mut reading = Command::new("sleep");
    let mut client = reading.arg("600").stdin(File::open(&file).unwrap()).spawn().unwrap();
    drop(reading); // which holds the file as well
    refuses(kvctl(&["umount"]).arg(place.mnt()), &["busy", &format!("{} (sleep)", client.id())]);
    succeeds(kvctl(&["umount", "--lazy"]).arg(place.mnt()));
    assert!(!place.is_mounted() && is_running(daemon), "an open file keeps it alive");
    client.kill().unwrap();
    client.wait().unwrap();
    wait_until("the daemon ends", || !is_running(daemon));
    place.mount();
    assert_eq!(fs::read(&file).unwrap().len(), 1 << 20);
    succeeds(kvctl(&["umount"]).arg(place.mnt()));
}

#[test]
fn events_are_followed_until_the_unmount_which_they_do_not_hinder() {
    let place = Place::new();
    place.mount();
    let mut follow = kvctl(&["events", "--follow"]);
    let mut follow = follow.arg(place.mnt()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("mounted at"));
    // It may just be reading, and then the mount is in use for that moment.
    wait_until("unmounted", || output(kvctl(&["umount"]).arg(place.mnt())).status.success());
    assert!(follow.wait().unwrap().success());
}

/// It began to repeat what it had printed, once the first events had been forgotten.
#[test]
fn what_comes_after_many_events_is_printed_once() {
    let place = Place::new();
    place.mount();
    let said = || fs::read_to_string(place.mnt().join(".ctl/events")).unwrap();
    let cause_event = |name: &str| {
        let dir = place.mnt().join("d");
        fs::create_dir(&dir).unwrap();
        let file = File::create_new(dir.join(name)).unwrap();
        fs::remove_dir(&dir).unwrap();
        drop(file);
        wait_until("the event", || said().contains(&format!("discarded d/{name}:")));
    };
    (0..1100).for_each(|at| cause_event(&format!("n{at}")));
    let mut follow = kvctl(&["events", "--follow"]);
    let mut follow = follow.arg(place.mnt()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("d/n1099:")), "the latest");
    cause_event("late");
    let next = lines.next().unwrap();
    assert!(next.contains("d/late:"), "{next}");
    follow.kill().unwrap();
    follow.wait().unwrap();
    wait_until("unmounted", || output(kvctl(&["umount"]).arg(place.mnt())).status.success());
}

#[test]
fn a_dead_mount_is_told_from_a_silent_one_and_nobody_hangs() {
    let place = Place::new();
    let shown = place.mnt().display().to_string();
    let daemon = place.mount();
    kill(Pid::from_raw(daemon), Signal::SIGSTOP).unwrap();
    refuses(kvctl(&["status"]).arg(place.mnt()), &[&shown, "no answer", "umount --force"]);
    refuses(kvctl(&["umount"]).arg(place.mnt()), &[&shown, "does not answer", "--force"]);
    kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
    wait_until("the daemon ends", || !is_running(daemon));
    // The last of its threads closes the device a little later.
    wait_until("a dead mount", || {
        fs::read_dir(place.mnt()).is_err_and(|error| error.raw_os_error() == Some(nix::libc::ENOTCONN))
    });
    refuses(kvctl(&["status"]).arg(place.mnt()), &[&shown, "its daemon is gone", "kvctl umount"]);
    let json = output(kvctl(&["status", "--json"]).arg(place.mnt()));
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&json[0]["alive"], &json[0]["health"]), (&false.into(), &serde_json::Value::Null));
    succeeds(kvctl(&["umount"]).arg(place.mnt()));
    assert!(!place.is_mounted());
}

/// The daemon is killed while the kernel waits for a client's lock and the client for the daemon.
#[test]
fn a_wedged_mount_is_told_and_cut_off_and_nobody_hangs() {
    let place = Place::new();
    let shown = place.mnt().display().to_string();
    let mut mount = kvctl(&["mount", "--l1=64MiB", "--log-level=error", "--guard=false"]);
    succeeds(mount.args(wedge::OPTIONS).arg("--l2").arg(place.store()).arg(place.mnt()));
    let daemon = place.pid();
    let mut wedged = wedge::Wedged::make(&place.mnt(), daemon);
    kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
    wait_until("its first thread has ended", || !is_running(daemon));
    refuses(kvctl(&["status"]).arg(place.mnt()), &[&shown, "was killed and cannot end", "umount --force"]);
    refuses(kvctl(&["stats"]).arg(place.mnt()), &[&shown, "was killed and cannot end", "umount --force"]);
    refuses(kvctl(&["events"]).arg(place.mnt()), &[&shown, "was killed and cannot end", "umount --force"]);
    refuses(kvctl(&["umount"]).arg(place.mnt()), &[&shown, "was killed and cannot end", "umount --force"]);
    // Also by a path that leads into it.
    let inside = place.mnt().join("wedge/known");
    refuses(kvctl(&["status"]).arg(inside), &["no kvcachefs is mounted there"]);
    let json = output(kvctl(&["status", "--json"]).arg(place.mnt()));
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json[0]["alive"], false);
    assert!(wedged.hangs(), "it is no wedge");
    succeeds(kvctl(&["umount", "--force"]).arg(place.mnt()));
    assert!(!place.is_mounted());
    wedged.said();
    // Whoever wanted it to be gone has that.
    succeeds(kvctl(&["umount", "--force"]).arg(place.mnt()));
    place.mount();
    refuses(kvctl(&["umount", "--force"]).arg(place.mnt()), &[&shown, "lives and answers"]);
    succeeds(kvctl(&["umount"]).arg(place.mnt()));
}

/// Whoever waits for a request that the daemon has taken cannot be ended by any signal.
#[test]
fn a_command_ends_in_time_though_its_request_is_not_answered() {
    let place = Place::new();
    let Some(disk) = stall::Disk::new() else { return };
    let shown = place.mnt().display().to_string();
    let store = format!("{}:128MiB", disk.path().join("store").display());
    let mut mount = kvctl(&["mount", "--l1=64MiB", "--log-level=error", "--request-deadline=1h"]);
    succeeds(mount.args(["--fsync-deadline=1h", "--l2", &store]).arg(place.mnt()));
    let frozen = disk.freeze();
    fs::write(place.mnt().join("f"), vec![7; 1 << 20]).unwrap();
    refuses(
        kvctl(&["umount", "--timeout=1s"]).arg(place.mnt()),
        &[&shown, "not everything could be stored within 1s", "nothing was unmounted"],
    );
    assert!(place.is_mounted());
    assert!(succeeds(kvctl(&["status"]).arg(place.mnt())).contains("health ok"));
    drop(frozen);
    // Whoever was left behind with the request ends once it is answered.
    wait_until("unmounted", || output(kvctl(&["umount"]).arg(place.mnt())).status.success());
}

#[test]
fn wrong_words_are_one_line_with_a_remedy() {
    let place = Place::new();
    refuses(&mut kvctl(&[]), &["kvctl: no command given; use mount, umount, status"]);
    refuses(&mut kvctl(&["umount"]), &["MOUNTPOINT", "is missing", "kvctl umount --help"]);
    refuses(&mut kvctl(&["status", "/a", "/b"]), &["/b: a second mount point; give one"]);
    assert!(succeeds(&mut kvctl(&["version"])).starts_with("kvctl "));
    refuses(&mut kvctl(&["dismount"]), &["dismount", "unknown command", "use mount, umount, status"]);
    refuses(&mut kvctl(&["status", "--xml"]), &["--xml", "unknown option", "kvctl --help"]);
    refuses(kvctl(&["umount", "--timeout=5"]).arg(place.mnt()), &["--timeout", "'5' has no unit"]);
    refuses(kvctl(&["umount"]).arg(place.mnt()), &["no kvcachefs is mounted there"]);
    refuses(kvctl(&["status"]).arg(place.mnt()), &["no kvcachefs is mounted there", "kvctl status"]);
    refuses(&mut kvctl(&["umount", "/proc"]), &["/proc", "type proc", "use umount"]);
    refuses(kvctl(&["mount", "--l1=4"]).arg(place.mnt()), &["--l1", "'4' has no unit"]);
    refuses(kvctl(&["mount", "--l3=4GiB"]).arg(place.mnt()), &["--l3", "unknown option"]);
}

#[test]
fn the_helper_refuses_what_it_does_not_know() {
    let place = Place::new();
    let run = |args: &[&str]| {
        let out =
            output(Command::new(HELPER).args([&place.store(), place.mnt().to_str().unwrap()]).args(args));
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, said) = run(&["-o", "rw,l1=64MiB,log_level=error,bogus=3"]);
    assert_eq!(code, Some(32), "{said}");
    assert!(said.lines().count() == 1 && said.contains("bogus: unknown option"), "{said}");
    let nameless = |source: &str, options: &str| {
        let mut helper = Command::new(HELPER);
        let out = output(helper.arg(source).arg(place.mnt()).args(["-o", options]));
        assert!(!place.is_mounted(), "{source} {options}");
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    for (source, options, parts) in [
        ("", "l1=64MiB", ["the first field: is empty", "/nvme/kv.store:200GiB"]),
        (":128MiB", "l1=64MiB", ["':128MiB': has a size and no path", "from the root"]),
        ("kv.store:128MiB", "l1=64MiB", ["'kv.store:128MiB': is a relative path", "from the root"]),
        ("kv", "l1=64MiB,l2=kv.store:128MiB", ["-o l2 'kv.store:128MiB': is a relative", "from the root"]),
        ("kv", "l1=64MiB,l2", ["-o l2: names no store", "l2=/nvme/kv.store:200GiB"]),
    ] {
        let (code, said) = nameless(source, options);
        assert_eq!(code, Some(1), "{source} {options}: {said}");
        assert!(said.lines().count() == 1 && parts.iter().all(|part| said.contains(part)), "{said}");
    }
    assert_eq!(run(&["-f", "-o", "rw,l1=64MiB"]), (Some(0), String::new()), "a fake mount");
    assert!(!place.is_mounted() && !place.0.path().join("store").exists());
    let (code, said) = run(&["-s", "-o", "rw,l1=64MiB,log_level=error,bogus=3"]);
    assert_eq!((code, said.as_str()), (Some(0), ""), "a sloppy mount");
    assert!(place.is_mounted());
    succeeds(kvctl(&["umount"]).arg(place.mnt()));
}

/// In a mount namespace of its own, where the helpers lie over /sbin.
#[test]
fn mount_8_and_fstab_reach_it() {
    let place = Place::new();
    let helpers = place.0.path().join("sbin");
    fs::create_dir(&helpers).unwrap();
    for name in ["mount.kvcachefs", "mount.fuse.kvcachefs"] {
        std::os::unix::fs::symlink(HELPER, helpers.join(name)).unwrap();
    }
    let script = r#"
        set -eu
        cd "$1"
        sbin=$(readlink -f /sbin)
        mount -t overlay overlay -o "lowerdir=$1/sbin:$sbin" "$sbin"
        options=l1=64MiB,log_level=error,pid_file=$1/pid,noatime
        gone() { pid=$(cat pid); umount mnt; timeout 60 tail -s 0.05 --pid="$pid" -f /dev/null; }

        mount -t kvcachefs "$2" mnt -o "$options,allow_other"
        findmnt -n -o FSTYPE,SOURCE -M "$1/mnt"
        grep -q "^allow_other = true # flag" mnt/.ctl/config
        echo kept > mnt/f
        gone

        mount -t fuse.kvcachefs any mnt -o "$options,ro,l2=$2"
        findmnt -n -o FSTYPE,SOURCE -M "$1/mnt"
        cat mnt/f
        echo lost 2>/dev/null > mnt/g || echo read-only
        gone

        echo "$2 $1/mnt kvcachefs $options,nofail,x-systemd.requires-mounts-for=/ 0 0" > fstab
        mount --fstab fstab -a
        mount --fstab fstab -a # again, to no effect
        findmnt -n -o FSTYPE,SOURCE "$1/mnt"
        cat mnt/f
        gone

        mount -t kvcachefs "$2" mnt -o "$options,bogus=3" 2>&1 || echo "exit $?"
    "#;
    let place_dir = place.0.path().to_str().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh", place_dir, &place.store()]);
    let said = succeeds(&mut command);
    let words: Vec<_> = said.split_whitespace().collect();
    let store = place.store();
    let expected = ["fuse.kvcachefs", &store, "fuse.kvcachefs", "any", "kept", "read-only"];
    assert_eq!(words[..6], expected, "{said}");
    assert_eq!(words[6..9], ["fuse.kvcachefs", &store, "kept"], "{said}");
    assert!(said.contains("bogus: unknown option") && said.ends_with("exit 32\n"), "{said}");
}

/// From wherever it is called, and without a trace afterwards.
#[test]
fn what_is_installed_is_said_and_goes_again() {
    let place = Place::new();
    let dest = place.0.path().join("dest");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("install.sh");
    let install = || {
        let mut command = Command::new(&script);
        command.current_dir("/").env("DESTDIR", &dest).env("PREFIX", "/opt/kv");
        command
    };
    assert!(succeeds(install().arg("--help")).contains("--uninstall"));
    refuses(install().arg("--bogus"), &["--bogus", "unknown option"]);
    refuses(install().arg("/nowhere"), &["/nowhere/kvcachefs", "cargo build"]);
    assert!(!dest.exists());
    let said = succeeds(install().arg(Path::new(KVCTL).parent().unwrap()));
    let files =
        ["opt/kv/sbin/kvcachefs", "opt/kv/sbin/kvctl", "sbin/mount.kvcachefs", "sbin/mount.fuse.kvcachefs"];
    let unit = "etc/systemd/system/kvcachefs@.service";
    for file in files.into_iter().chain([unit]) {
        let path = dest.join(file);
        assert!(path.symlink_metadata().is_ok() && said.contains(path.to_str().unwrap()), "{file}: {said}");
    }
    assert!(dest.join("etc/kvcachefs").is_dir());
    assert!(fs::read_to_string(dest.join(unit)).unwrap().contains("ExecStart=/opt/kv/sbin/kvcachefs"));
    succeeds(install().arg("--uninstall"));
    for file in files.into_iter().chain([unit]) {
        assert!(dest.join(file).symlink_metadata().is_err(), "{file} is left");
    }
}

#[test]
fn the_unit_and_the_fstab_example_name_options_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let example = fs::read_to_string(root.join("fstab.example")).unwrap();
    let lines = example.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let mut options = 0;
    for line in lines {
        let fields: Vec<_> = line.split_whitespace().collect();
        assert_eq!((fields.len(), fields[2]), (6, "kvcachefs"), "{line}");
        kvcachefs::config::Layer::from_fstab([fields[3]]).unwrap_or_else(|error| panic!("{line}: {error}"));
        options += fields[3].split(',').count();
    }
    assert!(options > 5);
    let unit = fs::read_to_string(root.join("kvcachefs@.service")).unwrap();
    assert!(
        unit.contains("Type=notify")
            && unit.contains("--daemon=false")
            && unit.contains("LimitMEMLOCK=infinity")
    );
    // What it starts and what it runs afterwards are command lines that the program understands.
    for (key, end) in [("ExecStart=", "--help"), ("ExecStopPost=-", "--help")] {
        let line = unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        let words: Vec<_> = line.split_whitespace().skip(1).chain([end]).collect();
        let place = Place::new();
        let help = succeeds(Command::new(Path::new(KVCTL).with_file_name("kvcachefs")).args(&words));
        assert!(
            words[..words.len() - 1]
                .iter()
                .filter(|word| word.starts_with("--"))
                .all(|word| help.contains(word.split('=').next().unwrap())),
            "{line}"
        );
        drop(place);
    }
}
