//! The agent with the real redirector in a network namespace of its own (needs root).
//!
//! Maps follow states and outlive the process, socket steering leads to the DNS service. Sessions
//! are found in the kernel. Tunnels spread over the cores.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use canal_abi::tier::ReplicaState;
use canal_model::ids::{Generation, ReplicaNumber, ServiceId, Vni};
use canal_model::program::*;
use canal_net::sys::{self, ConnectOptions, ListenOptions, Netns};
use canal_offload::redirector::{RedirectorOptions, RedirectorPrograms};
use canal_redirector_agent::dns::DnsServer;
use canal_redirector_agent::kernel::{AttachMode, GatewaySockets, TierPrograms};
use canal_redirector_agent::session_scan::SessionScanner as Sessions;
use canal_redirector_agent::{RedirectorAgent, RedirectorMaps, ReplicaConfig};
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_southbound_client::{ResourceState, Update, UpdateSource};
use canal_testing::netns::ProcessNetns;
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

/// A replica's network namespace with a device that leads nowhere.
struct ReplicaNetns(ProcessNetns);

impl ReplicaNetns {
    fn new() -> Self {
        let net = ProcessNetns::new();
        net.ip("link add eth0 type veth peer name nowhere");
        net.ip("link set nowhere up");
        net.ip("link set eth0 up");
        net.ip("addr add 250.1.0.1/16 dev eth0");
        net.ip("addr add 10.1.1.9/32 dev lo");
        net.ip("addr add fd77::9/128 dev lo nodad");
        Self(net)
    }

    fn run<F: Future<Output = ()>>(&self, test: impl FnOnce() -> F) {
        let run = || {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap()
                .block_on(test())
        };
        Netns::open(self.0.path()).unwrap().enter(run).unwrap();
    }
}

/// A directory for pins; the bpffs that is mounted in it is unmounted on drop.
struct ReplicaPins(tempfile::TempDir);

impl ReplicaPins {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    fn attach(&self) -> AttachMode {
        AttachMode {
            device: "eth0".into(),
            sysfs: "/sys".into(),
            pin_dir: self.0.path().join("bpf"),
            address: Ipv4Addr::new(250, 1, 0, 1),
            mtu: 1450,
            tunnels: 20,
        }
    }
    fn orders(&self) -> std::path::PathBuf {
        self.0.path().join("orders.json")
    }
}

impl Drop for ReplicaPins {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.0.path().join("bpf"))
            .output();
    }
}

fn table(service: &str, id: u32, version: u32, chain: &[u32]) -> Arc<Resource> {
    Arc::new(Resource::Table(BucketTable {
        service: service.parse().unwrap(),
        id: ServiceId::new(id).unwrap(),
        az: "az1".parse().unwrap(),
        vni: Vni::new(101).unwrap(),
        version,
        chains: vec![
            chain
                .iter()
                .map(|n| ReplicaNumber::new(*n).unwrap())
                .collect();
            BUCKETS
        ],
    }))
}

fn address(service: &str, id: u32, address: &str) -> Arc<Resource> {
    Arc::new(Resource::Address(GatewayAddress {
        service: service.parse().unwrap(),
        id: ServiceId::new(id).unwrap(),
        az: "az1".parse().unwrap(),
        addresses: vec![address.parse().unwrap()],
        network: None,
        open: true,
    }))
}

fn update_of(resources: Vec<Arc<Resource>>, generation: u64) -> (Update, ResourceState) {
    let update = Update {
        origin: UpdateSource::Controller,
        generation: Generation(generation),
        upserts: resources.clone(),
        removals: vec![],
    };
    (
        update,
        ResourceState::of_resources(resources, Generation(generation)),
    )
}

fn config(
    pins: &ReplicaPins,
    controller: Option<canal_southbound_client::controller_client::ControllerEndpoint>,
) -> ReplicaConfig {
    ReplicaConfig {
        az: "az1".parse().unwrap(),
        backend: "b1".parse().unwrap(),
        underlay: Ipv4Addr::new(250, 1, 0, 1),
        version: "test".into(),
        controller,
        orders: pins.orders(),
        sockets: Sessions::kernel(),
    }
}

