//! Compiles a tenant again and again, and checks what data planes would refuse. Only what changed is
//! compiled and checked. Start at [`TenantCompilers::with`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_catalog::wire_check::{self, EnforcedResources};
use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{CompileInput, CompileOutput, IncrementalCompiler, Recompiled};
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::TenantName;
use canal_model::program::Resource;

/// The compiler of one tenant, with the checks of its last result.
#[derive(Default)]
pub struct TenantCompiler {
    compiler: IncrementalCompiler,
    /// Bytes of the last result; `None` if data planes would have refused a part of it.
    accepted_bytes: Option<u64>,
}

/// A compiled tenant of which data planes accept all resources.
pub(crate) struct CheckedOutput<'c> {
    /// What was compiled, with the resources that data planes would refuse.
    pub(crate) output: &'c CompileOutput<Arc<Resource>>,
    /// The resources that may be published.
    pub(crate) resources: Vec<Arc<Resource>>,
    /// An error for each resource that data planes would refuse.
    pub(crate) refused: Vec<Diagnostic>,
    pub(crate) size: CompiledSize,
}

impl TenantCompiler {
    /// Compiles a tenant, and replaces or leaves out the resources that data planes would refuse.
    pub(crate) fn compile(
        &mut self,
        input: &CompileInput<'_>,
        max: CompiledSize,
    ) -> CheckedOutput<'_> {
        // If compiling panics, the next call checks everything.
        let accepted = self.accepted_bytes.take();
        let compiled = self.compiler.compile(input, max);
        let output = compiled.output();
        let changed = match &compiled {
            Recompiled::Everything(_) => None,
            Recompiled::Routes(_, changes) => accepted.and_then(|bytes| {
                let removed = wire_check::accepted_bytes(&changes.removed)?;
                let added = wire_check::accepted_bytes(&changes.added)?;
                Some(bytes.checked_sub(removed)?.saturating_add(added))
            }),
        };
        let mut refused = Vec::new();
        let EnforcedResources { resources, bytes } = match changed.filter(|it| *it <= max.bytes) {
            Some(bytes) => EnforcedResources {
                resources: output.resources.clone(),
                bytes,
            },
            None => wire_check::enforce(&output.resources, max.bytes, &mut refused),
        };
        let is_accepted = refused.is_empty() && bytes <= max.bytes && !output.is_stopped;
        self.accepted_bytes = is_accepted.then_some(bytes);
        let mut size = output.size;
        // The size of a compilation that stopped shows the excess; its resources are only a part.
        if !output.is_stopped {
            size.bytes = bytes;
        }
        CheckedOutput {
            output,
            resources,
            refused,
            size,
        }
    }
}

/// The compilers of all tenants.
#[derive(Default)]
pub struct TenantCompilers {
    compilers: Mutex<BTreeMap<TenantName, Arc<Mutex<TenantCompiler>>>>,
}

impl TenantCompilers {
    /// Calls `compile` with the compiler of a tenant, which no other call has at the same time.
    pub(crate) fn with<R>(
        &self,
        tenant: &TenantName,
        compile: impl FnOnce(&mut TenantCompiler) -> R,
    ) -> R {
        let compiler = {
            let mut all = self
                .compilers
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            all.entry(tenant.clone()).or_default().clone()
        };
        // A compiler that panicked begins anew at its next call.
        let mut compiler = compiler.lock().unwrap_or_else(PoisonError::into_inner);
        compile(&mut compiler)
    }

    /// Drops the compiler of a tenant that is gone.
    pub(crate) fn forget(&self, tenant: &TenantName) {
        let mut all = self
            .compilers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.remove(tenant);
    }
}

#[cfg(test)]
mod tests {
    use canal_catalog::PolicyOrigin;
    use canal_model::authorization::VALUES_MAX;
    use canal_model::ids::ServiceId;

    use super::*;
    use crate::source::{ReadContent, SourceState};
    use crate::tenant_sources::TenantSources;

    const BASE: &str = "apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.0.0.0/16]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 172.16.0.1, ports: [{name: http, port: 80}]}
";

    fn route(name: &str, paths: usize) -> String {
        let rule = |number| {
            format!(
                "  - {{matches: [{{path: {{value: /{number}}}}}], backendRefs: [{{name: web, port: 80}}]}}\n"
            )
        };
        let rules: String = (0..paths).map(rule).collect();
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec:\n  parentRefs: [{{group: '', kind: Service, name: web}}]\n  rules:\n{rules}"
        )
    }

    /// Returns a policy that data planes accept up to [`VALUES_MAX`] values.
    fn policy(values: usize) -> String {
        let paths: Vec<String> = (0..values).map(|number| format!("/{number}")).collect();
        format!(
            "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p, namespace: shop}}\n\
             spec: {{action: DENY, rules: [{{to: [{{operation: {{paths: [{}]}}}}]}}]}}\n",
            paths.join(", ")
        )
    }

    /// A compiler that has compiled other states before gives what a new one gives, also where data
    /// planes would refuse a resource, and where the share is exceeded.
    #[test]
    fn a_compiler_that_is_used_again_gives_what_a_new_one_gives() {
        let name: TenantName = "alpha".parse().unwrap();
        let mut used = TenantCompiler::default();
        let states: [(&[String], u64); 9] = [
            (&[route("a", 3)], u64::MAX),
            (&[route("a", 4)], u64::MAX),
            (&[route("a", 4), route("b", 2)], u64::MAX),
            (&[route("a", 4), policy(VALUES_MAX + 1)], u64::MAX),
            (&[route("a", 5), policy(VALUES_MAX + 1)], u64::MAX),
            (&[route("a", 5), policy(3)], u64::MAX),
            (&[route("a", 200), policy(3)], 8_000),
            (&[route("a", 5), policy(3)], 8_000),
            (&[route("a", 6), policy(3)], 8_000),
        ];
        for (at, (texts, bytes)) in states.into_iter().enumerate() {
            let text = format!("{BASE}---\n{}", texts.join("---\n"));
            let parsed = canal_sources::parse("alpha.yaml", &text);
            assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
            let documents = parsed.documents.into_iter().map(Arc::new).collect();
            let mut sources = TenantSources::new(name.clone());
            let content = ReadContent::new(PolicyOrigin::Files, documents, Vec::new());
            sources.take_state(SourceState::Read(Arc::new(content)));
            let keys = sources.service_keys().into_iter();
            let ids = keys.map(|key| (key, ServiceId::new(1).unwrap())).collect();
            let max = CompiledSize {
                bytes,
                ..CompiledSize::UNLIMITED
            };
            let (found, size) = sources.compile(&mut used, &ids, max);
            let (expected, expected_size) =
                sources.compile(&mut TenantCompiler::default(), &ids, max);
            assert_eq!(found.resources, expected.resources, "{at}");
            assert_eq!(found.diagnostics, expected.diagnostics, "{at}");
            assert_eq!(size, expected_size, "{at}");
            assert_eq!(found.objects.len(), expected.objects.len(), "{at}");
        }
    }
}
