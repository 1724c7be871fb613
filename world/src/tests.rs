//! Tests of the pure modules: golden texts of plan and commands, and the messages for mistakes in a
//! topology file.

mod directories;
mod keys;
mod links;
mod tier;

use std::path::{Path, PathBuf};

use crate::plan::WorldPlan;
use crate::problem::TopologyProblem;
use crate::tool_batch::{self, ToolBatch};
use crate::topology::{LinkRate, PodTemplate, Topology};

const SMOKE: &str = include_str!("../topologies/smoke.yaml");

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/smoke.yaml")
}

fn smoke() -> WorldPlan {
    WorldPlan::of(&Topology::parse(&file(), SMOKE).expect("the smoke topology is right"))
}

/// Compares with a golden text. `BLESS=1` writes the golden text again.
fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).expect("golden text written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = expected
        .lines()
        .zip(text.lines())
        .position(|(old, new)| old != new);
    let at = differs.unwrap_or_else(|| expected.lines().count().min(text.lines().count()));
    let line = |text: &str| text.lines().nth(at).unwrap_or("(the end)").to_owned();
    assert!(
        expected == text,
        "{name}:{}: {:?} is now {:?}; if that is meant, run again with BLESS=1",
        at + 1,
        line(&expected),
        line(text)
    );
}

#[test]
fn golden_plan() {
    golden("smoke.plan.txt", &smoke().to_string());
}

#[test]
fn golden_script() {
    let plan = smoke();
    let spaces = tool_batch::spaces(&plan);
    let mut batches = vec![tool_batch::make_spaces(
        spaces.iter().map(|(name, _)| *name),
    )];
    batches.extend(tool_batch::wires(&plan));
    batches.extend(tool_batch::configuration(&plan).into_iter().flatten());
    golden(
        "smoke.script.txt",
        &batches.iter().map(show).collect::<String>(),
    );
}

fn show(batch: &ToolBatch) -> String {
    let lines: String = batch
        .lines
        .iter()
        .map(|line| format!("  {line}\n"))
        .collect();
    format!(
        "{} {:?}\n{lines}",
        batch.netns.as_deref().unwrap_or("-"),
        batch.tool
    )
}

#[test]
fn no_default_route_leaves_a_world() {
    for batch in tool_batch::configuration(&smoke()).iter().flatten() {
        let netns = batch.netns.as_deref().unwrap_or_default();
        for line in batch
            .lines
            .iter()
            .filter(|line| line.contains("0.0.0.0/0") || line.contains("::/0"))
        {
            let inside_a_pod = netns.contains(".default.") && line.contains(" via ");
            assert!(
                inside_a_pod || line.contains("unreachable"),
                "{netns}: {line}"
            );
        }
    }
}

#[test]
fn no_text_is_too_broken_for_an_answer() {
    let check_text = |text: &str| {
        if let Err(problems) = Topology::parse(&file(), text) {
            assert!(!problems.is_empty(), "refused without a reason:\n{text}");
        }
    };
    for end in (0..SMOKE.len()).filter(|end| SMOKE.is_char_boundary(*end)) {
        check_text(&SMOKE[..end]);
    }
    let lines: Vec<&str> = SMOKE.lines().collect();
    for at in 0..lines.len() {
        let with = |line: &str| {
            [&lines[..at], &[line], &lines[at + 1..]]
                .concat()
                .join("\n")
        };
        let line = lines[at];
        for mutant in [
            "",
            &line.replace(':', ""),
            &format!("  {line}"),
            &line.replace('[', "{"),
            &line.replace(|letter: char| letter.is_ascii_digit(), "99999999999"),
            "- &a [*a]",
            "? {}",
        ] {
            check_text(&with(mutant));
        }
    }
}

