//! Attacks on the paths between nodes, gateways and key servers: certificates used elsewhere,
//! destinations that the sender may not name, headers that only gateways may send, frames and ports
//! of others.

use std::net::TcpStream;
use std::time::Duration;

use canal_e2e::hbone::{TunnelRequest, tunnel};
use canal_timing::deadline;
use canal_world::KEYS_PORT;

use super::attack_world::{
    Attack, AttackOutcome, AttackWorld, BETA, CLIENT, GATEWAY, INTRUDER, outcome_of, poll,
};

const ALPHA_WEB: &str = "alpha/default/web-0";
const BETA_WEB: &str = "beta/default/web-0";
const TLS: &str = "canal_tls_refused_total";

/// A tunnel through beta's own gateway to beta's own pod.
fn own(setup: &AttackWorld) -> AttackOutcome {
    setup.tunnel(
        BETA,
        GATEWAY,
        &setup.member("beta", "client"),
        &setup.pod(BETA_WEB, 8080),
        &[],
    )
}

fn alphas_own(setup: &AttackWorld) -> AttackOutcome {
    setup.tunnel(
        CLIENT,
        GATEWAY,
        &setup.member("alpha", "client"),
        &setup.pod(ALPHA_WEB, 8080),
        &[],
    )
}

/// A tunnel to the node of a pod that bypasses every gateway.
fn to_node(
    setup: &AttackWorld,
    from: &str,
    account: (&str, &str),
    pod: &str,
    headers: &[(&str, &str)],
) -> AttackOutcome {
    let listener = setup.pod(pod, 15008);
    setup.tunnel(
        from,
        &listener,
        &setup.member(account.0, account.1),
        &setup.pod(pod, 8080),
        headers,
    )
}

/// A request of beta's to its own gateway.
fn through_own_gateway(setup: &AttackWorld, authority: &str) -> AttackOutcome {
    setup.tunnel(
        BETA,
        GATEWAY,
        &setup.member("beta", "client"),
        authority,
        &[],
    )
}

/// A request of beta's to its own node.
fn through_own_node(setup: &AttackWorld, authority: &str) -> AttackOutcome {
    setup.tunnel(
        BETA,
        &setup.pod(BETA_WEB, 15008),
        &setup.member("beta", "client"),
        authority,
        &[],
    )
}

/// Time after which a connect counts as refused. A connect that the mesh allows is repeated. A lost
/// SYN is repeated once within it, after 1 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Tests whether a host's own socket connects to a port that it may use.
fn reaches(setup: &AttackWorld, from: &str, to: &str, port: u16) -> AttackOutcome {
    poll(deadline(CONNECT_TIMEOUT), || dials(setup, from, to, port))
}

/// Tests whether a host's own socket connects to a port.
pub(super) fn dials(setup: &AttackWorld, from: &str, to: &str, port: u16) -> AttackOutcome {
    let to = (setup.mesh.address(to), port).into();
    let dial = || {
        TcpStream::connect_timeout(&to, CONNECT_TIMEOUT)
            .map(drop)
            .map_err(|e| e.to_string())
    };
    let dialled = setup
        .mesh
        .world
        .inside(from, dial)
        .unwrap_or_else(|e| panic!("{from}: {e}"));
    AttackOutcome::of(dialled.is_ok(), dialled)
}

pub(crate) fn attacks() -> Vec<Attack> {
    [identities(), destinations(), words(), ports(), frames()]
        .into_iter()
        .flatten()
        .collect()
}

fn refused(attack: Attack, kind: &'static str, reason: &'static str) -> Attack {
    attack.counted(kind, TLS, &["side=\"server\"", reason])
}

/// Returns tunnels with certificates of another trust domain.
fn certificates_of_others() -> Vec<Attack> {
    let wrong = "reason=\"wrong_trust_domain\"";
    // The last function of each attack is its control: the same tunnel with the right certificate.
    vec![
        refused(
            Attack::new(
                "alpha's certificate, stolen, at beta's gateway address",
                |s| {
                    s.tunnel(
                        BETA,
                        GATEWAY,
                        &s.member("alpha", "client"),
                        &s.pod(BETA_WEB, 8080),
                        &[],
                    )
                },
                own,
            ),
            "gateway",
            wrong,
        ),
        refused(
            Attack::new(
                "alpha's gateway certificate, stolen, at beta's node",
                |s| {
                    let stolen =
                        s.issued("alpha", "spiffe://alpha.example/ns/canal-system/sa/gateway");
                    s.tunnel(
                        BETA,
                        &s.pod(BETA_WEB, 15008),
                        &stolen,
                        &s.pod(BETA_WEB, 8080),
                        &[],
                    )
                },
                |s| to_node(s, BETA, ("beta", "client"), BETA_WEB, &[]),
            ),
            "node",
            wrong,
        ),
        refused(
            Attack::new(
                "beta's certificate in alpha's network, at alpha's gateway address",
                |s| {
                    s.tunnel(
                        CLIENT,
                        GATEWAY,
                        &s.member("beta", "client"),
                        &s.pod(ALPHA_WEB, 8080),
                        &[],
                    )
                },
                alphas_own,
            ),
            "gateway",
            wrong,
        ),
        refused(
            Attack::new(
                "beta's certificate in alpha's network, at alpha's node",
                |s| to_node(s, CLIENT, ("beta", "client"), ALPHA_WEB, &[]),
                |s| to_node(s, CLIENT, ("alpha", "client"), ALPHA_WEB, &[]),
            ),
            "node",
            wrong,
        ),
    ]
}

