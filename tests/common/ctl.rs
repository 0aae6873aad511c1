//! A client of `.ctl/lease` and `.ctl/prefetch` that sends what the test says, byte for byte.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]
#![allow(unsafe_code, reason = "an ioctl with a payload of any size has no safe wrapper")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;

use kvcachefs::abi::{self, Command, Header, Range, RangeState, Slot};
use nix::errno::Errno;
use nix::libc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::Mount;

/// Sends `bytes` as the payload of a command, and returns what came in their place, also if the command failed.
pub fn raw_ioctl(fd: RawFd, number: u32, bytes: &[u8]) -> (Result<(), Errno>, Vec<u8>) {
    // The kernel reads and writes as many bytes as the number says, which need not be as many as there are.
    let said = (number >> 16 & 0x3fff) as usize;
    let mut buffer = bytes.to_vec();
    buffer.resize(buffer.len().max(said), 0);
    // SAFETY: the buffer is at least as long as the number says that the kernel may touch, and lives until the call is over.
    let result = unsafe { libc::ioctl(fd, u64::from(number), buffer.as_mut_ptr()) };
    (Errno::result(result).map(drop), buffer)
}

pub fn header(flags: u16, count: usize) -> Header {
    Header { version: abi::VERSION, flags, count: count as u32 }
}

/// What came back of a request: its head, and what is behind it.
pub fn parted<T: FromBytes, I: FromBytes>(bytes: &[u8]) -> (T, Vec<I>) {
    let (head, mut rest) = T::read_from_prefix(bytes).unwrap();
    let mut items = Vec::new();
    while let Ok((item, more)) = I::read_from_prefix(rest) {
        items.push(item);
        rest = more;
    }
    (head, items)
}

pub fn named(slot: Slot) -> Range {
    Range { id: u64::from(slot.id), generation: slot.generation, kind: abi::KIND_NAME, ..Range::default() }
}

pub fn node(id: u64) -> Range {
    Range { id, kind: abi::KIND_NODE, ..Range::default() }
}

/// A range of a lease.
pub fn item(at: u64) -> Range {
    Range { id: at, kind: abi::KIND_ITEM, ..Range::default() }
}

pub fn part(range: Range, offset: u64, length: u64) -> Range {
    Range { offset, length, ..range }
}

/// An ordinary open file's node.
pub fn node_of(file: &File) -> u64 {
    identity(file).unwrap().node
}

pub fn identity(file: &File) -> Result<abi::Id, Errno> {
    let head = abi::Id { header: header(0, 0), ..abi::Id::default() };
    let number = Command::Id.number(size_of::<abi::Id>());
    let (result, bytes) = raw_ioctl(file.as_raw_fd(), number, head.as_bytes());
    result.map(|()| parted::<abi::Id, u8>(&bytes).0)
}

/// What a write of names consists of.
pub fn names_message(base: Option<Slot>, names: &[&str]) -> Vec<u8> {
    let list: Vec<u8> = names.iter().flat_map(|name| name.bytes().chain([0])).collect();
    let head = abi::NamesHeader {
        magic: abi::NAMES_MAGIC,
        version: abi::VERSION,
        base_kind: if base.is_some() { abi::BASE_NAME } else { abi::BASE_ROOT },
        base: base.map_or(0, |slot| slot.id),
        base_generation: base.map_or(0, |slot| slot.generation),
        count: names.len() as u32,
        bytes: list.len() as u32,
        reserved: 0,
    };
    [head.as_bytes(), &list].concat()
}

/// An open control file.
pub struct Ctl(pub File);

impl Ctl {
    /// `.ctl/lease`, greeted.
    pub fn new(mount: &Mount) -> Self {
        let ctl = Self::open(&mount.at(".ctl/lease"));
        ctl.hello().unwrap();
        ctl
    }

    pub fn open(path: &Path) -> Self {
        Self(OpenOptions::new().read(true).write(true).open(path).unwrap())
    }

    pub fn call<T, I>(&self, command: Command, head: &T, items: &[I]) -> Result<Vec<u8>, Errno>
    where
        T: IntoBytes + Immutable,
        I: IntoBytes + Immutable,
    {
        let bytes = [head.as_bytes(), items.as_bytes()].concat();
        let (result, back) = raw_ioctl(self.0.as_raw_fd(), command.number(bytes.len()), &bytes);
        result.map(|()| back)
    }

    pub fn hello(&self) -> Result<abi::Hello, Errno> {
        let head = abi::Hello { header: header(0, 0), ..abi::Hello::default() };
        self.call::<_, u8>(Command::Hello, &head, &[]).map(|bytes| parted::<abi::Hello, u8>(&bytes).0)
    }

