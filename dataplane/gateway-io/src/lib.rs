//! Bytes of the gateway's connections: buffers, transports, bodies of messages, timeouts, the
//! fair distribution of a worker's time among tenants, and the watchdog of stuck workers.
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
pub mod watchdog;
