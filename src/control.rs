//! The control files: what a person reads with `cat`, and the handles through which an engine asks by ioctl.
//!
//! `.ctl` in the root is not listed, so that tools that walk the tree do not walk into it. Its files have no size,
//! as in `/proc`: their content is made when they are opened, except that of `events`, which grows and can be followed.

mod words;

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::stats::Events;
use crate::store::attr::{Attr, Entry};
use crate::store::control::SessionId;
use crate::store::core::now;
use crate::store::node::{Kind, ROOT_INO};
use crate::store::report::Snapshot;
use crate::store::{Caller, Store, Wake};
use crate::units::{Bytes, counted};

/// Inode number of `.ctl`; its files follow. Those of the store are larger than 2^32.
const DIR_INO: u64 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum File {
    Status,
    Stats,
    Metrics,
    Config,
    Version,
    Events,
    Leases,
    Hints,
    /// What is asked of it by ioctl belongs to the handle.
    Lease,
    Prefetch,
    Drain,
}

impl File {
    fn is_session(self) -> bool {
        matches!(self, Self::Lease | Self::Prefetch | Self::Drain)
    }
}

const FILES: [(&str, File); 11] = [
    ("status", File::Status),
    ("stats", File::Stats),
    ("metrics", File::Metrics),
    ("config", File::Config),
    ("version", File::Version),
    ("events", File::Events),
    ("leases", File::Leases),
    ("hints", File::Hints),
    ("lease", File::Lease),
    ("prefetch", File::Prefetch),
    ("drain", File::Drain),
];

/// An open control file.
pub struct Opened {
    file: File,
    text: Vec<u8>,
    /// Of `events`: what this reader's offsets are counted from.
    from: OnceLock<u64>,
    /// What the handle owns, if it can own something.
    pub session: Option<SessionId>,
}

pub struct Control {
    store: Arc<Store>,
    events: Arc<Events>,
    config: String,
    mountpoint: Vec<u8>,
    /// What tells our metrics from another mount's, as a label.
    label: String,
    wants_passthrough: bool,
    kernel_passthrough: AtomicBool,
    /// What the mount does without, and why: lines for status.
    without: parking_lot::Mutex<Vec<String>>,
    /// The process that cuts the mount off when this one has died; 0 if there is none.
    guard: AtomicU32,
    started: Instant,
    born: i64,
    uid: u32,
    gid: u32,
}

impl Control {
    pub const NAME: &'static str = ".ctl";

    pub fn new(
        store: Arc<Store>,
        events: Arc<Events>,
        config: String,
        mountpoint: &Path,
        wants_passthrough: bool,
    ) -> Self {
        Self {
            store,
            events,
            config,
            mountpoint: mountpoint.as_os_str().as_bytes().to_vec(),
            label: label("mount", &mountpoint.to_string_lossy()),
            wants_passthrough,
            kernel_passthrough: AtomicBool::new(false),
            without: parking_lot::Mutex::default(),
            guard: AtomicU32::new(0),
            started: Instant::now(),
            born: now(),
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
        }
    }

    pub fn wants_passthrough(&self) -> bool {
        self.wants_passthrough
    }

    pub fn set_kernel_passthrough(&self, granted: bool) {
        self.kernel_passthrough.store(granted, Ordering::Relaxed);
    }

    pub fn kernel_passthrough(&self) -> bool {
        self.kernel_passthrough.load(Ordering::Relaxed)
    }

    /// Notes something that the mount does without.
    pub fn without(&self, line: String) {
        self.without.lock().push(line);
    }

    pub fn set_guard(&self, pid: u32) {
        self.guard.store(pid, Ordering::Relaxed);
    }

    pub fn owns(&self, ino: u64) -> bool {
        (DIR_INO..=DIR_INO + FILES.len() as u64).contains(&ino)
    }

    fn file(ino: u64) -> Option<File> {
        let at = usize::try_from(ino.checked_sub(DIR_INO + 1)?).ok()?;
        FILES.get(at).map(|(_, file)| *file)
    }

