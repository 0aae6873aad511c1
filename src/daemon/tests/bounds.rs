//! Room, memory and the publish queue at their bounds: nobody waits for what never comes, and nobody is refused what
//! there is room for (rules R4, R7, R8, R15).

use std::sync::mpsc::Receiver;

use super::*;
use crate::l2::Class;
use crate::store::attr::Change;
use crate::store::node::{NONE, NodeId};

const MIB: usize = 1 << 20;

/// Nothing here takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// The answer to something that was asked.
fn answer<T>(told: &Receiver<T>, what: &str) -> T {
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} is never answered"))
}

fn striped(dir: &Path, mib: usize, more: &str) -> Rig {
    let store = |at| dir.join(format!("store.{at}")).display().to_string();
    Rig::with(&format!("l1=192MiB,l2={}:{mib}MiB,l2={}:{mib}MiB{more}", store(0), store(1)))
}

impl Rig {
    fn reader(&self, name: &str, flags: i32) -> Handle {
        self.store().open(self.find(name).unwrap(), libc::O_RDONLY | flags, &Self::caller()).unwrap().handle
    }

    fn ask(&self, handle: &Handle, offset: u64, len: usize) -> Receiver<Result<Vec<u8>, Errno>> {
        let (tell, told) = channel();
        let reply = Box::new(move |result: Result<&[u8], Errno>| {
            let _ = tell.send(result.map(<[u8]>::to_vec));
        });
        self.store().read(handle, offset, len, reply);
        told
    }

    fn put(&self, handle: &Handle, offset: u64, bytes: &[u8]) -> Receiver<Result<u32, Errno>> {
        let (tell, told) = channel();
        let reply = Box::new(move |result| {
            let _ = tell.send(result);
        });
        self.store().write(handle, offset, bytes, reply);
        told
    }

    fn open_new(&self, name: &str, flags: i32) -> Handle {
        let flags = libc::O_RDWR | libc::O_CREAT | flags;
        self.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, &Self::caller()).unwrap().1.handle
    }

    /// Whether everything becomes durable.
    fn drained(&self) {
        let (tell, told) = channel();
        self.store().barrier(Box::new(move |result| {
            let _ = tell.send(result);
        }));
        assert_eq!(answer(&told, "a drain"), Ok(()));
    }

    fn stored(&self, name: &str, bytes: &[u8]) {
        let handle = self.open_new(name, libc::O_EXCL);
        assert_eq!(answer(&self.put(&handle, 0, bytes), "a write"), Ok(bytes.len() as u32), "{name}");
        self.store().release(&handle);
        self.drained();
    }

    /// Stopping ends, however it stands.
    fn ends(self) {
        let (tell, told) = channel();
        std::thread::spawn(move || {
            self.daemon.stop();
            let _ = tell.send(());
        });
        answer(&told, "stopping");
    }

    fn truncate(&self, handle: &Handle, size: u64) {
        let (tell, told) = channel();
        let reply = Box::new(move |result: Result<crate::store::Attr, Errno>| {
            let _ = tell.send(result.map(|_| ()));
        });
        self.store().truncate(handle.ino, true, size, Default::default(), &Self::caller(), reply);
        assert_eq!(answer(&told, "a truncation"), Ok(()));
    }

    /// Has L1 drop all it may.
    fn empty_l1(&self) {
        while self.store().lock().drop_some(NONE) {}
    }
}

/// Room was counted over all devices, and a file lies on one: a file for which no device had room was let in, and then
/// neither it nor anything after it was ever stored.
#[test]
fn room_is_that_of_one_device() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, "");
    let content = |at: u8| vec![at; 28 * MIB];
    for at in 0..5 {
        rig.stored(&at.to_string(), &content(at));
    }
    assert!(rig.store().snapshot().counters.evictions_l2 > 0, "two of them do not fit on one device");
    assert_eq!(rig.read(rig.find("4").unwrap(), 28 * MIB), Ok(content(4)));

    // Larger than any of the devices.
    let handle = rig.open_new("large", libc::O_EXCL);
    assert_eq!(answer(&rig.put(&handle, 60 * MIB as u64, b"x"), "a write"), Err(Errno::EFBIG));
    rig.store().release(&handle);
    rig.drained();
    let snapshot = rig.store().snapshot();
    assert!(snapshot.used_peak_bytes <= snapshot.capacity_bytes);
    rig.ends();
}

/// Of a file that is written slowly nothing is stored yet, so it may still go to another device when the one it was
/// meant for fills up.
#[test]
fn a_file_that_is_nowhere_yet_goes_where_there_is_room() {
    [false, true].into_iter().for_each(file_that_moves);
}

/// `told`: it says at first how long it will be.
fn file_that_moves(told: bool) {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, ",evict=none");
    let slow = rig.open_new("slow", libc::O_EXCL);
    if told {
        rig.truncate(&slow, 26 * MIB as u64);
    }
    assert_eq!(answer(&rig.put(&slow, 0, &vec![1; 4 * MIB]), "a write"), Ok(4 * MIB as u32));
    let on = rig.store().lock().node(slow.id.idx()).device;
    let expected = || [0, 1].map(|device| rig.store().lock().space.on(device).expected());
    assert!(expected()[usize::from(on)] > 0 && expected()[usize::from(1 - on)] == 0, "{:?}", expected());
    // Files fill both devices alike; then those on the other one go.
    let free = |device: u8| rig.store().lock().space.on(device).free() * 4096;
    let mut files = Vec::new();
    while free(on) > 15 * MIB as u64 {
        let name = format!("file{}", files.len());
        rig.stored(&name, &vec![files.len() as u8; 2 * MIB]);
        files.push(name);
    }
    files.retain(|name| {
        let found = NodeId(rig.find(name).unwrap());
        let device = rig.store().lock().node(found.idx()).device;
        if device != on {
            rig.store().unlink(ROOT_INO, name.as_bytes(), &Rig::caller()).unwrap();
        }
        device == on
    });
    rig.drained();
    assert!(free(1 - on) > 26 * MIB as u64, "{}", free(1 - on));
    for at in 4..26 {
        let written = answer(&rig.put(&slow, (at * MIB) as u64, &[1; MIB]), "a write");
        assert_eq!(written, Ok(MIB as u32), "MiB {at}");
        if at == 24 {
            let (here, there) = (expected()[usize::from(on)], expected()[usize::from(1 - on)]);
            assert!(here == 0 && there > 0, "told {told}: {here} and {there} pages are expected");
        }
    }
    rig.store().release(&slow);
    rig.drained();
    assert_eq!(expected(), [0, 0]);
    let node = rig.store().lock().node(slow.id.idx()).device;
    assert_ne!(node, on, "the test should make it move");
    assert_eq!(rig.read(rig.find("slow").unwrap(), 26 * MIB), Ok(vec![1; 26 * MIB]));
    for name in files {
        let at: u8 = name["file".len()..].parse().unwrap();
        assert_eq!(rig.read(rig.find(&name).unwrap(), 2 * MIB), Ok(vec![at; 2 * MIB]), "{name}");
    }
    rig.ends();
}

