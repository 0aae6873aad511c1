//! Files that take most of the room of a store.

use std::sync::Arc;

use nix::errno::Errno;

use super::MIB;
use super::change::Change;
use crate::daemon::device_log::rig::{barrier, caller, close, create, open, write};
use crate::store::node::{Idx, ROOT_INO};
use crate::store::{Handle, Store};

const PAGE: usize = 4096;

pub struct Ballast {
    names: Vec<String>,
    /// A file that somebody has open is not evicted.
    readers: Vec<Handle>,
}

impl Ballast {
    /// Leaves these bytes of each device. `held`: eviction cannot take it.
    pub fn fill(store: &Arc<Store>, left: &[usize], held: bool) -> Self {
        let names: Vec<String> = (0..left.len()).map(|at| format!("ballast{at}")).collect();
        for name in &names {
            fill_one(store, name, left);
            barrier(store).unwrap();
        }
        let readers = names.iter().filter(|_| held).map(|name| open(store, name, libc::O_RDONLY).unwrap());
        Self { readers: readers.collect(), names }
    }

    pub fn remove(self, store: &Arc<Store>) {
        self.readers.iter().for_each(|reader| store.release(reader));
        for name in self.names {
            let removed = store.unlink(ROOT_INO, name.as_bytes(), &caller());
            assert!(matches!(removed, Ok(()) | Err(Errno::ENOENT)), "{name}: {removed:?}");
        }
    }
}

fn fill_one(store: &Arc<Store>, name: &str, left: &[usize]) {
    let handle = create(store, name, libc::O_EXCL).unwrap();
    let mut len = 0;
    while let more = more_bytes(store, handle.id.idx(), left)
        && more > 0
    {
        match write(store, &handle, len, &vec![9; more]) {
            Ok(_) => len += more,
            // The device it is on has no room, or never has so much.
            Err(Errno::ENOSPC | Errno::EFBIG) => break,
            Err(errno) => panic!("{name}: {errno}"),
        }
    }
    // Else it would lack what it was refused (S5).
    Change::Truncate { size: len }.ask(store, &handle).unwrap();
    // Else it would lack what it was refused (S5).
    Change::Truncate { size: len }.ask(store, &handle).unwrap();
    close(store, &handle);
}

/// What may still be taken on the device of this file, a MiB at a time.
fn more_bytes(store: &Arc<Store>, idx: Idx, left: &[usize]) -> usize {
    store.with(|core| {
        let device = core.node(idx).device;
        let free = core.space.on(device).free() as usize * PAGE;
        free.saturating_sub(left[usize::from(device)]).min(MIB)
    })
}
