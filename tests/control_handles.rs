//! `.ctl/lease` and `.ctl/prefetch`: what a handle understands, which names it may use, and what goes with it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};

use common::ctl::{Ctl, header, identity, named, names_message, node, node_of, part, raw_ioctl, status};
use common::run::wait_until;
use common::{Mount, Options, bytes, memory_only};
use kvcachefs::abi::{self, Command as Ioctl, Slot};
use nix::errno::Errno;
use nix::libc;
use zerocopy::IntoBytes;

const HANDLES: [&str; 3] = [".ctl/lease", ".ctl/prefetch", ".ctl/drain"];

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_raw(result.unwrap_err().raw_os_error().unwrap())
}

#[test]
fn hello_tells_the_limits_and_comes_first() {
    let mount = Mount::new();
    for path in HANDLES {
        let ctl = Ctl::open(&mount.at(path));
        assert_eq!(ctl.lookup(&[node(1)]).unwrap_err(), Errno::EPROTO, "before HELLO");
        let text = if path == ".ctl/lease" { Errno::EOPNOTSUPP } else { Errno::ENOENT };
        assert_eq!(errno((&ctl.0).write(&names_message(None, &["a"]))), text, "before it, this is text");
        let hello = ctl.hello().unwrap();
        assert_eq!(hello.header.version, abi::VERSION);
        assert_eq!((hello.ranges_max, hello.names_bytes_max), (abi::RANGES_MAX, abi::NAMES_BYTES_MAX));
        assert_eq!(
            (hello.block_bytes, hello.features, hello.prefetch_window),
            (256 << 10, abi::FEATURE_LEASES | abi::FEATURE_PREFETCH | abi::FEATURE_DRAIN, 2)
        );
        assert_eq!((hello.lease_bytes_max, hello.lease_client_bytes_max), (96 << 20, 64 << 20));
        assert_eq!((hello.ttl_default_ms, hello.ttl_max_ms), (60_000, 3_600_000));
        assert!(hello.ranges_max >= 256 && hello.names_max >= 1 << 16 && hello.parties_max >= 8);
        assert_eq!(ctl.hello(), Ok(hello), "as often as one likes");
        // Another version is told what is spoken here.
        let other =
            abi::Hello { header: abi::Header { version: 9, ..header(0, 0) }, ..abi::Hello::default() };
        let number = Ioctl::Hello.number(size_of::<abi::Hello>());
        let (result, back) = raw_ioctl(ctl.0.as_raw_fd(), number, other.as_bytes());
        assert_eq!(result, Err(Errno::EPROTO));
        assert_eq!(&back[..2], abi::VERSION.as_bytes());
    }
}

#[test]
fn what_a_file_does_not_understand_is_enotty() {
    let mount = Mount::new();
    fs::write(mount.at("f"), b"x").unwrap();
    let (plain, ctl) = (File::open(mount.at("f")).unwrap(), Ctl::new(&mount));
    let status = File::open(mount.at(".ctl/status")).unwrap();
    let dir = File::open(mount.path()).unwrap();
    let lookup = abi::Lookup { header: header(0, 1), ..abi::Lookup::default() };
    let number = Ioctl::Lookup.number(size_of::<abi::Lookup>() + 32);
    for file in [&plain, &status, &dir] {
        assert_eq!(raw_ioctl(file.as_raw_fd(), number, lookup.as_bytes()).0, Err(Errno::ENOTTY));
    }
    for file in [&ctl.0, &status, &dir] {
        assert_eq!(identity(file).unwrap_err(), Errno::ENOTTY, "ID is for ordinary files");
    }
    assert_eq!(raw_ioctl(ctl.0.as_raw_fd(), libc::TCGETS as u32, &[0; 64]).0, Err(Errno::ENOTTY));
    assert_eq!(raw_ioctl(plain.as_raw_fd(), libc::TCGETS as u32, &[0; 64]).0, Err(Errno::ENOTTY));
    // A count that there are no bytes for, where the kernel has handed them on.
    assert_eq!(ctl.call(Ioctl::Lookup, &lookup, &[0u8; 31]), Err(Errno::EINVAL));
    let most = abi::Lookup { header: header(0, 501), ..lookup };
    assert_eq!(ctl.call(Ioctl::Lookup, &most, &[0u8; 16_000]), Err(Errno::E2BIG));
}

