//! Tables of decisions by kind of source and by policy.

use canal_model::authorization::{AttributeMatch, AuthorizationAction, Clause, PolicyRule};
use canal_model::ids::{Generation, Vni};
use canal_model::program as p;
use canal_model::trust::TrustBundle;
use canal_southbound_client::ResourceState;

use super::*;
use crate::snapshot::NodeSnapshot;

const GATEWAY: &str = "spiffe://alpha.example/ns/canal-system/sa/gateway";
const APP: &str = "spiffe://alpha.example/ns/web/sa/front";
const FRIEND: &str = "spiffe://friend.example/ns/web/sa/front";
const FOREIGN: &str = "spiffe://beta.example/ns/web/sa/front";

fn key(name: &str) -> PolicyKey {
    PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: name.parse().unwrap(),
    }
}

fn clause(attribute: Attribute, any: AttributeMatch) -> Clause {
    Clause {
        attribute,
        any: vec![any],
        none: vec![],
    }
}

fn principal(of: &str) -> Clause {
    clause(
        Attribute::SourcePrincipal,
        AttributeMatch::Exact(of.trim_start_matches("spiffe://").into()),
    )
}

fn policy(name: &str, action: AuthorizationAction, when: Vec<Clause>) -> Authorization {
    Authorization {
        key: key(name),
        target: PolicyTarget::Namespace("b".parse().unwrap()),
        action,
        rules: vec![PolicyRule {
            when,
            ..PolicyRule::default()
        }],
        dry_run: false,
        broken: None,
    }
}

fn strict(ports: &[(u16, PeerMode)], mode: Option<PeerMode>) -> PeerAuthentication {
    PeerAuthentication {
        key: key("peer"),
        target: PolicyTarget::Tenant,
        mode,
        ports: ports.iter().copied().collect(),
        created: 1,
    }
}

fn pod() -> LocalPod {
    let text = r#"{"uid":"alpha/b/app-0","namespace":"b","name":"app-0","serviceAccount":"app","netns":"/n","cgroup":"/c",
        "ips":["10.1.1.2"],"labels":{"app":"app"}}"#;
    LocalPod::parse("f", text.as_bytes()).unwrap()
}

/// Returns the pod's policies if these are the tenant's. The tenant federates with friend.example.
fn of(authorizations: Vec<Authorization>, peers: Vec<PeerAuthentication>) -> PodPolicy {
    let bundle = |trust_domain: &str, federated| {
        p::Resource::Bundle(TrustBundle {
            tenant: "alpha".parse().unwrap(),
            trust_domain: trust_domain.parse().unwrap(),
            roots: vec![],
            revoked: vec![],
            blocked: vec![],
            federated,
        })
    };
    let shop: ServiceKey = "alpha/b/shop".parse().unwrap();
    let mut all = vec![
        p::Resource::Tenant(p::Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec![],
            gateway_cidrs: vec![],
            outbound_traffic_policy: p::OutboundTrafficPolicy::Deny,
            resolvers: Vec::new(),
            keys: Default::default(),
            shares: Default::default(),
        }),
        p::Resource::Workload(p::Workload {
            tenant: "alpha".parse().unwrap(),
            namespace: "b".parse().unwrap(),
            name: "app-0".parse().unwrap(),
            service_account: "app".parse().unwrap(),
            node: "n1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![],
            labels: p::Labels::new(),
            ready: true,
            tunnel: p::TunnelProtocol::Hbone,
            endpoints: vec![p::EndpointPort {
                service: shop,
                port: 80,
                target_port: 8080,
            }],
            udp_ports: Default::default(),
        }),
        bundle("alpha.example", false),
        bundle("friend.example", true),
    ];
    all.extend(authorizations.into_iter().map(p::Resource::Authorization));
    all.extend(peers.into_iter().map(p::Resource::PeerAuthentication));
    let view = NodeSnapshot::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap());
    PodPolicy::renew(
        &PodPolicy::default(),
        view.tenant(&"alpha".parse().unwrap()),
        &pod(),
    )
    .unwrap()
}

/// Returns the query of `identity`, a peer's identity, `identity@gateway`, or `plain`, for port
/// 8080.
fn query(identity: &str) -> AuthorizationQuery {
    let untold = of(vec![], vec![]);
    let source = |peer: &str, forwarded| untold.source(&peer.parse().unwrap(), forwarded).unwrap();
    let (source, address) = match identity.split_once('@') {
        Some((forwarded, _)) => (source(GATEWAY, Some(forwarded)), Some("10.1.9.9")),
        None if identity == "plain" => (ConnectionSource::Plain, Some("10.7.7.7")),
        None if identity == GATEWAY => (source(GATEWAY, None), None),
        None => (source(identity, None), Some("10.1.9.9")),
    };
    AuthorizationQuery {
        source,
        address: address.map(|a| a.parse().unwrap()),
        destination: "10.1.1.2:8080".parse().unwrap(),
        service: None,
    }
}

