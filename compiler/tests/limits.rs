//! Tests that reach every limit: input beyond a limit fails closed with a diagnostic, and input at
//! the limit works.

use std::fmt::Write;
use std::sync::Arc;

use canal_compiler::limits::*;
use canal_compiler::{CompileInput, CompileOutput, compile};
use canal_model::limits::CORS_LIST_BYTES_MAX;
use canal_model::program::{AppProtocol, DirectAudience, Resource, RouteAction, RouteRule};

use crate::parsed_tenant::{ParsedTenant, assert_decodes};

pub(crate) const BASE: &str = "
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}
---
";

pub(crate) fn output(yaml: &str) -> CompileOutput {
    let parsed = canal_sources::parse("limits.yaml", &format!("{BASE}{yaml}"));
    assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
    compiled(parsed)
}

fn compiled(parsed: canal_sources::ParsedFile) -> CompileOutput {
    let documents = parsed.documents.into_iter().map(Arc::new).collect();
    let output = compile(&ParsedTenant::of("alpha", documents).input());
    // At each limit and beyond it.
    assert_decodes(&output);
    output
}

pub(crate) fn routes(output: &CompileOutput) -> Vec<&RouteRule> {
    let rules = output
        .resources
        .iter()
        .filter_map(|resource| match resource {
            Resource::Route(rule) => Some(rule),
            _ => None,
        });
    rules.collect()
}

/// Compiles at the limit without diagnostics, and beyond it with `problem` among the diagnostics
/// and the rule refused.
#[track_caller]
fn check(limit: usize, problem: &str, yaml: impl Fn(usize) -> String) {
    let fine = output(&yaml(limit));
    assert_eq!(fine.diagnostics, [], "at the limit");
    assert!(
        routes(&fine)
            .iter()
            .all(|rule| !matches!(rule.action, RouteAction::Refuse { .. }))
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
    assert!(!routes(&beyond).is_empty());
    assert!(
        routes(&beyond)
            .iter()
            .all(|rule| matches!(rule.action, RouteAction::Refuse { status: 500, .. })),
        "beyond the limit"
    );
}

pub(crate) fn route(spec: &str) -> String {
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: r}}\nspec:\n  parentRefs: [{{group: '', kind: Service, name: web}}]\n{spec}"
    )
}

pub(crate) const BACKEND: &str = "{name: web, port: 80}";

fn rule_with_match(condition: &str) -> String {
    route(&format!(
        "  rules:\n  - matches: [{condition}]\n    backendRefs: [{BACKEND}]\n"
    ))
}

#[test]
fn rules_of_a_route() {
    check(RULES_PER_ROUTE_MAX, "rules, more than", |count| {
        let mut spec = String::from("  rules:\n");
        for number in 0..count {
            writeln!(
                spec,
                "  - {{matches: [{{path: {{value: /{number}}}}}], backendRefs: [{BACKEND}]}}"
            )
            .unwrap();
        }
        route(&spec)
    });
    let virtual_service = |count: usize| {
        let rule = "  - route: [{destination: {host: web}}]\n";
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v}}\nspec:\n  hosts: [web]\n  http:\n{}",
            rule.repeat(count)
        )
    };
    check(RULES_PER_ROUTE_MAX, "rules, more than", virtual_service);
}

