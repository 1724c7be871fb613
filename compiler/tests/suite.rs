//! The integration tests of the compiler: goldens, limits, properties, sizes.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod golden;
mod limits;
mod policy_limits;
mod properties;
mod size;
mod tenants;
