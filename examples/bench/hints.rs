//! Hints: how many tickets there can be in a second. What a workload has of them is in `requests`.

use std::time::Instant;

use crate::cli::Cli;
use crate::client::Client;
use crate::failure::{Context, Result};
use crate::files::Files;
use crate::mount::Mount;
use crate::report::Report;

/// Files of the window that is submitted and cancelled again and again.
const COLD: usize = 16;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    tickets(cli, report)?;
    crate::requests::run(cli, report)
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

pub fn store(cli: &Cli) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("kvcachefs-bench-")
        .tempdir_in(cli.scratch())
        .context(|| format!("cannot make a directory in {}", cli.scratch().display()))
}
