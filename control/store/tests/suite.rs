//! The integration tests of the store: reads and writes, full disks, kills, trust.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod full;
mod kill;
mod store;
mod trust;
