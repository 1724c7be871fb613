//! Policies on connections into a pod, over HBONE and in plaintext, and on those that are open when
//! policies change.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::fixture::raw::{self, PeerHello, connect};
use crate::fixture::{NodeFixture, NodeSetup, POD_V4, POD_V6};
use canal_model::authorization::{
    Attribute, AttributeMatch, Authorization, AuthorizationAction, Clause, PeerAuthentication,
    PeerMode, PolicyKey, PolicyRule, PolicyTarget,
};
use canal_model::program::Resource;
use canal_node_proxy::config::{CaptureChoice, PodLimits};
use canal_testing::TestCa;

const HBONE: &str = "10.77.0.2:15008";
const APP: &str = "10.77.0.2:8080";
const FRONT: &str = "spiffe://alpha.example/ns/web/sa/front";
const OTHER: &str = "spiffe://alpha.example/ns/web/sa/other";

fn run<T>(f: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(f)
}

/// Starts an application that sends back what it receives, and ends when that ends.
fn echo(l: TcpListener) {
    std::thread::spawn(move || {
        for s in l.incoming().flatten() {
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut &s, &mut &s);
                let _ = s.shutdown(std::net::Shutdown::Write);
            });
        }
    });
}

fn key(name: &str) -> PolicyKey {
    PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: name.parse().unwrap(),
    }
}

fn policy(
    name: &str,
    action: AuthorizationAction,
    attribute: Attribute,
    value: AttributeMatch,
) -> Resource {
    let when = vec![Clause {
        attribute,
        any: vec![value],
        none: vec![],
    }];
    Resource::Authorization(Authorization {
        key: key(name),
        target: PolicyTarget::Tenant,
        action,
        rules: vec![PolicyRule {
            when,
            ..PolicyRule::default()
        }],
        dry_run: false,
        broken: None,
    })
}

fn only(name: &str, peer_id: &str) -> Resource {
    policy(
        name,
        AuthorizationAction::Allow,
        Attribute::SourcePrincipal,
        AttributeMatch::Exact(peer_id.trim_start_matches("spiffe://").into()),
    )
}

fn network(name: &str, action: AuthorizationAction, network: &str) -> Resource {
    policy(
        name,
        action,
        Attribute::SourceAddress,
        AttributeMatch::Network(network.parse().unwrap()),
    )
}

fn mode(mode: PeerMode) -> Resource {
    let target = PolicyTarget::Tenant;
    Resource::PeerAuthentication(PeerAuthentication {
        key: key("peer"),
        target,
        mode: Some(mode),
        ports: [].into(),
        created: 1,
    })
}

fn setup(policies: Vec<Resource>) -> NodeSetup {
    NodeSetup {
        policies,
        ..NodeSetup::default()
    }
}

fn pod(fixture: &NodeFixture, peer_id: &str) -> PeerHello {
    PeerHello::of(
        &fixture.ca,
        peer_id.trim_start_matches("spiffe://alpha.example/"),
    )
}

/// Requests a tunnel with the credentials of `hello`; an error is the status.
fn connect_with(
    fixture: &NodeFixture,
    hello: &PeerHello,
    headers: &[(&'static str, &str)],
) -> Result<(), u16> {
    run(async {
        let h2 = raw::h2(fixture, HBONE, hello).await;
        connect(&h2, APP, headers).await.map(drop)
    })
}

/// Connects from outside without mTLS.
fn dial(fixture: &NodeFixture, to: &str) -> std::io::Result<TcpStream> {
    let to: SocketAddr = to.parse().unwrap();
    let s = fixture.outside.within(|| {
        TcpStream::connect_timeout(&to, canal_timing::deadline(Duration::from_secs(5)))
    })?;
    s.set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(10))))?;
    Ok(s)
}

/// Sends a byte and waits until it comes back.
fn ping(s: &mut TcpStream) -> Result<(), ErrorKind> {
    s.write_all(b"x").map_err(|e| e.kind())?;
    s.read_exact(&mut [0]).map_err(|e| e.kind())
}

fn plain(fixture: &NodeFixture, to: &str) -> Result<(), ErrorKind> {
    dial(fixture, to)
        .map_err(|e| e.kind())
        .and_then(|mut s| ping(&mut s))
}

