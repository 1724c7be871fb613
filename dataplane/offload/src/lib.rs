//! What the kernel does for a data plane: loads and keeps `bpf/*.bpf.c`, and the nftables fallback where BPF is refused.
//! Decides no policy. Start at [`capture::Capture`] for nodes, at [`edge::Edge`] for the cloud tier.

pub mod capture;
pub mod doors;
pub mod edge;
pub mod entries;
mod error;
mod hook;
pub mod inbound;
pub mod interface_guard;
mod journal;
pub mod nft;
pub mod nft_guard;
pub mod origins;
mod peer;
mod pins;
pub mod pod_guard;
pub mod redirector;
pub mod sessions;
pub mod sockets;
mod sys;
mod throttle;
mod tier;
mod tunnel;

pub use error::OffloadError;
pub use pins::{default_pin_dir, default_tier_pin_dir};
pub use sys::netns_cookie;
