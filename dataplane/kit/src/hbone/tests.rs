//! Client and server against each other, and each against a raw peer, on loopback.

mod limits;
mod raw;
mod revoked;
mod rig;
mod transfer;