#[test]
fn matches_of_a_rule() {
    let matches = |count: usize| {
        (0..count)
            .map(|number| format!("{{path: {{value: /{number}}}}}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    check(MATCHES_PER_RULE_MAX, "matches, more than", |count| {
        rule_with_match(&matches(count))
    });
    let uris = |count: usize| {
        (0..count)
            .map(|number| format!("{{uri: {{prefix: /{number}}}}}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    check(MATCHES_PER_RULE_MAX, "matches, more than", |count| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v}}\nspec:\n  hosts: [web]\n  http:\n  - match: [{}]\n    route: [{{destination: {{host: web}}}}]\n",
            uris(count)
        )
    });
}

#[test]
fn conditions_of_a_match() {
    let conditions = |count: usize| {
        (0..count)
            .map(|number| format!("{{name: x{number}, value: v}}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    check(
        CONDITIONS_PER_MATCH_MAX,
        "conditions here, more than",
        |count| rule_with_match(&format!("{{headers: [{}]}}", conditions(count))),
    );
    check(
        CONDITIONS_PER_MATCH_MAX,
        "conditions here, more than",
        |count| rule_with_match(&format!("{{queryParams: [{}]}}", conditions(count))),
    );
}

#[test]
fn backends_of_a_rule() {
    check(BACKENDS_PER_RULE_MAX, "backends, more than", |count| {
        route(&format!(
            "  rules:\n  - backendRefs: [{}]\n",
            vec![BACKEND; count].join(", ")
        ))
    });
}

#[test]
fn hosts_of_a_route() {
    check(HOSTS_PER_ROUTE_MAX, "hosts, more than", |count| {
        let hosts: Vec<String> = (0..count)
            .map(|number| format!("h{number}.example.com"))
            .collect();
        route(&format!(
            "  hostnames: [{}]\n  rules:\n  - backendRefs: [{BACKEND}]\n",
            hosts.join(", ")
        ))
    });
    // A VirtualService's hosts are services: those within the limit are routed, the others are not
    // affected.
    let hosts = |count: usize| {
        let hosts = vec!["web"; count].join(", ");
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v}}\nspec:\n  hosts: [{hosts}]\n  http:\n  - route: [{{destination: {{host: web}}}}]\n"
        )
    };
    assert_eq!(output(&hosts(HOSTS_PER_ROUTE_MAX)).diagnostics, []);
    assert!(
        output(&hosts(HOSTS_PER_ROUTE_MAX + 1)).diagnostics[0]
            .problem
            .contains("hosts, more than")
    );
}

#[test]
fn texts_and_regular_expressions() {
    check(TEXT_BYTES_MAX, "bytes, more than", |bytes| {
        rule_with_match(&format!(
            "{{path: {{type: Exact, value: /{}}}}}",
            // The slash in front counts as one byte.
            "a".repeat(bytes - 1)
        ))
    });
    check(TEXT_BYTES_MAX, "bytes, more than", |bytes| {
        rule_with_match(&format!(
            "{{headers: [{{name: x, value: {}}}]}}",
            "a".repeat(bytes)
        ))
    });
    // A name beyond the limit has the same diagnostic as one with a wrong character.
    check(TEXT_BYTES_MAX, "not a header's name", |bytes| {
        rule_with_match(&format!(
            "{{headers: [{{name: {}, value: x}}]}}",
            "a".repeat(bytes)
        ))
    });
    // Here too the slash counts as one byte.
    let regex = |bytes: usize| {
        rule_with_match(&format!(
            "{{path: {{type: RegularExpression, value: /{}}}}}",
            "a".repeat(bytes - 1)
        ))
    };
    check(REGEX_BYTES_MAX, "bytes, more than", regex);
    check(REGEX_NESTING_MAX as usize, "nested", |depth| {
        rule_with_match(&format!(
            "{{path: {{type: RegularExpression, value: '/{}a{}'}}}}",
            // The path is one level of nesting itself.
            "(".repeat(depth - 1),
            ")".repeat(depth - 1)
        ))
    });
    let repeated = |n: usize| {
        rule_with_match(&format!(
            "{{path: {{type: RegularExpression, value: '/(a{{{n}}}){{100}}'}}}}"
        ))
    };
    // 1,000 repetitions fit into the memory of one expression, and 50,000 do not.
    assert_eq!(output(&repeated(10)).diagnostics, []);
    let large = output(&repeated(500));
    assert!(
        large.diagnostics[0].problem.contains("bytes of memory"),
        "{:?}",
        large.diagnostics
    );
}

#[test]
fn weights() {
    let rule = |weight: u64| {
        route(&format!(
            "  rules:\n  - backendRefs: [{{name: web, port: 80, weight: {weight}}}]\n"
        ))
    };
    assert_eq!(output(&rule(WEIGHT_MAX.into())).diagnostics, []);
    assert!(
        output(&rule(u64::from(WEIGHT_MAX) + 1)).diagnostics[0]
            .problem
            .contains("is more than")
    );
}

