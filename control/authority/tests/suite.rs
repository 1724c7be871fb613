//! The integration tests of certificate authorities: the tenants', the mesh's own, and those of others.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod foreign;
mod infra;
mod tenant;
