//! A tier that grows under the load of clients behind node proxies: their tunnels move with the heads of their buckets, so that new
//! replicas get their share, and no request is lost. The clients count the losses; nothing here retries.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Child;
use std::time::{Duration, Instant};

use canal_e2e::{Mesh, until};
use canal_model::ids::ServiceId;
use canal_timing::{deadline, is_timed, timed};
use canal_wire::tier;
use serde_json::Value;

/// Pods behind one node proxy. The last one is the client that runs alone.
const CLIENTS: u16 = 9;
const SERVICE: &str = "alpha/default/web-0";
const URL: &str = "http://web-0.default.svc.cluster.local:80/blob?size=100";
const HBONE_PORT: u16 = 15008;
/// Replicas of the clients' AZ at first, and those that are added.
const FIRST: [&str; 2] = ["gw-1", "gw-2"];
const MORE: [(&str, &str); 4] = [("gw-1b", "b1"), ("gw-1c", "b1"), ("gw-2b", "b2"), ("gw-2c", "b2")];
/// Connections of each client: enough for all tunnels that a node has for one pod and service.
const CONNECTIONS: &str = "160";
/// A client gives up a request without a response after this time.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// Buckets of a service.
const BUCKETS: usize = 128;
/// A change of the fleet is visible within this time.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);
/// All connections of moved buckets have been asked to leave within this time.
const RELIEVED_WITHIN: Duration = Duration::from_secs(10);
/// Interval at which a client uses each of its connections; an HTTP/1.1 connection leaves with the next response.
const CONNECTION_USED_WITHIN: Duration = Duration::from_secs(7);
/// Time for which requests are counted from then on.
const COUNTED_FOR: Duration = Duration::from_secs(12);

fn client(n: u16) -> String {
    format!("alpha/default/client-{n}")
}

/// Starts a load that runs until the test stops it.
fn load(mesh: &Mesh, client: &str, extra: &[&str]) -> Child {
    let timeout_ms = deadline(ANSWERED_WITHIN).as_millis().to_string();
    let all = ["canal-samples", "load", URL, "--timeout-ms", &timeout_ms, "-d", "600"];
    mesh.spawn(client, &[&all[..], extra].concat())
}

/// Returns the service's ID, and the number of buckets of which each replica of the clients' AZ is the head.
fn heads(mesh: &Mesh) -> (ServiceId, BTreeMap<String, u64>) {
    let status = mesh.canal(&["gateway", "status", SERVICE, "-o", "json"]).json();
    let id = status["service"]["id"].as_u64().unwrap_or_else(|| panic!("no ID: {status}"));
    let tables = status["tables"].as_array().into_iter().flatten().filter(|table| table["az"] == "az1");
    let members = tables.filter_map(|table| table["members"].as_array()).flatten();
    let of = |member: &Value| Some((member["replica"].as_str()?.to_string(), member["heads"].as_u64()?));
    (ServiceId::new(id as u32).expect("an ID"), members.filter_map(of).filter(|(_, heads)| *heads > 0).collect())
}

/// Returns the number of requests that each of these replicas has answered so far.
fn requests<'a>(mesh: &Mesh, replicas: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
    replicas.map(|name| (name.to_string(), mesh.counted(name, "istio_requests_total", &[]))).collect()
}

fn since(before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    now.iter().map(|(name, count)| (name.clone(), count - before.get(name).copied().unwrap_or(0))).collect()
}

/// Returns the number of open tunnels of a pod, and the buckets of those that lead to the service.
fn tunnels(mesh: &Mesh, client: &str, service: ServiceId) -> (usize, BTreeSet<usize>) {
    let output = mesh.run(client, &["ss", "-Htn", "state", "established", "dport", "=", &format!(":{HBONE_PORT}")]);
    let own = output.stdout.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<SocketAddr>().ok());
    let buckets: Vec<usize> = own.map(|own| tier::bucket(own, HBONE_PORT, service)).collect();
    (buckets.len(), buckets.into_iter().collect())
}

fn all() -> impl Iterator<Item = &'static str> {
    FIRST.into_iter().chain(MORE.map(|(name, _)| name))
}

