//! The engine end to end on loopback: plain and HBONE listeners, real sockets, clients and endpoints that speak raw bytes.
//! One binary: it links once.

mod balance;
mod hbone;
mod http1;
mod http2;
mod limits;
mod smuggling;
mod tcp;
mod tier;
mod told;
mod upkeep;

mod client;
mod origin;
mod rig;
