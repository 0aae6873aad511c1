//! One file of memory and its mapping.
//!
//! Only one descriptor of the file is kept: on it a write lease
//! tells whether anybody else has the slab open or mapped (fact 5). The mapping is as long as the largest slab may
//! ever be and is made once; growing and shrinking only change the length of the file below it, so the address of a
//! slab never changes. Whatever lies beyond the file's length must not be touched, and [`Slab::span`] sees to that.
#![allow(unsafe_code, reason = "mappings are made and unmade here")]

use std::any::Any;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munlock, munmap};
use nix::sys::signal::{SigHandler, Signal, signal};
use parking_lot::Mutex;

use super::pool::{Owner, Pool};
use super::shm::{HUGE, Shm};
use crate::memory::{PAGE, Region, RegionId, Span};

/// Bytes of a huge page.
const HUGE_BYTES: usize = HUGE as usize * PAGE;

static NEXT_REGION: AtomicU64 = AtomicU64::new(1);

/// The memory itself. With its last share it is unmapped and freed, which takes as long as it is large.
pub(super) struct Memory {
    file: File,
    base: NonNull<u8>,
    reserved: usize,
    /// See [`Lock::Pages`].
    locks_pages: bool,
    /// May have huge pages.
    huge: bool,
    pages: AtomicU32,
    region: AtomicU64,
    /// Engines have been told of it.
    announced: AtomicBool,
    /// Has been opened in passthrough since it was handed out.
    lent: AtomicBool,
    /// Has been opened in passthrough since its pages were fresh.
    seen: AtomicBool,
    /// See [`Memory::start_trim`].
    trimming: AtomicBool,
    last_release: Mutex<Option<Instant>>,
    pub(super) owner: Mutex<Option<Owner>>,
    backing: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

// SAFETY: the mapping belongs to this value alone and is reached only through raw copies; everything else in it is
// Send and Sync.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// What of a slab is locked. The limit counts what is locked, whether there is memory behind it or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lock {
    Nothing,
    /// All that is mapped, once and for all: for those who have no limit.
    Reservation,
    /// The pages that are there. It takes a second mapping, and a call for every change of size.
    Pages,
}

impl Memory {
    pub(super) fn new(shm: &Shm, pages: u32, reserved: usize, lock: Lock) -> io::Result<Self> {
        let (file, huge) = shm.file(pages)?;
        file.set_len(u64::from(pages) * PAGE as u64)?;
        let reserved = reserved.max(pages as usize * PAGE).next_multiple_of(PAGE);
        let base = map_aligned(&file, reserved)?;
        let memory = Self {
            file,
            base,
            reserved,
            locks_pages: lock == Lock::Pages,
            huge,
            pages: AtomicU32::new(pages),
            region: AtomicU64::new(NEXT_REGION.fetch_add(1, Ordering::Relaxed)),
            announced: AtomicBool::new(false),
            lent: AtomicBool::new(false),
            seen: AtomicBool::new(false),
            trimming: AtomicBool::new(false),
            last_release: Mutex::new(None),
            owner: Mutex::new(None),
            backing: Mutex::new(None),
        };
        match lock {
            Lock::Nothing => {}
            Lock::Reservation => lock_on_fault(memory.base, reserved)?,
            Lock::Pages => lock_on_fault(memory.base, memory.bytes() as usize)?,
        }
        Ok(memory)
    }

