//! canal-node: not written yet.
fn main() {}
