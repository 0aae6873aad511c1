//! What a name costs in a directory of very many, against the same in one that has few.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::cli::Cli;
use crate::failure::{Context, Result};
use crate::interrupt;
use crate::mount::Mount;
use crate::pairs;
use crate::report::{Report, Unit};

/// Names of one sample: made, looked up, and removed.
const NAMES: u64 = 2_000;
/// Room for the largest number of names that `--files` allows, and L1 for the catalog's own needs.
const L1_MIB: u64 = 64;

pub fn run(cli: &Cli, report: &mut Report) -> Result<()> {
    let mount = Mount::start(cli, L1_MIB, &[])?;
    let (many, few) = (mount.dir().join("many"), mount.dir().join("few"));
    for dir in [&many, &few] {
        std::fs::create_dir(dir).context(|| format!("cannot make {}", dir.display()))?;
    }
    for at in 0..cli.files {
        if at % NAMES == 0 {
            interrupt::check()?;
        }
        make(&name(&many, "old", at))?;
    }
    let outcome = pairs::run(cli.pairs, || cycle(&many), || cycle(&few))?;
    let what = format!("names made, looked up and removed in a directory of {}", cli.files);
    report.pairs("names", what, &outcome, Unit::Operations, "an empty directory", 0.8);
    mount.stop()
}

fn name(dir: &Path, kind: &str, at: u64) -> PathBuf {
    // Spread, as hashes are.
    dir.join(format!("{:016x}-{kind}", at.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Links are names without bytes: what is measured is the directory.
fn make(path: &Path) -> Result<()> {
    std::os::unix::fs::symlink("t", path).context(|| format!("cannot make {}", path.display()))
}

fn cycle(dir: &Path) -> Result<f64> {
    let start = Instant::now();
    for at in 0..NAMES {
        make(&name(dir, "new", at))?;
    }
    for at in 0..NAMES {
        let path = name(dir, "none", at);
        if path.symlink_metadata().is_ok() {
            return Err(crate::failure::Failure::new(format!("{} is there", path.display())));
        }
    }
    for at in 0..NAMES {
        let path = name(dir, "new", at);
        std::fs::remove_file(&path).context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(3.0 * NAMES as f64 / start.elapsed().as_secs_f64())
}
