//! canal-router: finds the rule that a request matches, among the rules of one service. Immutable once built; no IO, no clock.
//!
//! # The API, as the gateway uses it
//!
//! * [`Router::build`] makes the table of one service from its rules (all ports); cheap enough to do again on every change of one
//!   rule: a fault concerns one match of one rule and never keeps the others from working. Keep it behind an `Arc`.
//! * [`Request`] is what the router may ask a request: implement it for the HTTP/1.1 view and for HTTP/2 requests.
//! * [`Router::find`] gives [`Found`]: the rule, which of its matches held, and the [`Action`].
//! * [`Router::reads_path`] says whether rules of a port look at the path: then the caller gives them its [`normalize_path`].
//! * [`pick`] shares out a split by a random number of the caller's: [`Pick::Backend`] (with its place, for per-backend state) or
//!   [`Pick::Refuse`].
//! * [`HostTable`] maps hosts, exact and `*.suffix`, to anything, most specific first: for plain listeners.
//! * [`Fault`] says which rule is broken, why and how to mend it; `name()` is its counter label.
//!
//! # What it promises
//!
//! The result is what a scan of all matches would give: the holding match with the smallest `Precedence` (`tests/reference.rs`).
//! Paths and query values are compared as the caller gives them. Element prefixes, string prefixes, exact paths and regexes may mix in one
//! service.
//! Work per request grows with the length of the path and with the candidates that share a path, not with the number of rules;
//! keys are hashed with a random seed, so that tenants cannot choose collisions; regexes run in linear time within size limits.

#![forbid(unsafe_code)]

mod build;
mod condition;
mod fault;
mod host;
mod index;
mod limits;
mod path;
mod pick;
mod regexes;
mod request;
mod router;

pub use fault::{Fault, FaultKind};
pub use host::HostTable;
pub use limits::Limits;
pub use path::{AmbiguousPath, normalize_path};
pub use pick::{NO_WEIGHT_STATUS, Pick, pick};
pub use request::Request;
pub use router::{Action, Found, Router};
