//! Reads of files that are in L1, against the same reads of the same files in a tmpfs (P1, P2, P3).

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::cli::Cli;
use crate::failure::{Context, Result};
use crate::files::{Files, rate};
use crate::map::Map;
use crate::mount::Mount;
use crate::pairs::{self, Outcome};
use crate::report::{Report, Unit};

/// How the bytes are fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    Read,
    Mmap,
}

const PREAD_BYTES: usize = 4096;
/// Preads between two looks at the clock.
const PREADS: usize = 256;
/// How often the files are made anew.
const PLACEMENTS: u32 = 4;

/// The same files on a mount and in a tmpfs.
struct Warm {
    mount: Mount,
    ours: Files,
    other: Files,
    /// Removed with its files.
    _tmpfs: tempfile::TempDir,
}

impl Warm {
    fn new(cli: &Cli, each_mib: u64, ours_first: bool) -> Result<Self> {
        let scratch = tempfile::Builder::new()
            .prefix("kvcachefs-bench-")
            .tempdir_in(&cli.tmpfs)
            .context(|| format!("cannot make a directory in {}", cli.tmpfs.display()))?;
        let mount = Mount::start(cli, cli.warm * 2, &["--dirty-limit".into(), format!("{}MiB", cli.warm)])?;
        let plan = |dir: &Path| Files::plan(&dir.join("files"), cli.warm, each_mib);
        let warm = Self { ours: plan(&mount.dir()), other: plan(scratch.path()), mount, _tmpfs: scratch };
        let buffers = warm.ours.buffers(1);
        let (first, second) = if ours_first { (&warm.ours, &warm.other) } else { (&warm.other, &warm.ours) };
        first.write(&buffers)?;
        second.write(&buffers)?;
        Ok(warm)
    }

    fn end(self) -> Result<()> {
        self.mount.stop()
    }
}

/// P1 and P2: whole files, one after the other, each opened, fetched into a buffer, and closed.
pub fn sequential(cli: &Cli, by: By, report: &mut Report) -> Result<()> {
    let (target, wanted, how) = match by {
        By::Read => ("P1", 0.90, "read"),
        By::Mmap => ("P2", 0.95, "mmap and copy"),
    };
    for &mib in &cli.sizes {
        let outcomes = placements(cli, mib, |files, threads| {
            rate(threads, cli.sample(), files.bytes, |at, buffer| {
                match by {
                    By::Read => files.read(at, 0, buffer)?,
                    By::Mmap => map(files, at, buffer)?,
                }
                Ok(files.bytes as u64)
            })
        })?;
        for (threads, outcome) in outcomes {
            let what = format!("{how}, {mib} MiB files, {threads} threads");
            report.pairs(target, what, &outcome, Unit::Bytes, "tmpfs", wanted);
        }
    }
    Ok(())
}

fn map(files: &Files, at: usize, buffer: &mut [u8]) -> Result<()> {
    let map = Map::of(&files.open(at)?, files.bytes).context(|| "cannot map a file".into())?;
    map.copy_to(buffer);
    files.check(at, buffer)
}

/// P3: preads of 4 KiB at random places of open files.
pub fn random(cli: &Cli, report: &mut Report) -> Result<()> {
    let mib = cli.sizes.iter().copied().max().unwrap_or(18);
    let outcomes = placements(cli, mib, |files, threads| {
        let open: Vec<_> = (0..files.count).map(|at| files.open(at)).collect::<Result<_>>()?;
        let pages = (files.bytes / PREAD_BYTES) as u64;
        rate(threads, cli.sample(), PREAD_BYTES, |at, buffer| {
            let mut state = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for _ in 0..PREADS {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let file = &open[(state >> 32) as usize % open.len()];
                let offset = state % pages * PREAD_BYTES as u64;
                file.read_exact_at(buffer, offset).context(|| "cannot pread".into())?;
            }
            Ok(PREADS as u64)
        })
    })?;
    for (threads, outcome) in outcomes {
        let what = format!("pread of 4 KiB, {mib} MiB files, {threads} threads");
        report.pairs("P3", what, &outcome, Unit::Operations, "tmpfs", 0.80);
    }
    Ok(())
}

/// Takes pairs of `sample` for each number of threads, on files that are made anew several times: where the kernel
/// happened to put them decides over a third of the speed, and stays the same as long as they live.
fn placements(
    cli: &Cli,
    mib: u64,
    sample: impl Fn(&Files, usize) -> Result<f64>,
) -> Result<Vec<(usize, Outcome)>> {
    let mut all = vec![Vec::new(); cli.threads.len()];
    for placement in 0..PLACEMENTS {
        let warm = Warm::new(cli, mib, placement % 2 == 0)?;
        for (&threads, samples) in cli.threads.iter().zip(&mut all) {
            let pairs = cli.pairs.div_ceil(PLACEMENTS);
            pairs::collect(samples, pairs, || sample(&warm.ours, threads), || sample(&warm.other, threads))?;
        }
        warm.end()?;
    }
    Ok(cli.threads.iter().copied().zip(all.iter().map(|samples| Outcome::of(samples))).collect())
}
