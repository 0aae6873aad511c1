//! `kvctl drain`: waiting until what has been written is durable.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvcachefs::error::{Error, Result};
use kvcachefs::units::Bytes;
use mount_tools::client::{End, Ended, Errno, Failures, Handle, Range, Stage, Ticket};
use serde_json::json;

use crate::interrupt::Interrupt;
use crate::paths::Paths;
use crate::prefetch::STEP;
use crate::progress::Progress;
use crate::{asked, print, show};

/// Waits until it is done, and says what could not be stored.
///
/// # Errors
/// Something could not be stored, or not in time.
pub fn run(paths: &[PathBuf], timeout: Option<Duration>, as_json: bool) -> Result<()> {
    let interrupt = Interrupt::new()?;
    let paths = match paths {
        [] => Paths::open(&[show::one(None)?.mountpoint])?,
        paths => Paths::open(paths)?,
    };
    // The root of the mount is all of it, whatever else is named.
    let everything = paths.named.iter().any(|named| named.name == Path::new(""));
    let ranges: Vec<Range> =
        if everything { Vec::new() } else { paths.ranges(paths.named.iter().map(|named| &*named.name))? };
    let drain = asked(paths.handle.drain(&ranges, timeout, 0))?;
    let Some(ticket) = drain.ticket else {
        let wrong =
            paths.named.iter().zip(&drain.states).find_map(|(named, state)| Some((named, state.err()?)));
        return Err(match wrong {
            Some((named, errno)) => Error::new(named.shown.display(), errno.desc()),
            None => Error::new(paths.mount.display(), "nothing was begun"),
        });
    };
    let Some((end, failures)) = ended(&paths.handle, &ticket, drain.bytes, &interrupt)? else {
        return Err(Error::new("interrupted", "it is stored all the same")
            .remedy("kvctl status says how much is not yet durable"));
    };
    told(&paths, &end, &failures, as_json)
}

/// None: interrupted. The names of what failed are known until the end is read, so they are asked for before.
fn ended(
    handle: &Handle,
    ticket: &Ticket,
    bytes: u64,
    interrupt: &Interrupt,
) -> Result<Option<(End, Failures)>> {
    let progress = Progress::new(bytes);
    while interrupt.came().is_none() {
        let Some(at) = asked(ticket.progress())? else { return Ok(None) };
        if !matches!(at.stage, Stage::None | Stage::Queued | Stage::Running) {
            let failures = if at.failed > 0 { asked(handle.failures(ticket))? } else { Failures::default() };
            return Ok(asked(ticket.wait(Some(Duration::ZERO)))?.map(|end| (end, failures)));
        }
        let failed = if at.failed > 0 { format!("{} failed", at.failed) } else { String::new() };
        progress.at(at.bytes, at.bytes_total, failed);
        // It is readable when this has ended: there is no other ticket of this handle.
        asked(handle.readable(Some(STEP)))?;
    }
    Ok(None)
}

fn told(paths: &Paths, end: &End, failures: &Failures, as_json: bool) -> Result<()> {
    let mount = paths.mount.display();
    let bytes = Bytes(end.bytes).approx();
    if as_json {
        let names = failures.paths.iter().map(|path| path.display().to_string());
        let said = json!({
            "mountpoint": mount.to_string(),
            "done": end.ended == Ended::Done,
            "files": end.files,
            "bytes": end.bytes,
            "failed": end.failed,
            "failures": names.collect::<Vec<_>>(),
        });
        print(format!("{said:#}\n").as_bytes())?;
    }
    for path in &failures.paths {
        eprintln!("kvctl: {}: could not be stored", paths.mount.join(path).display());
    }
    match end.ended {
        Ended::Done if as_json => Ok(()),
        Ended::Done => print(format!("{} files, {bytes} stored\n", end.files).as_bytes()),
        Ended::Failed(Errno::ETIMEDOUT) => Err(Error::new(
            mount,
            format!("not everything was stored in time, but {} files, {bytes}", end.files),
        )
        .remedy("the rest is stored all the same; drain again with a longer --timeout")),
        Ended::Failed(_) => Err(Error::new(mount, format!("{} files could not be stored", end.failed))
            .remedy("kvctl events says why; check the device")),
        Ended::Denied(errno) | Ended::Cancelled(errno) => Err(Error::new(mount, errno.desc())),
    }
}
