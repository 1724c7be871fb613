//! The agent of a replica of the cloud tier, inside the gateway's process: fills the redirector's maps from what the controller says,
//! reports which sessions the replica owns, and answers its tenants' DNS queries. Carries no session itself and decides no placement.
//!
//! [`Agent`] takes states and reports; [`content`] says what maps should hold, [`keeper`] writes what differs, [`sockets`] finds the
//! sessions of this network namespace, [`dns`] is the name service.

#![forbid(unsafe_code)]

mod agent;
pub mod content;
mod counts;
pub mod dns;
pub mod keeper;
pub mod kernel;
mod report;
pub mod sockets;

pub use agent::{Agent, Config, Sessions};
pub use keeper::Kernel;