/// Waits until `holds` returns true.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(20)),
            "never: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn resolve(to: IpAddr, name: &str, over_tcp: bool) -> Message {
    let mut query = Message::new();
    query
        .set_id(7)
        .add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    let query = query.to_vec().unwrap();
    let to = SocketAddr::new(to, 53);
    let asked = async {
        if over_tcp {
            let mut stream = TcpStream::connect(to).await.unwrap();
            stream
                .write_all(&[&(query.len() as u16).to_be_bytes()[..], &query].concat())
                .await
                .unwrap();
            let mut answer = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut answer).await.unwrap();
            return answer;
        }
        let own: SocketAddr = if to.is_ipv4() {
            "10.1.1.9:0"
        } else {
            "[fd77::9]:0"
        }
        .parse()
        .unwrap();
        let socket = UdpSocket::bind(own).await.unwrap();
        // Connected, so that a response from any other address is not received.
        socket.connect(to).await.unwrap();
        socket.send(&query).await.unwrap();
        let mut answer = vec![0; 2000];
        let length = socket.recv(&mut answer).await.unwrap();
        answer.truncate(length);
        answer
    };
    let answer = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), asked)
        .await
        .expect("an answer within 5 s");
    Message::from_vec(&answer).unwrap()
}

#[test]
fn tenants_query_their_own_address_and_get_their_own_names() {
    let (net, pins) = (ReplicaNetns::new(), ReplicaPins::new());
    net.run(|| async {
        let (registry, (_trigger, drain)) = (Registry::new(), drain::tree());
        let dns = DnsServer::start(
            "[::]:53".parse().unwrap(),
            "az1".parse().unwrap(),
            &registry,
            &drain,
            drain.watcher(),
        )
        .unwrap();
        let listener = sys::listen(
            None,
            "[::]:15009".parse().unwrap(),
            &ListenOptions::default(),
        )
        .unwrap();
        let sockets = GatewaySockets {
            hbone: None,
            plain: Some(
                std::os::fd::AsFd::as_fd(&listener)
                    .try_clone_to_owned()
                    .unwrap(),
            ),
            dns: Some(dns.socket_fd().unwrap()),
        };
        let mut programs = TierPrograms::attach(&pins.attach(), &pins.orders(), sockets).unwrap();
        programs.start_steering().unwrap();
        let (update, state) = update_of(
            vec![
                address("alpha/default/web", 7, "10.0.1.1"),
                address("alpha/canal-system/gateway", 5, "10.0.1.5"),
                address("beta/default/web", 8, "10.0.2.1"),
                address("beta/canal-system/gateway", 6, "10.0.1.5"),
            ],
            1,
        );
        dns.apply(&update, &state);
        let taking = dns.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // The gateway of beta has the ID 6.
                let tenant = if stream.local_addr().unwrap().ip() == IpAddr::from([240, 0, 0, 6]) {
                    "beta"
                } else {
                    "alpha"
                };
                tokio::spawn(taking.take(stream.into_std().unwrap(), &tenant.parse().unwrap()));
            }
        });
        for (to, want) in [
            ("240.0.0.5", "10.0.1.1"),
            ("240.0.0.6", "10.0.2.1"),
            ("fdca:a1:0:240::5", "10.0.1.1"),
        ] {
            for over_tcp in [false, true] {
                let answer = resolve(
                    to.parse().unwrap(),
                    "web.default.svc.cluster.local.",
                    over_tcp,
                )
                .await;
                let found: Vec<String> = answer
                    .answers()
                    .iter()
                    .map(|r| r.data().to_string())
                    .collect();
                assert_eq!(found, [want], "{to} tcp={over_tcp}");
            }
        }
        assert_eq!(
            resolve("240.0.0.5".parse().unwrap(), "www.example.com.", false)
                .await
                .response_code(),
            ResponseCode::Refused
        );
        // The address of a service does not serve DNS.
        // The server looks for the tenant before it parses the query, so an empty header will do.
        let socket = UdpSocket::bind("10.1.1.9:0").await.unwrap();
        socket.send_to(&[0; 12], "240.0.0.7:53").await.unwrap();
        let refused = || {
            registry
                .render()
                .contains("canal_dns_queries_total{transport=\"udp\",result=\"no_tenant\"} 1")
        };
        until("a query of no tenant", refused).await;
    });
}

