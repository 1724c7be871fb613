//! Integration tests of worlds in the kernel: processes, network, sizes, and leftovers. `make test`
//! runs each module in a process of its own (`suite MODULE::`).

mod build_failures;
mod cleanup;
mod keys;
mod life;
mod links;
mod network;
mod scene;
mod size;
mod tier;
