//! What goes wrong while starting, stopping or answering a control request.
//!
//! Such an error is read by a person, once, on a terminal or in a journal. So it is one line that
//! names the thing, what is wrong with it and what to do: `thing: cause; remedy`. What goes wrong
//! inside a file operation becomes an errno instead and has a type of its own in `fs`.

use std::error::Error as StdError;
use std::fmt;

/// The result of a start-up or control step.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One failed step, worded for the person who can repair it.
#[derive(Debug)]
pub struct Error {
    /// The option, path or key that the sentence is about, as the user wrote it.
    thing: String,
    cause: String,
    remedy: Option<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Says that `thing` is wrong because of `cause`.
    pub fn new(thing: impl fmt::Display, cause: impl fmt::Display) -> Self {
        Self { thing: thing.to_string(), cause: cause.to_string(), remedy: None, source: None }
    }

    /// Says that `thing` is wrong and takes the cause's words from `source`.
    pub fn caused_by(thing: impl fmt::Display, source: impl StdError + Send + Sync + 'static) -> Self {
        Self { source: Some(Box::new(source)), ..Self::new(thing, "") }
    }

    /// Adds what the reader should do.
    #[must_use]
    pub fn remedy(mut self, remedy: impl fmt::Display) -> Self {
        self.remedy = Some(remedy.to_string());
        self
    }

    /// Calls the thing, and what the remedy suggests in its place, by the name that it has where it was written.
    #[must_use]
    pub fn renamed(mut self, name: impl Fn(&str) -> Option<String>) -> Self {
        if let Some(name) = name(&self.thing) {
            self.thing = name;
            self.remedy = self.remedy.map(|remedy| match remedy.strip_prefix("did you mean --") {
                Some(meant) => format!("did you mean {}", meant.replace('-', "_")),
                None => remedy,
            });
        }
        self
    }

    /// Puts `thing` in front: the file or variable in which the offending value stood.
    #[must_use]
    pub fn within(mut self, thing: impl fmt::Display) -> Self {
        self.thing =
            if self.thing.is_empty() { thing.to_string() } else { format!("{thing}: {}", self.thing) };
        self
    }
}

/// One line, whatever the parts contain: a message of several lines would be torn apart by a journal.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = vec![self.thing.clone(), self.cause.clone()];
        if let Some(source) = &self.source {
            parts.push(source.to_string());
        }
        parts.retain(|part| !part.is_empty());
        let mut line = parts.join(": ");
        if let Some(remedy) = &self.remedy {
            line = format!("{line}; {remedy}");
        }
        f.write_str(&one_line(&line))
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// Folds every run of white space, line breaks included, into one blank.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_with_thing_cause_and_remedy() {
        let error = Error::caused_by("/nvme/kv", std::io::Error::other("no\nspace")).remedy("free some");
        assert_eq!(error.to_string(), "/nvme/kv: no space; free some");
        assert!(error.source().is_some());
        assert_eq!(Error::new("--l1", "too small").within("kv.toml").to_string(), "kv.toml: --l1: too small");
    }
}