/// Checks that the node refuses what only a gateway can decide, and admits what the gateway has
/// decided.
fn check_undecided(fixture: &NodeFixture, gateway: &PeerHello, front: &PeerHello) {
    fixture.apply(&setup(vec![policy(
        "get-only",
        AuthorizationAction::Allow,
        Attribute::Method,
        AttributeMatch::Exact("GET".into()),
    )]));
    assert_eq!(
        (
            connect_with(fixture, front, &[]),
            connect_with(fixture, gateway, &[])
        ),
        (Err(401), Ok(())),
        "the gateway has seen the method, this node cannot"
    );
    fixture.logged(|l| {
        l["result"] == "undecided" && l["error"].as_str().unwrap().contains("request.method")
    });
    let named = [
        "action=\"undecided\"",
        "policy=\"b/get-only\"",
        "tenant=\"alpha\"",
    ];
    assert_eq!(fixture.metric("canal_authorization_total", &named), 1.0);
}

#[test]
fn tunnels_are_authorized_by_the_verified_peer() {
    let fixture = NodeFixture::new(&setup(vec![only("front-only", FRONT)]));
    echo(fixture.ns.listen(APP));
    let (gateway, front, other) = (
        PeerHello::gateway(&fixture),
        pod(&fixture, FRONT),
        pod(&fixture, OTHER),
    );
    for (case, hello, headers, want) in [
        ("the pod itself", &front, vec![], Ok(())),
        ("another pod", &other, vec![], Err(401)),
        (
            "another pod that lies",
            &other,
            vec![("canal-source", FRONT)],
            Err(401),
        ),
        (
            "a gateway for many clients, which has authorized",
            &gateway,
            vec![],
            Ok(()),
        ),
        (
            "a gateway for the pod",
            &gateway,
            vec![("canal-source", FRONT)],
            Ok(()),
        ),
        (
            "a gateway for another pod",
            &gateway,
            vec![("canal-source", OTHER)],
            Err(401),
        ),
        (
            "a gateway without a source",
            &gateway,
            vec![("canal-source", "nobody")],
            Err(400),
        ),
    ] {
        assert_eq!(connect_with(&fixture, hello, &headers), want, "{case}");
    }
    // The three cases with 401, and the one with 400.
    fixture.until("denied", || {
        fixture.refused("inbound", "denied") == 3.0
            && fixture.refused("inbound", "bad_source") == 1.0
    });
    let line = fixture.logged(|l| l["result"] == "denied");
    assert_eq!(
        (line["response_flags"].as_str(), line["error"].as_str()),
        (Some("DENY"), Some("no ALLOW policy matches"))
    );
    let counted = |action: &str| {
        fixture.metric(
            "canal_authorization_total",
            &[&format!("action=\"{action}\"")],
        )
    };
    // No policy decides on the case with 400, so it does not count here.
    assert_eq!((counted("allow"), counted("deny")), (3.0, 3.0));

    check_undecided(&fixture, &gateway, &front);

    let mut dry = policy(
        "dry",
        AuthorizationAction::Deny,
        Attribute::DestinationPort,
        AttributeMatch::Port(8080),
    );
    if let Resource::Authorization(a) = &mut dry {
        a.dry_run = true;
    }
    fixture.apply(&setup(vec![
        dry,
        policy(
            "watch",
            AuthorizationAction::Audit,
            Attribute::DestinationPort,
            AttributeMatch::Port(8080),
        ),
    ]));
    assert_eq!(connect_with(&fixture, &other, &[]), Ok(()));
    fixture.until("watched", || {
        counted("dry_run_deny") == 1.0 && counted("audit") == 1.0
    });
}

#[test]
fn a_change_ends_the_tunnels_that_it_does_not_allow_and_no_others() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    let (front, other, gateway) = (
        pod(&fixture, FRONT),
        pod(&fixture, OTHER),
        PeerHello::gateway(&fixture),
    );
    let mut open = run_open(
        &fixture,
        &[
            (&front, &[]),
            (&other, &[]),
            (&gateway, &[("canal-source", OTHER)]),
            (&gateway, &[]),
        ],
    );
    fixture.apply(&setup(vec![mode(PeerMode::Permissive)]));
    for (n, t) in open.tunnels.iter_mut().enumerate() {
        assert_eq!(
            open.runtime.block_on(pong(t)),
            Ok(()),
            "tunnel {n}: nothing was forbidden"
        );
    }
    fixture.apply(&setup(vec![only("front-only", FRONT)]));
    // The pod `other`, and the gateway that speaks for it, are not allowed any more.
    for (n, want) in [Ok(()), Err(()), Err(()), Ok(())].into_iter().enumerate() {
        assert_eq!(
            open.runtime.block_on(pong(&mut open.tunnels[n])),
            want,
            "tunnel {n}"
        );
    }
    fixture.until("counted", || {
        fixture.metric("canal_node_closed_total", &["reason=\"denied\""]) == 2.0
    });
    let line = fixture.logged(|l| l["result"] == "denied" && l["src.identity"] == OTHER);
    assert_eq!(
        line["error"],
        "policies have changed: no ALLOW policy matches"
    );
}

