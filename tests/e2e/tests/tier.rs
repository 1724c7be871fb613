//! The cloud tier under change and failure: replicas that come and go, processes, backends and AZs
//! that die, a query of death, tenants without a node proxy. The clients count the losses; nothing
//! here retries.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::{ClientOutcome, Mesh, until};
use canal_timing::{assert_losses, assert_time, deadline, is_timed, timed};
use canal_world::Signal;
use canal_world::topology::Component;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

mod placement;
mod query_of_death;

use placement::{WatchedService, find_victim, gateways, is_twin, members, restarts, services};
use query_of_death::{QueryOfDeath, deaths_since, kill_by_request, loads_beside};

/// A pod behind a node proxy, and one whose node runs no part of the mesh.
const MESHED: &str = "alpha/default/client-0";
const PROXYLESS: &str = "beta/default/client-0";
/// Name of the echo service with all its labels: a resolver that tries a search list first queries
/// a dead server once for each of its entries.
const ECHO: &str = "tcp.default.svc.cluster.local:7000";
/// The first replica of each backend. In the timing tier there is a second with the same name and a
/// `b`. A backend is then a group of machines that fail together.
const FIRST: [&str; 8] = [
    "gw-1", "gw-2", "gw-3", "gw-4", "gw-5", "gw-6", "gw-7", "gw-8",
];
/// Backends beyond those of the file, so that services have shards without a common backend: copies
/// of this replica, in this AZ.
const MORE: [(&str, &str, &str, &str); 2] =
    [("gw-6", "gw-7", "b7", "az1"), ("gw-5", "gw-8", "b8", "az2")];
