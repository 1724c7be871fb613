//! Recorded histories through `bpf/redirector.bpf.c`, one loaded program with its maps and real
//! sockets per replica: each packet is forwarded as the rules of the model require, and no
//! established session breaks.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use canal_abi::tier::{
    BUCKETS, CHAIN, STAMP_LAST, STAMP_MIXED, STAMP_SKIPPED, STAMP_VERSION, TIER_VNI, Table,
};
use canal_histories::{ACK, FIN, HistorySegment, RST, SYN};
use canal_model::ids::{AzName, ReplicaNumber, ServiceId};
use canal_timing::deadline;
use canal_wire::tier::{bucket, service_address4, service_address6};

use crate::frames::{HEAD, OuterHeaders};
use crate::sim::history::{
    AzTables, History, HistoryStep, PacketKind, REPLICAS_MAX, SentPacket, record,
};
use crate::sim::rules::{Packet, PacketVerdict, Stamp};
use crate::sim::{PacketVisit, azs};
use host::{Host, STACK_TIMEOUT, underlay};

mod host;

/// Variable that repeats a failed history alone by its seed: `CANAL_HISTORY=SEED`.
const SEED: &str = "CANAL_HISTORY";
/// Number of histories: enough for each verdict that the test demands of all together.
const HISTORIES: u64 = 120;
/// Number of histories that are recorded ahead of the running one. Recording and replay use a core
/// each; a few wait if one is faster for a moment.
const AHEAD: usize = 16;
const PORT: u16 = 80;
/// TC_ACT_OK, TC_ACT_SHOT and TC_ACT_REDIRECT.
const PASSED: u32 = 0;
const DROPPED: u32 = 2;
const SENT: u32 = 7;

/// A client's end of a connection.
struct ClientEnd {
    at: SocketAddr,
    to: SocketAddr,
    /// Sequence number of each replica's SYN-ACK.
    answers: HashMap<ReplicaNumber, u32>,
    /// Number of [`word`]s that the service has read.
    delivered: u32,
    is_over: bool,
}

/// Any sequence number that is far from zero, so that no number wraps.
const FIRST: u32 = 1_000_000;

/// Returns the next four bytes that the client sends.
fn word(delivered: u32) -> [u8; 4] {
    delivered.to_be_bytes()
}

#[derive(Debug, Default)]
struct ReplayTally {
    packets: usize,
    verdicts: BTreeMap<&'static str, usize>,
    established: usize,
    requests_twice: usize,
}

struct HistoryReplay<'h> {
    hosts: &'h mut [Host],
    /// The host of each replica.
    slots: BTreeMap<ReplicaNumber, usize>,
    clients: BTreeMap<usize, ClientEnd>,
    tally: &'h mut ReplayTally,
}

fn edge(az: &AzName) -> Ipv4Addr {
    Ipv4Addr::new(250, 1, 1, az.as_str().as_bytes()[0])
}

fn bits(stamp: &Stamp) -> u32 {
    let flag = |is_set, bit| if is_set { bit } else { 0 };
    stamp.version & STAMP_VERSION
        | flag(stamp.mixed, STAMP_MIXED)
        | flag(stamp.skipped, STAMP_SKIPPED)
        | flag(stamp.last, STAMP_LAST)
}

/// Returns the counter of the program for an outcome of the rules.
fn counter(kind: PacketKind, packet: &Packet, verdict: &PacketVerdict) -> &'static str {
    match verdict {
        PacketVerdict::Keep if kind == PacketKind::Syn => "new",
        PacketVerdict::Keep => "owned",
        PacketVerdict::Forward { .. } if packet.begins => "forwarded_new",
        PacketVerdict::Forward { .. } => "forwarded",
        PacketVerdict::Unowned => "unowned",
        PacketVerdict::Unsettled => "ownership_unsettled",
        PacketVerdict::NoTable => "drop_service",
    }
}

