//! Tests of links with relays in plan and commands, and of the messages for mistakes.

use std::path::Path;

use super::{Mistake, SMOKE, check, file, golden, show};
use crate::plan::WorldPlan;
use crate::tool_batch;
use crate::topology::Topology;

const LINKS: &str = r#"world: links
azs: [az1, az2]
links: {interAz: {delay: 2ms}, gateway: {delay: 1ms, jitter: 0.5ms, loss: 1%}, seed: 7}
gateways:
- {name: gw1, az: az1, command: [sleep, infinity]}
- {name: gw2, az: az2, delay: 0ms, command: [sleep, infinity]}
hosts:
- {name: load, az: az2}
"#;

/// Shows the plan, and the commands that differ from links without relays: those that create them
/// and those in the relays' namespaces.
#[test]
fn golden_relays() {
    let topology = Topology::parse(Path::new("links.yaml"), LINKS)
        .unwrap_or_else(|problems| panic!("{problems:#?}"));
    let plan = WorldPlan::of(&topology);
    let relays = tool_batch::configuration(&plan)
        .into_iter()
        .flatten()
        .filter(|batch| batch.netns.as_ref().is_some_and(|n| n.contains(".relay-")));
    let batches = tool_batch::wires(&plan).into_iter().chain(relays);
    golden(
        "links.txt",
        &format!(
            "{plan}{}",
            batches.map(|batch| show(&batch)).collect::<String>()
        ),
    );
}

#[test]
fn links_lose_different_frames_of_one_seed() {
    let seeds = |text: &str| -> Vec<u64> {
        let topology = Topology::parse(Path::new("links.yaml"), text)
            .unwrap_or_else(|problems| panic!("{problems:#?}"));
        WorldPlan::of(&topology)
            .relays()
            .iter()
            .map(|relay| relay.seed)
            .collect()
    };
    let seven = seeds(LINKS);
    assert_eq!(
        seven,
        seeds(&LINKS.replace("world: links", "world: other")),
        "the same in every world"
    );
    assert!(seven[0] != seven[1] && seven[1] != seven[2], "{seven:?}");
    assert!(
        seeds(&LINKS.replace("seed: 7", "seed: 8"))
            .iter()
            .zip(&seven)
            .all(|(eight, seven)| eight != seven)
    );
}

const IN_LINKS: &[Mistake] = &[
    Mistake {
        name: "a delay without a unit, and a loss without a sign",
        from: "- {name: load1, az: az2}",
        to: "- {name: load1, az: az2, delay: 5, loss: 2}",
        answers: &[
            "9: delay: \"5\" is not a time such as 500us, 0.5ms or 1s (at most 10s); write a time such as 500us, 0.5ms or 1s (at most 10s)",
            "9: loss: \"2\" is not a share of frames such as 1% or 0.05%; write a share of frames such as 1% or 0.05%",
        ],
    },
    Mistake {
        name: "more jitter than delay",
        from: "- {name: load1, az: az2}",
        to: "- {name: load1, az: az2, delay: 1ms, jitter: 2ms}",
        answers: &["9: jitter: 2ms is more than the delay, 1ms; write at most the delay"],
    },
    Mistake {
        name: "pods' links have rates only",
        from: "controller:",
        to: "links: {pod: {delay: 1ms}}\ncontroller:",
        answers: &["4: pod has no field `delay`; remove it; valid fields: rate"],
    },
    Mistake {
        name: "a relay's name",
        from: "name: load1",
        to: "name: relay-gw1",
        answers: &[
            "9: the name \"relay-gw1\" begins with the prefix of relays; choose one without \"relay-\"",
        ],
    },
];

#[test]
fn mistakes_have_a_position_and_a_fix() {
    let wrong: Vec<String> = IN_LINKS
        .iter()
        .filter_map(|mistake| check(&file(), SMOKE, mistake))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
