//! A data plane's report on its limits: how much tenants have taken of each, and which of their
//! resources it omits for lack of capacity. The controller checks it once and shows it in `canal
//! status`. It decides nothing by it.

use canal_catalog::Catalog;
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::share::ShareKind;
use canal_wire::fleet::ShareState;
use canal_wire::{OMITTED_MAX, SHARE_REPORT_BYTES_MAX, SHARE_ROWS_MAX};
use prost::Message;

/// One tenant's use of one limit of a data plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedShare {
    pub kind: ShareKind,
    pub tenant: TenantName,
    pub used: u64,
    pub max: u64,
    pub refused: u64,
    pub revoked: u64,
}

/// A tenant's resource that a data plane omits for lack of capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedOmission {
    pub tenant: TenantName,
    /// Kind and name of the resource.
    pub resource: String,
    pub why: String,
}

/// Reason why a report is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareReportError {
    #[error("{0} is not a data plane; fix: report with a data plane's token")]
    NotADataPlane(String),
    #[error(
        "the report has {bytes} bytes; at most {limit} are accepted; fix: run a data plane of the controller's version"
    )]
    Bytes { bytes: usize, limit: usize },
    #[error(
        "{count} entries in one report; at most {limit} are accepted; fix: run a data plane of the controller's version"
    )]
    Entries { count: usize, limit: usize },
}

impl ShareReportError {
    /// Returns the name of the refusal for a counter.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotADataPlane(_) => "not_a_data_plane",
            Self::Bytes { .. } => "bytes",
            Self::Entries { .. } => "entries",
        }
    }
}

/// One data plane's report, on tenants that it may report on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShareReport {
    pub shares: Vec<ReportedShare>,
    pub omissions: Vec<ReportedOmission>,
}

impl ShareReport {
    /// Checks and converts a report of `principal`. Rows on tenants that are not its own, or do not
    /// exist, are left out.
    ///
    /// # Errors
    /// `principal` is an operator, or the report exceeds a limit.
    pub fn read(
        state: ShareState,
        principal: &Principal,
        catalog: &Catalog,
    ) -> Result<Self, ShareReportError> {
        let own = match principal {
            Principal::Node { tenant, .. } => Some(tenant),
            // A key server without a tenant is the provider's, and serves all tenants.
            Principal::KeyServer { tenant, .. } => tenant.as_ref(),
            Principal::Gateway { .. } | Principal::Edge { .. } => None,
            Principal::Operator { .. } => {
                return Err(ShareReportError::NotADataPlane(principal.to_string()));
            }
        };
        let bytes = state.encoded_len();
        // A report stays in memory until the next one, so that its size is checked before its rows.
        if bytes > SHARE_REPORT_BYTES_MAX {
            return Err(ShareReportError::Bytes {
                bytes,
                limit: SHARE_REPORT_BYTES_MAX,
            });
        }
        for (given, limit) in [
            (state.rows.len(), SHARE_ROWS_MAX),
            (state.omitted.len(), OMITTED_MAX),
        ] {
            if given > limit {
                return Err(ShareReportError::Entries {
                    count: given,
                    limit,
                });
            }
        }
        let tenant_of = |name: &str| {
            let (name, _) = catalog
                .tenants
                .get_key_value(&TenantName::new(name).ok()?)?;
            own.is_none_or(|own| own == name).then(|| name.clone())
        };
        let mut report = Self::default();
        for row in state.rows {
            let kind = ShareKind::ALL
                .iter()
                .copied()
                .find(|kind| kind.label() == row.limit);
            // A newer build may have limits that this one does not have.
            let (Some(kind), Some(tenant)) = (kind, tenant_of(&row.tenant)) else {
                continue;
            };
            let (used, max, refused, revoked) = (row.used, row.max, row.refused, row.revoked);
            report.shares.push(ReportedShare {
                kind,
                tenant,
                used,
                max,
                refused,
                revoked,
            });
        }
        for omitted in state.omitted {
            // The tenant may have been removed since the data plane made the report.
            let Some(tenant) = tenant_of(&omitted.tenant) else {
                continue;
            };
            report.omissions.push(ReportedOmission {
                tenant,
                resource: format!("{} {}", omitted.kind, omitted.name),
                why: omitted.why,
            });
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use canal_wire::fleet::{OmittedResource, ShareRow};

    use super::*;

    fn row(limit: &str, tenant: &str) -> ShareRow {
        ShareRow {
            limit: limit.into(),
            tenant: tenant.into(),
            used: 3,
            max: 4,
            refused: 5,
            revoked: 6,
        }
    }

    fn catalog() -> Catalog {
        let mut catalog = Catalog::default();
        for name in ["alpha", "beta"] {
            let nothing = canal_catalog::CompiledTenant::of_provider(Vec::new());
            let view =
                canal_catalog::TenantCatalog::next(None, nothing, canal_model::ids::Generation(1));
            catalog
                .tenants
                .insert(name.parse().unwrap(), std::sync::Arc::new(view));
        }
        catalog
    }

    #[test]
    fn a_data_plane_reports_only_its_own_tenants() {
        let node = Principal::Node {
            name: "n1".parse().unwrap(),
            tenant: "alpha".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let gateway = Principal::Gateway {
            name: "g1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let operator = Principal::Operator {
            name: "ann".parse().unwrap(),
            tenant: None,
        };
        let limit = ShareKind::GatewayConnections.label();
        let omitted = |tenant: &str| OmittedResource {
            tenant: tenant.into(),
            kind: "BucketTable".into(),
            name: "t".into(),
            why: "w".into(),
        };
        let state = ShareState {
            rows: vec![
                row(limit, "alpha"),
                row(limit, "beta"),
                row(limit, "gamma"), // The catalog has only alpha and beta.
                // A newer data plane may report limits that this controller does not know.
                row("of_the_future", "alpha"),
                // No tenant can have this name, since names are lower case.
                row(limit, "UPPER"),
            ],
            omitted: vec![omitted("alpha"), omitted("beta"), omitted("gamma")],
        };
        let seen = |principal: &Principal| {
            let report = ShareReport::read(state.clone(), principal, &catalog()).unwrap();
            let of = |t: &TenantName| t.to_string();
            (
                report
                    .shares
                    .iter()
                    .map(|s| of(&s.tenant))
                    .collect::<Vec<_>>(),
                report
                    .omissions
                    .iter()
                    .map(|o| of(&o.tenant))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(
            seen(&node),
            (vec!["alpha".to_string()], vec!["alpha".to_string()])
        );
        assert_eq!(
            seen(&gateway),
            (
                vec!["alpha".to_string(), "beta".into()],
                vec!["alpha".to_string(), "beta".into()]
            )
        );
        assert_eq!(
            ShareReport::read(state, &operator, &catalog())
                .unwrap_err()
                .name(),
            "not_a_data_plane"
        );
    }

    #[test]
    fn a_report_is_bounded_in_rows_and_bytes() {
        let gateway = Principal::Gateway {
            name: "g1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let refused = |state| {
            ShareReport::read(state, &gateway, &catalog())
                .unwrap_err()
                .name()
        };
        let rows = vec![row("x", "alpha"); SHARE_ROWS_MAX + 1];
        assert_eq!(
            refused(ShareState {
                rows,
                omitted: vec![]
            }),
            "entries"
        );
        let rows = vec![row(&"x".repeat(SHARE_REPORT_BYTES_MAX), "alpha")];
        assert_eq!(
            refused(ShareState {
                rows,
                omitted: vec![]
            }),
            "bytes"
        );
    }
}
