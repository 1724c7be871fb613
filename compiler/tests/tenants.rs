//! Tests of interactions between tenants: conflicting claims, and the scope of principals.

use canal_compiler::claims::{TenantClaims, collisions};
use canal_compiler::{CompileOutput, compile, scope};
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::program::{Resource, ResourceKind};

use crate::parsed_tenant::ParsedTenant;

fn output(name: &str, yaml: &str) -> CompileOutput {
    compile(&ParsedTenant::parse(name, "t.yaml", yaml).input())
}

/// Compiles a tenant from `vni trust-domain pods replica address` and its gateway ranges, and
/// returns its claims.
fn claims(name: &str, line: &str) -> TenantClaims {
    let words: Vec<&str> = line.split(' ').collect();
    let [vni, trust, pods, replica, address, gateways @ ..] = words.as_slice() else {
        panic!("{line:?}")
    };
    let gateways = gateways.join(", ");
    let yaml = format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {vni}, trustDomain: {trust}, podCidrs: [{pods}], gatewayCidrs: [{gateways}]}}\n---\n\
         apiVersion: canal.mesh/v1\nkind: GatewayReplica\nmetadata: {{name: {replica}}}\nspec: {{az: az1, addresses: [{address}]}}\n"
    );
    output(name, &yaml).claims
}

/// Checks which tenants yield, and the fields of their diagnostics.
fn check(tenants: &[(&str, &str)], withheld: &[&str], fields: &[&str]) {
    let claims: Vec<TenantClaims> = tenants
        .iter()
        .map(|(name, line)| claims(name, line))
        .collect();
    let found = collisions(&claims);
    assert_eq!(
        found
            .withheld
            .iter()
            .map(TenantName::as_str)
            .collect::<Vec<_>>(),
        withheld,
        "{tenants:?}"
    );
    let reported: Vec<String> = found
        .diagnostics
        .iter()
        .map(|(tenant, d)| format!("{tenant} {}", d.field))
        .collect();
    assert_eq!(reported, fields, "{tenants:?}");
    assert!(
        found
            .diagnostics
            .iter()
            .all(|(_, diagnostic)| diagnostic.object.is_some())
    );
}

#[test]
fn the_newer_tenant_loses_a_conflict() {
    // The fields are the VNI, the trust domain, the pod range, a replica, and its address.
    let alpha = ("alpha", "1 a.example 10.1.0.0/16 gw-0 10.1.0.1");
    check(
        &[alpha, ("beta", "2 b.example 10.2.0.0/16 gw-0 10.2.0.1")],
        &[],
        &[],
    );
    check(
        &[alpha, ("beta", "1 b.example 10.2.0.0/16 gw-0 10.2.0.1")],
        &["beta"],
        &["beta spec.vni"],
    );
    check(
        &[alpha, ("beta", "2 a.example 10.2.0.0/16 gw-0 10.2.0.1")],
        &["beta"],
        &["beta spec.trustDomain"],
    );
    check(
        &[alpha, ("beta", "2 b.example 10.1.7.0/24 gw-0 10.2.0.1")],
        &["beta"],
        &["beta spec.podCidrs[0]"],
    );
    // The first of the list is the oldest, so here alpha yields.
    check(
        &[("beta", "2 b.example 10.1.7.0/24 gw-0 10.2.0.1"), alpha],
        &["alpha"],
        &["alpha spec.podCidrs[0]"],
    );
    check(
        &[alpha, ("beta", "2 b.example 10.2.0.0/16 gw-0 10.1.0.1")],
        &["beta"],
        &["beta spec.addresses[0]"],
    );
    // Another replica may have the same address: it is in another network namespace, or on another
    // machine.
    check(
        &[alpha, ("beta", "2 b.example 10.2.0.0/16 gw-1 10.1.0.1")],
        &[],
        &[],
    );
    // A tenant that yields does not defend its claims: gamma conflicts only with beta, which is
    // excluded.
    let beta = ("beta", "1 b.example 10.2.0.0/16 gw-0 10.2.0.1");
    check(
        &[
            alpha,
            beta,
            ("gamma", "3 b.example 10.3.0.0/16 gw-0 10.3.0.1"),
        ],
        &["beta"],
        &["beta spec.vni"],
    );
}

