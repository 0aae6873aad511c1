//! One layer of configuration: what one source says, and nothing about the rest.
//!
//! The same struct is a set of command-line options, a TOML file and a set of environment variables,
//! so that an option is added in one place and has the same name everywhere: `--dirty-limit`,
//! `dirty_limit = `, `KVCACHEFS_DIRTY_LIMIT=`, `-o dirty_limit=`. The help texts are the
//! documentation of the options.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::{BoolishValueParser, NonEmptyStringValueParser};
use clap::{Args, Parser};
use log::LevelFilter;
use serde::Deserialize;

use super::{Evict, HugePages, L2Engine, L2Spec, Policy, ReadPath, Recycle};
use crate::error::{Error, Result, one_line};
use crate::units::{Bytes, Period, from_text};

/// Every variable that sets an option begins with this.
pub const ENV_PREFIX: &str = "KVCACHEFS_";

const TIERS: &str = "Tiers";
const ACCESS: &str = "Access";
const READING: &str = "Reading and residency";
const WRITING: &str = "Writing and durability";
const CONTROL: &str = "Leases";
const RUNNING: &str = "Running";

#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(deny_unknown_fields, default)]
pub struct Layer {
    /// The directory on which the file system appears. It must exist; what is in it is hidden while mounted.
    #[arg(value_name = "MOUNTPOINT")]
    pub mountpoint: Option<PathBuf>,

    /// RAM for L1. It is locked, so nothing else can have it. Default: a quarter of the memory, at most 4GiB.
    #[arg(long, value_name = "SIZE", help_heading = TIERS)]
    pub l1: Option<Bytes>,

    /// A store for L2: PATH:SIZE makes a file or opens one of that size, PATH takes what is there, a file or a whole block
    /// device.
    ///
    /// May be given several times; files are striped over all of them. Without it the mount is memory
    /// only: what leaves L1 is gone.
    #[arg(long, value_name = "PATH[:SIZE]", help_heading = TIERS)]
    #[serde(deserialize_with = "one_or_more")]
    pub l2: Option<Vec<L2Spec>>,

    /// Make new, empty stores, whatever the paths hold now, and of the sizes given. Everything in them is lost.
    /// On the command line only: in a file it would empty them at every start.
    #[arg(long, value_name = "BOOL", help_heading = TIERS, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub format: Option<bool>,

    /// How L2 is read and written: auto, uring or threads. Auto takes io_uring unless the kernel forbids it.
    #[arg(long, value_name = "ENGINE", help_heading = TIERS)]
    pub l2_engine: Option<L2Engine>,

    /// Requests that each L2 device is given at once. More is faster until the device's own queue is full. Default: 128.
    #[arg(long, value_name = "N", help_heading = TIERS)]
    pub queue_depth: Option<u32>,

    /// Most files that L2 keeps; the least valuable leave first. Default: no limit but space.
    #[arg(long, value_name = "N", help_heading = TIERS)]
    pub l2_files_max: Option<u64>,

    /// What happens when L2 is full: lru evicts the least recently used files, none answers ENOSPC. Default: lru.
    #[arg(long, value_name = "lru|none", help_heading = TIERS)]
    pub evict: Option<Evict>,

    /// Let other users than the one who mounts in. Ordinary permissions still decide.
    #[arg(long, value_name = "BOOL", help_heading = ACCESS, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub allow_other: Option<bool>,

    /// Refuse everything that would change the tree.
    #[arg(long, value_name = "BOOL", help_heading = ACCESS, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub read_only: Option<bool>,

    /// Let nothing on the mount be executed.
    #[arg(long, value_name = "BOOL", help_heading = ACCESS, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub noexec: Option<bool>,

    /// Let the kernel check owners and modes, as on any file system. Default: true.
    #[arg(long, value_name = "BOOL", help_heading = ACCESS, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub default_permissions: Option<bool>,

    /// The source that df and findmnt show. Default: the first L2 path, or kvcachefs.
    #[arg(long, value_name = "NAME", help_heading = ACCESS, value_parser = NonEmptyStringValueParser::new())]
    pub fsname: Option<String>,

