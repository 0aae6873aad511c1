//! What has been measured: a table for the terminal, or rows for docs/PERFORMANCE.md.

use std::fmt::Write as _;

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};

use crate::pairs::Outcome;

const HEADER: [&str; 6] = ["target", "what", "kvcachefs", "compared with", "ratio (quartiles)", "wanted"];

#[derive(Default, Debug)]
pub struct Report(Vec<[String; 6]>);

/// The unit of a rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    Bytes,
    Operations,
    /// The time that one takes.
    Each,
}

impl Unit {
    fn show(self, rate: f64) -> String {
        match self {
            Self::Bytes => format!("{:.2} GB/s", rate / 1e9),
            Self::Operations => format!("{:.0} k/s", rate / 1e3),
            Self::Each => format!("{:.0} ms", 1e3 / rate),
        }
    }
}

impl Report {
    /// Ours against something, in pairs. `wanted` is the least ratio.
    pub fn pairs(
        &mut self,
        target: &str,
        what: String,
        outcome: &Outcome,
        unit: Unit,
        other: &str,
        wanted: f64,
    ) {
        let verdict = if outcome.ratio >= wanted { "met" } else { "missed" };
        self.push([
            target.into(),
            format!("{what}; {} pairs", outcome.pairs),
            unit.show(outcome.ours),
            format!("{} {}", unit.show(outcome.other), other),
            format!("{:.3} ({:.3} to {:.3})", outcome.ratio, outcome.quartiles.0, outcome.quartiles.1),
            format!(">= {wanted:.2}: {verdict}"),
        ]);
    }

    /// A figure that is compared with a bound, or with nothing.
    pub fn figure(&mut self, target: &str, what: String, ours: String, other: String, wanted: String) {
        self.push([target.into(), what, ours, other, String::new(), wanted]);
    }

    fn push(&mut self, row: [String; 6]) {
        eprintln!("{}", row.iter().filter(|cell| !cell.is_empty()).cloned().collect::<Vec<_>>().join("  "));
        self.0.push(row);
    }

    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header(HEADER).add_rows(&self.0);
        table
    }

    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let line = |out: &mut String, text: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{text}");
        };
        let command: Vec<_> = std::env::args().skip(1).collect();
        line(&mut out, format_args!("Machine: {}.", machine()));
        line(&mut out, format_args!("Command: `bench {}`. Date: {}.", command.join(" "), today()));
        // Above the number of cores, others were computing too, and the figures say little.
        line(&mut out, format_args!("Load average at the end (1, 5, 15 minutes): {}.\n", load()));
        line(&mut out, format_args!("| {} |", HEADER.join(" | ")));
        line(&mut out, format_args!("|{}", "---|".repeat(HEADER.len())));
        for row in &self.0 {
            line(&mut out, format_args!("| {} |", row.join(" | ")));
        }
        out
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn machine() -> String {
    let field = |path: &str, key: &str| {
        let text = read(path);
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or(":?");
        line.split_once(':').map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kib: u64 = field("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0);
    format!(
        "{cores} cores of {}, {:.0} GiB, Linux {}",
        field("/proc/cpuinfo", "model name"),
        kib as f64 / f64::from(1 << 20),
        read("/proc/sys/kernel/osrelease").trim()
    )
}

fn load() -> String {
    read("/proc/loadavg").split_whitespace().take(3).collect::<Vec<_>>().join(", ")
}

/// The date as `date` says it.
fn today() -> String {
    let date = std::process::Command::new("date").arg("+%Y-%m-%d").output();
    date.map_or_else(|_| "?".into(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
