//! Integration tests of the `canal` command as a user runs it. `make test` runs each module in a
//! process of its own (`suite MODULE::`).

mod admin;
mod cli;
mod explain;
mod mesh;
