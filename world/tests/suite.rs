//! The integration tests of worlds as the kernel has them: life, network, sizes, and what is left of them.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod keys;
mod life;
mod network;
mod remains;
mod scene;
mod size;
mod tier;
mod unbuilt;
