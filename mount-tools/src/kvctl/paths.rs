//! Ordinary paths as the names that the daemon knows, with a handle of the mount that they are in.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvcachefs::error::{Error, Result};
use mount_tools::client::{Errno, Handle, Place, Range};

use crate::{asked, show};

/// What was named.
pub struct Paths {
    pub handle: Handle,
    pub mount: PathBuf,
    /// In the order in which they were named.
    pub named: Vec<Named>,
}

pub struct Named {
    /// As it was written.
    pub shown: PathBuf,
    /// From the root of the mount.
    pub name: PathBuf,
}

/// One file, whether it is there or not.
pub struct File {
    pub shown: PathBuf,
    pub name: PathBuf,
    pub bytes: u64,
}

impl Paths {
    /// # Errors
    /// One of them is in no mount or in another one than the first, or its daemon does not answer.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let mut mount: Option<PathBuf> = None;
        let mut named = Vec::new();
        for shown in paths {
            // A daemon that does not answer would keep us for ever, once we ask ourselves. What the kernel remembers of the
            // path is no sign of life.
            show::answer(shown, || asks(shown))?;
            let place = Place::of(shown).map_err(|error| match error.errno() {
                Errno::EXDEV => Error::new(shown.display(), "no kvcachefs is mounted there")
                    .remedy("kvctl status lists the mounts"),
                _ => Error::new(error, ""),
            })?;
            let first = mount.get_or_insert_with(|| place.mount.clone());
            if *first != place.mount {
                return Err(Error::new(
                    shown.display(),
                    format!(
                        "is in {}, and {} is in {}",
                        place.mount.display(),
                        paths[0].display(),
                        first.display()
                    ),
                )
                .remedy("name what is in one mount, and call once for each"));
            }
            named.push(Named { shown: shown.clone(), name: place.name });
        }
        let mount =
            mount.ok_or_else(|| Error::new("PATH", "is missing").remedy("name a file or a directory"))?;
        Ok(Self { handle: asked(Handle::open(&mount))?, mount, named })
    }

    /// The files that were named, and all below the directories, each once and these in the order of their names.
    ///
    /// # Errors
    /// A directory cannot be read, or there is no file at all.
    pub fn files(&self) -> Result<Vec<File>> {
        let mut files = Vec::new();
        for named in &self.named {
            walk(&named.shown, &named.name, &mut files)?;
        }
        let mut seen = BTreeSet::new();
        files.retain(|file| seen.insert(file.name.clone()));
        if files.is_empty() {
            return Err(Error::new(self.named[0].shown.display(), "there is no file in it"));
        }
        Ok(files)
    }

    /// # Errors
    /// There are too many names.
    pub fn ranges<'n>(&self, names: impl Iterator<Item = &'n Path>) -> Result<Vec<Range>> {
        let names: Vec<&Path> = names.collect();
        Ok(asked(self.handle.intern(&names))?.into_iter().map(Range::of).collect())
    }

    /// More than one request may have would not be one answer.
    ///
    /// # Errors
    /// There are more.
    pub fn one_request(&self, files: &[File]) -> Result<()> {
        let most = self.handle.limits().ranges;
        if files.len() <= most {
            return Ok(());
        }
        Err(Error::new(
            self.named[0].shown.display(),
            format!("{} files are more than one lease may have", files.len()),
        )
        .remedy(format!("name at most {most} at a time")))
    }
}

fn asks(path: &Path) -> io::Result<Vec<u8>> {
    for at in std::path::absolute(path)?.ancestors() {
        match nix::sys::statfs::statfs(at) {
            Err(Errno::ENOENT) => {}
            answer => return answer.map(|_| Vec::new()).map_err(io::Error::from),
        }
    }
    Ok(Vec::new())
}

fn walk(shown: &Path, name: &Path, files: &mut Vec<File>) -> Result<()> {
    let failed = |error| Error::caused_by(shown.display(), error);
    let meta = match fs::metadata(shown) {
        Ok(meta) => meta,
        // The daemon says the same, beside the others.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            files.push(File { shown: shown.to_owned(), name: name.to_owned(), bytes: 0 });
            return Ok(());
        }
        Err(error) => return Err(failed(error)),
    };
    if !meta.is_dir() {
        files.push(File { shown: shown.to_owned(), name: name.to_owned(), bytes: meta.len() });
        return Ok(());
    }
    let mut entries =
        fs::read_dir(shown).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (below, kind) = (entry.file_name(), entry.file_type().map_err(failed)?);
        // Links inside a directory are passed by: what they lead to is asked for by its own name.
        if kind.is_dir() || kind.is_file() {
            walk(&shown.join(&below), &name.join(&below), files)?;
        }
    }
    Ok(())
}
