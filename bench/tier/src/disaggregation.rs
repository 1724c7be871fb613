//! A replica's cost of taking packets out of aggregated tunnels (Canal appendix A): CPU per packet
//! from the wire to the service's socket, in the tunnel and bare, one after the other in one run.
//! Sender and receiver are two network namespaces on one core. A veth's packet is received inside
//! the `send` that sent it, so the sending thread's CPU is that of both. The cost of sending alone
//! is measured and subtracted.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use canal_abi::tier::{BUCKETS, CHAIN, Replica, Table, address_be};
use canal_net::sys::{Netns, cores, pin_thread};
use canal_offload::redirector::{RedirectorOptions, RedirectorPrograms};
use serde_json::json;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::frames::{PORT, datagram, in_tunnel};
use crate::record::FigureFile;

const EDGE: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 1);
/// Id of the only service; any number will do.
const SERVICE: u32 = 7;
/// Sessions of clients, used in turn.
/// With one session, its socket would always be in the cache. Nobody measured other numbers.
const SESSIONS: u16 = 1000;
/// Number of tunnels that they share: 10 for each of two cores.
const TUNNELS: u16 = 20;
/// `canal_wire::tier::TUNNEL_PORT`.
const TUNNEL_PORT: u16 = 40_000;
/// MAC address of the receivers' devices, and one that no device has.
const MAC: &str = "02:00:00:00:00:02";
const OTHER_MAC: &str = "02:00:00:00:00:03";
/// Size of the largest inner packet.
/// An Ethernet frame of 1,500 bytes less the 50 of the tunnel's headers.
const MTU: u32 = 1450;
/// Packets before the measurement in each turn.
/// Nobody measured a smaller number.
const WARM: usize = 5_000;

/// Number and size of the packets, and number of turns.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct MeasureTime {
    /// Packets of each path in each turn
    #[arg(long, default_value_t = 200_000)]
    packets: usize,
    /// Number of turns; the lowest result counts, because other load on the machine only adds to it
    #[arg(long, default_value_t = 7)]
    turns: usize,
    /// Payload bytes of a packet
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=1400))]
    bytes: u16,
}

/// A path to a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SocketPath {
    /// To another host on the link, so that the packet is dropped before IP: the cost of sending
    /// and of the link.
    Nowhere,
    Bare,
    /// Through the kernel's VXLAN device, without the redirector.
    Device,
    /// With the redirector, which first inspects the packet in the tunnel.
    Redirector,
}

const WAYS: [SocketPath; 4] = [
    SocketPath::Nowhere,
    SocketPath::Bare,
    SocketPath::Device,
    SocketPath::Redirector,
];

impl SocketPath {
    fn name(self) -> &'static str {
        match self {
            SocketPath::Nowhere => {
                "sent, and dropped by the receiver's device for another MAC (taken off below)"
            }
            SocketPath::Bare => "without tunnels",
            SocketPath::Device => "out of a tunnel, by the kernel's VXLAN device",
            SocketPath::Redirector => "looked into by the redirector, then out of the tunnel",
        }
    }

    /// Returns the device at the sender, and the receiver's underlay address.
    fn link(self) -> (&'static str, Ipv4Addr) {
        match self {
            SocketPath::Nowhere => ("nowhere", Ipv4Addr::new(250, 1, 0, 2)),
            SocketPath::Bare => ("bare", Ipv4Addr::new(250, 1, 0, 3)),
            SocketPath::Device => ("device", Ipv4Addr::new(250, 1, 0, 4)),
            SocketPath::Redirector => ("redirector", Ipv4Addr::new(250, 1, 0, 5)),
        }
    }
}

/// The namespaces, which are removed on drop.
struct NetnsPair {
    names: Vec<String>,
    sender: Netns,
    receivers: Vec<(SocketPath, Netns, UdpSocket)>,
    _redirectors: Vec<RedirectorPrograms>,
}