/// A slice beyond a limit has no effect; the Service's pods get no endpoint from it.
#[test]
fn addresses_and_ports_of_an_endpoint_slice() {
    let yaml = |addresses: usize, ports: usize| {
        let endpoints = "{addresses: [10.1.0.1]}, ".repeat(addresses);
        let ports: String = (1..=ports)
            .map(|port| format!("{{name: http, port: {port}}}, "))
            .collect();
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: manual}}\n\
             spec: {{clusterIP: 10.96.0.2, ports: [{{name: http, port: 80}}]}}\n---\n\
             apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {{nodeName: n}}\n\
             status: {{podIP: 10.1.0.1, conditions: [{{type: Ready, status: \"True\"}}]}}\n---\n\
             apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: manual-1, labels: {{kubernetes.io/service-name: manual}}}}\n\
             addressType: IPv4\nendpoints: [{endpoints}]\nports: [{ports}]\n"
        )
    };
    let endpoints = |output: &CompileOutput| {
        let workloads = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Workload(workload) => Some(workload.endpoints.len()),
                _ => None,
            });
        workloads.sum::<usize>()
    };
    let fine = output(&yaml(ENDPOINT_ADDRESSES_MAX, ENDPOINT_PORTS_MAX));
    assert_eq!(endpoints(&fine), ENDPOINT_PORTS_MAX);
    for (addresses, ports) in [(ENDPOINT_ADDRESSES_MAX + 1, 1), (1, ENDPOINT_PORTS_MAX + 1)] {
        let beyond = output(&yaml(addresses, ports));
        let problems: Vec<_> = beyond.diagnostics.iter().map(|d| &d.problem).collect();
        assert!(
            problems
                .iter()
                .any(|problem| problem.contains("and may have")),
            "{problems:?}"
        );
        assert_eq!(endpoints(&beyond), 0);
    }
}

#[test]
fn headers_that_a_filter_changes() {
    check(
        HEADER_CHANGES_PER_RULE_MAX,
        "changes more than 64 headers",
        |count| {
            let names: String = (0..count).map(|n| format!("x-{n}, ")).collect();
            route(&format!(
                "  rules: [{{filters: [{{type: RequestHeaderModifier, requestHeaderModifier: {{remove: [{names}]}}}}], \
                 backendRefs: [{{name: web, port: 80}}]}}]"
            ))
        },
    );
}

#[test]
fn the_body_of_a_direct_response() {
    check(
        DIRECT_RESPONSE_BODY_BYTES_MAX,
        "bytes, more than 4096",
        |bytes| {
            format!(
                "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: web}}\n\
                 spec: {{hosts: [web], http: [{{directResponse: {{status: 503, body: {{string: {}}}}}}}]}}\n",
                "x".repeat(bytes)
            )
        },
    );
}

#[test]
fn ports_of_a_service() {
    let service = |count: usize| {
        let ports: Vec<String> = (0..count)
            .map(|number| format!("{{name: tcp-{number}, port: {}}}", number + 1))
            .collect();
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: many}}\nspec: {{clusterIP: 10.96.0.2, selector: {{app: x}}, ports: [{}]}}\n",
            ports.join(", ")
        )
    };
    let ports = |output: &CompileOutput| {
        let services = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Service(service) if service.key.name.as_str() == "many" => {
                    Some(service.ports.clone())
                }
                _ => None,
            });
        services.collect::<Vec<_>>().concat()
    };
    let fine = output(&service(PORTS_PER_SERVICE_MAX));
    assert_eq!(fine.diagnostics, []);
    assert!(
        ports(&fine).len() == PORTS_PER_SERVICE_MAX
            && ports(&fine)
                .iter()
                .all(|port| port.protocol == AppProtocol::Tcp)
    );
    let beyond = output(&service(PORTS_PER_SERVICE_MAX + 1));
    assert!(
        beyond.diagnostics[0].problem.contains("ports, more than"),
        "{:?}",
        beyond.diagnostics
    );
    assert!(ports(&beyond).is_empty());
}

/// Compiles a tenant on the cloud tier with `count` objects made by `object`, and returns the
/// resources that `kept` selects and the problems.
fn on_tier<T>(
    count: usize,
    object: impl Fn(usize) -> String,
    kept: impl Fn(&Resource) -> Option<T>,
) -> (Vec<T>, Vec<String>) {
    let base = BASE.replace(
        "podCidrs: [10.1.0.0/16]",
        "podCidrs: [10.1.0.0/16, 'fd00:1::/64'], gatewayCidrs: [10.101.0.0/20]",
    );
    let objects: Vec<String> = (0..count).map(object).collect();
    let parsed = canal_sources::parse("limits.yaml", &format!("{base}{}", objects.join("---\n")));
    assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
    let output = compiled(parsed);
    let problems = output
        .diagnostics
        .into_iter()
        .map(|diagnostic| diagnostic.problem)
        .collect();
    (output.resources.iter().filter_map(kept).collect(), problems)
}

