//! What every daemon of Canal needs and no policy decides: limits that tenants share, and the limit of open files. It knows no traffic and no resources.

#![forbid(unsafe_code)]

mod files;
pub mod share;

pub use files::raise_file_limit;
pub use share::{GiveWay, ShareHolder, ShareRefusal, ShareUsage, TenantLimit, TenantLimitConfig, TenantPermit};
