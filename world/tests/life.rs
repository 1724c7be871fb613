//! Processes of a world: started, probed, ended, restarted, added and removed. Needs root.

use std::time::Duration;

use crate::scene;
use crate::scene::{SMOKE, becomes, client_output, dial, run, vanishes, world};
use canal_timing::deadline;
use canal_world::{PodTemplate, ProcessPhase, Signal, World};

/// Maximum time of an event on a quiet machine. In the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);

fn phase(world: &World, host: &str) -> ProcessPhase {
    world.host(host).expect("a host").process.phase
}

fn pid(world: &World, host: &str) -> Option<u32> {
    world.host(host).expect("a host").process.pid
}

fn log(world: &World, host: &str) -> String {
    std::fs::read_to_string(world.log(host).expect("a log")).unwrap_or_default()
}

#[test]
fn a_killed_process_starts_again_and_a_stopped_one_does_not() {
    let world = world("life", SMOKE);
    let first = pid(&world, "gw1").expect("it runs");
    world.kill("gw1", Signal::Kill).expect("killed");
    becomes("a new start", STEP_TIMEOUT, || {
        pid(&world, "gw1").is_some_and(|now| now != first)
    });
    assert_eq!(world.host("gw1").expect("a host").process.restarts, 1);
    assert!(
        log(&world, "gw1").contains("[world] ended: signal: 9"),
        "{}",
        log(&world, "gw1")
    );

    world.stop("gw1").expect("stopped");
    assert_eq!(phase(&world, "gw1"), ProcessPhase::Stopped);
    assert!(!world.is_ready("gw1").expect("known"));
    // A supervisor would restart the process after 250 ms.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(
        phase(&world, "gw1"),
        ProcessPhase::Stopped,
        "it must stay stopped"
    );
    world.start("gw1").expect("started");
    world
        .wait_host_ready("gw1", deadline(STEP_TIMEOUT))
        .expect("ready");

    // A restart is confirmed before its process is ready, so readiness must not be the
    // predecessor's. Five rounds, because the two race.
    for _ in 0..5 {
        let before = pid(&world, "gw1");
        world.restart("gw1").expect("restarted");
        world
            .wait_host_ready("gw1", deadline(STEP_TIMEOUT))
            .expect("ready");
        let now = pid(&world, "gw1");
        assert!(
            now.is_some() && now != before,
            "the readiness of process {before:?} was taken for that of its successor ({now:?})"
        );
    }
}

/// A world that is being taken down has lost its record and still has its name.
#[test]
fn a_world_that_is_about_to_end_is_waited_for_and_replaced() {
    let name = scene::name("ending");
    let path = std::path::PathBuf::from(format!("/run/canal/worlds/{name}.lock"));
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder for the lock");
    let lock = std::fs::File::create(path).expect("a lock file");
    lock.lock().expect("no other world has the name");
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(lock);
    });
    let options = canal_world::WorldOptions {
        replace: true,
        ..scene::options(true)
    };
    let world = World::up(&scene::topology(&name, SMOKE), &options)
        .unwrap_or_else(|error| panic!("{error}"));
    ending.join().expect("it only waits");
    world.down().expect("down");
}

#[test]
fn a_process_that_may_end_is_left_ended() {
    let yaml = SMOKE.replace(
        "- {name: load1, az: az2}",
        "- {name: load1, az: az2, command: [sh, -c, \"echo $GREETING from $CANAL_HOST; exit 0\"], env: {GREETING: hello}}\n- {name: load2, az: az2, command: [sh, -c, \"exit 3\"]}",
    );
    let world = canal_world::World::up(
        &scene::topology(&scene::name("end"), &yaml),
        &scene::options(true),
    )
    .expect("up");
    becomes("both ends", STEP_TIMEOUT, || {
        ["load1", "load2"]
            .iter()
            .all(|host| matches!(phase(&world, host), ProcessPhase::Ended { .. }))
    });
    assert_eq!(
        phase(&world, "load1"),
        ProcessPhase::Ended {
            how: "exit status: 0".into(),
            well: true
        }
    );
    assert_eq!(
        phase(&world, "load2"),
        ProcessPhase::Ended {
            how: "exit status: 3".into(),
            well: false
        }
    );
    assert!(log(&world, "load1").contains("hello from load1"));
    let late = world
        .wait_ready(Duration::from_millis(300))
        .expect_err("load2 failed")
        .to_string();
    assert!(
        late.contains("load2: ended (exit status: 3)") && !late.contains("load1"),
        "{late}"
    );
    world.start("load2").expect("started by hand");
}

