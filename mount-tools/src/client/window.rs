//! What a client asks about: ranges of files, one by one (lookup) or as one window (classification).

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use kvcachefs::abi::{self, Command, RangeState, Slot};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::error::{Error, Result};
use super::handle::{Handle, Session};
use super::lease::Lease;
use super::wire::{self, header};

/// How often a long lookup begins anew when names change between its parts.
const LOOKUPS: u32 = 8;

/// Bytes of a file, which is named or is one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range(pub(super) abi::Range);

impl Range {
    /// All of the file that the name leads to when it is asked for.
    pub fn of(name: Slot) -> Self {
        let range =
            abi::Range { id: u64::from(name.id), generation: name.generation, ..abi::Range::default() };
        Self(abi::Range { kind: abi::KIND_NAME, ..range })
    }

    /// All of the version that [`id`] has told.
    pub fn node(node: u64) -> Self {
        Self(abi::Range { id: node, kind: abi::KIND_NODE, ..abi::Range::default() })
    }

    /// What a lease holds of the range that was at this place when it was granted; to release it.
    pub fn item(place: u64) -> Self {
        Self(abi::Range { id: place, kind: abi::KIND_ITEM, ..abi::Range::default() })
    }

    /// A part of it; a length of 0 is to the end.
    #[must_use]
    pub fn part(self, offset: u64, length: u64) -> Self {
        Self(abi::Range { offset, length, ..self.0 })
    }
}

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// No range of the window could be found.
    Absent,
    L1,
    Mixed,
    L2,
}

impl Tier {
    pub(super) fn of(number: u8) -> Self {
        match number {
            abi::TIER_L1 => Self::L1,
            abi::TIER_MIXED => Self::Mixed,
            abi::TIER_L2 => Self::L2,
            _ => Self::Absent,
        }
    }

    /// As `user.kv.tier` says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::L1 => "l1",
            Self::Mixed => "mixed",
            Self::L2 => "l2",
        }
    }
}

/// A range that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub tier: Tier,
    /// A crash does not lose the file.
    pub durable: bool,
    /// By anybody.
    pub leased: bool,
    /// Open to be written.
    pub open: bool,
    /// Some of it is on its way to L1.
    pub loading: bool,
    pub blocks: u32,
    pub blocks_l1: u32,
    pub bytes: u64,
    pub bytes_l1: u64,
}

/// What there is of a range, or why there is nothing.
pub type State = std::result::Result<Found, Errno>;

pub(super) fn state(answer: &RangeState) -> State {
    if answer.status != 0 {
        return Err(Errno::from_raw(answer.status.saturating_neg()));
    }
    let has = |flag| answer.flags & flag != 0;
    Ok(Found {
        tier: Tier::of(answer.tier),
        durable: has(abi::STATE_DURABLE),
        leased: has(abi::STATE_LEASED),
        open: has(abi::STATE_OPEN),
        loading: has(abi::STATE_LOADING),
        blocks: answer.blocks,
        blocks_l1: answer.blocks_l1,
        bytes: answer.bytes,
        bytes_l1: answer.bytes_l1,
    })
}

/// Which of the ranges are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Two that were told one generation were told that the same files are there.
    pub generation: u64,
    /// How many from the first on, without a gap.
    pub prefix: usize,
    pub present: usize,
    pub states: Vec<State>,
}

/// Where all of the ranges are, for one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub tier: Tier,
    pub absent: u32,
    /// Ranges that have no state but an errno, those that are absent included.
    pub failed: u32,
    pub blocks: u64,
    pub blocks_l1: u64,
    pub bytes: u64,
    pub bytes_l1: u64,
    pub states: Vec<State>,
}

/// For how long a lease is wanted, and for how many that read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    pub ttl: Option<Duration>,
    pub parties: u32,
}

impl Terms {
    /// One share for each of the ranks of a request.
    pub fn shared_by(parties: u32) -> Self {
        Self { parties, ..Self::default() }
    }

    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl: Some(ttl), ..self }
    }

    pub(super) fn ttl_ms(&self) -> u32 {
        millis(self.ttl)
    }
}

/// 0 is the default, so a time that is less than a millisecond is one.
pub(super) fn millis(time: Option<Duration>) -> u32 {
    time.map_or(0, |time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1))
}

/// What an open file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id {
    /// This version of it, whatever becomes of the name.
    pub node: u64,
    pub size: u64,
    pub durable: bool,
}

