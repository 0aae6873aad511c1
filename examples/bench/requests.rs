//! Requests of an engine whose prefixes are on the mount, brought to L1 by hints or by the reads themselves (P8).
//!
//! The workload is 200 requests of 10,000 tokens, no two with a common prefix, 78 blocks of 128 tokens each: 18 MiB a block for a
//! model of 8 billion parameters in 16 bits, divided by `--hint-scale`. L1 holds 90 % of it, L2 105 %. All are stored,
//! and then loaded in the same order, which is the worst that can be done to a policy by recency.
//!
//! The engine is simulated: it has some requests in hand, loads one of them with a few threads, computes on it for
//! `--decode-ms`, and goes on to the next. A request is served when its bytes have been read: that is its first token.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use kvcachefs::abi;

use crate::cli::Cli;
use crate::client::Client;
use crate::failure::{Context, Failure, Result};
use crate::files::fill;
use crate::hints::store;
use crate::mount::Mount;
use crate::pairs;
use crate::report::{Report, Unit};

const REQUESTS: usize = 200;
const BLOCKS: usize = 78;
const BLOCK_BYTES: u64 = 18 << 20;
/// Requests that the engine has in hand at one time: granted, or waiting for their window.
const IN_HAND: usize = 16;
/// Threads that read the blocks of one request.
const LOADERS: usize = 4;
/// Windows that may be on their way at one time.
const WINDOW: usize = 2;
/// What is counted of a pass: hints, those of them that found all in L1, and files promoted.
const COUNTED: [&str; 3] = ["hints", "hints_bypassed", "promotions"];

/// How the bytes of a request come to L1.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// A window is submitted for each request that the engine gets; it is loaded when it is there and leased.
    Hints,
    /// By reading them, request after request.
    Reads,
}

struct Engine<'m> {
    mount: &'m Mount,
    client: Client,
    block: usize,
    decode: Duration,
}

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    let block = (BLOCK_BYTES / u64::from(cli.hint_scale)).next_multiple_of(4096);
    let all_mib = ((REQUESTS * BLOCKS) as u64 * block) >> 20;
    let scratch = store(cli)?;
    let path = scratch.path().join("l2");
    // Beside the blocks the catalog takes some.
    let args = [
        "--l2".to_owned(),
        format!("{}:{}MiB", path.display(), all_mib * 105 / 100 + 64),
        "--prefetch-window".to_owned(),
        WINDOW.to_string(),
    ];
    let mount = Mount::start(cli, all_mib * 9 / 10, &args)?;
    std::fs::create_dir(mount.dir().join("kv")).context(|| "cannot make a directory".into())?;
    let mut bytes = vec![0; block as usize];
    fill(&mut bytes);
    for request in 0..REQUESTS {
        crate::interrupt::check()?;
        write(&mount, request, &mut bytes)?;
    }
    mount.drain()?;
    let names: Vec<String> =
        (0..REQUESTS).flat_map(|request| (0..BLOCKS).map(move |block| name(request, block))).collect();
    let client = Client::new(&mount, &names)?;
    let engine = Engine { mount: &mount, client, block: block as usize, decode: cli.decode() };
    let (mut counts, mut passes) = ([0; COUNTED.len()], 0);
    let outcome = pairs::run(
        cli.pairs,
        || {
            let before = COUNTED.map(|key| mount.stat(key));
            let first_token = engine.pass(By::Hints)?;
            for ((count, key), before) in counts.iter_mut().zip(COUNTED).zip(before) {
                *count += mount.stat(key)? - before?;
            }
            passes += 1;
            Ok(1.0 / first_token.as_secs_f64())
        },
        || Ok(1.0 / engine.pass(By::Reads)?.as_secs_f64()),
    )?;
    let what = format!(
        "{REQUESTS} requests of {BLOCKS} blocks of {} KiB, L1 90 % and L2 105 %, window {WINDOW}, {IN_HAND} in hand",
        block >> 10
    );
    // Lower by 15 % is a rate higher by this.
    let wanted = 1.0 / 0.85;
    report.pairs(
        "P8",
        format!("time to first token, median of {what}, {} ms of computing each", engine.decode.as_millis()),
        &outcome,
        Unit::Each,
        "without hints",
        wanted,
    );
    let [hints, bypassed, promotions] = counts.map(|count| count as f64 / f64::from(passes));
    report.figure(
        "P8",
        format!("{what}: hints of a pass"),
        format!("{:.0} take a place in the window, {bypassed:.0} were all in L1", hints - bypassed),
        format!("{hints:.0} without the bypass; {promotions:.0} files promoted"),
        String::new(),
    );
    drop(engine);
    mount.stop()
}

