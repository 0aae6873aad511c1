//! One change of a file: how a client asks for it, and what it makes of the bytes.

use std::fmt;
use std::sync::Arc;

use nix::errno::Errno;

use super::MIB;
use crate::daemon::device_log::rig::{answer, caller, write};
use crate::daemon::device_log::rng::Rng;
use crate::store::hot::BLOCK;
use crate::store::{Handle, Store};

pub enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Truncate { size: usize },
    Zero { at: usize, len: usize, way: Way },
}

/// How bytes become zeros.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    Punch,
    Zero,
    ZeroAndGrow,
}

impl Change {
    /// Some change of a file of this size, which should not become much longer than `longest`.
    pub fn any(rng: &mut Rng, size: usize, longest: usize) -> Self {
        match rng.below(76) {
            0..12 => Self::write_blocks(rng, size, longest),
            12..45 => {
                let at = match rng.below(4) {
                    0 => rng.below(size + 1),
                    1 => rng.below(size + 600_000),
                    _ => size,
                };
                let len = 1 + rng.below(MIB);
                Self::Write { at: at.min(longest), bytes: rng.bytes(len) }
            }
            45..62 => {
                let size = match rng.below(5) {
                    0 => 0,
                    1 => size,
                    2 => (size + rng.below(900_000)).min(longest),
                    _ => rng.below(size + 1),
                };
                Self::Truncate { size }
            }
            _ => {
                let way = match rng.below(10) {
                    0..4 => Way::Punch,
                    4..7 => Way::Zero,
                    _ => Way::ZeroAndGrow,
                };
                Self::Zero { at: rng.below(size + 300_000), len: 1 + rng.below(3 * MIB), way }
            }
        }
    }

    /// Several whole blocks, which nobody has to read back for that.
    fn write_blocks(rng: &mut Rng, size: usize, longest: usize) -> Self {
        let block = BLOCK as usize;
        let at = rng.below(size.min(longest) / block + 1) * block;
        let len = (1 + rng.below(4)) * block;
        Self::Write { at, bytes: rng.bytes(len) }
    }

    pub fn ask(&self, store: &Arc<Store>, handle: &Handle) -> Result<(), Errno> {
        match self {
            Self::Write { at, bytes } => write(store, handle, *at, bytes).map(|_| ()),
            Self::Truncate { size } => {
                let (ino, size) = (handle.ino, *size as u64);
                answer(|reply| store.truncate(ino, true, size, Default::default(), &caller(), reply))
                    .map(|_| ())
            }
            Self::Zero { at, len, way } => {
                let mode = match way {
                    Way::Punch => libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE,
                    Way::Zero => libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_ZERO_RANGE,
                    Way::ZeroAndGrow => libc::FALLOC_FL_ZERO_RANGE,
                };
                answer(|reply| store.fallocate(handle, *at as u64, *len as u64, mode, reply))
            }
        }
    }

    pub fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::Write { at, bytes } => {
                let end = at + bytes.len();
                content.resize(content.len().max(end), 0);
                content[*at..end].copy_from_slice(bytes);
            }
            Self::Truncate { size } => content.resize(*size, 0),
            Self::Zero { at, len, way } => {
                if let Way::ZeroAndGrow = way {
                    content.resize(content.len().max(at + len), 0);
                }
                let end = (at + len).min(content.len());
                if *at < end {
                    content[*at..end].fill(0);
                }
            }
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { at, bytes } => write!(f, "write {} bytes at {at}", bytes.len()),
            Self::Truncate { size } => write!(f, "truncate to {size}"),
            Self::Zero { at, len, way } => write!(f, "{way:?} {len} bytes at {at}"),
        }
    }
}
