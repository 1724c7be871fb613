//! Worlds that cannot be built: they say why, and nothing is left the moment they do. Alone in its process, since any other test's `up` may hold
//! a name for a moment, to look whether it is a leftover. Needs root.

use crate::scene::{SMOKE, name, options, remains, topology};
use canal_world::World;

#[test]
fn a_world_that_cannot_be_built_says_why_and_leaves_nothing() {
    let name = name("bad");
    let missing = topology(&name, &SMOKE.replace("[sleep, infinity]", "[no-such-program]"));
    let error = World::up(&missing, &options(true)).expect_err("no such program").to_string();
    assert!(error.contains(":4:") && error.contains("there is no program \"no-such-program\"") && error.contains("build it"), "{error}");
    assert_eq!(remains(&name), Vec::<String>::new());

    // Something of ours is in the way, held by nobody's lock but not ours to have made.
    let mut unsupervised = options(true);
    unsupervised.supervisor = vec!["false".into()];
    let error = World::up(&topology(&name, SMOKE), &unsupervised).expect_err("no supervisor").to_string();
    assert!(error.contains("ended before the world was up (exit status: 1)"), "{error}");
    assert_eq!(remains(&name), Vec::<String>::new());
}
