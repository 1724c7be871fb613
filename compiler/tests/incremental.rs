//! After every edit the incremental compiler gives what a compile of the whole tenant gives: equal
//! resources, diagnostics, size and everything else.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{
    CompileInput, CompileOutput, IncrementalCompiler, Recompiled, compile_within, service_keys,
};
use canal_generated_policies::routing::cases;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::istio::Delegate;
use canal_model::policy::kubernetes::DIRECT_ANNOTATION;
use canal_model::policy::{Document, Object, Timestamp};
use canal_model::program::{Resource, RouteAction};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::limits::{BACKEND, BASE};
use crate::properties::{golden_texts, mutated_lines};

/// A tenant that is edited and compiled again and again.
struct EditedTenant {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    service_ids: BTreeMap<ServiceKey, ServiceId>,
    max: CompiledSize,
    compiler: IncrementalCompiler,
    /// The resources of the last compile.
    resources: Vec<Arc<Resource>>,
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
    }
}

/// One edit of a tenant: what is done, and to which documents.
#[derive(Debug, Clone)]
struct Edit {
    what: u8,
    at: Index,
    other: Index,
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let edit = (0..40u8, any::<Index>(), any::<Index>());
    let edit = edit.prop_map(|(what, at, other)| Edit { what, at, other });
    prop::collection::vec(edit, 1..16)
}

fn is_route(document: &Document) -> bool {
    matches!(
        document.object,
        Object::HttpRoute(_) | Object::GrpcRoute(_) | Object::VirtualService(_)
    )
}

/// Makes an edit; `pool` has other versions of the objects. Most edits are of routes, in place:
/// after any other edit the compiler compiles the whole tenant, so that the comparison shows
/// nothing. Nobody measured the weights; `most_edits_of_routes_compile_only_routes` bounds them.
fn apply(documents: &mut Vec<Arc<Document>>, pool: &[Arc<Document>], edit: &Edit) {
    let routes: Vec<usize> = (0..documents.len())
        .filter(|at| is_route(&documents[*at]))
        .collect();
    let route = (!routes.is_empty()).then(|| routes[edit.at.index(routes.len())]);
    let offered: Vec<&Arc<Document>> = pool.iter().filter(|it| is_route(it)).collect();
    match (edit.what, route) {
        (0..=17, _) if !offered.is_empty() => {
            put(documents, offered[edit.at.index(offered.len())], edit.other)
        }
        (18..=22, Some(at)) => drop(documents.remove(at)),
        // A file that is read again has new documents, also of what did not change.
        (23..=24, _) => {
            let first = edit.at.index(documents.len());
            for document in &mut documents[first..] {
                let mut moved = (**document).clone();
                moved.origin.line += u32::from(edit.what == 24);
                *document = Arc::new(moved);
            }
        }
        (25..=27, Some(at)) => edit_object(&mut documents[at], |object| {
            // Few times, so that routes often are of the same age.
            let at = Timestamp(edit.other.index(4) as u64);
            match object {
                Object::HttpRoute(it) => it.metadata.creation_timestamp = Some(at),
                Object::GrpcRoute(it) => it.metadata.creation_timestamp = Some(at),
                Object::VirtualService(it) => it.metadata.creation_timestamp = Some(at),
                // `is_route` selects these three kinds only.
                _ => {}
            }
        }),
        (28..=32, Some(at)) => edit_object(&mut documents[at], |object| {
            if let Object::VirtualService(it) = object {
                delegate(it, edit.other.index(8));
            }
        }),
        (33, _) => {
            let middle = edit.at.index(documents.len());
            documents.rotate_left(middle);
        }
        (34, _) => {
            let copy = documents[edit.at.index(documents.len())].clone();
            documents.insert(edit.other.index(documents.len()), copy);
        }
        (35, _) => {
            for document in documents.iter_mut() {
                edit_object(document, |object| {
                    if let Object::Service(it) = object {
                        let wanted = (edit.at.index(2) == 0).to_string();
                        let annotations = &mut it.metadata.annotations;
                        annotations.insert(DIRECT_ANNOTATION.to_owned(), wanted);
                    }
                });
            }
        }
        (36, _) => drop(documents.remove(edit.at.index(documents.len()))),
        (37.., _) => put(documents, &pool[edit.at.index(pool.len())], edit.other),
        // Without a route there is none to edit, and the pool may offer none.
        _ => {}
    }
}

/// Replaces the object with the same key, or adds the document.
fn put(documents: &mut Vec<Arc<Document>>, document: &Arc<Document>, place: Index) {
    let key = document.object.key();
    match documents.iter().position(|it| it.object.key() == key) {
        Some(at) => documents[at] = document.clone(),
        None => documents.insert(place.index(documents.len() + 1), document.clone()),
    }
}

fn edit_object(document: &mut Arc<Document>, edit: impl FnOnce(&mut Object)) {
    let mut edited = (**document).clone();
    edit(&mut edited.object);
    *document = Arc::new(edited);
}

/// Makes a VirtualService a delegate, or one that delegates to another.
fn delegate(route: &mut canal_model::policy::istio::VirtualService, choice: usize) {
    let spec = &mut route.spec;
    match choice {
        0..=2 => spec.hosts.clear(),
        3 => spec.gateways = vec!["edge".to_owned()],
        _ => {
            for rule in spec.http.iter_mut().take(choice - 3) {
                rule.delegate = Some(Delegate {
                    name: format!("vs-{}", choice % 3).parse().unwrap(),
                    namespace: None,
                });
                rule.route.clear();
                rule.redirect = None;
                rule.direct_response = None;
            }
        }
    }
}

/// A generated tenant, other versions of its objects, and edits of it.
fn edited_tenants() -> impl Strategy<Value = (Vec<Vec<Arc<Document>>>, Vec<Edit>, Option<u64>)> {
    let versions = prop::collection::vec(cases(), 4);
    let versions = versions.prop_map(|all| all.into_iter().map(|it| it.documents).collect());
    (
        versions,
        edits(),
        prop::option::weighted(0.2, 1_000..400_000u64),
    )
}

/// Edits a generated tenant, and compares the results after every edit.
fn check_edits(
    versions: &[Vec<Arc<Document>>],
    edits: &[Edit],
    max: Option<u64>,
) -> (usize, usize) {
    let pool: Vec<Arc<Document>> = versions.iter().flatten().cloned().collect();
    let mut edited = EditedTenant::new(versions[0].clone());
    if let Some(bytes) = max {
        edited.max.route_table_bytes = bytes;
    }
    edited.check();
    for edit in edits {
        apply(&mut edited.documents, &pool, edit);
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
    fn edits_compile_as_the_whole_tenant_does((versions, edits, max) in edited_tenants()) {
        check_edits(&versions, &edits, max);
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
        let (versions, edits, _) = edited_tenants().new_tree(&mut runner).unwrap().current();
        let (own, all) = check_edits(&versions, &edits, None);
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
        let parents = services
            .iter()
            .map(|service| format!("{{group: '', kind: Service, name: {service}}}"));
        let parents = parents.collect::<Vec<_>>().join(", ");
        let mut text = format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}}}\nspec:\n  parentRefs: [{parents}]\n  rules:\n"
        );
        for number in 0..count {
            // A Service has room for fewer than 200 of these expressions, so some of its rules
            // refuse.
            let value = format!("/{number}(abc|d[e-z]){{300}}");
            writeln!(text, "  - {{matches: [{{path: {{type: RegularExpression, value: '{value}'}}}}], backendRefs: [{BACKEND}]}}").unwrap();
        }
        text + "---\n"
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
