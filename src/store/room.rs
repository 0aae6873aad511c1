//! What is taken of L2, in pages, and what will be.

/// What is taken of one device.
#[derive(Default, Debug, Clone, Copy)]
pub struct Space {
    /// Pages that files may use.
    pub capacity: u64,
    /// Pages in extents that belong to some file, or will be free after the next commit.
    pub allocated: u64,
    /// Pages set aside for dirty blocks that have no extents yet.
    pub reserved: u64,
    /// Pages among `allocated` that become free with the next commits.
    pub leaving: u64,
    /// Pages among `allocated` of blocks that have been stored anew, which become free in the same way. Unlike those
    /// that leave with their files they count as used until then: else rewriting could outrun the commits.
    pub stale: u64,
    /// Pages that files under construction here will take beyond what they have, as far as one can tell: of those that
    /// took some in this period, and of those that last did in the one before ([`Room::take`]). They are not used and
    /// keep nobody out; they say where the next file goes.
    pub(super) expected: [u64; 2],
}

impl Space {
    pub fn used(&self) -> u64 {
        (self.allocated + self.reserved).saturating_sub(self.leaving)
    }

    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used())
    }

    pub fn expected(&self) -> u64 {
        self.expected.iter().sum()
    }

    /// What will be free once the files under construction are whole. Less than nothing, if they will not fit.
    pub fn spare(&self) -> i64 {
        self.free() as i64 - self.expected() as i64
    }
}

/// What is taken of L2, device by device: a file lies on one of them.
#[derive(Default, Debug, Clone)]
pub struct Room {
    pub devices: Vec<Space>,
    /// The most pages ever used.
    pub peak: u64,
    /// The number of the period, and the pages that were set aside in it so far.
    pub(super) period: u64,
    taken: u64,
}

/// A period is over when that many pages were set aside in it, or this part of all there are.
const PERIOD_PAGES: u64 = 1 << 18;
const PERIODS_OF_ALL: u64 = 16;

impl Room {
    pub fn new(devices: Vec<Space>) -> Self {
        let mut room = Self { devices, ..Self::default() };
        room.note_peak();
        room
    }

    /// Sets pages of a device aside.
    ///
    /// Time is counted in these. A file that takes none for a whole period, while others do, may be kept open for ever
    /// and be done, or never get more than the holes that it consists of: nothing is expected of it any more, until it
    /// goes on. Periods are long enough for each of many files that are written at once to take some.
    pub fn take(&mut self, device: u8, pages: u64) {
        self.on(device).reserved += pages;
        self.note_peak();
        self.taken += pages;
        let all: u64 = self.devices.iter().map(|device| device.capacity).sum();
        if self.taken >= PERIOD_PAGES.min(all / PERIODS_OF_ALL) {
            (self.period, self.taken) = (self.period + 1, 0);
            self.devices.iter_mut().for_each(|device| device.expected = [0, device.expected[0]]);
        }
    }

    /// Whether what was expected in `period` is.
    pub(super) fn is_expected_since(&self, period: u64) -> bool {
        period + 1 >= self.period
    }

    pub fn expected(&self) -> u64 {
        self.devices.iter().map(Space::expected).sum()
    }

    pub fn used(&self) -> u64 {
        self.devices.iter().map(Space::used).sum()
    }

    pub fn note_peak(&mut self) {
        self.peak = self.peak.max(self.used());
    }

    pub fn on(&mut self, device: u8) -> &mut Space {
        &mut self.devices[usize::from(device)]
    }

    /// The device that will have the most room.
    pub fn emptiest(&self) -> u8 {
        (0..self.devices.len()).max_by_key(|&at| self.devices[at].spare()).unwrap_or(0) as u8
    }
}