    /// Asks for a window to be brought to L1.
    pub fn prefetch_as(&self, head: abi::Prefetch, ranges: &[Range]) -> (abi::Prefetch, Vec<RangeState>) {
        let header = header(head.header.flags, ranges.len());
        parted(&self.call(Command::Prefetch, &abi::Prefetch { header, ..head }, ranges).unwrap())
    }

    pub fn prefetch(&self, flags: u16, ranges: &[Range]) -> abi::Prefetch {
        let head = abi::Prefetch { header: header(flags, 0), ..abi::Prefetch::default() };
        self.prefetch_as(head, ranges).0
    }

    fn on_ticket(&self, command: Command, ticket: u64) -> Result<abi::Ticket, Errno> {
        let state = abi::TicketState { ticket, ..abi::TicketState::default() };
        let head = abi::Ticket { header: header(0, 0), state, ..abi::Ticket::default() };
        self.call::<_, u8>(command, &head, &[]).map(|back| parted::<abi::Ticket, u8>(&back).0)
    }

    pub fn ticket(&self, ticket: u64) -> Result<abi::Ticket, Errno> {
        self.on_ticket(Command::Ticket, ticket)
    }

    pub fn cancel(&self, ticket: u64) -> Result<abi::Ticket, Errno> {
        self.on_ticket(Command::Cancel, ticket)
    }

    /// The ends that can be read now, with room for so many.
    pub fn ends(&self, room: usize) -> Result<Vec<abi::TicketState>, Errno> {
        let mut buffer = vec![0; room * size_of::<abi::TicketState>()];
        let len =
            (&self.0).read(&mut buffer).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap()))?;
        assert!(len > 0 && len.is_multiple_of(size_of::<abi::TicketState>()), "whole ones");
        let all = buffer[..len].chunks(size_of::<abi::TicketState>());
        Ok(all.map(|end| abi::TicketState::read_from_bytes(end).unwrap()).collect())
    }

    /// What poll(2) says of the handle within so many milliseconds.
    pub fn poll(&self, millis: u16) -> nix::poll::PollFlags {
        use nix::poll::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, millis).unwrap();
        fds[0].revents().unwrap()
    }

    pub fn intern_from(&self, base: Option<Slot>, names: &[&str]) -> Result<Vec<Slot>, Errno> {
        let list: Vec<u8> = names.iter().flat_map(|name| name.bytes().chain([0])).collect();
        let head = abi::Intern {
            header: header(0, names.len()),
            base: base.map_or(0, |slot| slot.id),
            base_generation: base.map_or(0, |slot| slot.generation),
            base_kind: if base.is_some() { abi::BASE_NAME } else { abi::BASE_ROOT },
            bytes: list.len() as u32,
            ..abi::Intern::default()
        };
        let back = self.call(Command::Intern, &head, &list)?;
        let (head, _) = parted::<abi::Intern, u8>(&back);
        Ok((0..names.len() as u32)
            .map(|at| Slot { id: head.first + at, generation: head.generation })
            .collect())
    }

    pub fn intern(&self, names: &[&str]) -> Vec<Slot> {
        self.intern_from(None, names).unwrap()
    }

    /// Interned ranges of whole files.
    pub fn ranges(&self, names: &[&str]) -> Vec<Range> {
        self.intern(names).into_iter().map(named).collect()
    }

    /// The same by write(2), as long lists go.
    pub fn write_names(&self, base: Option<Slot>, names: &[&str]) -> Result<Vec<Slot>, Errno> {
        let message = names_message(base, names);
        let written =
            (&self.0).write(&message).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap()))?;
        assert_eq!(written, message.len());
        let head = abi::Names { header: header(0, 0), ..abi::Names::default() };
        let (head, _) = parted::<abi::Names, u8>(&self.call::<_, u8>(Command::Names, &head, &[])?);
        Ok((0..head.header.count)
            .map(|at| Slot { id: head.first + at, generation: head.generation })
            .collect())
    }

    pub fn forget(&self, slots: &[Slot]) -> u32 {
        let head = abi::Forget { header: header(0, slots.len()), ..abi::Forget::default() };
        let back = self.call(Command::Forget, &head, slots).unwrap();
        parted::<abi::Forget, u8>(&back).0.forgotten
    }

    pub fn lookup(&self, ranges: &[Range]) -> Result<(abi::Lookup, Vec<RangeState>), Errno> {
        let head = abi::Lookup { header: header(0, ranges.len()), ..abi::Lookup::default() };
        self.call(Command::Lookup, &head, ranges).map(|back| parted(&back))
    }

    pub fn classify(&self, ranges: &[Range]) -> (abi::Classify, Vec<RangeState>) {
        let head = abi::Classify { header: header(0, ranges.len()), ..abi::Classify::default() };
        parted(&self.call(Command::Classify, &head, ranges).unwrap())
    }

    /// Classifies and asks for a lease.
    pub fn acquire(&self, ranges: &[Range], parties: u32, ttl_ms: u32) -> (abi::Classify, Vec<RangeState>) {
        let header = header(abi::CLASSIFY_LEASE, ranges.len());
        let head = abi::Classify { header, parties, ttl_ms, ..abi::Classify::default() };
        parted(&self.call(Command::Classify, &head, ranges).unwrap())
    }

    /// A lease that must be granted.
    #[track_caller]
    pub fn lease(&self, ranges: &[Range]) -> u64 {
        self.lease_for(ranges, 1)
    }

    #[track_caller]
    pub fn lease_for(&self, ranges: &[Range], parties: u32) -> u64 {
        let (head, states) = self.acquire(ranges, parties, 0);
        assert_ne!(head.lease, 0, "{head:?} {states:?}");
        head.lease
    }

    fn on_lease<I: IntoBytes + Immutable>(
        &self,
        command: Command,
        flags: u16,
        lease: u64,
        ttl_ms: u32,
        items: &[I],
    ) -> Result<Vec<u8>, Errno> {
        let head = abi::Lease { header: header(flags, items.len()), lease, ttl_ms, ..abi::Lease::default() };
        self.call(command, &head, items)
    }

    pub fn release(&self, lease: u64) -> Result<abi::Lease, Errno> {
        self.release_ranges(lease, 0, &[])
    }

    pub fn release_ranges(&self, lease: u64, flags: u16, ranges: &[Range]) -> Result<abi::Lease, Errno> {
        self.on_lease(Command::Release, flags, lease, 0, ranges).map(|back| parted::<abi::Lease, u8>(&back).0)
    }

    pub fn extend(&self, lease: u64, ttl_ms: u32) -> Result<abi::Lease, Errno> {
        self.on_lease::<u8>(Command::Extend, 0, lease, ttl_ms, &[])
            .map(|back| parted::<abi::Lease, u8>(&back).0)
    }

    pub fn attach(&self, lease: u64) -> Result<abi::Lease, Errno> {
        self.on_lease::<u8>(Command::Attach, 0, lease, 0, &[]).map(|back| parted::<abi::Lease, u8>(&back).0)
    }

    pub fn query(&self, lease: u64) -> Result<(abi::Lease, Vec<abi::Leased>), Errno> {
        let room = vec![abi::Leased::default(); abi::RANGES_MAX as usize];
        let back = self.on_lease(Command::Query, 0, lease, 0, &room)?;
        let (head, mut all) = parted::<abi::Lease, abi::Leased>(&back);
        all.truncate(head.header.count as usize);
        Ok((head, all))
    }
}

