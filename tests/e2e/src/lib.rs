//! A mesh in a world for the end-to-end tests: brings it up, runs clients in its pods, reads its counters and raw packets, and gives what
//! they said. Of tests it knows nothing.

#![forbid(unsafe_code)]

mod dns;
mod icmp;
mod mesh;
mod said;
mod wait;

pub use dns::{Answer, ask_tcp, ask_udp, query};
pub use icmp::{Heard, Icmp};
pub use mesh::{Mesh, bin, root};
pub use said::Said;
pub use wait::until;
