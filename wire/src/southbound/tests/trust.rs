//! Tests of zero trust's resources: each form of each round-trips, and unknown values or values
//! over a limit are refused.

use std::time::Duration;

use canal_model::authorization::{self as a, Attribute as A, AttributeMatch as M};
use canal_model::trust as t;

use super::*;
use wire::attribute::Kind as K;
use wire::r#match::Match as W;

pub(super) fn policy(name: &str) -> a::PolicyKey {
    a::PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "shop".parse().unwrap(),
        name: name.parse().unwrap(),
    }
}

fn clause(attribute: A, any: Vec<M>, none: Vec<M>) -> a::Clause {
    a::Clause {
        attribute,
        any,
        none,
    }
}

/// Returns one clause for every attribute, with all matches that fit it.
fn clauses() -> Vec<a::Clause> {
    let texts = || {
        vec![
            M::Exact("a".into()),
            M::Prefix("b".into()),
            M::Suffix("c".into()),
            M::Present,
        ]
    };
    let nets = || {
        vec![
            M::Network("10.0.0.0/8".parse().unwrap()),
            M::Network("fd00::/8".parse().unwrap()),
        ]
    };
    let words = [
        A::SourcePrincipal,
        A::SourceNamespace,
        A::SourceServiceAccount,
        A::RequestPrincipal,
        A::RequestAudience,
        A::RequestPresenter,
        A::RequestClaim(vec!["a".into(), "b.c/d".into()]),
        A::Header("x-a".into()),
        A::Host,
        A::Method,
        A::ServerName,
    ];
    let mut all: Vec<_> = words
        .into_iter()
        // The last argument has the values that the clause excludes.
        .map(|a| clause(a, texts(), vec![M::Exact(String::new())]))
        .collect();
    all.extend(
        [A::SourceAddress, A::RemoteAddress, A::DestinationAddress]
            .map(|a| clause(a, nets(), vec![])),
    );
    all.push(clause(
        A::DestinationPort,
        vec![],
        vec![M::Port(1), M::Port(65535)],
    ));
    all.push(clause(
        A::Path,
        [texts(), vec![M::Template("/a/{*}/{**}".into())]].concat(),
        vec![],
    ));
    all
}

fn authorization(action: a::AuthorizationAction, target: a::PolicyTarget) -> a::Authorization {
    let rule = a::PolicyRule {
        from: vec![clauses(), vec![]],
        to: vec![clauses()],
        when: clauses(),
    };
    a::Authorization {
        key: policy("p"),
        target,
        action,
        rules: vec![rule, a::PolicyRule::default()],
        dry_run: true,
        broken: Some("x".into()),
    }
}

pub(super) fn samples() -> Vec<Resource> {
    let labels = p::Labels::from([("app".into(), "web".into())]);
    let workloads = |namespace: Option<&str>| a::PolicyTarget::Workloads {
        namespace: namespace.map(|n| n.parse().unwrap()),
        labels: labels.clone(),
    };
    let targets = [
        (a::AuthorizationAction::Allow, a::PolicyTarget::Tenant),
        (
            a::AuthorizationAction::Deny,
            a::PolicyTarget::Namespace("shop".parse().unwrap()),
        ),
        (a::AuthorizationAction::Audit, workloads(None)),
        (
            a::AuthorizationAction::Custom(policy("opa")),
            workloads(Some("shop")),
        ),
        (
            a::AuthorizationAction::Allow,
            a::PolicyTarget::Service(key("alpha/shop/web")),
        ),
    ];
    let mut all: Vec<Resource> = targets
        .into_iter()
        .map(|(action, t)| Resource::Authorization(authorization(action, t)))
        .collect();
    all.extend(peers());
    all.extend(trust());
    let jwt = |keys: Option<&str>| a::JwtRule {
        issuer: "https://issuer".into(),
        audiences: vec!["a".into()],
        keys: keys.map(Into::into),
        headers: vec![("x-jwt".into(), "Bearer ".into())],
        parameters: vec!["token".into()],
        cookies: vec!["c".into()],
        forward: true,
        payload_header: keys.map(|_| "x-payload".into()),
        claim_headers: vec![
            ("x-sub".into(), vec!["sub".into()]),
            ("x-g".into(), vec!["a".into(), "b".into()]),
        ],
    };
    all.push(Resource::Authentication(a::Authentication {
        key: policy("jwt"),
        target: a::PolicyTarget::Tenant,
        rules: vec![jwt(None), jwt(Some("{\"keys\":[]}"))],
        broken: None,
    }));
    all.push(Resource::Authorizer(a::Authorizer {
        key: policy("opa"),
        service: key("alpha/shop/opa"),
        port: 9000,
        timeout: Duration::from_millis(250),
        fail_open: true,
        headers: vec!["x-a".into()],
        body_bytes: 8192,
    }));
    all
}

