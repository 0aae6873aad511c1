//! The bytes of a sealed version never change under a reader, whoever writes, truncates, maps, replaces or removes the
//! file, and wherever its bytes are (rules R2, R3b).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

#[path = "common/client.rs"]
mod client;
mod common;

use std::fs;

use client::{Client, Watchdog, fill};
use common::{Mount, memory_only};

const READER: &str = r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
held = {}
def hold(name, kind, seed, size):
    fd = os.open(name, os.O_RDONLY)
    address = None
    if kind != 'open':
        # Python's own mmap would keep a duplicate of the descriptor.
        flags = mmap.MAP_PRIVATE if kind == 'private' else mmap.MAP_SHARED
        address = libc.mmap(None, size, mmap.PROT_READ, flags, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), 'mmap of ' + name)
        if kind != 'both':
            os.close(fd)
            fd = None
    held[name] = (fd, address, int(seed), int(size))
def check(name):
    fd, address, seed, size = held[name]
    wanted = fill(seed, size)
    if fd is not None:
        if os.fstat(fd).st_size != size:
            return 'the open file has another size: %d' % os.fstat(fd).st_size
        if os.pread(fd, size + 100_000, 0) != wanted:
            return 'the open file has other bytes'
    if address is not None:
        if ctypes.string_at(address, size) != wanted:
            return 'the mapping has other bytes'
        if any(ctypes.string_at(address + size, -size % 4096)):
            return 'something is behind the end of the file'
    return 'same'
def drop(name):
    fd, address, _, size = held.pop(name)
    if fd is not None:
        os.close(fd)
    if address is not None:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
while True:
    command, name, *rest = hear().split()
    if command == 'hold':
        hold(name, rest[0], int(rest[1]), int(rest[2]))
        say('held')
    elif command == 'check':
        say(check(name))
    elif command == 'drop':
        drop(name)
        say('dropped')
"#;

const WRITER: &str = r#"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
def fallocate(fd, mode, offset, size):
    if libc.fallocate(fd, mode, offset, size) != 0:
        raise OSError(ctypes.get_errno(), 'fallocate')
def change(what, name, size):
    if what == 'replace':
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        write_all(fd, fill(77, 200_000))
    elif what == 'pwrite':
        fd = os.open(name, os.O_RDWR)
        os.pwrite(fd, b'X' * 5000, 4000)
    elif what == 'append':
        fd = os.open(name, os.O_WRONLY | os.O_APPEND)
        write_all(fd, b'Y' * 70_000)
    elif what == 'truncate':
        fd = None
        os.truncate(name, 1000)
    elif what == 'extend':
        fd = None
        os.truncate(name, size + 300_000)
    elif what == 'ftruncate':
        fd = os.open(name, os.O_RDWR)
        os.ftruncate(fd, 10)
    elif what == 'map':
        fd = os.open(name, os.O_RDWR)
        with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
            mapping[4000:9000] = b'X' * 5000
            mapping.flush()
    elif what == 'fallocate':
        fd = os.open(name, os.O_RDWR)
        fallocate(fd, 0, 0, size + 300_000)
    elif what == 'punch':
        fd = os.open(name, os.O_RDWR)
        fallocate(fd, 3, 0, 8192)
    elif what == 'zero':
        fd = os.open(name, os.O_RDWR)
        fallocate(fd, 16, 4000, 5000)
    elif what == 'nothing':
        fd = os.open(name, os.O_RDWR)
    elif what == 'rename':
        fd = os.open('part', PRIVATE)
        write_all(fd, fill(78, 150_000))
        os.rename('part', name)
    elif what == 'unlink':
        os.unlink(name)
        fd = os.open(name, PRIVATE)
        write_all(fd, fill(79, 150_000))
    step('changed')
    if fd is not None:
        os.close(fd)
    say('closed')
while True:
    what, name, size = hear().split()
    change(what, name, int(size))
"#;

const CHANGES: [&str; 13] = [
    "replace",
    "pwrite",
    "append",
    "truncate",
    "extend",
    "ftruncate",
    "map",
    "fallocate",
    "punch",
    "zero",
    "nothing",
    "rename",
    "unlink",
];

/// What the name shows after `change` was made to `old`.
fn changed(change: &str, mut old: Vec<u8>) -> Vec<u8> {
    match change {
        "replace" => return fill(77, 200_000),
        "rename" => return fill(78, 150_000),
        "unlink" => return fill(79, 150_000),
        "pwrite" | "map" => old[4000..9000].fill(b'X'),
        "append" => old.extend_from_slice(&[b'Y'; 70_000]),
        "truncate" => old.truncate(1000),
        "ftruncate" => old.truncate(10),
        "extend" | "fallocate" => old.resize(old.len() + 300_000, 0),
        "punch" => old[..8192].fill(0),
        "zero" => old[4000..9000].fill(0),
        _ => {}
    }
    old
}

struct Readers {
    client: Client,
    names: Vec<String>,
}

impl Readers {
    fn new(mount: &Mount) -> Self {
        Self { client: Client::new(mount, READER), names: Vec::new() }
    }

    fn hold(&mut self, name: &str, kind: &str, seed: u64, size: usize) {
        self.client.say(&format!("hold {name} {kind} {seed} {size}"));
        self.client.at("held");
        self.names.push(name.to_owned());
    }

