//! Tests of CAs that are not the controller's: CAs from files, and an external CA that signs by
//! request.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use canal_controller_core::{ControllerLimits, ExternalCa};
use canal_model::program::{Resource, ResourceKind};
use tonic::Code;

use super::{A, CaCli, GATEWAY, bundle, der, refused, verify};
use crate::fixture::{ControllerFixture, tenant, wait_limit};

/// Creates a CA with rcgen, and writes it as a trust domain's folder.
fn authority(
    folder: &Path,
    name: &str,
    root: Option<(&rcgen::Issuer<'static, rcgen::KeyPair>, &str)>,
) -> (rcgen::Issuer<'static, rcgen::KeyPair>, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, name);
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![
        rcgen::KeyUsagePurpose::KeyCertSign,
        rcgen::KeyUsagePurpose::CrlSign,
    ];
    let pem = match root {
        Some((issuer, _)) => params.signed_by(&key, issuer).unwrap().pem(),
        None => params.self_signed(&key).unwrap().pem(),
    };
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
    std::fs::write(
        folder.join("root-cert.pem"),
        root.map_or(pem.as_str(), |(_, root)| root),
    )
    .unwrap();
    std::fs::write(folder.join("cert-chain.pem"), &pem).unwrap();
    (rcgen::Issuer::from_ca_cert_pem(&pem, key).unwrap(), pem)
}

/// Checks that a broken key changes nothing, because the last good CA signs on.
async fn keep_the_last_good_key(
    fixture: &ControllerFixture,
    folder: &Path,
    ca: &mut CaCli,
    chain: &[String],
) {
    let good = std::fs::read_to_string(folder.join("key.pem")).unwrap();
    std::fs::write(folder.join("key.pem"), "broken").unwrap();
    let until = Instant::now() + wait_limit();
    while ca.status().await.error.is_empty() {
        assert!(Instant::now() < until, "the broken key is reported");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(
        fixture
            .metric(
                "canal_controller_ca_files_refused_total{domain=\"alpha.example\",reason=\"key\"}"
            )
            .await
            >= 1.0
    );
    assert!(
        (fixture
            .metric("canal_controller_ca_fault{tenant=\"alpha\",domain=\"alpha.example\"}")
            .await
            - 1.0)
            .abs()
            < f64::EPSILON
    );
    let kept = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    assert_eq!(kept[1], chain[1], "what was last good signs on");
    std::fs::write(folder.join("key.pem"), good).unwrap();
}

#[tokio::test]
async fn an_intermediate_from_files_signs_is_replaced_while_it_runs_and_a_broken_one_changes_nothing()
 {
    let outside = tempfile::tempdir().unwrap();
    let folder = outside.path().join("alpha.example");
    let (root, root_pem) = authority(&outside.path().join("root"), "root", None);
    let (_, first) = authority(&folder, "first", Some((&root, &root_pem)));
    let fixture = ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.trust.ca_dir = Some(outside.path().into())
    })
    .await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    let published = bundle(&n1, "alpha/alpha.example").unwrap();
    let chain = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    // The chain is the leaf, the intermediate and the root.
    // rcgen ends lines with CRLF on Windows, and the controller publishes LF.
    assert_eq!(
        (chain.len(), &published.roots),
        (3, &vec![root_pem.replace("\r\n", "\n")])
    );
    assert_eq!(
        der(&chain[1]),
        der(&first),
        "the leaf's chain carries the intermediate"
    );
    verify(&chain, &published).unwrap();
    let mut ca = CaCli::of(&fixture).await;
    assert_eq!(
        (
            ca.status().await.source.as_str(),
            ca.status().await.error.as_str()
        ),
        ("files", "")
    );
    // The files' owner replaces an intermediate, not the controller.
    assert_eq!(
        ca.rotate(false).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    ca.revoke(A, "").await.unwrap();
    n1.until(
        "the list",
        |h| matches!(&h[&(ResourceKind::Bundle, "alpha/alpha.example".into())].1, Resource::Bundle(b) if b.revoked.len() == 1),
    )
    .await;
    assert!(verify(&chain, &bundle(&n1, "alpha/alpha.example").unwrap()).is_err());
    ca.restore(A).await.unwrap();

    keep_the_last_good_key(&fixture, &folder, &mut ca, &chain).await;
    let (_, second) = authority(&folder, "second", Some((&root, &root_pem)));
    let until = Instant::now() + wait_limit();
    while der(&fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain[1])
        != der(&second)
    {
        assert!(Instant::now() < until, "the new intermediate signs");
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(ca.status().await.error, "");
}

#[tokio::test]
async fn revocations_in_files_are_published_from_the_start() {
    let outside = tempfile::tempdir().unwrap();
    let folder = outside.path().join("alpha.example");
    let (issuer, _) = authority(&folder, "alone", None);
    let moment = |year| rcgen::date_time_ymd(year, 1, 1);
    let revoked = rcgen::RevokedCertParams {
        serial_number: 77u64.into(),
        revocation_time: moment(2021),
        reason_code: None,
        invalidity_date: None,
    };
    let list = rcgen::CertificateRevocationListParams {
        this_update: moment(2021),
        next_update: moment(2100),
        crl_number: 1u64.into(),
        issuing_distribution_point: None,
        revoked_certs: vec![revoked],
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    std::fs::write(
        folder.join("crl.pem"),
        list.signed_by(&issuer).unwrap().pem().unwrap(),
    )
    .unwrap();
    let fixture = ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.trust.ca_dir = Some(outside.path().into())
    })
    .await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    let mut n1 = fixture.subscribe("n1").await;
    let key = (ResourceKind::Bundle, "alpha/alpha.example".to_string());
    let listed =
        |resource: &Resource| matches!(resource, Resource::Bundle(b) if b.revoked.len() == 1);
    n1.until("the list of the files", |h| {
        h.get(&key).is_some_and(|held| listed(&held.1))
    })
    .await;
}

/// A child process that is killed when the test ends.
struct ChildProcess(Child);

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of a CFSSL that can issue URI names: 1.4 or newer, from `setup/install test`.
/// Without it, the test prints that it is skipped, and gets `None`.
fn cfssl() -> Option<std::path::PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin/cfssl");
    let found = own.is_file().then_some(own);
    if found.is_none() {
        eprintln!("SKIPPED: no .tools/bin/cfssl; run setup/install test");
    }
    found
}