impl Drop for NetnsPair {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

fn run_ip(args: &str) -> anyhow::Result<()> {
    let out = Command::new("ip")
        .args(args.split_whitespace())
        .output()
        .context("ip (iproute2)")?;
    ensure!(
        out.status.success(),
        "ip {args}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(())
}

impl NetnsPair {
    fn new() -> anyhow::Result<Self> {
        let of = |part: &str| format!("canal-bench-{}-{part}", std::process::id());
        let sender = of("sender");
        run_ip(&format!("netns add {sender}"))?;
        let mut names = vec![sender.clone()];
        let made = Self::fill(&of, &sender, &mut names);
        let mut lab = Self {
            names,
            sender: Netns::open(format!("/run/netns/{sender}"))?,
            receivers: Vec::new(),
            _redirectors: Vec::new(),
        };
        // The value exists before this returns, so that everything created is removed.
        made?;
        for socket_path in [SocketPath::Bare, SocketPath::Device, SocketPath::Redirector] {
            let (netns, redirector, sink) = receiver(socket_path, &of(socket_path.link().0))?;
            lab._redirectors.extend(redirector);
            lab.receivers.push((socket_path, netns, sink));
        }
        Ok(lab)
    }

    /// Creates namespaces, links, and the routes from the sender.
    fn fill(
        of: &impl Fn(&str) -> String,
        sender: &str,
        names: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        for socket_path in WAYS {
            let (device, to) = socket_path.link();
            let receiver = of(device);
            run_ip(&format!("netns add {receiver}"))?;
            names.push(receiver.clone());
            run_ip(&format!(
                "-n {sender} link add {device} type veth peer name eth0 address {MAC} netns {receiver}"
            ))?;
            run_ip(&format!("-n {receiver} link set lo up"))?;
            run_ip(&format!("-n {receiver} link set eth0 mtu 1600 up"))?;
            run_ip(&format!("-n {receiver} addr add {to}/32 dev eth0"))?;
            run_ip(&format!("-n {receiver} route add default dev eth0"))?;
            run_ip(&format!("-n {sender} link set {device} mtu 1600 up"))?;
            // Bare packets go to the service itself.
            let to = if socket_path == SocketPath::Bare {
                service()
            } else {
                to
            };
            run_ip(&format!("-n {sender} route add {to}/32 dev {device}"))?;
            let mac = if socket_path == SocketPath::Nowhere {
                OTHER_MAC
            } else {
                MAC
            };
            run_ip(&format!(
                "-n {sender} neigh replace {to} lladdr {mac} dev {device} nud permanent"
            ))?;
        }
        Ok(())
    }
}

/// Creates a receiver's programs, if it has any, and the socket where packets end. The socket's
/// buffer stays full, so that packets are dropped there. docs/glossary.md explains buckets, chains
/// and tables.
fn receiver(
    socket_path: SocketPath,
    name: &str,
) -> anyhow::Result<(Netns, Option<RedirectorPrograms>, UdpSocket)> {
    let path = std::path::PathBuf::from(format!("/run/netns/{name}"));
    let netns = Netns::open(&path)?;
    // Without tunnels, packets for the service's address need a local route and no source check.
    let redirector = if socket_path == SocketPath::Bare {
        run_ip(&format!("-n {name} route add local 240.0.0.0/8 dev lo"))?;
        // New namespaces inherit the filter from the host, and the figure must not depend on that.
        netns.enter(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0"))??;
        None
    } else {
        let (_, address) = socket_path.link();
        let (device, edge) = ("eth0".to_string(), EDGE);
        let netns = Some(path);
        let options = RedirectorOptions {
            netns,
            device,
            pin_dir: None,
            address,
            number: 1,
            edge,
            mtu: MTU,
            tunnel_port: TUNNEL_PORT,
            tunnels: TUNNELS,
        };
        let redirector = RedirectorPrograms::attach(&options)?;
        // The redirector drops tunnels from hosts that it does not know.
        redirector.hosts().put(&address_be(EDGE), &0)?;
        redirector
            .replicas()
            .put(&1, &Replica::new(address, true))?;
        // This replica is the only member of every chain, so no packet is forwarded to another one.
        let mut chain = [0; CHAIN];
        chain[0] = 1;
        redirector.tables().put(
            &SERVICE,
            &Table {
                // The VNI of any tenant will do.
                vni: 101,
                version: 1,
                chain: [chain; BUCKETS],
            },
        )?;
        // This path is measured without the redirector, but needs the VXLAN device that it created.
        if socket_path == SocketPath::Device {
            let out = Command::new("tc")
                .args(["-n", name, "filter", "del", "dev", "eth0", "ingress"])
                .output()
                .context("tc (iproute2)")?;
            ensure!(
                out.status.success(),
                "tc: {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
        Some(redirector)
    };
    let sink = netns.enter(|| UdpSocket::bind(("0.0.0.0", PORT)))??;
    Ok((netns, redirector, sink))
}

fn service() -> Ipv4Addr {
    Ipv4Addr::from_bits(0xf000_0000 | SERVICE)
}

/// Returns the packets of a path with their destinations, one for each session.
fn packets(socket_path: SocketPath, bytes: usize) -> Vec<(Vec<u8>, SockAddr)> {
    let packet = |n: u16| {
        let client = (
            Ipv4Addr::new(10, 1, 1 + (n / 250) as u8, 2 + (n % 250) as u8),
            30_000 + n,
        );
        let inner = datagram(client, service(), bytes);
        let (_, to) = socket_path.link();
        let (packet, to) = if socket_path == SocketPath::Bare {
            (inner, service())
        } else {
            (in_tunnel((EDGE, TUNNEL_PORT + n % TUNNELS), to, &inner), to)
        };
        (packet, SocketAddrV4::new(to, 0).into())
    };
    (0..SESSIONS).map(packet).collect()
}

/// Sends the packets, and returns the thread's CPU per packet in ns.
fn send(socket: &Socket, packets: &[(Vec<u8>, SockAddr)], count: usize) -> anyhow::Result<f64> {
    let before = cpu_ns()?;
    for (packet, to) in packets.iter().cycle().take(count) {
        socket.send_to(packet, to)?;
    }
    Ok((cpu_ns()? - before) / count as f64)
}

/// Returns the CPU time of this thread, including its network work inside of system calls. The
/// kernel updates it at each scheduling; the sleep causes one.
fn cpu_ns() -> anyhow::Result<f64> {
    // The shortest sleep that surely lets another task run.
    std::thread::sleep(Duration::from_millis(1));
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")
        .context("/proc/thread-self/schedstat")?;
    text.split_whitespace()
        .next()
        .and_then(|ns| ns.parse().ok())
        .context("/proc/thread-self/schedstat")
}

/// Returns the number of datagrams that reached the socket, dropped ones included.
fn reached(netns: &Netns) -> anyhow::Result<u64> {
    let text = netns.enter(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))??;
    let mut lines = text.lines().filter_map(|l| l.strip_prefix("Udp: "));
    let (names, values) = (
        lines.next().context("no Udp line")?,
        lines.next().context("no Udp line")?,
    );
    let of = |name| {
        names
            .split(' ')
            .zip(values.split(' '))
            .find(|(n, _)| *n == name)
            .and_then(|(_, v)| v.parse::<u64>().ok())
    };
    of("RcvbufErrors").context("RcvbufErrors")
}

pub(crate) fn run(size: &MeasureTime, record: &FigureFile) -> anyhow::Result<()> {
    if let Some(core) = cores().last() {
        pin_thread(*core)?;
    }
    let lab = NetnsPair::new()?;
    let socket = lab
        .sender
        .enter(|| Socket::new(Domain::IPV4, Type::from(3), Some(Protocol::from(255))))??;
    let all = WAYS.map(|socket_path| packets(socket_path, size.bytes.into()));
    let mut least = [f64::MAX; WAYS.len()];
    for _ in 0..size.turns {
        for (at, socket_path) in WAYS.into_iter().enumerate() {
            send(&socket, &all[at], WARM)?;
            let receiver = lab
                .receivers
                .iter()
                .find(|(of, ..)| *of == socket_path)
                .map(|(_, netns, _)| netns);
            let before = receiver.map(reached).transpose()?;
            least[at] = least[at].min(send(&socket, &all[at], size.packets)?);
            if let (Some(netns), Some(before)) = (receiver, before) {
                let arrived = reached(netns)? - before;
                if arrived != size.packets as u64 {
                    bail!(
                        "{socket_path:?}: {arrived} of {} packets reached the socket",
                        size.packets
                    );
                }
            }
        }
    }
    print(size, least, record)
}

fn print(
    size: &MeasureTime,
    [nowhere, bare, device, redirector]: [f64; 4],
    record: &FigureFile,
) -> anyhow::Result<()> {
    println!(
        "{} sessions in {TUNNELS} tunnels, {} bytes of content, least of {} turns of {} packets; every packet reached its socket",
        SESSIONS, size.bytes, size.turns, size.packets
    );
    println!("| way into the replica | CPU per packet, ns | beside none |");
    println!("|---|---|---|");
    println!("| {} | {nowhere:.0} | |", SocketPath::Nowhere.name());
    for (socket_path, ns) in [
        (SocketPath::Bare, bare),
        (SocketPath::Device, device),
        (SocketPath::Redirector, redirector),
    ] {
        println!(
            "| {} | {:.0} | {:+.0} |",
            socket_path.name(),
            ns - nowhere,
            ns - bare
        );
    }
    record.put(
        "disaggregation",
        json!({ "bare_ns": bare - nowhere, "tunnel_ns": device - bare, "redirector_ns": redirector - device, "bytes": size.bytes }),
    )
}
