//! Tests of the limits at the controller's listeners: each is reached, refuses what exceeds it, and
//! counts that.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::fixture;
use crate::fixture::{
    ControllerFixture, ManualSubscriber, ReceivedResources, service, tenant_object, wait_limit,
};
use canal_controller_core::{
    ADMIN_CONNECTIONS_MAX, CertificateRate, ControllerLimits, TOKEN_BYTES_MAX,
};
use canal_model::program::ResourceKind;
use canal_model::share::{Share, ShareKind};
use canal_timing::slack;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tonic::Code;

fn alpha(config: &std::path::Path) {
    std::fs::create_dir(config.join("alpha")).unwrap();
    std::fs::write(config.join("alpha/t.yaml"), tenant_object("alpha", 1)).unwrap();
}

async fn refused(fixture: &ControllerFixture, reason: &str) {
    assert!(
        fixture
            .metric(&format!(
                "canal_controller_refused_total{{reason=\"{reason}\"}}"
            ))
            .await
            >= 1.0,
        "{reason}"
    );
}

#[tokio::test]
async fn streams_and_names() {
    let mut limits = ControllerLimits {
        streams: 2,
        // One less than the names of each tenant below.
        names: 4,
        ..ControllerLimits::default()
    };
    // All of the capacity, so that the limit on all streams is reached and not the tenant's share.
    limits
        .shares
        .set(ShareKind::ControllerStreams, Share::Percent(100));
    let fixture = ControllerFixture::with(limits, alpha).await;
    let mut first = fixture.subscribe("n1").await;
    first.settle().await;
    let second = fixture.subscribe("n2").await;
    let Err(over) =
        ManualSubscriber::try_open(fixture.channel().await, "n1", BTreeMap::new()).await
    else {
        panic!("a third was accepted")
    };
    assert_eq!(over.code(), Code::ResourceExhausted, "{over}");
    drop(second);
    // The controller counts the stream until it notices that its connection has ended.
    let until = Instant::now() + wait_limit();
    while fixture
        .metric("canal_controller_subscribers{kind=\"node\"}")
        .await
        > 1.0
        && Instant::now() < until
    {
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // What a data plane holds is no reason to refuse it: names of its tenant are removed, and those
    // of others are dropped.
    let resource = first.resources.values().next().unwrap().1.clone();
    let lists = |tenant: &'static str| {
        let resource = resource.clone();
        // Five names are one more than the limit.
        (0..5).map(move |i| {
            (
                (ResourceKind::Service, format!("{tenant}/shop/s{i}")),
                ("v".to_string(), resource.clone()),
            )
        })
    };
    let mut lists_much = ManualSubscriber::open(
        fixture.channel().await,
        "n2",
        lists("alpha").chain(lists("beta")).collect(),
    )
    .await;
    lists_much
        .until("what is not in force is removed", |held| {
            !held.keys().any(|(kind, _)| *kind == ResourceKind::Service)
        })
        .await;
    drop(lists_much);
    refused(&fixture, "streams").await;
    refused(&fixture, "names_out_of_scope").await;
}

