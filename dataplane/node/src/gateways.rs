//! Which gateway to ask, and in what order: same AZ first, of replicas two drawn at random and the one with fewer streams before the
//! other, those that failed lately last. The order is a pure function; what happened to each address is remembered here per worker.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_kit::backoff::Backoff;
use canal_kit::hbone::HboneError;
use canal_kit::tls::TlsError;
use canal_model::ids::AzName;
use canal_model::program::{Gateway, GatewayAddress};
use canal_wire::hbone::HBONE_PORT;
use rand::Rng;
use tokio::time::Instant;

use crate::pod::Pod;

/// Gateways asked for one connection at most.
pub const ATTEMPTS_MAX: usize = 3;
/// How long a gateway may take while another could be asked. A dead machine answers nothing at all, and traffic must be whole again
/// within a second of its death: this wait, a connection to the next, and the request itself on a machine that is busy.
pub const ATTEMPT_PATIENCE: Duration = Duration::from_millis(600);
/// A gateway that failed is asked last for so long: first time, at most.
pub const AVOID: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Where tunnels may be opened: a gateway replica, or a service's gateway address in one AZ, behind which is the whole tier of that AZ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entrance {
    /// In metrics: the replica's name, or the AZ's; there may be thousands of services.
    pub label: String,
    pub az: AzName,
    /// At most one of each family where it is a gateway address.
    pub addresses: Vec<IpAddr>,
    pub kind: EntranceKind,
}

/// What an entrance is, and how it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntranceKind {
    Replica {
        /// It takes nothing new.
        draining: bool,
    },
    Address {
        /// False: the controller knows of nobody in this AZ who would answer.
        open: bool,
    },
}

impl Entrance {
    /// A gateway replica that the tenant reaches at an address of its own.
    pub fn replica(g: &Gateway) -> Self {
        let kind = EntranceKind::Replica { draining: g.draining };
        Self { label: g.replica.to_string(), az: g.az.clone(), addresses: g.addresses.clone(), kind }
    }

    /// A service's gateway address.
    pub fn address(a: &GatewayAddress) -> Self {
        Self { label: a.az.to_string(), az: a.az.clone(), addresses: a.addresses.clone(), kind: EntranceKind::Address { open: a.open } }
    }
}

/// One address of one entrance, as the order weighs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub entrance: Arc<Entrance>,
    pub address: SocketAddr,
    /// Streams this worker has open to it.
    pub streams: usize,
    /// It failed lately.
    pub avoided: bool,
}

/// The candidates in the order to ask them. A draining replica is not asked; what failed lately is asked after all others, and before
/// that what is said to be closed, because asking is still better than refusing. Gateway addresses of other AZs are asked in the order
/// given, the same at all nodes; replicas are drawn.
pub fn decide_order(mut all: Vec<Candidate>, az: &AzName, rng: &mut impl Rng) -> Vec<Candidate> {
    all.retain(|c| c.entrance.kind != EntranceKind::Replica { draining: true });
    let mut groups: [Vec<Candidate>; 8] = Default::default();
    for c in all {
        let (far, closed) = (c.entrance.az != *az, c.entrance.kind == EntranceKind::Address { open: false });
        groups[usize::from(c.avoided) * 4 + usize::from(closed) * 2 + usize::from(far)].push(c);
    }
    let is_replica = |c: &Candidate| matches!(c.entrance.kind, EntranceKind::Replica { .. });
    groups.into_iter().flat_map(|g| if g.iter().all(is_replica) { by_two_choices(g, rng) } else { g }).collect()
}

/// Draws two at a time and takes the one with fewer streams: near the balance of "least", without every worker running to the same one.
fn by_two_choices(mut from: Vec<Candidate>, rng: &mut impl Rng) -> Vec<Candidate> {
    let mut order = Vec::with_capacity(from.len());
    while from.len() > 1 {
        let a = rng.random_range(0..from.len());
        let b = (a + rng.random_range(1..from.len())) % from.len();
        let fewer = if from[b].streams < from[a].streams { b } else { a };
        order.push(from.swap_remove(fewer));
    }
    order.extend(from);
    order
}

/// What a failure says about the gateway that was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// It is the gateway's: avoid it and ask the next.
    Gateway,
    /// It closes or is full: ask the next, bear no grudge.
    Busy,
    /// It is ours, or the destination's: the next would say the same.
    Nobody,
}

/// Reads a tunnel's failure.
pub fn decide_blame(e: &HboneError) -> Blame {
    match e {
        HboneError::Tls { source, .. } if matches!(**source, TlsError::NoCertificate(_)) => Blame::Nobody,
        HboneError::Reset { reason, .. } if *reason == h2::Reason::REFUSED_STREAM => Blame::Busy,
        HboneError::Connect(_)
        | HboneError::Tls { .. }
        | HboneError::RefusedByPeer { .. }
        | HboneError::Http2 { .. }
        | HboneError::Timeout { .. }
        | HboneError::Reset { .. } => Blame::Gateway,
        HboneError::Refused { .. } | HboneError::Request(_) | HboneError::Server(_) => Blame::Nobody,
    }
}

