//! What is on a device before it becomes a store: nothing at all, or something of somebody's.
//!
//! Nothing means zeros wherever others keep what tells them apart: the start of the device, as far as the catalog will
//! reach and at least 1 MiB, and its end, where partition tables, RAID sets and ZFS have theirs. The first page alone
//! does not do: btrfs leaves the first 64 KiB as they were, RAID sets of version 1.2 a page, ZFS 8 KiB.

use std::io;
use std::ops::Range;

use super::device::Claimed;

/// How much is looked at, at either end. The farthest mark is that of btrfs; behind the last ZFS label, the last of all,
/// there may be another 256 KiB.
const AT_LEAST: u64 = 1 << 20;
/// Bytes of one read.
const PIECE: usize = 1 << 20;
/// Behind this, which is beyond all marks, the catalog of a large store goes on for gigabytes: there a page of each piece
/// is read, so that a start takes a second at most.
const WHOLE: u64 = 256 << 20;
const SAMPLE: usize = 4096;

/// What is on the device up to `through` and at its end, in words; `None` if it is blank.
pub fn look(device: &Claimed, through: u64) -> io::Result<Option<String>> {
    let end = device.end();
    let start = 0..through.max(AT_LEAST).min(end);
    let tail = end.saturating_sub(AT_LEAST).max(start.end)..end;
    for range in [start, tail] {
        if let Some(at) = first_byte(device, range)? {
            return name(device).map(|name| Some(name.unwrap_or_else(|| format!("data at byte {at}"))));
        }
    }
    Ok(None)
}

/// Where the first byte is that is not zero. Files are only read where they have been written to.
fn first_byte(device: &Claimed, range: Range<u64>) -> io::Result<Option<u64>> {
    let zeros = vec![0; PIECE];
    let mut buf = vec![0; PIECE];
    let mut at = range.start;
    while let Some(data) = device.data_from(at).filter(|data| data.start < range.end) {
        at = data.start;
        let end = data.end.min(range.end);
        while at < end {
            let whole = (end - at).min(PIECE as u64);
            let read = if at < WHOLE || range.start >= WHOLE { whole } else { whole.min(SAMPLE as u64) };
            let piece = &mut buf[..read as usize];
            device.read_at(at, piece)?;
            if piece != &zeros[..piece.len()] {
                let offset = piece.iter().position(|byte| *byte != 0).unwrap_or(0);
                return Ok(Some(at + offset as u64));
            }
            at += whole;
        }
    }
    Ok(None)
}

/// Marks at fixed places, counted from the start.
const MARKS: [(u64, &[u8], &str); 23] = [
    (0, b"XFSB", "an XFS file system"),
    (0x438, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (0x1_0040, b"_BHRfS_M", "a btrfs file system"),
    (0x400, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (0x1018, &BCACHE, "a bcache or bcachefs device"),
    (0, b"hsqs", "a squashfs image"),
    (0x8001, b"CD001", "an ISO 9660 image"),
    (0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    (0x4000, b"SKUL\xba\xbe", "a LUKS encrypted volume"),
    (0, b"LABELONE", LVM),
    (0x200, b"LABELONE", LVM),
    (0x400, b"LABELONE", LVM),
    (0x600, b"LABELONE", LVM),
    (0, &MD, "a member of a RAID set (md)"),
    (0x1000, &MD, "a member of a RAID set (md)"),
    (0xff6, b"SWAPSPACE2", "swap space"),
    (0xff6, b"SWAP-SPACE", "swap space"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (0x36, b"FAT1", "a FAT file system"),
    (0x52, b"FAT32", "a FAT file system"),
    (0x1_0000, b"KVCFS-JH", "a kvcachefs store that was never finished, or has lost its superblocks"),
];
const LVM: &str = "an LVM physical volume";
const MD: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
const BCACHE: [u8; 16] =
    [0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81];
const ZFS: u64 = 0x00ba_b10c;

/// What the well-known marks say that it is.
fn name(device: &Claimed) -> io::Result<Option<String>> {
    let end = device.end();
    let has = |at: u64, mark: &[u8]| {
        let mut found = vec![0; mark.len()];
        device.read_at(at, &mut found).map(|()| at < end && found == mark)
    };
    // Partitions last: the others may lie in the space before the first one, and are what matters there.
    for (at, mark, name) in MARKS {
        if has(at, mark)? {
            return Ok(Some(name.to_owned()));
        }
    }
    for at in md_ends(end) {
        if has(at, &MD)? {
            return Ok(Some("a member of a RAID set (md)".to_owned()));
        }
    }
    if has_zfs_label(device)? {
        return Ok(Some("a member of a ZFS pool".to_owned()));
    }
    for at in [512, 4096, end.saturating_sub(512), end.saturating_sub(4096)] {
        if has(at, b"EFI PART")? {
            return Ok(Some("a partition table (GPT)".to_owned()));
        }
    }
    if has(510, &[0x55, 0xaa])? {
        return Ok(Some("a boot sector or partition table (MBR)".to_owned()));
    }
    Ok(None)
}

/// Where RAID sets of versions 1.0 and 0.90 have their superblock.
fn md_ends(end: u64) -> [u64; 2] {
    let sectors = end / 512;
    [sectors.saturating_sub(16) / 8 * 8 * 512, (end / 0x1_0000).saturating_sub(1) * 0x1_0000]
}

/// A ZFS label is 256 KiB, twice at the start and twice at the end; its second half holds uberblocks.
fn has_zfs_label(device: &Claimed) -> io::Result<bool> {
    const LABEL: u64 = 256 << 10;
    let end = device.end() / LABEL * LABEL;
    let mut half = vec![0; LABEL as usize / 2];
    for label in [0, LABEL, end.saturating_sub(2 * LABEL), end.saturating_sub(LABEL)] {
        device.read_at(label + LABEL / 2, &mut half)?;
        let found = half
            .chunks_exact(1024)
            .any(|uberblock| uberblock[..8] == ZFS.to_le_bytes() || uberblock[..8] == ZFS.to_be_bytes());
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}
