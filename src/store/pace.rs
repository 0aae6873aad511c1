//! How fast the devices have been reading lately, for estimates.

use std::time::{Duration, Instant};

/// What is older than this counts little.
const MEMORY: Duration = Duration::from_millis(500);
/// A shorter time says nothing.
const SAMPLE_MIN: Duration = Duration::from_millis(20);

/// Bytes per second, smoothed over the time in which something was being read.
#[derive(Default, Debug)]
pub struct Pace {
    rate: f64,
    busy: Duration,
    since: Option<Instant>,
    bytes: u64,
}

impl Pace {
    /// Something is read from now on, if it was not before.
    pub fn begin(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// `bytes` have come; `more` are on their way.
    pub fn add(&mut self, bytes: u64, more: bool, now: Instant) {
        self.bytes += bytes;
        let Some(since) = self.since else { return };
        self.busy += now.saturating_duration_since(since);
        self.since = more.then_some(now);
        if self.busy < SAMPLE_MIN && self.rate > 0.0 {
            return;
        }
        let seconds = self.busy.as_secs_f64().max(1e-6);
        let rate = self.bytes as f64 / seconds;
        let weight = if self.rate > 0.0 { (seconds / MEMORY.as_secs_f64()).min(1.0) } else { 1.0 };
        self.rate += (rate - self.rate) * weight;
        (self.busy, self.bytes) = (Duration::ZERO, 0);
    }

    /// How long so many bytes will take; 0: not known.
    pub fn millis_for(&self, bytes: u64) -> u32 {
        if self.rate <= 0.0 {
            return 0;
        }
        (bytes as f64 * 1000.0 / self.rate).ceil().clamp(1.0, f64::from(u32::MAX)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_that_of_the_time_in_which_something_was_read() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pace = Pace::default();
        assert_eq!(pace.millis_for(1 << 20), 0, "not known yet");
        pace.begin(at(0));
        pace.add(1_000_000, false, at(100));
        assert_eq!(pace.millis_for(10_000_000), 1000);
        // Nothing was wanted for a while, which says nothing of the device.
        pace.begin(at(10_000));
        pace.add(1_000_000, false, at(10_100));
        assert_eq!(pace.millis_for(10_000_000), 1000);
        // It is faster now; what was before is forgotten in time.
        pace.begin(at(20_000));
        pace.add(10_000_000, true, at(20_500));
        assert_eq!(pace.millis_for(20_000_000), 1000);
        // What is less than a sample is kept for the next.
        pace.add(1, true, at(20_501));
        assert_eq!(pace.millis_for(20_000_000), 1000);
        assert_eq!(pace.millis_for(0), 1, "known");
    }
}
