//! The compiler on one large tenant: 10,000 Services, each with a pod and an HTTPRoute of ten rules.
//! A change replaces one HTTPRoute, and the compiler makes the whole tenant again, as the controller
//! has it do. Parsing is not timed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_compiler::{CompileInput, compile, service_keys};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;

/// DESIGN's largest tenant, which docs/performance.md has as a target.
const SERVICES: usize = 10_000;
/// Rules of each service: with [`SERVICES`] they are the target's 100,000.
const RULES_PER_SERVICE: usize = 10;

/// The objects of the tenant, ready to be compiled.
pub struct CompileBench {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    /// Index of the first HTTPRoute in `documents`.
    first_route: usize,
    service_ids: BTreeMap<ServiceKey, ServiceId>,
}

impl Default for CompileBench {
    fn default() -> Self {
        Self::new()
    }
}

impl CompileBench {
    /// Parses the objects.
    ///
    /// # Panics
    /// Panics if the compiler has anything to say about the objects: then it did other work.
    pub fn new() -> Self {
        let tenant: TenantName = "alpha".parse().expect("the name is valid");
        let mut documents = parse(
            "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
             spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.0.0.0/8]}\n",
        );
        for at in 0..SERVICES {
            documents.extend(parse(&service(at)));
        }
        let first_route = documents.len();
        for at in 0..SERVICES {
            documents.extend(parse(&route(at, 0)));
        }
        let keys = service_keys(&tenant, &documents).into_iter();
        let ids = (1..).map(|id| ServiceId::new(id).expect("the ID is valid"));
        let bench = Self {
            service_ids: keys.zip(ids).collect(),
            tenant,
            documents,
            first_route,
        };
        let output = compile(&bench.input());
        assert_eq!(output.diagnostics, [], "the objects are valid");
        bench
    }

    fn input(&self) -> CompileInput<'_> {
        static NO_KEYS: BTreeMap<String, String> = BTreeMap::new();
        CompileInput {
            tenant: &self.tenant,
            documents: &self.documents,
            service_ids: &self.service_ids,
            jwks: &NO_KEYS,
        }
    }

    /// Compiles the tenant and returns the time that it took.
    pub fn compile(&self) -> Duration {
        let begun = Instant::now();
        let output = compile(black_box(&self.input()));
        let took = begun.elapsed();
        // The output is dropped outside the time.
        drop(black_box(output));
        took
    }

    /// Replaces a route, compiles the tenant, and returns the time of the compile. Each `number`
    /// gives other content to another route.
    pub fn change(&mut self, number: usize) -> Duration {
        // 7,919 is prime to the number of routes, so the changes are spread over all of them.
        let at = number * 7_919 % SERVICES;
        let changed = parse(&route(at, number + 1));
        self.documents[self.first_route + at] = changed[0].clone();
        self.compile()
    }
}

fn parse(yaml: &str) -> Vec<Arc<Document>> {
    let parsed = canal_sources::parse("bench.yaml", yaml);
    parsed.documents.into_iter().map(Arc::new).collect()
}

fn service(at: usize) -> String {
    let (high, low) = (at / 250, at % 250 + 1);
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: s{at}, namespace: shop}}\n\
         spec: {{clusterIP: 172.16.{high}.{low}, selector: {{app: s{at}}}, ports: [{{name: http, port: 80}}]}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: p{at}, namespace: shop, labels: {{app: s{at}}}, annotations: {{canal.mesh/az: az1}}}}\n\
         spec: {{nodeName: n1, containers: [{{name: c}}]}}\nstatus: {{podIP: 10.1.{high}.{low}, conditions: [{{type: Ready, status: \"True\"}}]}}\n"
    )
}

/// The HTTPRoute of a Service. `revision` is a part of its paths.
fn route(at: usize, revision: usize) -> String {
    let mut text = format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: r{at}, namespace: shop}}\n\
         spec:\n  parentRefs: [{{group: \"\", kind: Service, name: s{at}, port: 80}}]\n  rules:\n"
    );
    for rule in 0..RULES_PER_SERVICE {
        writeln!(
            text,
            "  - {{matches: [{{path: {{type: PathPrefix, value: /v{revision}/api/{rule}}}}}], backendRefs: [{{name: s{at}, port: 80}}]}}"
        )
        .expect("writing to a string succeeds");
    }
    text
}
