//! The only meeting place of the control side and the data sides: southbound (delta xDS), certificates, the operators' API,
//! and HBONE's header words. Messages and their conversion to `canal_model`; no sockets are opened here.

#![forbid(unsafe_code)]

pub mod hbone;
pub mod keyrpc;
pub mod southbound;
pub mod tier;

/// Generated from `proto/discovery.proto`: the delta xDS transport.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod discovery {
    tonic::include_proto!("envoy.service.discovery.v3");
}

/// Generated from `proto/citadel.proto`: Istio's certificate service.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod citadel {
    tonic::include_proto!("istio.v1.auth");
}

/// Generated from `proto/program.proto`: southbound resources as they travel.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod program {
    tonic::include_proto!("canal.program.v1");
}

/// Generated from `proto/api.proto`: the operators' API.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod api {
    tonic::include_proto!("canal.api.v1");
}

/// Generated from `proto/fleet.proto`: what edges and replicas report.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod fleet {
    tonic::include_proto!("canal.fleet.v1");
}

/// The controller's port for southbound, certificates and the API; Istio's number.
pub const CONTROLLER_PORT: u16 = 15012;
/// The name in the controller's server certificate, whatever address it is reached at.
pub const CONTROLLER_NAME: &str = "canal-controller";
/// Rows of one data plane's report of what tenants hold of its limits; the fullest and the most refused are told.
pub const SHARE_ROWS_MAX: usize = 4096;
/// Resources that one such report names as left out for want of room.
pub const OMITTED_MAX: usize = 1024;
/// Of those, of one tenant: enough to see what is wrong.
pub const OMITTED_PER_TENANT_MAX: usize = 16;
/// Bytes of one such report: 4,096 rows of at most 150 bytes, and 1,024 resources with names and reasons of a few hundred.
pub const SHARE_REPORT_BYTES_MAX: usize = 2 << 20;
/// Largest gRPC message either side accepts, bytes (Istio's WDS limit).
pub const MESSAGE_BYTES_MAX: usize = 200 << 20;
