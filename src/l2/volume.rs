//! A store: its devices, what is where on them, and its catalog's journal.
//!
//! ```text
//! device 0:  superblock, its copy | journal and checkpoints | data
//! others:    superblock, its copy | data
//! ```
//!
//! A device that is not wholly ours, and in the shape we left it, is refused; nothing is overwritten unless the user
//! says so (`--format`).

use std::cmp::Reverse;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::journal::{Batch, Checkpoint, Error as JournalError, Journal, Medium};
use super::record::Record;
use super::superblock::{FORMAT, Found, Superblock};
use super::{Claimed, Device, DeviceError, DeviceOptions, Engine, EngineGauges, Made, foreign};
use crate::error::{Error, Result};
use crate::memory::{AlignedBuf, PAGE, Region, RegionId};
use crate::units::{Bytes, counted, date};

mod openings;

/// Where the superblock's copy is. Devices tear writes at sectors, not over pages that are apart.
pub(super) const COPY_AT: u64 = PAGE as u64;
/// Start of what follows the superblocks.
const META_AT: u64 = 64 << 10;
/// Data starts at a multiple of this, so that whole blocks stay aligned for any device.
const DATA_ALIGN: u64 = 1 << 20;
/// Bytes of the device for each file the catalog has room for, unless the user says how many there may be.
const BYTES_PER_FILE: u64 = 64 << 10;
/// Smallest number of files a catalog has room for.
const FILES_MIN: u64 = 4096;
/// Part of the device that files cannot use: what was removed and not yet committed is somewhere too.
const SLACK_PART: u64 = 64;
const SLACK_MIN: u64 = 4 << 20;
const SLACK_MAX: u64 = 1 << 30;

/// Takes what is in a catalog while it is read, so that it is never in memory twice.
pub trait CatalogReader {
    /// Called first: the blocks of data on each device, and how many files there may be.
    fn devices(&mut self, data_blocks: &[u64], files_max: u64);
    fn record(&mut self, record: Record);
}

/// Puts an engine in front of a device's own, such as [`super::Faulty`].
pub type Wrap = fn(Arc<dyn Engine>) -> Arc<dyn Engine>;

pub struct VolumeOptions {
    /// For tests.
    pub wrap: Option<Wrap>,
    pub format: bool,
    /// Nothing is written, and so no store made.
    pub read_only: bool,
    pub files_max: Option<u64>,
    /// Once it is set, nothing is made or emptied any more.
    pub stopped: Arc<AtomicBool>,
    pub device: DeviceOptions,
}

impl VolumeOptions {
    fn go_on(&self) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(Error::new(
                "stopped by a signal",
                "there is no mount, and the stores are as they were",
            ));
        }
        Ok(())
    }
}

pub struct Volume {
    devices: Arc<Vec<Device>>,
    supers: Vec<Superblock>,
    journal: Mutex<Journal>,
    read_only: bool,
    /// Devices that were written to since they were last flushed.
    written: Vec<AtomicBool>,
    flushing: Mutex<()>,
    /// How much reading the catalog took.
    recovery_bytes: u64,
}

/// What a store was found to be.
pub struct Opened {
    pub volume: Volume,
    pub fresh: bool,
    /// How long reading its catalog took: not what was waited for until the devices could be had.
    pub read_in: Duration,
    /// The files that did not exist before; they go again with this.
    pub made: Vec<Made>,
    /// What a person should hear about the stores, a sentence each: what was overwritten, what is not used.
    pub warnings: Vec<String>,
}

fn random_id() -> io::Result<[u8; 16]> {
    use std::io::Read;
    let mut id = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut id)?;
    Ok(id)
}

/// Bytes of the log: half of it between two checkpoints, and room for the record of the largest file.
fn log_bytes(len: u64) -> u64 {
    (len / 64).clamp(super::journal::LOG_MIN, 256 << 20).next_multiple_of(PAGE as u64)
}

