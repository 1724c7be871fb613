//! Decides to which data planes an operator's request is sent, and what each may show. Pure. The
//! isolation of tenants in observations is decided here. Start at [`decide`].

use canal_catalog::Catalog;
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::program::ResourceKind;
use canal_wire::api::ObserveRequest;
use canal_wire::observe::{ObserveBegin, Subject};
use tonic::Status;

use super::{Observable, name_of, subject_name};
use crate::operator::OperatorScope;

/// Maximum number of data planes that one request may name.
/// As many observations may run in total (`OBSERVATIONS_MAX`). A tap that names none is of all
/// gateways of the tenant.
const NAMES_MAX: usize = 256;
/// Maximum bytes of a filter's text.
/// A rule's path or header value may have as many (`TEXT_BYTES_MAX`).
const FILTER_BYTES_MAX: usize = 4096;

/// A data plane, and the order that it gets.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) principal: Principal,
    pub(super) begin: ObserveBegin,
}

/// A request after it was checked.
#[derive(Debug)]
pub(super) struct ObservationRequest {
    pub(super) subject: Subject,
    /// Tenant that is observed; `None` for all tenants, or for the provider's own state.
    pub(super) tenant: Option<TenantName>,
    pub(super) targets: Vec<Target>,
}

/// Checks a request against the data planes that are connected.
///
/// # Errors
/// The named object does not exist, or is not visible to the operator.
pub(super) fn decide(
    request: &ObserveRequest,
    operator: &OperatorScope,
    catalog: &Catalog,
    there: &[Observable],
) -> Result<ObservationRequest, Status> {
    let subject = Subject::try_from(request.subject)
        .ok()
        .filter(|s| *s != Subject::Unspecified);
    let subject = subject.ok_or_else(|| {
        Status::invalid_argument(
            "the subject is unknown; fix: send TAP, LOGS, CONFIG_DUMP or METRICS",
        )
    })?;
    let tenant = match (operator.tenant(), request.tenant.as_str()) {
        // Only the provider's operators may leave the tenant out.
        (None, "") => None,
        (_, named) => Some(operator.tenant_of(named)?),
    };
    if let Some(tenant) = &tenant
        && !catalog.tenants.contains_key(tenant)
    {
        return Err(Status::not_found(format!(
            "there is no tenant {tenant}; fix: name one that `canal status` lists"
        )));
    }
    // Filters are checked before data planes are looked up, so that a wrong filter is reported
    // although no data plane is there.
    check_filters(request, tenant.as_ref(), catalog)?;
    if request.data_planes.len() > NAMES_MAX {
        return Err(Status::invalid_argument(format!(
            "{} data planes; at most {NAMES_MAX} are accepted; fix: name fewer",
            request.data_planes.len()
        )));
    }
    let view = Scope {
        operator,
        tenant: tenant.as_ref(),
        catalog,
        there,
    };
    let names = match (subject, request.data_planes.as_slice()) {
        // Without names, a tap or metrics cover all gateways of the tenant.
        (Subject::Tap | Subject::Metrics, []) => view.gateways(subject)?,
        (_, []) => {
            return Err(Status::invalid_argument(
                "the request names no data plane; fix: name one that `canal status` lists",
            ));
        }
        // Texts of several data planes could not be distinguished in one stream.
        (Subject::ConfigDump | Subject::Logs, [_, _, ..]) => {
            return Err(Status::invalid_argument(
                "the request names several data planes; fix: name one of them",
            ));
        }
        (_, names) => names
            .iter()
            .map(|name| view.named(name, subject))
            .collect::<Result<_, _>>()?,
    };
    let target = |principal: &Principal| Target {
        principal: principal.clone(),
        begin: view.begin(request, subject, principal),
    };
    let targets = names.into_iter().map(target).collect();
    Ok(ObservationRequest {
        subject,
        tenant,
        targets,
    })
}

/// Checks that the filters are short enough, and that the service exists.
fn check_filters(
    request: &ObserveRequest,
    tenant: Option<&TenantName>,
    catalog: &Catalog,
) -> Result<(), Status> {
    let texts = [&request.service, &request.path, &request.status];
    if texts.iter().any(|text| text.len() > FILTER_BYTES_MAX) {
        return Err(Status::invalid_argument(format!(
            "a filter is longer than {FILTER_BYTES_MAX} bytes; fix: shorten it"
        )));
    }
    if request.service.is_empty() {
        return Ok(());
    }
    let is_there = |tenant: &TenantName| {
        let name = format!("{tenant}/{}", request.service);
        catalog
            .tenants
            .get(tenant)
            .is_some_and(|view| view.of(ResourceKind::Service).any(|e| *e.name == *name))
    };
    let (found, of) = match tenant {
        Some(tenant) => (is_there(tenant), format!("tenant {tenant}")),
        None => (catalog.tenants.keys().any(is_there), "no tenant".into()),
    };
    if found {
        return Ok(());
    }
    let has = if tenant.is_some() { "has no" } else { "has a" };
    let fix = "fix: write NAMESPACE/NAME as `canal get services` lists it";
    Err(Status::not_found(format!(
        "{of} {has} service {:?}; {fix}",
        request.service
    )))
}