    /// The FUSE device, for hosts that keep it elsewhere. Default: /dev/fuse.
    #[arg(long, value_name = "PATH", help_heading = ACCESS)]
    pub fuse_device: Option<PathBuf>,

    /// Who answers reads of files in L1: auto, passthrough (the kernel alone) or daemon. Auto takes
    /// passthrough where kernel and rights allow it.
    #[arg(long, value_name = "PATH", help_heading = READING)]
    pub read_path: Option<ReadPath>,

    /// Which files leave L1 first: lru.
    #[arg(long, value_name = "POLICY", help_heading = READING)]
    pub policy: Option<Policy>,

    /// When a slab's memory is used again: owner (for the same owner and namespace) or strict (never without
    /// replacing its pages, which makes stores slower). Default: owner.
    #[arg(long, value_name = "owner|strict", help_heading = READING)]
    pub recycle: Option<Recycle>,

    /// How long a slab rests after its last reader closed it before it is used again. Default: 1s.
    #[arg(long, value_name = "TIME", help_heading = READING)]
    pub slab_rest: Option<Period>,

    /// Lock L1 in RAM. With false it may be swapped out, and reads then wait for the swap device. Default: true.
    #[arg(long, value_name = "BOOL", help_heading = READING, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub lock: Option<bool>,

    /// Huge pages for L1: auto (where the kernel has them at hand) or off. Default: auto.
    #[arg(long, value_name = "auto|off", help_heading = READING)]
    pub huge_pages: Option<HugePages>,

    /// Address space that L1 reserves at once, a multiple of 2MiB. Default: chosen from the size of L1.
    #[arg(long, value_name = "SIZE", help_heading = READING)]
    pub chunk_reserve: Option<Bytes>,

    /// Files up to this size share arenas of 2MiB and are read through the daemon. Default: 256KiB.
    #[arg(long, value_name = "SIZE", help_heading = READING)]
    pub small_file_max: Option<Bytes>,

    /// Files beyond this size get no slab of their own and are resident by range. Default: a quarter of
    /// L1, at most 1GiB.
    #[arg(long, value_name = "SIZE", help_heading = READING)]
    pub slab_file_max: Option<Bytes>,

    /// What leases may hold of L1, all together; 0B: nobody gets one. Default: three quarters of L1.
    #[arg(long, value_name = "SIZE", help_heading = CONTROL)]
    pub lease_max: Option<Bytes>,

    /// What the leases of one process may hold of L1. Default: half of L1, or --lease-max if that is less.
    #[arg(long, value_name = "SIZE", help_heading = CONTROL)]
    pub lease_client_max: Option<Bytes>,

    /// The longest time to live of a lease that is not extended. It is a backstop: leases end with the handle they were
    /// taken on. Default: 1h.
    #[arg(long, value_name = "TIME", help_heading = CONTROL)]
    pub lease_ttl_max: Option<Period>,

    /// Windows that are prefetched at one time; 0: none. Default: 2.
    #[arg(long, value_name = "COUNT", help_heading = CONTROL)]
    pub prefetch_window: Option<u32>,

    /// What those may bring to L1. Less than L1. Default: half of it.
    #[arg(long, value_name = "SIZE", help_heading = CONTROL)]
    pub prefetch_window_bytes: Option<Bytes>,

    /// Windows that may wait until others have been prefetched. Default: 1024.
    #[arg(long, value_name = "COUNT", help_heading = CONTROL)]
    pub prefetch_queue: Option<u32>,

    /// Bytes that may be published and not yet on L2; writers beyond it wait. Less than L1, and at least 64MiB or
    /// half of L1, whichever is less. Default: a quarter of L1 within that, at most 4GiB.
    #[arg(long, value_name = "SIZE", help_heading = WRITING)]
    pub dirty_limit: Option<Bytes>,

    /// How long a lookup waits for the last close of a file that is just being published. Default: 20ms.
    #[arg(long, value_name = "TIME", help_heading = WRITING)]
    pub publish_wait: Option<Period>,

    /// How long stopping waits for what is not yet on L2. Default: 30s.
    #[arg(long, value_name = "TIME", help_heading = WRITING)]
    pub drain_timeout: Option<Period>,