fn node(number: usize, ranges: &str) -> String {
    let underlay = std::net::Ipv4Addr::from_bits(0xC0A8_0001 + number as u32);
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: n{number}, labels: {{topology.kubernetes.io/zone: az1}}, \
         annotations: {{canal.mesh/vtep-mac: '02:00:5e:10:00:01'}}}}\nspec: {{podCIDRs: [{ranges}]}}\n\
         status: {{addresses: [{{type: InternalIP, address: {underlay}}}]}}\n"
    )
}

fn ranges(resource: &Resource) -> Option<usize> {
    match resource {
        Resource::Node(node) => Some(node.pod_cidrs.len()),
        _ => None,
    }
}

#[test]
fn ranges_of_gateway_addresses() {
    let tenant = |count: usize| {
        let nets: Vec<String> = (0..count)
            .map(|number| format!("10.101.{number}.0/24"))
            .collect();
        let base = BASE.replace(
            "podCidrs: [10.1.0.0/16]",
            &format!(
                "podCidrs: [10.1.0.0/16], gatewayCidrs: [{}]",
                nets.join(", ")
            ),
        );
        compiled(canal_sources::parse(
            "limits.yaml",
            base.trim_end_matches("---\n"),
        ))
    };
    let ranges = |output: &CompileOutput| {
        let mut tenants = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Tenant(tenant) => Some(tenant.gateway_cidrs.len()),
                _ => None,
            });
        tenants.next().unwrap()
    };
    let fine = tenant(GATEWAY_RANGES_MAX);
    assert_eq!(
        (ranges(&fine), fine.diagnostics.as_slice()),
        (GATEWAY_RANGES_MAX, &[][..])
    );
    let beyond = tenant(GATEWAY_RANGES_MAX + 1);
    assert_eq!(ranges(&beyond), GATEWAY_RANGES_MAX);
    assert!(
        beyond.diagnostics[0].problem.contains("ranges, more than"),
        "{:?}",
        beyond.diagnostics
    );
}

#[test]
fn resolvers_of_a_tenant() {
    let tenant = |resolvers: Vec<String>| {
        let base = BASE.replace(
            "podCidrs: [10.1.0.0/16]",
            &format!(
                "podCidrs: [10.1.0.0/16], resolvers: [{}]",
                resolvers.join(", ")
            ),
        );
        compiled(canal_sources::parse(
            "limits.yaml",
            base.trim_end_matches("---\n"),
        ))
    };
    let count = |output: &CompileOutput| {
        let mut tenants = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Tenant(tenant) => Some(tenant.resolvers.len()),
                _ => None,
            });
        tenants.next().unwrap()
    };
    let many = |count: usize| {
        (0..count)
            .map(|number| format!("10.9.0.{number}"))
            .collect::<Vec<_>>()
    };
    let fine = tenant(many(RESOLVERS_MAX));
    assert_eq!(
        (count(&fine), fine.diagnostics.as_slice()),
        (RESOLVERS_MAX, &[][..])
    );
    // Two beyond the limit are one diagnostic.
    let beyond = tenant(many(RESOLVERS_MAX + 2));
    assert_eq!(
        (count(&beyond), beyond.diagnostics.len()),
        (RESOLVERS_MAX, 1)
    );
    assert!(
        beyond.diagnostics[0]
            .problem
            .contains("resolvers, more than"),
        "{:?}",
        beyond.diagnostics
    );
    // Loopback, unspecified and multicast addresses are no resolvers for pods.
    for none in ["127.0.0.53", "\"::1\"", "0.0.0.0", "224.0.0.251"] {
        let output = tenant(vec![none.to_owned(), "10.9.0.1".to_owned()]);
        assert_eq!(
            (count(&output), output.diagnostics.len()),
            (1, 1),
            "{none} is left out with one diagnostic"
        );
    }
}

