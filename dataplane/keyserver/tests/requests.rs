//! Requests over real channels: handshakes and signatures, who may have them, and what is refused by which name.

use crate::rig::*;
use canal_keys::limits::Shares;
use canal_kit::testing::{TestCa, identity};
use canal_model::trust::KeyAlgorithm;
use canal_wire::keyrpc::{KeyName, Refusal, Request, Role, SpkiHash};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, date_time_ymd};

fn identity_key(id: &str) -> KeyName {
    KeyName::Identity(identity(id))
}

fn sign(key: KeyName, scheme: u16, input: &[u8]) -> Request<'_> {
    Request::Sign { key, shown: None, scheme, deadline_ms: 0, input }
}

/// The hash of a certificate's key.
fn of_key(leaf: &[u8]) -> SpkiHash {
    canal_kit::keys::spki_hash(x509_parser::parse_x509_certificate(leaf).unwrap().1.public_key().raw)
}

/// With the key of the certificate that a peer is shown.
fn sign_for<'a>(leaf: &[u8], key: &KeyName, scheme: u16, input: &'a [u8]) -> Request<'a> {
    Request::Sign { key: key.clone(), shown: Some(of_key(leaf)), scheme, deadline_ms: 0, input }
}

fn verify(leaf: &[u8], scheme: u16, input: &[u8], signature: &[u8]) {
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, RSA_PSS_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm};
    let (_, x) = x509_parser::parse_x509_certificate(leaf).unwrap();
    let algorithm: &'static dyn VerificationAlgorithm = if scheme == ECDSA { &ECDSA_P256_SHA256_ASN1 } else { &RSA_PSS_2048_8192_SHA256 };
    UnparsedPublicKey::new(algorithm, &x.public_key().subject_public_key.data).verify(input, signature).unwrap();
}

const ECDSA: u16 = 0x0403;
const RSA_PSS: u16 = 0x0804;

#[tokio::test(flavor = "multi_thread")]
async fn handshakes_of_both_roles_and_both_algorithms() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    for (component, own, tenant, domain) in [(NODE, WEB, "alpha", "alpha.example"), (RSA_NODE, SLOW, "rsa", "rsa.example")] {
        let channel = rig.channel(component).await;
        let (ca, id) = (rig.ca(tenant), PEER.replace("alpha.example", domain));
        let peers = Peers::new(ca, &ca.issue_with(&identity(&id), |_| {}), domain, &[own]);
        for _ in 0..3 {
            let mut client = peers.client();
            let Said::Done { alpn, suite, peer, secrets, .. } = channel.shake(own, &mut client).await else { panic!("not done") };
            assert!(!client.is_handshaking());
            assert_eq!((alpn.as_slice(), suite, peer.as_str(), secrets.0.len()), (&b"h2"[..], 0x1302, id.as_str(), 92));
        }
        if tenant == "alpha" {
            let mut server = peers.server();
            assert!(matches!(channel.shake(own, &mut server).await, Said::Done { .. }));
            assert!(!server.is_handshaking());
        }
    }
    let line = "canal_key_operations_total{kind=\"handshake_server\",algorithm=\"rsa\",tenant=\"rsa\"}";
    assert_eq!(rig.value(line), 3.0);
    assert_eq!(rig.value("canal_key_operations_total{kind=\"handshake_client\",algorithm=\"ecdsa\",tenant=\"alpha\"}"), 1.0);
    until("nothing is under way", || rig.value("canal_key_handshakes_under_way") == 0.0 && rig.value("canal_key_under_way") == 0.0).await;
    // One at a time: nothing ever waited for a batch.
    for algorithm in ["ecdsa", "rsa"] {
        assert_eq!(rig.value(&format!("canal_key_batch_waited_total{{algorithm=\"{algorithm}\"}}")), 0.0);
        assert_eq!(rig.value(&format!("canal_key_batch_wait_seconds_sum{{algorithm=\"{algorithm}\"}}")), 0.0);
    }
}

