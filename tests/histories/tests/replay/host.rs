//! A replica's host: a namespace with the redirector loaded, the socket steering, a listening
//! gateway, and a TUN device behind which all clients are. Packets that the program passes enter
//! the stack there, and the stack's responses leave there.

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use canal_abi::tier::{Replica, address_be};
use canal_histories::HistorySegment;
use canal_offload::redirector::{RedirectorOptions, RedirectorPrograms, RedirectorTestRun};
use canal_offload::socket_steering::{ServiceListener, SocketSteering};
use canal_timing::deadline;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::{Domain, Socket, Type};

use crate::lab::LabNetns;

/// Maximum time of an answer of the stack on a quiet machine. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
pub(super) const STACK_TIMEOUT: Duration = Duration::from_secs(5);
/// More than all histories leave half open: with a full list the kernel would respond with cookies.
const BACKLOG: i32 = 4096;

pub(super) struct Host {
    pub(super) address: Ipv4Addr,
    pub(super) redirector: RedirectorPrograms,
    netns: LabNetns,
    namespace: File,
    _steering: SocketSteering,
    listener: Socket,
    tun: File,
    /// The program's counters at the last read.
    counts: Vec<(&'static str, u64)>,
    /// Sessions that the gateway has accepted.
    pub(super) accepted: HashMap<SocketAddr, Socket>,
}

pub(super) fn underlay(slot: usize) -> Ipv4Addr {
    Ipv4Addr::new(250, 1, 0, 10 + slot as u8)
}

impl Host {
    pub(super) fn new(slot: usize) -> Self {
        let netns = LabNetns::bare();
        netns.within(|| {
            // A cookie would own a session without a request, which the model does not have.
            std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "0").unwrap();
            // Histories leave requests half open, so the kernel's limit must be above their number.
            std::fs::write("/proc/sys/net/ipv4/tcp_max_syn_backlog", "65536").unwrap();
        });
        let tun = netns.tun("tun0");
        // Inner addresses of services are in 240.0.0.0/8 and its IPv6 counterpart.
        for command in [
            "link set tun0 up",
            "route add local 240.0.0.0/8 dev lo",
            "route add default dev tun0",
        ] {
            netns.ip(command);
        }
        for command in [
            "-6 route add local fdca:a1:0:240::/96 dev lo",
            "-6 route add default dev tun0",
        ] {
            netns.ip(command);
        }
        let steering = SocketSteering::attach(Some(&netns.path()), None).unwrap();
        let listener = netns.within(|| {
            let listener = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
            listener
                // The port only has to be free: socket steering assigns sessions of any port to the
                // listener.
                .bind(&"[::]:20000".parse::<SocketAddr>().unwrap().into())
                .unwrap();
            listener.listen(BACKLOG).unwrap();
            listener.set_nonblocking(true).unwrap();
            listener
        });
        steering.set(ServiceListener::Plain, &listener).unwrap();
        let address = underlay(slot);
        // `load` touches no device: packets reach the program by test runs, and `begin` sets number
        // and edge.
        let redirector = RedirectorPrograms::load(&RedirectorOptions {
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
        Self {
            address,
            redirector,
            netns,
            namespace,
            _steering: steering,
            listener,
            tun,
            counts,
            accepted: HashMap::new(),
        }
    }

    /// Restarts as the replica `number`, with empty tables.
    pub(super) fn begin(&mut self, number: u16, edge: Ipv4Addr) {
        self.redirector.set_self(number, edge).unwrap();
        for service in self.redirector.tables().all().unwrap().keys() {
            self.redirector.tables().remove(service).unwrap();
        }
    }

    /// Adds a replica, or removes one.
    pub(super) fn set_replica(&self, number: u16, address: Option<Ipv4Addr>) {
        let (number, state) = (
            u32::from(number),
            address.map_or_else(Replica::default, |at| Replica::new(at, true)),
        );
        self.redirector.replicas().put(&number, &state).unwrap();
    }

    /// Assigns the replica `number` to the tier's host at `address`; 0: an edge.
    pub(super) fn set_host(&self, address: Ipv4Addr, number: u16) {
        self.redirector
            .hosts()
            .put(&address_be(address), &u32::from(number))
            .unwrap();
    }

    /// Runs the program over a frame, from inside the namespace, in which this thread stays.
    /// Returns the result and the counters that changed.
    pub(super) fn run(&mut self, frame: &[u8]) -> (RedirectorTestRun, Vec<&'static str>) {
        move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .unwrap();
        let ran = self.redirector.test_run(frame).unwrap();
        let after = self.redirector.counts().unwrap();
        let before = std::mem::replace(&mut self.counts, after.clone());
        let moved = before
            .iter()
            .zip(&after)
            .filter(|(before, after)| before != after)
            .map(|(_, after)| after.0);
        (ran, moved.collect())
    }

    /// Delivers a packet to the stack.
    pub(super) fn deliver(&mut self, packet: &[u8]) {
        self.tun.write_all(packet).unwrap();
    }

    /// Returns everything that the stack has sent to clients since the last call.
    pub(super) fn sent_by_stack(&mut self) -> Vec<HistorySegment> {
        let mut all = Vec::new();
        let mut room = [0; 2048];
        loop {
            match self.tun.read(&mut room) {
                Ok(length) => all.extend(HistorySegment::read(&room[..length])),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return all,
                Err(e) => panic!("{}: {e}", self.netns.name()),
            }
        }
    }

    /// Returns the gateway's session of this client, which it accepts on demand.
    pub(super) fn session(&mut self, client: SocketAddr) -> &Socket {
        let asked = Instant::now();
        while !self.accepted.contains_key(&client) {
            match self.listener.accept() {
                Ok((socket, from)) => {
                    let from = from.as_socket().unwrap();
                    socket
                        .set_read_timeout(Some(deadline(STACK_TIMEOUT)))
                        .unwrap();
                    self.accepted.insert(
                        SocketAddr::new(from.ip().to_canonical(), from.port()),
                        socket,
                    );
                }
                Err(e)
                    if e.kind() == ErrorKind::WouldBlock
                        && asked.elapsed() < deadline(STACK_TIMEOUT) =>
                {
                    std::thread::sleep(Duration::from_micros(100))
                }
                Err(e) => panic!("{client} has no session at {}: {e}", self.address),
            }
        }
        &self.accepted[&client]
    }
}
