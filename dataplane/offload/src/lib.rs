//! What the kernel does for a data plane: loads and keeps `bpf/*.bpf.c`, and the nftables fallback where BPF is refused.
//! Decides no policy. Start at [`capture::Capture`].

pub mod capture;
mod error;
mod journal;
pub mod nft;
pub mod origins;
mod pins;
mod sys;

pub use error::OffloadError;
pub use pins::default_pin_dir;
pub use sys::netns_cookie;
