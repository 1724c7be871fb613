//! A tier that grows under the load of clients behind node proxies: their tunnels move with the
//! heads of their buckets, so that new replicas get their share. It counts requests and losses and
//! asserts nothing; nothing here retries.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Child;
use std::time::{Duration, Instant};

use canal_model::ids::ServiceId;
use canal_timing::deadline;
use canal_wire::tier;
use serde_json::Value;

use crate::{Mesh, until};

/// Pods behind one node proxy. The last one is the client that runs alone. Eight load the service
/// together, and one runs alone.
const CLIENTS: u16 = 9;
const SERVICE: &str = "alpha/default/web-0";
const URL: &str = "http://web-0.default.svc.cluster.local:80/blob?size=100";
const HBONE_PORT: u16 = 15008;
/// Replicas of the clients' AZ at first, and those that are added.
const FIRST: [&str; 2] = ["gw-1", "gw-2"];
const MORE: [(&str, &str); 4] = [
    ("gw-1b", "b1"),
    ("gw-1c", "b1"),
    ("gw-2b", "b2"),
    ("gw-2c", "b2"),
];
/// Connections of each client: enough for all tunnels that a node has for one pod and service.
const CONNECTIONS: &str = "160";
/// A client gives up a request without a response after this time. It only has to exceed what a
/// quiet machine needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// Replicas of six that one client alone reaches. Nobody derived it: the client's tunnels lead to
/// distant buckets, whose heads differ as a rule, but they need not cover all six.
pub const REACHED_MIN: usize = 4;
/// Buckets of a service. `CANAL_BUCKETS` of `bpf/abi/tier.h`.
const BUCKETS: usize = 128;
/// A change of the fleet is visible within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);
/// All connections of moved buckets have received a GOAWAY or `Connection: close` within this time.
/// All begin their soft drain within 3 s (`ASK_WITHIN` of the gateway), in batches that a busy
/// machine delays.
const RELIEVED_WITHIN: Duration = Duration::from_secs(10);
/// Interval at which a client uses each of its connections; an HTTP/1.1 connection leaves with the
/// next response.
const CONNECTION_USED_WITHIN: Duration = Duration::from_secs(7);
/// Time for which requests are counted after the connections have moved. Longer than
/// `CONNECTION_USED_WITHIN`, so that every connection is used at least once.
const COUNTED_FOR: Duration = Duration::from_secs(12);

fn client(n: u16) -> String {
    format!("alpha/default/client-{n}")
}

/// Starts a load that runs until the test stops it.
fn load(mesh: &Mesh, client: &str, extra: &[&str]) -> Child {
    let timeout_ms = deadline(ANSWERED_WITHIN).as_millis().to_string();
    let all = [
        "canal-samples",
        "load",
        URL,
        "--timeout-ms",
        &timeout_ms,
        "-d",
        "600",
    ];
    mesh.spawn(client, &[&all[..], extra].concat())
}

/// Returns the service's ID, and the number of buckets of which each replica of the clients' AZ is
/// the head.
fn heads(mesh: &Mesh) -> (ServiceId, BTreeMap<String, u64>) {
    let status = mesh
        .canal(&["gateway", "status", SERVICE, "-o", "json"])
        .json();
    let id = status["service"]["id"]
        .as_u64()
        .unwrap_or_else(|| panic!("no ID: {status}"));
    let tables = status["tables"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|table| table["az"] == "az1");
    let members = tables
        .filter_map(|table| table["members"].as_array())
        .flatten();
    let of = |member: &Value| {
        Some((
            member["replica"].as_str()?.to_string(),
            member["heads"].as_u64()?,
        ))
    };
    (
        ServiceId::new(id as u32).expect("an ID"),
        members
            .filter_map(of)
            .filter(|(_, heads)| *heads > 0)
            .collect(),
    )
}

/// Returns the number of requests that each of these replicas has answered so far.
fn requests<'a>(mesh: &Mesh, replicas: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
    replicas
        .map(|name| {
            (
                name.to_string(),
                mesh.counted(name, "istio_requests_total", &[]),
            )
        })
        .collect()
}

