//! xtask: not written yet.
fn main() {}