/// A peer may speak under its application keys as soon as it has said Finished, so bytes of it arrive while the key server is at the handshake's
/// end, and right after it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_peer_says_behind_its_handshake_does_not_end_it() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let channel = rig.channel(NODE).await;
    let ca = rig.ca("alpha");
    let peers = Peers::new(ca, &ca.issue_with(&identity(PEER), |_| {}), "alpha.example", &[WEB]);
    for _ in 0..1000 {
        let mut client = peers.client();
        let mut call = channel.begin(WEB, Role::Server, &[], 0);
        channel.say(call.id, &Request::More { bytes: &flight(&mut client) });
        let bytes = match call.next().await {
            Said::Send(bytes) => bytes,
            other => panic!("{other:?}, no flight"),
        };
        hear(&mut client, &bytes);
        channel.say(call.id, &Request::More { bytes: &flight(&mut client) });
        let said = loop {
            channel.say(call.id, &Request::More { bytes: &[23, 3, 3] });
            match call.ready() {
                Some(said) => break said,
                // Often, and not so often that it floods.
                None => std::thread::sleep(std::time::Duration::from_micros(30)),
            }
        };
        assert!(matches!(said, Said::Done { .. }), "{said:?}, before its end");
        channel.forget(&call);
    }
    let late = || rig.value("canal_key_refusals_total{name=\"unknown_request\"");
    until("what came behind the end of a handshake is refused", || late() >= 30.0).await;
}

/// A requester that has given whole records waits for an answer before it gives more, and one that has given a part does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_flight_in_pieces_is_asked_for_record_by_record() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let channel = rig.channel(NODE).await;
    let ca = rig.ca("alpha");
    let peers = Peers::new(ca, &ca.issue_with(&identity(PEER), |_| {}), "alpha.example", &[WEB]);
    let mut client = peers.client();
    let mut call = channel.begin(WEB, Role::Server, &[], 0);
    channel.say(call.id, &Request::More { bytes: &flight(&mut client) });
    let Said::Send(bytes) = call.next().await else { panic!("no flight") };
    hear(&mut client, &bytes);
    let flight = flight(&mut client);
    // A change of cipher spec comes first: a record that says nothing.
    let spec = 6;
    assert_eq!(&flight[..5], &[20, 3, 3, 0, 1]);
    channel.say(call.id, &Request::More { bytes: &flight[..spec] });
    assert_eq!(call.next().await, Said::Send(Vec::new()), "more is wanted");
    let (part, rest) = flight[spec..].split_at(100);
    channel.say(call.id, &Request::More { bytes: part });
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(call.ready(), None, "a part of a record is not answered");
    channel.say(call.id, &Request::More { bytes: rest });
    assert!(matches!(call.next().await, Said::Done { .. }));
}

type Change = fn(&mut CertificateParams);