    pub(super) fn pages(&self) -> u32 {
        self.pages.load(Ordering::Acquire)
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.pages()) * PAGE as u64
    }

    pub(super) fn region(&self) -> Region {
        Region {
            id: RegionId(self.region.load(Ordering::Acquire)),
            base: self.base.as_ptr() as usize,
            len: self.bytes() as usize,
        }
    }

    /// Changes the number of pages. The caller is alone with the slab.
    pub(super) fn set_pages(&self, pages: u32) -> io::Result<()> {
        if pages as usize * PAGE > self.reserved {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = pages as usize * PAGE;
        if self.locks_pages && self.bytes() as usize > bytes {
            // SAFETY: the range is inside our own mapping, and unlocking changes no contents.
            let _ = unsafe { munlock(self.base.cast().byte_add(bytes), self.bytes() as usize - bytes) };
        } else if self.locks_pages {
            lock_on_fault(self.base, bytes)?;
        }
        if self.huge && !pages.is_multiple_of(HUGE) {
            // Or khugepaged, which sees the length of the mapping and not that of the file, would make a huge page of what
            // is left at the end.
            // SAFETY: advice for our own mapping; it changes no contents.
            let _ = unsafe { madvise(self.base.cast(), self.reserved, MmapAdvise::MADV_NOHUGEPAGE) };
        }
        self.file.set_len(bytes as u64)?;
        self.pages.store(pages, Ordering::Release);
        // A fixed buffer still knows the old pages (fact 9).
        self.region.store(NEXT_REGION.fetch_add(1, Ordering::Relaxed), Ordering::Release);
        Ok(())
    }

    /// Makes the whole last page part of the file again, zeros included, as long as nobody reads it.
    pub(super) fn whole_pages(&self) -> io::Result<()> {
        self.file.set_len(self.bytes())
    }

    /// Whether engines know of it, and whether they shall from now on.
    pub(super) fn set_announced(&self, on: bool) -> bool {
        self.announced.swap(on, Ordering::AcqRel)
    }

    /// A huge page of which a part is to go stays whole while an engine has it pinned.
    pub(super) fn is_pinned_whole(&self) -> bool {
        self.huge && self.announced.load(Ordering::Acquire)
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent.load(Ordering::Acquire)
    }

    pub(super) fn was_seen(&self) -> bool {
        self.seen.load(Ordering::Acquire)
    }

    /// Whether it was not before.
    pub(super) fn set_lent(&self) -> bool {
        self.seen.store(true, Ordering::Release);
        !self.lent.swap(true, Ordering::AcqRel)
    }

    /// Whether it takes more memory than is counted, or is being cut to that. A client may have its mapping put into huge
    /// pages (MADV_COLLAPSE), the last of which reaches past the end of the file. Of what nobody has ([`Memory::quiet`]),
    /// nobody can make more.
    pub(super) fn takes_more(&self) -> bool {
        self.trimming.load(Ordering::Acquire) || self.takes_more_than(self.bytes())
    }

    /// Whether it is to be cut by the caller, who calls [`Memory::trim`] and [`Memory::end_trim`]. Until then it counts as
    /// one that takes more, whatever it does, so that nobody uses it again.
    pub(super) fn start_trim(&self) -> bool {
        self.takes_more_than(self.bytes()) && !self.trimming.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end_trim(&self) {
        self.trimming.store(false, Ordering::Release);
    }

    fn takes_more_than(&self, bytes: u64) -> bool {
        self.file.metadata().is_ok_and(|found| found.blocks() * 512 > bytes)
    }

    /// Cuts what takes more than is counted, and locks again what was moved. Whether there was something to cut, and it
    /// is gone; pages that somebody has pinned stay until a later try.
    ///
    /// It takes its time, so the caller holds no lock, but a share in the memory. The number of pages does not change
    /// meanwhile, which it does in nobody's hands but its one owner's, and not while it is lent. What has no owner gets none
    /// between [`Memory::start_trim`] and [`Memory::end_trim`].
    pub(super) fn trim(&self) -> bool {
        /// Since kernel 5.14.
        const MADV_POPULATE_READ: i32 = 22;
        let bytes = self.bytes();
        if !self.takes_more_than(bytes) {
            return false;
        }
        let beyond = bytes..bytes.next_multiple_of(HUGE_BYTES as u64);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (from, len) = (beyond.start.cast_signed(), (beyond.end - beyond.start).cast_signed());
        if fallocate(&self.file, hole, from, len).is_err() || self.takes_more_than(bytes) {
            return false;
        }
        // A fault in a mapping that is locked locks. All of it: no huge page that was made is in our mapping any more,
        // whether it was cut or not, and where there was none made, there is little to do.
        // SAFETY: the range is inside the mapping and inside the file; populating changes no contents.
        unsafe { libc::madvise(self.base.as_ptr().cast(), bytes as usize, MADV_POPULATE_READ) };
        true
    }

    /// It is used again with its pages: nobody has it, but who had it is not forgotten.
    pub(super) fn take_from_rest(&self) {
        self.lent.store(false, Ordering::Release);
    }

    pub(super) fn last_release(&self) -> Option<Instant> {
        *self.last_release.lock()
    }

    pub(super) fn note_release(&self) {
        *self.last_release.lock() = Some(Instant::now());
    }

    /// Whether nobody else has it open or mapped.
    pub(super) fn quiet(&self) -> bool {
        let fd = self.file.as_raw_fd();
        // SAFETY: F_SETLEASE takes two integers and touches no memory of ours.
        let granted = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == 0;
        if granted {
            // SAFETY: as above. The question is answered; a lease that is held would only disturb the next open.
            unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        }
        granted
    }

    /// Faults all pages in, so that the first writer does not have to.
    pub(super) fn populate(&self) {
        /// Since kernel 5.14.
        const MADV_POPULATE_WRITE: i32 = 23;
        // SAFETY: the range is inside the mapping and inside the file; populating changes no contents.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes() as usize, MADV_POPULATE_WRITE) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The kernel's backing reference goes before the file does.
        self.backing.lock().take();
        // SAFETY: mapped in `new` with this length, and nothing refers to it any more: every span holds the
        // `Arc<Inner>` that has a share in this value, and this was the last share.
        if let Err(error) = unsafe { munmap(self.base.cast::<c_void>(), self.reserved) } {
            log::error!("unmapping a slab: {error}");
        }
    }
}

/// Maps a file from an address at which a huge page may lie. Elsewhere the kernel maps huge pages in pieces, which it
/// does not lock; not even if the mapping is locked anew.
fn map_aligned(file: &File, length: usize) -> io::Result<NonNull<u8>> {
    let room = length.checked_add(HUGE_BYTES).and_then(NonZeroUsize::new);
    let (room, length) =
        room.zip(NonZeroUsize::new(length)).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let nothing = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody else knows and nobody can access.
    let start = unsafe { mmap_anonymous(None, room, ProtFlags::PROT_NONE, nothing) }?;
    let before = (start.as_ptr() as usize).next_multiple_of(HUGE_BYTES) - start.as_ptr() as usize;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let at = NonZeroUsize::new(start.as_ptr() as usize + before);
    let fixed = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: it takes the place of a part of the mapping above: less than a huge page is before it, and the room is
    // longer by one.
    let base = match unsafe { mmap(at, length, access, fixed, file, 0) } {
        Ok(base) => base,
        Err(error) => {
            // SAFETY: mapped above with this length, and used for nothing.
            let _ = unsafe { munmap(start, room.get()) };
            return Err(error.into());
        }
    };
    // SAFETY: still inside the room, at its end at most.
    let behind = unsafe { base.byte_add(length.get()) };
    for (rest, len) in [(start, before), (behind, HUGE_BYTES - before)] {
        if len > 0 {
            // SAFETY: what is left of the room, which nobody uses.
            unsafe { munmap(rest, len) }?;
        }
    }
    Ok(base.cast())
}

/// Locks pages as they come into being. One call for the whole reservation keeps it one mapping.
fn lock_on_fault(base: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: locking changes no contents; the range is our own mapping.
    let result = unsafe { libc::mlock2(base.as_ptr().cast(), len, libc::MLOCK_ONFAULT as _) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether this process may lock `len` bytes, tried with address space that has no memory. (The capability alone does
/// not tell: inside a user namespace it does not lift the limit.)
pub(super) fn may_lock(len: usize) -> bool {
    let Some(length) = NonZeroUsize::new(len) else { return true };
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody else knows and nobody can access.
    let Ok(base) = (unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }) else {
        return false;
    };
    let locked = lock_on_fault(base.cast(), len).is_ok();
    // SAFETY: mapped just above with this length.
    let _ = unsafe { munmap(base, len) };
    locked
}

/// Sets how the process takes a signal.
pub(super) fn set_signal(which: Signal, how: SigHandler) -> io::Result<()> {
    // SAFETY: ignoring a signal installs no handler, so nothing runs in signal context.
    unsafe { signal(which, how) }?;
    Ok(())
}

/// What a slab's shares share: its memory, and the way back to the pool.
pub(super) struct Inner {
    memory: Option<Arc<Memory>>,
    pool: Weak<Pool>,
}

impl Inner {
    /// See [`Memory::trim`].
    pub(super) fn trim(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.trim())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let (Some(memory), Some(pool)) = (self.memory.take(), self.pool.upgrade()) {
            pool.take_back(memory);
        }
    }
}

/// A share of a slab.
#[derive(Clone)]
pub struct Slab(Arc<Inner>);

impl Slab {
    pub(super) fn new(memory: Arc<Memory>, pool: &Arc<Pool>) -> Self {
        Self(Arc::new(Inner { memory: Some(memory), pool: Arc::downgrade(pool) }))
    }

    /// A slab that does not go back to the pool by itself: an arena's.
    pub(super) fn unpooled(memory: Arc<Memory>) -> Self {
        Self(Arc::new(Inner { memory: Some(memory), pool: Weak::new() }))
    }

    fn memory(&self) -> &Memory {
        self.0.memory.as_ref().unwrap_or_else(|| unreachable!("taken only in drop"))
    }

    pub fn pages(&self) -> u32 {
        self.memory().pages()
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.memory().bytes()
    }

    /// # Panics
    /// If the range leaves the slab.
    pub fn span(&self, range: Range<usize>) -> Span {
        let memory = self.memory();
        assert!(
            range.start <= range.end && range.end as u64 <= memory.bytes(),
            "{range:?} of a slab of {} pages",
            memory.pages()
        );
        // SAFETY: the start is inside the mapping (asserted).
        let start = unsafe { memory.base.add(range.start) };
        // SAFETY: the range is inside the file, so touching it does not fault; it stays so because a slab shrinks
        // only in the hands of its one owner, who has no transfer on it. The Arc keeps the mapping.
        unsafe { Span::new(start, range.len(), Some(memory.region().id), self.0.clone()) }
    }

    pub fn region(&self) -> Region {
        self.memory().region()
    }

    pub fn backing_fd(&self) -> BorrowedFd<'_> {
        self.memory().file.as_fd()
    }

    /// Where the fs layer keeps the kernel's reference to the backing file, for the slab's life.
    pub fn backing_slot(&self) -> &Mutex<Option<Box<dyn Any + Send + Sync>>> {
        &self.memory().backing
    }

    /// Makes the file behind the slab exactly `bytes` long: passthrough shows its length as the file's (fact 7). What
    /// is left of the last page reads as zeros.
    pub fn set_len(&self, bytes: u64) -> io::Result<()> {
        let memory = self.memory();
        if bytes.div_ceil(PAGE as u64) != u64::from(memory.pages()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // The kernel zeros the rest of the page when a file is cut inside it.
        let rest = (memory.bytes() - bytes) as usize;
        if rest > 0 {
            self.span(bytes as usize..memory.bytes() as usize).zero(0..rest);
        }
        memory.file.set_len(bytes)
    }

    /// Lets engines register the slab as a fixed buffer. That faults all its pages in, so it is said only of slabs
    /// whose size will not change soon.
    pub fn announce(&self) {
        if let Some(pool) = self.0.pool.upgrade() {
            pool.announce(self.memory());
        }
    }

    /// Whether it could grow to that many pages, if there were room.
    pub fn can_grow_to(&self, pages: u32) -> bool {
        !self.is_lent() && pages as usize * PAGE <= self.memory().reserved
    }

    /// Grows or shrinks in place, within the budget. Only for slabs that no client can have open or mapped.
    pub fn resize(&self, pages: u32) -> bool {
        match self.0.pool.upgrade() {
            Some(pool) if !self.is_lent() => pool.resize(self.memory(), pages),
            _ => false,
        }
    }

    /// Clients have been given the slab to read, as a file of `owner`. If that is no longer whom it was taken for (the
    /// file changed hands), its pages are used again for nobody.
    pub fn mark_lent(&self, owner: Owner) {
        let mut taken_for = self.memory().owner.lock();
        if *taken_for != Some(owner) {
            *taken_for = None;
        }
        drop(taken_for);
        if self.memory().set_lent()
            && let Some(pool) = self.0.pool.upgrade()
        {
            pool.watch(Arc::downgrade(&self.0));
        }
    }

    pub fn is_lent(&self) -> bool {
        self.memory().is_lent()
    }

    /// The last handle on it was released just now.
    pub fn touch_release(&self) {
        self.memory().note_release();
    }
}

/// Where the mapping that begins at `base` ends, and the kernel's flags of it.
#[cfg(test)]
pub(super) fn mapping(base: usize) -> (usize, Vec<String>) {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{base:x}-")));
    let range = lines.next().expect("a mapping").split([' ', '-']).nth(1).expect("its end");
    let end = usize::from_str_radix(range, 16).expect("a number");
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).expect("its flags");
    (end, flags.split(' ').map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of the mapping that begins at `base`, and whether it is locked.
    fn pages_and_lock(base: usize) -> (usize, bool) {
        let (end, flags) = mapping(base);
        ((end - base) / PAGE, flags.iter().any(|flag| flag == "lo"))
    }

    #[test]
    fn under_a_limit_just_the_pages_are_locked() {
        let memory = Memory::new(&Shm::new(false), 4, 64 * PAGE, Lock::Pages).expect("256 KiB of memory");
        let base = memory.region().base;
        assert_eq!(pages_and_lock(base), (4, true));
        for pages in [16, 3, 64, 1] {
            memory.set_pages(pages).expect("a new size");
            assert_eq!(pages_and_lock(base), (pages as usize, true));
        }
        assert!(memory.set_pages(65).is_err(), "beyond what is reserved");
    }

    #[test]
    fn address_space_without_memory_tells_what_may_be_locked() {
        assert!(may_lock(PAGE));
        assert!(!may_lock(usize::MAX / 2), "there is no such address space");
    }
}
