//! Bad input: each one line on standard error that names the thing and the remedy, and exit code 1. Nothing is left
//! mounted and nothing overwritten.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::run::{Outcome, is_running, kvcachefs, mounts_on, run, wait_until};
use common::{Mount, bytes, memory_only};

/// A directory with a mount point and room for stores.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("kvcachefs-errors-").tempdir().unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        Self(dir)
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn mnt(&self) -> String {
        self.at("mnt")
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.at(name), text).unwrap();
        self.at(name)
    }

    /// `kvcachefs mount ARGS... MNT`, quiet but for errors.
    fn mount(&self, args: &[&str]) -> Outcome {
        run(kvcachefs(["mount", "--log-level=error"]).args(args).arg(self.mnt()))
    }

    /// Mounts, unmounts again when the daemon has stored everything, and answers its log.
    fn mounts(&self, args: &[&str]) -> String {
        let (pid_file, log) = (self.at("daemon.pid"), self.at("daemon.log"));
        let mut command = kvcachefs(["mount", "--daemon", "--l1=64MiB", "--pid-file", &pid_file]);
        run(command.args(["--log-file", &log]).args(args).arg(self.mnt())).expect_success();
        let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        run(&mut kvcachefs(["umount", &self.mnt()])).expect_success();
        wait_until("the daemon ends", || !is_running(pid));
        let text = fs::read_to_string(&log).unwrap();
        fs::remove_file(&log).unwrap();
        text
    }

    fn refuses(&self, args: &[&str], parts: &[&str]) {
        self.mount(args).expect_refusal(parts);
        assert_eq!(mounts_on(Path::new(&self.mnt())), 0, "{args:?}: mounted");
    }
}

#[test]
fn wrong_words() {
    let place = Place::new();
    place.refuses(&["--l3=1GiB"], &["--l3", "unknown option", "mount --help"]);
    place.refuses(&["--cache-size=1GiB"], &["--cache-size", "unknown option", "mount --help"]);
    place.refuses(&["--dirty-limits=1GiB"], &["--dirty-limits", "did you mean --dirty-limit"]);
    place.refuses(&["--l1", "-5MiB"], &["-5", "no option", "negative", "leave out the -"]);
    place.refuses(&["--allow-other=maybe"], &["--allow-other", "'maybe'", "true or false"]);
    place.refuses(&["-o", "ro,bogus=1"], &["-o bogus: unknown option"]);
    place.refuses(&["--evict=fifo"], &["--evict", "fifo", "use lru or none"]);
    place.refuses(&["--threads=many"], &["--threads", "many"]);
    place.refuses(&["--threads=1000"], &["--threads", "1000", "give 2 to 64"]);
    place.refuses(&["--l1=1GiB", "--l1=2GiB"], &["--l1", "given twice", "give it once"]);
    run(&mut kvcachefs(["mnt"])).expect_refusal(&["mnt", "unknown command", "use mount, umount or version"]);
    run(&mut kvcachefs::<&str>([]))
        .expect_refusal(&["kvcachefs: no command given; use mount, umount or version"]);
    run(&mut kvcachefs(["mount"])).expect_refusal(&["MOUNTPOINT", "missing"]);
    run(&mut kvcachefs(["umount"])).expect_refusal(&["MOUNTPOINT"]);
    run(&mut kvcachefs(["umount", "/proc"])).expect_refusal(&["/proc", "type proc", "use umount"]);
    run(&mut kvcachefs(["umount", &place.mnt()])).expect_refusal(&[&place.mnt(), "no kvcachefs is mounted"]);
}