/// Returns a pod that serves `count` UDP ports, and a route that names them all.
fn udp(count: usize) -> String {
    let numbers = 1..=count;
    let ports: Vec<String> = numbers
        .clone()
        .map(|n| {
            format!(
                "{{name: p{n}, port: {n}, protocol: UDP, targetPort: {}}}",
                1000 + n
            )
        })
        .collect();
    let refs: Vec<String> = numbers
        .map(|n| format!("{{name: udp, port: {n}}}"))
        .collect();
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: udp-0, labels: {{app: udp}}, annotations: {{canal.mesh/az: az1}}}}
spec: {{nodeName: n1}}
status: {{podIP: 10.1.0.9}}
---
apiVersion: v1
kind: Service
metadata: {{name: udp}}
spec: {{clusterIP: 10.96.0.9, selector: {{app: udp}}, ports: [{}]}}
---
apiVersion: gateway.networking.k8s.io/v1alpha2
kind: UDPRoute
metadata: {{name: udp}}
spec:
  parentRefs: [{{group: '', kind: Service, name: udp}}]
  rules:
  - backendRefs: [{}]
",
        ports.join(", "),
        refs.join(", ")
    )
}

fn udp_ports(output: &CompileOutput) -> Vec<u16> {
    let workloads = output
        .resources
        .iter()
        .filter_map(|resource| match resource {
            Resource::Workload(workload) => Some(&workload.udp_ports),
            _ => None,
        });
    workloads.flatten().copied().collect()
}

/// Beyond the limit, the ports that are named first stay open, the others stay closed, and the
/// route gets a diagnostic.
#[test]
fn udp_ports_of_a_pod() {
    let of_route = |output: &CompileOutput| -> Vec<String> {
        let about = output.diagnostics.iter().filter(|d| {
            d.object
                .as_ref()
                .is_some_and(|o| o.to_string() == "UDPRoute default/udp")
        });
        about
            .map(|d| format!("{:?} {}: {}", d.severity, d.field, d.problem))
            .collect()
    };
    let first: Vec<u16> = (1001..).take(UDP_PORTS_PER_WORKLOAD_MAX).collect();
    let fine = output(&udp(UDP_PORTS_PER_WORKLOAD_MAX));
    assert_eq!(udp_ports(&fine), first);
    let diagnostics = of_route(&fine);
    assert!(
        diagnostics.len() == 1
            && diagnostics[0]
                .contains("Warning spec.rules: the cloud tier does not carry datagrams"),
        "{diagnostics:?}"
    );
    let beyond = output(&udp(UDP_PORTS_PER_WORKLOAD_MAX + 1));
    assert_eq!(udp_ports(&beyond), first);
    let diagnostics = of_route(&beyond);
    let problem = "Error spec.rules[0].backendRefs[64]: Pod default/udp-0 has more than 64 UDP ports that routes name";
    assert!(
        diagnostics.len() == 2 && diagnostics[0].starts_with(problem),
        "{diagnostics:?}"
    );
    // Without the route no port is open, whatever the Service declares.
    let (services, _) = udp(1)
        .rsplit_once("---")
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .unwrap();
    assert_eq!(udp_ports(&output(&services)), Vec::<u16>::new());
}

#[test]
fn rules_and_backends_of_a_udp_route() {
    let rule = |count: usize| vec!["{name: udp, port: 1}"; count].join(", ");
    let backends = |count: usize| output(&udp(1).replace("{name: udp, port: 1}", &rule(count)));
    assert_eq!(udp_ports(&backends(BACKENDS_PER_RULE_MAX)), [1001]);
    let beyond = backends(BACKENDS_PER_RULE_MAX + 1);
    assert!(
        beyond.diagnostics[0]
            .problem
            .contains("backends, more than"),
        "{:?}",
        beyond.diagnostics
    );
    assert_eq!(udp_ports(&beyond), Vec::<u16>::new());
    let more = "  - backendRefs: [{name: udp, port: 1}]\n";
    let rules = |count: usize| output(&(udp(1) + &more.repeat(count - 1)));
    assert_eq!(udp_ports(&rules(RULES_PER_ROUTE_MAX)), [1001]);
    let beyond = rules(RULES_PER_ROUTE_MAX + 1);
    assert!(
        beyond.diagnostics[0].problem.contains("rules, more than"),
        "{:?}",
        beyond.diagnostics
    );
    assert_eq!(udp_ports(&beyond), Vec::<u16>::new());
}