#[derive(Debug)]
struct Memory {
    streams: Rc<()>,
    avoid_until: Option<Instant>,
    backoff: Backoff,
}

impl Memory {
    fn new() -> Self {
        Self { streams: Rc::default(), avoid_until: None, backoff: Backoff::new(AVOID.0, AVOID.1) }
    }
}

/// One worker's memory of what it asked, by address.
#[derive(Debug, Default)]
pub struct Gateways {
    memory: RefCell<HashMap<SocketAddr, Memory>>,
}

/// A stream to a gateway that counts until dropped.
#[derive(Debug)]
pub struct StreamHold {
    _one: Rc<()>,
}

impl Gateways {
    /// The addresses of `entrances` that `pod` can reach, one of each entrance, with what is remembered of it.
    pub fn candidates(&self, entrances: &[Arc<Entrance>], pod: &Pod, now: Instant) -> Vec<Candidate> {
        let memory = self.memory.borrow();
        let reachable = |e: &Arc<Entrance>| e.addresses.iter().copied().find(|a| pod.speaks(*a));
        entrances
            .iter()
            .filter_map(|e| Some((e, SocketAddr::new(reachable(e)?, HBONE_PORT))))
            .map(|(e, address)| {
                let m = memory.get(&address);
                Candidate {
                    entrance: e.clone(),
                    address,
                    streams: m.map_or(0, |m| Rc::strong_count(&m.streams) - 1),
                    avoided: m.and_then(|m| m.avoid_until).is_some_and(|until| now < until),
                }
            })
            .collect()
    }

    /// It failed: avoid it for a while, longer each time.
    pub fn failed(&self, address: SocketAddr, now: Instant) {
        let mut memory = self.memory.borrow_mut();
        let m = memory.entry(address).or_insert_with(Memory::new);
        // One failure hits all connections that waited for it: it counts once.
        if m.avoid_until.is_none_or(|until| now >= until) {
            m.avoid_until = Some(now + m.backoff.next_wait());
        }
    }

    /// It answered: all is forgiven, and one more stream is open to it until the hold is dropped.
    pub fn answered(&self, address: SocketAddr) -> StreamHold {
        let mut memory = self.memory.borrow_mut();
        let m = memory.entry(address).or_insert_with(Memory::new);
        m.avoid_until = None;
        m.backoff.reset();
        StreamHold { _one: m.streams.clone() }
    }