#[test]
fn sizes_and_times() {
    let place = Place::new();
    let store = format!("--l2={}:", place.at("store"));
    place.refuses(&["--l1=4"], &["--l1", "'4' has no unit", "4GiB"]);
    place.refuses(&["--l1=4GiBB"], &["--l1", "4GiBB"]);
    place.refuses(&["--l1=-1GiB"], &["--l1", "-1GiB"]);
    place.refuses(&["--l1=1MiB"], &["--l1", "1MiB", "give at least 64MiB"]);
    place.refuses(&[&format!("{store}200")], &["--l2", "'200' has no unit", "200GiB"]);
    place.refuses(&[&format!("{store}1MiB")], &["store", "1MiB is too small", "16MiB"]);
    place.refuses(&["--slab-rest=5"], &["--slab-rest", "'5' has no unit", "5s"]);
    place.refuses(&["--l1=64MiB", "--dirty-limit=64MiB"], &["--dirty-limit", "64MiB of L1", "give less"]);
    place.refuses(&["--small-file-max=1MiB"], &["--small-file-max", "1MiB", "256KiB"]);
    place.refuses(&["--queue-depth=100000"], &["--queue-depth", "100000", "give 1 to"]);
    assert!(!Path::new(&place.at("store")).exists(), "a store was made");
}

#[test]
fn more_memory_than_there_is() {
    let place = Place::new();
    place.refuses(&["--l1=900TiB"], &["--l1", "900TiB", "memory available", "give less"]);
    let lines = place.mount(&["-o", "l1=900TiB"]);
    lines.expect_refusal(&["900TiB"]);
}

#[test]
fn stores_larger_than_their_device() {
    let place = Place::new();
    let l2 = |size: &str| format!("--l2={}:{size}", place.at("store"));
    place.refuses(&["--l1=64MiB", &l2("900TiB")], &["store", "are free there", "smaller size"]);
    assert!(!Path::new(&place.at("store")).exists(), "a store was made");

    let device = LoopDevice::new(&place, 64 << 20);
    let l2 = format!("--l2={}:1GiB", device.0);
    place.refuses(&["--l1=64MiB", &l2], &[&device.0, "the device holds only 64MiB", "smaller size"]);
}

/// A store file is preallocated: one that a refused start left behind would fill the disk.
#[test]
fn a_start_that_is_refused_leaves_no_store_behind() {
    let place = Place::new();
    let l2 = |name: &str, size: &str| format!("--l2={}:{size}", place.at(name));
    place.mounts(&[&l2("old", "64MiB")]);
    let old = fs::read(place.at("old")).unwrap();
    for (args, parts) in [
        (vec![l2("old", "64MiB"), l2("new", "64MiB")], &["old", "1 path"][..]),
        (vec![l2("new", "64MiB"), l2("old", "64MiB")], &["new", "empty"]),
        (vec![l2("new", "64MiB"), "--pid-file=/nowhere/pid".to_owned()], &["/nowhere/pid"]),
        (vec![l2("new", "64MiB"), l2("newer", "16MiB"), "--l2-files-max=1000000".to_owned()], &["too small"]),
    ] {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        place.refuses(&[&["--l1=64MiB"], args.as_slice()].concat(), parts);
        for name in ["new", "newer"] {
            assert!(!Path::new(&place.at(name)).exists(), "{args:?} leaves {name} behind");
        }
        assert!(fs::read(place.at("old")).unwrap() == old, "{args:?} changes the old store");
    }
}

