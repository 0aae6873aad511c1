//! `kvctl prefetch`: files to L1, in windows of as many as one request may have.

use std::collections::{HashMap, VecDeque};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvcachefs::error::{Error, Result};
use kvcachefs::units::{Bytes, Period};
use mount_tools::client::{Became, End, Ended, Errno, Prefetch, Range, Ticket, Wish};
use serde_json::json;

use crate::classify::complain;
use crate::interrupt::Interrupt;
use crate::paths::{File, Paths};
use crate::progress::Progress;
use crate::{asked, print};

/// So that the device is not idle between one window and the next.
const AHEAD: usize = 4;

/// How often the bar moves, and a signal is seen.
pub const STEP: Duration = Duration::from_millis(100);

#[derive(clap::Args)]
pub struct Args {
    /// Files, and directories for all files below them; of one mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// What is larger goes first, of what waits for its turn.
    #[arg(long, value_name = "0..255", default_value_t = 0)]
    priority: u8,
    /// Give up what is not in L1 by then.
    #[arg(long, value_name = "TIME")]
    deadline: Option<Period>,
    /// Do not wait: leave it to the daemon as a hint, which kvctl hints shows.
    #[arg(long, conflicts_with_all = ["priority", "deadline", "json"])]
    hint: bool,
    /// For programs: one object.
    #[arg(long)]
    json: bool,
}

/// Brings files to L1.
///
/// # Errors
/// Some could not be brought. What was is there all the same.
pub fn run(args: &Args) -> Result<()> {
    let interrupt = Interrupt::new()?;
    let paths = Paths::open(&args.paths)?;
    if args.hint {
        return hint(&paths);
    }
    let files = paths.files()?;
    let ranges = paths.ranges(files.iter().map(|file| &*file.name))?;
    let mut wish = Wish::new().priority(args.priority);
    if let Some(Period(deadline)) = args.deadline {
        wish = wish.deadline(deadline);
    }
    let mut run = Run {
        windows: windows(&files, &ranges, paths.handle.limits()),
        progress: Progress::new(0),
        tickets: HashMap::new(),
        wrong: Vec::new(),
        total: 0,
        read: 0,
        bytes: 0,
        lost: 0,
        denied: None,
        paths: &paths,
        wish,
    };
    let finished = run.bring(&interrupt)?;
    drop(run.progress);
    let (read, all) = (Bytes(run.read).approx(), Bytes(run.bytes).approx());
    let count = files.len() - run.wrong.len();
    if args.json {
        let wrong = run.wrong.iter();
        let said = json!({
            "mountpoint": paths.mount.display().to_string(),
            "files": count,
            "bytes": run.bytes,
            "bytes_read": run.read,
            "done": finished && run.denied.is_none() && run.lost == 0 && run.wrong.is_empty(),
            "failed": wrong.map(|(file, errno)| json!({ "path": file.shown.display().to_string(), "error": errno.desc() })).collect::<Vec<_>>(),
        });
        print(format!("{said:#}\n").as_bytes())?;
    }
    if !finished {
        return Err(
            Error::new("interrupted", format!("{read} were read from L2")).remedy("the rest was taken back")
        );
    }
    if let Some(why) = run.denied {
        return Err(why);
    }
    complain(run.wrong)?;
    if run.lost > 0 {
        return Err(Error::new(paths.mount.display(), format!("{} files could not be read", run.lost))
            .remedy("kvctl events names them"));
    }
    if args.json {
        Ok(())
    } else {
        print(format!("{count} files, {all} in L1, {read} of them read from L2\n").as_bytes())
    }
}

/// As words for the daemon, whose hints outlive us.
fn hint(paths: &Paths) -> Result<()> {
    let names = paths.named.iter().map(|named| match named.name.as_os_str().as_bytes() {
        // The root of the mount has no name of its own.
        b"" => b"/".to_vec(),
        name => name.to_vec(),
    });
    let list: Vec<u8> = names.flat_map(|name| name.into_iter().chain([0])).collect();
    let file = paths.mount.join(".ctl/prefetch");
    std::fs::write(&file, list).map_err(|error| {
        let shown = paths.named[0].shown.display().to_string();
        denial(&shown, Errno::from_raw(error.raw_os_error().unwrap_or_default()))
    })
}

