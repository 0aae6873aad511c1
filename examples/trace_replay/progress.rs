//! How far the replay is: a bar on a terminal, elsewhere a line every few seconds.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::engine::Progress;
use crate::lru::HitCount;
use crate::table::throughput;
use crate::trace::Trace;

/// Often enough to see that it moves, seldom enough for a log.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows progress on standard error.
pub struct Shown {
    start: Instant,
    requests: u64,
    form: Form,
}

enum Form {
    Bar(ProgressBar),
    Lines { last: Instant },
}

impl Shown {
    pub fn new(trace: &Trace) -> Self {
        let requests = trace.requests.len() as u64;
        let start = Instant::now();
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} requests  {msg}  {eta} left");
        let form = match style {
            Ok(style) if stderr().is_terminal() => Form::Bar(ProgressBar::new(requests).with_style(style)),
            _ => Form::Lines { last: start },
        };
        Self { start, requests, form }
    }

    pub fn update(&mut self, progress: &Progress) {
        let requests = progress.requests.load(Ordering::Relaxed);
        let count = HitCount {
            hits: progress.hits.load(Ordering::Relaxed),
            references: progress.references.load(Ordering::Relaxed),
        };
        let speed = throughput(progress.bytes.load(Ordering::Relaxed), self.start.elapsed());
        let message = format!("hit rate {:.1} %  {speed}", count.percent());
        match &mut self.form {
            Form::Bar(bar) => {
                bar.set_position(requests);
                bar.set_message(message);
            }
            Form::Lines { last } if last.elapsed() >= LINE_EVERY => {
                *last = Instant::now();
                eprintln!("{requests}/{} requests  {message}", self.requests);
            }
            Form::Lines { .. } => {}
        }
    }

    pub fn finish(self) {
        if let Form::Bar(bar) = self.form {
            bar.finish_and_clear();
        }
    }
}