    fn attr(&self, ino: u64) -> Attr {
        let dir = ino == DIR_INO;
        let size = if Self::file(ino) == Some(File::Events) { self.events.len() } else { 0 };
        Attr {
            ino,
            kind: if dir { Kind::Dir } else { Kind::File },
            size,
            blocks: 0,
            mode: match Self::file(ino) {
                None => 0o555,
                // Whoever may not name a file by its path may not name it here.
                Some(file) if file.is_session() => 0o666,
                Some(_) => 0o444,
            },
            nlink: if dir { 2 } else { 1 },
            uid: self.uid,
            gid: self.gid,
            atime: self.born,
            mtime: if dir { self.born } else { now() },
            ctime: self.born,
            ttl: Duration::ZERO,
        }
    }

    /// None: not ours to answer.
    pub fn lookup(&self, parent: u64, name: &OsStr) -> Option<Result<Entry, Errno>> {
        let ino = if parent == ROOT_INO && name == Self::NAME {
            DIR_INO
        } else if parent == DIR_INO {
            match FILES.iter().position(|(known, _)| name == *known) {
                Some(at) => DIR_INO + 1 + at as u64,
                None => return Some(Err(Errno::ENOENT)),
            }
        } else {
            return None;
        };
        Some(Ok(Entry { attr: self.attr(ino), ttl: Duration::from_secs(3600) }))
    }

    pub fn getattr(&self, ino: u64) -> Option<Result<Attr, Errno>> {
        self.owns(ino).then(|| Ok(self.attr(ino)))
    }

    pub fn readdir(
        &self,
        ino: u64,
        offset: u64,
        add: &mut dyn FnMut(u64, u64, Kind, &OsStr) -> bool,
    ) -> Option<()> {
        if ino != DIR_INO {
            return None;
        }
        let dots = [(DIR_INO, Kind::Dir, "."), (ROOT_INO, Kind::Dir, "..")];
        let files = (DIR_INO + 1..).zip(FILES).map(|(ino, (name, _))| (ino, Kind::File, name));
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (cookie, (ino, kind, name)) in (1..).zip(dots.into_iter().chain(files)).skip(from) {
            if add(ino, cookie, kind, OsStr::from_bytes(name.as_bytes())) {
                break;
            }
        }
        Some(())
    }

    /// Everything that a control file says is data: there are no holes.
    pub fn seek(&self, opened: &Opened, offset: i64, whence: i32) -> Result<i64, Errno> {
        let size = match opened.file {
            File::Events => self.events.len() as i64,
            _ => opened.text.len() as i64,
        };
        match whence {
            _ if !(0..size).contains(&offset) => Err(Errno::ENXIO),
            libc::SEEK_DATA => Ok(offset),
            libc::SEEK_HOLE => Ok(size),
            _ => Err(Errno::EINVAL),
        }
    }

    pub fn open(&self, ino: u64, flags: i32, caller: &Caller) -> Option<Result<Opened, Errno>> {
        if ino == DIR_INO {
            return Some(Err(Errno::EISDIR));
        }
        let file = Self::file(ino)?;
        if flags & libc::O_ACCMODE != libc::O_RDONLY && !file.is_session() {
            return Some(Err(Errno::EACCES));
        }
        let session = file.is_session().then(|| self.store.open_session(caller));
        let text = match file {
            File::Status => self.status(),
            File::Stats => self.stats(),
            File::Metrics => self.metrics(),
            File::Config => self.config.clone(),
            File::Version => format!("kvcachefs {}\n", env!("CARGO_PKG_VERSION")),
            File::Leases => self.store.leases_text(caller.uid),
            File::Hints => self.store.hints_text(caller.uid),
            File::Events | File::Lease | File::Prefetch | File::Drain => String::new(),
        };
        Some(Ok(Opened { file, text: text.into_bytes(), from: OnceLock::new(), session }))
    }

