//! What the ioctls of `.ctl/lease`, `.ctl/prefetch` and `.ctl/drain` carry: fixed layouts, their meaning as [`Request`]s, nothing else.
//!
//! The C header `mount-tools/include/kvcachefs.h` says the same, a test compares the two, and docs/CONTROL.md explains
//! them. Numbers have the machine's byte order: both ends are on one machine. Every structure is a multiple of eight
//! bytes with its padding spelled out, so a 32-bit client sees the same.
//!
//! [`decode`] trusts nothing. Whatever is wrong with a request as a whole is an errno, and nothing is done; what is
//! wrong with one of its ranges is found later and becomes the status of that range alone.

mod ticket;

use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use self::ticket::{
    Drain, Failures, PREFETCH_ASK, PREFETCH_LEASE, Prefetch, TICKET_CANCELLED, TICKET_DENIED, TICKET_DONE,
    TICKET_DRAIN, TICKET_FAILED, TICKET_NONE, TICKET_PREFETCH, TICKET_QUEUED, TICKET_RUNNING, Ticket,
    TicketState,
};

/// The version that every request names.
pub const VERSION: u16 = 1;
/// The `type` of the command numbers.
pub const IOCTL_TYPE: u8 = b'K';
/// The most bytes that a command number can say.
pub const IOCTL_BYTES_MAX: usize = 16_383;

/// Ranges that one ioctl may carry. The largest request with as many fits into [`IOCTL_BYTES_MAX`].
pub const RANGES_MAX: u32 = 500;
/// Names that one FORGET may carry.
pub const FORGET_MAX: u32 = 2_000;
/// Bytes of one write of names, its header included: what the kernel hands on in one piece, wherever in its pages the
/// client has them. More would arrive as two writes.
pub const NAMES_BYTES_MAX: u32 = (1 << 20) - 4096;
/// A component of a name, as on any file system.
pub const COMPONENT_MAX: usize = 255;
/// A name with all its components.
pub const NAME_BYTES_MAX: usize = 4096;

/// What a write of names begins with: "KVNM", in the order of its bytes in memory.
pub const NAMES_MAGIC: u32 = u32::from_ne_bytes(*b"KVNM");

/// Features in [`Hello::features`].
pub const FEATURE_LEASES: u64 = 1;
pub const FEATURE_PREFETCH: u64 = 2;
pub const FEATURE_DRAIN: u64 = 4;

/// Flag of CLASSIFY: grant a lease if all of it is in L1.
pub const CLASSIFY_LEASE: u16 = 1;
/// Flag of RELEASE: all shares that this session has, not one.
pub const RELEASE_ALL_SHARES: u16 = 1;

/// Names in [`Intern`] and [`NamesHeader`] begin at the root of the mount.
pub const BASE_ROOT: u8 = 0;
/// They begin at the directory with this interned name.
pub const BASE_NAME: u8 = 1;

/// [`Range::kind`]: an interned name, with its generation.
pub const KIND_NAME: u8 = 0;
/// The number that ID says of an open file; the generation is 0.
pub const KIND_NODE: u8 = 1;
/// A range of a lease, by its place in the request that was granted; for RELEASE alone. The generation is 0.
pub const KIND_ITEM: u8 = 2;

/// [`Range::unit`]: offset and length are bytes.
pub const UNIT_BYTES: u8 = 0;
/// They are blocks of the geometry that the namespace declares.
pub const UNIT_BLOCKS: u8 = 1;

/// [`RangeState::tier`] and [`Classify::tier`].
pub const TIER_ABSENT: u8 = 0;
pub const TIER_L1: u8 = 1;
pub const TIER_MIXED: u8 = 2;
pub const TIER_L2: u8 = 3;

/// [`RangeState::flags`]: a crash does not lose the file.
pub const STATE_DURABLE: u8 = 1;
/// Somebody has a lease on some of the range.
pub const STATE_LEASED: u8 = 2;
/// The file is open to be written.
pub const STATE_OPEN: u8 = 4;
/// Some of the range is on its way to L1.
pub const STATE_LOADING: u8 = 8;

/// [`Lease::state`]: it has ended.
pub const LEASE_GONE: u32 = 1;
/// It has ended because its time to live was over.
pub const LEASE_EXPIRED: u32 = 2;

