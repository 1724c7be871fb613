//! A mesh in a world for the end-to-end tests: brings it up, runs clients in its pods, reads its
//! counters and raw packets, and returns their output. It also speaks the mesh's own protocols
//! directly, as an attacker would. It contains no tests.

#![forbid(unsafe_code)]

mod client_outcome;
pub mod controller;
pub mod credential;
mod dns;
mod ending;
pub mod exchanges;
pub mod flood;
pub mod hbone;
mod icmp;
pub mod keys;
mod load;
pub mod memory;
mod mesh;
pub mod raw;
pub mod scaleout;
mod wait;

pub use client_outcome::ClientOutcome;
pub use dns::{DnsAnswer, query, query_tcp, query_udp, query_udp_within};
pub use icmp::{Icmp, IcmpPacket};
pub use load::{ClientReports, load_while};
pub use mesh::{Mesh, bin, root};
pub use wait::{deadline_ms, until};

/// Inner address of the service with ID 3 on the tier. Only frames between edges and replicas have
/// such an address, so it is forged in every frame of a pod or node.
pub const SERVICE_INNER_ADDRESS: &str = "240.0.0.3";
