//! Sockets, threads and bytes of a data plane: system calls that no safe wrapper offers ([`sys`]),
//! workers ([`worker`]) and the copying between two connections ([`copy`]). The crate knows neither
//! TLS nor HBONE. Start with [`worker`], which is where code runs.

#![deny(unsafe_code)]

pub mod copy;
#[allow(
    unsafe_code,
    reason = "the only module of the crate for system calls that have no safe wrapper"
)]
pub mod sys;
pub mod worker;