/// Files were laid where least was set aside so far. Of files that have only begun that is little: one device got most of
/// them, filled up and evicted, while the other had room.
#[test]
fn files_that_have_only_begun_count_with_what_is_expected_of_them() {
    // Whether the files before them say how long they will be.
    for known in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let rig = striped(dir.path(), 96, "");
        let free = |device: u8| rig.store().lock().space.on(device).free() as usize * 4096;
        let apart = || free(0).abs_diff(free(1));
        let mut before = 0;
        while before < 2 || apart() < 5 * MIB {
            let less = if known { 0 } else { before << 18 };
            rig.stored(&format!("before{before}"), &vec![1; 8 * MIB - less]);
            before += 1;
        }
        let files: Vec<Handle> = (0..6).map(|at| rig.open_new(&at.to_string(), libc::O_EXCL)).collect();
        let step = 256 << 10;
        for offset in (0..8 * MIB).step_by(step) {
            for file in &files {
                let written = answer(&rig.put(file, offset as u64, &vec![1; step]), "a write");
                assert_eq!(written, Ok(step as u32));
            }
        }
        files.iter().for_each(|file| rig.store().release(file));
        rig.drained();
        assert!(apart() < 16 * MIB, "known {known}: {} and {} bytes are free", free(0), free(1));
        rig.ends();
    }
}

/// What is expected of a file goes away with it, however it ends, and once: else its device would look full, or empty,
/// for ever.
#[test]
fn nothing_is_expected_of_a_file_that_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, "");
    let counted = || {
        let core = rig.store().lock();
        let mut of_files = vec![0; core.space.devices.len()];
        for idx in core.building.values().filter_map(|id| core.by_id(*id)) {
            of_files[usize::from(core.node(idx).device)] += core.expected_of(idx);
        }
        let of_devices: Vec<u64> = core.space.devices.iter().map(|device| device.expected()).collect();
        assert_eq!(of_devices, of_files, "each file counts on its own device");
        of_devices.iter().sum::<u64>() as usize * 4096
    };
    // No two in a row are equally long, so that nothing says how long the next will be.
    let begin = |name: &str, flags: i32, len: usize| {
        let handle = rig.open_new(name, flags);
        assert_eq!(answer(&rig.put(&handle, 0, &vec![1; len]), "a write"), Ok(len as u32));
        assert_eq!(counted(), 4 * MIB - len, "{name}");
        handle
    };
    let remove = |name: &str| rig.store().unlink(ROOT_INO, name.as_bytes(), &Rig::caller()).unwrap();
    type End<'a> = &'a dyn Fn(&Handle);
    let ends: [(&str, i32, End<'_>); 6] = [
        ("published", libc::O_EXCL, &|_| {}),
        ("shared", 0, &|_| {}),
        ("outgrown", libc::O_EXCL, &|handle| {
            for at in 1..6 {
                let more = answer(&rig.put(handle, (at * MIB) as u64, &vec![1; MIB]), "a write");
                assert_eq!(more, Ok(MIB as u32));
            }
            assert!(counted() > 0);
        }),
        ("emptied", 0, &|handle| {
            rig.truncate(handle, 0);
            assert_eq!(answer(&rig.put(handle, 0, &vec![1; MIB]), "a write"), Ok(MIB as u32));
            assert_eq!(counted(), 3 * MIB);
        }),
        ("synced", libc::O_EXCL, &|handle| assert_eq!(rig.fsync(handle), Ok(()))),
        ("removed", libc::O_EXCL, &|_| remove("removed")),
    ];
    for (at, (name, flags, end)) in ends.into_iter().enumerate() {
        let handle = begin(name, flags, MIB + at * 4096);
        end(&handle);
        rig.store().release(&handle);
        assert_eq!(counted(), 0, "{name}");
    }
    rig.drained();
    assert!(rig.store().lock().space.devices.iter().all(|device| device.reserved == 0));
    rig.ends();
}

/// Each file went where the most bytes were left over, and the oldest file there left for it, not the oldest of all.
#[test]
fn the_least_recently_used_file_of_all_devices_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, "");
    let evicted = || rig.store().snapshot().counters.evictions_l2 as usize;
    let mut count = 0;
    while evicted() < 12 {
        rig.stored(&format!("file{count}"), &vec![1; 3 * MIB]);
        count += 1;
        let gone: Vec<usize> = (0..count).filter(|at| rig.find(&format!("file{at}")).is_err()).collect();
        assert_eq!(gone, (0..evicted()).collect::<Vec<_>>(), "after {count} files");
    }
    rig.ends();
}

