//! Interning: names are sent once, and are numbers from then on.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::PoisonError;

use kvcachefs::abi::{self, Command, FORGET_MAX, IOCTL_BYTES_MAX, Intern, Names, NamesHeader, Slot};
use nix::errno::Errno;
use zerocopy::IntoBytes;

use super::error::{Error, Result};
use super::handle::{Handle, Session};
use super::wire::header;

/// What one request may have for names, of all that the kernel hands on.
const INLINE_BYTES: usize = IOCTL_BYTES_MAX - size_of::<Intern>();

impl Handle {
    /// Interns paths from the root of the mount: all of them or, if one is refused, none.
    ///
    /// # Errors
    /// EINVAL, ENAMETOOLONG: a name is none. ENOSPC: there are as many as there may be.
    pub fn intern<P: AsRef<Path>>(&self, names: &[P]) -> Result<Vec<Slot>> {
        self.intern_below(None, names)
    }

    /// Interns paths from a directory that has been interned.
    ///
    /// # Errors
    /// As [`Handle::intern`]. ESTALE: `base` has been forgotten.
    pub fn intern_below<P: AsRef<Path>>(&self, base: Option<Slot>, names: &[P]) -> Result<Vec<Slot>> {
        let session = &*self.session;
        let room = if session.read_only {
            INLINE_BYTES
        } else {
            session.limits.names_bytes - size_of::<NamesHeader>()
        };
        let mut slots = Vec::with_capacity(names.len());
        for batch in batches(names, room)? {
            match session.send(base, &batch) {
                Ok(more) => slots.extend(more),
                Err(error) => {
                    // None of them, as it is for one request. What could not be forgotten goes with the session.
                    let _ = self.forget(&slots);
                    return Err(error);
                }
            }
        }
        Ok(slots)
    }

    /// Gives numbers back. Answers how many of them there were.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn forget(&self, names: &[Slot]) -> Result<u64> {
        let mut forgotten = 0;
        for part in names.chunks(FORGET_MAX as usize) {
            let head = abi::Forget { header: header(0, part.len()), ..abi::Forget::default() };
            let shown = self.session.shown();
            let (head, _) =
                self.session.call::<_, _, u8>("forgetting names", &shown, Command::Forget, &head, part)?;
            forgotten += u64::from(head.forgotten);
        }
        Ok(forgotten)
    }
}

/// Names with a zero byte behind each.
struct Batch {
    count: usize,
    first: String,
    bytes: Vec<u8>,
}

impl Batch {
    fn shown(&self) -> String {
        match self.count {
            1 => self.first.clone(),
            count => format!("{} and {} more names", self.first, count - 1),
        }
    }
}

fn batches<P: AsRef<Path>>(names: &[P], room: usize) -> Result<Vec<Batch>> {
    let mut all: Vec<Batch> = Vec::new();
    for name in names.iter().map(AsRef::as_ref) {
        let bytes = name.as_os_str().as_bytes();
        if bytes.contains(&0) {
            return Err(
                Error::new("interning", name.display(), Errno::EINVAL).remedy("no path has a zero byte")
            );
        }
        match all.last_mut() {
            Some(batch) if batch.bytes.len() + bytes.len() < room => {
                batch.count += 1;
                batch.bytes.extend_from_slice(bytes);
                batch.bytes.push(0);
            }
            _ => {
                all.push(Batch { count: 1, first: name.display().to_string(), bytes: [bytes, &[0]].concat() })
            }
        }
    }
    Ok(all)
}

impl Session {
    fn send(&self, base: Option<Slot>, batch: &Batch) -> Result<impl Iterator<Item = Slot> + use<>> {
        // NAMES answers for the last that this session has sent, so nobody may come between.
        let _naming = self.naming.lock().unwrap_or_else(PoisonError::into_inner);
        let base_kind = if base.is_some() { abi::BASE_NAME } else { abi::BASE_ROOT };
        let at = base.unwrap_or_default();
        let bytes = u32::try_from(batch.bytes.len()).unwrap_or(u32::MAX);
        let (first, generation) = if self.read_only {
            let head = Intern {
                header: header(0, batch.count),
                base: at.id,
                base_generation: at.generation,
                base_kind,
                bytes,
                ..Intern::default()
            };
            let shown = batch.shown();
            let (head, _) =
                self.call::<_, _, u8>("interning", &shown, Command::Intern, &head, &batch.bytes)?;
            (head.first, head.generation)
        } else {
            let head = NamesHeader {
                magic: abi::NAMES_MAGIC,
                version: abi::VERSION,
                base_kind,
                reserved: 0,
                base: at.id,
                base_generation: at.generation,
                count: u32::try_from(batch.count).unwrap_or(u32::MAX),
                bytes,
            };
            self.written(&[head.as_bytes(), &batch.bytes].concat())
                .map_err(|errno| explained(Error::new("interning", batch.shown(), errno)))?;
            let asked = Names { header: header(0, 0), ..Names::default() };
            let (head, _) =
                self.call::<_, u8, u8>("interning", &batch.shown(), Command::Names, &asked, &[])?;
            if head.header.count as usize != batch.count {
                // A forked child has sent names meanwhile, by the same session.
                return Err(Error::new("interning", batch.shown(), Errno::EBUSY)
                    .remedy("another process names by the same handle: give each its own"));
            }
            (head.first, head.generation)
        };
        Ok((0..batch.count as u32).map(move |at| Slot { id: first + at, generation }))
    }

    /// In one piece: a part of a list means nothing.
    fn written(&self, message: &[u8]) -> Result<(), Errno> {
        match self.file().write(message) {
            Ok(length) if length == message.len() => Ok(()),
            Ok(_) => Err(Errno::EIO),
            Err(error) => Err(Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EIO as i32))),
        }
    }
}

fn explained(error: Error) -> Error {
    match error.errno() {
        Errno::EINVAL => error.remedy("names are paths below the mount, without a leading /, . or .."),
        Errno::ENOSPC => error.remedy("forget names that are not needed any more"),
        Errno::ESTALE => error.remedy("the directory's name has been forgotten; intern it again"),
        _ => error,
    }
}