    /// After this a waiting file operation is answered, with an error if need be. Default: 30s.
    #[arg(long, value_name = "TIME", help_heading = WRITING)]
    pub request_deadline: Option<Period>,

    /// After this an fsync, of a file or of a directory, is answered with ETIMEDOUT though devices still take bytes; if
    /// they take none, --request-deadline ends it. Default: 5m.
    #[arg(long, value_name = "TIME", help_heading = WRITING)]
    pub fsync_deadline: Option<Period>,

    /// Return when the mount works and go on in the background. Default: stay in the foreground.
    #[arg(long, value_name = "BOOL", help_heading = RUNNING, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub daemon: Option<bool>,

    /// A file that holds the process id for as long as the mount works.
    #[arg(long, value_name = "PATH", help_heading = RUNNING)]
    pub pid_file: Option<PathBuf>,

    /// Where the log goes. Default: standard error, which a daemon no longer has once it is mounted.
    #[arg(long, value_name = "PATH", help_heading = RUNNING)]
    pub log_file: Option<PathBuf>,

    /// The least grave messages that are logged: off, error, warn, info, debug or trace. Default: info.
    #[arg(long, value_name = "LEVEL", help_heading = RUNNING, value_parser = parse_log_level)]
    #[serde(deserialize_with = "log_level")]
    pub log_level: Option<LevelFilter>,

    /// Have a small process (kvcachefs-guard) cut the mount off when the daemon has died, so that clients get an error at
    /// once and never hang. Default: true.
    #[arg(long, value_name = "BOOL", help_heading = RUNNING, require_equals = true, num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub guard: Option<bool>,

    /// Threads that take requests from the kernel. Each owns a 16 MiB buffer. Default: one a core, 2 to 8.
    #[arg(long, value_name = "N", help_heading = RUNNING)]
    pub threads: Option<usize>,
}

/// A layer alone on a command line: how `-o` options and environment variables are read.
#[derive(Parser)]
#[command(disable_help_flag = true, no_binary_name = true)]
struct Alone {
    #[command(flatten)]
    layer: Layer,
}