/// What the files before it say about the length of a new one is no reason to stay where there is no room: then others
/// left for it, though it would have fit elsewhere.
#[test]
fn a_file_goes_where_it_fits_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, "");
    // Two files of 20 MiB, which is what is expected of the next one.
    (0..2).for_each(|at| rig.stored(&format!("before{at}"), &vec![1; 20 * MIB]));
    let slow = rig.open_new("slow", libc::O_EXCL);
    assert_eq!(answer(&rig.put(&slow, 0, &vec![2; MIB]), "a write"), Ok(MIB as u32));
    let device = || rig.store().with(|core| core.node(slow.id.idx()).device);
    let on = device();
    // Others set room aside, until nothing is left there, and 8 MiB on the other device.
    let leave = |device: u8, pages: u64| {
        rig.store().with(|core| {
            let space = core.space.on(device);
            let taken = space.free() - pages;
            space.reserved += taken;
            taken
        })
    };
    let (here, there) = (leave(on, 0), leave(1 - on, 8 << 8));
    assert_eq!(answer(&rig.put(&slow, MIB as u64, &vec![2; MIB]), "a write"), Ok(MIB as u32));
    assert_ne!(device(), on);
    assert_eq!(rig.store().snapshot().counters.evictions_l2, 0, "nobody leaves as long as there is room");
    rig.store().with(|core| {
        core.space.on(on).reserved -= here;
        core.space.on(1 - on).reserved -= there;
    });
    rig.store().release(&slow);
    rig.drained();
    assert_eq!(rig.read(rig.find("slow").unwrap(), 2 * MIB), Ok(vec![2; 2 * MIB]));
    rig.ends();
}

/// A file of holes that is kept open is expected to fill them as long as it goes on, and no further than any other file
/// that has as little; then it is not.
#[test]
fn holes_are_not_expected_to_be_filled_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 64, "");
    let held = rig.open_new("held", libc::O_EXCL);
    rig.truncate(&held, 50 * MIB as u64);
    let expected = || rig.store().snapshot().expected_bytes as usize;
    let write = |at: usize| {
        let written = answer(&rig.put(&held, at as u64, &[1; 4096]), "a write");
        assert_eq!(written, Ok(4096));
    };
    write(40 * MIB);
    assert!(expected() > 0 && expected() <= 4 * MIB, "{}", expected());
    let before = expected();
    let mut others = 0;
    while expected() >= before {
        rig.stored(&format!("other{others}"), &vec![2; MIB]);
        others += 1;
        assert!(others < 100, "it is expected for ever");
    }
    assert_eq!(expected(), 0);
    // It goes on, and is expected to go on further.
    write(20 * MIB);
    assert!(expected() > 0);
    rig.store().release(&held);
    assert_eq!(expected(), 0);
    rig.ends();
}

/// A device whose oldest file is in use passed for the one where the oldest would leave, and the next there did, though
/// it had been closed just now and an older one lay on the other device.
#[test]
fn what_was_closed_last_leaves_last_on_whatever_device_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, "");
    let device = |name: &str| {
        let ino = rig.find(name).unwrap();
        rig.store().with(|core| core.node(NodeId(ino).idx()).device)
    };
    rig.stored("held", &vec![1; 14 * MIB]);
    // Opened before the other one is there, so it is the oldest of all.
    let reader = rig.reader("held", 0);
    rig.stored("old", &vec![1; 8 * MIB]);
    let on = device("held");
    assert_ne!(device("old"), on);
    let mut count = 0;
    let last = loop {
        let name = format!("new{count}");
        rig.stored(&name, &vec![1; MIB + count * 4096]);
        if device(&name) == on {
            break name;
        }
        count += 1;
    };
    assert!(rig.store().with(|core| core.evict_file()));
    assert!(rig.find(&last).is_ok() && rig.find("old").is_err(), "the oldest leaves");
    rig.store().release(&reader);
    rig.ends();
}

/// Files that a search for one to leave had met while their records were on their way were never found again, once L1
/// had dropped them meanwhile: they stayed for ever, and newer ones left.
#[test]
fn a_file_whose_record_was_on_its_way_can_leave_later() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let leaves = || rig.store().with(|core| core.evict_file());
    rig.stored("first", &vec![1; MIB]);
    rig.faults.hold_syncs();
    rig.write("second", &vec![2; MIB]);
    rig.faults.wait_for_sync();
    rig.empty_l1();
    let second = NodeId(rig.find("second").unwrap()).idx();
    assert!(rig.store().with(|core| core.hot(second).is_none()), "it is cold");
    assert!(leaves() && rig.find("first").is_err());
    assert!(!leaves() && rig.find("second").is_ok(), "what is not durable stays");
    rig.faults.release_syncs();
    rig.drained();
    rig.stored("third", &vec![3; MIB]);
    assert!(leaves());
    assert!(rig.find("second").is_err() && rig.find("third").is_ok(), "the older one leaves");
    rig.ends();
}

/// A worker that has something to store and no room for it ends with the daemon all the same.
#[test]
fn stopping_does_not_wait_for_room() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    {
        let mut core = rig.store().lock();
        let free = u32::try_from(core.allocators[0].free_blocks()).unwrap();
        core.allocators[0].allocate(free).unwrap();
    }
    rig.write("stuck", &[1; 70_000]);
    std::thread::sleep(Duration::from_millis(50));
    rig.ends();
}

