//! Converts southbound resources between `canal_model::program` and their wire form. Every value is
//! validated here, once, when it enters. The module does not decide what a refused resource leads
//! to. Start at [`encode()`] and [`decode()`].

mod consumer_rule;
mod decode;
mod decode_authorization;
mod decode_tier;
mod decode_trust;
mod encode;
mod encode_authorization;
mod encode_tier;
mod encode_trust;
mod ingress;
mod listener_certificate;
mod listener_filters;
mod load_balancers;
pub mod manifest;
pub mod parts;
pub mod refused;
mod route_answers;
mod route_attempts;
mod route_authorizer;
mod route_cors;
mod route_faults;
mod route_filters;
mod route_mirrors;
pub mod state_file;

use canal_model::ids::{IdError, StoreId};
use canal_model::program::{Resource, ResourceKind};
use prost::Message;

use crate::discovery::{ControlPlane, DeltaDiscoveryResponse};
use crate::program as wire;

/// Prefix of the store's id in a control plane's identifier.
const STORE_PREFIX: &str = "store~";

/// The reason why a resource from the wire was refused; it becomes the text of a NACK.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResourceDecodeError {
    /// The bytes are not the protobuf message that the type URL names.
    #[error(
        "{kind} {name}: the bytes are not a {kind} message: {why}; fix: run a controller of this data plane's version"
    )]
    Bytes {
        kind: &'static str,
        name: String,
        why: String,
    },
    /// A field holds a value outside its domain.
    #[error("{what}: field {field}: {why}")]
    Field {
        what: String,
        field: &'static str,
        why: String,
    },
    /// The type URL is not one of Canal's.
    #[error("unknown resource type {0:?}; this build knows those of canal.program.v1: {known}; fix: run a controller of this data plane's version", known = kind_labels())]
    Type(String),
    /// The name on the envelope is not the name in the resource.
    #[error(
        "the envelope names {envelope:?} but contains {inner:?}; fix: run a released build of the controller"
    )]
    Name { envelope: String, inner: String },
}

fn kind_labels() -> String {
    let names = ResourceKind::ALL.map(ResourceKind::label);
    names.join(", ")
}

/// Entry of `Node.client_features` of a subscriber that joins the parts of a response.
pub const RESPONSE_PARTS_FEATURE: &str = "canal.response_parts";

/// Returns the kind of a type URL.
///
/// # Errors
/// Fails with [`ResourceDecodeError::Type`] if the type URL is not one of Canal's.
pub fn kind_of(url: &str) -> Result<ResourceKind, ResourceDecodeError> {
    ResourceKind::ALL
        .into_iter()
        .find(|k| k.type_url() == url)
        .ok_or_else(|| ResourceDecodeError::Type(url.chars().take(120).collect()))
}

/// Returns the control plane's identifier, by which a controller names its store in the first
/// response of a stream.
pub fn control_plane(store: StoreId) -> ControlPlane {
    ControlPlane {
        identifier: format!("{STORE_PREFIX}{store}"),
    }
}

/// Returns the store that a response names. `None` if it names none, like all but the first
/// response of a stream.
///
/// # Errors
/// Fails if the response names a store in a form that this build does not know.
pub fn store_of(response: &DeltaDiscoveryResponse) -> Result<Option<StoreId>, IdError> {
    let named = response
        .control_plane
        .as_ref()
        .and_then(|plane| plane.identifier.strip_prefix(STORE_PREFIX));
    named.map(str::parse).transpose()
}

/// The codecs of the kinds. A row has the kind, its message, and the function that validates what
/// arrives. `From` fills the message.
macro_rules! codecs {
    ($($kind:ident = $message:ty, $decode:path;)*) => {
        /// Encodes a resource. Equal resources give equal bytes (maps are ordered), so a hash of
        /// the bytes serves as a version.
        pub fn encode(resource: &Resource) -> Vec<u8> {
            match resource {
                $(Resource::$kind(body) => <$message>::from(body).encode_to_vec(),)*
            }
        }

        /// Decodes the bytes of a resource, without comparing its name with the envelope's.
        fn decode_body(kind: ResourceKind, name: &str, bytes: &[u8]) -> Result<Resource, ResourceDecodeError> {
            let malformed = |e: prost::DecodeError| ResourceDecodeError::Bytes { kind: kind.label(), name: name.into(), why: e.to_string() };
            match kind {
                $(ResourceKind::$kind => {
                    let message = <$message>::decode(bytes).map_err(malformed)?;
                    $decode(name, message).map(Resource::$kind)
                })*
            }
        }
    };
}

codecs! {
    Tenant = wire::Tenant, decode::tenant;
    GatewayReplica = wire::Gateway, decode::gateway;
    Service = wire::Service, decode::service;
    Ingress = wire::IngressGateway, ingress::decode;
    ListenerCertificate = wire::ListenerCertificate, listener_certificate::decode;
    Workload = wire::Workload, decode::workload;
    Route = wire::Route, decode::route;
    Node = wire::Node, decode_tier::node;
    Replica = wire::Replica, decode_tier::replica;
    Address = wire::GatewayAddress, decode_tier::address;
    Table = wire::BucketTable, decode_tier::table;
    Throttle = wire::Throttle, decode_tier::throttle;
    DirectEndpoint = wire::DirectEndpoint, decode::direct_endpoint;
    Bundle = wire::Bundle, decode_trust::bundle;
    KeyServer = wire::KeyServer, decode_trust::key_server;
    Authorizer = wire::Authorizer, decode_authorization::authorizer;
    Authorization = wire::Authorization, decode_authorization::authorization;
    Authentication = wire::Authentication, decode_authorization::authentication;
    PeerAuthentication = wire::PeerAuthentication, decode_authorization::peer_authentication;
    Termination = wire::Termination, decode_trust::termination;
    Entitlement = wire::Entitlement, decode_trust::entitlement;
    Manifest = wire::Manifest, manifest::decode;
}

/// Decodes and validates a resource. `name` is the envelope's and must agree with the content.
///
/// # Errors
/// Fails with a [`ResourceDecodeError`] if the bytes are malformed, a value is invalid, or the
/// names differ.
pub fn decode(
    kind: ResourceKind,
    name: &str,
    bytes: &[u8],
) -> Result<Resource, ResourceDecodeError> {
    let resource = decode_body(kind, name, bytes)?;
    let inner = resource.name();
    if inner == name {
        Ok(resource)
    } else {
        Err(ResourceDecodeError::Name {
            envelope: name.into(),
            inner,
        })
    }
}

#[cfg(test)]
mod tests;
