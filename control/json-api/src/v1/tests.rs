//! Golden files of all views: each field of each view has a value that differs from its
//! neighbours'. `UPDATE_EXPECT=1` writes them again.

use canal_wire::api;
use expect_test::{ExpectFile, expect_file};

use super::*;
use crate::error_view::ErrorView;

fn check(expected: &ExpectFile, view: impl Serialize) {
    expected.assert_eq(&format!(
        "{}\n",
        serde_json::to_string_pretty(&VersionedView::new(view)).unwrap()
    ));
}

fn diagnostic() -> api::Diagnostic {
    api::Diagnostic {
        severity: api::Severity::Warning.into(),
        file: "routes.yaml".into(),
        line: 12,
        column: 3,
        object: "HTTPRoute bookinfo/reviews".into(),
        field: "spec.rules[0]".into(),
        problem: "no such service".into(),
        fix: "name a Service".into(),
        code: "CANAL0408".into(),
    }
}

fn change(what: api::change::ChangeKind) -> api::Change {
    let [kind, namespace, name] = ["Service", "bookinfo", "reviews"].map(String::from);
    api::Change {
        what: what.into(),
        kind,
        namespace,
        name,
        diff: "-a\n+b\n".into(),
    }
}

#[test]
fn object_views() {
    use api::change::ChangeKind::{Changed, Created, Deleted, Unchanged};
    let object = api::Object {
        api_version: "v1".into(),
        kind: "Service".into(),
        namespace: "bookinfo".into(),
        name: "reviews".into(),
        origin: "mesh.yaml".into(),
        yaml: "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 80}]}\n".into(),
        diagnostics: vec![diagnostic()],
    };
    check(
        &expect_file!["../../golden/objects.json"],
        ObjectListView::from(&api::GetResponse {
            objects: vec![object],
        }),
    );
    let changes: Vec<api::Change> = [Created, Changed, Unchanged, Deleted].map(change).into();
    let applied = api::ApplyResponse {
        accepted: true,
        generation: 7,
        changes: changes.clone(),
        diagnostics: vec![diagnostic()],
        changes_left_out: 0,
    };
    check(
        &expect_file!["../../golden/write-result.json"],
        WriteResultView::of_apply(&applied, true),
    );
    let diff = api::DiffResponse {
        changes,
        diagnostics: vec![diagnostic()],
        changes_left_out: 3,
    };
    check(
        &expect_file!["../../golden/diff.json"],
        DiffView::from(&diff),
    );
}

#[test]
fn status_view() {
    // Numbers of a message differ, except the wanted and the sent generation, so that a swapped
    // field changes the file.
    let subscriber = api::Subscriber {
        kind: "gateway".into(),
        name: "gw-1".into(),
        tenant: "alpha".into(),
        az: "az1".into(),
        connected: true,
        generation_wanted: 9,
        generation_sent: 9,
        generation_acked: 8,
        nack: "resource alpha/default/web: too large".into(),
        resources: 10,
        bytes_sent: 11,
        responses_sent: 12,
        nacks: 13,
        reconnects: 14,
        last_seen_ms: 1_795_233_906_789,
        version: "0.1.0".into(),
    };
    let tenant = api::TenantStatus {
        tenant: "alpha".into(),
        services: 1,
        workloads: 2,
        workloads_ready: 3,
        routes: 4,
        errors: 5,
        warnings: 6,
        outside_passes: true,
    };
    let share = api::ShareUse {
        component: "controller".into(),
        limit: "certificates".into(),
        tenant: "alpha".into(),
        used: 1,
        max: 2,
        refused: 3,
        revoked: 4,
        unit: "certificates".into(),
    };
    let status = api::StatusResponse {
        generation: 9,
        version: "0.1.0".into(),
        subscribers: vec![subscriber],
        tenants: vec![tenant],
        diagnostics: vec![diagnostic()],
        shares: vec![share],
        store: "00ff".into(),
    };
    check(
        &expect_file!["../../golden/status.json"],
        StatusView::from(&status),
    );
}

#[test]
fn convergence_needs_every_data_plane_connected_and_without_a_nack() {
    let subscriber = |connected, acked, nack: &str| {
        let nack = nack.to_owned();
        api::Subscriber {
            connected,
            generation_wanted: 5,
            generation_acked: acked,
            nack,
            ..api::Subscriber::default()
        }
    };
    for (case, subscribers, converged) in [
        ("none", vec![], true),
        (
            "one that is up to date",
            vec![subscriber(true, 5, "")],
            true,
        ),
        (
            "one that is behind",
            vec![subscriber(true, 5, ""), subscriber(true, 4, "")],
            false,
        ),
        ("one that refuses", vec![subscriber(true, 5, "no")], false),
        ("one that is away", vec![subscriber(false, 5, "")], false),
    ] {
        let status = api::StatusResponse {
            subscribers,
            ..api::StatusResponse::default()
        };
        assert_eq!(StatusView::from(&status).converged, converged, "{case}");
    }
}

