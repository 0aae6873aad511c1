//! The checksum of a file that is written front to back, kept up on the way (rule R9).

use smallvec::SmallVec;

use super::hot::BLOCK;

/// The running checksum of a file that is written front to back.
#[derive(Clone)]
pub struct Running {
    pub block: usize,
    pub at: usize,
    pub state: u32,
    /// Blocks that were completed on the way.
    pub done: SmallVec<[(usize, u32); 6]>,
}

const CRC: crc_fast::CrcAlgorithm = crc_fast::CrcAlgorithm::Crc32Iscsi;

pub fn crc_state(bytes: &[u8], state: Option<u32>) -> u32 {
    let mut digest = match state {
        Some(state) => crc_fast::Digest::new_with_init_state(CRC, u64::from(state)),
        None => crc_fast::Digest::new(CRC),
    };
    digest.update(bytes);
    digest.get_state() as u32
}

pub fn crc_of_state(state: u32) -> u32 {
    crc_fast::Digest::new_with_init_state(CRC, u64::from(state)).finalize() as u32
}

impl Running {
    pub fn update(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let (now, rest) = data.split_at(data.len().min(BLOCK as usize - self.at));
            self.state = crc_state(now, (self.at > 0).then_some(self.state));
            self.at += now.len();
            if self.at == BLOCK as usize {
                self.done.push((self.block, crc_of_state(self.state)));
                self.block += 1;
                self.at = 0;
            }
            data = rest;
        }
    }
}
