//! Which mount a path is in, and what it is called there.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::error::{Error, Result};

/// A path, as the daemon of its mount knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where it is mounted.
    pub mount: PathBuf,
    /// From the root of the mount; empty for the root itself.
    pub name: PathBuf,
}

impl Place {
    /// Finds the mount that a path leads to. What is missing may be so: that is asked by [`Handle::lookup`].
    ///
    /// It goes through the mount, so it waits for a daemon that does not answer.
    ///
    /// [`Handle::lookup`]: super::Handle::lookup
    ///
    /// # Errors
    /// EXDEV: no kvcachefs is there.
    pub fn of(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |error: io::Error| {
            Error::new(
                "resolving it",
                path.display(),
                Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EINVAL as i32)),
            )
        };
        let real = real(path).map_err(failed)?;
        let there = real.ancestors().find(|at| at.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
        let device = there.symlink_metadata().map_err(failed)?.dev();
        let same = |at: &&Path| at.symlink_metadata().is_ok_and(|meta| meta.dev() == device);
        let mount = there.ancestors().take_while(same).last().unwrap_or(there);
        if mount.join(".ctl/lease").symlink_metadata().is_err() {
            return Err(Error::new("finding its mount", path.display(), Errno::EXDEV)
                .remedy(format!("no kvcachefs is mounted on {}", mount.display())));
        }
        let name = real.strip_prefix(mount).unwrap_or(&real).to_owned();
        Ok(Self { mount: mount.to_owned(), name })
    }
}

/// Without links, as far as there is something.
fn real(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let mut missing = Vec::new();
    for at in absolute.ancestors() {
        match at.canonicalize() {
            Ok(real) => return Ok(missing.iter().rev().fold(real, |dir, name| dir.join(name))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match at.file_name() {
                Some(name) => missing.push(name),
                // What .. leads to from a directory that is not there, nobody knows.
                None => return Err(error),
            },
            Err(error) => return Err(error),
        }
    }
    Ok(absolute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_no_mount_is_told() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["", "none", "none/below"] {
            let error = Place::of(dir.path().join(name)).unwrap_err();
            assert_eq!(error.errno(), Errno::EXDEV);
            assert!(error.to_string().contains("no kvcachefs is mounted on"), "{error}");
        }
        assert_eq!(Place::of(dir.path().join("none/../below")).unwrap_err().errno(), Errno::ENOENT);
    }

    #[test]
    fn links_are_resolved_as_far_as_there_is_something() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().canonicalize().unwrap().join("below");
        std::fs::create_dir(&below).unwrap();
        std::os::unix::fs::symlink(&below, dir.path().join("link")).unwrap();
        assert_eq!(real(&dir.path().join("link/a/b")).unwrap(), below.join("a/b"));
    }
}
