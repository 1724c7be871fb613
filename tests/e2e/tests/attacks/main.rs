//! A tenant's people against another tenant, and an intruder among its own: every attack that the threat model names, with real bytes. Each
//! must fail, with the refusal counted where one is named; and the same probe by who may must succeed, or the attack proves nothing.

mod control;
mod deputies;
mod open;
mod requests;
mod stage;
mod tokens;
mod tunnels;

use std::time::{Duration, Instant};

use stage::{Attack, open_stage, stage};

/// A refusal shows in metrics within this time.
const SEEN_WITHIN: Duration = Duration::from_secs(8);
/// Attacks that must be there.
const ATTACKS_MIN: usize = 40;

/// All of them, by group.
fn groups() -> [(&'static str, Vec<Attack>); 6] {
    [
        ("tunnels", tunnels::attacks()),
        ("requests", requests::attacks()),
        ("tokens", tokens::attacks()),
        ("deputies", deputies::attacks()),
        ("control", control::attacks()),
        ("open", open::attacks()),
    ]
}

fn run(group: &str) {
    let stage = if group == "open" { open_stage() } else { stage() };
    let mut number = 0;
    let mut wrong = Vec::new();
    for (name, attacks) in groups() {
        for attack in attacks {
            number += 1;
            if name == group
                && let Err(complaint) = judge(stage, &attack)
            {
                wrong.push(format!("{number}. {}: {complaint}", attack.name));
            } else if name == group {
                println!("{number}. {}", attack.name);
            }
        }
    }
    if !wrong.is_empty() {
        // Before what was wrong, which nobody would find below so much.
        println!("{}", stage.mesh.logs());
    }
    assert!(wrong.is_empty(), "{} of {group}:\n{}", wrong.len(), wrong.join("\n"));
}

fn judge(stage: &stage::Stage, attack: &Attack) -> Result<(), String> {
    let before = attack.counter.as_ref().map(|counter| counter.read(stage));
    let seen = (attack.attempt)(stage);
    if seen.reached {
        return Err(format!("it reached: {}", seen.said));
    }
    let started = Instant::now();
    while let (Some(counter), Some(before)) = (&attack.counter, before)
        && counter.read(stage) < before + attack.refusals_min
    {
        if started.elapsed() > SEEN_WITHIN {
            return Err(format!(
                "it failed ({}), and {counter:?} counted {} of {}\n{}",
                seen.said,
                counter.read(stage) - before,
                attack.refusals_min,
                counter.siblings(stage)
            ));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let owner = (attack.control)(stage);
    if owner.reached { Ok(()) } else { Err(format!("the same by who may does not work: {} (the attack: {})", owner.said, seen.said)) }
}

#[test]
fn tunnels_are_closed_to_others() {
    run("tunnels");
}

#[test]
fn requests_do_not_pass_policies_by() {
    run("requests");
}

#[test]
fn tokens_are_not_forged() {
    run("tokens");
}

#[test]
fn the_mesh_is_nobody_s_deputy() {
    run("deputies");
}

#[test]
fn the_control_plane_serves_each_its_own() {
    run("control");
}

/// With the virtual switch open.
#[test]
fn what_a_switch_would_stop_the_mesh_refuses_itself() {
    run("open");
}

#[test]
fn there_are_enough_of_them_and_each_once() {
    let mut names: Vec<&str> = groups().iter().flat_map(|(_, attacks)| attacks.iter().map(|attack| attack.name)).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert!(all >= ATTACKS_MIN && names.len() == all, "{all} attacks, {} names", names.len());
    println!("{all} attacks");
}
