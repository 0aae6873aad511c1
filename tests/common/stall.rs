//! A disk that stops taking writes when it is told to, and goes on later: a file system of its own that is frozen.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct Disk {
    scratch: tempfile::TempDir,
}

fn does(program: &str, args: &[&str], path: &Path) -> bool {
    Command::new(program).args(args).arg(path).output().unwrap().status.success()
}

impl Disk {
    /// None where there is no mkfs or no loop device.
    pub fn new() -> Option<Self> {
        let scratch = tempfile::Builder::new().prefix("kvcachefs-disk-").tempdir().unwrap();
        let disk = Self { scratch };
        fs::create_dir(disk.path()).unwrap();
        let image = disk.scratch.path().join("image");
        fs::File::create(&image).unwrap().set_len(400 << 20).unwrap();
        let made = Command::new("mkfs.ext4").arg("-q").arg(&image).output();
        let ready = made.is_ok_and(|made| made.status.success())
            && Command::new("mount")
                .args(["-o", "loop"])
                .arg(&image)
                .arg(disk.path())
                .status()
                .unwrap()
                .success();
        if !ready {
            eprintln!("not tested: no disk of our own can be had");
        }
        ready.then_some(disk)
    }

    pub fn path(&self) -> PathBuf {
        self.scratch.path().join("disk")
    }

    /// From here on whatever is written to it waits.
    pub fn freeze(&self) -> Frozen<'_> {
        assert!(does("fsfreeze", &["--freeze"], &self.path()));
        Frozen(self)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        does("umount", &["-l"], &self.path());
    }
}

/// It goes on when this is dropped.
pub struct Frozen<'d>(&'d Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        does("fsfreeze", &["--unfreeze"], &self.0.path());
    }
}