#[test]
fn names_come_by_ioctl_and_by_write_all_or_none() {
    let mount = Mount::new();
    fs::create_dir_all(mount.at("m/rank0")).unwrap();
    fs::write(mount.at("m/rank0/a"), b"12345").unwrap();
    fs::write(mount.at("m/b"), b"1").unwrap();
    let ctl = Ctl::new(&mount);
    let slots = ctl.intern(&["m/rank0/a", "m/b", "m/none", "m/rank0"]);
    let lookup = |slots: &[Slot]| {
        let ranges: Vec<_> = slots.iter().copied().map(named).collect();
        let (head, states) = ctl.lookup(&ranges).unwrap();
        (head, states.iter().map(status).collect::<Vec<_>>())
    };
    let (head, states) = lookup(&slots[..3]);
    assert_eq!((head.prefix, head.present), (2, 2));
    assert_eq!(states, [Ok(()), Ok(()), Err(Errno::ENOENT)]);
    assert_eq!(lookup(&slots[3..]).1, [Err(Errno::EISDIR)]);

    // From a directory that has a name, as many as a write takes, in one piece wherever they lie.
    let below = ctl.write_names(Some(slots[3]), &["a", "x/y"]).unwrap();
    assert_eq!(lookup(&below).1, [Ok(()), Err(Errno::ENOENT)]);
    let room = abi::NAMES_BYTES_MAX as usize - size_of::<abi::NamesHeader>();
    let many: Vec<String> = (0..room / 8).map(|at| format!("n{at:06}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let slots_of_many = ctl.write_names(None, &many).unwrap();
    assert_eq!(slots_of_many.len(), many.len());
    assert_eq!(mount.stat("interned_names"), 6 + many.len() as u64);
    fs::write(mount.at(many[many.len() - 1]), b"last").unwrap();
    wait_until("the file", || lookup(&slots_of_many[many.len() - 1..]).1 == [Ok(())]);

    // One bad name, and there is none of them.
    let before = mount.stat("interned_names");
    for bad in ["", "/a", "a/", "a//b", ".", "..", "a/../b"] {
        assert_eq!(ctl.write_names(None, &["fine", bad]), Err(Errno::EINVAL), "{bad}");
        assert_eq!(ctl.intern_from(None, &["fine", bad]), Err(Errno::EINVAL), "{bad}");
    }
    let long = "x".repeat(256);
    assert_eq!(ctl.write_names(None, &["fine", &long]), Err(Errno::ENAMETOOLONG));
    assert_eq!(ctl.write_names(Some(Slot { id: 77, generation: 1 }), &["fine"]), Err(Errno::ESTALE));
    assert_eq!(errno((&ctl.0).write(b"m/b\n")), Errno::EINVAL, "a greeted handle takes no text");
    assert_eq!(mount.stat("interned_names"), before);

    // As many as a session may have, and not one more.
    let mut held = before;
    while held + many.len() as u64 <= 1 << 18 {
        ctl.write_names(None, &many).unwrap();
        held += many.len() as u64;
    }
    assert_eq!(ctl.write_names(None, &many), Err(Errno::ENOSPC));
    assert_eq!(mount.stat("interned_names"), held);
    drop(ctl);
    wait_until("the names are gone", || mount.stat("interned_names") == 0);
    wait_until("the session is gone", || mount.stat("control_sessions") == 0);
}

#[test]
fn a_forgotten_name_is_stale_for_its_range_alone() {
    let mount = Mount::new();
    fs::write(mount.at("a"), b"1").unwrap();
    fs::write(mount.at("b"), b"2").unwrap();
    let ctl = Ctl::new(&mount);
    let slots = ctl.intern(&["a", "b"]);
    assert_eq!(ctl.forget(&slots[..1]), 1);
    assert_eq!(ctl.forget(&slots[..1]), 0);
    let again = ctl.intern(&["b"]);
    assert_eq!(again[0].id, slots[0].id, "places are used again");
    assert_ne!(again[0].generation, slots[0].generation);
    let ranges = [named(slots[0]), named(slots[1]), named(again[0]), named(Slot { id: 9999, generation: 1 })];
    let (head, states) = ctl.lookup(&ranges).unwrap();
    assert_eq!((head.prefix, head.present), (0, 2));
    assert_eq!(
        states.iter().map(status).collect::<Vec<_>>(),
        [Err(Errno::ESTALE), Ok(()), Ok(()), Err(Errno::ESTALE)]
    );
    // Names are a session's own.
    let other = Ctl::new(&mount);
    assert_eq!(status(&other.lookup(&ranges[1..2]).unwrap().1[0]), Err(Errno::ESTALE));
}

#[test]
fn a_range_that_is_wrong_says_so_and_harms_no_other() {
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 1000)).unwrap();
    symlink("f", mount.at("link")).unwrap();
    fs::create_dir(mount.at("d")).unwrap();
    symlink("d", mount.at("dirlink")).unwrap();
    fs::write(mount.at("d/f"), b"x").unwrap();
    let ctl = Ctl::new(&mount);
    let slots = ctl.intern(&["f", "link", "f/x", "dirlink/f", ".ctl/status"]);
    let f = named(slots[0]);
    let cases = [
        (f, Ok(())),
        (part(f, 0, 1000), Ok(())),
        (part(f, 999, 1), Ok(())),
        (part(f, 1000, 0), Ok(())),
        (part(f, 999, 2), Err(Errno::ERANGE)),
        (part(f, 1001, 0), Err(Errno::ERANGE)),
        (part(f, u64::MAX, 1), Err(Errno::EINVAL)),
        (part(f, 1, u64::MAX), Err(Errno::EINVAL)),
        (part(f, 0, u64::MAX), Err(Errno::ERANGE)),
        (abi::Range { unit: abi::UNIT_BLOCKS, ..f }, Err(Errno::EOPNOTSUPP)),
        (abi::Range { unit: 7, ..f }, Err(Errno::EINVAL)),
        (abi::Range { kind: 7, ..f }, Err(Errno::EINVAL)),
        (abi::Range { kind: abi::KIND_ITEM, ..f }, Err(Errno::EINVAL)),
        (abi::Range { reserved: 1, ..f }, Err(Errno::EINVAL)),
        (abi::Range { id: 1 << 40, ..f }, Err(Errno::ESTALE)),
        (named(slots[1]), Err(Errno::ELOOP)),
        (named(slots[2]), Err(Errno::ENOTDIR)),
        (named(slots[3]), Err(Errno::ELOOP)),
        (named(slots[4]), Err(Errno::ENOENT)),
        (node(0), Err(Errno::ESTALE)),
        (node(u64::MAX), Err(Errno::ESTALE)),
        (abi::Range { generation: 1, ..node(1) }, Err(Errno::EINVAL)),
    ];
    let ranges: Vec<_> = cases.iter().map(|(range, _)| *range).collect();
    let (_, states) = ctl.lookup(&ranges).unwrap();
    for (state, (range, expected)) in states.iter().zip(&cases) {
        assert_eq!(status(state), *expected, "{range:?}");
        assert_eq!(state.status == 0, state.tier != abi::TIER_ABSENT, "{range:?}");
    }
    assert_eq!(states.len() - cases.len(), 0);
}

