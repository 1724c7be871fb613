//! Integration tests of the HTTP/1.1 codec, by tables of cases and by properties. `make test` runs
//! each module in a process of its own (`suite MODULE::`).

mod property;
mod receive;
mod table;
mod writing;
