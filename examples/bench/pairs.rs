//! Two things measured in turns, so that what disturbs the machine disturbs both.

use crate::failure::Result;
use crate::interrupt;

/// What came of the pairs: medians, and how the ratios spread.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    pub ours: f64,
    pub other: f64,
    /// Median of ours / other, pair by pair.
    pub ratio: f64,
    /// First and third quartile of the ratios.
    pub quartiles: (f64, f64),
    pub pairs: u32,
}

/// Alternates `ours` and `other`, each giving a rate. Who comes first alternates too: the second of two finds other
/// processor caches and clocks than the first. The first pair warms up and does not count.
pub fn run(
    pairs: u32,
    ours: impl FnMut() -> Result<f64>,
    other: impl FnMut() -> Result<f64>,
) -> Result<Outcome> {
    let mut samples = Vec::new();
    collect(&mut samples, pairs, ours, other)?;
    Ok(Outcome::of(&samples))
}

/// The same, adding to samples made before.
pub fn collect(
    samples: &mut Vec<(f64, f64)>,
    pairs: u32,
    mut ours: impl FnMut() -> Result<f64>,
    mut other: impl FnMut() -> Result<f64>,
) -> Result<()> {
    for pair in 0..=pairs {
        interrupt::check()?;
        let sample = if pair % 2 == 0 {
            let first = ours()?;
            (first, other()?)
        } else {
            let first = other()?;
            (ours()?, first)
        };
        if pair > 0 {
            samples.push(sample);
        }
    }
    Ok(())
}

impl Outcome {
    pub fn of(samples: &[(f64, f64)]) -> Self {
        let mut ratios: Vec<f64> = samples.iter().map(|(ours, other)| ours / other).collect();
        Self {
            ours: median(&mut samples.iter().map(|sample| sample.0).collect::<Vec<_>>()),
            other: median(&mut samples.iter().map(|sample| sample.1).collect::<Vec<_>>()),
            ratio: median(&mut ratios),
            quartiles: (quantile(&ratios, 0.25), quantile(&ratios, 0.75)),
            pairs: samples.len() as u32,
        }
    }
}

/// Sorts, and takes the middle.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(values, 0.5)
}

/// Of sorted values, linear between neighbours.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = part * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() {
        let outcome = Outcome::of(&[(1.0, 2.0), (10.0, 10.0), (3.0, 2.0)]);
        assert_eq!((outcome.ours, outcome.other, outcome.ratio), (3.0, 2.0, 1.0));
        assert_eq!(outcome.quartiles, (0.75, 1.25));
    }

    #[test]
    fn the_first_pair_does_not_count() {
        let mut ours = [100.0, 4.0, 4.0].into_iter();
        let outcome = run(2, || Ok(ours.next().unwrap_or(0.0)), || Ok(2.0)).unwrap();
        assert_eq!((outcome.ratio, outcome.pairs), (2.0, 2));
    }
}