    /// What a client writes to a control file.
    pub fn write(&self, opened: &Opened, data: &[u8]) -> Result<u32, Errno> {
        match opened.session {
            Some(session) if self.store.is_greeted(session) => self.store.write_names(session, data),
            Some(session) => self.write_text(opened.file, session, data),
            None => Err(Errno::EPERM),
        }
    }

    /// What a person writes to a handle.
    fn write_text(&self, file: File, session: SessionId, text: &[u8]) -> Result<u32, Errno> {
        if file != File::Prefetch {
            return Err(Errno::EOPNOTSUPP);
        }
        let words = words::words(text)?;
        let paths = words.iter().map(|word| words::path(word, &self.mountpoint));
        let paths: Vec<Vec<u8>> = paths.collect::<Result<_, Errno>>()?;
        self.store.prefetch_paths(session, &paths)?;
        u32::try_from(text.len()).map_err(|_| Errno::E2BIG)
    }

    /// The last descriptor of a control file is closed.
    pub fn release(&self, opened: &Opened) {
        if let Some(session) = opened.session {
            self.store.close_session(session);
        }
    }

    /// Whether a read of a control file gives something now; if not, `wake` is called once it does.
    pub fn poll(&self, opened: &Opened, wake: Option<Wake>) -> bool {
        opened.session.is_none_or(|session| self.store.poll_ends(session, wake))
    }

    pub fn read(&self, opened: &Opened, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        if let Some(ends) = opened.session.and_then(|session| self.store.read_ends(session, len)) {
            return ends;
        }
        Ok(self.read_text(opened, offset, len))
    }

    fn read_text(&self, opened: &Opened, offset: u64, len: usize) -> Vec<u8> {
        if opened.file == File::Events {
            // Who begins at the beginning gets what is left of it; `tail` asks for the end, where offsets are absolute.
            let from = *opened.from.get_or_init(|| if offset == 0 { self.events.forgotten() } else { 0 });
            return self.events.read(from.saturating_add(offset), len);
        }
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(opened.text.len());
        opened.text[from..opened.text.len().min(from.saturating_add(len))].to_vec()
    }

