//! What policies do to who wants into a pod, over HBONE and in plaintext, and to who is in already when they change.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::rig::raw::{self, Hello, connect};
use crate::rig::{POD_V4, POD_V6, Rig, Setup};
use canal_kit::testing::TestCa;
use canal_model::authorization::{
    Action, Attribute, Authorization, Clause, Match, PeerAuthentication, PeerMode, PolicyKey, PolicyTarget, Rule,
};
use canal_model::program::Resource;
use canal_node_proxy::config::{CaptureChoice, Limits};

const HBONE: &str = "10.77.0.2:15008";
const APP: &str = "10.77.0.2:8080";
const FRONT: &str = "spiffe://alpha.example/ns/web/sa/front";
const OTHER: &str = "spiffe://alpha.example/ns/web/sa/other";

fn run<T>(f: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(f)
}

/// An application that sends back what it gets, and ends when that ends.
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
    PolicyKey { tenant: "alpha".parse().unwrap(), namespace: "b".parse().unwrap(), name: name.parse().unwrap() }
}

fn policy(name: &str, action: Action, attribute: Attribute, value: Match) -> Resource {
    let when = vec![Clause { attribute, any: vec![value], none: vec![] }];
    Resource::Authorization(Authorization {
        key: key(name),
        target: PolicyTarget::Tenant,
        action,
        rules: vec![Rule { when, ..Rule::default() }],
        dry_run: false,
        broken: None,
    })
}

fn only(name: &str, who: &str) -> Resource {
    policy(name, Action::Allow, Attribute::SourcePrincipal, Match::Exact(who.trim_start_matches("spiffe://").into()))
}

fn network(name: &str, action: Action, network: &str) -> Resource {
    policy(name, action, Attribute::SourceAddress, Match::Network(network.parse().unwrap()))
}

fn mode(mode: PeerMode) -> Resource {
    let target = PolicyTarget::Tenant;
    Resource::PeerAuthentication(PeerAuthentication { key: key("peer"), target, mode: Some(mode), ports: [].into(), created: 1 })
}

fn setup(policies: Vec<Resource>) -> Setup {
    Setup { policies, ..Setup::default() }
}

fn pod(rig: &Rig, who: &str) -> Hello {
    Hello::of(&rig.ca, who.trim_start_matches("spiffe://alpha.example/"))
}