#[test]
fn probes_decide_readiness_and_the_registry_follows() {
    let yaml = SMOKE.replace(
        "readiness: {tcp: {port: 8080}}",
        "readiness: {exec: [test, -e, ready], periodMs: 50}",
    );
    let world = canal_world::World::up(
        &scene::topology(&scene::name("probe"), &yaml),
        &scene::options(true),
    )
    .expect("up");
    world
        .wait_host_ready("alpha/web-0", deadline(STEP_TIMEOUT))
        .expect("http probe");
    // The file does not exist yet, so the probe fails.
    assert!(!world.is_ready("beta/web-0").expect("known"));
    let pods = world.config_dir("beta").join("_pods.yaml");
    let listed = || std::fs::read_to_string(&pods).unwrap_or_default();
    // YAML writers may choose either quote.
    assert!(
        listed().contains("status: \"False\"") || listed().contains("status: 'False'"),
        "{}",
        listed()
    );
    run(&world, "beta/web-0", &["touch", "ready"]);
    world
        .wait_host_ready("beta/web-0", deadline(STEP_TIMEOUT))
        .expect("exec probe");
    becomes("a ready pod in the registry", STEP_TIMEOUT, || {
        !listed().contains("False") && listed().contains("True")
    });
    run(&world, "beta/web-0", &["rm", "ready"]);
    becomes("an unready pod in the registry", STEP_TIMEOUT, || {
        listed().contains("False")
    });
    // A host that hangs fails its probe too.
    world.kill("alpha/web-1", Signal::Stop).expect("stopped");
    becomes("unreadiness of a hanging pod", STEP_TIMEOUT, || {
        !world.is_ready("alpha/web-1").expect("known")
    });
    world.kill("alpha/web-1", Signal::Cont).expect("continued");
    world
        .wait_host_ready("alpha/web-1", deadline(STEP_TIMEOUT))
        .expect("ready again");
}

#[test]
fn the_meshs_input_files_are_written() {
    let world = world("files", SMOKE);
    let read = |path: &str| {
        std::fs::read_to_string(world.dir().join(path))
            .unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let parse =
        |text: &str| -> Vec<serde_json::Value> { serde_saphyr::from_multiple(text).expect("YAML") };
    // Expected numbers and addresses are those of `smoke.yaml` and of its plan.
    let tenant = &parse(&read("config/alpha/_tenant.yaml"))[0];
    assert_eq!(tenant["kind"], "Tenant");
    assert_eq!(tenant["spec"]["vni"], 101);
    assert_eq!(tenant["spec"]["podCidrs"][1], "fd00:101::/64");
    let gateways = parse(&read("config/beta/_gateways.yaml"));
    assert_eq!(gateways.len(), 2);
    assert_eq!(gateways[1]["spec"]["addresses"][0], "10.2.255.2");
    let pods = parse(&read("config/alpha/_pods.yaml"));
    assert_eq!(pods.len(), 3);
    assert_eq!(pods[1]["status"]["podIPs"][1]["ip"], "fd00:101::2:2");
    assert_eq!(pods[1]["metadata"]["annotations"]["canal.mesh/az"], "az2");
    assert_eq!(
        pods[1]["metadata"]["annotations"]["canal.mesh/tunnel"], "none",
        "its node runs no proxy"
    );

    let pod: serde_json::Value =
        serde_json::from_str(&read("nodes/a-n2/pods/alpha.default.web-1.json")).expect("JSON");
    let environment = world.host("alpha/web-1").expect("a pod").environment;
    assert_eq!(pod["uid"], "alpha/default/web-1");
    assert_eq!(pod["ips"][0], "10.1.2.2");
    assert_eq!(pod["netns"], environment.netns.display().to_string());
    assert!(
        // The node's file must name the cgroup that the pod really has.
        environment.cgroup.join("cgroup.procs").exists()
            && pod["cgroup"] == environment.cgroup.display().to_string()
    );

    let principals = parse(&read("principals.yaml")).remove(0);
    let kinds: Vec<&str> = principals
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|entry| entry["kind"].as_str())
        .collect();
    assert_eq!(
        kinds,
        ["operator", "gateway", "gateway", "node", "node", "node"]
    );
    // A token is 32 random bytes in hexadecimal.
    assert_eq!(world.operator_token().expect("a token").len(), 64);
    use std::os::unix::fs::PermissionsExt;
    // Tokens and their hashes must be readable by root only.
    for secret in ["operator.token", "tokens/a-n1.token", "principals.yaml"] {
        let mode = std::fs::metadata(world.dir().join(secret))
            .expect(secret)
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{secret}");
    }
}

