//! Files that are written in place, at random, under a small L1 and over remounts, hold what a plain array would hold.
//!
//! `KVCACHEFS_TEST_SEED` repeats a run whose seed was printed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "files are mapped and written to")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use common::{Mount, Options, bytes, memory_only};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::{MapFlags, MsFlags, ProtFlags, mmap, msync, munmap};

/// Files are of up to this size: some stay in slabs, most become slot files.
const LARGEST: u64 = 6 << 20;
const FILES: usize = 24;

struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit.max(1)
    }

    /// Mostly anywhere; often at the edges of pages, blocks and the file.
    fn place(&mut self, limit: u64) -> u64 {
        let at = self.below(limit + 1);
        let near = match self.below(8) {
            0 => at / 4096 * 4096,
            1 => at / 262_144 * 262_144,
            2 => (at / 262_144 * 262_144).saturating_sub(1),
            3 => at / 262_144 * 262_144 + 1,
            4 => limit,
            _ => at,
        };
        near.min(limit)
    }

    fn length(&mut self) -> u64 {
        match self.below(6) {
            0 => 1 + self.below(64),
            1 => 4096,
            2 => 262_144,
            3 => 1 + self.below(900_000),
            _ => 1 + self.below(70_000),
        }
    }
}

/// A file and what must be in it.
struct Modelled {
    path: PathBuf,
    file: Option<File>,
    model: Vec<u8>,
}

impl Modelled {
    fn open(&mut self) -> &File {
        let path = &self.path;
        self.file.get_or_insert_with(|| OpenOptions::new().read(true).write(true).open(path).unwrap())
    }

    fn write(&mut self, dice: &mut Dice) -> String {
        let offset = dice.place(LARGEST - 1_000_000);
        let content = bytes(dice.roll(), dice.length() as usize);
        let end = offset as usize + content.len();
        self.open().write_all_at(&content, offset).unwrap();
        if self.model.len() < end {
            self.model.resize(end, 0);
        }
        self.model[offset as usize..end].copy_from_slice(&content);
        format!("write {offset}..{end}")
    }

    fn read(&mut self, dice: &mut Dice) -> String {
        let offset = dice.place(self.model.len() as u64) as usize;
        let mut seen = vec![0xaa; dice.length() as usize];
        let mut count = 0;
        while let more @ 1.. = self.open().read_at(&mut seen[count..], (offset + count) as u64).unwrap() {
            count += more;
        }
        let end = self.model.len().min(offset + seen.len());
        self.compare(&seen[..count], offset, end);
        format!("read {offset}..{end}")
    }

    fn compare(&self, seen: &[u8], from: usize, to: usize) {
        let path = self.path.display();
        assert_eq!(seen.len(), to - from, "{path}: {from}..{to} of {} bytes: a short read", self.model.len());
        let wrong: Vec<usize> = (from..to).filter(|&at| seen[at - from] != self.model[at]).collect();
        if let (Some(first), Some(last)) = (wrong.first(), wrong.last()) {
            panic!(
                "{path}: {} bytes between {first} and {last} of {} are wrong",
                wrong.len(),
                self.model.len()
            );
        }
    }

    fn truncate(&mut self, dice: &mut Dice) -> String {
        let most = if dice.below(2) == 0 { self.model.len() as u64 } else { LARGEST };
        let size = dice.place(most);
        self.open().set_len(size).unwrap();
        self.model.resize(size as usize, 0);
        format!("truncate {size}")
    }

    fn allocate(&mut self, dice: &mut Dice) -> String {
        let (offset, len) = (dice.place(LARGEST - 1_000_000), dice.length() as usize);
        let (mode, zeros) = match dice.below(4) {
            0 => (FallocateFlags::empty(), false),
            1 => (FallocateFlags::FALLOC_FL_KEEP_SIZE, false),
            2 => (FallocateFlags::FALLOC_FL_ZERO_RANGE, true),
            _ => (FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, true),
        };
        fallocate(self.open(), mode, offset as i64, len as i64).unwrap();
        let end = offset as usize + len;
        if !mode.contains(FallocateFlags::FALLOC_FL_KEEP_SIZE) && self.model.len() < end {
            self.model.resize(end, 0);
        }
        let (from, to) = ((offset as usize).min(self.model.len()), end.min(self.model.len()));
        if zeros {
            self.model[from..to].fill(0);
        }
        format!("fallocate {mode:?} {offset}..{end}")
    }

