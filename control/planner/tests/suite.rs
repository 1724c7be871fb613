//! Integration tests of the planner: placement, tables, and sessions in a model of the tier.
//!
//! `make test` runs each module in its own process (`suite MODULE::`).

mod ingress;
mod placement;
mod sessions;
mod sim;
mod tables;