#[test]
fn maps_follow_states_and_outlive_the_process() {
    let (net, pins) = (ReplicaNetns::new(), ReplicaPins::new());
    net.run(|| async {
        let (registry, (_trigger, drain)) = (Registry::new(), drain::tree());
        let start = |registry: &Registry| {
            let programs =
                TierPrograms::attach(&pins.attach(), &pins.orders(), GatewaySockets::default())
                    .unwrap();
            RedirectorAgent::start(
                config(&pins, None),
                Box::new(programs),
                Box::new(|| (0, 0)),
                registry,
                &drain,
            )
            .unwrap()
        };
        // Attaching again opens the same pinned maps, so this reads what the kernel has.
        let tables_in_maps = || {
            let mut programs =
                TierPrograms::attach(&pins.attach(), &pins.orders(), GatewaySockets::default())
                    .unwrap();
            let mut tables: Vec<u32> = programs
                .leftover_entries()
                .unwrap()
                .tables
                .into_iter()
                .collect();
            tables.sort_unstable();
            tables
        };
        let agent = start(&registry);
        assert!(agent.ready().unwrap_err().contains("bucket tables"));
        let (update, state) = update_of(
            vec![
                table("alpha/default/web", 7, 1, &[1, 2]),
                table("alpha/default/db", 8, 1, &[2]),
            ],
            3,
        );
        agent.apply(&update, &state);
        assert_eq!(tables_in_maps(), [7, 8]);
        drop(agent);
        let agent = start(&Registry::new());
        assert_eq!(
            tables_in_maps(),
            [7, 8],
            "a new process adopts them unchanged"
        );
        let (update, state) = update_of(vec![table("alpha/default/db", 8, 2, &[2])], 4);
        agent.apply(&update, &state);
        assert_eq!(tables_in_maps(), [8], "and removes what has become stale");
        let dump = agent.dump();
        assert_eq!(
            (
                dump["generation"].as_u64(),
                dump["tables"][0]["version"].as_u64()
            ),
            (Some(4), Some(2)),
            "{dump}"
        );
    });
}

/// Returns the state of a replica in the map.
fn state_of(pins: &ReplicaPins, number: u32) -> u32 {
    let attach = pins.attach();
    let options = RedirectorOptions {
        netns: None,
        device: attach.device,
        pin_dir: Some(attach.pin_dir),
        address: attach.address,
        number: 1,
        edge: Ipv4Addr::new(250, 1, 0, 254),
        mtu: attach.mtu,
        tunnel_port: 40_000,
        tunnels: attach.tunnels,
    };
    RedirectorPrograms::attach(&options)
        .unwrap()
        .replicas()
        .get(&number)
        .unwrap()
        .unwrap()
        .state
}

#[test]
fn a_replica_that_went_down_is_a_suspect_first() {
    let (net, pins) = (ReplicaNetns::new(), ReplicaPins::new());
    net.run(|| async {
        let (_trigger, drain) = drain::tree();
        let programs =
            TierPrograms::attach(&pins.attach(), &pins.orders(), GatewaySockets::default())
                .unwrap();
        let agent = RedirectorAgent::start(
            config(&pins, None),
            Box::new(programs),
            Box::new(|| (0, 0)),
            &Registry::new(),
            &drain,
        )
        .unwrap();
        let replica = |up| {
            Arc::new(Resource::Replica(Replica {
                name: "gw-2".parse().unwrap(),
                number: ReplicaNumber::new(2).unwrap(),
                backend: "b2".parse().unwrap(),
                az: "az1".parse().unwrap(),
                underlay: Ipv4Addr::new(250, 1, 0, 2),
                up,
            }))
        };
        let says = |up, generation, want: ReplicaState| {
            let (update, state) = update_of(vec![replica(up)], generation);
            agent.apply(&update, &state);
            assert_eq!(state_of(&pins, 2), want as u32, "generation {generation}");
        };
        // A replica that gets this as its first state cannot know since when the other is down.
        says(false, 1, ReplicaState::CANAL_REPLICA_SUSPECT);
        says(true, 2, ReplicaState::CANAL_REPLICA_UP);
        says(false, 3, ReplicaState::CANAL_REPLICA_SUSPECT);
        says(true, 4, ReplicaState::CANAL_REPLICA_UP);
        says(false, 5, ReplicaState::CANAL_REPLICA_SUSPECT);
        // A repeated state does not extend the time as a suspect, which may be over by now.
        let (update, state) = update_of(vec![replica(false)], 6);
        agent.apply(&update, &state);
        until("it is down", || {
            state_of(&pins, 2) == ReplicaState::CANAL_REPLICA_DOWN as u32
        })
        .await;
        // A repeated state leaves the replica down and does not make it a suspect again.
        says(false, 7, ReplicaState::CANAL_REPLICA_DOWN);
        says(true, 8, ReplicaState::CANAL_REPLICA_UP);
    });
}

