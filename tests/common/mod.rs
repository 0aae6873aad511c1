//! A real mount for a test: the daemon as a process of its own, in a directory of its own, gone afterwards.
//!
//! `KVCACHEFS_TEST_MODE` chooses how it is mounted, so that the same tests run in every mode: `auto` (the default),
//! `daemon` (no passthrough), `threads` (no io_uring), `memory` (no L2), `striped` (L2 on three files), `block` (L2 on a
//! loop device), `strict` (slabs are never reused with their pages).
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

pub mod ctl;
pub mod run;
pub mod stall;
pub mod wedge;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How the tests are mounted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Auto,
    Daemon,
    Threads,
    Memory,
    Striped,
    Block,
    Strict,
}

pub fn mode() -> Mode {
    match std::env::var("KVCACHEFS_TEST_MODE").as_deref() {
        Err(_) | Ok("" | "auto") => Mode::Auto,
        Ok("daemon") => Mode::Daemon,
        Ok("threads") => Mode::Threads,
        Ok("memory") => Mode::Memory,
        Ok("striped") => Mode::Striped,
        Ok("block") => Mode::Block,
        Ok("strict") => Mode::Strict,
        Ok(other) => {
            panic!("KVCACHEFS_TEST_MODE={other} is none of auto daemon threads memory striped block strict")
        }
    }
}

pub fn memory_only() -> bool {
    mode() == Mode::Memory
}

pub fn striped() -> bool {
    mode() == Mode::Striped
}

/// Options of a mount, for tests that need their own.
#[derive(Clone, Debug)]
pub struct Options {
    pub l1_mib: u64,
    pub l2_mib: u64,
    pub extra: Vec<String>,
    /// Where the stores lie, if not beside the mount.
    pub store_dir: Option<PathBuf>,
    /// On how many files L2 lies, whatever the mode says (but for memory only).
    pub stripes: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self { l1_mib: 128, l2_mib: 512, extra: Vec::new(), store_dir: None, stripes: None }
    }
}

impl Options {
    pub fn new(l1_mib: u64, l2_mib: u64) -> Self {
        Self { l1_mib, l2_mib, ..Self::default() }
    }
    pub fn arg(mut self, arg: &str) -> Self {
        self.extra.push(arg.to_owned());
        self
    }
}

pub struct Mount {
    pub scratch: tempfile::TempDir,
    dir: PathBuf,
    daemon: Option<Child>,
    options: Options,
    loop_device: Option<String>,
    mounts: u32,
}

pub fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_kvcachefs"))
}

impl Mount {
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    pub fn with(options: Options) -> Self {
        let scratch = tempfile::Builder::new().prefix("kvcachefs-test-").tempdir().unwrap();
        let dir = scratch.path().join("mnt");
        fs::create_dir(&dir).unwrap();
        let mut mount = Self { scratch, dir, daemon: None, options, loop_device: None, mounts: 0 };
        mount.start();
        mount
    }

    /// Where the file system is mounted.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// A path inside the mount.
    pub fn at(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }

    /// The store file (or the first of several).
    pub fn store(&self) -> PathBuf {
        self.store_dir().join("store.0")
    }

