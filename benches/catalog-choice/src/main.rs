//! Compares stores for the catalog on the catalog's own job: small records, made durable in groups, and all read when
//! the file system is mounted. What came of it is in docs/decisions/0001-catalog.md.
//!
//! ```text
//! cargo run --release -- [FILES] [DIRECTORY]
//! ```
//!
//! Every measurement runs in a process of its own, so that memory and written bytes are the store's alone.

mod fjall_store;
mod journal_store;
mod redb_store;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use kvcachefs::l2::Extent;
use kvcachefs::l2::record::{Put, Record};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Files that are there before commits are measured.
const BEFORE: u64 = 100_000;
/// Records of one commit while a store is filled.
const FILL_GROUP: u64 = 256;
const GROUPS: [u64; 3] = [1, 16, 256];
const COMMITS: u64 = 400;

/// A store of records by number.
pub trait Catalog: Sized {
    fn create(dir: &Path, files: u64) -> Result<Self>;
    /// Opens the store and shows every record.
    fn open(dir: &Path, files: u64, visit: &mut dyn FnMut(&[u8])) -> Result<Self>;
    /// Makes the records durable: when this returns they survive a loss of power.
    fn commit(&mut self, records: &[(u64, Vec<u8>)]) -> Result<()>;
    /// As at the end of a daemon.
    fn close(self) -> Result<()>;
}

