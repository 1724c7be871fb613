//! Shared basis of all daemons, in the control plane and the data plane: metrics, the admin server,
//! logging, the drain, limits and their shares by tenant, backoff, files, and timestamps as text.
//! The crate decides no policy, and handles neither traffic nor resources. Start at [`metrics`],
//! [`drain`] and [`share`].

#![forbid(unsafe_code)]

pub mod admin;
pub mod atomic_file;
pub mod backoff;
pub mod drain;
mod files;
pub mod limits;
mod local;
pub mod logging;
pub mod metrics;
pub mod share;
mod timestamp;

pub use files::raise_file_limit;
pub use share::{
    RevocationOrder, ShareHolder, ShareRefusal, ShareUsage, TenantLimit, TenantLimitConfig,
    TenantPermit,
};
pub use timestamp::Rfc3339Time;
