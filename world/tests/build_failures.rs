//! Worlds that cannot be built: the error gives the reason, and nothing is left at that moment. The
//! test runs alone in its process and has the lock on leftovers. Another `up` may otherwise lock a
//! name for a moment to check whether it is a leftover. Needs root.

use crate::scene::{SMOKE, keep_leftovers, name, options, remains, topology};
use canal_world::World;

#[test]
fn a_failed_world_reports_the_reason_and_leaves_nothing() {
    keep_leftovers();
    let name = name("bad");
    let missing = topology(
        &name,
        &SMOKE.replace("[sleep, infinity]", "[no-such-program]"),
    );
    let error = World::up(&missing, &options(true))
        .expect_err("no such program")
        .to_string();
    assert!(
        error.contains(":4:")
            && error.contains("there is no program \"no-such-program\"")
            && error.contains("build it"),
        "{error}"
    );
    assert_eq!(remains(&name), Vec::<String>::new());

    // Here the supervisor cannot run: it is a program that ends at once.
    let mut unsupervised = options(true);
    unsupervised.supervisor = vec!["false".into()];
    let error = World::up(&topology(&name, SMOKE), &unsupervised)
        .expect_err("no supervisor")
        .to_string();
    assert!(
        error.contains("ended before the world was up (exit status: 1)"),
        "{error}"
    );
    assert_eq!(remains(&name), Vec::<String>::new());
}