#[test]
fn sessions_are_found_where_the_kernel_shows_them() {
    let net = ReplicaNetns::new();
    net.0.ip("addr add 240.0.0.7/32 dev lo");
    net.run(|| async {
        // On a stalled machine the client's FIN is retransmitted. The response meets a client that
        // is closed already, and its reset would end the server's TIME_WAIT (RFC 1337), which this
        // test must see. The write is to this thread's namespace.
        std::fs::write("/proc/sys/net/ipv4/tcp_rfc1337", "1").unwrap();
        // One socket for both families, as the gateway listens.
        let listener =
            sys::listen(None, "[::]:80".parse().unwrap(), &ListenOptions::default()).unwrap();
        // Scanned on this thread, because it is the one in the namespace.
        let look = || {
            Sessions::kernel()
                .scan(Instant::now() + canal_timing::deadline(Duration::from_secs(5)))
                .unwrap()
        };
        let id = ServiceId::new(7).unwrap();
        assert!(look().is_empty(), "a listener is no session");
        // Bound, because the kernel would choose the service's own address.
        let options = ConnectOptions {
            bind: Some("10.1.1.9:0".parse().unwrap()),
            ..ConnectOptions::default()
        };
        let client = sys::connect(None, "240.0.0.7:80".parse().unwrap(), &options)
            .await
            .unwrap();
        let (server, from) = listener.accept().await.unwrap();
        let from = SocketAddr::new(from.ip().to_canonical(), from.port());
        let bucket = 1 << canal_wire::tier::bucket(from, 80, id);
        assert_eq!(
            look()
                .into_iter()
                .map(|(id, of)| (id, of.buckets))
                .collect::<Vec<_>>(),
            [(id, bucket)]
        );
        drop(server);
        drop(client);
        let kernel = || std::fs::read_to_string("/proc/thread-self/net/tcp6").unwrap();
        // The fourth column is the state; 6 is TIME_WAIT (net/tcp_states.h).
        until("TIME_WAIT", || {
            kernel()
                .lines()
                .any(|line| line.split_whitespace().nth(3) == Some("06"))
        })
        .await;
        assert_eq!(
            look().get(&id).map(|o| o.buckets),
            Some(bucket),
            "TIME_WAIT answers packets still; the kernel has\n{}",
            kernel()
        );
    });
}

/// Cores of the machine that receive in this test.
const CORES: usize = 2;
/// Number of sessions; each sends [`PACKETS`] packets. 500 for each core on average: chance alone
/// makes a difference of some 16 (one standard deviation), far below the 30 % that the test
/// permits.
const SESSIONS: u32 = 1000;
/// Each session keeps its tunnel, so more packets do not make the shares more equal.
const PACKETS: usize = 5;

/// The other end of a replica's link: an edge with the tunnel end 250.1.0.200.
struct EdgeEnd {
    net: ProcessNetns,
    sysfs: tempfile::TempDir,
    /// Sockets by port. They stay open, because a process that another test starts holds them for a
    /// moment after they are closed here.
    sockets: Mutex<BTreeMap<u16, std::net::UdpSocket>>,
}

impl EdgeEnd {
    /// Creates the edge, and enables receive packet steering at the replica.
    fn new(net: &ReplicaNetns) -> Self {
        let edge = ProcessNetns::new();
        net.0.ip(&format!("link set nowhere netns {}", edge.pid()));
        edge.ip("link set nowhere up");
        edge.ip("addr add 250.1.0.200/16 dev nowhere");
        let sysfs = tempfile::tempdir().unwrap();
        // A sysfs contains the devices of the namespace from which it is mounted.
        let mounted = net
            .0
            .command("mount")
            .args(["-t", "sysfs", "sysfs"])
            .arg(sysfs.path())
            .status();
        assert!(
            mounted.unwrap().success(),
            "a sysfs of the replica's namespace"
        );
        std::fs::write(
            sysfs.path().join("class/net/eth0/queues/rx-0/rps_cpus"),
            format!("{:x}", (1 << CORES) - 1),
        )
        .unwrap();
        Self {
            net: edge,
            sysfs,
            sockets: Mutex::default(),
        }
    }