/// Returns tunnels with a certificate of the wrong CA, and without any.
fn certificates_of_nobody() -> Vec<Attack> {
    // The last function of each attack is its control: the same tunnel with alpha's certificate.
    vec![
        refused(
            Attack::new(
                "alpha's identity, signed by beta's authority, at alpha's node",
                |s| {
                    let forged = s.issued("beta", "spiffe://alpha.example/ns/default/sa/client");
                    s.tunnel(
                        CLIENT,
                        &s.pod(ALPHA_WEB, 15008),
                        &forged,
                        &s.pod(ALPHA_WEB, 8080),
                        &[],
                    )
                },
                |s| to_node(s, CLIENT, ("alpha", "client"), ALPHA_WEB, &[]),
            ),
            "node",
            "reason=\"unknown_issuer\"",
        ),
        refused(
            Attack::new(
                "no certificate, at alpha's node",
                |s| {
                    let (listener, authority) = (s.pod(ALPHA_WEB, 15008), s.pod(ALPHA_WEB, 8080));
                    outcome_of(&tunnel(
                        &s.mesh.world,
                        &TunnelRequest::new(
                            CLIENT,
                            listener.parse().expect("an address"),
                            None,
                            &authority,
                        ),
                    ))
                },
                |s| to_node(s, CLIENT, ("alpha", "client"), ALPHA_WEB, &[]),
            ),
            "node",
            "reason=\"no_certificate\"",
        ),
    ]
}

fn identities() -> Vec<Attack> {
    let mut all = certificates_of_others();
    all.extend(certificates_of_nobody());
    all
}

fn destinations() -> Vec<Attack> {
    // A gateway opens tunnels only to services and pods of the client's own tenant.
    let connects =
        |attack: Attack| attack.counted("gateway", "canal_gateway_refused_connects_total", &[]);
    let inbound = |attack: Attack| {
        attack.counted(
            "node",
            "canal_node_refused_total",
            &["direction=\"inbound\""],
        )
    };
    // The control: the pod that the tunnel was dialled for.
    let alphas_node = |s: &AttackWorld| through_own_node(s, &s.pod(BETA_WEB, 8080));
    vec![
        connects(Attack::new(
            "CONNECT to alpha's service by beta's gateway address",
            |s| through_own_gateway(s, "10.101.0.90:80"),
            own,
        )),
        connects(Attack::new(
            "CONNECT to alpha's service by name",
            |s| through_own_gateway(s, "secret.default.svc.cluster.local:80"),
            own,
        )),
        connects(Attack::new(
            "CONNECT to alpha's pod",
            |s| through_own_gateway(s, &s.pod("alpha/default/ws-0", 8081)),
            alphas_own,
        )),
        connects(Attack::new(
            "CONNECT to the controller",
            |s| through_own_gateway(s, &format!("{}:15020", s.mesh.address("controller"))),
            own,
        )),
        connects(Attack::new(
            "CONNECT to a gateway replica's metrics",
            |s| through_own_gateway(s, &format!("{}:15020", s.mesh.address("gw-1"))),
            own,
        )),
        connects(Attack::new(
            "CONNECT to a gateway's own loopback",
            |s| through_own_gateway(s, "127.0.0.1:15000"),
            own,
        )),
        connects(Attack::new(
            "CONNECT to the proxy's port of a pod",
            |s| through_own_gateway(s, &s.pod(BETA_WEB, 15001)),
            own,
        )),
        inbound(Attack::new(
            "CONNECT to a node's loopback",
            |s| through_own_node(s, "127.0.0.1:15000"),
            alphas_node,
        )),
        inbound(Attack::new(
            "CONNECT to another pod than was dialled",
            |s| through_own_node(s, &s.pod("beta/default/echo-0", 7000)),
            alphas_node,
        )),
        inbound(Attack::new(
            "CONNECT to the proxy's port, at the node",
            |s| through_own_node(s, &s.pod(BETA_WEB, 15008)),
            alphas_node,
        )),
        Attack::new(
            "GET in place of CONNECT, at the node",
            |s| {
                let (listener, member) = (s.pod(BETA_WEB, 15008), s.member("beta", "client"));
                let uri = format!("http://{}/headers", s.pod(BETA_WEB, 8080));
                let mut request = TunnelRequest::new(
                    BETA,
                    listener.parse().expect("an address"),
                    Some(&member),
                    &uri,
                );
                request.method = "GET";
                outcome_of(&tunnel(&s.mesh.world, &request))
            },
            alphas_node,
        )
        .counted(
            "node",
            "canal_hbone_refused_total",
            &["reason=\"not_connect\""],
        ),
    ]
}