/// Tunnels that are open as long as their runtime lives.
struct Open {
    runtime: tokio::runtime::Runtime,
    tunnels: Vec<raw::RawTunnel>,
}

type AuthorizedRequestCase<'a> = (&'a PeerHello, &'a [(&'static str, &'a str)]);

fn run_open(fixture: &NodeFixture, asked: &[AuthorizedRequestCase<'_>]) -> Open {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let mut tunnels = Vec::new();
    for (hello, headers) in asked {
        let opened = runtime.block_on(async {
            let h2 = raw::h2(fixture, HBONE, hello).await;
            connect(&h2, APP, headers).await
        });
        tunnels.push(opened.map_err(|status| status.to_string()).unwrap());
    }
    Open { runtime, tunnels }
}

async fn pong(t: &mut raw::RawTunnel) -> Result<(), ()> {
    t.send.send_data("x".into(), false).map_err(drop)?;
    let chunk = tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(10)),
        t.recv.data(),
    )
    .await
    .expect("an end in time");
    let chunk = chunk.ok_or(())?.map_err(drop)?;
    let _ = t.recv.flow_control().release_capacity(chunk.len());
    Ok(())
}

#[test]
fn federated_members_come_in_by_name_and_revoked_ones_go() {
    let friends = TestCa::new("friends");
    let friend = "spiffe://friend.example/ns/web/sa/front";
    let hello = |serial: u64| PeerHello {
        certificate: Some(friends.issue_with(&friend.parse().unwrap(), |p| {
            p.serial_number = Some(serial.into())
        })),
        alpn: &[b"h2"],
        ..PeerHello::of(&friends, "ns/web/sa/front")
    };
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    let bundles = |revoked: Vec<String>| {
        let own = fixture.ca.bundle("alpha", "alpha.example", false, vec![]);
        [
            own,
            friends.bundle("alpha", "friend.example", true, revoked),
        ]
        .into_iter()
        .map(|r| (*r).clone())
    };
    let with = |policies: Vec<Resource>, revoked| {
        setup(policies.into_iter().chain(bundles(revoked)).collect())
    };
    fixture.apply(&with(vec![], vec![]));
    assert_eq!(
        connect_with(&fixture, &hello(7), &[]),
        Err(401),
        "no policy names it"
    );
    assert_eq!(connect_with(&fixture, &pod(&fixture, OTHER), &[]), Ok(()));
    fixture.apply(&with(vec![only("friends", friend)], vec![]));
    // Serial numbers, by which one of two certificates of the same peer is revoked.
    let (one, two) = (hello(7), hello(8));
    let mut open = run_open(&fixture, &[(&one, &[]), (&two, &[])]);
    fixture.apply(&with(
        vec![only("friends", friend)],
        vec![friends.revocations(&[7])],
    ));
    let [revoked, good] = &mut open.tunnels[..] else {
        unreachable!()
    };
    assert_eq!(
        (
            open.runtime.block_on(pong(revoked)),
            open.runtime.block_on(pong(good))
        ),
        (Err(()), Ok(()))
    );
    run(async {
        if let Ok(mut tls) = raw::tls(&fixture, HBONE, &one).await {
            let read = tokio::io::AsyncReadExt::read(&mut tls, &mut [0]).await;
            assert!(!matches!(read, Ok(n) if n > 0), "no new handshake either");
        }
    });
    fixture.apply(&setup(vec![
        (*fixture.ca.bundle("alpha", "alpha.example", false, vec![])).clone(),
        only("friends", friend),
    ]));
    assert_eq!(
        open.runtime.block_on(pong(&mut open.tunnels[1])),
        Err(()),
        "federated no more"
    );
}

/// Name of the case, policies, result of plaintext to the application's port, and the refusal's
/// name.
type PlaintextCase = (
    &'static str,
    Vec<Resource>,
    Result<(), ErrorKind>,
    &'static str,
);

