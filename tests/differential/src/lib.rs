//! Every policy on every target against the oracle: compiled, sent over the wire form, run by what data planes run, compared request by
//! request. Nothing is mocked and nothing is sent: sockets and whole meshes are `canal-e2e`'s.
//!
//! * [`Trial`] is one tenant on all targets; [`Trial::compare`] asks them all the same.
//! * [`policy`] reads policies with questions from files; [`probe`] makes requests that hit or nearly hit a tenant's rules.
//! * [`target`] are the targets.
//! * [`guarded`] compares what data planes judge requests with.

#![forbid(unsafe_code)]

pub mod guarded;
pub mod policy;
pub mod probe;
pub mod target;
mod trial;

pub use trial::{Tally, Trial, shown};
