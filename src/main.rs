//! `kvcachefs`: parse, then run.

use std::process::ExitCode;

use kvcachefs::cli::{self, Action};
use kvcachefs::error::Result;
use kvcachefs::{background, daemon, guard, logging, mount};

fn main() -> ExitCode {
    match cli::parse(std::env::args_os(), std::env::vars_os()).and_then(act) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvcachefs: {error}");
            ExitCode::FAILURE
        }
    }
}

fn act(action: Action) -> Result<()> {
    match action {
        Action::Mount(config) => {
            let Some(mut ready) = background::start(config.daemon, config.pid_file.as_deref())? else {
                return Ok(()); // the daemon has reported that the mount works
            };
            let outcome = logging::init(&config).and_then(|()| {
                logging::end_on_panic();
                daemon::run(*config, &mut ready)
            });
            ready.finish(outcome)
        }
        Action::Unmount { mountpoint, how } => mount::unmount(&mountpoint, how),
        Action::Guard { mountpoint, daemon } => guard::stand(&mountpoint, daemon),
        Action::Show(text) => text.show(),
    }
}
