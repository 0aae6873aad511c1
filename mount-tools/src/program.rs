//! Where the daemon's program is.

use std::path::{Path, PathBuf};

use kvcachefs::error::{Error, Result};

const NAME: &str = "kvcachefs";

/// mount(8) and init systems run their programs with little or no PATH.
const USUAL: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];

/// Finds `kvcachefs`: beside this program first, so that a version fits its tools, then as a shell would.
///
/// # Errors
/// It is nowhere.
pub fn daemon() -> Result<PathBuf> {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = beside.into_iter().chain(std::env::split_paths(&path)).chain(USUAL.map(PathBuf::from));
    places
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(NAME))
        .find(|file| nix::unistd::access(file, nix::unistd::AccessFlags::X_OK).is_ok() && file.is_file())
        .ok_or_else(|| {
            Error::new(NAME, "the program is not found").remedy("install it beside this one or in the PATH")
        })
}
