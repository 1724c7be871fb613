//! What every data plane shares: sockets in other namespaces, SPIFFE mTLS, certificates, the southbound subscription, HBONE,
//! copying, metrics, access logs, admin servers, drain, workers and limits. No policy is decided here; the callers do that.
//!
//! Start with [`worker`] (where code runs), [`hbone`] (what it speaks) and [`southbound`] (what it is told).

#![deny(unsafe_code)]

pub mod admin;
pub mod backoff;
pub mod certs;
pub mod controller;
pub mod copy;
pub mod diagnostics;
pub mod drain;
pub mod hbone;
pub mod keys;
pub mod limits;
pub mod log;
pub mod metrics;
pub mod southbound;
#[allow(unsafe_code, reason = "the crate's one room for system calls that no safe wrapper offers")]
pub mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls;
pub mod worker;

mod durable;
