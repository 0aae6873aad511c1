//! What is counted when nothing is under way (S22).

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::daemon::device_log::rig::{barrier, check_places};
use crate::store::Store;
use crate::store::core::Core;

/// Nothing stays under way for so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until nothing is under way, while nobody has a file open to write, and looks whether the accounts say so.
pub fn check_at_rest(store: &Arc<Store>) -> Result<(), String> {
    drain(store)?;
    wait_until(store, is_at_rest);
    let core = store.lock();
    if core.dirty_pages > 0 {
        return Err(format!("{} pages stay dirty", core.dirty_pages));
    }
    for (at, device) in core.space.devices.iter().enumerate() {
        let under_way = [device.reserved, device.leaving, device.stale, device.expected()];
        if under_way != [0; 4] {
            return Err(format!("device {at}: reserved, leaving, stale, expected: {under_way:?}"));
        }
    }
    for idx in 0..core.tree.nodes.end() {
        let hot = core.tree.nodes.get(idx).and_then(|_| core.hot(idx));
        if hot.is_some_and(|hot| hot.blocks.iter().any(|block| block.charge > 0 || block.reserved > 0)) {
            return Err("a block has something set aside for it".to_owned());
        }
    }
    check_places(&core)
}

/// The same of a store that nothing is left in.
pub fn check_empty(store: &Arc<Store>) -> Result<(), String> {
    drain(store)?;
    wait_until(store, |core| is_at_rest(core) && core.space.used() == 0);
    check_at_rest(store)?;
    match store.snapshot().used_bytes {
        0 => Ok(()),
        used => Err(format!("{used} bytes are used by nothing")),
    }
}

fn is_at_rest(core: &Core) -> bool {
    let queue = &core.queue;
    core.dirty_pages == 0
        && core.space.devices.iter().all(|device| device.leaving == 0 && device.stale == 0)
        && !queue.pending()
        && queue.in_flight == 0
        && queue.in_flight_files == 0
}

fn wait_until(store: &Arc<Store>, come: impl Fn(&Core) -> bool) {
    let start = Instant::now();
    while !come(&store.lock()) && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// On a busy machine the devices may take nothing for longer than a request waits.
fn drain(store: &Arc<Store>) -> Result<(), String> {
    let start = Instant::now();
    loop {
        match barrier(store) {
            Err(Errno::ETIMEDOUT) if start.elapsed() < PATIENCE => {}
            result => return result.map_err(|errno| format!("a drain fails: {errno}")),
        }
    }
}
