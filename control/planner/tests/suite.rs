//! The integration tests of the plan: placement, tables, and sessions in a model of the tier.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod placement;
mod sessions;
mod sim;
mod tables;
