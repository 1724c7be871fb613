//! Links with delay, jitter and loss: the effects of a relay on round trips, on packets and on
//! their content, and its end with the world. Needs root.

use std::process::{Child, Stdio};
use std::time::Duration;

use crate::scene::{STEP_TIMEOUT, becomes, client_output, name, remains, run, vanishes, world};
use canal_timing::{deadline, is_timed, timed};
use canal_world::{Impairment, Signal, World};

const LINKS: &str = r#"world: links
azs: [az1, az2]
links: {interAz: {delay: 2ms}, seed: 7}
hosts:
- {name: client, az: az1}
- {name: plain, az: az1, command: [canal-world-peer, echo, "7"], readiness: {tcp: {port: 7}}}
- {name: late, az: az1, delay: 5ms, command: [canal-world-peer, echo, "7"], readiness: {tcp: {port: 7}}}
- {name: jumpy, az: az1, delay: 6ms, jitter: 2ms, command: [canal-world-peer, echo, "7"], readiness: {tcp: {port: 7}}}
- {name: far, az: az2, command: [canal-world-peer, echo, "7"], readiness: {tcp: {port: 7}}}
- {name: lossy, az: az1, loss: 5%, command: [canal-world-peer, echo, "7"], readiness: {tcp: {port: 7}}}
tenants:
- name: alpha
  vni: 101
  trustDomain: alpha.example
  podCidrs: [10.1.0.0/16, "fd00:101::/64"]
  nodes:
  - {name: a-n1, az: az1, delay: 1ms, proxy: false}
  - {name: a-n2, az: az2, proxy: false}
  pods:
  - {name: web, nodes: [a-n1, a-n2], replicas: 2, command: [canal-world-peer, echo, "7"], readiness: {tcp: {port: 7}}}
"#;

/// A path between two hosts: the relays on it, and the expected round-trip time in microseconds.
struct RelayPath {
    from: &'static str,
    to: &'static str,
    relays: u32,
    least: u64,
    /// Spread of the round-trip time above `least`, because of jitter.
    spread: u64,
}

const PATHS: &[RelayPath] = &[
    RelayPath {
        from: "client",
        to: "late:7",
        relays: 1,
        least: 10_000,
        spread: 0,
    },
    RelayPath {
        from: "client",
        to: "far:7",
        relays: 1,
        least: 4_000,
        spread: 0,
    },
    RelayPath {
        from: "client",
        to: "jumpy:7",
        relays: 1,
        least: 8_000,
        spread: 8_000,
    },
    RelayPath {
        from: "far",
        to: "late:7",
        relays: 2,
        least: 14_000,
        spread: 0,
    },
    RelayPath {
        from: "alpha/web-0",
        to: "10.1.2.2:7",
        relays: 2,
        least: 6_000,
        spread: 0,
    },
    RelayPath {
        from: "alpha/web-0",
        to: "[fd00:101::2:2]:7",
        relays: 2,
        least: 6_000,
        spread: 0,
    },
];

/// Maximum extra delay that one relay adds in one direction on an idle machine, in microseconds.
const EXACT: u64 = 200;
/// Round-trip time without any relay, including the processes, in microseconds.
const BARE: u64 = 300;

/// Returns `host:port` with the host's address.
fn target(world: &World, text: &str) -> String {
    let (host, port) = text.split_once(':').unwrap_or((text, ""));
    let is_name = host.starts_with(|letter: char| letter.is_ascii_lowercase());
    let address = is_name.then(|| world.host(host).expect("a host").ip4().expect("an address"));
    address.map_or(text.to_owned(), |address| format!("{address}:{port}"))
}

/// Returns the minimum, median and maximum round-trip time, in microseconds.
fn times(world: &World, from: &str, argv: &[&str]) -> [u64; 3] {
    let text = client_output(world, from, argv)
        .unwrap_or_else(|complaint| panic!("{argv:?} in {from}: {complaint}"));
    let times: Vec<u64> = text
        .split_whitespace()
        .map(|word| word.parse().expect("a number"))
        .collect();
    times.try_into().expect("three numbers")
}

