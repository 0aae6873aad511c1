//! A crash-safe log of records on a fixed region of a device, with checkpoints.
//!
//! ```text
//! region:  header | header | checkpoint area 0 | checkpoint area 1 | log (a ring)
//! frame:   magic u32, CRC u32, payload bytes u32, 0 u32, store tag u64, sequence u64, position u64 | payload | 0 to 4 KiB
//! payload: records, each: length u32, bytes
//! ```
//!
//! An append is one frame and one flush: when it returns, the records are durable. Positions in the log grow for ever;
//! where a frame lies is its position modulo the ring, so a frame of an earlier lap never passes for a new one. The
//! first frame that is not whole ends the log: frames are written one after the other, each confirmed before the next,
//! so only the last can be torn.
//!
//! A checkpoint is the whole state, written into the area that the current header does not use, while appends go on.
//! It remembers where the log stood when it began. Records are whole states or removals, so replaying what the
//! checkpoint already contains does no harm. The header that names it is the last write, to the slot that the current
//! one is not in. So recovery reads one checkpoint and at most one ring, however often it happens.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::memory::PAGE;

const MAGIC: u32 = 0x4b56_4a46;
const HEADER_MAGIC: &[u8; 8] = b"KVCFS-JH";
const CHUNK_MAGIC: u32 = 0x4b56_4343;
const FRAME_HEADER: usize = 40;
const PAGE_U64: u64 = PAGE as u64;
/// Positions, sequence numbers and generations are smaller.
const COUNT_END: u64 = 1 << 62;
/// Bytes of one write of a checkpoint.
const CHUNK_BYTES: usize = 1 << 20;
/// Records for one file, on average: attributes, a name of 100 bytes, an extent, some checksums.
const BYTES_PER_RECORD: u64 = 256;
/// And for each block of data: its checksum, and a part of an extent.
const BYTES_PER_BLOCK: u64 = 8;
/// How far behind the end of the log its continuation is looked for: more than any frame takes.
const LOOK_AHEAD: u64 = 4 << 20;
/// Smallest log.
pub const LOG_MIN: u64 = 4 << 20;

/// Where a journal lives. All offsets and lengths are multiples of a page.
pub trait Medium: Send + Sync {
    fn len(&self) -> u64;
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;
    /// Makes everything written so far durable.
    fn sync(&self) -> io::Result<()>;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[derive(Debug)]
pub enum Error {
    Io(io::Error),
    /// The log has no room for the batch: a checkpoint makes some.
    Full,
    /// What was durable cannot be read back.
    Damaged(String),
    /// There is no journal of this store here.
    Foreign,
    /// An earlier write failed; what is on the device is not known.
    Poisoned,
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Full => f.write_str("the catalog's log is full"),
            Self::Damaged(what) => write!(f, "the catalog is damaged: {what}"),
            Self::Foreign => f.write_str("no catalog of this store is there"),
            Self::Poisoned => f.write_str("an earlier write of the catalog failed"),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io(error) => error,
            other => io::Error::other(other.to_string()),
        }
    }
}

/// Records that become durable together.
#[derive(Default, Debug)]
pub struct Batch(Vec<u8>);