#[test]
fn an_open_file_names_its_version() {
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 300_000)).unwrap();
    let old = File::open(mount.at("f")).unwrap();
    let id = identity(&old).unwrap();
    assert_eq!((id.size, id.state & abi::STATE_OPEN), (300_000, 0));
    fs::write(mount.at("new"), b"12").unwrap();
    fs::rename(mount.at("new"), mount.at("f")).unwrap();
    let new = File::open(mount.at("f")).unwrap();
    assert_ne!(node_of(&new), id.node);
    let ctl = Ctl::new(&mount);
    let by_name = ctl.ranges(&["f"])[0];
    let (_, states) = ctl.lookup(&[node(id.node), node(node_of(&new)), by_name]).unwrap();
    assert_eq!(states.iter().map(|state| state.bytes).collect::<Vec<_>>(), [300_000, 2, 2]);
    drop(old);
    // Nobody has it any more.
    wait_until("the old version goes", || {
        status(&ctl.lookup(&[node(id.node)]).unwrap().1[0]) == Err(Errno::ESTALE)
    });
}

/// What is being written belongs to its writer, whoever knows its number.
#[test]
fn a_private_file_is_found_by_nobody_else() {
    let mount = Mount::new();
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(mount.at("p")).unwrap();
    file.write_all(b"secret").unwrap();
    let id = node_of(&file);
    let own = Ctl::new(&mount);
    let slot = own.ranges(&["p"])[0];
    let (_, states) = own.lookup(&[slot, node(id)]).unwrap();
    assert_eq!(status(&states[0]), Err(Errno::ENOENT), "names lead to what everybody sees");
    assert_eq!((status(&states[1]), states[1].flags & abi::STATE_OPEN), (Ok(()), abi::STATE_OPEN));
    let script = format!("print(lookup_node({id}))");
    assert_eq!(python(&mount, None, &script), (-libc::ENOENT).to_string());
    drop(file);
    // Whoever asks after close(2) has returned finds it.
    assert_eq!(status(&own.lookup(&[slot]).unwrap().1[0]), Ok(()));
    assert_eq!(python(&mount, None, &script), "0");
}

