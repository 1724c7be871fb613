//! What every daemon of Canal needs and no policy decides: limits that tenants share, the limit of open files, and the host's own names. It knows no traffic and no resources.

#![forbid(unsafe_code)]

mod files;
mod local;
pub mod share;

pub use files::raise_file_limit;
pub use local::is_local_name;
pub use share::{GiveWay, ShareHolder, ShareRefusal, ShareUsage, TenantLimit, TenantLimitConfig, TenantPermit};
