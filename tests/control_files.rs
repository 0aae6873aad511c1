//! `.ctl`: what people and Prometheus read there, that it can be followed, and that nobody can change it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use common::{Mount, Options, bytes, memory_only, striped};
use nix::libc;

fn errno<T: std::fmt::Debug, E: Into<std::io::Error>>(result: Result<T, E>) -> i32 {
    result.map_err(Into::into).unwrap_err().raw_os_error().unwrap()
}

fn read(mount: &Mount, name: &str) -> String {
    fs::read_to_string(mount.at(".ctl").join(name)).unwrap()
}

const PLAIN: [&str; 6] = ["status", "stats", "metrics", "config", "version", "events"];

#[test]
fn control_files_are_there_and_not_in_the_way() {
    let mount = Mount::new();
    fs::write(mount.at("f"), b"x").unwrap();
    let names = |path: &str| -> HashSet<String> {
        fs::read_dir(mount.at(path))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    assert_eq!(names(""), HashSet::from(["f".to_owned()]), ".ctl is not listed");
    let control = names(".ctl");
    for name in PLAIN {
        assert!(control.contains(name), "{name} in {control:?}");
    }
    for name in &control {
        let meta = fs::metadata(mount.at(".ctl").join(name)).unwrap();
        assert!(meta.is_file(), "{name}");
    }
    assert_eq!(errno(fs::metadata(mount.at(".ctl/none"))), libc::ENOENT);
    assert_eq!(errno(fs::metadata(mount.at(".ctl/status/x"))), libc::ENOTDIR);
    assert_eq!(errno(fs::read_dir(mount.at(".ctl/status"))), libc::ENOTDIR);
    // Only the root has one; elsewhere it is a name like any other.
    fs::create_dir(mount.at("d")).unwrap();
    assert_eq!(errno(fs::metadata(mount.at("d/.ctl"))), libc::ENOENT);
    fs::write(mount.at("d/.ctl"), b"mine").unwrap();
    assert_eq!(fs::read(mount.at("d/.ctl")).unwrap(), b"mine");
    let output = Command::new("ls").arg("-la").arg(mount.at(".ctl")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(
        listed.lines().any(|line| line.ends_with(" .")) && listed.lines().any(|line| line.ends_with(" .."))
    );
}

#[test]
fn status_version_and_config_say_what_is_mounted() {
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 3 << 20)).unwrap();
    // The kernel does not wait for the answer to a close.
    common::run::wait_until("the file", || read(&mount, "status").contains("files 1 "));
    assert_eq!(read(&mount, "version"), format!("kvcachefs {}\n", env!("CARGO_PKG_VERSION")));
    let status = read(&mount, "status");
    assert!(status.starts_with(&format!("kvcachefs {}", env!("CARGO_PKG_VERSION"))), "{status}");
    for part in ["health ok", "files 1 ", "L1 ", "128MiB", "L2 ", "published 1 file, 3MiB"] {
        assert!(status.contains(part), "{part} in:\n{status}");
    }
    assert!(
        status.lines().count() <= 24 && status.lines().all(|line| line.len() <= 160),
        "one screen:\n{status}"
    );
    let config = read(&mount, "config");
    assert!(config.contains("l1") && config.contains("128MiB"), "{config}");
    if !memory_only() && common::mode() != common::Mode::Block {
        assert!(config.contains(mount.store().to_str().unwrap()), "{config}");
    }
}

