//! Running the program as a person does: what it says, how it ends, and signals to a mounted daemon.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Mount, binary};

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// What a finished program has said, and its exit code.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Success, without complaint.
    pub fn expect_success(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Exit code 1, and one line on standard error that contains all of `parts`.
    pub fn expect_refusal(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(1), "exit code of {self:?}");
        assert_eq!(self.stdout, "", "standard output");
        assert!(
            self.stderr.ends_with('\n') && self.stderr.trim_end().lines().count() == 1,
            "not one line: {:?}",
            self.stderr
        );
        for part in parts {
            assert!(self.stderr.contains(part), "no '{part}' in: {}", self.stderr);
        }
    }
}

/// The program with these arguments, in an environment without options.
pub fn kvcachefs<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(binary());
    command.args(args);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KVCACHEFS_"))
    {
        command.env_remove(name);
    }
    command
}

/// Runs it to its end.
pub fn run(command: &mut Command) -> Outcome {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // What it says fits into a pipe.
    let status = ended(&mut child).unwrap_or_else(|| panic!("{command:?} does not end"));
    let output = child.wait_with_output().unwrap();
    Outcome {
        code: status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn ended(child: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    None
}

/// Waits for something that must come.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: never");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process runs. One that has ended and that nobody has asked about does not.
pub fn is_running(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

/// How often something is mounted on exactly this directory.
pub fn mounts_on(dir: &Path) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let dir = dir.to_str().unwrap();
    table.lines().filter(|line| line.split(' ').nth(4) == Some(dir)).count()
}

impl Mount {
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).unwrap();
    }

    /// How the daemon ends, which it has been made to do.
    pub fn ended(&mut self) -> ExitStatus {
        let mut daemon = self.daemon.take().unwrap();
        ended(&mut daemon).unwrap_or_else(|| panic!("the daemon does not end: {}", self.log()))
    }

    /// Whether a process that was killed still holds something open.
    pub fn is_held(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        tasks
            .into_iter()
            .any(|task| fs::read_dir(task.path().join("fd")).is_ok_and(|mut fds| fds.next().is_some()))
    }

    /// Does not wait for the daemon, which cannot end by itself.
    pub fn forget(&mut self) {
        self.daemon.take();
    }

    /// Changes the further options of the next start.
    pub fn set_extra(&mut self, args: &[&str]) {
        self.options.extra = args.iter().map(ToString::to_string).collect();
    }

    /// The arguments that name this mount's L2.
    pub fn stores(&mut self) -> Vec<String> {
        self.l2_args()
    }
}