impl Batch {
    pub fn push(&mut self, record: &[u8]) {
        self.0.extend((record.len() as u32).to_le_bytes());
        self.0.extend(record);
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What recovery did.
#[derive(Default, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub bytes_read: u64,
    pub records: u64,
    pub frames: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    generation: u64,
    /// Where replay starts, and the sequence number there.
    log_start: u64,
    log_seq: u64,
    area: u32,
    chunks: u32,
}

pub struct Journal {
    medium: Arc<dyn Medium>,
    layout: Layout,
    tag: u64,
    header: Header,
    /// Where the next frame goes.
    end: u64,
    seq: u64,
    poisoned: bool,
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    start: u64,
    area: u64,
    log: u64,
}

impl Layout {
    fn new(region: &Range<u64>, log: u64) -> Self {
        let len = region.end - region.start - 2 * PAGE_U64;
        let log = log.min(len / 2) / PAGE_U64 * PAGE_U64;
        Self { start: region.start, area: (len - log) / 2 / PAGE_U64 * PAGE_U64, log }
    }
    fn area_at(&self, area: u32) -> u64 {
        self.start + 2 * PAGE_U64 + u64::from(area) * self.area
    }
    fn log_at(&self) -> u64 {
        self.start + 2 * PAGE_U64 + 2 * self.area
    }
}

/// Bytes of a region whose checkpoints are half full with `records` average records of files with `blocks` blocks, with
/// a log of `log` bytes.
pub fn region_bytes(records: u64, blocks: u64, log: u64) -> u64 {
    let area = records.saturating_mul(2 * BYTES_PER_RECORD).saturating_add(blocks * 2 * BYTES_PER_BLOCK);
    // A number of files that no device holds is told as too small a device.
    let area = area.min(1 << 60).next_multiple_of(CHUNK_BYTES as u64);
    2 * PAGE_U64 + 2 * area + log.next_multiple_of(PAGE_U64)
}

fn crc(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn tag_of(store: &[u8; 16]) -> u64 {
    u64_at(store, 0) ^ u64_at(store, 8).rotate_left(17)
}

impl Header {
    fn encode(&self, tag: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        page[..8].copy_from_slice(HEADER_MAGIC);
        page[8..16].copy_from_slice(&tag.to_le_bytes());
        page[16..24].copy_from_slice(&self.generation.to_le_bytes());
        page[24..32].copy_from_slice(&self.log_start.to_le_bytes());
        page[32..40].copy_from_slice(&self.log_seq.to_le_bytes());
        page[40..44].copy_from_slice(&self.area.to_le_bytes());
        page[44..48].copy_from_slice(&self.chunks.to_le_bytes());
        let sum = crc(&[&page[..PAGE - 4]]);
        page[PAGE - 4..].copy_from_slice(&sum.to_le_bytes());
        page
    }

    fn decode(page: &[u8], tag: u64) -> Option<Self> {
        if &page[..8] != HEADER_MAGIC
            || u64_at(page, 8) != tag
            || crc(&[&page[..PAGE - 4]]) != u32_at(page, PAGE - 4)
        {
            return None;
        }
        Some(Self {
            generation: u64_at(page, 16),
            log_start: u64_at(page, 24),
            log_seq: u64_at(page, 32),
            area: u32_at(page, 40),
            chunks: u32_at(page, 44),
        })
    }
}

/// Calls `visit` for each record of a payload.
fn each_record<E>(payload: &[u8], visit: &mut dyn FnMut(&[u8]) -> Result<(), E>) -> Result<u64, Option<E>> {
    let (mut at, mut count) = (0, 0);
    while at + 4 <= payload.len() {
        let len = u32_at(payload, at) as usize;
        let Some(record) = payload.get(at + 4..at + 4 + len) else { return Err(None) };
        visit(record).map_err(Some)?;
        at += 4 + len;
        count += 1;
    }
    Ok(count)
}

impl Journal {
    pub fn format(
        medium: Arc<dyn Medium>,
        region: Range<u64>,
        log: u64,
        store: &[u8; 16],
    ) -> Result<Self, Error> {
        let layout = Layout::new(&region, log);
        let header = Header { generation: 1, log_start: 0, log_seq: 1, area: 0, chunks: 0 };
        let tag = tag_of(store);
        // Both slots hold a header from the start: a slot without one is a loss.
        medium.write_at(layout.start, &Header { generation: 0, ..header }.encode(tag))?;
        medium.sync()?;
        medium.write_at(layout.start + PAGE_U64, &header.encode(tag))?;
        medium.sync()?;
        Ok(Self { medium, layout, tag, header, end: 0, seq: 1, poisoned: false })
    }

    /// Reads the newest checkpoint and then the log, and calls `visit` for every record in order.
    pub fn open(
        medium: Arc<dyn Medium>,
        region: Range<u64>,
        log: u64,
        store: &[u8; 16],
        visit: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(Self, Report), Error> {
        let layout = Layout::new(&region, log);
        let tag = tag_of(store);
        let mut newest: Option<Header> = None;
        let mut headers = 0;
        for slot in 0..2 {
            let mut page = vec![0; PAGE];
            medium.read_at(layout.start + slot * PAGE_U64, &mut page)?;
            let Some(header) = Header::decode(&page, tag) else { continue };
            headers += 1;
            if newest.is_none_or(|other| other.generation < header.generation) {
                newest = Some(header);
            }
        }
        let header = newest.ok_or(Error::Foreign)?;
        // Positions and numbers that take until then are not counted to by writing.
        if header.area > 1
            || [header.generation, header.log_start, header.log_seq].iter().any(|n| *n >= COUNT_END)
            || !header.log_start.is_multiple_of(PAGE_U64)
        {
            return Err(Error::Damaged("its header says what none of ours does".into()));
        }
        let mut report = Report { bytes_read: 2 * PAGE_U64, ..Report::default() };
        let mut journal =
            Self { medium, layout, tag, header, end: header.log_start, seq: header.log_seq, poisoned: false };
        journal.read_checkpoint(&mut report, visit)?;
        while let Some(payload) = journal.read_frame(journal.end, journal.seq, &mut report)? {
            report.records += each_record(&payload, visit).map_err(|error| {
                Error::Damaged(
                    error.unwrap_or_else(|| "a frame of the log does not divide into records".into()),
                )
            })?;
            report.frames += 1;
            journal.end += frame_bytes(payload.len());
            journal.seq += 1;
            if journal.end - header.log_start >= journal.layout.log {
                break;
            }
        }
        journal.check_end(headers == 1, &mut report)?;
        // What a killed process wrote and did not flush is read back, but does not survive a power cut. It is about to
        // be relied upon: what comes after it must not become durable before it.
        journal.medium.sync()?;
        Ok((journal, report))
    }

    fn read_checkpoint(
        &self,
        report: &mut Report,
        visit: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), Error> {
        let mut at = self.layout.area_at(self.header.area);
        let end = at + self.layout.area;
        for index in 0..self.header.chunks {
            let damaged =
                || Error::Damaged(format!("part {index} of its checkpoint does not match its checksum"));
            let mut chunk = vec![0; CHUNK_BYTES];
            self.medium.read_at(at, &mut chunk)?;
            let len = u32_at(&chunk, 8) as usize;
            let whole = chunk_bytes(len);
            if at + whole as u64 > end {
                return Err(damaged());
            }
            if whole > CHUNK_BYTES {
                chunk.resize(whole, 0);
                self.medium.read_at(at + CHUNK_BYTES as u64, &mut chunk[CHUNK_BYTES..])?;
            }
            at += whole as u64;
            report.bytes_read += whole as u64;
            let right = u32_at(&chunk, 0) == CHUNK_MAGIC
                && u32_at(&chunk, 12) == index
                && u64_at(&chunk, 16) == self.tag
                && u64_at(&chunk, 24) == self.header.generation
                && crc(&[&chunk[8..FRAME_HEADER + len]]) == u32_at(&chunk, 4);
            if !right {
                return Err(damaged());
            }
            report.records += each_record(&chunk[FRAME_HEADER..FRAME_HEADER + len], visit)
                .map_err(|error| error.map_or_else(damaged, Error::Damaged))?;
        }
        Ok(())
    }

    /// Reads `buf` from the ring.
    fn ring_read(&self, position: u64, buf: &mut [u8]) -> io::Result<()> {
        let at = position % self.layout.log;
        let first = ((self.layout.log - at) as usize).min(buf.len());
        let (head, tail) = buf.split_at_mut(first);
        self.medium.read_at(self.layout.log_at() + at, head)?;
        if tail.is_empty() { Ok(()) } else { self.medium.read_at(self.layout.log_at(), tail) }
    }

    fn ring_write(&self, position: u64, buf: &[u8]) -> io::Result<()> {
        let at = position % self.layout.log;
        let first = ((self.layout.log - at) as usize).min(buf.len());
        let (head, tail) = buf.split_at(first);
        self.medium.write_at(self.layout.log_at() + at, head)?;
        if tail.is_empty() { Ok(()) } else { self.medium.write_at(self.layout.log_at(), tail) }
    }

    /// The payload of the frame at `position`, if it is whole and the one that belongs there.
    fn read_frame(&self, position: u64, seq: u64, report: &mut Report) -> Result<Option<Vec<u8>>, Error> {
        let mut page = vec![0; PAGE];
        self.ring_read(position, &mut page)?;
        report.bytes_read += PAGE_U64;
        let len = u32_at(&page, 8) as usize;
        let expected = u32_at(&page, 0) == MAGIC
            && u64_at(&page, 16) == self.tag
            && u64_at(&page, 24) == seq
            && u64_at(&page, 32) == position
            && frame_bytes(len) <= self.layout.log;
        if !expected {
            return Ok(None);
        }
        let whole = frame_bytes(len) as usize;
        if whole > PAGE {
            page.resize(whole, 0);
            let (_, rest) = page.split_at_mut(PAGE);
            self.ring_read(position + PAGE_U64, rest)?;
            report.bytes_read += (whole - PAGE) as u64;
        }
        if crc(&[&page[8..FRAME_HEADER + len]]) != u32_at(&page, 4) {
            return Ok(None);
        }
        Ok(Some(page[FRAME_HEADER..FRAME_HEADER + len].to_vec()))
    }

    /// A frame is written only when the one before it is durable. So if a later one is there than that at the end of
    /// the log, the end is not where a crash tore the last write: something that was durable has been lost.
    ///
    /// Usually the frame that would follow the lost one is looked for. Where only one header can be read, the other
    /// may have been the newer one, and the log from there on may have overwritten what the older one needs: then any
    /// later frame in the whole ring tells.
    fn check_end(&self, lone_header: bool, report: &mut Report) -> Result<(), Error> {
        let limit = self.header.log_start + self.layout.log;
        let (mut at, stop) = if lone_header {
            (self.end, self.end + self.layout.log)
        } else {
            (self.end + PAGE_U64, limit.min(self.end + LOOK_AHEAD))
        };
        let mut pages = Vec::new();
        while at < stop {
            pages.resize(((stop - at) as usize).min(CHUNK_BYTES), 0);
            self.ring_read(at, &mut pages)?;
            report.bytes_read += pages.len() as u64;
            for page in pages.chunks_exact(PAGE) {
                let (seq, position) = (u64_at(page, 24), u64_at(page, 32));
                let later = u32_at(page, 0) == MAGIC
                    && u64_at(page, 16) == self.tag
                    && if lone_header { seq > self.seq } else { seq == self.seq + 1 && position == at }
                    && position < COUNT_END
                    && position % self.layout.log == at % self.layout.log;
                if later && self.read_frame(position, seq, &mut Report::default())?.is_some() {
                    return Err(Error::Damaged(format!(
                        "record {} of its log is gone, and later ones are there",
                        self.seq
                    )));
                }
                at += PAGE_U64;
            }
        }
        Ok(())
    }

    /// Bytes of a checkpoint.
    pub fn area_bytes(&self) -> u64 {
        self.layout.area
    }

    fn used(&self) -> u64 {
        self.end - self.header.log_start
    }

    /// Whether it is time for a checkpoint, with `batch` about to be appended.
    pub fn needs_checkpoint(&self, batch: &Batch) -> bool {
        let after = self.used() + frame_bytes(batch.0.len());
        after > self.layout.log / 2
    }

    /// Makes the batch durable.
    pub fn append(&mut self, batch: &Batch) -> Result<(), Error> {
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        let whole = frame_bytes(batch.0.len());
        if self.used() + whole > self.layout.log || u32::try_from(batch.0.len()).is_err() {
            return Err(Error::Full);
        }
        let mut frame = vec![0; whole as usize];
        frame[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        frame[8..12].copy_from_slice(&(batch.0.len() as u32).to_le_bytes());
        frame[16..24].copy_from_slice(&self.tag.to_le_bytes());
        frame[24..32].copy_from_slice(&self.seq.to_le_bytes());
        frame[32..40].copy_from_slice(&self.end.to_le_bytes());
        frame[FRAME_HEADER..FRAME_HEADER + batch.0.len()].copy_from_slice(&batch.0);
        let sum = crc(&[&frame[8..FRAME_HEADER + batch.0.len()]]);
        frame[4..8].copy_from_slice(&sum.to_le_bytes());
        let written = self.ring_write(self.end, &frame).and_then(|()| self.medium.sync());
        if let Err(error) = written {
            self.poisoned = true;
            return Err(error.into());
        }
        self.end += whole;
        self.seq += 1;
        Ok(())
    }

    /// Leaves a sign that the store is in use: a frame without records. A clean end makes a checkpoint, and the log is
    /// empty after it; so whoever opens a log that is not, opens a store that was not closed.
    pub fn mark_in_use(&mut self) -> Result<(), Error> {
        if self.used() > 0 { Ok(()) } else { self.append(&Batch::default()) }
    }

    /// Begins a checkpoint of the state as of now or later. Appends may go on meanwhile.
    pub fn begin_checkpoint(&self) -> Checkpoint {
        Checkpoint {
            medium: self.medium.clone(),
            at: self.layout.area_at(1 - self.header.area),
            room: self.layout.area,
            tag: self.tag,
            header: Header {
                generation: self.header.generation + 1,
                log_start: self.end,
                log_seq: self.seq,
                area: 1 - self.header.area,
                chunks: 0,
            },
            chunk: Vec::new(),
        }
    }

    /// Makes a written checkpoint the one that recovery starts from. The log before it is free from then on.
    pub fn finish_checkpoint(&mut self, mut checkpoint: Checkpoint) -> Result<(), Error> {
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        checkpoint.flush()?;
        let header = checkpoint.header;
        let slot = header.generation % 2;
        let written = self
            .medium
            .sync()
            .and_then(|()| {
                self.medium.write_at(self.layout.start + slot * PAGE_U64, &header.encode(self.tag))
            })
            .and_then(|()| self.medium.sync());
        if let Err(error) = written {
            self.poisoned = true;
            return Err(error.into());
        }
        self.header = header;
        Ok(())
    }
}

fn frame_bytes(payload: usize) -> u64 {
    ((FRAME_HEADER + payload) as u64).next_multiple_of(PAGE_U64)
}

/// Bytes of a part of a checkpoint: one write, or as many as its one large record takes.
fn chunk_bytes(payload: usize) -> usize {
    (FRAME_HEADER + payload).next_multiple_of(CHUNK_BYTES)
}

/// A checkpoint that is being written.
pub struct Checkpoint {
    medium: Arc<dyn Medium>,
    at: u64,
    room: u64,
    tag: u64,
    header: Header,
    chunk: Vec<u8>,
}

impl Checkpoint {
    pub fn push(&mut self, record: &[u8]) -> Result<(), Error> {
        if !self.chunk.is_empty() && FRAME_HEADER + self.chunk.len() + 4 + record.len() > CHUNK_BYTES {
            self.flush()?;
        }
        self.chunk.extend((record.len() as u32).to_le_bytes());
        self.chunk.extend(record);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let len = self.chunk.len();
        let mut bytes = vec![0; chunk_bytes(len)];
        if bytes.len() as u64 > self.room {
            return Err(Error::Full);
        }
        bytes[0..4].copy_from_slice(&CHUNK_MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&self.header.chunks.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tag.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.header.generation.to_le_bytes());
        bytes[FRAME_HEADER..FRAME_HEADER + len].copy_from_slice(&self.chunk);
        let sum = crc(&[&bytes[8..FRAME_HEADER + len]]);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        self.medium.write_at(self.at, &bytes)?;
        self.at += bytes.len() as u64;
        self.room -= bytes.len() as u64;
        self.header.chunks += 1;
        self.chunk.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