impl Layer {
    /// Reads a TOML file. Every error names the file and, where there is one, the line and the key.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::NotFound => "write the file, or leave out --config",
                io::ErrorKind::PermissionDenied => "make it readable for the user who mounts",
                _ => "--config wants a TOML file",
            };
            Error::caused_by(path.display(), error).remedy(remedy)
        })?;
        Self::from_toml(&text).map_err(|error| error.within(path.display()))
    }

    fn from_toml(text: &str) -> Result<Self> {
        let mut layer: Self = toml::from_str(text).map_err(|error| toml_error(text, &error))?;
        // A relative path in a file would depend on where the daemon happens to be started.
        layer.check_absolute()?;
        layer.refuse_format("key 'format'")?;
        layer.l2 = layer.l2.filter(|specs| !specs.is_empty());
        Ok(layer)
    }

    /// What stands somewhere for good would empty the stores at every start, unnoticed.
    fn refuse_format(&mut self, named: &str) -> Result<()> {
        match self.format.take() {
            Some(true) => Err(Error::new(named, "would empty the stores at every start")
                .remedy("remove it, and give --format on the command line when they shall be made anew")),
            _ => Ok(()),
        }
    }

    fn check_absolute(&self) -> Result<()> {
        let paths = [
            ("mountpoint", &self.mountpoint),
            ("fuse_device", &self.fuse_device),
            ("pid_file", &self.pid_file),
            ("log_file", &self.log_file),
        ];
        let l2 = self.l2.iter().flatten().map(|spec| ("l2", spec.path.as_path()));
        let named = paths.iter().filter_map(|(key, path)| Some((*key, path.as_deref()?)));
        match named.chain(l2).find(|(_, path)| path.is_relative()) {
            Some((key, path)) => {
                Err(Error::new(format!("key '{key}'"), format!("'{}' is a relative path", path.display()))
                    .remedy("write it from the root, with a leading /"))
            }
            None => Ok(()),
        }
    }

    /// Reads the variables that name an option. The second part of the answer are variables with our
    /// prefix that name none: they are reported, not refused, since orchestrators inject such
    /// (`KVCACHEFS_SERVICE_HOST` and the like) without asking.
    pub fn from_env(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<(Self, Vec<String>)> {
        let mut layer = Self::default();
        let mut unknown = Vec::new();
        for (name, value) in vars {
            let Some(name) = name.to_str() else { continue };
            let Some(option) = name.strip_prefix(ENV_PREFIX) else { continue };
            let key = option.to_ascii_lowercase();
            if key == "config" || value.is_empty() {
                continue;
            }
            if !keys().any(|known| known == key) || option.bytes().any(|b| b.is_ascii_lowercase()) {
                unknown.push(name.to_owned());
                continue;
            }
            let value = value.to_str().ok_or_else(|| {
                Error::new(name, "is not valid UTF-8").remedy("set it to plain text or unset it")
            })?;
            let values = if key == "l2" { value.split(',').collect() } else { vec![value] };
            let mut one = Self::from_pairs(values.iter().map(|value| (key.as_str(), Some(*value))))
                .map_err(|error| error.within(name))?;
            one.refuse_format(name)?;
            layer = one.over(layer);
        }
        Ok((layer, unknown))
    }

    /// Reads `-o a,b=c` options, as fstab writes them. What only mount(8) or systemd care about is skipped.
    pub fn from_fstab<'o>(options: impl IntoIterator<Item = &'o str>) -> Result<Self> {
        let mut pairs = Vec::new();
        for option in options.into_iter().flat_map(|list| list.split(',')).map(str::trim) {
            let (key, value) =
                option.split_once('=').map_or((option, None), |(key, value)| (key, Some(value)));
            match (key, value) {
                ("", _) => {}
                ("ro", None) => pairs.push(("read_only", None)),
                ("rw", None) => pairs.push(("read_only", Some("false"))),
                ("exec", None) => pairs.push(("noexec", Some("false"))),
                ("config", _) => {}
                ("remount", _) => {
                    return Err(Error::new("-o remount", "is not supported")
                        .remedy("unmount, and mount again with the new options"));
                }
                _ if is_generic_mount_option(key) => {}
                _ => pairs.push((key, value)),
            }
        }
        let mut layer = Self::from_pairs(pairs.iter().copied()).map_err(|error| {
            let named = |word: &str| {
                let key = |key: &&str| word.strip_prefix("--") == Some(&key.replace('_', "-"));
                pairs.iter().map(|(key, _)| *key).find(key).map(|key| format!("-o {key}"))
            };
            error.renamed(named)
        })?;
        layer.refuse_format("-o format")?;
        Ok(layer)
    }

    fn from_pairs<'p>(pairs: impl IntoIterator<Item = (&'p str, Option<&'p str>)>) -> Result<Self> {
        let mut layer = Self::default();
        let mut words = Vec::new();
        for (key, value) in pairs {
            match (key, value) {
                ("mountpoint", Some(path)) => layer.mountpoint = Some(path.into()),
                (_, Some(value)) => words.push(format!("--{}={value}", key.replace('_', "-"))),
                (_, None) => words.push(format!("--{}", key.replace('_', "-"))),
            }
        }
        // A later option of the same name wins, as on every mount command line.
        let mut last: Vec<String> = Vec::new();
        for word in words {
            let name = |word: &str| word.split('=').next().map(str::to_owned);
            if name(&word).as_deref() != Some("--l2") {
                last.retain(|earlier| name(earlier) != name(&word));
            }
            last.push(word);
        }
        let parsed = Alone::try_parse_from(last).map_err(|error| usage_error(&error))?;
        Ok(parsed.layer.over(layer))
    }

    /// What this layer says, and where it says nothing, what `lower` says.
    #[must_use]
    pub fn over(self, lower: Self) -> Self {
        macro_rules! prefer {
            ($($field:ident),*) => { Self { $($field: self.$field.or(lower.$field)),* } };
        }
        prefer!(
            mountpoint,
            l1,
            l2,
            format,
            l2_engine,
            queue_depth,
            l2_files_max,
            evict,
            allow_other,
            read_only,
            noexec,
            default_permissions,
            fsname,
            fuse_device,
            read_path,
            policy,
            recycle,
            slab_rest,
            lock,
            huge_pages,
            chunk_reserve,
            small_file_max,
            slab_file_max,
            lease_max,
            lease_client_max,
            lease_ttl_max,
            prefetch_window,
            prefetch_window_bytes,
            prefetch_queue,
            dirty_limit,
            publish_wait,
            drain_timeout,
            request_deadline,
            fsync_deadline,
            daemon,
            pid_file,
            log_file,
            log_level,
            guard,
            threads
        )
    }
}

