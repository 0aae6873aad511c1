//! Questions to a mount that may never answer.
//!
//! Whoever waits for a FUSE daemon that has taken the request cannot be ended, not even by SIGKILL, as long as the
//! connection is up; a thread that does so keeps its whole process from ending. So it is a child that asks, and one
//! that gets no answer in time is left behind: it ends when the connection does.
#![allow(unsafe_code, reason = "fork(2) and _exit(2) have no safe form")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{ForkResult, fork, pipe2};

/// Runs `ask` in a child and waits for its answer, but no longer than `limit`. None: no answer in time.
///
/// In a process with other threads `ask` may do what may be done after a fork: system calls, and ask for memory,
/// which the C library allows. It must not log or print, and names
/// absolute paths: the child holds no descriptor and no directory.
pub fn within(limit: Duration, ask: impl FnOnce() -> io::Result<Vec<u8>>) -> Option<io::Result<Vec<u8>>> {
    let (from_child, to_parent) = match pipe2(OFlag::O_CLOEXEC) {
        Ok(both) => both,
        Err(errno) => return Some(Err(errno.into())),
    };
    // SAFETY: what the child may do is said above; it never returns from here.
    match unsafe { fork() } {
        Err(errno) => Some(Err(errno.into())),
        Ok(ForkResult::Child) => {
            answer(to_parent, ask);
            // SAFETY: ends the child without running what belongs to the parent: buffers, destructors, exit handlers.
            unsafe { libc::_exit(0) }
        }
        Ok(ForkResult::Parent { child }) => {
            drop(to_parent);
            let heard = hear(File::from(from_child), limit);
            if heard.is_none() {
                // If it can be ended, it is.
                let _ = kill(child, Signal::SIGKILL);
            }
            let _ = waitpid(child, heard.is_none().then_some(WaitPidFlag::WNOHANG));
            heard
        }
    }
}

/// The child's part: four bytes of errno, then what it has to say.
fn answer(to_parent: OwnedFd, ask: impl FnOnce() -> io::Result<Vec<u8>>) {
    // Left behind, it must hold nothing that others wait for: a terminal, a pipe, the lock of a store.
    let keep = to_parent.as_raw_fd().unsigned_abs();
    let ranges = [(0, keep.checked_sub(1)), (keep + 1, Some(u32::MAX))];
    for (first, last) in ranges {
        if let Some(last) = last {
            // SAFETY: what is closed here is never used again: the child ends after its answer.
            let _ = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    }
    // Nor may it keep a mount busy. Paths are absolute here.
    let _ = nix::unistd::chdir("/");
    let (errno, text) = match catch_unwind(AssertUnwindSafe(ask)) {
        Ok(Ok(text)) => (0, text),
        Ok(Err(error)) => (error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
        Err(_) => (libc::EIO, Vec::new()),
    };
    let mut to_parent = File::from(to_parent);
    // Nobody listens any more: then nobody misses it.
    let _ = to_parent.write_all(&errno.to_ne_bytes()).and_then(|()| to_parent.write_all(&text));
}

fn hear(mut from_child: File, limit: Duration) -> Option<io::Result<Vec<u8>>> {
    let deadline = Instant::now().checked_add(limit);
    let (mut said, mut piece) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map_or(PollTimeout::NONE, |left| {
            // Rounded up, so that it is not asked again and again within the last millisecond.
            PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut [PollFd::new(from_child.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) if left.is_some_and(|left| left.is_zero()) => return None,
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(errno) => return Some(Err(errno.into())),
        }
        match from_child.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => said.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Some(Err(error)),
        }
    }
    let Some((errno, text)) = said.split_first_chunk() else {
        return Some(Err(io::Error::other("the process that asked was ended")));
    };
    match i32::from_ne_bytes(*errno) {
        0 => Some(Ok(text.to_vec())),
        errno => Some(Err(io::Error::from_raw_os_error(errno))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_answer_that_does_not_come_is_not_waited_for() {
        let silent = || -> io::Result<Vec<u8>> {
            loop {
                nix::unistd::pause();
            }
        };
        assert!(within(Duration::from_millis(10), silent).is_none());
        let long = vec![7; 1 << 20];
        assert_eq!(within(LONG, || Ok(long.clone())).expect("in time").expect("an answer"), long);
    }

    #[test]
    fn errors_and_a_violent_end_are_answers() {
        let denied = within(LONG, || Err(Errno::EACCES.into())).expect("in time").expect_err("an error");
        assert_eq!(denied.raw_os_error(), Some(libc::EACCES));
        let ended = within(LONG, || {
            kill(nix::unistd::getpid(), Signal::SIGKILL)?;
            Ok(Vec::new())
        });
        assert!(ended.expect("in time").is_err());
    }

    #[test]
    fn who_asks_holds_nothing_of_ours() {
        let listed = within(LONG, || {
            let open = std::fs::read_dir("/proc/self/fd")?.flatten();
            let links = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
            Ok(links.map(|link| format!("{}\n", link.display())).collect::<String>().into_bytes())
        });
        let listed = String::from_utf8(listed.expect("in time").expect("an answer")).expect("text");
        // The pipe, and the directory that it reads.
        assert_eq!(listed.lines().count(), 2, "{listed}");
    }
}
