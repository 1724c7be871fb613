//! After every edit the incremental compiler gives what a compile of the whole tenant gives: equal
//! resources, diagnostics, size and everything else.

mod edits;

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_compiler::limits::{DELEGATION_COMPARISONS_PER_TENANT_MAX, DIAGNOSTICS_OF_SEVERITY_MAX};
use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{
    CompileInput, CompileOutput, IncrementalCompiler, Recompiled, compile_within, service_keys,
};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::program::{Resource, RouteAction};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::limits::BASE;
use crate::properties::{golden_texts, mutated_lines};
use crate::regex_limits::{regex_route, service_parents};
use edits::{GeneratedEdits, apply, edited_tenants};

/// A tenant that is edited and compiled again and again.
struct EditedTenant {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    service_ids: BTreeMap<ServiceKey, ServiceId>,
    max: CompiledSize,
    compiler: IncrementalCompiler,
    /// The resources of the last compile.
    resources: Vec<Arc<Resource>>,
    size: CompiledSize,
    /// Compiles in which not the whole tenant was compiled.
    partial: usize,
    compiles: usize,
}

impl EditedTenant {
    fn new(documents: Vec<Arc<Document>>) -> Self {
        Self {
            tenant: TenantName::new("alpha").unwrap(),
            documents,
            service_ids: BTreeMap::new(),
            max: CompiledSize::UNLIMITED,
            compiler: IncrementalCompiler::default(),
            resources: Vec::new(),
            size: CompiledSize::default(),
            partial: 0,
            compiles: 0,
        }
    }

    /// Gives each service the id that it had, or the next one.
    fn assign_ids(&mut self) {
        for key in service_keys(&self.tenant, &self.documents) {
            let next = u32::try_from(self.service_ids.len() + 1).unwrap();
            self.service_ids
                .entry(key)
                .or_insert_with(|| ServiceId::new(next).unwrap());
        }
    }

    /// Compiles the tenant in both ways, and compares the results.
    fn check(&mut self) {
        self.assign_ids();
        let no_keys = BTreeMap::new();
        let input = CompileInput {
            tenant: &self.tenant,
            documents: &self.documents,
            service_ids: &self.service_ids,
            jwks: &no_keys,
        };
        let expected = compile_within(&input, self.max);
        let found = self.compiler.compile(&input, self.max);
        let output = found.output();
        let unshared = CompileOutput {
            resources: output.resources.iter().map(|it| (**it).clone()).collect(),
            diagnostics: output.diagnostics.clone(),
            claims: output.claims.clone(),
            homes: output.homes.clone(),
            ingress: output.ingress.clone(),
            federations: output.federations.clone(),
            jwks: output.jwks.clone(),
            size: output.size,
            is_stopped: output.is_stopped,
        };
        assert_eq!(unshared.diagnostics, expected.diagnostics);
        assert_eq!(unshared.size, expected.size);
        // A message with all resources would be of no use.
        for (own, expected) in unshared.resources.iter().zip(&expected.resources) {
            assert_eq!(own, expected);
        }
        assert!(unshared == expected, "the results differ");
        self.compiles += 1;
        if let Recompiled::Routes(output, changes) = &found {
            self.partial += 1;
            let is_listed = |list: &[Arc<Resource>], it: &Arc<Resource>| {
                list.iter().any(|other| Arc::ptr_eq(other, it))
            };
            let kept = self
                .resources
                .iter()
                .filter(|it| !is_listed(&changes.removed, it));
            let old = output
                .resources
                .iter()
                .filter(|it| !is_listed(&changes.added, it));
            assert!(
                kept.eq(old)
                    && changes
                        .removed
                        .iter()
                        .all(|it| is_listed(&self.resources, it)),
                "the listed changes lead from one result to the next"
            );
        }
        self.resources = found.output().resources.clone();
        self.size = found.output().size;
    }
}

/// Edits a generated tenant, and compares the results after every edit.
fn check_edits(generated: &GeneratedEdits) -> (usize, usize) {
    let mut edited = EditedTenant::new(generated.documents.clone());
    edited.check();
    if let Some(scarce) = &generated.scarce {
        edited.max = scarce.beyond(edited.size);
        edited.check();
    }
    for edit in &generated.edits {
        apply(&mut edited.documents, &generated.pool, edit);
        // Every third edit is compiled together with the next one.
        if edit.other.index(3) > 0 && !edited.documents.is_empty() {
            edited.check();
        }
        if edited.documents.is_empty() {
            break;
        }
    }
    (edited.partial, edited.compiles)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn edits_compile_as_the_whole_tenant_does(generated in edited_tenants()) {
        check_edits(&generated);
    }

    #[test]
    fn bent_files_compile_as_the_whole_tenant_does(
        (text, changes) in (prop::sample::select(golden_texts()), prop::collection::vec(mutated_lines(), 1..6)),
    ) {
        let mut edited = EditedTenant::new(Vec::new());
        let mut text = text;
        for change in changes {
            let parsed = canal_sources::parse("bent.yaml", &text);
            edited.documents = parsed.documents.into_iter().map(Arc::new).collect();
            edited.check();
            text = change.apply(&text);
        }
    }
}

/// The comparison is useful only if many edits are not compiled with the whole tenant.
#[test]
fn most_edits_of_routes_compile_only_routes() {
    let mut runner = TestRunner::deterministic();
    let (mut partial, mut compiles) = (0, 0);
    for _ in 0..100 {
        let generated = edited_tenants().new_tree(&mut runner).unwrap().current();
        let (own, all) = check_edits(&generated);
        partial += own;
        compiles += all;
    }
    assert!(partial * 3 > compiles, "{partial} of {compiles}");
}