/// The names of all options, as a TOML file writes them.
pub fn keys() -> impl Iterator<Item = String> {
    let command = Layer::augment_args(clap::Command::new("layer"));
    command.get_arguments().map(|arg| arg.get_id().to_string()).collect::<Vec<_>>().into_iter()
}

/// The `config=` of fstab-style options, which is needed before all others.
pub fn fstab_config<'o>(options: impl IntoIterator<Item = &'o str>) -> Option<PathBuf> {
    let words = options.into_iter().flat_map(|list| list.split(','));
    words.filter_map(|word| word.trim().strip_prefix("config=")).last().map(PathBuf::from)
}

/// Whether `-o` knows an option of this name, as its own or as one that says nothing to a file system.
pub fn is_mount_option(key: &str) -> bool {
    let own = key.replace('-', "_");
    ["ro", "rw", "config"].contains(&key) || is_generic_mount_option(key) || keys().any(|known| known == own)
}

/// Options of mount(8), systemd and fstab that say nothing to a file system.
fn is_generic_mount_option(key: &str) -> bool {
    const GENERIC: [&str; 24] = [
        "auto",
        "noauto",
        "user",
        "nouser",
        "users",
        "owner",
        "group",
        "_netdev",
        "nofail",
        "defaults",
        "dev",
        "nodev",
        "suid",
        "nosuid",
        "exec",
        "atime",
        "noatime",
        "relatime",
        "norelatime",
        "async",
        "comment",
        "uhelper",
        "helper",
        "context",
    ];
    GENERIC.contains(&key) || key.starts_with("x-") || key.starts_with("X-")
}

/// One store needs no list around it.
fn one_or_more<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Vec<L2Spec>>, D::Error> {
    struct OneOrMore;
    impl<'de> serde::de::Visitor<'de> for OneOrMore {
        type Value = Vec<L2Spec>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a store in quotes such as \"/nvme/kv.store:200GiB\", or a list of them in []")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<L2Spec>, E> {
            text.parse().map(|spec| vec![spec]).map_err(E::custom)
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<L2Spec>, A::Error> {
            std::iter::from_fn(|| list.next_element().transpose()).collect()
        }
    }
    from.deserialize_any(OneOrMore).map(Some)
}

fn parse_log_level(text: &str) -> Result<LevelFilter, String> {
    text.parse()
        .map_err(|_| format!("log level '{text}' is unknown; use off, error, warn, info, debug or trace"))
}

fn log_level<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<LevelFilter>, D::Error> {
    struct Level(LevelFilter);
    impl std::str::FromStr for Level {
        type Err = String;
        fn from_str(text: &str) -> Result<Self, String> {
            parse_log_level(text).map(Self)
        }
    }
    from_text::<D, Level>(from).map(|level| level.map(|level| level.0))
}

/// Turns the parser's picture of an error into one line that names the line, the key and the way out.
fn toml_error(text: &str, error: &toml::de::Error) -> Error {
    let start = error.span().map_or(0, |span| span.start).min(text.len());
    let line = text[..start].matches('\n').count();
    let key = text.lines().nth(line).and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
    let place = match key {
        Some(key) => format!("line {}, key '{key}'", line + 1),
        None => format!("line {}", line + 1),
    };
    let message = one_line(error.message());
    let Some(unknown) = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next())
    else {
        let wrong = message.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected "));
        let remedy = match wrong {
            // Rust's words for numbers and booleans, which TOML writes bare.
            Some((found, "usize" | "u32" | "u64" | "a boolean")) if found.starts_with("string") => {
                Some("write it without quotes")
            }
            Some((found, "a string")) if !found.starts_with(['s', 'm']) => Some("write it in quotes"),
            _ if message == "duplicate key" => Some("give it once"),
            _ => None,
        };
        let error = Error::new(place, message);
        return match remedy {
            Some(remedy) => error.remedy(remedy),
            None => error,
        };
    };
    if text.lines().nth(line).is_some_and(|line| line.trim_start().starts_with('[')) {
        return Error::new(place, "the file has no sections").remedy("leave out the line in brackets");
    }
    let meant = unknown.trim_start_matches('-').replace('-', "_");
    let remedy = if keys().any(|key| key == meant) {
        format!("write {meant}")
    } else {
        "remove it; kvcachefs mount --help lists the options, and - is written _ here".to_owned()
    };
    Error::new(place, "no such option").remedy(remedy)
}

