//! Records histories of the tier from seeds: when each replica received which tables, and each
//! packet of some connections with the verdict of every replica on its path.
//!
//! The fleet and plans change, tables and reports arrive late, SYNs are repeated. The module sends
//! no real packets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::fleet::ReplicaState;
use canal_model::ids::{AzName, ReplicaNumber, ServiceId, Vni};
use canal_model::plan::PlannedTable;
use canal_model::program::BUCKETS;

use super::events::{AZS, SimEvent, apply};
use super::rules::PacketVerdict;
use super::{PacketFate, PacketVisit, SimTier, az, fate};

/// Replicas that live at one time, at most. A test that replays a history needs a host for each.
pub(crate) const REPLICAS_MAX: usize = 9;
/// Services that exist from the start. [`MORE_SERVICES`] are added later, so that some replicas
/// have no tables of them yet.
const SERVICES: u32 = 3;
/// As many as [`SERVICES`]; the number was chosen.
const MORE_SERVICES: u32 = 3;
/// Steps of a history. The number was chosen.
const STEPS: usize = 130;
/// Connections of one history, at most. The number was chosen.
const CONNECTIONS_MAX: usize = 12;

/// The kind of a packet within its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketKind {
    Syn,
    /// The acknowledgment of the SYN-ACK with which the connection continues.
    Acknowledgement,
    Data,
    /// The FIN of the client.
    Fin,
    /// The client's acknowledgment of the service's FIN.
    Last,
}

/// One packet of a connection.
#[derive(Debug, Clone)]
pub(crate) struct SentPacket {
    pub(crate) connection: usize,
    pub(crate) kind: PacketKind,
    /// The replica whose SYN-ACK the client has accepted; `None` before.
    pub(crate) answered: Option<ReplicaNumber>,
    pub(crate) az: AzName,
    /// Every replica that the packet reaches.
    pub(crate) visits: Vec<PacketVisit>,
}

/// The tables that one replica has: those of the services in its AZ.
pub(crate) type AzTables = BTreeMap<ServiceId, (Vni, Arc<PlannedTable>)>;

/// One step of a history.
#[derive(Debug, Clone)]
pub(crate) enum HistoryStep {
    Join(ReplicaNumber, AzName),
    Leave(ReplicaNumber),
    Published(ReplicaNumber, AzTables),
    Open {
        connection: usize,
        service: ServiceId,
        bucket: usize,
    },
    Packet(SentPacket),
}

/// A recorded history; see the module.
#[derive(Debug, Clone)]
pub(crate) struct History {
    pub(crate) steps: Vec<HistoryStep>,
    /// Connections that are established at the end, with their replicas.
    pub(crate) established: BTreeMap<usize, ReplicaNumber>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    Opening,
    /// The client has accepted a SYN-ACK.
    Answered,
    Established,
    /// The service has received the client's FIN and has sent its own.
    Closing,
    Closed,
}

struct SimConnection {
    service: ServiceId,
    az: AzName,
    bucket: usize,
    requests: BTreeSet<ReplicaNumber>,
    answered: Option<ReplicaNumber>,
    phase: ConnectionPhase,
}

/// A SplitMix64 generator (Steele, Lea, Flood 2014); the seed determines the history.
struct Lots(u64);

impl Lots {
    fn draw(&mut self, of: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as usize % of
    }
}

struct Recorder {
    tier: SimTier,
    lots: Lots,
    connections: Vec<SimConnection>,
    steps: Vec<HistoryStep>,
    published: BTreeMap<ReplicaNumber, usize>,
}

/// Records the history of a seed.
pub(crate) fn record(seed: u64) -> History {
    let mut tier = SimTier::new(&[("a1", 2), ("a2", 2), ("b1", 2)], SERVICES);
    tier.plan();
    tier.deliver_all();
    let mut recorder = Recorder {
        tier,
        lots: Lots(seed),
        connections: Vec::new(),
        steps: Vec::new(),
        published: BTreeMap::new(),
    };
    recorder.record_published();
    for _ in 0..STEPS {
        if recorder.lots.draw(5) < 2 {
            recorder.change()
        } else {
            recorder.send()
        }
    }
    recorder.end()
}