/// What a new store will be.
struct Plan {
    supers: Vec<Superblock>,
    log: u64,
}

impl Plan {
    fn new(devices: &[Claimed], options: &VolumeOptions) -> Result<Self> {
        let store = random_id().map_err(|error| Error::caused_by("/dev/urandom", error))?;
        let total: u64 = devices.iter().map(Claimed::len).sum();
        let log = log_bytes(devices[0].len());
        let files_max = options.files_max.unwrap_or(total / BYTES_PER_FILE).max(FILES_MIN);
        let meta_len = super::journal::region_bytes(files_max, total / crate::store::hot::BLOCK, log)
            .next_multiple_of(PAGE as u64);
        let mut supers = Vec::new();
        for (at, device) in devices.iter().enumerate() {
            let meta = if at == 0 { meta_len } else { 0 };
            let data_start = (META_AT + meta).next_multiple_of(DATA_ALIGN);
            if device.len() < data_start + (SLACK_MIN + DATA_ALIGN) {
                return Err(Error::new(
                    device.path().display(),
                    format!(
                        "{} is too small: the catalog alone takes {}",
                        Bytes(device.len()),
                        Bytes(data_start)
                    ),
                )
                .remedy("make it larger, or let it hold fewer files (--l2-files-max)"));
            }
            supers.push(Superblock {
                devices: devices.len() as u32,
                store,
                device: at as u32,
                block_bytes: crate::store::hot::BLOCK as u32,
                len: device.len(),
                meta_start: META_AT,
                meta_len: meta,
                data_start,
                files_max,
                made: crate::store::core::now(),
                opened: 0,
                opening: 0,
            });
        }
        Ok(Self { supers, log })
    }
}

fn data_blocks(supers: &[Superblock]) -> Vec<u64> {
    supers.iter().map(|superblock| (superblock.len - superblock.data_start) / PAGE as u64).collect()
}

impl Volume {
    /// Opens the store on `paths`, each with its size if it is to be made, and gives `reader` its catalog.
    pub fn open(
        paths: &[(&Path, Option<u64>)],
        options: &VolumeOptions,
        reader: &mut dyn CatalogReader,
    ) -> Result<Opened> {
        // First only looked at: what is refused must be as it was, its holes included.
        let mut claimed = Vec::new();
        for (path, size) in paths {
            let had = claim_patiently(path, *size, options);
            options.go_on()?;
            claimed.push(had.map_err(|error| Error::new("", error))?);
        }
        let plan = || Plan::new(&claimed, options);
        let mut warnings = Vec::new();
        let (plan, supers) = if options.format {
            let plan = plan()?;
            warnings.extend(claimed.iter().filter_map(overwritten));
            (Some(plan), Vec::new())
        } else {
            let found: Vec<Found> = claimed.iter().map(read_super).collect::<Result<_>>()?;
            if found.iter().all(|found| *found == Found::Blank) {
                let plan = plan()?;
                refuse_foreign(&claimed, &plan)?;
                if options.read_only {
                    return Err(Error::new(
                        claimed[0].path().display(),
                        "there is no store, and a read-only mount makes none",
                    )
                    .remedy("mount it without --read-only first"));
                }
                (Some(plan), Vec::new())
            } else {
                (None, check(&claimed, found)?)
            }
        };
        let (mut devices, mut made) = (Vec::new(), Vec::new());
        for claimed in claimed {
            let mut device = match claimed.ready(&options.device) {
                Ok(device) => device,
                Err(error) => {
                    // What is refused must be as it was, and so must the paths before it.
                    devices.iter().for_each(Device::give_back);
                    return Err(Error::new("", error));
                }
            };
            made.extend(device.take_made());
            devices.push(match options.wrap {
                Some(wrap) => device.wrap(wrap),
                None => device,
            });
        }
        if let Some(plan) = plan {
            if let Err(error) = options.go_on() {
                devices.iter().for_each(Device::give_back);
                return Err(error);
            }
            let volume = Self::format(devices, plan)?;
            reader.devices(&data_blocks(&volume.supers), volume.files_max());
            return Ok(Opened { volume, fresh: true, read_in: Duration::ZERO, made, warnings });
        }
        let reading = Instant::now();
        let mut supers = supers;
        warnings.extend(devices.iter().zip(&supers).filter_map(unused));
        reader.devices(&data_blocks(&supers), supers[0].files_max);
        let first = Arc::new(devices);
        let medium = Arc::new(FirstDevice(first.clone()));
        let mut undecodable = 0u64;
        let region = supers[0].meta_start..supers[0].meta_start + supers[0].meta_len;
        let opened =
            Journal::open(medium, region, log_bytes(supers[0].len), &supers[0].store, &mut |bytes| {
                match Record::decode(bytes) {
                    Some(record) => reader.record(record),
                    None => undecodable += 1,
                }
                Ok(())
            });
        let read_in = reading.elapsed();
        let path = first[0].path().display().to_string();
        const LOST: &str = "restore the device, or make a new store with --format, which loses what is in it";
        let (journal, report) = opened.map_err(|error| Error::new(&path, error).remedy(LOST))?;
        if undecodable > 0 {
            return Err(Error::new(&path, format!("{undecodable} records of the catalog cannot be read"))
                .remedy(LOST));
        }
        if report.frames > 0 {
            warnings.push(format!("{path} was not closed cleanly; what was not durable is gone"));
        }
        // Not sooner, since a store with a damaged catalog stays as it is; and not later, since whoever has the volume
        // may write.
        if !options.read_only {
            openings::count(&first, &mut supers)?;
        }
        let mut volume = Self::joined(first, supers, journal, report.bytes_read);
        volume.read_only = options.read_only;
        Ok(Opened { volume, fresh: false, read_in, made, warnings })
    }