/// The words with which the command that was given wrongly begins: `kvctl umount`.
fn program(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let usage = text.split("Usage: ").nth(1).unwrap_or("kvcachefs");
    let words = usage.split_whitespace().take_while(|word| !word.starts_with(['[', '<', '-']));
    words.collect::<Vec<_>>().join(" ")
}

/// Turns clap's several lines into one.
pub fn usage_error(error: &clap::Error) -> Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let arg = context(ContextKind::InvalidArg).unwrap_or_default();
    let option = arg.split([' ', '[', '=']).next().unwrap_or_default().to_owned();
    match error.kind() {
        ErrorKind::UnknownArgument if !arg.starts_with('-') => {
            let another = error.render().to_string().contains("MOUNTPOINT");
            let cause = if another { "a second mount point" } else { "is not expected here" };
            Error::new(arg, cause).remedy(if another { "give one" } else { "leave it out" })
        }
        ErrorKind::UnknownArgument if arg[1..].starts_with(|next: char| next.is_ascii_digit()) => {
            Error::new(arg, "is no option, and no option has a negative value").remedy("leave out the -")
        }
        ErrorKind::UnknownArgument => {
            let remedy = match context(ContextKind::SuggestedArg) {
                Some(similar) => format!("did you mean {similar}?"),
                None => "kvcachefs mount --help lists the options".to_owned(),
            };
            Error::new(arg, "unknown option").remedy(remedy)
        }
        ErrorKind::InvalidSubcommand => {
            Error::new(context(ContextKind::InvalidSubcommand).unwrap_or_default(), "unknown command")
                .remedy("use mount, umount or version")
        }
        ErrorKind::ValueValidation => {
            use std::error::Error as _;
            let cause = error.source().map(ToString::to_string).unwrap_or_default();
            let value = context(ContextKind::InvalidValue).unwrap_or_default();
            // Our own types name the value; those of others leave it out.
            if cause == "value was not a boolean" {
                return Error::new(option, format!("'{value}' is not possible")).remedy("use true or false");
            }
            let cause = if cause.contains(&value) { cause } else { format!("'{value}': {cause}") };
            Error::new(option, cause)
        }
        ErrorKind::InvalidValue
            if context(ContextKind::InvalidValue).is_none_or(|value| value.is_empty()) =>
        {
            if option.starts_with('-') {
                Error::new(option, "has no value").remedy(format!("write {arg}"))
            } else {
                // An argument that is no option is named in brackets of some kind.
                Error::new(arg.trim_matches(['[', ']', '<', '>']), "is empty").remedy("name a directory")
            }
        }
        ErrorKind::InvalidValue => {
            let value = context(ContextKind::InvalidValue).unwrap_or_default();
            let valid = context(ContextKind::ValidValue).unwrap_or_default();
            Error::new(option, format!("'{value}' is not possible")).remedy(format!("use one of {valid}"))
        }
        ErrorKind::ArgumentConflict => Error::new(option, "is given twice").remedy("give it once"),
        ErrorKind::MissingRequiredArgument => {
            Error::new(arg, "is missing").remedy(format!("{} --help shows how", program(error)))
        }
        _ => {
            let text = error.render().to_string();
            let first = text.split("\n\nUsage").next().unwrap_or_default();
            Error::new(first.trim_start_matches("error: "), "")
                .remedy(format!("see {} --help", program(error)))
        }
    }
}