    fn store_dir(&self) -> &Path {
        self.options.store_dir.as_deref().unwrap_or(self.scratch.path())
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    fn l2_args(&mut self) -> Vec<String> {
        let scratch = self.store_dir().to_owned();
        let mib = self.options.l2_mib;
        let stripes = self.options.stripes.or((mode() == Mode::Striped).then_some(3));
        match (mode(), stripes) {
            (Mode::Memory, _) => Vec::new(),
            (_, Some(count)) => (0..count)
                .flat_map(|at| {
                    [
                        "--l2".to_owned(),
                        format!("{}:{}MiB", scratch.join(format!("store.{at}")).display(), mib / count),
                    ]
                })
                .collect(),
            (Mode::Block, None) => {
                if self.loop_device.is_none() {
                    let file = scratch.join("store.0");
                    fs::File::create(&file).unwrap().set_len(mib << 20).unwrap();
                    let out = Command::new("losetup")
                        .args(["--find", "--show", "--direct-io=on"])
                        .arg(&file)
                        .output()
                        .unwrap();
                    assert!(out.status.success(), "losetup: {}", String::from_utf8_lossy(&out.stderr));
                    self.loop_device = Some(String::from_utf8(out.stdout).unwrap().trim().to_owned());
                }
                vec!["--l2".to_owned(), self.loop_device.clone().unwrap()]
            }
            _ => vec!["--l2".to_owned(), format!("{}:{mib}MiB", self.store().display())],
        }
    }

    /// Starts the daemon and waits until the mount answers.
    pub fn start(&mut self) {
        assert!(self.daemon.is_none(), "mounted already");
        let l2 = self.l2_args();
        self.mounts += 1;
        let log = fs::File::create(self.log_path()).unwrap();
        let mut command = Command::new(binary());
        command.arg("mount").args(["--l1", &format!("{}MiB", self.options.l1_mib)]).args(l2);
        match mode() {
            Mode::Daemon => command.args(["--read-path", "daemon"]),
            Mode::Threads => command.args(["--l2-engine", "threads"]),
            Mode::Strict => command.args(["--recycle", "strict"]),
            _ => &mut command,
        };
        command.args(&self.options.extra).arg(&self.dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut daemon = command.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            if fs::metadata(self.dir.join(".ctl/version")).is_ok() {
                break;
            }
            if let Some(status) = daemon.try_wait().unwrap() {
                panic!("the daemon ended with {status}: {}", self.log());
            }
            assert!(Instant::now() < deadline, "no mount after 30 s: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        self.daemon = Some(daemon);
    }

    fn log_path(&self) -> PathBuf {
        self.scratch.path().join(format!("daemon.{}.log", self.mounts))
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// SIGTERM: drains and unmounts.
    pub fn stop(&mut self) {
        let Some(mut daemon) = self.daemon.take() else { return };
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(daemon.id() as i32),
            nix::sys::signal::Signal::SIGTERM,
        )
        .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = daemon.try_wait().unwrap() {
                assert!(status.success(), "the daemon ended with {status}: {}", self.log());
                return;
            }
            assert!(Instant::now() < deadline, "the daemon did not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops and starts again.
    pub fn restart(&mut self) {
        self.stop();
        self.start();
    }

    /// Stops and starts again with further options.
    pub fn restart_with(&mut self, extra: &[&str]) {
        self.stop();
        self.options.extra.extend(extra.iter().map(|arg| (*arg).to_owned()));
        self.start();
    }

    /// SIGKILL, and the dead mount is detached.
    pub fn kill(&mut self) {
        let Some(mut daemon) = self.daemon.take() else { return };
        daemon.kill().unwrap();
        self.abort();
        daemon.wait().unwrap();
    }

    /// Ends the kernel's side of a daemon that is dying. If it was killed while it told the kernel of a changed name,
    /// that thread waits for a lock that a client holds, who waits for an answer of the daemon.
    fn abort(&self) {
        use nix::mount::MntFlags;
        let _ = nix::mount::umount2(&self.dir, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH);
    }

    /// Waits until everything published is durable.
    pub fn drain(&self) {
        fs::File::open(&self.dir).unwrap().sync_all().unwrap();
    }

    /// One number of `.ctl/stats`.
    pub fn stat(&self, key: &str) -> u64 {
        let text = fs::read_to_string(self.dir.join(".ctl/stats")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {key} in stats")).parse().unwrap()
    }

    /// Every in-flight gauge is back to zero, and no bound was ever exceeded.
    pub fn check_quiet(&self) {
        for gauge in [
            "writeback_queued_files",
            "writeback_in_flight_bytes",
            "waiting_writers",
            "promotions_in_flight",
            "device_in_flight",
        ] {
            self.wait_for(gauge, |value| value == 0);
        }
        if !memory_only() {
            self.wait_for("dirty_bytes", |value| value == 0);
        }
        self.check_bounds();
    }

    pub fn check_bounds(&self) {
        for (peak, limit) in [
            ("l1_used_peak_bytes", "l1_capacity_bytes"),
            ("l2_used_peak_bytes", "l2_capacity_bytes"),
            ("dirty_peak_bytes", "dirty_limit_bytes"),
        ] {
            if memory_only() && peak != "l1_used_peak_bytes" {
                continue;
            }
            assert!(
                self.stat(peak) <= self.stat(limit),
                "{peak} {} exceeds {limit} {}",
                self.stat(peak),
                self.stat(limit)
            );
        }
        assert_eq!(self.stat("crc_errors"), 0);
        assert_eq!(self.stat("store_failures"), 0);
    }

    /// Waits until a number of `.ctl/stats` is as wanted.
    pub fn wait_for(&self, key: &str, wanted: impl Fn(u64) -> bool) -> u64 {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let value = self.stat(key);
            if wanted(value) {
                return value;
            }
            assert!(Instant::now() < deadline, "{key} stays at {value}; status:\n{}", self.status());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn status(&self) -> String {
        fs::read_to_string(self.dir.join(".ctl/status")).unwrap_or_default()
    }

    pub fn events(&self) -> String {
        let mut text = String::new();
        fs::File::open(self.dir.join(".ctl/events")).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// Drops everything that L1 may drop, by filling it with other files (which are removed again).
    pub fn push_out_of_l1(&self) {
        assert!(!memory_only(), "without L2 what leaves L1 is gone");
        let dir = self.at("filler");
        fs::create_dir_all(&dir).unwrap();
        let bytes = vec![0x5a; 4 << 20];
        for at in 0..self.options.l1_mib * 2 / 4 {
            fs::write(dir.join(at.to_string()), &bytes).unwrap();
        }
        for at in 0..self.options.l1_mib * 4 {
            fs::write(dir.join(format!("small{at}")), &bytes[..128 << 10]).unwrap();
        }
        self.drain();
        fs::remove_dir_all(&dir).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- daemon log\n{}", self.log());
        }
        if let Some(mut daemon) = self.daemon.take() {
            if std::thread::panicking() {
                // One that a test has stopped would not answer, nor let the failure be told.
                let pid = nix::unistd::Pid::from_raw(daemon.id() as i32);
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT);
                eprintln!("--- status\n{}", self.status());
            }
            let _ = daemon.kill();
            self.abort();
            let _ = daemon.wait();
        }
        self.abort();
        if let Some(device) = &self.loop_device {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
    }
}

/// Bytes that a seed determines: what is read back is compared with them.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    out.truncate(len);
    out
}
