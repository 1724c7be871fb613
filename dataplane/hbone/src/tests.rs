//! Tests of client and server against each other, and of each against a raw peer, on loopback.

mod coupled;
mod fixture;
mod kernel;
mod limits;
mod raw;
mod revoked;
mod spread;
mod stalls;
mod transfer;
