//! `kvctl leases` and `kvctl hints`: a control file with a line for each, as a table.

use std::path::Path;

use comfy_table::{Table, presets};
use kvcachefs::error::Result;
use serde_json::{Map, Value};

use crate::{print, show};

/// Prints `.ctl/leases` or `.ctl/hints` of the given mount, or of the only one.
///
/// # Errors
/// It is unclear which mount is meant, or it does not answer.
pub fn run(mountpoint: Option<&Path>, name: &'static str, as_json: bool) -> Result<()> {
    let text = show::read(&show::one(mountpoint)?.mountpoint, name)?;
    let mut lines = text.lines().map(|line| line.trim_start_matches("# ").split(' '));
    let columns: Vec<&str> = lines.next().map(Iterator::collect).unwrap_or_default();
    if as_json {
        let object = |line: std::str::Split<'_, char>| -> Value {
            let fields = columns.iter().zip(line).map(|(key, field)| ((*key).to_owned(), value(field)));
            Value::Object(fields.collect::<Map<_, _>>())
        };
        return print(format!("{:#}\n", Value::Array(lines.map(object).collect())).as_bytes());
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(columns);
    lines.for_each(|line| {
        table.add_row(line);
    });
    print(format!("{table}\n").as_bytes())
}

/// Numbers as such; sizes and times stay as people read them.
fn value(field: &str) -> Value {
    field.parse::<u64>().map_or_else(|_| Value::from(field), Value::from)
}
