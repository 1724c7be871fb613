//! What every daemon of Canal needs and no policy decides: limits that tenants share. It knows no traffic and no resources.

#![forbid(unsafe_code)]

pub mod share;

pub use share::{GiveWay, ShareHolder, ShareRefusal, ShareUsage, TenantLimit, TenantLimitConfig, TenantPermit};