/// All hosts of the tier in az1.
const TIER_OF_AZ1: [&str; 11] = [
    "edge-1", "gw-1", "gw-1b", "gw-2", "gw-2b", "gw-3", "gw-3b", "gw-6", "gw-6b", "gw-7", "gw-7b",
];
/// Maximum number of lost requests on four persistent connections to one service while the
/// processes of a backend are killed: those in flight at each of its two replicas.
const KILLED_LOSSES_MAX: u64 = 2;
/// Maximum number of lost requests while the backend's machines vanish: one on each connection,
/// because nothing reports that the other end is gone.
const VANISHED_LOSSES_MAX: u64 = 4;
/// A client of a killed process gets responses again within this time. A SYN that meets its
/// listener while the kernel closes that may be dropped silently, and is retransmitted after a
/// second.
const KILLED_GAP_MAX: Duration = Duration::from_millis(1500);
/// New connections of a client whose replicas fail get responses again within this time. The edges
/// mark a dead replica down after two probes, 0.6 s at most; the rest is for the connection.
const GAP_MAX: Duration = Duration::from_secs(1);
/// New connections of a client whose whole AZ fails get responses again within this time. DNS drops
/// an AZ 1.5 s after its last edge's report; nodes try another AZ sooner.
const AZ_GAP_MAX: Duration = Duration::from_secs(2);
/// A replica whose workers run again gets new sessions within this time. Two good probes and a
/// report take less than a second. Nobody measured the value.
const BACK_WITHIN: Duration = Duration::from_secs(5);
/// Requests per second of each load while a backend dies. Several loads run beside each other on
/// two cores.
const RATE: u64 = 15;
/// Response timeout of clients while a backend dies. As long as the longest gap that is permitted
/// (`KILLED_GAP_MAX`).
const TIMEOUT: Duration = Duration::from_millis(1500);
/// A client that starts this long after a backend's death, or later, loses nothing. The same as
/// `GAP_MAX`.
const RECOVERED_WITHIN: Duration = Duration::from_secs(1);
/// Maximum number of lost requests, of 300 to a service that shares replicas with the one that is
/// killed repeatedly: those in flight there. The test permits one for each death of a gateway, and
/// no more than these.
const BESIDE_LOSSES_MAX: u64 = 6;
/// Maximum number of lost requests of a service whose replicas in the clients' AZ are all killed:
/// those sent while all of them are away.
/// 25 are sent per second, for up to four seconds.
const TWIN_LOSSES_MAX: u64 = 100;
/// Clients of that service get responses again within this time. The four seconds above, and a
/// second until new connections succeed (`GAP_MAX`).
const TWIN_GAP_MAX: Duration = Duration::from_secs(5);
/// Duration of the loads beside a query of death. At 25 requests a second they are the 300 of
/// `BESIDE_LOSSES_MAX`.
const QUERIED_FOR: Duration = Duration::from_secs(12);
/// Maximum number, of 700 new connections while an AZ's tier dies: those in progress through it at
/// that moment. 50 start per second, and one takes up to a tenth of a second where two cores are
/// busy with the whole mesh.
const AZ_LOSSES_MAX: u64 = 5;
/// Sessions that stay open while the fleet changes: in the timing tier, and in the gate. The timing
/// tier has enough for a share of each replica; the gate only needs some at each.
const SESSIONS: [usize; 2] = [2000, 200];
/// Response timeout of clients in the gate. It only has to exceed what a quiet machine needs: in
/// the gate, `deadline` waits a minute or more.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two changes of the fleet: about 48 of them in two minutes.
const PAUSE: Duration = Duration::from_millis(2500);
/// Time within which services are spread over a fleet that has just come up. It only has to exceed
/// what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const SPREAD_WITHIN: Duration = Duration::from_secs(60);
/// Replicas leave the tables of services that they no longer serve within this time: sessions own
/// their bucket for a minute after their end.
const OWNERS_LEAVE_WITHIN: Duration = Duration::from_secs(90);
/// A change of the fleet is visible within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        // No request can end the shipped gateway.
        let mesh = Mesh::up_in_place_of(
            "tier.yaml",
            "e2e-tier",
            ("canal-gateway", "crashing-gateway"),
            |topology| {
                for (like, name, backend, az) in MORE {
                    let like = topology
                        .gateways
                        .iter()
                        .find(|gateway| gateway.name == like)
                        .expect("it is in the file")
                        .clone();
                    topology.gateways.push(Component {
                        name: name.into(),
                        backend: Some(backend.into()),
                        az: az.into(),
                        ..like
                    });
                }
                // A second replica makes a backend a group, which fails as one in some tests of the
                // timing tier.
                let second = |first: &Component| Component {
                    name: format!("{}b", first.name),
                    ..first.clone()
                };
                let seconds: Vec<Component> = topology.gateways.iter().map(second).collect();
                topology
                    .gateways
                    .extend(seconds.into_iter().filter(|_| is_timed()));
                // A request for this path ends the test program.
                for gateway in &mut topology.gateways {
                    let process = gateway.process.as_mut().expect("gateways run");
                    process
                        .args
                        .extend(["--crash-on-path".to_string(), "/death".to_string()]);
                }
            },
        );
        for client in [MESHED, PROXYLESS] {
            until(
                deadline(SETTLED_WITHIN),
                &format!("{client} reaches every service"),
                // Each tenant has four services of HTTP (`tier.yaml`).
                || (0..4).all(|n| answers(&mesh, client, n)),
            );
        }
        // At first, the replicas that come up first have all services.
        until(
            deadline(SPREAD_WITHIN),
            "services are spread over the backends",
            || mesh.is_spread(),
        );
        mesh
    })
}

fn url(n: u32) -> String {
    format!("http://web-{n}.default.svc.cluster.local:80/blob?size=100")
}

fn answers(mesh: &Mesh, client: &str, n: u32) -> bool {
    let output = mesh.run(
        client,
        &[
            "curl",
            "-sS",
            "--max-time",
            "10",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            &url(n),
        ],
    );
    output.stdout.trim() == "200"
}

/// Starts a load that runs until the test stops it.
fn start_load(client: &str, n: u32, extra: &[&str]) -> std::process::Child {
    let timeout_ms = deadline(CLIENT_TIMEOUT).as_millis().to_string();
    load(
        client,
        n,
        &[&["-d", "600", "--timeout-ms", &timeout_ms], extra].concat(),
    )
}

/// Starts long-lived sessions of the client without a node proxy, which run until the test stops
/// them, and waits until all are open.
fn start_sessions(count: usize, extra: &[&str]) -> std::process::Child {
    let (count_text, patience_ms) = (
        count.to_string(),
        deadline(CLIENT_TIMEOUT).as_millis().to_string(),
    );
    let argv = [
        "canal-samples",
        "sessions",
        ECHO,
        "-n",
        &count_text,
        "--patience-ms",
        &patience_ms,
        "-d",
        "600",
    ];
    let long_lived = mesh().spawn(PROXYLESS, &[&argv, extra].concat());
    until(deadline(SETTLED_WITHIN), "all sessions are open", || {
        open_sessions() >= count
    });
    long_lived
}