    /// Forgets addresses that are no more, so that memory follows the fleet.
    pub fn keep_only(&self, known: impl Fn(SocketAddr) -> bool) {
        self.memory.borrow_mut().retain(|a, m| known(*a) || Rc::strong_count(&m.streams) > 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn entrance(label: &str, az: &str, address: &str, kind: EntranceKind) -> Arc<Entrance> {
        let addresses = address.split(',').map(|a| a.parse().unwrap()).collect();
        Arc::new(Entrance { label: label.into(), az: az.parse().unwrap(), addresses, kind })
    }

    fn gateway(name: &str, az: &str, address: &str, draining: bool) -> Arc<Entrance> {
        entrance(name, az, address, EntranceKind::Replica { draining })
    }

    fn pod(ips: &str) -> Pod {
        let text =
            format!(r#"{{"uid":"alpha/b/c","namespace":"b","name":"c","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":[{ips}]}}"#);
        Pod::parse("f", text.as_bytes()).unwrap()
    }

    fn names(order: &[Candidate]) -> String {
        order.iter().map(|c| c.entrance.label.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_order_is_own_az_then_others_and_what_failed_comes_last() {
        let az = "az1".parse().unwrap();
        let all = [
            gateway("near", "az1", "10.0.0.1", false),
            gateway("far", "az2", "10.0.0.2", false),
            gateway("leaving", "az1", "10.0.0.3", true),
        ];
        let (memory, pod) = (Gateways::default(), pod("\"10.0.9.9\""));
        let order = |now: Instant| {
            let mut rng = rand::rngs::StdRng::seed_from_u64(1);
            names(&decide_order(memory.candidates(&all, &pod, now), &az, &mut rng))
        };
        let near = "10.0.0.1:15008".parse().unwrap();
        let start = Instant::now();
        assert_eq!(order(start), "near far");
        memory.failed(near, start);
        assert_eq!(order(start), "far near");
        let later = start + AVOID.0;
        assert_eq!(order(later), "near far", "forgiven with time");
        memory.failed(near, later);
        assert_eq!(order(later + AVOID.0 - Duration::from_millis(1)), "far near", "the second time takes longer");
        drop(memory.answered(near));
        assert_eq!(order(later), "near far", "forgiven by an answer");
    }

    #[test]
    fn gateway_addresses_are_asked_own_az_first_then_open_then_closed_and_what_failed_last() {
        let az = "az2".parse().unwrap();
        // As the view has them: by AZ.
        let all = |closed: &str| -> Vec<Arc<Entrance>> {
            let open = |az: &str| EntranceKind::Address { open: !closed.contains(az) };
            (1..=4).map(|n| format!("az{n}")).map(|az| entrance(&az, &az, &format!("10.9.{}.1", &az[2..]), open(&az))).collect()
        };
        for (closed, failed, want) in [
            ("", "", "az2 az1 az3 az4"),
            ("az2", "", "az1 az3 az4 az2"),
            ("az2 az1", "", "az3 az4 az2 az1"),
            ("az1 az2 az3 az4", "", "az2 az1 az3 az4"),
            ("", "az2", "az1 az3 az4 az2"),
            ("az3", "az1 az2", "az4 az3 az2 az1"),
            ("az2", "az1 az2", "az3 az4 az1 az2"),
        ] {
            let (memory, pod, now) = (Gateways::default(), pod("\"10.0.9.9\""), Instant::now());
            for az in failed.split_whitespace() {
                memory.failed(format!("10.9.{}.1:15008", &az[2..]).parse().unwrap(), now);
            }
            // However busy they are, and whatever is drawn.
            let _busy: Vec<_> = (0..3).map(|_| memory.answered("10.9.3.1:15008".parse().unwrap())).collect();
            for seed in 0..20 {
                let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
                let order = decide_order(memory.candidates(&all(closed), &pod, now), &az, &mut rng);
                assert_eq!(names(&order), want, "closed: {closed:?}, failed: {failed:?}");
            }
        }
    }

    #[test]
    fn of_two_drawn_the_one_with_fewer_streams_is_asked_first() {
        let az = "az1".parse().unwrap();
        let all = [gateway("a", "az1", "10.0.0.1", false), gateway("b", "az1", "10.0.0.2", false)];
        let (memory, pod) = (Gateways::default(), pod("\"10.0.9.9\""));
        let holds: Vec<_> = (0..3).map(|_| memory.answered("10.0.0.1:15008".parse().unwrap())).collect();
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        for _ in 0..20 {
            assert_eq!(names(&decide_order(memory.candidates(&all, &pod, Instant::now()), &az, &mut rng)), "b a");
        }
        drop(holds);
        let firsts: std::collections::BTreeSet<String> =
            (0..50).map(|_| names(&decide_order(memory.candidates(&all, &pod, Instant::now()), &az, &mut rng))).collect();
        assert_eq!(firsts.len(), 2, "evenly loaded: either");
        memory.keep_only(|_| false);
        assert!(memory.memory.borrow().is_empty());
    }

    #[test]
    fn a_gateway_is_dialled_at_an_address_of_the_pods_family() {
        let both = [gateway("a", "az1", "10.0.0.1,fd00::1", false)];
        let memory = Gateways::default();
        let (v4, v6) = ("\"10.0.9.9\"", "\"fd00::9\"");
        for (ips, want) in
            [(v4, Some("10.0.0.1:15008")), (v6, Some("[fd00::1]:15008")), ("\"10.0.9.9\",\"fd00::9\"", Some("10.0.0.1:15008"))]
        {
            let got = memory.candidates(&both, &pod(ips), Instant::now()).first().map(|c| c.address.to_string());
            assert_eq!(got.as_deref(), want, "{ips}");
        }
        let v4_only = [gateway("a", "az1", "10.0.0.1", false)];
        assert!(memory.candidates(&v4_only, &pod(v6), Instant::now()).is_empty());
    }

    #[test]
    fn blame_is_the_gateways_only_when_it_is() {
        let address = "10.0.0.1:15008".parse().unwrap();
        let refused = |status| HboneError::Refused { address, authority: String::new(), status };
        let reset = |reason| HboneError::Reset { address, authority: String::new(), reason };
        let tls = |e| HboneError::Tls { address, source: Arc::new(e) };
        let no_certificate = TlsError::NoCertificate("spiffe://a/ns/b/sa/c".parse().unwrap());
        for (e, blame) in [
            (refused(503), Blame::Nobody),
            (refused(401), Blame::Nobody),
            (reset(h2::Reason::REFUSED_STREAM), Blame::Busy),
            (reset(h2::Reason::INTERNAL_ERROR), Blame::Gateway),
            (tls(no_certificate), Blame::Nobody),
            (tls(TlsError::Timeout(Duration::ZERO)), Blame::Gateway),
            (HboneError::Http2 { address, why: String::new() }, Blame::Gateway),
            (HboneError::RefusedByPeer { address, why: String::new() }, Blame::Gateway),
            (HboneError::Request(String::new()), Blame::Nobody),
        ] {
            assert_eq!(decide_blame(&e), blame, "{e}");
        }
    }
}
