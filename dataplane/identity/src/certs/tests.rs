//! Tests that obtain, renew and store certificates, against a fake controller.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use canal_runtime::drain::{self, DrainTrigger};
use canal_testing::{FakeController, TestCa, identity};
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use tempfile::TempDir;
use tonic::Status;

use super::*;

const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";

fn at(secs: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(secs)
}

#[test]
fn renewal_is_due_by_the_wall_clock_and_failures_wait_by_the_other() {
    let secs = Duration::from_secs;
    // Times in seconds: now, the issuance, the half life, and what is left of a wait after a
    // failure.
    for (name, now, from, until, retry, want) in [
        ("none yet", 100, None, None, None, RenewalDue::Now),
        (
            "none yet, failed just now",
            100,
            None,
            None,
            Some(secs(5)),
            RenewalDue::In(secs(5)),
        ),
        (
            "none yet, failed long ago",
            100,
            None,
            None,
            Some(secs(0)),
            RenewalDue::Now,
        ),
        (
            "young",
            100,
            Some(90),
            Some(110),
            None,
            RenewalDue::In(secs(10)),
        ),
        (
            "young, far from half life",
            100,
            Some(90),
            Some(5000),
            None,
            RenewalDue::In(RENEWAL_CHECK_INTERVAL),
        ),
        ("half life", 110, Some(90), Some(110), None, RenewalDue::Now),
        (
            "slept past it",
            9000,
            Some(90),
            Some(110),
            None,
            RenewalDue::Now,
        ),
        (
            "the clock was set back to a time before its issuance",
            50,
            Some(90),
            Some(110),
            None,
            RenewalDue::Now,
        ),
        (
            // The wait of 60 s is cut to the interval, so that a set clock is noticed.
            "half life, failed just now",
            110,
            Some(90),
            Some(110),
            Some(secs(60)),
            RenewalDue::In(RENEWAL_CHECK_INTERVAL),
        ),
    ] {
        assert_eq!(
            decide(at(now), from.map(at), until.map(at), retry),
            want,
            "{name}"
        );
    }
    assert_eq!(half_life(at(100), at(300), 0.0), at(200));
    // The jitter is at most 5 % of the lifetime of 200 s.
    assert_eq!(half_life(at(100), at(300), 1.0), at(210));
    assert_eq!(
        half_life(at(300), at(100), 0.0),
        at(300),
        "a lifetime of zero is over at once"
    );
}

struct CertificatesFixture {
    folder: TempDir,
    registry: Registry,
    controller: FakeController,
    ca: Arc<TestCa>,
    requests: Arc<AtomicUsize>,
    _trigger: DrainTrigger,
    drain: DrainWatcher,
}

impl CertificatesFixture {
    /// Creates a fixture whose controller issues the requested certificates with a lifetime of
    /// `life` from now.
    async fn new(life: Duration) -> Self {
        let (trigger, drain) = drain::tree();
        let fixture = Self {
            folder: tempfile::tempdir().unwrap(),
            registry: Registry::new(),
            controller: FakeController::start().await,
            ca: Arc::new(TestCa::new("alpha")),
            requests: Arc::default(),
            _trigger: trigger,
            drain,
        };
        fixture.issue(life);
        fixture
    }

    fn issue(&self, life: Duration) {
        let (ca, asked) = (self.ca.clone(), self.requests.clone());
        self.controller.issue(move |r| {
            asked.fetch_add(1, Relaxed);
            Ok(answer(&ca, &r, life))
        });
    }

    fn source(&self) -> CertificateSource {
        let controller = self
            .controller
            .reached_through(self.folder.path(), self.controller.address);
        let config = CertificateConfig {
            controller,
            folder: self.certs(),
            validity: VALIDITY,
        };
        CertificateSource::start(config, &self.registry, self.drain.clone()).unwrap()
    }

    fn certs(&self) -> PathBuf {
        self.folder.path().join("data/certs")
    }

    fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next())
            .map_or(0, |v| v.parse().unwrap())
    }
}

fn answer(ca: &TestCa, r: &IstioCertificateRequest, life: Duration) -> IstioCertificateResponse {
    let leaf = ca.sign_request(&r.csr, |p| {
        let now = std::time::SystemTime::now();
        // X.509 times are whole seconds, so the start is one second early.
        (p.not_before, p.not_after) = ((now - Duration::from_secs(1)).into(), (now + life).into());
    });
    IstioCertificateResponse {
        cert_chain: vec![leaf, ca.root_pem()],
    }
}