/// Returns a client whose packets hash to the bucket; clients of all histories differ.
fn client(
    history: u64,
    connection: usize,
    service: ServiceId,
    wanted: usize,
) -> (SocketAddr, SocketAddr) {
    let (high, low, own) = ((history >> 8) as u8, history as u8, connection as u8);
    let (from, to): (IpAddr, IpAddr) = if connection.is_multiple_of(2) {
        (
            Ipv4Addr::new(10, high, low, own).into(),
            service_address4(service).into(),
        )
    } else {
        (
            Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, history as u16, own.into()).into(),
            service_address6(service).into(),
        )
    };
    let found = (1024..u16::MAX)
        .map(|port| SocketAddr::new(from, port))
        .find(|at| bucket(*at, PORT, service) == wanted);
    (found.unwrap(), SocketAddr::new(to, PORT))
}

impl HistoryReplay<'_> {
    fn step(&mut self, history: u64, step: &HistoryStep) {
        match step {
            HistoryStep::Join(replica, az) => self.join(*replica, az),
            HistoryStep::Leave(replica) => {
                self.slots.remove(replica);
                self.hosts
                    .iter()
                    .for_each(|host| host.set_replica(replica.get(), None));
            }
            HistoryStep::Published(replica, tables) => self.publish(*replica, tables),
            HistoryStep::Open {
                connection,
                service,
                bucket,
            } => {
                let (at, to) = client(history, *connection, *service, *bucket);
                self.clients.insert(
                    *connection,
                    ClientEnd {
                        at,
                        to,
                        answers: HashMap::new(),
                        delivered: 0,
                        is_over: false,
                    },
                );
            }
            HistoryStep::Packet(sent) => self.send(sent),
        }
    }

    fn join(&mut self, replica: ReplicaNumber, az: &AzName) {
        let slot = (0..self.hosts.len())
            .find(|slot| self.slots.values().all(|taken| taken != slot))
            .expect("a host for each replica");
        self.slots.insert(replica, slot);
        self.hosts[slot].begin(replica.get(), edge(az));
        for (number, slot) in &self.slots {
            for host in &mut *self.hosts {
                host.set_replica(number.get(), Some(underlay(*slot)));
                host.set_host(underlay(*slot), number.get());
            }
        }
    }

    fn publish(&mut self, replica: ReplicaNumber, tables: &AzTables) {
        let mut wanted = HashMap::new();
        for (service, (vni, planned)) in tables {
            let mut chain = [[0; CHAIN]; BUCKETS];
            for (row, seats) in chain.iter_mut().zip(&planned.chains) {
                row.iter_mut()
                    .zip(seats)
                    .for_each(|(place, seat)| *place = seat.replica.get());
            }
            wanted.insert(
                service.get(),
                Table {
                    vni: vni.get(),
                    version: planned.version,
                    chain,
                },
            );
        }
        self.hosts[self.slots[&replica]]
            .redirector
            .tables()
            .replace_all(&wanted)
            .unwrap();
    }

    fn segment(&self, sent: &SentPacket) -> HistorySegment {
        let client = &self.clients[&sent.connection];
        let (from, to) = (client.at, client.to);
        let next = FIRST.wrapping_add(1 + 4 * client.delivered);
        let answer = sent
            .answered
            .map_or(0, |replica| client.answers[&replica].wrapping_add(1));
        let (number, acknowledges, flags, data) = match sent.kind {
            PacketKind::Syn => (FIRST, 0, SYN, Vec::new()),
            PacketKind::Acknowledgement => (next, answer, ACK, Vec::new()),
            PacketKind::Data => (next, answer, ACK, word(client.delivered).to_vec()),
            PacketKind::Fin => (next, answer, FIN | ACK, Vec::new()),
            PacketKind::Last => (
                next.wrapping_add(1),
                answer.wrapping_add(1),
                ACK,
                Vec::new(),
            ),
        };
        HistorySegment {
            from,
            to,
            number,
            acknowledges,
            flags,
            data,
        }
    }

    /// Sends a packet on the recorded path: from program to program, and at its end to a kernel or
    /// nowhere.
    fn send(&mut self, sent: &SentPacket) {
        let packet = self.segment(sent).packet().unwrap();
        let first = &sent.visits[0];
        let at = underlay(self.slots[&first.here]);
        let tunnel = OuterHeaders::new(&edge(&sent.az).to_string(), &at.to_string(), TIER_VNI);
        let mut frame = OuterHeaders {
            hop: first.packet.hop as u8,
            stamp: bits(&first.packet.stamp),
            ..tunnel
        }
        .frame(&packet);
        for visit in &sent.visits {
            frame = self.visit(sent, visit, &frame);
        }
        let last = sent.visits[sent.visits.len() - 1];
        if matches!(last.verdict, PacketVerdict::Keep | PacketVerdict::Unowned) {
            let slot = self.slots[&last.here];
            self.hosts[slot].deliver(&frame[HEAD..]);
        }
        if last.verdict == PacketVerdict::Keep {
            self.check_delivered(sent, last.here);
        }
        self.no_reset();
    }

    /// Checks that the program's verdict at one replica is that of the rules. Returns the forwarded
    /// frame.
    fn visit(&mut self, sent: &SentPacket, visit: &PacketVisit, frame: &[u8]) -> Vec<u8> {
        let wanted = counter(sent.kind, &visit.packet, &visit.verdict);
        let (test_run, moved) = self.hosts[self.slots[&visit.here]].run(frame);
        let case = || {
            format!(
                "{:?} of connection {} at {visit:?}",
                sent.kind, sent.connection
            )
        };
        let verdict = match visit.verdict {
            PacketVerdict::Keep | PacketVerdict::Unowned => PASSED,
            PacketVerdict::Forward { .. } => SENT,
            PacketVerdict::Unsettled | PacketVerdict::NoTable => DROPPED,
        };
        assert_eq!(
            (test_run.verdict, &moved[..]),
            (verdict, &[wanted][..]),
            "{}",
            case()
        );
        if let PacketVerdict::Forward { to, hop, stamp } = visit.verdict {
            let destination = Ipv4Addr::from(<[u8; 4]>::try_from(&test_run.frame[30..34]).unwrap());
            let carried = u32::from_be_bytes([
                0,
                test_run.frame[43],
                test_run.frame[44],
                test_run.frame[45],
            ]);
            let expected = (underlay(self.slots[&to]), hop, bits(&stamp));
            assert_eq!(
                (destination, usize::from(test_run.frame[49]), carried),
                expected,
                "{}",
                case()
            );
        }
        *self.tally.verdicts.entry(wanted).or_default() += 1;
        self.tally.packets += 1;
        test_run.frame
    }

    /// Checks what a kernel does with a delivered packet: a SYN-ACK for a request, bytes for the
    /// gateway, an end.
    fn check_delivered(&mut self, sent: &SentPacket, here: ReplicaNumber) {
        let host = &mut self.hosts[self.slots[&here]];
        let client = self.clients.get_mut(&sent.connection).unwrap();
        match sent.kind {
            PacketKind::Syn if client.answers.contains_key(&here) => {}
            PacketKind::Syn => {
                self.tally.requests_twice += usize::from(!client.answers.is_empty());
                client.answers.insert(here, syn_ack(host, client));
            }
            PacketKind::Acknowledgement => _ = host.session(client.at),
            PacketKind::Data => {
                let mut received = [0; 4];
                let mut session = host.session(client.at);
                session
                    .read_exact(&mut received)
                    .unwrap_or_else(|e| panic!("{}: {e}", client.at));
                assert_eq!(received, word(client.delivered), "{}", client.at);
                client.delivered += 1;
            }
            PacketKind::Fin => {
                let mut session = host.session(client.at);
                assert_eq!(
                    session.read(&mut [0; 4]).unwrap(),
                    0,
                    "{}: the end",
                    client.at
                );
                host.accepted.remove(&client.at);
            }
            PacketKind::Last => client.is_over = true,
        }
    }

    /// No kernel resets a connection that a client has.
    fn no_reset(&mut self) {
        for host in &mut *self.hosts {
            for sent_by_stack in host
                .sent_by_stack()
                .into_iter()
                .filter(|sent_by_stack| sent_by_stack.flags & RST != 0)
            {
                let broken = self
                    .clients
                    .values()
                    .any(|client| client.at == sent_by_stack.to && !client.is_over);
                assert!(!broken, "{} is reset by {}", sent_by_stack.to, host.address);
            }
        }
    }
}