    fn joined(
        devices: Arc<Vec<Device>>,
        supers: Vec<Superblock>,
        journal: Journal,
        recovery_bytes: u64,
    ) -> Self {
        let written = supers.iter().map(|_| AtomicBool::new(false)).collect();
        Self {
            devices,
            supers,
            journal: Mutex::new(journal),
            read_only: false,
            written,
            flushing: Mutex::new(()),
            recovery_bytes,
        }
    }

    fn format(devices: Vec<Device>, plan: Plan) -> Result<Self> {
        let Plan { supers, log } = plan;
        let (store, meta) =
            (supers[0].store, supers[0].meta_start..supers[0].meta_start + supers[0].meta_len);
        let devices = Arc::new(devices);
        let failed = |device: &Device, error: io::Error| Error::new(device.path().display(), error);
        for device in devices.iter() {
            device.cut().map_err(|error| failed(device, error))?;
        }
        // The journal first: a store with a superblock has a journal.
        let journal = Journal::format(Arc::new(FirstDevice(devices.clone())), meta, log, &store)
            .map_err(|error| Error::new(devices[0].path().display(), error))?;
        for (device, superblock) in devices.iter().zip(&supers) {
            for at in [COPY_AT, 0] {
                let span = AlignedBuf::zeroed(PAGE).into_span();
                span.copy_from(0, &superblock.encode());
                device
                    .write_at(at, &span)
                    .and_then(|()| device.sync_data())
                    .map_err(|error| failed(device, error))?;
            }
        }
        Ok(Self::joined(devices, supers, journal, 0))
    }

    pub fn engine(&self, device: usize) -> Arc<dyn Engine> {
        self.devices[device].engine()
    }

    /// Where the blocks of extents are counted from.
    pub fn data_offset(&self, device: usize) -> u64 {
        self.supers[device].data_start
    }