    fn status(&self) -> String {
        let s = self.store.snapshot();
        let c = &s.counters;
        let mut out = String::new();
        let mut line = |text: std::fmt::Arguments<'_>| {
            let _ = out.write_fmt(text);
            out.push('\n');
        };
        let percent =
            |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
        let health = if s.poisoned {
            "FAILED: the device refused a commit; what is published now is not stored, see .ctl/events"
        } else if c.lost_files > 0 {
            "DEGRADED: some files were lost to device errors, see .ctl/events"
        } else if c.bad_blocks > 0 {
            "DEGRADED: blocks of some files cannot be read, see .ctl/events"
        } else if c.store_failures > 0 || c.crc_errors > 0 || c.read_errors > 0 {
            "DEGRADED: a device has failed reads or writes, see .ctl/events"
        } else {
            "ok"
        };
        let up = self.started.elapsed().as_secs();
        line(format_args!(
            "kvcachefs {}   pid {}   up {}h{:02}m{:02}s   health {health}",
            env!("CARGO_PKG_VERSION"),
            std::process::id(),
            up / 3600,
            up / 60 % 60,
            up % 60
        ));
        line(format_args!(
            "files {}   directories {}   being written {}",
            s.files, s.directories, s.private_files
        ));
        line(format_args!(
            "L1   {} of {} ({:.0} %)   lent {}   free slabs {}   peak {}",
            Bytes(s.pool.total).approx(),
            Bytes(s.pool.budget).approx(),
            percent(s.pool.total, s.pool.budget),
            Bytes(s.pool.lent).approx(),
            Bytes(s.pool.free_slabs).approx(),
            Bytes(s.pool.peak_total).approx()
        ));
        if s.memory_only {
            line(format_args!("L2   none: what leaves L1 is gone"));
        } else {
            line(format_args!(
                "L2   {} of {} ({:.0} %)   dirty {} of {} (peak {})   queued {} files",
                Bytes(s.used_bytes).approx(),
                Bytes(s.capacity_bytes).approx(),
                percent(s.used_bytes, s.capacity_bytes),
                Bytes(s.dirty_bytes).approx(),
                Bytes(s.dirty_limit_bytes).approx(),
                Bytes(s.dirty_peak_bytes).approx(),
                s.queued_files
            ));
            line(format_args!(
                "     catalog {} of {} ({:.0} %)",
                Bytes(s.catalog_used_bytes),
                Bytes(s.catalog_capacity_bytes),
                percent(s.catalog_used_bytes, s.catalog_capacity_bytes)
            ));
        }
        for (path, engine, gauges) in &s.devices {
            line(format_args!("     {path}   engine {engine}   in flight {}", gauges.outstanding()));
        }
        let opens = c.open_hits_l1 + c.open_hits_mixed + c.open_hits_l2;
        line(format_args!(
            "opens to read {opens}: L1 {:.1} %, mixed {:.1} %, L2 {:.1} %   passthrough {}   direct {}",
            percent(c.open_hits_l1, opens),
            percent(c.open_hits_mixed, opens),
            percent(c.open_hits_l2, opens),
            c.opens_passthrough,
            c.opens_direct
        ));
        line(format_args!(
            "lookups {} (missed {})   published {}, {}   {}",
            c.lookups,
            c.lookup_misses,
            counted(c.published_files, "file"),
            Bytes(c.published_bytes).approx(),
            if s.memory_only {
                format!("evicted {}", c.evictions_l2)
            } else {
                format!("evicted from L1 {}, from L2 {}", c.evictions_l1, c.evictions_l2)
            }
        ));
        line(format_args!(
            "promoted {} ({})   written back {}   commits {}   waiting writers {}",
            c.promotions,
            Bytes(c.promoted_bytes).approx(),
            Bytes(c.writeback_bytes).approx(),
            c.commits,
            s.waiting_changes
        ));
        line(format_args!(
            "leases {}: {} of {}   granted {}   denied {}   expired {}   writes waiting for them {}",
            s.leases,
            Bytes(s.leased_bytes).approx(),
            Bytes(s.lease_max_bytes).approx(),
            c.leases_granted,
            c.leases_denied_client + c.leases_denied_full + c.leases_denied_count + c.leases_denied_changing,
            c.leases_expired,
            s.waiting_for_leases
        ));
        line(format_args!(
            "hints: running {}   queued {}   asked {}   in L1 {}   done {}   denied {}   cancelled {}   failed {}   brought {} (unread {})",
            s.hints_running,
            s.hints_queued,
            c.hints,
            c.hints_bypassed,
            c.hints_done,
            c.hints_denied(),
            c.hints_cancelled,
            c.hints_failed,
            Bytes(c.hint_bytes).approx(),
            Bytes(c.hint_unread_bytes).approx()
        ));
        line(format_args!(
            "errors: checksum {}   read {}   store {}   no space {}   timeouts {}   discarded {}",
            c.crc_errors, c.read_errors, c.store_failures, c.no_space, c.timeouts, c.discarded
        ));
        let guard = self.guard.load(Ordering::Relaxed);
        if guard != 0 {
            line(format_args!("guard: process {guard} cuts the mount off if this one dies"));
        }
        for without in self.without.lock().iter() {
            line(format_args!("without: {without}"));
        }
        out
    }

    fn stats(&self) -> String {
        let s = self.store.snapshot();
        // The process is not a measurement, so `metrics` does without it.
        let mut out = format!("pid {}\n", std::process::id());
        for metric in metrics(&s) {
            let _ = writeln!(out, "{} {}", metric.key, metric.value);
        }
        out
    }

    fn metrics(&self) -> String {
        let s = self.store.snapshot();
        let mut out = String::new();
        for metric in metrics(&s) {
            let (kind, suffix) = if metric.counter { ("counter", "_total") } else { ("gauge", "") };
            let name = format!("kvcachefs_{}{suffix}", metric.key);
            let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {kind}", metric.help);
            let _ = writeln!(out, "{name}{{{}}} {}", self.label, metric.value);
        }
        out
    }
}