/// Time after which a condition that a test waits for counts as never met: a renewal of a
/// superseded certificate is spread over this time.
const UNTIL_TIMEOUT: Duration = SUPERSEDED_SPREAD.saturating_add(Duration::from_secs(5));

async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(UNTIL_TIMEOUT),
            "never: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn an_identity_in_use_gets_one_certificate_and_keeps_it() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let seen: Arc<Mutex<Vec<IstioCertificateRequest>>> = Arc::default();
    let (ca, log) = (fixture.ca.clone(), seen.clone());
    fixture.controller.issue(move |r| {
        log.lock().unwrap().push(r.clone());
        Ok(answer(&ca, &r, Duration::from_secs(3600)))
    });
    let source = fixture.source();
    let (one, two) = (
        source.credential(&identity(ALICE)),
        source.credential(&identity(ALICE)),
    );
    let certificate = one.first().await.unwrap();
    assert_eq!(certificate.identity(), &identity(ALICE));
    assert!(Arc::ptr_eq(&certificate, &two.current().unwrap()));
    let asked = seen.lock().unwrap().clone();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].validity_duration, 24 * 3600);
    let fields = &asked[0].metadata.as_ref().unwrap().fields;
    assert_eq!(
        fields["ImpersonatedIdentity"],
        prost_types::Value::from(ALICE.to_string())
    );
    check_request(&asked[0].csr);
    let status = source.status();
    assert!(status.len() == 1 && status[0].error.is_empty() && status[0].not_after.is_some());
    let mode = |p: &std::path::Path| {
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(p).unwrap().permissions())
            & 0o777
    };
    let file = std::fs::read_dir(fixture.certs())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert_eq!((mode(&fixture.certs()), mode(&file)), (0o700, 0o600));
}

/// Checks that the CSR has a URI SAN only, an empty DN, and a P-256 key.
fn check_request(csr: &str) {
    use x509_parser::prelude::*;
    let (_, pem) = x509_parser::pem::parse_x509_pem(csr.as_bytes()).unwrap();
    let (_, csr) = X509CertificationRequest::from_der(&pem.contents).unwrap();
    let info = &csr.certification_request_info;
    assert_eq!(info.subject.iter().count(), 0);
    assert_eq!(
        info.subject_pki
            .algorithm
            .parameters
            .as_ref()
            .unwrap()
            .as_oid()
            .unwrap()
            .to_string(),
        "1.2.840.10045.3.1.7"
    );
    let sans: Vec<_> = csr
        .requested_extensions()
        .unwrap()
        .flat_map(|e| match e {
            ParsedExtension::SubjectAlternativeName(s) => s.general_names.clone(),
            _ => Vec::new(),
        })
        .collect();
    assert!(
        matches!(sans.as_slice(), [GeneralName::URI(u)] if *u == ALICE),
        "{sans:?}"
    );
}

#[tokio::test]
async fn certificates_are_renewed_at_half_life_without_a_gap() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3) * canal_timing::slack()).await;
    let source = fixture.source();
    let credential = source.credential(&identity(ALICE));
    let first = credential.first().await.unwrap();
    until("a second one", || {
        !Arc::ptr_eq(&first, &credential.current().unwrap())
    })
    .await;
    assert!(
        first.valid_at(SystemTime::now()),
        "replaced while the old one is still good"
    );
    assert!(fixture.requests.load(Relaxed) >= 2);
    drop(credential);
    let asked = fixture.requests.load(Relaxed);
    until("it is removed", || source.status().is_empty()).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(
        fixture.requests.load(Relaxed) <= asked + 1,
        "no component uses it any more"
    );
}

#[tokio::test]
async fn a_failing_renewal_keeps_the_old_one_and_is_counted_and_heals() {
    let fixture = CertificatesFixture::new(Duration::from_secs(4) * canal_timing::slack()).await;
    let source = fixture.source();
    let credential = source.credential(&identity(ALICE));
    let first = credential.first().await.unwrap();
    fixture.controller.issue(|_| {
        Err(Status::permission_denied(
            "no pod with that identity runs on your node",
        ))
    });
    until("a failure", || {
        fixture.metric("canal_certificate_failures_total{reason=\"refused\"}") >= 1
    })
    .await;
    assert!(Arc::ptr_eq(&first, &credential.current().unwrap()));
    assert!(source.status()[0].error.contains("runs on your node"));
    fixture.issue(Duration::from_secs(3600));
    until("it heals", || {
        !Arc::ptr_eq(&first, &credential.current().unwrap())
    })
    .await;
    assert!(source.status()[0].error.is_empty());
    assert_eq!(fixture.metric("canal_certificates_missing"), 0);
}

