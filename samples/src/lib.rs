//! Small real applications that the demo, the tests and the benches run in pods, and the clients
//! that check their answers. They do not depend on the mesh: the mesh must carry them unmodified.
//! Start at `main.rs`, which lists the roles.

#![forbid(unsafe_code)]

pub mod answer;
pub mod authz;
pub mod blob;
pub mod blob_client;
pub mod bookinfo;
pub mod connections;
pub mod echo_rpc;
pub mod grpc_client;
pub mod issuer;
pub mod listen;
pub mod load;
pub mod outbound;
pub mod pod;
pub mod sessions;
pub mod tcp;
pub mod tcp_client;
pub mod tls_client;
pub mod workload_client;
pub mod ws;
pub mod ws_client;

/// Messages and services generated from `proto/echo.proto`.
pub mod proto {
    tonic::include_proto!("canal.samples.v1");
}

/// Messages and services generated from `proto/ext_authz.proto`.
#[allow(unreachable_pub, clippy::all, reason = "generated code")]
pub mod ext_authz {
    tonic::include_proto!("envoy.service.auth.v3");
}

/// Messages and services generated from `proto/workload.proto`, which has no package.
#[allow(unreachable_pub, clippy::all, reason = "generated code")]
pub mod workload {
    tonic::include_proto!("_");
}
