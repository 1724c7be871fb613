//! Tests of the reconciler on fake maps that can fail.

use std::sync::Arc;

use canal_model::ids::ServiceId;
use canal_model::ids::{ReplicaNumber, Vni};
use canal_model::program::{
    BUCKETS, BucketTable, GatewayAddress, Node, OutboundTrafficPolicy, Replica, Resource, Tenant,
};
use canal_runtime::metrics::Registry;

use super::*;
use crate::desired_maps::ReplicaEntry;

const ROOM: MapCapacity = MapCapacity {
    addresses: 9,
    services: 9,
    prefixes: 2,
    nodes: 9,
    hosts: 9,
};

/// Fake maps with a limited number of prefixes, like the kernel's. With `deaf`, every write fails.
#[derive(Default)]
struct Small {
    content: EdgeMapContent,
    deaf: bool,
    written: Vec<MapWrite>,
}

impl MapStore for Small {
    fn write(&mut self, step: &MapWrite) -> Result<(), String> {
        let full = matches!(step, MapWrite::Prefix(k, Some(_)) if self.content.prefixes.len() == 2 && !self.content.prefixes.contains_key(k));
        if self.deaf || full {
            return Err("no room".into());
        }
        crate::map_writes::tests::take(&mut self.content, step);
        self.written.push(step.clone());
        Ok(())
    }
    fn read(&mut self) -> Result<EdgeMapContent, String> {
        Ok(self.content.clone())
    }
}

fn ip(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(250, 1, 0, n)
}

fn tenant() -> Resource {
    Resource::Tenant(Tenant {
        name: "alpha".parse().unwrap(),
        vni: Vni::new(101).unwrap(),
        trust_domain: "alpha.example".parse().unwrap(),
        pod_cidrs: Vec::new(),
        gateway_cidrs: Vec::new(),
        outbound_traffic_policy: OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: {
            let mut shares = canal_model::share::Shares::default();
            shares.set(
                canal_model::share::ShareKind::EdgeMapEntries,
                "100%".parse().unwrap(),
            );
            shares
        },
    })
}

fn node(n: u8) -> Resource {
    Resource::Node(Node {
        tenant: "alpha".parse().unwrap(),
        name: format!("n{n}").parse().unwrap(),
        az: "az1".parse().unwrap(),
        underlay: Ipv4Addr::new(172, 16, 0, n),
        mac: [2, 0, 0, 0, 0, n],
        pod_cidrs: vec![format!("10.1.{n}.0/24").parse().unwrap()],
    })
}

fn replica(n: u8, az: &str, up: bool) -> Resource {
    Resource::Replica(Replica {
        name: format!("g{n}").parse().unwrap(),
        number: number(n),
        backend: "be".parse().unwrap(),
        az: az.parse().unwrap(),
        underlay: ip(n),
        up,
    })
}

fn number(n: u8) -> ReplicaNumber {
    ReplicaNumber::new(n.into()).unwrap()
}

fn target(n: u8) -> ProbeTarget {
    ProbeTarget {
        name: format!("g{n}").parse().unwrap(),
        address: ip(n),
    }
}

fn new_reconciler(content: EdgeMapContent) -> (MapReconciler<Small>, Registry) {
    let registry = Registry::new();
    let small = Small {
        content,
        ..Small::default()
    };
    (
        MapReconciler::adopt(
            small,
            "az1".parse().unwrap(),
            ip(254),
            ROOM,
            EdgeCounters::new(&registry),
        )
        .unwrap(),
        registry,
    )
}

fn shared_resources(resources: &[Resource]) -> Vec<Arc<Resource>> {
    resources.iter().map(|r| Arc::new(r.clone())).collect()
}

fn shows(registry: &Registry, line: &str) -> bool {
    registry.render().lines().any(|l| l == line)
}

