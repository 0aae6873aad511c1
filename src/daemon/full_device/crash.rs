//! What a crash at this moment would leave.

use std::path::Path;

use nix::errno::Errno;

use super::file::difference;
use crate::daemon::device_log::rig::{close, open, read_handle};
use crate::daemon::tests::Rig;
use crate::l2::{Class, Faults};

/// Whether another daemon finds these files. `may_miss`: not all of them, since eviction may have taken some.
pub fn check(
    device: &Path,
    faults: &Faults,
    wanted: &[(&str, &Vec<u8>)],
    may_miss: bool,
) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("device");
    // So that it is all of one moment.
    Class::ALL.into_iter().for_each(|class| faults.hold(class));
    let copied = std::fs::copy(device, &copy);
    Class::ALL.into_iter().for_each(|class| faults.release(class));
    copied.unwrap();
    let rig = Rig::with(&format!("l1=64MiB,l2={}", copy.display()));
    let result = wanted.iter().try_for_each(|(name, content)| {
        check_file(&rig, name, content, may_miss).map_err(|why| format!("after a crash {name}: {why}"))
    });
    rig.stop();
    result
}

fn check_file(rig: &Rig, name: &str, content: &[u8], may_miss: bool) -> Result<(), String> {
    let store = rig.store();
    let handle = match open(store, name, libc::O_RDONLY) {
        Err(Errno::ENOENT) if may_miss => return Ok(()),
        opened => opened.map_err(|errno| format!("open: {errno}"))?,
    };
    let found = read_handle(store, &handle, content.len() + 1);
    close(store, &handle);
    match found {
        Ok(found) if found == content => Ok(()),
        Ok(found) => Err(difference(&found, content)),
        Err(errno) => Err(format!("read: {errno}")),
    }
}