fn peers() -> Vec<Resource> {
    let modes = [
        None,
        Some(a::PeerMode::Strict),
        Some(a::PeerMode::Permissive),
        Some(a::PeerMode::Disable),
    ];
    let peer = |mode: Option<a::PeerMode>| {
        Resource::PeerAuthentication(a::PeerAuthentication {
            key: policy("peer"),
            target: a::PolicyTarget::Tenant,
            mode,
            ports: mode.into_iter().map(|m| (8080, m)).collect(),
            created: 1_700_000_000,
        })
    };
    modes.into_iter().map(peer).collect()
}

fn trust() -> Vec<Resource> {
    let tenant = || "alpha".parse().unwrap();
    let termination = |certificate, clients, broken: Option<&str>| {
        Resource::Termination(t::Termination {
            service: key("alpha/shop/web"),
            port: 443,
            certificate,
            clients,
            required: broken.is_none(),
            broken: broken.map(Into::into),
        })
    };
    let entitlement = |requester, identities: &[&str]| {
        let identities = identities.iter().map(|i| i.parse().unwrap()).collect();
        Resource::Entitlement(t::Entitlement {
            tenant: tenant(),
            requester,
            identities,
        })
    };
    vec![
        Resource::Bundle(t::TrustBundle {
            tenant: tenant(),
            trust_domain: "beta.example".parse().unwrap(),
            roots: vec!["-----BEGIN CERTIFICATE-----\n".into()],
            revoked: vec!["-----BEGIN X509 CRL-----\n".into()],
            blocked: vec!["spiffe://beta.example/ns/shop/sa/mallory".parse().unwrap()],
            federated: true,
        }),
        Resource::KeyServer(t::KeyServer {
            tenant: tenant(),
            name: "own".parse().unwrap(),
            addresses: vec![
                "10.1.0.9:15013".parse().unwrap(),
                "[fd00::9]:15013".parse().unwrap(),
            ],
        }),
        termination(
            t::TerminationCertificate::Mesh,
            t::ClientCertificates::None,
            None,
        ),
        termination(
            t::TerminationCertificate::Mesh,
            t::ClientCertificates::Optional,
            Some("why"),
        ),
        termination(
            t::TerminationCertificate::KeyServer("own".parse().unwrap()),
            t::ClientCertificates::Required,
            None,
        ),
        entitlement(
            t::KeyRequester::Node("n1".parse().unwrap()),
            &["spiffe://a/ns/b/sa/c", "spiffe://a/ns/b/sa/d"],
        ),
        entitlement(t::KeyRequester::Gateway("r1".parse().unwrap()), &[]),
    ]
}

#[test]
fn a_tenants_key_location_round_trips() {
    let Resource::Tenant(tenant) = parents().remove(0) else {
        unreachable!()
    };
    for place in [t::KeyLocation::Local, t::KeyLocation::KeyServer] {
        for algorithm in [t::KeyAlgorithm::EcdsaP256, t::KeyAlgorithm::Rsa2048] {
            for local_fallback in [false, true] {
                let keys = t::KeyPolicy {
                    location: place,
                    algorithm,
                    local_fallback,
                };
                let resource = Resource::Tenant(p::Tenant {
                    keys,
                    ..tenant.clone()
                });
                assert_eq!(
                    decode(ResourceKind::Tenant, "alpha", &encode(&resource)).unwrap(),
                    resource
                );
            }
        }
    }
    let mut message = wire::Tenant::from(&tenant);
    message.keys = Some(wire::KeyPolicy {
        location: 9,
        ..Default::default()
    });
    let e = decode(ResourceKind::Tenant, "alpha", &message.encode_to_vec())
        .unwrap_err()
        .to_string();
    assert!(e.contains("keys.location"), "{e}");
}

