//! Worlds: a YAML topology becomes network namespaces, links, overlays, cgroups and processes on
//! one machine, and goes away without a trace. Used by the CLI, the demo, the tests and benches.
//!
//! Start reading at [`Topology`] (what a world shall be), then `plan` (its addresses), `script`
//! (the commands that make it), `stage` (making it) and [`supervise`] (keeping it). [`World`] is
//! the handle everyone holds.
//!
//! Invariants: no interface of a world is ever outside its namespaces, and no namespace has a
//! route out; a world is found by name in the kernel alone, so any crash can be cleaned; decisions
//! (`plan`, `script`, `check`) are pure, IO modules choose nothing.

mod cgroup;
mod check;
mod control;
mod error;
mod fault;
mod launch;
mod life;
mod net;
pub mod plan;
mod probe;
mod problem;
mod read;
mod registry;
mod script;
mod seat;
mod services;
mod stage;
mod state;
mod supervisor;
mod sweep;
mod sys;
#[cfg(test)]
mod tests;
pub mod tier;
pub mod topology;
mod tree;
mod vswitch;
mod world;

pub use cgroup::CpuTime;
pub use control::Host;
pub use error::{Error, Result};
pub use fault::Slow;
pub use life::{Phase, Pulse};
pub use net::{Refused, Traffic};
pub use plan::Plan;
pub use problem::{Problem, Spot};
pub use seat::{CAPTURE_PORT, CONTROLLER_PORT, Condition, Job, KEYS_PORT, READINESS_PORT, Seat};
pub use supervisor::supervise;
pub use sweep::Listed;
pub use sys::threads::StoppedThreads;
pub use topology::{Pod, Topology};
pub use world::{Options, Signal, World};
