//! Order in which gateways are tried: those in the same AZ first, those that failed recently last.
//! Of two random replicas, the one with fewer streams comes first.
//!
//! [`decide_order`] is pure. [`GatewayHealthTable`] records, per worker, what happened to each
//! address.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_hbone::{HboneError, Steering};
use canal_model::ids::{AzName, ServiceId};
use canal_model::program::{GatewayAddress, GatewayReplica};
use canal_runtime::backoff::Backoff;
use canal_tls::TlsError;
use canal_wire::hbone::HBONE_PORT;
use rand::Rng;
use tokio::time::Instant;

use crate::pod::LocalPod;

/// Gateways tried for one connection, at most. A gateway makes as many attempts at endpoints. With
/// 600 ms each but for the last, whose time ends with the response to CONNECT. A failure of three
/// gateways at once is no failure of one machine.
pub const ATTEMPTS_MAX: usize = 3;
/// Maximum time of an attempt on a dead peer while another one could be tried. Traffic must recover
/// within a second of a machine's death. That second contains this timeout, a connection to the
/// next gateway, and the request itself on a busy machine. A peer that answers PINGs is not dead:
/// it may be dialing the application, which another attempt would reach a second time.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(600);
/// Shortest and longest time for which a gateway that failed is ejected, which means tried last.
/// The first is short, because one failure may be a restart; the longest is how late a repaired
/// gateway is used first again. Nobody measured them.
pub const EJECTION_TIME: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Time limits of attempts to reach gateways. Tests use longer ones.
#[derive(Debug, Clone, Copy)]
pub struct AttemptTimeouts {
    /// Maximum time of one attempt, as [`ATTEMPT_TIMEOUT`] explains.
    pub attempt: Duration,
    /// Shortest and longest time for which a failed gateway is ejected, as [`EJECTION_TIME`]
    /// explains.
    pub ejection: (Duration, Duration),
}

impl Default for AttemptTimeouts {
    fn default() -> Self {
        Self {
            attempt: ATTEMPT_TIMEOUT,
            ejection: EJECTION_TIME,
        }
    }
}

/// A gateway endpoint for tunnels: a gateway replica, or a service's gateway address in one AZ.
/// Behind a gateway address is the whole tier of that AZ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayEndpoint {
    /// Name in metrics: the replica's, or that of the AZ, because there may be thousands of
    /// services.
    pub label: String,
    pub az: AzName,
    /// Addresses of the endpoint; a service's gateway has at most one of each IP family.
    pub addresses: Vec<IpAddr>,
    pub kind: GatewayEndpointKind,
    /// The service that owns the gateway address.
    pub service: Option<ServiceId>,
}

/// Kind of a gateway endpoint, and its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatewayEndpointKind {
    Replica {
        /// True if the replica accepts no new work.
        draining: bool,
    },
    Address {
        /// False: the controller knows no replica in this AZ that would answer.
        open: bool,
    },
}

impl GatewayEndpoint {
    /// Creates the endpoint of a gateway replica that the tenant reaches at an address of its own.
    pub fn replica(g: &GatewayReplica) -> Self {
        let kind = GatewayEndpointKind::Replica {
            draining: g.draining,
        };
        Self {
            label: g.replica.to_string(),
            az: g.az.clone(),
            addresses: g.addresses.clone(),
            kind,
            service: None,
        }
    }

    /// Creates the endpoint of a service's gateway address.
    pub fn address(a: &GatewayAddress) -> Self {
        let kind = GatewayEndpointKind::Address { open: a.open };
        Self {
            label: a.az.to_string(),
            az: a.az.clone(),
            addresses: a.addresses.clone(),
            kind,
            service: Some(a.id),
        }
    }
}

/// Returns what steers the pod's tunnels on the cloud tier to buckets of their own; `None`: the
/// candidate is not a gateway address.
pub fn steering(candidate: &GatewayCandidate, pod: &LocalPod) -> Option<Steering> {
    let is_v4 = candidate.address.is_ipv4();
    let source = pod.ips.iter().copied().find(|ip| ip.is_ipv4() == is_v4)?;
    Some(Steering {
        source,
        service: candidate.entrance.service?,
    })
}

/// One address of one gateway endpoint, with the state that decides its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayCandidate {
    pub entrance: Arc<GatewayEndpoint>,
    pub address: SocketAddr,
    /// Streams that this worker has open to the address.
    pub streams: usize,
    /// True if the address failed recently.
    pub avoided: bool,
}

