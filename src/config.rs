//! The configuration: what was said where, and what it amounts to.
//!
//! Four sources may set an option. From weakest to strongest: the built-in default, a TOML file, the
//! environment, the command line (with what fstab says through `-o` below options proper). Each is a
//! [`Layer`]; [`Config::resolve`] puts them on top of one another, fills the rest with defaults that
//! suit the host, and checks that the whole makes sense. What leaves here is plain data that need not
//! be doubted again; [`Config::render`] shows it with the source of every value.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Display, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use log::LevelFilter;

use crate::error::{Error, Result};
use crate::host::Host;
use crate::units::{Bytes, Period};

mod layer;
mod stores;

pub use layer::{ENV_PREFIX, Layer, fstab_config, is_mount_option, keys, usage_error};
pub use stores::L2Spec;
use stores::identity;

/// Below this L1 holds too few KV blocks to be worth a mount, and the bounds inside have no room.
pub const L1_MIN: Bytes = Bytes::mib(64);

/// The least that may be dirty: several writers with a block of 18 MiB each must fit side by side.
pub const DIRTY_MIN: Bytes = Bytes::mib(64);

/// A store below this has room for its own records and little else.
pub const L2_MIN: Bytes = Bytes::mib(16);

/// More session threads only cost buffers: replies come from completion threads.
const THREADS_MAX: usize = 64;

/// Deeper queues gain nothing on one device; the engine takes no more.
const QUEUE_DEPTH_MAX: u32 = 4096;

/// Files that share slabs lie within one block.
const SMALL_FILE_MAX: Bytes = Bytes::kib(256);
/// All that run are looked at whenever something has come for one of them.
const PREFETCH_WINDOW_MAX: u32 = 256;
/// Each takes some memory of the daemon's own for its ranges.
const PREFETCH_QUEUE_MAX: u32 = 65_536;

