//! Generated policies and requests, for tests that compare implementations with the compiler's
//! oracles. It compares nothing. Start at [`routing::cases`] and [`authorization::policies`].
//!
//! Nobody derived the weights and lengths here: rare fields keep most objects small, and each kind
//! still occurs many times in a run.

#![forbid(unsafe_code)]

mod attempts;
pub mod authorization;
mod consumers;
mod cors;
mod faults;
mod filter_constructors;
mod filters;
mod grpc;
mod mirrors;
pub mod routing;
mod vocabulary;
