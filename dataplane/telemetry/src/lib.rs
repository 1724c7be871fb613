//! What a data plane tells about its traffic: access logs ([`access_log`]), and the answers to operators who observe it through the
//! controller ([`observe`]). The crate decides neither what is logged nor who may observe what.

#![forbid(unsafe_code)]

pub mod access_log;
pub mod observe;