#[test]
fn a_full_map_accepts_new_entries_once_old_ones_are_removed() {
    let (mut k, registry) = new_reconciler(EdgeMapContent::default());
    k.set_input(shared_resources(&[tenant(), node(1), node(2)]));
    k.set_input(shared_resources(&[tenant(), node(3), node(4)]));
    assert_eq!(
        (k.tables.content.prefixes.len(), k.status().pending_entries),
        (2, 0)
    );
    assert_eq!(k.tables.content, k.maps.content);
    assert!(shows(
        &registry,
        "canal_edge_map_entries{map=\"canal_prefixes\"} 2"
    ));
    assert!(shows(
        &registry,
        "canal_edge_map_limit{map=\"canal_prefixes\"} 2"
    ));
}

#[test]
fn a_tenants_share_of_metric_series_follows_its_tenant_object() {
    let (mut k, registry) = new_reconciler(EdgeMapContent::default());
    let mut own = tenant();
    let Resource::Tenant(alpha) = &mut own else {
        panic!("a tenant")
    };
    alpha.shares.set(
        canal_model::share::ShareKind::MetricSeries,
        "7".parse().unwrap(),
    );
    // An omitted entry creates a metric series of the tenant.
    k.set_input(shared_resources(&[own, node(1), node(2), node(3)]));
    assert!(
        shows(
            &registry,
            "canal_share_max{limit=\"metric_series\",tenant=\"alpha\"} 7"
        ),
        "{}",
        registry.render()
    );
    k.set_input(shared_resources(&[tenant(), node(1), node(2), node(3)]));
    assert!(shows(
        &registry,
        "canal_share_max{limit=\"metric_series\",tenant=\"alpha\"} 1000"
    ));
}

#[test]
fn excess_is_refused_by_name_in_any_state_and_working_entries_stay() {
    let (mut k, registry) = new_reconciler(EdgeMapContent::default());
    let name = |refused: Vec<(ResourceKind, String, String)>| {
        refused
            .into_iter()
            .map(|(kind, name, _)| (kind, name))
            .collect::<Vec<_>>()
    };
    let nodes = |names: &[&str]| {
        names
            .iter()
            .map(|name| (ResourceKind::Node, format!("alpha/{name}")))
            .collect::<Vec<_>>()
    };
    // `ROOM` has place for two prefixes, and each node needs one.
    assert_eq!(
        name(k.set_input(shared_resources(&[tenant(), node(1), node(2), node(3)]))),
        nodes(&["n3"])
    );
    assert_eq!(k.tables.content.prefixes.len(), 2);
    assert!(shows(
        &registry,
        "canal_edge_map_entries_omitted{map=\"canal_prefixes\",reason=\"share\"} 1"
    ));
    assert!(shows(
        &registry,
        "canal_edge_map_refused_total{map=\"canal_prefixes\",tenant=\"alpha\"} 1"
    ));
    // A later state is applied although more of it is omitted.
    let all = shared_resources(&[
        tenant(),
        node(1),
        node(2),
        node(3),
        node(4),
        replica(1, "az1", true),
    ]);
    assert_eq!(name(k.set_input(all)), nodes(&["n3", "n4"]));
    assert_eq!(k.tables.content.replicas.len(), 1, "the replica is known");
    // An entry counts when it is newly omitted, and n3 was before.
    assert!(shows(
        &registry,
        "canal_edge_map_refused_total{map=\"canal_prefixes\",tenant=\"alpha\"} 2"
    ));
    // Nodes 2 and 3 worked. Node 1 returns and is the newest, although its key is the smallest.
    k.set_input(shared_resources(&[tenant(), node(2), node(3)]));
    assert!(shows(
        &registry,
        "canal_edge_map_entries_omitted{map=\"canal_prefixes\",reason=\"share\"} 0"
    ));
    assert_eq!(
        name(k.set_input(shared_resources(&[tenant(), node(1), node(2), node(3)]))),
        nodes(&["n1"])
    );
    let (mut again, _) = new_reconciler(k.tables.content.clone());
    let before = again.tables.content.prefixes.clone();
    assert_eq!(
        name(again.set_input(shared_resources(&[tenant(), node(1), node(2), node(3)]))),
        nodes(&["n1"]),
        "the agent was started again"
    );
    assert_eq!(again.tables.content.prefixes, before);
}