type Above<'a> = (&'a rcgen::Issuer<'static, rcgen::KeyPair>, &'a str);

/// Starts `cfssl serve` in `dir` with a new root, or an intermediate of `above`. Returns the
/// process and the URL on which it listens.
fn serve(
    binary: &Path,
    dir: &Path,
    profile: &str,
    above: Option<Above<'_>>,
) -> (ChildProcess, String) {
    authority(dir, "another ca", above);
    // The tests give the controller the same key, as the file `auth-key`.
    let config = format!(
        "{{\"signing\":{{\"default\":{profile}}},\"auth_keys\":{{\"k\":{{\"type\":\"standard\",\"key\":\"0123456789abcdef0123456789abcdef\"}}}}}}"
    );
    std::fs::write(dir.join("config.json"), config).unwrap();
    // The listener is closed again, since cfssl takes only a port number.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let port = free.port().to_string();
    let args = [
        "serve",
        "-address",
        "127.0.0.1",
        "-port",
        &port,
        "-ca",
        "cert-chain.pem",
        "-ca-key",
        "key.pem",
        "-config",
        "config.json",
    ];
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let child = Command::new(binary)
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let process = ChildProcess(child);
    let until = Instant::now() + wait_limit();
    while std::net::TcpStream::connect(free).is_err() {
        assert!(
            Instant::now() < until,
            "{}",
            std::fs::read_to_string(dir.join("log")).unwrap()
        );
        // Polls are cheap; the deadline bounds the wait.
        std::thread::sleep(Duration::from_millis(20));
    }
    (process, format!("http://{free}"))
}

#[tokio::test]
async fn an_external_cas_intermediate_is_part_of_the_chain() {
    // `cfssl` has printed that the test is skipped.
    let Some(binary) = cfssl() else { return };
    let outside = tempfile::tempdir().unwrap();
    let dir = |name: &str| outside.path().join(name);
    let (root, root_pem) = authority(&dir("root"), "root", None);
    let (_process, url) = serve(&binary, &dir("ca"), PROFILE, Some((&root, &root_pem)));
    let folder = dir("domains/alpha.example");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["root-cert.pem", "cert-chain.pem"] {
        std::fs::copy(dir("ca").join(name), folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("auth-key"), "0123456789abcdef0123456789abcdef").unwrap();
    let fixture = ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.trust.ca_dir = Some(dir("domains"));
        config.trust.external = vec![format!("alpha.example={url}").parse().unwrap()];
    })
    .await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    let chain = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    assert_eq!(chain.len(), 3, "leaf, intermediate, roots");
    verify(&chain, &bundle(&n1, "alpha/alpha.example").unwrap()).unwrap();
}

const PROFILE: &str =
    r#"{"expiry":"12h","usages":["digital signature","server auth","client auth"],"auth_key":"k"}"#;

