//! Tests that reach every limit of policies, trust and keys: input beyond a limit fails closed with
//! a diagnostic, and input at it works.

use std::fmt::Write;
use std::sync::Arc;

use canal_compiler::limits::*;
use canal_compiler::{CompileOutput, compile};
use canal_model::authorization::*;
use canal_model::program::Resource;
use canal_model::route_authorizer::{
    ROUTE_AUTHORIZER_HEADERS_MAX, ROUTE_AUTHORIZER_PATH_BYTES_MAX,
};
use canal_model::trust::{IDENTITIES_MAX, KEY_SERVER_ADDRESSES_MAX};

use crate::parsed_tenant::{ParsedTenant, assert_decodes};

const BASE: &str = "
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.0.0.0/8], keys: {location: KeyServer}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 192.168.0.1, selector: {app: web}, ports: [{name: grpc, port: 80}]}
---
";

fn output(yaml: &str) -> CompileOutput {
    output_in("alpha.example", yaml)
}

fn output_in(trust_domain: &str, yaml: &str) -> CompileOutput {
    let base = BASE.replace("alpha.example", trust_domain);
    let tenant = ParsedTenant::parse("alpha", "limits.yaml", &format!("{base}{yaml}"));
    let output = compile(&tenant.input());
    // At each limit and beyond it.
    assert_decodes(&output);
    output
}

fn policy(spec: &str) -> String {
    format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p}}\nspec: {{{spec}}}\n---\n"
    )
}

fn token(spec: &str) -> String {
    format!(
        "apiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {{name: t}}\nspec: {{{spec}}}\n---\n"
    )
}

/// Returns whether each policy is broken.
fn broken(output: &CompileOutput) -> Vec<bool> {
    let all = output
        .resources
        .iter()
        .filter_map(|resource| match resource {
            Resource::Authorization(policy) => Some(policy.broken.is_some()),
            Resource::Authentication(policy) => Some(policy.broken.is_some()),
            _ => None,
        });
    all.collect()
}

fn list(count: usize, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(", ")
}

/// Checks that the policy works at the limit, and that it is broken beyond it with `problem` among
/// the diagnostics.
#[track_caller]
fn check(limit: usize, problem: &str, yaml: impl Fn(usize) -> String) {
    let fine = output(&yaml(limit));
    assert!(
        !fine
            .diagnostics
            .iter()
            .any(|d| d.problem.contains("more than")),
        "at the limit: {:?}",
        fine.diagnostics
    );
    assert!(
        !broken(&fine).is_empty() && broken(&fine).iter().all(|broken| !broken),
        "at the limit"
    );
    let beyond = output(&yaml(limit + 1));
    assert!(
        beyond
            .diagnostics
            .iter()
            .any(|d| d.problem.contains(problem)),
        "{:?}",
        beyond.diagnostics
    );
    assert!(
        !broken(&beyond).is_empty() && broken(&beyond).iter().all(|broken| *broken),
        "beyond the limit"
    );
}

#[test]
fn rules_and_their_parts() {
    check(RULES_MAX, "rules, more than", |n| {
        policy(&format!("rules: [{}]", list(n, |_| "{}".into())))
    });
    let from = |n| list(n, |at| format!("{{source: {{namespaces: [n{at}]}}}}"));
    check(ALTERNATIVES_MAX, "items, more than", |n| {
        policy(&format!("rules: [{{from: [{}]}}]", from(n)))
    });
    let to = |n| list(n, |at| format!("{{operation: {{methods: [M{at}]}}}}"));
    check(ALTERNATIVES_MAX, "items, more than", |n| {
        policy(&format!("rules: [{{to: [{}]}}]", to(n)))
    });
    let when = |n| {
        list(n, |at| {
            format!("{{key: 'request.headers[x{at}]', values: [a]}}")
        })
    };
    check(CLAUSES_MAX, "items, more than", |n| {
        policy(&format!("rules: [{{when: [{}]}}]", when(n)))
    });
    let values = |n| list(n, |at| format!("n{at}"));
    check(VALUES_MAX, "items, more than", |n| {
        policy(&format!(
            "rules: [{{from: [{{source: {{namespaces: [{}]}}}}]}}]",
            values(n)
        ))
    });
}

