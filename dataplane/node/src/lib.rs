//! The node proxy: carries what pods dial to the mesh's gateways over HBONE with the pod's own identity, and what gateways bring for a pod
//! to the application. It reads no HTTP of the application's and balances nothing but gateways.
//!
//! Start reading at [`outbound`] and [`inbound`], the two roads; [`node`] starts everything, [`pods`] follows what runs on this node.

#![forbid(unsafe_code)]

pub mod authorization;
pub mod capture;
pub mod config;
pub mod decide;
pub mod dump;
pub mod gateways;
mod inbound;
pub mod node;
mod outbound;
pub mod pod;
pub mod pods;
pub mod refusal;
pub mod room;
pub mod telemetry;
pub mod view;
pub mod worker;

pub use config::NodeConfig;
pub use node::{NodeError, run};
