//! Drives the kernel for the data planes: loads `bpf/*.bpf.c`, attaches and pins the programs, and
//! writes and reads their maps. Where BPF is refused, it installs the nftables fallback. Decides no
//! policy. Start with [`capture::CapturePrograms`] for nodes and with [`edge::EdgeProgram`] for the
//! cloud tier.

pub mod capture;
pub mod connect_tables;
pub mod delivery;
pub mod edge;
mod embedded;
pub mod entries;
mod error;
pub mod inbound;
pub mod interface_guard;
mod journal;
pub mod nft;
pub mod nft_guard;
pub mod origins;
mod peer;
mod pins;
pub mod pod_guard;
pub mod proxy_route;
pub mod receive_hash;
pub mod reconcile;
pub mod redirector;
pub mod sessions;
pub mod socket_steering;
pub mod sockets;
mod sys;
mod tc_hook;
mod throttle;
mod tier;
mod tunnel;

pub use error::OffloadError;
pub use pins::{default_pin_dir, default_tier_pin_dir};
pub use sys::netns_cookie;
