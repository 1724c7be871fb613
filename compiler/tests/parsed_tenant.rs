//! [`ParsedTenant`]: a tenant's parsed documents with service ids, as the compiler takes them.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_compiler::{CompileInput, CompileOutput, service_keys};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;

/// A tenant's documents. The services have the ids 1, 2 and so on in the order of their keys.
pub(crate) struct ParsedTenant {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    service_ids: BTreeMap<ServiceKey, ServiceId>,
    jwks: BTreeMap<String, String>,
}

impl ParsedTenant {
    /// Parses one file of a tenant. Panics if the text has any diagnostic.
    #[track_caller]
    pub(crate) fn parse(tenant: &str, file: &str, yaml: &str) -> Self {
        let parsed = canal_sources::parse(file, yaml);
        assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
        Self::of(tenant, parsed.documents.into_iter().map(Arc::new).collect())
    }

    /// Creates a tenant from documents, even from those of a text with diagnostics.
    pub(crate) fn of(tenant: &str, documents: Vec<Arc<Document>>) -> Self {
        let tenant = TenantName::new(tenant).unwrap();
        let service_ids = service_keys(&tenant, &documents)
            .into_iter()
            .zip(1..)
            .map(|(key, id)| (key, ServiceId::new(id).unwrap()))
            .collect();
        Self {
            tenant,
            documents,
            service_ids,
            jwks: BTreeMap::new(),
        }
    }

    /// Returns the input of the compiler.
    pub(crate) fn input(&self) -> CompileInput<'_> {
        CompileInput {
            tenant: &self.tenant,
            documents: &self.documents,
            service_ids: &self.service_ids,
            jwks: &self.jwks,
        }
    }
}

/// Checks that data planes decode everything that was compiled.
#[track_caller]
pub(crate) fn assert_decodes(output: &CompileOutput) {
    for resource in &output.resources {
        let read = canal_wire::southbound::decode(
            resource.kind(),
            &resource.name(),
            &canal_wire::southbound::encode(resource),
        );
        let is_equal = read.as_ref().is_ok_and(|read| resource.reads_as(read));
        assert!(is_equal, "{}: {:?}", resource.name(), read.err());
    }
}
