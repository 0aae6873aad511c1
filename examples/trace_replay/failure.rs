//! What went wrong, in one line: the operation, the thing it was done to, and the cause.

use std::fmt;
use std::io;

pub type Result<T> = std::result::Result<T, Failure>;

#[derive(Debug)]
pub struct Failure {
    what: String,
    cause: Option<io::Error>,
}

impl Failure {
    pub fn new(what: String) -> Self {
        Self { what, cause: None }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Some(cause) => write!(f, "{}: {cause}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// Names the operation that met an I/O error.
pub trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Failure { what: what(), cause: Some(e.into()) })
    }
}
