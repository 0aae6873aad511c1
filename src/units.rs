//! Sizes and durations as people write them.
//!
//! A number without a unit is refused everywhere: `--l1 4` could mean four bytes or four gibibytes,
//! and either guess would hurt somebody.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error as _, Visitor};

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Bytes(pub u64);

/// Binary units first and largest first: this is the order in which `Display` tries them.
const SIZE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

const BINARY_UNITS: usize = 4;

impl Bytes {
    pub const ZERO: Self = Self(0);

    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    /// As a length in memory. Saturates on a 32-bit host, where no such length could be mapped anyway.
    pub fn len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// For people who read, not for machines: one decimal, unless it is zero, in the largest binary unit that fits.
    pub fn approx(self) -> String {
        match SIZE_UNITS[..BINARY_UNITS].iter().find(|(_, size)| self.0 >= *size) {
            Some((unit, size)) => {
                let number = format!("{:.1}", self.0 as f64 / *size as f64);
                format!("{}{unit}", number.trim_end_matches(".0"))
            }
            None => format!("{}B", self.0),
        }
    }
}

/// Exact: the largest binary unit that divides the number, so that parsing it gives the same bytes.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact =
            SIZE_UNITS[..BINARY_UNITS].iter().find(|(_, size)| self.0 != 0 && self.0.is_multiple_of(*size));
        match exact {
            Some((unit, size)) => write!(f, "{}{unit}", self.0 / size),
            None => write!(f, "{}B", self.0),
        }
    }
}

/// `1 file`, `2 files`.
pub fn counted(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Seconds since 1970 as logs write them: `2026-12-02T09:20:08Z`.
pub fn date(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years that begin in March have their leap day last, and 400 of them always have 146,097 days.
    let day = days + 719_468;
    let (era, day) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", era * 400 + year + next)
}

/// Why a text is no size or duration. Names the text and says what to write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitError(String);

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UnitError {}

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, unit) = split_number(text, "a size", "4GiB or 256MiB")?;
        if unit.is_empty() {
            return Err(UnitError(format!(
                "size '{text}' has no unit; write {number}GiB, {number}MiB or {number}B"
            )));
        }
        let scale = SIZE_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, scale)| *scale)
            .ok_or_else(|| {
                UnitError(format!(
                    "size '{text}' has the unknown unit '{unit}'; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
                ))
            })?;
        scaled(number, u128::from(scale)).and_then(|bytes| u64::try_from(bytes).ok()).map(Self).ok_or_else(
            || UnitError(format!("size '{text}' is larger than any store; the limit is 16777215TiB")),
        )
    }
}

/// A duration as people write it: `100ms`, `5s`, `2m`, `1h`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Period(pub Duration);

const TIME_UNITS: [(&str, u64); 5] =
    [("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000), ("us", 1)];

impl FromStr for Period {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, unit) = split_number(text, "a duration", "100ms or 5s")?;
        if unit.is_empty() {
            return Err(UnitError(format!("duration '{text}' has no unit; write {number}s or {number}ms")));
        }
        let scale = TIME_UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, scale)| *scale)
            .ok_or_else(|| {
                UnitError(format!("duration '{text}' has the unknown unit '{unit}'; use us, ms, s, m or h"))
            })?;
        scaled(number, u128::from(scale))
            .and_then(|micros| u64::try_from(micros).ok())
            .map(|micros| Self(Duration::from_micros(micros)))
            .ok_or_else(|| UnitError(format!("duration '{text}' is too long; write at most 1000000h")))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        let exact =
            TIME_UNITS.iter().find(|(_, scale)| micros != 0 && micros.is_multiple_of(u128::from(*scale)));
        match exact {
            Some((unit, scale)) => write!(f, "{}{unit}", micros / u128::from(*scale)),
            None => f.write_str("0s"),
        }
    }
}

/// Splits `1.5TiB` into `1.5` and `TiB`.
fn split_number<'t>(text: &'t str, what: &str, like: &str) -> Result<(&'t str, &'t str), UnitError> {
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(UnitError(format!("'{text}' is negative; write {what} such as {like}")));
    }
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..end], trimmed[end..].trim());
    let digits = number.bytes().filter(u8::is_ascii_digit).count();
    let points = number.len() - digits;
    if digits == 0 || points > 1 || number.starts_with('.') || number.ends_with('.') {
        return Err(UnitError(format!("'{text}' is not {what}; write one such as {like}")));
    }
    Ok((number, unit))
}