fn since(before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    now.iter()
        .map(|(name, count)| (name.clone(), count - before.get(name).copied().unwrap_or(0)))
        .collect()
}

/// Returns the number of open tunnels of a pod, and the buckets of those that lead to the service.
fn tunnels(mesh: &Mesh, client: &str, service: ServiceId) -> (usize, BTreeSet<usize>) {
    let output = mesh.run(
        client,
        &[
            "ss",
            "-Htn",
            "state",
            "established",
            "dport",
            "=",
            &format!(":{HBONE_PORT}"),
        ],
    );
    let own = output
        .stdout
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2)?.parse::<SocketAddr>().ok());
    let buckets: Vec<usize> = own
        .map(|own| tier::bucket(own, HBONE_PORT, service))
        .collect();
    (buckets.len(), buckets.into_iter().collect())
}

fn all() -> impl Iterator<Item = &'static str> {
    FIRST.into_iter().chain(MORE.map(|(name, _)| name))
}

/// Load of a replica that was added.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaShare {
    pub replica: String,
    /// Share of the requests, and of the heads of the service's buckets.
    pub of_requests: f64,
    pub of_heads: f64,
}

/// Replicas that one client alone reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoneClient {
    pub load: &'static str,
    /// Replicas of six that answered the client.
    pub replicas: usize,
    pub failed: u64,
}

/// Result of growing the tier from two replicas to six.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleOutFigures {
    /// Requests that were counted for the shares.
    pub requests: u64,
    pub shares: Vec<ReplicaShare>,
    /// Requests that failed during the whole load.
    pub failed: u64,
    pub alone: Vec<LoneClient>,
}

/// Brings up the world with two replicas in the clients' AZ.
pub fn up(name: &str) -> Mesh {
    let mesh = Mesh::up_with("tier.yaml", name, |topology| {
        topology
            .gateways
            .retain(|gateway| FIRST.contains(&gateway.name.as_str()) || gateway.name == "gw-4");
        topology.tenants.truncate(1);
        let clients = topology.tenants[0]
            .pods
            .iter_mut()
            .find(|pod| pod.name == "client")
            .expect("it is in the file");
        clients.replicas = CLIENTS;
    });
    for n in 0..CLIENTS {
        until(
            deadline(SETTLED_WITHIN),
            &format!("client {n} is answered"),
            || mesh.code(&client(n), URL, &[]) == 200,
        );
    }
    mesh
}

