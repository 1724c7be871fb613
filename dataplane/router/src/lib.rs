//! Finds the rule that a request matches, among the rules of one service. A router is immutable
//! once built; it does no IO and has no clock. Start with [`Router::build`] and [`Router::find`].
//!
//! # The API, as the gateway uses it
//!
//! * [`Router::build`] makes the router of one service from its route table (all ports). It is
//!   cheap enough to be repeated on every change of a rule: a fault affects one match of one rule
//!   and never stops the others from working. Keep the router behind an `Arc`.
//! * [`RoutableRequest`] is the view of a request that the router needs: implement it for the
//!   HTTP/1.1 view and for HTTP/2 requests.
//! * [`Router::find`] returns a [`RouteMatch`]: the rule, which of its matches held, and the
//!   [`RouteDecision`].
//! * [`Router::reads_path`] returns whether rules of a port depend on the path. Then the caller
//!   passes the path through [`routing_path`]. [`Router::reads_client`] returns whether they depend on
//!   what the caller knows of the client.
//! * [`pick`] distributes a weighted split by a random number of the caller:
//!   [`BackendChoice::Backend`] (with its index, for state per backend) or
//!   [`BackendChoice::Refuse`].
//! * [`HostTable`] maps hosts, exact and `*.suffix`, to any value; the most specific entry wins. It
//!   is for plain listeners.
//! * [`BrokenMatch`] describes which rule is broken, why, and how to fix it; `name()` is its
//!   counter label.
//!
//! # Guarantees
//!
//! * The result equals that of a scan of all matches: the first in match order that holds
//!   (`tests/reference.rs`). The router does not sort: `canal_model::route_table` is the order,
//!   here and in the compiler's IR.
//! * Paths and query values are compared as the caller provides them.
//! * One service may mix element prefixes, string prefixes, exact paths and regexes.
//! * Work per request grows with the length of the path and with the candidates that share a path,
//!   not with the number of rules.
//! * Keys are hashed with a random seed, so that tenants cannot choose collisions.
//! * Regexes run in linear time within size limits, and within a limit of work for each request.

#![forbid(unsafe_code)]

mod broken_match;
mod build;
mod condition;
mod host;
mod index;
mod limits;
mod path;
mod path_substitution;
mod regexes;
mod request;
mod router;
mod text_patterns;
mod weighted_choice;

pub use broken_match::{BrokenMatch, BrokenMatchKind};
pub use host::HostTable;
pub use limits::{REGEX_WORK_MAX, RouterLimits};
pub use path::{AmbiguousPath, normalize_path, routing_path};
pub use path_substitution::{PathSubstitution, SubstitutionRefusal};
pub use request::{RoutableRequest, line_separator};
pub use router::{RouteDecision, RouteMatch, Router};
pub use text_patterns::{PATTERN_TEXT_BYTES_MAX, TextPatterns};
pub use weighted_choice::{BackendChoice, NO_WEIGHT_STATUS, pick};
