//! What this machine has to offer, as far as defaults and limits depend on it.

use std::fs;
use std::path::Path;
use std::thread;

use crate::units::Bytes;

/// Memory and cores that this process may use. Plain data, so that tests can pretend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host {
    /// RAM of the machine, or of the control group when that is less.
    pub memory: Bytes,
    /// RAM that can be had without swapping, again at most the control group's.
    pub memory_available: Bytes,
    pub cores: usize,
}

impl Host {
    /// Asks the kernel. What it does not tell counts as unlimited, so nothing is refused for want of an answer.
    pub fn probe() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let limit = cgroup_memory_limit();
        let total = meminfo_field(&meminfo, "MemTotal").unwrap_or(u64::MAX);
        let available = meminfo_field(&meminfo, "MemAvailable").unwrap_or(u64::MAX);
        Self {
            memory: Bytes(total.min(limit)),
            memory_available: Bytes(available.min(limit)),
            cores: thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

fn meminfo_field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.split(':').next() == Some(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The tightest memory limit of our control group and its ancestors (version 2).
///
/// What the group already uses is not subtracted: most of it is page cache, which gives way.
fn cgroup_memory_limit() -> u64 {
    let root = Path::new("/sys/fs/cgroup");
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let inside = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
    root.join(inside)
        .ancestors()
        .take_while(|dir| dir.starts_with(root))
        .filter_map(|dir| fs::read_to_string(dir.join("memory.max")).ok()?.trim().parse().ok())
        .min()
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_by_its_exact_names() {
        let text = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    7 kB\n";
        assert_eq!(meminfo_field(text, "MemTotal"), Some(1_024_000));
        assert_eq!(meminfo_field(text, "MemAvailable"), Some(7168));
        assert_eq!(meminfo_field(text, "Mem"), None);
    }

    #[test]
    fn this_host_has_memory_and_cores() {
        let host = Host::probe();
        assert!(host.cores >= 1 && host.memory_available <= host.memory);
    }
}