impl Recorder {
    /// Applies a planned change of the fleet, or delivers a late message.
    fn change(&mut self) {
        let at = self.lots.draw(usize::MAX);
        let event = match self.lots.draw(40) {
            0..2 => SimEvent::Join([0, 1, 3][at % 3]),
            2..4 => SimEvent::Activate(at),
            4..7 => SimEvent::Drain(at),
            7 => SimEvent::Undrain(at),
            8 => SimEvent::Demand(SERVICES + 1 + at as u32 % MORE_SERVICES),
            9..16 => SimEvent::Plan,
            16..24 => SimEvent::DeliverTables(at),
            24..28 => SimEvent::DeliverEdgeTables(at % AZS.len()),
            28..33 => SimEvent::Scan(at),
            33..37 => SimEvent::DeliverReport(at),
            _ => SimEvent::DeliverEdgeReport(at % AZS.len()),
        };
        apply(&mut self.tier, event, REPLICAS_MAX);
        self.record_published();
    }

    /// Records which replicas exist now and which tables they have.
    fn record_published(&mut self) {
        let gone: Vec<_> = self
            .published
            .keys()
            .filter(|replica| !self.tier.replicas.contains_key(replica))
            .copied()
            .collect();
        for replica in gone {
            self.published.remove(&replica);
            self.steps.push(HistoryStep::Leave(replica));
        }
        for (replica, plan) in &self.tier.has {
            let az = &self.tier.replicas[replica].az;
            if !self.published.contains_key(replica) {
                self.steps.push(HistoryStep::Join(*replica, az.clone()));
            }
            if self.published.insert(*replica, *plan) == Some(*plan) {
                continue;
            }
            let services = self
                .tier
                .plans
                .get(*plan)
                .into_iter()
                .flat_map(|plan| &plan.services);
            let tables = services
                .filter_map(|(id, service)| {
                    Some((*id, (service.vni, service.tables.get(az)?.clone())))
                })
                .collect();
            self.steps.push(HistoryStep::Published(*replica, tables));
        }
    }

    /// Sends a packet of a client: the next one, a repeated SYN, or a late one.
    fn send(&mut self) {
        if self.connections.is_empty()
            || (self.connections.len() < CONNECTIONS_MAX && self.lots.draw(6) == 0)
        {
            let drawn = self.lots.draw(self.tier.demands.services.len());
            let service = *self.tier.demands.services.keys().nth(drawn).unwrap();
            let bucket = self.lots.draw(BUCKETS);
            let az = az(AZS[self.lots.draw(2)]);
            self.steps.push(HistoryStep::Open {
                connection: self.connections.len(),
                service,
                bucket,
            });
            let requests = BTreeSet::new();
            self.connections.push(SimConnection {
                service,
                az,
                bucket,
                requests,
                answered: None,
                phase: ConnectionPhase::Opening,
            });
        }
        let at = self.lots.draw(self.connections.len());
        let kind = match (self.connections[at].phase, self.lots.draw(8)) {
            (ConnectionPhase::Opening, 0..3) if !self.connections[at].requests.is_empty() => {
                PacketKind::Acknowledgement
            }
            (ConnectionPhase::Opening, _)
            | (ConnectionPhase::Answered | ConnectionPhase::Established, 0) => PacketKind::Syn,
            (ConnectionPhase::Answered, 1..4) => PacketKind::Acknowledgement,
            (ConnectionPhase::Established, 1) => PacketKind::Fin,
            (ConnectionPhase::Closing, _) => PacketKind::Last,
            _ => PacketKind::Data,
        };
        self.packet(at, kind);
    }