#[test]
fn stats_and_metrics_agree() {
    let mount = Mount::new();
    for at in 0..10 {
        fs::write(mount.at(&format!("f{at}")), bytes(at, 100_000)).unwrap();
    }
    mount.drain();
    let stats: HashMap<String, u64> = read(&mount, "stats")
        .lines()
        .map(|line| {
            let (key, value) = line.split_once(' ').unwrap();
            (key.to_owned(), value.parse().unwrap())
        })
        .collect();
    assert_eq!((stats["files"], stats["published_files"], stats["published_bytes"]), (10, 10, 1_000_000));

    let text = read(&mount, "metrics");
    let label = format!("{{mount=\"{}\"}}", mount.path().canonicalize().unwrap().display());
    assert!(text.ends_with('\n'));
    let mut help = HashSet::new();
    let mut kinds: HashMap<String, String> = HashMap::new();
    let mut values: HashMap<String, f64> = HashMap::new();
    // By name, those that tell something of each device.
    let mut of_devices: HashMap<String, HashMap<String, f64>> = HashMap::new();
    let mut versions = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, what) = rest.split_once(' ').unwrap();
            assert!(what.len() > 3 && what.ends_with('.'), "{line}");
            assert!(help.insert(name.to_owned()), "HELP twice: {line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(help.contains(name), "HELP comes first: {line}");
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "TYPE twice: {line}");
        } else {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = name.split_at(name.find('{').unwrap());
            let more = labels.strip_prefix(label.trim_end_matches('}'));
            let more = more.unwrap_or_else(|| panic!("without its mount: {line}")).trim_end_matches('}');
            let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(name.starts_with("kvcachefs_") && name.chars().all(legal), "{line}");
            let kind = kinds.get(name).unwrap_or_else(|| panic!("no TYPE before {line}"));
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            let unit = name.trim_end_matches("_total");
            for small in ["_kb", "_mb", "_kib", "_mib", "_ms", "_us", "_ns", "_pages", "_percent"] {
                assert!(!unit.ends_with(small), "base units only: {line}");
            }
            let value = value.parse().unwrap();
            if let Some(device) = more.strip_prefix(",device=") {
                let of_device = of_devices.entry(name.to_owned()).or_default();
                assert!(of_device.insert(device.to_owned(), value).is_none(), "twice: {line}");
            } else if let Some(version) = more.strip_prefix(",version=") {
                versions.push((name.to_owned(), version.to_owned(), value));
            } else {
                assert_eq!(more, "", "{line}");
                assert!(values.insert(name.to_owned(), value).is_none(), "twice: {line}");
            }
        }
    }
    let version = format!("{:?}", env!("CARGO_PKG_VERSION"));
    assert_eq!(versions, [("kvcachefs_build_info".to_owned(), version, 1.0)]);
    let all = values.len() + of_devices.len() + versions.len();
    assert_eq!((help.len(), kinds.len()), (all, all));
    assert_eq!(values["kvcachefs_healthy"], 1.0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let started = values["kvcachefs_start_time_seconds"];
    assert!(started > now - 86_400.0 && started <= now, "{started} of {now}");
    // What is told of each device adds up to what is told of all.
    let count = if memory_only() {
        0
    } else if striped() {
        3
    } else {
        1
    };
    assert!(of_devices.values().all(|of_device| of_device.len() == count), "{of_devices:?}");
    assert_eq!(of_devices.is_empty(), memory_only());
    for (each, all) in
        [("device_capacity_bytes", "l2_capacity_bytes"), ("device_used_bytes", "l2_used_bytes")]
    {
        let sum =
            of_devices.get(&format!("kvcachefs_{each}")).map_or(0.0, |of_device| of_device.values().sum());
        assert_eq!(sum, values[&format!("kvcachefs_{all}")], "{each}");
    }
    // The process is no measurement.
    for (key, value) in stats.into_iter().filter(|(key, _)| key != "pid") {
        let (gauge, counter) = (format!("kvcachefs_{key}"), format!("kvcachefs_{key}_total"));
        let metric = values.get(&gauge).or_else(|| values.get(&counter));
        let metric = *metric.unwrap_or_else(|| panic!("no metric for {key}"));
        // Reading is itself counted.
        let moves = key.starts_with("lookup") || key.contains("commit") || key.contains("checkpoint");
        assert!(metric == value as f64 || moves, "{key}: {value} in stats, {metric} in metrics");
    }
}

#[test]
fn status_says_what_was_switched_off() {
    let options =
        ["--noexec", "--lock=false", "--evict=none", "--default-permissions=false", "--guard=false"];
    let mut mount = Mount::new();
    let is_told = |mount: &Mount, option: &str| {
        let status = read(mount, "status");
        let told = status.lines().find_map(|line| line.strip_prefix("by options: ")).unwrap_or_default();
        told.split(' ').any(|word| word == option)
    };
    assert!(options.iter().all(|option| !is_told(&mount, option)), "{}", read(&mount, "status"));
    let more = ["--huge-pages=off", "--lease-max=0B", "--l2-engine=threads", "--read-path=daemon"];
    let (engine, path) = match common::mode() {
        common::Mode::Threads => (None, Some(more[3])),
        common::Mode::Daemon => (Some(more[2]), None),
        _ => (Some(more[2]), Some(more[3])),
    };
    let given: Vec<_> =
        options.into_iter().chain(more[..2].iter().copied()).chain(engine).chain(path).collect();
    mount.restart_with(&given);
    for option in options.into_iter().chain(more) {
        assert!(is_told(&mount, option), "{option} in:\n{}", read(&mount, "status"));
    }
    assert!(!is_told(&mount, "--read-only"));
    if !memory_only() {
        mount.restart_with(&["--read-only"]);
        assert!(is_told(&mount, "--read-only"), "{}", read(&mount, "status"));
    }
    let status = read(&mount, "status");
    assert!(status.lines().all(|line| line.len() <= 180), "one screen:\n{status}");
}

