//! The agent of the cloud tier's edge. It fills the maps by which `bpf/edge.bpf.c` forwards, probes
//! the replicas of its AZ, and reports the results to the controller.
//!
//! It handles no packets: the program forwards even while no agent runs. Start with
//! [`desired_maps`] (the desired content of the maps), [`map_writes`] (the order of the writes),
//! [`health`] (which replicas are up) and [`agent`] (the process).

#![forbid(unsafe_code)]

pub mod agent;
pub mod config;
pub mod counts;
pub mod desired_maps;
pub mod device;
mod dump;
pub mod health;
pub mod kernel;
pub mod map_reconciler;
pub mod map_writes;
mod path;
pub mod probe;
pub mod report;

pub use agent::run;
