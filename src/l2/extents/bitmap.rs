//! The claims of a recovery, a bit per block.

use std::ops::Range;

const WORD_BITS: u64 = u64::BITS as u64;

pub(super) struct Bitmap {
    words: Vec<u64>,
    bits: u64,
}

impl Bitmap {
    /// All clear.
    pub(super) fn new(bits: u64) -> Self {
        let words =
            usize::try_from(bits.div_ceil(WORD_BITS)).expect("a device's bitmap fits the address space");
        Self { words: vec![0; words], bits }
    }

    /// Sets a range (not empty, inside), or nothing of it and `false` if a part is set already.
    pub(super) fn claim(&mut self, range: Range<u64>) -> bool {
        if masks(&range).any(|(word, mask)| self.words[word] & mask != 0) {
            return false;
        }
        masks(&range).for_each(|(word, mask)| self.words[word] |= mask);
        true
    }

    /// The longest possible runs of clear bits, in order.
    pub(super) fn clear_runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let start = self.next(from, false)?;
            let end = self.next(start, true).unwrap_or(self.bits);
            from = end;
            Some(start..end)
        })
    }

    /// The first bit at or after `from` that is (not) set.
    fn next(&self, from: u64, set: bool) -> Option<u64> {
        if from >= self.bits {
            return None;
        }
        let flip = if set { 0 } else { u64::MAX };
        let mut word = (from / WORD_BITS) as usize;
        let mut wanted = (self.words[word] ^ flip) & (u64::MAX << (from % WORD_BITS));
        while wanted == 0 {
            word += 1;
            wanted = self.words.get(word)? ^ flip;
        }
        let found = word as u64 * WORD_BITS + u64::from(wanted.trailing_zeros());
        (found < self.bits).then_some(found)
    }
}

/// The words that a range touches, and which of their bits.
fn masks(range: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
    let Range { start, end } = *range;
    let last = (end - 1) / WORD_BITS;
    (start / WORD_BITS..=last).map(move |word| {
        let low = start.saturating_sub(word * WORD_BITS);
        let high = (end - word * WORD_BITS).min(WORD_BITS);
        (word as usize, (u64::MAX << low) & (u64::MAX >> (WORD_BITS - high)))
    })
}
