//! The integration tests of the same tenants on every target, held against the oracle.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod cases;
mod generated;
mod guarded;
mod limits;
mod shares;
