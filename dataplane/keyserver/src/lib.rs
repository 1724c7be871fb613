//! The key server: holds private keys that nodes and gateways do without, and does the handshakes and signatures that they are entitled to. It is a
//! data plane: it is told southbound who may use what, and asks the controller for certificates like a node. It carries no traffic.
//!
//! Start with [`engine`] (channels), `channel` (requests), [`lanes`] (when work is done), [`handshake`] and [`key`] (what the work is), and
//! [`provision`] and [`files`] (where keys come from). The frames are `canal_wire::keyrpc`.

#![forbid(unsafe_code)]

mod certified;
mod channel;
pub mod confine;
mod counts;
pub mod engine;
mod fair;
pub mod files;
pub mod handshake;
pub mod hardware;
mod held;
pub mod key;
pub mod lanes;
mod ledger;
pub mod limits;
pub mod provision;
pub mod rights;
pub mod secrets;
mod unauthenticated;
pub mod vault;

pub use certified::Certified;
pub use engine::{Engine, EngineConfig, EngineError};
