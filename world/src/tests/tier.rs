//! Tests of the pure modules for tier worlds: the golden texts, and the messages for mistakes.

use std::path::{Path, PathBuf};

use super::{Mistake, brief, check, golden, show};
use crate::plan::WorldPlan;
use crate::tool_batch;
use crate::topology::Topology;

const TIER: &str = include_str!("../../topologies/tier.yaml");

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml")
}

fn tier() -> Topology {
    Topology::parse(&file(), TIER).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

#[test]
fn golden_plan() {
    golden("tier.plan.txt", &WorldPlan::of(&tier()).to_string());
}

/// Shows the hosts that differ from those of worlds without edges: a router, an edge, a gateway, a
/// node.
#[test]
fn golden_script() {
    let batches = tool_batch::configuration(&WorldPlan::of(&tier()))
        .into_iter()
        .flatten();
    let shown = ["router-az1", "edge-1", "gw-1a", "b-free2"].map(|host| format!("cnl-tier.{host}"));
    let batches = batches.filter(|batch| {
        batch
            .netns
            .as_ref()
            .is_some_and(|netns| shown.contains(netns))
    });
    golden(
        "tier.script.txt",
        &batches.map(|batch| show(&batch)).collect::<String>(),
    );
}

#[test]
fn overlapping_tenants_differ_in_nothing_but_their_overlay() {
    let plan = WorldPlan::of(&tier());
    let (alpha, beta) = (&plan.tenants[0], &plan.tenants[1]);
    assert_eq!(
        (alpha.pods4, alpha.nodes[0].ip4, alpha.nodes[0].mac),
        (beta.pods4, beta.nodes[0].ip4, beta.nodes[0].mac)
    );
    assert_ne!(alpha.nodes[0].underlay, beta.nodes[0].underlay);
    let ours: Vec<_> = plan
        .pods
        .iter()
        .filter(|pod| pod.tenant == 0)
        .map(|pod| (pod.ip4, pod.ip6))
        .collect();
    assert!(ours.iter().all(|pair| {
        plan.pods
            .iter()
            .any(|pod| pod.tenant == 1 && (pod.ip4, pod.ip6) == *pair)
    }));
    assert!(
        alpha.gateways.is_empty(),
        "no node has the address of a replica"
    );
}

/// Mistakes that only a tier world can contain.
const IN_TIERS: &[Mistake] = &[
    Mistake {
        name: "both edges in one AZ",
        from: "{name: edge-2, az: az2}",
        to: "{name: edge-2, az: az1}",
        answers: &[
            "14: AZ \"az2\" has gateways and no edge; add an edge to `edges`: {name: edge-…, az: az2}",
            "15: AZ \"az2\" has gateways and no edge; add an edge to `edges`: {name: edge-…, az: az2}",
            "16: AZ \"az2\" has gateways and no edge; add an edge to `edges`: {name: edge-…, az: az2}",
            "17: AZ \"az2\" has gateways and no edge; add an edge to `edges`: {name: edge-…, az: az2}",
        ],
    },
    Mistake {
        name: "an edge nowhere",
        from: "{name: edge-2, az: az2}",
        to: "{name: edge-2, az: az2}\n- {name: edge-3, az: az3}",
        answers: &["9: there is no AZ \"az3\"; use one of: az1, az2"],
    },
    Mistake {
        name: "a home nowhere",
        from: "  gatewayCidrs:",
        to: "  homeAz: az3\n  gatewayCidrs:",
        answers: &["24: there is no AZ \"az3\"; use one of: az1, az2"],
    },
    Mistake {
        name: "no backend",
        from: "{name: gw-1a, az: az1, backend: b1}",
        to: "{name: gw-1a, az: az1}",
        answers: &["10: gateway \"gw-1a\" has no `backend`; add `backend: …`"],
    },
    Mistake {
        name: "no name for a backend",
        from: "{name: gw-1a, az: az1, backend: b1}",
        to: "{name: gw-1a, az: az1, backend: B1}",
        answers: &[
            "10: backend: \"B1\" is not a name; use 1 to 63 of a-z, 0-9 and -, not - at an end",
        ],
    },
    Mistake {
        name: "no gateway addresses",
        from: "  gatewayCidrs: [10.1.192.0/18, \"fd00:1:0:c::/64\"]\n",
        to: "",
        answers: &[
            "19: tenant \"alpha\" has no `gatewayCidrs`; add e.g. `gatewayCidrs: [10.1.192.0/18, \"fd00:101:0:c::/64\"]`, which its pods and services do not use",
        ],
    },
    Mistake {
        name: "gateway addresses of one family",
        from: "gatewayCidrs: [10.1.192.0/18, \"fd00:1:0:c::/64\"]",
        to: "gatewayCidrs: [10.1.192.0/18]",
        answers: &[
            "24: gatewayCidrs needs exactly one IPv4 and one IPv6 range; write e.g. [10.1.192.0/18, \"fd00:101:0:c::/64\"]",
        ],
    },
    Mistake {
        name: "too few gateway addresses",
        from: "gatewayCidrs: [10.1.192.0/18, \"fd00:1:0:c::/64\"]",
        to: "gatewayCidrs: [10.1.192.0/27, \"fd00:1:0:c::/120\"]",
        answers: &[
            "24: gatewayCidrs: 10.1.192.0/27 cannot be split; write a prefix length from 8 to 26: each AZ gets one eighth",
            "24: gatewayCidrs: fd00:1:0:c::/120 cannot be split; write a prefix length from 16 to 112: each AZ gets one eighth",
        ],
    },
    Mistake {
        name: "gateway addresses among the pods'",
        from: "gatewayCidrs: [10.1.192.0/18,",
        to: "gatewayCidrs: [10.1.64.0/18,",
        answers: &[
            "24: 10.1.64.0/18 overlaps 10.1.0.0/17 of tenant \"alpha\"; choose a range that is not in use",
        ],
    },
    Mistake {
        name: "the tier's own VNI",
        from: "vni: 101",
        to: "vni: 827553",
        answers: &["20: vni 827553 is reserved for the cloud tier; choose another vni"],
    },
    Mistake {
        name: "one VNI twice",
        from: "vni: 102",
        to: "vni: 101",
        answers: &["41: vni 101 is already used on line 20; choose another vni"],
    },
    Mistake {
        name: "the tier's own range",
        from: "podCidrs: [10.1.0.0/17,",
        to: "podCidrs: [241.1.0.0/17,",
        answers: &[
            "22: 241.1.0.0/17 overlaps 240.0.0.0/4 of the cloud tier; choose a range that is not in use",
        ],
    },
    Mistake {
        name: "the tier's own range of IPv6",
        from: "podCidrs: [10.1.0.0/17, \"fd00:1::/64\"]",
        to: "podCidrs: [10.1.0.0/17, \"fdca:a1:0:1::/64\"]",
        answers: &[
            "22: fdca:a1:0:1::/64 overlaps fdca:a1::/48 of the cloud tier; choose a range that is not in use",
        ],
    },
    Mistake {
        name: "a link too narrow",
        from: "{name: gw-1a, az: az1, backend: b1}",
        to: "{name: gw-1a, az: az1, backend: b1, mtu: 1000}",
        answers: &[
            "10: mtu: 1000 is not a number of bytes from 1280 to 9000; write a number of bytes from 1280 to 9000",
        ],
    },
];

#[test]
fn mistakes_have_a_position_and_a_fix() {
    let wrong: Vec<String> = IN_TIERS
        .iter()
        .filter_map(|mistake| check(&file(), TIER, mistake))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn edges_need_a_controller_unless_they_have_a_command() {
    let written = (
        "controller: {az: az1}\nedges:\n- {name: edge-1, az: az1}\n",
        "edges:\n- {name: edge-1, az: az1, command: [sleep, \"9\"]}\n",
    );
    let problems = Topology::parse(&file(), &TIER.replacen(written.0, written.1, 1))
        .expect_err("no controller");
    assert_eq!(
        brief(&problems[0]),
        "7: edge \"edge-2\" needs a controller; add `controller: {az: …}`"
    );
}

#[test]
fn tier_settings_without_edges_are_mistakes() {
    let edges = "edges:\n- {name: edge-1, az: az1}\n- {name: edge-2, az: az2}\n";
    let written = TIER.replacen(edges, "", 1).replacen(
        "  gatewayCidrs:",
        "  homeAz: az1\n  gatewayCidrs:",
        1,
    );
    let problems = Topology::parse(&file(), &written).expect_err("no tier");
    let found: Vec<String> = problems.iter().map(brief).collect();
    for expected in [
        "7: `backend` has no effect without edges; remove it, or add `edges`",
        "22: `gatewayCidrs` have no effect without edges; remove them, or add `edges`",
        "21: `homeAz` has no effect without edges; remove it, or add `edges`",
        "41: `dns` has no effect without edges; remove it, or add `edges`",
    ] {
        assert!(
            found.iter().any(|line| line == expected),
            "{expected} is not in {found:#?}"
        );
    }
    assert!(
        found
            .iter()
            .any(|line| line.contains("10.1.0.0/17 overlaps 10.1.0.0/17 of tenant \"alpha\"")),
        "{found:#?}"
    );
}

#[test]
fn resolvers_query_the_local_az_first() {
    let plan = WorldPlan::of(&tier());
    let servers = |az| crate::tier::name_servers(&plan, &plan.tenants[1], az);
    assert_eq!(
        servers(2)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>(),
        ["10.1.208.1", "10.1.200.1"]
    );
    let text = crate::services::resolver_file("shop", &servers(1));
    let expected = "nameserver 10.1.200.1\nnameserver 10.1.208.1\n\
        search shop.svc.cluster.local svc.cluster.local\noptions timeout:1 attempts:3 ndots:2\n";
    assert_eq!(text, expected);
    let many: Vec<_> = (1..=7)
        .map(|last| std::net::Ipv4Addr::new(10, 0, 0, last))
        .collect();
    assert_eq!(
        crate::services::resolver_file("shop", &many)
            .matches("nameserver")
            .count(),
        3,
        "resolvers read three"
    );
}

/// Nodes and replicas have one tunnel end per AZ; only routers have two routes to it (T16 in
/// docs/security.md).
#[test]
fn edges_of_one_az_share_a_tunnel_end_through_a_multipath_route() {
    let yaml = TIER.replacen(
        "{name: edge-2, az: az2}",
        "{name: edge-2, az: az2}\n- {name: edge-3, az: az1}",
        1,
    );
    let topology =
        Topology::parse(&file(), &yaml).unwrap_or_else(|problems| panic!("{problems:#?}"));
    let plan = WorldPlan::of(&topology);
    let host = |name: &str| plan.host(name).expect("a host");
    let ends: Vec<_> = plan
        .edges
        .iter()
        .map(|edge| (edge.hosts.join("+"), edge.underlay.to_string()))
        .collect();
    // 250.1.255.1 is the tunnel end that the edges of AZ 1 share.
    assert_eq!(
        ends,
        [
            ("edge-1+edge-3".into(), "250.1.255.1".into()),
            ("edge-2".into(), host("edge-2").ip4.to_string())
        ]
    );
    let (one, three) = (host("edge-1"), host("edge-3"));
    let by = |edge: &crate::plan::HostPlan| {
        format!(
            " nexthop via {} dev {} onlink",
            edge.ip4,
            edge.router_device()
        )
    };
    let none = std::collections::BTreeSet::new();
    // No edge is dead, then one is, then both.
    assert_eq!(
        tool_batch::router_to_edges(&plan, 0, &none),
        [format!(
            "route replace 250.1.255.1/32{}{}",
            by(one),
            by(three)
        )]
    );
    assert_eq!(
        tool_batch::router_to_edges(&plan, 0, &["edge-1".to_owned()].into()),
        [format!("route replace 250.1.255.1/32{}", by(three))]
    );
    assert!(
        tool_batch::router_to_edges(&plan, 0, &["edge-1".to_owned(), "edge-3".to_owned()].into())
            .is_empty()
    );
    assert!(
        tool_batch::router_to_edges(&plan, 1, &none).is_empty(),
        "one edge is its own end"
    );
    let texts: String = tool_batch::configuration(&plan)
        .into_iter()
        .flatten()
        .map(|batch| show(&batch))
        .collect();
    // Both edges of the AZ have the shared address.
    assert_eq!(texts.matches("addr add 250.1.255.1/32 dev lo").count(), 2);
    assert!(
        !texts.contains(&format!("dst {}", one.ip4)),
        "nodes know the shared end only"
    );
    let paths = crate::state::WorldPaths::of("tier");
    let environments = crate::host_environment::EnvironmentBuilder {
        topology: &topology,
        plan: &plan,
        paths: &paths,
        cgroup: Path::new("/cgroup"),
        bin_dirs: &[],
    };
    let command = |name: &str| {
        environments
            .host(host(name))
            .job
            .expect("a job")
            .argv
            .join(" ")
    };
    assert!(command("edge-3").contains(&format!("--address {} --anycast 250.1.255.1", three.ip4)));
    assert!(!command("edge-2").contains("--anycast"));
}

#[test]
fn edges_and_gateways_get_their_addresses() {
    let topology = tier();
    let (plan, paths) = (
        WorldPlan::of(&topology),
        crate::state::WorldPaths::of("tier"),
    );
    let environments = crate::host_environment::EnvironmentBuilder {
        topology: &topology,
        plan: &plan,
        paths: &paths,
        cgroup: Path::new("/cgroup"),
        bin_dirs: &[],
    };
    let command = |host: &str| {
        let environment = environments.host(plan.host(host).expect("a host"));
        environment
            .job
            .expect("a job")
            .argv
            .join(" ")
            .replace("/run/canal/worlds/tier", "DIR")
    };
    let common = |host: &str, az: &str| {
        format!(
            "--az {az} --controller https://250.1.0.1:15012 --root-ca DIR/infra/root.pem --token-file DIR/tokens/{host}.token --data-dir DIR/data/{host}"
        )
    };
    let programs = |host: &str| format!("--device eth0 --pin-dir DIR/data/{host}/bpffs");
    // Addresses follow from the order of hosts in the file (`plan.rs`).
    let edge = format!(
        "canal-edge --edge edge-2 --address 250.2.0.1 {} {}",
        common("edge-2", "az2"),
        programs("edge-2")
    );
    assert_eq!(command("edge-2"), edge);
    let gateway = format!(
        "canal-gateway --replica gw-3a {} --workers 1 --backend b3 --underlay 250.2.0.2 {}",
        common("gw-3a", "az2"),
        programs("gw-3a")
    );
    assert_eq!(command("gw-3a"), gateway);
}
