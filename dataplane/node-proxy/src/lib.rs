//! The node proxy: connects the pods of a node to the mesh over HBONE, each pod with its own
//! identity.
//!
//! Captured outbound connections go through the tenant's gateways, or to a ready pod's node for
//! direct ports. Inbound tunnels are delivered to the application. The proxy does not parse the
//! application's HTTP. It balances only between gateways and between the pods of a direct port.
//!
//! Start at [`outbound`] and [`inbound`], the two paths of the mesh, and [`inbound_plaintext`], the
//! path of connections without mTLS. All three begin in [`accept`]. [`node`] starts the process and
//! [`pod_reconciler`] follows the pods directory. Modules import only modules below them; `cargo
//! xtask tidy` checks this.

#![forbid(unsafe_code)]

pub mod accept;
pub mod authorization;
pub mod capture;
pub mod config;
pub mod connect_policies;
mod connection_fields;
mod delivery;
pub mod direct;
pub mod dump;
pub mod gateways;
pub mod identities;
mod inbound;
mod inbound_plaintext;
pub mod node;
pub mod open_connections;
mod outbound;
pub mod packets;
pub mod plaintext_capture;
pub mod plaintext_state;
pub mod pod;
pub mod pod_context;
pub mod pod_reconciler;
pub mod refusal;
pub mod routing;
pub mod snapshot;
pub mod telemetry;
pub mod unauthenticated;
pub mod worker;
pub mod workload_api;

pub use config::NodeConfig;
pub use node::{NodeError, run};
