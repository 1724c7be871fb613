//! DNS service of the tenants, on port 53 of the address of each tenant's own tier service
//! (`canal-system/gateway`).
//!
//! It answers the names of the tenant's services with gateway addresses, nearest first. It forwards
//! nothing. [`zone`] contains the names, [`answer`] builds responses, [`server`] has the sockets,
//! and [`datagrams`] and [`questions`] serve UDP.

pub mod answer;
mod datagrams;
mod questions;
mod server;
pub mod zone;

pub use server::{DnsError, DnsServer};