#[test]
fn a_world_is_recognised_by_its_topology() {
    let here = Topology::parse(&file(), SMOKE).expect("right");
    let there = Topology::parse(Path::new("/elsewhere.yaml"), SMOKE).expect("right");
    assert_eq!(
        here.fingerprint(),
        there.fingerprint(),
        "the path of the file has no influence"
    );
    let other =
        Topology::parse(&file(), &SMOKE.replace("replicas: 3", "replicas: 2")).expect("right");
    assert_ne!(here.fingerprint(), other.fingerprint());
}

/// Every field that `read` reads.
const KNOWN_FIELDS: &[&str] = &[
    "args",
    "az",
    "azs",
    "backend",
    "command",
    "config",
    "controller",
    "delay",
    "dns",
    "edges",
    "env",
    "exec",
    "gateway",
    "gatewayCidrs",
    "gateways",
    "homeAz",
    "host",
    "hosts",
    "http",
    "algorithm",
    "fallback",
    "interAz",
    "jitter",
    "loss",
    "seed",
    "keyServers",
    "keys",
    "location",
    "tenant",
    "tlsDir",
    "workloadApi",
    "labels",
    "links",
    "mtu",
    "name",
    "namespace",
    "node",
    "nodes",
    "outside",
    "outboundTrafficPolicy",
    "path",
    "periodMs",
    "pod",
    "podCidrs",
    "pods",
    "port",
    "proxy",
    "rate",
    "readiness",
    "replicas",
    "restart",
    "serviceAccount",
    "serviceCidrs",
    "tcp",
    "tenants",
    "trustDomain",
    "vni",
    "vswitch",
    "workers",
    "world",
];

/// The reference topology contains every field that a topology can have, with a comment.
#[test]
fn the_reference_is_right() {
    let path = file().with_file_name("reference.yaml");
    let topology = Topology::load(&path).unwrap_or_else(|problems| panic!("{problems:#?}"));
    assert_eq!(topology.tenants[0].config.len(), 1);
    let text = std::fs::read_to_string(&path).expect("the reference");
    for field in KNOWN_FIELDS {
        assert!(
            text.contains(&format!("{field}:")),
            "the reference does not show `{field}`"
        );
    }
}

/// A change to the smoke topology, and the resulting messages in the form `line: what; fix`.
struct Mistake {
    name: &'static str,
    from: &'static str,
    to: &'static str,
    answers: &'static [&'static str],
}

/// Returns the messages if they differ from the expected ones.
fn check(file: &Path, base: &str, mistake: &Mistake) -> Option<String> {
    let Mistake {
        name,
        from,
        to,
        answers,
    } = mistake;
    assert!(base.contains(from), "{name}: the topology has no {from:?}");
    let problems = Topology::parse(file, &base.replacen(from, to, 1)).expect_err(name);
    let found: Vec<String> = problems.iter().map(brief).collect();
    (found != *answers).then(|| format!("{name}:\n  {}", found.join("\n  ")))
}

fn brief(problem: &TopologyProblem) -> String {
    format!("{}: {}; {}", problem.spot.line, problem.what, problem.fix)
}

