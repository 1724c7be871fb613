//! The operators' side of the controller: the API that `canal` calls, observations of data planes,
//! and the read-only admin pages. It checks which operator may read and change which objects, and
//! converts. The other crates decide and execute. Start at [`AdminService`].

#![forbid(unsafe_code)]

mod admin;
pub mod admin_server;
mod conditions;
mod dump;
mod observe;
mod operator;
mod share_status;
mod views;

pub use admin::{AdminService, FILES_MAX};
pub use admin_server::{ADMIN_CONNECTIONS_MAX, AdminAcceptor, AdminEndpoint, PagesContext};
pub use conditions::{
    CONDITIONS_AT_ONCE_MAX, CONDITIONS_BYTES_MAX, CONDITIONS_PER_TENANT_MAX, ConditionsService,
    ConditionsStream,
};
pub use observe::{
    OBSERVATIONS_MAX, OBSERVATIONS_PER_OPERATOR_MAX, ObservationContext, ObservationRegistry,
    ObservationService, ObservationStream,
};
