//! What it costs to ask: opening a warm file, and one ioctl that classifies and leases a window (P6).

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cli::Cli;
use crate::client::Client;
use crate::failure::{Context, Failure, Result};
use crate::files::{Files, rate};
use crate::mount::Mount;
use crate::pairs;
use crate::report::{Report, Unit};
use crate::trivial::Running;

/// The largest window of the target.
const WINDOW: usize = 256;
const WANTED: Duration = Duration::from_micros(60);
/// Opens between two looks at the clock.
const OPENS: u64 = 64;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    opens(cli, report)?;
    windows(cli, report)
}

/// Open and close, against a daemon that does nothing else.
fn opens(cli: &Cli, report: &mut Report) -> Result<()> {
    let (count, bytes) = Running::files();
    let mib = (count * bytes) >> 20;
    let mount = Mount::start(cli, mib * 2, &["--dirty-limit".into(), format!("{mib}MiB")])?;
    let files = Files::plan(&mount.dir().join("files"), mib, bytes >> 20);
    files.write(&files.buffers(1))?;
    mount.drain()?;
    let trivial = Running::start()?;
    let before = mount.stat("opens_passthrough")?;
    for &threads in &cli.threads {
        let many = |path: &(dyn Fn(usize) -> std::path::PathBuf + Sync)| {
            rate(threads, cli.sample(), 0, |at, _| {
                let path = path(at);
                for _ in 0..OPENS {
                    File::open(&path).context(|| format!("cannot open {}", path.display()))?;
                }
                Ok(OPENS)
            })
        };
        let outcome = pairs::run(cli.pairs, || many(&|at| files.path(at)), || many(&|at| trivial.path(at)))?;
        let what = format!("open and close of a warm file, threads: {threads}");
        // At most 1.2 times the time is at least that part of the rate.
        report.pairs("P6", what, &outcome, Unit::Operations, "trivial daemon", 1.0 / 1.2);
    }
    if mount.stat("opens_passthrough")? == before {
        return Err(Failure::new("no file was opened with passthrough".into()));
    }
    drop(trivial);
    mount.stop()
}

/// How long it takes to classify and lease the first `count` ranges: median and 99th percentile over `time`, and how
/// often it was done.
fn acquires(client: &Client, count: usize, time: Duration) -> Result<(Duration, Duration, usize)> {
    let start = Instant::now();
    let mut took = Vec::new();
    while start.elapsed() < time {
        let asked = Instant::now();
        let lease = client.lease(&client.ranges[..count])?;
        took.push(asked.elapsed());
        client.release(lease)?;
    }
    took.sort_unstable();
    let at = |part: f64| took[((took.len() - 1) as f64 * part) as usize];
    Ok((at(0.5), at(0.99), took.len()))
}

fn micros(time: Duration) -> String {
    format!("{:.1} us", time.as_secs_f64() * 1e6)
}

/// Windows of files that are in L1: on an idle mount, and while others store as fast as they can.
fn windows(cli: &Cli, report: &mut Report) -> Result<()> {
    let mib = WINDOW as u64;
    let mount = Mount::start(cli, mib * 3, &["--dirty-limit".into(), format!("{mib}MiB")])?;
    let files = Files::plan(&mount.dir().join("files"), mib, 1);
    files.write(&files.buffers(1))?;
    mount.drain()?;
    let names: Vec<String> = (0..WINDOW).map(|at| format!("files/{at:04}.kv")).collect();
    let client = Client::new(&mount, &names)?;
    acquires(&client, WINDOW, cli.sample())?;
    for count in [1, 16, WINDOW] {
        let (median, p99, times) = acquires(&client, count, cli.sample() * cli.pairs)?;
        let wanted = match count {
            WINDOW if median <= WANTED => "<= 60 us: met",
            WINDOW => "<= 60 us: missed",
            _ => "",
        };
        report.figure(
            "P6",
            format!("one ioctl that classifies and leases {count} ranges by id; {times} times"),
            format!("{} median, {} p99", micros(median), micros(p99)),
            String::new(),
            wanted.into(),
        );
    }
    let over = AtomicBool::new(false);
    let loaded = std::thread::scope(|scope| {
        let stores = scope.spawn(|| {
            let files = Files::plan(&mount.dir().join("stores"), mib, 1);
            let buffers = files.buffers(2);
            while !over.load(Ordering::Relaxed) {
                files.write(&buffers)?;
            }
            Ok(())
        });
        // Until the dirty bound is reached.
        std::thread::sleep(Duration::from_secs(1));
        let took = acquires(&client, 16, cli.sample() * cli.pairs);
        over.store(true, Ordering::Relaxed);
        stores.join().unwrap_or_else(|_| Err(Failure::new("a client panicked".into()))).and(took)
    })?;
    report.figure(
        "P6",
        format!("the same of 16 ranges while two threads store without a pause; {} times", loaded.2),
        format!("{} median, {} p99", micros(loaded.0), micros(loaded.1)),
        String::new(),
        String::new(),
    );
    drop(client);
    mount.stop()
}
