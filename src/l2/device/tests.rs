use std::fs;
use std::process::Command;

use super::*;
use crate::l2::Faulty;
use crate::memory::AlignedBuf;

const MIB: u64 = 1 << 20;

fn sized(size: u64) -> DeviceOptions {
    DeviceOptions { size: Some(size), ..Default::default() }
}

fn message(opened: Result<Device, DeviceError>) -> String {
    let message = opened.err().expect("an error").to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

fn round_trip(device: &Device) {
    let last = device.len() - PAGE as u64;
    let span = AlignedBuf::zeroed(PAGE).into_span();
    span.copy_from(0, &[0xa5; PAGE]);
    device.write_at(last, &span).unwrap();
    device.sync_data().unwrap();
    span.zero(0..PAGE);
    device.read_at(last, &span).unwrap();
    assert!(span.with_bytes(|bytes| bytes == [0xa5; PAGE]));
    assert!(device.read_at(device.len(), &span).is_err());
}

#[test]
fn a_file_is_made_with_its_space_reserved_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    assert!(message(Device::open(&path, &DeviceOptions::default())).contains("give a size"));
    for kind in [EngineKind::Auto, EngineKind::Uring, EngineKind::Threads] {
        let device = Device::open(&path, &DeviceOptions { kind, ..sized(8 * MIB) }).unwrap();
        assert_eq!((device.len(), device.path()), (8 * MIB, path.as_path()));
        assert!(device.alignment() <= PAGE);
        assert_eq!(device.engine().name(), if kind == EngineKind::Threads { "threads" } else { "io_uring" });
        assert!(fs::metadata(&path).unwrap().blocks() * 512 >= 8 * MIB);
        round_trip(&device);
    }
    assert_eq!(Device::open(&path, &DeviceOptions::default()).unwrap().len(), 8 * MIB);
    assert!(message(Device::open(&path, &sized(4 * MIB))).contains("8MiB and is not a kvcachefs store"));
    fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(crate::l2::MAGIC, 0).unwrap();
    assert!(message(Device::open(&path, &sized(4 * MIB))).contains("more than the 4MiB asked for"));
    assert!(message(Device::open(&path, &sized(16 * MIB))).contains("less than the 16MiB asked for"));
    assert!(message(Device::open(&path, &sized(4097))).contains("multiple of 4096"));
    assert!(message(Device::open(folder.path(), &sized(MIB))).contains("neither a regular file"));
}

#[test]
fn a_file_with_holes_gets_its_space() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    File::create(&path).unwrap().set_len(4 * MIB + 100).unwrap();
    let device = Device::open(&path, &DeviceOptions::default()).unwrap();
    assert_eq!(device.len(), 4 * MIB);
    assert!(fs::metadata(&path).unwrap().blocks() * 512 >= 4 * MIB);
}

#[test]
fn more_than_the_file_system_has_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    assert!(message(Device::open(&path, &sized(1 << 50))).contains("the file system has"));
    assert!(!path.exists());
}

#[test]
fn one_daemon_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let first = Device::open(&path, &sized(MIB)).unwrap();
    let second = Device::open(&path, &sized(MIB));
    assert!(second.as_ref().is_err_and(DeviceError::is_in_use));
    let message = message(second);
    assert!(
        message.contains("in use by ") && message.contains(&format!("pid {}:", std::process::id())),
        "{message}"
    );
    drop(first);
    Device::open(&path, &sized(MIB)).unwrap();
}

/// As after a kill, when the kernel has not yet taken down the io_uring of a process that is gone.
#[test]
fn a_lock_that_outlives_its_process_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    drop(Device::open(&path, &sized(MIB)).unwrap());
    // flock ends; who inherits the open file holds what it locked.
    let script = "exec 9<>\"$0\"; flock 9; sleep 1 9<&9 >/dev/null 2>&1 & echo";
    let locked = Command::new("sh").args(["-c", script]).arg(&path).output().unwrap();
    assert!(locked.status.success(), "{locked:?}");
    assert!(File::open(&path).unwrap().try_lock().is_err());
    Device::open(&path, &sized(MIB)).unwrap();
}

#[test]
fn the_alignment_is_what_statx_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let device = Device::open(&path, &sized(MIB)).unwrap();
    match direct_alignment(&File::open(&path).unwrap()) {
        Some(alignment) if device.direct() => assert_eq!(device.alignment(), alignment),
        _ => assert_eq!(device.alignment(), PAGE),
    }
    assert_eq!(device.direct(), device.notes().is_empty());
}

#[test]
fn memory_file_systems_work_too() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let device = Device::open(&folder.path().join("store"), &sized(MIB)).unwrap();
    round_trip(&device);
}

#[test]
fn faults_can_be_put_in_front() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::open(&folder.path().join("store"), &sized(MIB)).unwrap();
    let mut faults = None;
    let device = device.wrap(|engine| {
        let (faulty, handle) = Faulty::new(engine);
        faults = Some(handle);
        Arc::new(faulty)
    });
    let span = AlignedBuf::zeroed(PAGE).into_span();
    faults.unwrap().fail_next(Direction::Write, 1, libc::EIO);
    assert_eq!(device.write_at(0, &span).unwrap_err().raw_os_error(), Some(libc::EIO));
    round_trip(&device);
}

/// A loop device over a file, detached on drop.
struct Loop(String);

impl Loop {
    /// `None` where there are no loop devices: unprivileged users and containers.
    fn over(file: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        made.status.success().then(|| Self(String::from_utf8_lossy(&made.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_used_whole_and_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("backing");
    File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    let Some(device_node) = Loop::over(&path) else {
        eprintln!("skipped: no loop devices here");
        return;
    };
    let node = Path::new(&device_node.0);
    for kind in [EngineKind::Auto, EngineKind::Threads] {
        let device = Device::open(node, &DeviceOptions { kind, ..Default::default() }).unwrap();
        assert_eq!(device.len(), 8 * MIB);
        round_trip(&device);
        assert!(Device::open(node, &DeviceOptions::default()).is_err_and(|error| error.is_in_use()));
    }
    assert!(message(Device::open(node, &sized(16 * MIB))).contains("leave out the size"));
    assert_eq!(Device::open(node, &sized(4 * MIB)).unwrap().len(), 4 * MIB);
}
