//! One set of cases for every source of policy: its objects are in force, a mistake removes
//! nothing, and a diagnostic can be traced to the author of its object. A new source adds a
//! fixture.

use std::path::PathBuf;

use canal_catalog::{CatalogObject, TenantCatalog};
use canal_compiler::resource_budget::CompiledSize;
use canal_model::ids::Generation;
use canal_sources::Directory;
use canal_wire::api;
use tempfile::TempDir;

use super::*;
use crate::files::update_of;
use crate::plan_apply::{WritePermission, WriteRequest, decide};
use crate::tenant_sources::TenantSources;

const TENANT: &str = "alpha";

/// A source with one tenant, whose objects a test writes and removes by the name of their file.
trait SourceFixture {
    /// Returns which source it is.
    fn origin(&self) -> PolicyOrigin;
    /// Writes a file of objects, and returns the errors that its author gets.
    fn put(&mut self, sources: &mut TenantSources, name: &str, yaml: &str) -> Vec<Diagnostic>;
    /// Removes a file and its objects.
    fn remove(&mut self, sources: &mut TenantSources, name: &str);
    /// Removes the tenant, of which nothing is left.
    fn remove_tenant(&mut self, sources: &mut TenantSources);
}

/// Files in a folder.
struct FilesFixture {
    root: TempDir,
    directory: Directory,
}

impl FilesFixture {
    fn new() -> Self {
        let root = TempDir::new().unwrap();
        std::fs::create_dir(root.path().join(TENANT)).unwrap();
        let directory = Directory::new(root.path());
        Self { root, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(TENANT).join(format!("{name}.yaml"))
    }

    fn scan(&mut self, sources: &mut TenantSources) -> Vec<Diagnostic> {
        let update = update_of(self.directory.scan(), self.root.path());
        let mut errors = Vec::new();
        for (tenant, state) in update.tenants {
            assert_eq!(tenant.as_str(), TENANT);
            if let SourceState::Read(content) = &state {
                errors.extend(content.diagnostics());
            }
            sources.take_state(state);
        }
        errors
    }
}

impl SourceFixture for FilesFixture {
    fn origin(&self) -> PolicyOrigin {
        PolicyOrigin::Files
    }
    fn put(&mut self, sources: &mut TenantSources, name: &str, yaml: &str) -> Vec<Diagnostic> {
        let new = self.root.path().join(".new");
        std::fs::write(&new, yaml).unwrap();
        std::fs::rename(&new, self.path(name)).unwrap();
        self.scan(sources)
    }
    fn remove(&mut self, sources: &mut TenantSources, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
        self.scan(sources);
    }
    fn remove_tenant(&mut self, sources: &mut TenantSources) {
        std::fs::remove_dir(self.root.path().join(TENANT)).unwrap();
        self.scan(sources);
    }
}

/// Objects that an operator applies.
struct ApiFixture;

impl ApiFixture {
    fn write(&mut self, sources: &mut TenantSources, request: WriteRequest) -> Vec<Diagnostic> {
        let plan = decide(
            sources,
            &request,
            Vec::new(),
            WritePermission {
                is_provider: true,
                bytes_max: u64::MAX,
            },
            1,
        );
        if !plan.is_refused() {
            *sources = plan.after;
        }
        plan.diagnostics
    }
}

impl SourceFixture for ApiFixture {
    fn origin(&self) -> PolicyOrigin {
        PolicyOrigin::Api
    }
    fn put(&mut self, sources: &mut TenantSources, name: &str, yaml: &str) -> Vec<Diagnostic> {
        self.write(
            sources,
            WriteRequest::Apply(vec![api::File {
                path: format!("{name}.yaml"),
                yaml: yaml.into(),
            }]),
        )
    }
    fn remove(&mut self, sources: &mut TenantSources, name: &str) {
        let object = api::ObjectRef {
            kind: "Service".into(),
            namespace: "default".into(),
            name: name.into(),
        };
        let errors = self.write(
            sources,
            WriteRequest::Delete {
                objects: vec![object],
                ignore_missing: false,
            },
        );
        assert_eq!(errors, []);
    }
    fn remove_tenant(&mut self, _: &mut TenantSources) {}
}

fn fixtures() -> [Box<dyn SourceFixture>; 2] {
    [Box::new(FilesFixture::new()), Box::new(ApiFixture)]
}

fn sources() -> TenantSources {
    TenantSources::new(TENANT.parse().unwrap())
}

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: None, ports: [{{port: {port}}}]}}\n"
    )
}

/// Returns the names of the objects in force, each with the source that it comes from.
fn in_force(sources: &TenantSources) -> Vec<(String, PolicyOrigin)> {
    let row = |object: CatalogObject| {
        (
            object.document.object.metadata().name.to_string(),
            object.origin,
        )
    };
    sources.objects().into_iter().map(row).collect()
}

