//! The HTTP/JSON face of the operators' API: typed views, and a service that answers HTTP requests
//! with them. It decides nothing: every request goes to the same
//! [`Admin`](canal_wire::api::admin_server::Admin) as a gRPC call, with the same operator.
//!
//! Start at [`v1`], the views of version 1, which `canal -o json` prints too. [`JsonApi`] serves
//! them. `docs/operations/json-api.md` describes paths, fields and errors for authors of clients.

#![forbid(unsafe_code)]

mod error_view;
mod query;
mod routes;
mod server;
pub mod v1;

pub use error_view::{ErrorDetailView, ErrorView};
pub use server::{JsonApi, JsonApiLimits, JsonRefusal, OBJECT_TEXT_BYTES_MAX};
