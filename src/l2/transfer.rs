//! A transfer inside an engine, and the pieces into which it is cut.
//!
//! The queue and every piece at the kernel hold a share of the [`Transfer`]. When the last share goes, the
//! transfer lets go of its memory and answers. So it is answered once, on every path, also when an engine's
//! thread dies; and since whoever talks to the kernel gives up its piece only after the kernel has answered,
//! never too early.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::engine::Done;
use super::meters::Meters;
use super::{Class, Direction, Io, Target};
use crate::memory::Span;

pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) class: Class,
    offset: u64,
    len: usize,
    /// `Some` until the transfer is dropped.
    span: Option<Span>,
    /// `Some` until the transfer is dropped. Never locked: the mutex only makes it `Sync`.
    done: Mutex<Option<Done>>,
    /// Bytes that have arrived. All of them make it a success.
    landed: AtomicUsize,
    /// The first error. What has not been issued by then never is.
    fault: OnceLock<io::Error>,
    /// Whether a piece was ever taken: which of two gauges counts it.
    started: AtomicBool,
    meters: Arc<Meters>,
}

impl Transfer {
    /// Takes `io` in. One that leaves the device comes back with its error already set, to be answered by
    /// the engine's thread like every other.
    pub(super) fn accept(io: Io, target: &Target, meters: &Arc<Meters>) -> Arc<Self> {
        let Io { direction, class, offset, span, done } = io;
        let len = span.len();
        meters.accepted(class);
        let fault = OnceLock::new();
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= target.len);
        if !inside {
            let _ = fault.set(io::Error::new(
                end_of_device(direction),
                format!("{}: {len} bytes at {offset} of {}", target.label, target.len),
            ));
        }
        Arc::new(Self {
            direction,
            class,
            offset,
            len,
            span: Some(span),
            done: Mutex::new(Some(done)),
            landed: AtomicUsize::new(0),
            fault,
            started: AtomicBool::new(false),
            meters: meters.clone(),
        })
    }

    /// Answers with `error`, unless another came first, once the last piece is back.
    pub(super) fn fail(&self, error: io::Error) {
        let _ = self.fault.set(error);
    }

    /// Whether nothing is left to ask of the kernel.
    pub(super) fn settled(&self) -> bool {
        self.len == 0 || self.fault.get().is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The `len` bytes at `at`, to be given to the kernel.
    pub(super) fn piece(self: &Arc<Self>, at: usize, len: usize) -> Piece {
        assert!(at <= self.len && len <= self.len - at, "piece {at}+{len} of a transfer of {}", self.len);
        if !self.started.swap(true, Ordering::Relaxed) {
            self.meters.started(self.class);
        }
        Piece { transfer: self.clone(), at, len, taken: len }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let outcome = match self.fault.take() {
            Some(error) => Err(error),
            None if *self.landed.get_mut() == self.len => Ok(()),
            None => Err(io::Error::other("the I/O engine ended before it did this transfer")),
        };
        let bytes = outcome.is_ok().then_some(self.len as u64);
        self.meters.answered(self.class, self.direction, *self.started.get_mut(), bytes);
        drop(self.span.take());
        if let Some(done) = self.done.get_mut().take() {
            // A panic in a callback would end the thread on which all other transfers depend.
            if catch_unwind(AssertUnwindSafe(|| done(outcome))).is_err() {
                log::error!("a completion of an L2 transfer panicked; other transfers go on");
            }
        }
    }
}

/// A part of a transfer that the kernel carries out in one operation (more if it comes up short).
pub(super) struct Piece {
    transfer: Arc<Transfer>,
    at: usize,
    len: usize,
    /// The length with which it was taken from the queue, which accounts for it.
    taken: usize,
}

/// What is left of a piece after the kernel's answer.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Nothing.
    Landed,
    /// The piece now names what is missing; issue it again.
    Rest,
}

impl Piece {
    pub(super) fn direction(&self) -> Direction {
        self.transfer.direction
    }

