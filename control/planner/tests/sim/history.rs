//! Histories of the tier from seeds: what every replica was told and when, and each packet of some connections with what the rules say that
//! every replica on its way does. Fleet and plans change, tables and reports come late, SYNs are sent again. It sends nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::fleet::ReplicaState;
use canal_model::ids::{AzName, ReplicaNumber, ServiceId, Vni};
use canal_model::plan::PlannedTable;
use canal_model::program::BUCKETS;

use super::events::{AZS, Event, apply};
use super::rules::Verdict;
use super::{Fate, Tier, Visit, az, fate};

/// So many replicas live at a time at most: whoever runs a history needs a host for each.
pub(crate) const REPLICAS_MAX: usize = 9;
/// There from the first; and so many that come later, so that replicas have no tables of them yet.
const SERVICES: u32 = 3;
const MORE_SERVICES: u32 = 3;
const STEPS: usize = 130;
const CONNECTIONS_MAX: usize = 12;

/// Which packet of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Syn,
    /// The acknowledgement of the SYN-ACK that the connection goes on with.
    Acknowledgement,
    Data,
    /// The client has no more to say.
    Fin,
    /// The client has heard that the service has no more to say either.
    Last,
}

/// One packet.
#[derive(Debug, Clone)]
pub(crate) struct Sent {
    pub(crate) connection: usize,
    pub(crate) kind: Kind,
    /// Whose SYN-ACK the client has taken; `None` before.
    pub(crate) answered: Option<ReplicaNumber>,
    pub(crate) az: AzName,
    /// Every replica that it comes to.
    pub(crate) visits: Vec<Visit>,
}

/// What one replica is told of services: the tables of its AZ.
pub(crate) type Tables = BTreeMap<ServiceId, (Vni, Arc<PlannedTable>)>;

/// What happens.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Join(ReplicaNumber, AzName),
    Leave(ReplicaNumber),
    Told(ReplicaNumber, Tables),
    Open { connection: usize, service: ServiceId, bucket: usize },
    Packet(Sent),
}

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct History {
    pub(crate) steps: Vec<Step>,
    /// Connections that are established at the end, and where.
    pub(crate) established: BTreeMap<usize, ReplicaNumber>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Opening,
    /// The client has taken a SYN-ACK.
    Answered,
    Established,
    /// The service has heard the client's FIN and has sent its own.
    Closing,
    Closed,
}

struct Connection {
    service: ServiceId,
    az: AzName,
    bucket: usize,
    requests: BTreeSet<ReplicaNumber>,
    answered: Option<ReplicaNumber>,
    stage: Stage,
}

/// SplitMix64 (Steele, Lea, Flood 2014): a history is its seed.
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
    tier: Tier,
    lots: Lots,
    connections: Vec<Connection>,
    steps: Vec<Step>,
    told: BTreeMap<ReplicaNumber, usize>,
}

/// The history of a seed.
pub(crate) fn record(seed: u64) -> History {
    let mut tier = Tier::new(&[("a1", 2), ("a2", 2), ("b1", 2)], SERVICES);
    tier.plan();
    tier.deliver_all();
    let mut recorder = Recorder { tier, lots: Lots(seed), connections: Vec::new(), steps: Vec::new(), told: BTreeMap::new() };
    recorder.note_told();
    for _ in 0..STEPS {
        if recorder.lots.draw(5) < 2 { recorder.change() } else { recorder.send() }
    }
    recorder.end()
}

impl Recorder {
    /// Something planned happens to the fleet, or something late arrives.
    fn change(&mut self) {
        let at = self.lots.draw(usize::MAX);
        let event = match self.lots.draw(40) {
            0..2 => Event::Join([0, 1, 3][at % 3]),
            2..4 => Event::Activate(at),
            4..7 => Event::Drain(at),
            7 => Event::Undrain(at),
            8 => Event::Demand(SERVICES + 1 + at as u32 % MORE_SERVICES),
            9..16 => Event::Plan,
            16..24 => Event::Deliver(at),
            24..28 => Event::DeliverEdge(at % AZS.len()),
            28..33 => Event::Look(at),
            33..37 => Event::Hear,
            _ => Event::HearEdge(at % AZS.len()),
        };
        apply(&mut self.tier, event, REPLICAS_MAX);
        self.note_told();
    }

    /// Notes which replicas are there now, and what they were told.
    fn note_told(&mut self) {
        let gone: Vec<_> = self.told.keys().filter(|replica| !self.tier.replicas.contains_key(replica)).copied().collect();
        for replica in gone {
            self.told.remove(&replica);
            self.steps.push(Step::Leave(replica));
        }
        for (replica, plan) in &self.tier.has {
            let az = &self.tier.replicas[replica].az;
            if !self.told.contains_key(replica) {
                self.steps.push(Step::Join(*replica, az.clone()));
            }
            if self.told.insert(*replica, *plan) == Some(*plan) {
                continue;
            }
            let services = self.tier.plans.get(*plan).into_iter().flat_map(|plan| &plan.services);
            let tables = services.filter_map(|(id, service)| Some((*id, (service.vni, service.tables.get(az)?.clone())))).collect();
            self.steps.push(Step::Told(*replica, tables));
        }
    }

