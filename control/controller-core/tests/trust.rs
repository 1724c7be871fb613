//! Tests of the tenants' trust over the wire: bundles and federation, key servers, rotation of
//! roots, revocation. rustls verifies chains. CAs of tenants are tested in `outside_ca`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fixture;
use crate::fixture::{
    ControllerFixture, ManualSubscriber, PRINCIPALS, fresh_csr, tenant, wait_limit, with_token,
    write_principals,
};
use canal_ca::RotationTimeouts;
use canal_controller_core::ControllerLimits;
use canal_model::program::{Resource, ResourceKind};
use canal_model::share::{Share, ShareKind};
use canal_model::trust::TrustBundle;
use canal_wire::api;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use tonic::Code;

mod ca_cli;
mod outside_ca;

use ca_cli::CaCli;

const A: &str = "spiffe://alpha.example/ns/shop/sa/a";
const B: &str = "spiffe://alpha.example/ns/shop/sa/b";
const GATEWAY: &str = "spiffe://alpha.example/ns/canal-system/sa/gateway";

/// Principals of key servers, besides those of every fixture.
const KEY_SERVERS: [(&str, &str); 3] = [
    ("ks1", "kind: keyserver, name: ks1, az: az1"),
    ("ka", "kind: keyserver, name: ka, az: az1, tenant: alpha"),
    ("kb", "kind: keyserver, name: kb, az: az1, tenant: beta"),
];

fn everybody() -> Vec<(&'static str, &'static str)> {
    PRINCIPALS.into_iter().chain(KEY_SERVERS).collect()
}

async fn two_tenants(keys: &str) -> ControllerFixture {
    ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.trust.rotation_timeouts = RotationTimeouts {
            settle: 0,
            grace: 0,
            overdue: 600,
        };
        write_principals(&config.principals, &everybody());
        let folder = config.config_dir.as_ref().unwrap();
        fixture::write(
            folder,
            "alpha/mesh.yaml",
            &tenant("alpha", 1).replace("podCidrs", &format!("{keys}podCidrs")),
        );
        fixture::write(folder, "beta/mesh.yaml", &tenant("beta", 2));
    })
    .await
}

fn bundle(s: &ManualSubscriber, name: &str) -> Option<TrustBundle> {
    match s.resources.get(&(ResourceKind::Bundle, name.to_string())) {
        Some((_, Resource::Bundle(bundle))) => Some(bundle.clone()),
        _ => None,
    }
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

/// Verifies a chain, as `CreateCertificate` returns it, against a bundle.
fn verify(chain: &[String], bundle: &TrustBundle) -> Result<(), String> {
    let mut roots = RootCertStore::empty();
    bundle.roots.iter().for_each(|r| roots.add(der(r)).unwrap());
    let lists = bundle
        .revoked
        .iter()
        .map(|l| CertificateRevocationListDer::from_pem_slice(l.as_bytes()).unwrap());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let verifier = builder
        .with_crls(lists)
        .allow_unknown_revocation_status()
        .build()
        .unwrap();
    let above: Vec<_> = chain[1..chain.len() - 1].iter().map(|c| der(c)).collect();
    verifier
        .verify_client_cert(&der(&chain[0]), &above, UnixTime::now())
        .map(|_| ())
        .map_err(|e| e.to_string())
}

async fn refused(fixture: &ControllerFixture, reason: &str) -> f64 {
    fixture
        .metric(&format!(
            "canal_controller_certificates_refused_total{{reason=\"{reason}\"}}"
        ))
        .await
}

#[tokio::test]
async fn a_bundle_is_sent_to_its_tenant_and_mutually_federated_ones() {
    let fixture = two_tenants("").await;
    let (mut n1, mut m1, mut g2) = (
        fixture.subscribe("n1").await,
        fixture.subscribe("m1").await,
        fixture.subscribe("g2").await,
    );
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    m1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "beta/beta.example".into()))
    })
    .await;
    let chain = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    verify(&chain, &bundle(&n1, "alpha/alpha.example").unwrap()).unwrap();
    assert!(verify(&chain, &bundle(&m1, "beta/beta.example").unwrap()).is_err());
    let federation = |other: &str| {
        format!(
            "---\napiVersion: canal.mesh/v1\nkind: Federation\nmetadata: {{name: f}}\nspec: {{tenant: {other}, trustDomain: {other}.example}}\n"
        )
    };
    fixture.write(
        "alpha/mesh.yaml",
        &(tenant("alpha", 1) + &federation("beta")),
    );
    // Once this service arrives, alpha's federation has been read too.
    fixture.write("alpha/mark.yaml", &fixture::service(1, "mark", 9));
    n1.until("alpha's new service", |h| {
        h.contains_key(&(ResourceKind::Service, "alpha/shop/mark".into()))
    })
    .await;
    assert!(
        bundle(&n1, "alpha/beta.example").is_none(),
        "one side alone does not create a federation"
    );
    fixture.write(
        "beta/mesh.yaml",
        &(tenant("beta", 2) + &federation("alpha")),
    );
    n1.until("beta's bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/beta.example".into()))
    })
    .await;
    m1.until("alpha's bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "beta/alpha.example".into()))
    })
    .await;
    let (foreign, own) = (
        bundle(&n1, "alpha/beta.example").unwrap(),
        bundle(&n1, "alpha/alpha.example").unwrap(),
    );
    assert!(foreign.federated && !own.federated);
    assert_eq!(
        foreign.roots,
        bundle(&m1, "beta/beta.example").unwrap().roots
    );
    g2.settle().await;
    assert_eq!(
        g2.names()
            .iter()
            .filter(|n| n.starts_with("Bundle"))
            .count(),
        3,
        "beta's gateway: beta's own, alpha's as beta may see it, and that of Canal's own parts"
    );
    fixture.write("beta/mesh.yaml", &tenant("beta", 2));
    n1.until("the end of the federation", |h| {
        !h.contains_key(&(ResourceKind::Bundle, "alpha/beta.example".into()))
    })
    .await;
    m1.until("the end of the federation", |h| {
        !h.contains_key(&(ResourceKind::Bundle, "beta/alpha.example".into()))
    })
    .await;
}

