//! Reads the direct path settings of the Tenant and its Services. `crate::direct` decides whether a
//! port is direct.

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::canal::DirectPathMode;
use canal_model::policy::kubernetes::DIRECT_ANNOTATION;

use super::tenant_objects::TenantObjects;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::direct::{DirectPreference, DirectSettings};

/// Reads the Tenant's `directPath` and the Services' annotations. An annotation that is neither
/// `true` nor `false` counts as `false`.
pub(crate) fn resolve(
    name: &TenantName,
    corpus: &TenantObjects<'_>,
    report: &mut DiagnosticCollector,
) -> DirectSettings {
    // Of several Tenants of this name the last counts, as in `tenant::own_object`.
    let own = corpus
        .tenants
        .iter()
        .rev()
        .find(|tenant| tenant.object.metadata.name.as_str() == name.as_str());
    // A field that cannot be parsed counts as Off.
    let is_off = own.is_some_and(|t| {
        t.object.spec.direct_path == DirectPathMode::Off || t.fault("spec.directPath").is_some()
    });
    let mut settings = DirectSettings {
        is_off,
        services: Default::default(),
    };
    for service in &corpus.services {
        let metadata = &service.object.metadata;
        let Some(written) = metadata.annotations.get(DIRECT_ANNOTATION) else {
            continue;
        };
        let preference = match written.as_str() {
            "true" => DirectPreference::Wanted,
            "false" => DirectPreference::Refused,
            _ => {
                // A diagnostic stays within a line, however long the annotation is.
                let shown: String = written.chars().take(80).collect();
                let field = format!("metadata.annotations[{DIRECT_ANNOTATION:?}]");
                report.error(
                    Code::InvalidAnnotation,
                    service.document,
                    field,
                    format!("{shown:?} is neither true nor false; gateways stay in use"),
                    "write true or false",
                );
                // A misspelled annotation must not make traffic bypass the gateway.
                DirectPreference::Refused
            }
        };
        let key = ServiceKey {
            tenant: name.clone(),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
        };
        settings.services.insert(key, preference);
    }
    settings
}
