//! A client of the control files: a handle with the names of all files of a benchmark.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};

use kvcachefs::abi::{self, Command, Header, Range, TicketState};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::failure::{Context, Failure, Result};
use crate::ioctl::ioctl;
use crate::mount::Mount;

/// Names that one INTERN takes here.
const NAMES: usize = 400;

#[derive(Debug)]
pub struct Client {
    handle: File,
    pub ranges: Vec<Range>,
}

pub fn header(flags: u16, count: usize) -> Header {
    Header { version: abi::VERSION, flags, count: count as u32 }
}

/// The structure that an answer begins with.
pub fn head<T: FromBytes + FromZeros>(said: &[u8]) -> T {
    T::read_from_prefix(said).map_or_else(|_| T::new_zeroed(), |(head, _)| head)
}

impl Client {
    pub fn new(mount: &Mount, names: &[String]) -> Result<Self> {
        let path = mount.dir().join(".ctl/prefetch");
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let handle = opened.context(|| format!("cannot open {}", path.display()))?;
        let mut client = Self { handle, ranges: Vec::new() };
        let hello = abi::Hello { header: header(0, 0), ..abi::Hello::default() };
        client.call(Command::Hello, hello.as_bytes().to_vec())?;
        for names in names.chunks(NAMES) {
            let list: Vec<u8> = names.iter().flat_map(|name| name.bytes().chain([0])).collect();
            let intern = abi::Intern {
                header: header(0, names.len()),
                bytes: list.len() as u32,
                ..abi::Intern::default()
            };
            let said: abi::Intern = head(&client.call(Command::Intern, [intern.as_bytes(), &list].concat())?);
            let range = |at| Range {
                id: u64::from(said.first) + at,
                generation: said.generation,
                ..Range::default()
            };
            client.ranges.extend((0..names.len() as u64).map(range));
        }
        Ok(client)
    }

    pub fn call(&self, command: Command, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        let number = command.number(bytes.len());
        ioctl(self.handle.as_raw_fd(), number, &mut bytes).context(|| format!("{command:?} fails"))?;
        Ok(bytes)
    }

    /// Classifies and leases ranges, which must all be in L1.
    pub fn lease(&self, ranges: &[Range]) -> Result<u64> {
        let head_of =
            abi::Classify { header: header(abi::CLASSIFY_LEASE, ranges.len()), ..abi::Classify::default() };
        let said: abi::Classify =
            head(&self.call(Command::Classify, [head_of.as_bytes(), ranges.as_bytes()].concat())?);
        if said.lease == 0 { Err(Failure::new(format!("no lease: {said:?}"))) } else { Ok(said.lease) }
    }

    pub fn release(&self, lease: u64) -> Result<()> {
        let lease = abi::Lease { header: header(0, 0), lease, ..abi::Lease::default() };
        self.call(Command::Release, lease.as_bytes().to_vec()).map(drop)
    }

    pub fn prefetch(&self, ranges: &[Range], flags: u16, tag: u64) -> Result<abi::Prefetch> {
        let asked = abi::Prefetch { header: header(flags, ranges.len()), tag, ..abi::Prefetch::default() };
        Ok(head(&self.call(Command::Prefetch, [asked.as_bytes(), ranges.as_bytes()].concat())?))
    }

    pub fn cancel(&self, ticket: u64) -> Result<()> {
        let mut asked = abi::Ticket { header: header(0, 0), ..abi::Ticket::default() };
        asked.state.ticket = ticket;
        self.call(Command::Cancel, asked.as_bytes().to_vec()).map(drop)
    }

    /// The ends of tickets, for which it waits.
    pub fn ends(&self) -> Result<Vec<TicketState>> {
        let mut fds = [PollFd::new(self.handle.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::NONE).context(|| "cannot poll".into())?;
        let mut bytes = vec![0; 64 * size_of::<TicketState>()];
        let len = (&self.handle).read(&mut bytes).context(|| "cannot read the ends of tickets".into())?;
        Ok(bytes[..len].chunks(size_of::<TicketState>()).map(head::<TicketState>).collect())
    }
}