fn name(request: usize, block: usize) -> String {
    format!("kv/{request:03}-{block:02}.kv")
}

/// What is in a block: its own number, and bytes that nothing can make short work of.
fn write(mount: &Mount, request: usize, bytes: &mut [u8]) -> Result<()> {
    for block in 0..BLOCKS {
        bytes[..8].copy_from_slice(&((request * BLOCKS + block) as u64).to_le_bytes());
        let path = mount.dir().join(name(request, block));
        std::fs::write(&path, &bytes).context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

impl Engine<'_> {
    /// All requests, and the median of the times from when the engine got one to when its bytes were read.
    fn pass(&self, by: By) -> Result<Duration> {
        let mut first_token = Vec::with_capacity(REQUESTS);
        let (mut waiting, mut ready) = (HashMap::new(), VecDeque::new());
        let mut got = Vec::with_capacity(REQUESTS);
        while first_token.len() < REQUESTS {
            crate::interrupt::check()?;
            while got.len() < REQUESTS && waiting.len() + ready.len() < IN_HAND {
                let request = got.len();
                got.push(Instant::now());
                if by == By::Reads {
                    ready.push_back((request, 0));
                    continue;
                }
                let ranges = &self.client.ranges[request * BLOCKS..(request + 1) * BLOCKS];
                let said = self.client.prefetch(ranges, abi::PREFETCH_LEASE, request as u64)?;
                match (said.state, said.ticket) {
                    (abi::TICKET_DONE, _) => ready.push_back((request, said.lease)),
                    (abi::TICKET_DENIED, _) => {
                        return Err(Failure::new(format!("request {request} is denied: {said:?}")));
                    }
                    (_, ticket) => drop(waiting.insert(ticket, request)),
                }
            }
            if ready.is_empty() {
                for end in self.client.ends()? {
                    let Some(request) = waiting.remove(&end.ticket) else { continue };
                    if end.state != abi::TICKET_DONE {
                        return Err(Failure::new(format!(
                            "the ticket of request {request} ends with {end:?}"
                        )));
                    }
                    ready.push_back((request, end.lease));
                }
            }
            if let Some((request, lease)) = ready.pop_front() {
                self.load(request)?;
                first_token.push(got[request].elapsed());
                if lease != 0 {
                    self.client.release(lease)?;
                }
                std::thread::sleep(self.decode);
            }
        }
        first_token.sort_unstable();
        Ok(first_token[first_token.len() / 2])
    }

    fn load(&self, request: usize) -> Result<()> {
        let part = |from: usize| {
            let mut buffer = vec![0; self.block];
            for block in (from..BLOCKS).step_by(LOADERS) {
                let path = self.mount.dir().join(name(request, block));
                let failed = || format!("cannot read {}", path.display());
                File::open(&path).and_then(|mut file| file.read_exact(&mut buffer)).context(failed)?;
                if buffer[..8] != ((request * BLOCKS + block) as u64).to_le_bytes() {
                    return Err(Failure::new(format!(
                        "{} has other bytes than were written",
                        path.display()
                    )));
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let loaders: Vec<_> = (0..LOADERS).map(|from| scope.spawn(move || part(from))).collect();
            loaders.into_iter().try_for_each(|one| {
                one.join().unwrap_or_else(|_| Err(Failure::new("a client panicked".into())))
            })
        })
    }
}
