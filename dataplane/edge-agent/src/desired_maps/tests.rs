//! Tests of the desired maps: named cases with the input as text, in every order.

use std::fmt::Write as _;

use canal_model::program::{OutboundTrafficPolicy, Tenant};

use super::*;

const ROOM: MapCapacity = MapCapacity {
    addresses: 4,
    services: 3,
    prefixes: 4,
    nodes: 3,
    hosts: 5,
};

fn az(s: &str) -> AzName {
    s.parse().unwrap()
}

fn tenant(name: &str, vni: &str, share: &str) -> Resource {
    let mut shares = canal_model::share::Shares::default();
    shares.set(ShareKind::EdgeMapEntries, share.parse().unwrap());
    Resource::Tenant(Tenant {
        name: name.parse().unwrap(),
        vni: Vni::new(vni.parse().unwrap()).unwrap(),
        trust_domain: "example".parse().unwrap(),
        pod_cidrs: Vec::new(),
        gateway_cidrs: Vec::new(),
        outbound_traffic_policy: OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares,
    })
}

/// Parses one resource per line: `tenant NAME VNI [SHARE]` (share of each map; default all of it),
/// `node TENANT/NAME UNDERLAY CIDR,..`, `replica NAME NUMBER AZ UNDERLAY [down]`, `address
/// TENANT/SERVICE ID AZ IP,.. [VNI]`, `table TENANT/SERVICE ID AZ VERSION NUMBER,..`, `host IP`.
fn read_input(text: &str) -> ControllerInput {
    let mut input = ControllerInput::default();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let list = |i: usize| words[i].split(',').map(|s| s.to_string());
        let key = |s: &str| -> canal_model::ids::ServiceKey {
            // The cases name no namespace, because a service's name alone distinguishes them.
            s.replacen('/', "/shop/", 1).parse().unwrap()
        };
        let resource = match words[0] {
            "tenant" => tenant(words[1], words[2], words.get(3).unwrap_or(&"100%")),
            "node" => {
                let (tenant, name) = words[1].split_once('/').unwrap();
                Resource::Node(Node {
                    tenant: tenant.parse().unwrap(),
                    name: name.parse().unwrap(),
                    az: az("az1"),
                    underlay: words[2].parse().unwrap(),
                    // No case depends on the MAC address.
                    mac: [2, 0, 0, 0, 0, 7],
                    pod_cidrs: list(3).map(|c| c.parse().unwrap()).collect(),
                })
            }
            "replica" => Resource::Replica(Replica {
                name: words[1].parse().unwrap(),
                number: ReplicaNumber::new(words[2].parse().unwrap()).unwrap(),
                backend: "be".parse().unwrap(),
                az: az(words[3]),
                underlay: words[4].parse().unwrap(),
                up: words.get(5).is_none(),
            }),
            "address" => Resource::Address(GatewayAddress {
                service: key(words[1]),
                id: ServiceId::new(words[2].parse().unwrap()).unwrap(),
                az: az(words[3]),
                addresses: list(4).map(|a| a.parse().unwrap()).collect(),
                network: words
                    .get(5)
                    .map(|vni| Vni::new(vni.parse().unwrap()).unwrap()),
                open: true,
            }),
            "table" => {
                let chain: Vec<_> = list(5)
                    .map(|n| ReplicaNumber::new(n.parse().unwrap()).unwrap())
                    .collect();
                Resource::Table(BucketTable {
                    service: key(words[1]),
                    id: ServiceId::new(words[2].parse().unwrap()).unwrap(),
                    az: az(words[3]),
                    // The VNI of the cases' tenant alpha.
                    vni: Vni::new(101).unwrap(),
                    version: words[4].parse().unwrap(),
                    chains: vec![chain; BUCKETS],
                })
            }
            "host" => {
                input.hosts.insert(words[1].parse().unwrap());
                continue;
            }
            other => panic!("{other}"),
        };
        input.resources.push(Arc::new(resource));
    }
    input
}

