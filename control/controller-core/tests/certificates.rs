//! Tests which principal gets which certificate, requested over the wire. rustls verifies what was
//! issued.

use std::sync::Arc;
use std::time::Duration;

use crate::fixture;
use crate::fixture::{ControllerFixture, fresh_csr, gateway, tenant};
use canal_controller_core::ControllerLimits;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use tonic::Code;

const A: &str = "spiffe://alpha.example/ns/shop/sa/a";
const B: &str = "spiffe://alpha.example/ns/shop/sa/b";
const GATEWAY: &str = "spiffe://alpha.example/ns/canal-system/sa/gateway";

/// Expected result: issued, or the status and the counter's reason.
type IssuanceOutcome = Result<(), (Code, &'static str)>;

/// Verifies the leaf against the bundle, as of today.
fn verify(chain: &[String], bundle: &str) -> Result<(), String> {
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(der(bundle)).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .unwrap();
    verifier
        .verify_client_cert(&der(&chain[0]), &[], UnixTime::now())
        .map(|_| ())
        .map_err(|e| e.to_string())
}

/// A case's name, a data plane's token, the identity that it requests, and the result.
type IssuanceCase = (
    &'static str,
    &'static str,
    Option<&'static str>,
    IssuanceOutcome,
);

const ISSUANCE_CASES: [IssuanceCase; 17] = [
    ("the node that runs it", "n1", Some(A), Ok(())),
    ("the other node, its own pod", "n2", Some(B), Ok(())),
    (
        "a gateway, the tenant it serves",
        "g1",
        Some(GATEWAY),
        Ok(()),
    ),
    (
        "the same name in the tenant that node belongs to",
        "m1",
        Some("spiffe://beta.example/ns/shop/sa/a"),
        Ok(()),
    ),
    (
        "a node that does not run it",
        "n2",
        Some(A),
        Err((Code::PermissionDenied, "not_on_node")),
    ),
    (
        "an account that no pod has",
        "n1",
        Some("spiffe://alpha.example/ns/shop/sa/zz"),
        Err((Code::PermissionDenied, "not_on_node")),
    ),
    (
        "the account in another namespace",
        "n1",
        Some("spiffe://alpha.example/ns/other/sa/a"),
        Err((Code::PermissionDenied, "not_on_node")),
    ),
    (
        "another tenant's domain",
        "n1",
        Some("spiffe://beta.example/ns/shop/sa/a"),
        Err((Code::PermissionDenied, "trust_domain")),
    ),
    (
        "another tenant's node",
        "m1",
        Some(A),
        Err((Code::PermissionDenied, "trust_domain")),
    ),
    (
        "the gateways' identity for a node",
        "n1",
        Some(GATEWAY),
        Err((Code::PermissionDenied, "reserved")),
    ),
    (
        "a gateway, a tenant it does not serve",
        "g1",
        Some("spiffe://beta.example/ns/canal-system/sa/gateway"),
        Err((Code::PermissionDenied, "trust_domain")),
    ),
    (
        "a gateway, a workload's identity",
        "g1",
        Some(A),
        Err((Code::PermissionDenied, "not_gateway")),
    ),
    (
        "an operator",
        "root",
        Some(A),
        Err((Code::PermissionDenied, "operator")),
    ),
    (
        "nobody",
        "nobody",
        Some(A),
        Err((Code::Unauthenticated, "")),
    ),
    (
        "no identity named",
        "n1",
        None,
        Err((Code::InvalidArgument, "no_identity")),
    ),
    (
        "an empty identity",
        "n1",
        Some(""),
        Err((Code::InvalidArgument, "no_identity")),
    ),
    (
        "not an identity",
        "n1",
        Some("https://alpha.example"),
        Err((Code::InvalidArgument, "identity_form")),
    ),
];

#[tokio::test]
async fn identities_are_issued_only_to_their_node() {
    let fixture = ControllerFixture::two_tenants().await;
    for (what, token, identity, want) in ISSUANCE_CASES {
        let before = |reason: &str| {
            format!("canal_controller_certificates_refused_total{{reason=\"{reason}\"}}")
        };
        // Each refusal is counted under its own reason.
        let counted = match want {
            Err((_, reason)) if !reason.is_empty() => {
                Some((before(reason), fixture.metric(&before(reason)).await))
            }
            // Requests without a valid token are refused before they are requests for certificates.
            _ => None,
        };
        let got = fixture.certificate(token, identity, None).await;
        match (got, want) {
            (Ok(got), Ok(())) => {
                // The chain is the leaf and the root: Istio's clients take the last certificate as
                // the root.
                assert_eq!(got.cert_chain.len(), 2, "{what}");
                verify(&got.cert_chain, &got.cert_chain[1])
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            (Err(status), Err((code, _))) => assert_eq!(status.code(), code, "{what}: {status}"),
            (got, want) => panic!("{what}: got {got:?}, wanted {want:?}"),
        }
        if let Some((line, count)) = counted {
            assert!(
                (fixture.metric(&line).await - count - 1.0).abs() < f64::EPSILON,
                "{what}: {line}"
            );
        }
    }
    // The cases with the result Ok: three of nodes, and one of a gateway.
    assert!(
        (fixture
            .metric("canal_controller_certificates_issued_total{to=\"node\"}")
            .await
            - 3.0)
            .abs()
            < f64::EPSILON
    );
    assert!(
        (fixture
            .metric("canal_controller_certificates_issued_total{to=\"gateway\"}")
            .await
            - 1.0)
            .abs()
            < f64::EPSILON
    );
}

#[tokio::test]
async fn a_bad_request_is_refused_and_named() {
    let fixture = ControllerFixture::two_tenants().await;
    let named = |identity: &str| {
        let mut p = rcgen::CertificateParams::default();
        p.subject_alt_names = vec![rcgen::SanType::URI(
            identity.to_string().try_into().unwrap(),
        )];
        p.serialize_request(&rcgen::KeyPair::generate().unwrap())
            .unwrap()
            .pem()
            .unwrap()
    };
    assert!(
        fixture
            .certificate("n1", Some(A), Some(named(A)))
            .await
            .is_ok()
    );
    for (what, csr, reason) in [
        ("another name in the request", named(B), "name"),
        ("no request", String::new(), "form"),
        (
            "a huge request",
            fresh_csr() + &" ".repeat(20_000),
            "too_large",
        ),
    ] {
        let refused = fixture
            .certificate("n1", Some(A), Some(csr))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{what}: {refused}");
        let line = format!("canal_controller_certificates_refused_total{{reason=\"{reason}\"}}");
        assert!(fixture.metric(&line).await >= 1.0, "{what}: {line}");
    }
}

#[tokio::test]
async fn roots_are_a_tenants_own_and_survive_a_restart() {
    let mut fixture = ControllerFixture::two_tenants().await;
    let alpha = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    let beta = fixture
        .certificate("m1", Some("spiffe://beta.example/ns/shop/sa/a"), None)
        .await
        .unwrap()
        .cert_chain;
    assert!(
        verify(&alpha, &beta[1]).is_err(),
        "one tenant's certificate does not hold with the other's bundle"
    );
    fixture.stop().await;
    fixture.start().await;
    let again = fixture
        .certificate("g1", Some(GATEWAY), None)
        .await
        .unwrap()
        .cert_chain;
    assert_eq!(again[1], alpha[1], "the root is the same");
    verify(&alpha, &again[1]).unwrap();
}

#[tokio::test]
async fn a_gateway_loses_an_identity_with_its_tenant() {
    let fixture = ControllerFixture::two_tenants().await;
    fixture.write(
        "alpha/mesh.yaml",
        &tenant("alpha", 1).replace(&gateway(1, "g1"), &gateway(1, "g2")),
    );
    let mut g2 = fixture.subscribe("g2").await;
    g2.until("alpha", |h| h.keys().any(|(_, n)| n == "alpha/g2"))
        .await;
    assert_eq!(
        fixture
            .certificate("g1", Some(GATEWAY), None)
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );
    assert!(fixture.certificate("g2", Some(GATEWAY), None).await.is_ok());
}

#[tokio::test]
async fn while_the_registry_is_not_known_the_answer_is_try_again() {
    let mut fixture = ControllerFixture::with(ControllerLimits::default(), |config| {
        std::fs::create_dir(config.join("alpha")).unwrap();
        std::fs::write(config.join("alpha/mesh.yaml"), tenant("alpha", 1)).unwrap();
    })
    .await;
    fixture.stop().await;
    std::fs::rename(fixture.path("alpha"), fixture.dir.path().join("aside")).unwrap();
    fixture.start().await;
    assert_eq!(
        fixture
            .certificate("n1", Some(A), None)
            .await
            .unwrap_err()
            .code(),
        Code::Unavailable
    );
    std::fs::rename(fixture.dir.path().join("aside"), fixture.path("alpha")).unwrap();
    let until = std::time::Instant::now() + fixture::wait_limit();
    while fixture.certificate("n1", Some(A), None).await.is_err() {
        assert!(std::time::Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
