//! Compares every policy on every target with the oracle: compiled, passed through the wire format,
//! executed by the code of data planes, request by request. Nothing is mocked and nothing is sent,
//! except by the test `running`, which sends requests to a gateway on loopback; `canal-e2e` tests
//! whole meshes.
//!
//! * [`RoutingComparison`] is one tenant on all targets; [`RoutingComparison::compare`] gives all
//!   of them the same request.
//! * [`policy`] reads policies with questions from files; [`probe`] makes requests that match or
//!   nearly match a tenant's rules.
//! * [`target`] contains the targets.
//! * [`authorization`] compares the code by which data planes authorize requests.

#![forbid(unsafe_code)]

pub mod authorization;
pub mod policy;
pub mod probe;
mod routing;
pub mod target;

pub use routing::{RoutingComparison, RoutingTally, format_verdict};