#[tokio::test(flavor = "multi_thread")]
async fn peers_are_refused_by_name_and_hear_an_alert() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    let channel = rig.channel(NODE).await;
    let (ca, stranger) = (rig.ca("alpha"), TestCa::new("stranger"));
    let beta = "spiffe://beta.example/ns/shop/sa/peer";
    let cases: [(&str, &TestCa, &str, Change, bool, Refusal); 7] = [
        ("expired", ca, PEER, |p| p.not_after = date_time_ymd(2021, 1, 1), true, Refusal::PeerExpired),
        ("not valid yet", ca, PEER, |p| p.not_before = date_time_ymd(2119, 1, 1), true, Refusal::PeerNotYetValid),
        ("wrong usage", ca, PEER, |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth], true, Refusal::PeerPurpose),
        ("another tenant", rig.ca("beta"), beta, |_| {}, true, Refusal::PeerTrustDomain),
        ("another root", &stranger, PEER, |_| {}, true, Refusal::PeerUnknownIssuer),
        ("not expected", ca, API, |_| {}, false, Refusal::PeerIdentity),
        ("revoked", ca, PEER, |p| p.serial_number = Some(77.into()), true, Refusal::PeerRevoked),
    ];
    let mut told = rig.usual();
    told.retain(|r| !r.name().starts_with("alpha/alpha.example"));
    told.push(ca.bundle("alpha", "alpha.example", false, vec![ca.revocations(&[77])]));
    rig.tell(&told);
    for (what, issuer, id, change, is_client, want) in cases {
        let issued = issuer.issue_with(&identity(id), change);
        let peers = Peers::new(ca, &issued, "alpha.example", &[WEB]);
        let mut peer = if is_client { peers.client() } else { peers.server() };
        let said = channel.shake(WEB, &mut peer).await;
        assert!(matches!(&said, Said::Refused(name, text) if *name == want && !text.is_empty()), "{what}: {said:?}");
        assert!(peer.process_new_packets().is_err(), "{what}: the peer heard an alert");
        let line = format!("canal_key_refusals_total{{name=\"{want}\",tenant=\"alpha\"}}");
        assert_eq!(rig.value(&line), 1.0, "{line}");
    }
    // A federated tenant's members may come; what they may do is not decided here.
    told.push(rig.ca("beta").bundle("alpha", "beta.example", true, vec![]));
    rig.tell(&told);
    let peers = Peers::new(ca, &rig.ca("beta").issue_with(&identity(beta), |_| {}), "alpha.example", &[WEB]);
    let said = channel.shake(WEB, &mut peers.client()).await;
    assert!(matches!(&said, Said::Done { peer, .. } if peer == beta), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_entitled_is_refused_on_open_channels_too() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let (node, beta, gateway) = (rig.channel(NODE).await, rig.channel(BETA_NODE).await, rig.channel(GATEWAY).await);
    let input = verify_input();
    let own = "spiffe://components.canal/ns/canal-system/sa/keyserver.ks-1";
    let cases = [
        ("a stolen certificate of another tenant's node with the same name", &beta, identity_key(WEB), Refusal::NotEntitled),
        ("a pod's key by a gateway", &gateway, identity_key(WEB), Refusal::NotEntitled),
        ("a gateway's key by a node", &node, identity_key(GATE), Refusal::NotEntitled),
        ("an identity that runs nowhere", &node, identity_key("spiffe://alpha.example/ns/x/sa/y"), Refusal::NotEntitled),
        ("a tenant that is not told", &node, identity_key("spiffe://gone.example/ns/x/sa/y"), Refusal::UnknownTenant),
        ("the key server's own", &node, identity_key(own), Refusal::UnknownTenant),
        ("a service by a node", &node, KeyName::Service("alpha/shop/web".parse().unwrap()), Refusal::NotEntitled),
        ("a file, where there are none", &gateway, KeyName::File("alpha/shop/web".parse().unwrap()), Refusal::UnknownKey),
    ];
    for (what, channel, key, want) in cases {
        for request in [sign(key.clone(), ECDSA, &input), Request::Chain { key: key.clone() }] {
            assert_eq!(channel.ask(&request).refusal().await, want, "{what}");
        }
        if let KeyName::Identity(id) = &key {
            assert_eq!(channel.begin(&id.to_string(), Role::Server, &[], 0).refusal().await, want, "{what}");
        }
    }
    assert!(matches!(node.ask(&sign(identity_key(WEB), ECDSA, &input)).next().await, Said::Signature(_)));
    let mut begun = node.begin(WEB, Role::Client, &[PEER], 0);
    assert!(matches!(begun.next().await, Said::Send(_)));
    // The pod leaves; its handshake too.
    let mut told = rig.usual();
    told.retain(|r| r.name() != "alpha/node/n1");
    told.push(entitlement("alpha", "node/n1", &[API]));
    rig.tell(&told);
    assert_eq!(node.ask(&sign(identity_key(WEB), ECDSA, &input)).refusal().await, Refusal::NotEntitled);
    node.say(begun.id, &Request::More { bytes: b"\x16\x03\x03\x00\x00" });
    assert_eq!(begun.refusal().await, Refusal::NotEntitled);
    assert!(matches!(node.ask(&sign(identity_key(API), ECDSA, &input)).next().await, Said::Signature(_)));
    // Its key is forgotten, and a new one is made when it comes back.
    let held = rig.value("canal_key_made_held");
    let before = rig.authorities.asked.lock().unwrap().len();
    rig.tell(&rig.usual());
    rig.provisioned().await;
    assert_eq!((rig.value("canal_key_made_held"), rig.authorities.asked.lock().unwrap().len()), (held + 1.0, before + 1));
}