type ExpectedDecisions<'a> = [(&'a str, Result<(), NodeRefusal>); 7];

fn check(case: &str, policy: &PodPolicy, answers: ExpectedDecisions<'_>) {
    for (identity, want) in answers {
        assert_eq!(
            policy.decide(&query(identity)).map_err(|no| no.refusal),
            want,
            "{case}: {identity}"
        );
    }
}

/// Returns the expected decisions for, in this order: a member, a gateway for a member, a gateway
/// for many, plaintext, a federated peer, a gateway for a federated peer, and a peer of a third
/// trust domain.
fn answers(of: [&str; 7]) -> ExpectedDecisions<'static> {
    let identity = [
        APP,
        "spiffe://alpha.example/ns/web/sa/front@gateway",
        GATEWAY,
        "plain",
        FRIEND,
        "spiffe://friend.example/ns/web/sa/front@gateway",
        FOREIGN,
    ];
    std::array::from_fn(|n| {
        let answer = match of[n] {
            "yes" => Ok(()),
            "no" => Err(NodeRefusal::Denied),
            "undecided" => Err(NodeRefusal::Undecided),
            "strict" => Err(NodeRefusal::StrictPlaintext),
            other => panic!("{other}"),
        };
        (identity[n], answer)
    })
}

/// A case's name, the policy of the pod, and the decision for each source of [`answers`].
type SourceCase = (&'static str, PodPolicy, [&'static str; 7]);

fn path() -> Clause {
    clause(Attribute::Path, AttributeMatch::Exact("/x".into()))
}

fn port(port: u16) -> Clause {
    clause(Attribute::DestinationPort, AttributeMatch::Port(port))
}

/// Returns the policy of a pod with one AuthorizationPolicy.
fn one(action: AuthorizationAction, when: Vec<Clause>) -> PodPolicy {
    of(vec![policy("p", action, when)], vec![])
}

fn identity_and_network_cases() -> Vec<SourceCase> {
    let network = |n: &str| {
        clause(
            Attribute::SourceAddress,
            AttributeMatch::Network(n.parse().unwrap()),
        )
    };
    vec![
        (
            "no policy exists",
            of(vec![], vec![]),
            ["yes", "yes", "yes", "yes", "no", "no", "no"],
        ),
        (
            "a member is allowed",
            one(AuthorizationAction::Allow, vec![principal(APP)]),
            ["yes", "yes", "yes", "no", "no", "no", "no"],
        ),
        (
            "another member is",
            one(
                AuthorizationAction::Allow,
                vec![principal("spiffe://alpha.example/ns/x/sa/y")],
            ),
            ["no", "no", "yes", "no", "no", "no", "no"],
        ),
        (
            "a friend is allowed by name",
            one(AuthorizationAction::Allow, vec![principal(FRIEND)]),
            ["no", "no", "yes", "no", "yes", "yes", "no"],
        ),
        (
            "any peer, but no peer by name",
            one(AuthorizationAction::Allow, vec![port(8080)]),
            ["yes", "yes", "yes", "yes", "no", "no", "no"],
        ),
        (
            "another port",
            one(AuthorizationAction::Allow, vec![port(81)]),
            ["no", "no", "no", "no", "no", "no", "no"],
        ),
        (
            "a member is denied",
            one(AuthorizationAction::Deny, vec![principal(APP)]),
            ["no", "no", "yes", "yes", "no", "no", "no"],
        ),
        (
            "a port is denied",
            one(AuthorizationAction::Deny, vec![port(8080)]),
            ["no", "no", "no", "no", "no", "no", "no"],
        ),
        (
            "plaintext's network is denied",
            one(AuthorizationAction::Deny, vec![network("10.7.0.0/16")]),
            ["yes", "yes", "yes", "no", "no", "no", "no"],
        ),
    ]
}

