//! The integration tests of a replica's agent and of its DNS service, in network namespaces of
//! their own. `make test` runs each module in a process of its own (`suite MODULE::`).

mod dns;
mod replica;