/// Why a file is not there any more, and why a writer was refused.
#[test]
fn evictions_and_refusals_are_told() {
    let refused = |mount: &Mount| {
        (0..40).find_map(|at| fs::write(mount.at(&format!("f{at}")), bytes(at, 3 << 20)).err())
    };
    let mount = Mount::with(Options::new(64, 96));
    if let Some(error) = refused(&mount) {
        panic!("eviction makes room, but: {error}");
    }
    mount.wait_for("evictions_l2", |files| files > 0);
    common::run::wait_until("the event", || mount.events().contains("evicted "));
    let from = ["from L1 ", "from L2 "].map(|tier| mount.status().contains(tier));
    assert_eq!(from, [!memory_only(); 2], "{}", mount.status());
    let events = mount.events();
    let line = events.lines().find(|line| line.contains("evicted ")).unwrap();
    // On several devices it need not be the oldest of all: if none of the files is committed yet when room is wanted, the
    // new one takes what is left over on another device and waits there, and then the oldest of that one leaves.
    assert!(
        line.contains("MiB, the least recently used") && (line.ends_with("first f0") || striped()),
        "{line}"
    );
    assert!(events.matches("evicted ").count() <= 2, "not one for each file:\n{events}");

    let mount = Mount::with(Options::new(64, 96).arg("--evict=none"));
    assert_eq!(errno(refused(&mount).map_or(Ok(()), Err)), libc::ENOSPC);
    assert!(mount.stat("no_space") > 0);
    common::run::wait_until("the event", || mount.events().contains("no space: "));
}

#[test]
fn what_is_open_does_not_change_while_it_is_read() {
    let mount = Mount::new();
    let mut stats = File::open(mount.at(".ctl/stats")).unwrap();
    let mut first = [0; 100];
    stats.read_exact(&mut first).unwrap();
    for at in 0..50 {
        fs::write(mount.at(&format!("f{at}")), b"x").unwrap();
    }
    let mut rest = String::new();
    stats.read_to_string(&mut rest).unwrap();
    let text = String::from_utf8(first.to_vec()).unwrap() + &rest;
    assert!(text.contains("published_files 0\n"), "one instant:\n{text}");
    mount.wait_for("published_files", |files| files == 50);
}

#[test]
fn there_is_nothing_to_sync_in_a_control_file() {
    let mount = Mount::new();
    for name in ["status", "events"] {
        File::open(mount.at(".ctl").join(name)).unwrap().sync_all().unwrap();
    }
}

#[test]
fn nobody_changes_a_control_file() {
    let mount = Mount::new();
    let at = |name: &str| mount.at(".ctl").join(name);
    for name in PLAIN {
        assert_eq!(errno(OpenOptions::new().write(true).open(at(name))), libc::EACCES, "{name}");
        assert_eq!(errno(fs::write(at(name), b"x")), libc::EACCES, "{name}");
        for result in [
            fs::remove_file(at(name)),
            fs::rename(at(name), mount.at("stolen")),
            fs::rename(at(name), at("other")),
            fs::set_permissions(at(name), PermissionsExt::from_mode(0o777)),
            fs::hard_link(at(name), mount.at("link")),
            nix::unistd::truncate(&at(name), 0).map_err(Into::into),
            rustix::fs::setxattr(at(name), "user.x", b"1", rustix::fs::XattrFlags::empty())
                .map_err(Into::into),
        ] {
            assert_eq!(errno(result), libc::EPERM, "{name}");
        }
    }
    fs::write(mount.at("f"), b"x").unwrap();
    for result in [
        fs::write(at("new"), b"x"),
        fs::create_dir(at("new")),
        symlink("x", at("new")),
        fs::rename(mount.at("f"), at("status")),
        fs::rename(mount.at("f"), at("new")),
        fs::rename(mount.at(".ctl"), mount.at("moved")),
        fs::remove_dir(mount.at(".ctl")),
        fs::set_permissions(mount.at(".ctl"), PermissionsExt::from_mode(0o777)),
    ] {
        assert_eq!(errno(result), libc::EPERM);
    }
    assert_eq!(errno(fs::create_dir(mount.at(".ctl"))), libc::EEXIST);
    assert_eq!(fs::read(mount.at("f")).unwrap(), b"x");
    assert_eq!(read(&mount, "version"), format!("kvcachefs {}\n", env!("CARGO_PKG_VERSION")));
    // cp looks for holes before it reads, and fsyncs nothing.
    for name in PLAIN {
        let copy = mount.scratch.path().join("copy");
        let status = Command::new("cp").arg(at(name)).arg(&copy).status().unwrap();
        assert!(status.success(), "cp {name}");
        assert!(name == "events" || !fs::read(&copy).unwrap().is_empty(), "cp {name}");
    }
}

/// Makes the daemon tell of something: a file whose writer is killed is discarded.
fn cause_event(mount: &Mount, name: &str) {
    let script = "exec 3> \"$0\"; echo part >&3; kill -9 $$";
    let status = Command::new("bash").arg("-c").arg(script).arg(mount.at(name)).status().unwrap();
    assert!(!status.success());
    common::run::wait_until("the event", || mount.events().contains(name));
}

