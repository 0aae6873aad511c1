//! A mount of a test's own, made and unmade with `kvctl`, and gone afterwards.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

pub const KVCTL: &str = env!("CARGO_BIN_EXE_kvctl");
const LIMIT: Duration = Duration::from_secs(60);

/// The tools find the daemon's program beside themselves. It belongs to another package, so it may be missing or old.
fn build_daemon() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package=kvcachefs", "--bin=kvcachefs"]).current_dir(root);
        let beside = Path::new(KVCTL).parent().unwrap();
        if beside.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.arg("--target-dir").arg(beside.parent().unwrap()).status().unwrap().success());
    });
}

pub struct Place(pub tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        build_daemon();
        let place = Self(tempfile::Builder::new().prefix("kvcachefs-tools-").tempdir().unwrap());
        fs::create_dir(place.mnt()).unwrap();
        place
    }

    pub fn mnt(&self) -> PathBuf {
        self.0.path().join("mnt")
    }

    pub fn store(&self) -> String {
        format!("{}:128MiB", self.0.path().join("store").display())
    }

    /// Mounts with `kvctl`, and answers the daemon's pid.
    pub fn mount(&self) -> i32 {
        let store = self.store();
        succeeds(kvctl(&["mount", "--l1", "64MiB", "--log-level", "error", "--l2", &store]).arg(self.mnt()));
        self.pid()
    }

    pub fn pid(&self) -> i32 {
        let stats = succeeds(kvctl(&["stats"]).arg(self.mnt()));
        stats.lines().find_map(|line| line.strip_prefix("pid ")).unwrap().parse().unwrap()
    }

    pub fn is_mounted(&self) -> bool {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.lines().any(|line| line.split(' ').nth(4) == self.mnt().to_str())
    }
}

impl Place {
    /// Mounted, with `count` files of `bytes` bytes in `d`, none of which is in L1.
    pub fn with_cold_files(count: usize, bytes: usize) -> Self {
        let place = Self::new();
        place.mount();
        fs::create_dir(place.mnt().join("d")).unwrap();
        for at in 0..count {
            fs::write(place.mnt().join(format!("d/f{at:04}")), content(at, bytes)).unwrap();
        }
        succeeds(kvctl(&["umount"]).arg(place.mnt()));
        place.mount();
        place
    }

    /// One number of `.ctl/stats`.
    pub fn stat(&self, key: &str) -> u64 {
        let stats = fs::read_to_string(self.mnt().join(".ctl/stats")).unwrap();
        let line = stats.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {key} in stats")).parse().unwrap()
    }
}

/// What file `at` has in it.
pub fn content(at: usize, bytes: usize) -> Vec<u8> {
    let line = format!("file {at:010}\n").into_bytes();
    line.iter().copied().cycle().take(bytes).collect()
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_mounted() {
            // The daemon ends when its mount does.
            let _ = nix::mount::umount2(&self.mnt(), nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

pub fn kvctl(args: &[&str]) -> Command {
    let mut command = Command::new(KVCTL);
    command.args(args);
    command
}

pub fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

pub fn succeeds(command: &mut Command) -> String {
    let out = output(command);
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Exit code 1, and one line on standard error that contains all of `parts`.
pub fn refuses(command: &mut Command, parts: &[&str]) {
    let out = output(command);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{command:?}: {said}");
    assert_eq!(said.lines().count(), 1, "not one line: {said:?}");
    for part in parts {
        assert!(said.contains(part), "no '{part}' in: {said}");
    }
}

pub fn is_running(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: never");
        std::thread::sleep(Duration::from_millis(5));
    }
}
