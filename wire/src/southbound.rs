//! Southbound resources between `canal_model::program` and their wire form: every value is checked here, once, at the edge.

mod decode;
mod decode_authorization;
mod decode_tier;
mod decode_trust;
mod encode;
mod encode_authorization;
mod encode_tier;
mod encode_trust;
pub mod manifest;
pub mod refused;
pub mod snapshot;

use canal_model::ids::{IdError, StoreId};
use canal_model::program::{Kind, Resource};
use prost::Message;

use crate::discovery::{ControlPlane, DeltaDiscoveryResponse};
use crate::program as wire;

/// What stands before the id of the store in a control plane's identifier.
const STORE_PREFIX: &str = "store~";

/// Why a resource from the wire was refused; becomes the text of a nack.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The bytes are not the protobuf message that the type URL names.
    #[error("{kind} {name}: the bytes are not a {kind} message: {why}")]
    Bytes { kind: &'static str, name: String, why: String },
    /// A field holds a value outside its domain.
    #[error("{what}: field {field}: {why}")]
    Field { what: String, field: &'static str, why: String },
    /// The type URL is not one of Canal's.
    #[error("unknown resource type {0:?}; this build knows those of canal.program.v1: {known}", known = known())]
    Type(String),
    /// The name on the envelope is not the name in the resource.
    #[error("the envelope names {envelope:?} but holds {inner:?}")]
    Name { envelope: String, inner: String },
}

fn known() -> String {
    let names = Kind::ALL.map(|kind| type_url(kind).rsplit('.').next().unwrap_or_default());
    names.join(", ")
}

/// The type URL of a kind.
pub fn type_url(kind: Kind) -> &'static str {
    match kind {
        Kind::Tenant => "type.googleapis.com/canal.program.v1.Tenant",
        Kind::Gateway => "type.googleapis.com/canal.program.v1.Gateway",
        Kind::Service => "type.googleapis.com/canal.program.v1.Service",
        Kind::Workload => "type.googleapis.com/canal.program.v1.Workload",
        Kind::Route => "type.googleapis.com/canal.program.v1.Route",
        Kind::Node => "type.googleapis.com/canal.program.v1.Node",
        Kind::Replica => "type.googleapis.com/canal.program.v1.Replica",
        Kind::Address => "type.googleapis.com/canal.program.v1.GatewayAddress",
        Kind::Table => "type.googleapis.com/canal.program.v1.BucketTable",
        Kind::Throttle => "type.googleapis.com/canal.program.v1.Throttle",
        Kind::Bundle => "type.googleapis.com/canal.program.v1.Bundle",
        Kind::KeyServer => "type.googleapis.com/canal.program.v1.KeyServer",
        Kind::Authorizer => "type.googleapis.com/canal.program.v1.Authorizer",
        Kind::Authorization => "type.googleapis.com/canal.program.v1.Authorization",
        Kind::Authentication => "type.googleapis.com/canal.program.v1.Authentication",
        Kind::PeerAuthentication => "type.googleapis.com/canal.program.v1.PeerAuthentication",
        Kind::Termination => "type.googleapis.com/canal.program.v1.Termination",
        Kind::Entitlement => "type.googleapis.com/canal.program.v1.Entitlement",
        Kind::Manifest => "type.googleapis.com/canal.program.v1.Manifest",
    }
}

/// The kind of a type URL.
pub fn kind_of(url: &str) -> Result<Kind, WireError> {
    Kind::ALL.into_iter().find(|k| type_url(*k) == url).ok_or_else(|| WireError::Type(url.chars().take(120).collect()))
}

/// How a controller names its store in the first response of a stream.
pub fn control_plane(store: StoreId) -> ControlPlane {
    ControlPlane { identifier: format!("{STORE_PREFIX}{store}") }
}

/// The store that a response names; `None`: it names none, as all but the first of a stream.
///
/// # Errors
/// It names a store in a form that this build does not know.
pub fn store_of(response: &DeltaDiscoveryResponse) -> Result<Option<StoreId>, IdError> {
    let named = response.control_plane.as_ref().and_then(|plane| plane.identifier.strip_prefix(STORE_PREFIX));
    named.map(str::parse).transpose()
}

