//! A world leaves nothing behind, however it ended. The tests hold the lock on leftovers, because
//! an `up` of another process removes leftovers too, and briefly has a file of a world open. Needs
//! root.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::scene;
use crate::scene::{
    SMOKE, STEP_TIMEOUT, becomes, file, keep_leftovers, kill_9, name, options, program, remains,
    supervisor_of, topology, vanishes, world,
};
use canal_timing::deadline;
use canal_world::{World, WorldOptions};

/// Starts a process that owns an ephemeral world. With `wait` it reads the output up to "up".
fn owner(file: &Path, wait: bool) -> Child {
    let mut child = program(&["hold", &file.display().to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    if wait {
        let out = child.stdout.take().expect("piped");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).expect("a line");
        assert!(line.starts_with("up "), "{line:?}");
    }
    child
}

#[test]
fn down_leaves_nothing_and_can_be_repeated() {
    keep_leftovers();
    let name = name("down");
    let world = world("down", SMOKE);
    assert!(!remains(&name).is_empty());
    world.down().expect("down");
    assert_eq!(remains(&name), Vec::<String>::new());
    World::down_by_name(&name).expect("down again");
    assert_eq!(remains(&name), Vec::<String>::new());
    assert!(World::open(&name).is_err());
}

#[test]
fn a_dropped_handle_removes_its_world() {
    keep_leftovers();
    let name = name("drop");
    drop(world("drop", SMOKE));
    assert_eq!(remains(&name), Vec::<String>::new());
}

/// The supervisor of a world whose owner has died takes the world down while another process brings
/// up one of the same name.
#[test]
fn a_world_comes_up_while_the_last_one_of_its_name_ends() {
    keep_leftovers();
    let name = name("again");
    let (file, topology) = (file(&name), topology(&name, SMOKE));
    let replacing = WorldOptions {
        replace: true,
        ..options(true)
    };
    for _ in 0..5 {
        let mut owner = owner(&file, true);
        kill_9(owner.id());
        owner.wait().expect("it ends");
        World::up(&topology, &replacing)
            .expect("the name is free")
            .down()
            .expect("down");
    }
    assert_eq!(remains(&name), Vec::<String>::new());
    std::fs::remove_file(file).expect("removed");
}

/// Takes a persistent world down when its test ends, even if the test fails.
struct WorldGuard<'a>(&'a str);

impl Drop for WorldGuard<'_> {
    fn drop(&mut self) {
        let _ = World::down_by_name(self.0);
    }
}

#[test]
fn a_persistent_world_is_brought_up_once() {
    keep_leftovers();
    let name = name("twice");
    let _down = WorldGuard(&name);
    let topology = topology(&name, SMOKE);
    let first = World::up(&topology, &options(false)).expect("up");
    first.wait_ready(deadline(STEP_TIMEOUT)).expect("ready");
    let pid = first.host("gw1").expect("a host").process.pid;
    assert!(pid.is_some());
    drop(first);
    let second = World::up(&topology, &options(false)).expect("the same again");
    assert_eq!(
        second.host("gw1").expect("a host").process.pid,
        pid,
        "nothing was restarted"
    );
    let listed = World::list().expect("a list");
    assert!(
        listed
            .iter()
            .any(|world| world.name == name && world.alive && world.owner.is_none()),
        "{listed:?}"
    );

    let other = scene::topology(&name, &SMOKE.replace("replicas: 3", "replicas: 2"));
    let refused = World::up(&other, &options(false))
        .expect_err("another topology")
        .to_string();
    assert!(
        refused.contains("is already up with another topology")
            && refused.contains("canal world down"),
        "{refused}"
    );
    let mut replace = options(false);
    replace.replace = true;
    let third = World::up(&other, &replace).expect("replaced");
    assert!(third.host("alpha/web-2").is_err());
    World::down_by_name(&name).expect("down");
    assert_eq!(remains(&name), Vec::<String>::new());
}