fn denied(attack: Attack) -> Attack {
    attack.counted("node", "canal_node_refused_total", &["reason=\"denied\""])
}

/// A pod with layer-7 policies.
const L7_POD: &str = "alpha/default/web-l7-0";
/// The tenant and the account of the attacking pod.
const ACCOUNT_OF_INTRUDER: (&str, &str) = ("alpha", "intruder");

/// A pod whose policies only admit the client's address.
const DRY_POD: &str = "alpha/default/web-dry-0";

/// Returns tunnels that name another source in a header; the pods' policies admit only the client.
fn claimed_sources() -> Vec<Attack> {
    let client = move |s: &AttackWorld| to_node(s, CLIENT, ("alpha", "client"), L7_POD, &[]);
    vec![
        denied(Attack::new(
            "canal-source of another, from no gateway",
            move |s| {
                to_node(
                    s,
                    INTRUDER,
                    ACCOUNT_OF_INTRUDER,
                    L7_POD,
                    &[(
                        "canal-source",
                        "spiffe://alpha.example/ns/default/sa/client",
                    )],
                )
            },
            client,
        )),
        denied(Attack::new(
            "canal-source of the gateway, from no gateway",
            move |s| {
                to_node(
                    s,
                    INTRUDER,
                    ACCOUNT_OF_INTRUDER,
                    L7_POD,
                    &[(
                        "canal-source",
                        "spiffe://alpha.example/ns/canal-system/sa/gateway",
                    )],
                )
            },
            client,
        )),
        denied(Attack::new(
            "baggage of another workload",
            move |s| {
                to_node(
                    s,
                    INTRUDER,
                    ACCOUNT_OF_INTRUDER,
                    L7_POD,
                    &[(
                        "baggage",
                        "k8s.namespace.name=default,k8s.pod.name=client-0,service.name=client",
                    )],
                )
            },
            client,
        )),
        denied(Attack::new(
            "x-forwarded-client-cert of another, on CONNECT",
            move |s| {
                let value = "By=spiffe://alpha.example/ns/default/sa/web;URI=spiffe://alpha.example/ns/default/sa/client";
                to_node(
                    s,
                    INTRUDER,
                    ACCOUNT_OF_INTRUDER,
                    L7_POD,
                    &[("x-forwarded-client-cert", value)],
                )
            },
            client,
        )),
        denied(Attack::new(
            "forwarded from an address that may",
            |s| {
                // `web-dry` admits the client by its address; 4711 stands for any port.
                let value = format!("for=\"{}:4711\"", s.mesh.address(CLIENT));
                to_node(
                    s,
                    INTRUDER,
                    ACCOUNT_OF_INTRUDER,
                    DRY_POD,
                    &[("forwarded", &value)],
                )
            },
            |s| to_node(s, CLIENT, ("alpha", "client"), DRY_POD, &[]),
        )),
    ]
}

/// Returns connections that bypass the gateway, or mTLS altogether.
fn bypasses() -> Vec<Attack> {
    vec![
        Attack::new(
            "past the gateway, where only the gateway can authorize",
            |s| {
                to_node(
                    s,
                    INTRUDER,
                    ("alpha", "intruder"),
                    "alpha/default/web-raw-0",
                    &[],
                )
            },
            // Through the gateway the intruder may read this path, since the gateway can evaluate
            // it.
            |s| s.served(INTRUDER, "http://10.101.0.17/blob?size=1", &[]),
        )
        .counted(
            "node",
            "canal_node_refused_total",
            &["reason=\"undecided\""],
        ),
        Attack::new(
            "plaintext past all proxies, to a pod that requires mTLS",
            |s| {
                s.served(
                    "alpha/default/bare-0",
                    &format!(
                        "http://{}/headers",
                        s.pod("alpha/default/web-strict-0", 8080)
                    ),
                    &[],
                )
            },
            |s| {
                s.served(
                    CLIENT,
                    &format!(
                        "http://{}/headers",
                        s.pod("alpha/default/web-strict-0", 8080)
                    ),
                    &[],
                )
            },
        )
        .counted(
            "node",
            "canal_node_refused_total",
            &["reason=\"strict_plaintext\""],
        ),
    ]
}

