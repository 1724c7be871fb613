//! The integration tests of the edge's process, alone and with a controller.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

#[path = "../../../dataplane/offload/tests/frames/mod.rs"]
mod frames;
mod hub;
mod process;
mod rig;
