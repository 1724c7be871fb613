//! A replica's host: a namespace with the redirector loaded, the doors, a listening gateway, and a TUN device behind which all clients are.
//! What the program lets to the stack goes in there, and what the stack answers comes out.

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use canal_abi::tier::{Replica, address_be};
use canal_histories::Segment;
use canal_offload::doors::{Door, Doors};
use canal_offload::redirector::{Options, Redirector, Trial};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::{Domain, Socket, Type};

use crate::lab::Netns;

/// Longer than any pause of this machine that is not a fault.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// More than all histories leave half open: a full list would have the kernel answer with cookies.
const BACKLOG: i32 = 4096;

pub(super) struct Host {
    pub(super) address: Ipv4Addr,
    pub(super) redirector: Redirector,
    netns: Netns,
    namespace: File,
    _doors: Doors,
    listener: Socket,
    tun: File,
    /// The program's counters, as they were last seen.
    counts: Vec<(&'static str, u64)>,
    /// Sessions that the gateway has accepted.
    pub(super) accepted: HashMap<SocketAddr, Socket>,
}

pub(super) fn underlay(slot: usize) -> Ipv4Addr {
    Ipv4Addr::new(250, 1, 0, 10 + slot as u8)
}

impl Host {
    pub(super) fn new(slot: usize) -> Self {
        let netns = Netns::bare();
        netns.within(|| {
            // A cookie would be owned without a request, and the model has none.
            std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "0").unwrap();
            std::fs::write("/proc/sys/net/ipv4/tcp_max_syn_backlog", "65536").unwrap();
        });
        let tun = netns.tun("tun0");
        for command in ["link set tun0 up", "route add local 240.0.0.0/8 dev lo", "route add default dev tun0"] {
            netns.ip(command);
        }
        for command in ["-6 route add local fdca:a1:0:240::/96 dev lo", "-6 route add default dev tun0"] {
            netns.ip(command);
        }
        let doors = Doors::attach(Some(&netns.path()), None).unwrap();
        let listener = netns.within(|| {
            let listener = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
            listener.bind(&"[::]:20000".parse::<SocketAddr>().unwrap().into()).unwrap();
            listener.listen(BACKLOG).unwrap();
            listener.set_nonblocking(true).unwrap();
            listener
        });
        doors.set(Door::Plain, &listener).unwrap();
        let address = underlay(slot);
        let redirector = Redirector::load(&Options {
            netns: None,
            device: "lo".into(),
            pin_dir: None,
            address,
            number: 0,
            edge: Ipv4Addr::UNSPECIFIED,
            mtu: 1400,
            tunnel_port: 40_000,
            tunnels: 0,
        })
        .unwrap();
        let namespace = File::open(netns.path()).unwrap();
        let counts = redirector.counts().unwrap();
        Self { address, redirector, netns, namespace, _doors: doors, listener, tun, counts, accepted: HashMap::new() }
    }

    /// Begins anew as the replica `number`, with empty tables.
    pub(super) fn begin(&mut self, number: u16, edge: Ipv4Addr) {
        self.redirector.set_self(number, edge).unwrap();
        for service in self.redirector.tables().all().unwrap().keys() {
            self.redirector.tables().remove(service).unwrap();
        }
    }

    /// Tells it of a replica that is there, or of one that is gone.
    pub(super) fn hear_of(&self, number: u16, address: Option<Ipv4Addr>) {
        let (number, state) = (u32::from(number), address.map_or_else(Replica::default, |at| Replica::new(at, true)));
        self.redirector.replicas().put(&number, &state).unwrap();
    }

    /// The tier's host at `address` is the replica `number`; 0: an edge.
    pub(super) fn believe(&self, address: Ipv4Addr, number: u16) {
        self.redirector.hosts().put(&address_be(address), &u32::from(number)).unwrap();
    }

    /// Runs the program over a frame, from inside the namespace: this thread stays there. Gives what it did and the counters that moved.
    pub(super) fn run(&mut self, frame: &[u8]) -> (Trial, Vec<&'static str>) {
        move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        let trial = self.redirector.trial(frame).unwrap();
        let after = self.redirector.counts().unwrap();
        let before = std::mem::replace(&mut self.counts, after.clone());
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after).map(|(_, after)| after.0);
        (trial, moved.collect())
    }

    /// Gives the stack a packet.
    pub(super) fn deliver(&mut self, packet: &[u8]) {
        self.tun.write_all(packet).unwrap();
    }

    /// Everything that the stack has sent to clients since it was asked last.
    pub(super) fn said(&mut self) -> Vec<Segment> {
        let mut all = Vec::new();
        let mut room = [0; 2048];
        loop {
            match self.tun.read(&mut room) {
                Ok(length) => all.extend(Segment::read(&room[..length])),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return all,
                Err(e) => panic!("{}: {e}", self.netns.name()),
            }
        }
    }

    /// The session that the gateway has of this client. It is accepted when it is asked for.
    pub(super) fn session(&mut self, client: SocketAddr) -> &Socket {
        let asked = Instant::now();
        while !self.accepted.contains_key(&client) {
            match self.listener.accept() {
                Ok((socket, from)) => {
                    let from = from.as_socket().unwrap();
                    socket.set_read_timeout(Some(PATIENCE)).unwrap();
                    self.accepted.insert(SocketAddr::new(from.ip().to_canonical(), from.port()), socket);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock && asked.elapsed() < PATIENCE => std::thread::sleep(Duration::from_micros(100)),
                Err(e) => panic!("{client} has no session at {}: {e}", self.address),
            }
        }
        &self.accepted[&client]
    }
}
