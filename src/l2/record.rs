//! How a node is written in the catalog's journal.
//!
//! ```text
//! kind u8 (1 put, 2 remove) | id u64 | for put:
//! type u8 (0 file, 1 directory, 2 symbolic link) | device u8 | mode u16 | uid u32 | gid u32 | parent u64 | seq u64
//! | size u64 | mtime i64 | ctime i64 | atime i64 | flags u8
//! | name: u16, bytes | target (links): u16, bytes
//! | extents: u32, each start u64 blocks u32 | checksums: u32, each u32 | attributes: u16, each u16 bytes u32 bytes
//! ```
//!
//! Little-endian throughout. A put is the node's whole state, so applying one twice, or an older one before a
//! newer one, does no harm. The journal guards records with checksums; a record that does not decode was written
//! by something else, and is refused.

use super::Extent;

/// One change of the catalog.
#[derive(Debug, PartialEq, Eq, Clone)]
pub enum Record {
    Put(Box<Put>),
    Remove(u64),
}

#[derive(Debug, PartialEq, Eq, Clone, Default)]
pub struct Put {
    pub id: u64,
    /// 0 file, 1 directory, 2 symbolic link.
    pub kind: u8,
    pub device: u8,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// 0 in the root itself: its parent is itself.
    pub parent: u64,
    pub seq: u64,
    pub size: u64,
    pub mtime: i64,
    pub ctime: i64,
    pub atime: i64,
    /// Bit 0: slot file. Bit 1: a directory with plain POSIX visibility.
    pub flags: u8,
    pub name: Vec<u8>,
    pub target: Vec<u8>,
    pub extents: Vec<Extent>,
    pub crcs: Vec<u32>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

const PUT: u8 = 1;
const REMOVE: u8 = 2;

impl Record {
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Remove(id) => {
                out.push(REMOVE);
                out.extend(id.to_le_bytes());
            }
            Self::Put(put) => put.encode(out),
        }
    }

    /// None if the bytes are no record.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let record = match from.u8()? {
            REMOVE => Self::Remove(from.u64()?),
            PUT => Self::Put(Box::new(Put::decode(&mut from)?)),
            _ => return None,
        };
        from.0.is_empty().then_some(record)
    }
}

impl Put {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(PUT);
        out.extend(self.id.to_le_bytes());
        out.extend([self.kind, self.device]);
        out.extend(self.mode.to_le_bytes());
        out.extend(self.uid.to_le_bytes());
        out.extend(self.gid.to_le_bytes());
        for word in [self.parent, self.seq, self.size] {
            out.extend(word.to_le_bytes());
        }
        for time in [self.mtime, self.ctime, self.atime] {
            out.extend(time.to_le_bytes());
        }
        out.push(self.flags);
        for text in [&self.name, &self.target] {
            out.extend((text.len() as u16).to_le_bytes());
            out.extend(text);
        }
        out.extend((self.extents.len() as u32).to_le_bytes());
        for extent in &self.extents {
            out.extend(extent.start.to_le_bytes());
            out.extend(extent.blocks.to_le_bytes());
        }
        out.extend((self.crcs.len() as u32).to_le_bytes());
        for crc in &self.crcs {
            out.extend(crc.to_le_bytes());
        }
        out.extend((self.xattrs.len() as u16).to_le_bytes());
        for (name, value) in &self.xattrs {
            out.extend((name.len() as u16).to_le_bytes());
            out.extend(name);
            out.extend((value.len() as u32).to_le_bytes());
            out.extend(value);
        }
    }

    fn decode(from: &mut Reader<'_>) -> Option<Self> {
        let mut put = Self { id: from.u64()?, kind: from.u8()?, device: from.u8()?, ..Self::default() };
        put.mode = from.u16()?;
        put.uid = from.u32()?;
        put.gid = from.u32()?;
        put.parent = from.u64()?;
        put.seq = from.u64()?;
        put.size = from.u64()?;
        put.mtime = from.u64()? as i64;
        put.ctime = from.u64()? as i64;
        put.atime = from.u64()? as i64;
        put.flags = from.u8()?;
        let len = usize::from(from.u16()?);
        put.name = from.bytes(len)?.to_vec();
        let len = usize::from(from.u16()?);
        put.target = from.bytes(len)?.to_vec();
        for _ in 0..from.u32()? {
            put.extents.push(Extent { start: from.u64()?, blocks: from.u32()? });
        }
        for _ in 0..from.u32()? {
            put.crcs.push(from.u32()?);
        }
        for _ in 0..from.u16()? {
            let len = usize::from(from.u16()?);
            let name = from.bytes(len)?.to_vec();
            let len = from.u32()? as usize;
            put.xattrs.push((name, from.bytes(len)?.to_vec()));
        }
        (put.kind <= 2).then_some(put)
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }
    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }
    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn example() -> Put {
        Put {
            id: 1 << 32 | 7,
            mode: 0o644,
            parent: 1 << 32,
            size: 300_000,
            mtime: -5,
            name: b"block".to_vec(),
            extents: vec![Extent { start: 9, blocks: 64 }, Extent { start: u64::MAX, blocks: 10 }],
            crcs: vec![1, 2],
            xattrs: vec![(b"user.a".to_vec(), vec![0; 300])],
            ..Put::default()
        }
    }

    #[test]
    fn a_record_reads_back() {
        for record in [Record::Put(Box::new(example())), Record::Remove(42)] {
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            assert_eq!(Record::decode(&bytes), Some(record));
        }
    }

    #[test]
    fn a_cut_record_is_refused() {
        let mut bytes = Vec::new();
        Record::Put(Box::new(example())).encode(&mut bytes);
        for len in 0..bytes.len() {
            assert_eq!(Record::decode(&bytes[..len]), None, "{len} of {} bytes", bytes.len());
        }
        bytes.push(0);
        assert_eq!(Record::decode(&bytes), None);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(record) = Record::decode(&bytes) {
                let mut again = Vec::new();
                record.encode(&mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