/// Whatever --format is to empty, is as it was after a start that is refused.
#[test]
fn a_start_that_is_refused_formats_nothing() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let l2 = format!("--l2={}:64MiB", place.at("store"));
    place.mounts(&[&l2]);
    let old = fs::read(place.at("store")).unwrap();
    let unharmed = |said: &Outcome, parts: &[&str]| {
        said.expect_refusal(parts);
        assert!(fs::read(place.at("store")).unwrap() == old, "the store was emptied: {}", said.stderr);
        assert_eq!(mounts_on(Path::new(&place.mnt())), 0, "mounted: {}", said.stderr);
    };
    let no_device = format!("--fuse-device={}", place.write("no-device", ""));
    unharmed(&place.mount(&["--l1=64MiB", "--format", &l2, &no_device]), &["--fuse-device"]);
    let other = format!("--l2={}:8MiB", place.at("other"));
    unharmed(&place.mount(&["--l1=64MiB", "--format", &l2, &other]), &["too small"]);

    std::os::unix::fs::chown(place.at("store"), Some(65534), Some(65534)).unwrap();
    // The mount point is root's.
    let format = ["--format", l2.as_str()];
    unharmed(&as_nobody(&place, &format), &[&place.mnt(), "mount as root"]);
    unharmed(&as_nobody(&place, &[&format[..], &["--read-path=passthrough"]].concat()), &["as root"]);
    let pid_file = format!("--pid-file={}", place.at("pid"));
    unharmed(&as_nobody(&place, &[&format[..], &[&pid_file]].concat()), &["--pid-file", "Permission denied"]);
    let pid_file = format!("--pid-file={}", place.write("pid", ""));
    fs::set_permissions(place.at("pid"), fs::Permissions::from_mode(0o644)).unwrap();
    unharmed(&as_nobody(&place, &[&format[..], &[&pid_file]].concat()), &["--pid-file", "Permission denied"]);
    // L1 that may not be locked, on a mount point that will do.
    let mut limited = Command::new("prlimit");
    limited.args(["--memlock=8192:8192", "setpriv", "--bounding-set=-ipc_lock,-sys_resource"]);
    limited.args(["--inh-caps=-ipc_lock,-sys_resource", "--"]).arg(common::binary());
    limited.args(["mount", "--l1=64MiB", "--log-level=error"]).args(format).arg(place.mnt());
    unharmed(&run(&mut limited), &["--l1", "64MiB", "cannot be locked", "--lock=false"]);
    place.mounts(&[&format!("--l2={}", place.at("store"))]);
}

/// Nothing is emptied after somebody has stopped the start that was to do it.
#[test]
fn a_start_that_is_stopped_formats_nothing() {
    use nix::sys::signal::{Signal, kill};
    let place = Place::new();
    let l2 = format!("--l2={}:64MiB", place.at("store"));
    place.mounts(&[&l2]);
    let old = fs::read(place.at("store")).unwrap();
    // Held by another for less long than the start would wait for it.
    let held = fs::File::open(place.at("store")).unwrap();
    held.lock().unwrap();
    let mut command = kvcachefs(["mount", "--log-level=error", "--l1=64MiB", "--format", &l2, &place.mnt()]);
    let start = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_until("the mount", || mounts_on(Path::new(&place.mnt())) == 1);
    kill(nix::unistd::Pid::from_raw(start.id() as i32), Signal::SIGINT).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    drop(held);
    wait_until("the start ends", || !is_running(start.id() as i32));
    let output = start.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("stopped by a signal"), "{output:?}");
    assert!(fs::read(place.at("store")).unwrap() == old, "the store was emptied: {said}");
    assert_eq!(mounts_on(Path::new(&place.mnt())), 0, "left mounted");
}

/// What is named as a pid file or a log is written, or goes: nothing else may be lost for it.
#[test]
fn a_pid_file_or_log_that_is_something_else_stays_as_it_is() {
    let place = Place::new();
    place.mounts(&[&format!("--l2={}:64MiB", place.at("store"))]);
    let notes = place.write("notes", "precious\n12\n");
    let content = |name: &str| fs::read(place.at(name)).unwrap();
    let (store, text) = (content("store"), content("notes"));
    let (pid_of, log_of) =
        (|path: &str| format!("--pid-file={path}"), |path: &str| format!("--log-file={path}"));
    let at = place.at("store");
    place.refuses(
        &["--l1=64MiB", &pid_of(&notes)],
        &["--pid-file", &notes, "something else", "file of its own"],
    );
    place.refuses(&["--l1=64MiB", &pid_of(&at)], &["--pid-file", &at, "something else"]);
    let own = format!("--l2={at}");
    place.refuses(&["--l1=64MiB", &own, &pid_of(&at)], &["--pid-file", &at, "is a store of --l2"]);
    place.refuses(&["--l1=64MiB", &own, &log_of(&at)], &["--log-file", &at, "is a store of --l2"]);
    place.refuses(&["--l1=64MiB", &log_of(&at)], &["--log-file", &at, "is a kvcachefs store"]);
    place.refuses(&["--l1=64MiB", &pid_of(&place.mnt())], &["--pid-file", "something else"]);
    assert!(content("store") == store && content("notes") == text);
    // One that is empty, or is left of a daemon that was killed, is taken.
    for left in ["", "2147483647\n"] {
        let path = place.write("daemon.pid", left);
        place.mounts(&[]);
        assert!(!Path::new(&path).exists());
    }
}

