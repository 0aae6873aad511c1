//! What is written is read back: at once, after it has left L1, and after a restart.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs;

use common::{Mount, bytes, memory_only};

const SIZES: [usize; 12] = [
    0,
    1,
    4095,
    4096,
    4097,
    256 << 10,
    (256 << 10) + 1,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 4096,
    1_124_352,
    5_000_001,
];

#[test]
fn files_read_back_whatever_their_size() {
    let mount = Mount::new();
    for (seed, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&format!("f{seed}")), bytes(seed as u64, size)).unwrap();
    }
    for (seed, size) in SIZES.into_iter().enumerate() {
        let read = fs::read(mount.at(&format!("f{seed}"))).unwrap();
        assert!(read == bytes(seed as u64, size), "file of {size} bytes");
    }
    mount.check_quiet();
}

#[test]
fn files_read_back_from_the_device() {
    if memory_only() {
        return;
    }
    let mount = Mount::new();
    for (seed, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&format!("f{seed}")), bytes(seed as u64, size)).unwrap();
    }
    mount.push_out_of_l1();
    for (seed, size) in SIZES.into_iter().enumerate() {
        let read = fs::read(mount.at(&format!("f{seed}"))).unwrap();
        assert!(read == bytes(seed as u64, size), "file of {size} bytes");
    }
    assert!(mount.stat("read_l2_bytes") > 0, "nothing came from the device");
    mount.check_quiet();
}

#[test]
fn files_are_there_after_a_restart() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    fs::create_dir_all(mount.at("a/b")).unwrap();
    for (seed, size) in SIZES.into_iter().enumerate() {
        fs::write(mount.at(&format!("a/b/f{seed}")), bytes(seed as u64, size)).unwrap();
    }
    let before = fs::metadata(mount.at("a/b/f5")).unwrap().modified().unwrap();
    mount.restart();
    for (seed, size) in SIZES.into_iter().enumerate() {
        let read = fs::read(mount.at(&format!("a/b/f{seed}"))).unwrap();
        assert!(read == bytes(seed as u64, size), "file of {size} bytes");
    }
    assert_eq!(fs::metadata(mount.at("a/b/f5")).unwrap().modified().unwrap(), before, "mtime is stable");
    mount.check_quiet();
}

#[test]
fn a_warm_file_is_read_by_the_kernel_alone() {
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 3 << 20)).unwrap();
    let direct = mount.stat("opens_direct");
    assert!(fs::read(mount.at("f")).unwrap() == bytes(1, 3 << 20));
    let passthrough = common::mode() != common::Mode::Daemon;
    assert_eq!(mount.stat("opens_passthrough"), u64::from(passthrough));
    assert_eq!(mount.stat("opens_direct"), direct + u64::from(!passthrough));
}
