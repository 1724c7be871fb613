//! The integration tests of whole meshes in worlds. Each module has worlds of its own and runs as a
//! process of its own: `cargo xtask test e2e` runs all, and one is run by `cargo test -p canal-e2e
//! --test meshes -- tier:: --test-threads=1 --nocapture`.

mod addresses;
mod adversary;
#[path = "attacks/main.rs"]
mod attacks;
#[path = "cases/main.rs"]
mod cases;
mod chaos;
mod config;
mod direct;
mod dns;
mod drain;
mod edges;
mod exchanges;
#[path = "exhaustion/main.rs"]
mod exhaustion;
mod external_ca;
mod failure;
mod http2;
mod icmp;
mod identity;
mod ingress;
mod keys_at_rest;
mod keyserver;
mod mtu;
mod observe;
mod policies;
mod protocols;
mod proxyless;
mod scaleout;
mod sockets;
#[path = "software/main.rs"]
mod software;
mod stalls;
mod throttle;
mod tier;
mod underlay;
mod zerotrust;
