//! Direct path out of a pod: to a ready pod's node under the service's name, or through a gateway
//! if no node opens the tunnel.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use canal_model::program as p;

use crate::fixture::gateway::{GatewayBehavior, GatewayLog};
use crate::fixture::{
    FAR, FOR_PODS, NEAR, NodeFixture, NodeSetup, POD_V4, attempt_timeouts, identity,
};

const VIP: &str = "10.96.0.1:80";
/// The service's authority, under which pods' nodes are requested.
const NAMED: &str = "shop.b.svc.cluster.local:80";
/// Addresses of the two pods.
const PODS: [&str; 2] = [FAR, FOR_PODS];

/// Returns ready pods at these addresses, which serve the shop and may be dialed at port 8080.
fn endpoints(at: &[&str]) -> Vec<p::Resource> {
    let one = |at: &&str| {
        let number = PODS.iter().position(|pod| pod == at).unwrap();
        p::Resource::DirectEndpoint(p::DirectEndpoint {
            tenant: "alpha".parse().unwrap(),
            namespace: "b".parse().unwrap(),
            name: format!("shop-{number}").parse().unwrap(),
            service_account: "shop".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![at.parse().unwrap()],
            serves: vec![p::DirectPort {
                service: "alpha/b/shop".parse().unwrap(),
                port: 80,
            }],
            own_ports: [8080].into(),
            audience: Default::default(),
        })
    };
    at.iter().map(one).collect()
}

fn with(at: &[&str]) -> NodeSetup {
    NodeSetup {
        policies: endpoints(at),
        ..NodeSetup::default()
    }
}

fn fallbacks(fixture: &NodeFixture) -> f64 {
    fixture.metric("canal_node_direct_fallbacks_total", &[])
}

fn failures(fixture: &NodeFixture, cause: &str) -> f64 {
    fixture.metric(
        "canal_node_direct_failures_total",
        &[&format!("cause=\"{cause}\"")],
    )
}

#[test]
fn direct_port_is_carried_to_a_ready_pod_as_the_service_and_recorded() {
    let fixture = NodeFixture::new(&with(&PODS));
    let (gateway, shop) = (
        fixture.gateway(NEAR, GatewayBehavior::SendAuthority),
        identity("ns/b/sa/shop"),
    );
    let pods = PODS.map(|at| fixture.impostor(at, GatewayBehavior::SendAuthority, &shop));
    let mut seen = BTreeSet::new();
    for _ in 0..40 {
        let printed = fixture.app("dial", &[VIP]).line();
        assert!(
            printed.starts_with(&format!("peer={VIP} "))
                && printed.ends_with(&format!("reply={NAMED}")),
            "{printed}"
        );
        for (number, pod) in pods.iter().enumerate() {
            while let Ok(saw) = pod.saw.try_recv() {
                let GatewayLog::Connect {
                    authority,
                    headers,
                    peer,
                    source,
                } = saw
                else {
                    // The pod also reports the end of each tunnel.
                    continue;
                };
                assert_eq!((authority.as_str(), peer), (NAMED, identity("ns/b/sa/app")));
                assert!(source.starts_with(POD_V4), "{source}");
                assert!(
                    headers["forwarded"]
                        .to_str()
                        .unwrap()
                        .starts_with(&format!("for=\"{POD_V4}:"))
                );
                seen.insert(number);
            }
        }
    }
    assert_eq!(seen.len(), 2, "both pods are tried");
    assert!(gateway.saw.try_recv().is_err(), "no gateway saw any of it");
    let labels = [
        "reporter=\"source\"",
        "destination_workload=\"shop\"",
        "destination_workload_namespace=\"b\"",
        "destination_principal=\"spiffe://alpha.example/ns/b/sa/shop\"",
        "destination_service=\"shop.b.svc.cluster.local\"",
        "connection_security_policy=\"mutual_tls\"",
    ];
    fixture.until("closed", || {
        fixture.metric("istio_tcp_connections_closed_total", &labels) == 40.0
    });
    let line = fixture.logged(|l| l["dst.addr"] == VIP);
    assert_eq!(
        (line["path"].as_str(), line["result"].as_str()),
        (Some("direct"), Some("complete")),
        "{line}"
    );
    assert_eq!(
        (fallbacks(&fixture), failures(&fixture, "unreachable")),
        (0.0, 0.0)
    );
}

#[test]
fn pods_own_direct_port_is_dialled_by_its_address_and_other_ports_by_a_gateway() {
    let fixture = NodeFixture::new(&with(&PODS[..1]));
    // The test's pods are outside the tenant's range, so only the lookup is tested: a direct port
    // is known by its address.
    let view = fixture.shared.view.load_full();
    let tenant = view.tenant(&"alpha".parse().unwrap()).unwrap();
    let at = |port: u16| {
        tenant
            .direct_address(format!("{FAR}:{port}").parse().unwrap())
            .map(|peers| peers.authority.to_string())
    };
    assert_eq!((at(8080), at(8081)), (Some(format!("{FAR}:8080")), None));
}