/// The effective configuration of one mount.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the file system appears; absolute.
    pub mountpoint: PathBuf,
    /// RAM for L1. Locked, so gone for everybody else. Default: a quarter of the memory, at most 4 GiB.
    pub l1: Bytes,
    /// The stores of L2; files are striped over them. Default: none, a memory-only mount.
    pub l2: Vec<L2Spec>,
    /// Make new stores whatever the paths hold. Default: false, and foreign contents are refused.
    pub format: bool,
    /// How L2 is read and written. Default: auto.
    pub l2_engine: L2Engine,
    /// Requests in flight on each device. Costs a buffer each. Default: 128.
    pub queue_depth: u32,
    /// Most files in L2. Each costs up to 256 bytes of RAM. Default: bounded by space alone.
    pub l2_files_max: Option<u64>,
    /// What a full L2 does. Default: lru.
    pub evict: Evict,
    /// Other users may enter. Default: false.
    pub allow_other: bool,
    /// Nothing may be changed. Default: false.
    pub read_only: bool,
    /// Nothing may be executed. Default: false.
    pub noexec: bool,
    /// The kernel checks owners and modes before it asks us. Default: true.
    pub default_permissions: bool,
    /// The source in mount tables. Default: the first L2 path, or `kvcachefs`.
    pub fsname: String,
    /// Default: /dev/fuse.
    pub fuse_device: PathBuf,
    /// Who answers warm reads. Default: auto, which decides by capability.
    pub read_path: ReadPath,
    /// Which files leave L1 first. Default: lru.
    pub policy: Policy,
    /// When a slab's pages are used again (rule R2). Default: owner; strict pays a page replacement a store.
    pub recycle: Recycle,
    /// How long a slab rests after its last RELEASE (rule R2). Longer is safer and needs more L1. Default: 1 s.
    pub slab_rest: Duration,
    /// Lock L1 in RAM. Without it reads may wait for swap. Default: true.
    pub lock: bool,
    /// Huge pages for L1. Default: auto.
    pub huge_pages: HugePages,
    /// Address space that L1 reserves at once. Default: `None`, chosen from the size of L1.
    pub chunk_reserve: Option<Bytes>,
    /// Files up to this size share slabs and never take the passthrough. Default: 256 KiB.
    pub small_file_max: Bytes,
    /// Files beyond this size are slot files. Default: a quarter of L1, at most 1 GiB.
    pub slab_file_max: Bytes,
    /// What all leases may hold of L1 (rule R12). Default: three quarters of it, so that others can go on.
    pub lease_max: Bytes,
    /// What those of one process may hold. Default: half of L1, so that no client can freeze it alone.
    pub lease_client_max: Bytes,
    /// The longest time to live of a lease; 60 s is what one gets that asks for none. Default: 1 h.
    pub lease_ttl_max: Duration,
    /// Windows that are brought to L1 at one time (rule R13); 0: none. Default: 2.
    pub prefetch_window: u32,
    /// What those may bring to L1. Default: half of it, so that two of them leave room for others.
    pub prefetch_window_bytes: Bytes,
    /// Windows that may wait for their turn; one more is denied. Default: 1024.
    pub prefetch_queue: u32,
    /// Published bytes not yet on the device (rule R7); always less than `l1`. Default: a quarter of L1, at
    /// least 64 MiB, at most 4 GiB.
    pub dirty_limit: Bytes,
    /// How long a lookup waits for a RELEASE that follows a FLUSH (rule R1). Default: 20 ms.
    pub publish_wait: Duration,
    /// How long stopping waits for write-back. What is dirty after it is lost. Default: 30 s.
    pub drain_timeout: Duration,
    /// When a waiting request is answered come what may (rule R15). Default: 30 s.
    pub request_deadline: Duration,
    /// When an fsync or a drain is answered, however much the devices move. Default: 5 min.
    pub fsync_deadline: Duration,
    /// Leave the terminal once the mount works. Default: false.
    pub daemon: bool,
    /// Holds the process id while the mount works. Default: none.
    pub pid_file: Option<PathBuf>,
    /// Where the log goes. Default: standard error.
    pub log_file: Option<PathBuf>,
    /// Default: info.
    pub log_level: LevelFilter,
    /// Start a guard that cuts the connection when the daemon has died. Default: true.
    pub guard: bool,
    /// Threads that read requests; each owns a buffer of 16 MiB. Default: one a core, 2 to 8.
    pub threads: usize,
    /// Things that the user should know about the configuration, each one line for the log.
    pub notes: Vec<String>,
    /// Who set which option; what is missing here is a default.
    sources: BTreeMap<&'static str, Source>,
}

/// Who set an option.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    Default,
    File,
    Env,
    Flag,
}

impl Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Env => "env",
            Self::Flag => "flag",
        })
    }
}

/// A word that is none of an option's choices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChoiceError(String);

impl Display for ChoiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ChoiceError {}

macro_rules! deserialize_from_text {
    ($($name:ty),*) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

deserialize_from_text!(L2Spec, Evict, HugePages, L2Engine, Policy, ReadPath, Recycle);

/// An option that takes one of a few words: the enum, its words, and the error that lists them.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident, $what:literal { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$variant_doc])* $variant),* }

        impl FromStr for $name {
            type Err = ChoiceError;

            fn from_str(text: &str) -> Result<Self, ChoiceError> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(ChoiceError(format!("{} '{text}' is unknown; use {}", $what, [$($word),*].join(" or ")))),
                }
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),* })
            }
        }
    };
}

choice! {
    /// Who answers reads of files in L1.
    ReadPath, "read path" {
        /// Passthrough where the kernel offers it and we have CAP_SYS_ADMIN, else the daemon.
        Auto = "auto",
        /// The kernel reads the slab itself; a mount without it is refused.
        Passthrough = "passthrough",
        /// The daemon copies, with FOPEN_DIRECT_IO.
        Daemon = "daemon"
    }
}

