//! Limits of tenants. The redirector limits a flood of one tenant, or to one service, to about the
//! rate before any process sees it; the gateway limits requests. The other tenant, with the same
//! addresses, loses nothing; without the limit everything is as before. However many replicas share
//! a limit, clients that use all of them get at least nine tenths of it.

use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use canal_e2e::credential::{Leaf, PemCredential, TestAuthority};
use canal_e2e::hbone::{TunnelAttempt, TunnelRequest, load};
use canal_e2e::{Icmp, Mesh, query, query_udp_within, until};
use canal_timing::{assert_losses, deadline, timed};
use canal_world::topology::OutsideTraffic;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const ALPHA: &str = "alpha/default/client-0";
const BETA: &str = "beta/default/client-0";
const REPLICAS: [&str; 4] = ["gw-1", "gw-2", "gw-3", "gw-6"];
/// Rate per second, and burst, for all replicas of the AZ together. Far below what one machine
/// serves, so that the throttle limits and not the CPU.
const RATE: u64 = 20;
/// Requests per second, for all replicas of all AZs together. Each of the test's requests is a
/// handshake, of which an unoptimized build makes few.
const REQUESTS_RATE: u64 = 10;
/// Minimum fraction of a limit that passes, whatever the number of replicas. The parts of the
/// replicas are rounded, and a bucket that is full loses tokens.
const LEAST: f64 = 0.9;
/// Source ports of a flood of queries: enough to meet every replica. As many as there are buckets,
/// so that a replica with a quarter of them is missed in one of 10^15 floods.
const PORTS: usize = 128;
/// Duration of floods. Longer than a second, so that the rate counts beside the burst.
const FLOOD: Duration = Duration::from_millis(1500);
/// Beta's sessions in a flood, and the pause between two of them, whatever happens to the earlier
/// ones. Far more than twice what passes, which the test checks: 20 of the burst and 30 of the 1.5
/// s.
const SESSIONS: u64 = 1500;
const NEXT_SESSION: Duration = Duration::from_millis(1);
/// Beta gives up a session that is not open within this time: a dropped SYN is retransmitted after
/// a second.
const OPEN_WITHIN: Duration = Duration::from_millis(500);
/// An admitted session gets its response within this time, on any machine. It only ends a hang.
const ANSWERED_WITHIN: Duration = Duration::from_secs(20);
/// Time within which services are spread over a fleet that has just come up. It only has to exceed
/// what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const SPREAD_WITHIN: Duration = Duration::from_secs(60);
/// Both families use the same token buckets, which hold the tokens of a second: this long after one
/// flood they are full for the next.
const FULL_AGAIN: Duration = Duration::from_secs(1);
/// Queries between two pauses: enough for a flood even on a busy machine.
const QUESTIONS: u64 = 5;
/// Agents read their programs' counters every two seconds. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const SEEN_WITHIN: Duration = Duration::from_secs(6);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("tier.yaml", "e2e-throttle", |topology| {
            // Echo requests of captured pods are outside the mesh.
            topology
                .tenants
                .iter_mut()
                .for_each(|tenant| tenant.outside = OutsideTraffic::Passthrough);
        });
        until(
            deadline(SPREAD_WITHIN),
            "services are spread over the backends",
            || mesh.is_spread(),
        );
        // A limit is divided by replica, and while buckets move there are more replicas than in the
        // plan.
        mesh.rest(deadline(Duration::from_secs(60)));
        until(
            deadline(Duration::from_secs(20)),
            "both tenants are served",
            || {
                [ALPHA, BETA]
                    .into_iter()
                    .all(|pod| (0..2).all(|n| flood(&mesh, pod, n, &["-n", "1"])["failed"] == 0))
            },
        );
        mesh
    })
}

/// Returns a Throttle of beta's, for a service or for the whole tenant.
fn throttle(service: Option<&str>, of: &str, rate: u64) -> String {
    let target = service
        .map(|name| format!("\n  targetRef: {{kind: Service, name: {name}}}"))
        .unwrap_or_default();
    format!(
        "apiVersion: canal.mesh/v1\nkind: Throttle\nmetadata: {{name: flood, namespace: default}}\nspec:{target}\n  \
         {of}: {{perSecond: {rate}, burst: {rate}}}\n"
    )
}