#[test]
fn two_worlds_of_one_file_live_side_by_side() {
    keep_leftovers();
    let (one, two) = (world("one", SMOKE), world("one-two", SMOKE));
    for world in [&one, &two] {
        let answer = scene::dial(world, "alpha/web-0", "10.1.2.2:8080");
        assert_eq!(answer, Ok("you are 10.1.1.2".into()));
    }
    one.down().expect("down");
    let answer = scene::dial(&two, "alpha/web-0", "[fd00:101::2:2]:8080");
    assert_eq!(
        answer,
        Ok("you are fd00:101::1:2".into()),
        "the other world is unchanged"
    );
}

#[test]
fn an_owner_killed_with_its_world_up_leaves_nothing() {
    keep_leftovers();
    let name = name("own");
    let file = file(&name);
    let mut child = owner(&file, true);
    assert!(!remains(&name).is_empty());
    child.kill().expect("killed");
    child.wait().expect("ended");
    vanishes(&name);
    std::fs::remove_file(file).expect("removed");
}

#[test]
fn an_owner_killed_while_it_builds_leaves_nothing() {
    keep_leftovers();
    let name = name("mid");
    let file = file(&name);
    for delay in [0, 5, 10, 20, 40, 80, 160, 320] {
        let mut child = owner(&file, false);
        std::thread::sleep(Duration::from_millis(delay));
        child.kill().expect("killed");
        child.wait().expect("ended");
        // An owner that was killed before the supervisor started leaves a file or two, which the
        // next run removes.
        becomes("an end of everything but files", STEP_TIMEOUT, || {
            remains(&name)
                .iter()
                .all(|left| *left == name || *left == format!("{name}.lock"))
        });
        World::gc().expect("collected");
        vanishes(&name);
    }
    std::fs::remove_file(file).expect("removed");
}

#[test]
fn a_killed_supervisor_leaves_nothing_and_the_owner_gets_an_error() {
    keep_leftovers();
    let name = name("sup");
    let topology = topology(&name, SMOKE);
    for delay in [0, 10, 30, 60] {
        let killer = std::thread::spawn({
            let name = name.clone();
            move || {
                let pid = supervisor_of(&name);
                std::thread::sleep(Duration::from_millis(delay));
                kill_9(pid);
            }
        });
        match World::up(&topology, &options(true)) {
            Err(error) => assert!(
                error.to_string().contains("ended before the world was up"),
                "{error}"
            ),
            Ok(world) => drop(world),
        }
        killer.join().expect("killed");
        vanishes(&name);
    }
}

#[test]
fn only_up_starts_supervisors() {
    let output = program(&["supervise", "nobody"])
        .stdin(Stdio::null())
        .output()
        .expect("ran");
    let client_output = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && client_output.contains("started by `canal world up`"),
        "{client_output}"
    );
}

#[test]
fn without_root_one_sentence_states_the_requirement() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let dir = std::env::temp_dir().join(name("user"));
    std::fs::create_dir_all(&dir).expect("a directory");
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).expect("open");
    let copy = dir.join("canal-world");
    // Another process copies the file: this one may be forking in another test, and a child that
    // has the file open for writing makes running it fail.
    assert!(
        Command::new("cp")
            .arg(scene::PROGRAM)
            .arg(&copy)
            .status()
            .expect("cp")
            .success()
    );
    let yaml = dir.join("smoke.yaml");
    std::fs::write(&yaml, SMOKE).expect("written");
    let unprivileged = 65534;
    let output = Command::new(&copy)
        .args(["up".as_ref(), yaml.as_os_str()])
        .uid(unprivileged)
        .gid(unprivileged)
        .output()
        .expect("ran");
    let client_output = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    assert!(!output.status.success());
    assert!(
        client_output.starts_with("worlds need root: network namespaces")
            && client_output.ends_with("with sudo")
            && !client_output.contains('\n'),
        "{client_output}"
    );
    std::fs::remove_dir_all(&dir).expect("removed");
}
