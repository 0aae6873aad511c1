//! The processes that serve a connection, and whether they are about to end.
//!
//! A daemon that is killed does not always go away: a thread of it that tells the kernel of a changed name waits for the
//! lock of a directory, the client that holds the lock waits for the daemon's answer, and the device stays open.
//! Nobody will ever answer then, but the kernel does not know it.

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use nix::unistd::Pid;

/// `PF_EXITING` in the kernel's flags of a process.
const EXITING: u32 = 4;

/// Processes that have the FUSE connection with this number open, as far as we may see them.
///
/// None: the kernel does not tell who has which connection open (before Linux 6.17).
pub fn serving(minor: &str) -> Option<Vec<i32>> {
    let mut told = false;
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let found = pids.filter(|pid: &i32| has_open(*pid, minor, &mut told)).collect();
    told.then_some(found)
}

fn has_open(pid: i32, minor: &str, told: &mut bool) -> bool {
    // The first thread of a process that is ending has closed everything; another may not get that far.
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for task in tasks {
        let mut open = fs::read_dir(task.path().join("fd")).into_iter().flatten().flatten().peekable();
        if open.peek().is_none() {
            continue;
        }
        return open.any(|entry| {
            // The links are text that the kernel makes up: reading them asks nothing of any mount.
            // A daemon has thousands of slabs.
            let is_file = fs::read_link(entry.path()).is_ok_and(|target| {
                let target = target.to_string_lossy();
                target.starts_with('/')
                    && !["/memfd:", crate::l1::SLAB_PATH].iter().any(|slab| target.starts_with(slab))
            });
            let said = is_file
                .then(|| fs::read_to_string(task.path().join("fdinfo").join(entry.file_name())).ok())
                .flatten()
                .unwrap_or_default();
            let connection = said.lines().find_map(|line| line.strip_prefix("fuse_connection:"));
            *told |= connection.is_some();
            connection.is_some_and(|connection| connection.trim() == minor)
        });
    }
    false
}

/// Whether a process has ended, or is about to and will do nothing more.
pub fn is_ending(pid: i32) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    let Ok(stat) = fs::read_to_string(process.join("stat")) else {
        // If something hides /proc, it says nothing about anybody.
        return nix::sys::signal::kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH);
    };
    // The name, in brackets, may contain anything. Then: state, parent, group, session, terminal, its group, flags.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let state = fields.next().unwrap_or("X");
    let flags: u32 = fields.nth(5).and_then(|flags| flags.parse().ok()).unwrap_or_default();
    // Who is writing a core dump waits for its other threads before it exits.
    let dumping = || {
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        status.lines().any(|line| line.strip_prefix("CoreDumping:").is_some_and(|is| is.trim() == "1"))
    };
    matches!(state, "Z" | "X") || flags & EXITING != 0 || dumping()
}

/// Whether nothing is left of a process but its exit code.
pub fn is_over(pid: i32) -> bool {
    // Its threads have left but for the first, which waits to be asked about.
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads == 0 || (threads == 1 && is_ending(pid) && !holds_files(pid))
}

fn holds_files(pid: i32) -> bool {
    fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|mut open| open.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_living_are_not_taken_for_dead() {
        let own = i32::try_from(std::process::id()).expect("a pid");
        assert!(!is_ending(own) && !is_ending(1));
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let pid = i32::try_from(child.id()).expect("a pid");
        assert!(!is_ending(pid));
        child.kill().expect("kill");
        // It is a zombie, if it has come so far; and then it is nothing.
        while !is_ending(pid) {
            std::thread::yield_now();
        }
        child.wait().expect("wait");
        assert!(is_ending(pid));
    }

    /// It cut off daemons that lived.
    #[test]
    fn who_cannot_be_looked_at_is_not_taken_for_dead() {
        use nix::mount::{MsFlags, mount};
        use nix::sched::{CloneFlags, unshare};
        let own = i32::try_from(std::process::id()).expect("a pid");
        let look = std::thread::spawn(move || {
            // For this thread alone.
            unshare(CloneFlags::CLONE_NEWNS).expect("a namespace of mounts, which takes root");
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .expect("private");
            mount(Some("none"), "/proc", Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a mount");
            assert!(!Path::new("/proc/self").exists());
            (is_ending(own), is_ending(i32::MAX))
        });
        assert_eq!(look.join().expect("the thread"), (false, true));
    }

    #[test]
    fn nobody_serves_what_is_not_mounted() {
        assert!(serving("4294967295").is_none_or(|pids| pids.is_empty()));
    }
}
