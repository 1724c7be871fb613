//! The integration tests of reading directories of objects, once and as they change.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod directory;
mod watch;
