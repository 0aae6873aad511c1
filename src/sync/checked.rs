//! Locks that are shuttle's where it runs, and parking_lot's elsewhere.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

pub fn is_on() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

pub enum Mutex<T> {
    Real(parking_lot::Mutex<T>),
    Checked(shuttle::sync::Mutex<T>),
}

pub enum MutexGuard<'m, T> {
    Real(parking_lot::MutexGuard<'m, T>),
    /// None while it is waited with.
    Checked(&'m shuttle::sync::Mutex<T>, Option<shuttle::sync::MutexGuard<'m, T>>),
}

/// Who panicked with it has been reported.
fn lock<T>(mutex: &shuttle::sync::Mutex<T>) -> shuttle::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        if is_on() {
            Self::Checked(shuttle::sync::Mutex::new(value))
        } else {
            Self::Real(parking_lot::Mutex::new(value))
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        match self {
            Self::Real(mutex) => MutexGuard::Real(mutex.lock()),
            Self::Checked(mutex) => MutexGuard::Checked(mutex, Some(lock(mutex))),
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

const HELD: &str = "it is held but while it is waited with";

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Real(guard) => guard,
            Self::Checked(_, guard) => guard.as_ref().expect(HELD),
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Real(guard) => guard,
            Self::Checked(_, guard) => guard.as_mut().expect(HELD),
        }
    }
}

pub enum Condvar {
    Real(parking_lot::Condvar),
    Checked(shuttle::sync::Condvar),
}

/// How a wait with an end has ended.
pub struct Waited {
    timed_out: bool,
}

impl Waited {
    pub fn timed_out(&self) -> bool {
        self.timed_out
    }
}

impl Default for Condvar {
    fn default() -> Self {
        Self::new()
    }
}

impl Condvar {
    pub fn new() -> Self {
        if is_on() {
            Self::Checked(shuttle::sync::Condvar::new())
        } else {
            Self::Real(parking_lot::Condvar::new())
        }
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        match (self, guard) {
            (Self::Real(condvar), MutexGuard::Real(guard)) => condvar.wait(guard),
            (Self::Checked(condvar), MutexGuard::Checked(_, guard)) => {
                let held = guard.take().expect(HELD);
                let again = condvar.wait(held).unwrap_or_else(std::sync::PoisonError::into_inner);
                *guard = Some(again);
            }
            _ => panic!("half of it was made outside of the checker"),
        }
    }

    /// To the checker the time is always over: others get their turn, and that is all.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, end: Instant) -> Waited {
        match (self, guard) {
            (Self::Real(condvar), MutexGuard::Real(guard)) => {
                Waited { timed_out: condvar.wait_until(guard, end).timed_out() }
            }
            (Self::Checked(_), MutexGuard::Checked(mutex, guard)) => {
                drop(guard.take());
                *guard = Some(lock(mutex));
                Waited { timed_out: true }
            }
            _ => panic!("half of it was made outside of the checker"),
        }
    }

    pub fn notify_one(&self) {
        match self {
            Self::Real(condvar) => drop(condvar.notify_one()),
            Self::Checked(condvar) => condvar.notify_one(),
        }
    }

    pub fn notify_all(&self) {
        match self {
            Self::Real(condvar) => drop(condvar.notify_all()),
            Self::Checked(condvar) => condvar.notify_all(),
        }
    }
}

thread_local! {
    /// The checker's tasks all run on its thread.
    static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
}

pub fn now() -> Instant {
    let now = NOW.get().unwrap_or_else(Instant::now);
    NOW.set(Some(now));
    now
}

/// Lets time pass for the checker.
pub fn advance(time: Duration) {
    NOW.set(Some(now() + time));
}
