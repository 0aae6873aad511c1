//! The pieces that the kernel may be touching.

use crate::l2::transfer::Piece;

/// Pieces at the kernel, each under the number that its completion will carry.
#[derive(Default)]
pub(super) struct Flights {
    places: Vec<Option<Flight>>,
    free: Vec<u32>,
}

struct Flight {
    piece: Piece,
    /// The fixed buffer that it uses.
    slot: Option<u16>,
}

impl Flights {
    pub(super) fn take_off(&mut self, piece: Piece, slot: Option<u16>) -> u64 {
        let flight = Some(Flight { piece, slot });
        if let Some(place) = self.free.pop() {
            self.places[place as usize] = flight;
            return place.into();
        }
        self.places.push(flight);
        self.places.len() as u64 - 1
    }

    /// # Panics
    /// If the kernel answers what was not asked; then nothing it says can be trusted.
    pub(super) fn touch_down(&mut self, number: u64) -> (Piece, Option<u16>) {
        let place = number as u32;
        let flight = self.places[place as usize].take();
        let Flight { piece, slot } =
            flight.unwrap_or_else(|| panic!("completion {number} without a transfer"));
        self.free.push(place);
        (piece, slot)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }
}

impl Drop for Flights {
    /// Only a panic of the ring's thread comes here with flights left. The kernel then still reads or writes
    /// their memory, and nobody is left to learn when it stops: ending the process is the only way to keep
    /// rule R10.
    fn drop(&mut self) {
        if !self.is_empty() {
            log::error!("the io_uring thread ended with transfers in flight; ending the process");
            std::process::abort();
        }
    }
}
