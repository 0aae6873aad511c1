//! The command line, and nothing else.

use std::path::PathBuf;

use clap::Parser;

use crate::lru::Order;

/// Replay an LLM serving trace on a kvcachefs mount through ordinary file operations, and verify every byte.
///
/// For each request: look up its prefix blocks, read the hits, compute nothing, write the misses as files named
/// by hash. Without options the excerpt that ships with the example runs on a temporary mount.
#[derive(Debug, Parser)]
#[command(name = "trace_replay", max_term_width = 110)]
pub struct Cli {
    /// Trace to replay, .jsonl or .jsonl.xz in Mooncake's form [default: the excerpt that ships with the example]
    #[arg(long, value_name = "PATH", help_heading = "Trace")]
    pub trace: Option<PathBuf>,
    /// Replay only the first N requests
    #[arg(long, value_name = "N", help_heading = "Trace")]
    pub requests: Option<usize>,
    /// Bytes of one block's file, a multiple of 4KiB; the same for all blocks
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_size, help_heading = "Trace")]
    pub block_bytes: u64,
    /// Seed of the blocks' names and contents
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Trace")]
    pub seed: u64,

    /// Requests in flight, each worked by a thread of its own, started in the trace's order
    ///
    /// On a small store many of them evict what others have looked up and not yet opened: a miss that the simulation,
    /// one request after the other, does not have.
    #[arg(long, value_name = "N", default_value_t = IN_FLIGHT_DEFAULT, value_parser = parse_in_flight, help_heading = "Client")]
    pub in_flight: usize,
    /// Order of a request's steps; within each part the last block comes first
    #[arg(long, value_enum, default_value_t = Order::LoadFirst, help_heading = "Client")]
    pub order: Order,
    /// Do not ask for `user.kv.tier` before each read; read latencies are then not told apart by tier
    #[arg(long, help_heading = "Client")]
    pub no_tier: bool,
    /// Points by which the hit rate may differ from the simulation, and fail if it differs by more [default: 0.05 with
    /// one request in flight, else 0.3]
    #[arg(long, value_name = "POINTS", help_heading = "Client")]
    pub bound: Option<f64>,
    /// Fail when the hit rate differs from the simulation by more than the bound
    ///
    /// The excerpt on a mount of the default size is always checked. With other traces, sizes or parts it is a forecast:
    /// how far requests in flight get from a simulation of one after the other depends on them.
    #[arg(long, help_heading = "Client")]
    pub check: bool,

    /// Size of L1
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size, help_heading = "Temporary mount")]
    pub l1: u64,
    /// Store file of L2 and its size, as PATH:SIZE [default: 2GiB beside the mount point]
    #[arg(long, value_name = "PATH:SIZE", value_parser = parse_store, help_heading = "Temporary mount")]
    pub l2: Option<Store>,
    /// Size L2 (or, with --plain, the directory) to P % of the different blocks of the replayed part
    #[arg(long, value_name = "P", value_parser = parse_percent, help_heading = "Temporary mount")]
    pub capacity_percent: Option<f64>,
    /// The daemon [default: kvcachefs beside this example in target/]
    #[arg(long, value_name = "PATH", help_heading = "Temporary mount")]
    pub daemon_binary: Option<PathBuf>,
    /// One more argument for `kvcachefs mount`, such as --daemon-arg=--read-path=daemon; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true, help_heading = "Temporary mount")]
    pub daemon_arg: Vec<String>,

    /// Replay on this kvcachefs mount instead of a temporary one
    #[arg(long, value_name = "DIR", conflicts_with_all = ["l1", "l2", "capacity_percent", "daemon_binary", "daemon_arg", "plain"], help_heading = "Elsewhere")]
    pub mount: Option<PathBuf>,
    /// Replay in this directory of any file system, for comparison. With --capacity-percent the client itself
    /// deletes the least recently used blocks
    #[arg(long, value_name = "DIR", conflicts_with_all = ["l1", "l2", "daemon_binary", "daemon_arg"], help_heading = "Elsewhere")]
    pub plain: Option<PathBuf>,
    /// Keep the blocks, and a temporary mount with its store
    #[arg(long, help_heading = "Elsewhere")]
    pub keep: bool,
}

