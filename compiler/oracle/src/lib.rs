//! What a rule's parts and a policy mean, written to be read and not to be fast: the reference that
//! tests compare data planes with. It does not choose the rule: `canal_compiler::oracle` does.

#![forbid(unsafe_code)]

pub mod answers;
pub mod attempts;
pub mod authorization;
pub mod cors;
pub mod faults;
pub mod filters;
pub mod forwarded_client;
pub mod load_balancing;
pub mod mirrors;
pub mod route_authorizers;
