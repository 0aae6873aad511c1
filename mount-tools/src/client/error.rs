//! What failed, why, and what to do: one line for a person, and an errno for a program.

use std::fmt;

use nix::errno::Errno;

/// The result of a request.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A request that failed as a whole. What is wrong with one range of it is the state of that range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    doing: &'static str,
    thing: String,
    errno: Errno,
    remedy: Option<String>,
}

impl Error {
    pub(super) fn new(doing: &'static str, thing: impl fmt::Display, errno: Errno) -> Self {
        Self { doing, thing: thing.to_string(), errno, remedy: None }
    }

    pub(super) fn remedy(self, remedy: impl fmt::Display) -> Self {
        Self { remedy: Some(remedy.to_string()), ..self }
    }

    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// The mount, path, lease or ticket that it is about.
    pub fn thing(&self) -> &str {
        &self.thing
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.thing, self.doing, self.errno.desc())?;
        match &self.remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        Self::new(Self::from(error.errno).kind(), error)
    }
}
