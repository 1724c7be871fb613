//! Integration tests of the store: reads and writes, full disks, kills, trust.
//!
//! `make test` runs each module in its own process (`suite MODULE::`).

mod full;
mod kill;
mod store;
mod trust;