/// Blocks that nobody wrote were charged without asking, past both bounds.
#[test]
fn holes_take_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let options = format!("l1=256MiB,l2={}:128MiB,slab-file-max=128MiB,evict=none", store.display());
    let rig = Rig::with(&options);
    // More than the store holds, with a byte at each end.
    for (name, size) in [("a", 90 * MIB as u64), ("b", 90 * MIB as u64), ("one", 2 * MIB as u64)] {
        let handle = rig.open_new(name, libc::O_EXCL);
        rig.truncate(&handle, size);
        assert_eq!(answer(&rig.put(&handle, 0, b"first"), "a write"), Ok(5));
        assert_eq!(answer(&rig.put(&handle, size - 4, b"last"), "a write"), Ok(4));
        rig.store().release(&handle);
        let snapshot = rig.store().snapshot();
        assert!(snapshot.dirty_bytes <= snapshot.dirty_limit_bytes, "{name}: {}", snapshot.dirty_bytes);
    }
    rig.drained();
    let check = |rig: &Rig| {
        for (name, size) in [("a", 90 * MIB), ("b", 90 * MIB), ("one", 2 * MIB)] {
            let read = rig.read(rig.find(name).unwrap(), size).unwrap();
            assert_eq!((read.len(), &read[..5], &read[size - 4..]), (size, &b"first"[..], &b"last"[..]));
            assert!(read[5..size - 4].iter().all(|&byte| byte == 0), "{name}");
        }
    };
    check(&rig);
    let used = rig.store().snapshot().used_bytes;
    assert!(used <= 6 * (256 << 10), "{used} bytes for six blocks");
    rig.empty_l1();
    assert_eq!(rig.store().snapshot().pool.used_slabs, 0, "a hole holds memory");
    check(&rig);
    // Written in later, the rest stays a hole.
    let handle = rig.store().open(rig.find("one").unwrap(), libc::O_WRONLY, &Rig::caller());
    let handle = match handle {
        Ok(opened) => opened.handle,
        Err(Errno::ESTALE) => {
            rig.store().open(rig.find("one").unwrap(), libc::O_WRONLY, &Rig::caller()).unwrap().handle
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(answer(&rig.put(&handle, MIB as u64, b"mid"), "a write"), Ok(3));
    rig.store().release(&handle);
    rig.drained();
    let snapshot = rig.store().snapshot();
    assert!(snapshot.used_bytes <= 7 * (256 << 10), "{}", snapshot.used_bytes);
    assert!(snapshot.dirty_peak_bytes <= snapshot.dirty_limit_bytes);
    assert_eq!(&rig.read(rig.find("one").unwrap(), 2 * MIB).unwrap()[MIB..MIB + 4], b"mid\0");
    rig.stop();
    let rig = Rig::with(&options);
    let read = rig.read(rig.find("a").unwrap(), 90 * MIB).unwrap();
    assert!(read[5..90 * MIB - 4].iter().all(|&byte| byte == 0));
    rig.ends();
}

/// What could not be stored is in L1 alone: dropped from there, whoever has it open would read zeros.
#[test]
fn what_could_not_be_stored_never_reads_as_a_hole() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let content = vec![7; 700_000];
    rig.faults.hold(Class::WriteBack);
    rig.write("lost", &content);
    let reader = rig.reader("lost", 0);
    rig.faults.fail_next(Direction::Write, 8, libc::EIO);
    rig.faults.release(Class::WriteBack);
    assert_eq!(rig.drain(), Err(Errno::EIO));
    rig.empty_l1();
    match answer(&rig.ask(&reader, 0, content.len()), "a read") {
        Ok(read) => assert!(read == content, "bytes that nobody wrote"),
        Err(error) => assert_eq!(error, Errno::EIO),
    }
    rig.store().release(&reader);
    rig.ends();
}

/// Reads that wait for memory to go around L1 were started one for each that ended; one that needed no transfer any
/// more left the rest waiting for ever.
#[test]
fn every_read_that_waits_for_memory_has_its_turn() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let rig = Rig::with(&format!("l1=128MiB,l2={}:160MiB", store.display()));
    let len = 40 * MIB;
    for (at, name) in ["first", "bad", "next"].into_iter().enumerate() {
        rig.stored(name, &vec![at as u8; len]);
    }
    rig.empty_l1();
    let readers = ["first", "bad", "next", "next"].map(|name| rig.reader(name, libc::O_DIRECT));
    rig.faults.hold(Class::Demand);
    let asked = readers.each_ref().map(|reader| rig.ask(reader, 0, len));
    {
        let mut core = rig.store().lock();
        let idx = readers[1].id.idx();
        core.size_blocks(idx);
        core.hot_mut(idx).blocks[3].bad = true;
    }
    rig.faults.release(Class::Demand);
    assert_eq!(answer(&asked[0], "the first read"), Ok(vec![0; len]));
    assert_eq!(answer(&asked[1], "a read of a bad block"), Err(Errno::EIO));
    for asked in &asked[2..] {
        assert_eq!(answer(asked, "a read behind one that was answered at once"), Ok(vec![2; len]));
    }
    readers.iter().for_each(|reader| rig.store().release(reader));
    rig.ends();
}

/// A device that answers nothing is no reason to keep a client in the kernel for ever.
#[test]
fn reads_around_l1_have_a_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let rig = Rig::with(&format!("l1=128MiB,l2={}:128MiB,request-deadline=2s", store.display()));
    let len = 40 * MIB;
    rig.stored("file", &vec![1; len]);
    rig.empty_l1();
    let reader = rig.reader("file", libc::O_DIRECT);
    rig.faults.hold(Class::Demand);
    let asked = [rig.ask(&reader, 0, len), rig.ask(&reader, 0, len)];
    asked.iter().for_each(|asked| assert_eq!(answer(asked, "a read"), Err(Errno::EIO)));
    rig.faults.release(Class::Demand);
    assert_eq!(answer(&rig.ask(&reader, 0, 4096), "a later read"), Ok(vec![1; 4096]));
    rig.store().release(&reader);
    rig.ends();
}

/// Files that are open moved to the old end of the list while everything else was used; four thousand of them there hid
/// all that could leave.
#[test]
fn open_files_do_not_hide_what_can_leave() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let rig = Rig::with(&format!("l1=64MiB,l2={}:64MiB,l2-files-max=20000", store.display()));
    let open: Vec<Handle> = (0..5000)
        .map(|at| {
            let name = format!("open{at}");
            rig.write(&name, b"held");
            rig.reader(&name, 0)
        })
        .collect();
    for at in 0..64 {
        rig.stored(&format!("file{at}"), &vec![at as u8; MIB]);
    }
    assert!(rig.store().snapshot().counters.evictions_l2 > 0, "the test should fill the store");
    for (at, handle) in open.iter().enumerate().step_by(500) {
        assert_eq!(rig.find(&format!("open{at}")).map(|_| ()), Ok(()), "an open file left");
        assert_eq!(answer(&rig.ask(handle, 0, 4), "a read"), Ok(b"held".to_vec()));
    }
    open.iter().for_each(|handle| rig.store().release(handle));
    // Closed, they can leave like any other.
    let before = rig.store().snapshot().counters.evictions_l2;
    for at in 64..128 {
        rig.stored(&format!("file{at}"), &vec![at as u8; MIB]);
    }
    assert!(rig.store().snapshot().counters.evictions_l2 > before);
    assert_eq!((0..5000).filter(|at| rig.find(&format!("open{at}")).is_ok()).count(), 0);
    rig.ends();
}

