//! Figures of the paper, computed.
#![forbid(unsafe_code)]
fn main() {}
