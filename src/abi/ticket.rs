//! What takes its time: a window that is brought to L1, a drain. The request begins it and is answered at once with a
//! *ticket*; how it ends is a [`TicketState`] that read(2) on the handle returns, and for which poll(2) waits.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Header;

/// Flag of PREFETCH: grant a lease in the step in which all of it is in L1.
pub const PREFETCH_LEASE: u16 = 1;
/// Flag of PREFETCH: say what would become of it, and do nothing.
pub const PREFETCH_ASK: u16 = 2;

/// [`TicketState::state`]. Nothing was begun.
pub const TICKET_NONE: u8 = 0;
/// It waits for its turn.
pub const TICKET_QUEUED: u8 = 1;
pub const TICKET_RUNNING: u8 = 2;
pub const TICKET_DONE: u8 = 3;
/// It was not begun.
pub const TICKET_DENIED: u8 = 4;
/// Its client took it back, or its deadline passed while it ran.
pub const TICKET_CANCELLED: u8 = 5;
pub const TICKET_FAILED: u8 = 6;

/// [`TicketState::kind`].
pub const TICKET_PREFETCH: u8 = 1;
pub const TICKET_DRAIN: u8 = 2;

/// PREFETCH: `header.count` [`Range`](super::Range)s follow, in whose place the answer has as many
/// [`RangeState`](super::RangeState)s.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Prefetch {
    pub header: Header,
    /// The client's own, which comes back with the ticket's end.
    pub tag: u64,
    /// From now on; 0: none.
    pub deadline_ms: u32,
    /// Of the lease: wanted, 0 for the default. The answer is what was given.
    pub ttl_ms: u32,
    /// Shares of the lease; 0 is one.
    pub parties: u32,
    /// What is larger goes first.
    pub priority: u8,
    pub reserved: [u8; 3],
    /// 0: it ended in this call, or nothing was begun. Answers from here on.
    pub ticket: u64,
    pub lease: u64,
    /// An errno: why it is denied, or why no lease was granted.
    pub status: i32,
    pub state: u8,
    /// Of the whole window.
    pub tier: u8,
    pub reserved_answer: u16,
    pub absent: u32,
    /// Ranges whose status is an error, those that are absent included.
    pub failed: u32,
    pub blocks: u64,
    pub blocks_l1: u64,
    pub bytes: u64,
    pub bytes_l1: u64,
    /// To be read from the device for it: what is on its way already is not counted.
    pub bytes_to_read: u64,
    /// Tickets that begin before it.
    pub ahead: u32,
    /// When it is expected to be done, from now on.
    pub estimate_ms: u32,
}

/// DRAIN: `header.count` [`Range`](super::Range)s of whole files and directories follow (none: everything), in whose
/// place the answer has as many [`RangeState`](super::RangeState)s, with nothing but their status.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Drain {
    pub header: Header,
    /// The client's own, which comes back with the ticket's end.
    pub tag: u64,
    /// From now on; 0: `--drain-timeout`.
    pub timeout_ms: u32,
    pub reserved: u32,
    /// 0: one of the ranges has a status, and nothing was begun. Answers from here on.
    pub ticket: u64,
    /// What it waits for.
    pub files: u64,
    pub bytes: u64,
}

/// What there is of a ticket. read(2) on the handle gives one for each ticket that has ended.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct TicketState {
    pub ticket: u64,
    pub tag: u64,
    /// 0: none was granted.
    pub lease: u64,
    /// Read from the device for it so far; or drained.
    pub bytes: u64,
    /// Drained.
    pub files: u64,
    /// Ranges that could not be brought to L1; files that could not be stored.
    pub failed: u64,
    /// An errno: why it ended otherwise than done, or why no lease was granted.
    pub status: i32,
    pub state: u8,
    pub kind: u8,
    pub reserved: u16,
    /// Of the lease, when it was granted.
    pub ttl_ms: u32,
    pub reserved_end: u32,
}

/// CANCEL and TICKET. All but the header and `state.ticket` is the answer.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub header: Header,
    pub state: TicketState,
    /// What `state.bytes` will be.
    pub bytes_total: u64,
    pub ahead: u32,
    pub estimate_ms: u32,
    pub age_ms: u32,
    pub reserved: u32,
}

/// FAILURES: room for `header.count` bytes follows; the answer has as many bytes of it as `bytes` says: paths, each ended
/// by a zero byte.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Failures {
    pub header: Header,
    /// A drain, whether it has ended or not.
    pub ticket: u64,
    /// Which failure to begin with.
    pub from: u32,
    /// Answers: how many are here, in how many bytes, and how many are known by name.
    pub count: u32,
    pub bytes: u32,
    pub known: u32,
}

const _: () = {
    assert!(size_of::<Prefetch>() == 112);
    assert!(size_of::<Drain>() == 48);
    assert!(size_of::<TicketState>() == 64);
    assert!(size_of::<Ticket>() == 96);
    assert!(size_of::<Failures>() == 32);
    assert!(
        size_of::<Prefetch>() + super::RANGES_MAX as usize * size_of::<super::Range>()
            <= super::IOCTL_BYTES_MAX
    );
};