/// The data planes that are connected, and what an operator may see of them.
struct Scope<'a> {
    operator: &'a OperatorScope,
    tenant: Option<&'a TenantName>,
    catalog: &'a Catalog,
    there: &'a [Observable],
}

impl<'a> Scope<'a> {
    /// True if the operator may observe the data plane, completely or in part.
    fn is_visible(&self, principal: &Principal) -> bool {
        let may = |tenant: &TenantName| {
            self.operator.may_see(tenant) && self.tenant.is_none_or(|named| named == tenant)
        };
        match principal {
            Principal::Node { tenant, .. }
            | Principal::KeyServer {
                tenant: Some(tenant),
                ..
            } => may(tenant),
            Principal::Gateway { .. } => {
                self.operator.is_provider()
                    || self
                        .catalog
                        .admitted(principal)
                        .any(|(tenant, _)| may(tenant))
            }
            Principal::Edge { .. } | Principal::KeyServer { tenant: None, .. } => {
                self.operator.is_provider()
            }
            Principal::Operator { .. } => false,
        }
    }

    /// Returns all gateways that serve the tenant and can show the subject.
    fn gateways(&self, subject: Subject) -> Result<Vec<&'a Principal>, Status> {
        let gateways = self.there.iter().filter(|o| {
            matches!(o.principal, Principal::Gateway { .. }) && o.subjects.contains(&subject)
        });
        let visible: Vec<_> = gateways
            .map(|o| &o.principal)
            .filter(|p| self.is_visible(p))
            .collect();
        match visible.is_empty() {
            true => Err(Status::not_found(
                "no gateway is connected; fix: correct what `canal status` shows",
            )),
            false => Ok(visible),
        }
    }

    /// Returns the data plane of this name that the operator may see.
    fn named(&self, name: &str, subject: Subject) -> Result<&'a Principal, Status> {
        let found: Vec<_> = self
            .there
            .iter()
            .filter(|o| name_of(&o.principal) == name && self.is_visible(&o.principal))
            .collect();
        match found.as_slice() {
            // The response does not reveal whether there is one that the operator may not see.
            [] => Err(Status::not_found(format!(
                "no data plane {name:?} is connected; fix: name one that `canal status` lists"
            ))),
            [one] if one.subjects.contains(&subject) => Ok(&one.principal),
            [one] => Err(Status::failed_precondition(format!(
                "{} serves no {}; fix: query another",
                one.principal,
                subject_name(subject)
            ))),
            several => {
                let all = several
                    .iter()
                    .map(|o| o.principal.to_string())
                    .collect::<Vec<_>>()
                    .join(", ");
                Err(Status::invalid_argument(format!(
                    "{name:?} is the name of {all}; fix: name the tenant too"
                )))
            }
        }
    }

    /// Returns the order for a data plane. One that serves several tenants shows a tenant's
    /// operator only that tenant's part.
    fn begin(
        &self,
        request: &ObserveRequest,
        subject: Subject,
        principal: &Principal,
    ) -> ObserveBegin {
        let is_own = matches!(
            principal,
            Principal::Node { .. }
                | Principal::KeyServer {
                    tenant: Some(_),
                    ..
                }
        );
        let tenant = self
            .tenant
            .filter(|_| !is_own)
            .map(ToString::to_string)
            .unwrap_or_default();
        ObserveBegin {
            subject: subject.into(),
            tenant,
            service: request.service.clone(),
            path: request.path.clone(),
            status: request.status.clone(),
            tail: request.tail,
            follow: request.follow,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use canal_catalog::{CompiledTenant, TenantCatalog};
    use tonic::Code;

    use super::*;

    fn there() -> Vec<Observable> {
        let node = |name: &str, tenant: &str| Principal::Node {
            name: name.parse().unwrap(),
            tenant: tenant.parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let gateway = Principal::Gateway {
            name: "g1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let edge = Principal::Edge {
            name: "edge-1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let all = BTreeSet::from([
            Subject::Tap,
            Subject::Logs,
            Subject::ConfigDump,
            Subject::Metrics,
        ]);
        let of_edge = BTreeSet::from([Subject::ConfigDump]);
        let of = |principal| Observable {
            principal,
            subjects: all.clone(),
        };
        vec![
            of(node("n1", "alpha")),
            of(node("n1", "beta")),
            of(gateway),
            Observable {
                principal: edge,
                subjects: of_edge,
            },
        ]
    }

    fn catalog() -> Catalog {
        let mut catalog = Catalog::default();
        for tenant in ["alpha", "beta"] {
            let nothing = CompiledTenant::of_provider(Vec::new());
            let view = TenantCatalog::next(None, nothing, canal_model::ids::Generation(1));
            catalog
                .tenants
                .insert(tenant.parse().unwrap(), Arc::new(view));
        }
        catalog
    }

    fn decide_request(
        tenant: Option<&str>,
        subject: Subject,
        named: &str,
        of: &str,
    ) -> Result<ObservationRequest, Status> {
        let data_planes = if named.is_empty() {
            vec![]
        } else {
            vec![named.to_owned()]
        };
        let request = ObserveRequest {
            subject: subject.into(),
            tenant: of.into(),
            data_planes,
            ..ObserveRequest::default()
        };
        decide(
            &request,
            &OperatorScope::of_test(tenant),
            &catalog(),
            &there(),
        )
    }

    #[test]
    fn a_tenants_operator_is_shown_its_own_only() {
        let alpha = Some("alpha");
        let own = decide_request(alpha, Subject::ConfigDump, "n1", "").unwrap();
        assert_eq!(own.targets.len(), 1);
        assert_eq!(
            (
                own.targets[0].principal.to_string().as_str(),
                own.targets[0].begin.tenant.as_str()
            ),
            ("node alpha/n1", "")
        );
        for (subject, named, of, code) in [
            (Subject::Tap, "", "beta", Code::PermissionDenied),
            (Subject::Logs, "n1", "beta", Code::PermissionDenied),
            (Subject::ConfigDump, "edge-1", "", Code::NotFound),
            (Subject::ConfigDump, "nosuch", "", Code::NotFound),
            (Subject::Logs, "", "", Code::InvalidArgument),
            (Subject::Unspecified, "", "", Code::InvalidArgument),
        ] {
            assert_eq!(
                decide_request(alpha, subject, named, of)
                    .unwrap_err()
                    .code(),
                code,
                "{subject:?} {named} {of}"
            );
        }
        let (hidden, unknown) = (
            decide_request(alpha, Subject::ConfigDump, "edge-1", ""),
            decide_request(alpha, Subject::ConfigDump, "edge-9", ""),
        );
        let text = |r: Result<ObservationRequest, Status>| {
            r.unwrap_err().message().replace("edge-9", "edge-1")
        };
        assert_eq!(
            text(hidden),
            text(unknown),
            "what is hidden looks as if it were not there"
        );
    }

    #[test]
    fn the_provider_sees_all_and_names_the_tenant_where_a_name_is_not_enough() {
        let tap = decide_request(None, Subject::Tap, "", "").unwrap();
        assert!(
            tap.tenant.is_none()
                && tap.targets.len() == 1
                && tap.targets[0].begin.tenant.is_empty()
        );
        let narrow = decide_request(None, Subject::Tap, "", "beta").unwrap();
        assert_eq!(narrow.targets[0].begin.tenant, "beta");
        assert_eq!(
            decide_request(None, Subject::Logs, "n1", "")
                .unwrap_err()
                .code(),
            Code::InvalidArgument
        );
        assert_eq!(
            decide_request(None, Subject::Logs, "n1", "beta")
                .unwrap()
                .targets[0]
                .principal
                .to_string(),
            "node beta/n1"
        );
        assert_eq!(
            decide_request(None, Subject::Logs, "edge-1", "")
                .unwrap_err()
                .code(),
            Code::FailedPrecondition
        );
        assert_eq!(
            decide_request(None, Subject::Tap, "", "nosuch")
                .unwrap_err()
                .code(),
            Code::NotFound
        );
    }

    #[test]
    fn an_unknown_service_is_named() {
        for (tenant, want) in [
            ("alpha", "tenant alpha has no service"),
            ("", "no tenant has a service"),
        ] {
            let request = ObserveRequest {
                subject: Subject::Tap.into(),
                tenant: tenant.into(),
                service: "shop/nosuch".into(),
                ..ObserveRequest::default()
            };
            let status = decide(
                &request,
                &OperatorScope::of_test(None),
                &catalog(),
                &there(),
            )
            .unwrap_err();
            assert!(
                status.code() == Code::NotFound && status.message().starts_with(want),
                "{status}"
            );
        }
    }
}
