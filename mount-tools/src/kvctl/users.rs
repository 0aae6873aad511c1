//! Who uses a mount, as far as `/proc` lets us see.

use std::fs;
use std::path::Path;
use std::time::Duration;

use kvcachefs::mount;

/// A process that waits for a dead device may hold the lock of its mappings; we do not wait with it.
const LIMIT: Duration = Duration::from_secs(5);

/// `1234 (python3)` for every process that has a file open or mapped, or its directory, below `dir`.
pub fn of(dir: &Path) -> Vec<String> {
    let own = std::process::id().to_string();
    let found = mount::within(LIMIT, || Ok(scan(dir, &own).join("\n").into_bytes()));
    let found = found.and_then(Result::ok).unwrap_or_default();
    String::from_utf8_lossy(&found).lines().map(str::to_owned).collect()
}

fn scan(dir: &Path, own: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| {
            let pid = entry.file_name().into_string().ok()?;
            if pid == own || !pid.bytes().all(|byte| byte.is_ascii_digit()) || !uses(&entry.path(), dir) {
                return None;
            }
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            Some(format!("{pid} ({})", name.trim_end().replace('\n', " ")))
        })
        .collect()
}

fn uses(process: &Path, dir: &Path) -> bool {
    // The links are text that the kernel makes up: reading them asks nothing of the mount.
    let inside = |link: &Path| fs::read_link(link).is_ok_and(|target| target.starts_with(dir));
    let descriptors = || fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    ["cwd", "root", "exe"].iter().any(|name| inside(&process.join(name)))
        || descriptors().any(|entry| inside(&entry.path()))
        || maps(process, dir)
}

fn maps(process: &Path, dir: &Path) -> bool {
    let text = fs::read(process.join("maps")).unwrap_or_default();
    // The sixth field is the path; it begins at the first slash.
    String::from_utf8_lossy(&text)
        .lines()
        .any(|line| line.find('/').is_some_and(|at| Path::new(&line[at..]).starts_with(dir)))
}