#[tokio::test]
async fn certificates_that_differ_from_the_request_are_refused() {
    // Certificates live longer than the test, so that none is renewed.
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    let (ca, other) = (fixture.ca.clone(), TestCa::new("other"));
    let wrong = ca.issue_with(&identity(BOB), |_| {});
    type Answer = Box<dyn Fn(&TestCa, &IstioCertificateRequest) -> IstioCertificateResponse + Send>;
    let list = |chain: Vec<String>| IstioCertificateResponse { cert_chain: chain };
    let hour = Duration::from_secs(3600);
    let (root, other_root) = (ca.root_pem(), other.root_pem());
    let cases: Vec<(&str, Answer, &str)> = vec![
        ("nothing", Box::new(move |_, _| list(vec![])), "bad_answer"),
        (
            "no bundle",
            Box::new(move |ca, r| list(vec![answer(ca, r, hour).cert_chain.remove(0)])),
            "bad_answer",
        ),
        (
            "not PEM",
            Box::new(move |_, _| list(vec!["x".into(), "y".into()])),
            "bad_answer",
        ),
        (
            "another's key",
            Box::new(move |_, _| list(vec![wrong.chain.clone(), root.clone()])),
            "bad_answer",
        ),
        (
            "another root",
            Box::new(move |ca, r| {
                list(vec![
                    answer(ca, r, hour).cert_chain.remove(0),
                    other_root.clone(),
                ])
            }),
            "bad_answer",
        ),
        (
            "another identity",
            Box::new(|ca, r| {
                signed(ca, r, |p| {
                    p.subject_alt_names = vec![rcgen::SanType::URI(BOB.try_into().unwrap())]
                })
            }),
            "wrong_identity",
        ),
        (
            "no identity",
            Box::new(|ca, r| signed(ca, r, |p| p.subject_alt_names.clear())),
            "wrong_identity",
        ),
        (
            "from the future",
            Box::new(|ca, r| signed(ca, r, |p| p.not_before = rcgen::date_time_ymd(2119, 1, 1))),
            "clock",
        ),
    ];
    for (name, play, reason) in cases {
        let ca = fixture.ca.clone();
        fixture.controller.issue(move |r| Ok(play(&ca, &r)));
        let before = fixture.metric(&format!(
            "canal_certificate_failures_total{{reason=\"{reason}\"}}"
        ));
        let credential = source.credential(&identity(ALICE));
        until(name, || {
            fixture.metric(&format!(
                "canal_certificate_failures_total{{reason=\"{reason}\"}}"
            )) > before
        })
        .await;
        assert!(credential.current().is_none(), "{name}");
        assert_eq!(fixture.metric("canal_certificates_missing"), 1);
        drop(credential);
        // The source removes unused identities when it looks for due renewals, which it does when
        // woken.
        source.inner.wake.notify_one();
        until("it is removed", || source.status().is_empty()).await;
    }
    // A certificate that was refused is not stored either.
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 0);
}

fn signed(
    ca: &TestCa,
    r: &IstioCertificateRequest,
    change: impl FnOnce(&mut rcgen::CertificateParams),
) -> IstioCertificateResponse {
    IstioCertificateResponse {
        cert_chain: vec![ca.sign_request(&r.csr, change), ca.root_pem()],
    }
}

#[tokio::test]
async fn a_restart_uses_stored_certificates_unless_expired_or_foreign() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    let kept = source.credential(&identity(ALICE)).first().await.unwrap();
    let short = fixture
        .controller
        .reached_through(fixture.folder.path(), fixture.controller.address);
    drop((source, short));
    fixture
        .controller
        .issue(|_| Err(Status::unavailable("gone")));

    let source = fixture.source();
    let again = source
        .credential(&identity(ALICE))
        .current()
        .expect("at once");
    assert_eq!(again.chain(), kept.chain());

    // The test stores the file of one identity under the name of another, and a torn file.
    let file = |id: &str| fixture.certs().join(format!("{}.json", hex(id)));
    std::fs::copy(file(ALICE), file(BOB)).unwrap();
    assert!(source.credential(&identity(BOB)).current().is_none());
    std::fs::write(file(BOB), "{\"identity\":").unwrap();
    let carol = "spiffe://alpha.example/ns/shop/sa/carol";
    std::fs::write(file(carol), "{\"identity\":").unwrap();
    assert!(source.credential(&identity(carol)).current().is_none());

    // An expired certificate is not used, and is removed at the next start.
    let old = fixture.ca.issue_with(&identity(BOB), |p| {
        p.not_after = rcgen::date_time_ymd(2021, 1, 1)
    });
    let text = serde_json::json!({"identity": BOB, "key": old.key, "chain": old.chain, "bundle": fixture.ca.root_pem()}).to_string();
    std::fs::write(file(BOB), text).unwrap();
    drop(source);
    let source = fixture.source();
    assert!(!file(BOB).exists() && !file(carol).exists() && file(ALICE).exists());
    assert!(source.credential(&identity(ALICE)).current().is_some());
}

