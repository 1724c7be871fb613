//! Integration tests of the controller from outside: its API, what data planes receive, trust, the
//! fleet. `make test` runs each module in its own process (`suite MODULE::`).

mod api;
mod certificates;
mod conditions;
mod files;
mod fixture;
mod fleet;
mod isolation;
mod json_api;
mod jwks;
mod limits;
mod observe;
mod scale;
mod southbound;
mod sums;
mod trust;
