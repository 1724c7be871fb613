//! Generates policies, and facts that are likely to match them. The vocabulary is small, so that
//! principals, paths and values collide.
//!
//! For tests only (feature `generate`): implementations of authorization compare themselves with
//! [`canal_oracle::authorization`] on these cases.

use std::collections::BTreeMap;

use canal_model::authorization::Attribute;
use canal_model::policy::canal::{AuthorizerService, ExternalAuthorizer, ExternalAuthorizerSpec};
use canal_model::policy::istio_security::{
    self, AuthorizationPolicy, AuthorizationPolicySpec, AuthorizationRule, DRY_RUN_ANNOTATION,
    MutualTls, MutualTlsMode, OperationSpec, PeerAuthentication, PeerAuthenticationSpec,
    PolicyAction, PolicyTargetRef, Provider, SourceSpec, StringList, WhenCondition,
    WorkloadSelector,
};
use canal_model::policy::{Metadata, Object};
use canal_model::program::Labels;
use canal_oracle::authorization::{OracleFacts, OracleValue};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::routing::{GeneratedRouting, case, metadata, name, pod, port, service, tenant};
use crate::vocabulary::words;

/// A generated tenant with policies, and facts to evaluate.
#[derive(Debug, Clone)]
pub struct GeneratedPolicies {
    pub case: GeneratedRouting,
    pub facts: Vec<OracleFacts>,
}

const PRINCIPALS: [&str; 9] = [
    "alpha.example/ns/shop/sa/web",
    "cluster.local/ns/shop/sa/api",
    "alpha.example/ns/shop/*",
    "*/sa/web",
    "*",
    "beta.example/ns/b/sa/c",
    "beta.example/*",
    "beta*",
    "*c",
];
const TRUST_DOMAINS: [&str; 4] = ["cluster.local", "beta.example", "beta*", "*"];
const NAMESPACES: [&str; 6] = ["shop", "sh*", "*op", "*", "other", "b"];
const ACCOUNTS: [&str; 4] = ["web", "shop/api", "other/web", "b/c"];
const BLOCKS: [&str; 6] = [
    "10.1.0.0/24",
    "10.1.0.1",
    "10.1.1.7",
    "fd00::/16",
    "0.0.0.0/0",
    "::/0",
];
const REQUEST_PRINCIPALS: [&str; 5] = ["https://i/u", "https://i/*", "*/u", "*", "https://j/v"];
const HOSTS: [&str; 9] = [
    "web",
    "WEB.example.com",
    "*.example.com",
    "web:80",
    "web:*",
    "*:81",
    "*",
    "w*",
    "[fd00::1]",
];
const PORTS: [&str; 3] = ["80", "81", "8080"];
const METHODS: [&str; 6] = ["GET", "POST", "G*", "*T", "*", "get"];
const PATHS: [&str; 11] = [
    "/a",
    "/a/*",
    "*.html",
    "/a/{*}",
    "/a/{**}",
    "/{*}/b",
    "/{**}/",
    "*",
    "/",
    "/a/{*}/{**}",
    "/b*",
];
const TEXTS: [&str; 6] = ["x", "x*", "*y", "*", "xy", "1"];
const KEYS: [(&str, &[&str]); 15] = [
    ("source.ip", &BLOCKS),
    ("remote.ip", &BLOCKS),
    ("source.namespace", &NAMESPACES),
    ("source.principal", &PRINCIPALS),
    ("source.serviceAccount", &ACCOUNTS),
    ("request.headers[X-A]", &TEXTS),
    ("request.headers[x-b]", &TEXTS),
    ("request.auth.principal", &REQUEST_PRINCIPALS),
    ("request.auth.audiences", &TEXTS),
    ("request.auth.presenter", &TEXTS),
    ("request.auth.claims[g]", &TEXTS),
    ("request.auth.claims[a][b]", &TEXTS),
    ("destination.ip", &BLOCKS),
    ("destination.port", &PORTS),
    ("connection.sni", &HOSTS),
];

/// Generates complete tenants with policies, and 24 sets of facts each.
pub fn policies() -> impl Strategy<Value = GeneratedPolicies> {
    (vec(policy(), 1..6), vec(peer(), 0..5), vec(facts(), 24)).prop_map(
        |(policies, peers, facts)| {
            let mut objects = vec![tenant()];
            let services: [(&str, &[(u16, &str)]); 3] = [
                ("web", &[(80, "http"), (81, "any")]),
                ("api", &[(80, "grpc")]),
                ("cache", &[(6379, "redis")]),
            ];
            objects.extend(
                services
                    .iter()
                    .enumerate()
                    .map(|(at, (name, ports))| service(at, name, ports)),
            );
            objects.extend((1..=4).map(pod));
            objects.extend(["authz", "other"].map(authorizer));
            objects.extend(
                policies
                    .into_iter()
                    .enumerate()
                    .map(|(at, policy)| named(&format!("policy-{at}"), policy)),
            );
            objects.extend(peers.into_iter().enumerate().map(
                |(at, (namespace, created, spec))| {
                    let metadata = Metadata {
                        namespace: name(namespace),
                        ..metadata(&format!("peer-{at}"), created)
                    };
                    Object::PeerAuthentication(PeerAuthentication { metadata, spec })
                },
            ));
            GeneratedPolicies {
                case: case(objects, Vec::new()),
                facts,
            }
        },
    )
}