/// Whoever reads a file that is being written pins it. Readers that overlap never let go of it together, and the worker
/// waited for that with everything behind it.
#[test]
fn readers_hold_up_neither_the_publish_queue_nor_publishing() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let handle = rig.open_new("slot", 0);
    assert_eq!(answer(&rig.put(&handle, 0, &[1; 700_000]), "a write"), Ok(700_000));
    // A reader that is being answered for as long as this test wants.
    let (begun, has_begun) = channel();
    let (end, may_end) = channel::<()>();
    let store = rig.store().clone();
    let id = handle.id;
    let held = std::thread::spawn(move || {
        let reader = store.open(id.0, libc::O_RDONLY, &Rig::caller()).unwrap().handle;
        let reply = Box::new(move |result: Result<&[u8], Errno>| {
            begun.send(result.map(<[u8]>::len)).unwrap();
            let _ = may_end.recv();
        });
        store.read(&reader, 0, 4096, reply);
        store.release(&reader);
    });
    assert_eq!(answer(&has_begun, "a read"), Ok(4096));
    let (tell, told) = channel();
    rig.store().fsync(&handle, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(answer(&told, "fsync of a file that is being read"), Ok(()));
    rig.stored("behind", &[2; 70_000]);
    // The last writer closes while the reader is still at it.
    assert_eq!(answer(&rig.put(&handle, 0, &[3; 4096]), "a write"), Ok(4096));
    rig.store().release(&handle);
    rig.drained();
    assert!(
        rig.store().lock().hot(id.idx()).is_none_or(|hot| hot.sealed()),
        "a reader keeps it from being sealed"
    );
    end.send(()).unwrap();
    held.join().unwrap();
    let mut wanted = vec![1; 700_000];
    wanted[..4096].fill(3);
    assert_eq!(rig.read(rig.find("slot").unwrap(), 700_000), Ok(wanted));
    rig.ends();
}

/// The same with writers: each lets go only for the next to come. Whoever comes after the worker wanted its turn comes
/// after the worker.
#[test]
fn writers_do_not_hold_up_the_publish_queue() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let handle = rig.open_new("slot", 0);
    assert_eq!(answer(&rig.put(&handle, 0, &[1; 70_000]), "a write"), Ok(70_000));
    let idx = handle.id.idx();
    // A write that goes on until the test ends it.
    rig.store().lock().hot_mut(idx).writing = true;
    let (tell, told) = channel();
    rig.store().fsync(&handle, Box::new(move |result| tell.send(result).unwrap()));
    while !rig.store().lock().hot_mut(idx).claimed {
        std::thread::yield_now();
    }
    rig.faults.hold(Class::WriteBack);
    rig.store().lock().hot_mut(idx).writing = false;
    let next = rig.put(&handle, 0, &[2; 70_000]);
    let had_its_turn = rig.store().lock().hot_mut(idx).transfers > 0;
    assert!(had_its_turn || next.try_recv().is_err(), "the next writer came before the worker");
    rig.store().with(|core| core.wake_if_unwritten(idx));
    // Once the worker has taken its copy it is the writer's turn.
    assert_eq!(answer(&next, "a write"), Ok(70_000));
    rig.faults.release(Class::WriteBack);
    assert_eq!(answer(&told, "fsync of a file that is being written"), Ok(()));
    rig.store().release(&handle);
    rig.drained();
    assert_eq!(rig.read(rig.find("slot").unwrap(), 70_000), Ok(vec![2; 70_000]));
    rig.ends();
}

/// The list of files under construction holds what is under construction.
#[test]
fn what_was_published_or_given_up_is_not_under_construction() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("l1=64MiB,l2={}:64MiB", dir.path().join("store").display());
    for options in [store.as_str(), "l1=64MiB"] {
        let rig = Rig::with(options);
        for at in 0..50 {
            rig.write(&at.to_string(), b"published");
            let handle = rig.open_new(&format!("gone{at}"), libc::O_EXCL);
            rig.store().unlink(ROOT_INO, format!("gone{at}").as_bytes(), &Rig::caller()).unwrap();
            rig.store().release(&handle);
        }
        let open = rig.open_new("open", libc::O_EXCL);
        assert_eq!(rig.store().lock().building.len(), 1, "{options}");
        rig.store().release(&open);
        assert_eq!(rig.store().lock().building.len(), 0, "{options}");
        rig.ends();
    }
}

/// A small read of a large cold file waits for its own blocks; the rest of the file comes behind what others wait for.
#[test]
fn only_what_is_read_goes_before_everything_else() {
    let dir = tempfile::tempdir().unwrap();
    let rig =
        Rig::with(&format!("l1=64MiB,l2={}:64MiB,slab-file-max=32MiB", dir.path().join("store").display()));
    let content: Vec<u8> = (0..20 * MIB).map(|at| (at >> 12) as u8).collect();
    rig.stored("file", &content);
    rig.empty_l1();
    let reader = rig.reader("file", 0);
    rig.faults.hold(Class::Promotion);
    let at = 9 * MIB + 4096;
    let read = answer(&rig.ask(&reader, at as u64, 4096), "a small read");
    assert_eq!(read, Ok(content[at..at + 4096].to_vec()));
    assert!(rig.faults.held(Class::Promotion) > 0, "the rest of the file is not wanted at once");
    let later = rig.ask(&reader, 0, 4096);
    rig.faults.release(Class::Promotion);
    assert_eq!(answer(&later, "a read of the rest"), Ok(content[..4096].to_vec()));
    assert_eq!(answer(&rig.ask(&reader, 0, 20 * MIB), "all of it"), Ok(content));
    rig.store().release(&reader);
    rig.ends();
}

