//! Parts of a file, as bytes, and the blocks that they lie in.

use std::ops::Range;

use crate::store::hot::{BLOCK, blocks_for};

/// Sorted ranges that do not touch.
pub type Parts = Vec<Range<u64>>;

/// Sorted, and joined where they touch.
pub fn merged(mut parts: Parts) -> Parts {
    parts.sort_unstable_by_key(|part| part.start);
    let mut out = Parts::with_capacity(parts.len());
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        match out.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => out.push(part),
        }
    }
    out
}

pub fn without(parts: &[Range<u64>], cut: &Range<u64>) -> Parts {
    if cut.is_empty() {
        return parts.to_vec();
    }
    let rest = |part: &Range<u64>| {
        [part.start..part.end.min(cut.start), part.start.max(cut.end)..part.end]
            .into_iter()
            .filter(|rest| !rest.is_empty())
    };
    parts.iter().flat_map(rest).collect()
}

/// The blocks that a part of a file lies in.
pub fn blocks_of(part: &Range<u64>) -> Range<u32> {
    if part.is_empty() { 0..0 } else { (part.start / BLOCK) as u32..blocks_for(part.end) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_cut_and_joined_exactly() {
        let cut = |parts: &[(u64, u64)], cut: Range<u64>| -> Vec<(u64, u64)> {
            let parts: Parts = parts.iter().map(|(start, end)| *start..*end).collect();
            without(&parts, &cut).into_iter().map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(cut(&[(0, 10)], 3..5), [(0, 3), (5, 10)]);
        assert_eq!(cut(&[(0, 3), (5, 10)], 2..6), [(0, 2), (6, 10)]);
        assert_eq!(cut(&[(0, 3), (5, 10)], 0..10), []);
        assert_eq!(cut(&[(0, 3)], 3..5), [(0, 3)]);
        assert_eq!(cut(&[(2, 4)], 0..0), [(2, 4)]);
        assert_eq!(cut(&[(2, 6)], 4..4), [(2, 6)]);
        assert_eq!(merged(vec![5..7, 0..2, 2..4, 6..9, 3..3]), [0..4, 5..9]);
        assert_eq!(merged(vec![0..10, 2..3, 12..13]), [0..10, 12..13]);
        assert_eq!(merged(vec![]), []);
    }

    #[test]
    fn parts_lie_in_whole_blocks() {
        assert_eq!(blocks_of(&(0..1)), 0..1);
        assert_eq!(blocks_of(&(BLOCK - 1..BLOCK + 1)), 0..2);
        assert_eq!(blocks_of(&(BLOCK..2 * BLOCK)), 1..2);
        assert_eq!(blocks_of(&(7..7)), 0..0);
    }
}