fn plaintext_cases() -> Vec<PlaintextCase> {
    let no = Err(ErrorKind::ConnectionReset);
    vec![
        ("no policy exists", vec![], Ok(()), "open"),
        (
            "permissive",
            vec![mode(PeerMode::Permissive)],
            Ok(()),
            "open",
        ),
        (
            "strict",
            vec![mode(PeerMode::Strict)],
            no,
            "strict_plaintext",
        ),
        (
            "its network is allowed",
            vec![network("near", AuthorizationAction::Allow, "10.77.0.0/16")],
            Ok(()),
            "allowed",
        ),
        (
            "its network is denied",
            vec![network("near", AuthorizationAction::Deny, "10.77.0.0/16")],
            no,
            "denied",
        ),
        (
            "only a member is allowed",
            vec![only("front-only", FRONT)],
            no,
            "denied",
        ),
        (
            "this hop cannot evaluate it",
            vec![policy(
                "get",
                AuthorizationAction::Allow,
                Attribute::Method,
                AttributeMatch::Exact("GET".into()),
            )],
            no,
            "undecided",
        ),
        ("no policy exists any more", vec![], Ok(()), "open"),
    ]
}

fn plaintext_follows_policies(capture: CaptureChoice, guard: &str) {
    let fixture = NodeFixture::new(&NodeSetup {
        capture,
        ..NodeSetup::default()
    });
    echo(fixture.ns.listen(APP));
    for (case, policies, want, answer) in plaintext_cases() {
        let refused = fixture.refused("inbound", answer);
        fixture.apply(&NodeSetup {
            capture,
            policies,
            ..NodeSetup::default()
        });
        assert_eq!(plain(&fixture, APP), want, "{case}");
        let guarded = if answer == "open" { "open" } else { guard };
        assert_eq!(fixture.context.plaintext.describe(), guarded, "{case}");
        if want.is_err() {
            fixture.until(case, || fixture.refused("inbound", answer) == refused + 1.0);
        }
        // From within the pod the application is reachable in every case.
        assert!(
            fixture.ns.within(|| TcpStream::connect(APP)).is_ok(),
            "{case}"
        );
    }
}

#[test]
fn plaintext_is_captured_while_policies_apply_to_it() {
    plaintext_follows_policies(CaptureChoice::Bpf, "bpf");
}

#[test]
fn nftables_captures_plaintext_as_well() {
    plaintext_follows_policies(CaptureChoice::Nft, "nft");
}

#[test]
fn admitted_plaintext_reaches_the_dialled_port() {
    let fixture = NodeFixture::new(&setup(vec![
        network("near", AuthorizationAction::Allow, "0.0.0.0/0"),
        network("near6", AuthorizationAction::Allow, "::/0"),
    ]));
    fixture.until("listeners", || fixture.context.plaintext.listeners() == 2);
    echo(fixture.ns.listen("0.0.0.0:8080"));
    echo(fixture.ns.listen(&format!("[{POD_V6}]:9090")));
    assert_eq!(plain(&fixture, APP), Ok(()));
    assert_eq!(plain(&fixture, &format!("[{POD_V6}]:9090")), Ok(()));
    let closed = plain(&fixture, &format!("{POD_V4}:9"));
    assert_eq!(closed, Err(ErrorKind::ConnectionReset), "nobody listens");
    fixture.logged(|l| l["result"] == "application_down" && l["dst.addr"] == "10.77.0.2:9");
    for port in canal_wire::hbone::ILLEGAL_PORTS
        .into_iter()
        .filter(|p| *p != 15008)
    {
        assert_eq!(
            plain(&fixture, &format!("{POD_V4}:{port}")),
            Err(ErrorKind::ConnectionReset),
            "{port}"
        );
    }
    fixture.until("reserved", || {
        fixture.refused("inbound", "reserved_port") == 2.0
    });
    // The lines of the two connections come in either order.
    let line = fixture.logged(|l| {
        l["result"] == "complete" && l["direction"] == "inbound" && l["dst.addr"] == APP
    });
    assert_eq!(line["src.identity"].as_str(), None);
    let labels = [
        "reporter=\"destination\"",
        "connection_security_policy=\"none\"",
    ];
    fixture.until("counted", || {
        fixture.metric("istio_tcp_connections_closed_total", &labels) == 3.0
    });
}

#[test]
fn a_change_ends_denied_plaintext_on_every_path() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    // Before there was a policy, the kernel delivered it without the proxy.
    let mut older = dial(&fixture, APP).unwrap();
    ping(&mut older).unwrap();
    let mut inside = fixture.ns.within(|| TcpStream::connect(APP).unwrap());
    fixture.apply(&setup(vec![network(
        "near",
        AuthorizationAction::Allow,
        "10.77.0.0/16",
    )]));
    let mut taken = dial(&fixture, APP).unwrap();
    assert_eq!(
        (ping(&mut older), ping(&mut taken)),
        (Ok(()), Ok(())),
        "both are allowed"
    );
    fixture.apply(&setup(vec![mode(PeerMode::Strict)]));
    for (what, s) in [("older", &mut older), ("taken", &mut taken)] {
        assert_eq!(ping(s), Err(ErrorKind::ConnectionReset), "{what}");
    }
    ping(&mut inside).unwrap();
    for reason in ["older_plaintext", "strict_plaintext"] {
        fixture.until(reason, || {
            fixture.metric(
                "canal_node_closed_total",
                &[&format!("reason=\"{reason}\"")],
            ) == 1.0
        });
    }
}

