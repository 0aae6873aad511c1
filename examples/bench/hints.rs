//! Hints: how many tickets there can be in a second, and how many windows of a real workload need one.
//!
//! The workload is 200 requests of 10,000 tokens, no two with a common prefix, 78 blocks of 128 tokens each: 18 MiB a block for a
//! model of 8 billion parameters in 16 bits, divided by `--hint-scale`. L1 holds 90 % of it, L2 105 %. All are stored,
//! and then loaded in the same order, which is the worst that can be done to a policy by recency.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::time::Instant;

use kvcachefs::abi;

use crate::cli::Cli;
use crate::client::Client;
use crate::failure::{Context, Failure, Result};
use crate::files::{Files, fill};
use crate::mount::Mount;
use crate::report::Report;

const REQUESTS: usize = 200;
const BLOCKS: usize = 78;
const BLOCK_BYTES: u64 = 18 << 20;
/// Requests that the engine has in hand at one time: granted, or waiting for their window.
const IN_HAND: usize = 16;
/// Files of the window that is submitted and cancelled again and again.
const COLD: usize = 16;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    tickets(cli, report)?;
    workload(cli, report)
}

/// One thread that submits a window that is not in L1, takes it back, and reads the end of its ticket.
fn tickets(cli: &Cli, report: &mut Report) -> Result<()> {
    let scratch = store(cli)?;
    let args = ["--l2".to_owned(), format!("{}:1GiB", scratch.path().join("l2").display())];
    let mount = Mount::start(cli, 128, &args)?;
    let files = Files::plan(&mount.dir().join("files"), 512, 1);
    files.write(&files.buffers(1))?;
    mount.drain()?;
    let names: Vec<String> = (0..COLD).map(|at| format!("files/{at:04}.kv")).collect();
    let client = Client::new(&mount, &names)?;
    let (start, time, mut done) = (Instant::now(), cli.sample() * cli.pairs, 0u64);
    while start.elapsed() < time {
        let said = client.prefetch(&client.ranges, 0, 0)?;
        if said.ticket != 0 {
            client.cancel(said.ticket)?;
            while client.ends()?.iter().all(|end| end.ticket != said.ticket) {}
        }
        done += 1;
    }
    let rate = done as f64 / start.elapsed().as_secs_f64();
    report.figure(
        "P8",
        format!(
            "windows of {COLD} ranges submitted, cancelled and their ends read, one thread; {done} times"
        ),
        format!("{rate:.0} a second"),
        String::new(),
        String::new(),
    );
    drop(client);
    mount.stop()
}

fn store(cli: &Cli) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("kvcachefs-bench-")
        .tempdir_in(cli.scratch())
        .context(|| format!("cannot make a directory in {}", cli.scratch().display()))
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

fn read(mount: &Mount, request: usize, buffer: &mut [u8]) -> Result<()> {
    for block in 0..BLOCKS {
        let path = mount.dir().join(name(request, block));
        let failed = || format!("cannot read {}", path.display());
        File::open(&path).and_then(|mut file| file.read_exact(buffer)).context(failed)?;
        if buffer[..8] != ((request * BLOCKS + block) as u64).to_le_bytes() {
            return Err(Failure::new(format!("{} has other bytes than were written", path.display())));
        }
    }
    Ok(())
}

fn workload(cli: &Cli, report: &mut Report) -> Result<()> {
    let block = (BLOCK_BYTES / u64::from(cli.hint_scale)).next_multiple_of(4096);
    let all_mib = ((REQUESTS * BLOCKS) as u64 * block) >> 20;
    let l1_mib = all_mib * 9 / 10;
    let scratch = store(cli)?;
    let path = scratch.path().join("l2");
    // Beside the blocks the catalog takes some.
    let args = [
        "--l2".to_owned(),
        format!("{}:{}MiB", path.display(), all_mib * 105 / 100 + 64),
        "--prefetch-window".to_owned(),
        "2".to_owned(),
    ];
    let mount = Mount::start(cli, l1_mib, &args)?;
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
    let keys = ["hints", "hints_bypassed", "promotions"];
    let before = keys.map(|key| mount.stat(key));
    let start = Instant::now();
    let (mut waiting, mut ready) = (HashMap::new(), VecDeque::new());
    let (mut next, mut done) = (0, 0);
    while done < REQUESTS {
        crate::interrupt::check()?;
        while next < REQUESTS && waiting.len() + ready.len() < IN_HAND {
            let ranges = &client.ranges[next * BLOCKS..(next + 1) * BLOCKS];
            let said = client.prefetch(ranges, abi::PREFETCH_LEASE, next as u64)?;
            match (said.state, said.ticket) {
                (abi::TICKET_DONE, _) => ready.push_back((next, said.lease)),
                (abi::TICKET_DENIED, _) => {
                    return Err(Failure::new(format!("request {next} is denied: {said:?}")));
                }
                (_, ticket) => drop(waiting.insert(ticket, next)),
            }
            next += 1;
        }
        if ready.is_empty() {
            for end in client.ends()? {
                let Some(request) = waiting.remove(&end.ticket) else { continue };
                if end.state != abi::TICKET_DONE {
                    return Err(Failure::new(format!("the ticket of request {request} ends with {end:?}")));
                }
                ready.push_back((request, end.lease));
            }
        }
        if let Some((request, lease)) = ready.pop_front() {
            read(&mount, request, &mut bytes)?;
            client.release(lease)?;
            done += 1;
        }
    }
    let took = start.elapsed();
    let mut count = [0; 3];
    for ((count, key), before) in count.iter_mut().zip(keys).zip(before) {
        *count = mount.stat(key)? - before?;
    }
    let [hints, bypassed, promotions] = count;
    report.figure(
        "P8",
        format!(
            "{REQUESTS} requests of {BLOCKS} blocks of {} KiB, L1 90 % and L2 105 %, window 2, {IN_HAND} in hand",
            block >> 10
        ),
        format!("{} take a place in the window, {bypassed} were all in L1", hints - bypassed),
        format!("{hints} without the bypass; {promotions} files promoted, {:.1} s", took.as_secs_f64()),
        String::new(),
    );
    drop(client);
    mount.stop()
}
