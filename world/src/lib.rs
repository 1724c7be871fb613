//! Worlds: builds a YAML topology as network namespaces, links, overlays, cgroups and processes on
//! one machine, and removes all of it without a trace. The CLI, the demo, the tests and the benches
//! use it. It contains none of the mesh's own logic: it starts the mesh's programs as processes.
//!
//! Start at [`Topology`] (the description of a world), then read `plan` (its addresses),
//! `tool_batch` (the commands that build it), `supervisor_state` (building it) and [`supervise`]
//! (running it). [`World`] is the handle for every caller.
//!
//! Invariants:
//! - No interface of a world is ever outside its namespaces, and no namespace has a route out.
//! - A world is found by its name in the kernel alone, so the leftovers of any crash can be
//!   removed.
//! - Decisions (`plan`, `tool_batch`, `check`) are pure; the modules with IO decide nothing.

mod cgroup;
mod check;
mod control;
mod error;
mod fault;
mod garbage_collect;
mod host_environment;
mod impairment;
mod launch;
mod link;
mod listeners;
mod net;
pub mod plan;
mod probe;
mod problem;
mod process_supervisor;
mod read;
mod recovery;
mod registry;
mod relay;
mod services;
mod state;
mod supervisor;
mod supervisor_state;
mod sys;
#[cfg(test)]
mod tests;
pub mod tier;
mod tool_batch;
pub mod topology;
mod tree;
mod vswitch;
mod world;

pub use cgroup::CpuTime;
pub use control::HostStatus;
pub use error::{Error, Result};
pub use garbage_collect::WorldListing;
pub use host_environment::{
    CAPTURE_PORT, CONTROLLER_PORT, HostEnvironment, KEYS_PORT, ManagedProcess, READINESS_PORT,
    StartCondition,
};
pub use impairment::Impairment;
pub use link::ImpairedLink;
pub use net::{RefusedPackets, Traffic};
pub use plan::WorldPlan;
pub use problem::{FilePosition, TopologyProblem};
pub use process_supervisor::{ProcessPhase, ProcessStatus};
pub use recovery::{Recovery, StoreRecovery};
pub use relay::{LinkCounters, LinkReport, link_report, relay_link};
pub use state::LeftoverLock;
pub use supervisor::supervise;
pub use sys::threads::StoppedThreads;
pub use topology::{PodTemplate, Topology};
pub use world::{Signal, World, WorldOptions};
