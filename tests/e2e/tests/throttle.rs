//! Early limits at the redirector: a flood of one tenant, or to one service, is cut to about its rate before any process sees it; the other
//! tenant, with the same addresses, loses nothing; without the limit all is as before.

use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::{Icmp, Mesh, ask_udp, query, until};

const ALPHA: &str = "alpha/default/client-0";
const BETA: &str = "beta/default/client-0";
const REPLICAS: [&str; 4] = ["gw-1", "gw-2", "gw-3", "gw-6"];
/// Per second, and at once, for each replica.
const RATE: u64 = 20;
/// How long floods last.
const FLOOD: Duration = Duration::from_millis(1500);
/// Questions between two pauses: so many that a machine with much else to do sends a flood too.
const QUESTIONS: u64 = 5;
/// Agents read their programs' counters every two seconds.
const SEEN_WITHIN: Duration = Duration::from_secs(6);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up("tier.yaml", "e2e-throttle");
        // How much a limit lets through is said for each replica, and while buckets move they are more than the plan's.
        mesh.rest(Duration::from_secs(60));
        until(Duration::from_secs(20), "both tenants are served", || {
            [ALPHA, BETA].into_iter().all(|pod| (0..2).all(|n| flood(&mesh, pod, n, &["-n", "1"])["failed"] == 0))
        });
        mesh
    })
}

/// A Throttle of beta's, for a service or for all of the tenant.
fn throttle(service: Option<&str>, of: &str, rate: u64) -> String {
    let target = service.map(|name| format!("\n  targetRef: {{kind: Service, name: {name}}}")).unwrap_or_default();
    format!(
        "apiVersion: canal.mesh/v1\nkind: Throttle\nmetadata: {{name: flood, namespace: default}}\nspec:{target}\n  \
         {of}: {{perSecond: {rate}, burst: {rate}}}\n"
    )
}

fn lift() {
    mesh().canal(&["delete", "--tenant", "beta", "Throttle", "flood"]).ok();
    mesh().converge(Duration::from_secs(10));
}

/// HTTP load on `web-N`, each request on a connection of its own; the report.
fn flood(mesh: &Mesh, pod: &str, n: u32, extra: &[&str]) -> serde_json::Value {
    let url = format!("http://web-{n}.default.svc.cluster.local:80/blob?size=100");
    let all = ["canal-samples", "load", &url, "--no-keepalive", "--timeout-ms", "400"].into_iter().chain(extra.iter().copied());
    mesh.run(pod, &all.collect::<Vec<_>>()).json()
}

/// Over AZ 1's replicas, where both clients are.
fn sum(family: &str, labels: &[&str]) -> u64 {
    REPLICAS.iter().map(|replica| mesh().counted(replica, family, labels)).sum()
}

fn refused(what: &str) -> u64 {
    sum("canal_redirector_packets_total", &[&format!("what=\"throttled_{what}\"")])
}

fn number(report: &serde_json::Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} is missing: {report}"))
}

/// The address of beta's `web-0` in AZ 1; alpha's has the same number, if any service of alpha's has.
fn address(name: &str, is_v6: bool) -> IpAddr {
    let all = mesh().resolve(BETA, &format!("{name}.default.svc.cluster.local"));
    *all.iter().find(|a| a.is_ipv6() == is_v6).unwrap_or_else(|| panic!("{name} has both families: {all:?}"))
}

/// Sessions that alpha opens at the same address meanwhile, one every 20 ms, by no proxy: how many, and how many failed within 300 ms
/// (a SYN that is dropped is sent again after a second).
fn alphas_sessions(to: SocketAddr, during: Duration) -> (u64, u64) {
    let work = || {
        let (started, mut all, mut failed) = (Instant::now(), 0, 0);
        while started.elapsed() < during {
            all += 1;
            failed += u64::from(TcpStream::connect_timeout(&to, Duration::from_millis(300)).is_err());
            std::thread::sleep(Duration::from_millis(20));
        }
        (all, failed)
    };
    mesh().world.inside(ALPHA, work).unwrap()
}