/// The beginning of every request.
#[repr(C)]
#[derive(
    FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq, PartialOrd, Ord,
)]
pub struct Header {
    pub version: u16,
    pub flags: u16,
    /// Items behind the request's own structure.
    pub count: u32,
}

/// HELLO: what this daemon understands and allows. All but the header is its answer.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Hello {
    pub header: Header,
    pub features: u64,
    /// Of a session.
    pub names_max: u32,
    pub names_bytes_max: u32,
    pub ranges_max: u32,
    /// Of a session.
    pub leases_max: u32,
    /// What all leases may hold of L1, and those of one process.
    pub lease_bytes_max: u64,
    pub lease_client_bytes_max: u64,
    /// The unit of residency, and of what a lease keeps others from changing.
    pub block_bytes: u32,
    pub parties_max: u32,
    pub ttl_default_ms: u32,
    pub ttl_max_ms: u32,
    /// Requests that may prefetch at one time; 0: none.
    pub prefetch_window: u32,
    /// Those that may wait for it.
    pub prefetch_queue: u32,
    /// What those that prefetch at one time may bring to L1.
    pub prefetch_bytes_max: u64,
    /// Of a session: those whose end it has not read.
    pub tickets_max: u32,
    pub reserved: u32,
}

/// NAMES: what the last write of names became. All but the header is its answer.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Names {
    /// `count` says how many they are.
    pub header: Header,
    /// The others follow it, in order.
    pub first: u32,
    pub generation: u32,
}

/// INTERN: `header.count` names, each ended by a zero byte, in the `bytes` bytes behind this.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Intern {
    pub header: Header,
    pub base: u32,
    pub base_generation: u32,
    pub bytes: u32,
    pub base_kind: u8,
    pub reserved: [u8; 3],
    /// Answer, as of NAMES.
    pub first: u32,
    pub generation: u32,
}

/// What a write of names begins with; `count` names follow in the `bytes` bytes behind it.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct NamesHeader {
    pub magic: u32,
    pub version: u16,
    pub base_kind: u8,
    pub reserved: u8,
    pub base: u32,
    pub base_generation: u32,
    pub count: u32,
    pub bytes: u32,
}

/// FORGET: `header.count` [`Slot`]s follow.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Forget {
    pub header: Header,
    /// Answer: how many of them there were.
    pub forgotten: u32,
    pub reserved: u32,
}

/// An interned name.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    pub id: u32,
    pub generation: u32,
}

/// ID, of an ordinary open file. All but the header is its answer.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Id {
    pub header: Header,
    /// This version of the file, as long as it is there.
    pub node: u64,
    pub size: u64,
    pub state: u8,
    pub reserved: [u8; 7],
}

/// LOOKUP: `header.count` [`Range`]s follow, in whose place the answer has as many [`RangeState`]s.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Lookup {
    pub header: Header,
    /// Answer: grows whenever a name appears, goes, or leads to another version.
    pub generation: u64,
    /// How many from the first on are there without a gap.
    pub prefix: u32,
    pub present: u32,
}

/// CLASSIFY: `header.count` [`Range`]s follow, in whose place the answer has as many [`RangeState`]s.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Classify {
    pub header: Header,
    /// Wanted, 0 for the default. The answer is what was given.
    pub ttl_ms: u32,
    /// Shares of the lease; 0 is one.
    pub parties: u32,
    /// Answers from here on.
    pub generation: u64,
    /// 0: none was granted.
    pub lease: u64,
    /// Why none was granted that was asked for.
    pub lease_errno: i32,
    /// Of the whole window.
    pub tier: u8,
    pub reserved: [u8; 3],
    pub absent: u32,
    /// Ranges whose status is an error, those that are absent included.
    pub failed: u32,
    pub blocks: u64,
    pub blocks_l1: u64,
    pub bytes: u64,
    pub bytes_l1: u64,
}

/// EXTEND, RELEASE, ATTACH and QUERY.
///
/// Behind it, RELEASE has `header.count` [`Range`]s (none: the whole lease), and QUERY has room for `header.count`
/// [`Leased`]s.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Lease {
    pub header: Header,
    pub lease: u64,
    /// Wanted by EXTEND, 0 for the default. The answer is what is left of it.
    pub ttl_ms: u32,
    /// Answer: shares that are held by anybody.
    pub parties: u32,
    /// Answer: those of this session.
    pub own: u32,
    pub state: u32,
    /// Answer: memory that it holds.
    pub bytes: u64,
    pub ranges: u32,
    pub reserved: u32,
}

