//! Showing what the control files say, without being held up by a mount whose daemon does not answer.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvcachefs::error::{Error, Result};
use kvcachefs::mount::{self, Entry, Life};
use kvcachefs::units::date;
use serde_json::{Map, Value, json};

use crate::print;

const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const FOLLOW_EVERY: Duration = Duration::from_millis(200);

/// Prints the status of one mount or of all.
///
/// # Errors
/// There is none, or one of them is dead or silent; the others are shown all the same.
pub fn status(mountpoint: Option<&Path>, as_json: bool) -> Result<()> {
    let entries = match mountpoint {
        Some(dir) => vec![ours(dir)?],
        None => all()?,
    };
    let mut objects = Vec::new();
    let mut failures = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        let dir = entry.mountpoint.display();
        let source = entry.source.to_string_lossy();
        let text = read(&entry.mountpoint, if as_json { "stats" } else { "status" });
        if as_json {
            let stats = text.as_ref().map(|text| numbers(text)).unwrap_or_default();
            let more = text.as_ref().ok().and_then(|_| read(&entry.mountpoint, "metrics").ok());
            let more = more.unwrap_or_default();
            objects.push(json!({
                "mountpoint": dir.to_string(),
                "source": source,
                "alive": text.is_ok(),
                "health": health(&stats),
                "version": labelled(&more, "version").next().map(|(_, version, _)| version),
                "uptime_seconds": stats.get("start_time_seconds").and_then(Value::as_u64).map(since),
                "devices": devices(&more),
                "stats": stats,
            }));
        } else if let Ok(text) = &text {
            let gap = if at == 0 { "" } else { "\n" };
            print(format!("{gap}{dir} ({source})\n{text}").as_bytes())?;
        }
        failures.extend(text.err());
    }
    if as_json {
        print(format!("{:#}\n", Value::Array(objects)).as_bytes())?;
    } else if entries.is_empty() {
        return Err(none());
    }
    // Each is one line; the last is said by whoever called us.
    let last = failures.pop();
    failures.iter().for_each(|failure| eprintln!("kvctl: {failure}"));
    last.map_or(Ok(()), Err)
}

/// Prints a control file of the given mount, or of the only one.
///
/// # Errors
/// It is unclear which mount is meant, or it does not answer.
pub fn file(mountpoint: Option<&Path>, name: &'static str) -> Result<()> {
    print(read(&one(mountpoint)?.mountpoint, name)?.as_bytes())
}

/// Prints the events so far and, if `follow`, those to come.
///
/// # Errors
/// As [`file`].
pub fn events(mountpoint: Option<&Path>, follow: bool) -> Result<()> {
    let dir = one(mountpoint)?.mountpoint;
    let mut offset = 0;
    loop {
        // Opened anew each time: a file that stays open would keep the mount from being unmounted.
        let file = dir.join(".ctl/events");
        let text = match answer(&dir, || from(&file, offset)) {
            Ok(text) => text,
            Err(_) if follow && offset > 0 && gone(&dir) => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some((end, text)) = text.split_first_chunk() else { continue };
        offset = u64::from_ne_bytes(*end);
        // What has been forgotten reads as blanks.
        let start = if text.starts_with(b" ") {
            text.iter().position(|byte| *byte == b'\n').map_or(text.len(), |at| at + 1)
        } else {
            0
        };
        print(dated(&String::from_utf8_lossy(&text[start..])).as_bytes())?;
        if !follow {
            return Ok(());
        }
        std::thread::sleep(FOLLOW_EVERY);
    }
}

/// The events' seconds since 1970 as dates. They are read whole lines at a time.
fn dated(text: &str) -> String {
    let line = |line: &str| {
        let (seconds, rest) = line.split_once('.')?;
        let (millis, said) = rest.split_once(' ')?;
        let at = date(seconds.parse().ok()?);
        Some(format!("{}.{millis}Z {said}", at.trim_end_matches('Z')))
    };
    text.split_inclusive('\n').map(|text| line(text).unwrap_or_else(|| text.to_owned())).collect()
}

/// Where the events end that follow here, in eight bytes, and those from `offset` on.
///
/// From the beginning what is left of it is read. So it is the size that says where the next begin, if nothing came while
/// it was read.
fn from(path: &Path, offset: u64) -> io::Result<Vec<u8>> {
    loop {
        let mut file = File::open(path)?;
        let before = file.metadata()?.len();
        file.seek(SeekFrom::Start(offset))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let end = if offset > 0 { offset + text.len() as u64 } else { file.metadata()?.len() };
        if offset > 0 || end == before {
            return Ok([&end.to_ne_bytes()[..], &text].concat());
        }
    }
}

/// Unmounted, or its daemon is no more: the end of what can be followed.
fn gone(dir: &Path) -> bool {
    ours(dir).is_err() || mount::life(dir) == Life::Dead
}

fn all() -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = mount::mounts()?.into_iter().filter(Entry::is_ours).collect();
    entries.dedup_by(|a, b| a.mountpoint == b.mountpoint);
    Ok(entries)
}

fn none() -> Error {
    Error::new("no kvcachefs is mounted", "").remedy("mount one: kvctl mount --l1 4GiB DIR")
}

fn ours(dir: &Path) -> Result<Entry> {
    let real = mount::real_path(dir);
    mount::mounted_on(&real)?.filter(Entry::is_ours).ok_or_else(|| {
        Error::new(dir.display(), "no kvcachefs is mounted there").remedy("kvctl status lists the mounts")
    })
}

