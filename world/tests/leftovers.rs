//! Leftovers of worlds with killed supervisors: they are listed, and the next world that is brought
//! up removes them. The test is alone in its program and has the lock on leftovers, because any
//! other `up` would remove the leftovers before they are listed. Needs root.

mod scene;

use std::path::Path;
use std::process::Command;

use canal_timing::deadline;
use canal_world::{StoreRecovery, World};
use scene::{
    SMOKE, STEP_TIMEOUT, becomes, file, keep_leftovers, kill_9, name, options, program, remains,
    supervisor_of, topology, vanishes, world,
};

#[test]
fn leftovers_of_killed_runs_are_removed_by_the_next() {
    keep_leftovers();
    let name = name("left");
    let file = file(&name);
    // The world is persistent, so no owner removes it when its supervisor is killed.
    assert!(
        program(&["up", &file.display().to_string()])
            .status()
            .expect("ran")
            .success()
    );
    kill_9(supervisor_of(&name));
    becomes("a leftover", STEP_TIMEOUT, || {
        World::list()
            .expect("a list")
            .iter()
            .any(|world| world.name == name && !world.alive)
    });
    assert!(World::open(&name).is_err(), "a leftover is no world");
    assert!(
        remains(&name)
            .iter()
            .any(|left| left.starts_with("process")),
        "its processes still run"
    );
    // This process has the lock on leftovers, so another one must not remove them.
    an_up_of_another_process_leaves_it(&name);
    // The next `up` of any name removes it.
    drop(world("next", SMOKE));
    vanishes(&name);

    // A leftover without any file exists only in the kernel.
    assert!(
        program(&["up", &file.display().to_string()])
            .status()
            .expect("ran")
            .success()
    );
    kill_9(supervisor_of(&name));
    // Without files, only names of namespaces, mounts and cgroups tell of the world.
    std::fs::remove_dir_all(format!("/run/canal/worlds/{name}")).expect("removed");
    World::gc().expect("collected");
    vanishes(&name);
    std::fs::remove_file(file).expect("removed");
    longer_names_than_files_may_give_are_seen_too();
    a_crashed_world_keeps_its_store_when_it_comes_up_again();
}

/// This process has the lock on leftovers.
fn an_up_of_another_process_leaves_it(leftover: &str) {
    let beside = name("other");
    let file = file(&beside);
    assert!(
        program(&["up", &file.display().to_string()])
            .status()
            .expect("ran")
            .success()
    );
    assert!(
        World::list()
            .expect("a list")
            .iter()
            .any(|world| world.name == leftover),
        "another process removed it"
    );
    World::down_by_name(&beside).expect("down");
    std::fs::remove_file(file).expect("removed");
}

/// Programs may choose longer names than files.
fn longer_names_than_files_may_give_are_seen_too() {
    let name = format!("{}-of-a-program", name("long"));
    let made = Command::new("ip")
        .args(["netns", "add", &format!("cnl-{name}.gw1")])
        .status()
        .expect("ran");
    assert!(made.success());
    assert!(
        World::list()
            .expect("a list")
            .iter()
            .any(|world| world.name == name && !world.alive)
    );
    assert!(World::gc().expect("collected").contains(&name));
    vanishes(&name);
}

/// The only test of this program calls it, because two tests at once would remove each other's
/// leftovers.
fn a_crashed_world_keeps_its_store_when_it_comes_up_again() {
    let name = name("crash");
    let dir = Path::new("/run/canal/worlds").join(&name);
    // No controller runs here: the test writes a store and a root in its place.
    let (store, root) = (
        dir.join("data/controller/canal.redb"),
        dir.join("infra/root.pem"),
    );
    let crash = || {
        std::fs::write(&store, "applied").expect("written");
        kill_9(supervisor_of(&name));
        becomes("a leftover", STEP_TIMEOUT, || {
            World::list()
                .expect("a list")
                .iter()
                .any(|world| world.name == name && !world.alive)
        });
    };
    let up = |yaml: &str, lasting: bool| {
        World::up(&topology(&name, yaml), &options(!lasting)).expect("up")
    };
    let first = up(SMOKE, true);
    assert_eq!(first.recovery().store, StoreRecovery::Nothing);
    std::fs::write(&root, "root").expect("written");
    let token = first.operator_token().expect("a token");
    crash();

    let second = up(SMOKE, true);
    assert_eq!(second.recovery().store, StoreRecovery::Kept);
    second.wait_ready(deadline(STEP_TIMEOUT)).expect("ready");
    assert_eq!(std::fs::read_to_string(&store).expect("kept"), "applied");
    assert_eq!(std::fs::read_to_string(&root).expect("kept"), "root");
    assert_ne!(
        second.operator_token().expect("a token"),
        token,
        "tokens are new"
    );
    crash();

    // A world with another topology is a different world.
    let third = up(&SMOKE.replace("replicas: 3", "replicas: 2"), true);
    assert_eq!(third.recovery().store, StoreRecovery::Dropped);
    assert!(!store.exists());
    crash();
    let other = world("beside", SMOKE);
    assert_eq!(
        other.recovery().removed,
        std::slice::from_ref(&name),
        "it names the worlds that it removed"
    );
    drop(other);
    vanishes(&name);
}
