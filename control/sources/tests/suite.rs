//! Integration tests of reading directories of objects, once and while they change.
//!
//! `make test` runs each module in its own process (`suite MODULE::`).

mod directory;
mod watch;
