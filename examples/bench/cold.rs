//! Reads of files that are all in L2, against fio on the same store file (P4).

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cli::Cli;
use crate::failure::{Failure, Result};
use crate::files::{Files, rate};
use crate::fio::{self, Amount, Direction, Shape, StoreFile};
use crate::mount::Mount;
use crate::pairs;
use crate::report::{Report, Unit};

const FILE_MIB: u64 = 18;
/// Threads with which the client is tried, as fio is with depths.
const THREADS: [usize; 4] = [2, 4, 8, 16];
/// Samples of the device have to be longer than those of memory.
const LONGER: u32 = 3;
/// Least part of the reads that must have come from L2.
const COLD_LEAST: f64 = 0.9;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    let store = StoreFile::new(cli)?;
    let mount = Mount::start(cli, cli.l1, &store.args())?;
    let files = Files::plan(&mount.dir().join("files"), cli.cold, FILE_MIB);
    files.write(&files.buffers(2))?;
    mount.drain()?;
    let shape = fio::best(&store, Direction::Read)?;
    // fio at its best reads into the same few MiB again and again, which stay in processor caches where the device's
    // bytes come by a copy (virtual machines). A promotion has to fill memory as large as L1; so shall fio, once.
    let into_l1 = Shape { block_kib: 4096, depth: (cli.l1 / 4) as u32, random: true };
    let time = cli.sample() * LONGER;
    // Whoever opens with O_DIRECT reads around L1. Others promote; what was read longest ago has left when its turn
    // comes again, because all files together are several times as large as L1.
    for (how, flags) in [("O_DIRECT opens", libc::O_DIRECT), ("promoted to L1 and evicted again", 0)] {
        let sample = |threads| {
            rate(threads, time, files.bytes, |at, buffer| {
                files.read(at, flags, buffer)?;
                Ok(files.bytes as u64)
            })
        };
        let mut best = (0.0, THREADS[0]);
        for threads in THREADS {
            let rate = sample(threads)?;
            eprintln!("{how}, {threads} threads: {:.2} GB/s", rate / 1e9);
            if rate > best.0 {
                best = (rate, threads);
            }
        }
        let before = mount.stat("read_l2_bytes")?;
        let read = AtomicU64::new(0);
        let against = |shape| {
            pairs::run(
                cli.pairs,
                || {
                    let rate = sample(best.1)?;
                    read.fetch_add((rate * time.as_secs_f64()) as u64, Ordering::Relaxed);
                    Ok(rate)
                },
                || fio::run(&store, Direction::Read, shape, Amount::For(time)),
            )
        };
        let outcome = against(shape)?;
        let spread = if flags == 0 { Some(against(into_l1)?) } else { None };
        let from_l2 = mount.stat("read_l2_bytes")? - before;
        // Threads end a little after the time, so that both are only about equal.
        let cold = from_l2 as f64 / read.into_inner() as f64;
        if cold < COLD_LEAST {
            return Err(Failure::new(format!("only {:.0} % was read from L2", cold * 100.0)));
        }
        let what = format!("cold read, {FILE_MIB} MiB files, {how}, {} threads", best.1);
        let other = format!("fio, {shape}");
        report.pairs("P4", what.clone(), &outcome, Unit::Bytes, &other, 0.90);
        if let Some(outcome) = spread {
            let other = format!("fio into as much memory, {into_l1}");
            report.pairs("P4", what, &outcome, Unit::Bytes, &other, 0.90);
        }
    }
    mount.stop()
}