    /// Sends a packet of a tunnel from each of these source ports.
    fn send(&self, ports: impl IntoIterator<Item = u16>) {
        let send = || {
            let mut sockets = self.sockets.lock().unwrap();
            for port in ports {
                // Not connected: a connected socket has a hash of its own, which a veth pair would
                // pass on.
                let socket = sockets
                    .entry(port)
                    .or_insert_with(|| std::net::UdpSocket::bind(("250.1.0.200", port)).unwrap());
                socket
                    .send_to(&[8, 0, 0, 0, 0x0c, 0xa0, 0xa1, 0], "250.1.0.1:4789")
                    .unwrap();
            }
        };
        Netns::open(self.net.path()).unwrap().enter(send).unwrap();
    }
}

impl Drop for EdgeEnd {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.sysfs.path())
            .output();
    }
}

/// Returns the packets that each core received since `before`, once all of `sent` have arrived.
async fn received(programs: &mut TierPrograms, before: &[u64], sent: usize) -> Vec<u64> {
    let started = Instant::now();
    loop {
        let now: Vec<u64> = programs
            .received_by_core()
            .unwrap()
            .iter()
            .zip(before)
            .map(|(now, before)| now - before)
            .collect();
        if now.iter().sum::<u64>() >= sent as u64 {
            return now[..CORES].to_vec();
        }
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(2)),
            "{sent} packets did not arrive: {now:?}"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Tunnels must spread over the replica's cores (Canal §4.4). The key of the receive hash is
/// unknown elsewhere. Ports that are merely many (10 per core of the edge, in a row) may therefore
/// split 14 to 6.
#[test]
fn tunnels_that_a_replica_names_spread_evenly_over_its_cores() {
    if sys::cores().len() < CORES {
        eprintln!("SKIPPED: this machine has less than {CORES} cores");
        return;
    }
    let (net, pins) = (ReplicaNetns::new(), ReplicaPins::new());
    let edge = EdgeEnd::new(&net);
    net.run(|| async {
        let attach = AttachMode {
            sysfs: edge.sysfs.path().into(),
            ..pins.attach()
        };
        let mut programs =
            TierPrograms::attach(&attach, &pins.orders(), GatewaySockets::default()).unwrap();
        let receive = programs.receive(Ipv4Addr::new(250, 1, 0, 200)).unwrap();
        assert_eq!(
            (receive.cores, receive.ports.len()),
            (CORES, 10 * CORES),
            "{receive:?}"
        );
        let cores = programs.received_by_core().unwrap();
        edge.send(receive.ports.iter().copied());
        let tunnels = received(&mut programs, &cores, receive.ports.len()).await;
        assert!(
            tunnels.iter().all(|n| (8..=12).contains(n)),
            "tunnels by core, within a fifth of 10: {tunnels:?}"
        );

        let cores = programs.received_by_core().unwrap();
        let service = ServiceId::new(7).unwrap();
        let port = |n: u32| {
            let client = SocketAddr::new(
                // Any clients; the ports distinguish the sessions.
                Ipv4Addr::from_bits(0x0a01_0100 + n % 7).into(),
                20_000 + n as u16,
            );
            // The edge selects a tunnel by the hash's upper half, because the lower bits select the
            // bucket.
            receive.ports[(canal_wire::tier::flow_hash(client, 80, service) >> 16) as usize
                % receive.ports.len()]
        };
        let mut sent = 0;
        for _ in 0..PACKETS {
            // A queue of the kernel has space for a thousand packets.
            for some in (0..SESSIONS).collect::<Vec<_>>().chunks(100) {
                edge.send(some.iter().map(|n| port(*n)));
                sent += some.len();
                received(&mut programs, &cores, sent).await;
            }
        }
        let packets = received(&mut programs, &cores, sent).await;
        println!("{CORES} cores: tunnels {tunnels:?}, packets of {SESSIONS} sessions {packets:?}");
        let share = sent as f64 / CORES as f64;
        assert!(
            packets
                .iter()
                // One core may have a fifth more tunnels than its share, and sessions are not
                // equally many in each.
                .all(|n| (0.7..=1.3).contains(&(*n as f64 / share))),
            "packets by core, within 30 % of {share}: {packets:?}"
        );
    });
}
