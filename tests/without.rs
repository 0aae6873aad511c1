//! A mount that must do without something (rule R17) works all the same and says so in its status.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "a seccomp filter is installed between fork and exec")]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::run::{kvcachefs, run, wait_until};
use common::{Mode, Mount, Options, bytes, memory_only, mode};

const NOBODY: u32 = 65_534;

#[test]
fn without_passthrough_it_says_who_reads() {
    let options = Options::default();
    // One mode says it already.
    let mount = Mount::with(if mode() == Mode::Daemon { options } else { options.arg("--read-path=daemon") });
    fs::write(mount.at("f"), bytes(1, 3 << 20)).unwrap();
    assert!(fs::read(mount.at("f")).unwrap() == bytes(1, 3 << 20));
    assert!(mount.status().contains("without: passthrough (--read-path daemon)"), "{}", mount.status());
    assert_eq!((mount.stat("passthrough"), mount.stat("opens_passthrough")), (0, 0));
}

const fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}
/// Loads 32 bits of what the kernel tells of the call: its number, and the lower halves of its arguments.
const fn load(at: u32) -> libc::sock_filter {
    op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at)
}
const NUMBER: u32 = 0;
const ARGUMENTS: [u32; 2] = [16, 24];
/// Skips so many instructions if what was loaded is equal, or is not.
const fn skip(equal: u32, if_so: u8, if_not: u8) -> libc::sock_filter {
    op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, if_so, if_not, equal)
}
const REFUSE: libc::sock_filter =
    op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
const ALLOW: libc::sock_filter = op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW);

/// The program runs under a filter of system calls, as in containers.
fn filtered(command: &mut Command, filter: Vec<libc::sock_filter>) -> &mut Command {
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: prctl is async-signal-safe; the program lives until the call returns, and the kernel copies it.
        let result = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(install) }
}

fn forbid_io_uring(command: &mut Command) -> &mut Command {
    filtered(command, vec![load(NUMBER), skip(libc::SYS_io_uring_setup as u32, 0, 1), REFUSE, ALLOW])
}

/// Answers FUSE_DEV_IOC_BACKING_OPEN with EPERM on every descriptor but this one.
fn forbid_backing_files(command: &mut Command, but: i32) -> &mut Command {
    const BACKING_OPEN: u32 = 1 << 30 | 16 << 16 | 229 << 8 | 1;
    let filter = vec![
        load(NUMBER),
        skip(libc::SYS_ioctl as u32, 0, 5),
        load(ARGUMENTS[1]),
        skip(BACKING_OPEN, 0, 3),
        load(ARGUMENTS[0]),
        skip(but as u32, 1, 0),
        REFUSE,
        ALLOW,
    ];
    filtered(command, filter)
}

/// The kernel takes backing files when the mount is made, and refuses most of them later.
#[test]
fn without_passthrough_for_a_file_the_daemon_reads_it() {
    let mut mount = Mount::new();
    if mount.stat("passthrough") == 0 {
        return;
    }
    let stores = mount.stores();
    mount.stop();
    let pid_file = mount.scratch.path().join("pid");
    let command = || {
        let mut command = kvcachefs(["mount", "--daemon", "--l1=128MiB", "--log-level=error", "--threads=4"]);
        command.args(&stores).arg("--pid-file").arg(&pid_file).arg(mount.path());
        command
    };
    let unmount = || {
        run(&mut kvcachefs(["umount", mount.path().to_str().unwrap()])).expect_success();
        wait_until("the daemon ends", || !pid_file.exists());
    };
    // The descriptor that the daemon tries it with when it starts; the other threads have copies.
    run(&mut command()).expect_success();
    let pid = fs::read_to_string(&pid_file).unwrap().trim().to_owned();
    let tried_with = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(Result::unwrap)
        .filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == Path::new("/dev/fuse")))
        .map(|fd| fd.file_name().to_str().unwrap().parse::<i32>().unwrap())
        .min()
        .unwrap();
    unmount();
    // Threads that start meanwhile open files, too: it may be another number the next time.
    let tries = (0..3).flat_map(|_| std::iter::once(tried_with).chain(3..40)).any(|number: i32| {
        run(forbid_backing_files(&mut command(), number)).expect_success();
        let succeeded = mount.stat("passthrough") == 1;
        if !succeeded {
            unmount();
        }
        succeeded
    });
    assert!(tries, "the test needs the first try to succeed");

    let files: Vec<PathBuf> = (0..32).map(|at| mount.at(&format!("f{at}"))).collect();
    for (at, path) in files.iter().enumerate() {
        fs::write(path, bytes(at as u64, 1 << 20)).unwrap();
    }
    // Many at once, so that some opens wait for the one that tries, and each file is read in one way by all.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for (at, path) in files.iter().enumerate() {
                    let open = fs::File::open(path).unwrap();
                    assert!(fs::read(path).unwrap() == bytes(at as u64, 1 << 20));
                    drop(open);
                }
            });
        }
    });
    let status = mount.status();
    assert!(status.contains("without: passthrough for some files (the kernel refused it: "), "{status}");
    assert!(mount.stat("opens_direct") > 0);
    mount.check_quiet();
    unmount();
}

