//! Whatever opens are mixed (of files in L1 and in L2, to read, write, replace, map and truncate), none fails: no EIO
//! where modes meet, no ESTALE from a second look (rule R3b). 8,000 opens; KVCACHEFS_TEST_FULL=1 makes 160,000.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "mappings are made and looked at")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use client::Watchdog;
use common::{Mount, Options, memory_only};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

const THREADS: u64 = 8;
const PAGE: usize = 4096;
/// Sizes of files: in chunks, around a block, with slabs.
const SIZES: [usize; 5] = [20_480, 262_144, 300_000, 1_050_000, 2_097_152];
/// Files that are used all the time, and those that are mostly in L2.
const WARM: u64 = 40;
const COLD: u64 = 120;

fn opens() -> u64 {
    match std::env::var("KVCACHEFS_TEST_FULL") {
        Ok(full) if full == "1" => 160_000,
        _ => 8_000,
    }
}

fn size_of(file: u64) -> usize {
    SIZES[(file % SIZES.len() as u64) as usize]
}

/// Every page begins with the number of its file; what follows is the version.
fn page(file: u64, version: u64) -> Vec<u8> {
    let mut page = (file + 1).to_le_bytes().to_vec();
    page.resize(PAGE, version as u8);
    page
}

fn content(file: u64, version: u64, size: usize) -> Vec<u8> {
    let mut bytes = page(file, version).repeat(size.div_ceil(PAGE));
    bytes.truncate(size);
    bytes
}

/// Every page is of this file, or was never written; and each page is of one version.
fn check(file: u64, bytes: &[u8], what: &str) {
    for (at, page) in bytes.chunks(PAGE).enumerate() {
        if page.len() < 16 {
            continue;
        }
        let number = u64::from_le_bytes(page[..8].try_into().unwrap());
        assert!(
            number == file + 1 || page.iter().all(|&byte| byte == 0),
            "{what}: file {file}, page {at}: {number}"
        );
    }
}

struct Mapping {
    address: NonNull<c_void>,
    len: usize,
}

impl Mapping {
    /// The whole pages of a file, if it has any.
    fn whole(file: &File, write: bool) -> io::Result<Option<Self>> {
        let len = file.metadata()?.len() as usize / PAGE * PAGE;
        let Some(size) = NonZeroUsize::new(len) else { return Ok(None) };
        let protection =
            if write { ProtFlags::PROT_READ | ProtFlags::PROT_WRITE } else { ProtFlags::PROT_READ };
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Some(Self { address, len }))
    }

    /// The bytes as they are now; others may be writing.
    fn read(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        // SAFETY: `len` bytes are mapped for reading while `self` lives; nothing is assumed about their values.
        unsafe {
            std::ptr::copy_nonoverlapping(self.address.as_ptr().cast::<u8>(), out.as_mut_ptr(), self.len)
        };
        out
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: the range was just checked and is mapped for writing.
        unsafe {
            let to = self.address.as_ptr().cast::<u8>().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used any more.
        unsafe { munmap(self.address, self.len) }.unwrap();
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// One open of `file` and what its kind of client does with it.
fn one(mount: &Mount, file: u64, random: &mut Random) -> io::Result<&'static str> {
    let path = mount.at(&format!("d{}/f{file}", file % 4));
    let (size, version) = (size_of(file), random.below(200) + 1);
    let at = random.below((size / PAGE) as u64) * PAGE as u64;
    match random.below(12) {
        0..4 => {
            let open = File::open(&path)?;
            let mut bytes = vec![0; PAGE];
            let len = open.read_at(&mut bytes, at)?;
            check(file, &bytes[..len], "one page");
            Ok("read")
        }
        4 => {
            check(file, &fs::read(&path)?, "all of it");
            Ok("read all")
        }
        5..7 => {
            let open = File::open(&path)?;
            // What another thread is still writing is shorter. Truncation never takes bytes from an open version.
            let Some(mapping) = Mapping::whole(&open, false)? else { return Ok("map nothing") };
            drop(open);
            check(file, &mapping.read(), "mapped");
            Ok("map")
        }
        7 => {
            let open = File::options().read(true).write(true).open(&path)?;
            open.write_all_at(&page(file, version), at)?;
            Ok("write in place")
        }
        8 => {
            let open = File::options().read(true).write(true).open(&path)?;
            let Some(mapping) = Mapping::whole(&open, true)? else { return Ok("map nothing") };
            drop(open);
            mapping.write(at as usize % mapping.len / PAGE * PAGE, &page(file, version));
            drop(mapping);
            Ok("map to write")
        }
        9 => {
            let mut open = File::options().write(true).truncate(true).open(&path)?;
            open.write_all(&content(file, version, size))?;
            Ok("replace")
        }
        10 => {
            fs::write(&path, content(file, version, size))?;
            Ok("create or replace")
        }
        _ => {
            // To write, and then nothing is written.
            let open = File::options().write(true).open(&path)?;
            assert!(open.metadata()?.is_file());
            Ok("open to write")
        }
    }
}

#[test]
fn no_mix_of_opens_fails() {
    let mount = Mount::with(Options::new(96, 512));
    let _watchdog = Watchdog::within(&mount, Duration::from_secs(if opens() > 8_000 { 1200 } else { 120 }));
    // Without L2 what does not fit is gone.
    let files = if memory_only() { WARM } else { WARM + COLD };
    for dir in 0..4 {
        fs::create_dir(mount.at(&format!("d{dir}"))).unwrap();
    }
    for file in 0..files {
        let path = mount.at(&format!("d{}/f{file}", file % 4));
        fs::write(path, content(file, 0, size_of(file))).unwrap();
    }
    mount.drain();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (mount, done) = (&mount, &done);
            scope.spawn(move || {
                let mut random = Random(0x9e37_79b9_7f4a_7c15 + thread);
                while done.fetch_add(1, Ordering::Relaxed) < opens() {
                    let warm = random.below(4) > 0 || files == WARM;
                    let file = if warm { random.below(WARM) } else { WARM + random.below(files - WARM) };
                    match one(mount, file, &mut random) {
                        Ok(_) => {}
                        Err(error)
                            if memory_only()
                                && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StorageFull) => {}
                        Err(error) => {
                            done.store(u64::MAX >> 1, Ordering::Relaxed);
                            panic!("file {file}: {error}");
                        }
                    }
                }
            });
        }
    });
    if !memory_only() {
        for file in 0..files {
            let path = mount.at(&format!("d{}/f{file}", file % 4));
            let bytes = fs::read(path).unwrap();
            assert_eq!(bytes.len(), size_of(file), "file {file}");
            check(file, &bytes, "at the end");
        }
        mount.drain();
    }
    assert!(mount.stat("copies_on_write") > 0, "no writer met a reader");
    assert!(memory_only() || mount.stat("promotions") > 0, "nothing came from the device");
    mount.wait_for("private_files", |files| files == 0);
    mount.wait_for("l1_lent_bytes", |bytes| bytes == 0);
    mount.check_quiet();
}
