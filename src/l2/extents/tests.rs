//! The allocator against a bitmap that is too simple to be wrong.

use super::*;
use proptest::prelude::*;

/// True is in use.
struct Model(Vec<bool>);

impl Model {
    fn set(&mut self, extent: Extent, to: bool) {
        for block in extent.start..extent.end() {
            assert_ne!(self.0[block as usize], to, "block {block} of {extent:?}");
            self.0[block as usize] = to;
        }
    }

    fn free(&self) -> u64 {
        self.0.iter().filter(|used| !**used).count() as u64
    }

    fn largest(&self) -> u64 {
        self.0.split(|used| *used).map(|run| run.len() as u64).max().unwrap_or(0)
    }
}

fn check(allocator: &Allocator, model: &Model) {
    assert_eq!(allocator.free_blocks(), model.free());
    assert_eq!(allocator.largest(), model.largest());
    if let State::Serving(runs) = &allocator.state {
        let mirrored: BTreeSet<_> = runs.by_start.iter().map(|(&start, &len)| (len, start)).collect();
        assert_eq!(mirrored, runs.by_len);
        let touching =
            runs.by_start.iter().zip(runs.by_start.keys().skip(1)).any(|((s, l), next)| s + l >= *next);
        assert!(!touching, "two runs that should be one");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u32),
    Free(prop::sample::Index),
    Claim(u64, u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u32..40).prop_map(Step::Allocate),
        1 => (0u32..400).prop_map(Step::Allocate),
        3 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => (0u64..520, 0u32..20).prop_map(|(start, blocks)| Step::Claim(start, blocks)),
    ]
}

proptest! {
    #[test]
    fn allocates_frees_and_claims_like_a_bitmap(
        blocks in 1u64..500,
        claims in prop::collection::vec((0u64..520, 0u32..20), 0..20),
        steps in prop::collection::vec(step(), 0..300),
    ) {
        let mut allocator = Allocator::new(blocks);
        let mut model = Model(vec![false; blocks as usize]);
        let mut held: Vec<Extent> = Vec::new();
        let claims = claims.into_iter().map(|(start, blocks)| Step::Claim(start, blocks));
        for step in claims.chain(steps) {
            match step {
                Step::Claim(start, len) => {
                    let extent = Extent { start, blocks: len };
                    let inside = len > 0 && extent.end() <= blocks;
                    let fits = inside && !model.0[start as usize..extent.end() as usize].contains(&true);
                    let claimed = allocator.claim(extent);
                    prop_assert_eq!(claimed.is_ok(), fits);
                    prop_assert_eq!(matches!(claimed, Err(ClaimError::Outside { .. })), !inside);
                    if fits {
                        model.set(extent, true);
                        held.push(extent);
                    }
                }
                Step::Allocate(len) => {
                    let (free, largest) = (model.free(), model.largest());
                    let got = allocator.allocate(len);
                    prop_assert_eq!(got.is_some(), u64::from(len) <= free);
                    let Some(got) = got else { continue };
                    prop_assert_eq!(got.iter().map(|extent| extent.blocks).sum::<u32>(), len);
                    if len > 0 && u64::from(len) <= largest {
                        prop_assert_eq!(got.len(), 1);
                    }
                    for extent in got {
                        model.set(extent, true);
                        held.push(extent);
                    }
                }
                Step::Free(which) if !held.is_empty() => {
                    let extent = held.swap_remove(which.index(held.len()));
                    model.set(extent, false);
                    allocator.free(extent);
                }
                Step::Free(_) => {}
            }
            check(&allocator, &model);
        }
        for extent in held {
            allocator.free(extent);
        }
        prop_assert_eq!(allocator.free_blocks(), blocks);
        prop_assert_eq!(allocator.largest(), blocks);
    }
}

#[test]
fn fills_to_the_last_block_and_comes_back_to_one_run() {
    let mut allocator = Allocator::new(10_000);
    let mut held: Vec<Extent> = Vec::new();
    let mut size = 1;
    while allocator.free_blocks() > 0 {
        size = size * 7 % 101 + 1;
        held.extend(allocator.allocate(size.min(allocator.free_blocks() as u32)).unwrap());
    }
    assert!(allocator.allocate(1).is_none());
    assert_eq!(allocator.largest(), 0);
    // Every other one first: the worst fragmentation there is.
    let (odd, even): (Vec<_>, Vec<_>) = held.into_iter().enumerate().partition(|(index, _)| index % 2 == 1);
    odd.into_iter().for_each(|(_, extent)| allocator.free(extent));
    let whole = allocator.free_blocks() as u32;
    let pieces = allocator.allocate(whole).unwrap();
    assert!(pieces.len() > 50, "{} pieces", pieces.len());
    pieces.into_iter().for_each(|extent| allocator.free(extent));
    even.into_iter().for_each(|(_, extent)| allocator.free(extent));
    assert_eq!(allocator.largest(), 10_000);
}

#[test]
fn takes_the_shortest_run_that_is_long_enough() {
    let mut allocator = Allocator::new(100);
    for start in [10, 15, 40] {
        allocator.claim(Extent { start, blocks: 1 }).unwrap();
    }
    // Runs: 0+10, 11+4, 16+24, 41+59.
    assert_eq!(allocator.allocate(3).unwrap()[..], [Extent { start: 11, blocks: 3 }]);
    assert_eq!(allocator.allocate(20).unwrap()[..], [Extent { start: 16, blocks: 20 }]);
    assert!(allocator.allocate(98).is_none(), "all or nothing");
    assert_eq!(allocator.free_blocks(), 74);
}

#[test]
fn a_claim_that_overlaps_claims_nothing() {
    let mut allocator = Allocator::new(200);
    allocator.claim(Extent { start: 60, blocks: 10 }).unwrap();
    let overlapping = Extent { start: 50, blocks: 11 };
    assert_eq!(allocator.claim(overlapping), Err(ClaimError::Overlap { extent: overlapping }));
    assert_eq!(allocator.free_blocks(), 190);
    allocator.claim(Extent { start: 50, blocks: 10 }).unwrap();
    let beyond = Extent { start: u64::MAX, blocks: u32::MAX };
    assert!(matches!(allocator.claim(beyond), Err(ClaimError::Outside { .. })));
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "was not in use"))]
fn a_double_free_is_caught() {
    let mut allocator = Allocator::new(100);
    let extent = allocator.allocate(10).unwrap()[0];
    allocator.free(extent);
    allocator.free(extent);
    assert_eq!(allocator.free_blocks(), 100);
}

#[test]
fn a_device_larger_than_an_extent_can_name() {
    let mut allocator = Allocator::new(1 << 33);
    let first = allocator.allocate(u32::MAX).unwrap();
    assert_eq!(first[..], [Extent { start: 0, blocks: u32::MAX }]);
    assert_eq!(allocator.largest(), (1 << 33) - u64::from(u32::MAX));
}

/// Prints what recovery costs: `cargo test --release -- --ignored --nocapture ten_million`.
#[test]
#[ignore = "takes seconds; run it for the numbers"]
fn ten_million_claims() {
    let mut allocator = Allocator::new(100_000_000);
    let began = std::time::Instant::now();
    for index in 0..10_000_000u64 {
        // Each once, in an order that memory does not like.
        let start = index * 6_700_417 % 10_000_000 * 10;
        allocator.claim(Extent { start, blocks: 7 }).unwrap();
    }
    let claimed = began.elapsed();
    assert_eq!(allocator.allocate(3).unwrap()[0].blocks, 3);
    println!("10,000,000 claims {claimed:?}, building {:?}", began.elapsed() - claimed);
}
