//! How often a store was opened, on each of its devices: this tells an older copy of one from the device that belongs to
//! the others.
//!
//! An opening for writing gets its number onto the devices in three steps. Each is flushed before the next begins, and
//! nothing else is written before the last has ended:
//! 1. on the others it is the opening that was begun, and the last is that of the first, which an opening that ended in
//!    the third step may not have told them;
//! 2. on the first it is the last opening;
//! 3. on the others, too.
//!
//! So, whenever it ends, the last opening of the first device is the last of each of the others, or the one that it has
//! begun. An older copy of one of the others is behind the first; an older copy of the first is behind the others, which
//! know by the third step that there was more than an attempt. What was only begun is never counted again: the number is
//! one beyond all that any device has begun. Else a copy from between the steps would match a later opening.

use std::io;

use super::{COPY_AT, Claimed, Device, rank};
use crate::error::{Error, Result};
use crate::l2::superblock::Superblock;
use crate::memory::{AlignedBuf, PAGE};

/// No store was opened so often.
pub(super) const END: u64 = 1 << 62;

/// Whether all devices are as the same opening left them.
pub(super) fn check(devices: &[Claimed], supers: &[Superblock]) -> Result<()> {
    let first = supers[0].opened;
    let fits = |superblock: &Superblock| superblock.opened == first || superblock.opening == first;
    let wrong: Vec<usize> = (1..supers.len()).filter(|at| !fits(&supers[*at])).collect();
    let Some(&at) = wrong.first() else { return Ok(()) };
    let behind = supers[at].opened < first;
    // If no other is like the first, it is the first that is unlike the others. Of two the older one is named.
    let alone = wrong.len() + 1 == supers.len();
    let (at, older) = if alone && (wrong.len() > 1 || !behind) { (0, !behind) } else { (at, behind) };
    let age = if older { "an older" } else { "a newer" };
    Err(Error::new(devices[at].path().display(), format!("it is {age} copy than the others"))
        .remedy("put back the one that belongs to the others; --format makes a new store and loses the old"))
}

/// Counts an opening that may write.
pub(super) fn count(devices: &[Device], supers: &mut [Superblock]) -> Result<()> {
    let number = supers.iter().map(|superblock| superblock.opening).max().unwrap_or(0) + 1;
    let failed =
        |device: &Device, error| Error::caused_by(device.path().display(), error).remedy("check the device");
    // What a killed process wrote is read back, but does not survive a power cut: then a copy that is good now would be
    // lost with the one that is written, and the others would know of an opening that the first does not.
    for device in devices {
        device.sync_data().map_err(|error| failed(device, error))?;
    }
    let last = supers[0].opened;
    for (device, superblock) in devices.iter().zip(&mut *supers).skip(1) {
        (superblock.opened, superblock.opening) = (last, number);
        put(device, superblock).map_err(|error| failed(device, error))?;
    }
    for (device, superblock) in devices.iter().zip(supers) {
        (superblock.opened, superblock.opening) = (number, number);
        put(device, superblock).map_err(|error| failed(device, error))?;
    }
    Ok(())
}

/// Writes both copies, and first the one that does not count: a torn write leaves the other.
fn put(device: &Device, superblock: &Superblock) -> io::Result<()> {
    let read = |at| {
        let span = AlignedBuf::zeroed(PAGE).into_span();
        let mut page = [0; PAGE];
        device.read_at(at, &span)?;
        span.copy_to(0, &mut page);
        Ok::<_, io::Error>(rank(&Superblock::decode(&page)))
    };
    let order = if read(0)? <= read(COPY_AT)? { [COPY_AT, 0] } else { [0, COPY_AT] };
    for at in order {
        let span = AlignedBuf::zeroed(PAGE).into_span();
        span.copy_from(0, &superblock.encode());
        device.write_at(at, &span)?;
        device.sync_data()?;
    }
    Ok(())
}
