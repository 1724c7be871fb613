//! What `canal status` shows of limits that tenants share: at the controller, as its own limits say, and at data planes, as they reported.
//! Nothing is counted or decided here.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::share::ShareKind;
use canal_runtime::ShareHolder;
use canal_runtime::share::TenantLimitUsage;
use canal_wire::api;

use crate::admin::Operator;
use crate::fleet::ShareReport;

/// Of data planes the provider is shown the shares of which so many percent are used, and those by which something was refused: all rows
/// of all tenants at all gateways would be hundreds of thousands.
const TIGHT_PERCENT: u128 = 80;
/// The component that stands for all nodes of a tenant together.
const NODES: &str = "nodes";

/// The controller's own limits.
pub(crate) fn of_controller(limits: &[TenantLimitUsage], operator: &Operator) -> Vec<api::ShareUse> {
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

/// Numbers that are summed where a row stands for several data planes.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    used: u64,
    max: u64,
    refused: u64,
    revoked: u64,
}

impl Sum {
    fn is_tight(self) -> bool {
        self.refused > 0 || self.revoked > 0 || u128::from(self.used) * 100 >= u128::from(self.max) * TIGHT_PERCENT
    }
}

/// The limits of connected data planes: each by its name, a tenant's nodes together.
pub(crate) fn of_data_planes(reports: &[(Principal, Arc<ShareReport>)], operator: &Operator) -> Vec<api::ShareUse> {
    let mut rows: BTreeMap<(ShareKind, String, &TenantName), Sum> = BTreeMap::new();
    for (principal, report) in reports {
        let component = match principal {
            Principal::Node { .. } => NODES.to_string(),
            other => other.to_string(),
        };
        for share in report.shares.iter().filter(|share| operator.may_see(&share.tenant)) {
            let sum = rows.entry((share.kind, component.clone(), &share.tenant)).or_default();
            // A data plane says what it likes; its numbers must not stop the controller.
            sum.used = sum.used.saturating_add(share.used);
            sum.max = sum.max.saturating_add(share.max);
            sum.refused = sum.refused.saturating_add(share.refused);
            sum.revoked = sum.revoked.saturating_add(share.revoked);
        }
    }
    let is_shown = |sum: &Sum| !operator.is_provider() || sum.is_tight();
    let shown = rows.into_iter().filter(|(_, sum)| is_shown(sum));
    shown
        .map(|((kind, component, tenant), Sum { used, max, refused, revoked })| api::ShareUse {
            component,
            limit: kind.label().into(),
            tenant: tenant.to_string(),
            used,
            max,
            refused,
            revoked,
            unit: kind.unit().into(),
        })
        .collect()
}

/// What data planes have no room for, as findings.
pub(crate) fn omissions(reports: &[(Principal, Arc<ShareReport>)], operator: &Operator) -> Vec<api::Diagnostic> {
    let all = reports.iter().flat_map(|(principal, report)| report.omissions.iter().map(move |omission| (principal, omission)));
    let own = all.filter(|(_, omission)| operator.may_see(&omission.tenant));
    own.map(|(principal, omission)| api::Diagnostic {
        severity: api::Severity::Error.into(),
        object: omission.resource.clone(),
        problem: format!("{principal} has no room for it, so it is not in force there: {}", omission.why),
        mend: "delete what is not needed, or have the provider raise the share in spec.shares of the Tenant".into(),
        ..api::Diagnostic::default()
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{ReportedOmission, ReportedShare};

    fn report(tenants: &[(&str, u64)]) -> Arc<ShareReport> {
        let share = |(tenant, used): &(&str, u64)| ReportedShare {
            kind: ShareKind::GatewayConnections,
            tenant: tenant.parse().unwrap(),
            used: *used,
            max: 100,
            refused: u64::from(*used == 100),
            revoked: 0,
        };
        let omission =
            |(tenant, _): &(&str, u64)| ReportedOmission { tenant: tenant.parse().unwrap(), resource: "x".into(), why: "full".into() };
        Arc::new(ShareReport { shares: tenants.iter().map(share).collect(), omissions: tenants.iter().take(1).map(omission).collect() })
    }

    fn all() -> Vec<(Principal, Arc<ShareReport>)> {
        let node = |name: &str, tenant: &str| Principal::Node {
            name: name.parse().unwrap(),
            tenant: tenant.parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let gateway = Principal::Gateway { name: "g1".parse().unwrap(), az: "az1".parse().unwrap() };
        vec![
            (gateway, report(&[("alpha", 7), ("beta", 100)])),
            (node("n1", "alpha"), report(&[("alpha", 1)])),
            (node("n2", "alpha"), report(&[("alpha", 2)])),
            (node("m1", "beta"), report(&[("beta", 3)])),
        ]
    }

    fn rows(operator: &Operator) -> Vec<(String, String, u64, u64)> {
        of_data_planes(&all(), operator).into_iter().map(|s| (s.component, s.tenant, s.used, s.max)).collect()
    }

    #[test]
    fn a_tenant_sees_its_own_shares_and_its_nodes_together() {
        let alpha = Operator::of_test(Some("alpha"));
        let want = [("gateway g1", "alpha", 7, 100), ("nodes", "alpha", 3, 200)];
        assert_eq!(rows(&alpha), want.map(|(c, t, used, max)| (c.to_string(), t.to_string(), used, max)));
        let found = omissions(&all(), &alpha);
        assert!(
            found.len() == 3 && found[0].problem.starts_with("gateway g1 has no room") && found[0].problem.ends_with(": full"),
            "{found:?}"
        );
        assert_eq!(omissions(&all(), &Operator::of_test(Some("beta"))).len(), 1);
    }

    #[test]
    fn the_provider_sees_where_it_is_tight() {
        let provider = Operator::of_test(None);
        assert_eq!(rows(&provider), [("gateway g1".to_string(), "beta".to_string(), 100, 100)]);
        assert_eq!(omissions(&all(), &provider).len(), 4);
    }
}
