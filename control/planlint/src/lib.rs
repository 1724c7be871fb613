//! The plan linter: pure.
#![forbid(unsafe_code)]
