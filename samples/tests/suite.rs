//! Integration tests of the sample applications and their roles. `make test` runs each module in a
//! process of its own (`suite MODULE::`).

mod roles;
mod trust;
