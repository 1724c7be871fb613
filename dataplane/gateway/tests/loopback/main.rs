//! The engine end to end on loopback: plain and HBONE listeners, real sockets, clients and endpoints that speak raw bytes.
//! One binary: it links once.

mod authorizers;
mod balance;
mod hbone;
mod http1;
mod http2;
mod limits;
mod policies;
mod shares;
mod smuggling;
mod tcp;
mod terminate;
mod tier;
mod told;
mod upkeep;

mod client;
mod origin;
mod rig;