/// `number * scale` without floating point, so that 1.5TiB is exact; what is below one unit is cut off.
/// `None` on overflow. `number` is digits with at most one point inside.
fn scaled(number: &str, scale: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = whole.parse::<u128>().ok()?.checked_mul(scale)?;
    // Nine decimals resolve a byte of a gibibyte; more would only risk an overflow.
    let fraction = &fraction[..fraction.len().min(9)];
    if fraction.is_empty() {
        return Some(whole);
    }
    let denominator = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    whole.checked_add(fraction.parse::<u128>().ok()?.checked_mul(scale)? / denominator)
}

/// Accepts a string only, and tells the author of a bare number what to write instead.
struct Quoted<T> {
    what: &'static str,
    unit: &'static str,
    parsed: std::marker::PhantomData<T>,
}

impl<T: FromStr<Err = UnitError>> Visitor<'_> for Quoted<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in quotes such as \"4{}\"", self.what, self.unit)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<T, E> {
        Err(E::custom(format!(
            "{} '{n}' has no unit; write it in quotes, as \"{n}{}\"",
            self.what, self.unit
        )))
    }

    fn visit_u64<E: serde::de::Error>(self, n: u64) -> Result<T, E> {
        Err(E::custom(format!(
            "{} '{n}' has no unit; write it in quotes, as \"{n}{}\"",
            self.what, self.unit
        )))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Quoted { what: "size", unit: "GiB", parsed: std::marker::PhantomData::<Self> })
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Quoted { what: "duration", unit: "s", parsed: std::marker::PhantomData::<Self> })
    }
}

/// Deserializes anything that is written as a string and parses itself.
pub fn from_text<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size(text: &str) -> Result<u64, String> {
        text.parse::<Bytes>().map(Bytes::get).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_in_every_unit() {
        assert_eq!(size("4GiB"), Ok(4 << 30));
        assert_eq!(size("256MiB"), Ok(256 << 20));
        assert_eq!(size("1.5TiB"), Ok(3 << 39));
        assert_eq!(size("4096B"), Ok(4096));
        assert_eq!(size("2 KB"), Ok(2000));
        assert_eq!(size("3mb"), Ok(3_000_000));
        assert_eq!(size("1GB"), Ok(1_000_000_000));
        assert_eq!(size("0.5KiB"), Ok(512));
        assert_eq!(size("16777215TiB"), Ok(16_777_215 << 40));
    }

    #[test]
    fn every_size_error_names_its_input() {
        for (text, expected) in [
            ("4", "has no unit; write 4GiB"),
            ("1.5", "has no unit"),
            ("-4GiB", "negative"),
            ("", "not a size"),
            ("GiB", "not a size"),
            ("1..5GiB", "not a size"),
            ("1.GiB", "not a size"),
            (".5GiB", "not a size"),
            ("4GiBB", "unknown unit 'GiBB'"),
            ("4 parsecs", "unknown unit 'parsecs'"),
            ("16777216TiB", "larger than any store"),
            ("99999999999999999999999999999999999999999999B", "larger than any store"),
            ("4G\u{130}B", "unknown unit"),
        ] {
            let error = size(text).expect_err(text);
            assert!(error.contains(&format!("'{text}'")) && error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_are_shown_exactly_and_approximately() {
        assert_eq!(Bytes::gib(4).to_string(), "4GiB");
        assert_eq!(Bytes(1025).to_string(), "1025B");
        assert_eq!(Bytes::ZERO.to_string(), "0B");
        assert_eq!(Bytes(1_610_612_736).approx(), "1.5GiB");
        assert_eq!(Bytes::gib(4).approx(), "4GiB");
        assert_eq!(Bytes::kib(1_006_992).approx(), "983.4MiB");
        assert_eq!(Bytes(12).approx(), "12B");
    }

    #[test]
    fn dates() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn durations() {
        let period = |text: &str| text.parse::<Period>().map(|p| p.0).map_err(|e| e.to_string());
        assert_eq!(period("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(period("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(period("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(period("1.5h"), Ok(Duration::from_secs(5400)));
        for text in ["5", "-1s", "s", "5 fortnights", "99999999999999999999h"] {
            let error = period(text).expect_err(text);
            assert!(error.contains(&format!("'{text}'")), "{text}: {error}");
        }
        assert_eq!(Period(Duration::from_millis(20)).to_string(), "20ms");
        assert_eq!(Period(Duration::ZERO).to_string(), "0s");
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(n in any::<u64>(), micros in 0u64..1 << 50) {
            prop_assert_eq!(Bytes(n).to_string().parse::<Bytes>(), Ok(Bytes(n)));
            let period = Period(Duration::from_micros(micros));
            prop_assert_eq!(period.to_string().parse::<Period>(), Ok(period));
        }

        #[test]
        fn garbage_never_panics(text in "\\PC{0,24}") {
            let _ = text.parse::<Bytes>();
            let _ = text.parse::<Period>();
        }
    }
}