/// S3: a list and its opposite form one clause, whose length data planes limit.
#[test]
fn list_and_its_opposite_share_one_limit() {
    let values = |n, what: &str| list(n, |at| format!("{what}{at}"));
    let half = VALUES_MAX / 2;
    check(VALUES_MAX - half, "more than", |n| {
        let operation = format!(
            "paths: [{}], notPaths: [{}]",
            values(half, "/a"),
            values(n, "/b")
        );
        policy(&format!(
            "action: DENY, rules: [{{to: [{{operation: {{{operation}}}}}]}}]"
        ))
    });
    check(VALUES_MAX - half, "more than", |n| {
        let lists = format!(
            "values: [{}], notValues: [{}]",
            values(half, "a"),
            values(n, "b")
        );
        policy(&format!(
            "rules: [{{when: [{{key: 'request.headers[x]', {lists}}}]}}]"
        ))
    });
    check(VALUES_MAX - half, "more than", |n| {
        let source = format!(
            "trustDomains: [{}], notTrustDomains: [{}]",
            values(half, "a"),
            values(n, "b")
        );
        policy(&format!("rules: [{{from: [{{source: {{{source}}}}}]}}]"))
    });
}

/// S3: the mesh's own trust domain, which replaces `cluster.local`, may be longer than that.
#[test]
fn principal_is_as_long_as_data_planes_read_it() {
    let long = "a-longer-name-than-istio-has-for-its-own.alpha.example";
    let prefix = |n: usize| {
        policy(&format!(
            "rules: [{{from: [{{source: {{principals: ['cluster.local/{}*']}}}}]}}]",
            "a".repeat(n - 15)
        ))
    };
    let limit = VALUE_BYTES_MAX + "cluster.local".len() - long.len();
    for (bytes, is_broken) in [(limit, false), (limit + 1, true), (VALUE_BYTES_MAX, true)] {
        assert_eq!(
            broken(&output_in(long, &prefix(bytes))),
            [is_broken],
            "{bytes} bytes"
        );
    }
}

#[test]
fn values_and_claims() {
    let header = |n: usize| {
        policy(&format!(
            "rules: [{{when: [{{key: 'request.headers[x]', values: [{}]}}]}}]",
            "a".repeat(n)
        ))
    };
    check(VALUE_BYTES_MAX, "bytes, more than", header);
    let claim = |n: usize| {
        policy(&format!(
            "rules: [{{when: [{{key: 'request.auth.claims[{}]', values: [a]}}]}}]",
            vec!["c"; n].join("][")
        ))
    };
    check(CLAIM_DEPTH_MAX, "not the name of a claim", claim);
}

#[test]
fn targets_of_a_policy() {
    let services = |n: usize| {
        let service = |at: usize| {
            format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: s{at}}}\nspec: {{clusterIP: 192.168.1.{}, ports: [{{port: 80}}]}}\n---\n",
                at + 1
            )
        };
        (0..n).map(service).collect::<String>()
    };
    let refs = |n| list(n, |at| format!("{{kind: Service, name: s{at}}}"));
    check(TARGETS_PER_POLICY_MAX, "targets, more than", |n| {
        services(n) + &policy(&format!("targetRefs: [{}], rules: [{{}}]", refs(n)))
    });
}

