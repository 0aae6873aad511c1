//! A file as its client knows it.

use crate::store::Handle;

pub struct File {
    /// Who writes to it now.
    pub writer: Option<Writer>,
    /// What was found under its name when it was closed last; None: nothing.
    pub closed: Option<Vec<u8>>,
}

pub struct Writer {
    pub handle: Handle,
    pub content: Vec<u8>,
    /// Others do not find it before it is closed or fsynced.
    pub private: bool,
    /// A write to it failed while it was private: it may be discarded when it is closed (S5).
    pub incomplete: bool,
}

impl File {
    pub fn is_private(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.private)
    }
}

impl Writer {
    /// Whether this may be found once it is closed, where `before` was found until then.
    pub fn may_leave(&self, found: Option<&Vec<u8>>, before: Option<&Vec<u8>>) -> bool {
        found == Some(&self.content) || (self.incomplete && found == before)
    }
}

/// How two contents differ, in a few words.
pub fn difference(found: &[u8], expected: &[u8]) -> String {
    let first = found.iter().zip(expected).position(|(one, other)| one != other);
    let last = found.iter().zip(expected).rposition(|(one, other)| one != other);
    format!(
        "{} bytes instead of {}, the first that differs is {first:?}, the last {last:?}",
        found.len(),
        expected.len()
    )
}
