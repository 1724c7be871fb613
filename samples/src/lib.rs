//! Small real applications that the demo, the tests and the benches put into pods, and the clients that judge them.
//! Nothing here knows of the mesh: these programs are what the mesh must carry unmodified.
//! Start reading at `main.rs`, which lists the roles.

#![forbid(unsafe_code)]

pub mod answer;
pub mod authz;
pub mod blob;
pub mod blob_client;
pub mod bookinfo;
pub mod echo_rpc;
pub mod grpc_client;
pub mod issuer;
pub mod listen;
pub mod load;
pub mod outbound;
pub mod pattern;
pub mod pod;
pub mod sessions;
pub mod tcp;
pub mod tcp_client;
pub mod tls_client;
pub mod workload_client;
pub mod ws;
pub mod ws_client;

/// Generated from `proto/echo.proto`.
pub mod proto {
    tonic::include_proto!("canal.samples.v1");
}

/// Generated from `proto/ext_authz.proto`.
#[allow(unreachable_pub, clippy::all, reason = "generated code")]
pub mod ext_authz {
    tonic::include_proto!("envoy.service.auth.v3");
}

/// Generated from `proto/workload.proto`, which has no package.
#[allow(unreachable_pub, clippy::all, reason = "generated code")]
pub mod workload {
    tonic::include_proto!("_");
}