fn path_and_mode_cases() -> Vec<SourceCase> {
    let broken = Authorization {
        broken: Some("no such field".into()),
        ..policy("p", AuthorizationAction::Allow, vec![])
    };
    let dry = Authorization {
        dry_run: true,
        ..policy("p", AuthorizationAction::Deny, vec![])
    };
    let custom = AuthorizationAction::Custom(key("authorizer"));
    vec![
        (
            "a path is denied",
            one(AuthorizationAction::Deny, vec![path()]),
            ["undecided", "yes", "yes", "undecided", "no", "no", "no"],
        ),
        (
            "a path is allowed",
            one(AuthorizationAction::Allow, vec![path()]),
            ["undecided", "yes", "yes", "undecided", "no", "no", "no"],
        ),
        (
            "a friend's path is",
            one(AuthorizationAction::Allow, vec![principal(FRIEND), path()]),
            ["no", "no", "yes", "no", "undecided", "yes", "no"],
        ),
        (
            "an authorizer is called",
            one(custom, vec![port(8080)]),
            // Only the tenant's own gateway can have called the authorizer before; this hop
            // cannot.
            [
                "undecided",
                "yes",
                "yes",
                "undecided",
                "undecided",
                "no",
                "no",
            ],
        ),
        (
            "broken",
            of(vec![broken], vec![]),
            ["no", "no", "no", "no", "no", "no", "no"],
        ),
        (
            "a dry run",
            of(vec![dry], vec![]),
            ["yes", "yes", "yes", "yes", "no", "no", "no"],
        ),
        (
            "strict",
            of(vec![], vec![strict(&[], Some(PeerMode::Strict))]),
            ["yes", "yes", "yes", "strict", "no", "no", "no"],
        ),
        (
            "strict here",
            of(vec![], vec![strict(&[(8080, PeerMode::Strict)], None)]),
            ["yes", "yes", "yes", "strict", "no", "no", "no"],
        ),
        (
            "strict but here",
            of(
                vec![],
                vec![strict(
                    &[(8080, PeerMode::Permissive)],
                    Some(PeerMode::Strict),
                )],
            ),
            ["yes", "yes", "yes", "yes", "no", "no", "no"],
        ),
    ]
}

#[test]
fn the_source_of_an_identity_bounds_a_nodes_decision() {
    let cases = identity_and_network_cases()
        .into_iter()
        .chain(path_and_mode_cases());
    for (case, policy, want) in cases {
        check(case, &policy, answers(want));
    }
    check(
        "before the first state",
        &PodPolicy::default(),
        answers(["yes"; 7]).map(|(identity, _)| (identity, Err(NodeRefusal::TenantUnknown))),
    );
}

#[test]
fn refusals_name_the_policy_and_the_reason() {
    let refusal_of = |policies: Vec<Authorization>, identity: &str| {
        of(policies, vec![]).decide(&query(identity)).unwrap_err()
    };
    let no = refusal_of(vec![policy("shut", AuthorizationAction::Deny, vec![])], APP);
    assert_eq!(
        (no.why.as_str(), no.policy),
        ("matched policy alpha/b/shut, rule 0", Some(key("shut")))
    );
    let no = refusal_of(
        vec![policy(
            "only",
            AuthorizationAction::Allow,
            vec![principal(FRIEND)],
        )],
        APP,
    );
    assert_eq!(
        (no.why.as_str(), no.policy),
        ("no ALLOW policy matches", None)
    );
    let no = refusal_of(
        vec![policy(
            "get",
            AuthorizationAction::Allow,
            vec![clause(
                Attribute::Method,
                AttributeMatch::Exact("GET".into()),
            )],
        )],
        APP,
    );
    assert_eq!(
        no.why,
        "alpha/b/get depends on request.method, which only a gateway can observe"
    );
    let no = refusal_of(
        vec![policy(
            "ask",
            AuthorizationAction::Custom(key("ext-authz")),
            vec![],
        )],
        APP,
    );
    assert_eq!(
        no.why,
        "alpha/b/ask calls alpha/b/ext-authz, which only a gateway can do"
    );
    let no = refusal_of(vec![], FOREIGN);
    assert_eq!(
        no.why,
        "trust domain beta.example is neither alpha.example nor federated with it"
    );
}

#[test]
fn only_pods_with_something_to_enforce_are_guarded() {
    let elsewhere = Authorization {
        target: PolicyTarget::Namespace("x".parse().unwrap()),
        ..policy("p", AuthorizationAction::Deny, vec![])
    };
    let audit = policy("p", AuthorizationAction::Audit, vec![]);
    let service = Authorization {
        target: PolicyTarget::Service("alpha/b/shop".parse().unwrap()),
        ..policy("p", AuthorizationAction::Deny, vec![])
    };
    for (case, policy, want) in [
        ("nothing", of(vec![], vec![]), false),
        (
            "permissive",
            of(vec![], vec![strict(&[], Some(PeerMode::Permissive))]),
            false,
        ),
        (
            "strict",
            of(vec![], vec![strict(&[], Some(PeerMode::Strict))]),
            true,
        ),
        (
            "strict at a port",
            of(
                vec![],
                vec![strict(&[(1, PeerMode::Strict)], Some(PeerMode::Disable))],
            ),
            true,
        ),
        (
            "a policy",
            of(
                vec![policy("p", AuthorizationAction::Allow, vec![])],
                vec![],
            ),
            true,
        ),
        // An audit refuses nothing, but it has to observe the connection.
        ("an audit", of(vec![audit], vec![]), true),
        (
            "another namespace's policy",
            of(vec![elsewhere], vec![]),
            false,
        ),
        (
            "a service's policy: a client without mTLS does not name a service",
            of(vec![service], vec![]),
            false,
        ),
        // The policies are not known yet, so they may be strict.
        ("before the first state", PodPolicy::default(), true),
    ] {
        assert_eq!(policy.guards_plaintext(), want, "{case}");
    }
}

