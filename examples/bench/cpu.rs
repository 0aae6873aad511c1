//! Processor time of the daemon while clients read warm files (P11).

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::cli::Cli;
use crate::failure::{Context, Result};
use crate::files::{Files, rate};
use crate::mount::Mount;
use crate::report::Report;

const FILE_MIB: u64 = 18;
const THREADS: usize = 2;
/// Processor time is told in hundredths of a second.
const TIME: Duration = Duration::from_secs(5);
/// Part of one core that still is about nothing.
const WANTED: f64 = 0.01;

/// What the readers do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Files are opened once.
    Open,
    /// Files are opened for each time they are read.
    Reopen,
}

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    let warm = ["--dirty-limit".to_owned(), format!("{}MiB", cli.warm)];
    let daemon: Vec<_> = warm.iter().cloned().chain(["--read-path=daemon".into()]).collect();
    let by_kernel = Mount::start(cli, cli.warm * 2, &warm)?;
    let by_daemon = Mount::start(cli, cli.warm * 2, &daemon)?;
    let files = |mount: &Mount| {
        let files = Files::plan(&mount.dir().join("files"), cli.warm / 2, FILE_MIB);
        files.write(&files.buffers(1)).map(|()| files)
    };
    let (ours, other) = (files(&by_kernel)?, files(&by_daemon)?);
    for how in [How::Open, How::Reopen] {
        let kernel = sample(&by_kernel, &ours, how)?;
        let served = sample(&by_daemon, &other, how)?;
        let show =
            |(load, each): (f64, f64)| format!("{:.1} % of a core, {:.2} ms per GiB", load * 100.0, each);
        let what = match how {
            How::Open => "files kept open",
            How::Reopen => "files opened for each read",
        };
        let verdict = if kernel.0 <= WANTED { "about 0: met" } else { "about 0: missed" };
        report.figure(
            "P11",
            format!("daemon's processor time, warm reads of {FILE_MIB} MiB, {THREADS} threads, {what}"),
            show(kernel),
            format!("{} with --read-path daemon", show(served)),
            if how == How::Open { verdict.into() } else { "opens reach the daemon".into() },
        );
    }
    by_kernel.stop()?;
    by_daemon.stop()
}

/// The part of a core that the daemon used, and its milliseconds for each GiB that was read.
fn sample(mount: &Mount, files: &Files, how: How) -> Result<(f64, f64)> {
    let open: Vec<_> = (0..files.count).map(|at| files.open(at)).collect::<Result<_>>()?;
    let (before, start) = (mount.cpu()?, Instant::now());
    let rate = rate(THREADS, TIME, files.bytes, |at, buffer| {
        match how {
            How::Open => open[at % open.len()].read_exact_at(buffer, 0).context(|| "cannot read".into())?,
            How::Reopen => files.read(at, 0, buffer)?,
        }
        Ok(files.bytes as u64)
    })?;
    let (used, elapsed) = ((mount.cpu()? - before).as_secs_f64(), start.elapsed().as_secs_f64());
    let gib = rate * elapsed / f64::from(1 << 30);
    Ok((used / elapsed, used * 1000.0 / gib))
}