/// A file of 2 MiB as the daemon records it.
fn record(id: u64) -> (u64, Vec<u8>) {
    let mixed = (id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let crc = |block: u64| (mixed.rotate_left(block as u32 * 8) ^ block) as u32;
    let put = Put {
        id,
        mode: 0o644,
        parent: 1 << 32 | (mixed >> 56),
        seq: id,
        size: 2 << 20,
        mtime: 1_700_000_000_000_000_000 + id as i64 * 1000,
        name: format!("{mixed:016x}{:016x}.kv", mixed.rotate_left(32)).into_bytes(),
        extents: vec![Extent { start: id * 512, blocks: 512 }],
        crcs: (0..8).map(crc).collect(),
        xattrs: vec![(b"user.kv.blocks".to_vec(), b"0-127".to_vec())],
        ..Put::default()
    };
    let mut bytes = Vec::new();
    Record::Put(Box::new(put)).encode(&mut bytes);
    (id, bytes)
}

fn fill(catalog: &mut impl Catalog, files: std::ops::Range<u64>) -> Result<u64> {
    let (mut at, mut payload) = (files.start, 0);
    while at < files.end {
        let end = (at + FILL_GROUP).min(files.end);
        let records: Vec<_> = (at..end).map(record).collect();
        payload += records.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        catalog.commit(&records)?;
        at = end;
    }
    Ok(payload)
}

/// A field of a file of /proc/self.
fn proc(file: &str, key: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/self/{file}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let digits = value.ok_or(format!("no {key}"))?.trim().trim_end_matches(" kB");
    Ok(digits.parse()?)
}

/// One measurement: its figures, as words.
fn measure<C: Catalog>(phase: &str, dir: &Path, files: u64) -> Result<String> {
    match phase {
        "fill" => {
            let mut catalog = C::create(dir, files)?;
            let (written, start) = (proc("io", "write_bytes")?, Instant::now());
            let payload = fill(&mut catalog, 0..files)?;
            catalog.close()?;
            let amplification = (proc("io", "write_bytes")? - written) as f64 / payload as f64;
            let disk: u64 = size_of_tree(dir)?;
            let each = disk as f64 / files as f64;
            Ok(format!("{:.1} {amplification:.2} {each:.0}", start.elapsed().as_secs_f64()))
        }
        "mount" => {
            let before = proc("status", "RssAnon")?;
            let start = Instant::now();
            let (mut records, mut bytes) = (0u64, 0u64);
            let catalog = C::open(dir, files, &mut |record| {
                records += 1;
                bytes += record.len() as u64;
            })?;
            let took = start.elapsed().as_secs_f64();
            if records != files {
                return Err(format!("{records} records came back, not {files}").into());
            }
            let peak = proc("status", "VmHWM")?;
            let after = proc("status", "RssAnon")?.saturating_sub(before);
            drop(catalog);
            Ok(format!("{took:.2} {:.0} {:.0}", after as f64 / 1024.0, peak as f64 / 1024.0))
        }
        group => {
            let group: u64 = group.parse()?;
            let mut catalog = C::create(dir, BEFORE + COMMITS * group)?;
            fill(&mut catalog, 0..BEFORE)?;
            let written = proc("io", "write_bytes")?;
            let (mut times, mut payload) = (Vec::new(), 0);
            for commit in 0..COMMITS {
                let first = BEFORE + commit * group;
                let records: Vec<_> = (first..first + group).map(record).collect();
                payload += records.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
                let start = Instant::now();
                catalog.commit(&records)?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            let amplification = (proc("io", "write_bytes")? - written) as f64 / payload as f64;
            times.sort_by(f64::total_cmp);
            let (median, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
            Ok(format!("{median:.0} {late:.0} {amplification:.1}"))
        }
    }
}

fn size_of_tree(dir: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        bytes += if meta.is_dir() { size_of_tree(&entry.path())? } else { meta.blocks() * 512 };
    }
    Ok(bytes)
}

/// What is measured is reading from the device, not from the page cache.
fn forget_pages(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            forget_pages(&path)?;
        } else {
            let file = fs::File::open(path)?;
            file.sync_all()?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
    }
    Ok(())
}

fn child(engine: &str, phase: &str, dir: &Path, files: u64) -> Result<Vec<String>> {
    let out = Command::new(std::env::current_exe()?)
        .args(["--child", engine, phase])
        .arg(dir)
        .arg(files.to_string())
        .output()?;
    if !out.status.success() {
        return Err(format!("{engine} {phase}: {}", String::from_utf8_lossy(&out.stderr)).into());
    }
    Ok(String::from_utf8(out.stdout)?.split_whitespace().map(str::to_owned).collect())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, engine, phase, dir, files] = &args[..]
        && flag == "--child"
    {
        let (dir, files) = (Path::new(dir), files.parse()?);
        let figures = match engine.as_str() {
            "redb" => measure::<redb_store::Redb>(phase, dir, files)?,
            "fjall" => measure::<fjall_store::Fjall>(phase, dir, files)?,
            _ => measure::<journal_store::Own>(phase, dir, files)?,
        };
        println!("{figures}");
        return Ok(());
    }
    let files: u64 = args.first().map_or(Ok(1_000_000), |text| text.parse())?;
    let place = args.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    println!("{files} files; a record has {} bytes.\n", record(0).1.len());
    println!("| store | records a commit | commit, median | 99 of 100 | written / payload |");
    println!("|---|---|---|---|---|");
    const ENGINES: [&str; 3] = ["redb", "fjall", "own journal"];
    for group in GROUPS {
        for engine in ENGINES {
            let dir = tempfile::tempdir_in(&place)?;
            let figures = child(engine, &group.to_string(), dir.path(), 0)?;
            println!("| {engine} | {group} | {} us | {} us | {} |", figures[0], figures[1], figures[2]);
        }
    }
    println!(
        "\n| store | filling, {FILL_GROUP} a commit | written / payload | on disk a file | open and scan | memory after | memory, peak |"
    );
    println!("|---|---|---|---|---|---|---|");
    for engine in ENGINES {
        let dir = tempfile::tempdir_in(&place)?;
        let filled = child(engine, "fill", dir.path(), files)?;
        let mut mounts = Vec::new();
        for _ in 0..3 {
            forget_pages(dir.path())?;
            mounts.push(child(engine, "mount", dir.path(), files)?);
        }
        let seconds = |figures: &Vec<String>| figures[0].parse::<f64>().unwrap_or(f64::NAN);
        mounts.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        let mount = &mounts[1];
        println!(
            "| {engine} | {} s | {} | {} B | {} s | {} MiB | {} MiB |",
            filled[0], filled[1], filled[2], mount[0], mount[1], mount[2]
        );
    }
    Ok(())
}