/// Why nothing was begun, and what to do about it.
pub fn denial(thing: &str, errno: Errno) -> Error {
    match errno {
        Errno::EAGAIN => {
            Error::new(thing, "as many windows wait as may").remedy("try again; kvctl hints shows them")
        }
        Errno::EOPNOTSUPP => Error::new(thing, "this mount does not prefetch")
            .remedy("mount it with --prefetch-window of at least 1"),
        Errno::ENOSPC => Error::new(thing, "it does not fit into L1 or into what may be leased")
            .remedy("ask for less, or mount with a larger --l1 or --lease-max"),
        Errno::EDQUOT => Error::new(thing, "it is more than one process may lease")
            .remedy("ask for less, or mount with a larger --lease-client-max"),
        Errno::ETIMEDOUT => {
            Error::new(thing, "not in L1 before the deadline").remedy("give a longer --deadline")
        }
        errno => Error::new(thing, errno.desc()),
    }
}

type Part<'f> = (&'f [File], &'f [Range]);

/// As many files as one request may have, and as many bytes as are brought at one time, unless one file alone is more.
fn windows<'f>(
    files: &'f [File],
    ranges: &'f [Range],
    limits: &mount_tools::client::Limits,
) -> VecDeque<Part<'f>> {
    let most = if limits.prefetch_bytes == 0 { u64::MAX } else { limits.prefetch_bytes };
    let (mut windows, mut start, mut bytes) = (VecDeque::new(), 0, 0u64);
    for (at, file) in files.iter().enumerate() {
        if at > start && (at - start == limits.ranges || bytes.saturating_add(file.bytes) > most) {
            windows.push_back((&files[start..at], &ranges[start..at]));
            (start, bytes) = (at, 0);
        }
        bytes = bytes.saturating_add(file.bytes);
    }
    windows.push_back((&files[start..], &ranges[start..]));
    windows
}

struct Run<'f> {
    paths: &'f Paths,
    wish: Wish,
    windows: VecDeque<Part<'f>>,
    tickets: HashMap<u64, (Ticket, &'f Path)>,
    progress: Progress,
    wrong: Vec<(&'f File, Errno)>,
    /// What all windows that were begun have to read, and what those that have ended have read.
    total: u64,
    read: u64,
    /// Of all windows.
    bytes: u64,
    /// Files that could not be read, whose names are in the events.
    lost: u64,
    denied: Option<Error>,
}

impl Run<'_> {
    /// True: to the end. False: it was interrupted.
    fn bring(&mut self, interrupt: &Interrupt) -> Result<bool> {
        loop {
            if interrupt.came().is_some() {
                self.tickets.clear();
                return Ok(false);
            }
            while self.denied.is_none() && self.tickets.len() < AHEAD && self.begin()? {}
            if self.tickets.is_empty() && (self.windows.is_empty() || self.denied.is_some()) {
                return Ok(true);
            }
            for end in asked(self.paths.handle.ends(Some(STEP)))? {
                self.ended(&end);
            }
            self.show()?;
        }
    }

    /// False: there is no further window now.
    fn begin(&mut self) -> Result<bool> {
        let Some((files, ranges)) = self.windows.pop_front() else { return Ok(false) };
        let Prefetch { window, became, bytes_to_read, .. } =
            asked(self.paths.handle.prefetch(ranges, &self.wish))?;
        if let (Became::Denied(Errno::EAGAIN), false) = (&became, self.tickets.is_empty()) {
            // Our own wait as well: the next turn is after one of them.
            self.windows.push_front((files, ranges));
            return Ok(false);
        }
        self.bytes += window.bytes;
        let wrong = files.iter().zip(&window.states).filter_map(|(file, state)| Some((file, state.err()?)));
        let wrong: Vec<_> = wrong.collect();
        match became {
            Became::Begun(ticket) => {
                self.total += bytes_to_read;
                self.tickets.insert(ticket.number(), (ticket, &files[0].shown));
            }
            // Of files that cannot be had it says so one by one.
            Became::Denied(errno) if wrong.len() < files.len() => {
                self.denied = Some(denial(&files[0].shown.display().to_string(), errno));
            }
            Became::Denied(_) | Became::Here(_) | Became::Nothing => {}
        }
        self.wrong.extend(wrong);
        Ok(true)
    }

    fn ended(&mut self, end: &End) {
        let Some((_, first)) = self.tickets.remove(&end.ticket) else { return };
        self.read += end.bytes;
        match end.ended {
            Ended::Done => self.lost += end.failed,
            Ended::Failed(_) => self.lost += end.failed.max(1),
            Ended::Denied(errno) | Ended::Cancelled(errno) => {
                self.denied.get_or_insert_with(|| denial(&first.display().to_string(), errno));
            }
        }
    }

    fn show(&self) -> Result<()> {
        let mut read = self.read;
        for (ticket, _) in self.tickets.values() {
            read += asked(ticket.progress())?.map_or(0, |at| at.bytes);
        }
        let left = self.windows.iter().map(|(files, _)| files.len()).sum::<usize>();
        let message = if left > 0 { format!("{left} files wait") } else { String::new() };
        self.progress.at(read, self.total, message);
        Ok(())
    }
}
