//! Attacks that a cloud's virtual switch would stop, with that switch open: VNIs and addresses of
//! others, ports of the provider. Canal itself must refuse and count each of them, frame by frame.

use canal_e2e::SERVICE_INNER_ADDRESS;
use canal_e2e::credential::PemCredential;
use canal_e2e::keys::{KeyServerReply, Requester};
use canal_wire::keyrpc::KeyName;

use super::attack_world::{Attack, AttackOutcome, AttackWorld, BETA, CLIENT, FRAMES};
use super::control::component;
use super::tunnels::dials;

/// VNI of the tier. It is `CANAL_TIER_VNI` of `bpf/abi/tier.h`.
const TIER: u32 = 827_553;
const ALPHA_NODE: &str = "spiffe://components.canal/ns/alpha/sa/node.alpha-n1";
const BETA_NODE: &str = "spiffe://components.canal/ns/beta/sa/node.beta-n1";
/// A gateway address that every tenant has.
const SERVICE: &str = "10.102.2.1:15008";

pub(crate) fn attacks() -> Vec<Attack> {
    [at_the_edge(), at_the_replica(), from_a_pod(), ports()]
        .into_iter()
        .flatten()
        .collect()
}

/// An attack by frames, and the counter that must have counted each of them.
fn frames(
    name: &'static str,
    host: &'static str,
    words: impl Fn(&AttackWorld) -> String + 'static,
) -> Attack {
    let attempt = move |s: &AttackWorld| {
        let peer = canal_e2e::bin("canal-world-peer").display().to_string();
        let (words, count) = (words(s), format!("count={FRAMES}"));
        let argv: Vec<&str> = [&*peer, "spoof"]
            .into_iter()
            .chain(words.split(' '))
            .chain([&*count])
            .collect();
        let output = s.mesh.run(host, &argv);
        // Nothing responds; the count of refusals proves that no frame passed.
        AttackOutcome::of(false, (output.stdout, output.stderr))
    };
    let served = |s: &AttackWorld| s.by_alpha(CLIENT, "http://10.101.0.90/headers", &[]);
    Attack::new(name, attempt, served).each_frame()
}

/// A VXLAN frame from beta's node.
fn tunnelled(
    name: &'static str,
    vni: u32,
    via: &'static str,
    ends: impl Fn(&AttackWorld) -> (String, String) + 'static,
) -> Attack {
    frames(name, "beta-n1", move |s| {
        let (from, to) = ends(s);
        format!("from={from} to={to} vni={vni} via={}", s.mesh.address(via))
    })
}

fn own(s: &AttackWorld) -> String {
    s.pod(BETA, 999)
}

fn at_the_edge() -> Vec<Attack> {
    // The counter's label says which check refused the frame.
    let at = |attack: Attack, what| attack.counted("edge", "canal_edge_packets_total", &[what]);
    // A source is unknown if its host is no node of the VNI's tenant, and forged if the inner
    // source is no pod of that node.
    let unknown_source = "what=\"drop_unknown_source\"";
    let forged = "what=\"drop_forged\"";
    let address = "what=\"drop_address\"";
    vec![
        // 101 is alpha's VNI and 102 beta's.
        at(
            tunnelled(
                "open: alpha's VNI from beta's node, to the edge",
                101,
                "edge-1",
                |s| (own(s), SERVICE.into()),
            ),
            unknown_source,
        ),
        at(
            tunnelled(
                "open: the tier's VNI from a node, to the edge",
                TIER,
                "edge-1",
                |s| (format!("{SERVICE_INNER_ADDRESS}:15008"), own(s)),
            ),
            unknown_source,
        ),
        at(
            tunnelled(
                "open: a pod of another node, by the own VNI",
                102,
                "edge-1",
                |_| ("10.1.2.2:999".into(), SERVICE.into()),
            ),
            forged,
        ),
        at(
            tunnelled(
                "open: no pod of the tenant, by the own VNI",
                102,
                "edge-1",
                |_| ("192.0.2.1:999".into(), SERVICE.into()),
            ),
            forged,
        ),
        at(
            tunnelled(
                "open: a gateway address that is no service's",
                102,
                "edge-1",
                |s| (own(s), "10.102.3.200:80".into()),
            ),
            address,
        ),
        at(
            tunnelled(
                "open: a session to the controller, by the overlay",
                102,
                "edge-1",
                |s| (own(s), format!("{}:15012", s.mesh.address("controller"))),
            ),
            address,
        ),
    ]
}

fn at_the_replica() -> Vec<Attack> {
    let at = |attack: Attack, what| {
        attack.counted(
            "gateway",
            "canal_redirector_packets_total",
            &["program=\"redirector\"", what],
        )
    };
    let unknown_source = "what=\"drop_unknown_source\"";
    // 102 is beta's VNI and 101 alpha's. Replicas accept tunnels from edges and other replicas
    // only.
    vec![
        at(
            tunnelled(
                "open: the tier's VNI from a node, to a replica",
                TIER,
                "gw-1",
                |s| (own(s), format!("{SERVICE_INNER_ADDRESS}:15008")),
            ),
            unknown_source,
        ),
        at(
            tunnelled(
                "open: the own VNI, round the edge to a replica",
                102,
                "gw-1",
                |s| (own(s), SERVICE.into()),
            ),
            unknown_source,
        ),
        at(
            tunnelled(
                "open: alpha's VNI, round the edge to a replica",
                101,
                "gw-1",
                |s| (own(s), SERVICE.into()),
            ),
            unknown_source,
        ),
        at(
            tunnelled(
                "open: a session to a replica's own address, by the overlay",
                102,
                "edge-1",
                |s| (own(s), format!("{}:15020", s.mesh.address("gw-1"))),
            ),
            // The edge forwards what could be a response; the replica has dialled no such
            // connection.
            "what=\"drop_crossed\"",
        ),
    ]
}

