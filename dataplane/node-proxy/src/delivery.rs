//! Source address of connections to applications: the client's, so that the application sees it. It
//! is never the pod's own, which applications may trust.
//!
//! `canal_offload::delivery` prepares the pod's namespace. [`crate::routing`] determines the
//! client.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use canal_net::sys::{self, DeliveryOptions, SysError};
use canal_offload::delivery::{Delivery, SUBSTITUTE_V6};
use canal_wire::hbone::DELIVERY_MARK;
use rand::Rng;
use tokio::net::TcpStream;

use crate::pod_context::PodContext;
use crate::refusal::NodeRefusal;

/// Substitute that applications see as their IPv4 client where the client's address cannot be used.
/// It is assigned to no interface, and differs from 127.0.0.1. Istio's sidecars deliver from the
/// same address.
const SUBSTITUTE_V4: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);
/// Linux's default range of ephemeral ports.
const PORTS: std::ops::RangeInclusive<u16> = 32_768..=60_999;
/// Ports that are tried besides the client's own. With nine tenths of them in use, four of five
/// connections still find one; a search of all would take CPU from all other connections.
pub(crate) const PORT_ATTEMPTS_MAX: usize = 16;
/// Lowest client port that is reused. Applications take a lower one for a sign of root, and a peer
/// that states one might not be root.
const UNPRIVILEGED_PORT_MIN: u16 = 1024;

/// Reason why an application was not reached.
#[derive(Debug)]
pub(crate) struct Undelivered {
    pub(crate) refusal: NodeRefusal,
    pub(crate) why: String,
}

/// State of a pod on which the source address depends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Circumstances<'a> {
    /// Addresses of the pod itself.
    pub(crate) own: &'a [IpAddr],
    pub(crate) delivery: &'a Delivery,
    /// True if plaintext into the pod is redirected to the proxy, unless it comes through loopback.
    pub(crate) is_guarded: bool,
}

/// Decides the source from which `target`, an address of the pod, is dialed. It is the address of
/// `client`. Without a client, or if its address is of the other family, it is the address of
/// `hop`, which dialed the pod. `None`: there is no address but the pod's own.
pub(crate) fn decide_source(
    client: Option<IpAddr>,
    hop: IpAddr,
    target: IpAddr,
    pod: &Circumstances<'_>,
) -> Option<DeliveryOptions> {
    let options = |source, is_foreign, on_loopback| DeliveryOptions {
        mark: DELIVERY_MARK,
        source,
        is_foreign,
        on_loopback,
    };
    let known = client
        .filter(|ip| is_usable(*ip, target))
        .or(Some(hop).filter(|ip| is_usable(*ip, target)));
    match known {
        // The pod is its own client: use the dialed one of its addresses, as the kernel would.
        Some(ip) if pod.own.contains(&ip) => Some(options(target, false, false)),
        Some(ip) if pod.delivery.is_transparent => Some(options(ip, true, pod.is_guarded)),
        // Without the routes, the guard would redirect the connection back to the proxy.
        _ if pod.is_guarded && !pod.delivery.has_routes => None,
        _ if target.is_ipv4() => Some(options(SUBSTITUTE_V4.into(), false, pod.is_guarded)),
        _ if pod.delivery.has_substitute_v6 || pod.delivery.is_transparent => {
            Some(options(SUBSTITUTE_V6.into(), true, pod.is_guarded))
        }
        _ => None,
    }
}

/// Returns whether a remote client can have the address, and whether it is of the target's family.
fn is_usable(ip: IpAddr, target: IpAddr) -> bool {
    ip.is_ipv4() == target.is_ipv4()
        && !ip.is_unspecified()
        && !ip.is_loopback()
        && !ip.is_multicast()
        && match ip {
            IpAddr::V4(v4) => !v4.is_broadcast() && v4.octets()[0] != 0,
            IpAddr::V6(v6) => !v6.is_unicast_link_local(),
        }
}

/// Returns the ports to try: first the client's own, if it is known and unprivileged, then random
/// ones.
fn ports(own: Option<u16>) -> impl Iterator<Item = u16> {
    let any = std::iter::repeat_with(|| rand::rng().random_range(PORTS)).take(PORT_ATTEMPTS_MAX);
    own.filter(|port| *port >= UNPRIVILEGED_PORT_MIN)
        .into_iter()
        .chain(any)
}

