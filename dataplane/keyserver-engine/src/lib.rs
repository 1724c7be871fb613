//! The key server: stores private keys so that nodes and gateways need none, and performs the
//! handshakes and signatures to which they are entitled.
//!
//! It is a data plane: it receives entitlements southbound, and requests certificates from the
//! controller like a node. It carries no traffic.
//!
//! Start at [`engine`] (channels). Then read `channel` (requests), [`operation_pool`] (scheduling),
//! [`handshake`] and [`key`] (the operations), [`provision`] and [`tenant_key_files`] (sources of
//! keys). The frames are in `canal_wire::keyrpc`.

#![forbid(unsafe_code)]

mod certified_key;
mod channel;
mod counts;
pub mod engine;
pub mod entitlements;
mod fair_queue;
pub mod handshake;
pub mod hardware;
pub mod key;
mod key_slot;
pub mod limits;
pub mod memory_protection;
pub mod operation_pool;
pub mod provision;
mod quotas;
pub mod secret_capture;
pub mod tenant_key_files;
mod unauthenticated;
pub mod vault;

pub use certified_key::CertifiedPrivateKey;
pub use engine::{KeyServerConfig, KeyServerEngine, KeyServerEngineError};
