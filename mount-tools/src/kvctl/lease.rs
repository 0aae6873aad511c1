//! `kvctl lease`: files that stay in L1 while a command runs.

use std::ffi::OsString;
use std::io::{Read, stdin};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use kvcachefs::error::{Error, Result};
use kvcachefs::units::{Bytes, Period};
use mount_tools::client::{Became, Ended, Lease, Terms, Ticket, Wish};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::interrupt::Interrupt;
use crate::paths::{File, Paths};
use crate::prefetch::{STEP, denial};
use crate::progress::Progress;
use crate::{asked, print};

/// What the command finds in its environment: a rank may attach to it.
const VARIABLE: &str = "KVCACHEFS_LEASE";

#[derive(clap::Args)]
pub struct Args {
    /// Files, and directories for all files below them; of one mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Give up if they are not all in L1 by then.
    #[arg(long, value_name = "TIME")]
    deadline: Option<Period>,
    /// For programs: one object, once it is granted.
    #[arg(long)]
    json: bool,
    /// What to run; its exit code is ours. It finds the lease's number in KVCACHEFS_LEASE.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Brings files to L1, keeps them there, and says how the command ended.
///
/// # Errors
/// There is no lease, or it ended before its time.
pub fn run(args: &Args) -> Result<ExitCode> {
    let interrupt = Interrupt::new()?;
    let paths = Paths::open(&args.paths)?;
    let files = paths.files()?;
    paths.one_request(&files)?;
    let mut lease = granted(&paths, &files, args, &interrupt)?;
    let (state, _) = asked(lease.query())?;
    let (number, bytes) = (lease.number(), state.bytes);
    if args.json {
        let said = json!({ "lease": number, "files": files.len(), "bytes": bytes });
        print(format!("{said}\n").as_bytes())?;
    } else {
        eprintln!("kvctl: lease {number}: {} files, {}", files.len(), Bytes(bytes).approx());
    }
    let code = match args.command.split_first() {
        None => {
            until_told(&mut lease, &interrupt)?;
            ExitCode::SUCCESS
        }
        Some((program, rest)) => {
            let child = Command::new(program).args(rest).env(VARIABLE, number.to_string()).spawn();
            let child = child.map_err(|error| Error::caused_by(program.display(), error))?;
            until_ended(&mut lease, child, &interrupt)?
        }
    };
    asked(lease.release())?;
    Ok(code)
}

fn granted(paths: &Paths, files: &[File], args: &Args, interrupt: &Interrupt) -> Result<Lease> {
    let ranges = paths.ranges(files.iter().map(|file| &*file.name))?;
    let mut wish = Wish::new().leased(Terms::default());
    if let Some(Period(deadline)) = args.deadline {
        wish = wish.deadline(deadline);
    }
    let answer = asked(paths.handle.prefetch(&ranges, &wish))?;
    let first = files[0].shown.display().to_string();
    let wrong = files.iter().zip(&answer.window.states).find_map(|(file, state)| Some((file, state.err()?)));
    match (answer.became, wrong) {
        (Became::Denied(_), Some((file, errno))) => Err(Error::new(file.shown.display(), errno.desc())),
        (Became::Denied(errno), None) => Err(denial(&first, errno)),
        (Became::Here(Some(lease)), _) => Ok(lease),
        (Became::Begun(ticket), _) => brought(&ticket, &first, interrupt),
        (Became::Here(None) | Became::Nothing, _) => Err(Error::new(first, "no lease was granted")),
    }
}

fn brought(ticket: &Ticket, first: &str, interrupt: &Interrupt) -> Result<Lease> {
    let progress = Progress::new(0);
    loop {
        if interrupt.came().is_some() {
            return Err(Error::new("interrupted", "it was not yet in L1").remedy("nothing is held"));
        }
        if let Some(end) = asked(ticket.wait(Some(STEP)))? {
            return match (end.ended, end.lease) {
                (Ended::Done, Some(lease)) => Ok(lease),
                (Ended::Done, None) => Err(Error::new(first, "no lease was granted")),
                (Ended::Denied(errno) | Ended::Cancelled(errno) | Ended::Failed(errno), _) => {
                    Err(denial(first, errno))
                }
            };
        }
        if let Some(at) = asked(ticket.progress())? {
            let message = if at.ahead > 0 { format!("{} before it", at.ahead) } else { String::new() };
            progress.at(at.bytes, at.bytes_total, message);
        }
    }
}

/// When a lease is extended next: with two thirds of its time left for whatever holds us up.
struct Extending(Instant);

impl Extending {
    fn of(lease: &Lease) -> Self {
        Self(Instant::now() + lease.ttl() / 3)
    }

    fn step(&mut self, lease: &mut Lease) -> Result<()> {
        if Instant::now() >= self.0 {
            asked(lease.extend(None))?;
            *self = Self::of(lease);
        }
        Ok(())
    }
}

fn until_told(lease: &mut Lease, interrupt: &Interrupt) -> Result<()> {
    let failed = |error| Error::caused_by("standard input", error);
    let mut extending = Extending::of(lease);
    let mut stdin = stdin().lock();
    while interrupt.came().is_none() {
        extending.step(lease)?;
        let limit = Timespec::try_from(STEP).ok();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        if stdin.read(&mut [0; 4096]).map_err(failed)? == 0 {
            break;
        }
    }
    Ok(())
}

/// Ctrl-C reaches the command by itself, SIGTERM through us; we end when it has.
fn until_ended(lease: &mut Lease, mut child: Child, interrupt: &Interrupt) -> Result<ExitCode> {
    let failed = |error| Error::caused_by("waiting for the command", error);
    let mut extending = Extending::of(lease);
    let mut held = true;
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            // As a shell says it.
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)));
        }
        if interrupt.came() == Some(Signal::SIGTERM as i32) {
            interrupt.reset();
            let _: Result<(), Errno> = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
        }
        // The command goes on in any case: it reads what it reads, only slower.
        if held && let Err(error) = extending.step(lease) {
            eprintln!("kvctl: {error}");
            held = false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
