//! The engine end to end on loopback: plain and HBONE listeners, real sockets, clients and endpoints that speak raw bytes.
//! One binary: it links once.

mod authorizers;
mod balance;
mod hbone;
mod http1;
mod http2;
mod interim;
mod limits;
mod paths;
mod policies;
mod smuggling;
mod tcp;
mod terminate;
mod tier;
mod tokens;
mod told;
mod upkeep;

mod client;
mod origin;
mod rig;