/// The cloud tier separates tenants by VNI. If one of two tenants is not on it, their addresses
/// must differ.
#[test]
fn tenants_on_the_tier_may_have_the_same_addresses() {
    // The last field, gatewayCidrs, puts the tenant on the cloud tier.
    let alpha = (
        "alpha",
        "1 a.example 10.1.0.0/16 gw-0 10.1.0.1 10.101.0.0/20",
    );
    check(
        &[
            alpha,
            (
                "beta",
                "2 b.example 10.1.0.0/16 gw-1 10.1.0.1 10.101.0.0/20",
            ),
        ],
        &[],
        &[],
    );
    check(
        &[
            alpha,
            (
                "beta",
                "1 b.example 10.1.0.0/16 gw-1 10.1.0.1 10.101.0.0/20",
            ),
        ],
        &["beta"],
        &["beta spec.vni"],
    );
    check(
        &[
            alpha,
            (
                "beta",
                "2 a.example 10.1.0.0/16 gw-1 10.1.0.1 10.101.0.0/20",
            ),
        ],
        &["beta"],
        &["beta spec.trustDomain"],
    );
    check(
        &[alpha, ("beta", "2 b.example 10.1.0.0/16 gw-1 10.1.0.1")],
        &["beta"],
        &["beta spec.podCidrs[0]"],
    );
    // The pod range lies in alpha's gatewayCidrs, and beta itself is not on the tier.
    check(
        &[alpha, ("beta", "2 b.example 10.101.8.0/24 gw-1 10.1.0.1")],
        &["beta"],
        &["beta spec.podCidrs[0]"],
    );
    check(
        &[alpha, ("beta", "2 b.example 10.2.0.0/16 gw-1 10.1.0.1")],
        &[],
        &[],
    );
    let plain = ("plain", "3 p.example 10.1.7.0/24 gw-1 10.1.7.1");
    check(&[plain, alpha], &["alpha"], &["alpha spec.podCidrs[0]"]);
    check(
        &[
            plain,
            // The gateway range contains the pod range of plain, which is not on the tier.
            ("beta", "2 b.example 10.2.0.0/16 gw-2 10.2.0.1 10.1.0.0/19"),
        ],
        &["beta"],
        &["beta spec.gatewayCidrs[0]"],
    );
}

#[test]
fn of_two_tenant_objects_of_one_name_the_younger_counts() {
    // Objects with equal names and namespaces are duplicates, of which the first one counts.
    let object = |namespace: &str, day: u32, n: u32| {
        format!(
            "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: alpha, namespace: {namespace}, creationTimestamp: \"2026-01-0{day}T00:00:00Z\"}}\nspec: {{vni: {n}, trustDomain: a.example, podCidrs: [10.1.0.0/16], gatewayCidrs: [10.101.0.0/20], homeAz: az{n}, defaultThrottle: {{requests: {{perSecond: {n}, burst: 1}}}}}}\n---\n"
        )
    };
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}\n";
    for (days, n) in [([1, 2], 2), ([2, 1], 1)] {
        let text = object("a", days[0], 1) + &object("b", days[1], 2) + service;
        let output = output("alpha", &text);
        let tenant = output.resources.iter().find_map(|resource| match resource {
            Resource::Tenant(tenant) => Some(tenant),
            _ => None,
        });
        assert_eq!(tenant.unwrap().vni.get(), n);
        let home = format!("az{n}");
        assert!(output.homes.values().all(|az| az.as_str() == home));
        assert!(!output.homes.is_empty());
        let throttles = output
            .resources
            .iter()
            .filter_map(|resource| match resource {
                Resource::Throttle(throttle) => Some(throttle.requests.per_second),
                _ => None,
            });
        assert_eq!(throttles.collect::<Vec<_>>(), [n]);
    }
}