fn lift() {
    mesh()
        .canal(&["delete", "--tenant", "beta", "Throttle", "flood"])
        .expect_success();
    mesh().converge(deadline(Duration::from_secs(10)));
}

/// Runs HTTP load on `web-N`, each request on its own connection, and returns the report.
fn flood(mesh: &Mesh, pod: &str, n: u32, extra: &[&str]) -> serde_json::Value {
    let url = format!("http://web-{n}.default.svc.cluster.local:80/blob?size=100");
    let all = [
        "canal-samples",
        "load",
        &url,
        "--no-keepalive",
        "--timeout-ms",
        "400",
    ]
    .into_iter()
    .chain(extra.iter().copied());
    mesh.run(pod, &all.collect::<Vec<_>>()).json()
}

/// Sums a metric over AZ 1's replicas, where both clients are.
fn sum(family: &str, labels: &[&str]) -> u64 {
    REPLICAS
        .iter()
        .map(|replica| mesh().counted(replica, family, labels))
        .sum()
}

fn refused(what: &str) -> u64 {
    sum(
        "canal_redirector_packets_total",
        &[&format!("what=\"throttled_{what}\"")],
    )
}

/// Returns the address of beta's `web-0` in AZ 1; alpha's service with that number, if any, has the
/// same.
fn address(name: &str, is_v6: bool) -> IpAddr {
    let all = mesh().resolve(BETA, &format!("{name}.default.svc.cluster.local"));
    *all.iter()
        .find(|a| a.is_ipv6() == is_v6)
        .unwrap_or_else(|| panic!("{name} has both families: {all:?}"))
}

/// Opens sessions of alpha to the same address, without a proxy, one every 20 ms until `over`.
/// Returns their number, and the number of those that failed within 300 ms (a dropped SYN is
/// retransmitted after a second).
fn alphas_sessions(to: SocketAddr, over: &AtomicBool) -> (u64, u64) {
    let work = || {
        let (mut all, mut failed) = (0, 0);
        while !over.load(Ordering::Relaxed) {
            all += 1;
            failed +=
                u64::from(TcpStream::connect_timeout(&to, Duration::from_millis(300)).is_err());
            std::thread::sleep(Duration::from_millis(20));
        }
        (all, failed)
    };
    mesh().world.inside(ALPHA, work).unwrap()
}

/// Opens a session. Returns when it was admitted or given up, and, if it was admitted, whether it
/// got a response.
async fn session(to: SocketAddr) -> (Instant, Option<bool>) {
    let opened = tokio::time::timeout(OPEN_WITHIN, tokio::net::TcpStream::connect(to)).await;
    let at = Instant::now();
    let Ok(Ok(mut stream)) = opened else {
        return (at, None);
    };
    let ask = async {
        stream
            .write_all(
                format!("GET /blob?size=100 HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n")
                    .as_bytes(),
            )
            .await?;
        let mut answer = Vec::new();
        stream
            .read_to_end(&mut answer)
            .await
            .map(|_| answer.starts_with(b"HTTP/1.1 200 "))
    };
    (
        at,
        Some(matches!(
            tokio::time::timeout(ANSWERED_WITHIN, ask).await,
            Ok(Ok(true))
        )),
    )
}

/// Result of a flood.
struct FloodResult {
    admitted: u64,
    served: u64,
    /// Sessions accepted by user space, without alpha's and the spared service's.
    accepted: u64,
    /// Time from the first SYN until no session waited for a SYN-ACK.
    took: Duration,
}

/// Opens beta's sessions one after the other without waiting for any. Returns, for each admitted
/// one, whether it got a response; and [`FloodResult::took`].
fn flood_with_sessions(to: SocketAddr) -> (Vec<bool>, Duration) {
    let work = async {
        let (started, mut next) = (Instant::now(), tokio::time::interval(NEXT_SESSION));
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..SESSIONS {
            next.tick().await;
            all.spawn_local(session(to));
        }
        let came = all.join_all().await;
        let last = came
            .iter()
            .map(|(at, _)| *at)
            .max()
            .expect("there are sessions");
        (
            came.into_iter()
                .filter_map(|(_, answered)| answered)
                .collect(),
            last - started,
        )
    };
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, work)
    };
    mesh().world.inside(BETA, run).unwrap()
}