#[test]
fn paths_of_a_store_that_are_mixed_up_are_named() {
    let place = Place::new();
    let l2 = |name: &str, size: &str| format!("--l2={}{size}", place.at(name));
    place.mounts(&[&l2("one", ":512MiB"), &l2("two", ":64MiB")]);
    let (one, two) = (l2("one", ""), l2("two", ""));
    place.refuses(&["--l1=64MiB", &two, &one], &["two", "it is path 2 of its store, not 1"]);
    place.refuses(&["--l1=64MiB", &two], &["two", "its store has 2 paths, 1 is given"]);
    place.mounts(&[&one, &two]);

    let other = place.write("other", &"x".repeat(50 << 20));
    for size in [":64MiB", ":32MiB"] {
        place.refuses(
            &["--l1=64MiB", &l2("other", size)],
            &[&other, "50MiB", "not a kvcachefs store", "another path"],
        );
    }
    std::os::unix::fs::symlink("/nowhere/store", place.at("link")).unwrap();
    place.refuses(&["--l1=64MiB", &l2("link", ":64MiB")], &["link", "symbolic link to what is not there"]);
    let pid_file = place.at("pid");
    let more = ["mount", "--daemon", "--log-level=error", "--l1=64MiB", "--pid-file", &pid_file];
    run(kvcachefs(more).args([&one, &two, "--l2-files-max=100000000"]).arg(place.mnt())).expect_success();
    let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let config = fs::read_to_string(place.at("mnt/.ctl/config")).unwrap();
    run(&mut kvcachefs(["umount", &place.mnt()])).expect_success();
    wait_until("the daemon ends", || !is_running(pid));
    let line = config.lines().find(|line| line.starts_with("l2_files_max = ")).expect(&config);
    assert!(line.contains(" # flag, which asked for 100000000") && !line.contains("= 100000000"), "{line}");
    let log = place.mounts(&[&one, &two, "--l2-files-max=100000000"]);
    assert!(log.contains("--l2-files-max 100000000: the store was made for"), "{log}");
}

