//! Who a request comes from, as far as `/proc` tells.
//!
//! A FUSE request names the calling *thread*. Private names belong to *processes* (rule R1), and
//! whether a writer closed its file or was killed shows only in its `/proc/PID/stat` while its
//! descriptors are being closed.

use std::fs;
use std::sync::OnceLock;

/// The caller of a request.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The thread. 0 when the caller is in a pid namespace that this daemon cannot see.
    pub tid: u32,
    pub uid: u32,
    pub gid: u32,
}

/// Whether `/proc` numbers processes as the requests do. A daemon in a pid namespace of its own that sees the `/proc` of
/// another would take every caller for somebody else.
fn proc_is_ours() -> bool {
    static OURS: OnceLock<bool> = OnceLock::new();
    *OURS.get_or_init(|| {
        fs::read_link("/proc/self")
            .is_ok_and(|own| own.as_os_str() == std::process::id().to_string().as_str())
    })
}

impl Caller {
    pub fn new(tid: u32, uid: u32, gid: u32) -> Self {
        Self { tid: if proc_is_ours() { tid } else { 0 }, uid, gid }
    }
}

/// The process that thread `tid` belongs to; 0 where it cannot be known.
pub fn process_of(tid: u32) -> u32 {
    if tid == 0 {
        return 0;
    }
    let Ok(status) = fs::read(format!("/proc/{tid}/status")) else { return 0 };
    status
        .split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(b"Tgid:"))
        .and_then(|rest| std::str::from_utf8(rest).ok()?.trim().parse().ok())
        .unwrap_or(0)
}

/// The supplementary groups of thread `tid`; none where they cannot be known.
pub fn groups_of(tid: u32) -> Box<[u32]> {
    if tid == 0 {
        return Box::default();
    }
    let Ok(status) = fs::read(format!("/proc/{tid}/status")) else { return Box::default() };
    let line = status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"Groups:"));
    let text = line.and_then(|rest| std::str::from_utf8(rest).ok()).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// What the process `tgid` is called, as people may see it; `?` where it cannot be known.
pub fn command_of(tgid: u32) -> Box<str> {
    let name = if tgid == 0 { None } else { fs::read(format!("/proc/{tgid}/comm")).ok() };
    name.map_or_else(|| "?".into(), |name| crate::shown::name(name.trim_ascii_end()).into())
}

/// Whether thread `tid` belongs to process `tgid`.
pub fn is_thread_of(tid: u32, tgid: u32) -> bool {
    tid != 0 && tgid != 0 && (tid == tgid || fs::metadata(format!("/proc/{tgid}/task/{tid}")).is_ok())
}

/// Whether there is such a process, if only as one that nobody has waited for yet.
pub fn is_there(tgid: u32) -> bool {
    fs::exists(format!("/proc/{tgid}")).unwrap_or(true)
}

/// The kernel's flag in `/proc/PID/stat` for a task that is exiting (PF_EXITING).
const EXITING: u64 = 4;

/// The signal that thread `tid` is dying of, if it is.
///
/// Asked while the thread waits for our answer to its FLUSH, so nothing here may wait for that thread in turn. Reading
/// `/proc/PID/stat` of a thread that is in the middle of execve(2) does: the kernel holds `exec_update_lock` there, also
/// while it closes close-on-exec descriptors, and `stat` takes it. `status` does not. A thread that closes its files
/// because it exits has given up its address space before, and only then does `status` have no `Vm` lines.
pub fn dying_of(tid: u32) -> Option<i32> {
    let status = fs::read(format!("/proc/{tid}/status")).ok()?;
    if status.split(|&byte| byte == b'\n').any(|line| line.starts_with(b"VmSize:")) {
        return None;
    }
    let stat = fs::read_to_string(format!("/proc/{tid}/stat")).ok()?;
    // The command name, in parentheses, may itself hold spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Field 9 of stat(5) is the flags, field 52 the exit code; `rest` starts at field 3.
    let flags: u64 = fields.get(9 - 3)?.parse().ok()?;
    let code: i32 = fields.get(52 - 3)?.parse().ok()?;
    (flags & EXITING != 0 && code & 0x7f != 0).then_some(code & 0x7f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_finds_its_process() {
        let tgid = std::process::id();
        let tid = std::thread::spawn(|| {
            let tid = nix::unistd::gettid().as_raw() as u32;
            assert!(is_thread_of(tid, std::process::id()));
            assert_eq!(process_of(tid), std::process::id());
            tid
        })
        .join()
        .unwrap_or(0);
        assert_ne!(tid, tgid);
        assert!(!is_thread_of(1, tgid));
        assert_eq!(process_of(0), 0);
        assert_ne!(&*command_of(tgid), "?");
        assert_eq!((&*command_of(0), groups_of(0).len()), ("?", 0));
        let own: Vec<u32> = nix::unistd::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        let mut said = groups_of(tgid).to_vec();
        said.sort_unstable();
        assert!(own.iter().all(|group| said.contains(group)), "{own:?} {said:?}");
    }

    #[test]
    fn the_living_die_of_nothing() {
        assert_eq!(dying_of(std::process::id()), None);
    }
}