#[test]
fn exec_is_inside_in_every_respect() {
    let world = world("exec", SMOKE);
    let script = "hostname; cat /etc/hosts | grep -c web-1; grep ^0:: /proc/self/cgroup; pwd; echo $POD_IP; ls -l /proc/1/ns/net > /dev/null; cat /proc/net/dev | grep -c eth0";
    let seen = client_output(&world, "alpha/web-1", &["sh", "-c", script]).expect("ran");
    let lines: Vec<&str> = seen.lines().collect();
    assert_eq!(lines[0], "web-1");
    assert_eq!(lines[1], "2", "its own name, v4 and v6");
    assert!(lines[2].ends_with("/a-n2/default.web-1"), "{}", lines[2]);
    assert!(
        lines[3].ends_with("/data/alpha.default.web-1"),
        "{}",
        lines[3]
    );
    assert_eq!(lines[4..], ["10.1.2.2", "1"]);
    let machine = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    assert!(
        !machine.contains("web-1"),
        "the machine's own files are untouched"
    );
    let listening = world.inside("alpha/web-1", || {
        std::net::TcpListener::bind("10.1.2.2:0").is_ok()
    });
    assert!(
        listening.expect("inside"),
        "the pod's address is ours to bind inside"
    );
    // The pod's address exists only in the pod's namespace.
    assert!(
        std::net::TcpListener::bind("10.1.2.2:0").is_err(),
        "and not outside"
    );
    let unknown = world
        .exec("alpha/web-9", &["true"])
        .expect_err("no such pod")
        .to_string();
    assert!(unknown.contains("has no host \"alpha/web-9\""), "{unknown}");
    let near = world
        .exec("gw3", &["true"])
        .expect_err("no such host")
        .to_string();
    assert!(near.contains("did you mean"), "{near}");
    // Both tenants have a pod of that name, so it needs its tenant.
    let unclear = world.host("web-0").expect_err("two of them").to_string();
    assert!(
        unclear.contains("alpha/default/web-0 or beta/default/web-0"),
        "{unclear}"
    );
    let missing = world
        .exec("gw1", &["no-such-program"])
        .expect_err("no such program")
        .to_string();
    assert!(
        missing.contains("no-such-program") && missing.contains("the search path is"),
        "{missing}"
    );
}

/// Checks that pods that are added at once get addresses of their own.
fn add_at_once(world: &World, pod: &PodTemplate) {
    std::thread::scope(|scope| {
        for name in ["one", "two", "three", "four"] {
            let (world, pod) = (
                world,
                PodTemplate {
                    name: name.into(),
                    replicas: 1,
                    ..pod.clone()
                },
            );
            scope.spawn(move || {
                world
                    .add_pod("alpha", &pod)
                    .expect("added beside the others")
            });
        }
    });
    let mut addresses: Vec<_> = world
        .hosts()
        .expect("hosts")
        .iter()
        .filter_map(canal_world::HostStatus::ip4)
        .collect();
    let count = addresses.len();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), count, "an address was given twice");
    for name in ["one", "two", "three", "four"] {
        world.remove_pod(&format!("{name}-0")).expect("removed");
    }
}

