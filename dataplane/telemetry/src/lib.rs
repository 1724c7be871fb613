//! Telemetry of a data plane: access logs ([`access_log`]), the live view of requests ([`tap`]), and
//! the responses to operators that observe it through the controller ([`observe`]). The crate decides
//! neither what is logged nor which operator may observe it.

#![forbid(unsafe_code)]

pub mod access_log;
pub mod observe;
pub mod tap;
