//! What goes on beside the clients: transfers that take their time, and L1 that drops what it may.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::REQUEST_DEADLINE;
use crate::daemon::device_log::rng::Rng;
use crate::daemon::tests::Rig;
use crate::l2::Class;
use crate::store::node::NONE;

#[derive(Default)]
pub struct Disturbance {
    ended: AtomicBool,
    one: Mutex<()>,
}

impl Disturbance {
    /// Disturbs until somebody says that it is enough.
    pub fn go_on(&self, rig: &Rig, mut rng: Rng, classes: &[Class]) {
        while !self.ended.load(Ordering::Acquire) {
            let one = self.one.lock();
            disturb(rig, &mut rng, classes);
            MutexGuard::unlock_fair(one);
        }
    }

    /// Nothing is held up until what is returned is dropped.
    pub fn pause(&self) -> MutexGuard<'_, ()> {
        self.one.lock()
    }

    /// It ends when what is returned is dropped, also by a panic.
    pub fn ends(&self) -> SetWhenDropped<'_> {
        SetWhenDropped(&self.ended)
    }
}

pub struct SetWhenDropped<'a>(pub &'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn disturb(rig: &Rig, rng: &mut Rng, classes: &[Class]) {
    match rng.below(6) {
        0 => hold(rig, classes[rng.below(classes.len())], Duration::from_micros(rng.below(30_000) as u64)),
        1 => {
            let long = REQUEST_DEADLINE * 2 + Duration::from_millis(50);
            let time = if rng.percent(20) { long } else { Duration::from_millis(5) };
            hold(rig, classes[rng.below(classes.len())], time);
        }
        2..5 => {
            let mut core = rig.store().lock();
            for _ in 0..1 + rng.below(8) {
                if !core.drop_some(NONE) {
                    break;
                }
            }
        }
        _ => std::thread::sleep(Duration::from_micros(rng.below(10_000) as u64)),
    }
}

fn hold(rig: &Rig, class: Class, time: Duration) {
    rig.faults.hold(class);
    std::thread::sleep(time);
    rig.faults.release(class);
}
