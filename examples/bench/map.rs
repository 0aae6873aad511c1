//! A file's bytes in memory, as a client maps them.
#![allow(unsafe_code, reason = "mmap has no safe wrapper")]

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A shared, read-only mapping of a whole file.
#[derive(Debug)]
pub struct Map {
    at: NonNull<std::ffi::c_void>,
    len: usize,
}

impl Map {
    pub fn of(file: &File, len: usize) -> io::Result<Self> {
        let length = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the kernel chooses the address, so no memory that is in use is replaced.
        let at = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self { at, len })
    }

    /// Copies everything to `to`, as a client does that hands the bytes on.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert!(to.len() >= self.len, "the buffer is too small");
        // SAFETY: the mapping is readable for `len` bytes and `to` is as large; the files of a benchmark are not cut
        // while they are mapped, and whoever wrote them has finished.
        unsafe { std::ptr::copy_nonoverlapping(self.at.as_ptr().cast::<u8>(), to.as_mut_ptr(), self.len) };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing points into it any more.
        if let Err(error) = unsafe { munmap(self.at, self.len) } {
            eprintln!("bench: munmap: {error}");
        }
    }
}