/// A client of another process, and of another user, in a few lines of Python.
const PYTHON: &str = r#"
ctl = os.open(".ctl/lease", os.O_RDWR)
def ioctl(nr, data):
    data = bytearray(data)
    fcntl.ioctl(ctl, 3 << 30 | len(data) << 16 | 0x4b00 | nr, data)
    return data
ioctl(1, struct.pack("HHI", 1, 0, 0) + bytes(80))
def lookup(id, generation, kind):
    data = struct.pack("HHIQII", 1, 0, 1, 0, 0, 0) + struct.pack("QQQIBBH", id, 0, 0, generation, kind, 0, 0)
    return struct.unpack_from("i", ioctl(6, data), 24)[0]
def lookup_node(id):
    return lookup(id, 0, 1)
def lookup_name(name):
    name = name.encode() + b"\0"
    data = ioctl(3, struct.pack("HHIIIIBBBBII", 1, 0, 1, 0, 0, len(name), 0, 0, 0, 0, 0, 0) + name)
    first, generation = struct.unpack_from("II", data, 24)
    return lookup(first, generation, 0)
"#;

/// Python that begins as root, which may run the interpreter wherever it is, and goes on as a user with these groups.
fn script_of(user: Option<(u32, &[u32])>, script: &str) -> String {
    let become_user = user.map_or_else(String::new, |(uid, groups)| {
        format!("os.setgroups({groups:?})\nos.setregid({uid}, {uid})\nos.setreuid({uid}, {uid})\n")
    });
    format!("import fcntl, os, struct, sys\n{become_user}{PYTHON}\n{script}")
}

