//! `kvctl classify`: where files are.

use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use kvcachefs::error::{Error, Result};
use kvcachefs::units::Bytes;
use mount_tools::client::{Found, State, Tier};
use serde_json::{Value, json};

use crate::paths::{File, Paths};
use crate::{asked, print};

/// Prints where each file is, and all of them together.
///
/// # Errors
/// One of them cannot be found or read; the others are shown all the same.
pub fn run(paths: &[PathBuf], as_json: bool) -> Result<()> {
    let paths = Paths::open(paths)?;
    let files = paths.files()?;
    let ranges = paths.ranges(files.iter().map(|file| &*file.name))?;
    let mut states: Vec<State> = Vec::new();
    // Of more files than one request may have it is true of each part for an instant of its own.
    for part in ranges.chunks(paths.handle.limits().ranges) {
        states.extend(asked(paths.handle.classify(part))?.states);
    }
    let found: Vec<&Found> = states.iter().flatten().collect();
    let sum = |of: fn(&Found) -> u64| found.iter().map(|state| of(state)).sum::<u64>();
    let (bytes, bytes_l1) = (sum(|state| state.bytes), sum(|state| state.bytes_l1));
    let tier = whole(&found);
    let shown: Vec<(&File, &State)> = files.iter().zip(&states).collect();
    if as_json {
        let files: Vec<Value> = shown.iter().map(|(file, state)| object(file, state)).collect();
        let all = json!({
            "mountpoint": paths.mount.display().to_string(),
            "tier": tier.name(),
            "bytes": bytes,
            "bytes_l1": bytes_l1,
            "files": files,
        });
        print(format!("{all:#}\n").as_bytes())?;
    } else {
        print(format!("{}\n", table(&shown)).as_bytes())?;
        let (bytes, bytes_l1) = (Bytes(bytes).approx(), Bytes(bytes_l1).approx());
        print(format!("{}: {} files, {bytes_l1} of {bytes} in L1\n", tier.name(), found.len()).as_bytes())?;
    }
    complain(shown.into_iter().filter_map(|(file, state)| Some((file, state.err()?))).collect())
}

/// Says what is wrong with each file, the last of them as the error of the whole.
///
/// # Errors
/// There is one.
pub fn complain(wrong: Vec<(&File, nix::errno::Errno)>) -> Result<()> {
    let mut errors: Vec<Error> =
        wrong.iter().map(|(file, errno)| Error::new(file.shown.display(), errno.desc())).collect();
    let last = errors.pop();
    errors.iter().for_each(|error| eprintln!("kvctl: {error}"));
    last.map_or(Ok(()), Err)
}

fn whole(found: &[&Found]) -> Tier {
    let all = |tier| found.iter().all(|state| state.tier == tier);
    match found {
        [] => Tier::Absent,
        _ if all(Tier::L1) => Tier::L1,
        _ if all(Tier::L2) => Tier::L2,
        _ => Tier::Mixed,
    }
}

fn marks(state: &Found) -> Vec<&'static str> {
    let marks = [
        (state.durable, "durable"),
        (state.leased, "leased"),
        (state.open, "open"),
        (state.loading, "loading"),
    ];
    marks.into_iter().filter_map(|(has, name)| has.then_some(name)).collect()
}

fn object(file: &File, state: &State) -> Value {
    let path = file.shown.display().to_string();
    match state {
        Ok(state) => json!({
            "path": path,
            "tier": state.tier.name(),
            "bytes": state.bytes,
            "bytes_l1": state.bytes_l1,
            "blocks": state.blocks,
            "blocks_l1": state.blocks_l1,
            "durable": state.durable,
            "leased": state.leased,
            "open": state.open,
            "loading": state.loading,
        }),
        Err(errno) => json!({ "path": path, "error": errno.desc(), "errno": *errno as i32 }),
    }
}

fn table(files: &[(&File, &State)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["file", "tier", "bytes", "in L1", ""]);
    for (file, state) in files {
        let path = file.shown.display().to_string();
        match state {
            Ok(state) => table.add_row([
                path,
                state.tier.name().to_owned(),
                Bytes(state.bytes).approx(),
                Bytes(state.bytes_l1).approx(),
                marks(state).join(" "),
            ]),
            Err(errno) => {
                table.add_row([path, "-".to_owned(), String::new(), String::new(), errno.desc().to_owned()])
            }
        };
    }
    for at in [2, 3] {
        if let Some(column) = table.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
