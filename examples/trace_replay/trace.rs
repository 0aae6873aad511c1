//! Serving traces in Mooncake's form: one JSON object a line, whose `hash_ids` name the 512-token
//! prefix blocks of a request in order.
//!
//! Equal ids are the same reusable block, and an id depends on all text before it. Only `hash_ids` is
//! used: the replay runs as fast as the file system lets it, not by the trace's clock.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::failure::{Context, Failure, Result};

/// The trace that ships with the example; see NOTICE.md for its origin.
const EXCERPT: &str = include_str!("conversation_excerpt.jsonl");

/// The id of a prefix block, as the trace gives it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(pub u64);

/// One request of the trace.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Its prefix blocks, first block first.
    pub blocks: Vec<BlockId>,
    /// The latest earlier request of the same conversation, by index. A turn cannot be asked before
    /// the turn it continues was answered, so the replay does not start it earlier either.
    pub after: Option<usize>,
}

/// The requests to replay, in order of arrival.
#[derive(Debug)]
pub struct Trace {
    pub requests: Vec<Request>,
}

#[derive(Deserialize)]
struct Line {
    hash_ids: Vec<u64>,
}

impl Trace {
    /// The excerpt in this directory.
    pub fn excerpt(limit: Option<usize>) -> Result<Self> {
        Self::parse(EXCERPT.as_bytes(), limit)
    }

    /// Reads `path`, through `xz -dc` when it ends in `.xz`.
    pub fn open(path: &Path, limit: Option<usize>) -> Result<Self> {
        let trace = if path.extension().is_some_and(|e| e == "xz") {
            let out = Command::new("xz")
                .arg("-dc")
                .arg("--")
                .arg(path)
                .stdin(Stdio::null())
                .output()
                .context(|| {
                    format!("cannot run `xz -dc {}` (install xz-utils, or unpack the trace)", path.display())
                })?;
            if !out.status.success() {
                let said = String::from_utf8_lossy(&out.stderr);
                return Err(Failure::new(format!("cannot unpack the trace: {}", said.trim())));
            }
            Self::parse(out.stdout.as_slice(), limit)
        } else {
            let file =
                std::fs::File::open(path).context(|| format!("cannot open the trace {}", path.display()))?;
            Self::parse(BufReader::new(file), limit)
        };
        trace.map_err(|e| Failure::new(format!("{}: {e}", path.display())))
    }

    fn parse(lines: impl BufRead, limit: Option<usize>) -> Result<Self> {
        let mut requests = Vec::new();
        let mut latest = HashMap::new();
        for (index, line) in lines.lines().enumerate().take(limit.unwrap_or(usize::MAX)) {
            let line = line.context(|| "cannot read the trace".into())?;
            let Line { hash_ids } = serde_json::from_str(&line)
                .map_err(|e| Failure::new(format!("line {} is not a trace request: {e}", index + 1)))?;
            // The first block is the system prompt that all requests share; the second tells
            // conversations apart.
            let after = hash_ids.get(1).and_then(|&conversation| latest.insert(conversation, index));
            requests.push(Request { blocks: hash_ids.into_iter().map(BlockId).collect(), after });
        }
        if requests.is_empty() {
            return Err(Failure::new("the trace has no requests".into()));
        }
        Ok(Self { requests })
    }

    /// Blocks asked for, repeats counted.
    pub fn references(&self) -> u64 {
        self.requests.iter().map(|r| r.blocks.len() as u64).sum()
    }

    /// Different blocks asked for.
    pub fn unique_blocks(&self) -> u64 {
        self.requests.iter().flat_map(|r| &r.blocks).collect::<HashSet<_>>().len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_excerpt_has_the_counts_that_its_notice_states() {
        let trace = Trace::excerpt(None).unwrap();
        assert_eq!(trace.requests.len(), 344);
        assert_eq!(trace.references(), 8652);
        assert_eq!(trace.unique_blocks(), 5738);
    }

    #[test]
    fn a_turn_follows_the_last_turn_of_its_conversation_only() {
        let text = r#"{"timestamp": 0, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "hash_ids": [0, 7]}
{"timestamp": 0, "hash_ids": [0]}
{"timestamp": 1, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 2, "hash_ids": [0, 1, 2, 3, 4]}"#;
        let trace = Trace::parse(text.as_bytes(), None).unwrap();
        let after: Vec<_> = trace.requests.iter().map(|r| r.after).collect();
        assert_eq!(after, [None, None, None, Some(0), Some(3)]);
        assert_eq!(Trace::parse(text.as_bytes(), Some(2)).unwrap().requests.len(), 2);
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = Trace::parse("{\"hash_ids\": [1]}\n{\"x\": 1}\n".as_bytes(), None).unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
        assert!(Trace::parse("".as_bytes(), None).is_err());
    }
}
