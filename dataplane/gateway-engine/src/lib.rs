//! The gateway engine: accepts tenants' connections, routes their requests, and forwards them to
//! endpoints.
//!
//! A request passes through eight phases, each a module: [`accept`] → [`establish`] → [`decode`] →
//! [`route`] → [`balance`] → [`authorize`] → [`forward`] → [`finish`]. `docs/life-of/request.md`
//! follows a request through them. [`pipeline::serve`] is the one function in which they stand in
//! order, for HTTP/1.1, HTTP/2 and bytes that are not requests. Each [`worker`] runs alone on its
//! thread. Each request uses one snapshot of the configuration (`canal-gateway-config`). The
//! connections' bytes are moved by `canal-gateway-io`.
//!
//! Modules import only modules below them; `cargo xtask tidy` checks this. [`accept`] calls
//! [`establish`], that calls [`decode`] (or [`relay`], for bytes that are not requests), and those
//! call [`pipeline`] for each request by way of [`forward`]. Data that phases share is defined
//! below them: [`downstream_state`], [`session`], [`destination`], and the record that [`finish`]
//! reports; a request's head, the translation of heads and the errors in `canal-gateway-http`; limits
//! and what tenants use of them in `canal-gateway-limits`.
//!
//! The engine opens listeners and connections. It reads no files and does not connect to the
//! controller: its process passes the configuration to [`GatewayEngine::apply`]. Start with
//! [`GatewayEngine`].

#![forbid(unsafe_code)]

mod accept;
mod authorize;
mod balance;
mod config;
mod decode;
mod destination;
mod downstream_state;
mod endpoints;
mod engine;
mod establish;
mod finish;
mod forward;
mod local_reply;
mod permit;
mod pipeline;
mod rebalance;
mod relay;
mod request_fields;
mod request_metrics;
mod route;
mod session;
mod soft_drain;
mod source_workload;
mod table_builds;
mod upstream;
mod worker;

pub use accept::ListenerFds;
pub use canal_gateway_config::ServiceCertificateFn;
pub use canal_gateway_limits::limits::{GatewayLimits, GatewayTimeouts};
pub use canal_hbone::BUFFER_BYTES_MIN;
pub use canal_telemetry::observe::TapFilter as Filter;
pub use canal_telemetry::tap::TapBroker;
pub use config::{
    CloudTierConfig, ForwardedHeaders, GatewayConfig, InvalidPlainListener, PlainListener,
};
pub use engine::{EngineDependencies, GatewayEngine, GatewayError};
pub use worker::Handover;