#[test]
fn issuers_and_their_keys() {
    const KEYS: &str = "'{\"keys\":[{\"kty\":\"EC\"}]}'";
    let rules = |n| list(n, |at| format!("{{issuer: i{at}, jwks: {KEYS}}}"));
    check(JWT_RULES_MAX, "rules, more than", |n| {
        token(&format!("jwtRules: [{}]", rules(n)))
    });
    for field in ["audiences", "fromParams", "fromCookies"] {
        let words = |n| list(n, |at| format!("a{at}"));
        check(VALUES_MAX, "items, more than", |n| {
            token(&format!(
                "jwtRules: [{{issuer: i, jwks: {KEYS}, {field}: [{}]}}]",
                words(n)
            ))
        });
    }
    let issuer = |n: usize| {
        token(&format!(
            "jwtRules: [{{issuer: {}, jwks: {KEYS}}}]",
            "i".repeat(n)
        ))
    };
    check(VALUE_BYTES_MAX, "bytes; at most", issuer);
    // Key sets that are too long, or too many URIs, disable only their own issuer.
    let keyed = |output: &CompileOutput| -> Vec<bool> {
        let all = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Authentication(policy) => Some(
                    policy
                        .rules
                        .iter()
                        .map(|rule| rule.keys.is_some())
                        .collect::<Vec<_>>(),
                ),
                _ => None,
            });
        all.flatten().collect()
    };
    let inline = |n: usize| {
        token(&format!(
            "jwtRules: [{{issuer: i, jwks: {KEYS}}}, {{issuer: j, jwks: '{}{}'}}]",
            // The set without its quotes, so that the padding is inside of the value.
            &KEYS[1..KEYS.len() - 1],
            " ".repeat(n)
        ))
    };
    // The two quotes are YAML's and not part of the value.
    let padding = KEYS_BYTES_MAX - (KEYS.len() - 2);
    assert_eq!(keyed(&output(&inline(padding))), [true, true]);
    let beyond = output(&inline(padding + 1));
    assert_eq!(keyed(&beyond), [true, false]);
    assert!(
        beyond
            .diagnostics
            .iter()
            .any(|d| d.problem.contains("key set has")),
        "{:?}",
        beyond.diagnostics
    );
    // The policy stays in force: only the issuer without keys is disabled.
    assert_eq!(broken(&beyond), [false]);
    let uris = |n: usize| {
        let mut yaml = String::new();
        for at in 0..n {
            let name = format!("metadata: {{name: t{at}}}");
            yaml += &token(&format!(
                "jwtRules: [{{issuer: i, jwksUri: 'https://i/{at}'}}]"
            ))
            .replace("metadata: {name: t}", &name);
        }
        output(&yaml)
    };
    assert_eq!(
        uris(JWKS_URIS_PER_TENANT_MAX).jwks.len(),
        JWKS_URIS_PER_TENANT_MAX
    );
    let beyond = uris(JWKS_URIS_PER_TENANT_MAX + 1);
    assert_eq!(beyond.jwks.len(), JWKS_URIS_PER_TENANT_MAX);
    assert!(
        beyond
            .diagnostics
            .iter()
            .any(|d| d.problem.contains("key URLs")),
        "{:?}",
        beyond.diagnostics
    );
}

#[test]
fn authorizers_are_bounded() {
    let authorizer = |spec: &str| {
        format!(
            "apiVersion: canal.mesh/v1\nkind: ExternalAuthorizer\nmetadata: {{name: a}}\nspec: {{service: {{name: web, port: 80}}, {spec}}}\n---\n"
        ) + &policy("action: CUSTOM, provider: {name: a}, rules: [{}]")
    };
    for (fits, beyond) in [
        ("timeout: 60s".to_owned(), "timeout: 60001ms".to_owned()),
        (
            format!("includeRequestBody: {{maxBytes: {AUTHORIZER_BODY_BYTES_MAX}}}"),
            "includeRequestBody: {maxBytes: 65537}".to_owned(),
        ),
        (
            format!(
                "includeRequestHeaders: [{}]",
                list(VALUES_MAX, |at| format!("x{at}"))
            ),
            format!(
                "includeRequestHeaders: [{}]",
                list(VALUES_MAX + 1, |at| format!("x{at}"))
            ),
        ),
    ] {
        assert_eq!(
            broken(&output(&authorizer(&fits))),
            [false],
            "{}",
            &fits[..20]
        );
        assert_eq!(
            broken(&output(&authorizer(&beyond))),
            [true],
            "{}",
            &beyond[..20]
        );
    }
}

#[test]
fn ports_of_a_peer_authentication() {
    let yaml = |n: usize| {
        let ports = list(n, |at| format!("'{}': {{mode: DISABLE}}", at + 1));
        format!(
            "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: p}}\nspec: {{selector: {{matchLabels: {{a: b}}}}, mtls: {{mode: DISABLE}}, portLevelMtls: {{{ports}}}}}\n"
        )
    };
    let said = |n: usize| -> Vec<(Option<PeerMode>, usize)> {
        let all = output(&yaml(n))
            .resources
            .into_iter()
            .filter_map(|resource| match resource {
                Resource::PeerAuthentication(policy) => Some((policy.mode, policy.ports.len())),
                _ => None,
            });
        all.collect()
    };
    assert_eq!(said(VALUES_MAX), [(Some(PeerMode::Disable), VALUES_MAX)]);
    assert_eq!(said(VALUES_MAX + 1), [(Some(PeerMode::Strict), 0)]);
}