/// Returns the candidates in the order in which they are tried. Draining replicas are left out.
/// Addresses that failed recently come last, and before them those that are closed, because trying
/// them is still better than refusing. Gateway addresses of other AZs keep the given order, which
/// is the same at all nodes; replicas are drawn.
pub fn decide_order(
    mut all: Vec<GatewayCandidate>,
    az: &AzName,
    rng: &mut impl Rng,
) -> Vec<GatewayCandidate> {
    all.retain(|c| c.entrance.kind != GatewayEndpointKind::Replica { draining: true });
    let mut groups: [Vec<GatewayCandidate>; 8] = Default::default();
    for c in all {
        let (far, closed) = (
            c.entrance.az != *az,
            c.entrance.kind == GatewayEndpointKind::Address { open: false },
        );
        // In descending weight: failed recently, closed, in another AZ.
        groups[usize::from(c.avoided) * 4 + usize::from(closed) * 2 + usize::from(far)].push(c);
    }
    let is_replica =
        |c: &GatewayCandidate| matches!(c.entrance.kind, GatewayEndpointKind::Replica { .. });
    groups
        .into_iter()
        .flat_map(|g| {
            if g.iter().all(is_replica) {
                by_two_choices(g, rng)
            } else {
                g
            }
        })
        .collect()
}

/// Draws two at a time and takes the one with fewer streams. The balance is near that of
/// least-loaded, but not all workers select the same one.
fn by_two_choices(mut from: Vec<GatewayCandidate>, rng: &mut impl Rng) -> Vec<GatewayCandidate> {
    let mut order = Vec::with_capacity(from.len());
    while from.len() > 1 {
        let a = rng.random_range(0..from.len());
        let b = (a + rng.random_range(1..from.len())) % from.len();
        let fewer = if from[b].streams < from[a].streams {
            b
        } else {
            a
        };
        order.push(from.swap_remove(fewer));
    }
    order.extend(from);
    order
}

/// Cause of a gateway's failure to open a tunnel, which decides the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureAttribution {
    /// The gateway failed: eject it and try the next.
    Gateway,
    /// The gateway is draining or full: try the next, and do not eject this one.
    Busy,
    /// This node or the destination failed: another gateway would give the same result.
    Other,
}

/// Attributes the failure of a tunnel to its cause.
pub fn attribute_failure(e: &HboneError) -> FailureAttribution {
    match e {
        HboneError::Tls { source, .. } if matches!(**source, TlsError::NoCertificate(_)) => {
            FailureAttribution::Other
        }
        HboneError::Reset { reason, .. } if *reason == h2::Reason::REFUSED_STREAM => {
            FailureAttribution::Busy
        }
        HboneError::Connect(_)
        | HboneError::Tls { .. }
        | HboneError::RefusedByPeer { .. }
        | HboneError::Http2 { .. }
        | HboneError::Timeout { .. }
        | HboneError::Reset { .. } => FailureAttribution::Gateway,
        HboneError::Refused { .. } | HboneError::Request(_) | HboneError::Server(_) => {
            FailureAttribution::Other
        }
    }
}

#[derive(Debug)]
struct GatewayHealth {
    streams: Rc<()>,
    avoid_until: Option<Instant>,
    backoff: Backoff,
}

impl GatewayHealth {
    fn new(timeouts: AttemptTimeouts) -> Self {
        let (first, longest) = timeouts.ejection;
        Self {
            streams: Rc::default(),
            avoid_until: None,
            backoff: Backoff::new(first, longest),
        }
    }
}

/// Health of the addresses that one worker has tried.
#[derive(Debug, Default)]
pub struct GatewayHealthTable {
    timeouts: AttemptTimeouts,
    memory: RefCell<HashMap<SocketAddr, GatewayHealth>>,
}

/// Counts one stream to an address until it is dropped.
#[derive(Debug)]
pub struct GatewayStreamGuard {
    _one: Rc<()>,
}

impl GatewayHealthTable {
    /// Creates a table that knows no gateways.
    pub fn new(timeouts: AttemptTimeouts) -> Self {
        Self {
            timeouts,
            memory: RefCell::default(),
        }
    }

    /// Returns one address of each gateway endpoint that `pod` can reach, with its recorded health.
    pub fn candidates(
        &self,
        entrances: &[Arc<GatewayEndpoint>],
        pod: &LocalPod,
        now: Instant,
    ) -> Vec<GatewayCandidate> {
        let memory = self.memory.borrow();
        let reachable =
            |e: &Arc<GatewayEndpoint>| e.addresses.iter().copied().find(|a| pod.has_family_of(*a));
        entrances
            .iter()
            .filter_map(|e| Some((e, SocketAddr::new(reachable(e)?, HBONE_PORT))))
            .map(|(e, address)| {
                let m = memory.get(&address);
                GatewayCandidate {
                    entrance: e.clone(),
                    address,
                    streams: m.map_or(0, |m| Rc::strong_count(&m.streams) - 1),
                    avoided: m
                        .and_then(|m| m.avoid_until)
                        .is_some_and(|until| now < until),
                }
            })
            .collect()
    }

