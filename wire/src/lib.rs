//! The only interface between the control plane and the data planes. It covers southbound (delta
//! xDS), certificates, the operators' API, the key server protocol, and HBONE's header fields. The
//! crate defines messages and converts them to `canal_model`. It opens no sockets. Start at
//! [`southbound`].

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

/// Generated from `proto/program.proto`: southbound resources in wire form.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod program {
    tonic::include_proto!("canal.program.v1");
}

/// Generated from `proto/api.proto`: the operators' API.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod api {
    tonic::include_proto!("canal.api.v1");
}

/// Generated from `proto/fleet.proto`: reports of edges and replicas to the controller.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod fleet {
    tonic::include_proto!("canal.fleet.v1");
}

/// Generated from `proto/observe.proto`: observations of data planes by operators.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod observe {
    tonic::include_proto!("canal.observe.v1");
}

/// Maximum unconsumed bytes of answers in one observation. The controller buffers no more than this
/// for a slow reader.
/// These are eight of the largest answers. With 256 observations the controller buffers 64 MiB, if
/// each is of one data plane.
pub const OBSERVE_WINDOW_BYTES: u64 = 256 << 10;
/// Bytes that one answer costs of the window in addition to its data.
/// Without it, answers with little data would be almost free. Nobody measured the exact size of the
/// fields around.
pub const OBSERVE_ANSWER_COST: u64 = 64;
/// Maximum number of data bytes in one answer.
/// An eighth of [`OBSERVE_WINDOW_BYTES`], so that answers follow each other while credit is on its
/// way.
pub const OBSERVE_DATA_BYTES_MAX: usize = 32 << 10;
/// Maximum number of concurrent observations of one data plane; the controller starts no more.
/// A tenant's default share is 25 % of it. Nobody measured this value.
pub const OBSERVATIONS_PER_DATA_PLANE_MAX: usize = 64;
/// Longest duration of an observation.
/// It ends what an operator forgot. Nobody measured this value; a longer one is begun again.
pub const OBSERVE_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(3600);

/// Controller port for southbound, certificates and the API; Istio uses the same number.
pub const CONTROLLER_PORT: u16 = 15012;
/// Name in the controller's server certificate, independent of the address used to reach it.
pub const CONTROLLER_NAME: &str = "canal-controller";
/// Maximum number of rows in one data plane's share report. The fullest rows and those with most
/// refusals are included.
/// Nobody measured this value; a data plane serves far fewer tenants that are near a share.
pub const SHARE_ROWS_MAX: usize = 4096;
/// Maximum number of resources that one share report lists as omitted because a map is full or a
/// share is used up.
/// With at most 16 of a tenant ([`OMITTED_PER_TENANT_MAX`]), 64 tenants or more are named.
pub const OMITTED_MAX: usize = 1024;
/// Maximum number of omitted resources of one tenant in a share report: enough to find the cause.
/// The controller shows as many refused resources of one tenant.
pub const OMITTED_PER_TENANT_MAX: usize = 16;
/// Maximum size of one share report: 4,096 rows of at most 150 bytes, and 1,024 resources with
/// names and reasons of a few hundred bytes.
pub const SHARE_REPORT_BYTES_MAX: usize = 2 << 20;
/// Largest gRPC message that either side accepts, in bytes (Istio's WDS limit).
pub const MESSAGE_BYTES_MAX: usize = 200 << 20;
