//! How a mount begins and ends: by signal, by an operator's umount, in the background, read-only. However it ends
//! without an error, everything published is durable.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;

use common::run::{is_running, kvcachefs, mounts_on, run, wait_until};
use common::{Mode, Mount, Options, bytes, memory_only, mode};
use nix::errno::Errno;
use nix::sys::signal::Signal;

const FILES: u64 = 12;
const SIZES: [usize; 4] = [100, 300 << 10, 1 << 20, 3_000_001];

fn content(seed: u64) -> Vec<u8> {
    bytes(seed, SIZES[seed as usize % SIZES.len()])
}

fn fill(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for seed in 0..FILES {
        fs::write(dir.join(seed.to_string()), content(seed)).unwrap();
    }
}

fn check(dir: &Path) {
    for seed in 0..FILES {
        assert!(fs::read(dir.join(seed.to_string())).unwrap() == content(seed), "{}/{seed}", dir.display());
    }
}

#[test]
fn a_signal_drains_and_unmounts() {
    let mut mount = Mount::new();
    for (at, signal) in [Signal::SIGTERM, Signal::SIGINT].into_iter().enumerate() {
        let dir = mount.at(&at.to_string());
        fill(&dir);
        mount.signal(signal);
        assert_eq!(mount.ended().code(), Some(0), "{signal}: {}", mount.log());
        assert_eq!(mounts_on(mount.path()), 0, "{signal} leaves a mount");
        mount.start();
        if !memory_only() {
            check(&dir);
        }
    }
}

/// The kernel does not wait for the daemon to hear of the last close, and an unmount throws away what is on its way.
#[test]
fn what_was_closed_just_before_the_unmount_is_stored() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    for round in 0..10 {
        let open: Vec<_> = (0..100)
            .map(|at| {
                let mut file = fs::File::create_new(mount.at(&format!("{round}.{at}"))).unwrap();
                file.write_all(&content(at)).unwrap();
                file
            })
            .collect();
        drop(open);
        nix::mount::umount(mount.path()).unwrap();
        assert_eq!(mount.ended().code(), Some(0), "{}", mount.log());
        mount.start();
        for at in 0..100 {
            let read = fs::read(mount.at(&format!("{round}.{at}")));
            let read = read.unwrap_or_else(|error| panic!("round {round}, file {at}: {error}"));
            assert!(read == content(at), "round {round}, file {at}");
        }
    }
}

#[test]
fn a_start_says_whether_the_end_was_clean() {
    if memory_only() {
        return;
    }
    const SAID: &str = "was not closed cleanly";
    let mut mount = Mount::new();
    assert!(!mount.log().contains(SAID), "a new store: {}", mount.log());
    for changes in [true, false] {
        mount.restart();
        assert!(!mount.log().contains(SAID), "after a clean end: {}", mount.log());
        if changes {
            fill(&mount.at("d"));
            mount.drain();
        }
        mount.kill();
        mount.start();
        assert!(mount.log().contains(SAID), "killed, changes: {changes}: {}", mount.log());
    }
    check(&mount.at("d"));
}

#[test]
fn a_hang_up_is_no_reason_to_end() {
    let mount = Mount::new();
    mount.signal(Signal::SIGHUP);
    wait_until("the signal in the log", || mount.log().contains("SIGHUP ignored"));
    fill(&mount.at("d"));
    check(&mount.at("d"));
}

#[test]
fn every_way_to_unmount_ends_the_daemon_with_everything_durable() {
    let mut mount = Mount::new();
    let own = common::binary();
    let ways: [(&str, &[&str]); 4] = [
        ("umount", &[]),
        ("fusermount3", &["-u"]),
        ("umount", &["-l"]),
        (own.to_str().unwrap(), &["umount"]),
    ];
    for (at, (program, args)) in ways.into_iter().enumerate() {
        let dir = mount.at(&at.to_string());
        fill(&dir);
        run(Command::new(program).args(args).arg(mount.path())).expect_success();
        assert_eq!(mount.ended().code(), Some(0), "{program} {args:?}: {}", mount.log());
        assert_eq!(mounts_on(mount.path()), 0);
        mount.start();
        if !memory_only() {
            check(&dir);
        }
    }
}

