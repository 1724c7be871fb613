//! HTTP messages in the gateway, for all HTTP versions: a request's head in the form that the
//! phases need, the translation of heads between versions, the reasons for which the gateway itself
//! ends a request, and its responses to them.
//!
//! It neither parses HTTP/1.1 (`canal-h1` does), nor opens, reads or writes a connection, nor routes
//! or authorizes a request. Start with [`head::RequestInfo`], [`heads`] and
//! [`proxy_error::ProxyError`].

#![forbid(unsafe_code)]

pub mod endpoint_version;
pub mod forwarded_client;
pub mod head;
pub mod heads;
pub mod interim;
pub mod proxy_error;
pub mod reply_fields;
pub mod retry_policy;
pub mod route_authorizer;
pub mod routing_views;