#[test]
fn objects_of_a_source_are_in_force_until_it_is_removed() {
    for mut source in fixtures() {
        let (mut sources, origin) = (sources(), source.origin());
        assert_eq!(
            source.put(&mut sources, "a", &service("a", 80)),
            [],
            "{origin:?}"
        );
        source.put(&mut sources, "b", &service("b", 80));
        assert_eq!(
            in_force(&sources),
            [("a".to_string(), origin), ("b".to_string(), origin)]
        );
        assert_eq!(
            sources.bytes(),
            (service("a", 80) + &service("b", 80)).len() as u64,
            "{origin:?}"
        );
        assert!(sources.has(origin) && sources.is_complete() && !sources.is_gone());
        source.put(&mut sources, "a", &service("a", 8080));
        assert!(
            sources
                .objects()
                .iter()
                .any(|object| object.document.text.contains("8080")),
            "{origin:?}"
        );
        source.remove(&mut sources, "a");
        assert_eq!(in_force(&sources), [("b".to_string(), origin)]);
        source.remove(&mut sources, "b");
        source.remove_tenant(&mut sources);
        assert!(!sources.has(origin) && sources.is_gone(), "{origin:?}");
    }
}

#[test]
fn a_mistake_is_named_and_removes_nothing() {
    for mut source in fixtures() {
        let (mut sources, origin) = (sources(), source.origin());
        source.put(&mut sources, "a", &service("a", 80));
        for broken in [
            "kind: [",
            "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {prots: []}\n",
        ] {
            let errors = source.put(&mut sources, "a", broken);
            assert!(
                errors
                    .iter()
                    .any(|d| d.severity == Severity::Error && !d.fix.is_empty()),
                "{origin:?}: {errors:?}"
            );
            assert_eq!(in_force(&sources), [("a".to_string(), origin)], "{broken}");
            assert!(
                sources.objects()[0].document.text.contains("port: 80"),
                "{origin:?}"
            );
        }
    }
}

#[test]
fn diagnostics_of_an_object_are_reported_by_its_key() {
    let route = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r}\n\
                 spec: {parentRefs: [{kind: Service, group: '', name: a}], rules: [{backendRefs: [{name: nosuch, port: 80}]}]}\n";
    for mut source in fixtures() {
        let (mut sources, origin) = (sources(), source.origin());
        source.put(&mut sources, "a", &service("a", 80));
        source.put(&mut sources, "r", route);
        let keys: Vec<_> = sources.service_keys().into_iter().collect();
        let ids = keys
            .into_iter()
            .map(|key| (key, canal_model::ids::ServiceId::new(1).unwrap())) // There is one.
            .collect();
        let view = TenantCatalog::next(
            None,
            sources
                .compile(&mut Default::default(), &ids, CompiledSize::UNLIMITED)
                .0,
            Generation(1),
        );
        let object = view
            .objects
            .iter()
            .find(|object| object.document.object.metadata().name.as_str() == "r")
            .unwrap();
        let key = object.document.object.key();
        let found: Vec<&Diagnostic> = view.status_of(&key).collect();
        assert!(
            found.iter().any(|d| d.problem.contains("nosuch")),
            "{origin:?}: {:?}",
            view.diagnostics
        );
        let location = if origin == PolicyOrigin::Files {
            "r.yaml"
        } else {
            "api"
        };
        assert!(
            object.location().ends_with(location),
            "{}",
            object.location()
        );
    }
}

#[test]
fn of_two_objects_with_one_key_that_of_the_first_source_is_in_force() {
    // In each order of writing: precedence is no matter of time.
    for files_first in [true, false] {
        let mut sources = sources();
        let (mut files, mut api) = (FilesFixture::new(), ApiFixture);
        if files_first {
            files.put(&mut sources, "a", &service("a", 80));
            let errors = api.put(&mut sources, "a", &service("a", 8080));
            assert!(
                errors
                    .iter()
                    .any(|d| d.problem.contains("comes from the file")),
                "{errors:?}"
            );
        } else {
            api.put(&mut sources, "a", &service("a", 8080));
            files.put(&mut sources, "a", &service("a", 80));
            let warnings = sources
                .compile(
                    &mut Default::default(),
                    &BTreeMap::new(),
                    CompiledSize::UNLIMITED,
                )
                .0
                .diagnostics;
            assert!(
                warnings.iter().any(|d| d.severity == Severity::Warning
                    && d.problem.contains("comes from api and from")),
                "{warnings:?}"
            );
        }
        assert_eq!(in_force(&sources), [("a".to_string(), PolicyOrigin::Files)]);
        files.remove(&mut sources, "a");
        let left = if files_first {
            vec![]
        } else {
            vec![("a".to_string(), PolicyOrigin::Api)]
        };
        assert_eq!(in_force(&sources), left);
    }
}

#[test]
fn a_source_that_was_not_read_yet_leaves_the_tenant_incomplete() {
    let mut sources = sources();
    sources.expect(PolicyOrigin::Files);
    assert!(!sources.is_complete() && sources.has(PolicyOrigin::Files) && !sources.is_gone());
    FilesFixture::new().put(&mut sources, "a", &service("a", 80));
    assert!(sources.is_complete());
}
