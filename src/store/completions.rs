//! The threads on which transfers are completed: checksums are verified and clients answered here, so that a
//! device's own thread does nothing but keep the device busy.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::sync::{Condvar, JoinHandle, Mutex, spawn};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    stopping: bool,
}

/// Jobs and the threads that do them.
pub struct Completions {
    shared: Arc<(Mutex<Queue>, Condvar)>,
    threads: Mutex<Vec<JoinHandle>>,
}

impl Completions {
    pub fn new() -> Self {
        Self { shared: Arc::default(), threads: Mutex::default() }
    }

    pub fn start(&self, threads: usize) -> std::io::Result<()> {
        for at in 0..threads {
            let shared = self.shared.clone();
            let thread = spawn(&format!("kv-done-{at}"), move || {
                let (queue, wake) = &*shared;
                loop {
                    let mut locked = queue.lock();
                    let job = loop {
                        if let Some(job) = locked.jobs.pop_front() {
                            break job;
                        }
                        if locked.stopping {
                            return;
                        }
                        wake.wait(&mut locked);
                    };
                    drop(locked);
                    job();
                }
            })?;
            self.threads.lock().push(thread);
        }
        Ok(())
    }

    pub fn push(&self, job: Job) {
        let (queue, wake) = &*self.shared;
        queue.lock().jobs.push_back(job);
        wake.notify_one();
    }

    /// Does what is queued and ends the threads.
    pub fn stop(&self) {
        let (queue, wake) = &*self.shared;
        queue.lock().stopping = true;
        wake.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a completion thread panicked");
            }
        }
    }
}