/// Mistakes that are visible in one field alone.
const IN_FIELDS: &[Mistake] = &[
    Mistake {
        name: "a slip of the pen",
        from: "trustDomain: alpha.example",
        to: "trustDomian: alpha.example",
        answers: &[
            "11: a tenant has no `trustDomain`; add `trustDomain: …`",
            "13: a tenant has no field `trustDomian`; did you mean `trustDomain`?",
        ],
    },
    Mistake {
        name: "an unknown field",
        from: "  vni: 101\n",
        to: "  vni: 101\n  colour: red\n",
        answers: &[
            "13: a tenant has no field `colour`; remove it; valid fields: name, vni, trustDomain, outboundTrafficPolicy, podCidrs, gatewayCidrs, ingressNetwork, homeAz, dns, keys, serviceCidrs, config, nodes, pods",
        ],
    },
    Mistake {
        name: "several at once, in the order of the lines",
        from: "world: smoke\nazs: [{name: az1}, {name: az2}]",
        to: "world: Smoke!\nazs: [{name: az1}, {name: az1}]\nlinks: {pod: {rate: fast}}",
        answers: &[
            "2: world: \"Smoke!\" is not a name; use 1 to 20 of a-z, 0-9 and -, not - at an end",
            "3: az \"az1\" is already on line 3; give it another name",
            "4: rate: \"fast\" is not a rate such as 100mbit or 1gbit (64kbit to 400gbit); write a rate such as 100mbit or 1gbit (64kbit to 400gbit)",
            "8: there is no AZ \"az2\"; use one of: az1, az1",
            "10: there is no AZ \"az2\"; use one of: az1, az1",
            "19: there is no AZ \"az2\"; use one of: az1, az1",
        ],
    },
    Mistake {
        name: "a list instead of a mapping",
        from: "controller: {az: az1, command: [sleep, infinity]}",
        to: "controller: [az1]",
        answers: &[
            "4: the controller must be a mapping, but this is a list; write `field: value` lines here",
        ],
    },
    Mistake {
        name: "an out-of-range vni",
        from: "vni: 101",
        to: "vni: 16777216",
        answers: &[
            "12: vni: 16777216 is not a VXLAN network identifier from 1 to 16777215; choose a smaller one",
        ],
    },
    Mistake {
        name: "a range with host bits",
        from: "10.1.0.0/16",
        to: "10.1.2.0/16",
        answers: &[
            "14: podCidrs: 10.1.2.0/16 has bits set beyond its prefix length; write 10.1.0.0/16",
        ],
    },
    Mistake {
        name: "two probes",
        from: "readiness: {tcp: {port: 8080}}",
        to: "readiness: {tcp: {port: 8080}, exec: [\"true\"]}",
        answers: &[
            "31: readiness needs exactly one of http, tcp, exec; write e.g. `readiness: {tcp: {port: 9080}}`",
        ],
    },
    Mistake {
        name: "a port of nought",
        from: "readiness: {tcp: {port: 8080}}",
        to: "readiness: {tcp: {port: 0}}",
        answers: &["31: port: \"0\" is not a port from 1 to 65535; write a port from 1 to 65535"],
    },
    Mistake {
        name: "a pod without a command",
        from: "{name: web, node: b-n1, command: [canal-world-peer, listen, \"8080\"], readiness",
        to: "{name: web, node: b-n1, readiness",
        answers: &["31: a pod has no `command`; add `command: …`"],
    },
    Mistake {
        name: "an unknown policy",
        from: "  vni: 102\n",
        to: "  vni: 102\n  outboundTrafficPolicy: allow\n",
        answers: &[
            "27: outboundTrafficPolicy: \"allow\" is not Deny or Passthrough; write Deny or Passthrough",
        ],
    },
    Mistake {
        name: "an unknown word for the switch",
        from: "azs:",
        to: "vswitch: closed\nazs:",
        answers: &["3: vswitch: \"closed\" is not Checked or Open; write Checked or Open"],
    },
    Mistake {
        name: "a missing configuration file",
        from: "  vni: 102\n",
        to: "  vni: 102\n  config: [nowhere.yaml]\n",
        answers: &[
            "27: config: nowhere.yaml: No such file or directory (os error 2); name an existing YAML file or directory",
        ],
    },
];

