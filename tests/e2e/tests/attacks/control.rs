//! Attacks on the controller and on key servers with a token or a certificate of beta's, for data
//! and keys of alpha or the provider.

use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_e2e::credential::{PemCredential, request, request_with_key};
use canal_e2e::keys::{KeyServerReply, Requester};
use canal_model::program::ResourceKind;
use canal_timing::deadline;
use canal_wire::keyrpc::KeyName;

use super::attack_world::{Attack, AttackOutcome, AttackWorld, BETA_OPERATOR, poll};

const CERTIFICATES: &str = "canal_controller_certificates_refused_total";
const CONTROLLER: &str = "canal_controller_refused_total";
const ALPHA_CLIENT: &str = "spiffe://alpha.example/ns/default/sa/client";
const BETA_CLIENT: &str = "spiffe://beta.example/ns/default/sa/client";
const BETA_NODE: &str = "spiffe://components.canal/ns/beta/sa/node.beta-n1";
const ALPHA_NODE: &str = "spiffe://components.canal/ns/alpha/sa/node.alpha-n1";

pub(crate) fn attacks() -> Vec<Attack> {
    [
        subscriptions(),
        certificates(),
        key_servers(),
        operators(),
        readable_pages(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Tests whether a subscriber receives any resource of alpha's.
fn receives(
    setup: &AttackWorld,
    caller: &Caller<'_>,
    node: &str,
    kinds: &[ResourceKind],
    names: &[&str],
) -> AttackOutcome {
    // The calls run at once, because each waits for the silence after the last message.
    let answers: Vec<_> = std::thread::scope(|scope| {
        let subscribed: Vec<_> = kinds
            .iter()
            .map(|kind| scope.spawn(|| caller.subscribe(node, kind.type_url(), names)))
            .collect();
        subscribed
            .into_iter()
            .map(|subscribed| subscribed.join().expect("a subscription ends"))
            .collect()
    });
    let mut all = Vec::new();
    for answer in answers {
        match answer {
            Ok(receives) => all.extend(receives),
            Err(status) => return AttackOutcome::of(false, (setup.mesh.world.name(), status)),
        }
    }
    AttackOutcome::of(all.iter().any(|name| name.contains("alpha")), all)
}

/// The controller has sent a subscriber's first resources within this time. It only has to exceed
/// what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const RECEIVED_WITHIN: Duration = Duration::from_secs(5);

/// Tests whether a subscriber that may have resources of alpha's receives one. The controller may
/// be silent for longer than a subscription waits, so it is repeated.
fn receives_own(
    setup: &AttackWorld,
    caller: &Caller<'_>,
    node: &str,
    kinds: &[ResourceKind],
) -> AttackOutcome {
    poll(deadline(RECEIVED_WITHIN), || {
        receives(setup, caller, node, kinds, &[])
    })
}

/// Kinds that a node receives of its own tenant.
const OWN: &[ResourceKind] = &[
    ResourceKind::Tenant,
    ResourceKind::Service,
    ResourceKind::Workload,
    ResourceKind::Bundle,
];
/// Kinds that contain a tenant's policies.
const POLICY_KINDS: &[ResourceKind] = &[
    ResourceKind::Authorization,
    ResourceKind::Authentication,
    ResourceKind::Authorizer,
    ResourceKind::Termination,
];

/// Returns the subscription of alpha's node itself.
fn alphas(kinds: &'static [ResourceKind]) -> impl Fn(&AttackWorld) -> AttackOutcome {
    move |s: &AttackWorld| {
        receives_own(
            s,
            &Caller::as_itself(&s.mesh.world, "alpha-n1"),
            "node~alpha-n1",
            kinds,
        )
    }
}

/// Returns the subscription of a gateway itself.
fn gateways(kinds: &'static [ResourceKind]) -> impl Fn(&AttackWorld) -> AttackOutcome {
    move |s: &AttackWorld| {
        receives_own(
            s,
            &Caller::as_itself(&s.mesh.world, "gw-1"),
            "gateway~gw-1",
            kinds,
        )
    }
}

/// Returns subscriptions of beta's node to what is not beta's.
fn subscriptions_to_alpha() -> Vec<Attack> {
    let beta =
        |node: &'static str, kinds: &'static [ResourceKind], names: &'static [&'static str]| {
            move |s: &AttackWorld| {
                receives(
                    s,
                    &Caller::as_itself(&s.mesh.world, "beta-n1"),
                    node,
                    kinds,
                    names,
                )
            }
        };
    // The last argument is the control: the subscriber that may receive these resources.
    vec![
        Attack::new(
            "every kind, by the wildcard, as alpha's node",
            beta("node~alpha-n1", &ResourceKind::ALL, &[]),
            alphas(OWN),
        ),
        Attack::new(
            "every kind, as a gateway",
            beta("gateway~gw-1", &ResourceKind::ALL, &[]),
            gateways(&[ResourceKind::Service, ResourceKind::Route]),
        ),
        Attack::new(
            "alpha's services by name",
            beta(
                "node~beta-n1",
                &[ResourceKind::Service, ResourceKind::Workload],
                &["alpha/default/web", "alpha/default/web-0", "alpha"],
            ),
            alphas(&[ResourceKind::Service]),
        ),
        Attack::new(
            "alpha's bundle by name",
            beta(
                "node~beta-n1",
                &[ResourceKind::Bundle],
                &["alpha/alpha.example", "beta/alpha.example"],
            ),
            alphas(OWN),
        ),
        Attack::new(
            "alpha's policies and authorizers",
            beta("node~beta-n1", POLICY_KINDS, &[]),
            alphas(&[ResourceKind::Authorization]),
        ),
    ]
}

/// Returns subscriptions of a tenant's key server, and with tokens of others.
fn subscriptions_of_others() -> Vec<Attack> {
    vec![
        Attack::new(
            "entitlements, as a tenant's key server",
            |s| {
                let beta = |receives: AttackOutcome| {
                    AttackOutcome::of(receives.output.contains("beta"), receives.output)
                };
                beta(receives(
                    s,
                    &Caller::as_itself(&s.mesh.world, "alpha-ks"),
                    "keyserver~alpha-ks",
                    &[ResourceKind::Entitlement, ResourceKind::Tenant],
                    &[],
                ))
            },
            // The provider's key server serves all tenants, so it gets beta's entitlements too.
            |s| {
                receives_own(
                    s,
                    &Caller::as_itself(&s.mesh.world, "ks-1"),
                    "keyserver~ks-1",
                    &[ResourceKind::Entitlement, ResourceKind::Tenant],
                )
            },
        ),
        Attack::new(
            "an unknown token",
            |s| {
                receives(
                    s,
                    // A token has 64 characters; the controller has none of zeros.
                    &Caller::with_token(&s.mesh.world, "beta-n1", &"0".repeat(64)),
                    "node~alpha-n1",
                    OWN,
                    &[],
                )
            },
            alphas(OWN),
        )
        .counted("controller", CONTROLLER, &["reason=\"unknown_token\""]),
        Attack::new(
            "an operator's token for a subscription",
            |s| {
                receives(
                    s,
                    &Caller::with_token(&s.mesh.world, "beta-n1", BETA_OPERATOR),
                    "node~alpha-n1",
                    OWN,
                    &[],
                )
            },
            alphas(OWN),
        )
        .counted("controller", CONTROLLER, &["reason=\"subscribe_operator\""]),
    ]
}

fn subscriptions() -> Vec<Attack> {
    let mut all = subscriptions_to_alpha();
    all.extend(subscriptions_of_others());
    all
}

fn issued(
    setup: &AttackWorld,
    host: &str,
    identity: &str,
    csr: &str,
    service: Option<&str>,
) -> AttackOutcome {
    let answer = Caller::as_itself(&setup.mesh.world, host).certificate(identity, csr, service);
    AttackOutcome::of(answer.is_ok(), answer.map(|chain| chain.len()))
}

/// Asks for a certificate of the own pod, which the node may have.
fn own_certificate(s: &AttackWorld) -> AttackOutcome {
    issued(s, "beta-n1", BETA_CLIENT, &request(&[BETA_CLIENT]), None)
}

/// Returns requests for certificates of identities that the requester does not have.
fn foreign_certificates() -> Vec<Attack> {
    let asks = |name, host: &'static str, identity: &'static str, reason: &'static str| {
        Attack::new(
            name,
            move |s: &AttackWorld| issued(s, host, identity, &request(&[identity]), None),
            own_certificate,
        )
        .counted("controller", CERTIFICATES, &[reason])
    };
    // Each attack names the reason of its refusal, so that none is refused by accident.
    vec![
        asks(
            "a certificate of alpha's",
            "beta-n1",
            ALPHA_CLIENT,
            "reason=\"trust_domain\"",
        ),
        asks(
            "a certificate of another node's pod",
            "beta-n1",
            "spiffe://beta.example/ns/default/sa/web",
            "reason=\"not_on_node\"",
        ),
        asks(
            "a certificate of an unknown identity",
            "beta-n1",
            "spiffe://beta.example/ns/default/sa/nobody",
            "reason=\"not_on_node\"",
        ),
        asks(
            "the own gateway's certificate",
            "beta-n1",
            "spiffe://beta.example/ns/canal-system/sa/gateway",
            "reason=\"reserved\"",
        ),
        asks(
            "another component's certificate",
            "beta-n1",
            "spiffe://components.canal/ns/canal-system/sa/gateway.gw-1",
            "reason=\"not_component\"",
        ),
        asks(
            "another node's component certificate",
            "beta-n1",
            ALPHA_NODE,
            "reason=\"not_component\"",
        ),
        asks(
            "a key server's component certificate",
            "beta-n1",
            "spiffe://components.canal/ns/canal-system/sa/keyserver.ks-1",
            "reason=\"not_component\"",
        ),
        asks(
            "a pod's certificate, by a gateway",
            "gw-1",
            BETA_CLIENT,
            "reason=\"not_gateway\"",
        ),
        // Alpha's keys are in key servers, so even alpha's node gets no certificate for a key of
        // its own.
        asks(
            "a certificate whose key is in key servers",
            "alpha-n1",
            ALPHA_CLIENT,
            "reason=\"keys_in_key_server\"",
        ),
    ]
}

/// Returns requests for certificates whose content or token is not the requester's.
fn forged_requests() -> Vec<Attack> {
    vec![
        Attack::new(
            "a request with alpha's identity inside",
            |s| issued(s, "beta-n1", BETA_CLIENT, &request(&[ALPHA_CLIENT]), None),
            own_certificate,
        )
        .counted("controller", CERTIFICATES, &["reason=\"name\""]),
        Attack::new(
            "a request with a second identity inside",
            |s| {
                issued(
                    s,
                    "beta-n1",
                    BETA_CLIENT,
                    &request(&[BETA_CLIENT, ALPHA_CLIENT]),
                    None,
                )
            },
            own_certificate,
        )
        .counted("controller", CERTIFICATES, &["reason=\"name\""]),
        Attack::new(
            "a certificate with the names of alpha's service",
            |s| {
                issued(
                    s,
                    "beta-n1",
                    BETA_CLIENT,
                    &request(&[BETA_CLIENT]),
                    Some("alpha/default/web"),
                )
            },
            own_certificate,
        )
        // Any refusal counts: the controller refuses the identity before it looks up the service.
        .counted("controller", CERTIFICATES, &[]),
        Attack::new(
            "a certificate by an operator's token",
            |s| {
                let caller = Caller::with_token(&s.mesh.world, "beta-n1", BETA_OPERATOR);
                let answer = caller.certificate(BETA_CLIENT, &request(&[BETA_CLIENT]), None);
                AttackOutcome::of(answer.is_ok(), answer)
            },
            own_certificate,
        )
        .counted("controller", CERTIFICATES, &["reason=\"operator\""]),
    ]
}

fn certificates() -> Vec<Attack> {
    let mut all = foreign_certificates();
    all.extend(forged_requests());
    all
}

/// Returns the channel certificate of a node, obtained with its token.
pub(super) fn component(setup: &AttackWorld, host: &str, identity: &str) -> PemCredential {
    let (csr, key) = request_with_key(&[identity]);
    let chain = Caller::as_itself(&setup.mesh.world, host)
        .certificate(identity, &csr, None)
        .unwrap_or_else(|e| panic!("{identity}: {e}"));
    PemCredential {
        chain: chain[..chain.len() - 1].concat(),
        key,
    }
}

fn subscribed(
    setup: &AttackWorld,
    host: &str,
    credential: Option<&PemCredential>,
    ask: impl Fn(&Requester<'_>) -> KeyServerReply,
) -> AttackOutcome {
    let answer = ask(&Requester {
        world: &setup.mesh.world,
        host,
        server: "ks-1",
        credential,
    });
    let used = matches!(
        answer,
        KeyServerReply::Signature(_) | KeyServerReply::Certificates(_) | KeyServerReply::Handshake
    );
    AttackOutcome::of(used, answer)
}

fn key_servers() -> Vec<Attack> {
    let key = |identity: &str| KeyName::Identity(identity.parse().expect("an identity"));
    // The control: alpha's node signs by the key of its own pod.
    let alphas = move |s: &AttackWorld| {
        let own = component(s, "alpha-n1", ALPHA_NODE);
        subscribed(s, "alpha-n1", Some(&own), |r| r.sign(key(ALPHA_CLIENT)))
    };
    let betas = |name, ask: fn(&Requester<'_>) -> KeyServerReply| {
        let attempt = move |s: &AttackWorld| {
            let own = component(s, "beta-n1", BETA_NODE);
            subscribed(s, "beta-n1", Some(&own), ask)
        };
        Attack::new(name, attempt, alphas)
    };
    vec![
        betas("a signature by alpha's key", |r| {
            r.sign(KeyName::Identity(
                ALPHA_CLIENT.parse().expect("an identity"),
            ))
        }),
        betas("the certificates of alpha's key", |r| {
            r.chain(KeyName::Identity(
                ALPHA_CLIENT.parse().expect("an identity"),
            ))
        }),
        betas("a handshake by alpha's key", |r| {
            r.begin(ALPHA_CLIENT.parse().expect("an identity"))
        }),
        betas("a signature by alpha's gateway's key", |r| {
            r.sign(KeyName::Identity(
                "spiffe://alpha.example/ns/canal-system/sa/gateway"
                    .parse()
                    .expect("an identity"),
            ))
        }),
        betas("a signature by the key of alpha's service", |r| {
            r.sign(KeyName::Service(
                "alpha/default/web".parse().expect("a service"),
            ))
        }),
        betas("a signature by a file's key", |r| {
            r.sign(KeyName::File(
                "alpha/default/web-open".parse().expect("a service"),
            ))
        }),
        Attack::new(
            "a key server without a certificate",
            move |s| subscribed(s, "beta-n1", None, |r| r.sign(key(ALPHA_CLIENT))),
            alphas,
        ),
        Attack::new(
            "a key server with a workload's certificate",
            move |s| {
                subscribed(s, "beta-n1", Some(&s.member("alpha", "client")), |r| {
                    r.sign(key(ALPHA_CLIENT))
                })
            },
            alphas,
        ),
        // Beta's CA may sign any name, so the issuer decides whether a component is believed.
        Attack::new(
            "a component's identity, signed by beta's authority",
            move |s| {
                subscribed(s, "beta-n1", Some(&s.issued("beta", ALPHA_NODE)), |r| {
                    r.sign(key(ALPHA_CLIENT))
                })
            },
            alphas,
        ),
        Attack::new(
            "alpha's identity of another node's pod",
            move |s| {
                let own = component(s, "alpha-n1", ALPHA_NODE);
                subscribed(s, "alpha-n1", Some(&own), |r| {
                    r.sign(key("spiffe://alpha.example/ns/default/sa/web"))
                })
            },
            alphas,
        ),
    ]
}

fn beta_operator(setup: &AttackWorld) -> Caller<'_> {
    Caller::with_token(&setup.mesh.world, "controller", BETA_OPERATOR)
}

fn operators() -> Vec<Attack> {
    fn outcome_of<T: std::fmt::Debug>(answer: Result<T, impl std::fmt::Debug>) -> AttackOutcome {
        AttackOutcome::of(answer.is_ok(), answer.map(|_| ()))
    }
    let foreign =
        |attack: Attack| attack.counted("controller", CONTROLLER, &["reason=\"foreign_tenant\""]);
    let provider =
        |attack: Attack| attack.counted("controller", CONTROLLER, &["reason=\"not_the_provider\""]);
    vec![
        foreign(Attack::new(
            "alpha's objects",
            |s| outcome_of(beta_operator(s).get("alpha")),
            // The control is the same order of beta's operator for its own tenant.
            |s| outcome_of(beta_operator(s).get("beta")),
        )),
        foreign(Attack::new(
            "a removal from alpha",
            |s| outcome_of(beta_operator(s).delete("alpha", "AuthorizationPolicy", "clients")),
            |s| outcome_of(beta_operator(s).delete("beta", "AuthorizationPolicy", "clients")),
        )),
        foreign(Attack::new(
            "a new root for alpha",
            |s| outcome_of(beta_operator(s).rotate("alpha")),
            // A rotation or revocation would disturb the other cases, so the control only reads.
            |s| {
                AttackOutcome::of(
                    s.mesh.canal(&["ca", "status", "--tenant", "alpha"]).code == Some(0),
                    "the provider",
                )
            },
        )),
        foreign(Attack::new(
            "a revocation in alpha",
            |s| {
                outcome_of(
                    beta_operator(s).revoke("alpha", "spiffe://alpha.example/ns/default/sa/nobody"),
                )
            },
            |s| {
                AttackOutcome::of(
                    s.mesh.canal(&["ca", "status", "--tenant", "alpha"]).code == Some(0),
                    "the provider",
                )
            },
        )),
        provider(Attack::new(
            "a replica out of service",
            |s| outcome_of(beta_operator(s).drain("gw-3")),
            |s| {
                AttackOutcome::of(
                    s.mesh.canal(&["gateway", "undrain", "gw-3"]).code == Some(0),
                    "the provider",
                )
            },
        )),
        Attack::new(
            "the operators' API by a node's token",
            |s| outcome_of(Caller::as_itself(&s.mesh.world, "beta-n1").get("alpha")),
            |s| outcome_of(beta_operator(s).get("beta")),
        )
        .counted("controller", CONTROLLER, &["reason=\"not_an_operator\""]),
    ]
}

/// The pages that beta can read do not name alpha at all, not even in a counter. The control of the
/// overview is that it names beta; that of each other page is one of a process that serves alpha.
fn readable_pages() -> Vec<Attack> {
    let overview = |s: &AttackWorld, name: &str| {
        let output = beta_operator(s).overview();
        let output = output.unwrap_or_else(|e| panic!("{e}"));
        AttackOutcome::of(output.contains(name), output)
    };
    let dump = |s: &AttackWorld, host: &str| {
        let socket = s
            .mesh
            .world
            .data(host)
            .expect("a host of the world")
            .join("admin.sock");
        let socket = socket.to_string_lossy();
        let output = s
            .mesh
            .run(
                host,
                &[
                    "curl",
                    "-sS",
                    "--unix-socket",
                    &socket,
                    "http://localhost/config_dump",
                ],
            )
            .expect_success();
        AttackOutcome::of(
            output.contains("alpha"),
            // A dump is too long for a message.
            output.chars().take(100).collect::<String>(),
        )
    };
    let metrics = |s: &AttackWorld, host: &str| {
        let output = s
            .mesh
            .run(host, &["curl", "-sS", "http://127.0.0.1:15020/metrics"])
            .expect_success();
        AttackOutcome::of(
            output.contains("alpha"),
            output
                .lines()
                .find(|line| line.contains("alpha"))
                // A page without alpha has no line to show.
                .unwrap_or_default(),
        )
    };
    let log = |s: &AttackWorld, host: &str| {
        let text = s
            .mesh
            .world
            .log(host)
            .ok()
            .and_then(|path| std::fs::read_to_string(path).ok())
            // A wrong path would show in the control, which must find alpha in the same way.
            .unwrap_or_default();
        AttackOutcome::of(
            text.contains("alpha"),
            text.lines()
                .find(|line| line.contains("alpha"))
                // A text without alpha has no line to show.
                .unwrap_or_default(),
        )
    };
    vec![
        Attack::new(
            "alpha in what beta's operator is shown",
            move |s| overview(s, "alpha"),
            move |s| overview(s, "beta"),
        ),
        Attack::new(
            "alpha in the dump of beta's node",
            move |s| dump(s, "beta-n1"),
            move |s| dump(s, "alpha-n1"),
        ),
        Attack::new(
            "alpha in the metrics of beta's node",
            move |s| metrics(s, "beta-n1"),
            move |s| metrics(s, "gw-1"),
        ),
        Attack::new(
            "alpha in the log of beta's node",
            move |s| log(s, "beta-n1"),
            move |s| log(s, "alpha-n1"),
        ),
    ]
}