#[test]
fn an_unmount_with_open_files_is_refused_and_a_lazy_one_lets_them_finish() {
    let mut mount = Mount::new();
    fill(&mount.at("d"));
    let mut open = File::open(mount.at("d/2")).unwrap();
    let shown = mount.path().to_str().unwrap().to_owned();
    run(&mut kvcachefs(["umount", &shown])).expect_refusal(&[&shown, "busy", "--lazy"]);
    check(&mount.at("d"));
    run(&mut kvcachefs(["umount", "--lazy", &shown])).expect_success();
    assert_eq!(mounts_on(mount.path()), 0);
    let mut read = Vec::new();
    std::io::Read::read_to_end(&mut open, &mut read).unwrap();
    assert!(read == content(2), "an open file is read to its end");
    drop(open);
    assert_eq!(mount.ended().code(), Some(0), "{}", mount.log());
    mount.start();
    if !memory_only() {
        check(&mount.at("d"));
    }
}

/// A client that keeps a file open would have the daemon wait for the whole of `--drain-timeout`.
#[test]
fn a_second_signal_does_not_wait_for_clients() {
    let mut mount = Mount::with(Options::default().arg("--drain-timeout=1h"));
    fill(&mount.at("d"));
    let open = File::open(mount.at("d/2")).unwrap();
    mount.signal(Signal::SIGTERM);
    wait_until("detached after the drain", || mounts_on(mount.path()) == 0);
    mount.signal(Signal::SIGTERM);
    assert_eq!(mount.ended().code(), Some(0), "{}", mount.log());
    drop(open);
    mount.start();
    if !memory_only() {
        check(&mount.at("d"));
    }
}

#[test]
fn clients_that_do_not_let_go_are_left_behind_with_everything_durable() {
    let mut mount = Mount::with(Options::default().arg("--drain-timeout=1s"));
    fill(&mount.at("d"));
    let open = File::open(mount.at("d/2")).unwrap();
    mount.signal(Signal::SIGTERM);
    assert_eq!(mount.ended().code(), Some(0), "{}", mount.log());
    assert!(mount.log().contains("everything is stored; waiting up to 1s"), "{}", mount.log());
    assert!(mount.log().contains("clients still use the mount"), "{}", mount.log());
    let error = open.metadata().and_then(|_| File::open(mount.at("d/2"))).unwrap_err();
    assert!(
        matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ENOENT | libc::ECONNABORTED)),
        "{error}"
    );
    drop(open);
    mount.start();
    if !memory_only() {
        check(&mount.at("d"));
    }
}

/// However far the drain has come: what was fsynced is there, the rest is whole or absent, and exit code 0 means all.
#[test]
fn an_impatient_end_loses_nothing_that_was_durable() {
    if memory_only() {
        return;
    }
    for (drain_timeout, signals) in [("1h", 2), ("1ms", 1)] {
        let argument = format!("--drain-timeout={drain_timeout}");
        let mut mount = Mount::with(Options::new(256, 512).arg(&argument).arg("--dirty-limit=200MiB"));
        fill(&mount.at("durable"));
        mount.drain();
        fs::create_dir(mount.at("dirty")).unwrap();
        for seed in 0..40 {
            fs::write(mount.at(&format!("dirty/{seed}")), bytes(seed, 4 << 20)).unwrap();
        }
        for _ in 0..signals {
            mount.signal(Signal::SIGTERM);
        }
        let status = mount.ended();
        assert!(matches!(status.code(), Some(0 | 1)), "{status}: {}", mount.log());
        assert_eq!(mounts_on(mount.path()), 0);
        let log = mount.log();
        mount.start();
        check(&mount.at("durable"));
        let mut there = 0;
        for seed in 0..40 {
            match fs::read(mount.at(&format!("dirty/{seed}"))) {
                Ok(read) => {
                    assert!(read == bytes(seed, 4 << 20), "dirty/{seed} is not what was written");
                    there += 1;
                }
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "dirty/{seed}"),
            }
        }
        assert!(!status.success() || there == 40, "exit code 0 with {there} of 40 files stored: {log}");
        if !status.success() {
            assert!(log.contains("what was durable is safe"), "{log}");
        }
    }
}