#[test]
fn federations_and_key_servers_of_a_tenant() {
    let federations = |n: usize| {
        let one = |at: usize| {
            format!(
                "apiVersion: canal.mesh/v1\nkind: Federation\nmetadata: {{name: f{at}}}\nspec: {{tenant: t{at}, trustDomain: t{at}.example}}\n---\n"
            )
        };
        output(&(0..n).map(one).collect::<String>())
    };
    assert_eq!(
        federations(FEDERATIONS_PER_TENANT_MAX).federations.len(),
        FEDERATIONS_PER_TENANT_MAX
    );
    let beyond = federations(FEDERATIONS_PER_TENANT_MAX + 1);
    assert_eq!(
        (beyond.federations.len(), beyond.diagnostics.len()),
        (FEDERATIONS_PER_TENANT_MAX, 1)
    );

    let servers = |n: usize, addresses: usize| -> (usize, usize) {
        let mut yaml = String::new();
        for at in 0..n {
            let addresses = list(addresses, |a| format!("'192.0.2.{}:15013'", a + 1));
            writeln!(
                yaml,
                "apiVersion: canal.mesh/v1\nkind: KeyServer\nmetadata: {{name: k{at}}}\nspec: {{addresses: [{addresses}]}}\n---"
            )
            .unwrap();
        }
        let output = output(&yaml);
        (
            output
                .resources
                .iter()
                .filter(|resource| matches!(resource, Resource::KeyServer(_)))
                .count(),
            output.diagnostics.len(),
        )
    };
    assert_eq!(
        servers(KEY_SERVERS_PER_TENANT_MAX, 1),
        (KEY_SERVERS_PER_TENANT_MAX, 0)
    );
    assert_eq!(
        servers(KEY_SERVERS_PER_TENANT_MAX + 1, 1),
        (KEY_SERVERS_PER_TENANT_MAX, 1)
    );
    // A KeyServer with too many addresses is not used at all.
    assert_eq!(servers(1, KEY_SERVER_ADDRESSES_MAX), (1, 0));
    assert_eq!(servers(1, KEY_SERVER_ADDRESSES_MAX + 1), (0, 1));
}

#[test]
fn identities_of_a_node() {
    let pods = |n: usize| {
        let pod = |at: usize| {
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{at}, annotations: {{canal.mesh/az: az1}}}}\nspec: {{nodeName: n1, serviceAccountName: a{at}}}\nstatus: {{podIP: 10.1.{}.{}}}\n---\n",
                at / 250,
                at % 250 + 1
            )
        };
        let output = output(&(0..n).map(pod).collect::<String>());
        let entitled: Vec<usize> = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Entitlement(entitlement) => Some(entitlement.identities.len()),
                _ => None,
            })
            .collect();
        (entitled, output.diagnostics.len())
    };
    assert_eq!(pods(IDENTITIES_MAX), (vec![IDENTITIES_MAX], 0));
    assert_eq!(pods(IDENTITIES_MAX + 1), (vec![IDENTITIES_MAX], 1));
}

#[test]
fn a_reason_is_cut_where_it_is_too_long() {
    let yaml = policy(&format!(
        "action: CUSTOM, provider: {{name: {}}}, rules: [{{}}]",
        "ä".repeat(2 * REASON_BYTES_MAX)
    ));
    let output = output(&yaml);
    let reason = output.resources.iter().find_map(|resource| match resource {
        Resource::Authorization(policy) => policy.broken.clone(),
        _ => None,
    });
    let reason = reason.expect("the policy is broken");
    assert!(
        (REASON_BYTES_MAX - 4..=REASON_BYTES_MAX).contains(&reason.len()),
        "{}",
        reason.len()
    );
}

