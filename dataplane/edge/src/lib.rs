//! The agent of the cloud tier's edge: fills the maps by which `bpf/edge.bpf.c` forwards, probes the replicas of its AZ, and tells the
//! controller what it finds. It touches no packet: the program forwards on while no agent runs.
//!
//! Start with [`maps`] (what should be in the kernel), [`steps`] (in which order), [`health`] (who is alive) and [`agent`] (the process).

#![forbid(unsafe_code)]

pub mod agent;
pub mod config;
pub mod counts;
pub mod device;
mod dump;
pub mod health;
pub mod keeper;
pub mod kernel;
pub mod maps;
pub mod probe;
pub mod report;
pub mod steps;

pub use agent::run;
