//! L2: block storage.
