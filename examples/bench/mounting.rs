//! Time to mount, and memory for each file, with a full catalog (P10).
//!
//! The catalog is written through the library, as a checkpoint of a store that has been used for long would be. The
//! store is a sparse file behind a loop device: its files have places on it and no bytes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use kvcachefs::l2::record::{Put, Record};
use kvcachefs::l2::volume::{CatalogReader, Volume, VolumeOptions};
use kvcachefs::l2::{DeviceOptions, Extent};

use crate::cli::Cli;
use crate::failure::{Context, Failure, Result};
use crate::interrupt;
use crate::mount::Mount;
use crate::pairs::median;
use crate::report::Report;

const DIRS: u64 = 256;
const L1_MIB: u64 = 64;
const MOUNTS: usize = 5;
/// What a file may cost (DESIGN.md, P10).
const BYTES_WANTED: f64 = 256.0;
/// What a million files may take to mount.
const SECONDS_WANTED: f64 = 2.0;
/// The time of all files, in nanoseconds since 1970. Any will do.
const BORN: i64 = 1_700_000_000_000_000_000;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    let home = tempfile::Builder::new()
        .prefix("kvcachefs-bench-catalog-")
        .tempdir_in(cli.scratch())
        .context(|| "cannot make a directory for the store".into())?;
    let bytes = cli.files * cli.file_kib * 1024;
    let room = bytes + bytes / 32 + cli.files * 1024 + (1 << 30);
    let device = Loop::over(&home.path().join("l2.store"), room.next_multiple_of(1 << 20))?;
    let args = vec!["--l2".into(), device.0.display().to_string()];
    let mut empty = Vec::new();
    format(&device.0, cli, 0)?;
    for _ in 0..MOUNTS {
        let mount = Mount::start(cli, L1_MIB, &args)?;
        empty.push((mount.took.as_secs_f64(), mount.anonymous_bytes()? as f64));
        mount.stop()?;
    }
    format(&device.0, cli, cli.files)?;
    let mut full = Vec::new();
    for _ in 0..MOUNTS {
        let mount = Mount::start(cli, L1_MIB, &args)?;
        full.push((mount.took.as_secs_f64(), mount.anonymous_bytes()? as f64));
        let files = mount.stat("files")?;
        if files != cli.files {
            return Err(Failure::new(format!("{files} files are mounted, not {}", cli.files)));
        }
        mount.stop()?;
    }
    let seconds = |samples: &[(f64, f64)]| median(&mut samples.iter().map(|s| s.0).collect::<Vec<_>>());
    let memory = |samples: &[(f64, f64)]| median(&mut samples.iter().map(|s| s.1).collect::<Vec<_>>());
    let files = cli.files as f64;
    let wanted = SECONDS_WANTED * (files / 1e6).max(1.0);
    let verdict = |good| if good { "met" } else { "missed" };
    report.figure(
        "P10",
        format!("time to mount, {} files of {} KiB, median of {MOUNTS}", cli.files, cli.file_kib),
        format!("{:.2} s", seconds(&full)),
        format!("{:.2} s empty", seconds(&empty)),
        format!("<= {wanted:.0} s: {}", verdict(seconds(&full) <= wanted)),
    );
    let each = (memory(&full) - memory(&empty)) / files;
    report.figure(
        "P10",
        format!("anonymous memory for each of them, after the mount; names of {} bytes", name(0).len()),
        format!("{each:.0} B"),
        format!("{:.1} MB empty", memory(&empty) / 1e6),
        format!("<= {BYTES_WANTED:.0} B: {}", verdict(each <= BYTES_WANTED)),
    );
    Ok(())
}

/// As long as the hexadecimal digits of a 128-bit hash with an extension.
fn name(at: u64) -> String {
    let mixed = (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{mixed:016x}{at:016x}.kv")
}

/// A new store has no catalog to read.
struct Nobody;

impl CatalogReader for Nobody {
    fn devices(&mut self, _: &[u64], _: u64) {}
    fn record(&mut self, _: Record) {}
}

/// Makes a store with `files` files on `device`.
fn format(device: &Path, cli: &Cli, files: u64) -> Result<()> {
    let options = VolumeOptions {
        read_only: false,
        format: true,
        files_max: Some(cli.files + cli.files / 8),
        device: DeviceOptions::default(),
        wrap: None,
        stopped: Arc::default(),
    };
    let failed = |error: kvcachefs::error::Error| Failure::new(error.to_string());
    let opened = Volume::open(&[(device, None)], &options, &mut Nobody).map_err(failed)?;
    let volume = opened.volume;
    let pages = (cli.file_kib / 4) as u32;
    let blocks = (cli.file_kib * 1024).div_ceil(256 << 10) as u32;
    let mut encoded = Vec::new();
    let mut checkpoint = volume.begin_checkpoint();
    // The root is node 0; directories follow it, then files.
    for id in 1..=DIRS + files {
        interrupt::check()?;
        let mut put = Put { id: 1 << 32 | id, seq: id, mode: 0o644, ..Put::default() };
        (put.mtime, put.ctime, put.atime) = (BORN, BORN, BORN);
        if id <= DIRS {
            (put.kind, put.mode, put.name) = (1, 0o755, format!("{:02x}", id - 1).into_bytes());
        } else {
            let at = id - DIRS - 1;
            put.parent = 1 << 32 | (at % DIRS + 1);
            put.name = name(at).into_bytes();
            put.size = cli.file_kib * 1024;
            put.extents = vec![Extent { start: at * u64::from(pages), blocks: pages }];
            put.crcs = (0..blocks).map(|block| (at as u32).wrapping_add(block)).collect();
        }
        encoded.clear();
        Record::Put(Box::new(put)).encode(&mut encoded);
        checkpoint.push(&encoded).context(|| "cannot write the catalog".into())?;
    }
    volume.finish_checkpoint(checkpoint).context(|| "cannot write the catalog".into())?;
    volume.stop();
    Ok(())
}

/// A loop device over a sparse file.
struct Loop(PathBuf);

impl Loop {
    fn over(path: &Path, bytes: u64) -> Result<Self> {
        File::create(path)
            .and_then(|file| file.set_len(bytes))
            .context(|| format!("cannot make {}", path.display()))?;
        let out = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(path)
            .output()
            .context(|| "cannot run losetup".into())?;
        if !out.status.success() {
            let said = String::from_utf8_lossy(&out.stderr);
            return Err(Failure::new(format!("losetup (it needs root): {}", said.trim())));
        }
        Ok(Self(String::from_utf8_lossy(&out.stdout).trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        if !detached.is_ok_and(|status| status.success()) {
            eprintln!("bench: {} is still attached", self.0.display());
        }
    }
}
