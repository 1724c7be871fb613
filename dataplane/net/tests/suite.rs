//! Integration tests of the crate from outside: the end of a process. `make test` runs each module
//! in its own process (`suite MODULE::`).

mod process;
