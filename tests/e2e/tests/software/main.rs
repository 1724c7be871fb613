//! Third-party software, unmodified, in a meshed and in an unmeshed tenant with the same addresses:
//! each program's server in one pod, its client in a pod on another node, over pod and Service
//! addresses of both families. The output of a script's `check` is an observation, compared like
//! those of the cases (`differences.tsv`). Software that this machine lacks is skipped and
//! reported. The gate runs Redis only.
//!
//! The scripts are `tests/e2e/programs/software/*.sh`; their first lines state their requirements,
//! their port, and their paths if not all.

mod program;

use std::sync::Mutex;
use std::time::Instant;

use canal_e2e::Mesh;

use crate::cases::differences;
use program::{ClientPart, SoftwareProgram};

/// Programs that run at the same time. They wait more than they compute; the test machine has two
/// cores.
const WORKERS: usize = 4;
/// Minimum number of available programs, so that a machine without any does not pass. Fewer than
/// the list has, because some need software that few machines have.
const PROGRAMS_MIN: usize = 12;

/// The program that the gate runs. The others take minutes, and need what few machines have
/// installed.
const GATE_PROGRAM: &str = "redis";

/// Redis with its replication and Sentinel: the one program for which the gate has time.
#[test]
fn redis_works_as_without_the_mesh() {
    let mesh = Mesh::up("software.yaml", "e2e-soft-redis");
    let redis = SoftwareProgram::all()
        .into_iter()
        .find(|program| program.name == GATE_PROGRAM)
        .expect("its script is in the folder");
    if let Some(missing) = redis.missing(&mesh) {
        println!("SKIPPED: software, {GATE_PROGRAM}: this machine has no {missing}");
        return;
    }
    differences::compare_runs("tests/e2e/tests/software/differences.tsv", |_| {
        redis.observe(&mesh, ClientPart::Check)
    });
}

/// All programs, Redis with its crowd included.
#[test]
fn foreign_software_works_as_without_the_mesh() {
    let mesh = Mesh::up("software.yaml", "e2e-soft");
    let (programs, missing): (Vec<SoftwareProgram>, Vec<SoftwareProgram>) = SoftwareProgram::all()
        .into_iter()
        // Few machines have every program; `PROGRAMS_MIN` must run.
        .partition(|program| program.missing(&mesh).is_none());
    for program in &missing {
        println!(
            "SKIPPED: software, {}: this machine has no {}",
            program.name,
            program.missing(&mesh).unwrap_or_default()
        );
    }
    assert!(
        programs.len() >= PROGRAMS_MIN,
        "only {} programs can be had; fix: setup/install software",
        programs.len()
    );
    differences::compare_runs("tests/e2e/tests/software/differences.tsv", |again| {
        let chosen = || {
            programs
                .iter()
                .filter(|program| again.is_empty() || again.contains(&program.name))
        };
        let (waiting, observed) = (Mutex::new(chosen()), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            // Several programs at once: most of the time each waits for its server.
            for _ in 0..WORKERS {
                scope.spawn(|| {
                    while let Some(program) =
                        { waiting.lock().expect("no worker panics with it").next() }
                    {
                        let started = Instant::now();
                        let seen = program.observe(&mesh, ClientPart::Check);
                        println!("{}: {:.0} s", program.name, started.elapsed().as_secs_f64());
                        observed
                            .lock()
                            .expect("no worker panics with it")
                            .extend(seen);
                    }
                });
            }
        });
        let mut observed = observed.into_inner().expect("no worker panicked with it");
        // A crowd takes what its tenant may have of a gateway, so nothing is beside it.
        observed.extend(
            chosen()
                .filter(|program| program.has_crowd)
                .flat_map(|program| program.observe(&mesh, ClientPart::Crowd)),
        );
        observed
    });
}
