//! The command line, and nothing else.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

/// Measure the targets P1 to P6, P8, P10 and P11 in pairs, on a temporary mount.
#[derive(Debug, Parser)]
#[command(name = "bench", max_term_width = 110)]
pub struct Cli {
    /// Targets to measure
    #[arg(required = true, value_enum)]
    pub what: Vec<What>,
    /// Pairs of samples; one more is made first and not counted
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// Length of one sample, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 400, value_parser = clap::value_parser!(u64).range(10..))]
    pub sample: u64,
    /// Client threads, several counts separated by commas
    #[arg(long, value_name = "N,...", default_value = "1,2,8", value_delimiter = ',', value_parser = parse_threads)]
    pub threads: Vec<usize>,
    /// File sizes in MiB for P1 and P2, separated by commas
    #[arg(long, value_name = "MIB,...", default_value = "2,18", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub sizes: Vec<u64>,
    /// Bytes of warm files in MiB (P1, P2, P3, P11). L1 is twice as large
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..))]
    pub warm: u64,
    /// Bytes of cold files, and of one sample's stores, in MiB (P4, P5). The store file is twice as large
    #[arg(long, value_name = "MIB", default_value_t = 1536, value_parser = clap::value_parser!(u64).range(256..))]
    pub cold: u64,
    /// L1 in MiB for P4 and P5; small against --cold, so that nothing stays warm
    #[arg(long, value_name = "MIB", default_value_t = 320, value_parser = clap::value_parser!(u64).range(64..))]
    pub l1: u64,
    /// Blocks of the 200 requests are 18 MiB divided by this (hints)
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub hint_scale: u32,
    /// Milliseconds that the simulated engine computes on each request (hints)
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=60_000))]
    pub decode_ms: u64,
    /// Files in the catalog for P10, and names in one directory (names)
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub files: u64,
    /// Size of each of P10's files in KiB; they exist in the catalog only
    #[arg(long, value_name = "KIB", default_value_t = 2048, value_parser = clap::value_parser!(u64).range(4..))]
    pub file_kib: u64,
    /// Where the store file goes [default: the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,
    /// Where the other's warm files go: a tmpfs
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub tmpfs: PathBuf,
    /// The daemon [default: kvcachefs beside this example in target/]
    #[arg(long, value_name = "PATH")]
    pub daemon_binary: Option<PathBuf>,
    /// One more argument for `kvcachefs mount`; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub daemon_arg: Vec<String>,
    /// Print rows for docs/PERFORMANCE.md
    #[arg(long)]
    pub markdown: bool,
}

impl Cli {
    pub fn sample(&self) -> Duration {
        Duration::from_millis(self.sample)
    }

    pub fn decode(&self) -> Duration {
        Duration::from_millis(self.decode_ms)
    }

    pub fn scratch(&self) -> PathBuf {
        self.scratch.clone().unwrap_or_else(std::env::temp_dir)
    }
}

/// The targets, as docs/PERFORMANCE.md names them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum What {
    /// Warm sequential reads against tmpfs
    P1,
    /// The same through mmap
    P2,
    /// Warm random preads of 4 KiB against tmpfs
    P3,
    /// Cold reads against fio on the same store file
    P4,
    /// Sustained stores with their drain against fio on the same store file
    P5,
    /// Open and close of a warm file against a trivial daemon, and what classifying and leasing costs
    P6,
    /// Tickets a second; time to first token of 200 requests with and without hints, and how many windows take a place
    Hints,
    /// Time to mount and memory of a full catalog
    P10,
    /// What a name costs in a directory of very many, against one in an empty directory
    Names,
    /// CPU time of the daemon while clients read warm files
    P11,
}

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=1024).contains(&n) => Ok(n),
        _ => Err("expected 1 to 1024".into()),
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
}
