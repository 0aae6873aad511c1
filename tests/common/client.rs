//! Clients that are processes of their own, and a watchdog for tests that could hang.
//!
//! A client is a few lines of Python: the language of those who will use the mount, and a process that forks, executes
//! and dies as it likes. It talks with the test in lines.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::common::Mount;

/// What every client begins with. `fill` makes the same bytes as [`fill`].
const PRELUDE: &str = r#"
import errno, fcntl, mmap, os, signal, sys, threading
os.chdir(sys.argv[1])
def say(text):
    os.write(1, (str(text) + "\n").encode())
def hear():
    line = sys.stdin.readline()
    if not line:
        os._exit(99)
    return line.strip()
def step(text):
    say(text)
    hear()
def fill(seed, size):
    return (b"%016x" % seed) * (size // 16) + b"=" * (size % 16)
def write_all(fd, data):
    while data:
        data = data[os.write(fd, data):]
def errno_of(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
PRIVATE = os.O_CREAT | os.O_EXCL | os.O_RDWR
"#;

/// Bytes that client and test agree on.
pub fn fill(seed: u64, size: usize) -> Vec<u8> {
    let mut out = format!("{seed:016x}").into_bytes().repeat(size / 16);
    out.resize(size, b'=');
    out
}

pub struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Client {
    /// Runs `script` in the root of the mount.
    pub fn new(mount: &Mount, script: &str) -> Self {
        Self::with(mount, script, &[])
    }

    pub fn with(mount: &Mount, script: &str, args: &[&str]) -> Self {
        let mut child = Command::new("python3")
            .args(["-u", "-c", &format!("{PRELUDE}\n{script}")])
            .arg(mount.path())
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the clients of this test are Python");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn hear(&mut self) -> String {
        let line = self.last_words();
        assert!(!line.is_empty(), "the client ended early");
        line
    }

    /// The next line, or nothing if the client ended.
    pub fn last_words(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Waits for the client to arrive at a `step`.
    #[track_caller]
    pub fn at(&mut self, step: &str) {
        assert_eq!(self.hear(), step);
    }

    pub fn say(&mut self, text: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{text}").unwrap();
    }

    /// Lets the client leave its `step`.
    pub fn go(&mut self) {
        self.say("");
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9));
    }

    pub fn wait(mut self) -> ExitStatus {
        self.stdin = None;
        self.child.wait().unwrap()
    }

    /// Waits for an end without error.
    #[track_caller]
    pub fn end(self) {
        let status = self.wait();
        assert!(status.success(), "the client ended with {status}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// Ends a test that hangs: without its daemon every request of every client fails.
pub struct Watchdog {
    _done: Sender<()>,
}

impl Watchdog {
    /// With ten times the work there is ten times the time.
    pub fn new(mount: &Mount) -> Self {
        let full = std::env::var_os("KVCACHEFS_TEST_FULL").is_some();
        Self::within(mount, Duration::from_secs(if full { 1200 } else { 120 }))
    }

    pub fn within(mount: &Mount, time: Duration) -> Self {
        let daemon = nix::unistd::Pid::from_raw(mount.pid() as i32);
        let (done, ended) = channel::<()>();
        std::thread::spawn(move || {
            if ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                eprintln!("the test hangs after {time:?}: killing its daemon");
                let _ = nix::sys::signal::kill(daemon, nix::sys::signal::Signal::SIGKILL);
                if ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("the test hangs without its daemon, too");
                    std::process::abort();
                }
            }
        });
        Self { _done: done }
    }
}