/// The errno in a status.
pub fn status(state: &RangeState) -> Result<(), Errno> {
    match state.status {
        0 => Ok(()),
        status => Err(Errno::from_raw(-status)),
    }
}

/// The same in Python, for clients that are processes of their own. It wants `fcntl`, `os` and `struct`.
pub const PYTHON: &str = r#"
import struct
def ctl_ioctl(fd, nr, data):
    data = bytearray(data)
    fcntl.ioctl(fd, 3 << 30 | len(data) << 16 | 0x4b00 | nr, data)
    return data
def ctl_open():
    fd = os.open(".ctl/lease", os.O_RDWR)
    ctl_ioctl(fd, 1, struct.pack("HHI", 1, 0, 0) + bytes(80))
    return fd
def ctl_name(fd, name):
    name = name.encode() + b"\0"
    data = ctl_ioctl(fd, 3, struct.pack("HHIIIIBBBBII", 1, 0, 1, 0, 0, len(name), 0, 0, 0, 0, 0, 0) + name)
    return struct.unpack_from("II", data, 24)
def ctl_range(fd, name, offset=0, length=0):
    id, generation = ctl_name(fd, name)
    return struct.pack("QQQIBBH", id, offset, length, generation, 0, 0, 0)
def ctl_node(file):
    return struct.unpack_from("Q", ctl_ioctl(file, 5, struct.pack("HHI", 1, 0, 0) + bytes(24)), 8)[0]
def ctl_lease(fd, ranges, parties=1, ttl=0):
    data = struct.pack("HHIII", 1, 1, len(ranges), ttl, parties) + bytes(64) + b"".join(ranges)
    data = ctl_ioctl(fd, 7, data)
    return struct.unpack_from("Qi", data, 24)
def ctl_release(fd, lease, flags=0):
    return struct.unpack_from("IIII", ctl_ioctl(fd, 9, struct.pack("HHIQ", 1, flags, 0, lease) + bytes(32)), 16)
def ctl_attach(fd, lease):
    return struct.unpack_from("IIII", ctl_ioctl(fd, 10, struct.pack("HHIQ", 1, 0, 0, lease) + bytes(32)), 16)
"#;
