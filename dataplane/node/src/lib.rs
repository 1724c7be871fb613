//! The node proxy: carries what pods dial to the mesh's gateways over HBONE with the pod's own identity, and what gateways bring for a pod
//! to the application. It reads no HTTP of the application's and balances nothing but gateways.
//!
//! Start reading at [`outbound`] and [`inbound`], the two roads of the mesh, and [`plain`], that of others; all begin in [`accept`]. [`node`]
//! starts everything, [`pods`] follows what runs on this node. Modules name those below them only (`cargo xtask tidy` holds this).

#![forbid(unsafe_code)]

pub mod accept;
pub mod authorization;
pub mod capture;
pub mod config;
pub mod decide;
pub mod dump;
pub mod gateways;
pub mod guard;
pub mod identities;
mod inbound;
pub mod node;
pub mod open;
mod outbound;
pub mod packets;
mod plain;
pub mod plaintext;
pub mod pod;
pub mod pods;
pub mod refusal;
pub mod room;
pub mod telemetry;
pub mod unauthenticated;
pub mod view;
pub mod worker;
pub mod workload_api;

pub use config::NodeConfig;
pub use node::{NodeError, run};
