//! Limits of the gateway: their configuration, what the process, a worker and each tenant use of
//! them, and the worker's counters of refusals and other events.
//!
//! It admits or refuses, and counts. It reads no bytes and closes no connection: what follows from a
//! refusal is decided by `canal-gateway-engine`. Start with [`limits::GatewayLimits`].

#![forbid(unsafe_code)]

pub mod body_budget;
pub mod http2_settings;
pub mod limits;
pub mod retry_budget;
pub mod shares;
pub mod tenant_usage;
pub mod worker_counters;
