//! Replays an LLM serving trace on a kvcachefs mount through ordinary file operations, verifies every
//! byte of every hit, and compares the hit rate with an exact LRU of the same capacity.
//!
//! ```text
//! cargo build --release
//! cargo run --release --example trace_replay
//! ```
//!
//! Without options it mounts a temporary kvcachefs and replays the excerpt that ships with it. Exit code 1
//! means wrong bytes, an error, or, in that run or with `--check`, a hit rate that the simulation does not explain, and
//! the last line says which; 130 a signal.

mod bytes;
mod cli;
mod engine;
mod failure;
mod lru;
mod mount;
mod progress;
mod table;
mod trace;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::{BLOCK_ALIGN_BYTES, Cli};
use crate::engine::Replay;
use crate::failure::{Context, Failure, Result};
use crate::lru::simulate;
use crate::mount::{Counters, Mounted, Plan};
use crate::table::Report;
use crate::trace::Trace;

/// L2 of a temporary mount, unless it is given: a sixth of what the excerpt stores.
const L2_DEFAULT_BYTES: u64 = 2 << 30;
/// Mounts until L2 holds exactly the blocks of --capacity-percent: one to learn what the store keeps for
/// itself, one with that added, one in case that it grew with the size.
const SIZING_MOUNTS: usize = 3;
/// What a shell reports for a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => {
            // Nobody is left to tell when this cannot be printed.
            let _ = answer.print();
            return if answer.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    match run(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("trace_replay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let stop = stop_on_signals()?;
    let trace = match &cli.trace {
        Some(path) => Trace::open(path, cli.requests)?,
        None => Trace::excerpt(cli.requests)?,
    };
    let place = Place::prepare(cli, &trace, &stop)?;
    let capacity_blocks = place.capacity_blocks(cli, &trace)?;
    let expected = simulate(&trace, capacity_blocks.unwrap_or(u64::MAX), cli.order);
    let (requests, references) = (trace.requests.len(), trace.references());
    let (dir, scale) = (place.dir(), table::scale(cli.block_bytes));
    println!("Replaying {requests} requests, {references} references, on {}; {scale}.", dir.display());

    // Held to the end of the replay and removed with its blocks; inside, `model` is the namespace.
    let blocks = tempfile::Builder::new()
        .prefix("trace-replay-")
        .disable_cleanup(cli.keep)
        .tempdir_in(&dir)
        .context(|| format!("cannot make a directory in {}", dir.display()))?;
    let before = place.counters()?;
    let replay = Replay {
        trace: &trace,
        root: blocks.path().join("model"),
        block_bytes: usize::try_from(cli.block_bytes)
            .map_err(|_| Failure::new("blocks are too large".into()))?,
        seed: cli.seed,
        in_flight: cli.in_flight,
        order: cli.order,
        ask_tier: !cli.no_tier && before.is_some(),
        client_capacity: place.client_capacity(capacity_blocks),
        stop: &stop,
    };
    let mut shown = progress::Shown::new(&trace);
    let outcome = replay.run(|progress| shown.update(progress))?;
    shown.finish();
    let counters = before.zip(place.counters()?);
    let interrupted = stop.load(Ordering::Relaxed);
    if !interrupted {
        let report = Report {
            outcome: &outcome,
            expected,
            bound_points: cli.bound_points(),
            capacity_blocks,
            unique_blocks: trace.unique_blocks(),
            block_bytes: cli.block_bytes,
            in_flight: cli.in_flight,
            order: cli.order,
            ask_tier: replay.ask_tier,
            counters,
        };
        print!("{report}");
        let beyond = report.disagreement();
        place.leave(blocks, cli.keep)?;
        let wrong = (outcome.wrong_bytes > 0)
            .then(|| format!("{} bytes were not what had been written", outcome.wrong_bytes));
        if let Some(why) = wrong.or_else(|| beyond.clone().filter(|_| cli.checks_hit_rate())) {
            return Err(Failure::new(why));
        }
        if let Some(why) = beyond {
            println!("Note: {why}. A forecast is not checked; --check makes this a failure.");
        }
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("trace_replay: interrupted after {} requests; cleaning up", outcome.requests);
    place.leave(blocks, cli.keep)?;
    Ok(ExitCode::from(INTERRUPTED))
}

/// A flag that the signals set which would otherwise end the program with its mount left behind.
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .context(|| format!("cannot handle signal {signal}"))?;
    }
    Ok(stop)
}

/// Where the blocks go.
enum Place {
    /// A mount of our own.
    Temporary(Mounted),
    /// Somebody else's mount.
    Mount(PathBuf),
    /// A directory of any file system.
    Plain(PathBuf),
}

