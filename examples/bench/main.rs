//! Measures kvcachefs against what it is to be compared with: tmpfs, fio on the same store file, and the least that a daemon can be.
//!
//! ```text
//! cargo build --release && cargo run --release --example bench -- p1 p2 p3
//! ```
//!
//! Machines are shared and noisy, so nothing here is a single figure: ours and the other's samples alternate within
//! one run, and what counts is the median of the pairs' ratios.

mod cli;
mod client;
mod cold;
mod control;
mod cpu;
#[path = "../trace_replay/failure.rs"]
mod failure;
mod files;
mod fio;
mod hints;
mod interrupt;
mod ioctl;
mod map;
mod mount;
mod mounting;
mod names;
mod pairs;
mod report;
mod requests;
mod store;
mod trivial;
mod warm;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, What};
use crate::failure::Result;
use crate::report::Report;

/// What a shell reports for a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    if let Some(ended) = trivial::daemon() {
        return ended;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => {
            // Nobody is left to tell when this cannot be printed.
            let _ = answer.print();
            return if answer.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    match run(&cli) {
        Ok(report) => {
            if cli.markdown {
                print!("{}", report.markdown());
            } else {
                println!("{}", report.table());
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench: {error}");
            if interrupt::is_wanted() { ExitCode::from(INTERRUPTED) } else { ExitCode::FAILURE }
        }
    }
}

fn run(cli: &Cli) -> Result<Report> {
    interrupt::watch()?;
    let mut report = Report::default();
    for what in &cli.what {
        match what {
            What::P1 => warm::sequential(cli, warm::By::Read, &mut report)?,
            What::P2 => warm::sequential(cli, warm::By::Mmap, &mut report)?,
            What::P3 => warm::random(cli, &mut report)?,
            What::P4 => cold::run(cli, &mut report)?,
            What::P5 => store::run(cli, &mut report)?,
            What::P6 => control::run(cli, &mut report)?,
            What::Hints => hints::run(cli, &mut report)?,
            What::P10 => mounting::run(cli, &mut report)?,
            What::Names => names::run(cli, &mut report)?,
            What::P11 => cpu::run(cli, &mut report)?,
        }
    }
    Ok(report)
}
