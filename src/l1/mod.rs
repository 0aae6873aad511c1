//! L1: pinned memory.
