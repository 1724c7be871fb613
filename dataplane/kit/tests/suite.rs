//! The integration tests of the kit from outside: hostile TLS peers, and how a process ends.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod hostile;
mod process;
