//! Many writers whose files together are larger than L1 all finish, and every byte is on the device (rules R2, R5, R7).
//!
//! They write in steps that end inside blocks. So under pressure blocks are spilled while they are being filled, and
//! change while their early copy is on its way; what counts in the end is the last state of each.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File};
use std::io::Write;

use common::{Mount, Options, bytes, memory_only};

const WRITERS: u64 = 8;
const FILE_BYTES: usize = 18 << 20;
/// Not a multiple of anything that matters.
const STEP: usize = (1 << 20) - 52;

#[test]
fn writers_that_need_more_than_l1_all_finish_and_lose_nothing() {
    if memory_only() {
        return; // without L2 there is nowhere else for their bytes
    }
    let mut mount = Mount::with(Options::new(64, 768));
    let rounds = if std::env::var_os("KVCACHEFS_TEST_FULL").is_some() { 20 } else { 3 };
    for round in 0..rounds {
        let name = |writer| format!("{writer}.kv");
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let path = mount.at(&name(writer));
                scope.spawn(move || {
                    let content = bytes(round * WRITERS + writer, FILE_BYTES);
                    let mut file = File::create(path).unwrap();
                    content.chunks(STEP).for_each(|part| file.write_all(part).unwrap());
                });
            }
        });
        mount.drain();
        mount.check_quiet();
        if round + 1 == rounds {
            mount.restart();
        }
        for writer in 0..WRITERS {
            let content = fs::read(mount.at(&name(writer))).unwrap();
            assert!(content == bytes(round * WRITERS + writer, FILE_BYTES), "{} differs", name(writer));
        }
    }
    mount.check_bounds();
}