#[test]
fn nodes_of_a_tenant_and_their_ranges() {
    let many = |count: usize| {
        on_tier(
            count,
            |number| node(number, &format!("'fd00:1::{:x}:0/112'", number + 1)),
            ranges,
        )
    };
    let (nodes, problems) = many(NODES_PER_TENANT_MAX);
    assert_eq!((nodes.len(), problems), (NODES_PER_TENANT_MAX, vec![]));
    let (nodes, problems) = many(NODES_PER_TENANT_MAX + 1);
    assert_eq!(nodes.len(), NODES_PER_TENANT_MAX);
    assert!(
        problems.len() == 1 && problems[0].contains("nodes, more than"),
        "{problems:?}"
    );
    let wide = |count: usize| {
        let nets: Vec<String> = (0..count)
            .map(|number| format!("10.1.{number}.0/24"))
            .collect();
        on_tier(1, |number| node(number, &nets.join(", ")), ranges)
    };
    assert_eq!(
        wide(RANGES_PER_NODE_MAX),
        (vec![RANGES_PER_NODE_MAX], vec![])
    );
    let (nodes, problems) = wide(RANGES_PER_NODE_MAX + 1);
    assert_eq!(nodes, [RANGES_PER_NODE_MAX]);
    assert!(
        problems.len() == 1 && problems[0].contains("ranges, more than"),
        "{problems:?}"
    );
}

#[test]
fn throttles_of_a_tenant() {
    let object = |number: usize| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s{number}}}\nspec: {{clusterIP: 10.97.{}.{}, selector: {{app: web}}, ports: [{{port: 80}}]}}\n---\n\
             apiVersion: canal.mesh/v1\nkind: Throttle\nmetadata: {{name: t{number}}}\n\
             spec: {{targetRef: {{kind: Service, name: s{number}}}, sessions: {{perSecond: 5}}}}\n",
            number / 256,
            number % 256
        )
    };
    let throttles = |count: usize| {
        on_tier(count, object, |resource| {
            matches!(resource, Resource::Throttle(_)).then_some(())
        })
    };
    let (kept, problems) = throttles(THROTTLES_PER_TENANT_MAX);
    assert_eq!((kept.len(), problems), (THROTTLES_PER_TENANT_MAX, vec![]));
    let (kept, problems) = throttles(THROTTLES_PER_TENANT_MAX + 1);
    assert_eq!(kept.len(), THROTTLES_PER_TENANT_MAX);
    assert!(
        problems.len() == 1 && problems[0].contains("throttles, more than"),
        "{problems:?}"
    );
}

#[test]
fn objects_of_a_tenant() {
    // Pods are left out first: leaving out a route would open its service.
    let pod = "kind: Pod\napiVersion: v1\nmetadata: {name: pod-0}\nspec: {}\n";
    let parsed = canal_sources::parse(
        "limits.yaml",
        &format!("{BASE}{pod}---\n{}", rule_with_match("{method: GET}")),
    );
    let mut documents: Vec<_> = parsed.documents.into_iter().map(Arc::new).collect();
    let template = documents
        .iter()
        .find(|d| d.object.key().to_string() == "Pod default/pod-0")
        .unwrap()
        .clone();
    for number in 1..OBJECTS_PER_TENANT_MAX {
        let canal_model::policy::Object::Pod(mut pod) = template.object.clone() else {
            panic!("a pod")
        };
        pod.metadata.name = format!("pod-{number}").parse().unwrap();
        documents.push(Arc::new(canal_model::policy::Document {
            object: canal_model::policy::Object::Pod(pod),
            ..template.as_ref().clone()
        }));
    }
    let output = compile(&ParsedTenant::of("alpha", documents).input());
    assert!(
        output.diagnostics[0].problem.contains("objects, more than"),
        "{:?}",
        output.diagnostics
    );
    assert_eq!(routes(&output).len(), 1);
    let services = output
        .resources
        .iter()
        .filter(|resource| matches!(resource, Resource::Service(_)))
        .count();
    assert_eq!(services, 1);
}