/// A range that a client names.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Range {
    pub id: u64,
    pub offset: u64,
    /// 0: to the end.
    pub length: u64,
    pub generation: u32,
    pub kind: u8,
    pub unit: u8,
    pub reserved: u16,
}

/// What there is of a range.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct RangeState {
    /// 0, or a negative errno: then there is nothing else.
    pub status: i32,
    pub tier: u8,
    pub flags: u8,
    pub reserved: u16,
    pub blocks: u32,
    pub blocks_l1: u32,
    pub bytes: u64,
    pub bytes_l1: u64,
}

/// A range of a lease.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Leased {
    pub node: u64,
    pub offset: u64,
    pub length: u64,
    /// Bytes of it that are still held.
    pub held: u64,
}

/// Where the names of a batch begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Root,
    Name(Slot),
}

/// Names that have been checked, in order, without their zero bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameList {
    pub base: Base,
    pub names: Vec<Box<[u8]>>,
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// With the version that it speaks, whichever that is.
    Hello(Hello),
    Names(Names),
    Intern(Intern, NameList),
    Forget(Forget, Vec<Slot>),
    Id(Id),
    Lookup(Lookup, Vec<Range>),
    Classify(Classify, Vec<Range>),
    Extend(Lease),
    Release(Lease, Vec<Range>),
    Attach(Lease),
    /// With room for so many ranges.
    Query(Lease, usize),
    Prefetch(Prefetch, Vec<Range>),
    Cancel(Ticket),
    Ticket(Ticket),
    Drain(Drain, Vec<Range>),
    /// With room for so many bytes.
    Failures(Failures, usize),
}

/// The commands, by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Hello = 1,
    Names = 2,
    Intern = 3,
    Forget = 4,
    Id = 5,
    Lookup = 6,
    Classify = 7,
    Extend = 8,
    Release = 9,
    Attach = 10,
    Query = 11,
    Prefetch = 12,
    Cancel = 13,
    Ticket = 14,
    Drain = 15,
    Failures = 16,
}

impl Command {
    pub const ALL: [Self; 16] = [
        Self::Hello,
        Self::Names,
        Self::Intern,
        Self::Forget,
        Self::Id,
        Self::Lookup,
        Self::Classify,
        Self::Extend,
        Self::Release,
        Self::Attach,
        Self::Query,
        Self::Prefetch,
        Self::Cancel,
        Self::Ticket,
        Self::Drain,
        Self::Failures,
    ];

    /// The whole command number of a request of so many bytes, as `_IOWR` makes it.
    pub const fn number(self, bytes: usize) -> u32 {
        3 << 30 | (bytes as u32 & 0x3fff) << 16 | (IOCTL_TYPE as u32) << 8 | self as u32
    }

    /// Bytes of the structure that the request begins with.
    pub const fn head_bytes(self) -> usize {
        match self {
            Self::Hello => size_of::<Hello>(),
            Self::Names => size_of::<Names>(),
            Self::Intern => size_of::<Intern>(),
            Self::Forget => size_of::<Forget>(),
            Self::Id => size_of::<Id>(),
            Self::Lookup => size_of::<Lookup>(),
            Self::Classify => size_of::<Classify>(),
            Self::Extend | Self::Release | Self::Attach | Self::Query => size_of::<Lease>(),
            Self::Prefetch => size_of::<Prefetch>(),
            Self::Cancel | Self::Ticket => size_of::<Ticket>(),
            Self::Drain => size_of::<Drain>(),
            Self::Failures => size_of::<Failures>(),
        }
    }

    fn flags(self) -> u16 {
        match self {
            Self::Classify => CLASSIFY_LEASE,
            Self::Release => RELEASE_ALL_SHARES,
            Self::Prefetch => PREFETCH_LEASE | PREFETCH_ASK,
            _ => 0,
        }
    }
}

/// Which command a number is, if it is one of ours.
pub fn command(number: u32) -> Option<Command> {
    let ours = number >> 30 == 3 && number >> 8 & 0xff == u32::from(IOCTL_TYPE);
    Command::ALL.into_iter().find(|command| ours && *command as u32 == number & 0xff)
}

/// The first `T` of `bytes`, and what is behind it.
fn head<T: FromBytes>(bytes: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)
}

