//! The integration tests of attachment, on objects as users write them. `make test` runs each module
//! in its own process (`suite MODULE::`).

mod certificates;
mod fixture;
mod frontend_validation;
mod listeners;
mod routes;
mod servers;