/// What the daemon holds of writes that wait is told, and given back.
#[test]
fn what_is_held_of_waiting_writes_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let rig = Rig::with(&format!("l1=64MiB,l2={}:128MiB,dirty-limit=32MiB", store.display()));
    let handle = rig.open_new("file", libc::O_EXCL);
    rig.faults.hold(Class::WriteBack);
    let piece = vec![1; MIB];
    let told: Vec<_> = (0..40).map(|at| rig.put(&handle, (at * MIB) as u64, &piece)).collect();
    let snapshot = rig.store().snapshot();
    assert!(snapshot.waiting_bytes >= 7 * MIB as u64, "{}", snapshot.waiting_bytes);
    assert!(snapshot.dirty_bytes <= snapshot.dirty_limit_bytes);
    rig.faults.release(Class::WriteBack);
    told.iter().for_each(|told| assert_eq!(answer(told, "a write that waited"), Ok(MIB as u32)));
    assert_eq!(rig.store().snapshot().waiting_bytes, 0);
    rig.store().release(&handle);
    rig.drained();
    rig.ends();
}

/// Times that a client sets do not keep a file, nor its device, from their turn.
#[test]
fn a_file_from_the_future_leaves_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, "");
    for at in 0..300 {
        let name = format!("f{at}");
        rig.stored(&name, &vec![1; MIB]);
        if at < 2 {
            let ino = rig.find(&name).unwrap();
            let dated = Change { atime: Some(i64::MAX), mtime: Some(i64::MAX), ..Change::default() };
            rig.store().setattr(ino, dated).unwrap();
        }
    }
    for at in 0..2 {
        assert_eq!(rig.find(&format!("f{at}")), Err(Errno::ENOENT), "{at} is the oldest of all");
    }
    // Half of what both devices hold, and whatever is on its way, was written last.
    for at in 250..300 {
        assert!(rig.find(&format!("f{at}")).is_ok(), "{at} is younger than many that stayed");
    }
    rig.ends();
}

/// What a file was made of by copy-on-write was let go before all was there that its cut needed: when that failed, the
/// file had its old length and zeros in place of what had not been copied.
#[test]
fn a_cut_that_fails_leaves_a_copy_on_write_version_all_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let content = vec![7; 4 * MIB];
    rig.stored("file", &content);
    rig.store().with(|core| {
        core.settings.dirty_limit_pages = 512;
        core.settings.request_deadline = Duration::from_millis(300);
    });
    let ino = rig.find("file").unwrap();
    assert_eq!(rig.store().open(ino, libc::O_RDWR, &Rig::caller()).err(), Some(Errno::ESTALE));
    let ino = rig.find("file").unwrap();
    let handle = rig.store().open(ino, libc::O_RDWR, &Rig::caller()).unwrap().handle;
    // Half of it is copied before there is no credit for more.
    rig.faults.hold(Class::WriteBack);
    assert_eq!(answer(&rig.put(&handle, 0, b"x"), "a write"), Err(Errno::EIO));
    rig.faults.release(Class::WriteBack);
    rig.wait(|| rig.store().snapshot().dirty_bytes == 0);
    rig.empty_l1();
    rig.faults.hold(Class::Demand);
    let (tell, told) = channel();
    let reply = Box::new(move |result: Result<crate::store::Attr, Errno>| {
        let _ = tell.send(result.map(|_| ()));
    });
    let size = MIB as u64 + 5;
    rig.store().truncate(handle.ino, true, size, Default::default(), &Rig::caller(), reply);
    assert_eq!(answer(&told, "a truncation"), Err(Errno::EIO));
    rig.faults.release(Class::Demand);
    assert!(answer(&rig.ask(&handle, 0, 4 * MIB), "a read") == Ok(content.clone()), "it is as it was");
    rig.store().release(&handle);
    rig.drained();
    assert!(rig.read(rig.find("file").unwrap(), 4 * MIB) == Ok(content));
    rig.ends();
}

/// A block that was to be overwritten as a whole counted as one of zeros as soon as there was memory for that, also if
/// there was then no room for the next one: what the file had there could not be seen any more, or was changed to zeros.
#[test]
fn a_write_that_fails_leaves_blocks_that_are_not_in_l1_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start_with(dir.path(), "64MiB,evict=none", faulty);
    let block = 256 << 10;
    let content: Vec<u8> = (0..2 * MIB).map(|at| (at / 4096 % 250) as u8 + 1).collect();
    let handle = rig.open_new("file", 0);
    assert_eq!(answer(&rig.put(&handle, 0, &content), "a write"), Ok(2 * MIB as u32));
    let (tell, told) = channel();
    rig.store().fsync(&handle, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(answer(&told, "fsync"), Ok(()));
    rig.empty_l1();
    // Others set room aside, until there is some for one block alone.
    let taken = rig.store().with(|core| {
        let space = core.space.on(0);
        let taken = space.free() - 64;
        space.reserved += taken;
        taken
    });
    assert_eq!(answer(&rig.put(&handle, 0, &vec![0xff; 2 * block]), "a write"), Err(Errno::ENOSPC));
    assert!(answer(&rig.ask(&handle, 0, 2 * MIB), "a read") == Ok(content.clone()), "it is as it was");
    rig.empty_l1();
    assert_eq!(answer(&rig.put(&handle, 0, &vec![0xff; 2 * block]), "a write"), Err(Errno::ENOSPC));
    // This block has what it takes.
    assert_eq!(answer(&rig.put(&handle, 100, &[0xee; 10]), "a write"), Ok(10));
    rig.store().with(|core| core.space.on(0).reserved -= taken);
    let mut content = content;
    content[100..110].fill(0xee);
    rig.store().release(&handle);
    rig.drained();
    assert!(rig.read(rig.find("file").unwrap(), 2 * MIB) == Ok(content));
    rig.ends();
}

