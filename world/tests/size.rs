//! A hundred pods come up in time. Needs root.

use std::time::{Duration, Instant};

use crate::scene;
use canal_timing::{assert_time, deadline};
use canal_world::World;

/// Time limit for 100 pods. `docs/timing.md` has 1.0 to 1.2 s, so the limit finds only what became
/// many times slower.
const BAR: Duration = Duration::from_secs(20);

#[test]
fn a_hundred_pods_are_up_and_ready_in_time() {
    let yaml = include_str!("hundred.yaml");
    let started = Instant::now();
    let world = World::up(
        &scene::topology(&scene::name("size"), yaml),
        &scene::options(true),
    )
    .expect("up");
    let up = started.elapsed();
    world.wait_ready(deadline(BAR)).expect("ready");
    let ready = started.elapsed();
    let answer = scene::dial(&world, "web-99", "[fd00:101::1:2]:8080");
    assert_eq!(answer, Ok("you are fd00:101::4:1a".into()));
    let ending = Instant::now();
    world.down().expect("down");
    println!(
        "100 pods on 4 nodes: built and started in {up:.2?}, all ready after {ready:.2?}, gone in {:.2?}",
        ending.elapsed()
    );
    assert_time("time until a hundred pods are ready", ready, BAR);
}
