//! Rust's view of `bpf/abi/*.h`, generated at build time, and the few conversions between it and std's types. Loads nothing.

pub mod capture;
pub mod inbound;
pub mod interface_guard;
mod plain;
pub mod pod;
pub mod tier;

pub use plain::{Plain, from_bytes, to_bytes};
