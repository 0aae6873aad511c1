//! The kernel's mount table, as far as it concerns us.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::FSTYPE;
use crate::error::{Error, Result};

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// One mounted file system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub mountpoint: PathBuf,
    /// The file system's device number, as `major:minor`: no other one that is mounted has it.
    pub number: String,
    pub fstype: String,
    /// What `df` shows in its first column.
    pub source: OsString,
}

impl Entry {
    pub fn is_ours(&self) -> bool {
        self.fstype == FSTYPE
    }
}

/// All mounts that this process sees, in the order in which the kernel lists them: of several on one
/// directory the last is on top.
///
/// # Errors
/// /proc is not mounted.
pub fn mounts() -> Result<Vec<Entry>> {
    let table =
        fs::read(MOUNTINFO).map_err(|error| Error::caused_by(MOUNTINFO, error).remedy("mount /proc"))?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The mount on top of exactly this directory.
///
/// # Errors
/// As [`mounts`].
pub fn mounted_on(mountpoint: &Path) -> Result<Option<Entry>> {
    Ok(mounts()?.into_iter().rev().find(|entry| entry.mountpoint == mountpoint))
}

/// `36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/sda rw`: optional fields end with a dash.
fn parse(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let number = fields.nth(2)?;
    let mountpoint = fields.nth(1)?;
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    Some(Entry {
        mountpoint: PathBuf::from(unescaped(mountpoint)),
        number: String::from_utf8_lossy(number).into_owned(),
        fstype: String::from_utf8_lossy(rest.next()?).into_owned(),
        source: unescaped(rest.next()?),
    })
}

/// Blanks and backslashes are written as three octal digits.
fn unescaped(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        out.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &rest[4..] } else { tail };
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_parsed_with_blanks_in_its_names() {
        let line = br"36 35 0:31 / /mnt/my\040kv rw,nosuid shared:7 master:1 - fuse.kvcachefs /nvme\134a:b rw,user_id=0";
        let entry = parse(line).expect("an entry");
        assert_eq!(entry.mountpoint, Path::new("/mnt/my kv"));
        assert_eq!(entry.number, "0:31");
        assert_eq!(entry.source, r"/nvme\a:b");
        assert!(entry.is_ours());
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn the_root_is_mounted_and_a_plain_file_is_not() {
        assert!(mounted_on(Path::new("/")).expect("mountinfo").is_some());
        assert_eq!(mounted_on(Path::new("/proc/self/status")).expect("mountinfo"), None);
    }
}