choice! {
    /// How L2 is read and written.
    L2Engine, "engine" {
        /// io_uring unless the kernel forbids it.
        Auto = "auto",
        /// io_uring or nothing.
        Uring = "uring",
        /// pread and pwrite on a pool of threads.
        Threads = "threads"
    }
}

choice! {
    /// What a full L2 does (rule R8).
    Evict, "eviction" {
        /// The least recently used files leave, whole.
        Lru = "lru",
        /// Writers get ENOSPC.
        None = "none"
    }
}

choice! {
    /// Which files leave L1 first.
    Policy, "policy" {
        /// Least recently used, the last block of a request first.
        Lru = "lru"
    }
}

choice! {
    /// When the pages of a slab may serve another file (rule R2).
    Recycle, "recycling" {
        /// For the same owner and namespace, once nobody has the slab open and it has rested.
        Owner = "owner",
        /// Never: pages are replaced first.
        Strict = "strict"
    }
}

choice! {
    /// Huge pages for L1.
    HugePages, "huge-pages setting" {
        /// When the kernel offers them for shared memory.
        Auto = "auto",
        Off = "off"
    }
}

/// The layers of one start, strongest first.
#[derive(Debug)]
struct Layers {
    stack: [(Source, Layer); 3],
    sources: BTreeMap<&'static str, Source>,
}

impl Layers {
    /// The strongest value of one option, remembering who gave it.
    fn take<T>(&mut self, key: &'static str, field: impl Fn(&mut Layer) -> &mut Option<T>) -> Option<T> {
        let (source, value) =
            self.stack.iter_mut().find_map(|(source, layer)| Some((*source, field(layer).take()?)))?;
        self.sources.insert(key, source);
        Some(value)
    }
}

macro_rules! take {
    ($layers:ident . $field:ident) => {
        $layers.take(stringify!($field), |layer| &mut layer.$field)
    };
}

