//! fio, as the measure of what the device gives, and the store file on which it and the daemon work.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::fs::Advice;
use tempfile::TempDir;

use crate::cli::Cli;
use crate::failure::{Context, Failure, Result};
use crate::files::fill;
use crate::interrupt;
use crate::pairs::median;

/// Where the superblock says that data starts; see `src/l2/superblock.rs`.
const DATA_START_AT: u64 = 64;
/// Operations of the size of a block of ours, of a part of a promotion, and of a large one.
const BLOCK_KIB: [u32; 3] = [256, 1024, 4096];
const DEPTHS: [u32; 4] = [2, 8, 32, 128];
/// Length of a try of the sweep, and tries of each shape.
const TRY: Duration = Duration::from_millis(500);
const ROUNDS: usize = 3;

/// A store file that has been written all over: first writes into reserved extents are slower than later ones, and
/// reads of what was never written do not reach the device.
#[derive(Debug)]
pub struct StoreFile {
    path: PathBuf,
    mib: u64,
    _home: TempDir,
}

impl StoreFile {
    pub fn new(cli: &Cli) -> Result<Self> {
        let mib = cli.cold * 2;
        let home = tempfile::Builder::new()
            .prefix("kvcachefs-bench-store-")
            .tempdir_in(cli.scratch())
            .context(|| "cannot make a directory for the store".into())?;
        let path = home.path().join("l2.store");
        let write = || {
            let mut file = File::create(&path)?;
            let mut bytes = vec![0; 1 << 20];
            fill(&mut bytes);
            for at in (0..mib).take_while(|_| !interrupt::is_wanted()) {
                bytes[..8].copy_from_slice(&at.to_le_bytes());
                file.write_all(&bytes)?;
            }
            file.sync_all()?;
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            std::io::Result::Ok(())
        };
        write().context(|| format!("cannot write {}", path.display()))?;
        interrupt::check()?;
        Ok(Self { path, mib, _home: home })
    }

    /// Options for a mount that makes this file its store.
    pub fn args(&self) -> Vec<String> {
        vec!["--l2".into(), format!("{}:{}MiB", self.path.display(), self.mib), "--format".into()]
    }

    /// Where the files' bytes lie, as the superblock tells.
    fn data(&self) -> Result<(u64, u64)> {
        let mut start = [0; 8];
        File::open(&self.path)
            .and_then(|file| file.read_exact_at(&mut start, DATA_START_AT))
            .context(|| format!("cannot read {}", self.path.display()))?;
        let start = u64::from_le_bytes(start);
        Ok((start, (self.mib << 20) - start))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    Read,
    Write,
}

/// How fio is to work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    pub block_kib: u32,
    pub depth: u32,
    /// In random order, as files of a cold set are asked for. Some devices like that better. Reads only.
    pub random: bool,
}

impl Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.random { ", random" } else { "" };
        write!(f, "{} KiB, depth {}{order}", self.block_kib, self.depth)
    }
}

/// How much fio is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    For(Duration),
    /// And make it durable.
    Mib(u64),
}

/// Bytes a second of fio on the data of `store`.
pub fn run(store: &StoreFile, direction: Direction, shape: Shape, amount: Amount) -> Result<f64> {
    interrupt::check()?;
    let (start, len) = store.data()?;
    let mut command = Command::new("fio");
    command
        .args(["--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=terse"])
        .args(["--terse-version=3", "--fallocate=none", "--overwrite=1", "--allow_file_create=0"])
        .arg(format!("--filename={}", store.path.display()))
        .arg(format!("--offset={start}"))
        .arg(format!("--bs={}k", shape.block_kib))
        .arg(format!("--iodepth={}", shape.depth));
    match direction {
        Direction::Read => {
            let order = if shape.random { "--rw=randread" } else { "--rw=read" };
            command.args([order, "--norandommap", "--readonly", "--invalidate=0"])
        }
        Direction::Write => command.args(["--rw=write", "--end_fsync=1", "--invalidate=0"]),
    };
    match amount {
        // fio takes whole seconds, unless a unit says otherwise.
        Amount::For(time) => {
            command.args(["--time_based", &format!("--runtime={}ms", time.as_millis())]);
            command.arg(format!("--size={}", len / (4 << 20) * (4 << 20)))
        }
        Amount::Mib(mib) => command.arg(format!("--size={mib}m")),
    };
    let out = command.output().context(|| "cannot run fio (is it installed?)".into())?;
    let text = String::from_utf8_lossy(&out.stdout);
    let said = || {
        let errors = String::from_utf8_lossy(&out.stderr);
        Failure::new(format!("fio ended with {}: {} {}", out.status, errors.trim(), text.trim()))
    };
    if !out.status.success() {
        return Err(said());
    }
    // Terse version 3: KiB and KiB/s of reads are fields 6 and 7, of writes 47 and 48; run times in ms 9 and 50.
    let line = text.lines().find(|line| line.starts_with("3;")).ok_or_else(said)?;
    let at = if direction == Direction::Read { 5 } else { 46 };
    let field = |at: usize| line.split(';').nth(at).and_then(|field| field.parse::<f64>().ok());
    let (kib, ms) = field(at).zip(field(at + 3)).ok_or_else(said)?;
    Ok(kib * 1024.0 / (ms / 1000.0))
}

/// The shape with which fio is fastest here: in rounds over all shapes, so that a noisy moment favours none.
pub fn best(store: &StoreFile, direction: Direction) -> Result<Shape> {
    let orders: &[bool] = if direction == Direction::Read { &[false, true] } else { &[false] };
    let mut shapes = Vec::new();
    for block_kib in BLOCK_KIB {
        for depth in DEPTHS {
            shapes.extend(orders.iter().map(|&random| Shape { block_kib, depth, random }));
        }
    }
    let mut rates = vec![Vec::new(); shapes.len()];
    for _ in 0..ROUNDS {
        for (shape, rates) in shapes.iter().zip(&mut rates) {
            rates.push(run(store, direction, *shape, Amount::For(TRY))?);
        }
    }
    let mut best = (0.0, shapes[0]);
    for (shape, rates) in shapes.iter().zip(&mut rates) {
        let rate = median(rates);
        eprintln!("fio {direction:?} {shape}: {:.2} GB/s", rate / 1e9);
        if rate > best.0 {
            best = (rate, *shape);
        }
    }
    Ok(best.1)
}
