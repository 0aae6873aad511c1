//! Writes that wait for room are held by the daemon. However many a client sends without waiting for an answer, only so
//! many are handed over; the kernel keeps the others, and their bytes stay with the client.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;

use common::{Mount, Options};

/// What the kernel was told when it asked, from its own files.
fn max_background(mount: &Mount) -> Option<u64> {
    let device = fs::metadata(mount.path()).unwrap().dev();
    // The kernel's own directory, named after the mount's device number.
    let path = format!("/sys/fs/fuse/connections/{}/max_background", device & 0xff | device >> 12 & 0xfff00);
    fs::read_to_string(path).ok().map(|text| text.trim().parse().unwrap())
}

#[test]
fn the_kernel_hands_over_no_more_than_may_be_dirty() {
    for (l1, limit, wanted) in [(128, 64, 1024), (8192, 3000, 3000)] {
        let mount = Mount::with(
            Options::new(l1, 256).arg("--dirty-limit").arg(&format!("{limit}MiB")).arg("--lock=false"),
        );
        let Some(background) = max_background(&mount) else {
            eprintln!("skipped: the kernel's list of FUSE connections is not mounted");
            return;
        };
        assert_eq!(background, wanted, "with --dirty-limit {limit}MiB");
        assert_eq!(mount.stat("waiting_bytes"), 0);
    }
}
