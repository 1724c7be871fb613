//! Reports that the controller must refuse: of other components, with wrong addresses, or beyond a
//! limit.

use canal_wire::fleet::{ReplicaReportRequest, ServiceOwnership};
use tonic::Code;

fn replica(backend: &str, az: &str, underlay: &str) -> ReplicaReportRequest {
    ReplicaReportRequest {
        backend: backend.into(),
        az: az.into(),
        underlay: underlay.into(),
        ..ReplicaReportRequest::default()
    }
}

/// A token, a report that it may not send, and the code and the reason of the refusal.
pub(super) type MisnamedReplica = (&'static str, ReplicaReportRequest, Code, &'static str);

pub(super) fn misnamed_replicas() -> Vec<MisnamedReplica> {
    [replicas_of_others(), replicas_with_wrong_addresses()].concat()
}

fn replicas_of_others() -> Vec<MisnamedReplica> {
    vec![
        (
            "nobody",
            replica("b1", "az1", "250.1.0.9"),
            Code::Unauthenticated,
            "unknown_token",
        ),
        (
            "n1",
            replica("b1", "az1", "250.1.0.9"),
            Code::PermissionDenied,
            "not_a_replica",
        ),
        (
            "e1",
            replica("b1", "az1", "250.1.0.9"),
            Code::PermissionDenied,
            "not_a_replica",
        ),
        (
            "root",
            replica("b1", "az1", "250.1.0.9"),
            Code::PermissionDenied,
            "not_a_replica",
        ),
        (
            "r2",
            replica("b2", "az1", "250.1.0.9"),
            Code::PermissionDenied,
            "backend",
        ),
        (
            "r2",
            replica("b1", "az2", "250.2.0.9"),
            Code::PermissionDenied,
            "az",
        ),
    ]
}

fn replicas_with_wrong_addresses() -> Vec<MisnamedReplica> {
    // One entry more than the limit.
    let many = ReplicaReportRequest {
        owned: (0..=canal_controller_core::OWNED_MAX)
            .map(|i| ServiceOwnership {
                service: i as u32 + 1,
                ..ServiceOwnership::default()
            })
            .collect(),
        ..replica("b1", "az1", "250.1.0.3")
    };
    vec![
        (
            "r2",
            replica("b1", "az1", "10.1.0.9"),
            Code::InvalidArgument,
            "underlay",
        ),
        (
            "r2",
            replica("b1", "az1", "250.9.0.9"),
            Code::InvalidArgument,
            "underlay",
        ),
        (
            "r2",
            // 250.9.0.9 and 250.0.0.9 are no tier addresses: AZ numbers are 1 to 7.
            replica("b1", "az1", "250.0.0.9"),
            Code::InvalidArgument,
            "underlay",
        ),
        (
            "r2",
            replica("b1", "az1", "here"),
            Code::InvalidArgument,
            "underlay",
        ),
        // r1 has registered with 250.1.0.3, whose second octet is the AZ's number: az1 has 1.
        (
            "r2",
            replica("b1", "az1", "250.1.0.3"),
            Code::FailedPrecondition,
            "underlay_taken",
        ),
        (
            "r2",
            replica("b1", "az1", "250.2.0.3"),
            Code::FailedPrecondition,
            "az_number",
        ),
        (
            "r4",
            replica("b3", "az2", "250.1.0.9"),
            Code::FailedPrecondition,
            "az_number_taken",
        ),
        (
            "r1",
            replica("b1", "az1", "250.1.0.9"),
            Code::FailedPrecondition,
            "registered_otherwise",
        ),
        (
            "r2",
            replica("B!", "az1", "250.1.0.9"),
            Code::InvalidArgument,
            "form",
        ),
        ("r1", many, Code::InvalidArgument, "entries"),
    ]
}
