//! The types that every part of Canal shares: ids, user policy, and the resources that data planes
//! run. Types only: no IO, no clock. Start at [`policy`] for what users write and at [`program`]
//! for what data planes receive.

#![forbid(unsafe_code)]

pub mod authorization;
pub mod certificate;
pub mod client_attributes;
pub mod client_validation;
pub mod diagnostic;
pub mod diagnostic_code;
pub mod fleet;
pub mod identity;
pub mod ids;
pub mod ingress;
pub mod limits;
pub mod listener_filters;
pub mod load_balancing;
pub mod plan;
pub mod policy;
pub mod principal;
pub mod program;
pub mod request_fraction;
pub mod route_attempts;
pub mod route_authorizer;
pub mod route_cors;
pub mod route_faults;
pub mod route_filters;
pub mod route_table;
pub mod share;
pub mod tier;
pub mod trust;