#[test]
fn service_ids() {
    let output = compile(&CompileInput {
        service_ids: &Default::default(),
        ..ParsedTenant::parse("alpha", "limits.yaml", BASE).input()
    });
    assert!(
        output.diagnostics[0]
            .problem
            .contains("service IDs are taken"),
        "{:?}",
        output.diagnostics
    );
    assert!(
        !output
            .resources
            .iter()
            .any(|resource| matches!(resource, Resource::Service(_)))
    );
}

/// Errors beyond the reader's limit are not reported one by one, but the route must still fail
/// closed because of them.
#[test]
fn a_route_with_too_many_mistakes_refuses_all() {
    let methods = "{method: get}, ".repeat(1000);
    let fields: String = (0..1000).map(|number| format!("x{number}: 1, ")).collect();
    for spec in [
        format!("  rules: [{{matches: [{methods}], backendRefs: [{BACKEND}]}}]\n"),
        format!("  rules: [{{{fields} backendRefs: [{BACKEND}]}}]\n"),
    ] {
        let output = compiled(canal_sources::parse(
            "limits.yaml",
            &format!("{BASE}{}", route(&spec)),
        ));
        let rules = routes(&output);
        assert_eq!(rules.len(), 1);
        assert!(
            matches!(rules[0].action, RouteAction::Refuse { status: 500, .. }),
            "{:?}",
            rules[0].action
        );
    }
}

/// Returns a service of an opaque protocol on these ports, with pods numbered from `first`.
fn direct(name: &str, ports: usize, first: usize, pods: usize) -> String {
    let ports: Vec<String> = (1..=ports)
        .map(|port| format!("{{name: tcp-{port}, port: {port}}}"))
        .collect();
    let mut yaml = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: None, selector: {{app: {name}}}, ports: [{}]}}\n",
        ports.join(", ")
    );
    for pod in first..first + pods {
        writeln!(
            yaml,
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}-{pod}, labels: {{app: {name}}}, annotations: {{canal.mesh/az: az1}}}}\n\
             spec: {{nodeName: n1}}\nstatus: {{podIP: 10.1.{}.{}, conditions: [{{type: Ready, status: 'True'}}]}}",
            pod / 250,
            pod % 250 + 1
        )
        .unwrap();
    }
    yaml
}

/// Returns the number of direct endpoints, and the number of ports that the first of them serves.
fn direct_endpoints(yaml: &str) -> (usize, usize) {
    let output = output(yaml);
    let all = output
        .resources
        .iter()
        .filter_map(|resource| match resource {
            Resource::DirectEndpoint(endpoint) => Some(endpoint.serves.len()),
            _ => None,
        });
    let all: Vec<usize> = all.collect();
    (all.len(), all.first().copied().unwrap_or(0))
}

#[test]
fn endpoints_of_the_direct_path() {
    let per_service = DIRECT_ENDPOINTS_PER_SERVICE_MAX;
    assert_eq!(
        direct_endpoints(&direct("a", 1, 0, per_service)),
        (per_service, 1)
    );
    assert_eq!(
        direct_endpoints(&direct("a", 1, 0, per_service + 1)),
        (0, 0),
        "the service keeps the gateway"
    );
    let services = DIRECT_ENDPOINTS_PER_TENANT_MAX / per_service;
    let full: String = (0..services)
        .map(|n| direct(&format!("a{n:03}"), 1, n * per_service, per_service))
        .collect();
    assert_eq!(
        direct_endpoints(&full),
        (DIRECT_ENDPOINTS_PER_TENANT_MAX, 1)
    );
    let beyond = full + &direct("z", 1, services * per_service, 1);
    assert_eq!(
        direct_endpoints(&beyond),
        (DIRECT_ENDPOINTS_PER_TENANT_MAX, 1),
        "the last service keeps the gateway"
    );
    let ports = DIRECT_PORTS_PER_WORKLOAD_MAX;
    assert_eq!(direct_endpoints(&direct("a", ports, 0, 1)), (1, ports));
    assert_eq!(direct_endpoints(&direct("a", ports + 1, 0, 1)), (1, ports));
}