/// Beta floods `to` with new sessions while alpha opens some to the same address; `spared` more go
/// to another service of beta's.
fn sessions(to: SocketAddr, spared: u64) -> FloodResult {
    let (mesh, over) = (mesh(), AtomicBool::new(false));
    let before = sum("canal_gateway_accepted_connections_total", &[]);
    let (answered, took, (alphas, failed)) = std::thread::scope(|scope| {
        let alpha = scope.spawn(|| alphas_sessions(to, &over));
        let other = scope.spawn(|| {
            (spared > 0).then(|| flood(mesh, BETA, 1, &["-n", &spared.to_string(), "-c", "2"]))
        });
        let flooded = scope.spawn(|| flood_with_sessions(to)).join();
        over.store(true, Ordering::Relaxed);
        if let Some(report) = other.join().expect("beta's other sessions") {
            assert_eq!(report["failed"], 0, "beta's web-1 has no limit: {report}");
        }
        let (answered, took) = flooded.expect("beta's sessions");
        (answered, took, alpha.join().expect("alpha's sessions"))
    });
    println!("{to}: alpha opened {alphas} sessions meanwhile, {failed} failed");
    timed!(
        alphas > 30,
        "the other tenant opens more than 30 sessions beside a flood, {}",
        family(to.ip())
    );
    assert_losses(
        &format!(
            "sessions of the other tenant lost beside a flood, {}",
            family(to.ip())
        ),
        failed,
        0,
    );
    let accepted = (sum("canal_gateway_accepted_connections_total", &[]) - before)
        .saturating_sub(alphas + spared);
    FloodResult {
        admitted: answered.len() as u64,
        served: answered.iter().filter(|answered| **answered).count() as u64,
        accepted,
        took,
    }
}

/// Returns the name of an address's family, for the names of figures: an address may differ from
/// run to run.
fn family(address: IpAddr) -> &'static str {
    if address.is_ipv6() { "IPv6" } else { "IPv4" }
}

/// Returns the maximum that a limit of `rate` admits in this time; each replica may round up by
/// one.
fn most(replicas: u64, rate: u64, took: Duration) -> u64 {
    rate + (rate as f64 * took.as_secs_f64()) as u64 + replicas
}

/// Returns the minimum that it admits of a flood of this duration that meets all replicas, which
/// start with full token buckets.
fn least(rate: u64, flood: Duration) -> u64 {
    (LEAST * (rate as f64 + rate as f64 * flood.as_secs_f64())) as u64
}

#[test]
fn new_sessions_are_cut_to_the_rate_before_a_process_sees_them() {
    let mesh = mesh();
    // With a limit of one service, another service of the tenant must not be limited.
    for (scope, counter, spared) in [
        (Some("web-0"), "service_sessions", 40),
        (None, "tenant_sessions", 0),
    ] {
        mesh.apply("beta", &throttle(scope, "sessions", RATE));
        let (before, mut lost) = (refused(counter), 0);
        for is_v6 in [false, true] {
            let to = SocketAddr::from((address("web-0", is_v6), 80));
            let replicas = mesh.heads("beta/default/web-0", "az1").len() as u64;
            // The bucket must be full at the beginning, or the previous flood would lower the
            // result.
            std::thread::sleep(FULL_AGAIN);
            let FloodResult {
                admitted,
                served,
                accepted,
                took,
            } = sessions(to, spared);
            // Each SYN that was not admitted is dropped and counted.
            lost += SESSIONS - admitted;
            // For a limit of the whole tenant, a replica's part is its largest share of any of the
            // tenant's services, which may be another one.
            let most = if scope.is_some() {
                most(replicas, RATE, took)
            } else {
                replicas * most(1, RATE, took)
            };
            println!(
                "{counter}, {to}: {SESSIONS} tried, {accepted} accepted, {served} served by {replicas} replicas, {most} at most"
            );
            // Fewer sessions than twice the limit would not be a flood, and the upper bound would
            // prove nothing.
            timed!(
                SESSIONS > 2 * most,
                "sessions are a flood, {counter}, {}",
                family(to.ip())
            );
            assert_eq!(served, admitted, "admitted sessions are served");
            // The tokens of the burst and of one second are the least that any machine must let
            // through.
            let least = least(RATE, NEXT_SESSION * SESSIONS as u32).max(2 * RATE);
            timed!(
                (least..=most).contains(&served),
                "the limit of sessions is served, and no more, {counter}, {}",
                family(to.ip())
            );
            timed!(
                accepted <= most,
                "no more sessions than the limit reach a process, {counter}, {}",
                family(to.ip())
            );
        }
        // A SYN that is lost when its client gives up is counted once.
        until(
            deadline(SEEN_WITHIN),
            &format!("{lost} {counter} are counted"),
            || refused(counter) - before >= lost,
        );
        lift();
        // 20 clients for 300 sessions exceed the limit by far if it is still in force.
        until(
            deadline(Duration::from_secs(10)),
            "the limit was removed",
            || flood(mesh, BETA, 0, &["-n", "300", "-c", "20"])["failed"] == 0,
        );
    }
}