/// A thief has a node's channel certificate: an operator revokes it, and it ends at once, with what is under way.
#[tokio::test(flavor = "multi_thread")]
async fn a_requester_whose_certificate_is_revoked_is_cut_off_at_once() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let infra = &rig.authorities.infra;
    let stolen = infra.intermediate("what was stolen is below it", 5);
    let theirs = Channel::connect(rig.address, &stolen, NODE).await.unwrap();
    let others = rig.channel(NODE).await;
    let input = verify_input();
    let may = async |channel: &Channel| matches!(channel.ask(&sign(identity_key(WEB), ECDSA, &input)).next().await, Said::Signature(_));
    assert!(may(&theirs).await && may(&others).await);
    let mut begun = theirs.begin(WEB, Role::Client, &[PEER], 0);
    assert!(matches!(begun.next().await, Said::Send(_)));
    let mut told = rig.usual();
    told.push(infra.bundle("canal-system", "components.canal", false, vec![infra.revocations(&[5])]));
    rig.tell(&told);
    assert_eq!(begun.next().await, Said::End);
    until("the channel's end", || rig.value("canal_key_channels_ended_total{reason=\"revoked\"}") == 1.0).await;
    // With TLS 1.3 a client learns that it is refused when it reads.
    if let Ok(again) = Channel::connect(rig.address, &stolen, NODE).await {
        assert!(!again.lives().await);
    }
    until("strangers", || rig.value("canal_key_strangers_total{reason=\"handshake\"}") == 1.0).await;
    assert!(may(&others).await && may(&rig.channel(NODE).await).await, "the node itself has another certificate");
}