impl Config {
    /// Settles every option and checks the whole.
    ///
    /// # Errors
    /// One line that names the option, what is wrong with it and what to do.
    pub fn resolve(file: Layer, env: Layer, flags: Layer, host: &Host) -> Result<Self> {
        let mut layers = Layers {
            stack: [(Source::Flag, flags), (Source::Env, env), (Source::File, file)],
            sources: BTreeMap::new(),
        };
        let mountpoint = take!(layers.mountpoint).ok_or_else(|| {
            Error::new("MOUNTPOINT", "is missing").remedy("name a directory: kvcachefs mount /mnt/kv")
        })?;
        let l1 = take!(layers.l1).unwrap_or_else(|| default_l1(host));
        let l2 = take!(layers.l2).unwrap_or_default();
        let lease_max = take!(layers.lease_max).unwrap_or(Bytes(l1.get() / 4 * 3));
        let fsname = take!(layers.fsname).unwrap_or_else(|| default_fsname(&l2));
        let period = |given: Option<Period>, default: Duration| given.map_or(default, |period| period.0);
        let config = Self {
            mountpoint: absolute("MOUNTPOINT", mountpoint)?,
            l1,
            l2: l2
                .into_iter()
                .map(|spec| Ok(L2Spec { path: absolute("--l2", spec.path)?, ..spec }))
                .collect::<Result<_>>()?,
            format: take!(layers.format).unwrap_or(false),
            l2_engine: take!(layers.l2_engine).unwrap_or(L2Engine::Auto),
            queue_depth: take!(layers.queue_depth).unwrap_or(128),
            l2_files_max: take!(layers.l2_files_max),
            evict: take!(layers.evict).unwrap_or(Evict::Lru),
            allow_other: take!(layers.allow_other).unwrap_or(false),
            read_only: take!(layers.read_only).unwrap_or(false),
            noexec: take!(layers.noexec).unwrap_or(false),
            default_permissions: take!(layers.default_permissions).unwrap_or(true),
            fsname,
            fuse_device: take!(layers.fuse_device).unwrap_or_else(|| PathBuf::from("/dev/fuse")),
            read_path: take!(layers.read_path).unwrap_or(ReadPath::Auto),
            policy: take!(layers.policy).unwrap_or(Policy::Lru),
            recycle: take!(layers.recycle).unwrap_or(Recycle::Owner),
            slab_rest: period(take!(layers.slab_rest), Duration::from_secs(1)),
            lock: take!(layers.lock).unwrap_or(true),
            huge_pages: take!(layers.huge_pages).unwrap_or(HugePages::Auto),
            chunk_reserve: take!(layers.chunk_reserve),
            small_file_max: take!(layers.small_file_max).unwrap_or(SMALL_FILE_MAX),
            slab_file_max: take!(layers.slab_file_max).unwrap_or(Bytes(l1.get() / 4).min(Bytes::gib(1))),
            lease_max,
            lease_client_max: take!(layers.lease_client_max)
                .unwrap_or_else(|| Bytes(l1.get() / 2).min(lease_max)),
            lease_ttl_max: period(take!(layers.lease_ttl_max), Duration::from_secs(3600)),
            prefetch_window: take!(layers.prefetch_window).unwrap_or(2),
            prefetch_window_bytes: take!(layers.prefetch_window_bytes).unwrap_or(Bytes(l1.get() / 2)),
            prefetch_queue: take!(layers.prefetch_queue).unwrap_or(1024),
            dirty_limit: take!(layers.dirty_limit).unwrap_or_else(|| default_dirty_limit(l1)),
            publish_wait: period(take!(layers.publish_wait), Duration::from_millis(20)),
            drain_timeout: period(take!(layers.drain_timeout), Duration::from_secs(30)),
            request_deadline: period(take!(layers.request_deadline), Duration::from_secs(30)),
            fsync_deadline: period(take!(layers.fsync_deadline), Duration::from_secs(300)),
            daemon: take!(layers.daemon).unwrap_or(false),
            pid_file: take!(layers.pid_file).map(|path| absolute("--pid-file", path)).transpose()?,
            log_file: take!(layers.log_file).map(|path| absolute("--log-file", path)).transpose()?,
            log_level: take!(layers.log_level).unwrap_or(LevelFilter::Info),
            guard: take!(layers.guard).unwrap_or(true),
            threads: take!(layers.threads).unwrap_or_else(|| host.cores.clamp(2, 8)),
            notes: Vec::new(),
            sources: layers.sources,
        };
        config.check_memory(host)?;
        config.check_leases()?;
        config.check_prefetch()?;
        config.check_l2()?;
        config.check_running()?;
        Ok(config)
    }

    /// No L2: what leaves L1 is gone.
    pub fn is_memory_only(&self) -> bool {
        self.l2.is_empty()
    }

    /// Who set `key`, named as in a TOML file.
    pub fn source(&self, key: &str) -> Source {
        self.sources.get(key).copied().unwrap_or(Source::Default)
    }

    /// Names an option as the one who set it wrote it, so that an error points at the right place.
    fn named(&self, key: &'static str) -> String {
        match self.source(key) {
            Source::Flag | Source::Default => format!("--{}", key.replace('_', "-")),
            Source::Env => format!("{ENV_PREFIX}{}", key.to_ascii_uppercase()),
            Source::File => format!("key '{key}'"),
        }
    }

