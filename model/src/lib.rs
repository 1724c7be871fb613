//! The words every part of Canal shares: ids, user policy, and the programs data planes run. Types only: no IO, no clock.

#![forbid(unsafe_code)]

pub mod authorization;
pub mod diagnostic;
pub mod fleet;
pub mod identity;
pub mod ids;
pub mod limits;
pub mod plan;
pub mod policy;
pub mod principal;
pub mod program;
pub mod share;
pub mod tier;
pub mod trust;