/// Asks for a tunnel as `hello` does; the status if refused.
fn ask(rig: &Rig, hello: &Hello, headers: &[(&'static str, &str)]) -> Result<(), u16> {
    run(async {
        let h2 = raw::h2(rig, HBONE, hello).await;
        connect(&h2, APP, headers).await.map(drop)
    })
}

/// Somebody outside without mTLS.
fn dial(rig: &Rig, to: &str) -> std::io::Result<TcpStream> {
    let to: SocketAddr = to.parse().unwrap();
    let s = rig.outside.within(|| TcpStream::connect_timeout(&to, Duration::from_secs(5)))?;
    s.set_read_timeout(Some(Duration::from_secs(10)))?;
    Ok(s)
}

/// Whether a byte comes back, and else how it fails.
fn ping(s: &mut TcpStream) -> Result<(), ErrorKind> {
    s.write_all(b"x").map_err(|e| e.kind())?;
    s.read_exact(&mut [0]).map_err(|e| e.kind())
}

fn plain(rig: &Rig, to: &str) -> Result<(), ErrorKind> {
    dial(rig, to).map_err(|e| e.kind()).and_then(|mut s| ping(&mut s))
}

#[test]
fn tunnels_are_judged_by_who_stands_behind_them() {
    let rig = Rig::new(&setup(vec![only("front-only", FRONT)]));
    echo(rig.ns.listen(APP));
    let (gateway, front, other) = (Hello::gateway(&rig), pod(&rig, FRONT), pod(&rig, OTHER));
    for (case, hello, headers, want) in [
        ("the pod itself", &front, vec![], Ok(())),
        ("another pod", &other, vec![], Err(401)),
        ("another pod that lies", &other, vec![("canal-source", FRONT)], Err(401)),
        ("a gateway for many, which has judged", &gateway, vec![], Ok(())),
        ("a gateway for the pod", &gateway, vec![("canal-source", FRONT)], Ok(())),
        ("a gateway for another pod", &gateway, vec![("canal-source", OTHER)], Err(401)),
        ("a gateway for nobody", &gateway, vec![("canal-source", "nobody")], Err(400)),
    ] {
        assert_eq!(ask(&rig, hello, &headers), want, "{case}");
    }
    rig.until("denied", || rig.refused("inbound", "denied") == 3.0 && rig.refused("inbound", "bad_source") == 1.0);
    let line = rig.logged(|l| l["result"] == "denied");
    assert_eq!((line["response_flags"].as_str(), line["error"].as_str()), (Some("DENY"), Some("no ALLOW policy matches")));
    let counted = |action: &str| rig.metric("canal_authorization_total", &[&format!("action=\"{action}\"")]);
    assert_eq!((counted("allow"), counted("deny")), (3.0, 3.0));

    rig.tell(&setup(vec![policy("get-only", Action::Allow, Attribute::Method, Match::Exact("GET".into()))]));
    assert_eq!((ask(&rig, &front, &[]), ask(&rig, &gateway, &[])), (Err(401), Ok(())), "the gateway has seen the method, this node cannot");
    rig.logged(|l| l["result"] == "undecided" && l["error"].as_str().unwrap().contains("request.method"));
    let named = ["action=\"undecided\"", "policy=\"b/get-only\"", "tenant=\"alpha\""];
    assert_eq!(rig.metric("canal_authorization_total", &named), 1.0);

    let mut dry = policy("dry", Action::Deny, Attribute::DestinationPort, Match::Port(8080));
    if let Resource::Authorization(a) = &mut dry {
        a.dry_run = true;
    }
    rig.tell(&setup(vec![dry, policy("watch", Action::Audit, Attribute::DestinationPort, Match::Port(8080))]));
    assert_eq!(ask(&rig, &other, &[]), Ok(()));
    rig.until("watched", || counted("dry_run_deny") == 1.0 && counted("audit") == 1.0);
}

#[test]
fn a_change_ends_the_tunnels_that_it_does_not_allow_and_no_others() {
    let rig = Rig::new(&Setup::default());
    echo(rig.ns.listen(APP));
    let (front, other, gateway) = (pod(&rig, FRONT), pod(&rig, OTHER), Hello::gateway(&rig));
    let mut open = run_open(&rig, &[(&front, &[]), (&other, &[]), (&gateway, &[("canal-source", OTHER)]), (&gateway, &[])]);
    rig.tell(&setup(vec![mode(PeerMode::Permissive)]));
    for (n, t) in open.tunnels.iter_mut().enumerate() {
        assert_eq!(open.runtime.block_on(pong(t)), Ok(()), "tunnel {n}: nothing was forbidden");
    }
    rig.tell(&setup(vec![only("front-only", FRONT)]));
    for (n, want) in [Ok(()), Err(()), Err(()), Ok(())].into_iter().enumerate() {
        assert_eq!(open.runtime.block_on(pong(&mut open.tunnels[n])), want, "tunnel {n}");
    }
    rig.until("counted", || rig.metric("canal_node_closed_total", &["reason=\"denied\""]) == 2.0);
    let line = rig.logged(|l| l["result"] == "denied" && l["src.identity"] == OTHER);
    assert_eq!(line["error"], "policies have changed: no ALLOW policy matches");
}

/// Tunnels that are open while their runtime lives.
struct Open {
    runtime: tokio::runtime::Runtime,
    tunnels: Vec<raw::Tunnel>,
}

type Asked<'a> = (&'a Hello, &'a [(&'static str, &'a str)]);

fn run_open(rig: &Rig, asked: &[Asked<'_>]) -> Open {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut tunnels = Vec::new();
    for (hello, headers) in asked {
        let opened = runtime.block_on(async {
            let h2 = raw::h2(rig, HBONE, hello).await;
            connect(&h2, APP, headers).await
        });
        tunnels.push(opened.map_err(|status| status.to_string()).unwrap());
    }
    Open { runtime, tunnels }
}

async fn pong(t: &mut raw::Tunnel) -> Result<(), ()> {
    t.send.send_data("x".into(), false).map_err(drop)?;
    let chunk = tokio::time::timeout(Duration::from_secs(10), t.recv.data()).await.expect("an end in time");
    let chunk = chunk.ok_or(())?.map_err(drop)?;
    let _ = t.recv.flow_control().release_capacity(chunk.len());
    Ok(())
}

#[test]
fn federated_members_come_in_by_name_and_revoked_ones_go() {
    let friends = TestCa::new("friends");
    let friend = "spiffe://friend.example/ns/web/sa/front";
    let hello = |serial: u64| Hello {
        certificate: Some(friends.issue_with(&friend.parse().unwrap(), |p| p.serial_number = Some(serial.into()))),
        alpn: &[b"h2"],
        ..Hello::of(&friends, "ns/web/sa/front")
    };
    let rig = Rig::new(&Setup::default());
    echo(rig.ns.listen(APP));
    let bundles = |revoked: Vec<String>| {
        let own = rig.ca.bundle("alpha", "alpha.example", false, vec![]);
        [own, friends.bundle("alpha", "friend.example", true, revoked)].into_iter().map(|r| (*r).clone())
    };
    let with = |policies: Vec<Resource>, revoked| setup(policies.into_iter().chain(bundles(revoked)).collect());
    rig.tell(&with(vec![], vec![]));
    assert_eq!(ask(&rig, &hello(7), &[]), Err(401), "nobody names it");
    assert_eq!(ask(&rig, &pod(&rig, OTHER), &[]), Ok(()));
    rig.tell(&with(vec![only("friends", friend)], vec![]));
    let (one, two) = (hello(7), hello(8));
    let mut open = run_open(&rig, &[(&one, &[]), (&two, &[])]);
    rig.tell(&with(vec![only("friends", friend)], vec![friends.revocations(&[7])]));
    let [revoked, good] = &mut open.tunnels[..] else { unreachable!() };
    assert_eq!((open.runtime.block_on(pong(revoked)), open.runtime.block_on(pong(good))), (Err(()), Ok(())));
    run(async {
        if let Ok(mut tls) = raw::tls(&rig, HBONE, &one).await {
            let read = tokio::io::AsyncReadExt::read(&mut tls, &mut [0]).await;
            assert!(!matches!(read, Ok(n) if n > 0), "no new handshake either");
        }
    });
    rig.tell(&setup(vec![(*rig.ca.bundle("alpha", "alpha.example", false, vec![])).clone(), only("friends", friend)]));
    assert_eq!(open.runtime.block_on(pong(&mut open.tunnels[1])), Err(()), "federated no more");
}

/// Case, policies, what plaintext to the application's port gets, and the refusal's name.
type Case = (&'static str, Vec<Resource>, Result<(), ErrorKind>, &'static str);

fn plaintext_cases() -> Vec<Case> {
    let no = Err(ErrorKind::ConnectionReset);
    vec![
        ("nobody said anything", vec![], Ok(()), "open"),
        ("permissive", vec![mode(PeerMode::Permissive)], Ok(()), "open"),
        ("strict", vec![mode(PeerMode::Strict)], no, "strict_plaintext"),
        ("its network is allowed", vec![network("near", Action::Allow, "10.77.0.0/16")], Ok(()), "allowed"),
        ("its network is denied", vec![network("near", Action::Deny, "10.77.0.0/16")], no, "denied"),
        ("only a member is allowed", vec![only("front-only", FRONT)], no, "denied"),
        ("nobody here can tell", vec![policy("get", Action::Allow, Attribute::Method, Match::Exact("GET".into()))], no, "undecided"),
        ("nobody said anything any more", vec![], Ok(()), "open"),
    ]
}

fn plaintext_follows_policies(capture: CaptureChoice, guard: &str) {
    let rig = Rig::new(&Setup { capture, ..Setup::default() });
    echo(rig.ns.listen(APP));
    for (case, policies, want, answer) in plaintext_cases() {
        let refused = rig.refused("inbound", answer);
        rig.tell(&Setup { capture, policies, ..Setup::default() });
        assert_eq!(plain(&rig, APP), want, "{case}");
        let guarded = if answer == "open" { "open" } else { guard };
        assert_eq!(rig.room.plaintext.describe(), guarded, "{case}");
        if want.is_err() {
            rig.until(case, || rig.refused("inbound", answer) == refused + 1.0);
        }
        // Within the pod, and through tunnels, the application is reached as ever.
        assert!(rig.ns.within(|| TcpStream::connect(APP)).is_ok(), "{case}");
    }
}

#[test]
fn plaintext_is_looked_at_while_policies_want_it() {
    plaintext_follows_policies(CaptureChoice::Bpf, "bpf");
}

#[test]
fn plaintext_is_looked_at_by_nftables_as_well() {
    plaintext_follows_policies(CaptureChoice::Nft, "nft");
}

#[test]
fn plaintext_that_is_let_in_goes_to_the_port_that_was_dialled() {
    let rig = Rig::new(&setup(vec![network("near", Action::Allow, "0.0.0.0/0"), network("near6", Action::Allow, "::/0")]));
    rig.until("listeners", || rig.room.plaintext.listeners() == 2);
    echo(rig.ns.listen("0.0.0.0:8080"));
    echo(rig.ns.listen(&format!("[{POD_V6}]:9090")));
    assert_eq!(plain(&rig, APP), Ok(()));
    assert_eq!(plain(&rig, &format!("[{POD_V6}]:9090")), Ok(()));
    let closed = plain(&rig, &format!("{POD_V4}:9"));
    assert_eq!(closed, Err(ErrorKind::ConnectionReset), "nobody listens");
    rig.logged(|l| l["result"] == "application_down" && l["dst.addr"] == "10.77.0.2:9");
    for port in canal_wire::hbone::ILLEGAL_PORTS.into_iter().filter(|p| *p != 15008) {
        assert_eq!(plain(&rig, &format!("{POD_V4}:{port}")), Err(ErrorKind::ConnectionReset), "{port}");
    }
    rig.until("reserved", || rig.refused("inbound", "reserved_port") == 2.0);
    let line = rig.logged(|l| l["result"] == "complete" && l["direction"] == "inbound");
    assert_eq!((line["dst.addr"].as_str(), line["src.identity"].as_str()), (Some(APP), None));
    let labels = ["reporter=\"destination\"", "connection_security_policy=\"none\""];
    rig.until("counted", || rig.metric("istio_tcp_connections_closed_total", &labels) == 3.0);
}

#[test]
fn a_change_ends_plaintext_that_it_does_not_allow_whoever_carries_it() {
    let rig = Rig::new(&Setup::default());
    echo(rig.ns.listen(APP));
    // Before there was any policy the kernel led it past the proxy.
    let mut older = dial(&rig, APP).unwrap();
    ping(&mut older).unwrap();
    let mut inside = rig.ns.within(|| TcpStream::connect(APP).unwrap());
    rig.tell(&setup(vec![network("near", Action::Allow, "10.77.0.0/16")]));
    let mut taken = dial(&rig, APP).unwrap();
    assert_eq!((ping(&mut older), ping(&mut taken)), (Ok(()), Ok(())), "both are allowed");
    rig.tell(&setup(vec![mode(PeerMode::Strict)]));
    for (what, s) in [("older", &mut older), ("taken", &mut taken)] {
        assert_eq!(ping(s), Err(ErrorKind::ConnectionReset), "{what}");
    }
    ping(&mut inside).unwrap();
    for reason in ["older_plaintext", "strict_plaintext"] {
        rig.until(reason, || rig.metric("canal_node_closed_total", &[&format!("reason=\"{reason}\"")]) == 1.0);
    }
}

#[test]
fn plaintext_connections_are_limited_by_name() {
    let limits = Limits { inbound: 1, ..Limits::default() };
    let rig = Rig::new(&Setup { limits, policies: vec![network("near", Action::Allow, "0.0.0.0/0")], ..Setup::default() });
    echo(rig.ns.listen(APP));
    let mut first = dial(&rig, APP).unwrap();
    ping(&mut first).unwrap();
    assert_eq!(plain(&rig, APP), Err(ErrorKind::ConnectionReset));
    rig.until("named", || rig.refused("inbound", "connection_limit") == 1.0);
    assert_eq!(rig.metric("canal_limit_refused_total", &["pod_plaintext_connections"]), 1.0);
}

#[test]
fn probes_reach_declared_ports_whatever_policies_say_and_no_others() {
    const UNDECLARED: &str = "10.77.0.2:8081";
    let strict = || Setup { on_node: true, ..setup(vec![mode(PeerMode::Strict)]) };
    let rig = Rig::new(&strict());
    echo(rig.ns.listen(APP));
    echo(rig.ns.listen(UNDECLARED));
    rig.until("listeners", || rig.room.plaintext.listeners() == 2);
    let mut probe = dial(&rig, APP).unwrap();
    assert_eq!(ping(&mut probe), Ok(()));
    assert_eq!(plain(&rig, UNDECLARED), Err(ErrorKind::ConnectionReset), "a process of the node is judged like anybody's");
    rig.until("named", || rig.refused("inbound", "strict_plaintext") == 1.0);
    rig.tell(&Setup { on_node: true, ..setup(vec![policy("shut", Action::Deny, Attribute::DestinationPort, Match::Port(8080))]) });
    assert_eq!((ping(&mut probe), plain(&rig, APP)), (Ok(()), Ok(())), "a change does not end it");
    assert_eq!(rig.metric("canal_authorization_total", &["action=\"node\""]), 2.0);
    assert_eq!(plain(&rig, UNDECLARED), Ok(()), "policies let it in now, as anybody");
    let refused = plain(&rig, &format!("{POD_V4}:15006"));
    assert_eq!(refused, Err(ErrorKind::ConnectionReset), "the proxy's own ports are nobody's");
}

#[test]
fn a_guard_that_cannot_be_set_up_is_told_and_tried_again() {
    let rig = Rig::new(&Setup::default());
    let pod = rig.room.pod.load_full();
    let lost = canal_node_proxy::pod::Pod { netns: "/run/netns/canal-none".into(), ..(*pod).clone() };
    rig.room.pod.store(lost.into());
    rig.tell(&setup(vec![mode(PeerMode::Strict)]));
    assert!(rig.room.plaintext.describe().starts_with("NOT GUARDED: network namespace /run/netns/canal-none"));
    assert_eq!(rig.metric("canal_node_guard_failures_total", &[]), 1.0);
    rig.room.pod.store(pod);
    rig.tell(&setup(vec![mode(PeerMode::Strict)]));
    assert_eq!((rig.room.plaintext.describe().as_str(), rig.metric("canal_node_guarded_pods", &[])), ("bpf", 1.0));
    assert_eq!(plain(&rig, APP), Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_pod_whose_tenant_is_not_known_lets_nothing_in() {
    let rig = Rig::new(&Setup::default());
    rig.room.policy.store(Default::default());
    assert!(rig.room.policy.load().guards_plaintext());
    echo(rig.ns.listen(APP));
    assert_eq!(ask(&rig, &Hello::gateway(&rig), &[]), Err(503), "and it is the tenant that is missing, not a right");
    rig.until("named", || rig.refused("inbound", "tenant_unknown") == 1.0);
}