    fn check_memory(&self, host: &Host) -> Result<()> {
        let wrong = |key, cause: String| Error::new(self.named(key), cause);
        if self.l1 < L1_MIN {
            return Err(wrong("l1", format!("{} is less than the {L1_MIN} that L1 needs", self.l1))
                .remedy(format!("give at least {L1_MIN}")));
        }
        if self.l1 > host.memory_available {
            let available = host.memory_available.approx();
            return Err(wrong("l1", format!("{} is more than the {available} of memory available", self.l1))
                .remedy("give less, or free memory first"));
        }
        if self.dirty_limit >= self.l1 {
            return Err(wrong(
                "dirty_limit",
                format!("{} is not below the {} of L1", self.dirty_limit, self.l1),
            )
            .remedy("give less, or a larger --l1"));
        }
        let least = DIRTY_MIN.min(Bytes(self.l1.get() / 2));
        if self.source("dirty_limit") != Source::Default && self.dirty_limit < least {
            return Err(wrong(
                "dirty_limit",
                format!("{} is too little for writers to make progress", self.dirty_limit),
            )
            .remedy(format!("give at least {least}")));
        }
        if self.slab_file_max > self.l1 {
            return Err(wrong(
                "slab_file_max",
                format!("{} is more than the {} of L1", self.slab_file_max, self.l1),
            )
            .remedy("give less, or a larger --l1"));
        }
        if self.small_file_max > SMALL_FILE_MAX {
            let cause = format!("{} is more than a block of {SMALL_FILE_MAX}", self.small_file_max);
            return Err(wrong("small_file_max", cause).remedy("give less"));
        }
        if self.small_file_max > self.slab_file_max {
            return Err(wrong(
                "small_file_max",
                format!("{} is more than --slab-file-max {}", self.small_file_max, self.slab_file_max),
            )
            .remedy("give less"));
        }
        match self.chunk_reserve {
            Some(chunk) if chunk.is_empty() || !chunk.get().is_multiple_of(Bytes::mib(2).get()) => {
                Err(wrong("chunk_reserve", format!("{chunk} is not a multiple of 2MiB"))
                    .remedy("round it up"))
            }
            _ => Ok(()),
        }
    }

    fn check_leases(&self) -> Result<()> {
        let wrong = |key, cause: String| Error::new(self.named(key), cause);
        if self.lease_max >= self.l1 {
            let cause =
                format!("{} is not below the {} of L1: nobody else could go on", self.lease_max, self.l1);
            return Err(wrong("lease_max", cause).remedy("give less, or a larger --l1"));
        }
        if self.lease_client_max > self.lease_max {
            let cause = format!("{} is more than --lease-max {}", self.lease_client_max, self.lease_max);
            return Err(wrong("lease_client_max", cause).remedy("give less, or a larger --lease-max"));
        }
        if self.lease_ttl_max.is_zero() {
            return Err(wrong("lease_ttl_max", "0s would end each lease at once".to_owned())
                .remedy("give a minute or more; --lease-max 0B grants none"));
        }
        Ok(())
    }

    fn check_prefetch(&self) -> Result<()> {
        let wrong = |key, cause: String| Error::new(self.named(key), cause);
        if self.prefetch_window_bytes >= self.l1 {
            let cause = format!(
                "{} is not below the {} of L1: nobody else could go on",
                self.prefetch_window_bytes, self.l1
            );
            return Err(wrong("prefetch_window_bytes", cause).remedy("give less, or a larger --l1"));
        }
        if self.prefetch_window > PREFETCH_WINDOW_MAX {
            let cause = format!("{} is out of range", self.prefetch_window);
            return Err(wrong("prefetch_window", cause)
                .remedy(format!("give at most {PREFETCH_WINDOW_MAX}; 0 prefetches nothing")));
        }
        if self.prefetch_queue > PREFETCH_QUEUE_MAX {
            let cause = format!("{} is out of range", self.prefetch_queue);
            return Err(wrong("prefetch_queue", cause).remedy(format!("give at most {PREFETCH_QUEUE_MAX}")));
        }
        Ok(())
    }

    fn check_l2(&self) -> Result<()> {
        if self.is_memory_only() && self.format {
            return Err(Error::new(self.named("format"), "there is no L2 to format")
                .remedy("give --l2 PATH:SIZE or leave it out"));
        }
        if self.read_only && self.format {
            return Err(Error::new(self.named("format"), "a read-only mount cannot be formatted")
                .remedy("leave out one of the two"));
        }
        let mut seen = HashSet::new();
        for spec in &self.l2 {
            let what = format!("{} {spec}", self.named("l2"));
            if !seen.insert(identity(&spec.path)) {
                return Err(Error::new(what, "the same store is given twice").remedy("give every store once"));
            }
            if self.hides(&spec.path) {
                return Err(self.hidden(what));
            }
            spec.check(self.format, self.read_only).map_err(|error| error.within(what))?;
        }
        Ok(())
    }