/// Waits until a client's new connections to every service are answered, 20 in a row.
fn wait_until_served(clients: &[&'static str]) {
    for client in clients {
        for n in 0..4 {
            until(
                deadline(SETTLED_WITHIN),
                &format!("{client}: web-{n} answers every new connection"),
                || {
                    let child = load(client, n, &["-n", "20", "-c", "2", "--no-keepalive"]);
                    mesh().end("new connections", child).json()["failed"] == 0
                },
            );
        }
    }
}

fn load(client: &str, n: u32, extra: &[&str]) -> std::process::Child {
    let url = url(n);
    let all: Vec<&str> = ["canal-samples", "load", &url]
        .into_iter()
        .chain(extra.iter().copied())
        .collect();
    mesh().spawn(client, &all)
}

fn number(report: &Value, field: &str) -> u64 {
    report[field]
        .as_f64()
        .unwrap_or_else(|| panic!("{field} is missing: {report}")) as u64
}

/// Returns the longest time without a response.
fn gap(report: &Value) -> Duration {
    Duration::from_millis(number(report, "gap_ms_max"))
}

fn fleet() -> Value {
    mesh().canal(&["gateway", "list", "-o", "json"]).json()
}

fn check_success(output: ClientOutcome) -> ClientOutcome {
    assert_eq!(output.code, Some(0), "{output:?}");
    output
}

/// Returns the number of open sessions between the client without a node proxy and the echo server.
fn open_sessions() -> usize {
    let output = check_success(mesh().run(
        PROXYLESS,
        &["ss", "-Htn", "state", "established", "dport", "=", ":7000"],
    ));
    output.stdout.lines().count()
}

/// At least 50 changes within two minutes under 2,000 long-lived sessions and a stream of new ones;
/// none breaks. `make test-timing` runs one minute of it, `make test` one round with fewer sessions
/// and longer timeouts.
#[test]
fn planned_changes_break_no_session() {
    let mesh = mesh();
    let (seconds, events_min) = match (std::env::var_os("CANAL_SOAK").is_some(), is_timed()) {
        // The soak makes 50 changes (docs/testing.md), the timing tier a part of them.
        (true, _) => (140, 50),
        (false, true) => (80, 16),
        // The gate makes one round, however long that takes.
        (false, false) => (0, 4),
    };
    let begun = Instant::now();
    // Opening uses a fifth of the machine, so capacity decides nothing. A session that opened later
    // could be at an added replica, and would end with it.
    let long_lived = start_sessions(
        SESSIONS[usize::from(!is_timed())],
        &["--open-rate", "200", "--interval-ms", "4000"],
    );
    // Each request opens a connection: changes meet handshakes too. Nobody derived the rates.
    let fresh = start_load(PROXYLESS, 0, &["-r", "40", "-c", "8", "--no-keepalive"]);
    let meshed = start_load(MESHED, 1, &["-r", "40", "-c", "8"]);
    let started = Instant::now();
    let mut events = 0;
    std::thread::scope(|removals| {
        // Ten seconds are left for the last changes to end.
        while events < 4 || begun.elapsed() + Duration::from_secs(10) < Duration::from_secs(seconds)
        {
            // Each call makes four changes.
            let guest = change_fleet(events / 4);
            // The replica's process drains first, for seconds, in which the next one may come.
            removals.spawn(move || {
                mesh.world
                    .remove_gateway(&guest)
                    .unwrap_or_else(|e| panic!("{guest}: {e}"))
            });
            events += 4;
        }
    });
    let took = started.elapsed().as_secs_f64();
    let long_lived = mesh.stop("long-lived sessions", long_lived).json();
    let fresh = mesh.stop("new sessions without a node proxy", fresh).json();
    let meshed = mesh.stop("requests through node proxies", meshed).json();
    println!(
        "{events} changes of the fleet in {took:.0} s: {} sessions held, {} broken; {} new sessions, {} failed; {} meshed requests, {} failed",
        long_lived["sessions"],
        long_lived["broken"],
        fresh["requests"],
        fresh["failed"],
        meshed["requests"],
        meshed["failed"]
    );
    // Mechanisms by which the sessions survived: chains, and segments that TCP retransmitted.
    let spread = |what: &str| -> u64 {
        let label = format!("what=\"{what}\"");
        ["gw-1", "gw-2", "gw-3", "gw-6"] // The replicas of the clients' AZ in `tier.yaml`.
            .iter()
            .map(|host| mesh.counted(host, "canal_redirector_packets_total", &[&label]))
            .sum()
    };
    println!(
        "packets passed on: {}; sent again: {}; reset: {}",
        spread("forwarded"),
        spread("ownership_unsettled"),
        spread("unowned")
    );
    timed!(
        events >= events_min,
        "as many changes of the fleet as planned fit into the time"
    );
    for (what, report) in [
        ("held", &long_lived),
        ("fresh", &fresh),
        ("meshed", &meshed),
    ] {
        // The gate's timeouts are long, so a loss is a fault. The figure below is the timing tier's.
        let is_ok = report["ok"] == true;
        assert!(
            is_timed() || is_ok,
            "{what}: {report}\n{}\n{}",
            fleet(),
            mesh.log_lines("edge-1", "probes changed the state of a replica")
        );
        timed!(
            is_ok,
            "planned changes of the fleet break none of the sessions and requests: {what}"
        );
    }
}

/// Makes four planned changes of the fleet: a replica is added and another drained, then the other
/// way around. Returns the added one, which may be removed.
fn change_fleet(round: usize) -> String {
    let mesh = mesh();
    let (backend, old) = [
        ("b1", "gw-1"),
        ("b2", "gw-2"),
        ("b3", "gw-3"),
        ("b6", "gw-6"),
    ][round % 4];
    let guest = format!("gw-guest-{round}");
    // In the gate no clock decides how long a change lasts.
    let pause = || {
        if is_timed() {
            std::thread::sleep(PAUSE)
        } else {
            mesh.converge(deadline(SETTLED_WITHIN))
        }
    };
    mesh.world
        .add_gateway(&guest, "az1", backend)
        .unwrap_or_else(|e| panic!("{guest}: {e}"));
    mesh.world
        .wait_host_ready(&guest, deadline(SETTLED_WITHIN))
        .unwrap();
    check_success(mesh.canal(&["gateway", "drain", old, "--timeout", "0"]));
    pause();
    check_success(mesh.canal(&["gateway", "undrain", old]));
    check_success(mesh.canal(&["gateway", "drain", &guest, "--timeout", "0"]));
    pause();
    guest
}

/// A process dies, its host survives: the redirector continues, the sessions of other replicas are
/// unaffected, and each client's next attempt succeeds.
#[test]
fn a_killed_replica_loses_only_its_own_sessions() {
    let mesh = mesh();
    let long_lived = mesh.spawn(
        // Many at each replica; ten messages a second on each show a break at once.
        PROXYLESS,
        &[
            "canal-samples",
            "sessions",
            ECHO,
            "-n",
            "300",
            "--interval-ms",
            "100",
            "-d",
            // The sessions last until the victim is chosen, killed and back.
            "15",
        ],
    );
    until(deadline(SETTLED_WITHIN), "all sessions are open", || {
        open_sessions() >= 300
    });
    // Reports arrive once per second; a report a second from now describes the present state.
    let opened = Instant::now();
    until(
        deadline(SETTLED_WITHIN),
        "all replicas have reported since",
        || {
            let elapsed = opened.elapsed().as_millis() as u64;
            fleet()["replicas"]
                .as_array()
                .expect("replicas")
                .iter()
                .all(|replica| number(replica, "since_last_report_ms") + 1000 < elapsed)
        },
    );
    let (victim, own) = busiest();
    mesh.world.kill(&victim, Signal::Kill).unwrap();
    let long_lived = mesh.end("sessions while a replica dies", long_lived).json();
    // A client that reconnects while the kernel still closes the process's sockets one by one may
    // meet its listener, and is reset with it.
    let (too_early, broken) = (
        number(&long_lived, "unanswered"),
        number(&long_lived, "broken"),
    );
    println!(
        "{victim} killed: {broken} of 300 sessions broken (it had {own}), of them {too_early} that came back too early; {} ms to the next answer",
        long_lived["gap_ms_max"]
    );
    timed!(
        (1..=own).contains(&(broken - too_early)),
        "a killed replica breaks sessions, and none but its own"
    );
    assert_time(
        "time until the sessions of a killed replica are answered again",
        gap(&long_lived),
        KILLED_GAP_MAX,
    );
    mesh.world
        .wait_host_ready(&victim, deadline(SETTLED_WITHIN))
        .unwrap();
}

/// Returns the replica with the most sessions, and their number.
fn busiest() -> (String, u64) {
    let fleet = fleet();
    let all = fleet["replicas"].as_array().expect("replicas");
    let sessions = |r: &&Value| number(r, "sessions");
    let most = all.iter().max_by_key(sessions).expect("there is a replica");
    (
        most["name"].as_str().expect("a name").to_string(),
        sessions(&most),
    )
}

/// The redirector and the edge forward without their processes, which adopt the existing maps when
/// they return.
#[test]
fn agents_restart_without_a_lost_session() {
    let mesh = mesh();
    let long_lived = start_sessions(300, &["--interval-ms", "200"]);
    let fresh = start_load(PROXYLESS, 0, &["-r", "50", "-c", "4", "--no-keepalive"]);
    mesh.world.kill("edge-1", Signal::Kill).unwrap();
    mesh.world
        .wait_host_ready("edge-1", deadline(SETTLED_WITHIN))
        .unwrap();
    mesh.world.restart("edge-1").unwrap();
    mesh.world
        .wait_host_ready("edge-1", deadline(SETTLED_WITHIN))
        .unwrap();
    mesh.world.restart("controller").unwrap();
    mesh.converge(deadline(SETTLED_WITHIN));
    for (what, child) in [("sessions", long_lived), ("new sessions", fresh)] {
        let report = mesh.stop(what, child).json();
        assert_eq!(
            report["ok"], true,
            "{what} while the edge's agent and the controller restart: {report}"
        );
    }
}

/// Runs loads on both tenants' HTTP services while a whole backend fails; `end` fails one of its
/// hosts. On persistent connections at most `losses_max` requests are lost. New connections
/// continue without a pause of a second. A client that starts a second later or more loses nothing.
fn backend_dies(what: &str, losses_max: u64, end: impl Fn(&str) + Sync) {
    let mesh = mesh();
    let (rate, limit_ms) = (RATE.to_string(), TIMEOUT.as_millis().to_string());
    let common = ["-r", &rate, "-d", "10", "--timeout-ms", &limit_ms];
    let kinds = [
        // The first kind shows what in-flight requests are lost, the second when new connections
        // succeed.
        ("kept", &["-c", "4"][..], losses_max),
        // New connections may fail for a second (`GAP_MAX`), in which each load starts `RATE`
        // requests. 64 are more than can wait at a time, so those that wait hold up no later ones.
        ("new", &["-c", "64", "--no-keepalive"], RATE),
    ];
    let started = Instant::now();
    let mut loads = Vec::new();
    for client in [MESHED, PROXYLESS] {
        // The four services of HTTP of `tier.yaml`.
        for n in 0..4 {
            for (connections, extra, losses_max) in kinds {
                let child = load(client, n, &[&common, extra].concat());
                let name = format!("b2 {what}: {client} web-{n}, {connections} connections");
                loads.push((
                    name,
                    losses_max,
                    connections == "new",
                    started.elapsed(),
                    child,
                ));
            }
        }
    }
    // The loads have opened their connections, so that some of them end with the backend.
    std::thread::sleep(Duration::from_secs(3));
    // All hosts fail at once.
    std::thread::scope(|scope| {
        for host in ["gw-2", "gw-2b"] {
            scope.spawn(|| end(host));
        }
    });
    let died = started.elapsed();
    for (name, losses_max, is_new, begun, child) in loads {
        let report = mesh.end("load while a backend dies", child).json();
        println!("{name}: {report}");
        // This is in the load's own time, and allows for a request that started in time and ended
        // late.
        let recovered_at = died - begun + RECOVERED_WITHIN + TIMEOUT;
        // A load without a loss has no time of one.
        let last = Duration::from_millis(report["failed_last_ms"].as_u64().unwrap_or(0));
        assert_time(
            &format!("time from the death until the last loss, {name}"),
            last.saturating_sub(died - begun),
            recovered_at - (died - begun),
        );
        assert_losses(
            &format!("requests lost, {name}"),
            number(&report, "failed"),
            losses_max,
        );
        timed!(
            // 9 of the 10 seconds; a load that stalls itself would lose nothing.
            number(&report, "requests") >= 9 * RATE,
            "the load is sent at its rate, {name}"
        );
        // A request on a kept connection may wait for `TIMEOUT`, which is longer than `GAP_MAX`.
        if is_new {
            assert_time(
                &format!("time without a response, {name}"),
                gap(&report),
                GAP_MAX,
            );
        }
    }
}

/// Reverts the failure of these hosts when it is dropped, so that a failed test leaves a complete
/// fleet.
struct FaultReversal<'a, F: Fn(&str)>(&'a [&'a str], F);

impl<F: Fn(&str)> Drop for FaultReversal<'_, F> {
    fn drop(&mut self) {
        self.0.iter().for_each(|host| (self.1)(host));
    }
}

/// The processes of all replicas of a backend die and stay dead: its services continue on their
/// other backends.
#[test]
fn a_dead_backend_is_replaced_within_a_second() {
    let mesh = mesh();
    {
        let _reversal = FaultReversal(&["gw-2", "gw-2b"], |host| drop(mesh.world.start(host)));
        backend_dies("killed", KILLED_LOSSES_MAX, |host| {
            kill_for_good(mesh, host)
        });
    }
    // Whatever the result, the next test starts with a complete fleet.
    settle(&["gw-2", "gw-2b"]);
}

fn kill_for_good(mesh: &Mesh, host: &str) {
    mesh.world.kill(host, Signal::Kill).unwrap();
    mesh.world.stop(host).unwrap();
}

/// The same without bounds: after the death of a backend, all services of all clients answer every
/// new connection.
#[test]
fn a_dead_backend_leaves_all_services_served() {
    let mesh = mesh();
    {
        let _reversal = FaultReversal(&["gw-2"], |host| drop(mesh.world.start(host)));
        kill_for_good(mesh, "gw-2");
        wait_until_served(&[MESHED, PROXYLESS]);
    }
    settle(&["gw-2"]);
    wait_until_served(&[MESHED, PROXYLESS]);
}

/// Waits until these hosts are ready and all data planes have their configuration.
fn settle(hosts: &[&str]) {
    let mesh = mesh();
    hosts.iter().for_each(|host| {
        mesh.world
            .wait_host_ready(host, deadline(SETTLED_WITHIN))
            .unwrap()
    });
    mesh.converge(deadline(SETTLED_WITHIN));
}

/// All machines of a backend vanish silently: nothing resets their connections.
#[test]
fn a_backend_whose_machines_vanish_is_replaced_within_a_second() {
    let mesh = mesh();
    {
        let _reversal = FaultReversal(&["gw-2", "gw-2b"], |host| drop(mesh.world.link_up(host)));
        backend_dies("vanished", VANISHED_LOSSES_MAX, |host| {
            mesh.world.link_down(host).unwrap()
        });
    }
    settle(&["gw-2", "gw-2b"]);
}

/// Opens a session now. Returns the time, and whether it got a response within a second.
async fn new_session(to: SocketAddr) -> (Instant, bool) {
    let began = Instant::now();
    let ask = async {
        let mut stream = TcpStream::connect(to).await?;
        stream
            .write_all(b"GET /blob?size=1 HTTP/1.1\r\nHost: web-0\r\nConnection: close\r\n\r\n")
            .await?;
        let mut answer = Vec::new();
        stream
            .read_to_end(&mut answer)
            .await
            .map(|_| answer.starts_with(b"HTTP/1.1 200 "))
    };
    (
        began,
        matches!(
            tokio::time::timeout(Duration::from_secs(1), ask).await,
            Ok(Ok(true))
        ),
    )
}

/// Opens sessions of a pod without a node proxy, one every 20 ms for this long. Returns when each
/// started, and whether it got a response.
fn new_sessions(to: SocketAddr, lasts: Duration) -> Vec<(Instant, bool)> {
    let work = async {
        let (started, mut next) = (
            Instant::now(),
            tokio::time::interval(Duration::from_millis(20)),
        );
        let mut all = tokio::task::JoinSet::new();
        while started.elapsed() < lasts {
            next.tick().await;
            all.spawn_local(new_session(to));
        }
        all.join_all().await
    };
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, work)
    };
    mesh().world.inside(PROXYLESS, run).unwrap()
}

