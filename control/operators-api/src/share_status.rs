//! The use of shared limits that `canal status` shows. The controller's limits are read directly;
//! those of data planes come from their reports. Nothing is counted or decided here.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::share::ShareKind;
use canal_runtime::ShareHolder;
use canal_runtime::share::TenantLimitUsage;
use canal_southbound::ShareReport;
use canal_wire::api;

use crate::operator::OperatorScope;

/// Percentage of use from which the provider is shown a share at data planes. Shares by which
/// something was refused or revoked are shown too. All rows of all tenants at all gateways would be
/// hundreds of thousands.
/// The value was chosen so that a fifth is left when the provider first sees the share.
const TIGHT_PERCENT: u128 = 80;
/// Name of the component that stands for all nodes of a tenant together.
const NODES: &str = "nodes";

/// Returns the use of the controller's own limits that the operator may see.
pub(crate) fn of_controller(
    limits: &[TenantLimitUsage],
    operator: &OperatorScope,
) -> Vec<api::ShareUse> {
    let mut out = Vec::new();
    for limit in limits {
        for usage in &limit.holders {
            let tenant = match &usage.holder {
                ShareHolder::Tenant(name) if operator.may_see(name) => name.to_string(),
                ShareHolder::Provider if operator.is_provider() => String::new(),
                _ => continue,
            };
            out.push(api::ShareUse {
                component: "controller".into(),
                limit: limit.kind.label().into(),
                tenant,
                used: usage.used,
                max: usage.max,
                refused: usage.refused,
                revoked: usage.revoked,
                unit: limit.kind.unit().into(),
            });
        }
    }
    out
}

/// Sums of the numbers where one row stands for several data planes.
#[derive(Debug, Clone, Copy, Default)]
struct ShareSum {
    used: u64,
    max: u64,
    refused: u64,
    revoked: u64,
}

impl ShareSum {
    /// True if the share is nearly full, or something was refused or revoked.
    fn is_tight(self) -> bool {
        self.refused > 0
            || self.revoked > 0
            || u128::from(self.used) * 100 >= u128::from(self.max) * TIGHT_PERCENT
    }
}

/// Returns the use of the limits of connected data planes that the operator may see: one row per
/// data plane, but one for all nodes of a tenant.
pub(crate) fn of_data_planes(
    reports: &[(Principal, Arc<ShareReport>)],
    operator: &OperatorScope,
) -> Vec<api::ShareUse> {
    let mut rows: BTreeMap<(ShareKind, String, &TenantName), ShareSum> = BTreeMap::new();
    for (principal, report) in reports {
        let component = match principal {
            Principal::Node { .. } => NODES.to_string(),
            other => other.to_string(),
        };
        for share in report
            .shares
            .iter()
            .filter(|share| operator.may_see(&share.tenant))
        {
            let sum = rows
                .entry((share.kind, component.clone(), &share.tenant))
                .or_default();
            // A data plane may report any number, which must not make the controller panic.
            sum.used = sum.used.saturating_add(share.used);
            sum.max = sum.max.saturating_add(share.max);
            sum.refused = sum.refused.saturating_add(share.refused);
            sum.revoked = sum.revoked.saturating_add(share.revoked);
        }
    }
    // The provider sees only shares that are nearly used up; a tenant sees all of its own.
    let is_shown = |sum: &ShareSum| !operator.is_provider() || sum.is_tight();
    let shown = rows.into_iter().filter(|(_, sum)| is_shown(sum));
    shown
        .map(
            |(
                (kind, component, tenant),
                ShareSum {
                    used,
                    max,
                    refused,
                    revoked,
                },
            )| api::ShareUse {
                component,
                limit: kind.label().into(),
                tenant: tenant.to_string(),
                used,
                max,
                refused,
                revoked,
                unit: kind.unit().into(),
            },
        )
        .collect()
}

/// Returns a diagnostic for each resource that a data plane omits for lack of capacity.
pub(crate) fn omissions(
    reports: &[(Principal, Arc<ShareReport>)],
    operator: &OperatorScope,
) -> Vec<api::Diagnostic> {
    let all = reports.iter().flat_map(|(principal, report)| {
        report
            .omissions
            .iter()
            .map(move |omission| (principal, omission))
    });
    let own = all.filter(|(_, omission)| operator.may_see(&omission.tenant));
    own.map(|(principal, omission)| api::Diagnostic {
        severity: api::Severity::Error.into(),
        code: DiagnosticCode::ShareExceeded.to_string(),
        object: omission.resource.clone(),
        problem: format!("{principal} has no capacity for the resource, so it is not in force there: {}", omission.why),
        fix: "delete unused objects, or have the provider raise the share in spec.shares of the Tenant".into(),
        ..api::Diagnostic::default()
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use canal_southbound::{ReportedOmission, ReportedShare};

    use super::*;

    fn report(tenants: &[(&str, u64)]) -> Arc<ShareReport> {
        let share = |(tenant, used): &(&str, u64)| ReportedShare {
            kind: ShareKind::GatewayConnections,
            tenant: tenant.parse().unwrap(),
            used: *used,
            max: 100,
            refused: u64::from(*used == 100),
            revoked: 0,
        };
        let omission = |(tenant, _): &(&str, u64)| ReportedOmission {
            tenant: tenant.parse().unwrap(),
            resource: "x".into(),
            why: "full".into(),
        };
        Arc::new(ShareReport {
            shares: tenants.iter().map(share).collect(),
            omissions: tenants.iter().take(1).map(omission).collect(),
        })
    }

    fn all() -> Vec<(Principal, Arc<ShareReport>)> {
        let node = |name: &str, tenant: &str| Principal::Node {
            name: name.parse().unwrap(),
            tenant: tenant.parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let gateway = Principal::Gateway {
            name: "g1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        vec![
            (gateway, report(&[("alpha", 7), ("beta", 100)])),
            (node("n1", "alpha"), report(&[("alpha", 1)])),
            (node("n2", "alpha"), report(&[("alpha", 2)])),
            (node("m1", "beta"), report(&[("beta", 3)])),
        ]
    }

    fn rows(operator: &OperatorScope) -> Vec<(String, String, u64, u64)> {
        of_data_planes(&all(), operator)
            .into_iter()
            .map(|s| (s.component, s.tenant, s.used, s.max))
            .collect()
    }

    #[test]
    fn a_tenant_sees_its_own_shares_and_its_nodes_together() {
        let alpha = OperatorScope::of_test(Some("alpha"));
        let want = [("gateway g1", "alpha", 7, 100), ("nodes", "alpha", 3, 200)];
        assert_eq!(
            rows(&alpha),
            want.map(|(c, t, used, max)| (c.to_string(), t.to_string(), used, max))
        );
        let found = omissions(&all(), &alpha);
        assert!(
            found.len() == 3
                && found[0].problem.starts_with("gateway g1 has no capacity")
                && found[0].problem.ends_with(": full"),
            "{found:?}"
        );
        assert_eq!(
            omissions(&all(), &OperatorScope::of_test(Some("beta"))).len(),
            1
        );
    }

    #[test]
    fn the_provider_sees_scarce_limits() {
        let provider = OperatorScope::of_test(None);
        assert_eq!(
            rows(&provider),
            [("gateway g1".to_string(), "beta".to_string(), 100, 100)]
        );
        assert_eq!(omissions(&all(), &provider).len(), 4);
    }
}