/// No tenant may have the provider's name or the trust domain of Canal's own components.
#[test]
fn reserved_names_compile_to_nothing() {
    let compiled = |tenant: &str, trust_domain: &str| {
        let yaml = format!(
            "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {tenant}}}\nspec: {{vni: 1, trustDomain: {trust_domain}, podCidrs: [10.1.0.0/16]}}\n"
        );
        let documents = canal_sources::parse("t.yaml", &yaml)
            .documents
            .into_iter()
            .map(Arc::new)
            .collect();
        let output = compile(&ParsedTenant::of(tenant, documents).input());
        (
            output.resources.len(),
            output
                .diagnostics
                .into_iter()
                .map(|d| d.field)
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(compiled("alpha", "alpha.example"), (1, vec![]));
    assert_eq!(
        compiled("canal-system", "alpha.example"),
        (0, vec!["metadata.name".to_owned()])
    );
    assert_eq!(
        compiled("alpha", "components.canal"),
        (0, vec!["spec.trustDomain".to_owned()])
    );
}

/// Each target of a policy gets a unique name, whatever other policies are called.
/// A class stands for all of its Gateways. If they counted against the limit, anybody who may create
/// a Gateway could break the policies of the whole tenant.
#[test]
fn a_class_may_have_more_gateways_than_a_policy_has_targets() {
    let gateway = |at: usize| {
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: g{at}}}\nspec: {{gatewayClassName: canal, listeners: [{{name: a, port: 80, protocol: HTTP}}]}}\n---\n"
        )
    };
    let gateways: String = (0..=TARGETS_PER_POLICY_MAX).map(gateway).collect();
    let class = "targetRefs: [{group: gateway.networking.k8s.io, kind: GatewayClass, name: canal}], rules: [{}]";
    let of_root = policy(class).replace("{name: p}", "{name: p, namespace: istio-system}");
    let output = output(&(gateways + &of_root));
    assert_eq!(broken(&output), [false; TARGETS_PER_POLICY_MAX + 1]);
}

#[test]
fn targets_have_unique_names() {
    let named =
        |name: &str, spec: &str| policy(spec).replace("{name: p}", &format!("{{name: {name}}}"));
    let long = "l".repeat(63)
        + &format!(".{}", "m".repeat(63))
        + &format!(".{}", "n".repeat(63))
        + &format!(".{}", "o".repeat(61));
    let refs = "targetRefs: [{kind: Service, name: web}, {kind: Service, name: gone}], rules: [{}]";
    let yaml = [
        named("p", refs),
        named("p.target-2", "rules: [{}]"),
        named(&long, refs),
    ]
    .concat();
    let output = output(&yaml);
    let names: Vec<String> = output
        .resources
        .iter()
        .filter_map(|resource| match resource {
            Resource::Authorization(policy) => Some(policy.key.name.to_string()),
            _ => None,
        })
        .collect();
    assert_eq!(
        names,
        [
            long.as_str(),
            "p",
            "p.target-2",
            "p.target-3",
            "target-2.of-long-name"
        ]
    );
}

#[test]
fn lists_of_a_route_authorizer() {
    let yaml = |headers: usize, path: usize, body: u32| {
        let headers: Vec<String> = (0..headers).map(|number| format!("x-{number}")).collect();
        let (headers, path) = (headers.join(", "), "a".repeat(path - 1));
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: r}}\nspec:\n  \
             parentRefs: [{{group: '', kind: Service, name: web}}]\n  \
             rules: [{{filters: [{{type: ExternalAuth, externalAuth: {{protocol: HTTP, backendRef: {{name: web, port: 80}}, \
             http: {{path: /{path}, allowedHeaders: [{headers}], allowedResponseHeaders: [{headers}]}}, forwardBody: {{maxSize: {body}}}}}}}], \
             backendRefs: [{{name: web, port: 80}}]}}]\n"
        )
    };
    let (headers, path, body) = (
        ROUTE_AUTHORIZER_HEADERS_MAX,
        ROUTE_AUTHORIZER_PATH_BYTES_MAX,
        AUTHORIZER_BODY_BYTES_MAX,
    );
    let most = output(&yaml(headers, path, body));
    assert_eq!(most.diagnostics, []);
    for (beyond, problem) in [
        (yaml(headers + 1, path, body), "more than 64 headers"),
        (yaml(headers, path + 1, body), "more than 1024 bytes"),
        (yaml(headers, path, body + 1), "not from 0 to 65536"),
    ] {
        let refused = output(&beyond);
        assert_eq!(refused.diagnostics.len(), 1, "{problem}");
        assert!(
            refused.diagnostics[0].problem.contains(problem),
            "{problem}"
        );
    }
}