#[test]
fn earlier_probes_override_the_controller_and_own_probes_override_both() {
    let earlier = EdgeMapContent {
        replicas: [(
            number(1),
            ReplicaEntry {
                address: ip(1),
                up: false,
            },
        )]
        .into(),
        ..EdgeMapContent::default()
    };
    let (mut k, _) = new_reconciler(earlier);
    let all = shared_resources(&[
        replica(1, "az1", true),
        replica(2, "az1", true),
        replica(3, "az2", false),
    ]);
    k.set_input(all.clone());
    let up = |k: &MapReconciler<Small>| {
        k.tables
            .content
            .replicas
            .values()
            .map(|s| s.up)
            .collect::<Vec<_>>()
    };
    assert_eq!(up(&k), [false, true, false]);
    assert_eq!(
        k.targets().keys().cloned().collect::<Vec<_>>(),
        [target(1), target(2)],
        "this edge does not probe replicas of the other AZ"
    );
    assert!(k.record_probe_result(&target(1), true) && k.record_probe_result(&target(2), false));
    assert_eq!(up(&k), [true, false, false], "in the kernel at once");
    assert!(!k.record_probe_result(&target(2), false), "no news");
    assert!(
        !k.record_probe_result(&target(3), true) && !k.record_probe_result(&target(9), true),
        "not this edge's"
    );
    k.set_input(all);
    assert_eq!(up(&k), [true, false, false]);
}

#[test]
fn nothing_is_touched_before_the_first_state() {
    let earlier = EdgeMapContent {
        hosts: [(ip(7), 7)].into(),
        ..EdgeMapContent::default()
    };
    let (mut k, _) = new_reconciler(earlier.clone());
    k.set_hosts([ip(1)].into());
    assert_eq!(k.audit(), Ok(0));
    assert_eq!(k.tables.content, earlier);
    k.set_input(Vec::new());
    k.set_hosts([ip(1)].into());
    assert_eq!(k.tables.content.hosts, [(ip(1), 0), (ip(254), 0)].into());
}

#[test]
fn an_audit_repairs_external_changes_and_failed_writes() {
    let (mut k, registry) = new_reconciler(EdgeMapContent::default());
    k.set_input(shared_resources(&[
        tenant(),
        node(1),
        replica(1, "az1", true),
    ]));
    assert_eq!(k.audit(), Ok(0));
    k.tables.content.nodes.clear();
    k.tables.content.hosts.insert(ip(66), 0);
    assert_eq!(k.audit(), Ok(2));
    assert_eq!(k.tables.content, k.maps.content);
    k.tables.deaf = true;
    assert!(
        k.record_probe_result(&target(1), false),
        "the controller is notified even if the kernel map is unchanged"
    );
    k.set_input(shared_resources(&[
        tenant(),
        node(2),
        replica(1, "az1", true),
    ]));
    assert!(k.status().pending_entries > 0);
    assert!(shows(
        &registry,
        "canal_edge_map_write_failures_total{map=\"canal_prefixes\"} 2"
    ));
    k.tables.deaf = false;
    assert_eq!(k.audit(), Ok(0));
    assert_eq!(
        (k.status().pending_entries, &k.tables.content),
        (0, &k.maps.content)
    );
    assert!(!k.tables.content.replicas[&number(1)].up);
}

/// Returns the resources of an edge with this many services of one tenant on 80 replicas.
fn many(services: u32) -> Vec<Arc<Resource>> {
    let key = |n: u32| format!("alpha/shop/s{n}").parse().unwrap();
    let table = |n: u32| {
        let of = |bucket: usize, at: u32| {
            number(u8::try_from((n * 3 + at + bucket as u32) % 80 + 1).unwrap())
        };
        BucketTable {
            service: key(n),
            id: ServiceId::new(n).unwrap(),
            az: "az1".parse().unwrap(),
            vni: Vni::new(101).unwrap(),
            version: 1,
            chains: (0..BUCKETS)
                .map(|bucket| (0..3).map(|at| of(bucket, at * 7)).collect())
                .collect(),
        }
    };
    let address = |n: u32, az: u8| GatewayAddress {
        service: key(n),
        id: ServiceId::new(n).unwrap(),
        az: format!("az{az}").parse().unwrap(),
        addresses: vec![
            [10, 128 + az, (n >> 8) as u8, n as u8].into(),
            format!("fd00:{az}::{n:x}").parse().unwrap(),
        ],
        network: None,
        open: true,
    };
    let mut all = vec![tenant()];
    all.extend((1..=80).map(|n| replica(n, "az1", true)));
    all.extend((1..=200).map(node));
    all.extend((1..=services).flat_map(|n| {
        [
            Resource::Address(address(n, 1)),
            Resource::Address(address(n, 2)),
            Resource::Table(table(n)),
        ]
    }));
    all.into_iter().map(Arc::new).collect()
}

