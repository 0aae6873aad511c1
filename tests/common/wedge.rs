//! How a killed daemon comes to hang, and its clients with it, by design and not by chance.
//!
//! Three clients: one keeps a file open that it has flushed; one wants to make a directory of that name, whose lookup
//! waits for the release with the directory locked; one publishes a new version of another name in the directory, of which the daemon tells the kernel,
//! and for that the kernel takes the lock. If the daemon is killed now, neither can go on.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Options of the mount: a lookup of a file that is being closed waits for as long as the test takes.
pub const OPTIONS: [&str; 2] = ["--publish-wait=10m", "--request-deadline=20m"];

pub struct Wedged {
    writers: [Child; 2],
    /// It hangs for as long as nobody cuts it off.
    pub waiting: Child,
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: never");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn shell(script: &str, dir: &Path) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(dir).stdin(Stdio::piped()).stderr(Stdio::piped());
    command.stdout(Stdio::piped()).spawn().unwrap()
}

/// The letter of a thread of the daemon: R, S, D and so on.
fn state(daemon: i32, thread: &str) -> Option<char> {
    let tasks = fs::read_dir(format!("/proc/{daemon}/task")).ok()?.flatten();
    let task = tasks
        .map(|task| task.path())
        .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == thread))?;
    fs::read_to_string(task.join("stat")).ok()?.rsplit(')').next()?.trim_start().chars().next()
}

impl Wedged {
    /// Brings the daemon to where it must not be killed.
    pub fn make(mnt: &Path, daemon: i32) -> Self {
        let dir = mnt.join("wedge");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("known"), "old").unwrap();
        assert_eq!(fs::read(dir.join("known")).unwrap(), b"old");
        // Closing the duplicate flushes, and the file stays open.
        let keeps = shell(r#"exec 3>"$1/kept"; echo x >&3; true 4>&3; echo; read end"#, &dir);
        let mut publishes =
            shell(r#"exec 3>"$1/known"; echo new >&3; echo; read go; exec 3>&-; read end"#, &dir);
        let ready = |child: &Child| {
            let mut waits = [nix::poll::PollFd::new(
                std::os::fd::AsFd::as_fd(child.stdout.as_ref().unwrap()),
                nix::poll::PollFlags::POLLIN,
            )];
            assert_eq!(nix::poll::poll(&mut waits, 60_000u16), Ok(1), "a client is not ready");
        };
        ready(&keeps);
        ready(&publishes);
        let waits = || {
            let stats = fs::read_to_string(mnt.join(".ctl/stats")).unwrap();
            stats.lines().find_map(|line| line.strip_prefix("publish_waits ")?.parse::<u64>().ok()).unwrap()
        };
        let before = waits();
        let waiting = shell(r#"exec mkdir "$1/kept""#, &dir);
        until("a lookup waits", || waits() > before);
        publishes.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        until("the kernel is being told", || state(daemon, "kv-notify") == Some('D'));
        Self { writers: [keeps, publishes], waiting }
    }

    pub fn hangs(&mut self) -> bool {
        self.waiting.try_wait().unwrap().is_none()
    }

    /// What the client says that has waited: it has an error, and it has ended.
    pub fn said(&mut self) -> String {
        until("the client that waited ends", || !self.hangs());
        let mut said = String::new();
        std::io::Read::read_to_string(self.waiting.stderr.as_mut().unwrap(), &mut said).unwrap();
        said
    }
}

impl Drop for Wedged {
    fn drop(&mut self) {
        for child in self.writers.iter_mut().chain([&mut self.waiting]) {
            let _ = child.kill();
        }
    }
}