#[test]
fn mirrors_of_a_rule() {
    let yaml = |count: usize| {
        let mirrors = "{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}}}, "
            .repeat(count);
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: copied}}\nspec:\n  \
             parentRefs: [{{group: \"\", kind: Service, name: web}}]\n  \
             rules: [{{filters: [{mirrors}], backendRefs: [{{name: web, port: 80}}]}}]\n"
        )
    };
    assert_eq!(output(&yaml(MIRRORS_PER_RULE_MAX)).diagnostics, []);
    let beyond = output(&yaml(MIRRORS_PER_RULE_MAX + 1));
    let problems: Vec<_> = beyond.diagnostics.iter().map(|d| &d.problem).collect();
    assert_eq!(problems, ["the rule has more than 8 mirrors"]);
    let mirrors = beyond.resources.iter().map(|resource| match resource {
        Resource::Route(rule) => rule.mirrors.len(),
        _ => 0,
    });
    let served = mirrors.sum::<usize>();
    assert_eq!(served, MIRRORS_PER_RULE_MAX, "requests are served");
}

/// Returns the text form of the tenant's IR, and the problems of errors.
fn preferences(yaml: &str) -> (String, Vec<String>) {
    let tenant = ParsedTenant::parse("alpha", "limits.yaml", &format!("{BASE}{yaml}"));
    let (ir, diagnostics) = canal_compiler::build_ir(&tenant.input());
    let errors = diagnostics.into_iter();
    let errors = errors.filter(|it| it.severity == canal_model::diagnostic::Severity::Error);
    let ir = ir.expect("the tenant is valid").to_string();
    (ir, errors.map(|it| it.problem).collect())
}

/// Checks that `yaml` has `limit` lines with `marker` in the IR at the limit and beyond it, and an
/// error only beyond it.
fn check_preferences(limit: usize, marker: &str, problem: &str, yaml: impl Fn(usize) -> String) {
    let count = |ir: &str| ir.lines().filter(|line| line.contains(marker)).count();
    let (ir, errors) = preferences(&yaml(limit));
    assert_eq!((count(&ir), errors), (limit, vec![]), "at the limit");
    let (ir, errors) = preferences(&yaml(limit + 1));
    assert_eq!(count(&ir), limit, "beyond the limit");
    assert!(
        errors.len() == 1 && errors[0].contains(problem),
        "{errors:?}"
    );
}

fn priority(name: usize, spec: &str) -> String {
    format!(
        "apiVersion: canal.mesh/v1\nkind: TrafficPriority\nmetadata: {{name: t{name}}}\nspec: {{{spec}}}\n---\n"
    )
}

#[test]
fn preferences_of_a_tenant() {
    check_preferences(
        OFFLOAD_PREFERENCES_PER_TENANT_MAX,
        "offload default/",
        "OffloadPreferences, more than",
        |count| {
            let one = |at| {
                format!(
                    "apiVersion: canal.mesh/v1\nkind: OffloadPreference\nmetadata: {{name: o{at}}}\nspec: {{servicePort: {{name: web, port: 80}}, targets: {{nic: Allowed}}}}\n---\n"
                )
            };
            (0..count).map(one).collect()
        },
    );
    check_preferences(
        TRAFFIC_PRIORITIES_PER_TENANT_MAX,
        "priority default/",
        "TrafficPriorities, more than",
        |count| (0..count).map(|at| priority(at, "highShare: 5")).collect(),
    );
}