fn hex(id: &str) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(id)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

#[tokio::test]
async fn an_unwritable_disk_affects_restarts_and_not_the_certificate() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    std::fs::remove_dir(fixture.certs()).unwrap();
    std::fs::write(fixture.certs(), "in the way").unwrap();
    assert!(source.credential(&identity(ALICE)).first().await.is_some());
    assert_eq!(fixture.metric("canal_certificate_write_failures_total"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_identities_are_requested_a_few_at_a_time() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    let all: Vec<_> = (0..50)
        .map(|i| {
            source.credential(&identity(&format!(
                "spiffe://alpha.example/ns/shop/sa/s{i}"
            )))
        })
        .collect();
    for c in &all {
        assert!(c.first().await.is_some());
    }
    let most = fixture.controller.most_requests_at_once();
    assert!((2..=REQUESTS_MAX).contains(&most), "{most}");
    assert_eq!(fixture.metric("canal_certificates_issued_total"), 50);
}

#[tokio::test]
async fn services_and_algorithms_have_certificates_of_their_own() {
    // Certificates live longer than the test, so that none is renewed.
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let seen: Arc<Mutex<Vec<IstioCertificateRequest>>> = Arc::default();
    let (ca, log) = (fixture.ca.clone(), seen.clone());
    fixture.controller.issue(move |r| {
        log.lock().unwrap().push(r.clone());
        Ok(answer(&ca, &r, Duration::from_secs(3600)))
    });
    let source = fixture.source();
    let service: ServiceKey = "alpha/shop/cart".parse().unwrap();
    let plain = source.credential(&identity(ALICE));
    let served = source.service_credential(&identity(ALICE), &service, KeyAlgorithm::EcdsaP256);
    let rsa = source.credential_with_algorithm(&identity(ALICE), KeyAlgorithm::Rsa2048);
    for c in [&plain, &served, &rsa] {
        assert_eq!(c.first().await.unwrap().identity(), &identity(ALICE));
    }
    let asked = seen.lock().unwrap().clone();
    assert_eq!(asked.len(), 3);
    let named = |r: &IstioCertificateRequest, field: &str| match r
        .metadata
        .as_ref()?
        .fields
        .get(field)?
        .kind
        .as_ref()?
    {
        prost_types::value::Kind::StringValue(s) => Some(s.clone()),
        _ => None,
    };
    assert!(
        asked
            .iter()
            .all(|r| named(r, "ImpersonatedIdentity").as_deref() == Some(ALICE))
    );
    assert_eq!(
        asked
            .iter()
            .filter_map(|r| named(r, "Service"))
            .collect::<Vec<_>>(),
        ["alpha/shop/cart"]
    );
    let key = |c: &Credential| {
        let der = c.current().unwrap().chain()[0].clone();
        let (_, x) =
            <x509_parser::prelude::X509Certificate as x509_parser::prelude::FromDer<_>>::from_der(
                &der,
            )
            .unwrap();
        x.public_key().parsed().unwrap().key_size()
    };
    // Bits of a P-256 key and of the RSA key.
    assert_eq!((key(&plain), key(&rsa)), (256, 2048));
    // Each has its own file, though all are of one identity.
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 3);
    // The certificates of the service and of the RSA key survive a restart.
    drop(source);
    fixture
        .controller
        .issue(|_| Err(Status::unavailable("gone")));
    let source = fixture.source();
    assert!(
        source
            .service_credential(&identity(ALICE), &service, KeyAlgorithm::EcdsaP256)
            .current()
            .is_some()
    );
    assert!(
        source
            .credential_with_algorithm(&identity(ALICE), KeyAlgorithm::Rsa2048)
            .current()
            .is_some()
    );
}

