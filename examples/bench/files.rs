//! The files that clients write and read, and threads that do so.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::failure::{Context, Failure, Result};
use crate::interrupt;

/// Files of one size in one directory.
#[derive(Clone, Debug)]
pub struct Files {
    dir: PathBuf,
    pub count: usize,
    pub bytes: usize,
}

impl Files {
    /// `total_mib` of files of `each_mib`, to be written.
    pub fn plan(dir: &Path, total_mib: u64, each_mib: u64) -> Self {
        let count = (total_mib / each_mib).max(1);
        Self { dir: dir.to_owned(), count: count as usize, bytes: (each_mib << 20) as usize }
    }

    pub fn path(&self, at: usize) -> PathBuf {
        self.dir.join(format!("{:04}.kv", at % self.count))
    }

    /// What `threads` threads write from: made before anything is timed.
    pub fn buffers(&self, threads: usize) -> Vec<Mutex<Vec<u8>>> {
        let mut bytes = vec![0; self.bytes];
        fill(&mut bytes);
        (0..threads).map(|_| Mutex::new(bytes.clone())).collect()
    }

    /// Writes them all, from a thread for each of `buffers`.
    pub fn write(&self, buffers: &[Mutex<Vec<u8>>]) -> Result<()> {
        fs::create_dir_all(&self.dir).context(|| format!("cannot make {}", self.dir.display()))?;
        let next = AtomicU64::new(0);
        each(buffers.len(), |thread| {
            // Nobody else takes it: it is the thread's own.
            let mut bytes = buffers[thread].lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed) as usize;
                if at >= self.count {
                    return Ok(());
                }
                interrupt::check()?;
                bytes[..8].copy_from_slice(&(at as u64).to_le_bytes());
                let path = self.path(at);
                let file = OpenOptions::new().write(true).create(true).truncate(true).open(&path);
                file.and_then(|mut file| file.write_all(&bytes))
                    .context(|| format!("cannot write {}", path.display()))?;
            }
        })
        .map(|_| ())
    }

    pub fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.dir).context(|| format!("cannot remove {}", self.dir.display()))
    }

    /// Opens, reads and closes one file; whose it is, its first bytes tell.
    pub fn read(&self, at: usize, flags: i32, buffer: &mut [u8]) -> Result<()> {
        let path = self.path(at);
        let failed = || format!("cannot read {}", path.display());
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open(&path).context(failed)?;
        file.read_exact(&mut buffer[..self.bytes]).context(failed)?;
        self.check(at, buffer)
    }

    /// A benchmark that reads the wrong thing measures nothing.
    pub fn check(&self, at: usize, bytes: &[u8]) -> Result<()> {
        if bytes[..8] == ((at % self.count) as u64).to_le_bytes() {
            return Ok(());
        }
        Err(Failure::new(format!("{} has other bytes than were written", self.path(at).display())))
    }

    pub fn open(&self, at: usize) -> Result<File> {
        let path = self.path(at);
        File::open(&path).context(|| format!("cannot open {}", path.display()))
    }
}

/// Bytes that no device or file system can make short work of.
pub fn fill(bytes: &mut [u8]) {
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

/// Runs `work` on `threads` threads, and adds up what they return.
pub fn each<T: Send>(threads: usize, work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(Failure::new("a client panicked".into()))))
            .collect()
    })
}

/// Has `threads` threads repeat `step` for `time`, and returns what they did a second. `step` gets the number of the
/// repetition, different for every thread, and the thread's buffer, and returns how much it did.
pub fn rate(
    threads: usize,
    time: Duration,
    buffer_bytes: usize,
    step: impl Fn(usize, &mut [u8]) -> Result<u64> + Sync,
) -> Result<f64> {
    let start = Barrier::new(threads);
    let next = AtomicU64::new(0);
    let rates = each(threads, |_| {
        let mut buffer = vec![1; buffer_bytes];
        start.wait();
        let begin = Instant::now();
        let mut done = 0;
        while begin.elapsed() < time {
            interrupt::check()?;
            done += step(next.fetch_add(1, Ordering::Relaxed) as usize, &mut buffer)?;
        }
        // Each thread's own rate, so that none counts the time in which others finish their last step.
        Ok(done as f64 / begin.elapsed().as_secs_f64())
    })?;
    Ok(rates.iter().sum())
}