/// A replica whose workers are stopped while the rest of its process responds gets no new session
/// after two seconds. It gets new sessions within five seconds after its workers continue.
#[test]
fn a_grey_failure_gets_no_new_session() {
    // Longer than the two seconds after which a replica with stuck workers must get no session.
    const GREY: Duration = Duration::from_secs(6);
    let mesh = mesh();
    let victim = mesh
        .heads("beta/default/web-0", "az1")
        .into_iter()
        .next()
        .expect("web-0 lives in az1");
    let all = mesh.resolve(PROXYLESS, "web-0.default.svc.cluster.local");
    let to = *all
        .iter()
        .find(|ip| ip.is_ipv4())
        .unwrap_or_else(|| panic!("{all:?}"));
    let taken = || {
        mesh.counted(
            &victim,
            "canal_redirector_packets_total",
            &["program=\"redirector\"", "what=\"new\""],
        )
    };
    let (stopped_at, back, sessions) = std::thread::scope(|scope| {
        // The watch covers the failure, and the time in which the replica must return.
        // 7 s are the second before the failure, `BACK_WITHIN`, and one second more.
        let watch = scope.spawn(|| new_sessions((to, 80).into(), GREY + Duration::from_secs(7)));
        // Some sessions are answered first, so that lost ones are those of the failure.
        std::thread::sleep(Duration::from_secs(1));
        let (stopped, stopped_at) = (
            mesh.world.stop_threads(&victim, "gateway-").unwrap(),
            Instant::now(),
        );
        std::thread::sleep(GREY);
        // The replica has had no new session for longer than the interval at which its counter is
        // read.
        let before = taken();
        drop(stopped);
        let back = until(
            deadline(SETTLED_WITHIN),
            "the replica has new sessions again",
            || taken() > before,
        );
        (stopped_at, back, watch.join().expect("the sessions end"))
    });
    let after = |began: &Instant| began.saturating_duration_since(stopped_at);
    let lost: Vec<Duration> = sessions
        .iter()
        .filter(|(_, answered)| !answered)
        .map(|(began, _)| after(began))
        .collect();
    let last = lost.iter().max().copied().unwrap_or_default();
    println!(
        "{victim} grey for {GREY:?}: {} of {} new sessions lost, the last began {last:?} after; some again {back:?} after",
        lost.len(),
        sessions.len()
    );
    // Without such a session the time until none is sent there would be zero.
    timed!(!lost.is_empty(), "a session reaches the stuck workers");
    assert_time(
        "time until a grey replica gets no new session",
        last,
        // The requirement that the gateway's watchdog asserts (`MISSED_LOOKS_MAX`).
        Duration::from_secs(2),
    );
    assert_time(
        "time until a replica that runs again gets new sessions",
        back,
        BACK_WITHIN,
    );
    mesh.converge(deadline(SETTLED_WITHIN));
}

