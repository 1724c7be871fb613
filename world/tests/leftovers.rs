//! Worlds whose supervisors were killed: seen, and taken away by whatever is brought up next. Alone in its process, since any other test's `up`
//! would take them away before they are seen. Needs root.

mod scene;

use canal_world::World;
use scene::{SMOKE, SOON, becomes, file, kill_9, name, program, remains, supervisor_of, vanishes, world};

#[test]
fn what_killed_runs_left_is_cleaned_by_the_next() {
    let name = name("left");
    let file = file(&name);
    // Persistent, so nobody reaps it; then its supervisor dies.
    assert!(program(&["up", &file.display().to_string()]).status().expect("ran").success());
    kill_9(supervisor_of(&name));
    becomes("a leftover", SOON, || World::list().expect("a list").iter().any(|world| world.name == name && !world.alive));
    assert!(World::open(&name).is_err(), "a leftover is no world");
    assert!(remains(&name).iter().any(|left| left.starts_with("process")), "its processes still run");
    // The next `up` of whatever name removes it.
    drop(world("next", SMOKE));
    vanishes(&name, SOON);

    // And a leftover without any file: only what the kernel holds.
    assert!(program(&["up", &file.display().to_string()]).status().expect("ran").success());
    kill_9(supervisor_of(&name));
    std::fs::remove_dir_all(format!("/run/canal/worlds/{name}")).expect("removed");
    World::gc().expect("collected");
    vanishes(&name, SOON);
    std::fs::remove_file(file).expect("removed");
}
