//! What the benches of the gateway share: a network of their own, pinned processes, an origin, Canal's configuration, load generators, tables.
//! Nothing in here measures or judges; that is what each program does.

#![forbid(unsafe_code)]

pub mod canal;
pub mod document;
pub mod generators;
pub mod namespace;
pub mod origin;
pub mod process;
pub mod spread;