    /// Returns the number of streams open to the address, and whether it failed recently.
    pub fn state_of(&self, address: SocketAddr, now: Instant) -> (usize, bool) {
        let memory = self.memory.borrow();
        let Some(m) = memory.get(&address) else {
            return (0, false);
        };
        (
            Rc::strong_count(&m.streams) - 1,
            m.avoid_until.is_some_and(|until| now < until),
        )
    }

    /// Records a failure: ejects the address for a while, longer each time.
    pub fn failed(&self, address: SocketAddr, now: Instant) {
        let mut memory = self.memory.borrow_mut();
        let m = memory
            .entry(address)
            .or_insert_with(|| GatewayHealth::new(self.timeouts));
        // All connections that waited for the address fail at once, so they count as one failure.
        if m.avoid_until.is_none_or(|until| now >= until) {
            m.avoid_until = Some(now + m.backoff.next_wait());
        }
    }

    /// Records a success: ends the ejection, and counts one more stream until the guard is dropped.
    pub fn answered(&self, address: SocketAddr) -> GatewayStreamGuard {
        let mut memory = self.memory.borrow_mut();
        let m = memory
            .entry(address)
            .or_insert_with(|| GatewayHealth::new(self.timeouts));
        m.avoid_until = None;
        m.backoff.reset();
        GatewayStreamGuard {
            _one: m.streams.clone(),
        }
    }