/// Packets that leave a pod of beta's: the pod's guard sees them before any switch.
fn from_a_pod() -> Vec<Attack> {
    let guarded = |attack: Attack, verdict| {
        attack
            .counted(
                "node",
                "canal_pod_guard_packets_total",
                &["tenant=\"beta\"", verdict],
            )
            // The sender's kernel returns an error at the first frame, so there is one refusal.
            .once()
    };
    // Frames of raw sockets are not captured, so the guard stops them; VXLAN is UDP.
    let (raw, udp) = ("verdict=\"stopped_tcp\"", "verdict=\"stopped_udp\"");
    vec![
        guarded(
            frames("open: a service's inner address, from a pod", BETA, |s| {
                format!("from={} to={SERVICE_INNER_ADDRESS}:80", own(s))
            }),
            raw,
        ),
        guarded(
            frames(
                "open: the key server's port by raw packets, from a pod",
                BETA,
                |s| format!("from={} to={}:15013", own(s), s.mesh.address("ks-1")),
            ),
            raw,
        ),
        guarded(
            frames("open: another pod's address, from a pod", BETA, |_| {
                "from=10.1.2.2:999 to=10.102.2.1:15008".into()
            }),
            raw,
        ),
        guarded(
            frames("open: VXLAN of its own, from a pod", BETA, |s| {
                format!(
                    "from=10.1.1.2:999 to={SERVICE} vni=101 via={}",
                    s.mesh.address("edge-1")
                )
            }),
            udp,
        ),
        Attack::new(
            "open: the key server's port, from a pod",
            |s| {
                s.served(
                    BETA,
                    &format!("http://{}:15013/", s.mesh.address("ks-1")),
                    &[],
                )
            },
            |s| s.served(BETA, "http://10.101.0.10/headers", &[]),
        )
        .counted(
            "node",
            "canal_node_refused_total",
            &["direction=\"outbound\""],
        ),
        Attack::new(
            "open: a gateway's metrics, from a pod",
            |s| {
                s.served(
                    BETA,
                    &format!("http://{}:15020/metrics", s.mesh.address("gw-1")),
                    &[],
                )
            },
            |s| s.served(BETA, "http://10.101.0.10/headers", &[]),
        )
        .counted(
            "node",
            "canal_node_refused_total",
            &["direction=\"outbound\""],
        ),
    ]
}

/// Ports of the provider's and of alpha's that beta's node reaches now. They are protected by
/// certificates, or only the host itself may connect, as the operators' pages are configured here.
fn ports() -> Vec<Attack> {
    let file = || KeyName::File("alpha/default/web-open".parse().expect("a service"));
    let asks =
        move |s: &AttackWorld, host: &str, server: &str, credential: Option<&PemCredential>| {
            let answer = Requester {
                world: &s.mesh.world,
                host,
                server,
                credential,
            }
            .sign(file());
            AttackOutcome::of(
                matches!(
                    answer,
                    KeyServerReply::Signature(_)
                        | KeyServerReply::Certificates(_)
                        | KeyServerReply::Handshake
                ),
                answer,
            )
        };
    // The control shows that a key server answers at all.
    let alive = |s: &AttackWorld| {
        let own = component(s, "alpha-n1", ALPHA_NODE);
        let answer = Requester {
            world: &s.mesh.world,
            host: "alpha-n1",
            server: "ks-1",
            credential: Some(&own),
        }
        .ping();
        AttackOutcome::of(answer == KeyServerReply::Pong, answer)
    };
    // These ports are open on the host's loopback only, so its kernel refuses and nothing is
    // counted.
    let closed = |name, to: &'static str, port| {
        Attack::new(
            name,
            move |s: &AttackWorld| dials(s, "beta-n1", to, port),
            // The control reads the same page from the host itself.
            move |s: &AttackWorld| pages(s, to),
        )
    };
    vec![
        Attack::new(
            "open: beta's node asks alpha's own key server for a signature",
            move |s| {
                asks(
                    s,
                    "beta-n1",
                    "alpha-ks",
                    Some(&component(s, "beta-n1", BETA_NODE)),
                )
            },
            alive,
        )
        .counted("keyServer", "canal_key_refusals_total", &[]),
        Attack::new(
            "open: beta's node asks alpha's own key server without a certificate",
            move |s| asks(s, "beta-n1", "alpha-ks", None),
            alive,
        )
        .counted(
            "keyServer",
            "canal_key_unauthenticated_connections_total",
            &[],
        ),
        closed("open: beta's node reads a gateway's metrics", "gw-1", 15020),
        closed(
            "open: beta's node reads a key server's metrics",
            "ks-1",
            15020,
        ),
        closed("open: beta's node opens a gateway's tap", "gw-1", 15000),
    ]
}

/// Tests whether a host can read its own pages.
fn pages(s: &AttackWorld, host: &str) -> AttackOutcome {
    let output = s
        .mesh
        .run(host, &["curl", "-sS", "http://127.0.0.1:15020/metrics"]);
    AttackOutcome::of(
        output.code == Some(0) && output.stdout.contains("canal_"),
        output.stdout.chars().take(100).collect::<String>(),
    )
}