#[test]
fn of_many_events_the_latest_are_shown_whoever_reads() {
    let mount = Mount::new();
    for at in 0..1100 {
        cause_event(&mount, &format!("n{at}"));
    }
    let path = mount.at(".ctl/events");
    let shown = fs::read_to_string(&path).unwrap();
    assert_eq!(shown.lines().count(), 1024);
    for line in shown.lines() {
        assert!(line.split(' ').next().unwrap().parse::<f64>().is_ok_and(|at| at > 1.6e9), "{line:?}");
    }
    assert!(!shown.contains("n10/n10:") && shown.lines().last().unwrap().contains("n1099"), "the latest");
    let tail = |arguments: &[&str]| {
        String::from_utf8(Command::new("tail").args(arguments).arg(&path).output().unwrap().stdout).unwrap()
    };
    let last: Vec<_> = shown.lines().skip(1021).map(|line| format!("{line}\n")).collect();
    assert_eq!(tail(&["-n", "3"]), last.concat());
    assert_eq!(tail(&["-c", "20"]), shown[shown.len() - 20..]);
    assert!(tail(&["-n", "+1"]) == shown);
    let mut follower = File::open(&path).unwrap();
    follower.read_to_string(&mut String::new()).unwrap();
    cause_event(&mount, "late");
    let mut more = String::new();
    follower.read_to_string(&mut more).unwrap();
    assert!(more.contains("late") && more.lines().count() == 1, "{more}");
}

#[test]
fn events_can_be_followed() {
    let mount = Mount::new();
    cause_event(&mount, "early");
    let mut tail = Command::new("tail")
        .args(["-f", "-s", "0.05", "-n", "+1"])
        .arg(mount.at(".ctl/events"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut wait_for = |name: &str| {
        let line = lines.find(|line| line.contains(name)).unwrap();
        let (at, text) = line.split_once(' ').unwrap();
        assert!(at.parse::<f64>().unwrap() > 1.6e9, "seconds since 1970: {line}");
        assert!(text.contains("discarded"), "{line}");
    };
    wait_for("early");
    for at in 0..5 {
        let name = format!("during{at}");
        cause_event(&mount, &name);
        wait_for(&name);
    }
    tail.kill().unwrap();
    tail.wait().unwrap();
    // Without tail: an open descriptor finds what came since it met the end.
    let mut events = File::open(mount.at(".ctl/events")).unwrap();
    let mut text = String::new();
    events.read_to_string(&mut text).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains("discarded")).count(), 6);
    assert_eq!(fs::metadata(mount.at(".ctl/events")).unwrap().len(), text.len() as u64);
    cause_event(&mount, "late");
    let mut more = String::new();
    events.read_to_string(&mut more).unwrap();
    assert!(more.contains("late") && !more.contains("early"), "{more}");
}

/// Whoever may make a file may choose its name. It makes no lines of its own, and does nothing to the terminal of who reads.
#[test]
fn names_that_are_told_forge_nothing() {
    let mount = Mount::with(Options::new(64, 128).arg("--log-level=debug"));
    let name = "d\n1.000 lost everything\r\u{1b}[2J\u{9b}2J\u{202e}\\";
    let shown = r"d\n1.000 lost everything\r\u{1b}[2J\u{9b}2J\u{202e}\\";
    fs::create_dir(mount.at(name)).unwrap();
    // An event: its directory goes while it is being written.
    let file = File::create_new(mount.at(name).join(name)).unwrap();
    fs::remove_dir(mount.at(name)).unwrap();
    drop(file);
    let events = mount.events();
    assert!(events.contains(&format!(" discarded {shown}/{shown}: ")), "{events:?}");
    assert!(
        !events.chars().any(|char| char != '\n' && (char.is_control() || char == '\u{202e}')),
        "{events:?}"
    );
    assert!(!events.lines().any(|line| line.starts_with("1.000")), "{events:?}");
    // A line of the log: it is evicted.
    fs::write(mount.at(name), bytes(1, 1 << 20)).unwrap();
    mount.drain();
    for at in 0..192 {
        fs::write(mount.at(&format!("f{at}")), bytes(at, 1 << 20)).unwrap();
    }
    assert!(!mount.at(name).exists(), "it was the least recently used");
    let log = mount.log();
    assert!(log.contains(&format!("evict {shown}\n")), "{log:?}");
    assert!(!log.lines().any(|line| line.starts_with("1.000")), "{log:?}");
    assert!(!log.contains(['\u{9b}', '\r', '\u{202e}']), "{log:?}");
    // What we say is not lost in what fuser says of each request.
    assert!(!log.contains(" fuser"), "{log}");
}