/// The mount that is meant: the given one, or the only one.
///
/// # Errors
/// There is none, or there are several.
pub fn one(mountpoint: Option<&Path>) -> Result<Entry> {
    if let Some(dir) = mountpoint {
        return ours(dir);
    }
    let mut entries = all()?;
    match entries.len() {
        0 => Err(none()),
        1 => Ok(entries.remove(0)),
        n => {
            Err(Error::new("MOUNTPOINT", format!("{n} are mounted"))
                .remedy("name one; kvctl status lists them"))
        }
    }
}

/// What a control file says.
///
/// # Errors
/// The mount is dead or silent.
pub fn read(dir: &Path, name: &'static str) -> Result<String> {
    let file = dir.join(".ctl").join(name);
    answer(dir, || fs::read(file)).map(|text| String::from_utf8_lossy(&text).into_owned())
}

/// What the mount at or around `dir` answers, with words for when it does not.
///
/// # Errors
/// It is dead or silent, or `ask` fails.
pub fn answer(dir: &Path, ask: impl FnOnce() -> io::Result<Vec<u8>>) -> Result<Vec<u8>> {
    let shown = dir.display();
    match mount::within(ANSWER_LIMIT, ask) {
        Some(Ok(text)) => Ok(text),
        Some(Err(error)) if mount::life(dir) == Life::Dead => Err(Error::caused_by(&shown, error)
            .remedy(format!("its daemon is gone; mount again or detach it: kvctl umount {shown}"))),
        Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(Error::caused_by(&shown, error)
                .remedy("ask as the user who mounted, or mount with allow_other"))
        }
        Some(Err(error)) => Err(Error::caused_by(&shown, error)),
        None if mount::is_wedged(dir) => {
            Err(Error::new(&shown, "its daemon was killed and cannot end, so nobody is answered")
                .remedy(format!("cut it off: kvctl umount --force {shown}")))
        }
        None => Err(Error::new(&shown, format!("no answer within {ANSWER_LIMIT:?}"))
            .remedy(format!("end its daemon, or cut it off: kvctl umount --force {shown}"))),
    }
}

/// `key value` lines as a JSON object.
fn numbers(text: &str) -> Map<String, Value> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.filter_map(|(key, value)| Some((key.to_owned(), Value::from(value.parse::<u64>().ok()?)))).collect()
}

/// In a word. An older daemon, or none that answers, does not say.
fn health(stats: &Map<String, Value>) -> Option<&'static str> {
    let is = |key: &str| stats.get(key).and_then(Value::as_u64).map(|value| value != 0);
    Some(match (is("poisoned")?, is("healthy")?) {
        (true, _) => "failed",
        (false, false) => "degraded",
        (false, true) => "ok",
    })
}

fn since(start: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs().saturating_sub(start)
}

/// Of Prometheus' lines `kvcachefs_name{mount="…",label="…"} value`: name, what the label says, value.
fn labelled<'t>(text: &'t str, label: &str) -> impl Iterator<Item = (&'t str, String, u64)> {
    // Quotes within a value have a backslash before them.
    let before = format!(",{label}=\"");
    text.lines().filter_map(move |line| {
        let (name, rest) = line.strip_prefix("kvcachefs_")?.split_once('{')?;
        let (said, value) = rest.split_once(&before)?.1.rsplit_once("\"} ")?;
        Some((name, unescaped(said), value.parse().ok()?))
    })
}

fn unescaped(said: &str) -> String {
    let mut out = String::new();
    let mut chars = said.chars();
    while let Some(char) = chars.next() {
        out.push(match char {
            '\\' => match chars.next() {
                Some('n') => '\n',
                Some(other) => other,
                None => '\\',
            },
            other => other,
        });
    }
    out
}

/// One object for each device, with its path and its numbers.
fn devices(metrics: &str) -> Vec<Value> {
    let mut found: Vec<(String, Map<String, Value>)> = Vec::new();
    for (name, path, value) in labelled(metrics, "device") {
        let name = name.trim_start_matches("device_").trim_end_matches("_total");
        let at = found.iter().position(|(known, _)| *known == path).unwrap_or_else(|| {
            found.push((path.clone(), Map::from_iter([("path".to_owned(), path.into())])));
            found.len() - 1
        });
        found[at].1.insert(name.to_owned(), value.into());
    }
    found.into_iter().map(|(_, object)| Value::Object(object)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_told_apart_by_their_label() {
        let text = "# HELP kvcachefs_device_read_bytes_total Bytes.\n\
            kvcachefs_files{mount=\"/m\"} 3\n\
            kvcachefs_build_info{mount=\"/m,version=\\\"0\\\"\",version=\"0.1.0\"} 1\n\
            kvcachefs_device_read_bytes_total{mount=\"/m\",device=\"/a\\\\b\\\"c\\nd\"} 7\n\
            kvcachefs_device_read_bytes_total{mount=\"/m\",device=\"/e\"} 8\n\
            kvcachefs_device_used_bytes{mount=\"/m\",device=\"/e\"} 9\n";
        let version: Vec<_> = labelled(text, "version").collect();
        assert_eq!(version, [("build_info", "0.1.0".to_owned(), 1)]);
        let expected = [
            json!({"path": "/a\\b\"c\nd", "read_bytes": 7}),
            json!({"path": "/e", "read_bytes": 8, "used_bytes": 9}),
        ];
        assert_eq!(devices(text), expected);
    }
}
