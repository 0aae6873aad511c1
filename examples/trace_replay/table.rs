//! The report: one table of what happened, one of latencies, and a legend that says where each figure
//! comes from.

use std::fmt;
use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use hdrhistogram::Histogram;

use crate::engine::{Outcome, Tier};
use crate::lru::{HitCount, Order};
use crate::mount::Counters;

/// KV bytes of one of the trace's blocks for Qwen3-8B in bf16: keys and values, 36 layers, 8 heads of 128,
/// 512 tokens.
pub const MODEL_BLOCK_BYTES: u64 = 2 * 36 * 8 * 128 * 2 * 512;

/// All that the report shows.
#[derive(Debug)]
pub struct Report<'a> {
    pub outcome: &'a Outcome,
    pub expected: HitCount,
    pub bound_points: f64,
    /// Blocks that the place holds; none if it holds all.
    pub capacity_blocks: Option<u64>,
    pub unique_blocks: u64,
    pub block_bytes: u64,
    pub in_flight: usize,
    pub order: Order,
    pub ask_tier: bool,
    /// The daemon's counters before and after; none on another file system.
    pub counters: Option<(Counters, Counters)>,
}

impl Report<'_> {
    /// Points by which the hit rate differs from the simulation.
    pub fn difference_points(&self) -> f64 {
        self.outcome.count.percent() - self.expected.percent()
    }

    pub fn agrees(&self) -> bool {
        self.difference_points().abs() <= self.bound_points
    }

    /// In words, if the hit rate is further from the simulation than the bound.
    pub fn disagreement(&self) -> Option<String> {
        let points = self.difference_points();
        (!self.agrees()).then(|| {
            let why = if self.in_flight > 1 {
                "; requests in flight evict or store what others have looked up, which the simulation of one after the \
                 other does not have: --in-flight 1 comes closer"
            } else {
                ""
            };
            format!(
                "the hit rate differs from the simulation by {points:+.3} points, more than {}{why}",
                self.bound_points
            )
        })
    }

    fn facts(&self) -> Table {
        let o = self.outcome;
        let mut table = table();
        let mut row = |what: &str, value: String| {
            table.add_row([Cell::new(what), Cell::new(value).set_alignment(CellAlignment::Right)]);
        };
        row("requests", o.requests.to_string());
        row("references", format!("{} to {} blocks", o.count.references, self.unique_blocks));
        row("scale of a block", scale(self.block_bytes));
        row("capacity", self.capacity());
        row("in flight, order", format!("{}, {}", self.in_flight, order(self.order)));
        row("hit rate", format!("{:.3} % ({} hits)", o.count.percent(), o.count.hits));
        row(
            "  expected by simulation",
            format!("{:.3} % ({} hits)", self.expected.percent(), self.expected.hits),
        );
        let verdict = if self.agrees() { "within" } else { "BEYOND" };
        row(
            "  difference",
            format!("{:+.3} points, {verdict} {}", self.difference_points(), self.bound_points),
        );
        row("gone between lookup and open", o.vanished.to_string());
        row("stored meanwhile by another request", o.stored_meanwhile.to_string());
        row("read", gibibytes(o.read_bytes));
        row("written", gibibytes(o.written_bytes));
        row("throughput", throughput(o.read_bytes + o.written_bytes, o.elapsed));
        row("verified bytes", o.read_bytes.to_string());
        row("wrong bytes", o.wrong_bytes.to_string());
        if o.short_reads > 0 {
            row("files that needed several reads", o.short_reads.to_string());
        }
        if let Some((before, after)) = &self.counters {
            let grown = |key| counted(after.since(before, key));
            let grown_bytes = |key| after.since(before, key).map_or("n/a".into(), gibibytes);
            row("hits in L1", self.tier_hits(after.since(before, "open_hits_l1")));
            row("hits in L2", self.tier_hits(after.since(before, "open_hits_l2")));
            row("opens by passthrough", grown("opens_passthrough"));
            row("opens direct", grown("opens_direct"));
            row("promotions", format!("{}, {}", grown("promotions"), grown_bytes("promoted_bytes")));
            row("evictions from L1", grown("evictions_l1"));
            row("evictions from L2", grown("evictions_l2"));
            row("dirty peak", after.get("dirty_peak_bytes").map_or("n/a".into(), mebibytes));
            row("published files", grown("published_files"));
            row("written back", grown_bytes("writeback_bytes"));
            row("CRC errors", grown("crc_errors"));
        }
        table
    }

    fn capacity(&self) -> String {
        match self.capacity_blocks {
            Some(blocks) => {
                let percent = 100.0 * blocks as f64 / self.unique_blocks as f64;
                format!("{blocks} blocks, {percent:.2} % of the different ones")
            }
            None => "all blocks".into(),
        }
    }

    fn tier_hits(&self, hits: Option<u64>) -> String {
        hits.map_or("n/a".into(), |hits| {
            let references = self.outcome.count.references;
            format!("{hits}, {:.2} % of references", HitCount { hits, references }.percent())
        })
    }

    fn latencies(&self) -> Table {
        let mut table = table();
        table.set_header(["latency", "count", "p50", "p95", "p99"].map(Cell::new));
        for (tier, histogram) in Tier::ALL.iter().zip(&self.outcome.loads) {
            let name = match tier {
                Tier::L1 => "read from L1",
                Tier::Mixed => "read from L1 and L2",
                Tier::L2 => "read from L2",
                Tier::Unknown if self.ask_tier && self.counters.is_some() => "read, tier unknown",
                Tier::Unknown => "read",
            };
            add_latency(&mut table, name, histogram);
        }
        add_latency(&mut table, "store", &self.outcome.stores);
        add_latency(&mut table, "lookup of a request", &self.outcome.lookups);
        table
    }

    fn legend(&self) -> Vec<&'static str> {
        let mut lines = vec![
            "A request is looked up whole; its hits are the longest run of present blocks from the first on.",
            "Read: open, fstat, one read, without the comparison. Store: create, one write, close, rename.",
            "Throughput counts the time in which the client makes and compares bytes, too.",
        ];
        if self.counters.is_some() {
            lines.push(
                "Hits by tier, opens, promotions and evictions are the daemon's counters (.ctl/stats).",
            );
            if self.ask_tier {
                lines.push("Tiers in latencies are labels: user.kv.tier, asked just before each open (--no-tier: not).");
            }
        }
        lines
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.facts())?;
        writeln!(f, "{}", self.latencies())?;
        for line in self.legend() {
            writeln!(f, "{line}")?;
        }
        for wrong in &self.outcome.wrong_files {
            let (path, d) = (wrong.path.display(), wrong.difference);
            writeln!(f, "WRONG: {path}: {} bytes differ, the first at offset {}", d.bytes, d.first)?;
        }
        Ok(())
    }
}