fn replica() -> api::ReplicaStatus {
    api::ReplicaStatus {
        name: "gw-1".into(),
        number: 1,
        backend: "b1".into(),
        az: "az1".into(),
        underlay: "250.1.0.1".into(),
        state: "draining".into(),
        up: true,
        drain_requested: true,
        sessions: 2,
        accepted: 3,
        generation: 4,
        services: 5,
        heads: 6,
        owners: 7,
        since_last_report_ms: 8,
        version: "0.1.0".into(),
        cores: 9,
    }
}

fn placed_service() -> api::PlacedService {
    api::PlacedService {
        service: "alpha/bookinfo/reviews".into(),
        id: 17,
        home_az: "az1".into(),
        backends: vec!["az1/b1".into(), "az2/b3".into()],
        open_azs: vec!["az1".into()],
        gateway_number: 3,
        migrating: true,
    }
}

#[test]
fn fleet_views() {
    // Every number differs from the others of its message, so that a swapped field changes the
    // file.
    let edge = api::EdgeStatus {
        name: "edge-1".into(),
        az: "az1".into(),
        underlay: "250.1.0.200".into(),
        reporting: true,
        generation: 4,
        version: "0.1.0".into(),
        tunnel_end: "250.1.0.201".into(),
    };
    let fleet = api::FleetResponse {
        edges: vec![edge],
        replicas: vec![replica()],
        services: vec![placed_service()],
        blast: vec![api::BlastRadius {
            failed: 2,
            expected_services: 0.25,
        }],
        plan: 5,
        unmet_constraints: vec!["az2 has one backend".into()],
        findings: vec!["a chain has a replica twice".into()],
        tables_waiting: 6,
    };
    check(
        &expect_file!["../../golden/fleet.json"],
        FleetView::from(&fleet),
    );
    check(
        &expect_file!["../../golden/replicas.json"],
        ReplicaListView::from(&fleet.replicas[..]),
    );
    check(
        &expect_file!["../../golden/replica-order.json"],
        ReplicaOrderView::new("gw-1", Some(&replica())),
    );
    check(
        &expect_file!["../../golden/replica-gone.json"],
        ReplicaOrderView::new("gw-1", None),
    );
    let member = api::ExplainedMember {
        replica: "gw-1".into(),
        heads: 1,
        owners: 2,
        standbys: 3,
    };
    let table = api::ExplainedTable {
        az: "az1".into(),
        version: 4,
        confirmed: true,
        closing: false,
        open: true,
        addresses: vec!["10.1.192.1".into()],
        members: vec![member],
    };
    let explained = api::ExplainResponse {
        service: Some(placed_service()),
        tables: vec![table],
        unmet_constraints: vec!["one AZ".into()],
    };
    check(
        &expect_file!["../../golden/service-placement.json"],
        ServicePlacementView::from(&explained),
    );
}

#[test]
fn session_view() {
    let path = api::EdgePath {
        edge: "edge-1".into(),
        table_version: 4,
        chain: vec!["gw-1".into(), "gw-2".into()],
        replica: "gw-1".into(),
        tunnel_port: 40_001,
    };
    let session = api::ClientSession {
        service: "alpha/bookinfo/reviews".into(),
        port: 9080,
        bucket: 17,
        az: "az1".into(),
        owner: "gw-2".into(),
        paths: vec![path],
    };
    let found = api::SessionsResponse {
        sessions: vec![session],
        silent: vec!["gw-3".into()],
    };
    check(
        &expect_file!["../../golden/sessions.json"],
        SessionListView::from(&found),
    );
}

#[test]
fn trust_view() {
    // Every number differs from the others of its message, so that a swapped field changes the
    // file.
    let root = api::RootStatus {
        fingerprint: "00ff".into(),
        signs: true,
        not_after: 1,
        leaves: 2,
    };
    let certificate = api::IssuedCertificate {
        serial: "0a".into(),
        identity: "spiffe://alpha.example/ns/default/sa/web".into(),
        holder: "node n1".into(),
        issued: 3,
        not_after: 4,
        revoked: true,
        root: "00ff".into(),
    };
    let domain = api::TrustDomainStatus {
        tenant: "alpha".into(),
        trust_domain: "alpha.example".into(),
        source: "own".into(),
        phase: "announced".into(),
        since: 5,
        roots: vec![root],
        waiting: vec!["node n2".into()],
        overdue: true,
        issued: 6,
        revoked: 7,
        blocked_identities: vec!["spiffe://alpha.example/ns/default/sa/old".into()],
        crl_number: 8,
        error: "ca-key.pem is missing".into(),
        certificates: vec![certificate],
        bundle: vec!["-----BEGIN CERTIFICATE-----\n".into()],
    };
    let trust = api::TrustResponse {
        domains: vec![domain],
        note: "the new root is announced".into(),
    };
    check(
        &expect_file!["../../golden/trust.json"],
        TrustDomainListView::from(&trust),
    );
}

#[test]
fn error_view() {
    let status = tonic::Status::permission_denied(
        "this token is for tenant alpha only; fix: use another token",
    );
    check(
        &expect_file!["../../golden/error.json"],
        ErrorView::from(&status),
    );
}