#[test]
fn comparisons_of_offload_preferences() {
    // Each preference is compared with each of the pods.
    // With 2,000, the limit allows 500 preferences, fewer than the limit on their number.
    const PODS: usize = 2000;
    let mut pods = String::new();
    for at in 0..PODS {
        write!(
            pods,
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{at}, labels: {{app: web}}, annotations: {{canal.mesh/az: a}}}}\nspec: {{nodeName: n}}\nstatus: {{podIP: 10.0.{}.{}}}\n---\n",
            at / 250,
            at % 250 + 1
        )
        .unwrap();
    }
    check_preferences(
        OFFLOAD_COMPARISONS_PER_TENANT_MAX / PODS,
        "offload default/",
        "comparisons with workloads",
        |count| {
            let one = |at| {
                format!(
                    "apiVersion: canal.mesh/v1\nkind: OffloadPreference\nmetadata: {{name: o{at}}}\nspec: {{selector: {{matchLabels: {{app: none}}}}, targets: {{nic: Allowed}}}}\n---\n"
                )
            };
            pods.clone() + &(0..count).map(one).collect::<String>()
        },
    );
}

#[test]
fn parts_of_traffic_priorities() {
    check_preferences(
        RULES_PER_PRIORITY_MAX,
        "=> low",
        "rules, more than",
        |count| {
            priority(
                0,
                &format!("rules: [{}]", list(count, |_| "{class: low}".to_owned())),
            )
        },
    );
    // Four objects of 64 rules with 16 matches have as many matches as a tenant may have.
    let matches = PRIORITY_MATCHES_PER_TENANT_MAX / 4 / RULES_PER_PRIORITY_MAX;
    let rule = format!(
        "{{class: low, matches: [{}]}}",
        list(matches, |at| format!("{{path: {{value: /{at}}}}}"))
    );
    let rules = format!(
        "rules: [{}]",
        list(RULES_PER_PRIORITY_MAX, |_| rule.clone())
    );
    let full: String = (0..4).map(|at| priority(at, &rules)).collect();
    check_preferences(
        PRIORITY_MATCHES_PER_TENANT_MAX,
        "=> low",
        "matches; it and those behind it",
        |count| match count - PRIORITY_MATCHES_PER_TENANT_MAX {
            0 => full.clone(),
            _ => full.clone() + &priority(4, "rules: [{class: low}]"),
        },
    );
    let asserting = |count| {
        let principals = list(count, |at| format!("alpha.example/ns/a/sa/b{at}"));
        preferences(&priority(0, &format!("assertedBy: [{principals}]")))
    };
    let (ir, errors) = asserting(ASSERTING_PRINCIPALS_MAX);
    let count = |ir: &str| ir.matches("asserted by").count();
    assert_eq!((count(&ir), errors), (ASSERTING_PRINCIPALS_MAX, vec![]));
    let (ir, errors) = asserting(ASSERTING_PRINCIPALS_MAX + 1);
    assert_eq!(count(&ir), ASSERTING_PRINCIPALS_MAX);
    assert!(errors.len() == 1 && errors[0].contains("principals, more than"));
}

#[test]
fn comparisons_of_delegations() {
    // Each rule costs 1,000 times 1,000 comparisons, and 2,000 copies of matches.
    const MATCHES: usize = 1000;
    let rules = DELEGATION_COMPARISONS_PER_TENANT_MAX / (MATCHES * MATCHES + 2 * MATCHES);
    let virtual_service = |name: &str, spec: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n---\n"
        )
    };
    let matches = |path: &str| list(MATCHES, |at| format!("{{uri: {{prefix: /{path}{at}}}}}"));
    let leaf = format!(
        "http: [{{match: [{}], route: [{{destination: {{host: web}}}}]}}]",
        matches("leaf")
    );
    let root = |count| {
        let rule = format!("{{match: [{}], delegate: {{name: leaf}}}}", matches("root"));
        format!("hosts: [web], http: [{}]", list(count, |_| rule.clone()))
    };
    let compile = |count| {
        preferences(&(virtual_service("leaf", &leaf) + &virtual_service("root", &root(count))))
    };
    let (_, errors) = compile(rules);
    assert_eq!(errors, [""; 0], "at the limit");
    let (ir, errors) = compile(rules + 1);
    assert!(
        errors.len() == 1 && errors[0].contains("comparisons of matches"),
        "{errors:?}"
    );
    assert!(
        ir.contains("refuse"),
        "the rule beyond the limit refuses: {ir}"
    );
}
