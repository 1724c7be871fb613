//! What taking packets out of aggregated tunnels costs a replica (Canal appendix A): CPU per packet from the wire to the service's socket, in
//! the tunnel and bare, one after the other in one run. Sender and receiver are two network namespaces on one core: a veth's packet is received
//! inside the send that sent it, so that the sending thread's CPU is that of both, and what sending alone costs is measured and taken off.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use canal_abi::tier::{BUCKETS, CHAIN, Replica, Table, address_be};
use canal_kit::sys::{Netns, cores, pin_thread};
use canal_offload::redirector::{Options, Redirector};
use serde_json::json;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::frames::{PORT, datagram, in_tunnel};
use crate::record::Record;

const EDGE: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 1);
const SERVICE: u32 = 7;
/// Clients' sessions, in turn.
const SESSIONS: u16 = 1000;
/// Tunnels that they share: 10 for each of two cores.
const TUNNELS: u16 = 20;
const TUNNEL_PORT: u16 = 40_000;
/// Of the receivers' devices, and of none.
const MAC: &str = "02:00:00:00:00:02";
const OTHER_MAC: &str = "02:00:00:00:00:03";
/// Largest inner packet.
const MTU: u32 = 1450;
/// Before what is measured in each turn.
const WARM: usize = 5_000;

/// How long to measure.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Size {
    /// Packets of each way in each turn
    #[arg(long, default_value_t = 200_000)]
    packets: usize,
    /// Turns; the least of them counts, because other work on the machine only ever adds
    #[arg(long, default_value_t = 7)]
    turns: usize,
    /// Bytes of a packet's content
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=1400))]
    bytes: u16,
}

/// A way to a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To somebody else on the link, so that it is dropped in front of IP: what sending and the link cost.
    Nowhere,
    Bare,
    /// Through the kernel's VXLAN device, without the redirector.
    Device,
    /// With the redirector, which looks into the tunnel first.
    Redirector,
}

const WAYS: [Way; 4] = [Way::Nowhere, Way::Bare, Way::Device, Way::Redirector];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Nowhere => "sent, and dropped by the receiver's device for another MAC (taken off below)",
            Way::Bare => "without tunnels",
            Way::Device => "out of a tunnel, by the kernel's VXLAN device",
            Way::Redirector => "looked into by the redirector, then out of the tunnel",
        }
    }

    /// Device at the sender, and the receiver's underlay address.
    fn link(self) -> (&'static str, Ipv4Addr) {
        match self {
            Way::Nowhere => ("nowhere", Ipv4Addr::new(250, 1, 0, 2)),
            Way::Bare => ("bare", Ipv4Addr::new(250, 1, 0, 3)),
            Way::Device => ("device", Ipv4Addr::new(250, 1, 0, 4)),
            Way::Redirector => ("redirector", Ipv4Addr::new(250, 1, 0, 5)),
        }
    }
}

/// The namespaces; gone when dropped.
struct Lab {
    names: Vec<String>,
    sender: Netns,
    receivers: Vec<(Way, Netns, UdpSocket)>,
    _redirectors: Vec<Redirector>,
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

fn run_ip(args: &str) -> anyhow::Result<()> {
    let out = Command::new("ip").args(args.split_whitespace()).output().context("ip (iproute2)")?;
    ensure!(out.status.success(), "ip {args}: {}", String::from_utf8_lossy(&out.stderr));
    Ok(())
}

impl Lab {
    fn new() -> anyhow::Result<Self> {
        let of = |part: &str| format!("canal-bench-{}-{part}", std::process::id());
        let sender = of("sender");
        run_ip(&format!("netns add {sender}"))?;
        let mut names = vec![sender.clone()];
        let made = Self::fill(&of, &sender, &mut names);
        let mut lab = Self { names, sender: Netns::open(format!("/run/netns/{sender}"))?, receivers: Vec::new(), _redirectors: Vec::new() };
        // Kept in any case, so that what was made goes again.
        made?;
        for way in [Way::Bare, Way::Device, Way::Redirector] {
            let (netns, redirector, sink) = receiver(way, &of(way.link().0))?;
            lab._redirectors.extend(redirector);
            lab.receivers.push((way, netns, sink));
        }
        Ok(lab)
    }