fn python(mount: &Mount, user: Option<(u32, &[u32])>, script: &str) -> String {
    let mut command = Command::new("python3");
    let output = command.args(["-c", &script_of(user, script)]).current_dir(mount.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn only_what_one_may_read_can_be_named() {
    let mount = Mount::with(Options::default().arg("--allow-other"));
    fs::set_permissions(mount.scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mode = |path: &str, mode| {
        fs::set_permissions(mount.at(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    let own = |path: &str, uid, gid| std::os::unix::fs::chown(mount.at(path), Some(uid), Some(gid)).unwrap();
    fs::create_dir(mount.at("open")).unwrap();
    fs::create_dir(mount.at("closed")).unwrap();
    for path in ["open/all", "open/group", "open/owner", "open/none", "closed/all"] {
        fs::write(mount.at(path), b"x").unwrap();
    }
    mode("open", 0o711);
    mode("closed", 0o700);
    for (path, bits) in [
        ("open/all", 0o604),
        ("open/group", 0o640),
        ("open/owner", 0o400),
        ("open/none", 0o077),
        ("closed/all", 0o644),
    ] {
        mode(path, bits);
    }
    own("open/group", 0, 4242);
    own("open/owner", 6001, 0);
    own("open/none", 6001, 0);
    let ids: Vec<u64> = ["open/all", "open/group", "open/owner", "open/none", "closed/all"]
        .iter()
        .map(|path| node_of(&File::open(mount.at(path)).unwrap()))
        .collect();
    let paths =
        ["open/all", "open/group", "open/owner", "open/none", "closed/all", "closed/nothing", "open/nothing"];
    let script = format!(
        "for path in {paths:?}: print(lookup_name(path), end=' ')\nfor id in {ids:?}: print(lookup_node(id), end=' ')"
    );
    let (no, gone) = (-(Errno::EACCES as i32), -(Errno::ENOENT as i32));
    let told = |statuses: [i32; 7]| {
        let by_node = &statuses[..5];
        statuses.iter().chain(by_node).map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let as_user = |uid: u32, groups: &[u32]| python(&mount, Some((uid, groups)), &script);
    // As open(2) has it: root may do everything, an owner has his own bits even if others have more.
    assert_eq!(python(&mount, None, &script), told([0, 0, 0, 0, 0, gone, gone]));
    assert_eq!(as_user(6000, &[]), told([0, no, no, 0, no, no, gone]));
    assert_eq!(as_user(6000, &[77, 4242]), told([0, 0, no, 0, no, no, gone]));
    assert_eq!(as_user(6001, &[]), told([0, no, 0, no, no, no, gone]));
    assert_eq!(as_user(4242, &[]), told([0, 0, no, 0, no, no, gone]));

    // A session notices at once that a directory has been opened to it, or closed.
    let asks =
        script_of(Some((6000, &[])), "for line in sys.stdin: print(lookup_name(line.strip()), flush=True)");
    let mut child = Command::new("python3")
        .args(["-u", "-c", &asks])
        .current_dir(mount.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answers = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut ask = |path: &str| {
        writeln!(child.stdin.as_mut().unwrap(), "{path}").unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut answers, &mut line).unwrap();
        line.trim().parse::<i32>().unwrap()
    };
    assert_eq!(ask("closed/all"), no);
    mode("closed", 0o701);
    assert_eq!(ask("closed/all"), 0);
    fs::rename(mount.at("closed"), mount.at("moved")).unwrap();
    assert_eq!(ask("closed/all"), gone);
    assert_eq!(ask("moved/all"), 0);
    mode("moved", 0o700);
    assert_eq!(ask("moved/all"), no);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A name is a path: what has been put in its place is found, also by a session that has looked before.
#[test]
fn names_follow_what_becomes_of_the_tree() {
    let mount = Mount::new();
    fs::create_dir_all(mount.at("a/b")).unwrap();
    fs::write(mount.at("a/b/f"), bytes(1, 10)).unwrap();
    let ctl = Ctl::new(&mount);
    let range = ctl.ranges(&["a/b/f"])[0];
    let size = || {
        let (head, states) = ctl.lookup(&[range]).unwrap();
        (head.generation, status(&states[0]).map(|()| states[0].bytes))
    };
    let (mut generation, found) = size();
    assert_eq!(found, Ok(10));
    assert_eq!(size(), (generation, Ok(10)), "nothing has changed");
    let mut now = |expected: Result<u64, Errno>| {
        let (later, found) = size();
        assert_eq!(found, expected);
        assert!(later > generation, "{later} after {generation}");
        generation = later;
    };
    fs::write(mount.at("a/b/g"), bytes(2, 20)).unwrap();
    fs::rename(mount.at("a/b/g"), mount.at("a/b/f")).unwrap();
    now(Ok(20));
    fs::rename(mount.at("a/b"), mount.at("a/c")).unwrap();
    now(Err(Errno::ENOENT));
    fs::create_dir(mount.at("a/b")).unwrap();
    fs::write(mount.at("a/b/f"), bytes(3, 30)).unwrap();
    now(Ok(30));
    fs::remove_file(mount.at("a/b/f")).unwrap();
    now(Err(Errno::ENOENT));
    fs::rename(mount.at("a/c"), mount.at("a/b")).unwrap();
    now(Ok(20));
}

#[test]
fn handles_are_files_without_content() {
    let mount = Mount::new();
    for path in HANDLES {
        let meta = fs::metadata(mount.at(path)).unwrap();
        assert_eq!((meta.permissions().mode() & 0o777, meta.len()), (0o666, 0), "{path}");
        assert_eq!(fs::read(mount.at(path)).unwrap(), b"");
        let truncating = OpenOptions::new().write(true).truncate(true).open(mount.at(path)).unwrap();
        drop(truncating);
        let mut nonblocking = OpenOptions::new();
        nonblocking.read(true).custom_flags(libc::O_NONBLOCK);
        let mut text = String::new();
        nonblocking.open(mount.at(path)).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(
            errno(OpenOptions::new().write(true).create_new(true).open(mount.at(path))),
            Errno::EEXIST
        );
        assert_eq!(errno(fs::remove_file(mount.at(path))), Errno::EPERM);
    }
    wait_until("no session is left", || mount.stat("control_sessions") == 0);
}

#[test]
fn a_mount_that_is_read_only_can_be_asked() {
    if memory_only() {
        return;
    }
    let mut mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 1000)).unwrap();
    mount.drain();
    mount.restart_with(&["--read-only"]);
    assert_eq!(errno(OpenOptions::new().write(true).open(mount.at(".ctl/lease"))), Errno::EROFS);
    let ctl = Ctl(File::open(mount.at(".ctl/lease")).unwrap());
    ctl.hello().unwrap();
    let range = ctl.ranges(&["f"]);
    assert_eq!(ctl.lookup(&range).unwrap().0.present, 1);
    assert_eq!(fs::read(mount.at("f")).unwrap(), bytes(1, 1000));
    mount.wait_for("promotions_in_flight", |count| count == 0);
    ctl.lease(&range);
}