fn named(own: &str, (namespace, dry_run, spec): (&str, bool, AuthorizationPolicySpec)) -> Object {
    let annotations = if dry_run {
        BTreeMap::from([(DRY_RUN_ANNOTATION.to_owned(), "true".to_owned())])
    } else {
        BTreeMap::new()
    };
    let metadata = Metadata {
        namespace: name(namespace),
        annotations,
        ..metadata(own, None)
    };
    Object::AuthorizationPolicy(AuthorizationPolicy { metadata, spec })
}

fn authorizer(own: &str) -> Object {
    let service = AuthorizerService {
        name: name("api"),
        namespace: None,
        port: port(80),
    };
    let spec = ExternalAuthorizerSpec {
        service,
        timeout: None,
        fail_open: false,
        include_request_headers: Vec::new(),
        include_request_body: None,
    };
    Object::ExternalAuthorizer(ExternalAuthorizer {
        metadata: metadata(own, None),
        spec,
    })
}

fn some_namespace() -> impl Strategy<Value = &'static str> {
    prop_oneof![6 => Just("shop"), 2 => Just("istio-system"), 1 => Just("other")]
}

fn selector() -> impl Strategy<Value = Option<WorkloadSelector>> {
    let labels = prop_oneof![
        Just(("app", "web")),
        Just(("app", "api")),
        Just(("version", "v2"))
    ];
    option::weighted(
        0.4,
        labels.prop_map(|(k, v)| WorkloadSelector {
            match_labels: Labels::from([(k.to_owned(), v.to_owned())]),
        }),
    )
}

fn policy() -> impl Strategy<Value = (&'static str, bool, AuthorizationPolicySpec)> {
    // Allow and Deny decide requests, so they are frequent; an Audit that is whole only reports.
    let action = prop_oneof![
        6 => Just(PolicyAction::Allow),
        4 => Just(PolicyAction::Deny),
        1 => Just(PolicyAction::Audit),
        2 => Just(PolicyAction::Custom),
    ];
    let target = |service: &str| PolicyTargetRef {
        group: String::new(),
        kind: "Service".into(),
        name: name(service),
        namespace: None,
    };
    // Nobody measured the weights; the parts below are rare, so that most policies have none of
    // them.
    let targets = option::weighted(0.15, vec(select(vec!["web", "api"]).prop_map(target), 1..3));
    // No ExternalAuthorizer has the last name, so a policy that names it is broken.
    let provider = select(vec!["authz", "other", "nobody"]);
    let parts = (
        some_namespace(),
        prop::bool::weighted(0.15),
        selector(),
        targets,
        vec(rule(), 0..4),
        action,
        provider,
    );
    parts.prop_map(
        |(namespace, dry_run, selector, targets, mut rules, action, provider)| {
            // Without rules such a policy is broken or never matches, so it gets the empty rule,
            // which always matches.
            if rules.is_empty() && action != PolicyAction::Allow {
                rules.push(AuthorizationRule::default());
            }
            let spec = AuthorizationPolicySpec {
                // Istio refuses a policy with both a selector and target references.
                selector: selector.filter(|_| targets.is_none()),
                target_refs: targets,
                provider: (action == PolicyAction::Custom).then(|| Provider {
                    name: provider.to_owned(),
                }),
                action,
                rules,
                ..AuthorizationPolicySpec::default()
            };
            (namespace, dry_run, spec)
        },
    )
}

fn rule() -> impl Strategy<Value = AuthorizationRule> {
    let from = source().prop_map(|source| istio_security::FromClause {
        source: Some(source),
    });
    let to = operation().prop_map(|operation| istio_security::ToClause {
        operation: Some(operation),
    });
    let when = select(KEYS.to_vec()).prop_flat_map(|(key, values)| {
        value_lists(values, values, 0.98).prop_map(move |(values, not_values)| WhenCondition {
            key: key.to_owned(),
            values,
            not_values,
        })
    });
    (
        option::weighted(0.5, vec(from, 1..3)),
        option::weighted(0.5, vec(to, 1..3)),
        option::weighted(0.4, vec(when, 1..3)),
    )
        .prop_map(|(from, to, when)| AuthorizationRule { from, to, when })
}