#[test]
fn dead_and_refusing_pods_are_passed_over_without_an_error() {
    let fixture = NodeFixture::new(&with(&PODS));
    let shop = identity("ns/b/sa/shop");
    let _well = fixture.impostor(PODS[1], GatewayBehavior::SendAuthority, &shop);
    // Nothing listens at the first pod.
    for _ in 0..20 {
        assert!(
            fixture
                .app("dial", &[VIP])
                .line()
                .ends_with(&format!("reply={NAMED}"))
        );
    }
    assert!(failures(&fixture, "unreachable") >= 1.0);
    drop(fixture);
    let fixture = NodeFixture::new(&with(&PODS));
    let (_full, _well) = (
        fixture.impostor(PODS[0], GatewayBehavior::Refuse(503), &shop),
        fixture.impostor(PODS[1], GatewayBehavior::SendAuthority, &shop),
    );
    for _ in 0..20 {
        assert!(
            fixture
                .app("dial", &[VIP])
                .line()
                .ends_with(&format!("reply={NAMED}"))
        );
    }
    assert!(failures(&fixture, "unavailable") >= 1.0);
    assert_eq!(fallbacks(&fixture), 0.0);
}

/// The pod's node enforces a policy that only a gateway can evaluate, and this node does not have
/// the policy yet.
#[test]
fn a_denial_by_the_pods_node_falls_back_to_the_gateway_without_loss() {
    let fixture = NodeFixture::new(&with(&PODS));
    let (gateway, shop) = (
        fixture.gateway(NEAR, GatewayBehavior::SendAuthority),
        identity("ns/b/sa/shop"),
    );
    let _pods = PODS.map(|at| fixture.impostor(at, GatewayBehavior::Refuse(401), &shop));
    for _ in 0..5 {
        let printed = fixture.app("dial", &[VIP]).line();
        assert!(
            printed.ends_with(&format!("reply={VIP}")),
            "the gateway is asked for what was dialled: {printed}"
        );
        assert_eq!(gateway.authority(), VIP);
        gateway.tunnel_end();
    }
    assert_eq!(
        (fallbacks(&fixture), failures(&fixture, "denied")),
        (5.0, 5.0),
        "one refusal is enough"
    );
    let line = fixture.logged(|l| l["dst.addr"] == VIP);
    assert_eq!(line.get("path"), None, "{line}");
}

/// An address that another workload has taken over proves another identity and gets nothing.
#[test]
fn a_peer_with_another_identity_is_refused() {
    let fixture = NodeFixture::new(&with(&PODS[..1]));
    let gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    let thief = fixture.impostor(
        PODS[0],
        GatewayBehavior::SendAuthority,
        &identity("ns/b/sa/thief"),
    );
    let _other = fixture.impostor(
        PODS[1],
        GatewayBehavior::SendAuthority,
        &identity("ns/canal-system/sa/gateway"),
    );
    assert!(
        fixture
            .app("dial", &[VIP])
            .line()
            .ends_with(&format!("reply={VIP}"))
    );
    assert_eq!(gateway.authority(), VIP);
    assert!(thief.saw.try_recv().is_err());
    assert_eq!(failures(&fixture, "unreachable"), 1.0);
}

/// The pod's node is alive and waits for the application, which would see another attempt as a
/// second connection.
#[test]
fn pod_whose_node_answers_pings_has_time_for_its_response() {
    let fixture = NodeFixture::new(&with(&PODS));
    let (gateway, shop) = (
        fixture.gateway(NEAR, GatewayBehavior::SendAuthority),
        identity("ns/b/sa/shop"),
    );
    let late = GatewayBehavior::Late(attempt_timeouts().attempt * 3 / 2);
    let pods = PODS.map(|at| fixture.impostor(at, late, &shop));
    assert!(
        fixture
            .app("dial", &[VIP])
            .line()
            .ends_with(&format!("reply={NAMED}"))
    );
    let asked = pods.each_ref().map(|pod| pod.connections.load(Relaxed));
    assert_eq!(
        (
            asked.iter().sum::<usize>(),
            gateway.connections.load(Relaxed)
        ),
        (1, 0),
        "{asked:?}"
    );
    assert_eq!(
        (failures(&fixture, "unreachable"), fallbacks(&fixture)),
        (0.0, 0.0)
    );
}

#[test]
fn a_silent_pod_costs_one_attempt_and_new_snapshots_apply_at_once() {
    let fixture = NodeFixture::new(&with(&PODS[..1]));
    let gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    let _mute = fixture.impostor(PODS[0], GatewayBehavior::Mute, &identity("ns/b/sa/shop"));
    let started = Instant::now();
    assert!(
        fixture
            .app("dial", &[VIP])
            .line()
            .ends_with(&format!("reply={VIP}"))
    );
    canal_timing::assert_time(
        "time of a connection to a mute pod",
        started.elapsed(),
        Duration::from_secs(5),
    );
    assert_eq!(gateway.authority(), VIP);
    // The pod is not ready any more, so it is not tried.
    fixture.apply(&NodeSetup::default());
    let before = failures(&fixture, "unreachable");
    assert!(
        fixture
            .app("dial", &[VIP])
            .line()
            .ends_with(&format!("reply={VIP}"))
    );
    assert_eq!(
        (failures(&fixture, "unreachable"), fallbacks(&fixture)),
        (before, 1.0)
    );
}