    /// Whether the mount would lie over this file. The mount point itself, which may be one of a dead daemon, is not
    /// looked at.
    fn hides(&self, path: &Path) -> bool {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let place = match (self.mountpoint.parent(), self.mountpoint.file_name()) {
            (Some(dir), Some(name)) => real(dir).join(name),
            _ => return false,
        };
        path.parent().is_some_and(|dir| real(dir).starts_with(place))
    }

    fn hidden(&self, what: String) -> Error {
        let cause = format!("lies below the mount point {}, which will hide it", self.mountpoint.display());
        Error::new(what, cause).remedy("put it elsewhere")
    }

    fn check_running(&self) -> Result<()> {
        let wrong = |key, cause: String| Error::new(self.named(key), cause);
        if !(1..=THREADS_MAX).contains(&self.threads) {
            return Err(wrong("threads", format!("{} is out of range", self.threads))
                .remedy(format!("give 2 to {THREADS_MAX}")));
        }
        if self.threads < 2 {
            return Err(wrong("threads", "1 is not enough: one request may wait for another".to_owned())
                .remedy(format!("give 2 to {THREADS_MAX}")));
        }
        if !(1..=QUEUE_DEPTH_MAX).contains(&self.queue_depth) {
            return Err(wrong("queue_depth", format!("{} is out of range", self.queue_depth))
                .remedy(format!("give 1 to {QUEUE_DEPTH_MAX}")));
        }
        let own_files = [("pid_file", &self.pid_file), ("log_file", &self.log_file)];
        for (key, path) in own_files.into_iter().filter_map(|(key, path)| Some((key, path.as_ref()?))) {
            if self.l2.iter().any(|store| same_file(&store.path, path)) {
                return Err(wrong(key, format!("{} is a store of --l2", path.display()))
                    .remedy("name a file of its own"));
            }
            if self.hides(path) {
                return Err(self.hidden(format!("{} {}", self.named(key), path.display())));
            }
        }
        if self.l2_files_max == Some(0) {
            return Err(wrong("l2_files_max", "0 leaves no room for any file".to_owned())
                .remedy("leave out --l2 for a memory-only mount"));
        }
        if self.request_deadline.is_zero() {
            return Err(wrong("request_deadline", "0s would answer nothing".to_owned())
                .remedy("give a second or more"));
        }
        if self.fsync_deadline.is_zero() {
            return Err(wrong("fsync_deadline", "0s would let nothing become durable".to_owned())
                .remedy("give what an emptying of --dirty-limit takes, or more"));
        }
        if self.publish_wait >= self.request_deadline {
            return Err(wrong("publish_wait", "is not below --request-deadline".to_owned())
                .remedy("the default of 20ms suits nearly everybody"));
        }
        if self.fsname.contains(['\n', '\0']) {
            return Err(wrong("fsname", "contains a line break".to_owned()).remedy("give a plain name"));
        }
        Ok(())
    }

