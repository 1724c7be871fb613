//! Direct ports: ready pods to which connections go without a gateway, and the order in which they
//! are tried. Without IO.
//!
//! The controller decides which ports are direct and which pods serve them. [`crate::outbound`]
//! opens the tunnels.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_hbone::{ConnectAuthority, HboneError};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_model::program::DirectEndpoint;
use canal_wire::hbone::{HBONE_PORT, STATUS_DENIED};
use rand::Rng;

use crate::pod::{LocalPod, workload_name};

/// Pods tried for one connection before a gateway is tried, at most. As many gateways may be tried
/// after them. Each may take 600 ms, so all of them have failed after 1.8 s.
pub const DIRECT_ATTEMPTS_MAX: usize = 3;

/// A ready pod of the tenant that accepts tunnels to a direct port.
#[derive(Debug, PartialEq, Eq)]
pub struct DirectPeer {
    pub addresses: Vec<IpAddr>,
    /// The one identity that the pod must prove.
    pub expected: Arc<[Identity]>,
}

/// The pods behind one direct port, and the authority under which they serve it.
#[derive(Debug, PartialEq, Eq)]
pub struct DirectPeers {
    /// A service's host and port, so that its policies apply; the address itself where a pod was
    /// dialed.
    pub authority: ConnectAuthority,
    pub peers: Vec<Arc<DirectPeer>>,
    pub common: CommonPeer,
}

/// Labels that all pods of a port have in common, for the records; empty where they differ.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CommonPeer {
    pub workload: String,
    pub namespace: String,
    pub principal: String,
    pub zone: String,
}

impl DirectPeer {
    /// Creates the peer that the resource describes.
    pub fn new(endpoint: &DirectEndpoint, trust_domain: &TrustDomain) -> Self {
        let identity = Identity {
            trust_domain: trust_domain.clone(),
            namespace: endpoint.namespace.clone(),
            service_account: endpoint.service_account.clone(),
        };
        Self {
            addresses: endpoint
                .addresses
                .iter()
                .map(IpAddr::to_canonical)
                .collect(),
            expected: Arc::new([identity]),
        }
    }

    /// Returns the HBONE address at which `pod` reaches the peer, if possible of the family that
    /// the application dialed.
    pub fn address(&self, pod: &LocalPod, dialled: IpAddr) -> Option<SocketAddr> {
        let reachable = || {
            self.addresses
                .iter()
                .copied()
                .filter(|ip| pod.has_family_of(*ip))
        };
        let same = reachable().find(|ip| ip.is_ipv4() == dialled.is_ipv4());
        same.or_else(|| reachable().next())
            .map(|ip| SocketAddr::new(ip, HBONE_PORT))
    }
}

impl DirectPeers {
    /// Creates the peers of a port from `of`, which is in any order and not empty.
    pub fn new(
        authority: ConnectAuthority,
        mut of: Vec<(&DirectEndpoint, Arc<DirectPeer>)>,
    ) -> Self {
        of.sort_by(|a, b| (&a.0.namespace, &a.0.name).cmp(&(&b.0.namespace, &b.0.name)));
        let common = CommonPeer::of(&of);
        Self {
            authority,
            peers: of.into_iter().map(|(_, peer)| peer).collect(),
            common,
        }
    }
}

impl CommonPeer {
    fn of(all: &[(&DirectEndpoint, Arc<DirectPeer>)]) -> Self {
        let common = |text: fn(&DirectEndpoint, &DirectPeer) -> String| {
            let mut texts = all.iter().map(|(endpoint, peer)| text(endpoint, peer));
            let first = texts.next().unwrap_or_default();
            if texts.all(|text| text == first) {
                first
            } else {
                String::new()
            }
        };
        Self {
            workload: common(|e, _| workload_name(e.name.as_str()).to_owned()),
            namespace: common(|e, _| e.namespace.to_string()),
            principal: common(|_, p| {
                p.expected
                    .first()
                    .map(ToString::to_string)
                    .unwrap_or_default()
            }),
            zone: common(|e, _| e.az.to_string()),
        }
    }
}

/// Selects the next of `count` peers that were not tried: of two random ones the one with fewer
/// streams, as gateways do. If neither is usable, the one with the fewest streams of all is
/// selected; one that failed recently only if there is no other. `streams` returns `None` for a
/// peer that cannot be reached.
pub fn decide_peer(
    count: usize,
    tried: &[usize],
    streams: impl Fn(usize) -> Option<usize>,
    is_avoided: impl Fn(usize) -> bool,
    rng: &mut impl Rng,
) -> Option<usize> {
    if count == 0 {
        return None;
    }
    let first = rng.random_range(0..count);
    let second = if count > 1 {
        (first + rng.random_range(1..count)) % count
    } else {
        first
    };
    let is_free = |at: &usize| !tried.contains(at) && streams(*at).is_some();
    let is_usable = |at: &usize| is_free(at) && !is_avoided(*at);
    let two = [first, second]
        .into_iter()
        .filter(is_usable)
        .min_by_key(|at| streams(*at));
    two.or_else(|| (0..count).filter(is_usable).min_by_key(|at| streams(*at)))
        .or_else(|| (0..count).filter(is_free).min_by_key(|at| streams(*at)))
}

