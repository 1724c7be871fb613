//! Generates policies and requests for tests that compare the compiler, its oracle and what runs
//! programs. Only tests depend on it. Start at [`routing::cases`].

#![forbid(unsafe_code)]

pub mod authorization;
pub mod routing;
