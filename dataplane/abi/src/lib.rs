//! Rust types of `bpf/abi/*.h`, generated at build time, and the few conversions between them and
//! the standard library's types. Loads no BPF program. There is one module per header; [`Plain`] is
//! how their structs become bytes of a map.

pub mod capture;
pub mod inbound;
pub mod interface_guard;
mod plain;
pub mod pod;
pub mod tier;

pub use plain::{Plain, from_bytes, to_bytes};
