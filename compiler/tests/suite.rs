//! The integration tests of the compiler: golden texts, limits, properties, sizes. `make test` runs
//! each module in its own process (`suite MODULE::`).

mod budget;
mod golden;
mod host_matches;
mod incremental;
mod limits;
mod load_balancers;
mod parsed_tenant;
mod policy_limits;
mod properties;
mod regex_limits;
mod size;
mod tenants;