/// Formats the maps as text, without the edge's own host.
fn show(maps: &DesiredMaps) -> Vec<String> {
    let c = &maps.content;
    let mut lines: Vec<String> = c
        .addresses
        .iter()
        .map(|((v, ip), id)| format!("address {v:?} {ip} {id:?}"))
        .collect();
    let some = |ip: Option<IpAddr>| ip.map_or_else(|| "-".to_string(), |ip| ip.to_string());
    lines.extend(c.returns.iter().map(|(id, r)| {
        format!(
            "return {id:?} {:?} {} {}",
            r.vni,
            some(r.v4.map(IpAddr::V4)),
            some(r.v6.map(IpAddr::V6))
        )
    }));
    lines.extend(
        c.prefixes
            .iter()
            .map(|((v, net), via)| format!("prefix {v:?} {net} {}", via.node)),
    );
    lines.extend(c.nodes.keys().map(|(v, ip)| format!("node {v:?} {ip}")));
    for (id, t) in &c.tables {
        // `read_input` gives all buckets the same chain, so one stands for all.
        assert!(t.chains.iter().all(|row| *row == t.chains[0]));
        let mut line = format!("table {id:?} v{}", t.version);
        // The VNI of the cases' ingress network.
        if t.vni.get() == 700 {
            line += " vni 700";
        }
        t.chains[0]
            .iter()
            // 0 stands for no replica.
            .filter(|n| **n != 0)
            .for_each(|n| write!(line, " {n}").unwrap());
        lines.push(line);
    }
    lines.extend(c.replicas.iter().map(|(n, s)| {
        format!(
            "replica {} {} {}",
            n.get(),
            s.address,
            if s.up { "up" } else { "down" }
        )
    }));
    lines.extend(
        c.hosts
            .iter()
            // The address of the edge's own host ends with 254.
            .filter(|(h, _)| h.octets()[3] != 254)
            .map(|(h, n)| format!("host {h} {n}")),
    );
    lines.extend(maps.left_out.iter().map(|l| format!("left out: {l}")));
    lines
        .iter()
        .map(|l| {
            // Of the ids that `Debug` shows, the cases have the numbers alone.
            l.replace("Vni(", "")
                .replace("ServiceId(", "")
                .replace(')', "")
        })
        .collect()
}

/// A marker in a list of expected lines: the list is then incomplete, and each other part of it
/// must occur in the result.
const FULL: &str = "does not fit";

