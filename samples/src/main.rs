//! canal-samples: not written yet.
fn main() {}
