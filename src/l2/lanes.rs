//! The order in which an engine serves what it has accepted.
//!
//! One first-in-first-out lane per class, served in the order of [`Class`], under three rules:
//! 1. At most `depth` pieces are at the kernel.
//! 2. Of these at most half, and at most `write_back_bytes`, are write-back, whether or not a read waits:
//!    so a read that arrives finds a place at once and a short queue at the device.
//! 3. A lane that was passed over [`PATIENCE`] times is served next, so nothing starves.

use std::collections::VecDeque;
use std::sync::Arc;

use super::transfer::{Piece, Transfer};
use super::{Class, EngineOptions};
use crate::memory::PAGE;

/// How many pieces of other lanes may be taken while a lane waits. Under a full load of reads one piece in
/// nine is write-back: slow, but the bound on dirty bytes (rule R7) keeps draining.
const PATIENCE: u32 = 8;

/// The kernel moves at most 2 GiB less a page in one operation.
const PIECE_BYTES_MAX: usize = 1 << 30;

pub(super) struct Lanes {
    lanes: [Lane; 3],
    depth: usize,
    piece_bytes: usize,
    write_back_pieces: usize,
    write_back_bytes: usize,
    /// Pieces taken and not landed, of all classes.
    taken: usize,
}

#[derive(Default)]
struct Lane {
    waiting: VecDeque<Waiting>,
    passed_over: u32,
    taken_pieces: usize,
    taken_bytes: usize,
}

/// A transfer of which the first `cut` bytes have been taken.
struct Waiting {
    transfer: Arc<Transfer>,
    cut: usize,
}

/// What comes next.
pub(super) enum Next {
    /// To be given to the kernel, and then reported by [`Lanes::landed`].
    Piece(Piece),
    /// Nothing to do for it: drop it, but only after the lock on the lanes, since that answers it.
    Settled(Arc<Transfer>),
}

impl Lanes {
    pub(super) fn new(depth: usize, options: &EngineOptions) -> Self {
        Self {
            lanes: Default::default(),
            depth: depth.max(1),
            piece_bytes: (options.piece_bytes as usize).clamp(PAGE, PIECE_BYTES_MAX).next_multiple_of(PAGE),
            write_back_pieces: (depth / 2).max(1),
            write_back_bytes: usize::try_from(options.write_back_bytes).unwrap_or(usize::MAX),
            taken: 0,
        }
    }

    pub(super) fn push(&mut self, transfer: Arc<Transfer>) {
        self.lanes[transfer.class.index()].waiting.push_back(Waiting { transfer, cut: 0 });
    }