/// What a refusal tells people to do works, and the log says what it has cost.
#[test]
fn a_store_keeps_its_size_until_it_is_made_anew() {
    let place = Place::new();
    let l2 = |name: &str, size: &str| format!("--l2={}{size}", place.at(name));
    let len = |name: &str| fs::metadata(place.at(name)).unwrap().len();
    let small = place.write("kv", "6 bytes");
    place.refuses(&["--l1=64MiB", &l2("kv", "")], &[&small, "7 bytes", "give a size and --format"]);
    place.refuses(&["--l1=64MiB", &l2("kv", ":64MiB")], &[&small, "7B", "give --format"]);
    let log = place.mounts(&[&l2("kv", ":64MiB"), "--format"]);
    assert!(log.contains("--format overwrote what was no kvcachefs store"), "{log}");
    assert!(log.contains("on 1 path:") && log.contains("MiB for files"), "{log}");
    assert_eq!(len("kv"), 64 << 20);
    for (size, other) in [(":128MiB", 128), (":32MiB", 32)] {
        place.refuses(&["--l1=64MiB", &l2("kv", size)], &[&small, "leave out the size", "--format"]);
        assert!(!place.mounts(&[&l2("kv", "")]).contains("--format"));
        let log = place.mounts(&[&l2("kv", size), "--format"]);
        assert!(log.contains("--format emptied the store of ") && log.contains(" made 2"), "{log}");
        assert_eq!(len("kv"), other << 20);
    }
    // Nor does one get longer for others that do not fit beside it.
    let small = SmallDisk::new(&place, "96m");
    let on_small = |name: &str, size: &str| l2(&format!("small/{name}"), size);
    place.mounts(&[&on_small("kv", ":32MiB")]);
    let before = fs::read(place.at("small/kv")).unwrap();
    let both = [&on_small("kv", ":64MiB"), &on_small("other", ":48MiB"), "--format", "--l1=64MiB"];
    place.refuses(&both, &["small/other", "more bytes", "ask for less"]);
    assert!(fs::read(place.at("small/kv")).unwrap() == before, "{} bytes", len("small/kv"));
    assert!(!Path::new(&place.at("small/other")).exists());
    drop(small);
    // Where one of several is refused, none is cut.
    let file = fs::File::open(place.at("kv")).unwrap();
    file.try_lock().unwrap();
    place.write("other", &"x".repeat(32 << 20));
    let both = [&l2("other", ":16MiB"), &l2("kv", ":16MiB"), "--format", "--l1=64MiB"];
    place.refuses(&both, &["kv", "in use"]);
    drop(file);
    assert_eq!((len("other"), len("kv")), (32 << 20, 32 << 20));
    assert!(fs::read(place.at("other")).unwrap().iter().all(|byte| *byte == b'x'));

    fs::OpenOptions::new().write(true).open(place.at("kv")).unwrap().set_len(48 << 20).unwrap();
    let log = place.mounts(&[&l2("kv", "")]);
    assert!(log.contains("kv: 16MiB at its end are not used") && log.contains("--format"), "{log}");
    place.write("mnt/below", "");
    let log = place.mounts(&[]);
    assert_eq!(log.matches("is not empty").count(), 1, "{log}");
}

#[test]
fn a_pid_file_of_another_daemon_is_not_taken_over() {
    let mut mount = Mount::new();
    mount.stop();
    let pid_file = mount.scratch.path().join("pid");
    let shown = pid_file.to_str().unwrap().to_owned();
    // A number that means nothing any more is no reason to refuse: here it is that of this test.
    fs::write(&pid_file, format!("{}\n", std::process::id())).unwrap();
    mount.set_extra(&["--pid-file", &shown]);
    mount.start();
    let pid = mount.pid().to_string();
    wait_until("the pid file", || fs::read_to_string(&pid_file).unwrap().trim() == pid);
    let place = Place::new();
    place.refuses(&["--l1=64MiB", "--pid-file", &shown], &["--pid-file", &shown, &pid, "which runs"]);
    assert_eq!(fs::read_to_string(&pid_file).unwrap().trim(), pid);
    mount.stop();
    assert!(!pid_file.exists());
}

#[test]
fn a_read_only_mount_makes_no_store() {
    let place = Place::new();
    let l2 = format!("--l2={}:64MiB", place.at("new"));
    place.refuses(&["--l1=64MiB", "--read-only", &l2], &["new", "does not exist", "read-only"]);
    assert!(!Path::new(&place.at("new")).exists());
    place.write("new", "");
    place.refuses(&["--l1=64MiB", "--read-only", &l2], &["new", "is empty", "read-only"]);
    fs::File::create(place.at("new")).unwrap().set_len(64 << 20).unwrap();
    place.refuses(&["--l1=64MiB", "--read-only", &l2], &["new", "there is no store", "read-only"]);
    assert!(fs::read(place.at("new")).unwrap().iter().all(|byte| *byte == 0));
}

/// A file system with little room, below the place.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(place: &Place, size: &str) -> Self {
        let disk = Self(place.at("small").into());
        fs::create_dir(&disk.0).unwrap();
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(&disk.0))
            .expect_success();
        disk
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

struct LoopDevice(String);

