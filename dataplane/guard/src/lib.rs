//! Judges requests and connections by authorization policies: [`PolicySet`] holds those of one destination, [`Facts`] is what a hop knows,
//! [`Verdict`] what follows. Also which PeerAuthentication and RequestAuthentication a destination has. Pure: no IO, no clock; it asks no
//! authorizer and checks no token.

#![forbid(unsafe_code)]

mod facts;
mod matching;
mod peer;
mod place;
mod set;
mod truth;

pub use facts::{Facts, Sight, Unknown, Value, name};
pub use peer::{authentications, peer_mode};
pub use place::{Place, applies};
pub use set::{Asked, Hit, HitKind, PolicySet, Verdict};
