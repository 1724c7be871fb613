//! Resolves references from routes to services. A reference that is broken or not allowed is
//! refused, and its backend keeps its weight.

use std::collections::BTreeMap;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ServiceKey, TenantName};
use canal_model::policy::ObjectKind;
use canal_model::policy::gateway_api::{BackendRef, ReferenceGrant};
use canal_model::policy::istio::Destination;
use canal_model::program::{BackendTarget, Labels, Service};

use super::route_fields::FieldIssue;
use super::subset::Subsets;
use super::tenant_objects::Sourced;
use crate::names;

/// The objects that routes may refer to.
pub(crate) struct DestinationIndex<'a> {
    pub(crate) tenant: &'a TenantName,
    pub(crate) services: &'a BTreeMap<ServiceKey, Service>,
    pub(crate) subsets: &'a Subsets,
    pub(crate) grants: &'a [Sourced<'a, ReferenceGrant>],
}

/// The route of which a backendRef is resolved.
#[derive(Clone, Copy)]
pub(crate) struct RouteOrigin<'a> {
    pub(crate) kind: ObjectKind,
    pub(crate) namespace: &'a Namespace,
    /// The Service that all parents of the route name, if it is one of another namespace. The route
    /// needs no ReferenceGrant to leave its requests at the Service that its clients dialled.
    pub(crate) consumed: Option<&'a ServiceKey>,
}

const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

impl DestinationIndex<'_> {
    /// Resolves a backendRef of a route.
    pub(crate) fn of_backend_ref(
        &self,
        route: RouteOrigin<'_>,
        backend: &BackendRef,
    ) -> Result<BackendTarget, FieldIssue> {
        let RouteOrigin {
            kind,
            namespace,
            consumed,
        } = route;
        // Services are in Kubernetes' core group, whose name is empty.
        if !backend.group.is_empty() || backend.kind != "Service" {
            let problem = format!(
                "backends of kind {:?} are not supported in this version",
                backend.kind
            );
            return Err(FieldIssue::new("kind", problem, "refer to a Service")
                .with_code(Code::UnsupportedBackend));
        }
        let target_namespace = backend.namespace.as_ref().unwrap_or(namespace);
        let key = ServiceKey {
            tenant: self.tenant.clone(),
            namespace: target_namespace.clone(),
            name: backend.name.clone(),
        };
        // The grant is checked before the lookup: a namespace without a grant must not learn
        // whether the service exists.
        if target_namespace != namespace
            && consumed != Some(&key)
            && !is_granted(self.grants, kind.as_str(), namespace, &key)
        {
            let problem = format!(
                "namespace {target_namespace} does not allow {kind}s of {namespace} to refer to Service {}",
                backend.name
            );
            let fix = format!(
                "write a ReferenceGrant in {target_namespace} from {kind}s in {namespace} to that Service"
            );
            return Err(
                FieldIssue::new("namespace", problem, fix).with_code(Code::BackendNotPermitted)
            );
        }
        let service = self.find(&key, "name")?;
        let Some(port) = backend.port else {
            return Err(FieldIssue::new(
                "port",
                "a Service backend needs a port",
                "write the Service's port",
            )
            .with_code(Code::MissingField));
        };
        has_port(service, port.get(), "port")?;
        Ok(BackendTarget::Service {
            service: key,
            port: port.get(),
            subset: Labels::new(),
        })
    }

    /// Resolves a destination of a VirtualService in `namespace` to a service or subset. `dialled`
    /// is the port that the client dialled.
    pub(crate) fn of_destination(
        &self,
        namespace: &Namespace,
        to: &Destination,
        dialled: u16,
    ) -> Result<BackendTarget, FieldIssue> {
        let Some(key) = names::service(self.tenant, namespace, &to.host) else {
            let problem = format!("{:?} is not a service of this tenant", to.host);
            return Err(FieldIssue::new(
                "destination.host",
                problem,
                "write a Service's name, or name.namespace",
            )
            .with_code(Code::UnresolvedBackend));
        };
        let service = self.find(&key, "destination.host")?;
        let port = match (&to.port, service.ports.as_slice()) {
            (Some(port), _) => port.number.get(),
            // As in Istio, the port may be omitted if the service has only one.
            (None, [only]) => only.port,
            (None, _) => dialled,
        };
        // The dialled port may be one that the destination lacks, so every port is checked.
        has_port(
            service,
            port,
            if to.port.is_some() {
                "destination.port.number"
            } else {
                "destination.port"
            },
        )?;
        let subset = match &to.subset {
            None => Labels::new(),
            Some(name) => match self.subsets.get(&key).and_then(|subsets| subsets.get(name)) {
                Some(Some(labels)) => labels.clone(),
                Some(None) => {
                    let problem = format!("subset {name:?} of {} is broken", to.host);
                    return Err(FieldIssue::new(
                        "destination.subset",
                        problem,
                        "fix it in its DestinationRule",
                    )
                    .with_code(Code::UnresolvedSubset));
                }
                None => {
                    let problem = format!("{} has no subset {name:?}", to.host);
                    return Err(FieldIssue::new(
                        "destination.subset",
                        problem,
                        "define it in a DestinationRule for that host",
                    )
                    .with_code(Code::UnresolvedSubset));
                }
            },
        };
        Ok(BackendTarget::Service {
            service: key,
            port,
            subset,
        })
    }

    /// Returns whether the destination's port depends on the port that the client dialled.
    pub(crate) fn follows_dialled_port(&self, namespace: &Namespace, to: &Destination) -> bool {
        let service = names::service(self.tenant, namespace, &to.host)
            .and_then(|key| self.services.get(&key));
        to.port.is_none() && service.is_some_and(|service| service.ports.len() != 1)
    }

    fn find(&self, key: &ServiceKey, field: &'static str) -> Result<&Service, FieldIssue> {
        self.services.get(key).ok_or_else(|| {
            let problem = format!("there is no Service {}/{}", key.namespace, key.name);
            FieldIssue::new(field, problem, "create it or correct the name")
                .with_code(Code::UnresolvedBackend)
        })
    }
}

/// Returns whether routes of `kind` in namespace `from` may refer to the service in another
/// namespace.
pub(crate) fn is_granted(
    grants: &[Sourced<'_, ReferenceGrant>],
    kind: &str,
    from: &Namespace,
    to: &ServiceKey,
) -> bool {
    grants.iter().any(|grant| {
        let spec = &grant.object.spec;
        grant.object.metadata.namespace == to.namespace
            && grant.fault("spec").is_none()
            && spec
                .from
                .iter()
                .any(|f| f.group == GATEWAY_GROUP && f.kind == kind && f.namespace == *from)
            && spec.to.iter().any(|t| {
                t.group.is_empty()
                    && t.kind == "Service"
                    && t.name.as_ref().is_none_or(|name| *name == to.name)
            })
    })
}

fn has_port(service: &Service, port: u16, field: &'static str) -> Result<(), FieldIssue> {
    if service.ports.iter().any(|p| p.port == port) {
        return Ok(());
    }
    let known: Vec<String> = service.ports.iter().map(|p| p.port.to_string()).collect();
    let fix = if known.is_empty() {
        "fix the Service's ports".to_owned()
    } else {
        format!("use {}", known.join(" or "))
    };
    Err(FieldIssue::new(
        field,
        format!(
            "Service {}/{} has no TCP port {port}",
            service.key.namespace, service.key.name
        ),
        fix,
    )
    .with_code(Code::BackendPortNotFound))
}