    /// Forgets addresses that no longer exist and have no stream, so that the table follows the
    /// fleet.
    pub fn keep_only(&self, known: impl Fn(SocketAddr) -> bool) {
        self.memory
            .borrow_mut()
            .retain(|a, m| known(*a) || Rc::strong_count(&m.streams) > 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn entrance(
        label: &str,
        az: &str,
        address: &str,
        kind: GatewayEndpointKind,
    ) -> Arc<GatewayEndpoint> {
        let addresses = address.split(',').map(|a| a.parse().unwrap()).collect();
        Arc::new(GatewayEndpoint {
            label: label.into(),
            az: az.parse().unwrap(),
            addresses,
            kind,
            service: None,
        })
    }

    fn gateway(name: &str, az: &str, address: &str, draining: bool) -> Arc<GatewayEndpoint> {
        entrance(name, az, address, GatewayEndpointKind::Replica { draining })
    }

    fn pod(ips: &str) -> LocalPod {
        let text = format!(
            r#"{{"uid":"alpha/b/c","namespace":"b","name":"c","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":[{ips}]}}"#
        );
        LocalPod::parse("f", text.as_bytes()).unwrap()
    }

    fn names(order: &[GatewayCandidate]) -> String {
        order
            .iter()
            .map(|c| c.entrance.label.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn the_order_is_own_az_then_others_then_failed() {
        let az = "az1".parse().unwrap();
        let all = [
            gateway("near", "az1", "10.0.0.1", false),
            gateway("far", "az2", "10.0.0.2", false),
            gateway("leaving", "az1", "10.0.0.3", true),
        ];
        let (memory, pod) = (GatewayHealthTable::default(), pod("\"10.0.9.9\""));
        let order = |now: Instant| {
            let mut rng = rand::rngs::StdRng::seed_from_u64(1);
            names(&decide_order(
                memory.candidates(&all, &pod, now),
                &az,
                &mut rng,
            ))
        };
        let near = "10.0.0.1:15008".parse().unwrap();
        let start = Instant::now();
        assert_eq!(order(start), "near far");
        memory.failed(near, start);
        assert_eq!(order(start), "far near");
        let later = start + EJECTION_TIME.0;
        assert_eq!(order(later), "near far", "forgiven with time");
        memory.failed(near, later);
        assert_eq!(
            order(later + EJECTION_TIME.0 - Duration::from_millis(1)),
            "far near",
            "the second time takes longer"
        );
        drop(memory.answered(near));
        assert_eq!(order(later), "near far", "forgiven by an answer");
    }

    #[test]
    fn gateway_order_is_own_az_then_open_then_closed_then_failed() {
        let az = "az2".parse().unwrap();
        // Sorted by AZ, as in a snapshot.
        let all = |closed: &str| -> Vec<Arc<GatewayEndpoint>> {
            let open = |az: &str| GatewayEndpointKind::Address {
                open: !closed.contains(az),
            };
            (1..=4)
                .map(|n| format!("az{n}"))
                .map(|az| entrance(&az, &az, &format!("10.9.{}.1", &az[2..]), open(&az)))
                .collect()
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
            let (memory, pod, now) = (
                GatewayHealthTable::default(),
                pod("\"10.0.9.9\""),
                Instant::now(),
            );
            for az in failed.split_whitespace() {
                memory.failed(format!("10.9.{}.1:15008", &az[2..]).parse().unwrap(), now);
            }
            // Neither the number of streams nor the draw changes the order of gateway addresses.
            let _busy: Vec<_> = (0..3)
                .map(|_| memory.answered("10.9.3.1:15008".parse().unwrap()))
                .collect();
            // Different draws, because one could have the expected order by chance.
            for seed in 0..20 {
                let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
                let order = decide_order(memory.candidates(&all(closed), &pod, now), &az, &mut rng);
                assert_eq!(
                    names(&order),
                    want,
                    "closed: {closed:?}, failed: {failed:?}"
                );
            }
        }
    }

    #[test]
    fn of_two_random_gateways_the_one_with_fewer_streams_is_first() {
        let az = "az1".parse().unwrap();
        let all = [
            gateway("a", "az1", "10.0.0.1", false),
            gateway("b", "az1", "10.0.0.2", false),
        ];
        let (memory, pod) = (GatewayHealthTable::default(), pod("\"10.0.9.9\""));
        let holds: Vec<_> = (0..3)
            .map(|_| memory.answered("10.0.0.1:15008".parse().unwrap()))
            .collect();
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        for _ in 0..20 {
            assert_eq!(
                names(&decide_order(
                    memory.candidates(&all, &pod, Instant::now()),
                    &az,
                    &mut rng
                )),
                "b a"
            );
        }
        drop(holds);
        let firsts: std::collections::BTreeSet<String> = (0..50)
            .map(|_| {
                names(&decide_order(
                    memory.candidates(&all, &pod, Instant::now()),
                    &az,
                    &mut rng,
                ))
            })
            .collect();
        assert_eq!(firsts.len(), 2, "evenly loaded: either");
        memory.keep_only(|_| false);
        assert!(memory.memory.borrow().is_empty());
    }

    #[test]
    fn a_gateway_is_dialled_at_an_address_of_the_pods_family() {
        let both = [gateway("a", "az1", "10.0.0.1,fd00::1", false)];
        let memory = GatewayHealthTable::default();
        let (v4, v6) = ("\"10.0.9.9\"", "\"fd00::9\"");
        for (ips, want) in [
            (v4, Some("10.0.0.1:15008")),
            (v6, Some("[fd00::1]:15008")),
            ("\"10.0.9.9\",\"fd00::9\"", Some("10.0.0.1:15008")),
        ] {
            let got = memory
                .candidates(&both, &pod(ips), Instant::now())
                .first()
                .map(|c| c.address.to_string());
            assert_eq!(got.as_deref(), want, "{ips}");
        }
        let v4_only = [gateway("a", "az1", "10.0.0.1", false)];
        assert!(
            memory
                .candidates(&v4_only, &pod(v6), Instant::now())
                .is_empty()
        );
    }

    #[test]
    fn a_failure_is_attributed_to_the_gateway_only_where_it_caused_it() {
        let address = "10.0.0.1:15008".parse().unwrap();
        let refused = |status| HboneError::Refused {
            address,
            authority: String::new(),
            status,
        };
        let reset = |reason| HboneError::Reset {
            address,
            authority: String::new(),
            reason,
        };
        let tls = |e| HboneError::Tls {
            address,
            source: Arc::new(e),
        };
        let no_certificate = TlsError::NoCertificate("spiffe://a/ns/b/sa/c".parse().unwrap());
        for (e, cause) in [
            (refused(503), FailureAttribution::Other),
            (refused(401), FailureAttribution::Other),
            (reset(h2::Reason::REFUSED_STREAM), FailureAttribution::Busy),
            (
                reset(h2::Reason::INTERNAL_ERROR),
                FailureAttribution::Gateway,
            ),
            (tls(no_certificate), FailureAttribution::Other),
            (
                tls(TlsError::Timeout(Duration::ZERO)),
                FailureAttribution::Gateway,
            ),
            (
                HboneError::Http2 {
                    address,
                    why: String::new(),
                },
                FailureAttribution::Gateway,
            ),
            (
                HboneError::RefusedByPeer {
                    address,
                    why: String::new(),
                },
                FailureAttribution::Gateway,
            ),
            (
                HboneError::Request(String::new()),
                FailureAttribution::Other,
            ),
        ] {
            assert_eq!(attribute_failure(&e), cause, "{e}");
        }
    }
}