impl LoopDevice {
    fn new(place: &Place, size: u64) -> Self {
        let file = place.at("disk");
        fs::File::create(&file).unwrap().set_len(size).unwrap();
        let out = run(Command::new("losetup").args(["--find", "--show"]).arg(&file)).expect_success();
        Self(out.stdout.trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn paths_that_are_not_what_they_should_be() {
    let place = Place::new();
    let file = place.write("file", "precious");
    let missing = place.at("missing");
    let at = |path: &str| run(&mut kvcachefs(["mount", "--log-level=error", "--l1=64MiB", path]));
    at(&missing).expect_refusal(&[&missing, "does not exist", "mkdir -p"]);
    at(&file).expect_refusal(&[&file, "is not a directory"]);

    let l2 = |path: &str| format!("--l2={path}");
    place.refuses(&[&l2(&format!("{missing}/store:64MiB"))], &["--l2", &missing, "mkdir -p"]);
    place.refuses(&[&l2(&missing)], &["--l2", &missing, "does not exist", "give a size"]);
    place.refuses(&[&l2(&place.mnt())], &["--l2", &place.mnt(), "is a directory", "name a file in it"]);
    place.refuses(&[&l2("/dev/null")], &["--l2", "/dev/null", "neither a file nor a block device"]);
    place.refuses(&[&l2(&file)], &["--l2", &file, "too few for a store"]);
    let foreign = place.write("foreign", &"somebody's own bytes ".repeat(1 << 20));
    place.refuses(&["--l1=64MiB", &l2(&foreign)], &[&foreign, "not a kvcachefs store", "--format"]);
    assert!(fs::read_to_string(&foreign).unwrap().starts_with("somebody's own"), "overwritten");
    let twice = l2(&format!("{}:64MiB", place.at("s")));
    place.refuses(&[&twice, &twice], &["--l2", "given twice"]);
    place.refuses(&["--format"], &["--format", "no L2", "--l2 PATH:SIZE"]);
    place.refuses(&["-o", "remount,ro"], &["-o remount", "not supported", "mount again"]);
    run(&mut kvcachefs(["mount", &place.mnt(), &missing])).expect_refusal(&[&missing, "second mount point"]);
    place.refuses(&["--l1=64MiB", "--log-file=/nowhere/log"], &["--log-file", "/nowhere/log"]);
    place.refuses(&["--l1=64MiB", "--pid-file=/nowhere/pid"], &["--pid-file", "/nowhere/pid"]);
    let (victim, link) = (place.write("victim", "somebody's own"), place.at("link"));
    std::os::unix::fs::symlink(&victim, &link).unwrap();
    place.refuses(&["--l1=64MiB", &format!("--pid-file={link}")], &["--pid-file", &link, "no symbolic link"]);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "somebody's own");
}

#[test]
fn a_store_in_use_and_a_mount_point_that_is_busy() {
    let mut mount = Mount::new();
    let place = Place::new();
    if !memory_only() {
        let stores = mount.stores();
        let stores: Vec<_> = stores.iter().map(String::as_str).collect();
        // Who it is, so that somebody can do something about it. Of a block device the kernel does not tell.
        let pid = match common::mode() {
            common::Mode::Block => "in use".to_owned(),
            _ => format!("in use by kvcachefs, pid {}: wait if it is stopping", mount.pid()),
        };
        place.refuses(&[&["--l1=64MiB"], stores.as_slice()].concat(), &[&pid, "another"]);
        let format = [&["--l1=64MiB", "--format"], stores.as_slice()].concat();
        place.refuses(&format, &["in use", "another"]);
    }
    let dir = mount.path().to_str().unwrap().to_owned();
    let said = run(&mut kvcachefs(["mount", "--l1=64MiB", "--log-level=error", &dir]));
    said.expect_refusal(&[&dir, "busy", "mounted here already", &format!("kvcachefs umount {dir}")]);
    assert_eq!(mounts_on(mount.path()), 1);
    fs::write(mount.at("f"), bytes(1, 100)).unwrap();
    assert!(fs::read(mount.at("f")).unwrap() == bytes(1, 100), "the first mount is unharmed");
}

#[test]
fn a_mount_whose_daemon_is_stopped_is_busy_and_nobody_hangs() {
    let mount = Mount::new();
    mount.signal(nix::sys::signal::Signal::SIGSTOP);
    let tasks = || fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap().flatten();
    let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap();
    wait_until("every thread is stopped", || tasks().all(|task| stat(task).contains(") T ")));
    let dir = mount.path().to_str().unwrap().to_owned();
    let said = run(&mut kvcachefs(["mount", "--l1=64MiB", "--log-level=error", &dir]));
    mount.signal(nix::sys::signal::Signal::SIGCONT);
    said.expect_refusal(&[&dir, "busy", "does not answer", "umount --force"]);
}

#[test]
fn a_stale_mount_point_is_recognised_and_replaced() {
    let mut mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 1 << 20)).unwrap();
    mount.drain();
    // Who stands in it, or has something of it open, keeps nobody from mounting there again.
    let mut standing = Command::new("sleep").arg("600").current_dir(mount.path()).spawn().unwrap();
    let open = fs::File::open(mount.at("f")).unwrap();
    mount.signal(nix::sys::signal::Signal::SIGKILL);
    mount.ended();
    let error = fs::read_dir(mount.path()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN), "the mount is dead");
    assert_eq!(mounts_on(mount.path()), 1);
    mount.start();
    assert_eq!(standing.try_wait().unwrap(), None, "it stands there");
    standing.kill().unwrap();
    standing.wait().unwrap();
    drop(open);
    assert!(mount.log().contains("dead kvcachefs mount"), "{}", mount.log());
    assert_eq!(mounts_on(mount.path()), 1, "the dead mount is below the new one");
    if !memory_only() {
        assert!(fs::read(mount.at("f")).unwrap() == bytes(1, 1 << 20));
    }
}