/// Headers in which gateways and nodes exchange sources.
fn words() -> Vec<Attack> {
    let mut all = claimed_sources();
    all.extend(bypasses());
    all
}

fn ports() -> Vec<Attack> {
    // The world's virtual switch drops these packets and counts them by reason.
    let keys = |attack: Attack| attack.dropped(|refused| refused.keys);
    let provider = |attack: Attack| attack.dropped(|refused| refused.provider);
    vec![
        keys(Attack::new(
            "beta's node dials alpha's own key server",
            |s| dials(s, "beta-n1", "alpha-ks", KEYS_PORT),
            // The control opens the same port from a host that may.
            |s| reaches(s, "alpha-n1", "alpha-ks", KEYS_PORT),
        )),
        Attack::new(
            "beta's pod dials the provider's key server",
            |s| dials(s, BETA, "ks-1", KEYS_PORT),
            |s| reaches(s, "beta-n1", "ks-1", KEYS_PORT),
        )
        .dropped(|refused| refused.tcp),
        provider(Attack::new(
            "beta's node reads a gateway's metrics",
            |s| dials(s, "beta-n1", "gw-1", 15020),
            |s| reaches(s, "gw-1", "gw-1", 15020),
        )),
        provider(Attack::new(
            "beta's node reads the controller's metrics",
            |s| dials(s, "beta-n1", "controller", 15020),
            |s| reaches(s, "controller", "controller", 15020),
        )),
        provider(Attack::new(
            "beta's node reads a key server's metrics",
            |s| dials(s, "beta-n1", "ks-1", 15020),
            |s| reaches(s, "ks-1", "ks-1", 15020),
        )),
        provider(Attack::new(
            "beta's node opens a gateway's tap",
            |s| dials(s, "beta-n1", "gw-1", 15000),
            |s| {
                AttackOutcome::of(
                    s.mesh
                        .run(
                            "gw-1",
                            &["curl", "-sS", "http://127.0.0.1:15000/config_dump"],
                        )
                        .code
                        == Some(0),
                    "the gateway itself",
                )
            },
        )),
        Attack::new(
            "beta's pod reads its own node's admin port",
            |s| {
                s.served(
                    BETA,
                    &format!("http://{}:15000/config_dump", s.mesh.address("beta-n1")),
                    &[],
                )
            },
            |s| {
                AttackOutcome::of(
                    s.mesh
                        .run(
                            "beta-n1",
                            &["curl", "-sS", "http://127.0.0.1:15000/config_dump"],
                        )
                        .code
                        == Some(0),
                    "the node itself",
                )
            },
        ),
    ]
}

/// Frames that no honest host sends (`adversary.rs` has all kinds of them).
fn frames() -> Vec<Attack> {
    let spoof = |setup: &AttackWorld, words: &str| {
        let peer = canal_e2e::bin("canal-world-peer").display().to_string();
        let argv: Vec<&str> = [&*peer, "spoof"]
            .into_iter()
            .chain(words.split(' '))
            .collect();
        let output = setup.mesh.run("beta-n1", &argv);
        // The router's counter shows what leaves; nothing responds.
        AttackOutcome::of(false, output.stdout)
    };
    let served = |s: &AttackWorld| s.by_alpha(CLIENT, "http://10.101.0.90/headers", &[]);
    // Each attack sends 20 frames, of which one has to be counted, so lost ones do not matter.
    // 10.1.1.2 is a pod, and 10.102.2.1 the gateways' address in AZ 1 (`GATEWAY`), both of every
    // tenant. 999 stands for any port.
    vec![
        Attack::new(
            "alpha's VNI from beta's node, to the edge",
            move |s| {
                spoof(
                    s,
                    &format!(
                        "from=10.1.1.2:999 to=10.102.2.1:15008 vni=101 via={} count=20",
                        s.mesh.address("edge-1")
                    ),
                )
            },
            served,
        )
        .dropped(|refused| refused.vni),
        Attack::new(
            "alpha's VNI from beta's node, to alpha's node",
            move |s| {
                spoof(
                    s,
                    &format!(
                        "from=10.1.1.2:999 to=10.1.1.3:8080 vni=101 via={} count=20",
                        s.mesh.address("alpha-n1")
                    ),
                )
            },
            served,
        )
        .dropped(|refused| refused.vni),
        Attack::new(
            "the own VNI, to a gateway replica past the edge",
            move |s| {
                spoof(
                    s,
                    &format!(
                        "from=10.1.1.2:999 to=10.102.2.1:15008 vni=102 via={} count=20",
                        s.mesh.address("gw-1")
                    ),
                )
            },
            served,
        )
        .dropped(|refused| refused.peer),
    ]
}
