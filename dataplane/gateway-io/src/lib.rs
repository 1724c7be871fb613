//! Bytes of the gateway's connections: buffers, transports, bodies of messages, timeouts, and the
//! fair distribution of a worker's time among tenants.
//!
//! It knows no request, no tenant's configuration and no endpoint: `canal-gateway-engine` does.
//! Start with [`io::Io`] and [`body::BodyPump`].

#![forbid(unsafe_code)]

pub mod body;
pub mod buffer;
pub mod clock;
pub mod io;
pub mod proxy_header;
pub mod scheduler;
