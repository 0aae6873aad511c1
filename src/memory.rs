//! Memory that outlives whoever asked for it.
//!
//! A read or write that the kernel carries out against our memory may still be running when the
//! client that caused it is gone (rule R10). So memory moves through the daemon as a [`Span`]: an
//! address range together with a share in whatever keeps it mapped. Whoever holds a span holds the
//! memory; the last one to let go gives it back.
#![allow(unsafe_code, reason = "raw address ranges live here, and in few other places")]

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// The alignment of everything that takes part in direct I/O, and the size of a page.
pub const PAGE: usize = 4096;

/// Names a range of memory that an I/O engine may have registered as a fixed buffer.
///
/// Ids are never used twice, so a registration that outlives its memory can never be taken for
/// that of newer memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RegionId(pub u64);

/// A registered region and where in it a span lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    pub id: RegionId,
    /// First address of the region, not of the span.
    pub base: usize,
    pub len: usize,
}

/// A range of mapped memory and a share in what keeps it mapped.
#[derive(Clone)]
pub struct Span {
    ptr: NonNull<u8>,
    len: usize,
    region: Option<RegionId>,
    _keep: Arc<dyn Send + Sync>,
}

// SAFETY: a span is an address and a length. The memory behind it is kept mapped by `_keep`, which is
// itself Send and Sync, and every access goes through raw copies or through `bytes`, whose callers
// promise that nobody writes meanwhile.
unsafe impl Send for Span {}
// SAFETY: as above; `&Span` gives no access that `Span` does not.
unsafe impl Sync for Span {}

impl Span {
    /// Makes a span over `ptr..ptr + len`.
    ///
    /// # Safety
    /// The range is readable and writable for as long as `keep` (or a clone of it) lives.
    pub unsafe fn new(
        ptr: NonNull<u8>,
        len: usize,
        region: Option<RegionId>,
        keep: Arc<dyn Send + Sync>,
    ) -> Self {
        Self { ptr, len, region, _keep: keep }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The region that an engine may know as a fixed buffer, if the span lies in one.
    pub fn region(&self) -> Option<RegionId> {
        self.region
    }

    /// The part `range` of this span, with its own share of the memory.
    ///
    /// # Panics
    /// If the range is not inside the span.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice {range:?} of a span of {}",
            self.len
        );
        // SAFETY: the start is inside the allocation (asserted), so the addition neither wraps nor leaves it.
        let ptr = unsafe { self.ptr.add(range.start) };
        Self { ptr, len: range.len(), region: self.region, _keep: self._keep.clone() }
    }

    /// The same range, kept by somebody else, who in turn keeps what kept it so far.
    pub fn kept_by(self, keep: Arc<dyn Send + Sync>) -> Self {
        Self { ptr: self.ptr, len: self.len, region: self.region, _keep: keep }
    }

    /// Whether `next` begins where this span ends, in memory that the same owner keeps.
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.ptr.as_ptr() as usize + self.len == next.ptr.as_ptr() as usize
            && std::ptr::addr_eq(Arc::as_ptr(&self._keep), Arc::as_ptr(&next._keep))
    }

    /// This span and the one that follows it, as one.
    ///
    /// # Panics
    /// If `next` does not follow.
    pub fn joined(&self, next: &Self) -> Self {
        assert!(self.is_followed_by(next), "spans are joined where they meet");
        Self { ptr: self.ptr, len: self.len + next.len, region: self.region, _keep: self._keep.clone() }
    }

    /// Copies `from` to offset `at`.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn copy_from(&self, at: usize, from: &[u8]) {
        assert!(
            at <= self.len && from.len() <= self.len - at,
            "{} bytes at {at} of {}",
            from.len(),
            self.len
        );
        // SAFETY: bounds asserted; the memory is mapped (type invariant); `from` is a Rust slice and so
        // cannot overlap memory that is only reachable through raw pointers.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.ptr.as_ptr().add(at), from.len()) }
    }

    /// Copies from offset `at` into `to`.
    ///
    /// # Panics
    /// If that many bytes are not there.
    pub fn copy_to(&self, at: usize, to: &mut [u8]) {
        assert!(at <= self.len && to.len() <= self.len - at, "{} bytes at {at} of {}", to.len(), self.len);
        // SAFETY: as in `copy_from`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr.as_ptr().add(at), to.as_mut_ptr(), to.len()) }
    }

    /// Copies all of `from` to the start of this span, span to span.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn copy_from_span(&self, from: &Span) {
        assert!(from.len <= self.len, "{} bytes into {}", from.len, self.len);
        // SAFETY: both ranges are mapped; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from.ptr.as_ptr(), self.ptr.as_ptr(), from.len) }
    }

    /// Writes zeros over `range`.
    ///
    /// # Panics
    /// If the range is not inside the span.
    pub fn zero(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "zero {range:?} of {}", self.len);
        // SAFETY: bounds asserted, memory mapped.
        unsafe { std::ptr::write_bytes(self.ptr.as_ptr().add(range.start), 0, range.len()) }
    }

    /// Lets `f` see the bytes without a copy.
    ///
    /// The caller knows that nobody writes to this range while `f` runs: the bytes are sealed, or
    /// they are covered by the file's state. What may still change is read with [`Span::copy_to`].
    pub fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        // SAFETY: mapped for `len` bytes (type invariant) and not written to meanwhile (the caller's promise
        // above); client processes can map sealed memory for reading only.
        f(unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) })
    }
}