/// Which version of a file is open: a rank compares it with what its lease holds.
///
/// # Errors
/// ENOTTY: it is no ordinary file of a kvcachefs. ESTALE: it is gone.
pub fn id(file: &File) -> Result<Id> {
    let head = abi::Id { header: header(0, 0), ..abi::Id::default() };
    let (id, _) = wire::call::<_, u8, u8>(file.as_fd(), Command::Id, &head, &[])
        .map_err(|errno| Error::new("id", "an open file", errno))?;
    Ok(Id { node: id.node, size: id.size, durable: id.state & abi::STATE_DURABLE != 0 })
}

impl Session {
    /// A request about ranges that have one answer, and so are one request.
    pub fn about<T>(
        &self,
        doing: &'static str,
        command: Command,
        head: &T,
        ranges: &[Range],
    ) -> Result<(T, Vec<State>)>
    where
        T: FromBytes + IntoBytes + Immutable,
    {
        let most = self.limits.ranges;
        if ranges.len() > most {
            return Err(Error::new(doing, format!("{} ranges", ranges.len()), Errno::E2BIG)
                .remedy(format!("one answer is about at most {most}: make them fewer and larger")));
        }
        let items: Vec<abi::Range> = ranges.iter().map(|range| range.0).collect();
        let (head, states) = self.call::<_, _, RangeState>(doing, &self.shown(), command, head, &items)?;
        Ok((head, states.iter().map(state).collect()))
    }
}

impl Handle {
    /// Which of the ranges are there, in order. More than fit into one request are asked for in several, and the answer is
    /// one all the same: no name has changed between the first and the last.
    ///
    /// # Errors
    /// EAGAIN: names changed each time that it was asked.
    pub fn lookup(&self, ranges: &[Range]) -> Result<Lookup> {
        'anew: for _ in 0..LOOKUPS {
            let mut all: Option<Lookup> = None;
            for part in ranges.chunks(self.session.limits.ranges) {
                let head = abi::Lookup { header: header(0, part.len()), ..abi::Lookup::default() };
                let (head, states) = self.session.about("lookup", Command::Lookup, &head, part)?;
                let more = (head.prefix as usize, head.present as usize);
                let all = all.get_or_insert(Lookup {
                    generation: head.generation,
                    prefix: 0,
                    present: 0,
                    states: Vec::with_capacity(ranges.len()),
                });
                if all.generation != head.generation {
                    continue 'anew;
                }
                if all.prefix == all.states.len() {
                    all.prefix += more.0;
                }
                all.present += more.1;
                all.states.extend(states);
            }
            return all.ok_or_else(|| Error::new("lookup", "no ranges", Errno::EINVAL));
        }
        Err(Error::new("lookup", format!("{} ranges", ranges.len()), Errno::EAGAIN)
            .remedy("names change all the while; ask for fewer at a time"))
    }

    /// Where the ranges are, as one window.
    ///
    /// # Errors
    /// E2BIG: more than one request may have; several would not be one instant.
    pub fn classify(&self, ranges: &[Range]) -> Result<Window> {
        let head = abi::Classify { header: header(0, ranges.len()), ..abi::Classify::default() };
        let (head, states) = self.session.about("classify", Command::Classify, &head, ranges)?;
        Ok(window(&head, states))
    }

    /// The same and, if all of it is in L1, a lease in the same step; or why there is none.
    ///
    /// # Errors
    /// As [`Handle::classify`].
    pub fn classify_and_lease(
        &self,
        ranges: &[Range],
        terms: &Terms,
    ) -> Result<(Window, std::result::Result<Lease, Errno>)> {
        let head = abi::Classify {
            header: header(abi::CLASSIFY_LEASE, ranges.len()),
            ttl_ms: terms.ttl_ms(),
            parties: terms.parties,
            ..abi::Classify::default()
        };
        let (head, states) = self.session.about("lease", Command::Classify, &head, ranges)?;
        let lease = match head.lease {
            0 => Err(Errno::from_raw(head.lease_errno)),
            lease => Ok(Lease::granted(&self.session, lease, head.ttl_ms)),
        };
        Ok((window(&head, states), lease))
    }
}

fn window(head: &abi::Classify, states: Vec<State>) -> Window {
    Window {
        tier: Tier::of(head.tier),
        absent: head.absent,
        failed: head.failed,
        blocks: head.blocks,
        blocks_l1: head.blocks_l1,
        bytes: head.bytes,
        bytes_l1: head.bytes_l1,
        states,
    }
}
