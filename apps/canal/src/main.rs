//! canal: not written yet.
fn main() {}