    /// A client sends a packet, the next that it would send, or a SYN once more, or one that is late.
    fn send(&mut self) {
        if self.connections.is_empty() || (self.connections.len() < CONNECTIONS_MAX && self.lots.draw(6) == 0) {
            let drawn = self.lots.draw(self.tier.demands.services.len());
            let service = *self.tier.demands.services.keys().nth(drawn).unwrap();
            let bucket = self.lots.draw(BUCKETS);
            let az = az(AZS[self.lots.draw(2)]);
            self.steps.push(Step::Open { connection: self.connections.len(), service, bucket });
            let requests = BTreeSet::new();
            self.connections.push(Connection { service, az, bucket, requests, answered: None, stage: Stage::Opening });
        }
        let at = self.lots.draw(self.connections.len());
        let kind = match (self.connections[at].stage, self.lots.draw(8)) {
            (Stage::Opening, 0..3) if !self.connections[at].requests.is_empty() => Kind::Acknowledgement,
            (Stage::Opening, _) | (Stage::Answered | Stage::Established, 0) => Kind::Syn,
            (Stage::Answered, 1..4) => Kind::Acknowledgement,
            (Stage::Established, 1) => Kind::Fin,
            (Stage::Closing, _) => Kind::Last,
            _ => Kind::Data,
        };
        self.packet(at, kind);
    }

    fn packet(&mut self, at: usize, kind: Kind) -> Fate {
        if kind == Kind::Syn {
            return self.syn(at);
        }
        let requests: Vec<_> = self.connections[at].requests.iter().copied().collect();
        let drawn = self.lots.draw(requests.len().max(1));
        let connection = &mut self.connections[at];
        let answered = *connection.answered.get_or_insert_with(|| requests[drawn]);
        if connection.stage == Stage::Opening {
            connection.stage = Stage::Answered;
        }
        // Nobody owns what is closed.
        let owner = Some(answered).filter(|_| connection.stage != Stage::Closed);
        let place = (connection.service, &connection.az, connection.bucket);
        let visits = self.tier.walk(place, false, &|here| Some(here) == owner);
        let fate = fate(&visits, answered);
        assert!(fate != Fate::Reset || connection.stage == Stage::Closed, "{kind:?} of a session of {answered:?} is reset: {visits:?}");
        if fate == Fate::Found {
            connection.stage = match (connection.stage, kind) {
                (Stage::Answered | Stage::Established, Kind::Fin) => Stage::Closing,
                (Stage::Answered, _) => Stage::Established,
                (Stage::Closing, Kind::Last) => Stage::Closed,
                (stage, _) => stage,
            };
        }
        if connection.stage == Stage::Closed && !connection.requests.is_empty() {
            let ended = std::mem::take(&mut connection.requests);
            let (service, az, bucket) = (connection.service, connection.az.clone(), connection.bucket);
            ended.into_iter().for_each(|replica| self.forget(&(service, az.clone(), bucket, replica)));
        }
        self.note_sent(at, kind, visits);
        fate
    }

    /// A SYN: the first, one that is sent again, or a late copy. What a replica has of the connection already, it does not make anew.
    fn syn(&mut self, at: usize) -> Fate {
        let connection = &mut self.connections[at];
        let visits = self.tier.begin(connection.service, &connection.az, connection.bucket);
        let taker = visits.last().filter(|visit| visit.verdict == Verdict::Keep).map(|visit| visit.here);
        if let Some(taker) = taker
            && connection.requests.insert(taker)
        {
            self.tier.sessions.push((connection.service, connection.az.clone(), connection.bucket, taker));
        }
        self.note_sent(at, Kind::Syn, visits);
        if taker.is_some() { Fate::Found } else { Fate::Again }
    }

    fn forget(&mut self, session: &super::Session) {
        if let Some(at) = self.tier.sessions.iter().position(|held| held == session) {
            self.tier.sessions.swap_remove(at);
        }
    }

    fn note_sent(&mut self, connection: usize, kind: Kind, visits: Vec<Visit>) {
        let Connection { answered, az, .. } = &self.connections[connection];
        if !visits.is_empty() {
            self.steps.push(Step::Packet(Sent { connection, kind, answered: *answered, az: az.clone(), visits }));
        }
    }

    /// Everything that was late arrives; what was lost is sent again; each connection that lives says something more.
    fn end(mut self) -> History {
        for replica in self.tier.replicas.values_mut().filter(|replica| replica.state == ReplicaState::Joining) {
            replica.state = ReplicaState::Active;
        }
        self.tier.deliver_all();
        self.note_told();
        let mut established = BTreeMap::new();
        for at in 0..self.connections.len() {
            let stage = self.connections[at].stage;
            match stage {
                // A client whose AZ has no such service any more has no connection.
                Stage::Opening if self.connections[at].requests.is_empty() && self.packet(at, Kind::Syn) != Fate::Found => continue,
                Stage::Closing => assert_eq!(self.packet(at, Kind::Last), Fate::Found, "the end of connection {at}"),
                Stage::Closed => _ = self.packet(at, Kind::Data),
                _ => {}
            }
            if self.connections[at].stage != Stage::Closed {
                assert_eq!(self.packet(at, Kind::Data), Fate::Found, "the last word of connection {at}");
                established.extend(self.connections[at].answered.map(|owner| (at, owner)));
            }
        }
        History { steps: self.steps, established }
    }
}
