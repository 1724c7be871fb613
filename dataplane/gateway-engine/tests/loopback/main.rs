//! End-to-end tests of the engine on loopback: plain and HBONE listeners, real sockets, clients and
//! endpoints that exchange raw bytes.
//!
//! All tests are in one binary, so that they are linked only once.

mod answers;
mod authorizers;
mod balance;
mod builds;
mod client_attributes;
mod closed;
mod consumers;
mod cors;
mod credit;
mod exchanges;
mod faults;
mod fidelity;
mod filters;
mod grpc;
mod hbone;
mod http1;
mod http2;
mod https_listeners;
mod interim;
mod lifecycle;
mod limits;
mod listener_filters;
mod load_balancers;
mod mirrors;
mod observability;
mod paths;
mod policies;
mod proxied_listeners;
mod relay_listeners;
mod retries;
mod route_authorizers;
mod shares;
mod smuggling;
mod sums;
mod tcp;
mod terminate;
mod terminated_relays;
mod tier;
mod timeouts;
mod tokens;

mod client;
mod fixture;
mod origin;
