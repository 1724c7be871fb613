//! Integration tests of the router, by tables of cases and against a simple reference. `make test`
//! runs each module in a process of its own (`suite MODULE::`).

mod reference;
mod rules;
mod table;