#[test]
fn new_replicas_take_their_part_of_meshed_clients() {
    let mesh = Mesh::up_with("tier.yaml", "e2e-scaleout", |topology| {
        topology.gateways.retain(|gateway| FIRST.contains(&gateway.name.as_str()) || gateway.name == "gw-4");
        topology.tenants.truncate(1);
        let clients = topology.tenants[0].pods.iter_mut().find(|pod| pod.name == "client").expect("it is in the file");
        clients.replicas = CLIENTS;
    });
    for n in 0..CLIENTS {
        until(deadline(SETTLED_WITHIN), &format!("client {n} is answered"), || mesh.code(&client(n), URL, &[]) == 200);
    }
    let loaded: Vec<String> = (0..CLIENTS - 1).map(client).collect();
    let loads: Vec<Child> = loaded.iter().map(|client| load(&mesh, client, &["-r", "24", "-c", CONNECTIONS])).collect();
    let begun = Instant::now();
    let (service, before) = heads(&mesh);
    let mut count = 0;
    until(deadline(SETTLED_WITHIN), "the tunnels cover every bucket", || {
        let of_each: Vec<_> = loaded.iter().map(|client| tunnels(&mesh, client, service)).collect();
        count = of_each.iter().map(|(count, _)| count).sum::<usize>();
        of_each.into_iter().flat_map(|(_, buckets)| buckets).collect::<BTreeSet<_>>().len() == BUCKETS
    });
    println!("{count} tunnels of {} pods, all AZs and services, in all buckets; heads {before:?}", loaded.len());
    for (name, backend) in MORE {
        mesh.world.add_gateway(name, "az1", backend).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    for (name, _) in MORE {
        mesh.world.wait_host_ready(name, deadline(SETTLED_WITHIN)).unwrap();
    }
    until(deadline(SETTLED_WITHIN), "six replicas are heads", || heads(&mesh).1.values().filter(|heads| **heads >= 21).count() == 6);
    println!("six replicas are heads {:.1} s after the load began", begun.elapsed().as_secs_f64());
    if is_timed() {
        std::thread::sleep(RELIEVED_WITHIN + CONNECTION_USED_WITHIN);
    }
    let first = requests(&mesh, all());
    if is_timed() {
        std::thread::sleep(COUNTED_FOR);
    }
    let mut counted = BTreeMap::new();
    until(deadline(COUNTED_FOR), "each new replica has answered requests", || {
        counted = since(&first, &requests(&mesh, all()));
        MORE.iter().all(|(name, _)| counted[*name] > 0)
    });
    let (_, heads) = heads(&mesh);
    let asked: u64 = all().map(|name| mesh.counted(name, "canal_gateway_rebalanced_connections_total", &[])).sum();
    let whole: u64 = counted.values().sum();
    println!("{whole} requests: {counted:?}; heads {heads:?}; {asked} connections were asked to leave");
    for (client, child) in loaded.iter().zip(loads) {
        let report = mesh.stop(client, child).json();
        assert_eq!(report["failed"], 0, "{client}: {report}\n{}", mesh.logs());
    }
    timed!(whole > 1000, "more than 1000 requests are counted");
    for (name, _) in MORE {
        let (share, of_heads) = (counted[name] as f64 / whole as f64, heads[name] as f64 / 128.0);
        println!("{name}: {share:.3} of the requests, {of_heads:.3} of the heads");
        timed!((0.75..=1.25).contains(&(share / of_heads)), "{name} gets the share of requests that it has of the buckets, within 25 %");
    }
    for (what, extra) in [
        ("connections that are kept", ["-r", "50", "-c", "32"].as_slice()),
        ("a connection for each request", &["-r", "50", "-c", "8", "--no-keepalive"]),
    ] {
        alone(&mesh, what, extra, service);
    }
}

/// One pod alone uses most of the replicas.
fn alone(mesh: &Mesh, what: &str, extra: &[&str], service: ServiceId) {
    let client = client(CLIENTS - 1);
    let before = requests(mesh, all());
    let child = load(mesh, &client, extra);
    let mut counted = BTreeMap::new();
    until(deadline(RELIEVED_WITHIN), &format!("{what}: four of six replicas have answered"), || {
        counted = since(&before, &requests(mesh, all()));
        counted.values().filter(|count| **count > 0).count() >= 4
    });
    let (count, buckets) = tunnels(mesh, &client, service);
    let report = mesh.stop(what, child).json();
    println!("one client, {what}: {count} tunnels in {} buckets, {counted:?}", buckets.len());
    assert_eq!(report["failed"], 0, "{what}: {report}");
}
