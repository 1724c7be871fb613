//! canal-controller: not written yet.
fn main() {}
