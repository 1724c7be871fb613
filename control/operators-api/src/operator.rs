//! The operator behind a request: which tenants it may see, and the count of its request by
//! outcome. It decides nothing about what a request does. Start at [`OperatorCall`].

use std::sync::Arc;

use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::ids::TenantName;
use tonic::{Code, Status};

/// An authenticated operator and the tenants that it may see.
pub(crate) struct OperatorScope {
    pub(crate) name: String,
    /// Tenant of the operator; `None` for the provider's operators, which may access every tenant.
    tenant: Option<TenantName>,
}

impl OperatorScope {
    pub(crate) fn new(name: String, tenant: Option<TenantName>) -> Self {
        Self { name, tenant }
    }

    #[cfg(test)]
    pub(crate) fn of_test(tenant: Option<&str>) -> Self {
        Self::new("test".into(), tenant.map(|tenant| tenant.parse().unwrap()))
    }

    pub(crate) fn is_provider(&self) -> bool {
        self.tenant.is_none()
    }

    pub(crate) fn may_see(&self, tenant: &TenantName) -> bool {
        self.tenant.as_ref().is_none_or(|own| own == tenant)
    }

    pub(crate) fn tenant(&self) -> Option<&TenantName> {
        self.tenant.as_ref()
    }

    /// Returns the tenant that a request is about. `named` is the tenant in the request; empty
    /// means the operator's own tenant.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` for another tenant, whether or not it exists, so that operators cannot
    /// probe for tenants. `INVALID_ARGUMENT` if the provider names no tenant or an invalid one.
    pub(crate) fn tenant_of(&self, named: &str) -> Result<TenantName, Status> {
        match (&self.tenant, named) {
            (Some(own), "") => Ok(own.clone()),
            (Some(own), named) if own.as_str() == named => Ok(own.clone()),
            (Some(own), _) => Err(Status::permission_denied(format!(
                "this token is for tenant {own} only; fix: name that tenant, or use another token"
            ))),
            (None, "") => Err(Status::invalid_argument(
                "the request names no tenant; fix: name one",
            )),
            (None, named) => {
                TenantName::new(named).map_err(|e| Status::invalid_argument(e.to_string()))
            }
        }
    }
}

/// One request of an operator. When it is dropped, it is counted once by its verb and outcome,
/// however the request ended.
pub(crate) struct OperatorCall {
    pub(crate) scope: OperatorScope,
    pub(crate) verb: &'static str,
    outcome: &'static str,
    metrics: Arc<ControllerMetrics>,
}

impl OperatorCall {
    /// Creates the request. Until an outcome is set it counts as `invalid`, because the checks of
    /// its fields come first.
    pub(crate) fn new(
        scope: OperatorScope,
        verb: &'static str,
        metrics: Arc<ControllerMetrics>,
    ) -> Self {
        Self {
            scope,
            verb,
            outcome: "invalid",
            metrics,
        }
    }

    /// Sets the outcome under which the request is counted.
    pub(crate) fn set_outcome(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }

    /// Returns the tenant that the request is about; see [`OperatorScope::tenant_of`].
    ///
    /// # Errors
    /// The same as of [`OperatorScope::tenant_of`]. A request about another tenant counts as
    /// `denied`.
    pub(crate) fn tenant_of(&mut self, named: &str) -> Result<TenantName, Status> {
        let tenant = self.scope.tenant_of(named);
        if tenant
            .as_ref()
            .is_err_and(|status| status.code() == Code::PermissionDenied)
        {
            self.outcome = "denied";
            self.metrics.refuse("foreign_tenant");
        }
        tenant
    }
}

impl Drop for OperatorCall {
    fn drop(&mut self) {
        self.metrics.count(
            metrics::API_REQUESTS,
            &[("verb", self.verb), ("outcome", self.outcome)],
        );
    }
}

#[cfg(test)]
mod tests {
    use canal_controller_metrics::GaugeValues;

    use super::*;

    #[test]
    fn a_request_is_counted_once_however_it_ends() {
        let metrics = Arc::new(ControllerMetrics::default());
        let call =
            |tenant| OperatorCall::new(OperatorScope::of_test(tenant), "get", metrics.clone());
        drop(call(None));
        let mut foreign = call(Some("alpha"));
        assert_eq!(
            foreign.tenant_of("beta").unwrap_err().code(),
            Code::PermissionDenied
        );
        drop(foreign);
        let mut own = call(Some("alpha"));
        own.tenant_of("").unwrap();
        own.set_outcome("accepted");
        drop(own);
        let mut unnamed = call(None);
        assert_eq!(
            unnamed.tenant_of("").unwrap_err().code(),
            Code::InvalidArgument
        );
        drop(unnamed);
        let text = metrics.render(&GaugeValues::default());
        for (outcome, count) in [("invalid", 2), ("denied", 1), ("accepted", 1)] {
            let line = format!(
                "canal_controller_api_requests_total{{verb=\"get\",outcome=\"{outcome}\"}} {count}\n"
            );
            assert!(text.contains(&line), "{line} in\n{text}");
        }
        assert!(text.contains("canal_controller_refused_total{reason=\"foreign_tenant\"} 1\n"));
    }
}