/// Sends datagrams to a port without a listener, from many ports, for the duration of floods, and
/// returns their number. They meet all replicas.
fn datagrams(pod: &str, to: IpAddr, per_second: u64) -> u64 {
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let open = || {
        (0..PORTS)
            .map(|_| UdpSocket::bind(any))
            .collect::<std::io::Result<Vec<_>>>()
    };
    let sockets = mesh().world.inside(pod, open).unwrap().unwrap();
    let (started, mut sent) = (Instant::now(), 0);
    for socket in sockets.iter().cycle() {
        // An error is about an earlier datagram: the port is closed.
        let _ = socket.send_to(b"a datagram", (to, 9));
        sent += 1;
        let due = started + Duration::from_secs(1) * sent / per_second as u32;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if started.elapsed() >= FLOOD {
            break;
        }
    }
    u64::from(sent)
}

/// A flood through every replica's token buckets gets the whole limit, and no more.
#[test]
fn packets_of_many_flows_get_the_whole_limit() {
    let mesh = mesh();
    // 200 packets per second: a tenth of the 2,000 that are sent.
    let rate = 200;
    for (scope, counter) in [(Some("web-0"), "service_packets"), (None, "tenant_packets")] {
        mesh.apply("beta", &throttle(scope, "packets", rate));
        for is_v6 in [false, true] {
            let to = address("web-0", is_v6);
            let heads = mesh.heads("beta/default/web-0", "az1");
            assert!(heads.len() > 1, "one replica divides nothing: {heads:?}");
            // Excess packets are counted as throttled. Admitted ones are counted at the end of
            // their chain, because no process has the port.
            let count_passed = || {
                sum(
                    "canal_redirector_packets_total",
                    &["program=\"redirector\"", "what=\"unowned\""],
                )
            };
            std::thread::sleep(FULL_AGAIN);
            // `refused` and `count_passed` read counters, so they come before the clock starts.
            let (before, passed_before, started) =
                (refused(counter), count_passed(), Instant::now());
            let sent = datagrams(BETA, to, 2000);
            let took = started.elapsed();
            until(deadline(SEEN_WITHIN), "all datagrams are counted", || {
                refused(counter) - before + count_passed() - passed_before >= sent
            });
            let (lost, passed) = (refused(counter) - before, count_passed() - passed_before);
            let replicas = heads.len() as u64;
            // For a limit of the whole tenant, a replica's part is its largest share of any of the
            // tenant's services, which may be another one.
            let most = if scope.is_some() {
                most(replicas, rate, took)
            } else {
                replicas * most(1, rate, took)
            };
            let least = least(rate, FLOOD);
            println!(
                "{counter}, {to}: {passed} of {sent} datagrams passed {replicas} replicas, {lost} were refused; {least} to {most} may pass"
            );
            // Otherwise the upper bound would prove nothing.
            timed!(
                sent > 2 * most,
                "datagrams are a flood, {counter}, {}",
                family(to)
            );
            timed!(
                (least..=most).contains(&passed),
                "the limit of datagrams passes, and no more, {counter}, {}",
                family(to)
            );
        }
        lift();
    }
}

