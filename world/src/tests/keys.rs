//! Tests of key servers in topologies, plans and commands, and of the messages for mistakes.

use std::path::{Path, PathBuf};

use super::{Mistake, brief, check, show};
use crate::plan::WorldPlan;
use crate::tool_batch;
use crate::topology::{Topology, TopologyKeyLocation};

const TIER: &str = include_str!("../../topologies/tier.yaml");

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml")
}

/// Returns the tier topology with key servers: one in each AZ, and one that belongs to beta.
fn text() -> String {
    let servers = "keyServers:\n- {name: ks-1, az: az1}\n- {name: ks-2, az: az2}\n- {name: beta-ks, az: az1, tenant: beta, tlsDir: .}\ntenants:\n";
    let keys = "  vni: 101\n  keys: {location: KeyServer, algorithm: Rsa2048}\n";
    TIER.replacen("tenants:\n", servers, 1)
        .replacen("  vni: 101\n", keys, 1)
}

fn topology() -> Topology {
    Topology::parse(&file(), &text()).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

#[test]
fn requesters_get_the_providers_key_servers_and_their_names() {
    let topology = topology();
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
    // Nodes and gateways of both AZs and tenants get the same two servers, never a tenant's.
    // Addresses follow from the order of hosts in the file (`plan.rs`).
    let expected = "--key-server az1=ks-1@250.1.0.7:15013 --key-server az2=ks-2@250.2.0.6:15013";
    for host in ["a-n1", "b-n2", "gw-1a", "gw-4b"] {
        let command = command(host);
        assert!(
            command.contains(expected) && !command.contains("beta-ks"),
            "{host}: {command}"
        );
    }
    let own = "--tenant beta --tls-dir DIR/data/beta-ks/tls";
    for (host, begins, ends) in [
        (
            "ks-1",
            "canal-keyserver --name ks-1 --az az1 ",
            "--listen 0.0.0.0:15013",
        ),
        ("beta-ks", "canal-keyserver --name beta-ks ", own),
    ] {
        let command = command(host);
        assert!(
            command.starts_with(begins) && command.ends_with(ends),
            "{host}: {command}"
        );
        assert!(
            command.contains(&format!("--token-file DIR/tokens/{host}.token")),
            "{host}: {command}"
        );
    }
    assert_eq!(
        topology.tenants[0].keys.map(|keys| keys.location),
        Some(TopologyKeyLocation::KeyServer)
    );
    assert_eq!(
        plan.key_servers_of("beta")
            .map(|host| host.name.as_str())
            .collect::<Vec<_>>(),
        ["beta-ks"]
    );
    assert_eq!(plan.key_servers_of("alpha").count(), 0);
}

/// Nodes and gateways reach the provider's key servers. A tenant's own key server is reached by its
/// own nodes and by gateways.
#[test]
fn routers_admit_only_requesters_to_key_servers() {
    let plan = WorldPlan::of(&topology());
    let batches = tool_batch::configuration(&plan).into_iter().flatten();
    let rules: Vec<String> = batches
        .filter(|batch| batch.netns.as_deref() == Some("cnl-tier.router-az1"))
        .flat_map(|batch| batch.lines)
        .filter(|line| line.contains("to_key_servers") && line.contains("rule"))
        .collect();
    let address = |host: &str| plan.host(host).expect("a host").ip4.to_string();
    let device = |host: &str| {
        format!(
            "oifname \"{}\"",
            plan.host(host).expect("a host").router_device()
        )
    };
    let of = |host: &str| {
        rules
            .iter()
            .filter(|rule| rule.contains(&device(host)))
            .collect::<Vec<_>>()
    };
    // Words, because an address may be the beginning of a longer one.
    let names = |rule: &str, address: &str| rule.split([' ', ',']).any(|word| word == address);
    let (ours, theirs) = (of("ks-1"), of("beta-ks"));
    // One rule refuses all but requesters; a tenant's server also has a rule for its nodes and one
    // for others.
    assert_eq!((ours.len(), theirs.len()), (1, 3), "{rules:#?}");
    for outsider in ["edge-1", "edge-2", "controller", "ks-2", "beta-ks"] {
        assert!(names(ours[0], &address(outsider)), "{outsider}: {rules:#?}");
    }
    for asker in ["gw-1a", "gw-4b", "a-n1", "b-n2"] {
        assert!(
            !names(ours[0], &address(asker)) && !names(theirs[0], &address(asker)),
            "{asker}: {rules:#?}"
        );
    }
    assert!(
        names(theirs[1], &address("b-n1"))
            && !names(theirs[1], &address("a-n1"))
            && theirs[1].ends_with("accept"),
        "{rules:#?}"
    );
    // 10.200.0.0/13 contains the underlay addresses of all nodes.
    assert!(
        theirs[2].contains("10.200.0.0/13") && theirs[2].ends_with("drop"),
        "{rules:#?}"
    );
    // Without key servers the chain must not exist.
    let without = WorldPlan::of(&Topology::parse(&file(), TIER).expect("right"));
    assert!(
        !tool_batch::configuration(&without)
            .iter()
            .flatten()
            .any(|batch| show(batch).contains("to_key_servers"))
    );
}

const MISTAKES: &[Mistake] = &[
    Mistake {
        name: "a key server of an unknown tenant",
        from: "tenant: beta",
        to: "tenant: gamma",
        answers: &[
            "21: key server \"beta-ks\": there is no tenant \"gamma\"; use one of: alpha, beta",
        ],
    },
    Mistake {
        name: "keys of an unknown tenant",
        from: "tenant: beta, tlsDir: .",
        to: "tlsDir: .",
        answers: &[
            "21: key server \"beta-ks\" has `tlsDir` and no `tenant`; add `tenant: …`, or remove it: the provider's key server has only keys that it creates",
        ],
    },
    Mistake {
        name: "keys from nowhere",
        from: "tlsDir: .",
        to: "tlsDir: nowhere",
        answers: &["21: tlsDir: nowhere is not a directory; name an existing directory"],
    },
    Mistake {
        name: "keys in no key server",
        from: "- {name: ks-1, az: az1}\n- {name: ks-2, az: az2}\n",
        to: "",
        answers: &[
            "23: the keys of tenant \"alpha\" are in key servers, but the provider has no key server; add one without `tenant` to `keyServers`: {name: ks-1, az: …}",
        ],
    },
    Mistake {
        name: "an unknown location of keys",
        from: "location: KeyServer",
        to: "place: Cloud",
        answers: &["25: place: \"Cloud\" is not Local or KeyServer; write Local or KeyServer"],
    },
    Mistake {
        name: "an algorithm without keys",
        from: "algorithm: Rsa2048",
        to: "algorithm: Rsa512",
        answers: &[
            "25: algorithm: \"Rsa512\" is not EcdsaP256 or Rsa2048; write EcdsaP256 or Rsa2048",
        ],
    },
    Mistake {
        name: "a tenant for a component that has none",
        from: "{name: gw-1a, az: az1, backend: b1}",
        to: "{name: gw-1a, az: az1, backend: b1, tenant: beta}",
        answers: &[
            "10: a gateway has no field `tenant`; remove it; valid fields: name, az, workers, receiveCores, backend, mtu, rate, delay, jitter, loss, command, args, env, restart, readiness",
        ],
    },
];

#[test]
fn mistakes_have_a_position_and_a_fix() {
    let text = text();
    let wrong: Vec<String> = MISTAKES
        .iter()
        .filter_map(|mistake| check(&file(), &text, mistake))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn key_servers_need_a_controller_unless_they_have_a_command() {
    let text = "world: few\nazs: [a]\nkeyServers:\n- {name: ks-1, az: a}\n- {name: ks-2, az: a, command: [sleep, \"9\"]}\n";
    let problems = Topology::parse(&file(), text).expect_err("no controller");
    assert_eq!(
        problems.iter().map(brief).collect::<Vec<_>>(),
        ["4: key server \"ks-1\" needs a controller; add `controller: {az: …}`"]
    );
}