    /// Whether everything accepted has been taken.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.waiting.is_empty())
    }

    /// Whether [`Lanes::take`] has something to give.
    pub(super) fn is_open(&self) -> bool {
        self.choose().is_some()
    }

    pub(super) fn take(&mut self) -> Option<Next> {
        let chosen = self.choose()?;
        for class in Class::ALL {
            if class != chosen && self.may_take(class) {
                self.lanes[class.index()].passed_over += 1;
            }
        }
        let lane = &mut self.lanes[chosen.index()];
        lane.passed_over = 0;
        let front = lane.waiting.front_mut()?;
        if front.transfer.settled() {
            return lane.waiting.pop_front().map(|waiting| Next::Settled(waiting.transfer));
        }
        let len = self.piece_bytes.min(front.transfer.len() - front.cut);
        let piece = front.transfer.piece(front.cut, len);
        front.cut += len;
        if front.cut == front.transfer.len() {
            lane.waiting.pop_front();
        }
        lane.taken_pieces += 1;
        lane.taken_bytes += len;
        self.taken += 1;
        Some(Next::Piece(piece))
    }

    /// Empties the lanes. Dropping the transfers answers them: not under the lock.
    pub(super) fn take_all(&mut self) -> Vec<Arc<Transfer>> {
        self.lanes
            .iter_mut()
            .flat_map(|lane| lane.waiting.drain(..))
            .map(|waiting| waiting.transfer)
            .collect()
    }

    /// The kernel has let go of a piece that was taken.
    pub(super) fn landed(&mut self, piece: &Piece) {
        let lane = &mut self.lanes[piece.class().index()];
        lane.taken_pieces -= 1;
        lane.taken_bytes -= piece.taken();
        self.taken -= 1;
    }

    fn choose(&self) -> Option<Class> {
        if self.taken >= self.depth {
            return None;
        }
        let mut ready = Class::ALL.into_iter().filter(|&class| self.may_take(class));
        let first = ready.next()?;
        Some(ready.find(|class| self.lanes[class.index()].passed_over >= PATIENCE).unwrap_or(first))
    }

    fn may_take(&self, class: Class) -> bool {
        let lane = &self.lanes[class.index()];
        let Some(front) = lane.waiting.front() else { return false };
        if class != Class::WriteBack || lane.taken_pieces == 0 {
            return true;
        }
        let len = self.piece_bytes.min(front.transfer.len() - front.cut);
        lane.taken_pieces < self.write_back_pieces && lane.taken_bytes + len <= self.write_back_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::l2::{Direction, Io, Target};
    use crate::memory::AlignedBuf;
    use std::fs::File;

    fn push(lanes: &mut Lanes, class: Class, len: usize) {
        let target = Target {
            file: Arc::new(File::open("/dev/null").unwrap()),
            len: 1 << 30,
            grain: 512,
            label: "test".into(),
        };
        let span = AlignedBuf::zeroed(len).into_span();
        let io = Io { direction: Direction::Read, class, offset: 0, span, done: Box::new(|_| ()) };
        lanes.push(Transfer::accept(io, &target, &Arc::default()));
    }

    fn take(lanes: &mut Lanes) -> Option<Piece> {
        lanes.take().map(|next| match next {
            Next::Piece(piece) => piece,
            Next::Settled(_) => panic!("nothing here is settled"),
        })
    }

    fn lanes(depth: usize) -> Lanes {
        let options = EngineOptions { piece_bytes: 8192, write_back_bytes: 4 * 8192, ..Default::default() };
        Lanes::new(depth, &options)
    }

    #[test]
    fn reads_come_first_and_nobody_starves() {
        let mut lanes = lanes(64);
        for _ in 0..30 {
            push(&mut lanes, Class::WriteBack, 4096);
            push(&mut lanes, Class::Promotion, 4096);
            push(&mut lanes, Class::Demand, 4096);
        }
        let served: Vec<_> =
            std::iter::from_fn(|| take(&mut lanes)).take(20).map(|piece| piece.class()).collect();
        assert!(served[..8].iter().all(|&class| class == Class::Demand));
        assert_eq!(served[8], Class::Promotion);
        assert_eq!(served[9], Class::WriteBack);
        assert_eq!(served[10], Class::Demand);
        assert_eq!(served.iter().filter(|&&class| class == Class::WriteBack).count(), 2);
    }

    #[test]
    fn write_back_never_holds_more_than_its_share() {
        let mut lanes = lanes(64);
        push(&mut lanes, Class::WriteBack, 64 * 8192);
        let mut held: Vec<_> = std::iter::from_fn(|| take(&mut lanes)).collect();
        assert_eq!(held.len(), 4, "bound by bytes");
        push(&mut lanes, Class::Demand, 4096);
        assert_eq!(take(&mut lanes).map(|piece| piece.class()), Some(Class::Demand));
        lanes.landed(&held.pop().unwrap());
        assert!(take(&mut lanes).is_some());

        let mut lanes = self::lanes(4);
        push(&mut lanes, Class::WriteBack, 64 * 8192);
        assert_eq!(std::iter::from_fn(|| take(&mut lanes)).count(), 2, "bound by pieces");
    }

    #[test]
    fn a_transfer_is_cut_without_gap_or_overlap() {
        let mut lanes = lanes(64);
        push(&mut lanes, Class::Demand, 3 * 8192 + 4096);
        let cuts: Vec<_> =
            std::iter::from_fn(|| take(&mut lanes)).map(|piece| (piece.offset(), piece.len())).collect();
        assert_eq!(cuts, [(0, 8192), (8192, 8192), (16384, 8192), (24576, 4096)]);
        assert!(lanes.is_empty());
    }

    #[test]
    fn what_has_failed_is_not_issued_further() {
        let mut lanes = lanes(64);
        push(&mut lanes, Class::Demand, 4 * 8192);
        let mut piece = take(&mut lanes).unwrap();
        piece.step(Err(std::io::Error::from_raw_os_error(libc::EIO)), 512);
        assert!(matches!(lanes.take(), Some(Next::Settled(_))));
        assert!(lanes.is_empty());
    }
}
