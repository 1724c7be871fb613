//! Load balancers that hash, compared with the oracle: from a DestinationRule through the compiler
//! and the wire format to the gateway's tables, for generated requests and endpoints.

use std::fmt::Write;
use std::sync::Arc;

use canal_compiler::{build_ir, lower};
use canal_differential::policy::Policy;
use canal_differential::target::received;
use canal_gateway_config::{EndpointSet, LoadBalancing, SnapshotBuilder, hash_of_request};
use canal_model::ids::{AzName, Generation, ReplicaName, ServiceKey};
use canal_model::load_balancing::LoadBalancer;
use canal_model::program::Labels;
use canal_oracle::load_balancing::{OracleHashedRequest, endpoint};
use canal_router::RoutableRequest;
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

const BASE: &str = "
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16]}
---
apiVersion: canal.mesh/v1
kind: GatewayReplica
metadata: {name: gw-all}
spec: {az: az1, addresses: [10.1.255.1]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}
";

/// Compiles a load balancer of a service with these pods. Returns it with the endpoint set that a
/// gateway makes of it.
fn compiled(
    load_balancer: &str,
    pods: impl IntoIterator<Item = u8>,
) -> (LoadBalancer, Arc<EndpointSet>) {
    let mut text = format!(
        "{BASE}---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: web}}\nspec: {{host: web, trafficPolicy: {{loadBalancer: {load_balancer}}}}}\n"
    );
    for pod in pods {
        write!(
            text,
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: web-{pod}, labels: {{app: web}}, annotations: {{canal.mesh/az: az1}}}}\nspec: {{nodeName: n1}}\nstatus: {{podIP: 10.1.0.{pod}, conditions: [{{type: Ready, status: 'True'}}]}}\n"
        )
        .unwrap();
    }
    let parsed = canal_sources::parse("hash.yaml", &text);
    assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
    let policy = Policy::of(&[("hash.yaml".to_owned(), text)]);
    let (ir, diagnostics) = build_ir(&policy.input());
    assert_eq!(diagnostics, []);
    let ir = ir.unwrap();
    let (az, replica): (AzName, ReplicaName) = ("az1".parse().unwrap(), "gw-all".parse().unwrap());
    let placement = lower::placement_on(&ir, &replica, &"b1".parse().unwrap());
    let resources = received(&lower::gateway(&ir, &replica, &az, &placement));
    let resources: Vec<_> = resources.into_iter().map(Arc::new).collect();
    let mut builder = SnapshotBuilder::new("gw-all", None, None);
    let snapshot = builder.apply(&resources, &[], Generation(1));
    let service: ServiceKey = "alpha/default/web".parse().unwrap();
    let tenant = snapshot.tenant("alpha").unwrap();
    let slot = tenant.service(&service).unwrap().port(80).unwrap().slot;
    let policy = ir.services[&service]
        .service
        .load_balancer(80, &Labels::new());
    (policy, snapshot.set(slot).unwrap().clone())
}

/// A generated request.
struct SentRequest<'a>(&'a OracleHashedRequest);

impl RoutableRequest for SentRequest<'_> {
    fn host(&self) -> &[u8] {
        b"web"
    }
    fn method(&self) -> &[u8] {
        b"GET"
    }
    fn path(&self) -> &[u8] {
        b"/"
    }
    fn query(&self) -> Option<&[u8]> {
        self.0.query.as_deref().map(str::as_bytes)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        let values = self.0.headers.iter().filter(|(sent, _)| sent == name);
        values.for_each(|(_, value)| visit(value.as_bytes()));
    }
}

fn load_balancers() -> impl Strategy<Value = String> {
    let key = select(vec![
        "httpHeaderName: X-User",
        "httpCookie: {name: user}",
        "httpCookie: {name: user, path: /, ttl: 0s}",
        "useSourceIp: true",
        "httpQueryParameterName: user",
    ]);
    let table = select(vec![
        "",
        ", ringHash: {}",
        ", ringHash: {minimumRingSize: 3}",
        ", minimumRingSize: 50",
        ", maglev: {tableSize: 11}",
        ", maglev: {tableSize: 251}",
    ]);
    (key, table).prop_map(|(key, table)| format!("{{consistentHash: {{{key}{table}}}}}"))
}

fn requests() -> impl Strategy<Value = OracleHashedRequest> {
    // XXH64 treats inputs of 32 bytes and more differently.
    let value = || {
        select(vec![
            "",
            "a",
            "b",
            "user",
            "a long value of more than 32 bytes: 0123",
        ])
    };
    let header = prop_oneof![
        value().prop_map(|value| ("x-user".to_owned(), value.to_owned())),
        value().prop_map(|value| ("user".to_owned(), value.to_owned())),
    ];
    // Cookies whose names only contain the configured name must not be hashed.
    let cookie = select(vec!["user", "superuser", "users", "a"]);
    let cookies = vec((cookie, value(), any::<bool>()), 1..3).prop_map(|pairs| {
        let pairs = pairs.into_iter().map(|(name, value, is_quoted)| {
            if is_quoted {
                format!("{name}=\"{value}\"")
            } else {
                format!("{name}={value}")
            }
        });
        pairs.collect::<Vec<_>>().join("; ")
    });
    let query = vec(
        (select(vec!["user", "users", "x"]), option::of(value())),
        // None, one, or two, which may have the same name.
        0..3,
    );
    let query = query.prop_map(|pairs| {
        let pairs = pairs.into_iter().map(|(name, value)| match value {
            Some(value) => format!("{name}={value}"),
            None => name.to_owned(),
        });
        pairs.collect::<Vec<_>>().join("&")
    });
    let client = any::<u8>().prop_map(|last| format!("10.1.9.{last}"));
    (
        // None, one, or two, which may have the same name.
        vec(header, 0..3),
        option::of(cookies),
        option::of(query),
        client,
    )
        .prop_map(|(mut headers, cookies, query, client)| {
            headers.extend(cookies.map(|line| ("cookie".to_owned(), line)));
            OracleHashedRequest {
                headers,
                query,
                client,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_gateway_selects_the_endpoint_of_the_oracle(
        text in load_balancers(),
        pods in btree_set(1..250u8, 1..8),
        requests in vec(requests(), 32),
    ) {
        let (policy, set) = compiled(&text, pods);
        let LoadBalancing::ConsistentHash(balancer) = &set.load_balancing else {
            panic!("{text} does not hash")
        };
        let addresses: Vec<String> =
            set.endpoints.iter().map(|it| it.address.to_string()).collect();
        let endpoints: Vec<&str> = addresses.iter().map(String::as_str).collect();
        for request in requests {
            let expected = endpoint(&policy, &endpoints, &request);
            let hash = hash_of_request(&balancer.key, &request.client, &SentRequest(&request));
            let at = hash.and_then(|hash| balancer.positions(hash, 1).next());
            prop_assert_eq!(at.map(|at| endpoints[at]), expected, "{} {:?}", text, request);
        }
    }
}
