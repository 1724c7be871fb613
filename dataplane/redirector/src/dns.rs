//! The tenants' name service: on the address of each tenant's own service of the tier (`canal-system/gateway`), port 53. Answers the
//! names of the tenant's services with gateway addresses, nearest first; forwards nothing. [`zone`] knows, [`answer`] words, [`server`] has
//! the sockets.

pub mod answer;
mod server;
pub mod zone;

pub use server::{Dns, DnsError};
