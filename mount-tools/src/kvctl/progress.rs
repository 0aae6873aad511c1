//! How far something is: a bar on a terminal, and nothing elsewhere.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressStyle};

/// On standard error; gone when it is dropped.
pub struct Progress(ProgressBar);

impl Progress {
    pub fn new(bytes: u64) -> Self {
        // What is done in no time shows nothing: it appears with the first step.
        let style =
            ProgressStyle::with_template("{bar:32} {binary_bytes}/{binary_total_bytes}  {msg}  {eta} left");
        Self(match style {
            Ok(style) if stderr().is_terminal() => ProgressBar::new(bytes).with_style(style),
            _ => ProgressBar::hidden(),
        })
    }

    pub fn at(&self, bytes: u64, total: u64, message: String) {
        self.0.set_length(total.max(bytes));
        self.0.set_position(bytes);
        self.0.set_message(message);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
