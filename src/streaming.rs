//! Copies past the caches.
//!
//! What a client writes is copied into a slab and then left alone until the device or another client reads it. An
//! ordinary copy first fetches every line of the slab from memory, only to overwrite it, and drives out of the caches
//! what is in use. Streaming stores do neither. The C library has them too, but for copies that are a good part of the last
//! cache: on a machine with much of it never for a request.
#![allow(unsafe_code, reason = "streaming stores are intrinsics")]

/// From this size on the stores win. Below it, what is copied is likely to be looked at again soon.
const FROM: usize = 32 << 10;

/// Copies `len` bytes.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= FROM {
        // SAFETY: the caller's promise.
        return unsafe { stream(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// As [`copy`], with streaming stores for all whole lines.
///
/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: `head`, the lines and what is left from `tail` on divide `len` bytes, which the caller vouches for. The
    // stores want 16 bytes of alignment and get 64, since `head` ends where a line begins; loads want none. SSE2
    // is part of every x86-64.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for at in (head..tail).step_by(LINE) {
            let (source, target) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let line = [
                _mm_loadu_si128(source),
                _mm_loadu_si128(source.add(1)),
                _mm_loadu_si128(source.add(2)),
                _mm_loadu_si128(source.add(3)),
            ];
            _mm_stream_si128(target, line[0]);
            _mm_stream_si128(target.add(1), line[1]);
            _mm_stream_si128(target.add(2), line[2]);
            _mm_stream_si128(target.add(3), line[3]);
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
        // Streaming stores may become visible after later ordinary ones, such as the release of a lock.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_and_no_other_is_touched() {
        let from: Vec<u8> = (0..FROM + 300).map(|at| (at % 251) as u8 + 1).collect();
        for len in [0, 1, 63, 64, 65, FROM - 1, FROM, FROM + 1, FROM + 63, FROM + 64, FROM + 129] {
            for (skip_from, skip_to) in [(0, 0), (1, 0), (0, 1), (16, 63), (63, 64), (80, 17), (7, 65)] {
                let mut to = vec![0; skip_to + len + 100];
                // SAFETY: both vectors hold that many bytes after what is skipped.
                unsafe { copy(from.as_ptr().add(skip_from), to.as_mut_ptr().add(skip_to), len) };
                assert_eq!(
                    to[skip_to..skip_to + len],
                    from[skip_from..skip_from + len],
                    "{len} {skip_from} {skip_to}"
                );
                assert!(to[..skip_to].iter().chain(&to[skip_to + len..]).all(|&byte| byte == 0));
            }
        }
    }
}