/// A tenant with resources of every kind that has a scope.
const SHARED_TENANT: &str = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\nspec: {vni: 1, trustDomain: a.example, podCidrs: [10.1.0.0/16], gatewayCidrs: [10.101.0.0/20], keys: {location: KeyServer}}\n---\n\
        apiVersion: canal.mesh/v1\nkind: GatewayReplica\nmetadata: {name: gw-0}\nspec: {az: az1, addresses: [10.1.0.1]}\n---\n\
        apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}\n---\n\
        apiVersion: v1\nkind: Pod\nmetadata: {name: web-0, labels: {app: web}}\nspec: {nodeName: n1}\nstatus: {podIP: 10.1.0.2}\n---\n\
        apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{group: '', kind: Service, name: web}], rules: [{backendRefs: [{name: web, port: 80}]}]}\n---\n\
        apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: az1}, annotations: {canal.mesh/vtep-mac: '02:00:5e:10:00:01'}}\n\
        spec: {podCIDR: 10.1.0.0/24}\nstatus: {addresses: [{type: InternalIP, address: 192.168.1.1}]}\n---\n\
        apiVersion: canal.mesh/v1\nkind: Throttle\nmetadata: {name: t}\nspec: {sessions: {perSecond: 5}}\n---\n\
        apiVersion: canal.mesh/v1\nkind: KeyServer\nmetadata: {name: own}\nspec: {addresses: ['192.0.2.1:15013']}\n---\n\
        apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: none}\n---\n\
        apiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {name: jwt}\n---\n\
        apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: strict}\nspec: {mtls: {mode: STRICT}}\n---\n\
        apiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {name: web}\nspec: {targetRef: {kind: Service, name: web}, port: 80, certificate: {mesh: {}}}\n";

/// Returns the kinds of the resources that a principal receives.
fn kinds_for(output: &CompileOutput, principal: &Principal) -> Vec<ResourceKind> {
    if !scope::admits(&output.claims, principal, &scope::TierPlacement::default()) {
        return Vec::new();
    }
    output
        .resources
        .iter()
        .filter(|resource| scope::visible(resource, principal, &scope::TierPlacement::default()))
        .map(Resource::kind)
        .collect()
}

#[test]
fn principals_see_their_share() {
    let output = output("alpha", SHARED_TENANT);
    let kinds = |principal: &Principal| kinds_for(&output, principal);
    let az = || "az1".parse().unwrap();
    let node = |name: &str, tenant: &str| Principal::Node {
        name: name.parse().unwrap(),
        tenant: tenant.parse().unwrap(),
        az: az(),
    };
    let gateway = |name: &str| Principal::Gateway {
        name: name.parse().unwrap(),
        az: az(),
    };
    let edge = Principal::Edge {
        name: "edge-az1".parse().unwrap(),
        az: az(),
    };
    // The tier's own service is sorted before `web`.
    let of_node = [
        ResourceKind::Tenant,
        ResourceKind::GatewayReplica,
        ResourceKind::Service,
        ResourceKind::Service,
    ];
    let policies = [
        ResourceKind::KeyServer,
        ResourceKind::Authorization,
        ResourceKind::Authentication,
        ResourceKind::PeerAuthentication,
        ResourceKind::Termination,
    ];
    let of_gateway = [
        of_node.as_slice(),
        &[
            ResourceKind::Workload,
            ResourceKind::Route,
            ResourceKind::Throttle,
        ],
        &policies,
    ]
    .concat();
    assert_eq!(kinds(&gateway("gw-0")), of_gateway);
    assert_eq!(kinds(&edge), [ResourceKind::Tenant, ResourceKind::Node]);
    // Only gw-0 is a replica of the tenant.
    assert_eq!(kinds(&gateway("gw-1")), []);
    let of_all_nodes = [
        ResourceKind::Authorization,
        ResourceKind::PeerAuthentication,
    ];
    assert_eq!(
        kinds(&node("n1", "alpha")),
        [of_node.as_slice(), &[ResourceKind::Workload], &of_all_nodes].concat()
    );
    assert_eq!(
        kinds(&node("n2", "alpha")), // No pod runs there.
        [of_node.as_slice(), &of_all_nodes].concat()
    );
    let keys = |tenant: Option<&str>| Principal::KeyServer {
        name: "k".parse().unwrap(),
        az: az(),
        tenant: tenant.map(|t| t.parse().unwrap()),
    };
    assert_eq!(
        kinds(&keys(None)),
        [ResourceKind::Tenant, ResourceKind::Entitlement]
    );
    assert_eq!(
        kinds(&keys(Some("alpha"))),
        [ResourceKind::Tenant, ResourceKind::Entitlement]
    );
    assert_eq!(kinds(&keys(Some("beta"))), []);
    assert_eq!(kinds(&node("n1", "beta")), []);
    // Even if `admits` wrongly accepted the tenant, another tenant's node could not see its
    // resources.
    assert!(output.resources.iter().all(|resource| !scope::visible(
        resource,
        &node("n1", "beta"),
        &scope::TierPlacement::default()
    )));
    for tenant in [None, Some("alpha".parse().unwrap())] {
        assert_eq!(
            kinds(&Principal::Operator {
                name: "ops".parse().unwrap(),
                tenant
            }),
            []
        );
    }
}
