//! Waiting until what was published is durable.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

use kvcachefs::abi::{self, Command, IOCTL_BYTES_MAX};
use nix::errno::Errno;

use super::error::Result;
use super::handle::Handle;
use super::ticket::Ticket;
use super::window::{Range, State, millis};
use super::wire::header;

/// What was to be drained.
#[derive(Debug)]
pub struct Drain {
    /// None: one of the ranges has an errno, and nothing is waited for.
    pub ticket: Option<Ticket>,
    pub files: u64,
    pub bytes: u64,
    pub states: Vec<Result<(), Errno>>,
}

/// Files that could not be stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// From the root of the mount.
    pub paths: Vec<PathBuf>,
    /// How many are known by name, of perhaps more.
    pub known: u32,
}

impl Handle {
    /// Begins to wait until everything that is published is durable: whole files, all below directories, or with no ranges
    /// all of it. The time that it may take is the daemon's own if none is given.
    ///
    /// # Errors
    /// EMFILE: this session has as many tickets as it may. E2BIG: name directories.
    pub fn drain(&self, ranges: &[Range], timeout: Option<Duration>, tag: u64) -> Result<Drain> {
        let head = abi::Drain {
            header: header(0, ranges.len()),
            tag,
            timeout_ms: millis(timeout),
            ..abi::Drain::default()
        };
        // As for a prefetch.
        let mut tickets = self.session.tickets();
        let (head, states) = self.session.about("drain", Command::Drain, &head, ranges)?;
        let ticket = (head.ticket != 0).then(|| {
            tickets.open.insert(head.ticket);
            Ticket::drained(&self.session, head.ticket)
        });
        let states = states.into_iter().map(|state: State| state.map(drop)).collect();
        Ok(Drain { ticket, files: head.files, bytes: head.bytes, states })
    }

    /// The paths of what a drain could not store, until its end is read.
    ///
    /// # Errors
    /// ENOENT: its end has been read.
    pub fn failures(&self, ticket: &Ticket) -> Result<Failures> {
        let room = vec![0u8; IOCTL_BYTES_MAX - size_of::<abi::Failures>()];
        let mut all = Failures::default();
        loop {
            let from = u32::try_from(all.paths.len()).unwrap_or(u32::MAX);
            let number = ticket.number();
            let head = abi::Failures {
                header: header(0, room.len()),
                ticket: number,
                from,
                ..abi::Failures::default()
            };
            let thing = format_args!("ticket {number}");
            let (head, bytes) =
                self.session.call::<_, _, u8>("failures", &thing, Command::Failures, &head, &room)?;
            all.known = head.known;
            let bytes = &bytes[..bytes.len().min(head.bytes as usize)];
            let paths =
                bytes.split_inclusive(|byte| *byte == 0).map(|path| path.strip_suffix(&[0]).unwrap_or(path));
            let before = all.paths.len();
            all.paths.extend(paths.map(|path| PathBuf::from(OsString::from_vec(path.to_vec()))));
            if all.paths.len() == before || all.paths.len() >= head.known as usize {
                return Ok(all);
            }
        }
    }
}