#[tokio::test(flavor = "multi_thread")]
async fn signatures_and_chains_are_of_the_key_that_was_named() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    let input = verify_input();
    let service = KeyName::Service("alpha/shop/web".parse().unwrap());
    for (component, key, scheme, wrong) in
        [(NODE, identity_key(WEB), ECDSA, RSA_PSS), (RSA_NODE, identity_key(SLOW), RSA_PSS, ECDSA), (GATEWAY, service, ECDSA, RSA_PSS)]
    {
        let channel = rig.channel(component).await;
        let Said::Certificates(chain) = channel.ask(&Request::Chain { key: key.clone() }).next().await else { panic!("{key}: no chain") };
        for request in [sign(key.clone(), scheme, &input), sign_for(&chain[0], &key, scheme, &input)] {
            let Said::Signature(signature) = channel.ask(&request).next().await else { panic!("{key}: no signature") };
            verify(&chain[0], scheme, &input, &signature);
        }
        let another = Request::Sign { key: key.clone(), shown: Some([7; 32]), scheme, deadline_ms: 0, input: &input };
        assert_eq!(channel.ask(&another).refusal().await, Refusal::OtherKey);
        assert_eq!(channel.ask(&sign(key.clone(), wrong, &input)).refusal().await, Refusal::Scheme);
        for bad in [&b"a certificate, say"[..], &input[..100], b""] {
            assert_eq!(channel.ask(&sign(key.clone(), scheme, bad)).refusal().await, Refusal::Input);
        }
    }
    let asked = rig.authorities.asked.lock().unwrap().clone();
    assert!(asked.iter().any(|a| a == &format!("{GATE} for alpha/shop/web")), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn keyless_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let web = TestCa::new("web").issue_with(&identity(WEB), |_| {});
    std::fs::write(dir.path().join("shop.web.crt"), &web.chain).unwrap();
    std::fs::write(dir.path().join("shop.web.key"), &web.key).unwrap();
    let allow = |text: &str| std::fs::write(dir.path().join("allow.yaml"), text).unwrap();
    allow("allow: {shop/web: [gateway/g1]}");
    let rig = Rig::start(Setting { tls_dir: Some(dir.path().into()), ..Setting::default() }).await;
    rig.tell(&rig.usual());
    let (gateway, node, other) =
        (rig.channel(GATEWAY).await, rig.channel(NODE).await, rig.channel("spiffe://components.canal/ns/canal-system/sa/gateway.g2").await);
    let key = KeyName::File("alpha/shop/web".parse().unwrap());
    let input = verify_input();
    let ask = |channel: &Channel| channel.ask(&sign(key.clone(), ECDSA, &input));
    assert!(matches!(ask(&gateway).next().await, Said::Signature(_)));
    // Clients of TLS 1.2 too, with this key and no other.
    let ecdhe = [&[1; 64][..], &[3, 0, 29, 32], &[9; 32]].concat();
    assert!(matches!(gateway.ask(&sign(key.clone(), ECDSA, &ecdhe)).next().await, Said::Signature(_)));
    assert_eq!(node.ask(&sign(identity_key(WEB), ECDSA, &ecdhe)).refusal().await, Refusal::Input);
    assert_eq!(ask(&node).refusal().await, Refusal::NotEntitled);
    assert_eq!(ask(&other).refusal().await, Refusal::NotEntitled);
    for _ in 0..20 {
        allow("allow: {}");
        assert_eq!(ask(&gateway).refusal().await, Refusal::NotAllowed);
        assert_eq!(gateway.ask(&Request::Chain { key: key.clone() }).refusal().await, Refusal::NotAllowed);
        allow("allow: {shop/web: [gateway/g1]}");
        assert!(matches!(ask(&gateway).next().await, Said::Signature(_)));
    }
    assert_eq!(gateway.ask(&sign(KeyName::File("alpha/shop/none".parse().unwrap()), ECDSA, &input)).refusal().await, Refusal::NotAllowed);
    // A service of the same name elsewhere is another service: in another namespace, of another tenant.
    allow("allow: {shop/web: [gateway/g1], other/web: [gateway/g1]}");
    for (service, want, text) in [
        ("alpha/other/web", Refusal::UnknownKey, "other.web.crt and other.web.key"),
        ("alpha/third/web", Refusal::NotAllowed, "allow.yaml does not let gateway/g1 use the key of alpha/third/web"),
        ("beta/shop/web", Refusal::UnknownTenant, "tenant alpha's key server"),
    ] {
        let key = KeyName::File(service.parse().unwrap());
        for request in [sign(key.clone(), ECDSA, &input), Request::Chain { key }] {
            match gateway.ask(&request).next().await {
                Said::Refused(name, said) => assert!(name == want && said.contains(text), "{service}: {name}: {said}"),
                other => panic!("{service}: {other:?}"),
            }
        }
    }
    assert!(matches!(ask(&gateway).next().await, Said::Signature(_)));
    // A gateway that serves the tenant no more.
    let mut told = rig.usual();
    told.retain(|r| r.name() != "alpha/gateway/g1");
    rig.tell(&told);
    assert_eq!(ask(&gateway).refusal().await, Refusal::NotEntitled);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_not_there_yet_is_waited_for_and_its_lack_is_named() {
    let rig = Rig::start(Setting::default()).await;
    rig.authorities.refuses.store(true, std::sync::atomic::Ordering::Relaxed);
    rig.tell(&rig.usual());
    let (channel, input) = (rig.channel(NODE).await, verify_input());
    let mut call = channel.ask(&sign(identity_key(WEB), ECDSA, &input));
    match call.next().await {
        Said::Refused(Refusal::NoCertificate, text) => assert!(text.contains("issues nothing"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(rig.value("canal_key_certificate_failures_total{reason=\"refused\"}") > 0.0);
    rig.authorities.refuses.store(false, std::sync::atomic::Ordering::Relaxed);
    rig.authorities.delay_ms.store(600, std::sync::atomic::Ordering::Relaxed);
    rig.provisioned().await;
    // New ones: who needs one at once has it first, and waits for it.
    let names: Vec<String> = (0..40).map(|n| format!("spiffe://alpha.example/ns/crowd/sa/n{n}")).collect();
    let mut told = rig.usual();
    told.retain(|r| r.name() != "alpha/node/n1");
    told.push(entitlement("alpha", "node/n1", &names.iter().map(String::as_str).collect::<Vec<_>>()));
    rig.tell(&told);
    let begun = std::time::Instant::now();
    let mut call = channel.begin(&names[39], Role::Client, &[PEER], 0);
    assert!(matches!(call.next().await, Said::Send(_)));
    assert!(begun.elapsed().as_millis() < 2400, "behind the crowd: {:?}", begun.elapsed());
    rig.provisioned().await;
    assert!(rig.authorities.at_once.1.load(std::sync::atomic::Ordering::Relaxed) <= canal_keys::limits::ISSUES_MAX);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_at_half_life_and_keys_follow_the_policy() {
    // Long, for a short life's half is not much more than what a busy machine takes for all that happens meanwhile.
    const LIFE: std::time::Duration = std::time::Duration::from_secs(20);
    let rig = Rig::start(Setting::default()).await;
    *rig.authorities.change.lock().unwrap() = Some(Box::new(|p| {
        let now = std::time::SystemTime::now();
        (p.not_before, p.not_after) = (now.into(), (now + LIFE).into());
    }));
    let begun = std::time::Instant::now();
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let channel = rig.channel(NODE).await;
    let mut chains = std::collections::BTreeSet::new();
    let chain = || async {
        match channel.ask(&Request::Chain { key: identity_key(WEB) }).next().await {
            Said::Certificates(chain) => chain[0].clone(),
            other => panic!("{other:?}"),
        }
    };
    chains.insert(chain().await);
    let gateway = rig.channel(GATEWAY).await;
    let service = KeyName::Service("alpha/shop/web".parse().unwrap());
    assert!(matches!(gateway.ask(&Request::Chain { key: service }).next().await, Said::Certificates(_)));
    let of_service = || rig.authorities.asked.lock().unwrap().iter().filter(|a| a.ends_with("for alpha/shop/web")).count();
    while chains.len() < 2 && begun.elapsed() < SOON {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        chains.insert(chain().await);
    }
    let took = begun.elapsed();
    assert!(
        chains.len() == 2 && took > LIFE.mul_f64(0.4) && took < LIFE.mul_f64(0.8),
        "a second certificate at about half of the first one's life: {took:?}"
    );
    // Who is still shown the first one is signed for with its key.
    let (input, key) = (verify_input(), identity_key(WEB));
    for leaf in &chains {
        match channel.ask(&sign_for(leaf, &key, ECDSA, &input)).next().await {
            Said::Signature(signature) => verify(leaf, ECDSA, &input, &signature),
            other => panic!("{other:?}"),
        }
    }
    // A service that nobody asked for again is forgotten after half a life more.
    until("no service", || !rig.engine.dump()["keys"].to_string().contains("alpha/shop/web")).await;
    assert_eq!(of_service(), 2);
    *rig.authorities.change.lock().unwrap() = None;
    let mut told = rig.usual();
    told[0] = tenant("alpha", KeyAlgorithm::Rsa2048);
    rig.tell(&told);
    until("a key of the new kind", || rig.engine.dump()["keys"].to_string().contains("\"algorithm\":\"rsa\"")).await;
    let rsa = || async { matches!(channel.ask(&sign(identity_key(WEB), RSA_PSS, &input)).next().await, Said::Signature(_)) };
    let end = std::time::Instant::now() + SOON;
    while !rsa().await {
        assert!(std::time::Instant::now() < end, "no RSA key");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_that_signs_no_more_has_its_certificates_replaced_at_once() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let issued = || rig.authorities.asked.lock().unwrap().iter().filter(|a| *a == WEB).count();
    assert_eq!(issued(), 1);
    let mut told = rig.usual();
    told.retain(|r| r.name() != "alpha/alpha.example");
    let next = TestCa::new("next");
    told.push(std::sync::Arc::new(canal_model::program::Resource::Bundle(canal_model::trust::Bundle {
        tenant: "alpha".parse().unwrap(),
        trust_domain: "alpha.example".parse().unwrap(),
        roots: vec![next.root_pem(), rig.ca("alpha").root_pem()],
        revoked: vec![],
        federated: false,
    })));
    rig.tell(&told);
    until("a new certificate", || issued() == 2).await;
    // The controller still signs with the old one here: it is not asked again and again.
    rig.tell(&told);
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(issued(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_has_so_many_services() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let gateway = rig.channel(GATEWAY).await;
    let ask = |n: usize| gateway.ask(&Request::Chain { key: KeyName::Service(format!("alpha/shop/s{n}").parse().unwrap()) });
    for first in (0..canal_keys::limits::SERVICES_MAX).step_by(64) {
        // Some at a time: each has to be issued within its time.
        let mut calls: Vec<_> = (first..first + 64).map(ask).collect();
        for call in &mut calls {
            assert!(matches!(call.next().await, Said::Certificates(_)));
        }
    }
    let asked = rig.authorities.asked.lock().unwrap().iter().filter(|name| name.contains(" for ")).cloned().collect::<Vec<_>>();
    let services = asked.iter().collect::<std::collections::BTreeSet<_>>().len();
    assert_eq!((services, asked.len()), (canal_keys::limits::SERVICES_MAX, canal_keys::limits::SERVICES_MAX), "one certificate each");
    match ask(canal_keys::limits::SERVICES_MAX).next().await {
        Said::Refused(Refusal::NoCertificate, text) => assert!(text.contains("1024 services"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(ask(0).next().await, Said::Certificates(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_are_reached_by_one_tenant_alone() {
    let rig = Rig::start(Setting { shares: Shares { requester: 6, tenant: 4, ..Shares::default() }, ..Setting::default() }).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let (alpha, beta, gateway) = (rig.channel(NODE).await, rig.channel(BETA_NODE).await, rig.channel(GATEWAY).await);
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut call = alpha.begin(WEB, Role::Client, &[PEER], 0);
        assert!(matches!(call.next().await, Said::Send(_)));
        held.push(call);
    }
    assert_eq!(rig.value("canal_key_handshakes_under_way"), 4.0);
    assert_eq!(alpha.begin(WEB, Role::Client, &[PEER], 0).refusal().await, Refusal::TenantBusy);
    assert_eq!(gateway.begin(GATE, Role::Client, &[PEER], 0).refusal().await, Refusal::TenantBusy);
    assert_eq!(alpha.ask(&sign(identity_key(WEB), ECDSA, &verify_input())).refusal().await, Refusal::TenantBusy);
    assert!(matches!(beta.begin(OTHER, Role::Client, &[PEER], 0).next().await, Said::Send(_)));
    alpha.say(held[0].id, &Request::Abandon);
    assert!(alpha.lives().await);
    assert!(matches!(gateway.begin(GATE, Role::Client, &[PEER], 0).next().await, Said::Send(_)));
    // A channel that ends gives all back.
    drop((held, alpha));
    until("given back", || rig.value("canal_key_under_way") == 2.0).await;
}