#[tokio::test]
async fn streams_of_one_tenant_do_not_exhaust_the_stream_limit_of_others() {
    // As many streams as are opened below, so that each further one must revoke one.
    let mut limits = ControllerLimits {
        streams: 6,
        ..ControllerLimits::default()
    };
    // All of the capacity: the tenant reaches the limit within its share.
    limits
        .shares
        .set(ShareKind::ControllerStreams, Share::Percent(100));
    let fixture = ControllerFixture::with(limits, alpha).await;
    let mut all = Vec::new();
    for token in ["n1", "n1", "n1", "n2", "n2", "n2"] {
        all.push(fixture.subscribe(token).await);
    }
    let of_alpha = |metric: &str| {
        format!("canal_share_{metric}{{limit=\"controller_streams\",tenant=\"alpha\"}}")
    };
    // The comparison has a tolerance, because metrics are read as floating-point numbers.
    assert!((fixture.metric(&of_alpha("used")).await - 6.0).abs() < 0.1);
    let mut others = Vec::new();
    // Each new stream ends the oldest stream of the tenant with the most.
    for (token, ended) in [("m1", 0), ("g1", 1)] {
        let mut other = fixture.subscribe(token).await;
        other.settle().await;
        others.push(other);
        let end = all[ended].end().await;
        assert!(
            end.code() == Code::ResourceExhausted
                && end.message().contains("alpha has the most streams"),
            "{end}"
        );
    }
    refused(&fixture, "streams_revoked").await;
    assert!((fixture.metric(&of_alpha("revoked_total")).await - 2.0).abs() < 0.1);
    let status = fixture.admin("ann").await.status().await;
    let row = status
        .shares
        .iter()
        .find(|row| row.limit == "controller_streams")
        .expect("a tenant sees its own use");
    assert_eq!(
        (
            row.tenant.as_str(),
            row.component.as_str(),
            row.max,
            row.revoked
        ),
        ("alpha", "controller", 6, 2)
    );
    // A share that the provider writes into the Tenant applies to the tenant's next change.
    fixture.write(
        "alpha/t.yaml",
        &tenant_object("alpha", 1).replace("spec: {", "spec: {shares: {controllerStreams: 1}, "),
    );
    let until = Instant::now() + wait_limit();
    while fixture.metric(&of_alpha("max")).await > 1.0 {
        assert!(Instant::now() < until, "the Tenant's share is not in force");
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Held until here: a dropped stream would give back what it takes of the share.
    drop((all, others));
}

#[tokio::test]
async fn names_that_only_streams_know_are_on_their_tenants_account() {
    let mut limits = ControllerLimits::default();
    limits
        .shares
        // Five names of 22 bytes exceed 64 bytes.
        .set(ShareKind::SubscriptionBytes, Share::Amount(64));
    let fixture = ControllerFixture::with(limits, alpha).await;
    let mut node = fixture.subscribe("n1").await;
    node.settle().await;
    let resource = node.resources.values().next().unwrap().1.clone();
    let claims = || {
        (0..5)
            .map(|i| {
                (
                    (ResourceKind::Service, format!("alpha/shop/long-gone-{i}")),
                    ("v".to_string(), resource.clone()),
                )
            })
            .collect()
    };
    let mut greedy = ManualSubscriber::open(fixture.channel().await, "n1", claims()).await;
    assert_eq!(greedy.end().await.code(), Code::ResourceExhausted);
    refused(&fixture, "subscription_bytes").await;
    // The share does not apply to the provider's gateways, and streams that bring no names take
    // nothing of it. What the ended stream had taken is given back.
    ManualSubscriber::open(fixture.channel().await, "g1", claims())
        .await
        .settle()
        .await;
    fixture.subscribe("n2").await.settle().await;
    assert!(
        fixture
            .metric("canal_share_refused_total{limit=\"subscription_bytes\",tenant=\"alpha\"}")
            .await
            >= 1.0
    );
    assert!(
        fixture
            .metric("canal_share_used{limit=\"subscription_bytes\",tenant=\"alpha\"}")
            .await
            < 1.0
    );
}

/// N1b: while a gateway is disconnected, most of its routes are deleted. Its stream is not refused
/// for listing them.
#[tokio::test]
async fn a_gateway_reconnects_after_most_of_its_resources_were_deleted() {
    let limits = ControllerLimits {
        names: 10,
        ..ControllerLimits::default()
    };
    let fixture = ControllerFixture::with(limits, |config| {
        std::fs::create_dir(config.join("alpha")).unwrap();
        std::fs::write(config.join("alpha/t.yaml"), fixture::tenant("alpha", 1)).unwrap();
    })
    .await;
    let mut root = fixture.admin("root").await;
    let routes = |held: &ReceivedResources| {
        held.keys()
            .filter(|(kind, _)| *kind == ResourceKind::Route)
            .count()
    };
    let rule = |n| {
        format!(
            "{{matches: [{{path: {{type: Exact, value: /{n}}}}}], backendRefs: [{{name: a, port: 80}}]}}"
        )
    };
    let rules = (0..1_000).map(rule).collect::<Vec<_>>().join(", ");
    let route = format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: many, namespace: shop}}\nspec: {{parentRefs: [{{group: \
         \"\", kind: Service, name: a}}], rules: [{rules}]}}\n"
    );
    root.must_apply("alpha", &[&route]).await;
    let mut gateway = fixture.subscribe("g1").await;
    gateway
        .until("all routes", |held| routes(held) >= 1_000)
        .await;
    let held = gateway.resources.clone();
    drop(gateway);
    assert!(root.delete_all("alpha").await.unwrap().accepted);
    let mut gateway = ManualSubscriber::open(fixture.channel().await, "g1", held).await;
    gateway
        .until("the removals", |held| routes(held) < 1_000)
        .await;
    assert_eq!(routes(&gateway.resources), 0);
}

async fn connections_are(fixture: &ControllerFixture, n: f64) {
    let until = Instant::now() + wait_limit();
    while (fixture.metric("canal_controller_connections").await - n).abs() > f64::EPSILON {
        assert!(Instant::now() < until, "not {n} connections");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn connections() {
    let mut limits = ControllerLimits {
        connections: 2,
        ..ControllerLimits::default()
    };
    limits
        .shares
        .set(ShareKind::ControllerConnections, Share::Amount(1));
    let fixture = ControllerFixture::with(limits, alpha).await;
    let mut one = fixture.admin("ann").await;
    one.must_apply("alpha", &[&service(1, "a", 1)]).await;
    let mut two = fixture.admin("ann").await;
    assert_eq!(
        two.apply("alpha", &[&service(1, "b", 2)])
            .await
            .unwrap_err()
            .code(),
        Code::ResourceExhausted,
        "alpha has its share"
    );
    refused(&fixture, "connections").await;
    fixture.admin("root").await.status().await;
    drop((one, two));
    connections_are(&fixture, 0.0).await;
    fixture
        .admin("ann")
        .await
        .must_apply("alpha", &[&service(1, "c", 3)])
        .await;
}

/// Opens a TLS connection on which nothing more is sent.
async fn silent(fixture: &ControllerFixture) -> tokio_rustls::client::TlsStream<TcpStream> {
    use rustls::pki_types::pem::PemObject;
    let mut roots = rustls::RootCertStore::empty();
    let pem = fixture.config.infra_dir.join("root.pem");
    roots
        .add(rustls::pki_types::CertificateDer::from_pem_file(pem).unwrap())
        .unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tcp = TcpStream::connect(fixture.controller().address())
        .await
        .unwrap();
    let name = rustls::pki_types::ServerName::try_from(canal_wire::CONTROLLER_NAME).unwrap();
    tokio_rustls::TlsConnector::from(std::sync::Arc::new(config))
        .connect(name, tcp)
        .await
        .unwrap()
}

/// Resolves when the controller has closed the connection; what it sends before, such as its HTTP/2
/// settings, does not matter.
async fn wait_for_close(connection: &mut tokio_rustls::client::TlsStream<TcpStream>) {
    while connection.read(&mut [0; 64]).await.unwrap_or(0) > 0 {}
}

#[tokio::test]
async fn silent_connections_block_no_other_and_are_closed() {
    // A share of 25 % is nine of the 36 that the provider's part leaves.
    const PLACES: usize = 40;
    let mut limits = ControllerLimits {
        unauthenticated: PLACES,
        handshake: Duration::from_secs(60),
        ..ControllerLimits::default()
    };
    limits
        .shares
        .set(ShareKind::ControllerUnauthenticated, Share::Percent(25));
    let fixture = ControllerFixture::with(limits, alpha).await;
    // Four times the capacity, and eighteen times the share, all from one address.
    let mut held = Vec::new();
    for _ in 0..4 * PLACES {
        held.push(silent(&fixture).await);
    }
    fixture.admin("root").await.status().await;
    fixture.admin("bob").await.status().await;
    fixture.subscribe("m1").await.settle().await;
    fixture.subscribe("g1").await.settle().await;
    refused(&fixture, "unauthenticated_revoked").await;
    let used = "canal_share_used{limit=\"controller_unauthenticated_connections\"";
    assert!(
        fixture.metric(&format!("{used},tenant=\"\"}}")).await < 1.0,
        "no source belongs to the provider"
    );
    let mut first = held.remove(0);
    tokio::time::timeout(wait_limit(), wait_for_close(&mut first))
        .await
        .expect("the oldest was closed");
    let open = fixture.metric("canal_controller_connections").await;
    assert!(open <= (PLACES + 8) as f64, "{open} connections are open");
}

#[tokio::test]
async fn an_unauthenticated_connection_is_cut_at_its_deadline() {
    let fixture = ControllerFixture::with(
        ControllerLimits {
            handshake: slack() * Duration::from_millis(300),
            ..ControllerLimits::default()
        },
        |_| {},
    )
    .await;
    let mut quiet = silent(&fixture).await;
    let mut speaks = silent(&fixture).await;
    tokio::io::AsyncWriteExt::write_all(
        &mut speaks,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    )
    .await
    .unwrap();
    let cut = async {
        wait_for_close(&mut quiet).await;
        wait_for_close(&mut speaks).await;
    };
    tokio::time::timeout(wait_limit(), cut)
        .await
        .expect("both are cut, with and without the HTTP/2 preface");
    refused(&fixture, "authorization_deadline").await;
}

#[tokio::test]
async fn one_nodes_requests_block_no_other_nodes_certificates() {
    // Large beside the tokens that come back while the test runs, one a second.
    const BURST: u32 = 60;
    let limits = ControllerLimits {
        tenant_rate: CertificateRate {
            burst: BURST,
            per_second: 1,
        },
        ..ControllerLimits::default()
    };
    let fixture = ControllerFixture::with(limits, alpha).await;
    let csr = fixture::fresh_csr();
    let (mut made, mut limited) = (0, 0);
    // Four bursts, so that some requests fail even if the bucket refills on a slow machine.
    for _ in 0..4 * BURST {
        match fixture
            .certificate("n1", Some(&component("n1")), Some(csr.clone()))
            .await
        {
            Ok(_) => made += 1,
            Err(e) => {
                assert_eq!(e.code(), Code::ResourceExhausted, "{e}");
                assert!(e.message().contains("node alpha/n1"), "{e}");
                limited += 1;
            }
        }
    }
    // The bucket refills while the requests are sent, so more than the burst may be issued.
    assert!(
        made >= BURST && limited > BURST,
        "{made} made, {limited} refused"
    );
    assert!(
        fixture
            .metric("canal_controller_certificates_refused_total{reason=\"rate\"}")
            .await
            > 0.0
    );
    for other in ["n2", "m1", "g1"] {
        fixture
            .certificate(other, Some(&component(other)), None)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_tenants_certificates_fill_its_share_and_no_others() {
    let limits = ControllerLimits {
        // Tenants may take 90 of the 100, since the provider's reserve is a tenth; alpha's share is
        // a tenth of the 90.
        issued: 100,
        ..ControllerLimits::default()
    };
    let fixture = ControllerFixture::with(limits, alpha).await;
    let csr = fixture::fresh_csr();
    let mut made = 0;
    let full = loop {
        match fixture
            .certificate("n1", Some(&component("n1")), Some(csr.clone()))
            .await
        {
            Ok(_) => made += 1,
            Err(e) => break e,
        }
        // No more than the capacity can be issued, so a missing share is noticed.
        assert!(made < 100, "the share is not enforced");
    };
    assert_eq!(
        (made, full.code()),
        (9, Code::ResourceExhausted),
        "a tenth of what tenants may take: {full}"
    );
    assert!(
        full.message()
            .contains("alpha has 9 unexpired certificates"),
        "{full}"
    );
    for other in ["m1", "g1"] {
        fixture
            .certificate(other, Some(&component(other)), None)
            .await
            .unwrap();
    }
    assert!(
        (fixture
            .metric("canal_share_used{limit=\"certificates\",tenant=\"alpha\"}")
            .await
            - 9.0)
            .abs()
            < f64::EPSILON
    );
    assert!(
        fixture
            .metric("canal_share_refused_total{limit=\"certificates\",tenant=\"alpha\"}")
            .await
            >= 1.0
    );
}

/// Returns the identity that a data plane of the fixture has as a component.
fn component(token: &str) -> String {
    let account = match token {
        "g1" => "canal-system/sa/gateway.g1",
        "m1" => "beta/sa/node.m1",
        "n1" => "alpha/sa/node.n1",
        _ => "alpha/sa/node.n2",
    };
    format!("spiffe://components.canal/ns/{account}")
}

#[tokio::test]
async fn handshakes() {
    let fixture = ControllerFixture::with(
        ControllerLimits {
            handshake: slack() * Duration::from_millis(300),
            ..ControllerLimits::default()
        },
        |_| {},
    )
    .await;
    let mut idle = TcpStream::connect(fixture.controller().address())
        .await
        .unwrap();
    assert_eq!(
        idle.read(&mut [0; 1]).await.unwrap_or(0),
        0,
        "a silent connection is closed"
    );
    refused(&fixture, "handshake_deadline").await;
    let mut rude = TcpStream::connect(fixture.controller().address())
        .await
        .unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut rude, b"GET / HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    let _ = rude.read_to_end(&mut Vec::new()).await;
    refused(&fixture, "handshake").await;
}

#[tokio::test]
async fn tokens_and_requests() {
    let fixture = ControllerFixture::with(
        ControllerLimits {
            request_bytes: 10_000,
            ..ControllerLimits::default()
        },
        alpha,
    )
    .await;
    let long = "x".repeat(TOKEN_BYTES_MAX + 1);
    let Err(over) =
        ManualSubscriber::try_open(fixture.channel().await, &long, BTreeMap::new()).await
    else {
        panic!("a token that is too long was accepted")
    };
    assert_eq!(over.code(), Code::Unauthenticated, "{over}");
    refused(&fixture, "token_form").await;
    let mut ann = fixture.admin("ann").await;
    let large = service(1, "a", 1) + &"# more\n".repeat(2000);
    assert_eq!(
        ann.apply("alpha", &[&large]).await.unwrap_err().code(),
        Code::OutOfRange
    );
    ann.must_apply("alpha", &[&service(1, "a", 1)]).await;
}

#[tokio::test]
async fn admin_connections() {
    let fixture = ControllerFixture::empty().await;
    let address = fixture.controller().admin_address().unwrap();
    let mut open = Vec::new();
    for _ in 0..ADMIN_CONNECTIONS_MAX {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    let mut over = TcpStream::connect(address).await.unwrap();
    assert_eq!(over.read(&mut [0; 1]).await.unwrap_or(0), 0);
    refused(&fixture, "admin_connections").await;
    drop(open);
    let until = Instant::now() + wait_limit();
    loop {
        let mut tcp = TcpStream::connect(address).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(
            &mut tcp,
            b"GET /healthz/ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        )
        .await
        .unwrap();
        let mut text = String::new();
        if tcp.read_to_string(&mut text).await.is_ok() && text.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(Instant::now() < until, "the connection is still refused");
    }
}
