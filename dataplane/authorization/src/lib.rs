//! Authorizes requests and connections. [`PolicySet`] contains the policies of one destination,
//! [`Attributes`] provides what a hop knows, and [`AuthorizationDecision`] is the result. The crate
//! also selects the PeerAuthentication and RequestAuthentications of a destination. It is pure: it
//! does no IO, has no clock, calls no authorizer and verifies no token. Start with
//! [`PolicySet::decide`].

#![forbid(unsafe_code)]

mod attributes;
mod matching;
mod peer;
mod policy_destination;
mod policy_set;
mod ternary;

pub use attributes::{AttributeValue, AttributeVisibility, Attributes, NoAttributes, name};
pub use peer::{authentications, peer_mode};
pub use policy_destination::{PolicyDestination, applies, applies_to_answers};
pub use policy_set::{AuthorizationDecision, ExtAuthzProgress, PolicySet, ShadowKind, ShadowMatch};
