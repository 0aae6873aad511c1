//! `echo PATH... > .ctl/prefetch`: hints of a shell, which outlive it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use common::ctl::Ctl;
use common::run::wait_until;
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi;

const SIZE: usize = 1 << 20;

const FILES: [&str; 5] = ["plain", "dir/one", "dir/two words", "dir/deep/three", "new\nline"];

fn cold(options: Options) -> Mount {
    let mut mount = Mount::with(options);
    fs::create_dir_all(mount.at("dir/deep")).unwrap();
    for (at, name) in (0..).zip(FILES) {
        fs::write(mount.at(name), bytes(at, SIZE)).unwrap();
    }
    symlink("plain", mount.at("link")).unwrap();
    mount.restart();
    mount
}

/// What a shell says of a script that runs in the mount.
fn shell(mount: &Mount, script: &str) -> Result<(), String> {
    let output = Command::new("bash").args(["-c", script]).current_dir(mount.path()).output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stderr).unwrap()) }
}

fn tier(mount: &Mount, name: &str) -> u8 {
    let ctl = Ctl::new(mount);
    ctl.classify(&ctl.ranges(&[name])).0.tier
}

#[track_caller]
fn check(mount: &Mount, script: &str, brought: &[&str]) {
    assert_eq!(shell(mount, script), Ok(()), "{script}");
    wait_until("no hint is left", || mount.stat("hints_running") + mount.stat("hints_queued") == 0);
    for name in FILES {
        let wanted = if brought.contains(&name) { abi::TIER_L1 } else { abi::TIER_L2 };
        assert_eq!(tier(mount, name), wanted, "{name:?} after {script}");
    }
}

#[test]
fn words_name_files_and_directories() {
    if memory_only() {
        return;
    }
    // What a script names, where DIR stands for the mount, and what it brings.
    let scripts: [(&str, &[&str]); 7] = [
        ("echo plain > .ctl/prefetch", &["plain"]),
        ("echo /plain dir/one/ > .ctl/prefetch", &["plain", "dir/one"]),
        ("echo dir > .ctl/prefetch", &FILES[1..4]),
        ("echo DIR > .ctl/prefetch", &FILES),
        ("echo \"'DIR/dir/two words'\" > .ctl/prefetch", &["dir/two words"]),
        ("printf '%q\\n' $'new\\nline' 'dir/two words' > .ctl/prefetch", &[FILES[4], FILES[2]]),
        ("find dir -type f -print0 > .ctl/prefetch", &FILES[1..4]),
    ];
    let mut mount = cold(Options::default());
    for (script, brought) in scripts {
        let script = script.replace("DIR", &mount.path().display().to_string());
        check(&mount, &script, brought);
        mount.restart();
    }
    mount.check_quiet();
}

#[test]
fn a_shell_is_told_why_not() {
    if memory_only() {
        return;
    }
    let mut mount = cold(Options::default());
    for (words, said) in [
        ("missing", "No such file"),
        ("plain/below", "Not a directory"),
        ("link", "Too many levels"),
        ("''", ""),
        ("../plain", "Invalid argument"),
        ("'", "Invalid argument"),
    ] {
        let script = format!("printf '%s\\n' \"{words}\" > .ctl/prefetch");
        match (shell(&mount, &script), said) {
            (Ok(()), "") => {}
            (told, said) => assert!(told.as_ref().unwrap_err().contains(said), "{words}: {told:?}"),
        }
    }
    assert!(shell(&mount, "echo > .ctl/prefetch").unwrap_err().contains("Invalid argument"), "no words");
    wait_until("no hint is left", || mount.stat("hints_running") + mount.stat("hints_queued") == 0);
    // What is there is brought, whatever else was named.
    mount.restart();
    check(&mount, "echo missing link plain > .ctl/prefetch", &["plain"]);
    mount.restart_with(&["--prefetch-window=0"]);
    assert!(shell(&mount, "echo plain > .ctl/prefetch").unwrap_err().contains("not supported"));
    assert_eq!(tier(&mount, "plain"), abi::TIER_L2);
}

/// Whoever may not read a file does not bring it.
#[test]
fn a_hint_is_as_good_as_its_writer() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::with(Options::default().arg("--allow-other"));
    fs::create_dir_all(mount.at("dir")).unwrap();
    for name in ["dir/open", "dir/closed"] {
        fs::write(mount.at(name), bytes(1, SIZE)).unwrap();
    }
    fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(mount.at("dir/closed"), fs::Permissions::from_mode(0o600)).unwrap();
    mount.restart();
    fs::set_permissions(mount.scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let as_nobody = |words: &str| {
        let script = format!(
            "setpriv --reuid 65534 --regid 65534 --clear-groups bash -c 'echo {words} > .ctl/prefetch'"
        );
        shell(&mount, &script)
    };
    let told = as_nobody("dir/closed");
    assert!(told.as_ref().is_err_and(|told| told.contains("ermission denied")), "{told:?}");
    assert_eq!(as_nobody("dir"), Ok(()));
    wait_until("no hint is left", || mount.stat("hints_running") + mount.stat("hints_queued") == 0);
    assert_eq!((tier(&mount, "dir/open"), tier(&mount, "dir/closed")), (abi::TIER_L1, abi::TIER_L2));
}

#[test]
fn hints_are_shown() {
    let mount = Mount::new();
    let text = fs::read_to_string(mount.at(".ctl/hints")).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("# ticket pid command state priority"));
    assert!(mount.status().contains("\nhints: running 0   queued 0"), "{}", mount.status());
}