/// Sends echo requests from a pod to one address at this rate for the duration of floods. Returns
/// how many were sent and answered.
fn echoes(pod: &str, to: IpAddr, per_second: u32) -> (u64, u64) {
    let icmp = Icmp::open(&mesh().world, pod, to.is_ipv6());
    let (started, mut sent, mut answered) = (Instant::now(), 0, 0);
    let reply = if to.is_ipv6() { (129, 0) } else { (0, 0) };
    let pause = Duration::from_secs(1) / per_second;
    let mut receive = |within: Duration| {
        answered += u64::from(
            icmp.receive_one(within, |h| h.kind == reply && h.from == to)
                .is_some(),
        )
    };
    while started.elapsed() < FLOOD {
        icmp.echo(to, sent as u16).unwrap();
        sent += 1;
        while started.elapsed() < pause * sent as u32 {
            receive(pause);
        }
    }
    // Collects the responses that are still in transit.
    let end = Instant::now();
    while end.elapsed() < Duration::from_millis(300) {
        receive(Duration::from_millis(50));
    }
    (sent, answered)
}

#[test]
fn packets_are_cut_to_the_rate() {
    let mesh = mesh();
    // 100 packets per second: a tenth of beta's flood.
    let rate = 100;
    for (scope, counter) in [(Some("web-0"), "service_packets"), (None, "tenant_packets")] {
        mesh.apply("beta", &throttle(scope, "packets", rate));
        let (before, mut lost) = (refused(counter), 0);
        for is_v6 in [false, true] {
            let to = address("web-0", is_v6);
            std::thread::sleep(FULL_AGAIN);
            let started = Instant::now();
            // Beta sends ten times its limit. Alpha has none, and sends twice beta's limit.
            let ((sent, answered), (alphas, alphas_answered)) = std::thread::scope(|scope| {
                let beta = scope.spawn(move || echoes(BETA, to, 1000));
                let alpha = scope.spawn(move || echoes(ALPHA, to, 200));
                (
                    beta.join().expect("beta's echoes"),
                    alpha.join().expect("alpha's echoes"),
                )
            });
            // Echo requests have no ports, so all are in one bucket and at one replica, which has its
            // share of the limit.
            let replicas = mesh.heads("beta/default/web-0", "az1").len() as u64;
            // Shares of replicas are not exactly equal, so the lower bound assumes one replica
            // more. No replica admits more than the whole limit.
            let (least, most) = (
                least(rate, FLOOD) / (replicas + 1),
                most(1, rate, started.elapsed()),
            );
            println!(
                "{counter}, {to}: {answered} of {sent} echoes answered, {least} to {most} may be; alpha: {alphas_answered} of {alphas}"
            );
            // Otherwise the upper bound would prove nothing.
            timed!(
                sent > 2 * most,
                "echoes are a flood, {counter}, {}",
                family(to)
            );
            timed!(
                (least..=most).contains(&answered),
                "the limit of echoes is answered, and no more, {counter}, {}",
                family(to)
            );
            assert_losses(
                &format!(
                    "echoes of the other tenant lost beside a flood, {counter}, {}",
                    family(to)
                ),
                alphas - alphas_answered,
                0,
            );
            lost += sent - answered;
        }
        until(
            deadline(SEEN_WITHIN),
            &format!("{lost} {counter} are counted"),
            || refused(counter) - before >= lost,
        );
        lift();
        // 200 echoes per second are twice the removed limit.
        let (sent, answered) = echoes(BETA, address("web-0", false), 200);
        assert_losses(
            &format!("echoes lost without a limit, {counter}"),
            sent - answered,
            0,
        );
    }
}

