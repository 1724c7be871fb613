//! The integration tests of the node proxy: both directions, policies, and the Workload API.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod inbound;
mod outbound;
mod policies;
mod rig;
mod workload_api;
