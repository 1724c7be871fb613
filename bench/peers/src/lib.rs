//! Parts that the benches of the gateway share: a private network, pinned processes, an origin,
//! Canal's configuration, load generators, tables. Each program measures and assesses by itself.

#![forbid(unsafe_code)]

pub mod answer;
pub mod any_certificate;
pub mod canal;
pub mod document;
pub mod generators;
pub mod namespace;
pub mod origin;
pub mod process;
pub mod spread;