/// Connects to an application of the pod from the client's address, or from that of the hop that
/// dialed.
pub(crate) async fn dial(
    context: &PodContext,
    target: SocketAddr,
    client: Option<SocketAddr>,
    hop: IpAddr,
) -> Result<TcpStream, Undelivered> {
    // An IPv4 client may be stated as a mapped address.
    let client = client.map(|a| SocketAddr::new(a.ip().to_canonical(), a.port()));
    let options = {
        let pod = context.pod.load();
        // The hook follows the policies a moment later, so either counts.
        let is_guarded = context.policy.load().guards_plaintext() || context.plaintext.is_guarded();
        let circumstances = Circumstances {
            own: &pod.ips,
            delivery: &context.delivery,
            is_guarded,
        };
        decide_source(
            client.map(|a| a.ip()),
            hop.to_canonical(),
            target.ip(),
            &circumstances,
        )
    };
    let Some(options) = options else {
        let why = format!(
            "{target}: only the pod's own address can be used as the client's address: {}",
            context.delivery.missing
        );
        return Err(Undelivered {
            refusal: NodeRefusal::SourceUnavailable,
            why,
        });
    };
    // The client's port belongs to the client's address only.
    let own = client
        .filter(|a| a.ip() == options.source)
        .map(|a| a.port());
    sys::connect_from(&context.netns, target, &options, ports(own))
        .await
        .map_err(|e| {
            // Without a free port nothing is known of the application, which may be up.
            let refusal = if matches!(e, SysError::SourcePorts { .. }) {
                NodeRefusal::SourceUnavailable
            } else {
                NodeRefusal::ApplicationDown
            };
            Undelivered {
                refusal,
                why: e.to_string(),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    const V4: &str = "10.0.0.2";
    const V6: &str = "fd00::2";
    const GATEWAY: &str = "10.9.9.9";

    /// A case's name, its client, hop, target, means of delivery, whether the pod is guarded, and
    /// the source with its two marks.
    type SourceCase<'a> = (
        &'static str,
        Option<&'static str>,
        &'static str,
        &'static str,
        &'a Delivery,
        bool,
        Option<(&'static str, bool, bool)>,
    );

    /// Returns cases of clients that the pod may see as they are, where answers find their way.
    fn cases_of_clients(all: &Delivery) -> Vec<SourceCase<'_>> {
        // The source's two marks: it is not an address of the pod, and the connection goes over
        // loopback, where no guard redirects it.
        vec![
            (
                "a client",
                Some("10.0.0.7"),
                GATEWAY,
                V4,
                all,
                false,
                Some(("10.0.0.7", true, false)),
            ),
            (
                "guarded",
                Some("10.0.0.7"),
                GATEWAY,
                V4,
                all,
                true,
                Some(("10.0.0.7", true, true)),
            ),
            (
                "many clients",
                None,
                GATEWAY,
                V4,
                all,
                false,
                Some((GATEWAY, true, false)),
            ),
            (
                "the other family",
                Some("fd00::7"),
                GATEWAY,
                V4,
                all,
                false,
                Some((GATEWAY, true, false)),
            ),
            (
                "IPv6",
                Some("fd00::7"),
                "fd00::9",
                V6,
                all,
                false,
                Some(("fd00::7", true, false)),
            ),
            (
                "itself",
                Some(V4),
                GATEWAY,
                V4,
                all,
                true,
                Some((V4, false, false)),
            ),
            (
                "nowhere",
                Some("0.0.0.0"),
                GATEWAY,
                V4,
                all,
                false,
                Some((GATEWAY, true, false)),
            ),
        ]
    }

    /// Returns cases in which a substitute takes the place of the client, or in which there is
    /// none.
    fn cases_of_substitutes<'a>(
        all: &'a Delivery,
        routes: &'a Delivery,
        none: &'a Delivery,
    ) -> Vec<SourceCase<'a>> {
        // The marks are those of `cases_of_clients`. The substitute of IPv4 is a loopback address,
        // so it is not foreign; that of IPv6 is.
        vec![
            (
                "loopback",
                Some("127.0.0.1"),
                "127.0.0.1",
                V4,
                all,
                false,
                Some(("127.0.0.6", false, false)),
            ),
            (
                "::1",
                Some("::1"),
                "::1",
                V6,
                all,
                false,
                Some(("fd63:616e:616c::6", true, false)),
            ),
            (
                "link-local",
                Some("fe80::1"),
                "fd00::9",
                V6,
                all,
                false,
                Some(("fd00::9", true, false)),
            ),
            (
                "unmarked answers",
                Some("10.0.0.7"),
                GATEWAY,
                V4,
                routes,
                true,
                Some(("127.0.0.6", false, true)),
            ),
            (
                "unmarked answers, IPv6",
                Some("fd00::7"),
                "fd00::9",
                V6,
                routes,
                false,
                Some(("fd63:616e:616c::6", true, false)),
            ),
            (
                "nothing",
                Some("10.0.0.7"),
                GATEWAY,
                V4,
                none,
                false,
                Some(("127.0.0.6", false, false)),
            ),
            (
                "nothing, IPv6",
                Some("fd00::7"),
                "fd00::9",
                V6,
                none,
                false,
                None,
            ),
            (
                "nothing, guarded",
                Some("10.0.0.7"),
                GATEWAY,
                V4,
                none,
                true,
                None,
            ),
        ]
    }

    #[test]
    fn application_sees_its_client_else_the_hop_else_a_substitute_never_its_own_pod() {
        let own = [ip("10.0.0.2"), ip("fd00::2")];
        let all = Delivery {
            has_routes: true,
            is_transparent: true,
            ..Delivery::default()
        };
        let routes = Delivery {
            has_routes: true,
            has_substitute_v6: true,
            ..Delivery::default()
        };
        let none = Delivery::default();
        let cases = [
            cases_of_clients(&all),
            cases_of_substitutes(&all, &routes, &none),
        ]
        .concat();
        for (case, client, hop, target, delivery, is_guarded, want) in cases {
            let pod = Circumstances {
                own: &own,
                delivery,
                is_guarded,
            };
            let decided = decide_source(client.map(ip), ip(hop), ip(target), &pod);
            let decided = decided.map(|o| (o.source, o.is_foreign, o.on_loopback));
            assert_eq!(
                decided,
                want.map(|(source, foreign, loopback)| (ip(source), foreign, loopback)),
                "{case}"
            );
        }
    }

    #[test]
    fn privileged_source_ports_are_not_preserved() {
        assert_eq!(ports(Some(4711)).next(), Some(4711));
        for own in [None, Some(0), Some(1023)] {
            let tried: Vec<u16> = ports(own).collect();
            assert!(
                tried.len() == PORT_ATTEMPTS_MAX && tried.iter().all(|p| PORTS.contains(p)),
                "{own:?}"
            );
        }
    }
}