/// The name service is in user space: the queries that it receives are those that the redirector
/// admitted.
#[test]
fn a_flood_of_questions_does_not_reach_the_name_service() {
    let mesh = mesh();
    // The rate is far below the flood, so nearly all queries must be refused.
    let (rate, asked) = (100, |host: &str| {
        mesh.counted(host, "canal_dns_queries_total", &[])
    });
    let servers: [IpAddr; 2] =
        ["10.102.2.1", "fd00:102::2000:0:0:1"].map(|text| text.parse().expect("an address"));
    let question = query("web-0.default.svc.cluster.local.", false);
    mesh.apply("beta", &throttle(None, "packets", rate));
    for server in servers {
        let replicas = mesh.heads("beta/canal-system/gateway", "az1").len() as u64;
        let before: u64 = REPLICAS.iter().map(|replica| asked(replica)).sum();
        let any = if server.is_ipv6() {
            "[::]:0"
        } else {
            "0.0.0.0:0"
        };
        let sockets: Vec<UdpSocket> = (0..PORTS)
            .map(|_| {
                mesh.world
                    .inside(BETA, || UdpSocket::bind(any))
                    .unwrap()
                    .unwrap()
            })
            .collect();
        std::thread::sleep(FULL_AGAIN);
        let (started, mut sent) = (Instant::now(), 0);
        let mut next = sockets.iter().cycle();
        let mut ask = |count: u64| {
            for socket in next.by_ref().take(count as usize) {
                socket.send_to(&question, (server, 53)).unwrap();
            }
            sent += count;
        };
        while started.elapsed() < FLOOD {
            ask(QUESTIONS);
            // Without a pause the client would take the CPU from the programs that it floods.
            std::thread::sleep(Duration::from_micros(200));
        }
        // On a busy machine this thread may wait beyond the end of the flood. The tokens that the
        // limit added during the wait are then used too, at every replica.
        ask(2 * PORTS as u64);
        let mut alphas = 0;
        // Alpha asks the same address, and its queries must not use beta's tokens.
        for _ in 0..20 {
            alphas += u64::from(
                query_udp_within(ANSWERED_WITHIN, &mesh.world, ALPHA, server, &question).is_some(),
            );
        }
        // For a limit of the whole tenant, services on other replicas do not share it, so that each
        // replica may admit the full share.
        let (least, most) = (
            least(rate, FLOOD),
            replicas * most(1, rate, started.elapsed()),
        );
        // The name service's counter has no tenant, so alpha's queries are subtracted.
        let received = REPLICAS.iter().map(|replica| asked(replica)).sum::<u64>() - before - alphas;
        println!(
            "{server}: {received} of {sent} questions reached {replicas} replicas' name service, {most} at most; alpha: {alphas} of 20"
        );
        // Otherwise the upper bound would prove nothing.
        timed!(sent > 4 * most, "queries are a flood, {}", family(server));
        timed!(
            (least..=most).contains(&received),
            "the limit of queries reaches the name service, and no more, {}",
            family(server)
        );
        assert_eq!(alphas, 20, "alpha's questions are answered");
    }
    // `packets_are_cut_to_the_rate` checks that packets pass once a limit is removed.
    lift();
}

/// A mesh in which tenant alpha has the test's own CA, so that the test can open HBONE connections
/// as alpha's node does.
struct Meshed {
    mesh: Mesh,
    credential: PemCredential,
    _files: tempfile::TempDir,
}

