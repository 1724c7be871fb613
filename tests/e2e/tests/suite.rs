//! The integration tests of whole meshes in worlds. Each module has worlds of its own and runs as a process of its own: `cargo xtask test e2e` runs all, and one is run by
//! `cargo test -p canal-e2e --test suite -- tier:: --test-threads=1 --nocapture`.

mod adversary;
#[path = "attacks/main.rs"]
mod attacks;
mod chaos;
mod config;
mod dns;
mod drain;
#[path = "exhaustion/main.rs"]
mod exhaustion;
mod external_ca;
mod failure;
mod http2;
mod icmp;
mod identity;
mod keys_at_rest;
mod keyserver;
mod mtu;
mod policies;
mod protocols;
mod proxyless;
mod throttle;
mod tier;
mod underlay;
mod zerotrust;