    pub(super) fn class(&self) -> Class {
        self.transfer.class
    }

    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    pub(super) fn offset(&self) -> u64 {
        self.transfer.offset + self.at as u64
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where the piece's `len()` bytes are. Valid while the piece is.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        // `piece()` has checked that `at` is inside the span.
        self.span().as_ptr().wrapping_add(self.at)
    }

    pub(super) fn span(&self) -> &Span {
        self.transfer.span.as_ref().expect("held until the transfer is dropped")
    }

    /// Takes in the kernel's answer: bytes, or an error.
    ///
    /// Of a short transfer only whole `grain`s count, because direct I/O cannot go on in between.
    pub(super) fn step(&mut self, answer: io::Result<usize>, grain: usize) -> Step {
        let got = match answer {
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Step::Rest,
            Err(error) => {
                self.transfer.fail(error);
                return Step::Landed;
            }
        };
        let kept = if got >= self.len { self.len } else { got - got % grain };
        if kept == 0 {
            self.transfer.fail(end_of_device(self.direction()).into());
            return Step::Landed;
        }
        self.transfer.landed.fetch_add(kept, Ordering::AcqRel);
        self.at += kept;
        self.len -= kept;
        if self.len == 0 { Step::Landed } else { Step::Rest }
    }
}

fn end_of_device(direction: Direction) -> io::ErrorKind {
    match direction {
        Direction::Read => io::ErrorKind::UnexpectedEof,
        Direction::Write => io::ErrorKind::WriteZero,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{AlignedBuf, PAGE};
    use std::fs::File;
    use std::sync::mpsc::{Receiver, channel};

    fn transfer(len: usize) -> (Arc<Transfer>, Receiver<io::Result<()>>) {
        let (tell, told) = channel();
        let target = Target {
            file: Arc::new(File::open("/dev/null").unwrap()),
            len: 1 << 30,
            grain: 512,
            label: "test".into(),
        };
        let io = Io {
            direction: Direction::Read,
            class: Class::Demand,
            offset: 0,
            span: AlignedBuf::zeroed(len).into_span(),
            done: Box::new(move |outcome| tell.send(outcome).unwrap()),
        };
        (Transfer::accept(io, &target, &Arc::default()), told)
    }

    #[test]
    fn a_short_answer_is_continued_at_a_whole_grain() {
        let (whole, told) = transfer(2 * PAGE);
        let mut piece = whole.piece(0, 2 * PAGE);
        drop(whole);
        assert_eq!(piece.step(Ok(PAGE + 700), 512), Step::Rest);
        assert_eq!((piece.offset(), piece.len()), (PAGE as u64 + 512, PAGE - 512));
        assert_eq!(piece.step(Err(io::ErrorKind::Interrupted.into()), 512), Step::Rest);
        assert!(told.try_recv().is_err());
        assert_eq!(piece.step(Ok(PAGE - 512), 512), Step::Landed);
        drop(piece);
        told.recv().unwrap().unwrap();
    }

    #[test]
    fn the_end_of_the_device_is_an_error() {
        let (whole, told) = transfer(PAGE);
        let mut piece = whole.piece(0, PAGE);
        drop(whole);
        assert_eq!(piece.step(Ok(100), 512), Step::Landed);
        drop(piece);
        assert_eq!(told.recv().unwrap().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn the_first_error_is_the_answer_and_comes_when_all_pieces_are_back() {
        let (whole, told) = transfer(2 * PAGE);
        let (mut first, mut second) = (whole.piece(0, PAGE), whole.piece(PAGE, PAGE));
        drop(whole);
        first.step(Err(io::Error::from_raw_os_error(libc::EIO)), 512);
        drop(first);
        assert!(told.try_recv().is_err(), "the kernel still has the second piece");
        second.step(Err(io::Error::from_raw_os_error(libc::ENOSPC)), 512);
        drop(second);
        assert_eq!(told.recv().unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn what_nobody_did_is_answered_with_an_error() {
        let (whole, told) = transfer(PAGE);
        drop(whole);
        assert!(told.recv().unwrap().is_err());
    }
}