/// What a flood came to.
struct Flood {
    tried: u64,
    served: u64,
    /// By user space, alpha's and the spared service's not counted.
    accepted: u64,
    took: Duration,
}

/// Beta floods `to` with new sessions while alpha opens some at the same address; `spared` more are beta's to another service.
fn sessions(to: SocketAddr, spared: u64) -> Flood {
    let mesh = mesh();
    let (before, started) = (sum("canal_gateway_accepted_connections_total", &[]), Instant::now());
    let (url, seconds) = (format!("http://{to}/blob?size=100"), FLOOD.as_secs_f64().to_string());
    // Patient, so that who was let in is answered on a slow machine as well; and many, so that it is a flood all the same.
    let argv = ["canal-samples", "load", &url, "--no-keepalive", "-c", "200", "-d", &seconds, "--timeout-ms", "400"];
    let flooding = mesh.spawn(BETA, &argv);
    let (alphas, failed) = alphas_sessions(to, FLOOD);
    if spared > 0 {
        let report = flood(mesh, BETA, 1, &["-n", &spared.to_string(), "-c", "2"]);
        assert_eq!(report["failed"], 0, "beta's web-1 has no limit: {report}");
    }
    let report = mesh.end("a flood", flooding).json();
    let took = started.elapsed();
    println!("{to}: alpha opened {alphas} sessions meanwhile, {failed} failed");
    assert!(alphas > 30 && failed == 0, "alpha: {failed} of {alphas} sessions to {to} failed");
    let accepted = (sum("canal_gateway_accepted_connections_total", &[]) - before).saturating_sub(alphas + spared);
    Flood { tried: number(&report, "requests"), served: number(&report, "succeeded"), accepted, took }
}

/// What a limit of `rate` lets through in this time at so many replicas.
fn most(replicas: u64, rate: u64, took: Duration) -> u64 {
    replicas * (rate + (rate as f64 * took.as_secs_f64()) as u64 + 1)
}

#[test]
fn new_sessions_are_cut_to_the_rate_before_a_process_sees_them() {
    let mesh = mesh();
    for (scope, counter, spared) in [(Some("web-0"), "service_sessions", 40), (None, "tenant_sessions", 0)] {
        mesh.apply("beta", &throttle(scope, "sessions", RATE));
        let (before, mut lost) = (refused(counter), 0);
        for is_v6 in [false, true] {
            let to = SocketAddr::from((address("web-0", is_v6), 80));
            let replicas = mesh.heads("beta/default/web-0", "az1").len() as u64;
            let Flood { tried, served, accepted, took } = sessions(to, spared);
            lost += tried - served;
            let most = most(replicas, RATE, took);
            println!("{counter}, {to}: {tried} tried, {accepted} accepted, {served} served by {replicas} replicas, {most} at most");
            assert!(tried > 2 * most, "{tried} tries are no flood for a limit of {most}");
            assert!((2 * RATE..=most).contains(&served), "{served} served, {most} at most");
            assert!(accepted <= most, "{accepted} were accepted, {most} may be");
        }
        // A SYN that is lost when its client gives up is counted once.
        until(SEEN_WITHIN, &format!("{lost} {counter} are counted"), || refused(counter) - before >= lost);
        lift();
        until(Duration::from_secs(10), "the limit is gone", || flood(mesh, BETA, 0, &["-n", "300", "-c", "20"])["failed"] == 0);
    }
}

/// Echoes that a pod sends to one address, so many within a second for as long as floods last; how many were sent and answered.
fn echoes(pod: &str, to: IpAddr, per_second: u32) -> (u64, u64) {
    let icmp = Icmp::open(&mesh().world, pod, to.is_ipv6());
    let (started, mut sent, mut answered) = (Instant::now(), 0, 0);
    let reply = if to.is_ipv6() { (129, 0) } else { (0, 0) };
    let pause = Duration::from_secs(1) / per_second;
    let mut hear = |within: Duration| answered += u64::from(icmp.hear_one(within, |h| h.kind == reply && h.from == to).is_some());
    while started.elapsed() < FLOOD {
        icmp.echo(to, sent as u16).unwrap();
        sent += 1;
        while started.elapsed() < pause * sent as u32 {
            hear(pause);
        }
    }
    // What is still under way.
    let end = Instant::now();
    while end.elapsed() < Duration::from_millis(300) {
        hear(Duration::from_millis(50));
    }
    (sent, answered)
}