/// The cases: name, input, and expected maps.
const CASES: &[(&str, &str, &[&str])] = &[
    ("nothing", "", &[]),
    (
        "two tenants with the same address",
        "tenant alpha 101
         tenant beta 102
         address alpha/web 1 az1 10.255.0.1,fd00::1
         address beta/web 2 az1 10.255.0.1",
        &[
            "address 101 10.255.0.1 1",
            "address 101 fd00::1 1",
            "address 102 10.255.0.1 2",
            "return 1 101 10.255.0.1 fd00::1",
            "return 2 102 10.255.0.1 -",
        ],
    ),
    (
        "a Gateway's address is on the network of its clients, and so are their packets",
        "tenant alpha 101
         address alpha/web.gateway 1 az1 198.51.100.33 700
         address alpha/web 2 az1 10.255.0.1
         table alpha/web.gateway 1 az1 3 7
         table alpha/web 2 az1 3 7",
        &[
            "address 101 10.255.0.1 2",
            "address 700 198.51.100.33 1",
            "return 1 700 198.51.100.33 -",
            "return 2 101 10.255.0.1 -",
            "table 1 v3 vni 700 7",
            "table 2 v3 7",
        ],
    ),
    (
        "another AZ's addresses and tables are not this edge's",
        "tenant alpha 101
         address alpha/web 1 az2 10.255.0.1
         table alpha/web 1 az2 3 1,2",
        &[],
    ),
    (
        "a table with its chains",
        "table alpha/web 1 az1 3 7,8,9",
        &["table 1 v3 7 8 9"],
    ),
    (
        "nodes of every AZ, by family, with host bits cleared",
        "tenant alpha 101
         node alpha/n1 172.16.0.1 10.1.1.5/24,fd01::/64",
        &[
            "prefix 101 10.1.1.0/24 172.16.0.1",
            "prefix 101 fd01::/64 172.16.0.1",
            "node 101 172.16.0.1",
        ],
    ),
    (
        "replicas of all AZs are hosts; other hosts have no number",
        "replica g1 1 az1 250.1.0.11
         replica g2 2 az2 250.2.0.11 down
         host 250.1.0.11
         host 250.2.0.1",
        &[
            "replica 1 250.1.0.11 up",
            "replica 2 250.2.0.11 down",
            "host 250.1.0.11 1",
            "host 250.2.0.1 0",
            "host 250.2.0.11 2",
        ],
    ),
    (
        "entries of an unknown tenant wait",
        "address alpha/web 1 az1 10.255.0.1
         node alpha/n1 172.16.0.1 10.1.1.0/24",
        &[
            "left out: alpha/shop/web@az1 is not in canal_addresses: its tenant is unknown",
            "left out: alpha/n1 is not in canal_nodes: its tenant is unknown",
        ],
    ),
    (
        "two that claim one place",
        "tenant alpha 101
         address alpha/b 2 az1 10.255.0.1
         address alpha/a 1 az1 10.255.0.1
         node alpha/n2 172.16.0.2 10.1.1.0/24
         node alpha/n1 172.16.0.1 10.1.1.0/24
         replica g2 1 az1 250.1.0.12
         replica g1 1 az1 250.1.0.11",
        &[
            "address 101 10.255.0.1 1",
            "return 1 101 10.255.0.1 -",
            "return 2 101 10.255.0.1 -",
            "prefix 101 10.1.1.0/24 172.16.0.1",
            "node 101 172.16.0.1",
            "node 101 172.16.0.2",
            "replica 1 250.1.0.11 up",
            "host 250.1.0.11 1",
            "left out: alpha/shop/b@az1 10.255.0.1 is not in canal_addresses: alpha/shop/a@az1 10.255.0.1 uses the same key",
            "left out: alpha/n2 10.1.1.0/24 is not in canal_prefixes: alpha/n1 uses the same key",
            "left out: g2 is not in canal_replicas: g1 uses the same key",
        ],
    ),
    (
        "addresses beyond the room",
        "tenant alpha 101
         address alpha/a 1 az1 10.255.0.1,fd00::1
         address alpha/b 2 az1 10.255.0.2,fd00::2
         address alpha/c 3 az1 10.255.0.3",
        &[
            "address 101 10.255.0.1 1",
            "address 101 10.255.0.2 2",
            "address 101 fd00::1 1",
            "address 101 fd00::2 2",
            "left out: alpha/shop/c@az1 10.255.0.3 does not fit canal_addresses: its tenant's share is 4",
            FULL,
        ],
    ),
    (
        "a tenant beyond its share, with smaller keys than another",
        "tenant alpha 101 2
         tenant beta 900 2
         address beta/web 9 az1 10.255.0.1,fd00::1
         address alpha/a 1 az1 10.255.0.1
         address alpha/b 2 az1 10.255.0.2
         address alpha/c 3 az1 10.255.0.3
         table beta/web 9 az1 1 1
         table alpha/a 1 az1 1 1
         table alpha/b 2 az1 1 1
         table alpha/c 3 az1 1 1
         node beta/n1 172.17.0.1 10.1.1.0/24,10.1.2.0/24
         node alpha/n1 172.16.0.1 10.1.1.0/24
         node alpha/n2 172.16.0.2 10.1.2.0/24
         node alpha/n3 172.16.0.3 10.1.3.0/24",
        &[
            "address 101 10.255.0.1 1",
            "address 101 10.255.0.2 2",
            "address 900 10.255.0.1 9",
            "address 900 fd00::1 9",
            "return 9 900 10.255.0.1 fd00::1",
            "table 9 v1 1",
            "prefix 900 10.1.1.0/24 172.17.0.1",
            "prefix 900 10.1.2.0/24 172.17.0.1",
            "node 900 172.17.0.1",
            "left out: alpha/shop/c@az1 10.255.0.3 does not fit canal_addresses: its tenant's share is 2",
            "left out: alpha/shop/c@az1 does not fit canal_tables: its tenant's share is 2",
            "left out: alpha/n3 10.1.3.0/24 does not fit canal_prefixes: its tenant's share is 2",
            "left out: alpha/n3 does not fit canal_nodes: its tenant's share is 2",
            FULL,
        ],
    ),
    (
        "services beyond the room",
        "tenant alpha 101
         table alpha/a 1 az1 1 1
         table alpha/b 2 az1 1 1
         table alpha/c 3 az1 1 1
         table alpha/d 4 az1 1 1",
        &["table 1 v1 1", "table 2 v1 1", "table 3 v1 1", FULL],
    ),
    (
        "nodes and prefixes beyond the room",
        "tenant alpha 101
         node alpha/n1 172.16.0.1 10.1.1.0/24,10.1.2.0/24
         node alpha/n2 172.16.0.2 10.1.3.0/24
         node alpha/n3 172.16.0.3 10.1.4.0/24
         node alpha/n4 172.16.0.4 10.1.5.0/24",
        &[
            "prefix 101 10.1.4.0/24 172.16.0.3",
            "node 101 172.16.0.3",
            FULL,
        ],
    ),
    (
        "hosts beyond the room",
        "host 1.0.0.1\nhost 1.0.0.2\nhost 1.0.0.3\nhost 1.0.0.4\nhost 251.0.0.5",
        &["host 1.0.0.4 0", FULL],
    ),
];