/// Returns the identity of one of Canal's own components.
fn own(who: &str) -> String {
    format!("spiffe://components.canal/ns/{who}")
}

/// A case's name, the token, the identity that is requested, and the reason of the refusal.
type KeyCase = (&'static str, &'static str, String, Option<&'static str>);

/// Alpha keeps its keys in key servers and beta does not. A component may also request the
/// certificate of its own part, and an operator none.
fn key_cases() -> Vec<KeyCase> {
    let beta = "spiffe://beta.example/ns/shop/sa/a";
    vec![
        ("a node", "n1", A.into(), Some("keys_in_key_server")),
        (
            "a gateway",
            "g1",
            GATEWAY.into(),
            Some("keys_in_key_server"),
        ),
        ("the provider's key server, a pod's", "ks1", A.into(), None),
        (
            "the provider's key server, the gateways'",
            "ks1",
            GATEWAY.into(),
            None,
        ),
        ("the tenant's key server", "ka", A.into(), None),
        (
            "an account that no pod has",
            "ks1",
            "spiffe://alpha.example/ns/shop/sa/zz".into(),
            Some("not_entitled"),
        ),
        (
            "another tenant's key server",
            "kb",
            A.into(),
            Some("trust_domain"),
        ),
        (
            "a tenant that keeps its keys",
            "ks1",
            beta.into(),
            Some("not_entitled"),
        ),
        ("a node's own part", "n1", own("alpha/sa/node.n1"), None),
        (
            "a gateway's own part",
            "g1",
            own("canal-system/sa/gateway.g1"),
            None,
        ),
        (
            "a key server's own part",
            "ks1",
            own("canal-system/sa/keyserver.ks1"),
            None,
        ),
        (
            "a tenant's key server's own part",
            "ka",
            own("alpha/sa/keyserver.ka"),
            None,
        ),
        (
            "another node's part",
            "n1",
            own("alpha/sa/node.n2"),
            Some("not_component"),
        ),
        (
            "a node as a key server",
            "n1",
            own("canal-system/sa/keyserver.ks1"),
            Some("not_component"),
        ),
        (
            "an operator",
            "root",
            own("canal-system/sa/gateway.g1"),
            Some("operator"),
        ),
    ]
}

#[tokio::test]
async fn keys_in_key_servers_restrict_certificate_requests() {
    let fixture = two_tenants("keys: {location: KeyServer}, ").await;
    let mut ks1 = fixture.subscribe("ks1").await;
    let entitled = |name: &str| (ResourceKind::Entitlement, name.to_string());
    ks1.until("the gateways", |h| {
        h.contains_key(&entitled("alpha/gateway/g1")) && h.contains_key(&entitled("alpha/node/n1"))
    })
    .await;
    let mut kb = fixture.subscribe("kb").await;
    kb.settle().await;
    assert!(
        kb.names().iter().all(|n| !n.contains("alpha")),
        "{:?}",
        kb.names()
    );
    assert!(
        !kb.names().iter().any(|n| n.contains("gateway")),
        "beta's keys are where its gateways are: {:?}",
        kb.names()
    );
    // A case that succeeds has no reason; its counter of `none` does not exist.
    for (what, token, identity, want) in key_cases() {
        let before = refused(&fixture, want.unwrap_or("none")).await;
        let got = fixture.certificate(token, Some(&identity), None).await;
        match (got, want) {
            (Ok(_), None) => {}
            (Err(_), Some(reason)) => assert!(
                (refused(&fixture, reason).await - before - 1.0).abs() < f64::EPSILON,
                "{what}: {reason}"
            ),
            (got, want) => panic!("{what}: got {got:?}, wanted {want:?}"),
        }
    }
    // Components' certificates are signed by the controller's own root.
    let part = fixture
        .certificate("n1", Some(&own("alpha/sa/node.n1")), None)
        .await
        .unwrap()
        .cert_chain;
    assert_eq!(
        part[1],
        std::fs::read_to_string(fixture.config.infra_dir.join("root.pem")).unwrap()
    );
    fixture.write(
        "alpha/mesh.yaml",
        &tenant("alpha", 1).replace(
            "podCidrs",
            "keys: {location: KeyServer, fallback: Local}, podCidrs",
        ),
    );
    // The certificate service uses the new setting once the file was compiled.
    let until = Instant::now() + wait_limit();
    while fixture.certificate("n1", Some(A), None).await.is_err() {
        assert!(
            Instant::now() < until,
            "with a fallback a node may hold a key"
        );
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut root = fixture.admin("root").await;
    assert_eq!(root.subscriber("ks1").await.kind, "keyserver");
}

/// A case's name, the token, the identity, the service and the request, and the reason of the
/// refusal.
type HostNameCase = (
    &'static str,
    &'static str,
    &'static str,
    Option<&'static str>,
    Option<String>,
    &'static str,
);

/// Returns requests that are refused. `rsa` is a request with an RSA key.
fn host_name_cases(rsa: &str) -> Vec<HostNameCase> {
    vec![
        (
            "another tenant's service",
            "g1",
            GATEWAY,
            Some("beta/shop/a"),
            None,
            "service_unknown",
        ),
        (
            "no such service",
            "g1",
            GATEWAY,
            Some("alpha/shop/zz"),
            None,
            "service_unknown",
        ),
        (
            "no service at all",
            "g1",
            GATEWAY,
            Some("shop"),
            None,
            "service_form",
        ),
        (
            "a node",
            "n1",
            A,
            Some("alpha/shop/a"),
            None,
            "service_not_gateway",
        ),
        (
            "a gateway that does not serve the tenant",
            "g2",
            GATEWAY,
            Some("alpha/shop/a"),
            None,
            "trust_domain",
        ),
        (
            "an RSA key where the tenant's are ECDSA",
            "n1",
            A,
            None,
            Some(rsa.into()),
            "key_algorithm",
        ),
    ]
}

#[tokio::test]
async fn host_names_of_a_service_go_with_the_gateways_identity() {
    let fixture = two_tenants("").await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("alpha", |h| {
        h.contains_key(&(ResourceKind::Service, "alpha/shop/a".into()))
    })
    .await;
    let chain = fixture
        .certificate_of("g1", GATEWAY, Some("alpha/shop/a"), None)
        .await
        .unwrap()
        .cert_chain;
    let leaf = der(&chain[0]);
    let text = String::from_utf8_lossy(&leaf);
    for name in ["a.shop.svc.cluster.local", "a.shop.svc", GATEWAY] {
        assert!(text.contains(name), "{name}");
    }
    let rsa = rcgen::KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048)
        .unwrap();
    let rsa = rcgen::CertificateParams::default()
        .serialize_request(&rsa)
        .unwrap()
        .pem()
        .unwrap();
    for (what, token, identity, service, csr, reason) in host_name_cases(&rsa) {
        let before = refused(&fixture, reason).await;
        assert!(
            fixture
                .certificate_of(token, identity, service, csr)
                .await
                .is_err(),
            "{what}"
        );
        // Metrics are floating-point numbers, which are not compared for equality.
        assert!(
            (refused(&fixture, reason).await - before - 1.0).abs() < f64::EPSILON,
            "{what}: {reason}"
        );
    }
    fixture.write(
        "alpha/mesh.yaml",
        &tenant("alpha", 1).replace("podCidrs", "keys: {algorithm: Rsa2048}, podCidrs"),
    );
    // The file is compiled with a delay.
    let until = Instant::now() + wait_limit();
    while fixture
        .certificate_of("n1", A, None, Some(rsa.clone()))
        .await
        .is_err()
    {
        assert!(
            Instant::now() < until,
            "RSA is accepted if the tenant configures it"
        );
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that the old root stays while n2 may use a certificate of it, and goes once n2 has
/// another.
async fn end_without_certificates_of_the_old_root(
    fixture: &ControllerFixture,
    ca: &mut CaCli,
    n1: &mut ManualSubscriber,
    both: &TrustBundle,
) {
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let waits = ca.status().await;
    assert!(
        waits.phase == "switched"
            && waits.waiting.len() == 1
            && waits.waiting[0].contains("node alpha/n2"),
        "{waits:?}"
    );
    fixture.certificate("n2", Some(B), None).await.unwrap();
    let done = ca.phase("steady").await;
    assert_eq!(done.roots.len(), 1);
    n1.until(
        "one root",
        |h| matches!(&h[&(ResourceKind::Bundle, "alpha/alpha.example".into())].1, Resource::Bundle(b) if b.roots.len() == 1),
    )
    .await;
    assert_eq!(
        bundle(n1, "alpha/alpha.example").unwrap().roots[0],
        both.roots[1]
    );
    assert_eq!(
        done.certificates
            .iter()
            .filter(|c| c.root == done.roots[0].fingerprint)
            .count(),
        2
    );
}

/// Checks that a restart does not undo the announcement of a new root.
async fn restart_while_announced(fixture: &mut ControllerFixture, ca: CaCli) -> CaCli {
    drop(ca);
    fixture.stop().await;
    fixture.start().await;
    let mut ca = CaCli::of(fixture).await;
    assert_eq!(ca.status().await.phase, "announced");
    ca
}

#[tokio::test]
async fn a_root_signs_after_all_acknowledge_it_and_retires_when_unused() {
    let mut fixture = two_tenants("").await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    let first = bundle(&n1, "alpha/alpha.example").unwrap();
    let old = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    // n2 holds a certificate and is not connected, so it is unknown whether it runs.
    fixture.certificate("n2", Some(B), None).await.unwrap();
    let mut ca = CaCli::of(&fixture).await;
    assert!(ca.rotate(false).await.unwrap().note.contains("announced"));
    assert!(
        ca.rotate(false).await.unwrap().note.contains("--force"),
        "a second rotation is refused while one is in progress"
    );
    n1.until(
        "both roots",
        |h| matches!(&h[&(ResourceKind::Bundle, "alpha/alpha.example".into())].1, Resource::Bundle(b) if b.roots.len() == 2),
    )
    .await;
    // The batch ends with the tenant's manifest, which must be acknowledged too.
    n1.settle().await;
    let both = bundle(&n1, "alpha/alpha.example").unwrap();
    assert_eq!(
        both.roots[0], first.roots[0],
        "the old root signs and is first"
    );
    // The controller checks once a second (`MAINTENANCE_INTERVAL`): two checks at least must find
    // that n2 has acknowledged nothing.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let waits = ca.status().await;
    assert_eq!(
        (waits.phase.as_str(), waits.waiting.as_slice()),
        (
            "announced",
            &["node alpha/n2: is not connected".to_string()][..]
        )
    );
    let meanwhile = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    assert_eq!(
        meanwhile.last().unwrap(),
        &both.roots.concat(),
        "the last element contains all roots"
    );
    let mut ca = restart_while_announced(&mut fixture, ca).await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    let mut n2 = fixture.subscribe("n2").await;
    n2.settle().await;
    let status = ca.phase("switched").await;
    assert_eq!(
        status.roots.iter().map(|r| r.signs).collect::<Vec<_>>(),
        [true, false]
    );
    n1.until(
        "the switch",
        |h| matches!(&h[&(ResourceKind::Bundle, "alpha/alpha.example".into())].1, Resource::Bundle(b) if b.roots[1] == first.roots[0]),
    )
    .await;
    let now = bundle(&n1, "alpha/alpha.example").unwrap();
    assert_eq!(
        now.roots[0], both.roots[1],
        "the new root signs and is first"
    );
    let new = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    for chain in [&old, &meanwhile, &new] {
        verify(chain, &now).unwrap();
    }
    verify(&new, &both).unwrap();
    assert!(verify(&new, &first).is_err());
    end_without_certificates_of_the_old_root(&fixture, &mut ca, &mut n1, &both).await;
}

#[tokio::test]
async fn force_takes_the_next_step_although_subscribers_lag() {
    let mut fixture = two_tenants("").await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    fixture.certificate("n2", Some(B), None).await.unwrap();
    for (want, roots) in [("announced", 2), ("switched", 2), ("steady", 1)] {
        let mut ca = CaCli::of(&fixture).await;
        let answer = ca.rotate(true).await.unwrap();
        let done = &answer.domains[0];
        assert_eq!(
            (done.phase.as_str(), done.roots.len()),
            (want, roots),
            "{}",
            answer.note
        );
        // Each step is on disk when the request is answered.
        fixture.stop().await;
        fixture.start().await;
        let kept = CaCli::of(&fixture).await.status().await;
        assert_eq!((&kept.phase, &kept.roots), (&done.phase, &done.roots));
    }
}

/// Checks that a restored identity gets certificates, and that orders about what is not there are
/// refused.
async fn restore_and_refuse_the_wrong(
    fixture: &ControllerFixture,
    n1: &mut ManualSubscriber,
    ca: &mut CaCli,
    again: &TrustBundle,
) {
    ca.restore(A).await.unwrap();
    let unblocked = |h: &fixture::ReceivedResources| matches!(&h[&(ResourceKind::Bundle, "alpha/alpha.example".into())].1, Resource::Bundle(b) if b.blocked.is_empty());
    n1.until("no identity is blocked", unblocked).await;
    verify(
        &fixture
            .certificate("n1", Some(A), None)
            .await
            .unwrap()
            .cert_chain,
        again,
    )
    .unwrap();
    for (what, got, code) in [
        ("not blocked", ca.restore(A).await, Code::NotFound),
        (
            "no such serial",
            ca.revoke("", "00ff").await,
            Code::NotFound,
        ),
        (
            "another domain's",
            ca.revoke("spiffe://beta.example/ns/shop/sa/a", "").await,
            Code::FailedPrecondition,
        ),
        (
            "nothing named",
            ca.revoke("", "").await,
            Code::InvalidArgument,
        ),
    ] {
        assert_eq!(got.unwrap_err().code(), code, "{what}");
    }
}

#[tokio::test]
async fn a_revoked_identity_is_on_the_list_and_gets_nothing_until_it_is_restored() {
    let mut fixture = two_tenants("").await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    let bad = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    // Two certificates of the identity, so that its revocation must find both.
    let gone = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    let good = fixture
        .certificate("n2", Some(B), None)
        .await
        .unwrap()
        .cert_chain;
    let mut ca = CaCli::of(&fixture).await;
    let of_b = ca
        .status()
        .await
        .certificates
        .into_iter()
        .find(|c| c.identity == B)
        .unwrap();
    assert_eq!(
        (of_b.holder.as_str(), of_b.revoked),
        ("node alpha/n2", false)
    );
    assert!(
        ca.revoke(A, "")
            .await
            .unwrap()
            .note
            .starts_with("2 certificates")
    );
    let listed = |lists: usize| move |h: &fixture::ReceivedResources| matches!(&h[&(ResourceKind::Bundle, "alpha/alpha.example".into())].1, Resource::Bundle(b) if b.revoked.len() == lists);
    n1.until("the list", listed(1)).await;
    let published = bundle(&n1, "alpha/alpha.example").unwrap();
    assert_eq!(
        published.blocked,
        [A.parse().unwrap()],
        "certificates that are on no record count as revoked, too"
    );
    for chain in [&bad, &gone] {
        assert!(verify(chain, &published).unwrap_err().contains("Revoked"));
    }
    verify(&good, &published).unwrap();
    let before = refused(&fixture, "blocked").await;
    assert_eq!(
        fixture
            .certificate("n1", Some(A), None)
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );
    assert!((refused(&fixture, "blocked").await - before - 1.0).abs() < f64::EPSILON);
    // A revocation by serial affects only that certificate.
    ca.revoke("", &of_b.serial).await.unwrap();
    fixture.certificate("n2", Some(B), None).await.unwrap();
    fixture.stop().await;
    fixture.start().await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    let again = bundle(&n1, "alpha/alpha.example").unwrap();
    assert!(
        verify(&good, &again).is_err() && verify(&bad, &again).is_err(),
        "a restart forgets nothing"
    );
    assert!(fixture.certificate("n1", Some(A), None).await.is_err());
    let mut ca = CaCli::of(&fixture).await;
    // Three: both certificates of A, and the one of B that was revoked by its serial.
    assert_eq!(
        (
            ca.status().await.revoked,
            ca.status().await.blocked_identities
        ),
        (3, vec![A.to_string()])
    );
    assert_eq!(again.blocked, [A.parse().unwrap()]);
    restore_and_refuse_the_wrong(&fixture, &mut n1, &mut ca, &again).await;
}

/// Checks that a tenant's operator may not change the trust domain of the components.
async fn refuse_a_tenants_operator(fixture: &ControllerFixture, identity: &str) {
    let mut bob = CaCli(fixture.admin("bob").await, "canal-system");
    assert_eq!(
        bob.revoke(identity, "").await.unwrap_err().code(),
        Code::PermissionDenied
    );
    assert_eq!(
        bob.restore(identity).await.unwrap_err().code(),
        Code::PermissionDenied
    );
}

/// Data planes that present certificates of Canal's components to each other learn which are
/// revoked. Only the provider may revoke them.
#[tokio::test]
async fn a_revoked_component_is_published_to_all_peers() {
    const PARTS: &str = "canal-system/components.canal";
    let mut fixture = two_tenants("keys: {location: KeyServer}, ").await;
    let has_bundle =
        |h: &fixture::ReceivedResources| h.contains_key(&(ResourceKind::Bundle, PARTS.into()));
    // Nodes of both tenants, a gateway, and key servers of the provider and of a tenant: all verify
    // components.
    let mut all = Vec::new();
    for who in ["n1", "m1", "g1", "ks1", "ka"] {
        let mut s = fixture.subscribe(who).await;
        s.until("the trust bundle of Canal's parts", has_bundle)
            .await;
        let own = bundle(&s, PARTS).unwrap();
        assert!(
            own.revoked.is_empty()
                && !own.federated
                && own.roots
                    == [
                        std::fs::read_to_string(fixture.config.infra_dir.join("root.pem")).unwrap()
                    ]
        );
        all.push(s);
    }
    let identity = "spiffe://components.canal/ns/alpha/sa/node.n1";
    let part = async |fixture: &ControllerFixture| {
        fixture
            .certificate("n1", Some(identity), None)
            .await
            .map(|answer| answer.cert_chain)
    };
    let stolen = part(&fixture).await.unwrap();
    let mut ca = CaCli(fixture.admin("root").await, "canal-system");
    let status = ca.status().await;
    assert_eq!(
        (status.source.as_str(), status.issued, status.roots[0].signs),
        ("controller", 1, true)
    );
    let serial = status.certificates[0].serial.clone();
    assert_eq!(
        (
            status.certificates[0].identity.as_str(),
            status.certificates[0].holder.as_str()
        ),
        (identity, "node alpha/n1")
    );
    // A second certificate of the identity, which the revocation by serial leaves valid.
    let own = part(&fixture).await.unwrap();
    assert!(
        ca.revoke("", &serial)
            .await
            .unwrap()
            .note
            .starts_with("1 certificates")
    );
    for s in &mut all {
        s.until("the list", |h| matches!(&h[&(ResourceKind::Bundle, PARTS.into())].1, Resource::Bundle(b) if b.revoked.len() == 1)).await;
        let published = bundle(s, PARTS).unwrap();
        assert!(verify(&stolen, &published).unwrap_err().contains("Revoked"));
        verify(&own, &published).unwrap();
    }
    // Revokes all certificates of the identity, and blocks it.
    ca.revoke(identity, "").await.unwrap();
    assert_eq!(
        part(&fixture).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    fixture.stop().await;
    fixture.start().await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the list, after a restart", has_bundle).await;
    let again = bundle(&n1, PARTS).unwrap();
    assert!(verify(&stolen, &again).is_err() && verify(&own, &again).is_err());
    assert!(part(&fixture).await.is_err());
    let mut ca = CaCli(fixture.admin("root").await, "canal-system");
    ca.restore(identity).await.unwrap();
    verify(&part(&fixture).await.unwrap(), &again).unwrap();
    assert_eq!(
        ca.rotate(false).await.unwrap_err().code(),
        Code::FailedPrecondition,
        "the root of Canal's components is replaced by hand"
    );
    refuse_a_tenants_operator(&fixture, identity).await;
}

#[tokio::test]
async fn operators_cannot_change_another_tenants_ca() {
    let fixture = two_tenants("").await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    // Bob is an operator of beta.
    let mut bob = CaCli(fixture.admin("bob").await, "alpha");
    assert_eq!(
        bob.rotate(false).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    assert_eq!(
        bob.revoke(A, "").await.unwrap_err().code(),
        Code::PermissionDenied
    );
    assert_eq!(
        bob.restore(A).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    let request = api::TrustRequest {
        tenant: String::new(),
        certificates: true,
    };
    let seen = bob
        .0
        .client
        .trust(with_token(request, "bob"))
        .await
        .unwrap()
        .into_inner()
        .domains;
    assert_eq!(
        seen.iter().map(|d| d.tenant.as_str()).collect::<Vec<_>>(),
        ["beta"]
    );
    let mut node = CaCli(fixture.admin("n1").await, "alpha");
    assert_eq!(
        node.rotate(true).await.unwrap_err().code(),
        Code::PermissionDenied
    );
}

#[tokio::test]
async fn the_record_of_certificates_is_bounded_and_private_keys_can_be_sealed() {
    // Two certificates, so that the third finds the issuance log full.
    let mut limits = ControllerLimits {
        issued: 2,
        ..ControllerLimits::default()
    };
    // Alpha's share must not be full before the log is.
    limits
        .shares
        .set(ShareKind::Certificates, Share::Percent(100));
    let mut fixture = ControllerFixture::tuned(limits, |config| {
        let key = config.data_dir.with_extension("key");
        // Any 32 bytes are a key; [8; 32] below is a wrong one.
        std::fs::write(&key, [7; 32]).unwrap();
        config.trust.key_file = Some(key);
    })
    .await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    let published = bundle(&n1, "alpha/alpha.example").unwrap();
    for _ in 0..2 {
        fixture
            .certificate("n1", Some(A), Some(fresh_csr()))
            .await
            .unwrap();
    }
    let full = fixture.certificate("n1", Some(A), None).await.unwrap_err();
    // The refusal is counted under the log's own reason.
    assert_eq!(
        (
            full.code(),
            refused(&fixture, "issuance_log_full").await as u32
        ),
        (Code::ResourceExhausted, 1)
    );
    fixture.stop().await;
    std::fs::write(fixture.config.trust.key_file.as_ref().unwrap(), [8; 32]).unwrap();
    assert!(
        fixture
            .try_start()
            .await
            .err()
            .unwrap()
            .to_string()
            .contains("--store-key-file")
    );
    std::fs::write(fixture.config.trust.key_file.as_ref().unwrap(), [7; 32]).unwrap();
    fixture.start().await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    assert_eq!(
        bundle(&n1, "alpha/alpha.example").unwrap().roots,
        published.roots
    );
}