/// Generates a list of values and its opposite: with the probability `weight`, one of them or both
/// are set.
fn value_lists(
    any: &'static [&'static str],
    none: &'static [&'static str],
    weight: f64,
) -> impl Strategy<Value = (StringList, StringList)> + Clone {
    let list = |of| vec(words(of), 1..4);
    let pair = prop_oneof![
        3 => list(any).prop_map(|any| (Some(any), None)),
        1 => list(none).prop_map(|none| (None, Some(none))),
        1 => (list(any), list(none)).prop_map(|(any, none)| (Some(any), Some(none))),
    ];
    option::weighted(weight, pair).prop_map(Option::unwrap_or_default)
}

fn source() -> impl Strategy<Value = SourceSpec> {
    // About one in fifty sources has an invalid range, which breaks the policy.
    const ODD_BLOCKS: [&str; 7] = [
        "10.1.0.0/24",
        "10.1.0.1",
        "10.1.1.7",
        "fd00::/16",
        "0.0.0.0/0",
        "::/0",
        "10.1",
    ];
    // The numbers are probabilities. Identities decide most policies, so they are frequent.
    let lists = (
        value_lists(&PRINCIPALS, &PRINCIPALS, 0.35),
        value_lists(&REQUEST_PRINCIPALS, &REQUEST_PRINCIPALS, 0.2),
        value_lists(&NAMESPACES, &NAMESPACES, 0.3),
        value_lists(&ACCOUNTS, &ACCOUNTS, 0.3),
        value_lists(&BLOCKS, &ODD_BLOCKS, 0.2),
        value_lists(&BLOCKS, &BLOCKS, 0.1),
        value_lists(&TRUST_DOMAINS, &TRUST_DOMAINS, 0.15),
    );
    lists.prop_map(
        |(
            principals,
            request_principals,
            namespaces,
            accounts,
            blocks,
            remote_blocks,
            trust_domains,
        )| {
            let mut source = SourceSpec {
                principals: principals.0,
                not_principals: principals.1,
                request_principals: request_principals.0,
                not_request_principals: request_principals.1,
                namespaces: namespaces.0,
                not_namespaces: namespaces.1,
                ip_blocks: blocks.0,
                not_ip_blocks: blocks.1,
                remote_ip_blocks: remote_blocks.0,
                not_remote_ip_blocks: remote_blocks.1,
                trust_domains: trust_domains.0,
                not_trust_domains: trust_domains.1,
                ..SourceSpec::default()
            };
            // Service accounts are not allowed together with principals or namespaces.
            if source.principals.is_none()
                && source.not_principals.is_none()
                && source.namespaces.is_none()
                && source.not_namespaces.is_none()
            {
                (source.service_accounts, source.not_service_accounts) = accounts;
            }
            // A source without conditions would break the policy.
            if source == SourceSpec::default() {
                source.principals = Some(vec!["*".to_owned()]);
            }
            source
        },
    )
}

fn operation() -> impl Strategy<Value = OperationSpec> {
    let lists = (
        value_lists(&HOSTS, &HOSTS, 0.3),
        value_lists(&PORTS, &PORTS, 0.3),
        value_lists(&METHODS, &METHODS, 0.4),
        value_lists(&PATHS, &PATHS, 0.5),
    );
    lists.prop_map(|(hosts, ports, methods, paths)| {
        let mut operation = OperationSpec {
            hosts: hosts.0,
            not_hosts: hosts.1,
            ports: ports.0,
            not_ports: ports.1,
            methods: methods.0,
            not_methods: methods.1,
            paths: paths.0,
            not_paths: paths.1,
        };
        if operation == OperationSpec::default() {
            operation.methods = Some(vec!["*".to_owned()]);
        }
        operation
    })
}

fn peer() -> impl Strategy<Value = (&'static str, Option<u64>, PeerAuthenticationSpec)> {
    let mode = || {
        select(vec![
            MutualTlsMode::Unset,
            MutualTlsMode::Disable,
            MutualTlsMode::Permissive,
            MutualTlsMode::Strict,
        ])
        .prop_map(|mode| MutualTls { mode })
    };
    let ports = btree_map(words(&PORTS), mode(), 0..3);
    (
        some_namespace(),
        option::of(0..3u64),
        selector(),
        mode(),
        ports,
    )
        .prop_map(|(namespace, created, selector, mtls, ports)| {
            let port_level_mtls = if selector.is_some() {
                ports
            } else {
                BTreeMap::new()
            };
            (
                namespace,
                created,
                PeerAuthenticationSpec {
                    selector,
                    mtls,
                    port_level_mtls,
                },
            )
        })
}