    /// Namespaces, links, and the routes from the sender.
    fn fill(of: &impl Fn(&str) -> String, sender: &str, names: &mut Vec<String>) -> anyhow::Result<()> {
        for way in WAYS {
            let (device, to) = way.link();
            let receiver = of(device);
            run_ip(&format!("netns add {receiver}"))?;
            names.push(receiver.clone());
            run_ip(&format!("-n {sender} link add {device} type veth peer name eth0 address {MAC} netns {receiver}"))?;
            run_ip(&format!("-n {receiver} link set lo up"))?;
            run_ip(&format!("-n {receiver} link set eth0 mtu 1600 up"))?;
            run_ip(&format!("-n {receiver} addr add {to}/32 dev eth0"))?;
            run_ip(&format!("-n {receiver} route add default dev eth0"))?;
            run_ip(&format!("-n {sender} link set {device} mtu 1600 up"))?;
            // Bare packets go to the service itself.
            let to = if way == Way::Bare { service() } else { to };
            run_ip(&format!("-n {sender} route add {to}/32 dev {device}"))?;
            let mac = if way == Way::Nowhere { OTHER_MAC } else { MAC };
            run_ip(&format!("-n {sender} neigh replace {to} lladdr {mac} dev {device} nud permanent"))?;
        }
        Ok(())
    }
}

/// A receiver's programs, if it has any, and the socket where packets end: it is full and stays so.
fn receiver(way: Way, name: &str) -> anyhow::Result<(Netns, Option<Redirector>, UdpSocket)> {
    let path = std::path::PathBuf::from(format!("/run/netns/{name}"));
    let netns = Netns::open(&path)?;
    let redirector = if way == Way::Bare {
        run_ip(&format!("-n {name} route add local 240.0.0.0/8 dev lo"))?;
        netns.enter(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0"))??;
        None
    } else {
        let (_, address) = way.link();
        let (device, edge) = ("eth0".to_string(), EDGE);
        let netns = Some(path);
        let options =
            Options { netns, device, pin_dir: None, address, number: 1, edge, mtu: MTU, tunnel_port: TUNNEL_PORT, tunnels: TUNNELS };
        let redirector = Redirector::attach(&options)?;
        redirector.hosts().put(&address_be(EDGE), &0)?;
        redirector.replicas().put(&1, &Replica::new(address, true))?;
        let mut chain = [0; CHAIN];
        chain[0] = 1;
        redirector.tables().put(&SERVICE, &Table { vni: 101, version: 1, chain: [chain; BUCKETS] })?;
        if way == Way::Device {
            let out = Command::new("tc").args(["-n", name, "filter", "del", "dev", "eth0", "ingress"]).output().context("tc (iproute2)")?;
            ensure!(out.status.success(), "tc: {}", String::from_utf8_lossy(&out.stderr));
        }
        Some(redirector)
    };
    let sink = netns.enter(|| UdpSocket::bind(("0.0.0.0", PORT)))??;
    Ok((netns, redirector, sink))
}

fn service() -> Ipv4Addr {
    Ipv4Addr::from_bits(0xf000_0000 | SERVICE)
}

/// What is sent on a way, and to where, one for each session.
fn packets(way: Way, bytes: usize) -> Vec<(Vec<u8>, SockAddr)> {
    let packet = |n: u16| {
        let client = (Ipv4Addr::new(10, 1, 1 + (n / 250) as u8, 2 + (n % 250) as u8), 30_000 + n);
        let inner = datagram(client, service(), bytes);
        let (_, to) = way.link();
        let (packet, to) =
            if way == Way::Bare { (inner, service()) } else { (in_tunnel((EDGE, TUNNEL_PORT + n % TUNNELS), to, &inner), to) };
        (packet, SocketAddrV4::new(to, 0).into())
    };
    (0..SESSIONS).map(packet).collect()
}

/// Sends; the thread's CPU per packet, ns.
fn send(socket: &Socket, packets: &[(Vec<u8>, SockAddr)], count: usize) -> anyhow::Result<f64> {
    let before = cpu_ns()?;
    for (packet, to) in packets.iter().cycle().take(count) {
        socket.send_to(packet, to)?;
    }
    Ok((cpu_ns()? - before) / count as f64)
}

/// This thread's, with all that it did for the network inside of system calls. It is told anew at each turn of the scheduler: the sleep is one.
fn cpu_ns() -> anyhow::Result<f64> {
    std::thread::sleep(Duration::from_millis(1));
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").context("/proc/thread-self/schedstat")?;
    text.split_whitespace().next().and_then(|ns| ns.parse().ok()).context("/proc/thread-self/schedstat")
}

/// Datagrams that reached the socket, taken or not.
fn reached(netns: &Netns) -> anyhow::Result<u64> {
    let text = netns.enter(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))??;
    let mut lines = text.lines().filter_map(|l| l.strip_prefix("Udp: "));
    let (names, values) = (lines.next().context("no Udp line")?, lines.next().context("no Udp line")?);
    let of = |name| names.split(' ').zip(values.split(' ')).find(|(n, _)| *n == name).and_then(|(_, v)| v.parse::<u64>().ok());
    of("RcvbufErrors").context("RcvbufErrors")
}

pub(crate) fn run(size: &Size, record: &Record) -> anyhow::Result<()> {
    if let Some(core) = cores().last() {
        pin_thread(*core)?;
    }
    let lab = Lab::new()?;
    let socket = lab.sender.enter(|| Socket::new(Domain::IPV4, Type::from(3), Some(Protocol::from(255))))??;
    let all = WAYS.map(|way| packets(way, size.bytes.into()));
    let mut least = [f64::MAX; WAYS.len()];
    for _ in 0..size.turns {
        for (at, way) in WAYS.into_iter().enumerate() {
            send(&socket, &all[at], WARM)?;
            let receiver = lab.receivers.iter().find(|(of, ..)| *of == way).map(|(_, netns, _)| netns);
            let before = receiver.map(reached).transpose()?;
            least[at] = least[at].min(send(&socket, &all[at], size.packets)?);
            if let (Some(netns), Some(before)) = (receiver, before) {
                let arrived = reached(netns)? - before;
                if arrived != size.packets as u64 {
                    bail!("{way:?}: {arrived} of {} packets reached the socket", size.packets);
                }
            }
        }
    }
    tell(size, least, record)
}

fn tell(size: &Size, [nowhere, bare, device, redirector]: [f64; 4], record: &Record) -> anyhow::Result<()> {
    println!(
        "{} sessions in {TUNNELS} tunnels, {} bytes of content, least of {} turns of {} packets; every packet reached its socket",
        SESSIONS, size.bytes, size.turns, size.packets
    );
    println!("| way into the replica | CPU per packet, ns | beside none |");
    println!("|---|---|---|");
    println!("| {} | {nowhere:.0} | |", Way::Nowhere.name());
    for (way, ns) in [(Way::Bare, bare), (Way::Device, device), (Way::Redirector, redirector)] {
        println!("| {} | {:.0} | {:+.0} |", way.name(), ns - nowhere, ns - bare);
    }
    record.put(
        "disaggregation",
        json!({ "bare_ns": bare - nowhere, "tunnel_ns": device - bare, "redirector_ns": redirector - device, "bytes": size.bytes }),
    )
}