/// A route that leaves its Service room for expressions changes what other routes of the Service may
/// use, and theirs what those on their other Services may.
#[test]
fn routes_that_share_a_limit_are_compiled_together() {
    let services = ["other", "far"].map(|name| {
        format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: None, ports: [{{name: http, port: 80}}]}}\n---\n")
    });
    let of = |name: &str, services: &[&str], count: usize| {
        regex_route(name, &service_parents(services), count)
    };
    let documents = |counts: [usize; 3]| -> Vec<Arc<Document>> {
        let routes = of("a", &["web"], counts[0])
            + &of("b", &["web", "other"], counts[1])
            + &of("c", &["other", "far"], counts[2])
            + &of("d", &["far"], 1);
        let text = BASE.to_owned() + &services.concat() + &routes;
        let parsed = canal_sources::parse("limits.yaml", &text);
        parsed.documents.into_iter().map(Arc::new).collect()
    };
    let refused = |edited: &EditedTenant| {
        let rules = edited.resources.iter().filter_map(|it| match &**it {
            Resource::Route(rule) => Some(rule),
            _ => None,
        });
        let refused = rules.filter(|it| matches!(it.action, RouteAction::Refuse { .. }));
        refused.count()
    };
    let mut edited = EditedTenant::new(documents([200, 1, 1]));
    edited.check();
    let full = refused(&edited);
    for counts in [[1, 1, 1], [1, 200, 1], [200, 200, 200], [200, 1, 1]] {
        edited.documents = documents(counts);
        edited.check();
    }
    assert_eq!(refused(&edited), full);
    // All four edits are of routes alone, so each is compiled partially.
    assert!(full > 1 && edited.partial == 4, "{full} {}", edited.partial);
}

fn parsed(text: &str) -> Vec<Arc<Document>> {
    let parsed = canal_sources::parse("limits.yaml", text);
    assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
    parsed.documents.into_iter().map(Arc::new).collect()
}

/// A share may change alone, and then what was compiled may exceed it.
#[test]
fn a_share_that_changes_alone_is_applied() {
    let route = regex_route("a", &service_parents(&["web"]), 2);
    let mut edited = EditedTenant::new(parsed(&(BASE.to_owned() + &route)));
    edited.check();
    edited.max.route_table_bytes = edited.size.route_table_bytes - 1;
    edited.check();
    assert!(edited.resources.is_empty());
    edited.max = CompiledSize::UNLIMITED;
    edited.check();
    assert!(!edited.resources.is_empty());
}

/// Two states that differ in one route: the first is within a limit of the tenant, and the second
/// exceeds it by the sum of independent routes.
fn check_limit(first: [&str; 2], second: [&str; 2]) {
    // An object that did not change is the same document, as in the controller.
    let kept = parsed(&(BASE.to_owned() + first[0]));
    let of = |text: &str| kept.iter().cloned().chain(parsed(text)).collect();
    let mut edited = EditedTenant::new(of(first[1]));
    edited.check();
    for text in [second[0], second[1], first[1]] {
        edited.documents = of(text);
        edited.check();
    }
    assert!(edited.partial >= 1, "{}", edited.partial);
}

const OTHER_SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: other}\n\
    spec: {clusterIP: None, ports: [{name: http, port: 80}]}\n---\n";

/// Independent delegates share the comparisons that merging may cost.
#[test]
fn comparisons_of_independent_delegates_are_counted_together() {
    // Lists beyond their own limit are counted, but not compared, so that the test is quick.
    let of = |service: &str, roots: usize, leaves: usize| {
        let matches = |count: usize| vec!["{}"; count].join(", ");
        let (roots, leaves) = (matches(roots), matches(leaves));
        let head = "apiVersion: networking.istio.io/v1\nkind: VirtualService\n";
        format!(
            "{head}metadata: {{name: {service}}}\nspec: {{hosts: [{service}], http: [{{match: [{roots}], delegate: {{name: of-{service}}}}}]}}\n---\n\
             {head}metadata: {{name: of-{service}}}\nspec: {{http: [{{match: [{leaves}], route: [{{destination: {{host: web}}}}]}}]}}\n---\n"
        )
    };
    let half = DELEGATION_COMPARISONS_PER_TENANT_MAX / 2;
    let kept = OTHER_SERVICE.to_owned() + &of("web", half / 1_100, 1_090);
    check_limit(
        [&kept, &of("other", 100, 100)],
        [&of("other", 100, 101), &of("other", half / 1_100, 1_110)],
    );
    // One that exceeds the limit alone leaves the tenant's later ones nothing.
    let kept = OTHER_SERVICE.to_owned() + &of("web", 10, 10);
    check_limit(
        [&kept, &of("other", 100, 100)],
        [&of("other", 100, 101), &of("other", 2_100, 2_000)],
    );
}

/// Diagnostics are left out by their number in the whole tenant.
#[test]
fn diagnostics_of_independent_routes_are_counted_together() {
    let of = |service: &str, errors: usize| {
        let rules = (0..errors).collect::<Vec<_>>();
        let rules = rules.chunks(250).map(|backends| {
            let backends = vec!["{name: gone, port: 80}"; backends.len()].join(", ");
            format!("  - backendRefs: [{backends}]\n")
        });
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {service}}}\nspec:\n  parentRefs: [{}]\n  rules:\n{}---\n",
            service_parents(&[service]),
            rules.collect::<String>()
        )
    };
    let kept = OTHER_SERVICE.to_owned() + &of("web", DIAGNOSTICS_OF_SEVERITY_MAX - 10);
    check_limit(
        [&kept, &of("other", 5)],
        [&of("other", 6), &of("other", 20)],
    );
}