/// Adds four replicas under the load of eight clients, and counts which replicas answer. With
/// `is_timed` it counts after the time within which connections have moved; otherwise until each
/// new replica has answered. A bucket is a part of a service's sessions, and its head is the
/// replica that gets the new ones (docs/glossary.md, cloud tier).
pub fn grow(mesh: &Mesh, is_timed: bool) -> ScaleOutFigures {
    let loaded: Vec<String> = (0..CLIENTS - 1).map(client).collect();
    let loads: Vec<Child> = loaded
        .iter()
        // 24 requests per second use each of the 160 connections within seven seconds.
        .map(|client| load(mesh, client, &["-r", "24", "-c", CONNECTIONS]))
        .collect();
    let begun = Instant::now();
    let (service, before) = heads(mesh);
    let mut count = 0;
    until(
        // Each bucket must have a tunnel before the tier grows, so that its requests can move.
        deadline(SETTLED_WITHIN),
        "the tunnels cover every bucket",
        || {
            let of_each: Vec<_> = loaded
                .iter()
                .map(|client| tunnels(mesh, client, service))
                .collect();
            count = of_each.iter().map(|(count, _)| count).sum::<usize>();
            of_each
                .into_iter()
                .flat_map(|(_, buckets)| buckets)
                .collect::<BTreeSet<_>>()
                .len()
                == BUCKETS
        },
    );
    println!(
        "{count} tunnels of {} pods, all AZs and services, in all buckets; heads {before:?}",
        loaded.len()
    );
    for (name, backend) in MORE {
        mesh.world
            .add_gateway(name, "az1", backend)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    for (name, _) in MORE {
        mesh.world
            .wait_host_ready(name, deadline(SETTLED_WITHIN))
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    until(deadline(SETTLED_WITHIN), "six replicas are heads", || {
        // An equal share of the 128 buckets is at least 21 for each of six replicas.
        heads(mesh).1.values().filter(|heads| **heads >= 21).count() == 6
    });
    println!(
        "six replicas are heads {:.1} s after the load began",
        begun.elapsed().as_secs_f64()
    );
    let (requests, shares) = count_shares(mesh, is_timed);
    let failed = loaded
        .iter()
        .zip(loads)
        .map(|(client, child)| failed_of(mesh, client, child))
        .sum();
    // A single busy client must profit from new replicas too, however it connects.
    // 50 requests per second use each connection within a second, also those of moved buckets.
    let alone = [
        (
            "persistent connections",
            ["-r", "50", "-c", "32"].as_slice(),
        ),
        (
            // The rate is the same; eight requests at a time are enough for it.
            "a connection for each request",
            &["-r", "50", "-c", "8", "--no-keepalive"],
        ),
    ];
    let alone = alone
        .into_iter()
        .map(|(load, extra)| measure_alone(mesh, load, extra, service))
        .collect();
    ScaleOutFigures {
        requests,
        shares,
        failed,
        alone,
    }
}

/// Ends a load and returns how many of its requests failed.
fn failed_of(mesh: &Mesh, client: &str, child: Child) -> u64 {
    let report = mesh.stop(client, child).json();
    let failed = report["failed"]
        .as_u64()
        .unwrap_or_else(|| panic!("{client}: {report}"));
    if failed > 0 {
        println!("{client}: {report}");
    }
    failed
}

fn count_shares(mesh: &Mesh, is_timed: bool) -> (u64, Vec<ReplicaShare>) {
    if is_timed {
        std::thread::sleep(RELIEVED_WITHIN + CONNECTION_USED_WITHIN);
    }
    let first = requests(mesh, all());
    if is_timed {
        std::thread::sleep(COUNTED_FOR);
    }
    let mut counted = BTreeMap::new();
    until(
        deadline(COUNTED_FOR),
        "each new replica has answered requests",
        || {
            counted = since(&first, &requests(mesh, all()));
            MORE.iter().all(|(name, _)| counted[*name] > 0)
        },
    );
    let (_, heads) = heads(mesh);
    let asked: u64 = all()
        .map(|name| mesh.counted(name, "canal_gateway_rebalanced_connections_total", &[]))
        .sum();
    let total: u64 = counted.values().sum();
    println!(
        "{total} requests: {counted:?}; heads {heads:?}; {asked} connections were asked to leave"
    );
    let share = |(name, _): (&str, &str)| ReplicaShare {
        replica: name.to_owned(),
        of_requests: counted[name] as f64 / total as f64,
        of_heads: heads[name] as f64 / BUCKETS as f64,
    };
    (total, MORE.into_iter().map(share).collect())
}

/// Runs one client alone until it has reached most of the replicas, or the time for that is over.
fn measure_alone(
    mesh: &Mesh,
    what: &'static str,
    extra: &[&str],
    service: ServiceId,
) -> LoneClient {
    let client = client(CLIENTS - 1);
    let before = requests(mesh, all());
    let child = load(mesh, &client, extra);
    let end = Instant::now() + deadline(RELIEVED_WITHIN);
    let counted = loop {
        let counted = since(&before, &requests(mesh, all()));
        let replicas = counted.values().filter(|count| **count > 0).count();
        if replicas >= REACHED_MIN || Instant::now() >= end {
            break counted;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let replicas = counted.values().filter(|count| **count > 0).count();
    let (count, buckets) = tunnels(mesh, &client, service);
    let failed = failed_of(mesh, what, child);
    println!(
        "one client, {what}: {count} tunnels in {} buckets, {counted:?}",
        buckets.len()
    );
    LoneClient {
        load: what,
        replicas,
        failed,
    }
}