fn check<M: Message>(kind: ResourceKind, name: &str, cases: Vec<(&str, M, &str)>) {
    for (case, message, text) in cases {
        let e = decode(kind, name, &message.encode_to_vec())
            .expect_err(case)
            .to_string();
        assert!(e.contains(text), "{case}: {e}");
    }
}

fn with<M: Clone>(message: &M, change: impl FnOnce(&mut M)) -> M {
    let mut message = message.clone();
    change(&mut message);
    message
}

/// Returns the message of a rule with one clause.
fn ruled(attribute: wire::attribute::Kind, path: &[&str], m: wire::r#match::Match) -> wire::Rule {
    let attribute = wire::Attribute {
        kind: attribute.into(),
        path: path.iter().map(ToString::to_string).collect(),
    };
    let clause = wire::Clause {
        attribute: Some(attribute),
        any: vec![wire::Match { r#match: Some(m) }],
        none: vec![],
    };
    wire::Rule {
        from: vec![wire::All {
            clauses: vec![clause],
        }],
        to: vec![],
        when: None,
    }
}

fn good_authorization() -> wire::Authorization {
    wire::Authorization::from(&authorization(
        a::AuthorizationAction::Allow,
        a::PolicyTarget::Tenant,
    ))
}

/// Returns a policy with this rule alone.
fn one(rule: wire::Rule) -> wire::Authorization {
    with(&good_authorization(), |m| m.rules = vec![rule])
}

fn exact() -> W {
    W::Exact("a".into())
}

fn many(n: usize) -> wire::Rule {
    with(&ruled(K::Host, &[], exact()), |r| {
        let any = &mut r.from[0].clauses[0].any;
        *any = vec![any[0].clone(); n];
    })
}

/// A case's name, a broken policy, and a part of the text that the NACK must contain.
type PolicyCase = (&'static str, wire::Authorization, &'static str);

fn broken_actions_and_targets() -> Vec<PolicyCase> {
    let good = good_authorization();
    // The policy belongs to alpha.
    let other = Some(wire::PolicyKey {
        tenant: "beta".into(),
        namespace: "shop".into(),
        name: "opa".into(),
    });
    let foreign = wire::ServiceKey {
        tenant: "beta".into(),
        namespace: "shop".into(),
        name: "web".into(),
    };
    let to = |target| {
        Some(wire::PolicyTarget {
            target: Some(target),
        })
    };
    let blank = wire::policy_target::Workloads {
        namespace: "shop".into(),
        labels: Default::default(),
    };
    vec![
        (
            "no action",
            with(&good, |m| m.action = None),
            "field action: is missing",
        ),
        (
            "authorizer of another",
            with(&good, |m| {
                m.action = other.map(wire::authorization::Action::Custom)
            }),
            "another tenant",
        ),
        (
            "no target",
            with(&good, |m| m.target = None),
            "field target: is missing",
        ),
        (
            "target of another",
            with(&good, |m| {
                m.target = to(wire::policy_target::Target::Service(foreign))
            }),
            "another tenant",
        ),
        (
            "no labels",
            with(&good, |m| {
                m.target = to(wire::policy_target::Target::Workloads(blank))
            }),
            "labels: is empty",
        ),
    ]
}

fn broken_clauses() -> Vec<PolicyCase> {
    let first = |rule: &mut wire::Rule, f: fn(&mut wire::Clause)| f(&mut rule.from[0].clauses[0]);
    vec![
        (
            "attribute unknown",
            one(with(&ruled(K::Host, &[], exact()), |r| {
                first(r, |c| c.attribute.as_mut().unwrap().kind = 99)
            })),
            "99",
        ),
        (
            "attribute absent",
            one(ruled(K::Nothing, &[], exact())),
            "not known to this build",
        ),
        (
            "match unknown",
            one(with(&ruled(K::Host, &[], exact()), |r| {
                first(r, |c| c.any[0].r#match = None)
            })),
            "field rules.match: is missing",
        ),
        (
            "clause without matches",
            one(with(&ruled(K::Host, &[], exact()), |r| {
                first(r, |c| c.any.clear())
            })),
            "without matches",
        ),
    ]
}

fn broken_matches() -> Vec<PolicyCase> {
    vec![
        (
            "network for a text",
            one(ruled(K::Host, &[], W::Network("10.0.0.0/8".into()))),
            "cannot match Host",
        ),
        (
            "text for a network",
            one(ruled(K::SourceAddress, &[], exact())),
            "cannot match SourceAddress",
        ),
        (
            "text for a port",
            one(ruled(K::DestinationPort, &[], exact())),
            "cannot match DestinationPort",
        ),
        (
            "template for a host",
            one(ruled(K::Host, &[], W::Template("/{*}".into()))),
            "cannot match",
        ),
        (
            "CIDR",
            one(ruled(
                K::SourceAddress,
                &[],
                W::Network("10.0.0.0/99".into()),
            )),
            "is not a CIDR",
        ),
        (
            "port",
            one(ruled(K::DestinationPort, &[], W::Port(0))),
            "0 is not a port",
        ),
        (
            "header in capitals",
            one(ruled(K::Header, &["X-A"], exact())),
            "lower case",
        ),
        (
            "header without name",
            one(ruled(K::Header, &[], exact())),
            "needs one name",
        ),
        (
            "claim without path",
            one(ruled(K::RequestClaim, &[], exact())),
            "without a path",
        ),
        // One path element more than the limit, CLAIM_DEPTH_MAX.
        (
            "claim too deep",
            one(ruled(
                K::RequestClaim,
                &["a"; a::CLAIM_DEPTH_MAX + 1],
                exact(),
            )),
            "more than 16",
        ),
        (
            "path where none is",
            one(ruled(K::Host, &["a"], exact())),
            "neither a claim nor a header",
        ),
    ]
}

fn policies_beyond_their_limits() -> Vec<PolicyCase> {
    let good = good_authorization();
    vec![
        (
            "too many rules",
            with(&good, |m| {
                m.rules = vec![wire::Rule::default(); a::RULES_MAX + 1]
            }),
            "more than 512",
        ),
        (
            "too many sources",
            one(wire::Rule {
                // 513 is one more than the 512 sources, or operations, of a rule.
                from: vec![wire::All::default(); 513],
                ..Default::default()
            }),
            "more than 512",
        ),
        (
            "too many operations",
            one(wire::Rule {
                to: vec![wire::All::default(); 513],
                ..Default::default()
            }),
            "more than 512",
        ),
        (
            "too many clauses",
            one(with(&ruled(K::Host, &[], exact()), |r| {
                r.from[0].clauses = vec![r.from[0].clauses[0].clone(); a::CLAUSES_MAX + 1]
            })),
            "more than 64",
        ),
        (
            "too many values",
            one(many(a::VALUES_MAX + 1)),
            "more than 1024",
        ),
        (
            "value too long",
            one(ruled(
                K::Host,
                &[],
                W::Exact("a".repeat(a::VALUE_BYTES_MAX + 1)),
            )),
            "more than 4096",
        ),
        (
            "reason too long",
            with(&good, |m| {
                m.broken = Some("a".repeat(a::REASON_BYTES_MAX + 1))
            }),
            "more than 1024",
        ),
    ]
}

#[test]
fn broken_policies_are_refused() {
    let cases = [
        broken_actions_and_targets(),
        broken_clauses(),
        broken_matches(),
        policies_beyond_their_limits(),
    ]
    .concat();
    check(ResourceKind::Authorization, "alpha/shop/p", cases);
    let most = one(many(a::VALUES_MAX)).encode_to_vec();
    assert!(
        decode(ResourceKind::Authorization, "alpha/shop/p", &most).is_ok(),
        "the most that is allowed is allowed"
    );
}

/// Checks that broken RequestAuthentications are refused.
fn check_broken_authentications(all: &[Resource]) {
    let Some(Resource::Authentication(jwt)) = all
        .iter()
        .find(|r| r.kind() == ResourceKind::Authentication)
    else {
        unreachable!()
    };
    let good = wire::Authentication::from(jwt);
    let rule = |f: fn(&mut wire::JwtRule)| with(&good, |m| f(&mut m.rules[0]));
    let cases = vec![
        (
            "no issuer",
            rule(|r| r.issuer.clear()),
            "field rules.issuer: is empty",
        ),
        (
            "header in capitals",
            rule(|r| r.headers[0].name = "X".into()),
            "lower case",
        ),
        (
            "payload header",
            rule(|r| r.payload_header = Some("a b".into())),
            "field rules.payload_header",
        ),
        (
            "claim without a path",
            rule(|r| r.claim_headers[0].claim.clear()),
            "without a path",
        ),
        (
            "keys too long",
            rule(|r| r.keys = Some(" ".repeat(a::KEYS_BYTES_MAX + 1))),
            "field rules.keys",
        ),
        (
            "too many audiences",
            rule(|r| r.audiences = vec!["a".into(); a::VALUES_MAX + 1]),
            "field rules.audiences",
        ),
        (
            "too many rules",
            with(&good, |m| {
                m.rules = vec![m.rules[0].clone(); a::JWT_RULES_MAX + 1]
            }),
            "more than 64",
        ),
    ];
    check(ResourceKind::Authentication, "alpha/shop/jwt", cases);
}

/// Checks that broken PeerAuthentications are refused.
fn check_broken_peer_authentications(all: &[Resource]) {
    let Some(Resource::PeerAuthentication(peer)) = all
        .iter()
        .find(|r| r.kind() == ResourceKind::PeerAuthentication)
    else {
        unreachable!()
    };
    let good = wire::PeerAuthentication::from(peer);
    let cases = vec![
        ("mode", with(&good, |m| m.mode = 9), "field mode"),
        (
            "mode of a port",
            with(&good, |m| m.ports = [(80, 0)].into()),
            "field ports: is missing",
        ),
        (
            "port",
            with(&good, |m| m.ports = [(0, 1)].into()),
            "0 is not a port",
        ),
    ];
    check(ResourceKind::PeerAuthentication, "alpha/shop/peer", cases);
}

/// Checks that broken authorizers are refused.
fn check_broken_authorizers(all: &[Resource]) {
    let Some(Resource::Authorizer(authorizer)) =
        all.iter().find(|r| r.kind() == ResourceKind::Authorizer)
    else {
        unreachable!()
    };
    let good = wire::Authorizer::from(authorizer);
    let cases = vec![
        (
            "no time",
            with(&good, |m| m.timeout_ms = 0),
            "field timeout_ms",
        ),
        (
            "too much time",
            with(&good, |m| m.timeout_ms = 60_001),
            "field timeout_ms",
        ),
        (
            "body",
            with(&good, |m| m.body_bytes = a::AUTHORIZER_BODY_BYTES_MAX + 1),
            "field body_bytes",
        ),
        (
            "service of another",
            with(&good, |m| {
                m.service.as_mut().unwrap().tenant = "beta".into()
            }),
            "another tenant",
        ),
    ];
    check(ResourceKind::Authorizer, "alpha/shop/opa", cases);
}

#[test]
fn broken_authentications_are_refused() {
    let all = samples();
    check_broken_authentications(&all);
    check_broken_peer_authentications(&all);
    check_broken_authorizers(&all);
}

/// Checks that broken trust bundles are refused.
fn check_broken_bundles(all: &[Resource]) {
    let Resource::Bundle(bundle) = &all[0] else {
        unreachable!()
    };
    let good = wire::Bundle::from(bundle);
    let cases = vec![
        (
            "no roots",
            with(&good, |m| m.roots.clear()),
            "field roots: is empty",
        ),
        (
            "not PEM",
            with(&good, |m| m.roots = vec!["x".into()]),
            "BEGIN CERTIFICATE",
        ),
        (
            "a certificate for a list",
            with(&good, |m| m.revoked = m.roots.clone()),
            "BEGIN X509 CRL",
        ),
        (
            "too many",
            with(&good, |m| {
                m.roots = vec![m.roots[0].clone(); t::ROOTS_MAX + 1]
            }),
            "more than 16",
        ),
        (
            "too many lists",
            with(&good, |m| {
                m.revoked = vec![m.revoked[0].clone(); t::REVOKED_MAX + 1]
            }),
            "more than 16",
        ),
        (
            "no identity",
            with(&good, |m| m.blocked = vec!["mallory".into()]),
            "field blocked",
        ),
        (
            "too many identities",
            with(&good, |m| {
                m.blocked = vec![m.blocked[0].clone(); t::BLOCKED_IDENTITIES_MAX + 1]
            }),
            "more than 10000",
        ),
        (
            "too long",
            with(&good, |m| m.roots[0] += &" ".repeat(t::PEM_BYTES_MAX)),
            "field roots",
        ),
    ];
    check(ResourceKind::Bundle, "alpha/beta.example", cases);
}

/// Checks that broken key servers are refused.
fn check_broken_key_servers(all: &[Resource]) {
    let Resource::KeyServer(server) = &all[1] else {
        unreachable!()
    };
    let good = wire::KeyServer::from(server);
    let cases = vec![
        (
            "not an address",
            with(&good, |m| m.addresses = vec!["keys.example:1".into()]),
            "is not ip:port",
        ),
        (
            "too many",
            with(&good, |m| {
                m.addresses = vec![m.addresses[0].clone(); t::KEY_SERVER_ADDRESSES_MAX + 1]
            }),
            "more than 16",
        ),
    ];
    check(ResourceKind::KeyServer, "alpha/own", cases);
}

/// Checks that broken terminations are refused.
fn check_broken_terminations(all: &[Resource]) {
    let Resource::Termination(termination) = &all[2] else {
        unreachable!()
    };
    let good = wire::Termination::from(termination);
    let cases = vec![
        ("clients", with(&good, |m| m.clients = 9), "field clients"),
        (
            "certificate",
            with(&good, |m| m.certificate = None),
            "field certificate: is missing",
        ),
        ("port", with(&good, |m| m.port = 0), "0 is not a port"),
    ];
    check(ResourceKind::Termination, "alpha/shop/web:443", cases);
}

/// Checks that broken entitlements are refused.
fn check_broken_entitlements(all: &[Resource]) {
    // `trust` returns the entitlement of a node sixth.
    let Resource::Entitlement(entitlement) = &all[5] else {
        unreachable!()
    };
    let good = wire::Entitlement::from(entitlement);
    let cases = vec![
        (
            "requester",
            with(&good, |m| m.requester = None),
            "field requester: is missing",
        ),
        (
            "not an identity",
            with(&good, |m| m.identities[0] = "a".into()),
            "field identities",
        ),
        (
            "not sorted",
            with(&good, |m| m.identities.reverse()),
            "not sorted",
        ),
        (
            "twice",
            with(&good, |m| m.identities = vec![m.identities[0].clone(); 2]),
            "without duplicates",
        ),
        (
            "two trust domains",
            with(&good, |m| m.identities.push("spiffe://z/ns/b/sa/c".into())),
            "another trust domain",
        ),
        (
            "too many",
            with(&good, |m| {
                m.identities = vec![m.identities[0].clone(); t::IDENTITIES_MAX + 1]
            }),
            "more than 4096",
        ),
    ];
    check(ResourceKind::Entitlement, "alpha/node/n1", cases);
}

#[test]
fn broken_trust_is_refused() {
    let all = trust();
    check_broken_bundles(&all);
    check_broken_key_servers(&all);
    check_broken_terminations(&all);
    check_broken_entitlements(&all);
}
