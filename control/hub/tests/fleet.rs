//! The fleet over the wire: replicas and edges report and subscribe as data planes do; what they are told is judged.

mod rig;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use canal_hub::{FleetTimes, Limits};
use canal_model::program::{BucketTable, GatewayAddress, Kind, Resource};
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{EdgeOrders, EdgeState, ReplicaOrders, ReplicaState, Seen};
use rig::{PATIENCE, Rig, Subscriber, pod, service, with_token};
use tonic::transport::Channel;
use tonic::Status;

const PRINCIPALS: [(&str, &str); 10] = [
    ("r1", "kind: gateway, name: r1, az: az1, backend: b1"),
    ("r2", "kind: gateway, name: r2, az: az1, backend: b1"),
    ("r3", "kind: gateway, name: r3, az: az1, backend: b2"),
    ("r4", "kind: gateway, name: r4, az: az2, backend: b3"),
    ("e1", "kind: edge, name: e1, az: az1"),
    ("e2", "kind: edge, name: e2, az: az2"),
    ("n1", "kind: node, name: n1, tenant: alpha, az: az1"),
    ("m1", "kind: node, name: m1, tenant: beta, az: az1"),
    ("root", "kind: operator, name: root"),
    ("ann", "kind: operator, name: ann, tenant: alpha"),
];

fn tier_tenant(name: &str, vni: u8) -> String {
    let object = format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {vni}, trustDomain: {name}.example, \
         podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}}\n"
    );
    [object, service(1, "a", 1), pod(1, "a-0", "a", "n1", 1, true)].join("---\n")
}

fn times() -> FleetTimes {
    let ms = Duration::from_millis;
    FleetTimes { edge_silent: ms(600), replica_silent: ms(800), gone: ms(1200), grace: ms(1500), lag: ms(1500) }
}

