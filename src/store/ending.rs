//! The end of the session: no client is left.
//!
//! The kernel sends a RELEASE after the last close(2) of a file, but without waiting for it; if the file system is
//! unmounted right then, the message is thrown away. The mount is only gone when nobody has a file open any more, so
//! then every handle that is still here has been closed.

use std::sync::Arc;

use super::Store;
use super::core::Core;
use super::node::NodeId;

impl Core {
    /// Publishes what was closed. A private version that was written to after its last FLUSH had no close.
    fn close_all(&mut self) {
        let building: Vec<NodeId> = self.building.values().copied().collect();
        for id in building {
            let Some(idx) = self.by_id(id) else { continue };
            let hot = self.hot_mut(idx);
            if hot.sealed() || hot.writing || hot.private().is_some_and(|private| !private.flushed) {
                continue;
            }
            (hot.writers, hot.promised) = (0, 0);
            self.close_if_done(idx);
        }
    }
}

impl Store {
    /// Called once the mount is gone and its session has ended.
    pub fn close_all(self: &Arc<Self>) {
        self.with(Core::close_all);
    }
}