#[test]
fn a_daemon_that_ends_takes_only_its_own_mount_with_it() {
    let mut old = Mount::with(Options::default().arg("--drain-timeout=1s"));
    fs::write(old.at("f"), "old").unwrap();
    let open = File::open(old.at("f")).unwrap();
    run(&mut kvcachefs(["umount", "--lazy", old.path().to_str().unwrap()])).expect_success();
    let pid_file = old.scratch.path().join("new.pid");
    let args = ["mount", "--daemon", "--l1=64MiB", "--pid-file", pid_file.to_str().unwrap()];
    run(kvcachefs(args).arg(old.path())).expect_success();
    let new: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    fs::write(old.at("g"), "new").unwrap();
    old.signal(Signal::SIGTERM);
    assert_eq!(old.ended().code(), Some(0), "{}", old.log());
    assert_eq!(fs::read_to_string(old.at("g")).unwrap(), "new");
    drop(open);
    run(&mut kvcachefs(["umount", old.path().to_str().unwrap()])).expect_success();
    wait_until("the new daemon ends", || !is_running(new));
}

/// After an umount the daemon has work to do, and its pid file is still there.
#[test]
fn a_mount_waits_for_the_pid_file_of_a_daemon_that_is_ending() {
    let mut old = Mount::new();
    let pid_file = format!("--pid-file={}", old.scratch.path().join("pid").display());
    old.stop();
    old.set_extra(&[&pid_file]);
    old.start();
    fs::write(old.at("f"), "old").unwrap();
    let open = File::open(old.at("f")).unwrap();
    run(&mut kvcachefs(["umount", "--lazy", old.path().to_str().unwrap()])).expect_success();
    let dir = old.path().to_owned();
    let new =
        std::thread::spawn(move || run(kvcachefs(["mount", "--daemon", "--l1=64MiB", &pid_file]).arg(dir)));
    std::thread::sleep(std::time::Duration::from_millis(500));
    drop(open);
    assert_eq!(old.ended().code(), Some(0), "{}", old.log());
    let said = new.join().unwrap();
    assert_eq!(said.code, Some(0), "{said:?}");
    let new: i32 = fs::read_to_string(old.scratch.path().join("pid")).unwrap().trim().parse().unwrap();
    run(&mut kvcachefs(["umount", old.path().to_str().unwrap()])).expect_success();
    wait_until("the new daemon ends", || !is_running(new));
}

#[test]
fn in_the_background_it_returns_when_the_mount_works() {
    let mut mount = Mount::new();
    let stores = mount.stores();
    mount.stop();
    let pid_file = mount.scratch.path().join("pid");
    let log = mount.scratch.path().join("background.log");
    for round in 0..3 {
        let mut command = kvcachefs(["mount", "--daemon", "--l1=64MiB"]);
        command.args(&stores).arg("--pid-file").arg(&pid_file).arg("--log-file").arg(&log);
        let said = run(command.arg(mount.path())).expect_success();
        assert_eq!(
            (said.stdout.as_str(), said.stderr.as_str()),
            ("", ""),
            "a log file leaves nothing to print"
        );
        assert_eq!(mounts_on(mount.path()), 1, "returned before the mount");
        let stats = fs::read_to_string(mount.at(".ctl/stats")).unwrap();
        let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        assert!(stats.starts_with(&format!("pid {pid}\n")), "{stats}");
        // It holds no directory busy and has no terminal to lose.
        assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
        assert_eq!(fs::read_link(format!("/proc/{pid}/fd/2")).unwrap(), Path::new("/dev/null"));
        if round > 0 && !memory_only() {
            check(&mount.at("d"));
        }
        fill(&mount.at("d"));
        run(&mut kvcachefs(["umount", mount.path().to_str().unwrap()])).expect_success();
        wait_until("the daemon ends", || !is_running(pid));
        assert!(!pid_file.exists(), "the pid file outlives the daemon");
    }
    assert_eq!(fs::read_to_string(&log).unwrap().matches("INFO  kvcachefs::daemon] unmounted").count(), 3);
}

#[test]
fn an_error_in_the_background_is_the_callers() {
    let mut mount = Mount::new();
    let stores = mount.stores();
    let other = mount.scratch.path().join("other");
    fs::create_dir(&other).unwrap();
    if !memory_only() {
        let said = run(kvcachefs(["mount", "--daemon", "--l1=64MiB"]).args(stores).arg(&other));
        said.expect_refusal(&["in use"]);
    }
    let pid_file = "--pid-file=/nowhere/pid";
    let said = run(kvcachefs(["mount", "--daemon", "--l1=64MiB", "--log-level=warn", pid_file]).arg(&other));
    said.expect_refusal(&["--pid-file", "/nowhere/pid"]);
    assert_eq!(mounts_on(&other), 0, "a mount is left behind");
}

