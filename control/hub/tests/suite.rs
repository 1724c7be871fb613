//! The integration tests of the controller from outside: its API, what data planes are given, trust, the fleet.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod api;
mod certificates;
mod files;
mod fleet;
mod isolation;
mod jwks;
mod limits;
mod rig;
mod scale;
mod southbound;
mod trust;