    fn write_mapped(&mut self, dice: &mut Dice) -> String {
        let Some(length) = NonZeroUsize::new(self.model.len()) else { return "map nothing".into() };
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = match unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, self.open(), 0) } {
            Ok(base) => base,
            // Files that the daemon serves cannot be mapped shared; that is said at once, not by lost bytes.
            Err(Errno::ENODEV) => return "map refused".into(),
            Err(error) => panic!("{}: mmap: {error}", self.path.display()),
        };
        let from = dice.place(length.get() as u64 - 1) as usize;
        let to = length.get().min(from + dice.length() as usize);
        let content = bytes(dice.roll(), to - from);
        // SAFETY: the range is inside the mapping, and nobody else uses it.
        unsafe {
            let seen = std::slice::from_raw_parts_mut(base.as_ptr().cast::<u8>(), length.get());
            seen[from..to].copy_from_slice(&content);
            msync(base, length.get(), MsFlags::MS_SYNC).unwrap();
            munmap(base, length.get()).unwrap();
        }
        self.model[from..to].copy_from_slice(&content);
        format!("map and write {from}..{to}")
    }

    fn check(&mut self, when: &str) {
        assert_eq!(fs::metadata(&self.path).unwrap().len(), self.model.len() as u64, "size {when}");
        let seen = fs::read(&self.path).unwrap();
        assert_eq!(seen.len(), self.model.len(), "{when}");
        self.compare(&seen, 0, seen.len());
    }

    fn step(&mut self, dice: &mut Dice) -> String {
        match dice.below(20) {
            0..8 => self.write(dice),
            8..13 => self.read(dice),
            13 => self.truncate(dice),
            14 | 15 => self.allocate(dice),
            16 => {
                self.open().sync_all().unwrap();
                "fsync".into()
            }
            17 => self.write_mapped(dice),
            18 => {
                self.check("while it is open");
                "check".into()
            }
            _ => {
                self.file = None;
                "close".into()
            }
        }
    }
}

/// A seed, and the steps so far, which are printed if the test fails.
struct Story(u64, Vec<String>);

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("KVCACHEFS_TEST_SEED={}", self.0);
            self.1.iter().rev().take(60).rev().for_each(|line| eprintln!("{line}"));
        }
    }
}

/// `exclusive`: files begin as private ones, which are published whole; else they are shared from the start.
fn random_steps(exclusive: bool, options: Options, seed: u64) {
    let full = std::env::var_os("KVCACHEFS_TEST_FULL").is_some();
    let (rounds, steps) = if full { (20, 1500) } else { (3, 400) };
    println!("KVCACHEFS_TEST_SEED={seed}");
    let mut story = Story(seed, Vec::new());
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut mount = Mount::with(options);
    let mut files: Vec<Modelled> = (0..FILES)
        .map(|at| {
            let path = mount.at(&format!("f{at}"));
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            let file =
                if exclusive { options.create_new(true) } else { options.create(true).truncate(false) }
                    .open(&path)
                    .unwrap();
            Modelled { path, file: Some(file), model: Vec::new() }
        })
        .collect();
    for round in 0..rounds {
        for step in 0..steps {
            let at = dice.below(FILES as u64) as usize;
            let what = files[at].step(&mut dice);
            story.1.push(format!("{round}.{step} f{at}: {what}"));
        }
        files.iter_mut().for_each(|file| file.file = None);
        files.iter_mut().for_each(|file| file.check("after a round"));
        mount.check_quiet();
        if !memory_only() {
            mount.restart();
            story.1.push(format!("{round} restart"));
            files.iter_mut().for_each(|file| file.check("after a restart"));
        }
    }
    if !memory_only() {
        assert!(mount.stat("read_l2_bytes") > 0, "nothing came from L2");
    }
    mount.check_quiet();
}

fn seed() -> u64 {
    std::env::var("KVCACHEFS_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| u64::from(std::process::id()) << 32 | u64::from(rand()))
}

fn rand() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() as u32
}

/// L1 holds half of the files; without L2 it has to hold them all.
fn small() -> Options {
    if memory_only() { Options::new(512, 0) } else { Options::new(64, 512) }
        .arg("--slab-file-max")
        .arg("2MiB")
        .arg("--slab-rest")
        .arg("1ms")
}

#[test]
fn shared_files_hold_what_was_written() {
    random_steps(false, small(), seed());
}

#[test]
fn private_files_hold_what_was_written() {
    random_steps(true, small(), seed());
}

#[test]
fn files_in_slabs_hold_what_was_written() {
    // In memory only each file may have a slab for its readers beside the one that is being written.
    let l1 = if memory_only() { 512 } else { 64 };
    let options = Options::new(l1, 512).arg("--slab-file-max").arg("8MiB").arg("--slab-rest").arg("1ms");
    random_steps(true, options, seed());
}
