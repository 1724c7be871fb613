//! The integration tests of HTTP/1.1 by tables of cases and by properties.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod property;
mod receive;
mod table;
mod writing;
