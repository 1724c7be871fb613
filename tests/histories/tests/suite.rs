//! Histories that the model of the tier records (`control/planner/tests/sim`), packet by packet
//! through the program in the kernel. `make test` runs each module in its own process (`suite
//! MODULE::`).

#[path = "../../../dataplane/offload/tests/frames/mod.rs"]
mod frames;
#[path = "../../../dataplane/offload/tests/lab/mod.rs"]
mod lab;
mod replay;
#[path = "../../../control/planner/tests/sim/mod.rs"]
mod sim;