fn meshed(name: &str, change: impl FnOnce(&mut canal_world::Topology)) -> Meshed {
    let (files, root) = (
        tempfile::tempdir().expect("a directory"),
        TestAuthority::root("alpha"),
    );
    let domain = files.path().join("alpha.example");
    std::fs::create_dir_all(&domain).expect("a directory");
    for (name, text) in [
        ("root-cert.pem", root.pem()),
        ("cert-chain.pem", root.pem()),
        ("key.pem", root.key_pem()),
    ] {
        std::fs::write(domain.join(name), text).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let mesh = Mesh::up_with("tier.yaml", name, |topology| {
        let controller = topology
            .controller
            .as_mut()
            .and_then(|c| c.process.as_mut())
            .expect("the world has a controller");
        controller
            .args
            .extend(["--ca-dir".into(), files.path().display().to_string()]);
        change(topology);
    });
    Meshed {
        mesh,
        credential: root.issue(&Leaf::of("spiffe://alpha.example/ns/default/sa/client")),
        _files: files,
    }
}

/// Sends requests of alpha's from both AZs, each over its own HBONE connection, as many as the
/// machine can. Returns how many were answered, how many were refused by the limit, and the time.
fn meshed_requests(
    Meshed {
        mesh, credential, ..
    }: &Meshed,
) -> (u64, u64, Duration) {
    // Long enough that the rate, and not only the burst, decides what is admitted.
    const SECONDS: u64 = 4;
    let started = Instant::now();
    let from = |pod: &'static str| {
        // Of the service's addresses, the node uses that of its own AZ.
        let number = if pod == ALPHA {
            "10.102.2."
        } else {
            "10.102.4."
        };
        let status = mesh
            .canal(&["gateway", "status", "alpha/default/web-0", "-o", "json"])
            .json();
        let tables = status["tables"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|table| table["addresses"].as_array())
            .flatten();
        let all: Vec<&str> = tables.filter_map(serde_json::Value::as_str).collect();
        let own = all
            .iter()
            .find(|address| address.starts_with(number))
            // A service without an address in the pod's AZ is reached by that of another one.
            .or_else(|| all.iter().find(|address| address.starts_with("10.")));
        let to = own
            .and_then(|address| address.parse::<IpAddr>().ok())
            .unwrap_or_else(|| panic!("web-0 has no address: {status}"));
        load(
            &mesh.world,
            &TunnelRequest::new(
                pod,
                SocketAddr::from((to, 15008)),
                Some(credential),
                "10.101.0.10:80",
            ),
            // Four clients in each AZ send far more than the limit admits.
            4,
            SECONDS,
        )
    };
    let loads = std::thread::scope(|scope| {
        [ALPHA, "alpha/default/client-far-0"]
            .map(|pod| scope.spawn(move || from(pod)))
            .map(|load| load.join().expect("alpha's requests"))
    });
    let took = started.elapsed();
    let refused = |opened: &TunnelAttempt| matches!(opened, TunnelAttempt::Open(answer) if answer.starts_with("HTTP/1.1 429"));
    let wrong: Vec<_> = loads
        .iter()
        .flat_map(|load| &load.failed)
        .filter(|opened| !refused(opened))
        .collect();
    // Only the limit may refuse: another status would hide a fault of the gateway.
    assert!(
        wrong.is_empty(),
        "{} requests failed otherwise: {:?}",
        wrong.len(),
        wrong.first()
    );
    (
        loads.iter().map(|load| load.reached).sum(),
        loads
            // `load` tries each refused request once more, and the limit counts both.
            .iter()
            .map(|load| load.failed.len() as u64 + load.again)
            .sum(),
        took,
    )
}

/// A limit on requests is in force for all replicas of all AZs together, whatever their number.
fn requests_get_the_whole_limit(meshed: &Meshed, replicas_min: usize) {
    let (mesh, rate) = (&meshed.mesh, REQUESTS_RATE);
    mesh.apply("alpha", &throttle(Some("web-0"), "requests", rate));
    let mut replicas = Vec::new();
    // At first, the replicas that come up first have all services.
    until(
        deadline(SPREAD_WITHIN),
        &format!("web-0 has {replicas_min} replicas or more"),
        || {
            replicas = ["az1", "az2"]
                .iter()
                .flat_map(|az| mesh.heads("alpha/default/web-0", az))
                .collect();
            replicas.len() >= replicas_min && mesh.is_spread()
        },
    );
    std::thread::sleep(2 * FULL_AGAIN);
    let (passed, refused, took) = meshed_requests(meshed);
    let (least, most) = (least(rate, took), most(replicas.len() as u64, rate, took));
    println!(
        "requests, {} replicas: {passed} passed and {refused} were refused in {took:?}; {least} to {most} may pass",
        replicas.len()
    );
    timed!(
        refused > passed,
        "requests are a flood for {replicas_min} or more replicas"
    );
    timed!(
        (least..=most).contains(&passed),
        "the limit of requests passes {replicas_min} or more replicas, and no more"
    );
}

#[test]
fn requests_by_many_replicas_get_the_whole_limit() {
    requests_get_the_whole_limit(&meshed("e2e-thrmany", |_| ()), 3);
}

#[test]
fn requests_by_one_replica_get_the_whole_limit() {
    let one = meshed("e2e-throne", |topology| {
        topology.gateways.retain(|gateway| gateway.name == "gw-1");
        topology.edges.retain(|edge| edge.az == "az1");
    });
    requests_get_the_whole_limit(&one, 1);
}