/// Page-aligned heap memory, for bounce buffers and for the journal.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer owns its memory alone, like a Box<[u8]>.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access is read-only, like a Box<[u8]>.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes, aligned to a page.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn zeroed(len: usize) -> Self {
        assert!(len > 0, "an aligned buffer has a size");
        let layout = Layout::from_size_align(len, PAGE).unwrap_or_else(|_| panic!("a buffer of {len} bytes"));
        // SAFETY: the size is not zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw) else { handle_alloc_error(layout) };
        Self { ptr, layout }
    }

    /// `len` bytes, aligned to a page, of arbitrary contents: whoever asks for them writes or zeros each byte before
    /// anybody sees it. Clearing a buffer that the device then fills costs as much as the checksum of what comes.
    ///
    /// # Panics
    /// If `len` is zero.
    pub fn unwritten(len: usize) -> Span {
        assert!(len > 0, "an aligned buffer has a size");
        let layout = Layout::from_size_align(len, PAGE).unwrap_or_else(|_| panic!("a buffer of {len} bytes"));
        // SAFETY: the size is not zero. The buffer becomes a span at once, so that no reference to bytes that were
        // never written is made.
        let raw = unsafe { alloc(layout) };
        let Some(ptr) = NonNull::new(raw) else { handle_alloc_error(layout) };
        Self { ptr, layout }.into_span()
    }

    /// Turns the buffer into a span, to be given to an I/O engine.
    pub fn into_span(self) -> Span {
        let (ptr, len) = (self.ptr, self.layout.size());
        // SAFETY: the buffer is valid until dropped, and the span's Arc is what owns it from here on.
        unsafe { Span::new(ptr, len, None, Arc::new(self)) }
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this length and initialised to zero.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.layout.size()) }
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc_zeroed` with this very layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_keeps_the_memory_of_its_span() {
        let span = AlignedBuf::zeroed(2 * PAGE).into_span();
        let part = span.slice(PAGE..PAGE + 10);
        span.copy_from(PAGE, b"0123456789");
        drop(span);
        assert_eq!(part.with_bytes(<[u8]>::to_vec), b"0123456789");
    }

    #[test]
    #[should_panic(expected = "of a span of")]
    fn a_slice_cannot_leave_its_span() {
        let _ = AlignedBuf::zeroed(PAGE).into_span().slice(0..PAGE + 1);
    }
}
