//! Access to the controller: principals and their tokens, the admission of connections, and the
//! limits that tenants share. It does not authorize the requests of an authenticated client; each
//! service does. Start at [`Authenticator`] and [`TenantLimits`].

#![forbid(unsafe_code)]

pub mod admission;
mod authentication;
mod connection;
mod listener;
pub mod principals;
pub mod shares;
mod unread_answers;

use std::time::{SystemTime, UNIX_EPOCH};

pub use authentication::{AuthenticatedClient, Authenticator};
pub use connection::CountedConnection;
pub use listener::{
    CONNECTIONS_MAX, ControlListener, FILES_RESERVED, HANDSHAKE_TIMEOUT, ListenError,
    UNAUTHENTICATED_MAX,
};
pub use principals::{Principals, principal_name};
pub use shares::{SharedCapacities, TenantLimits, holder_of};
pub use unread_answers::{CountedAnswers, UNREAD_ANSWER_BYTES_MAX, UnreadAnswers};

/// Returns the current time in seconds since 1970.
pub fn now_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}