#[test]
fn without_io_uring_the_thread_engine_takes_over() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    let stores = mount.stores();
    mount.stop();
    let pid_file = mount.scratch.path().join("pid");
    let mut command = kvcachefs(["mount", "--daemon", "--l1=128MiB", "--log-level=error"]);
    command.args(&stores).arg("--pid-file").arg(&pid_file).arg(mount.path());
    run(forbid_io_uring(&mut command)).expect_success();
    fs::write(mount.at("f"), bytes(1, 3 << 20)).unwrap();
    mount.push_out_of_l1();
    assert!(fs::read(mount.at("f")).unwrap() == bytes(1, 3 << 20));
    assert!(mount.stat("read_l2_bytes") > 0);
    let status = mount.status();
    assert!(status.contains("engine threads"), "{status}");
    assert!(status.lines().any(|line| line.starts_with("without: io_uring")), "{status}");
    run(&mut kvcachefs(["umount", mount.path().to_str().unwrap()])).expect_success();
    wait_until("the daemon ends", || !pid_file.exists());

    let mut command = kvcachefs(["mount", "--l1=128MiB", "--log-level=error", "--l2-engine=uring"]);
    command.args(&stores).arg(mount.path());
    run(forbid_io_uring(&mut command)).expect_refusal(&["io_uring", "--l2-engine"]);
}

/// Slabs are opened a second time by their path in /proc, where their mode counts for all but CAP_DAC_OVERRIDE.
#[test]
fn a_umask_that_takes_everything_takes_no_slab() {
    let mut mount = Mount::new();
    mount.stop();
    let mut command = Command::new("setpriv");
    command.args([
        "--bounding-set=-dac_override,-dac_read_search",
        "--",
        "sh",
        "-c",
        "umask 0777; exec \"$@\"",
        "sh",
    ]);
    command.arg(common::binary()).args(["mount", "--l1=64MiB", "--log-level=warn"]).arg(mount.path());
    let log = mount.scratch.path().join("umask.log");
    let mut daemon = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    wait_until("the mount", || {
        assert!(daemon.try_wait().unwrap().is_none(), "{}", said());
        mount.at(".ctl/version").exists()
    });
    fs::write(mount.at("f"), bytes(1, 4 << 20)).unwrap();
    let in_slabs = mount.stat("l1_slab_bytes");
    assert!(fs::read(mount.at("f")).unwrap() == bytes(1, 4 << 20));
    run(&mut kvcachefs(["umount", mount.path().to_str().unwrap()])).expect_success();
    assert!(daemon.wait().unwrap().success(), "{}", said());
    assert_eq!(in_slabs, 4 << 20, "{}", said());
    assert!(!said().contains("no memory"), "{}", said());
}

/// A daemon that runs as nobody, in a mount namespace where /dev/fuse is open to all, as on most machines.
struct Nobodys {
    daemon: Child,
    scratch: tempfile::TempDir,
}

const AS_NOBODY: [&str; 5] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];

impl Nobodys {
    fn spawn(args: &[&str]) -> Self {
        Self::spawn_by(&[], args)
    }