fn syn_ack(host: &mut Host, client: &ClientEnd) -> u32 {
    let asked = Instant::now();
    loop {
        let sent_by_stack = host.sent_by_stack();
        if let Some(found) = sent_by_stack.iter().find(|sent_by_stack| {
            sent_by_stack.to == client.at && sent_by_stack.flags & (SYN | ACK | RST) == SYN | ACK
        }) {
            return found.number;
        }
        let waited = asked.elapsed();
        assert!(
            waited < deadline(STACK_TIMEOUT),
            "no SYN-ACK for {} by {}",
            client.at,
            host.address
        );
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn replay(hosts: &mut [Host], seed: u64, history: &History, tally: &mut ReplayTally) {
    for host in &mut *hosts {
        // The remaining sessions of the last history are reset, and their owners report that.
        host.accepted.clear();
        host.sent_by_stack();
    }
    let mut replay = HistoryReplay {
        hosts,
        slots: BTreeMap::new(),
        clients: BTreeMap::new(),
        tally,
    };
    for step in &history.steps {
        replay.step(seed, step);
    }
    for (connection, owner) in &history.established {
        let at = replay.clients[connection].at;
        let host = &mut replay.hosts[replay.slots[owner]];
        assert!(
            host.accepted.contains_key(&at),
            "{at} is at {}",
            host.address
        );
        assert!(host.session(at).take_error().unwrap().is_none(), "{at}");
        replay.tally.established += 1;
    }
    replay.no_reset();
    for replica in replay.slots.keys() {
        replay
            .hosts
            .iter()
            .for_each(|host| host.set_replica(replica.get(), None));
    }
}

/// Runs all histories, or one by its seed.
#[test]
fn the_program_follows_the_rules_through_recorded_histories() {
    let seeds = std::env::var(SEED).ok().map_or_else(
        || (0..HISTORIES).collect(),
        |seed| vec![seed.parse::<u64>().unwrap()],
    );
    let is_complete = seeds.len() > 1;
    // Some histories are recorded while others run.
    let (recorded, histories) = sync_channel(AHEAD);
    let recorder = std::thread::spawn(move || {
        seeds
            .into_iter()
            .take_while(|seed| recorded.send((*seed, record(*seed))).is_ok())
            .count()
    });
    // The replay's namespace changes with each packet, so it has its own thread.
    let replayed = std::thread::spawn(move || {
        let mut hosts: Vec<Host> = (0..REPLICAS_MAX).map(Host::new).collect();
        for az in azs().keys() {
            hosts.iter().for_each(|host| host.set_host(edge(az), 0));
        }
        let mut tally = ReplayTally::default();
        for (seed, history) in histories {
            // If a history fails, its seed is the last output.
            println!("history {seed}");
            replay(&mut hosts, seed, &history, &mut tally);
        }
        tally
    });
    let tally = replayed
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("{} histories, {tally:?}", recorder.join().unwrap());
    // One repeated history need not meet every verdict; all of them together must.
    if is_complete {
        for verdict in [
            "new",
            "owned",
            "forwarded_new",
            "forwarded",
            "unowned",
            "ownership_unsettled",
            "drop_service",
        ] {
            assert!(
                // Ten occurrences of a verdict tell a history that meets it from an accident.
                tally.verdicts.get(verdict).is_some_and(|seen| *seen >= 10),
                "{verdict} is hardly met: {tally:?}"
            );
        }
        // Few established or repeated requests would mean that the histories became trivial. The
        // bounds were chosen.
        assert!(
            tally.established >= 500 && tally.requests_twice >= 50,
            "{tally:?}"
        );
    }
}