/// How much smaller a block is here than an engine's.
pub fn scale(block_bytes: u64) -> String {
    let factor = MODEL_BLOCK_BYTES as f64 / block_bytes as f64;
    format!("{} KiB for 72 MiB (512 tokens of Qwen3-8B): 1:{factor}", block_bytes / 1024)
}

/// MiB/s, as the progress bar and the table say it.
pub fn throughput(bytes: u64, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    format!("{:.0} MiB/s over {seconds:.1} s", bytes as f64 / f64::from(1 << 20) / seconds)
}

const fn order(order: Order) -> &'static str {
    match order {
        Order::LoadFirst => "hits before misses",
        Order::LastFirst => "misses before hits",
    }
}

fn table() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table
}

fn add_latency(table: &mut Table, name: &str, histogram: &Histogram<u64>) {
    if histogram.is_empty() {
        return;
    }
    let percentile = |q| duration(Duration::from_nanos(histogram.value_at_quantile(q)));
    let values = [histogram.len().to_string(), percentile(0.5), percentile(0.95), percentile(0.99)];
    let values = values.map(|v| Cell::new(v).set_alignment(CellAlignment::Right));
    table.add_row([Cell::new(name)].into_iter().chain(values));
}

fn duration(d: Duration) -> String {
    match d.as_micros() {
        0..10_000 => format!("{:.1} us", d.as_secs_f64() * 1e6),
        10_000..10_000_000 => format!("{:.1} ms", d.as_secs_f64() * 1e3),
        _ => format!("{:.1} s", d.as_secs_f64()),
    }
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn counted(value: Option<u64>) -> String {
    value.map_or("n/a".into(), |v| v.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_stated() {
        assert_eq!(MODEL_BLOCK_BYTES, 72 << 20);
        assert!(scale(1 << 20).ends_with("1:72"));
        assert!(scale(64 << 10).ends_with("1:1152"));
    }

    #[test]
    fn latencies_are_readable_at_every_size() {
        let shown = |micros| duration(Duration::from_micros(micros));
        assert_eq!([shown(3), shown(25_000), shown(12_000_000)], ["3.0 us", "25.0 ms", "12.0 s"]);
    }
}
