//! What a block contains: a stream of 64-bit words that its seed decides, so that nothing has to be
//! kept to verify a file.
//!
//! Word `i` is a mix of `seed + i * STEP` (splitmix64's, one multiplication shorter). No word depends on
//! the one before, so several are computed at once, and a wrong word never hides the next. Quality
//! matters only so far that two blocks never agree in a page; secrecy does not matter.

use std::mem::size_of;

const WORD_BYTES: usize = size_of::<u64>();
/// The golden ratio's bits: consecutive multiples differ in all bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Words compared before one branch decides, so that the inner loop has none.
const STRIDE_BYTES: usize = 4096;

/// The seed of one block's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(u64);

impl Seed {
    /// The seed of block `name` in the run with seed `run`. Bijective in `name`: no two blocks share it.
    pub const fn of(run: u64, name: u64) -> Self {
        Self(avalanche(name ^ avalanche(run)))
    }

    /// The seed as the number that names the block's file.
    pub const fn name(self) -> u64 {
        self.0
    }

    /// Fills `out` with the block's first bytes.
    pub fn fill(self, out: &mut [u8]) {
        let mut at = self.0;
        let mut words = out.chunks_exact_mut(WORD_BYTES);
        for word in &mut words {
            word.copy_from_slice(&mix(at).to_le_bytes());
            at = at.wrapping_add(STEP);
        }
        let rest = words.into_remainder();
        rest.copy_from_slice(&mix(at).to_le_bytes()[..rest.len()]);
    }

    /// Compares `bytes` with the block's; none if they are the same.
    pub fn compare(self, bytes: &[u8]) -> Option<Difference> {
        let mut found: Option<Difference> = None;
        let mut at = self.0;
        for (stride, chunk) in bytes.chunks(STRIDE_BYTES).enumerate() {
            let start = at;
            let mut wrong = 0;
            let mut words = chunk.chunks_exact(WORD_BYTES);
            for word in &mut words {
                let mut got = [0; WORD_BYTES];
                got.copy_from_slice(word);
                wrong |= u64::from_le_bytes(got) ^ mix(at);
                at = at.wrapping_add(STEP);
            }
            let rest = words.remainder();
            if wrong != 0 || rest != &mix(at).to_le_bytes()[..rest.len()] {
                let mut expected = [0; STRIDE_BYTES];
                Self(start).fill(&mut expected);
                for (offset, _) in
                    chunk.iter().zip(expected).enumerate().filter(|(_, (got, want))| **got != *want)
                {
                    let first = stride * STRIDE_BYTES + offset;
                    found.get_or_insert(Difference { first, bytes: 0 }).bytes += 1;
                }
            }
        }
        found
    }
}

/// How a file differs from what was stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Offset of the first wrong byte.
    pub first: usize,
    /// Wrong bytes in all.
    pub bytes: usize,
}

const fn mix(at: u64) -> u64 {
    let folded = (at ^ (at >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    folded ^ (folded >> 32)
}

/// splitmix64's finalizer: every input bit reaches every output bit, and it can be inverted.
const fn avalanche(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_verifies_at_every_length() {
        for len in [0, 1, 7, 8, 9, 4095, 4096, 4097, 8192, 12_345] {
            let mut bytes = vec![0; len];
            Seed::of(1, 2).fill(&mut bytes);
            assert_eq!(Seed::of(1, 2).compare(&bytes), None, "{len} bytes");
        }
    }

    #[test]
    fn a_flipped_bit_is_found_where_it_is() {
        let mut bytes = vec![0; 12_345];
        let seed = Seed::of(0, 9);
        seed.fill(&mut bytes);
        for at in [0, 8, 4095, 4096, 8191, 12_343, 12_344] {
            bytes[at] ^= 0x10;
            assert_eq!(seed.compare(&bytes), Some(Difference { first: at, bytes: 1 }));
            bytes[at] ^= 0x10;
        }
        for at in [5, 4097, 12_000] {
            bytes[at] ^= 1;
        }
        assert_eq!(seed.compare(&bytes), Some(Difference { first: 5, bytes: 3 }));
    }

    #[test]
    fn blocks_and_runs_differ_in_every_page() {
        let page = |seed: Seed, at: usize| {
            let mut bytes = vec![0; 1 << 16];
            seed.fill(&mut bytes);
            bytes[at..at + 4096].to_vec()
        };
        for at in [0, 4096, 61_440] {
            assert_ne!(page(Seed::of(0, 1), at), page(Seed::of(0, 2), at));
            assert_ne!(page(Seed::of(0, 1), at), page(Seed::of(1, 1), at));
            assert_ne!(page(Seed::of(0, 1), at), page(Seed::of(0, 1), (at + 4096) % 65_536));
        }
    }
}