    #[track_caller]
    fn check(&mut self, name: &str, when: &str) {
        self.client.say(&format!("check {name}"));
        let heard = self.client.hear();
        assert_eq!(heard, "same", "{name} {when}");
    }

    #[track_caller]
    fn check_all(&mut self, when: &str) {
        for name in self.names.clone() {
            self.check(&name, when);
        }
    }

    fn drop_all(&mut self) {
        for name in std::mem::take(&mut self.names) {
            self.client.say(&format!("drop {name}"));
            self.client.at("dropped");
        }
    }
}

/// Readers hold files of `size` bytes in every way while each change is made to one of them.
fn change_under_readers(size: usize, cold: bool) {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let kinds = ["open", "shared", "private", "both"];
    let mut files = Vec::new();
    for kind in kinds {
        for change in CHANGES {
            let (name, seed) = (format!("{kind}-{change}"), files.len() as u64 + 100);
            fs::write(mount.at(&name), fill(seed, size)).unwrap();
            files.push((name, kind, change, seed));
        }
    }
    if cold {
        mount.push_out_of_l1();
    }
    let mut readers = Readers::new(&mount);
    let mut writer = Client::new(&mount, WRITER);
    for (name, kind, _, seed) in &files {
        readers.hold(name, kind, *seed, size);
    }
    if !cold {
        readers.check_all("before anything changed");
    }
    for (name, _, change, seed) in &files {
        writer.say(&format!("{change} {name} {size}"));
        writer.at("changed");
        readers.check(name, "while the writer has it open");
        writer.go();
        writer.at("closed");
        readers.check(name, "after the writer has closed it");
        let (found, wanted) = (fs::read(mount.at(name)).unwrap(), changed(change, fill(*seed, size)));
        assert_eq!(found.len(), wanted.len(), "size of {name} for a new reader");
        assert!(found == wanted, "bytes of {name} for a new reader");
        assert_eq!(fs::metadata(mount.at(name)).unwrap().len(), wanted.len() as u64, "{name}");
    }
    readers.check_all("after every change");
    if !memory_only() {
        mount.push_out_of_l1();
        readers.check_all("after L1 was filled with other files");
        for (name, _, change, seed) in &files {
            assert!(
                fs::read(mount.at(name)).unwrap() == changed(change, fill(*seed, size)),
                "bytes of {name} after L1 was filled with other files"
            );
        }
    }
    for (name, ..) in &files {
        fs::remove_file(mount.at(name)).unwrap();
    }
    readers.check_all("after the files were removed");
    for at in 0..40 {
        fs::write(mount.at(&format!("later-{at}")), fill(at, size)).unwrap();
    }
    readers.check_all("after others took the free memory");
    readers.drop_all();
    for at in 0..40 {
        let name = mount.at(&format!("later-{at}"));
        assert!(fs::read(&name).unwrap() == fill(at, size));
        fs::remove_file(&name).unwrap();
    }
    mount.drain();
    if !memory_only() {
        mount.wait_for("l2_used_bytes", |bytes| bytes == 0);
    }
    mount.wait_for("l1_lent_bytes", |bytes| bytes == 0);
    mount.check_quiet();
}

#[test]
fn a_small_file_in_l1_keeps_its_bytes_for_its_readers() {
    change_under_readers(40_000, false);
}

#[test]
fn a_file_with_a_slab_keeps_its_bytes_for_its_readers() {
    change_under_readers(1_100_123, false);
}

#[test]
fn a_small_file_in_l2_keeps_its_bytes_for_its_readers() {
    if !memory_only() {
        change_under_readers(40_000, true);
    }
}

#[test]
fn a_large_file_in_l2_keeps_its_bytes_for_its_readers() {
    if !memory_only() {
        change_under_readers(1_100_123, true);
    }
}

#[test]
fn a_mapping_outlives_close_eviction_replacement_and_unlink() {
    let mount = Mount::new();
    let _watchdog = Watchdog::new(&mount);
    let sizes = [4096, 50_001, 1 << 20, 3_000_001];
    let mut readers = Readers::new(&mount);
    let older: Vec<(String, u64, usize)> =
        (0..).zip(sizes).map(|(at, size)| (format!("f{at}"), at + 1, size)).collect();
    for (name, seed, size) in &older {
        fs::write(mount.at(name), fill(*seed, *size)).unwrap();
        readers.hold(name, "shared", *seed, *size);
    }
    readers.check_all("mapped");
    if !memory_only() {
        mount.push_out_of_l1();
        readers.check_all("after eviction from L1");
    }
    for (name, seed, size) in &older {
        fs::write(mount.at(name), fill(seed + 1000, *size)).unwrap();
    }
    readers.check_all("after replacement");
    for (name, seed, size) in &older {
        assert!(fs::read(mount.at(name)).unwrap() == fill(seed + 1000, *size));
        fs::remove_file(mount.at(name)).unwrap();
    }
    readers.check_all("after unlink");
    for at in 0..60 {
        fs::write(mount.at("other"), fill(at, 1 << 20)).unwrap();
    }
    readers.check_all("after other files were written and replaced");
    readers.drop_all();
    fs::remove_file(mount.at("other")).unwrap();
    mount.wait_for("l1_lent_bytes", |bytes| bytes == 0);
    mount.check_quiet();
}