// A second worker, because the fake controller below blocks one with `thread::sleep`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_and_component_keys_are_on_no_disk() {
    // Certificates live longer than the test, so that none is renewed.
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    assert!(
        source
            .credential_in_memory(&identity(BOB))
            .first()
            .await
            .is_some()
    );
    // Without a file: the key is kept in memory only.
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 0);
    let alice = source.credential(&identity(ALICE));
    assert!(alice.first().await.is_some());
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 1);
    source.forget(&identity(ALICE));
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 0);
    // When a tenant's keys move to key servers, the certificates of all its identities are removed,
    // and no others.
    let carol = "spiffe://beta.example/ns/shop/sa/carol";
    let held = [ALICE, BOB, carol].map(|id| source.credential(&identity(id)));
    for c in &held {
        assert!(c.first().await.is_some());
    }
    until("they are stored", || {
        std::fs::read_dir(fixture.certs()).unwrap().count() == 3
    })
    .await;
    source.forget_domain(&identity(ALICE).trust_domain);
    // Carol is of another trust domain.
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 1);
    source.forget(&identity(carol));
    // A certificate that arrives after its identity was forgotten is not stored either.
    let (asked, ca) = (fixture.requests.load(Relaxed), fixture.ca.clone());
    let seen = fixture.requests.clone();
    fixture.controller.issue(move |r| {
        seen.fetch_add(1, Relaxed);
        // Long enough that `forget` below comes before the answer. It blocks one of the two
        // threads.
        std::thread::sleep(Duration::from_millis(300));
        Ok(answer(&ca, &r, Duration::from_secs(3600)))
    });
    let _alice = source.credential(&identity(ALICE));
    until("it is requested", || fixture.requests.load(Relaxed) > asked).await;
    source.forget(&identity(ALICE));
    // The controller answers after 300 ms.
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(std::fs::read_dir(fixture.certs()).unwrap().count(), 0);
}

/// An identity that is wanted again gets a certificate of its own request, and none of a request
/// from before it was forgotten.
#[tokio::test]
async fn an_answer_from_before_a_forgotten_identity_is_not_used_afterwards() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    let (ca, begun, answered) = (
        fixture.ca.clone(),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
    );
    let (seen, done) = (begun.clone(), answered.clone());
    fixture.controller.issue(move |r| {
        seen.fetch_add(1, Relaxed);
        // Long enough for the identity to be released and requested again.
        std::thread::sleep(Duration::from_millis(300));
        done.fetch_add(1, Relaxed);
        Ok(answer(&ca, &r, Duration::from_secs(3600)))
    });
    let before = source.credential(&identity(ALICE));
    until("it is requested", || begun.load(Relaxed) == 1).await;
    source.forget(&identity(ALICE));
    let again = source.credential(&identity(ALICE));
    again.first().await.unwrap();
    assert_eq!(
        answered.load(Relaxed),
        2,
        "the certificate is of the first request"
    );
    drop(before);
}

/// A key that is forgotten at any moment of its request is not on disk afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn forgotten_identities_are_not_stored() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    for round in 0..200 {
        let asked = fixture.requests.load(Relaxed);
        let held = source.credential(&identity(ALICE));
        let request = async {
            while fixture.requests.load(Relaxed) == asked {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(canal_timing::deadline(UNTIL_TIMEOUT), request)
            .await
            .expect("it is requested");
        // The response takes a millisecond or two to arrive, and as long to be written.
        std::thread::sleep(Duration::from_micros(25 * round));
        source.forget(&identity(ALICE));
        let kept = || std::fs::read_dir(fixture.certs()).unwrap().count();
        assert_eq!(kept(), 0, "round {round}");
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(kept(), 0, "round {round}, later");
        drop(held);
    }
}

#[tokio::test]
async fn a_certificate_of_a_root_that_signs_no_more_is_renewed_soon_and_once() {
    let fixture = CertificatesFixture::new(Duration::from_secs(3600)).await;
    let source = fixture.source();
    let store = TrustStore::new(&fixture.registry);
    source.follow(store.clone());
    let credential = source.credential(&identity(ALICE));
    let old = credential.first().await.unwrap();
    store
        .replace([fixture.ca.bundle("alpha", "alpha.example", false, vec![])])
        .unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(fixture.requests.load(Relaxed), 1);
    // Another root signs from here on.
    let next = Arc::new(TestCa::new("next"));
    let (ca, asked) = (next.clone(), fixture.requests.clone());
    fixture.controller.issue(move |r| {
        asked.fetch_add(1, Relaxed);
        Ok(answer(&ca, &r, Duration::from_secs(3600)))
    });
    store
        .replace([next.bundle("alpha", "alpha.example", false, vec![])])
        .unwrap();
    until("it is renewed", || {
        credential.current().unwrap().chain() != old.chain()
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(fixture.requests.load(Relaxed), 2);
}
