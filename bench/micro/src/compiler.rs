//! The compiler on one large tenant: 10,000 Services, each with a pod and an HTTPRoute of ten rules.
//! A change replaces one HTTPRoute. The calls are those of the controller. Parsing is not timed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{CompileInput, IncrementalCompiler, Recompiled, compile, service_keys};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;

/// DESIGN's largest tenant, which docs/performance.md has as a target.
pub(crate) const SERVICES: usize = 10_000;
/// Rules of each service: with [`SERVICES`] they are the target's 100,000.
pub(crate) const RULES_PER_SERVICE: usize = 10;

/// The objects of the tenant, ready to be compiled.
pub struct CompileBench {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    service_ids: BTreeMap<ServiceKey, ServiceId>,
    compiler: IncrementalCompiler,
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
        let tenant: TenantName = TENANT.parse().expect("the name is valid");
        let documents = documents();
        let keys = service_keys(&tenant, &documents).into_iter();
        let ids = (1..).map(|id| ServiceId::new(id).expect("the ID is valid"));
        let bench = Self {
            service_ids: keys.zip(ids).collect(),
            tenant,
            documents,
            compiler: IncrementalCompiler::default(),
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

    /// Compiles the whole tenant and returns the time that it took.
    pub fn compile(&mut self) -> Duration {
        let mut compiler = IncrementalCompiler::default();
        let begun = Instant::now();
        black_box(compiler.compile(black_box(&self.input()), CompiledSize::UNLIMITED));
        let took = begun.elapsed();
        // What was compiled before is dropped outside the time.
        self.compiler = compiler;
        took
    }

    /// Replaces a route, compiles the tenant, and returns the time of the compile. Each `number`
    /// gives other content to another route.
    ///
    /// # Panics
    /// Panics if the result has other changes than the rules of the route.
    pub fn change(&mut self, number: usize) -> Duration {
        change(&mut self.documents, number);
        let mut compiler = std::mem::take(&mut self.compiler);
        let input = self.input();
        let begun = Instant::now();
        let compiled = black_box(compiler.compile(black_box(&input), CompiledSize::UNLIMITED));
        let took = begun.elapsed();
        let Recompiled::Routes(_, changes) = compiled else {
            panic!("the whole tenant was compiled");
        };
        let counts = [changes.removed.len(), changes.added.len()];
        assert_eq!(counts, [RULES_PER_SERVICE; 2], "each rule of the route");
        self.compiler = compiler;
        took
    }

    /// Compares the result of all changes with that of a compile of the whole tenant.
    ///
    /// # Panics
    /// Panics if they differ.
    pub fn check(&mut self) {
        let mut compiler = std::mem::take(&mut self.compiler);
        let input = self.input();
        let expected = compile(&input);
        let compiled = compiler.compile(&input, CompiledSize::UNLIMITED);
        let found = compiled.output();
        let are_equal = found
            .resources
            .iter()
            .map(AsRef::as_ref)
            .eq(&expected.resources)
            && found.size == expected.size
            && found.diagnostics == expected.diagnostics;
        assert!(are_equal, "the results differ");
        self.compiler = compiler;
    }
}

/// Name of the tenant that is compiled.
pub(crate) const TENANT: &str = "alpha";

/// Returns the objects of the tenant. The last ones are the HTTPRoutes.
pub(crate) fn documents() -> Vec<Arc<Document>> {
    let mut documents = parse(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
         spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.0.0.0/8]}\n",
    );
    for at in 0..SERVICES {
        documents.extend(parse(&service(at)));
    }
    for at in 0..SERVICES {
        documents.extend(parse(&route(at, 0)));
    }
    documents
}

/// Replaces a route. Each `number` gives other content to another route.
pub(crate) fn change(documents: &mut [Arc<Document>], number: usize) {
    // 7,919 is prime to the number of routes, so the changes are spread over all of them.
    let at = number * 7_919 % SERVICES;
    let place = documents.len() - SERVICES + at;
    documents[place] = parse(&route(at, number + 1)).remove(0);
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