/// Changes the first resource for which `change` returns true.
fn change_first(resources: &mut [Arc<Resource>], change: &dyn Fn(&mut Resource) -> bool) {
    let at = resources
        .iter()
        .position(|r| change(&mut Resource::clone(r)))
        .unwrap();
    let mut next = Resource::clone(&resources[at]);
    change(&mut next);
    resources[at] = Arc::new(next);
}

/// Checks that an update writes only what changed. `cargo test --release -p canal-edge-agent
/// of_many_services -- --nocapture` prints the time of each update, without the kernel's part.
#[test]
fn an_update_of_many_services_writes_only_changes() {
    // Nearly as many as the map holds (`CANAL_SERVICES_MAX`, 16,384).
    const SERVICES: u32 = 16_000;
    // Every map has room for all, so that nothing is omitted.
    let capacity = MapCapacity {
        addresses: 40_000,
        services: 20_000,
        prefixes: 300,
        nodes: 300,
        hosts: 300,
    };
    let az: AzName = "az1".parse().unwrap();
    let mut k = MapReconciler::adopt(
        Wide::default(),
        az,
        ip(254),
        capacity,
        EdgeCounters::new(&Registry::new()),
    )
    .unwrap();
    let mut resources = many(SERVICES);
    // Returns the number of tables that were allocated anew.
    let mut apply = |what: &str, resources: &[Arc<Resource>], written: usize| {
        let (before, tables) = (k.tables.written, k.maps.content.tables.clone());
        let begun = std::time::Instant::now();
        k.set_input(resources.to_vec());
        let took = begun.elapsed();
        println!(
            "{SERVICES} services, {what}: {took:.1?}, {} elements written",
            k.tables.written - before
        );
        assert_eq!(
            (k.tables.written - before, k.status().pending_entries),
            (written, 0),
            "{what}"
        );
        let is_new = |(id, table): &(&ServiceId, &Arc<_>)| {
            !tables.get(*id).is_some_and(|old| Arc::ptr_eq(old, table))
        };
        k.maps.content.tables.iter().filter(is_new).count()
    };
    let services = SERVICES as usize;
    // Each service has two addresses in this AZ, a return entry and a table. The others are 80
    // replicas, the hosts of these and of the edge, and a node and a prefix for each of 200 nodes.
    assert_eq!(
        apply("all of it", &resources, services * 4 + 80 + 81 + 400),
        services
    );
    change_first(&mut resources, &|r| {
        if let Resource::Table(t) = r {
            t.version += 1;
            true
        } else {
            false
        }
    });
    assert_eq!(apply("one table", &resources, 1), 1);
    change_first(&mut resources, &|r| {
        if let Resource::Address(a) = r {
            a.open = false;
            true
        } else {
            false
        }
    });
    assert_eq!(
        apply(
            "one address closed, which is no matter of an edge's",
            &resources,
            0
        ),
        0
    );
    change_first(&mut resources, &|r| {
        if let Resource::Replica(r) = r {
            r.underlay = ip(250);
            true
        } else {
            false
        }
    });
    // The replica, its new host, and its old host.
    assert_eq!(apply("one replica's address", &resources, 3), 0);
    assert_eq!(apply("nothing", &resources, 0), 0);
}

/// Fake maps with space for everything that count the writes.
#[derive(Default)]
struct Wide {
    written: usize,
}

impl MapStore for Wide {
    fn write(&mut self, _: &MapWrite) -> Result<(), String> {
        self.written += 1;
        Ok(())
    }
    fn read(&mut self) -> Result<EdgeMapContent, String> {
        Ok(EdgeMapContent::default())
    }
}