#[test]
fn words_become_maps() {
    for (name, text, want) in CASES {
        let mut words = read_input(text);
        let decide = |t: &ControllerInput| {
            show(&decide_maps(
                t,
                &az("az1"),
                Ipv4Addr::new(250, 1, 0, 254),
                &ROOM,
                &DesiredMaps::default(),
                &EdgeMapContent::default(),
            ))
        };
        let got = decide(&words);
        if want.contains(&FULL) {
            for line in *want {
                assert!(
                    got.iter().any(|g| g.contains(line)),
                    "{name}: {line} is not in {got:#?}"
                );
            }
        } else {
            assert_eq!(got, *want, "{name}");
        }
        words.resources.reverse();
        assert_eq!(decide(&words), got, "{name}: in another order");
    }
}

fn decide(input: &ControllerInput, have: &EdgeMapContent) -> DesiredMaps {
    decide_maps(
        input,
        &az("az1"),
        Ipv4Addr::new(250, 1, 0, 254),
        &ROOM,
        &DesiredMaps::default(),
        have,
    )
}

#[test]
fn resources_beyond_a_share_are_refused_by_kind_and_name() {
    let text = "tenant alpha 101 2
        address alpha/a 1 az1 10.255.0.1,fd00::1
        address alpha/b 2 az1 10.255.0.2,fd00::2
        address gamma/a 7 az1 10.255.0.9";
    let refused: Vec<_> = decide(&read_input(text), &EdgeMapContent::default())
        .refused()
        .collect();
    // Alpha's service is listed once although two of its addresses are omitted; gamma may still
    // become known.
    assert_eq!(refused.len(), 1, "{refused:?}");
    let (kind, name, why) = &refused[0];
    assert_eq!(
        (*kind, name.as_str()),
        (ResourceKind::Address, "alpha/shop/b@az1")
    );
    assert!(
        why.contains("its tenant's share is 2 entries; fix: ")
            && why.contains("spec.shares.edgeMapEntries"),
        "{why}"
    );
}

/// If alpha demands more than its share, every entry of beta that the kernel had stays, also when
/// an agent starts. So do alpha's older entries.
#[test]
fn existing_entries_stay_when_a_tenant_exceeds_its_share() {
    let beta = "tenant beta 900 2
        table beta/web 900 az1 1 1
        node beta/n1 172.17.0.1 10.1.1.0/24";
    let alpha = "tenant alpha 101 2
        table alpha/old 50 az1 1 1
        node alpha/n9 172.16.0.9 10.1.9.0/24";
    let worked = decide(
        &read_input(&format!("{beta}\n{alpha}")),
        &EdgeMapContent::default(),
    );
    let flood = "table alpha/a 1 az1 1 1
        table alpha/b 2 az1 1 1
        table alpha/c 3 az1 1 1
        node alpha/n1 172.16.0.1 10.0.1.0/24
        node alpha/n2 172.16.0.2 10.0.2.0/24
        node alpha/n3 172.16.0.3 10.0.3.0/24";
    let flooded = decide(
        &read_input(&format!("{flood}\n{alpha}\n{beta}")),
        &worked.content,
    );
    let steps = crate::map_writes::tests::decide_steps(&worked.content, &flooded.content);
    assert!(!steps.is_empty(), "alpha has room for one more");
    for step in steps {
        let removes = format!("{step:?}").ends_with("None)");
        assert!(!removes, "{step:?} takes away what worked");
    }
}