#[test]
fn the_service_manager_is_told_of_beginning_and_end() {
    let mut mount = Mount::new();
    mount.stop();
    let socket = mount.scratch.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
    let told = |what: &str| {
        let mut text = [0; 4096];
        loop {
            let len = manager.recv(&mut text).unwrap_or_else(|error| panic!("no {what}: {error}"));
            if String::from_utf8_lossy(&text[..len]).lines().any(|line| line == what) {
                return;
            }
        }
    };
    // As the unit does it: whatever the file says, the process that was started is the one that serves.
    let file = mount.scratch.path().join("kv.toml");
    fs::write(&file, "daemon = true\nl1 = \"64MiB\"\n").unwrap();
    let mut daemon = kvcachefs(["mount", "--daemon=false", "--log-level=error", "--config"])
        .arg(&file)
        .arg(mount.path())
        .env("NOTIFY_SOCKET", &socket)
        .spawn()
        .unwrap();
    told("READY=1");
    assert_eq!(mounts_on(mount.path()), 1);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(daemon.id() as i32), Signal::SIGTERM).unwrap();
    told("STOPPING=1");
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_read_only_mount_shows_everything_and_changes_nothing() {
    let mut mount = Mount::new();
    fill(&mount.at("d"));
    mount.stop();
    mount.set_extra(&["--read-only"]);
    let before = (!memory_only()).then(|| fs::read(mount.store()).unwrap());
    mount.start();
    if !memory_only() {
        check(&mount.at("d"));
        let errors = [
            fs::write(mount.at("d/0"), "x"),
            fs::remove_file(mount.at("d/0")),
            fs::rename(mount.at("d/0"), mount.at("d/x")),
            fs::set_permissions(mount.at("d/0"), std::os::unix::fs::PermissionsExt::from_mode(0o600)),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().raw_os_error(), Some(Errno::EROFS as i32));
        }
    }
    for error in [fs::write(mount.at("new"), "x"), fs::create_dir(mount.at("new"))] {
        assert_eq!(error.unwrap_err().raw_os_error(), Some(Errno::EROFS as i32));
    }
    assert!(mount.status().starts_with("kvcachefs"));
    mount.stop();
    if let Some(before) = before {
        assert!(fs::read(mount.store()).unwrap() == before, "the store has changed");
    }
    mount.set_extra(&[]);
    mount.start();
    if !memory_only() {
        check(&mount.at("d"));
    }
}

#[test]
fn mount_tables_know_the_type_and_the_source() {
    let mut mount = Mount::new();
    let first = mount.stores().get(1).cloned();
    let source = first.map_or("kvcachefs".to_owned(), |store| {
        if mode() == Mode::Block { store } else { store.rsplit_once(':').unwrap().0.to_owned() }
    });
    let dir = mount.path().to_str().unwrap();
    let table = run(Command::new("findmnt").args(["-n", "-o", "FSTYPE,SOURCE", "-M", dir])).expect_success();
    assert_eq!(table.stdout.split_whitespace().collect::<Vec<_>>(), ["fuse.kvcachefs", &source]);
    let typed =
        Command::new("findmnt").args(["-n", "-o", "TARGET", "-t", "fuse.kvcachefs"]).output().unwrap();
    assert!(String::from_utf8_lossy(&typed.stdout).lines().any(|line| line == dir));
    let df = run(Command::new("df").args(["-T", dir])).expect_success();
    let row = df.stdout.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!((row[0], row[1], row[6]), (source.as_str(), "fuse.kvcachefs", dir));
}

#[test]
fn nothing_is_executed_where_that_is_not_wanted() {
    use std::os::unix::fs::PermissionsExt;
    let mut mount = Mount::new();
    for (options, runs) in [(&[][..], true), (&["-o", "noexec"], false), (&["-o", "noexec,exec"], true)] {
        mount.stop();
        mount.set_extra(options);
        mount.start();
        let program = mount.at("program");
        fs::copy("/bin/true", &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let ran = Command::new(&program).status();
        assert_eq!(ran.is_ok(), runs, "{options:?}: {ran:?}");
    }
}