#[test]
fn packets_are_cut_to_the_rate() {
    let mesh = mesh();
    let rate = 100;
    for (scope, counter) in [(Some("web-0"), "service_packets"), (None, "tenant_packets")] {
        mesh.apply("beta", &throttle(scope, "packets", rate));
        let (before, mut lost) = (refused(counter), 0);
        for is_v6 in [false, true] {
            let to = address("web-0", is_v6);
            let started = Instant::now();
            // Beta sends ten times what it may, alpha what it likes below that.
            let ((sent, answered), (alphas, alphas_answered)) = std::thread::scope(|scope| {
                let beta = scope.spawn(move || echoes(BETA, to, 1000));
                let alpha = scope.spawn(move || echoes(ALPHA, to, 200));
                (beta.join().expect("beta's echoes"), alpha.join().expect("alpha's echoes"))
            });
            // Echoes have no ports: one bucket, and so one replica.
            let most = most(1, rate, started.elapsed());
            println!("{counter}, {to}: {answered} of {sent} echoes answered, {most} at most; alpha: {alphas_answered} of {alphas}");
            assert!(sent > 2 * most && (rate..=most).contains(&answered), "{answered} of {sent} echoes, {most} at most");
            assert_eq!(alphas_answered, alphas, "alpha lost echoes to {to}");
            lost += sent - answered;
        }
        until(SEEN_WITHIN, &format!("{lost} {counter} are counted"), || refused(counter) - before >= lost);
        lift();
        let (sent, answered) = echoes(BETA, address("web-0", false), 200);
        assert_eq!(sent, answered, "the limit is gone");
    }
}

/// The name service is user space: what it is asked is what the redirector let through.
#[test]
fn a_flood_of_questions_does_not_reach_the_name_service() {
    let mesh = mesh();
    let (rate, asked) = (100, |host: &str| mesh.counted(host, "canal_dns_queries_total", &[]));
    let servers: [IpAddr; 2] = ["10.102.2.1", "fd00:102::2000:0:0:1"].map(|text| text.parse().expect("an address"));
    let question = query("web-0.default.svc.cluster.local.", false);
    mesh.apply("beta", &throttle(None, "packets", rate));
    for server in servers {
        let replicas = mesh.heads("beta/canal-system/gateway", "az1").len() as u64;
        let before: u64 = REPLICAS.iter().map(|replica| asked(replica)).sum();
        let any = if server.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
        let socket = mesh.world.inside(BETA, || UdpSocket::bind(any)).unwrap().unwrap();
        let (started, mut sent) = (Instant::now(), 0);
        while started.elapsed() < FLOOD {
            for _ in 0..QUESTIONS {
                socket.send_to(&question, (server, 53)).unwrap();
            }
            sent += QUESTIONS;
            std::thread::sleep(Duration::from_micros(200));
        }
        let mut alphas = 0;
        for _ in 0..20 {
            alphas += u64::from(ask_udp(&mesh.world, ALPHA, server, &question).is_some());
        }
        let most = most(replicas, rate, started.elapsed());
        let heard = REPLICAS.iter().map(|replica| asked(replica)).sum::<u64>() - before - alphas;
        println!("{server}: {heard} of {sent} questions reached {replicas} replicas' name service, {most} at most; alpha: {alphas} of 20");
        assert!(sent > 4 * most, "{sent} questions are no flood for a limit of {most}");
        assert!((rate..=most).contains(&heard), "{heard} of {sent} questions, {most} at most");
        assert_eq!(alphas, 20, "alpha's questions are answered");
    }
    lift();
    until(Duration::from_secs(5), "the limit is gone", || (0..50).all(|_| ask_udp(&mesh.world, BETA, servers[0], &question).is_some()));
}
