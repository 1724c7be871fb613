//! The integration tests of the node proxy: both directions, policies, and the Workload API.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod delivery;
mod direct;
mod fixture;
mod inbound;
mod outbound;
mod policies;
mod workload_api;