/// The values that the generated facts take, by attribute.
const FACT_VALUES: [(Attribute, &[&str]); 10] = [
    (
        Attribute::SourcePrincipal,
        &[
            "alpha.example/ns/shop/sa/web",
            "alpha.example/ns/shop/sa/api",
            "beta.example/ns/b/sa/c",
            "alpha.example/ns/other/sa/web",
        ],
    ),
    (Attribute::SourceNamespace, &["shop", "other", "b"]),
    (
        Attribute::SourceServiceAccount,
        &["shop/web", "shop/api", "b/c"],
    ),
    (
        Attribute::RequestPrincipal,
        &["https://i/u", "https://i/w", "https://j/v"],
    ),
    (Attribute::RequestAudience, &["x", "xy", "y"]),
    (Attribute::RequestPresenter, &["x", "1"]),
    (
        Attribute::Host,
        &[
            "web",
            "Web:80",
            "web.example.com",
            "WEB.EXAMPLE.COM.:81",
            "web.",
            "a.example.com",
            "[FD00::1]:80",
            "[fd00::1]",
            "web:81",
            "",
        ],
    ),
    (Attribute::Method, &["GET", "POST", "PUT", "get"]),
    (
        Attribute::Path,
        &[
            "/a", "/a/b", "/a/", "/a/b/c", "/x.html", "/", "/b/b", "/c/b/", "/bb", "*",
        ],
    ),
    (Attribute::ServerName, &["web", "web.example.com", "other"]),
];

/// Generates facts of a hop: each attribute is unknown, absent, or has values.
pub fn facts() -> impl Strategy<Value = OracleFacts> {
    let claim = |names: &[&str]| {
        Attribute::RequestClaim(names.iter().map(|name| (*name).to_owned()).collect())
    };
    // One text contains a comma, as the values of a repeated header are joined by commas.
    let texts: &[&str] = &["x", "xy", "y", "", "1", "x,y"];
    let others = [
        Attribute::Header("x-a".into()),
        Attribute::Header("x-b".into()),
        claim(&["g"]),
        claim(&["a", "b"]),
    ];
    let all: Vec<(Attribute, &'static [&'static str])> = FACT_VALUES
        .into_iter()
        .chain(others.into_iter().map(|a| (a, texts)))
        .collect();
    let of_texts: Vec<_> = all
        .into_iter()
        .map(|(attribute, words)| attribute_values(attribute, text(words)))
        .collect();
    // One address is IPv4-mapped (`::ffff:`), which both sides must treat in the same way.
    let address = select(vec![
        "10.1.0.1",
        "10.1.1.7",
        "10.9.9.9",
        "fd00::1",
        "::ffff:10.1.0.1",
        "2001:db8::1",
    ]);
    // Each text is an address, so the port is never used.
    let address = address
        .prop_map(|text| {
            text.parse()
                .map_or(OracleValue::Port(0), OracleValue::Address)
        })
        .boxed();
    let addresses = [
        Attribute::SourceAddress,
        Attribute::RemoteAddress,
        Attribute::DestinationAddress,
    ];
    let addresses: Vec<_> = addresses
        .into_iter()
        .map(|attribute| attribute_values(attribute, address.clone()))
        .collect();
    let port = attribute_values(
        Attribute::DestinationPort,
        select(vec![80u16, 81, 6379])
            .prop_map(OracleValue::Port)
            .boxed(),
    );
    (of_texts, addresses, port, any::<bool>()).prop_map(|(texts, addresses, port, is_complete)| {
        let mut facts = OracleFacts { is_complete, ..OracleFacts::default() };
        for (attribute, values) in texts.into_iter().chain(addresses).chain([port]) {
            match values {
                Some(values) => drop(facts.values.insert(attribute, values)),
                None => drop(facts.unseen.insert(attribute)),
            }
        }
        // Of the generated principals, only those of beta.example are outside the own trust domain.
        let is_beta = |value: &OracleValue| matches!(value, OracleValue::Text(text) if text.starts_with("beta."));
        facts.is_foreign = facts.values.get(&Attribute::SourcePrincipal).is_some_and(|values| values.iter().any(is_beta));
        facts
    })
}

fn text(words: &'static [&'static str]) -> BoxedStrategy<OracleValue> {
    select(words)
        .prop_map(|word: &str| OracleValue::Text(word.to_owned()))
        .boxed()
}

/// Generates the values of an attribute; `None` means unknown. Most are known, as at a gateway;
/// some have several values.
fn attribute_values(
    attribute: Attribute,
    value: BoxedStrategy<OracleValue>,
) -> impl Strategy<Value = (Attribute, Option<Vec<OracleValue>>)> {
    let values = prop_oneof![1 => Just(Vec::new()), 6 => vec(value.clone(), 1), 1 => vec(value, 2)];
    option::weighted(0.85, values).prop_map(move |values| (attribute.clone(), values))
}