/// Mistakes that are visible only between fields.
const BETWEEN_FIELDS: &[Mistake] = &[
    Mistake {
        name: "a node that is not there",
        from: "nodes: [a-n1, a-n2]\n    replicas",
        to: "nodes: [a-n1, b-n1]\n    replicas",
        answers: &["21: tenant \"alpha\" has no node \"b-n1\"; use one of: a-n1, a-n2"],
    },
    Mistake {
        name: "one name twice",
        from: "{name: b-n1, az: az1, proxy: false}",
        to: "{name: gw1, az: az1, proxy: false}",
        answers: &[
            "29: the name \"gw1\" is already taken on line 6; give it another name",
            "31: tenant \"beta\" has no node \"b-n1\"; use one of: gw1",
        ],
    },
    Mistake {
        name: "one vni twice",
        from: "vni: 102",
        to: "vni: 101",
        answers: &["26: vni 101 is already used on line 12; choose another vni"],
    },
    Mistake {
        name: "one trust domain twice",
        from: "beta.example",
        to: "alpha.example",
        answers: &[
            "27: trustDomain \"alpha.example\" is already used on line 13; choose another one",
        ],
    },
    Mistake {
        name: "overlapping pods",
        from: "10.2.0.0/16",
        to: "10.0.0.0/14",
        answers: &[
            "28: 10.0.0.0/14 overlaps 10.1.0.0/16 of tenant \"alpha\"; choose a range that is not in use",
        ],
    },
    Mistake {
        name: "pods in the underlay",
        from: "10.2.0.0/16",
        to: "10.201.0.0/16",
        answers: &[
            "28: 10.201.0.0/16 overlaps 10.200.0.0/13 of the nodes' underlay; choose a range that is not in use",
        ],
    },
    Mistake {
        name: "too many nodes for the range",
        from: "podCidrs: [10.2.0.0/16, \"fd00:102::/64\"]\n  nodes: [{name: b-n1, az: az1, proxy: false}]",
        to: "podCidrs: [10.2.0.0/22, \"fd00:102::/64\"]\n  nodes: [{name: b-n1, az: az1, proxy: false}, {name: b2, az: az1, proxy: false}, {name: b3, az: az1, proxy: false}]",
        answers: &[
            "29: 3 nodes do not fit into 10.2.0.0/22; keep 2 nodes, or write a shorter prefix",
        ],
    },
    Mistake {
        name: "too many pods on a node",
        from: "{name: web, node: b-n1,",
        to: "{name: web, node: b-n1, replicas: 254,",
        answers: &["31: node \"b-n1\" has more than 253 pods; spread them over more nodes"],
    },
    Mistake {
        name: "a mesh without a controller",
        from: "controller: {az: az1, command: [sleep, infinity]}\ngateways:\n- {name: gw1, az: az1, command: [canal-world-peer, listen, \"8080\"]}",
        to: "gateways:\n- {name: gw1, az: az1}",
        answers: &["5: gateway \"gw1\" needs a controller; add `controller: {az: …}`"],
    },
];