fn items<T: FromBytes>(count: u32, max: u32, mut bytes: &[u8]) -> Result<Vec<T>, Errno> {
    if count > max {
        return Err(Errno::E2BIG);
    }
    let mut all = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let (item, rest) = head::<T>(bytes)?;
        all.push(item);
        bytes = rest;
    }
    Ok(all)
}

fn zero(reserved: &[u8]) -> Result<(), Errno> {
    if reserved.iter().all(|byte| *byte == 0) { Ok(()) } else { Err(Errno::EINVAL) }
}

/// What a command with these bytes asks for.
///
/// # Errors
/// ENOTTY: no such command. EINVAL: fewer bytes than it takes, unknown flags, or reserved fields that are not zero. EPROTO:
/// another version. E2BIG: more items than one request may have. INTERN also has the errors of [`name_list`].
pub fn decode(number: u32, bytes: &[u8]) -> Result<Request, Errno> {
    let command = command(number).ok_or(Errno::ENOTTY)?;
    let (header, _) = head::<Header>(bytes)?;
    if bytes.len() < command.head_bytes() {
        return Err(Errno::EINVAL);
    }
    if header.version != VERSION && command != Command::Hello {
        return Err(Errno::EPROTO);
    }
    if header.flags & !command.flags() != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(match command {
        Command::Hello => Request::Hello(head(bytes)?.0),
        Command::Names => Request::Names(head(bytes)?.0),
        Command::Intern => {
            let (intern, rest) = head::<Intern>(bytes)?;
            zero(&intern.reserved)?;
            let named = rest.get(..intern.bytes as usize).ok_or(Errno::EINVAL)?;
            let slot = Slot { id: intern.base, generation: intern.base_generation };
            Request::Intern(intern, name_list(intern.base_kind, slot, header.count, named)?)
        }
        Command::Forget => {
            let (forget, rest) = head::<Forget>(bytes)?;
            zero(forget.reserved.as_bytes())?;
            Request::Forget(forget, items(header.count, FORGET_MAX, rest)?)
        }
        Command::Id => Request::Id(head(bytes)?.0),
        Command::Lookup => {
            let (lookup, rest) = head(bytes)?;
            Request::Lookup(lookup, window(header.count, rest)?)
        }
        Command::Classify => {
            let (classify, rest) = head::<Classify>(bytes)?;
            zero(&classify.reserved)?;
            Request::Classify(classify, window(header.count, rest)?)
        }
        Command::Extend => Request::Extend(lease(bytes)?.0),
        Command::Release => {
            let (lease, rest) = lease(bytes)?;
            Request::Release(lease, items(header.count, RANGES_MAX, rest)?)
        }
        Command::Attach => Request::Attach(lease(bytes)?.0),
        Command::Query => {
            let (lease, rest) = lease(bytes)?;
            let room = items::<Leased>(header.count, RANGES_MAX, rest)?.len();
            Request::Query(lease, room)
        }
        Command::Prefetch => {
            let (prefetch, rest) = head::<Prefetch>(bytes)?;
            zero(&prefetch.reserved)?;
            zero(prefetch.reserved_answer.as_bytes())?;
            Request::Prefetch(prefetch, window(header.count, rest)?)
        }
        Command::Cancel => Request::Cancel(ticket(bytes)?),
        Command::Ticket => Request::Ticket(ticket(bytes)?),
        Command::Drain => {
            let (drain, rest) = head::<Drain>(bytes)?;
            zero(drain.reserved.as_bytes())?;
            Request::Drain(drain, items(header.count, RANGES_MAX, rest)?)
        }
        Command::Failures => {
            let (failures, rest) = head::<Failures>(bytes)?;
            if rest.len() < header.count as usize {
                return Err(Errno::EINVAL);
            }
            Request::Failures(failures, header.count as usize)
        }
    })
}

fn lease(bytes: &[u8]) -> Result<(Lease, &[u8]), Errno> {
    let (lease, rest) = head::<Lease>(bytes)?;
    zero(lease.reserved.as_bytes())?;
    Ok((lease, rest))
}

fn ticket(bytes: &[u8]) -> Result<Ticket, Errno> {
    let (ticket, _) = head::<Ticket>(bytes)?;
    zero(ticket.reserved.as_bytes())?;
    zero(ticket.state.reserved.as_bytes())?;
    zero(ticket.state.reserved_end.as_bytes())?;
    Ok(ticket)
}