#[test]
fn pods_come_and_go_in_a_living_world() {
    let world = world("pods", SMOKE);
    let yaml = "name: late\nnamespace: shop\nnodes: [a-n1, a-n2]\nreplicas: 2\ncommand: [canal-world-peer, listen, \"8080\"]\nreadiness: {tcp: {port: 8080}}\nlabels: {app: late}\n";
    let pod = PodTemplate::parse(yaml).expect("a pod");
    let names = world.add_pod("alpha", &pod).expect("added");
    assert_eq!(names, ["alpha/shop/late-0", "alpha/shop/late-1"]);
    world.wait_ready(deadline(STEP_TIMEOUT)).expect("ready");
    let late_pod = world.host("late-1").expect("a pod").environment;
    let to = format!("{}:8080", late_pod.ip4.expect("an address"));
    // The two pods of the file on this node have .2 and .3.
    assert_eq!(dial(&world, "late-0", &to), Ok("you are 10.1.1.4".into()));
    let again = world.add_pod("alpha", &pod).expect_err("twice").to_string();
    assert!(again.contains("exists already"), "{again}");
    add_at_once(&world, &pod);
    let many = PodTemplate {
        name: "many".into(),
        nodes: vec!["a-n1".into()],
        // 253 pods fit on a node; three are there.
        replicas: 251,
        ..pod.clone()
    };
    let full = world
        .add_pod("alpha", &many)
        .expect_err("three are there")
        .to_string();
    assert!(
        full.contains("the maximum of 253 pods") && world.host("many-0").is_err(),
        "{full}"
    );
    let nowhere = world
        .add_pod("gamma", &pod)
        .expect_err("no tenant")
        .to_string();
    assert!(
        nowhere.contains("there is no tenant \"gamma\""),
        "{nowhere}"
    );

    let pods = world.config_dir("alpha").join("_pods.yaml");
    let listed = || {
        std::fs::read_to_string(&pods)
            .unwrap_or_default()
            .contains("late-1")
    };
    assert!(listed());
    // Removed pods must leave nothing, neither in files nor in the kernel.
    world.remove_pod("late-1").expect("removed");
    assert!(!listed() && !late_pod.netns.exists() && !late_pod.cgroup.exists());
    assert!(
        !world
            .dir()
            .join("nodes/a-n2/pods/alpha.shop.late-1.json")
            .exists()
    );
    assert!(world.host("late-1").is_err());
    let fixed = world
        .remove_pod("gw1")
        .expect_err("a gateway is no pod")
        .to_string();
    assert!(fixed.contains("gw1"), "{fixed}");
    // The address and the link are free again.
    let back =
        PodTemplate::parse("name: back\nnode: a-n2\ncommand: [sleep, infinity]\n").expect("a pod");
    world.add_pod("alpha", &back).expect("added");
    assert_eq!(
        world.host("back-0").expect("a pod").environment.ip4,
        late_pod.ip4
    );
}

#[test]
fn cpu_and_bytes_are_counted_per_host() {
    let world = world("count", SMOKE);
    let before = world.cpu("alpha/web-2").expect("cpu");
    run(
        &world,
        "alpha/web-2",
        &[
            "sh",
            "-c",
            "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done",
        ],
    );
    let spent = world.cpu("alpha/web-2").expect("cpu").since(before);
    assert!(spent.total() > Duration::from_millis(20), "{spent:?}");
    let bytes = |host: &str| {
        let devices = world.traffic(host).expect("counters");
        devices
            .into_iter()
            .find(|(name, _)| name == "eth0")
            .map(|(_, traffic)| traffic.rx_bytes)
            .unwrap_or(0)
    };
    let before = bytes("alpha/web-1");
    client_output(
        &world,
        "alpha/web-2",
        &["canal-world-peer", "pour", "10.1.2.2:8080", "1000000"],
    )
    .expect("poured");
    let received = bytes("alpha/web-1") - before;
    assert!((1_000_000..1_300_000).contains(&received), "{received}");
}

