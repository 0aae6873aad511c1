//! Chunks: memory from shared arenas, in powers of two of pages.
//!
//! A buddy allocator in each arena. Clients never see this memory, so it is used again at once.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use super::pool::Pool;
use super::slab::Slab;
use crate::memory::{PAGE, Span};

/// Largest chunk: one block of a file.
pub const CHUNK_MAX: usize = 256 << 10;
/// Size of an arena.
pub(super) const ARENA_BYTES: usize = 2 << 20;
/// 4 KiB << 6 = 256 KiB.
const ORDERS: usize = 7;

/// The order whose chunks hold `len` bytes.
fn order_of(len: usize) -> usize {
    len.div_ceil(PAGE).next_power_of_two().trailing_zeros() as usize
}

pub(super) fn chunk_bytes(len: usize) -> usize {
    PAGE << order_of(len.max(1))
}

pub(super) struct Arena {
    pub slab: Slab,
    /// Free offsets by order.
    free: [BTreeSet<u32>; ORDERS],
    pub used: usize,
}

impl Arena {
    fn new(slab: Slab) -> Self {
        let mut free: [BTreeSet<u32>; ORDERS] = Default::default();
        free[ORDERS - 1] = (0..ARENA_BYTES).step_by(CHUNK_MAX).map(|at| at as u32).collect();
        Self { slab, free, used: 0 }
    }

    fn take(&mut self, order: usize) -> Option<u32> {
        let found = (order..ORDERS).find(|&at| !self.free[at].is_empty())?;
        let offset = self.free[found].pop_first()?;
        for at in (order..found).rev() {
            self.free[at].insert(offset + ((PAGE << at) as u32));
        }
        self.used += PAGE << order;
        Some(offset)
    }

    fn give(&mut self, mut offset: u32, mut order: usize) {
        self.used -= PAGE << order;
        while order < ORDERS - 1 {
            let buddy = offset ^ ((PAGE << order) as u32);
            if !self.free[order].remove(&buddy) {
                break;
            }
            offset = offset.min(buddy);
            order += 1;
        }
        self.free[order].insert(offset);
    }
}

/// All arenas.
#[derive(Default)]
pub(super) struct Arenas {
    list: Vec<Option<Arena>>,
}

impl Arenas {
    /// A place for `len` bytes, if an arena has one.
    pub fn take(&mut self, len: usize) -> Option<(usize, u32, Slab)> {
        let order = order_of(len);
        for (at, arena) in self.list.iter_mut().enumerate() {
            if let Some(arena) = arena
                && let Some(offset) = arena.take(order)
            {
                return Some((at, offset, arena.slab.clone()));
            }
        }
        None
    }

    pub fn add(&mut self, slab: Slab) {
        let arena = Some(Arena::new(slab));
        match self.list.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = arena,
            None => self.list.push(arena),
        }
    }

    pub fn give(&mut self, arena: usize, offset: u32, len: usize) {
        if let Some(Some(arena)) = self.list.get_mut(arena) {
            arena.give(offset, order_of(len));
        }
    }

    pub fn count(&self) -> usize {
        self.list.iter().flatten().count()
    }

    pub fn used(&self) -> usize {
        self.list.iter().flatten().map(|arena| arena.used).sum()
    }

    /// An arena that holds nothing.
    pub fn take_empty(&mut self) -> Option<Slab> {
        let place = self.list.iter_mut().find(|place| place.as_ref().is_some_and(|arena| arena.used == 0))?;
        place.take().map(|arena| arena.slab)
    }
}

struct Inner {
    slab: Slab,
    arena: usize,
    offset: u32,
    len: usize,
    pool: Weak<Pool>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            pool.give_chunk(self.arena, self.offset, self.len);
        }
    }
}

/// A share of a piece of an arena.
#[derive(Clone)]
pub struct Chunk(Arc<Inner>);

impl Chunk {
    pub(super) fn new(pool: &Arc<Pool>, slab: Slab, arena: usize, offset: u32, len: usize) -> Self {
        Self(Arc::new(Inner { slab, arena, offset, len: chunk_bytes(len), pool: Arc::downgrade(pool) }))
    }

    pub fn len(&self) -> usize {
        self.0.len
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    pub fn span(&self) -> Span {
        let start = self.0.offset as usize;
        self.0.slab.span(start..start + self.0.len).kept_by(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_to_powers_of_two_pages() {
        assert_eq!(chunk_bytes(1), 4096);
        assert_eq!(chunk_bytes(4097), 8192);
        assert_eq!(chunk_bytes(CHUNK_MAX), CHUNK_MAX);
    }
}
