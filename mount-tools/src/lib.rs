//! What programs need that use a kvcachefs mount: the client of its control files.

pub mod client;
