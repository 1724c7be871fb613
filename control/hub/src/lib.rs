//! The controller's hub: takes policy from files and operators, compiles it, and tells every data plane what concerns it and no more.
//! It opens the controller's ports; it knows nothing of how traffic flows.
//!
//! Start reading at [`Hub::start`]; then `writer` (how a change comes into force), `catalog` (what is in force), `session` (what one
//! subscriber is to be sent), `southbound`, `certificates` and `admin` (three of the services), `trust` (authorities), and `fleet` (the cloud
//! tier).

#![forbid(unsafe_code)]

mod admin;
mod admission;
mod apply;
mod catalog;
mod certificates;
mod changes;
mod connection;
mod doors;
mod dump;
mod fetch;
mod files;
mod fleet;
mod hub;
mod jwks;
mod listener;
mod metrics;
mod prepare;
mod principals;
mod session;
mod share_status;
mod shared;
mod shares;
mod southbound;
mod subscribers;
mod tenant;
mod trust;
mod turns;
mod wire_check;
mod writer;

pub use admin::FILES_MAX;
pub use doors::{ADMIN_SOCKET_NAME, DOOR_CONNECTIONS_MAX};
pub use fleet::{FleetTimes, OWNED_MAX, SEEN_MAX};
pub use hub::{Config, Hub, HubError, Limits, REQUEST_BYTES_MAX};
pub use jwks::{AllowedHost, JWKS_BYTES_MAX, JWKS_FETCHES_MAX, JWKS_FETCHES_PER_TENANT_MAX, JWKS_URIS_MAX, JwksOptions};
pub use listener::{CONNECTIONS_MAX, FILES_RESERVED, ListenError, UNAUTHENTICATED_MAX};
pub use principals::{PRINCIPALS_BYTES_MAX, PRINCIPALS_MAX, Principals, PrincipalsError, TOKEN_BYTES_MAX};
pub use session::{NACK_SPLITS_MAX, NAME_BYTES_MAX, NAMES_MAX, PENDING_MAX, RESPONSE_BYTES_MAX, STREAM_NAME_BYTES_MAX};
pub use shares::{COMPILED_BYTES_MAX, CONFIGURATION_BYTES_MAX, QUEUED_CHANGE_BYTES_MAX, QUEUED_CHANGES_MAX};
pub use subscribers::{PRINCIPAL_NAME_BYTES_MAX, STREAMS_MAX, STREAMS_PER_PRINCIPAL_MAX};
pub use trust::{
    BARRED_MAX, CA_DOMAINS_MAX, CA_FILE_BYTES_MAX, CERTIFICATES_PER_HOLDER_MAX, CertificateRate, EXTERNAL_REQUESTS_MAX, ExternalCa,
    ISSUED_MAX, PROVIDER_RATE, REPEATED_LIFETIME_SECONDS, REVOKED_MAX, TENANT_RATE, TrustOptions,
};

use canal_model::diagnostic::Severity;
use canal_model::principal::Principal;
use canal_model::program::Kind;

/// A kind as labels and JSON spell it.
fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Tenant => "Tenant",
        Kind::Gateway => "Gateway",
        Kind::Service => "Service",
        Kind::Workload => "Workload",
        Kind::Route => "Route",
        Kind::Node => "Node",
        Kind::Replica => "Replica",
        Kind::Address => "GatewayAddress",
        Kind::Table => "BucketTable",
        Kind::Throttle => "Throttle",
        Kind::Bundle => "Bundle",
        Kind::KeyServer => "KeyServer",
        Kind::Authorizer => "Authorizer",
        Kind::Authorization => "Authorization",
        Kind::Authentication => "Authentication",
        Kind::PeerAuthentication => "PeerAuthentication",
        Kind::Termination => "Termination",
        Kind::Entitlement => "Entitlement",
        Kind::Manifest => "Manifest",
    }
}

/// A principal's kind as labels and `canal status` spell it.
fn principal_name(p: &Principal) -> &'static str {
    match p {
        Principal::Node { .. } => "node",
        Principal::Gateway { .. } => "gateway",
        Principal::Edge { .. } => "edge",
        Principal::KeyServer { .. } => "keyserver",
        Principal::Operator { .. } => "operator",
    }
}

/// A severity as labels spell it.
fn severity_name(s: Severity) -> &'static str {
    match s {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}