#[test]
fn a_services_policies_apply_to_connections_that_name_it() {
    let service: ServiceKey = "alpha/b/shop".parse().unwrap();
    let shut = Authorization {
        target: PolicyTarget::Service(service.clone()),
        ..policy("p", AuthorizationAction::Deny, vec![])
    };
    let policy = of(vec![shut], vec![]);
    assert!(policy.decide(&query(APP)).is_ok());
    let by_name = AuthorizationQuery {
        service: Some(service),
        ..query(APP)
    };
    assert_eq!(
        policy.decide(&by_name).map_err(|no| no.refusal),
        Err(NodeRefusal::Denied)
    );
    assert_eq!(policy.names().count(), 1);
}

#[test]
fn audits_and_dry_runs_are_counted_on_paths_without_a_gateway() {
    let dry = Authorization {
        dry_run: true,
        ..policy("dry", AuthorizationAction::Deny, vec![])
    };
    let policy = of(
        vec![
            dry,
            policy("audit", AuthorizationAction::Audit, vec![principal(APP)]),
        ],
        vec![],
    );
    for (identity, want) in [
        (APP, "audit audit dry_run_deny dry"),
        ("plain", "dry_run_deny dry"),
        (GATEWAY, ""),
        ("spiffe://alpha.example/ns/web/sa/front@gateway", ""),
    ] {
        let mut seen = Vec::new();
        policy.observe(&query(identity), &mut |key, kind| {
            seen.push(format!("{} {}", kind.name(), key.name))
        });
        assert_eq!(seen.join(" "), want, "{identity}");
    }
}

#[test]
fn policies_are_rebuilt_only_on_change_and_outlive_their_tenant() {
    let tenant = |a: Vec<Authorization>| {
        let all: Vec<_> = [p::Resource::Tenant(p::Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec![],
            gateway_cidrs: vec![],
            outbound_traffic_policy: p::OutboundTrafficPolicy::Deny,
            resolvers: Vec::new(),
            keys: Default::default(),
            shares: Default::default(),
        })]
        .into_iter()
        .chain(a.into_iter().map(p::Resource::Authorization))
        .collect();
        NodeSnapshot::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap())
    };
    let alpha = "alpha".parse().unwrap();
    let (one, other) = (
        policy("a", AuthorizationAction::Deny, vec![]),
        policy("b", AuthorizationAction::Allow, vec![]),
    );
    let view = tenant(vec![one.clone(), other.clone()]);
    let held = PodPolicy::renew(&PodPolicy::default(), view.tenant(&alpha), &pod()).unwrap();
    let again = tenant(vec![other, one.clone()]);
    assert!(
        PodPolicy::renew(&held, again.tenant(&alpha), &pod()).is_none(),
        "the order has no effect"
    );
    // A tenant without the policy `b` has other policies; one that is gone keeps its last ones.
    let less = tenant(vec![one]);
    assert!(PodPolicy::renew(&held, less.tenant(&alpha), &pod()).is_some());
    assert!(PodPolicy::renew(&held, None, &pod()).is_none());
    assert!(PodPolicy::renew(&PodPolicy::default(), None, &pod()).is_none());

    let state = |resources: Vec<Authorization>| {
        let tenant = p::Resource::Tenant((*view.tenant(&alpha).unwrap().tenant).clone());
        let all = resources
            .into_iter()
            .map(p::Resource::Authorization)
            .chain([tenant])
            .map(Arc::new)
            .collect();
        ResourceState::of_resources(all, Generation(2))
    };
    let (node, two) = ("n1".parse().unwrap(), || {
        vec![
            policy("a", AuthorizationAction::Deny, vec![]),
            policy("b", AuthorizationAction::Allow, vec![]),
        ]
    });
    let basis = |view: &NodeSnapshot| PolicySources::new(view.tenant(&alpha).unwrap(), &pod());
    let same = NodeSnapshot::after(&view, &state(two()), &node);
    assert!(
        basis(&same).is_same(&basis(&view)),
        "equal rules are reused, so that they are not compared again"
    );
    let fewer = NodeSnapshot::after(&view, &state(two().split_off(1)), &node);
    assert!(!basis(&fewer).is_same(&basis(&view)));
}
