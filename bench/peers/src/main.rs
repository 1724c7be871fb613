//! canal-bench-peers: not written yet.
fn main() {}
