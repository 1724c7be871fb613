//! Requests over real channels: signatures, entitlements, and the names of refusals. Handshakes are
//! tested in `handshakes`.

use std::time::Duration;

use crate::fixture::*;
use canal_keyserver_engine::limits::{CERTIFICATE_REQUESTS_MAX, QuotaShares};
use canal_model::trust::KeyAlgorithm;
use canal_testing::{TestCa, identity};
use canal_wire::keyrpc::{HandshakeRole, KeyName, KeyRefusal, KeyRequest, SpkiHash};

fn identity_key(id: &str) -> KeyName {
    KeyName::Identity(identity(id))
}

fn sign(key: KeyName, scheme: u16, input: &[u8]) -> KeyRequest<'_> {
    KeyRequest::Sign {
        key,
        presented: None,
        scheme,
        deadline_ms: 0,
        input,
    }
}

/// Returns the hash of a certificate's key.
fn of_key(leaf: &[u8]) -> SpkiHash {
    canal_tls::spki_hash(
        x509_parser::parse_x509_certificate(leaf)
            .unwrap()
            .1
            .public_key()
            .raw,
    )
}

/// Requests a signature with the key of the certificate that a peer is presented.
fn sign_for<'a>(leaf: &[u8], key: &KeyName, scheme: u16, input: &'a [u8]) -> KeyRequest<'a> {
    KeyRequest::Sign {
        key: key.clone(),
        presented: Some(of_key(leaf)),
        scheme,
        deadline_ms: 0,
        input,
    }
}

fn verify(leaf: &[u8], scheme: u16, input: &[u8], signature: &[u8]) {
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_ASN1, RSA_PSS_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm,
    };
    let (_, x) = x509_parser::parse_x509_certificate(leaf).unwrap();
    let algorithm: &'static dyn VerificationAlgorithm = if scheme == ECDSA {
        &ECDSA_P256_SHA256_ASN1
    } else {
        &RSA_PSS_2048_8192_SHA256
    };
    UnparsedPublicKey::new(algorithm, &x.public_key().subject_public_key.data)
        .verify(input, signature)
        .unwrap();
}

/// Signature schemes of RFC 8446 §4.2.3: ecdsa_secp256r1_sha256, rsa_pss_rsae_sha256.
const ECDSA: u16 = 0x0403;
const RSA_PSS: u16 = 0x0804;

