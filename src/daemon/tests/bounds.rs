//! Room, memory and the publish queue at their bounds: nobody waits for what never comes, and nobody is refused what
//! there is room for (rules R4, R7, R8, R15).

use std::sync::mpsc::Receiver;

use super::*;
use crate::store::node::NodeId;

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
        self.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, &Self::caller()).unwrap().1
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
    let dir = tempfile::tempdir().unwrap();
    let rig = striped(dir.path(), 56, ",evict=none");
    let slow = rig.open_new("slow", libc::O_EXCL);
    assert_eq!(answer(&rig.put(&slow, 0, &vec![1; 4 * MIB]), "a write"), Ok(4 * MIB as u32));
    let on = rig.store().lock().node(slow.id.idx()).device;
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
    }
    rig.store().release(&slow);
    rig.drained();
    let node = rig.store().lock().node(slow.id.idx()).device;
    assert_ne!(node, on, "the test should make it move");
    assert_eq!(rig.read(rig.find("slow").unwrap(), 26 * MIB), Ok(vec![1; 26 * MIB]));
    for name in files {
        let at: u8 = name["file".len()..].parse().unwrap();
        assert_eq!(rig.read(rig.find(&name).unwrap(), 2 * MIB), Ok(vec![at; 2 * MIB]), "{name}");
    }
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