#[test]
fn no_fuse_device() {
    let place = Place::new();
    let missing = place.at("fuse");
    place.refuses(&[&format!("--fuse-device={missing}")], &[&missing, "modprobe fuse"]);
    let file = place.write("no-device", "");
    place.refuses(&["--l1=64MiB", &format!("--fuse-device={file}")], &["--fuse-device"]);
    // As in a container that was not given the device.
    let script = format!(
        "mount -t tmpfs none /dev && exec {} mount --l1=64MiB --log-level=error {}",
        common::binary().display(),
        place.mnt()
    );
    let said = run(Command::new("unshare").args(["--mount", "sh", "-c", &script]));
    said.expect_refusal(&["/dev/fuse", "No such file", "modprobe fuse", "--device /dev/fuse"]);
}

/// The program as a user who may do nothing in particular.
fn as_nobody(place: &Place, args: &[&str]) -> Outcome {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(place.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = PathBuf::from(place.at("kvcachefs"));
    fs::copy(common::binary(), &program).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program);
    run(command
        .args(["mount", "--l1=64MiB", "--lock=false", "--log-level=error"])
        .args(args)
        .arg(place.mnt()))
}

#[test]
fn no_permission() {
    let place = Place::new();
    // The mount point is root's.
    as_nobody(&place, &[]).expect_refusal(&[&place.mnt(), "mount as root"]);
    // Another's store.
    let mut store = fs::File::create(place.at("store")).unwrap();
    std::io::Write::write_all(&mut store, &[0; 4096]).unwrap();
    store.set_len(64 << 20).unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(place.at("store"), fs::Permissions::from_mode(0o600)).unwrap();
    let l2 = format!("--l2={}", place.at("store"));
    as_nobody(&place, &[&l2]).expect_refusal(&[&place.at("store"), "Permission denied", "run as"]);
    // A directory in which no store may be made.
    let l2 = format!("--l2={}:64MiB", place.at("new"));
    as_nobody(&place, &[&l2]).expect_refusal(&[&place.at("new"), "Permission denied", "run as"]);
    // A configuration that may not be read.
    let file = place.write("kv.toml", "");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let config = format!("--config={file}");
    as_nobody(&place, &[&config]).expect_refusal(&[&file, "Permission denied", "make it readable"]);
}