/// Checks that requesters get no key that the controller does not entitle them to.
async fn refuse_keys_of_others(node: &Channel, beta: &Channel, gateway: &Channel) {
    let input = verify_input();
    let own = "spiffe://components.canal/ns/canal-system/sa/keyserver.ks-1";
    let cases = [
        (
            "a stolen certificate of another tenant's node with the same name",
            beta,
            identity_key(WEB),
            KeyRefusal::NotEntitled,
        ),
        (
            "a pod's key by a gateway",
            gateway,
            identity_key(WEB),
            KeyRefusal::NotEntitled,
        ),
        (
            "a gateway's key by a node",
            node,
            identity_key(GATE),
            KeyRefusal::NotEntitled,
        ),
        (
            "an identity that runs nowhere",
            node,
            identity_key("spiffe://alpha.example/ns/x/sa/y"),
            KeyRefusal::NotEntitled,
        ),
        (
            "a tenant without an entitlement",
            node,
            identity_key("spiffe://gone.example/ns/x/sa/y"),
            KeyRefusal::UnknownTenant,
        ),
        (
            "the key server's own",
            node,
            identity_key(own),
            KeyRefusal::UnknownTenant,
        ),
        (
            "a service by a node",
            node,
            KeyName::Service("alpha/shop/web".parse().unwrap()),
            KeyRefusal::NotEntitled,
        ),
        (
            "a file, where there are none",
            gateway,
            KeyName::File("alpha/shop/web".parse().unwrap()),
            KeyRefusal::UnknownKey,
        ),
    ];
    for (what, channel, key, want) in cases {
        for request in [
            sign(key.clone(), ECDSA, &input),
            KeyRequest::Chain { key: key.clone() },
        ] {
            assert_eq!(channel.start_call(&request).refusal().await, want, "{what}");
        }
        if let KeyName::Identity(id) = &key {
            assert_eq!(
                channel
                    .begin(&id.to_string(), HandshakeRole::Server, &[], 0)
                    .refusal()
                    .await,
                want,
                "{what}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn entitlements_apply_to_open_channels_too() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let (node, beta, gateway) = (
        fixture.channel(NODE).await,
        fixture.channel(BETA_NODE).await,
        fixture.channel(GATEWAY).await,
    );
    let input = verify_input();
    refuse_keys_of_others(&node, &beta, &gateway).await;
    assert!(matches!(
        node.start_call(&sign(identity_key(WEB), ECDSA, &input))
            .next()
            .await,
        ServerReply::Signature(_)
    ));
    let mut begun = node.begin(WEB, HandshakeRole::Client, &[PEER], 0);
    assert!(matches!(begun.next().await, ServerReply::Send(_)));
    // The pod disappears, and its handshake ends.
    let mut resources = fixture.usual();
    resources.retain(|r| r.name() != "alpha/node/n1");
    resources.push(entitlement("alpha", "node/n1", &[API]));
    fixture.publish(&resources);
    assert_eq!(
        node.start_call(&sign(identity_key(WEB), ECDSA, &input))
            .refusal()
            .await,
        KeyRefusal::NotEntitled
    );
    // Any bytes of the peer make the key server check the entitlement again.
    node.send_request(
        begun.id,
        &KeyRequest::More {
            bytes: b"\x16\x03\x03\x00\x00",
        },
    );
    assert_eq!(begun.refusal().await, KeyRefusal::NotEntitled);
    assert!(matches!(
        node.start_call(&sign(identity_key(API), ECDSA, &input))
            .next()
            .await,
        ServerReply::Signature(_)
    ));
    // Its key is dropped, and a new one is generated when the pod comes back.
    let keys = fixture.value("canal_key_generated_keys");
    let before = fixture.authorities.requested_names.lock().unwrap().len();
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    assert_eq!(
        (
            fixture.value("canal_key_generated_keys"),
            fixture.authorities.requested_names.lock().unwrap().len()
        ),
        (keys + 1.0, before + 1)
    );
}

/// An attacker has a node's channel certificate. An operator revokes it: the channel ends at once,
/// with its requests in progress.
#[tokio::test(flavor = "multi_thread")]
async fn a_requester_whose_certificate_is_revoked_is_cut_off_at_once() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let infra = &fixture.authorities.infra;
    // 5 is the serial number by which the intermediate is revoked below.
    let stolen = infra.intermediate("what was stolen is below it", 5);
    let theirs = Channel::connect(fixture.address, &stolen, NODE)
        .await
        .unwrap();
    let others = fixture.channel(NODE).await;
    let input = verify_input();
    let may = async |channel: &Channel| {
        matches!(
            channel
                .start_call(&sign(identity_key(WEB), ECDSA, &input))
                .next()
                .await,
            ServerReply::Signature(_)
        )
    };
    assert!(may(&theirs).await && may(&others).await);
    let mut begun = theirs.begin(WEB, HandshakeRole::Client, &[PEER], 0);
    assert!(matches!(begun.next().await, ServerReply::Send(_)));
    let mut resources = fixture.usual();
    resources.push(infra.bundle(
        "canal-system",
        "components.canal",
        false,
        vec![infra.revocations(&[5])],
    ));
    fixture.publish(&resources);
    assert_eq!(begun.next().await, ServerReply::End);
    until("the channel's end", || {
        fixture.value("canal_key_channels_ended_total{reason=\"revoked\"}") == 1.0
    })
    .await;
    // In TLS 1.3 a client learns that it is refused when it reads.
    if let Ok(again) = Channel::connect(fixture.address, &stolen, NODE).await {
        assert!(!again.lives().await);
    }
    until("unauthenticated connections", || {
        fixture.value("canal_key_unauthenticated_connections_total{reason=\"handshake\"}") == 1.0
    })
    .await;
    assert!(
        may(&others).await && may(&fixture.channel(NODE).await).await,
        "the node itself has another certificate"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn signatures_and_chains_are_of_the_key_that_was_named() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    let input = verify_input();
    let service = KeyName::Service("alpha/shop/web".parse().unwrap());
    for (component, key, scheme, wrong) in [
        (NODE, identity_key(WEB), ECDSA, RSA_PSS),
        (RSA_NODE, identity_key(SLOW), RSA_PSS, ECDSA),
        (GATEWAY, service, ECDSA, RSA_PSS),
    ] {
        let channel = fixture.channel(component).await;
        let ServerReply::Certificates(chain) = channel
            .start_call(&KeyRequest::Chain { key: key.clone() })
            .next()
            .await
        else {
            panic!("{key}: no chain")
        };
        for request in [
            sign(key.clone(), scheme, &input),
            sign_for(&chain[0], &key, scheme, &input),
        ] {
            let ServerReply::Signature(signature) = channel.start_call(&request).next().await
            else {
                panic!("{key}: no signature")
            };
            verify(&chain[0], scheme, &input, &signature);
        }
        let another = KeyRequest::Sign {
            key: key.clone(),
            // The hash of no key of this name.
            presented: Some([7; 32]),
            scheme,
            deadline_ms: 0,
            input: &input,
        };
        assert_eq!(
            channel.start_call(&another).refusal().await,
            KeyRefusal::OtherKey
        );
        assert_eq!(
            channel
                .start_call(&sign(key.clone(), wrong, &input))
                .refusal()
                .await,
            KeyRefusal::Scheme
        );
        // TLS 1.3 prescribes what is signed, so everything else is refused (RFC 8446 section
        // 4.4.3).
        for bad in [&b"a certificate, say"[..], &input[..100], b""] {
            assert_eq!(
                channel
                    .start_call(&sign(key.clone(), scheme, bad))
                    .refusal()
                    .await,
                KeyRefusal::Input
            );
        }
    }
    let asked = fixture.authorities.requested_names.lock().unwrap().clone();
    assert!(
        asked
            .iter()
            .any(|a| a == &format!("{GATE} for alpha/shop/web")),
        "{asked:?}"
    );
}

/// Checks that a service of the same name in another namespace or of another tenant is another
/// service.
async fn refuse_other_services(gateway: &Channel) {
    let input = verify_input();
    for (service, want, text) in [
        (
            "alpha/other/web",
            KeyRefusal::UnknownKey,
            "other.web.crt and other.web.key",
        ),
        (
            "alpha/third/web",
            KeyRefusal::NotAllowed,
            "allow.yaml does not allow gateway/g1 to use the key of alpha/third/web",
        ),
        (
            "beta/shop/web",
            KeyRefusal::UnknownTenant,
            "tenant alpha's key server",
        ),
    ] {
        let key = KeyName::File(service.parse().unwrap());
        for request in [sign(key.clone(), ECDSA, &input), KeyRequest::Chain { key }] {
            match gateway.start_call(&request).next().await {
                ServerReply::Refused(name, said) => assert!(
                    name == want && said.contains(text),
                    "{service}: {name}: {said}"
                ),
                other => panic!("{service}: {other:?}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keyless_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let web = TestCa::new("web").issue_with(&identity(WEB), |_| {});
    std::fs::write(dir.path().join("shop.web.crt"), &web.chain).unwrap();
    std::fs::write(dir.path().join("shop.web.key"), &web.key).unwrap();
    let allow = |text: &str| std::fs::write(dir.path().join("allow.yaml"), text).unwrap();
    allow("allow: {shop/web: [gateway/g1]}");
    let fixture = KeyServerFixture::start(ServerSetup {
        tls_dir: Some(dir.path().into()),
        ..ServerSetup::default()
    })
    .await;
    fixture.publish(&fixture.usual());
    let (gateway, node, other) = (
        fixture.channel(GATEWAY).await,
        fixture.channel(NODE).await,
        fixture
            .channel("spiffe://components.canal/ns/canal-system/sa/gateway.g2")
            .await,
    );
    let key = KeyName::File("alpha/shop/web".parse().unwrap());
    let input = verify_input();
    let start_call = |channel: &Channel| channel.start_call(&sign(key.clone(), ECDSA, &input));
    assert!(matches!(
        start_call(&gateway).next().await,
        ServerReply::Signature(_)
    ));
    // Clients of TLS 1.2 are served as well, with this key and no other.
    // What TLS 1.2 signs: both randoms, the named curve X25519, and a public key of 32 bytes.
    let ecdhe = [&[1; 64][..], &[3, 0, 29, 32], &[9; 32]].concat();
    assert!(matches!(
        gateway
            .start_call(&sign(key.clone(), ECDSA, &ecdhe))
            .next()
            .await,
        ServerReply::Signature(_)
    ));
    assert_eq!(
        node.start_call(&sign(identity_key(WEB), ECDSA, &ecdhe))
            .refusal()
            .await,
        KeyRefusal::Input
    );
    assert_eq!(start_call(&node).refusal().await, KeyRefusal::NotEntitled);
    assert_eq!(start_call(&other).refusal().await, KeyRefusal::NotEntitled);
    // Repeated, because each change of the list has to apply to the very next request.
    for _ in 0..20 {
        allow("allow: {}");
        assert_eq!(start_call(&gateway).refusal().await, KeyRefusal::NotAllowed);
        assert_eq!(
            gateway
                .start_call(&KeyRequest::Chain { key: key.clone() })
                .refusal()
                .await,
            KeyRefusal::NotAllowed
        );
        allow("allow: {shop/web: [gateway/g1]}");
        assert!(matches!(
            start_call(&gateway).next().await,
            ServerReply::Signature(_)
        ));
    }
    // The allow list decides first, so a requester does not learn which services exist.
    assert_eq!(
        gateway
            .start_call(&sign(
                KeyName::File("alpha/shop/none".parse().unwrap()),
                ECDSA,
                &input
            ))
            .refusal()
            .await,
        KeyRefusal::NotAllowed
    );
    // A service of the same name in another namespace or of another tenant is another service.
    allow("allow: {shop/web: [gateway/g1], other/web: [gateway/g1]}");
    refuse_other_services(&gateway).await;
    assert!(matches!(
        start_call(&gateway).next().await,
        ServerReply::Signature(_)
    ));
    let mut resources = fixture.usual();
    resources.retain(|r| r.name() != "alpha/gateway/g1"); // The gateway is no longer entitled.
    fixture.publish(&resources);
    assert_eq!(
        start_call(&gateway).refusal().await,
        KeyRefusal::NotEntitled
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_not_there_yet_is_waited_for_and_its_lack_is_named() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture
        .authorities
        .refuses
        .store(true, std::sync::atomic::Ordering::Relaxed);
    fixture.publish(&fixture.usual());
    let (channel, input) = (fixture.channel(NODE).await, verify_input());
    let mut call = channel.start_call(&sign(identity_key(WEB), ECDSA, &input));
    match call.next().await {
        ServerReply::Refused(KeyRefusal::NoCertificate, text) => {
            assert!(text.contains("issues nothing"), "{text}")
        }
        other => panic!("{other:?}"),
    }
    assert!(fixture.value("canal_key_certificate_failures_total{reason=\"refused\"}") > 0.0);
    fixture
        .authorities
        .refuses
        .store(false, std::sync::atomic::Ordering::Relaxed);
    fixture
        .authorities
        .delay_ms
        .store(600, std::sync::atomic::Ordering::Relaxed);
    fixture.provisioned().await;
    // New names: a request for one is served before the others, and waits for it.
    let names: Vec<String> = (0..40)
        .map(|n| format!("spiffe://alpha.example/ns/crowd/sa/n{n}"))
        .collect();
    let mut resources = fixture.usual();
    resources.retain(|r| r.name() != "alpha/node/n1");
    resources.push(entitlement(
        "alpha",
        "node/n1",
        &names.iter().map(String::as_str).collect::<Vec<_>>(),
    ));
    let crowd = || {
        fixture
            .authorities
            .requested_names
            .lock()
            .unwrap()
            .iter()
            .filter(|name| names.contains(name))
            .cloned()
            .collect::<Vec<_>>()
    };
    fixture.authorities.holds.send_replace(true);
    fixture.publish(&resources);
    until("the first of the crowd", || {
        crowd().len() == CERTIFICATE_REQUESTS_MAX
    })
    .await;
    // Any name of the crowd will do whose certificate is not requested yet.
    let mut call = channel.begin(&names[39], HandshakeRole::Client, &[PEER], 0);
    until("the request", || {
        fixture.value("canal_key_requests_in_flight") == 1.0
    })
    .await;
    let begun = std::time::Instant::now();
    fixture.authorities.holds.send_replace(false);
    assert!(matches!(call.next().await, ServerReply::Send(_)));
    // Eight certificates are requested at once, and each takes 600 ms. Behind all 40 of the crowd,
    // the request would wait for 3 s.
    canal_timing::assert_time(
        "time until a new key is issued for a request before the crowd",
        begun.elapsed(),
        // Four rounds of 600 ms.
        Duration::from_millis(2400),
    );
    // It is taken first after the identities in progress. The keys of identities that are taken
    // together are generated in parallel, and the first finished one requests its certificate
    // first.
    let position = crowd().iter().position(|name| *name == names[39]);
    assert!(
        position.is_some_and(|position| position < 2 * CERTIFICATE_REQUESTS_MAX),
        "behind the crowd: {position:?}"
    );
    fixture.provisioned().await;
    assert!(
        fixture
            .authorities
            .at_once
            .1
            .load(std::sync::atomic::Ordering::Relaxed)
            <= CERTIFICATE_REQUESTS_MAX
    );
}

/// Checks that a peer that is still presented the first certificate gets signatures of its key.
async fn sign_with_both_keys(channel: &Channel, chains: &std::collections::BTreeSet<Vec<u8>>) {
    let (input, key) = (verify_input(), identity_key(WEB));
    for leaf in chains {
        match channel
            .start_call(&sign_for(leaf, &key, ECDSA, &input))
            .next()
            .await
        {
            ServerReply::Signature(signature) => verify(leaf, ECDSA, &input, &signature),
            other => panic!("{other:?}"),
        }
    }
}

/// Checks that the key is replaced once the tenant demands another algorithm.
async fn renew_with_the_new_algorithm(fixture: &KeyServerFixture, channel: &Channel) {
    let input = verify_input();
    *fixture.authorities.change.lock().unwrap() = None;
    let mut resources = fixture.usual();
    resources[0] = tenant("alpha", KeyAlgorithm::Rsa2048);
    fixture.publish(&resources);
    until("a key of the new kind", || {
        fixture.engine.dump()["keys"]
            .to_string()
            .contains("\"algorithm\":\"rsa\"")
    })
    .await;
    let rsa = || async {
        matches!(
            channel
                .start_call(&sign(identity_key(WEB), RSA_PSS, &input))
                .next()
                .await,
            ServerReply::Signature(_)
        )
    };
    let end = std::time::Instant::now() + canal_timing::deadline(SOON);
    while !rsa().await {
        assert!(std::time::Instant::now() < end, "no RSA key");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_at_half_life_and_keys_follow_the_policy() {
    // The lifetime is long, because the steps before the renewal at half of it may take long on a
    // busy machine.
    const LIFE: std::time::Duration = std::time::Duration::from_secs(20);
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    *fixture.authorities.change.lock().unwrap() = Some(Box::new(|p| {
        let now = std::time::SystemTime::now();
        (p.not_before, p.not_after) = (now.into(), (now + LIFE).into());
    }));
    let begun = std::time::Instant::now();
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let channel = fixture.channel(NODE).await;
    let mut chains = std::collections::BTreeSet::new();
    let chain = || async {
        match channel
            .start_call(&KeyRequest::Chain {
                key: identity_key(WEB),
            })
            .next()
            .await
        {
            ServerReply::Certificates(chain) => chain[0].clone(),
            other => panic!("{other:?}"),
        }
    };
    chains.insert(chain().await);
    let gateway = fixture.channel(GATEWAY).await;
    let service = KeyName::Service("alpha/shop/web".parse().unwrap());
    assert!(matches!(
        gateway
            .start_call(&KeyRequest::Chain { key: service })
            .next()
            .await,
        ServerReply::Certificates(_)
    ));
    let of_service = || {
        fixture
            .authorities
            .requested_names
            .lock()
            .unwrap()
            .iter()
            .filter(|a| a.ends_with("for alpha/shop/web"))
            .count()
    };
    let end = begun + canal_timing::deadline(SOON);
    while chains.len() < 2 && std::time::Instant::now() < end {
        // An interval of polling.
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        chains.insert(chain().await);
    }
    let took = begun.elapsed();
    // 0.4 and not 0.5, because renewals are spread around half of the life.
    assert!(
        chains.len() == 2 && took > LIFE.mul_f64(0.4),
        "a second certificate not before half of the first one's life: {took:?}"
    );
    canal_timing::assert_time(
        "time until a certificate is renewed at half of its life",
        took,
        // Renewals are due by 0.55 of the life. The rest is a margin in which the certificate is
        // still valid.
        LIFE.mul_f64(0.8),
    );
    sign_with_both_keys(&channel, &chains).await;
    // A service without further requests is dropped after another half life.
    until("no service", || {
        !fixture.engine.dump()["keys"]
            .to_string()
            .contains("alpha/shop/web")
    })
    .await;
    // At first use and at its only renewal.
    assert_eq!(of_service(), 2);
    renew_with_the_new_algorithm(&fixture, &channel).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_that_signs_no_more_has_its_certificates_replaced_at_once() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let issued = || {
        fixture
            .authorities
            .requested_names
            .lock()
            .unwrap()
            .iter()
            .filter(|a| *a == WEB)
            .count()
    };
    assert_eq!(issued(), 1);
    let mut resources = fixture.usual();
    resources.retain(|r| r.name() != "alpha/alpha.example");
    let next = TestCa::new("next");
    resources.push(std::sync::Arc::new(canal_model::program::Resource::Bundle(
        canal_model::trust::TrustBundle {
            tenant: "alpha".parse().unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            roots: vec![next.root_pem(), fixture.ca("alpha").root_pem()],
            revoked: vec![],
            blocked: vec![],
            federated: false,
        },
    )));
    fixture.publish(&resources);
    until("a new certificate", || issued() == 2).await;
    // The fake controller still signs with the old root, and is not requested again and again.
    fixture.publish(&resources);
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(issued(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_has_so_many_services() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let gateway = fixture.channel(GATEWAY).await;
    let start_call = |n: usize| {
        gateway.start_call(&KeyRequest::Chain {
            key: KeyName::Service(format!("alpha/shop/s{n}").parse().unwrap()),
        })
    };
    for first in (0..canal_keyserver_engine::limits::SERVICES_MAX).step_by(64) {
        // Some at a time, because each has to be issued within its timeout.
        let mut calls: Vec<_> = (first..first + 64).map(start_call).collect();
        for call in &mut calls {
            assert!(matches!(call.next().await, ServerReply::Certificates(_)));
        }
    }
    let asked = fixture
        .authorities
        .requested_names
        .lock()
        .unwrap()
        .iter()
        // The fixture records a request for a certificate of a service as `identity for service`.
        .filter(|name| name.contains(" for "))
        .cloned()
        .collect::<Vec<_>>();
    let services = asked
        .iter()
        .collect::<std::collections::BTreeSet<_>>()
        .len();
    assert_eq!(
        (services, asked.len()),
        (
            canal_keyserver_engine::limits::SERVICES_MAX,
            canal_keyserver_engine::limits::SERVICES_MAX
        ),
        "one certificate each"
    );
    match start_call(canal_keyserver_engine::limits::SERVICES_MAX)
        .next()
        .await
    {
        ServerReply::Refused(KeyRefusal::NoCertificate, text) => {
            assert!(text.contains("1024 services"), "{text}")
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        start_call(0).next().await,
        ServerReply::Certificates(_)
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_are_reached_by_one_tenant_alone() {
    let fixture = KeyServerFixture::start(ServerSetup {
        // A requester's quota is above the tenant's share, so that only the tenant's share is met.
        shares: QuotaShares {
            requester: 6,
            tenant: 4,
            ..QuotaShares::default()
        },
        ..ServerSetup::default()
    })
    .await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let (alpha, beta, gateway) = (
        fixture.channel(NODE).await,
        fixture.channel(BETA_NODE).await,
        fixture.channel(GATEWAY).await,
    );
    let mut calls = Vec::new();
    for _ in 0..4 {
        let mut call = alpha.begin(WEB, HandshakeRole::Client, &[PEER], 0);
        assert!(matches!(call.next().await, ServerReply::Send(_)));
        calls.push(call);
    }
    assert_eq!(fixture.value("canal_key_handshakes_in_flight"), 4.0);
    assert_eq!(
        alpha
            .begin(WEB, HandshakeRole::Client, &[PEER], 0)
            .refusal()
            .await,
        KeyRefusal::TenantBusy
    );
    assert_eq!(
        gateway
            .begin(GATE, HandshakeRole::Client, &[PEER], 0)
            .refusal()
            .await,
        KeyRefusal::TenantBusy
    );
    assert_eq!(
        alpha
            .start_call(&sign(identity_key(WEB), ECDSA, &verify_input()))
            .refusal()
            .await,
        KeyRefusal::TenantBusy
    );
    assert!(matches!(
        beta.begin(OTHER, HandshakeRole::Client, &[PEER], 0)
            .next()
            .await,
        ServerReply::Send(_)
    ));
    // One abandoned handshake gives its place in the tenant's share to a gateway.
    alpha.send_request(calls[0].id, &KeyRequest::Abandon);
    assert!(alpha.lives().await);
    assert!(matches!(
        gateway
            .begin(GATE, HandshakeRole::Client, &[PEER], 0)
            .next()
            .await,
        ServerReply::Send(_)
    ));
    // The end of a channel releases everything.
    // What remains are the handshakes of beta and of the gateway.
    drop((calls, alpha));
    until("given back", || {
        fixture.value("canal_key_requests_in_flight") == 2.0
    })
    .await;
}