    /// The effective configuration as TOML; a comment after every value says who set it. Feeding the
    /// text back as `--config` gives the same mount.
    pub fn render(&self) -> String {
        let text = |value: &dyn Display| toml::Value::String(value.to_string()).to_string();
        let path = |path: &Path| text(&path.display());
        let period = |duration: Duration| text(&Period(duration));
        let stores = self.l2.iter().map(|spec| text(spec)).collect::<Vec<_>>().join(", ");
        let rows: [(&str, Option<String>); 40] = [
            ("mountpoint", Some(path(&self.mountpoint))),
            ("l1", Some(text(&self.l1))),
            ("l2", Some(format!("[{stores}]"))),
            // A file must not say it; the next start is not to empty the store again.
            ("format", (!self.format).then(|| "false".to_owned())),
            ("l2_engine", Some(text(&self.l2_engine))),
            ("queue_depth", Some(self.queue_depth.to_string())),
            ("l2_files_max", self.l2_files_max.map(|n| n.to_string())),
            ("evict", Some(text(&self.evict))),
            ("allow_other", Some(self.allow_other.to_string())),
            ("read_only", Some(self.read_only.to_string())),
            ("noexec", Some(self.noexec.to_string())),
            ("default_permissions", Some(self.default_permissions.to_string())),
            ("fsname", Some(text(&self.fsname))),
            ("fuse_device", Some(path(&self.fuse_device))),
            ("read_path", Some(text(&self.read_path))),
            ("policy", Some(text(&self.policy))),
            ("recycle", Some(text(&self.recycle))),
            ("slab_rest", Some(period(self.slab_rest))),
            ("lock", Some(self.lock.to_string())),
            ("huge_pages", Some(text(&self.huge_pages))),
            ("chunk_reserve", self.chunk_reserve.map(|size| text(&size))),
            ("small_file_max", Some(text(&self.small_file_max))),
            ("slab_file_max", Some(text(&self.slab_file_max))),
            ("lease_max", Some(text(&self.lease_max))),
            ("lease_client_max", Some(text(&self.lease_client_max))),
            ("lease_ttl_max", Some(period(self.lease_ttl_max))),
            ("prefetch_window", Some(self.prefetch_window.to_string())),
            ("prefetch_window_bytes", Some(text(&self.prefetch_window_bytes))),
            ("prefetch_queue", Some(self.prefetch_queue.to_string())),
            ("dirty_limit", Some(text(&self.dirty_limit))),
            ("publish_wait", Some(period(self.publish_wait))),
            ("drain_timeout", Some(period(self.drain_timeout))),
            ("request_deadline", Some(period(self.request_deadline))),
            ("fsync_deadline", Some(period(self.fsync_deadline))),
            ("daemon", Some(self.daemon.to_string())),
            ("pid_file", self.pid_file.as_deref().map(path)),
            ("log_file", self.log_file.as_deref().map(path)),
            ("log_level", Some(text(&self.log_level.as_str().to_ascii_lowercase()))),
            ("guard", Some(self.guard.to_string())),
            ("threads", Some(self.threads.to_string())),
        ];
        let mut out = String::new();
        for (key, value) in rows {
            // Writing to a string cannot fail.
            let _ = match value {
                Some(value) => writeln!(out, "{key} = {value} # {}", self.source(key)),
                None if key == "format" => {
                    writeln!(out, "# format was given: this start has made the stores anew")
                }
                None => writeln!(out, "# {key} is not set"),
            };
        }
        out
    }
}

/// The daemon leaves its working directory, so no relative path survives the start.
fn absolute(what: &str, path: PathBuf) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        return Err(Error::new(what, "is empty").remedy("name a path"));
    }
    std::path::absolute(&path).map_err(|error| Error::caused_by(format!("{what} {}", path.display()), error))
}

/// Whether two paths lead to one file, whether or not it is there.
fn same_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    real(one) == real(other)
}

fn default_l1(host: &Host) -> Bytes {
    let quarter = Bytes((host.memory.get() / 4) & !(Bytes::mib(2).get() - 1));
    quarter.min(Bytes::gib(4)).max(L1_MIN)
}

fn default_dirty_limit(l1: Bytes) -> Bytes {
    let limit = Bytes(l1.get() / 4).min(Bytes::gib(4)).max(DIRTY_MIN);
    if limit < l1 { limit } else { Bytes(l1.get() / 2) }
}

fn default_fsname(l2: &[L2Spec]) -> String {
    l2.first().map_or_else(|| "kvcachefs".to_owned(), |spec| spec.path.display().to_string())
}

#[cfg(test)]
mod tests;
