//! canal-gateway: not written yet.
fn main() {}