/// What was read from where a block had been was taken for that block's, though it had been given up meanwhile and the
/// place was another file's: a hole could not be read any more, and a file that is not a slot file was lost for it.
#[test]
fn a_read_that_a_hole_or_a_cut_overtakes_says_nothing_of_the_file() {
    for (slot, cut) in [(true, false), (false, false), (true, true), (false, true)] {
        let what = format!("slot {slot}, cut {cut}");
        let dir = tempfile::tempdir().unwrap();
        let rig = striped(dir.path(), 64, "");
        let posix = rig.store().mkdir(ROOT_INO, b"posix", 0o755, &Rig::caller()).unwrap().attr.ino;
        rig.store().setxattr(posix, b"user.kv.publish", b"posix", 0).unwrap();
        let flags = libc::O_RDWR | libc::O_CREAT | if slot { 0 } else { libc::O_EXCL };
        let made = rig.store().create(posix, b"file", 0o644, flags, &Rig::caller());
        let handle = made.unwrap().1.handle;
        assert_eq!(answer(&rig.put(&handle, 0, &vec![1; 2 * MIB]), "a write"), Ok(2 * MIB as u32));
        rig.store().release(&handle);
        rig.drained();
        let device = || rig.store().lock().node(handle.id.idx()).device;
        assert_eq!(device(), 1, "the one whose reads are held, without the catalog");
        rig.empty_l1();
        let ino = rig.find_in(posix, "file").unwrap();
        let open = |flags| rig.store().open(ino, flags, &Rig::caller()).unwrap().handle;
        let (reader, writer) = (open(libc::O_RDONLY | libc::O_DIRECT), open(libc::O_RDWR));
        rig.faults.hold(Class::Demand);
        let read = rig.ask(&reader, MIB as u64, MIB);
        if cut {
            rig.truncate(&writer, MIB as u64);
            rig.truncate(&writer, 2 * MIB as u64);
        } else {
            let mode = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;
            let (tell, told) = channel();
            let reply = Box::new(move |result| tell.send(result).unwrap());
            rig.store().fallocate(&writer, MIB as u64, MIB as u64, mode, reply);
            assert_eq!(answer(&told, "a hole"), Ok(()));
        }
        rig.store().release(&writer);
        rig.drained();
        rig.stored("other", &vec![2; MIB]);
        rig.faults.release(Class::Demand);
        let read = answer(&read, "a read").unwrap_or_else(|errno| panic!("{what}: {errno}"));
        assert!([0, 1].iter().any(|byte| read == vec![*byte; MIB]), "{what}");
        rig.store().release(&reader);
        assert_eq!(rig.find_in(posix, "file"), Ok(ino), "{what}");
        let mut now = vec![1; 2 * MIB];
        now[MIB..].fill(0);
        assert!(rig.read(ino, 2 * MIB) == Ok(now), "{what}");
        assert_eq!(rig.store().snapshot().counters.crc_errors, 0, "{what}");
        rig.ends();
    }
}

/// A hole waited for what somebody was reading there with its edges zeroed already, and when that did not come it was
/// refused.
#[test]
fn a_hole_does_not_wait_for_what_it_takes_away() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let content = vec![7; MIB];
    let handle = rig.open_new("file", 0);
    assert_eq!(answer(&rig.put(&handle, 0, &content), "a write"), Ok(MIB as u32));
    let (tell, told) = channel();
    rig.store().fsync(&handle, Box::new(move |result| tell.send(result).unwrap()));
    assert_eq!(answer(&told, "fsync"), Ok(()));
    rig.empty_l1();
    let (block, edge) = (256 << 10, 1000);
    // The edge is in L1.
    assert_eq!(answer(&rig.ask(&handle, 0, 10), "a read"), Ok(vec![7; 10]));
    rig.store().with(|core| core.settings.request_deadline = Duration::from_millis(300));
    rig.faults.hold(Class::Demand);
    let read = rig.ask(&handle, block, 10);
    let mode = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;
    let (tell, told) = channel();
    let reply = Box::new(move |result| tell.send(result).unwrap());
    rig.store().fallocate(&handle, edge, 3 * block - edge, mode, reply);
    let punched = answer(&told, "a hole");
    rig.faults.release(Class::Demand);
    let mut now = content;
    if punched.is_ok() {
        now[edge as usize..3 * block as usize].fill(0);
    }
    assert!(answer(&rig.ask(&handle, 0, MIB), "a read") == Ok(now), "{punched:?}");
    let read = answer(&read, "a read");
    assert!(matches!(read, Ok(_) | Err(Errno::EIO)), "{read:?}");
    assert_eq!(punched, Ok(()));
    rig.store().release(&handle);
    rig.drained();
    rig.ends();
}

/// A file was cut to the length that an fallocate had asked for, if somebody wrote behind that while it waited.
#[test]
fn an_fallocate_that_had_to_wait_takes_nothing_away() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    let handle = rig.open_new("slot", 0);
    assert_eq!(answer(&rig.put(&handle, 0, &[1; 4096]), "a write"), Ok(4096));
    let idx = handle.id.idx();
    // A write that goes on until the test ends it.
    rig.store().lock().hot_mut(idx).writing = true;
    let (tell, told) = channel();
    rig.store().fallocate(&handle, 0, 8192, 0, Box::new(move |result| tell.send(result).unwrap()));
    assert!(told.try_recv().is_err(), "it waits");
    rig.store().lock().hot_mut(idx).writing = false;
    let bytes = vec![2; MIB];
    assert_eq!(answer(&rig.put(&handle, 0, &bytes), "a write"), Ok(MIB as u32));
    assert_eq!(answer(&told, "an fallocate"), Ok(()));
    assert!(answer(&rig.ask(&handle, 0, 2 * MIB), "a read") == Ok(bytes));
    rig.store().release(&handle);
    rig.drained();
    rig.ends();
}