    /// Pages of each device that files may use: all but what the pages of removed files may still take.
    pub fn device_pages(&self) -> Vec<u64> {
        data_blocks(&self.supers)
            .into_iter()
            .map(|blocks| {
                let bytes = blocks * PAGE as u64;
                let slack = (bytes / SLACK_PART).clamp(SLACK_MIN, SLACK_MAX);
                bytes.saturating_sub(slack) / PAGE as u64
            })
            .collect()
    }

    pub fn capacity_pages(&self) -> u64 {
        self.device_pages().into_iter().sum()
    }

    pub fn recovery_bytes(&self) -> u64 {
        self.recovery_bytes
    }

    pub fn files_max(&self) -> u64 {
        self.supers[0].files_max
    }

    /// Bytes of records that fit into a checkpoint in any order, its parts being of a fixed size.
    pub fn catalog_bytes_max(&self) -> u64 {
        self.journal.lock().area_bytes() / 2
    }

    /// What the devices do without, for status.
    pub fn notes(&self) -> Vec<String> {
        let mut notes: Vec<_> = self.devices.iter().flat_map(|device| device.notes().to_vec()).collect();
        notes.dedup(); // what the kernel lacks it lacks for every device
        notes
    }

    pub fn mark_written(&self, device: usize) {
        self.written[device].store(true, Ordering::Release);
    }

    /// Makes all data written so far durable.
    pub fn flush(&self) -> io::Result<()> {
        // One at a time: who finds nothing written since must not go on before the flush of it has ended.
        let _one = self.flushing.lock();
        for (device, written) in self.devices.iter().zip(&self.written) {
            if written.swap(false, Ordering::AcqRel)
                && let Err(error) = device.sync_data()
            {
                written.store(true, Ordering::Release);
                return Err(error);
            }
        }
        Ok(())
    }

    pub fn needs_checkpoint(&self) -> bool {
        !self.read_only && self.journal.lock().needs_checkpoint(&Batch::default())
    }

    /// See [`Journal::mark_in_use`].
    pub fn mark_in_use(&self) -> io::Result<()> {
        Ok(self.journal.lock().mark_in_use()?)
    }

    /// Makes records durable.
    pub fn append(&self, records: &[Vec<u8>]) -> std::result::Result<(), JournalError> {
        let mut batch = Batch::default();
        records.iter().for_each(|record| batch.push(record));
        self.journal.lock().append(&batch)
    }

    /// Begins a checkpoint, which takes every record of the state.
    pub fn begin_checkpoint(&self) -> Checkpoint {
        self.journal.lock().begin_checkpoint()
    }

    pub fn finish_checkpoint(&self, checkpoint: Checkpoint) -> std::result::Result<(), JournalError> {
        // Records name bytes that have been written; those must be durable before the records are.
        self.written.iter().for_each(|written| written.store(true, Ordering::Release));
        self.flush()?;
        self.journal.lock().finish_checkpoint(checkpoint)
    }

    pub fn gauges(&self) -> Vec<(String, &'static str, EngineGauges)> {
        self.devices
            .iter()
            .map(|device| {
                let engine = device.engine();
                (device.path().display().to_string(), engine.name(), engine.in_flight())
            })
            .collect()
    }

    pub fn register(&self, region: Region) {
        self.devices.iter().for_each(|device| device.engine().register(region));
    }

    pub fn unregister(&self, id: RegionId) {
        self.devices.iter().for_each(|device| device.engine().unregister(id));
    }

    /// Finishes everything accepted.
    pub fn stop(&self) {
        self.devices.iter().for_each(|device| device.engine().stop());
    }
}

/// How long to wait for a store that is in use. After a daemon was killed, the kernel lets go of its ring, and with it
/// of the file and its lock, a little later than of the process.
const IN_USE_PATIENCE: Duration = Duration::from_secs(5);