impl Place {
    fn prepare(cli: &Cli, trace: &Trace, stop: &AtomicBool) -> Result<Self> {
        if let Some(dir) = &cli.plain {
            return Ok(Self::Plain(dir.clone()));
        }
        if let Some(dir) = &cli.mount {
            return Ok(Self::Mount(dir.clone()));
        }
        let daemon = daemon_binary(cli)?;
        let wanted = cli.capacity_percent.map(|percent| percent_of(trace.unique_blocks(), percent));
        let given = cli.l2.as_ref().map_or(L2_DEFAULT_BYTES, |store| store.bytes);
        let mut plan = Plan {
            daemon: &daemon,
            l1_bytes: cli.l1,
            store: cli.l2.as_ref().map(|store| store.path.as_path()),
            l2_bytes: wanted.map_or(given, |blocks| blocks * cli.block_bytes),
            more_args: &cli.daemon_arg,
        };
        let mut mounted = Mounted::start(&plan)?;
        let Some(wanted) = wanted else { return Ok(Self::Temporary(mounted)) };
        for _ in 1..SIZING_MOUNTS {
            let wanted_bytes = wanted * cli.block_bytes;
            let got_bytes = mount::capacity_bytes(&mounted.dir())?;
            if got_bytes / cli.block_bytes == wanted || stop.load(Ordering::Relaxed) {
                break;
            }
            plan.l2_bytes =
                (plan.l2_bytes + wanted_bytes).saturating_sub(got_bytes).next_multiple_of(BLOCK_ALIGN_BYTES);
            mounted.stop()?;
            mounted = Mounted::start(&plan)?;
        }
        Ok(Self::Temporary(mounted))
    }

    fn dir(&self) -> PathBuf {
        match self {
            Self::Temporary(mounted) => mounted.dir(),
            Self::Mount(dir) | Self::Plain(dir) => dir.clone(),
        }
    }

    /// The daemon's counters, where there is a daemon.
    fn counters(&self) -> Result<Option<Counters>> {
        match self {
            Self::Temporary(_) | Self::Mount(_) => Counters::read(&self.dir()).map(Some),
            Self::Plain(_) => Ok(None),
        }
    }

    /// Blocks that fit, as the mount itself says; none if all do.
    fn capacity_blocks(&self, cli: &Cli, trace: &Trace) -> Result<Option<u64>> {
        match self {
            Self::Temporary(_) | Self::Mount(_) => {
                Ok(Some(mount::capacity_bytes(&self.dir())? / cli.block_bytes))
            }
            Self::Plain(_) => {
                Ok(cli.capacity_percent.map(|percent| percent_of(trace.unique_blocks(), percent)))
            }
        }
    }

    /// Blocks that the client has to keep to by itself.
    fn client_capacity(&self, capacity_blocks: Option<u64>) -> Option<u64> {
        match self {
            Self::Temporary(_) | Self::Mount(_) => None,
            Self::Plain(_) => capacity_blocks,
        }
    }

    /// Removes the blocks, or with `keep` says where they are.
    fn leave(self, blocks: tempfile::TempDir, keep: bool) -> Result<()> {
        let path = blocks.path().to_path_buf();
        match self {
            Self::Temporary(mounted) if keep => {
                let dir = mounted.keep();
                println!(
                    "kept {} (end it with: umount {}; then remove its parent)",
                    path.display(),
                    dir.display()
                );
            }
            Self::Temporary(mounted) => {
                // The store goes as a whole; removing its files one by one would only take time.
                let _ = blocks.keep();
                let took = mounted.stop()?;
                println!("Drained and unmounted in {:.1} s.", took.as_secs_f64());
            }
            Self::Mount(_) | Self::Plain(_) if keep => println!("kept {}", path.display()),
            Self::Mount(_) | Self::Plain(_) => {
                blocks.close().context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }
}

/// Whole blocks, rounded down as the traces' README does.
fn percent_of(blocks: u64, percent: f64) -> u64 {
    // Both are far below 2^53, and a trace has at least one block.
    ((blocks as f64 * percent / 100.0) as u64).max(1)
}

fn daemon_binary(cli: &Cli) -> Result<PathBuf> {
    if let Some(path) = &cli.daemon_binary {
        return Ok(path.clone());
    }
    let own = std::env::current_exe().context(|| "cannot find this program's own path".into())?;
    // target/PROFILE/examples/trace_replay
    let path = own.parent().and_then(Path::parent).unwrap_or(Path::new(".")).join("kvcachefs");
    if fs::metadata(&path).is_ok_and(|m| m.is_file()) {
        return Ok(path);
    }
    let built = path.display();
    Err(Failure::new(format!(
        "no daemon at {built}: build it with `cargo build` (--release alike) or name it with --daemon-binary"
    )))
}
