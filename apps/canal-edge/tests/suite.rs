//! Integration tests of the edge's process, alone and with a controller. `make test` runs each
//! module in a process of its own (`suite MODULE::`).

mod fixture;
#[path = "../../../dataplane/offload/tests/frames/mod.rs"]
mod frames;
mod process;
mod real_controller;