fn claim_patiently(
    path: &Path,
    size: Option<u64>,
    options: &VolumeOptions,
) -> std::result::Result<Claimed, DeviceError> {
    let deadline = Instant::now() + IN_USE_PATIENCE;
    loop {
        match Claimed::open(path, size, options.format) {
            Err(error) if error.is_in_use() && Instant::now() < deadline && options.go_on().is_ok() => {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// The journal's medium: the first device.
struct FirstDevice(Arc<Vec<Device>>);

impl FirstDevice {
    fn device(&self) -> &Device {
        &self.0[0]
    }
}

impl Medium for FirstDevice {
    fn len(&self) -> u64 {
        self.device().len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let span = AlignedBuf::zeroed(buf.len()).into_span();
        self.device().read_at(offset, &span)?;
        span.copy_to(0, buf);
        Ok(())
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let span = AlignedBuf::zeroed(buf.len()).into_span();
        span.copy_from(0, buf);
        self.device().write_at(offset, &span)
    }
    fn sync(&self) -> io::Result<()> {
        self.device().sync_data()
    }
}

/// What the two copies of the superblock say. One good copy is enough, whatever has become of the other.
fn read_super(device: &Claimed) -> Result<Found> {
    let mut copies = Vec::new();
    for at in [0, COPY_AT] {
        let mut page = [0; PAGE];
        device.read_at(at, &mut page).map_err(|error| Error::new(device.path().display(), error))?;
        copies.push(Superblock::decode(&page));
    }
    copies.sort_by_key(rank);
    Ok(copies.swap_remove(0))
}

/// Which copy of a superblock counts: the one with the lower rank, and the first of two that are alike.
fn rank(found: &Found) -> (u8, Reverse<(u64, u64)>) {
    let (kind, openings) = match found {
        // A crash between the writes of an opening leaves one copy newer than the other.
        Found::Ours(superblock) => (0, (superblock.opened, superblock.opening)),
        Found::Format(_) => (1, (0, 0)),
        Found::Damaged => (2, (0, 0)),
        Found::Foreign => (3, (0, 0)),
        Found::Blank => (4, (0, 0)),
    };
    (kind, Reverse(openings))
}

const NEW: &str =
    "give the path of a kvcachefs store, or make a new one with --format, which loses what is there";

/// Refuses what is not blank, although it has no superblock.
fn refuse_foreign(devices: &[Claimed], plan: &Plan) -> Result<()> {
    for (device, superblock) in devices.iter().zip(&plan.supers) {
        let shown = device.path().display();
        let found = foreign::look(device, superblock.data_start);
        if let Some(what) = found.map_err(|error| Error::new(&shown, error))? {
            return Err(
                Error::new(shown, format!("it is not a kvcachefs store: it holds {what}")).remedy(NEW)
            );
        }
    }
    Ok(())
}

/// What no superblock of ours says. That its checksum is right only tells that it is as it was written.
fn flaw(superblock: &Superblock, at: usize) -> Option<&'static str> {
    let Superblock { len, meta_start, meta_len, data_start, files_max, opened, opening, .. } = *superblock;
    let page = PAGE as u64;
    let whole = [len, meta_start, meta_len, data_start].iter().all(|bytes| bytes.is_multiple_of(page));
    let meta_end = meta_start.checked_add(meta_len);
    let log = log_bytes(len.min(1 << 60));
    let flaws = [
        (!whole, "its sizes are no multiples of a page"),
        (data_start >= len || len > i64::MAX as u64, "its data is not inside of it"),
        (meta_start < 2 * page || meta_end.is_none_or(|end| end > data_start), "its catalog has no place"),
        (at == 0 && meta_len < super::journal::region_bytes(1, 0, log), "its catalog is too small"),
        (at == 0 && files_max > meta_len / 256, "its catalog has no room for its files"),
        (opened > opening || opening >= openings::END, "it was not opened as often as it says"),
    ];
    flaws.into_iter().find(|(flaw, _)| *flaw).map(|(_, what)| what)
}

/// What `--format` takes away.
fn overwritten(device: &Claimed) -> Option<String> {
    // What cannot be read is no reason to refuse: it is to go.
    let what = match read_super(device).ok()? {
        Found::Ours(store) => format!(
            "emptied the store of {} that was made {}",
            Bytes(store.len).approx(),
            date(store.made / 1_000_000_000)
        ),
        Found::Format(format) => format!("overwrote a store of format {format}"),
        Found::Damaged => "overwrote a store whose superblock was damaged".to_owned(),
        Found::Blank | Found::Foreign => {
            let what = foreign::look(device, 0).ok()??;
            format!("overwrote what was no kvcachefs store: it held {what}")
        }
    };
    Some(format!("{}: --format {what}", device.path().display()))
}

/// A store has the size that it was made with, though its file or device may have grown since.
fn unused((device, superblock): (&Device, &Superblock)) -> Option<String> {
    let rest = device.len().checked_sub(superblock.len).filter(|rest| *rest > 0)?;
    Some(format!(
        "{}: {} at its end are not used, since the store was made with {}; a new one made with --format, which loses \
         what is in it, takes all",
        device.path().display(),
        Bytes(rest).approx(),
        Bytes(superblock.len).approx()
    ))
}

/// Whether the devices are those of one store, complete, in order, and left by the same opening.
fn check(devices: &[Claimed], found: Vec<Found>) -> Result<Vec<Superblock>> {
    let mut supers = Vec::new();
    for (at, (device, found)) in devices.iter().zip(found).enumerate() {
        let shown = device.path().display();
        let error = match found {
            Found::Ours(superblock) => {
                let own = superblock.device as usize;
                let wrong = if let Some(flaw) = flaw(&superblock, own) {
                    Some(format!("its superblock cannot be one of ours: {flaw}"))
                } else if superblock.len > device.len() {
                    Some(format!(
                        "it is cut off: {} of {} are left",
                        Bytes(device.len()),
                        Bytes(superblock.len)
                    ))
                } else if superblock.block_bytes != crate::store::hot::BLOCK as u32 {
                    Some(format!("it was made with blocks of {} bytes", superblock.block_bytes))
                } else if superblock.devices as usize != devices.len() {
                    Some(format!(
                        "its store has {}, {} given",
                        counted(u64::from(superblock.devices), "path"),
                        if devices.len() == 1 { "1 is".to_owned() } else { format!("{} are", devices.len()) }
                    ))
                } else if superblock.device as usize != at {
                    Some(format!("it is path {} of its store, not {}", superblock.device + 1, at + 1))
                } else if supers.first().is_some_and(|first: &Superblock| first.store != superblock.store) {
                    Some("it belongs to another store than the first path".to_owned())
                } else {
                    None
                };
                match wrong {
                    None => {
                        supers.push(superblock);
                        continue;
                    }
                    Some(wrong) => Error::new(shown, wrong).remedy("give all paths of the store, in their order and whole; --format makes a new store and loses the old"),
                }
            }
            Found::Blank => Error::new(shown, "it is empty, but other paths belong to a store").remedy(NEW),
            Found::Format(format) => Error::new(
                shown,
                format!("it is a store of format {format}; this program knows format {FORMAT}"),
            )
            .remedy(
                "use the program that made it, or make a new store with --format, which loses what is there",
            ),
            Found::Damaged => Error::new(shown, "both copies of its superblock are damaged").remedy(NEW),
            Found::Foreign => {
                let what = foreign::look(device, 0).map_err(|error| Error::new(&shown, error))?;
                let what = what.unwrap_or_else(|| "something else".to_owned());
                Error::new(shown, format!("it is not a kvcachefs store: it holds {what}")).remedy(NEW)
            }
        };
        return Err(error);
    }
    openings::check(devices, &supers)?;
    Ok(supers)
}

#[cfg(test)]
mod tests;