#[test]
fn logs_are_bounded() {
    let yaml = SMOKE.replace(
        "- {name: load1, az: az2}",
        "- {name: load1, az: az2, command: [sh, -c, \"head -c 10000000 /dev/zero | tr '\\\\0' x; echo end; sleep infinity\"]}",
    );
    let world = world("log", &yaml);
    let log = world.log("load1").expect("a log");
    let size = |path: &std::path::Path| std::fs::metadata(path).map_or(0, |found| found.len());
    becomes("a cut log", STEP_TIMEOUT, || {
        size(&log.with_extension("log.1")) > 8 << 20
    });
    becomes("a short log", STEP_TIMEOUT, || size(&log) < 8 << 20);
}

#[test]
fn nothing_starts_before_its_dependencies() {
    // Built-in programs wait for the controller's root certificate, and pods for their capture.
    let yaml = SMOKE
        .replace(
            "{name: gw2, az: az2, command: [canal-world-peer, listen, \"8080\"]}",
            "{name: gw2, az: az2}",
        )
        .replace(
            "{name: b-n1, az: az1, proxy: false}",
            "{name: b-n1, az: az1}",
        );
    let dir = std::env::temp_dir().join(scene::name("stand-in"));
    std::fs::create_dir_all(&dir).expect("a directory");
    // The stand-ins listen at the port of the readiness probe, 15021.
    for program in ["canal-gateway", "canal-node"] {
        let path = dir.join(program);
        std::fs::write(
            &path,
            "#!/bin/sh\necho \"$@\"\nexec canal-world-peer listen 15021\n",
        )
        .expect("written");
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("runnable");
    }
    let mut options = scene::options(true);
    options.bin_dirs.insert(0, dir.clone());
    let world = canal_world::World::up(&scene::topology(&scene::name("wait"), &yaml), &options)
        .expect("up");
    let waiting = |host: &str, what: &str| matches!(phase(&world, host), ProcessPhase::Waiting { until } if until.contains(what));
    becomes("waiting", STEP_TIMEOUT, || {
        waiting("gw2", "root.pem")
            && waiting("b-n1", "root.pem")
            && waiting("beta/web-0", "capture")
    });
    std::fs::write(world.root_ca(), "a root").expect("written");
    for host in ["gw2", "b-n1"] {
        let ready = world.wait_host_ready(host, deadline(STEP_TIMEOUT));
        ready.expect("ready");
    }
    let line = log(&world, "gw2");
    assert!(
        line.contains(
            "canal-gateway --replica gw2 --az az2 --controller https://250.1.0.1:15012 --root-ca"
        ),
        "{line}"
    );
    assert!(
        log(&world, "b-n1").contains("--node b-n1 --az az1")
            && log(&world, "b-n1").contains("--pods-dir"),
        "{}",
        log(&world, "b-n1")
    );
    assert!(waiting("beta/web-0", "capture"), "no capture yet");
    let environment = world.host("beta/web-0").expect("a pod").environment;
    // The listener on 15001 plays the node proxy's capture in the pod's namespace.
    let mut listener = std::process::Command::new("nsenter")
        .arg(format!("--net={}", environment.netns.display()))
        .args([
            scene::bin_dir()
                .join("canal-world-peer")
                .display()
                .to_string()
                .as_str(),
            "listen",
            "15001",
        ])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("a listener");
    let ready = world.wait_host_ready("beta/web-0", deadline(STEP_TIMEOUT));
    listener
        .kill()
        .and_then(|()| listener.wait())
        .expect("ended");
    ready.expect("captured pods start");
    let pins = world.dir().join("data/b-n1/bpffs").display().to_string();
    let mounts = std::fs::read_to_string("/proc/mounts").expect("mounts");
    assert!(
        mounts
            .lines()
            .any(|line| line.contains(&pins) && line.contains(" bpf ")),
        "its pins have a bpffs that outlives it"
    );
    let name = world.name().to_owned();
    drop(world);
    vanishes(&name);
    std::fs::remove_dir_all(&dir).expect("removed");
}