    fn packet(&mut self, at: usize, kind: PacketKind) -> PacketFate {
        if kind == PacketKind::Syn {
            return self.syn(at);
        }
        let requests: Vec<_> = self.connections[at].requests.iter().copied().collect();
        // A lot is drawn of at least one; without requests the client has chosen its replica
        // already.
        let drawn = self.lots.draw(requests.len().max(1));
        let connection = &mut self.connections[at];
        // The first packet after the SYN decides which of the replicas that answered it the client
        // uses.
        let answered = *connection.answered.get_or_insert_with(|| requests[drawn]);
        if connection.phase == ConnectionPhase::Opening {
            connection.phase = ConnectionPhase::Answered;
        }
        // A closed session has no owner.
        let owner = Some(answered).filter(|_| connection.phase != ConnectionPhase::Closed);
        let place = (connection.service, &connection.az, connection.bucket);
        let visits = self.tier.walk(place, false, &|here| Some(here) == owner);
        let fate = fate(&visits, answered);
        assert!(
            // The kernel resets packets of a closed session; for any other session a reset is a
            // failure.
            fate != PacketFate::Reset || connection.phase == ConnectionPhase::Closed,
            "{kind:?} of a session of {answered:?} is reset: {visits:?}"
        );
        if fate == PacketFate::Found {
            connection.phase = match (connection.phase, kind) {
                // A FIN comes first: as any other packet it would establish an answered connection.
                (ConnectionPhase::Answered | ConnectionPhase::Established, PacketKind::Fin) => {
                    ConnectionPhase::Closing
                }
                (ConnectionPhase::Answered, _) => ConnectionPhase::Established,
                (ConnectionPhase::Closing, PacketKind::Last) => ConnectionPhase::Closed,
                // Other packets, and those of a closed session, change nothing about the
                // connection.
                (phase, _) => phase,
            };
        }
        if connection.phase == ConnectionPhase::Closed && !connection.requests.is_empty() {
            // A client that has closed its connection repeats no SYN.
            let ended = std::mem::take(&mut connection.requests);
            let (service, az, bucket) =
                (connection.service, connection.az.clone(), connection.bucket);
            ended
                .into_iter()
                .for_each(|replica| self.forget(&(service, az.clone(), bucket, replica)));
        }
        self.note_sent(at, kind, visits);
        fate
    }

    /// Sends a SYN: the first, a repeated one, or a late copy. A replica that already has a request
    /// of the connection creates no second one.
    fn syn(&mut self, at: usize) -> PacketFate {
        let connection = &mut self.connections[at];
        let visits = self
            .tier
            .begin(connection.service, &connection.az, connection.bucket);
        let taker = visits
            .last()
            .filter(|visit| visit.verdict == PacketVerdict::Keep)
            .map(|visit| visit.here);
        if let Some(taker) = taker
            && connection.requests.insert(taker)
        {
            self.tier.sessions.push((
                connection.service,
                connection.az.clone(),
                connection.bucket,
                taker,
            ));
        }
        self.note_sent(at, PacketKind::Syn, visits);
        if taker.is_some() {
            PacketFate::Found
        } else {
            PacketFate::Again
        }
    }

    fn forget(&mut self, session: &super::SimSession) {
        if let Some(at) = self.tier.sessions.iter().position(|held| held == session) {
            self.tier.sessions.swap_remove(at);
        }
    }

    fn note_sent(&mut self, connection: usize, kind: PacketKind, visits: Vec<PacketVisit>) {
        let SimConnection { answered, az, .. } = &self.connections[connection];
        if !visits.is_empty() {
            self.steps.push(HistoryStep::Packet(SentPacket {
                connection,
                kind,
                answered: *answered,
                az: az.clone(),
                visits,
            }));
        }
    }

    /// Delivers all late messages, repeats lost packets, and sends one more packet on each live
    /// connection.
    fn end(mut self) -> History {
        // A joining replica that has everything becomes active, as the controller would have it.
        for replica in self
            .tier
            .replicas
            .values_mut()
            .filter(|replica| replica.state == ReplicaState::Joining)
        {
            replica.state = ReplicaState::Active;
        }
        self.tier.deliver_all();
        self.record_published();
        let mut established = BTreeMap::new();
        for at in 0..self.connections.len() {
            let phase = self.connections[at].phase;
            match phase {
                // The service has left the AZ, so the client has no connection.
                ConnectionPhase::Opening
                    if self.connections[at].requests.is_empty()
                        && self.packet(at, PacketKind::Syn) != PacketFate::Found =>
                {
                    continue;
                }
                ConnectionPhase::Closing => assert_eq!(
                    self.packet(at, PacketKind::Last),
                    PacketFate::Found,
                    "the end of connection {at}"
                ),
                // The kernel may reset this packet; `packet` checks what must not happen to it.
                ConnectionPhase::Closed => _ = self.packet(at, PacketKind::Data),
                // These connections are live; the packet below checks them.
                _ => {}
            }
            if self.connections[at].phase != ConnectionPhase::Closed {
                assert_eq!(
                    self.packet(at, PacketKind::Data),
                    PacketFate::Found,
                    "the last packet of connection {at}"
                );
                established.extend(self.connections[at].answered.map(|owner| (at, owner)));
            }
        }
        History {
            steps: self.steps,
            established,
        }
    }
}
