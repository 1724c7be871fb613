//! Generated policies and requests, for tests that compare implementations with the compiler's
//! oracles. It compares nothing. Start at [`routing::cases`] and [`authorization::policies`].

#![forbid(unsafe_code)]

mod attempts;
pub mod authorization;
mod cors;
mod faults;
mod filters;
mod grpc;
mod mirrors;
pub mod routing;
mod vocabulary;