#[test]
fn round_trips_match_the_links_delays() {
    let world = world("rtt", LINKS);
    let mut wrong = Vec::new();
    // The timing tier judges medians and so needs more samples; the last argument is the payload's
    // size.
    let count = if is_timed() { "200" } else { "50" };
    // Both TCP and UDP, because a relay must delay each frame alike.
    for path in PATHS {
        let to = target(&world, path.to);
        for argv in [
            &["canal-world-peer", "rtt", &to, count][..],
            &["canal-world-peer", "rtt-udp", &to, count, "100"],
        ] {
            let [least, median, _] = times(&world, path.from, argv);
            let exact = path.least + BARE + 2 * u64::from(path.relays) * EXACT;
            println!(
                "{} to {} ({}): least {least}, median {median} µs",
                path.from, path.to, argv[1]
            );
            // Other work on the machine makes round trips longer and never shorter, so the minimum
            // shows the link.
            if least < path.least {
                wrong.push(format!(
                    "{} to {}: least {least}, median {median}, shall be {}",
                    path.from, path.to, path.least
                ));
            }
            // Jitter is symmetric, so the minimum may lie half of the spread above; 2 ms are for
            // the machine.
            let is_exact =
                least <= exact + path.spread / 2 && median <= exact + path.spread + 2_000;
            timed!(
                is_exact,
                "round trips from {} to {} by {} are those of the links",
                path.from,
                path.to,
                argv[1]
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let jumpy = target(&world, "jumpy:7");
    let [least, _, largest] = times(
        &world,
        "client",
        &["canal-world-peer", "rtt-udp", &jumpy, "300", "100"],
    );
    // Twice 2 ms either way are up to 8 ms; 300 samples exceed 3 ms with near certainty.
    assert!(
        largest - least > 3_000,
        "jitter of 2 ms each way spreads round trips: {least} to {largest}"
    );
}

/// Returns the number of datagrams that arrived at a host in which no socket receives them.
fn arrived(world: &World, host: &str) -> u64 {
    let text =
        String::from_utf8(run(world, host, &["cat", "/proc/self/net/snmp"]).stdout).expect("text");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let found = names
        .split(' ')
        .zip(values.split(' '))
        .find(|(name, _)| *name == "NoPorts");
    found.expect("a counter").1.parse().expect("a number")
}

#[test]
fn losses_are_those_of_the_seed_and_the_share() {
    // Enough datagrams for a loss of 5 % to be measured well.
    const SENT: u64 = 20_000;
    const BATCH: u64 = 2_000;
    /// Number of worlds until one has no frame on the link but the datagrams. Another frame takes a
    /// place in the sequence of losses.
    const WORLDS_MAX: usize = 8;
    let lost_if_alone = || {
        let world = world("loss", LINKS);
        let to = target(&world, "lossy:9");
        let before = (
            arrived(&world, "lossy"),
            world.link_report("lossy").expect("a report").a_to_b,
        );
        let counters = || world.link_report("lossy").expect("a report").a_to_b;
        // The relay's socket holds one batch, even while the relay does not run.
        for sent in (BATCH..=SENT).step_by(BATCH as usize) {
            client_output(
                &world,
                "client",
                &[
                    "canal-world-peer",
                    // The arguments behind the address: count, bytes of payload, and datagrams per
                    // second.
                    "datagrams",
                    &to,
                    &BATCH.to_string(),
                    "100",
                    "50000",
                ],
            )
            .expect("sent");
            let all = || {
                counters().frames + counters().dropped_loss
                    - before.1.frames
                    - before.1.dropped_loss
                    >= sent
            };
            becomes("the fate of all datagrams", STEP_TIMEOUT, all);
        }
        let after = counters();
        let lost = after.dropped_loss - before.1.dropped_loss;
        let others =
            after.frames + after.dropped_loss - before.1.frames - before.1.dropped_loss - SENT;
        if others > 0 {
            println!("{others} other frames passed the link; once more");
            return None;
        }
        let expected = SENT - lost;
        becomes("the arrival of the others", STEP_TIMEOUT, || {
            arrived(&world, "lossy") - before.0 >= expected
        });
        assert_eq!(
            arrived(&world, "lossy") - before.0,
            expected,
            "what was not lost arrived, and nothing twice"
        );
        assert_eq!(
            (
                after.dropped_queue,
                after.dropped_socket,
                after.dropped_device,
                after.dropped_oversize
            ),
            (0, 0, 0, 0)
        );
        Some(lost)
    };
    let lost = || {
        (0..WORLDS_MAX)
            .find_map(|_| lost_if_alone())
            .expect("a world in which nothing but the datagrams uses the link")
    };
    let (first, second) = (lost(), lost());
    // Four standard deviations of the binomial distribution.
    let bound = 4.0 * (SENT as f64 * 0.05 * 0.95).sqrt();
    assert!(
        (first as f64 - SENT as f64 * 0.05).abs() < bound,
        "{first} of {SENT} were lost"
    );
    assert_eq!(first, second, "one seed, one fate");
}

#[test]
fn content_passes_whole_whatever_its_size() {
    let world = world("whole", LINKS);
    // Payload sizes of datagrams that fill the MTU: 1600 on the underlay, 1500 in overlays.
    for (from, to, bytes) in [
        ("client", "late:7", "1572"),
        ("client", "far:7", "1572"),
        ("alpha/web-0", "10.1.2.2:7", "1472"),
        ("alpha/web-0", "[fd00:101::2:2]:7", "1452"),
    ] {
        let to = target(&world, to);
        times(
            &world,
            from,
            &["canal-world-peer", "rtt-udp", &to, "20", bytes],
        );
        // The senders' TCP does not segment (GSO) and leaves checksums to the device, also inside
        // tunnels.
        let rate = client_output(
            &world,
            from,
            &["canal-world-peer", "digest", &to, "20000000"],
        )
        .unwrap_or_else(|complaint| panic!("{to}: {complaint}"));
        println!("{from} to {to}: {rate} bit/s");
    }
    for relay in ["late", "a-n1", "relay-az1-az2"] {
        let report = world.link_report(relay).expect("a report");
        for counters in [report.a_to_b, report.b_to_a] {
            assert!(counters.frames > 0, "{relay}: {report:?}");
            assert_eq!(
                (counters.dropped_oversize, counters.dropped_device),
                (0, 0),
                "{relay}: {report:?}"
            );
        }
    }
}

#[test]
fn a_full_link_drops_and_counts_the_excess() {
    // 1.4 MB a batch: the relay's socket holds 16 MiB, so the queue drops and not the kernel.
    const BATCH: u64 = 1_000;
    let world = world("full", LINKS);
    let _late = world
        .impair("late", Impairment::delay(Duration::from_secs(10)))
        .expect("impaired");
    let to = target(&world, "late:9");
    let mut sent = 0;
    becomes("a full queue", STEP_TIMEOUT, || {
        client_output(
            &world,
            "client",
            &[
                "canal-world-peer",
                "datagrams",
                &to,
                &BATCH.to_string(),
                "1400",
                "50000",
            ],
        )
        .expect("sent");
        sent += BATCH;
        world
            .link_report("late")
            .expect("a report")
            .a_to_b
            .dropped_queue
            > 0
    });
    // 32 MiB contain some 23,000 such frames.
    assert!(sent > 18_000, "the queue was full after {sent}");
}

#[test]
fn a_dead_relay_restarts_and_a_link_stays_down() {
    let world = world("again", LINKS);
    let to = target(&world, "late:7");
    let reach = || {
        client_output(
            &world,
            "client",
            &[
                "timeout",
                "2",
                "canal-world-peer",
                "rtt-udp",
                &to,
                "1",
                "10",
            ],
        )
        .is_ok()
    };
    becomes("an answer", STEP_TIMEOUT, reach);
    world.kill("relay-late", Signal::Kill).expect("killed");
    becomes("a new relay", STEP_TIMEOUT, || {
        reach()
            && world
                .host("relay-late")
                .is_ok_and(|host| host.process.restarts == 1)
    });
    world.link_down("late").expect("down");
    assert!(!reach());
    let link = run(&world, "late", &["ip", "-o", "link", "show", "eth0"]);
    assert!(
        String::from_utf8_lossy(&link.stdout).contains("NO-CARRIER"),
        "the host sees its carrier go"
    );
    world.link_up("late").expect("up");
    becomes("the link", STEP_TIMEOUT, reach);
}

/// A process that answers in a host, as long as this value exists.
struct Echo(Child);

impl Echo {
    fn begin(world: &World, host: &str) -> Self {
        let mut command = world
            .exec(host, &["canal-world-peer", "echo", "7"])
            .expect("a command");
        Self(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .expect("started"),
        )
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const TIER: &str = r#"world: links
azs: [az1]
links: {gateway: {delay: 3ms}}
controller: {az: az1, command: [sleep, infinity]}
edges: [{name: edge-1, az: az1, command: [sleep, infinity]}]
gateways: [{name: gw-1, az: az1, backend: b1, command: [sleep, infinity]}]
hosts: [{name: client, az: az1}]
tenants: []
"#;

#[test]
fn a_joining_gateway_has_a_relay_that_leaves_with_it() {
    let world = world("join", TIER);
    world.add_gateway("gw-2", "az1", "b1").expect("added");
    world.wait_ready(deadline(STEP_TIMEOUT)).expect("ready");
    for gateway in ["gw-1", "gw-2"] {
        let echo = Echo::begin(&world, gateway);
        let to = target(&world, &format!("{gateway}:7"));
        becomes("an answer", STEP_TIMEOUT, || {
            client_output(&world, "client", &["canal-world-peer", "rtt", &to, "1"]).is_ok()
        });
        let [least, ..] = times(&world, "client", &["canal-world-peer", "rtt", &to, "50"]);
        assert!(least >= 6_000, "{gateway}: {least} µs");
        drop(echo);
    }
    world.remove_gateway("gw-2").expect("removed");
    let left: Vec<String> = remains(world.name())
        .into_iter()
        .filter(|left| left.contains("gw-2"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(world.host("relay-gw-2").is_err());
}

#[test]
fn a_world_with_relays_leaves_nothing() {
    let name = name("gone");
    let world = world("gone", LINKS);
    let relays: Vec<u32> = world
        .hosts()
        .expect("hosts")
        .iter()
        .filter(|host| host.environment.kind == "relay")
        .filter_map(|host| host.pid())
        .collect();
    assert_eq!(relays.len(), 5);
    for host in world
        .hosts()
        .expect("hosts")
        .iter()
        .filter(|host| host.environment.kind == "relay")
    {
        let devices = world.traffic(&host.environment.name).expect("counters");
        let names: Vec<&str> = devices.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names
                .iter()
                .filter(|name| **name != "lo")
                .copied()
                .collect::<Vec<_>>()
                .len(),
            2,
            "{names:?}"
        );
    }
    world.down().expect("down");
    vanishes(&name);
    let alive = relays
        .iter()
        .filter(|pid| std::path::Path::new(&format!("/proc/{pid}/stat")).exists())
        .count();
    assert_eq!(alive, 0, "a relay outlived its world");
}
