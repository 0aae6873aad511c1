//! Stores with their drain, against fio that writes as much to the same store file and makes it durable (P5).

use std::time::Instant;

use crate::cli::Cli;
use crate::failure::Result;
use crate::files::Files;
use crate::fio::{self, Amount, Direction, StoreFile};
use crate::mount::Mount;
use crate::pairs;
use crate::report::{Report, Unit};

const FILE_MIB: u64 = 18;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    let store = StoreFile::new(cli)?;
    let mount = Mount::start(cli, cli.l1, &store.args())?;
    let files = Files::plan(&mount.dir().join("files"), cli.cold, FILE_MIB);
    let shape = fio::best(&store, Direction::Write)?;
    let bytes = (files.count * files.bytes) as u64;
    for threads in [1, 4] {
        let buffers = files.buffers(threads);
        let outcome = pairs::run(
            cli.pairs,
            || {
                let start = Instant::now();
                files.write(&buffers)?;
                mount.drain()?;
                let took = start.elapsed();
                // fio then writes where nothing is, so that the mount stays whole.
                files.remove()?;
                mount.drain()?;
                Ok(bytes as f64 / took.as_secs_f64())
            },
            || fio::run(&store, Direction::Write, shape, Amount::Mib(bytes >> 20)),
        )?;
        let what = format!("store of {} MiB and drain, {FILE_MIB} MiB files, {threads} threads", bytes >> 20);
        let other = format!("fio, {shape}");
        report.pairs("P5", what, &outcome, Unit::Bytes, &other, 0.85);
    }
    mount.stop()
}