    /// `by` is a program that runs the one after it.
    fn spawn_by(by: &[&str], args: &[&str]) -> Self {
        let scratch = tempfile::Builder::new().prefix("kvcachefs-nobody-").tempdir().unwrap();
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // The build directory may be closed to others.
        fs::copy(common::binary(), scratch.path().join("kvcachefs")).unwrap();
        for owned in ["mnt", "l2"] {
            fs::create_dir(scratch.path().join(owned)).unwrap();
            chown(scratch.path().join(owned), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let script = r#"
            mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse || exit 9
            exec "$@""#;
        let log = fs::File::create(scratch.path().join("log")).unwrap();
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", script, "sh"])
            .args(by)
            .args(AS_NOBODY)
            .arg("./kvcachefs")
            .args(args);
        // What chooses the mode of this test names no option of the daemon's, which it would say.
        let ours =
            |(name, _): &(std::ffi::OsString, _)| name.to_string_lossy().starts_with("KVCACHEFS_TEST_");
        std::env::vars_os().filter(ours).for_each(|(name, _)| {
            command.env_remove(name);
        });
        let daemon = command.arg(scratch.path().join("mnt"));
        let daemon = daemon.current_dir(scratch.path()).stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Self { daemon, scratch }
    }

    fn dir(&self) -> PathBuf {
        self.scratch.path().join("mnt")
    }

    /// A program that nobody runs where the mount is.
    fn command<S: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--mount", "--target", &self.daemon.id().to_string(), "--"])
            .args(AS_NOBODY)
            .args(words);
        command
    }

    fn read(&self, path: &str) -> Option<Vec<u8>> {
        let output = self.command([Path::new("cat"), &self.dir().join(path)]).output().unwrap();
        output.status.success().then_some(output.stdout)
    }

    fn wait_mounted(&mut self) {
        wait_until("a mount of nobody's", || {
            let ended = self.daemon.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.log());
            self.read(".ctl/version").is_some_and(|text| text.starts_with(b"kvcachefs"))
        });
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Nobodys {
    fn drop(&mut self) {
        // The mount ends with the namespace, and that with its last process.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Through the setuid program fusermount3, without CAP_SYS_ADMIN and so without passthrough.
#[test]
fn without_any_capability_it_mounts_through_the_helper() {
    let mut args = vec!["mount", "--l1=64MiB", "--lock=false", "--log-level=warn"];
    if !memory_only() {
        args.push("--l2=l2/store:128MiB");
    }
    let mut mount = Nobodys::spawn(&args);
    mount.wait_mounted();
    let status = String::from_utf8(mount.read(".ctl/status").unwrap()).unwrap();
    assert!(
        status.lines().any(|line| line.starts_with("without: passthrough") && line.contains("CAP_SYS_ADMIN")),
        "{status}"
    );
    let table = fs::read_to_string(format!("/proc/{}/mountinfo", mount.daemon.id())).unwrap();
    let line = table.lines().find(|line| line.contains(mount.dir().to_str().unwrap())).unwrap();
    assert!(line.contains(" - fuse.kvcachefs "), "{line}");
    let file = mount.scratch.path().join("file");
    fs::write(&file, bytes(1, 3 << 20)).unwrap();
    run(&mut mount.command([Path::new("cp"), &file, &mount.dir().join("f")])).expect_success();
    assert!(mount.read("f").unwrap() == bytes(1, 3 << 20));
    let program = mount.scratch.path().join("kvcachefs");
    run(&mut mount.command([&program, Path::new("umount"), &mount.dir()])).expect_success();
    assert!(mount.daemon.wait().unwrap().success(), "{}", mount.log());
}

#[test]
fn passthrough_that_is_insisted_on_is_refused_where_it_cannot_be() {
    let args = ["mount", "--l1=64MiB", "--lock=false", "--log-level=error", "--read-path=passthrough"];
    let mut mount = Nobodys::spawn(&args);
    assert_eq!(mount.daemon.wait().unwrap().code(), Some(1), "{}", mount.log());
    let log = mount.log();
    assert!(log.trim_end().lines().count() == 1 && log.contains("--read-path passthrough"), "{log}");
    assert!(log.contains("use --read-path auto, or run as root"), "{log}");
}

/// What may be locked is 8 MiB for an ordinary user on most machines.
#[test]
fn memory_that_may_not_be_locked_is_said_before_it_is_missed() {
    let mut args = vec!["mount", "--l1=64MiB"];
    if !memory_only() {
        args.push("--l2=l2/store:128MiB");
    }
    let mut mount = Nobodys::spawn(&args);
    assert_eq!(mount.daemon.wait().unwrap().code(), Some(1), "{}", mount.log());
    let log = mount.log();
    assert!(log.trim_end().lines().count() == 1 && log.contains("--l1"), "{log}");
    assert!(log.contains("--lock=false") && log.contains("RLIMIT_MEMLOCK"), "{log}");
    assert!(!mount.scratch.path().join("l2/store").exists(), "a store is left behind");
}

/// A limit that L1 fits in is enough, however many slabs it is cut into.
#[test]
fn a_limit_of_locked_memory_that_l1_fits_in_is_enough() {
    const LIMIT: &str = "--memlock=67108864";
    if run(Command::new("prlimit").args([LIMIT, "true"])).code != Some(0) {
        eprintln!("not tested: without CAP_SYS_RESOURCE the limit cannot be set");
        return;
    }
    let mut args = vec!["mount", "--l1=64MiB", "--log-level=warn"];
    if !memory_only() {
        args.push("--l2=l2/store:256MiB");
    }
    let mut mount = Nobodys::spawn_by(&["prlimit", LIMIT], &args);
    mount.wait_mounted();
    for at in 0..(if memory_only() { 12 } else { 24 }) {
        let file = mount.scratch.path().join("file");
        // Sizes differ, so slabs are resized.
        let size = (3 << 20) + (at % 3) * 300_000;
        fs::write(&file, bytes(at as u64, size)).unwrap();
        let name = format!("f{at}");
        run(&mut mount.command([Path::new("cp"), &file, &mount.dir().join(&name)])).expect_success();
        assert!(mount.read(&name).unwrap() == bytes(at as u64, size), "{name}: {}", mount.log());
    }
    let stats = String::from_utf8(mount.read(".ctl/stats").unwrap()).unwrap();
    let used: u64 =
        stats.lines().find_map(|line| line.strip_prefix("l1_used_bytes ")).unwrap().parse().unwrap();
    assert!(used > 32 << 20, "L1 holds no more than {used} bytes");
    let status = fs::read_to_string(format!("/proc/{}/status", mount.daemon.id())).unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    let locked: u64 = locked.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(locked << 10 >= used, "{locked} KiB locked of {used} bytes");
    assert!(!mount.log().contains("no memory for a slab"), "{}", mount.log());
}

/// The end of a file of memory or of a store, as the kernel sees it, may be no further than RLIMIT_FSIZE.
#[test]
fn a_limit_of_file_sizes_that_may_be_raised_is_raised() {
    let mut args = vec!["mount", "--l1=64MiB", "--lock=false", "--log-level=warn"];
    if !memory_only() {
        args.push("--l2=l2/store:128MiB");
    }
    let mut mount = Nobodys::spawn_by(&["prlimit", "--fsize=1048576:unlimited"], &args);
    mount.wait_mounted();
    let file = mount.scratch.path().join("file");
    fs::write(&file, bytes(1, 3 << 20)).unwrap();
    run(&mut mount.command([Path::new("cp"), &file, &mount.dir().join("f")])).expect_success();
    run(&mut mount.command([Path::new("sync"), &mount.dir().join("f")])).expect_success();
    assert!(mount.read("f").unwrap() == bytes(1, 3 << 20), "{}", mount.log());
}

#[test]
fn a_limit_of_file_sizes_that_is_too_small_is_said_before_it_is_met() {
    // The largest slab, and then the store.
    let cases = [("1048576", "--slab-file-max=64MiB"), ("16777216", "--slab-file-max=8MiB")];
    for (limit, slabs) in cases.into_iter().take(if memory_only() { 1 } else { 2 }) {
        let mut args = vec!["mount", "--l1=64MiB", "--lock=false", "--log-level=error", slabs];
        if !memory_only() {
            args.push("--l2=l2/store:128MiB");
        }
        let mut mount = Nobodys::spawn_by(&["prlimit", &format!("--fsize={limit}")], &args);
        assert_eq!(mount.daemon.wait().unwrap().code(), Some(1), "{}", mount.log());
        let log = mount.log();
        assert!(log.trim_end().lines().count() == 1 && log.contains("RLIMIT_FSIZE"), "{log}");
        assert!(log.contains("ulimit -f"), "{log}");
        assert!(!mount.scratch.path().join("l2/store").exists(), "a store is left behind");
    }
}

#[test]
fn a_limit_of_address_space_is_said() {
    let mut args = vec!["mount", "--l1=64MiB", "--lock=false", "--log-level=warn"];
    if !memory_only() {
        args.push("--l2=l2/store:128MiB");
    }
    let mut mount = Nobodys::spawn_by(&["prlimit", "--as=8589934592"], &args);
    mount.wait_mounted();
    let status = String::from_utf8(mount.read(".ctl/status").unwrap()).unwrap();
    assert!(status.contains("without: more than 8GiB of address space"), "{status}");
}

/// The signal that comes with it, SIGXFSZ, would.
#[test]
fn a_limit_of_file_sizes_that_is_set_later_ends_no_daemon() {
    let mount = Mount::with(Options::default().arg("--request-deadline=1s"));
    let pid = mount.pid().to_string();
    let limit = |limit: &str| {
        run(Command::new("prlimit").args([limit, "--pid", &pid])).expect_success();
    };
    limit("--fsize=1048576:");
    // There is no room in L1, and L2 fails.
    let error = fs::write(mount.at("f"), bytes(1, 5 << 20)).unwrap_err();
    let wanted = if memory_only() { libc::ENOSPC } else { libc::EIO };
    assert_eq!(error.raw_os_error(), Some(wanted), "{error}");
    limit("--fsize=unlimited:");
    fs::write(mount.at("f"), bytes(2, 5 << 20)).unwrap();
    assert!(fs::read(mount.at("f")).unwrap() == bytes(2, 5 << 20));
}