/// Returns `count` pods, each with its own identity, service, and policy that admits the first pod.
fn pods_with_policies(count: usize) -> String {
    let mut yaml = String::new();
    for n in 0..count {
        let pod = direct(&format!("p{n}"), 1, n, 1).replace(
            "spec: {nodeName: n1}",
            &format!("spec: {{nodeName: n{n}, serviceAccountName: p{n}}}"),
        );
        let policy = format!(
            "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p{n}}}\nspec: {{selector: {{matchLabels: \
             {{app: p{n}}}}}, action: ALLOW, rules: [{{from: [{{source: {{serviceAccounts: [default/p0]}}}}]}}]}}\n"
        );
        yaml += &(pod + &policy);
    }
    yaml
}

/// Returns the number of direct endpoints that exactly one node receives, and of those that no node
/// receives.
fn sent_to_one_and_none(yaml: &str) -> (usize, usize) {
    let output = output(yaml);
    let audience = |resource: &Resource| match resource {
        Resource::DirectEndpoint(endpoint) => match &endpoint.audience {
            DirectAudience::Nodes(nodes) => Some(nodes.len()),
            DirectAudience::Tenant => None,
        },
        _ => None,
    };
    let sizes: Vec<usize> = output.resources.iter().filter_map(audience).collect();
    (
        sizes.iter().filter(|size| **size == 1).count(),
        sizes.iter().filter(|size| **size == 0).count(),
    )
}

#[test]
fn evaluations_for_the_audience_of_direct_endpoints() {
    let square = DIRECT_EVALUATIONS_PER_TENANT_MAX.isqrt();
    assert_eq!(square * square, DIRECT_EVALUATIONS_PER_TENANT_MAX);
    assert_eq!(
        sent_to_one_and_none(&pods_with_policies(square)),
        (square, 0)
    );
    let (one, none) = sent_to_one_and_none(&pods_with_policies(square + 1));
    assert_eq!(
        (one + none, none),
        (square + 1, 2),
        "the rest is sent to no data plane"
    );
}

#[test]
fn bytes_of_a_list_of_cors() {
    // Each name counts with its comma.
    let names = |bytes: usize| {
        let mut names = vec!["x".repeat(63); 63];
        names.push("x".repeat(bytes - 63 * 64 - 1));
        names.join(", ")
    };
    for list in ["allowHeaders", "exposeHeaders"] {
        check(CORS_LIST_BYTES_MAX, "bytes, more than", |bytes| {
            route(&format!(
                "  rules:\n  - filters: [{{type: CORS, cors: {{allowOrigins: ['https://a.example'], {list}: [{}]}}}}]\n    backendRefs: [{BACKEND}]\n",
                names(bytes)
            ))
        });
        check(CORS_LIST_BYTES_MAX, "bytes, more than", |bytes| {
            format!(
                "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v}}\nspec:\n  hosts: [web]\n  http:\n  - corsPolicy: {{allowOrigins: [{{exact: 'https://a.example'}}], {list}: [{}]}}\n    route: [{{destination: {{host: web}}}}]\n",
                names(bytes)
            )
        });
    }
}

/// A rule's destinations and mirrors are read for each port of each Service that its object routes.
#[test]
fn destinations_and_mirrors_beyond_the_limit_are_not_read() {
    let object = |rule: &str| {
        format!(
            "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v}}\nspec: {{hosts: [web], http: [{{{rule}}}]}}\n"
        )
    };
    let many = |entry: &str, count: usize| vec![entry; count].join(", ");
    let destinations = many(
        "{destination: {host: gone}, weight: 1}",
        BACKENDS_PER_RULE_MAX + 1,
    );
    let refused = output(&object(&format!("route: [{destinations}]")));
    let [found] = refused.diagnostics.as_slice() else {
        panic!("{:?}", refused.diagnostics)
    };
    assert!(found.problem.contains("257 backends"), "{found:?}");
    let action = &routes(&refused)[0].action;
    assert!(matches!(action, RouteAction::Refuse { .. }), "{action:?}");
    let mirrors = many("{destination: {host: web}}", 2 * BACKENDS_PER_RULE_MAX);
    let web = "route: [{destination: {host: web}}]";
    let mirrored = output(&object(&format!("{web}, mirrors: [{mirrors}]")));
    assert_eq!(routes(&mirrored)[0].mirrors.len(), MIRRORS_PER_RULE_MAX);
    // One for all that are not read, and one for each other that gets no request.
    let expected = 1 + BACKENDS_PER_RULE_MAX - MIRRORS_PER_RULE_MAX;
    assert_eq!(mirrored.diagnostics.len(), expected);
}