/// The tier of a whole AZ fails: edge and replicas. Its clients use the other AZ within two
/// seconds, by southbound and by DNS.
#[test]
fn a_dead_az_is_replaced_within_two_seconds() {
    let mesh = mesh();
    // More requests may run at once than start in a second: a resolver queries the dead AZ's server
    // first, and waits that long for it.
    let loads = [MESHED, PROXYLESS].map(|client| {
        (
            client,
            load(
                client,
                0,
                // 50 requests a second for 14 s are the 700 of `AZ_LOSSES_MAX`. 64 at a time,
                // because those that wait for a dead replica must not delay others; 1.5 s is
                // `TIMEOUT`.
                &[
                    "-r",
                    "50",
                    "-c",
                    "64",
                    "-d",
                    "14",
                    "--timeout-ms",
                    "1500",
                    "--no-keepalive",
                ],
            ),
        )
    });
    // Both loads run when the AZ dies.
    std::thread::sleep(Duration::from_secs(3));
    let reports = while_az1_is_dead(|| {
        loads.map(|(client, child)| (client, mesh.end("load while an AZ dies", child).json()))
    });
    for (client, report) in reports {
        println!("az1's tier dead: {client}: {report}");
        assert_time(
            &format!("time without a response when az1's tier dies, {client}"),
            gap(&report),
            AZ_GAP_MAX,
        );
        assert_losses(
            &format!("requests lost when az1's tier dies, {client}"),
            number(&report, "failed"),
            AZ_LOSSES_MAX,
        );
        timed!(
            // 50 requests a second for 14 s are 700.
            number(&report, "requests") >= 690,
            "the load is sent at its rate when az1's tier dies, {client}"
        );
    }
}

