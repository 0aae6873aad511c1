//! Hints: windows that are brought to L1 (rule R13).

use super::tickets::Progress;
use crate::store::core::Core;

impl Core {
    /// Nothing more is begun for a hint.
    pub(super) fn stop_hint(&mut self, _id: u64) -> Progress {
        Progress::default()
    }

    pub(super) fn hint_progress(&self, _id: u64) -> Progress {
        Progress::default()
    }
}