/// As Prometheus reads it.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    format!("{name}=\"{value}\"")
}

/// One number that both `stats` and `metrics` tell.
struct Metric {
    key: &'static str,
    help: &'static str,
    counter: bool,
    value: u64,
}

fn metrics(s: &Snapshot) -> Vec<Metric> {
    let c = &s.counters;
    let gauge = |key, value, help| Metric { key, help, counter: false, value };
    let counter = |key, value, help| Metric { key, help, counter: true, value };
    let engines = |f: fn(&crate::l2::EngineGauges) -> u64| s.devices.iter().map(|(_, _, g)| f(g)).sum();
    vec![
        gauge("files", s.files, "Visible files and links."),
        gauge("directories", s.directories, "Directories."),
        gauge("private_files", s.private_files, "Names under construction."),
        gauge("alias_inodes", s.alias_inodes, "Further inode numbers of files that the kernel knows."),
        gauge("l1_capacity_bytes", s.pool.budget, "Memory that L1 may use."),
        gauge("l1_used_bytes", s.pool.total, "Memory that L1 uses, free slabs included."),
        gauge("l1_used_peak_bytes", s.pool.peak_total, "Most memory that L1 has used."),
        gauge("l1_slab_bytes", s.pool.used_slabs, "Memory of slabs that hold files."),
        gauge("l1_chunk_bytes", s.pool.used_chunks, "Memory of chunks that hold small files and blocks."),
        gauge("l1_free_slab_bytes", s.pool.free_slabs, "Memory of slabs that wait to be used again."),
        gauge("l1_resting_bytes", s.pool.resting, "Memory of slabs that rest after passthrough."),
        gauge("l1_lent_bytes", s.pool.lent, "Memory of evicted slabs that clients still map."),
        gauge("l2_capacity_bytes", s.capacity_bytes, "Room for files on the devices."),
        gauge("l2_used_bytes", s.used_bytes, "Room that files take or have reserved."),
        gauge("l2_used_peak_bytes", s.used_peak_bytes, "Most room that files have taken."),
        gauge(
            "l2_expected_bytes",
            s.expected_bytes,
            "Room that files under construction will take beyond that, as far as one can tell.",
        ),
        gauge("catalog_capacity_bytes", s.catalog_capacity_bytes, "Room for the records of files."),
        gauge("catalog_used_bytes", s.catalog_used_bytes, "Room that the records of files take."),
        gauge("dirty_bytes", s.dirty_bytes, "Bytes written by clients that are not on a device."),
        gauge("dirty_peak_bytes", s.dirty_peak_bytes, "Most dirty bytes so far."),
        gauge("dirty_limit_bytes", s.dirty_limit_bytes, "Bound of the dirty bytes."),
        gauge("writeback_queued_files", s.queued_files, "Entries of the publish queue."),
        gauge("writeback_in_flight_bytes", s.writeback_in_flight_bytes, "Bytes on their way to the devices."),
        gauge("waiting_writers", s.waiting_changes, "Writes that wait for room."),
        gauge("waiting_for_leases", s.waiting_for_leases, "Of these, writes that wait for a lease to end."),
        gauge("control_sessions", s.sessions, "Open handles of .ctl/lease, .ctl/prefetch and .ctl/drain."),
        gauge("interned_names", s.interned_names, "Names that these have interned."),
        gauge("leases", s.leases, "Leases."),
        gauge("leased_bytes", s.leased_bytes, "Memory that leases hold in L1."),
        gauge("lease_capacity_bytes", s.lease_max_bytes, "Memory that leases may hold."),
        gauge("lease_aside_bytes", s.lease_aside_bytes, "Of this, memory set aside for hints that run."),
        gauge("hints_running", s.hints_running, "Windows that are being brought to L1."),
        gauge("hints_queued", s.hints_queued, "Windows that wait until others have been."),
        gauge("waiting_bytes", s.waiting_bytes, "Bytes that the daemon holds of writes that wait."),
        gauge("promotions_in_flight", c.promoting, "Groups of blocks on their way from the devices."),
        gauge("device_in_flight", engines(|g| g.outstanding()), "Transfers that devices are working on."),
        gauge(
            "recovery_read_bytes",
            c.recovery_bytes,
            "Bytes of the catalog read when the store was opened.",
        ),
        gauge("poisoned", u64::from(s.poisoned), "1 after a commit failed."),
        gauge("passthrough", u64::from(s.passthrough), "1 if resident files are read by the kernel alone."),
        counter("lookups", c.lookups, "Lookups that reached the daemon."),
        counter("lookup_misses", c.lookup_misses, "Lookups that found nothing."),
        counter("opens_passthrough", c.opens_passthrough, "Opens whose reads stay in the kernel."),
        counter("opens_direct", c.opens_direct, "Opens whose reads and writes come to the daemon."),
        counter("open_hits_l1", c.open_hits_l1, "Read-only opens of files wholly in L1."),
        counter("open_hits_mixed", c.open_hits_mixed, "Read-only opens of files partly in L1."),
        counter("open_hits_l2", c.open_hits_l2, "Read-only opens of files not in L1."),
        counter("read_l1_bytes", c.read_l1_bytes, "Bytes read through the daemon that were in L1."),
        counter("read_l2_bytes", c.read_l2_bytes, "Bytes read from the devices."),
        counter(
            "read_around_bytes",
            c.read_around_bytes,
            "Bytes read from the devices without keeping them.",
        ),
        counter("written_bytes", c.written_bytes, "Bytes written by clients."),
        counter("published_files", c.published_files, "Files that became visible."),
        counter("published_bytes", c.published_bytes, "Bytes of files that became visible."),
        counter("publish_waits", c.publish_waits, "Lookups that waited for a file to be released."),
        counter("discarded_files", c.discarded, "Files under construction that never became visible."),
        counter("unlinked_files", c.unlinked, "Files removed by clients."),
        counter(
            "copies_on_write",
            c.copies_on_write,
            "Versions made because a sealed file was opened to be written.",
        ),
        counter("aliases", c.aliases, "Fresh identities given to files that came into L1 while open."),
        counter("promotions", c.promotions, "Files or blocks brought from L2 to L1."),
        counter("promoted_bytes", c.promoted_bytes, "Bytes brought from L2 to L1."),
        counter("promoted_unread", c.promoted_unread, "Promotions dropped from L1 without having been read."),
        counter("evictions_l1", c.evictions_l1, "Times that L1 dropped a file or part of one."),
        counter("evictions_l2", c.evictions_l2, "Files that left to make room."),
        counter("evicted_bytes", c.evicted_bytes, "Bytes of files that left to make room."),
        counter("no_space", c.no_space, "Requests answered with ENOSPC."),
        counter("spilled_bytes", c.spilled_bytes, "Bytes of unfinished files written early under pressure."),
        counter("writeback_bytes", c.writeback_bytes, "Bytes written to the devices."),
        counter("committed_files", c.committed_files, "Files whose record became durable."),
        counter("commits", c.commits, "Commits of the catalog."),
        counter("checkpoints", c.checkpoints, "Checkpoints of the catalog."),
        counter("store_failures", c.store_failures, "Files that could not be stored."),
        counter("read_errors", c.read_errors, "Reads that a device failed."),
        counter("crc_errors", c.crc_errors, "Blocks whose checksum did not match."),
        counter("lost_files", c.lost_files, "Files that vanished: they could not be stored or read back."),
        counter(
            "bad_blocks",
            c.bad_blocks,
            "Blocks that cannot be read back, of files that stay: slot files, and what is being written.",
        ),
        counter("writer_waits", c.waits, "Writes that had to wait."),
        counter("lease_waits", c.lease_waits, "Of these, those that waited for a lease first."),
        counter("lease_timeouts", c.lease_timeouts, "Writes that waited in vain for a lease to end."),
        counter("control_lookups", c.control_lookups, "Lists of names that were looked up by ioctl."),
        counter("classified_l1", c.classified_l1, "Windows that were wholly in L1."),
        counter("classified_mixed", c.classified_mixed, "Windows that were partly in L1."),
        counter("classified_l2", c.classified_l2, "Windows of which nothing was in L1."),
        counter("classified_absent", c.classified_absent, "Windows of which nothing was there."),
        counter("leases_granted", c.leases_granted, "Leases granted."),
        counter(
            "leases_denied_client",
            c.leases_denied_client,
            "Leases denied for what one process may have.",
        ),
        counter("leases_denied_full", c.leases_denied_full, "Leases denied for what all may have."),
        counter(
            "leases_denied_count",
            c.leases_denied_count,
            "Leases denied for how many leases, or ranges of leases, there may be.",
        ),
        counter(
            "leases_denied_changing",
            c.leases_denied_changing,
            "Leases denied since somebody was writing to a file at that moment.",
        ),
        counter("leases_expired", c.leases_expired, "Leases that ended since their time to live was over."),
        counter("leases_closed", c.leases_closed, "Leases that ended with the handle of their last holder."),
        counter("hints", c.hints, "Windows that were asked to be brought to L1."),
        counter("hints_bypassed", c.hints_bypassed, "Windows that were in L1 when that was asked."),
        counter("hints_joined", c.hints_joined, "Windows some of which was on its way already."),
        counter("hints_done", c.hints_done, "Windows that were brought to L1."),
        counter("hints_failed", c.hints_failed, "Windows that could not be brought to L1."),
        counter("hints_cancelled", c.hints_cancelled, "Windows that were given up before they were in L1."),
        counter("hints_denied_off", c.hints_denied_off, "Windows denied since none is prefetched."),
        counter(
            "hints_denied_busy",
            c.hints_denied_busy,
            "Windows denied since too many waited, or somebody was writing.",
        ),
        counter("hints_denied_room", c.hints_denied_room, "Windows denied for what L1 or leases may hold."),
        counter(
            "hints_denied_count",
            c.hints_denied_count,
            "Windows denied for how many tickets or leases there may be.",
        ),
        counter(
            "hints_denied_deadline",
            c.hints_denied_deadline,
            "Windows whose deadline passed before their turn.",
        ),
        counter("hints_denied_ranges", c.hints_denied_ranges, "Windows denied for what they named."),
        counter("hint_bytes", c.hint_bytes, "Bytes brought to L1 for hints."),
        counter(
            "hint_unread_bytes",
            c.hint_unread_bytes,
            "Of these, bytes that left L1 without having been read.",
        ),
        counter(
            "promotions_discarded",
            c.promotions_discarded,
            "Blocks that came from L2 when something newer had taken their place.",
        ),
        counter("promotions_failed", c.promotions_failed, "Blocks that could not be brought from L2."),
        counter("timeouts", c.timeouts, "Requests that ran into their deadline."),
        counter("fsync_timeouts", c.fsync_timeouts, "Of these, fsyncs and drains."),
        counter("slabs_created", s.pool.created, "Slabs made."),
        counter("slabs_reused", s.pool.reused, "Slabs used again with their pages."),
        counter("slabs_replaced", s.pool.replaced, "Slabs whose pages were replaced before reuse."),
        counter(
            "slabs_kept_whole",
            c.slabs_kept_whole,
            "Slabs that could not be cut to the size of their file, which the daemon serves.",
        ),
        counter(
            "slabs_trimmed",
            s.pool.trimmed,
            "Slabs that took more than is counted, after MADV_COLLAPSE, and were cut again.",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_escaped() {
        assert_eq!(label("mount", "/mnt/kv"), r#"mount="/mnt/kv""#);
        assert_eq!(label("mount", "/a\\b\"c\nd"), r#"mount="/a\\b\"c\nd""#);
    }
}
