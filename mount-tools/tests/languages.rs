//! The clients in other languages, and the examples of all of them, on a real mount.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod place;

use std::path::{Path, PathBuf};
use std::process::Command;

use place::{KVCTL, Place, output, succeeds};

const BYTES: usize = 3 << 20;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn python(script: &str) -> Command {
    let mut command = Command::new("python3");
    let module = root().join("mount-tools/python");
    command.arg("-W").arg("error").arg(root().join(script)).env("PYTHONPATH", module);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Twice: what is brought the first time is there the second.
fn cycles(mut example: impl FnMut() -> Command) {
    let place = Place::with_cold_files(2, BYTES);
    let read = format!("rank read {} bytes", 2 * BYTES);
    for first in [true, false] {
        let said = succeeds(example().arg(place.mnt()).args(["d/f0000", "d/f0001"]));
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines[0], lines[1] == "waiting"), ("lookup 2 of 2", first), "{said}");
        assert!(lines[lines.len() - 2..] == [&read, "released"], "{said}");
        assert_eq!(place.stat("leases"), 0);
    }
    let out = output(example().arg(place.mnt()).args(["d/f0000", "d/none"]));
    assert!(
        !out.status.success() && String::from_utf8_lossy(&out.stderr).contains("a range is missing"),
        "{out:?}"
    );
    let out = output(example().arg("/proc").arg("f"));
    assert!(!out.status.success() && !out.stderr.is_empty());
}

#[test]
fn the_cycle_in_c() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("cycle");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu99", "-Wall", "-Wextra", "-Werror", "-I"]).arg(root().join("mount-tools/include"));
    succeeds(cc.arg(root().join("examples/control_c/cycle.c")).arg("-o").arg(&program));
    cycles(|| Command::new(&program));
}

#[test]
fn the_cycle_in_python() {
    cycles(|| python("examples/control_cycle.py"));
}

#[test]
fn the_cycle_in_rust() {
    // Cargo builds the examples of a package with all of its tests, and not with this one alone.
    let beside = Path::new(KVCTL).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package=mount-tools", "--example=control_cycle"]).current_dir(root());
    if beside.ends_with("release") {
        cargo.arg("--release");
    }
    succeeds(cargo.arg("--target-dir").arg(beside.parent().unwrap()));
    let program = beside.join("examples/control_cycle");
    cycles(|| Command::new(&program));
}

#[test]
fn the_python_module_has_the_layouts_of_the_header() {
    succeeds(&mut python("mount-tools/python/tests/test_abi.py"));
}

#[test]
fn the_python_module_on_a_mount() {
    let place = Place::with_cold_files(4, BYTES);
    succeeds(python("mount-tools/python/tests/mounted.py").arg(place.mnt()));
    assert_eq!(place.stat("leases"), 0);
}
