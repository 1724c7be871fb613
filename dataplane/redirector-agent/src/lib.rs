//! The redirector agent of a cloud-tier replica, in the gateway's process. It writes the
//! redirector's maps, reports the sessions that the replica owns, and answers its tenants' DNS
//! queries.
//!
//! It forwards no packet and makes no placement decision.
//!
//! Start at [`RedirectorAgent`], which receives states and sends reports. [`desired_maps`] decides
//! the content of the maps, and [`map_reconciler`] writes the differences. [`session_scan`] finds
//! the sessions of this network namespace. [`dns`] is the DNS service.

#![forbid(unsafe_code)]

mod agent;
mod counts;
pub mod desired_maps;
pub mod dns;
mod heads;
pub mod kernel;
pub mod map_reconciler;

pub mod receive;
mod report;
pub mod session_scan;
mod session_search;

pub use agent::{RebalanceFn, RedirectorAgent, ReplicaConfig, SessionCountFn};
pub use heads::HeadChange;
pub use map_reconciler::RedirectorMaps;
