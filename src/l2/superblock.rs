//! The first page of every device of a store, twice: what the store is, and which of its devices this is.
//!
//! ```text
//! 0 magic "KVCFS-L2" | 8 format u32 | 12 devices u32 | 16 store id [16] | 32 this device u32 | 36 block bytes u32
//! | 40 length u64 | 48 meta start u64 | 56 meta length u64 | 64 data start u64 | 72 files max u64 | 80 made (ns) i64
//! | 88 opened u64 | 96 opening u64
//! | 4092 CRC-32C u32 of the 4092 bytes before
//! ```

use crate::memory::PAGE;

pub const MAGIC: &[u8; 8] = b"KVCFS-L2";
/// Grows with every change that an older program would misread.
pub const FORMAT: u32 = 1;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    pub devices: u32,
    pub store: [u8; 16],
    pub device: u32,
    pub block_bytes: u32,
    pub len: u64,
    pub meta_start: u64,
    pub meta_len: u64,
    pub data_start: u64,
    pub files_max: u64,
    pub made: i64,
    /// Which opening for writing was the last, counted from 1. 0 until then, and where they were not counted yet.
    pub opened: u64,
    /// Which one was begun last. It is beyond `opened` only until the opening has reached every device.
    pub opening: u64,
}

/// What the first page of a device is.
#[derive(PartialEq, Eq, Debug)]
pub enum Found {
    Ours(Superblock),
    /// All zeros: never used.
    Blank,
    /// Ours, but of a format that this program does not know.
    Format(u32),
    /// Ours, but damaged.
    Damaged,
    /// Somebody else's.
    Foreign,
}

fn crc(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

impl Superblock {
    pub fn encode(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, MAGIC);
        put(8, &FORMAT.to_le_bytes());
        put(12, &self.devices.to_le_bytes());
        put(16, &self.store);
        put(32, &self.device.to_le_bytes());
        put(36, &self.block_bytes.to_le_bytes());
        put(40, &self.len.to_le_bytes());
        put(48, &self.meta_start.to_le_bytes());
        put(56, &self.meta_len.to_le_bytes());
        put(64, &self.data_start.to_le_bytes());
        put(72, &self.files_max.to_le_bytes());
        put(80, &self.made.to_le_bytes());
        put(88, &self.opened.to_le_bytes());
        put(96, &self.opening.to_le_bytes());
        let sum = crc(&page[..PAGE - 4]);
        page[PAGE - 4..].copy_from_slice(&sum.to_le_bytes());
        page
    }

    pub fn decode(page: &[u8]) -> Found {
        if page.iter().all(|&byte| byte == 0) {
            return Found::Blank;
        }
        if page.len() != PAGE || &page[..8] != MAGIC {
            return Found::Foreign;
        }
        let u32_at = |at: usize| u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if u32_at(8) != FORMAT {
            return Found::Format(u32_at(8));
        }
        if crc(&page[..PAGE - 4]) != u32_at(PAGE - 4) {
            return Found::Damaged;
        }
        let mut store = [0; 16];
        store.copy_from_slice(&page[16..32]);
        Found::Ours(Self {
            devices: u32_at(12),
            store,
            device: u32_at(32),
            block_bytes: u32_at(36),
            len: u64_at(40),
            meta_start: u64_at(48),
            meta_len: u64_at(56),
            data_start: u64_at(64),
            files_max: u64_at(72),
            made: u64_at(80) as i64,
            opened: u64_at(88),
            opening: u64_at(96),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock {
            devices: 2,
            store: [7; 16],
            device: 1,
            block_bytes: 256 << 10,
            len: 1 << 30,
            meta_start: 65536,
            meta_len: 1 << 24,
            data_start: 1 << 25,
            files_max: 12345,
            made: 99,
            opened: 6,
            opening: 7,
        }
    }

    #[test]
    fn it_reads_back() {
        assert_eq!(Superblock::decode(&example().encode()), Found::Ours(example()));
    }

    #[test]
    fn every_damage_is_seen() {
        let page = example().encode();
        for at in 0..PAGE {
            let mut damaged = page;
            damaged[at] ^= 0x10;
            assert!(!matches!(Superblock::decode(&damaged), Found::Ours(_)), "byte {at}");
        }
        assert_eq!(Superblock::decode(&[0; PAGE]), Found::Blank);
        assert_eq!(Superblock::decode(&[b'x'; PAGE]), Found::Foreign);
    }
}