/// A window has at least one range.
fn window(count: u32, bytes: &[u8]) -> Result<Vec<Range>, Errno> {
    if count == 0 {
        return Err(Errno::EINVAL);
    }
    items(count, RANGES_MAX, bytes)
}

/// The names in a write.
///
/// # Errors
/// EINVAL: it does not begin with a [`NamesHeader`] or is not as long as that says. EPROTO: another version. E2BIG: longer
/// than [`NAMES_BYTES_MAX`]. And those of [`name_list`].
pub fn names_in_write(bytes: &[u8]) -> Result<NameList, Errno> {
    if bytes.len() > NAMES_BYTES_MAX as usize {
        return Err(Errno::E2BIG);
    }
    let (header, rest) = head::<NamesHeader>(bytes)?;
    if header.magic != NAMES_MAGIC || header.reserved != 0 || rest.len() != header.bytes as usize {
        return Err(Errno::EINVAL);
    }
    if header.version != VERSION {
        return Err(Errno::EPROTO);
    }
    let slot = Slot { id: header.base, generation: header.base_generation };
    name_list(header.base_kind, slot, header.count, rest)
}

/// Checks `count` names, each ended by a zero byte, that fill `bytes`.
///
/// # Errors
/// EINVAL: not exactly so many names, none at all, an unknown kind of base, an empty name, one that begins or ends with `/`,
/// or a component that is empty, `.` or `..`. ENAMETOOLONG: a component longer than 255 bytes, or a name longer than 4096.
pub fn name_list(base_kind: u8, slot: Slot, count: u32, bytes: &[u8]) -> Result<NameList, Errno> {
    let base = match (base_kind, slot) {
        (BASE_ROOT, Slot { id: 0, generation: 0 }) => Base::Root,
        (BASE_NAME, slot) => Base::Name(slot),
        _ => return Err(Errno::EINVAL),
    };
    let Some((0, all)) = bytes.split_last().map(|(last, all)| (*last, all)) else {
        return Err(Errno::EINVAL);
    };
    let names: Vec<Box<[u8]>> = all
        .split(|byte| *byte == 0)
        .map(|name| check_name(name).map(|()| name.into()))
        .collect::<Result<_, Errno>>()?;
    if u32::try_from(names.len()) != Ok(count) {
        return Err(Errno::EINVAL);
    }
    Ok(NameList { base, names })
}

fn check_name(name: &[u8]) -> Result<(), Errno> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Errno::ENAMETOOLONG);
    }
    for component in name.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." | b".." => return Err(Errno::EINVAL),
            long if long.len() > COMPONENT_MAX => return Err(Errno::ENAMETOOLONG),
            _ => {}
        }
    }
    Ok(())
}

/// An answer: its structure, and the items behind it.
pub fn encode<T: IntoBytes + Immutable, I: IntoBytes + Immutable>(head: &T, items: &[I]) -> Vec<u8> {
    let mut out = Vec::with_capacity(size_of::<T>() + size_of_val(items));
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(items.as_bytes());
    out
}

/// What the header and the clients' binaries say as well.
const _: () = {
    assert!(size_of::<Header>() == 8);
    assert!(size_of::<Hello>() == 88);
    assert!(size_of::<Names>() == 16);
    assert!(size_of::<Intern>() == 32);
    assert!(size_of::<NamesHeader>() == 24);
    assert!(size_of::<Forget>() == 16);
    assert!(size_of::<Slot>() == 8);
    assert!(size_of::<Id>() == 32);
    assert!(size_of::<Lookup>() == 24);
    assert!(size_of::<Classify>() == 80);
    assert!(size_of::<Lease>() == 48);
    assert!(size_of::<Range>() == 32);
    assert!(size_of::<RangeState>() == 32);
    assert!(size_of::<Leased>() == 32);
    assert!(size_of::<Classify>() + RANGES_MAX as usize * size_of::<Range>() <= IOCTL_BYTES_MAX);
    assert!(size_of::<Forget>() + FORGET_MAX as usize * size_of::<Slot>() <= IOCTL_BYTES_MAX);
    // An answer takes the place of its request.
    assert!(size_of::<Range>() == size_of::<RangeState>());
};

#[cfg(test)]
mod tests;