#[test]
fn plaintext_connections_are_limited_by_name() {
    let limits = PodLimits {
        inbound: 1,
        ..PodLimits::default()
    };
    let fixture = NodeFixture::new(&NodeSetup {
        limits,
        policies: vec![network("near", AuthorizationAction::Allow, "0.0.0.0/0")],
        ..NodeSetup::default()
    });
    echo(fixture.ns.listen(APP));
    let mut first = dial(&fixture, APP).unwrap();
    ping(&mut first).unwrap();
    assert_eq!(plain(&fixture, APP), Err(ErrorKind::ConnectionReset));
    fixture.until("named", || {
        fixture.refused("inbound", "connection_limit") == 1.0
    });
    assert_eq!(
        fixture.metric("canal_limit_refused_total", &["pod_plaintext_connections"]),
        1.0
    );
}

#[test]
fn probes_reach_only_declared_ports_regardless_of_policies() {
    const UNDECLARED: &str = "10.77.0.2:8081";
    let strict = || NodeSetup {
        on_node: true,
        ..setup(vec![mode(PeerMode::Strict)])
    };
    let fixture = NodeFixture::new(&strict());
    echo(fixture.ns.listen(APP));
    echo(fixture.ns.listen(UNDECLARED));
    // One for IPv4 and one for IPv6.
    fixture.until("listeners", || fixture.context.plaintext.listeners() == 2);
    let mut probe = dial(&fixture, APP).unwrap();
    assert_eq!(ping(&mut probe), Ok(()));
    assert_eq!(
        plain(&fixture, UNDECLARED),
        Err(ErrorKind::ConnectionReset),
        "a process of the node is authorized like any client"
    );
    fixture.until("named", || {
        fixture.refused("inbound", "strict_plaintext") == 1.0
    });
    fixture.apply(&NodeSetup {
        on_node: true,
        ..setup(vec![policy(
            "shut",
            AuthorizationAction::Deny,
            Attribute::DestinationPort,
            AttributeMatch::Port(8080),
        )])
    });
    assert_eq!(
        (ping(&mut probe), plain(&fixture, APP)),
        (Ok(()), Ok(())),
        "a change does not end it"
    );
    // `probe`, and the later connection to the declared port.
    assert_eq!(
        fixture.metric("canal_authorization_total", &["action=\"node\""]),
        2.0
    );
    assert_eq!(
        plain(&fixture, UNDECLARED),
        Ok(()),
        "policies admit it now, like any client"
    );
    let refused = plain(&fixture, &format!("{POD_V4}:15006"));
    assert_eq!(
        refused,
        Err(ErrorKind::ConnectionReset),
        "the proxy's own ports are never admitted"
    );
}

#[test]
fn a_failed_guard_set_up_is_reported_and_retried() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let pod = fixture.context.pod.load_full();
    let lost = canal_node_proxy::pod::LocalPod {
        netns: "/run/netns/canal-none".into(),
        ..(*pod).clone()
    };
    fixture.context.pod.store(lost.into());
    fixture.apply(&setup(vec![mode(PeerMode::Strict)]));
    assert!(
        fixture
            .context
            .plaintext
            .describe()
            .starts_with("not captured: network namespace /run/netns/canal-none")
    );
    assert_eq!(
        fixture.metric("canal_node_plaintext_capture_failures_total", &[]),
        1.0
    );
    fixture.context.pod.store(pod);
    fixture.apply(&setup(vec![mode(PeerMode::Strict)]));
    assert_eq!(
        (
            fixture.context.plaintext.describe().as_str(),
            fixture.metric("canal_node_plaintext_captured_pods", &[])
        ),
        ("bpf", 1.0)
    );
    assert_eq!(plain(&fixture, APP), Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_pod_without_a_known_tenant_admits_nothing() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    fixture.context.policy.store(Default::default());
    assert!(fixture.context.policy.load().guards_plaintext());
    echo(fixture.ns.listen(APP));
    assert_eq!(
        connect_with(&fixture, &PeerHello::gateway(&fixture), &[]),
        Err(503),
        "and the reason is the missing tenant, not a denial"
    );
    fixture.until("named", || {
        fixture.refused("inbound", "tenant_unknown") == 1.0
    });
}