/// A controller with tenants alpha and beta on the tier, at the same addresses.
async fn tier() -> Rig {
    let limits = Limits { fleet: times(), ..Limits::default() };
    let rig = Rig::with(limits, |config| {
        for (name, vni) in [("alpha", 1), ("beta", 2)] {
            std::fs::create_dir(config.join(name)).unwrap();
            std::fs::write(config.join(name).join("all.yaml"), tier_tenant(name, vni)).unwrap();
        }
    });
    let rig = rig.await;
    rig::write_principals(&rig.config.principals, &PRINCIPALS);
    let until = Instant::now() + PATIENCE;
    while rig.metric("canal_controller_generation").await < 1.0 || !knows(&rig, "e1").await {
        assert!(Instant::now() < until, "the principals were not read again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    rig
}

async fn knows(rig: &Rig, token: &'static str) -> bool {
    Subscriber::try_open(rig.channel().await, token, BTreeMap::new()).await.is_ok()
}

/// A replica as a data plane would be: it subscribes and reports.
struct Ship {
    token: &'static str,
    client: FleetClient<Channel>,
    south: Subscriber,
    state: ReplicaState,
}

impl Ship {
    async fn launch(rig: &Rig, token: &'static str, backend: &str, az: &str, underlay: &str) -> Self {
        let client = FleetClient::new(rig.channel().await);
        let state = ReplicaState { backend: backend.into(), az: az.into(), underlay: underlay.into(), ..ReplicaState::default() };
        Self { token, client, south: rig.subscribe(token).await, state }
    }

    async fn report(&mut self) -> Result<ReplicaOrders, Status> {
        self.state.generation = self.south.generation;
        self.client.replica_report(with_token(self.state.clone(), self.token)).await.map(tonic::Response::into_inner)
    }

    /// Takes what comes, and reports.
    async fn turn(&mut self) -> ReplicaOrders {
        self.south.drain(Duration::from_millis(10)).await;
        self.report().await.unwrap()
    }
}

/// An edge as a data plane would be.
struct Rim {
    token: &'static str,
    client: FleetClient<Channel>,
    south: Subscriber,
    state: EdgeState,
}

impl Rim {
    async fn launch(rig: &Rig, token: &'static str, az: &str, underlay: &str) -> Self {
        let client = FleetClient::new(rig.channel().await);
        let state = EdgeState { az: az.into(), underlay: underlay.into(), ..EdgeState::default() };
        Self { token, client, south: rig.subscribe(token).await, state }
    }

    fn sees(&mut self, seen: &[(&str, bool)]) {
        self.state.seen = seen.iter().map(|(replica, up)| Seen { replica: replica.to_string(), up: *up }).collect();
    }

    async fn report(&mut self) -> Result<EdgeOrders, Status> {
        self.state.generation = self.south.generation;
        self.client.edge_report(with_token(self.state.clone(), self.token)).await.map(tonic::Response::into_inner)
    }

    async fn turn(&mut self) -> EdgeOrders {
        self.south.drain(Duration::from_millis(10)).await;
        self.report().await.unwrap()
    }
}

fn tables(south: &Subscriber) -> BTreeMap<String, BucketTable> {
    let of = |(key, (_, resource)): (&(Kind, String), &(String, Resource))| match resource {
        Resource::Table(t) => Some((key.1.clone(), t.clone())),
        _ => None,
    };
    south.held.iter().filter_map(of).collect()
}

fn addresses(south: &Subscriber) -> BTreeMap<String, GatewayAddress> {
    let of = |(key, (_, resource)): (&(Kind, String), &(String, Resource))| match resource {
        Resource::Address(a) => Some((key.1.clone(), a.clone())),
        _ => None,
    };
    south.held.iter().filter_map(of).collect()
}

fn heads(table: &BucketTable) -> BTreeSet<u16> {
    table.chains.iter().filter_map(|c| c.first()).map(|n| n.get()).collect()
}

/// Lets everybody take and report until `done` holds.
async fn sail(ships: &mut [&mut Ship], rims: &mut [&mut Rim], what: &str, done: impl Fn(&[&mut Ship], &[&mut Rim]) -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done(ships, rims) {
        assert!(Instant::now() < until, "{what} did not come to be");
        for ship in ships.iter_mut() {
            ship.turn().await;
        }
        for rim in rims.iter_mut() {
            rim.turn().await;
        }
    }
}

#[tokio::test]
async fn a_registered_replica_and_its_edge_get_tables() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r2 = Ship::launch(&rig, "r2", "b1", "az1", "250.1.0.4").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    let mut node = rig.subscribe("n1").await;
    assert_eq!(r1.turn().await.number, 1);
    assert_eq!(r2.turn().await.number, 2);
    e1.sees(&[("r1", true), ("r2", true)]);
    let has_all = |south: &Subscriber| {
        let t = tables(south);
        t.len() == 4 && t.values().all(|t| heads(t) == [1, 2].into())
    };
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "tables with both heads", |ships, rims| {
        ships.iter().all(|s| has_all(&s.south)) && rims.iter().all(|r| has_all(&r.south) && addresses(&r.south).values().all(|a| a.open))
    })
    .await;
    let own = addresses(&e1.south);
    let names: Vec<&str> = own.keys().map(String::as_str).collect();
    let both = |t: &str| [format!("{t}/canal-system/gateway@az1"), format!("{t}/shop/a@az1")];
    assert_eq!(names, [both("alpha"), both("beta")].concat());
    for tenant in ["alpha", "beta"] {
        assert_eq!(own[&format!("{tenant}/canal-system/gateway@az1")].addresses, ["10.1.200.1".parse::<std::net::IpAddr>().unwrap()]);
    }
    assert_eq!(own.values().map(|a| a.id).collect::<BTreeSet<_>>().len(), 4, "ids are of one space");
    node.settle().await;
    assert!(addresses(&node).keys().all(|n| n.starts_with("alpha/")) && addresses(&node).len() == 2, "{:?}", node.names());
    assert!(tables(&node).is_empty() && !node.names().iter().any(|n| n.starts_with("Replica")), "{:?}", node.names());
    let orders = r1.turn().await;
    assert_eq!((orders.edge.as_str(), orders.drain), ("250.1.0.2", false));
    assert_eq!(orders.hosts, ["250.1.0.2", "250.1.0.3", "250.1.0.4"]);
    assert!(!e1.south.names().iter().any(|n| n.starts_with("Service") || n.starts_with("Workload") || n.starts_with("Route")));
}
