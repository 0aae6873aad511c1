//! A mapping outlives the descriptor, eviction, replacement and unlinking of its file, and keeps showing its bytes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "files are mapped and looked at")]

mod common;

use std::fs::{self, File};
use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;

use common::{Mode, Mount, Options, bytes, memory_only};
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

struct Map {
    base: NonNull<std::ffi::c_void>,
    len: usize,
}

impl Map {
    /// Maps the file, and closes it.
    fn new(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let length = NonZeroUsize::new(len).unwrap();
        let map = |flags| {
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { mmap(None, length, ProtFlags::PROT_READ, flags, &file, 0) }
        };
        // Handles that the daemon serves can be mapped only privately.
        let base = match map(MapFlags::MAP_SHARED) {
            Err(Errno::ENODEV) => map(MapFlags::MAP_PRIVATE).unwrap(),
            other => other.unwrap(),
        };
        Self { base, len }
    }

    fn shows(&self, wanted: &[u8]) -> bool {
        // SAFETY: mapped for as long as self lives; a version that is mapped never changes.
        (unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast::<u8>(), self.len) }) == wanted
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; slices of it live only inside `shows`.
        unsafe { munmap(self.base, self.len) }.unwrap();
    }
}

/// Writes enough other files to take over all of L1, twice. Some are read, so that their slabs rest and are reused.
fn fill_l1(mount: &Mount, size: usize) {
    for at in 0..2 * (64 << 20) / size {
        let (path, content) = (mount.at(&format!("other{}", at % 8)), bytes(1000 + at as u64, size));
        fs::write(&path, &content).unwrap();
        assert!(fs::read(&path).unwrap() == content);
    }
    if !memory_only() {
        mount.push_out_of_l1();
    }
}

fn is_passthrough() -> bool {
    common::mode() != Mode::Daemon
}

fn mount() -> Mount {
    Mount::with(Options::new(64, 256).arg("--slab-rest").arg("1ms"))
}

/// The kernel's RELEASE of what was closed has come. Before, this process finds the file as it wrote it, and not by
/// passthrough.
fn released(mount: &Mount) {
    mount.wait_for("private_files", |files| files == 0);
}

#[test]
fn a_mapping_outlives_its_file() {
    let mount = mount();
    let size = (3 << 20) + 100;
    let (path, old, new) = (mount.at("f"), bytes(1, size), bytes(2, size));
    fs::write(&path, &old).unwrap();
    released(&mount);
    let map = Map::new(&path);
    assert!(map.shows(&old), "right after close");
    fill_l1(&mount, size);
    assert!(map.shows(&old), "after eviction");
    fs::write(&path, &new).unwrap();
    released(&mount);
    assert!(map.shows(&old), "after replacement");
    let newer = Map::new(&path);
    fs::write(mount.at("temporary"), &old).unwrap();
    fs::rename(mount.at("temporary"), &path).unwrap();
    assert!(newer.shows(&new), "after a rename over it");
    fs::remove_file(&path).unwrap();
    fill_l1(&mount, size);
    assert!(map.shows(&old), "after unlink");
    assert!(newer.shows(&new), "of the second version after unlink");
    if is_passthrough() {
        mount.wait_for("l1_lent_bytes", |lent| lent >= 2 * size as u64);
    }
    assert!(map.shows(&old) && newer.shows(&new));
    drop((map, newer));
    mount.wait_for("l1_lent_bytes", |lent| lent == 0);
    mount.check_quiet();
}

#[test]
fn what_is_lent_is_counted_and_comes_back() {
    if !is_passthrough() {
        // The mapping keeps the file itself open: nothing is ever lent.
        return;
    }
    let mount = mount();
    let size = 2 << 20;
    let mut maps = Vec::new();
    for at in 0..8u64 {
        let (path, content) = (mount.at(&format!("f{at}")), bytes(at, size));
        fs::write(&path, &content).unwrap();
        released(&mount);
        maps.push((Map::new(&path), content));
        fs::remove_file(&path).unwrap();
    }
    let all = maps.len() * size;
    assert_eq!(mount.wait_for("l1_lent_bytes", |lent| lent >= all as u64), all as u64);
    // The rest of L1 works on, within its bound.
    fill_l1(&mount, size);
    mount.check_bounds();
    while let Some((map, content)) = maps.pop() {
        assert!(map.shows(&content), "file {}", maps.len());
        drop(map);
        mount.wait_for("l1_lent_bytes", |lent| lent == (maps.len() * size) as u64);
    }
    mount.check_quiet();
}

#[test]
fn a_partial_mapping_lends_the_whole_slab() {
    if !is_passthrough() {
        return;
    }
    let mount = mount();
    let size = 2 << 20;
    let content = bytes(7, size);
    fs::write(mount.at("f"), &content).unwrap();
    let map = Map::new(&mount.at("f"));
    let (page, length) = (4096, size - 4096);
    // SAFETY: the tail of our own mapping; only the first page is looked at from here on.
    unsafe { munmap(map.base.byte_add(page), length) }.unwrap();
    let map = Map { base: std::mem::ManuallyDrop::new(map).base, len: page };
    fs::remove_file(mount.at("f")).unwrap();
    assert_eq!(mount.wait_for("l1_lent_bytes", |lent| lent > 0), size as u64);
    fill_l1(&mount, size);
    assert!(map.shows(&content[..page]));
    drop(map);
    mount.wait_for("l1_lent_bytes", |lent| lent == 0);
    mount.check_quiet();
}

#[test]
fn l1_full_of_mapped_files_still_serves_others() {
    if memory_only() || !is_passthrough() {
        return;
    }
    let mount = mount();
    let size = 4 << 20;
    let mut maps = Vec::new();
    // More than L1 has: what does not fit is served around it.
    for at in 0..24u64 {
        let (path, content) = (mount.at(&format!("f{at}")), bytes(at, size));
        fs::write(&path, &content).unwrap();
        released(&mount);
        maps.push((Map::new(&path), content));
    }
    for (at, (map, content)) in maps.iter().enumerate() {
        assert!(map.shows(content), "mapping {at}");
        assert!(fs::read(mount.at(&format!("f{at}"))).unwrap() == *content, "read {at}");
    }
    assert_eq!(mount.stat("timeouts"), 0);
    drop(maps);
    mount.wait_for("l1_lent_bytes", |lent| lent == 0);
    mount.check_quiet();
}
