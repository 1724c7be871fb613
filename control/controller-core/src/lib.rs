//! The controller library: wires the crates of `control` together and runs them in one process. It
//! opens the listeners, starts the catalog writer, and passes each crate the handles that it needs.
//! It does not route traffic.
//!
//! Start at [`Controller::start`]. `writer` shows how a change takes effect. Its parts
//! are crates of their own. `canal-catalog` is the state in force, and
//! `canal-policy-sources` reads the objects that it is compiled from. `canal-southbound`
//! distributes it to data planes. `canal-access` authenticates clients, `canal-trust` is the
//! certificate authorities, `canal-fleet` the cloud tier, and `canal-operators-api` the operators'
//! API.

#![forbid(unsafe_code)]

mod config;
mod controller;
mod parts;
mod servers;
mod writer;

pub use canal_access::principals::{
    PRINCIPALS_BYTES_MAX, PRINCIPALS_MAX, PrincipalsError, TOKEN_BYTES_MAX,
};
pub use canal_access::shares::{
    COMPILED_BYTES_MAX, COMPILED_RESOURCES_MAX, CONFIGURATION_BYTES_MAX, QUEUED_CHANGE_BYTES_MAX,
    QUEUED_CHANGES_MAX, ROUTE_TABLE_BYTES_MAX,
};
pub use canal_access::{
    CONNECTIONS_MAX, FILES_RESERVED, ListenError, Principals, UNAUTHENTICATED_MAX,
};
pub use canal_fleet::{OWNED_MAX, SEEN_MAX, SilenceTimeouts};
pub use canal_operators_api::{
    ADMIN_CONNECTIONS_MAX, FILES_MAX, OBSERVATIONS_MAX, OBSERVATIONS_PER_OPERATOR_MAX,
};
pub use canal_southbound::{
    NACK_SPLITS_MAX, NAME_BYTES_MAX, NAMES_MAX, PENDING_MAX, PRINCIPAL_NAME_BYTES_MAX,
    RESPONSE_BYTES_MAX, STREAM_NAME_BYTES_MAX, STREAMS_MAX, STREAMS_PER_PRINCIPAL_MAX,
};
pub use canal_trust::jwks::{
    AllowedHost, JWKS_BYTES_MAX, JWKS_FETCHES_MAX, JWKS_FETCHES_PER_TENANT_MAX, JWKS_URIS_MAX,
    JwksOptions,
};
pub use canal_trust::{
    BLOCKED_MAX, CA_DOMAINS_MAX, CA_FILE_BYTES_MAX, CERTIFICATES_PER_HOLDER_MAX, CertificateRate,
    EXTERNAL_REQUESTS_MAX, ExternalCa, ISSUED_MAX, PROVIDER_RATE, REPEATED_LIFETIME_SECONDS,
    REVOKED_MAX, TENANT_RATE, TrustOptions,
};
pub use config::{ControllerConfig, ControllerError, ControllerLimits, REQUEST_BYTES_MAX};
pub use controller::Controller;
