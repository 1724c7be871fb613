//! Integration tests of the CAs: the tenants', the controller's own, and external ones.
//!
//! `make test` runs each module in its own process (`suite MODULE::`).

mod foreign;
mod infra;
mod tenant;
