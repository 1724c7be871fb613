//! YAML documents in which every value has its position, so that all mistakes of a document can be
//! reported at once. The crate knows neither objects nor topologies, and reads no files.
//!
//! Start at [`tree::parse`], which returns the tree of one document. [`decode::decode`] decodes a
//! tree into a type and reports every value that does not fit and every unknown field; serde alone
//! stops at the first.

#![forbid(unsafe_code)]

pub mod decode;
mod error;
pub mod limits;
pub mod path;
mod scalar;
pub mod tree;
