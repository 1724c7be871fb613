//! A tenant's users against another tenant, and an intruder among a tenant's own workloads: every
//! attack that the threat model names, with real bytes. Each must fail, and be counted if the
//! threat model names a counter. The same probe by an authorized client must succeed; otherwise the
//! attack proves nothing.

mod attack_world;
mod confused_deputy;
mod control;
mod open;
mod requests;
mod tokens;
mod tunnels;

use std::time::{Duration, Instant};

use attack_world::{Attack, open_setup, setup};
use canal_timing::deadline;

/// A refusal is visible in metrics within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const SEEN_WITHIN: Duration = Duration::from_secs(8);
/// Minimum number of attacks. It finds a list that lost attacks by mistake.
const ATTACKS_MIN: usize = 40;

/// Returns all attacks by group.
fn groups() -> [(&'static str, Vec<Attack>); 6] {
    [
        ("tunnels", tunnels::attacks()),
        ("requests", requests::attacks()),
        ("tokens", tokens::attacks()),
        ("deputies", confused_deputy::attacks()),
        ("control", control::attacks()),
        ("open", open::attacks()),
    ]
}

fn run(group: &str) {
    let setup = if group == "open" {
        open_setup()
    } else {
        setup()
    };
    let mut number = 0;
    let mut wrong = Vec::new();
    for (name, attacks) in groups() {
        for attack in attacks {
            number += 1;
            if name == group
                && let Err(complaint) = run_case(setup, &attack)
            {
                wrong.push(format!("{number}. {}: {complaint}", attack.name));
            } else if name == group {
                println!("{number}. {}", attack.name);
            }
        }
    }
    if !wrong.is_empty() {
        // The logs come before the failures, which would otherwise be hard to find.
        println!("{}", setup.mesh.logs());
    }
    assert!(
        wrong.is_empty(),
        "{} of {group}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

fn run_case(setup: &attack_world::AttackWorld, attack: &Attack) -> Result<(), String> {
    let before = attack.counter.as_ref().map(|counter| counter.read(setup));
    let seen = (attack.attempt)(setup);
    if seen.reached {
        return Err(format!("the attack succeeded: {}", seen.output));
    }
    let started = Instant::now();
    while let (Some(counter), Some(before)) = (&attack.counter, before)
        && counter.read(setup) < before + attack.refusals_min
    {
        if started.elapsed() > deadline(SEEN_WITHIN) {
            return Err(format!(
                "the attack failed ({}), but {counter:?} counted {} of {}\n{}",
                seen.output,
                counter.read(setup) - before,
                attack.refusals_min,
                counter.siblings(setup)
            ));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let owner = (attack.control)(setup);
    if owner.reached {
        Ok(())
    } else {
        Err(format!(
            "the control does not work: {} (the attack: {})",
            owner.output, seen.output
        ))
    }
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
fn the_mesh_is_no_confused_deputy() {
    run("deputies");
}

#[test]
fn the_control_plane_serves_each_its_own() {
    run("control");
}

/// Runs the attacks with the virtual switch open.
#[test]
fn the_mesh_refuses_the_packets_that_a_switch_would_drop() {
    run("open");
}

#[test]
fn there_are_enough_of_them_and_each_once() {
    let mut names: Vec<&str> = groups()
        .iter()
        .flat_map(|(_, attacks)| attacks.iter().map(|attack| attack.name))
        .collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert!(
        all >= ATTACKS_MIN && names.len() == all,
        "{all} attacks, {} names",
        names.len()
    );
    println!("{all} attacks");
}