impl Cli {
    /// Points by which the hit rate may differ from the simulation.
    pub fn bound_points(&self) -> f64 {
        self.bound.unwrap_or(if self.in_flight == 1 { 0.05 } else { 0.3 })
    }
}

impl Cli {
    /// Whether a hit rate beyond the bound is a failure: where the agreement is promised, or asked for.
    pub fn checks_hit_rate(&self) -> bool {
        let default = self.trace.is_none()
            && self.requests.is_none()
            && self.capacity_percent.is_none()
            && self.l2.is_none()
            && self.mount.is_none()
            && self.plain.is_none()
            && self.in_flight <= IN_FLIGHT_DEFAULT;
        self.check || self.bound.is_some() || default
    }
}

/// A store file and its size.
#[derive(Clone, Debug)]
pub struct Store {
    pub path: PathBuf,
    pub bytes: u64,
}

/// Blocks are extents of 4 KiB in L2, so that other sizes would not fill it exactly.
pub const BLOCK_ALIGN_BYTES: u64 = 4096;

/// With more, the excerpt's hit rate is not promised.
const IN_FLIGHT_DEFAULT: usize = 4;

/// Threads beyond this only wait for each other.
const IN_FLIGHT_MAX: usize = 1024;

fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u32); 4] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let (digits, shift) = UNITS
        .iter()
        .find_map(|&(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
        .ok_or("a size needs a unit: KiB, MiB, GiB or TiB")?;
    let count: u64 =
        digits.trim().parse().map_err(|_| "a size is a whole number and a unit, such as 64MiB")?;
    let bytes = count
        .checked_mul(1 << shift)
        .filter(|&b| b > 0 && b <= 1 << 60)
        .ok_or("this size is out of range")?;
    if bytes % BLOCK_ALIGN_BYTES == 0 { Ok(bytes) } else { Err("the size must be a multiple of 4KiB".into()) }
}

fn parse_store(text: &str) -> Result<Store, String> {
    let (path, size) = text.rsplit_once(':').ok_or("expected PATH:SIZE, such as /nvme/kv.store:8GiB")?;
    if path.is_empty() {
        return Err("the path is empty".into());
    }
    Ok(Store { path: path.into(), bytes: parse_size(size)? })
}

fn parse_percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent),
        _ => Err("a percentage is above 0 and at most 100".into()),
    }
}

fn parse_in_flight(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=IN_FLIGHT_MAX).contains(&n) => Ok(n),
        _ => Err(format!("expected 1 to {IN_FLIGHT_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_forecast_is_not_a_failed_check() {
        let checks = |line: &str| {
            let words = line.split_whitespace();
            Cli::try_parse_from(["trace_replay"].into_iter().chain(words)).unwrap().checks_hit_rate()
        };
        for line in ["", "--l1 512MiB --in-flight 1", "--requests 60 --check", "--trace t --bound 1"] {
            assert!(checks(line), "{line}");
        }
        for line in ["--capacity-percent 10", "--requests 60", "--trace t", "--l2 /s:1GiB", "--in-flight 16"]
        {
            assert!(!checks(line), "{line}");
        }
    }

    #[test]
    fn sizes_need_a_unit_and_whole_pages() {
        assert_eq!(parse_size("4KiB"), Ok(4096));
        assert_eq!(parse_size("3 GiB"), Ok(3 << 30));
        for bad in ["4096", "1KiB", "0MiB", "-1MiB", "1.5MiB", "99999999TiB", ""] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        let store = parse_store("/a:b/c:2MiB").unwrap();
        assert_eq!((store.path.to_str(), store.bytes), (Some("/a:b/c"), 2 << 20));
    }
}