/// Kind of a pod's failure to open a tunnel, which decides the next step. No kind has delivered any
/// byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectFailure {
    /// The pod's node refuses by policy, perhaps one that only a gateway can evaluate: a gateway is
    /// tried.
    Denied,
    /// The pod's node responds that it cannot serve the tunnel: the next pod is tried.
    Unavailable,
    /// The pod's node does not respond as it should: it is ejected for a while, and the next pod is
    /// tried.
    Unreachable,
    /// This node caused the failure: a gateway is tried.
    Own,
}

impl DirectFailure {
    /// Returns the label `cause` of `canal_node_direct_failures_total`.
    pub fn name(self) -> &'static str {
        match self {
            DirectFailure::Denied => "denied",
            DirectFailure::Unavailable => "unavailable",
            DirectFailure::Unreachable => "unreachable",
            DirectFailure::Own => "own",
        }
    }
}

/// Classifies the failure of a direct tunnel.
pub fn decide_direct_failure(e: &HboneError) -> DirectFailure {
    use canal_tls::TlsError;
    match e {
        HboneError::Tls { source, .. } if matches!(**source, TlsError::NoCertificate(_)) => {
            DirectFailure::Own
        }
        HboneError::Request(_) | HboneError::Server(_) => DirectFailure::Own,
        HboneError::Refused { status, .. } if *status == STATUS_DENIED => DirectFailure::Denied,
        HboneError::Refused { .. } => DirectFailure::Unavailable,
        HboneError::Reset { reason, .. } if *reason == h2::Reason::REFUSED_STREAM => {
            DirectFailure::Unavailable
        }
        HboneError::Connect(_)
        | HboneError::Tls { .. }
        | HboneError::RefusedByPeer { .. }
        | HboneError::Http2 { .. }
        | HboneError::Timeout { .. }
        | HboneError::Reset { .. } => DirectFailure::Unreachable,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::SeedableRng;

    use super::*;

    #[test]
    fn peer_with_fewer_streams_is_selected_and_failed_ones_last() {
        let pick = |tried: &[usize], busy: [Option<usize>; 3], avoided: &[usize]| {
            let mut rng = rand::rngs::StdRng::seed_from_u64(7);
            let all = (0..50).filter_map(|_| {
                decide_peer(
                    3,
                    tried,
                    |at| busy[at],
                    |at| avoided.contains(&at),
                    &mut rng,
                )
            });
            all.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
        };
        let even = [Some(0); 3];
        assert_eq!(pick(&[], even, &[]), [0, 1, 2]);
        assert_eq!(pick(&[0], even, &[]), [1, 2]);
        assert_eq!(pick(&[], [Some(9), Some(0), Some(9)], &[0, 2]), [1]);
        assert_eq!(
            pick(&[], [Some(1), Some(0), Some(9)], &[]),
            [0, 1],
            "the busiest of three is never the less busy of two"
        );
        assert_eq!(
            pick(&[1], [Some(0), Some(0), None], &[0]),
            [0],
            "one that failed is better than none"
        );
        assert_eq!(pick(&[0, 1, 2], even, &[]), [0; 0]);
        assert_eq!(pick(&[], [None; 3], &[]), [0; 0], "another address family");
        assert_eq!(
            decide_peer(0, &[], |_| Some(0), |_| false, &mut rand::rng()),
            None
        );
    }

    #[test]
    fn pod_is_dialled_in_the_family_that_the_application_chose_if_it_can_be() {
        let peer = |addresses: &[&str]| DirectPeer {
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            expected: Arc::new(["spiffe://a.example/ns/b/sa/c".parse().unwrap()]),
        };
        let pod = |ips: &str| {
            let text = format!(
                r#"{{"uid":"a/b/c","namespace":"b","name":"c","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":[{ips}]}}"#
            );
            LocalPod::parse("f", text.as_bytes()).unwrap()
        };
        let (dual, v4) = (pod(r#""10.0.0.9","fd00::9""#), pod(r#""10.0.0.9""#));
        let both = ["10.0.0.1", "fd00::1"];
        for (addresses, pod, dialled, want) in [
            (&both[..], &dual, "10.96.0.1", Some("10.0.0.1:15008")),
            (&both[..], &dual, "fd96::1", Some("[fd00::1]:15008")),
            (&both[..1], &dual, "fd96::1", Some("10.0.0.1:15008")),
            (&both[..], &v4, "fd96::1", Some("10.0.0.1:15008")),
            (&both[1..], &v4, "10.96.0.1", None),
        ] {
            let got = peer(addresses).address(pod, dialled.parse().unwrap());
            assert_eq!(
                got,
                want.map(|a| a.parse().unwrap()),
                "{addresses:?} {dialled}"
            );
        }
    }

    #[test]
    fn denial_goes_to_a_gateway_and_other_failures_to_the_next_pod() {
        let address = "10.0.0.1:15008".parse().unwrap();
        let refused = |status| HboneError::Refused {
            address,
            authority: String::new(),
            status,
        };
        for (e, want) in [
            (refused(401), DirectFailure::Denied),
            (refused(503), DirectFailure::Unavailable),
            (refused(400), DirectFailure::Unavailable),
            (
                HboneError::Http2 {
                    address,
                    why: String::new(),
                },
                DirectFailure::Unreachable,
            ),
            (HboneError::Request(String::new()), DirectFailure::Own),
        ] {
            assert_eq!(decide_direct_failure(&e), want, "{e}");
        }
    }
}