/// What a durable file had grown by and what had been spilled of that was taken for durable: nothing was dirty any more, and
/// nothing said that the record is older.
#[test]
fn an_fsync_stores_the_record_of_what_was_spilled() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(dir.path());
    for name in ["closed", "shared"] {
        let flags = if name == "shared" { 0 } else { libc::O_EXCL };
        let handle = rig.open_new(name, flags);
        let fsync = || {
            let (tell, told) = channel();
            rig.store().fsync(&handle, Box::new(move |result| tell.send(result).unwrap()));
            assert_eq!(answer(&told, "fsync"), Ok(()));
        };
        assert_eq!(answer(&rig.put(&handle, 0, &vec![1; MIB]), "a write"), Ok(MIB as u32));
        fsync();
        assert_eq!(answer(&rig.put(&handle, MIB as u64, &vec![2; MIB]), "a write"), Ok(MIB as u32));
        // No commit comes in between.
        let store = rig.store().clone();
        let commits = store.committing.lock();
        // Others wait for the credit that it holds.
        let before = rig.store().with(|core| std::mem::replace(&mut core.settings.dirty_limit_pages, 256));
        let other = rig.open_new("other", libc::O_EXCL);
        assert_eq!(answer(&rig.put(&other, 0, &vec![3; MIB / 2]), "a write"), Ok(MIB as u32 / 2));
        rig.wait(|| rig.store().lock().hot(handle.id.idx()).is_some_and(|hot| !hot.dirty_blocks()));
        assert_eq!(rig.store().getxattr(handle.ino, b"user.kv.durable"), Ok(b"0".to_vec()), "{name}");
        drop(commits);
        fsync();
        assert_eq!(rig.store().getxattr(handle.ino, b"user.kv.durable"), Ok(b"1".to_vec()), "{name}");
        rig.store().with(|core| core.settings.dirty_limit_pages = before);
        let crashed = tempfile::tempdir().unwrap();
        std::fs::copy(dir.path().join("store"), crashed.path().join("store")).unwrap();
        let later = Rig::start(crashed.path());
        let mut wanted = vec![1; 2 * MIB];
        wanted[MIB..].fill(2);
        assert!(later.read(later.find(name).unwrap(), 3 * MIB) == Ok(wanted), "{name}");
        later.stop();
        rig.store().unlink(ROOT_INO, b"other", &Rig::caller()).unwrap();
        rig.store().release(&other);
        rig.store().release(&handle);
    }
    rig.drained();
    rig.ends();
}

/// A block of an unfinished file gives its place up for its next bytes where there is no room beside it, also if it is on its
/// way there right now: that was refused, depending on when the write came.
#[test]
fn a_write_waits_for_the_place_that_its_block_is_being_spilled_to() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start_with(dir.path(), "64MiB,evict=none", faulty);
    let handle = rig.open_new("file", libc::O_EXCL);
    let mut content = vec![1; MIB];
    assert_eq!(answer(&rig.put(&handle, 0, &content), "a write"), Ok(MIB as u32));
    rig.faults.hold(Class::WriteBack);
    // Others wait for the credit that it holds, until it is on its way.
    let before = rig.store().with(|core| std::mem::replace(&mut core.settings.dirty_limit_pages, 256));
    let other = rig.open_new("other", libc::O_EXCL);
    let waits = rig.put(&other, 0, &[2; 4096]);
    rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
    rig.store().with(|core| {
        core.settings.dirty_limit_pages = before;
        core.wakes.admission = true;
    });
    assert_eq!(answer(&waits, "a write that waited"), Ok(4096));
    let taken = rig.store().with(|core| {
        let space = core.space.on(0);
        let taken = space.free();
        space.reserved += taken;
        taken
    });
    let written = rig.put(&handle, 100, &[3; 10]);
    assert!(written.try_recv().is_err(), "it is refused");
    rig.faults.release(Class::WriteBack);
    assert_eq!(answer(&written, "a write to what was spilled"), Ok(10));
    content[100..110].fill(3);
    rig.store().release(&handle);
    rig.store().release(&other);
    rig.drained();
    assert!(rig.read(rig.find("file").unwrap(), 2 * MIB) == Ok(content));
    rig.store().with(|core| core.space.on(0).reserved -= taken);
    rig.ends();
}

/// What was given up while it was being spilled has its room until that has ended. Who came just then was told that
/// there is none, on a device that was all but empty.
#[test]
fn a_write_waits_for_the_room_of_what_was_given_up_while_it_was_spilled() {
    for evict in ["lru", "none"] {
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig::start_with(dir.path(), &format!("64MiB,evict={evict}"), faulty);
        let given_up = rig.open_new("given up", libc::O_EXCL);
        assert_eq!(answer(&rig.put(&given_up, 0, &vec![1; MIB]), "a write"), Ok(MIB as u32));
        rig.faults.hold(Class::WriteBack);
        let before = rig.store().with(|core| std::mem::replace(&mut core.settings.dirty_limit_pages, 256));
        let other = rig.open_new("other", libc::O_EXCL);
        let waits = rig.put(&other, 0, &[2; 4096]);
        rig.wait(|| rig.faults.held(Class::WriteBack) > 0);
        rig.store().with(|core| {
            core.settings.dirty_limit_pages = before;
            core.wakes.admission = true;
        });
        assert_eq!(answer(&waits, "a write that waited"), Ok(4096));
        rig.store().unlink(ROOT_INO, b"given up", &Rig::caller()).unwrap();
        rig.store().release(&given_up);
        let take_the_rest = || {
            rig.store().with(|core| {
                let space = core.space.on(0);
                let rest = space.free();
                space.reserved += rest;
                rest
            })
        };
        let mut taken = take_the_rest();
        let written = rig.put(&other, 4096, &[3; MIB / 2]);
        assert!(written.try_recv().is_err(), "{evict}: it is refused");
        rig.faults.release(Class::WriteBack);
        assert_eq!(answer(&written, "a write when room was made"), Ok(MIB as u32 / 2));
        // When nothing of that kind is left, there is no room.
        taken += take_the_rest();
        let refused = rig.put(&other, 2 * MIB as u64, &[3; MIB / 2]);
        assert_eq!(answer(&refused, "a write without room"), Err(Errno::ENOSPC), "{evict}");
        rig.store().with(|core| core.space.on(0).reserved -= taken);
        rig.store().release(&other);
        rig.drained();
        rig.ends();
    }
}