/// The resource's bytes. Equal resources give equal bytes (maps are ordered), so a hash of them is a version.
pub fn encode(r: &Resource) -> Vec<u8> {
    match r {
        Resource::Tenant(t) => wire::Tenant::from(t).encode_to_vec(),
        Resource::Gateway(g) => wire::Gateway::from(g).encode_to_vec(),
        Resource::Service(s) => wire::Service::from(s).encode_to_vec(),
        Resource::Workload(w) => wire::Workload::from(w).encode_to_vec(),
        Resource::Route(r) => wire::Route::from(r).encode_to_vec(),
        Resource::Node(n) => wire::Node::from(n).encode_to_vec(),
        Resource::Replica(r) => wire::Replica::from(r).encode_to_vec(),
        Resource::Address(a) => wire::GatewayAddress::from(a).encode_to_vec(),
        Resource::Table(t) => wire::BucketTable::from(t).encode_to_vec(),
        Resource::Throttle(t) => wire::Throttle::from(t).encode_to_vec(),
        Resource::Bundle(b) => wire::Bundle::from(b).encode_to_vec(),
        Resource::KeyServer(k) => wire::KeyServer::from(k).encode_to_vec(),
        Resource::Authorizer(a) => wire::Authorizer::from(a).encode_to_vec(),
        Resource::Authorization(a) => wire::Authorization::from(a).encode_to_vec(),
        Resource::Authentication(a) => wire::Authentication::from(a).encode_to_vec(),
        Resource::PeerAuthentication(p) => wire::PeerAuthentication::from(p).encode_to_vec(),
        Resource::Termination(t) => wire::Termination::from(t).encode_to_vec(),
        Resource::Entitlement(e) => wire::Entitlement::from(e).encode_to_vec(),
        Resource::Manifest(m) => wire::Manifest::from(m).encode_to_vec(),
    }
}

/// Reads and checks a resource. `name` is the envelope's and must agree with the content.
pub fn decode(kind: Kind, name: &str, bytes: &[u8]) -> Result<Resource, WireError> {
    fn read<M: Message + Default>(kind: &'static str, name: &str, bytes: &[u8]) -> Result<M, WireError> {
        M::decode(bytes).map_err(|e| WireError::Bytes { kind, name: name.into(), why: e.to_string() })
    }
    let r = match kind {
        Kind::Tenant => Resource::Tenant(decode::tenant(name, read("Tenant", name, bytes)?)?),
        Kind::Gateway => Resource::Gateway(decode::gateway(name, read("Gateway", name, bytes)?)?),
        Kind::Service => Resource::Service(decode::service(name, read("Service", name, bytes)?)?),
        Kind::Workload => Resource::Workload(decode::workload(name, read("Workload", name, bytes)?)?),
        Kind::Route => Resource::Route(decode::route(name, read("Route", name, bytes)?)?),
        Kind::Node => Resource::Node(decode_tier::node(name, read("Node", name, bytes)?)?),
        Kind::Replica => Resource::Replica(decode_tier::replica(name, read("Replica", name, bytes)?)?),
        Kind::Address => Resource::Address(decode_tier::address(name, read("GatewayAddress", name, bytes)?)?),
        Kind::Table => Resource::Table(decode_tier::table(name, read("BucketTable", name, bytes)?)?),
        Kind::Throttle => Resource::Throttle(decode_tier::throttle(name, read("Throttle", name, bytes)?)?),
        Kind::Bundle => Resource::Bundle(decode_trust::bundle(name, read("Bundle", name, bytes)?)?),
        Kind::KeyServer => Resource::KeyServer(decode_trust::key_server(name, read("KeyServer", name, bytes)?)?),
        Kind::Authorizer => Resource::Authorizer(decode_authorization::authorizer(name, read("Authorizer", name, bytes)?)?),
        Kind::Authorization => Resource::Authorization(decode_authorization::authorization(name, read("Authorization", name, bytes)?)?),
        Kind::Authentication => Resource::Authentication(decode_authorization::authentication(name, read("Authentication", name, bytes)?)?),
        Kind::PeerAuthentication => {
            Resource::PeerAuthentication(decode_authorization::peer_authentication(name, read("PeerAuthentication", name, bytes)?)?)
        }
        Kind::Termination => Resource::Termination(decode_trust::termination(name, read("Termination", name, bytes)?)?),
        Kind::Entitlement => Resource::Entitlement(decode_trust::entitlement(name, read("Entitlement", name, bytes)?)?),
        Kind::Manifest => Resource::Manifest(manifest::decode(name, read("Manifest", name, bytes)?)?),
    };
    let inner = r.name();
    if inner == name { Ok(r) } else { Err(WireError::Name { envelope: name.into(), inner }) }
}

#[cfg(test)]
mod tests;