proptest::proptest! {
    /// Beta's entries within its share are in the maps, whatever alpha demands, in any order, and
    /// whatever the kernel had.
    #[test]
    fn no_demand_of_one_tenant_displaces_anothers_entries(
        services in proptest::collection::vec((1..200u32, 1..60u8), 0..40),
        nodes in proptest::collection::vec((1..200u8, 1..60u8), 0..40),
        shuffle in 0..8usize,
    ) {
        let beta = "tenant beta 900 25%\naddress beta/web 777 az1 10.255.0.1\ntable beta/web 777 az1 1 1\nnode beta/n1 172.17.0.1 10.1.1.0/24\n";
        let mut text = String::from("tenant alpha 101 50%\n");
        for (id, ip) in services {
            // A service has one id; the last resource with it counts, as in the controller's state.
            text.push_str(&format!("address alpha/s{id} {id} az1 10.255.1.{ip}\ntable alpha/s{id} {id} az1 1 1\n"));
        }
        for (n, net) in nodes {
            text.push_str(&format!("node alpha/n{n} 172.16.0.{n} 10.2.{net}.0/24\n"));
        }
        let mut words = read_input(&format!("{text}{beta}"));
        let turn = shuffle % words.resources.len();
        words.resources.rotate_left(turn);
        let capacity = MapCapacity { addresses: 8, services: 8, prefixes: 8, nodes: 8, hosts: 5 };
        let own = Ipv4Addr::new(250, 1, 0, 254);
        let mut have = EdgeMapContent::default();
        let mut before = DesiredMaps::default();
        for _ in 0..2 {
            let maps = decide_maps(&words, &az("az1"), own, &capacity, &before, &have);
            let c = &maps.content;
            let of = |vni: u32| c.addresses.keys().filter(|(v, _)| v.get() == vni).count();
            proptest::prop_assert_eq!((of(900), c.tables.contains_key(&ServiceId::new(777).unwrap())), (1, true));
            proptest::prop_assert_eq!(c.prefixes.keys().filter(|(v, _)| v.get() == 900).count(), 1);
            proptest::prop_assert_eq!(c.nodes.keys().filter(|(v, _)| v.get() == 900).count(), 1);
            proptest::prop_assert!(of(101) <= 4 && c.tables.len() <= 5 && c.returns.len() <= 5 && c.nodes.len() <= 5 && c.prefixes.len() <= 5);
            proptest::prop_assert!(maps.left_out.iter().filter(|l| l.is_refused()).all(|l| l.tenant.as_ref().is_some_and(|t| t.as_str() == "alpha")));
            // A new decision on the content that is in the kernel changes nothing.
            if have != EdgeMapContent::default() {
                proptest::prop_assert_eq!(&maps.content, &have);
            }
            (have, before) = (maps.content.clone(), DesiredMaps::default());
        }
    }
}

#[test]
fn earlier_decisions_make_no_difference() {
    let own = Ipv4Addr::new(250, 1, 0, 254);
    let all = |maps: &DesiredMaps| {
        (
            maps.content.clone(),
            maps.members.clone(),
            maps.left_out.clone(),
        )
    };
    let mut before = DesiredMaps::default();
    for (name, text, _) in CASES {
        let whole = read_input(text);
        // The whole input, each resource in turn removed and added again, with the inputs of other
        // cases in between.
        for at in 0..=whole.resources.len() {
            let mut part = whole.clone();
            if at < part.resources.len() {
                part.resources.remove(at);
            }
            for words in [&part, &whole] {
                let next = decide_maps(
                    words,
                    &az("az1"),
                    own,
                    &ROOM,
                    &before,
                    &EdgeMapContent::default(),
                );
                assert_eq!(
                    all(&next),
                    all(&decide_maps(
                        words,
                        &az("az1"),
                        own,
                        &ROOM,
                        &DesiredMaps::default(),
                        &EdgeMapContent::default()
                    )),
                    "{name}, without {at}"
                );
                before = next;
            }
        }
    }
    let mut words =
        read_input("table alpha/a 1 az1 1 1\ntable alpha/b 2 az1 1 1\ntenant alpha 101");
    let one = decide_maps(
        &words,
        &az("az1"),
        own,
        &ROOM,
        &before,
        &EdgeMapContent::default(),
    );
    words.resources[1] = read_input("table alpha/b 2 az1 2 3").resources.remove(0);
    let two = decide_maps(
        &words,
        &az("az1"),
        own,
        &ROOM,
        &one,
        &EdgeMapContent::default(),
    );
    let table =
        |maps: &DesiredMaps, id: u32| maps.content.tables[&ServiceId::new(id).unwrap()].clone();
    assert!(
        Arc::ptr_eq(&table(&one, 1), &table(&two, 1)),
        "an unchanged table is not made again"
    );
    assert_eq!((table(&one, 2).version, table(&two, 2).version), (1, 2));
}
