//! What it costs to ask: opening a warm file, and one ioctl that classifies and leases a window (P6).

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvcachefs::abi::{self, Command, Header, Range};
use zerocopy::{FromBytes, IntoBytes};

use crate::cli::Cli;
use crate::failure::{Context, Failure, Result};
use crate::files::{Files, rate};
use crate::ioctl::ioctl;
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
        let what = format!("open and close of a warm file, {threads} threads");
        // At most 1.2 times the time is at least that part of the rate.
        report.pairs("P6", what, &outcome, Unit::Operations, "trivial daemon", 1.0 / 1.2);
    }
    if mount.stat("opens_passthrough")? == before {
        return Err(Failure::new("no file was opened with passthrough".into()));
    }
    drop(trivial);
    mount.stop()
}

/// A handle with the names of all files.
struct Client {
    handle: File,
    ranges: Vec<Range>,
}

fn header(flags: u16, count: usize) -> Header {
    Header { version: abi::VERSION, flags, count: count as u32 }
}

impl Client {
    fn new(mount: &Mount, names: &[String]) -> Result<Self> {
        let path = mount.dir().join(".ctl/lease");
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let handle = opened.context(|| format!("cannot open {}", path.display()))?;
        let mut client = Self { handle, ranges: Vec::new() };
        let hello = abi::Hello { header: header(0, 0), ..abi::Hello::default() };
        client.call(Command::Hello, hello.as_bytes().to_vec())?;
        let list: Vec<u8> = names.iter().flat_map(|name| name.bytes().chain([0])).collect();
        let intern = abi::Intern {
            header: header(0, names.len()),
            bytes: list.len() as u32,
            ..abi::Intern::default()
        };
        let said = client.call(Command::Intern, [intern.as_bytes(), &list].concat())?;
        let said =
            abi::Intern::read_from_prefix(&said).map_or_else(|_| abi::Intern::default(), |(head, _)| head);
        let range =
            |at| Range { id: u64::from(said.first) + at, generation: said.generation, ..Range::default() };
        client.ranges = (0..names.len() as u64).map(range).collect();
        Ok(client)
    }

    fn call(&self, command: Command, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        let number = command.number(bytes.len());
        ioctl(self.handle.as_raw_fd(), number, &mut bytes).context(|| format!("{command:?} fails"))?;
        Ok(bytes)
    }

    /// How long it takes to classify and lease the first `count` ranges, which must all be in L1.
    fn acquire(&self, count: usize) -> Result<Duration> {
        let head = abi::Classify { header: header(abi::CLASSIFY_LEASE, count), ..abi::Classify::default() };
        let bytes = [head.as_bytes(), self.ranges[..count].as_bytes()].concat();
        let start = Instant::now();
        let said = self.call(Command::Classify, bytes)?;
        let took = start.elapsed();
        let head = abi::Classify::read_from_prefix(&said)
            .map_or_else(|_| abi::Classify::default(), |(head, _)| head);
        if head.lease == 0 {
            return Err(Failure::new(format!("no lease: {head:?}")));
        }
        let lease = abi::Lease { header: header(0, 0), lease: head.lease, ..abi::Lease::default() };
        self.call(Command::Release, lease.as_bytes().to_vec())?;
        Ok(took)
    }

    /// Median and 99th percentile over `time`.
    fn acquires(&self, count: usize, time: Duration) -> Result<(Duration, Duration, usize)> {
        let start = Instant::now();
        let mut took = Vec::new();
        while start.elapsed() < time {
            took.push(self.acquire(count)?);
        }
        took.sort_unstable();
        let at = |part: f64| took[((took.len() - 1) as f64 * part) as usize];
        Ok((at(0.5), at(0.99), took.len()))
    }
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
    let names: Vec<String> = (0..WINDOW).map(|at| format!("files/{:04}.kv", at)).collect();
    let client = Client::new(&mount, &names)?;
    client.acquires(WINDOW, cli.sample())?;
    for count in [1, 16, WINDOW] {
        let (median, p99, times) = client.acquires(count, cli.sample() * cli.pairs)?;
        let wanted = match count {
            WINDOW if median <= WANTED => "<= 60 us: met",
            WINDOW => "<= 60 us: missed",
            _ => "",
        };
        let what = format!("one ioctl that classifies and leases {count} ranges by id; {times} times");
        report.figure(
            "P6",
            what,
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
        let took = client.acquires(16, cli.sample() * cli.pairs);
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
