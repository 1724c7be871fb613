//! A mesh in a world for the end-to-end tests: brings it up, runs clients in its pods, reads its counters and raw packets, and gives what
//! they said; and speaks the mesh's own protocols by hand, as an adversary would. Of tests it knows nothing.

#![forbid(unsafe_code)]

pub mod controller;
pub mod credential;
mod dns;
pub mod flood;
pub mod hbone;
mod icmp;
pub mod keys;
pub mod memory;
mod mesh;
pub mod raw;
mod said;
mod standstill;
mod wait;

pub use dns::{Answer, ask_tcp, ask_udp, query};
pub use icmp::{Heard, Icmp};
pub use mesh::{Mesh, bin, root};
pub use said::Said;
pub use standstill::measure;
pub use wait::until;