#[tokio::test]
async fn an_external_ca_signs_and_its_answers_are_verified() {
    // `cfssl` has printed that the test is skipped.
    let Some(binary) = cfssl() else { return };
    let outside = tempfile::tempdir().unwrap();
    let dir = |name: &str| outside.path().join(name);
    let (process, url) = serve(&binary, &dir("ca"), PROFILE, None);
    let folder = dir("domains/alpha.example");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(dir("ca/root-cert.pem"), folder.join("root-cert.pem")).unwrap();
    std::fs::write(
        folder.join("auth-key"),
        "0123456789abcdef0123456789abcdef\n",
    )
    .unwrap();
    let fixture = ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.trust.ca_dir = Some(dir("domains"));
        config.trust.external = vec![
            format!("alpha.example={url}")
                .parse::<ExternalCa>()
                .unwrap(),
        ];
    })
    .await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    let mut n1 = fixture.subscribe("n1").await;
    n1.until("the bundle", |h| {
        h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
    })
    .await;
    let published = bundle(&n1, "alpha/alpha.example").unwrap();
    let chain = fixture
        .certificate("n1", Some(A), None)
        .await
        .unwrap()
        .cert_chain;
    verify(&chain, &published).unwrap();
    assert!(String::from_utf8_lossy(&der(&chain[0])).contains(A));
    let named = fixture
        .certificate_of("g1", GATEWAY, Some("alpha/shop/a"), None)
        .await
        .unwrap()
        .cert_chain;
    assert!(String::from_utf8_lossy(&der(&named[0])).contains("a.shop.svc.cluster.local"));
    let mut ca = CaCli::of(&fixture).await;
    let status = ca.status().await;
    assert_eq!(status.bundle, published.roots);
    assert_eq!(
        (status.source.as_str(), status.issued, status.error.as_str()),
        ("external", 2, "")
    );
    // A refusal, wrong settings and an absent CA each have a reason of their own.
    let fault = async |what: &str, reason: &str| {
        let before = refused(&fixture, reason).await;
        let got = fixture.certificate("n1", Some(A), None).await.unwrap_err();
        assert_eq!(got.code(), Code::Unavailable, "{what}: {got}");
        assert!(
            (refused(&fixture, reason).await - before - 1.0).abs() < f64::EPSILON,
            "{what}: {got}"
        );
    };
    // A key that is valid, but not the one with which cfssl authenticates requests.
    std::fs::write(folder.join("auth-key"), "00").unwrap();
    fault("another key", "external_refused").await;
    // These characters are no hexadecimal digits.
    std::fs::write(folder.join("auth-key"), "zz").unwrap();
    fault("no key", "external_settings").await;
    std::fs::write(
        folder.join("auth-key"),
        "0123456789abcdef0123456789abcdef\n",
    )
    .unwrap();
    ca.revoke(A, "").await.unwrap();
    assert!(
        fixture.certificate("n1", Some(A), None).await.is_err(),
        "a blocked identity is not requested"
    );
    ca.restore(A).await.unwrap();
    // The end of the process also closes its port.
    drop(process);
    fault("it is gone", "external_unreachable").await;
    assert!(
        fixture
            .metric("canal_controller_external_ca_requests_total{outcome=\"signed\"}")
            .await
            // The certificates of A and of the gateway.
            >= 2.0
    );
}

#[tokio::test]
async fn requests_that_an_external_ca_may_not_sign_have_a_reason() {
    // `cfssl` has printed that the test is skipped.
    let Some(binary) = cfssl() else { return };
    for (what, profile, reason) in [
        (
            "for servers only",
            PROFILE.replace(",\"client auth\"", ""),
            "external_usage",
        ),
        (
            "lives a year",
            // A year is longer than LIFETIME_SECONDS_MAX, one day.
            PROFILE.replace("12h", "8760h"),
            "external_lifetime",
        ),
        ("another root", PROFILE.to_string(), "external_chain"),
    ] {
        let outside = tempfile::tempdir().unwrap();
        let dir = |name: &str| outside.path().join(name);
        let (_process, url) = serve(&binary, &dir("ca"), &profile, None);
        let folder = dir("domains/alpha.example");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(dir("ca/root-cert.pem"), folder.join("root-cert.pem")).unwrap();
        // The controller trusts another root than the one under which cfssl signs.
        if reason == "external_chain" {
            authority(&dir("other"), "other", None);
            std::fs::copy(dir("other/root-cert.pem"), folder.join("root-cert.pem")).unwrap();
        }
        std::fs::write(folder.join("auth-key"), "0123456789abcdef0123456789abcdef").unwrap();
        let fixture = ControllerFixture::tuned(ControllerLimits::default(), |config| {
            config.trust.ca_dir = Some(dir("domains"));
            config.trust.external = vec![format!("alpha.example={url}").parse().unwrap()];
        })
        .await;
        fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
        let mut n1 = fixture.subscribe("n1").await;
        n1.until("the bundle", |h| {
            h.contains_key(&(ResourceKind::Bundle, "alpha/alpha.example".into()))
        })
        .await;
        let got = fixture.certificate("n1", Some(A), None).await.unwrap_err();
        assert!(refused(&fixture, reason).await >= 1.0, "{what}: {got}");
    }
}