#[test]
fn a_configuration_file_that_is_wrong() {
    let place = Place::new();
    let refuses = |text: &str, parts: &[&str]| {
        let file = place.write("kv.toml", text);
        place.refuses(&[&format!("--config={file}")], &[&[file.as_str()], parts].concat());
    };
    refuses("l1 = \"64MiB\"\nthreads =\n", &["line 2"]);
    refuses("l1 = \"64MiB\"\n[l2\n", &["line 2"]);
    refuses("\n\nl3 = \"4GiB\"\n", &["line 3", "l3", "no such option", "remove it"]);
    refuses("l1 = \"64MiB\"\ndirty-limit = \"1GiB\"\n", &["line 2", "dirty-limit", "write dirty_limit"]);
    refuses("[mount]\nl1 = \"64MiB\"\n", &["line 1", "no sections", "leave out"]);
    refuses("l1 = \"64MiB\"\nl1 = \"65MiB\"\n", &["line 2", "l1", "give it once"]);
    refuses("l1 = 4\n", &["line 1", "l1"]);
    refuses("l1 = \"4\"\n", &["line 1", "l1", "no unit"]);
    refuses("threads = \"many\"\n", &["line 1", "threads"]);
    refuses("l2 = [\"store:1GiB\"]\n", &["l2", "store", "relative path", "leading /"]);
    let missing = place.at("missing.toml");
    place.refuses(&[&format!("--config={missing}")], &[&missing, "No such file", "leave out --config"]);
    place.refuses(&[&format!("--config={}", place.mnt())], &[&place.mnt(), "TOML file"]);
}

#[test]
fn an_environment_that_is_wrong() {
    let place = Place::new();
    let with = |name: &str, value: &str| {
        let mut command = kvcachefs(["mount", "--log-level=error"]);
        run(command.arg(place.mnt()).env(name, value))
    };
    with("KVCACHEFS_L1", "4").expect_refusal(&["KVCACHEFS_L1", "no unit", "4GiB"]);
    with("KVCACHEFS_DIRTY_LIMIT", "lots").expect_refusal(&["KVCACHEFS_DIRTY_LIMIT", "lots"]);
    with("KVCACHEFS_LOCK", "perhaps").expect_refusal(&["KVCACHEFS_LOCK", "perhaps"]);
    with("KVCACHEFS_L1", "1MiB").expect_refusal(&["KVCACHEFS_L1", "1MiB", "give at least"]);
    with("KVCACHEFS_CONFIG", "/nowhere.toml").expect_refusal(&["/nowhere.toml", "No such file"]);
}

/// Flags win over the environment, that over the file, that over the defaults; `.ctl/config` says who set what.
#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let place = Place::new();
    let file = place.write(
        "kv.toml",
        "l1 = \"64MiB\"\nthreads = 3\npublish_wait = \"11ms\"\nlog_level = \"error\"\nfsname = \"file\"\n",
    );
    let pid_file = place.at("pid");
    let mut command = kvcachefs(["mount", "--daemon", "--l1=96MiB", "-o", "publish_wait=33ms,threads=5"]);
    command.args(["--config", &file, "--pid-file", &pid_file, "--threads=6"]).arg(place.mnt());
    let env = [("L1", "80MiB"), ("THREADS", "4"), ("PUBLISH_WAIT", "22ms"), ("FSNAME", "env"), ("L9", "x")];
    run(command.envs(env.map(|(name, value)| (format!("KVCACHEFS_{name}"), value)))).expect_success();
    let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let config = fs::read_to_string(place.at("mnt/.ctl/config")).unwrap();
    let unmounted = run(&mut kvcachefs(["umount", &place.mnt()]));
    for line in [
        "l1 = \"96MiB\" # flag",
        "threads = 6 # flag",
        "publish_wait = \"33ms\" # flag",
        "fsname = \"env\" # env",
        "log_level = \"error\" # file",
        "drain_timeout = \"30s\" # default",
        // Without L2 as many as there can be; what is in effect has a value.
        "l2_files_max = 2147483647 # default",
    ] {
        assert!(config.lines().any(|known| known == line), "no '{line}' in\n{config}");
    }
    unmounted.expect_success();
    wait_until("the daemon ends", || !is_running(pid));
}