/// The same without bounds: both clients of the AZ are served by the other.
#[test]
fn a_dead_az_leaves_all_services_served() {
    while_az1_is_dead(|| wait_until_served(&[MESHED, PROXYLESS]));
}

/// Runs `work` while all hosts of az1's tier have no link, and waits until traffic is back
/// afterwards.
fn while_az1_is_dead<T>(work: impl FnOnce() -> T) -> T {
    let mesh = mesh();
    let hosts: Vec<&str> = TIER_OF_AZ1
        .into_iter()
        .filter(|host| mesh.world.host(host).is_ok())
        .collect();
    let result = {
        let _reversal = FaultReversal(&hosts, |host| drop(mesh.world.link_up(host)));
        std::thread::scope(|scope| {
            for host in &hosts {
                scope.spawn(move || mesh.world.link_down(host).unwrap());
            }
        });
        work()
    };
    mesh.converge(deadline(SETTLED_WITHIN));
    until(deadline(SETTLED_WITHIN), "traffic is back", || {
        [MESHED, PROXYLESS]
            .into_iter()
            .all(|client| answers(mesh, client, 0))
    });
    result
}

/// A request that crashes every replica it reaches ends only replicas in its own service's tables.
/// Services that share those replicas lose the requests in flight there; all others lose nothing.
#[test]
fn a_request_that_crashes_replicas_affects_one_service_only() {
    let mesh = mesh();
    let all = services();
    let (mut placed, mut tables, mut victim) = (Value::Null, Vec::new(), None);
    // Replicas of an earlier shard leave after the sessions of earlier tests have left TIME_WAIT.
    until(
        deadline(OWNERS_LEAVE_WITHIN),
        "a service shares no replica with another",
        || {
            placed = mesh.canal(&["gateway", "status", "-o", "json"]).json();
            tables = all.iter().map(|service| members(&service.name)).collect();
            victim = find_victim(&placed, &all, &tables);
            victim.is_some()
        },
    );
    let victim = victim.expect("it was found");
    let before = restarts();
    let others = loads_beside(victim, &all, tables);
    let begun = Instant::now();
    if is_timed() {
        // The losses and gaps are measured from a steady state.
        std::thread::sleep(Duration::from_secs(2));
    }
    let mut own = kill_by_request(victim, &before);
    let victim = &victim.name;
    if is_timed() {
        // The loads go on while replicas return.
        std::thread::sleep(QUERIED_FOR.saturating_sub(begun.elapsed()));
    }
    let reports: Vec<_> = others
        .into_iter()
        .map(|(name, table, child)| {
            (
                name,
                table,
                mesh.stop("load beside a query of death", child).json(),
            )
        })
        .collect();
    for gateway in gateways() {
        mesh.world
            // It only has to exceed what a quiet machine needs.
            .wait_host_ready(&gateway, deadline(Duration::from_secs(30)))
            .unwrap();
    }
    let after = mesh.canal(&["gateway", "status", "-o", "json"]).json();
    own.extend(members(victim));
    let (died, deaths) = deaths_since(&before);
    println!("query of death for {victim}: {died:?} died, its tables name {own:?}");
    let query = QueryOfDeath {
        victim,
        placed,
        after,
        died,
        deaths,
    };
    let mut elsewhere = 0;
    for (name, table, report) in reports {
        elsewhere += u32::from(query.check_losses(name, &table, &report));
    }
    let QueryOfDeath { placed, died, .. } = query;
    println!(
        "query of death for {victim}: {deaths} deaths; {elsewhere} services share no replica that died"
    );
    assert!(
        elsewhere > 0,
        "every service shares a replica that died, so nothing was shown of others: {placed}"
    );
    assert!(
        !died.is_empty(),
        "no replica died, so nothing was shown: {placed}"
    );
    assert!(
        died.is_subset(&own),
        "{died:?} died, its tables name {own:?}: {placed}"
    );
    assert!(
        own.len() < gateways().count(),
        "tables of all replicas show nothing: {placed}"
    );
}