#[test]
fn mistakes_have_a_position_and_a_fix() {
    let wrong: Vec<String> = IN_FIELDS
        .iter()
        .chain(BETWEEN_FIELDS)
        .filter_map(|mistake| check(&file(), SMOKE, mistake))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn broken_yaml_has_a_position() {
    let text = SMOKE.replacen("{name: az2}]", "{name: az2}", 1);
    let problems = Topology::parse(&file(), &text).expect_err("not YAML");
    assert_eq!(problems.len(), 1);
    assert!(
        problems[0].spot.line > 0 && problems[0].what.starts_with("not readable as YAML"),
        "{}",
        problems[0]
    );
}

#[test]
fn limits_of_a_world() {
    // Each limit is exceeded by one, so that the limit itself is tested.
    let azs: Vec<String> = (1..=8).map(|number| format!("az{number}")).collect();
    let text = format!("world: big\nazs: [{}]\n", azs.join(", "));
    let problems = Topology::parse(Path::new("big.yaml"), &text).expect_err("eight AZs");
    assert_eq!(brief(&problems[0]), "2: more than 7 AZs; keep at most 7");

    // Each gateway is a line behind the first three, so the last of 255 is in line 258.
    let gateways: String = (0..255)
        .map(|number| format!("- {{name: g{number}, az: a, command: [x]}}\n"))
        .collect();
    let problems = Topology::parse(
        Path::new("big.yaml"),
        &format!("world: big\nazs: [a]\ngateways:\n{gateways}"),
    )
    .expect_err("255 gateways");
    assert_eq!(
        brief(&problems[0]),
        "258: 255 gateways are more than 254; remove some: a tenant's gateway range is one /24"
    );

    // Each AZ's router is a host too, so 2,000 more are one too many.
    let hosts: String = (0..2000)
        .map(|number| format!("- {{name: h{number}, az: a}}\n"))
        .collect();
    let problems = Topology::parse(
        Path::new("big.yaml"),
        &format!("world: big\nazs: [a]\nhosts:\n{hosts}"),
    )
    .expect_err("2001 hosts");
    assert_eq!(
        brief(&problems[0]),
        "0: the world has 2001 hosts, more than 2000; make it smaller, or split it"
    );

    let problems = Topology::parse(
        Path::new("big.yaml"),
        &"#".repeat(crate::tree::FILE_BYTES_MAX + 1),
    )
    .expect_err("a huge file");
    assert_eq!(
        problems[0].to_string(),
        "big.yaml: the file has 1048577 bytes, more than 1048576; fix: split it into several worlds"
    );
}

#[test]
fn values_stay_as_written() {
    let yaml = "name: web\nnode: n\ncommand: [run, 1.10, yes, \"08\", 0x10, 1e3]\nenv: {VERSION: 1.10, EMPTY: , DEBUG: true, LONG: \"a b\"}\n";
    let pod = PodTemplate::parse(yaml).expect("a pod");
    assert_eq!(
        pod.process.command,
        ["run", "1.10", "yes", "08", "0x10", "1e3"]
    );
    let env: Vec<(&str, &str)> = pod
        .process
        .env
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(
        env,
        [
            ("DEBUG", "true"),
            ("EMPTY", ""),
            ("LONG", "a b"),
            ("VERSION", "1.10")
        ]
    );
    let problems =
        PodTemplate::parse("name: Web\nnode: n\ncommand: [x]\n").expect_err("upper case");
    assert_eq!(
        brief(&problems[0]),
        "1: pod: \"Web\" is not a name; use 1 to 59 of a-z, 0-9 and -, not - at an end"
    );
}

#[test]
fn rates() {
    for (text, bits) in [
        ("100mbit", Some(100_000_000)),
        ("1gbit", Some(1_000_000_000)),
        ("64kbit", Some(64_000)),
        ("63kbit", None),
        ("500gbit", None),
        ("10", None),
        ("mbit", None),
        ("1 gbit", None),
    ] {
        assert_eq!(
            text.parse::<LinkRate>().ok().map(|rate| rate.bits),
            bits,
            "{text}"
        );
    }
}

#[test]
fn services_become_names() {
    let yaml = "apiVersion: v1\nkind: Service\nmetadata: {name: reviews, namespace: bookinfo}\nspec: {clusterIP: 10.101.0.5, clusterIPs: [10.101.0.5, 'fd00::5']}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: headless}\nspec: {clusterIP: None}\n";
    let path =
        std::env::temp_dir().join(format!("canal-world-services-{}.yaml", std::process::id()));
    std::fs::write(&path, yaml).expect("written");
    let services = crate::services::in_files(std::slice::from_ref(&path));
    std::fs::remove_file(&path).expect("removed");
    let own = ["10.1.1.2".parse().expect("an address")];
    let text = crate::services::hosts_file("web-0", &own, "bookinfo", &services);
    let expected = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n10.1.1.2 web-0\n\
        10.101.0.5 reviews reviews.bookinfo reviews.bookinfo.svc reviews.bookinfo.svc.cluster.local\n\
        fd00::5 reviews reviews.bookinfo reviews.bookinfo.svc reviews.bookinfo.svc.cluster.local\n";
    assert_eq!(text, expected);
    assert!(
        !crate::services::hosts_file("x", &own, "other", &services).contains(" reviews "),
        "bare names are the namespace's own"
    );
}
