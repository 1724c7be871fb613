//! Reports the tenants' use of this data plane's limits, and the resources that do not fit, to the
//! controller. `canal status` shows them. The controller makes no decision with the reports. The
//! next report makes up for a lost one.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use canal_model::share::ShareKind;
use canal_runtime::ShareHolder;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry};
use canal_runtime::share::TenantLimitUsage;
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{OmittedResource, ShareRow, ShareState};
use canal_wire::{OMITTED_MAX, OMITTED_PER_TENANT_MAX, SHARE_ROWS_MAX};
use tonic::Code;

use super::{ApplyFn, OMITTED, RefusedResource};
use crate::controller_client::ControllerConnection;

/// Interval at which shares are checked, and reported if they changed. An operator's view is as old
/// at most. Nobody measured the value.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout of a share report. Half of the interval, so that no report waits for the one before.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a reason in bytes. The reasons of data planes are shorter.
const WHY_BYTES_MAX: usize = 256;

/// Source of the reports. Clones share the same data.
#[derive(Clone)]
pub(super) struct ShareReporter {
    registry: Registry,
    omitted: Arc<Mutex<Vec<RefusedResource>>>,
    reports: CounterFamily,
}

impl ShareReporter {
    pub(super) fn new(registry: Registry) -> Self {
        let family = MetricFamily::new(
            "canal_southbound_share_reports_total",
            "Reports of how much of shared limits tenants use.",
            &["result"],
        );
        let reports = registry.counters(family);
        Self {
            registry,
            omitted: Arc::default(),
            reports,
        }
    }

    /// Wraps `apply` so that the resources that do not fit are stored for the next report and
    /// removed from its result.
    pub(super) fn collect_omissions(&self, mut apply: ApplyFn) -> ApplyFn {
        let latest = self.omitted.clone();
        Box::new(move |update, state| {
            let (omitted, refused) = apply(update, state)?
                .into_iter()
                .partition(|r: &RefusedResource| r.label == OMITTED);
            *latest.lock().unwrap_or_else(PoisonError::into_inner) = omitted;
            Ok(refused)
        })
    }

    fn state(&self) -> ShareState {
        let omitted = self.omitted.lock().unwrap_or_else(PoisonError::into_inner);
        ShareState {
            rows: select_rows(&self.registry.share_usage()),
            omitted: select_omitted(&omitted),
        }
    }

    /// Reports over one connection for as long as it is polled.
    pub(super) async fn run(
        &self,
        connection: &ControllerConnection,
        interval: Duration,
    ) -> Infallible {
        let mut client = FleetClient::new(connection.channel.clone());
        let mut reported = ShareState::default();
        loop {
            tokio::time::sleep(interval).await;
            let state = self.state();
            if state == reported {
                continue;
            }
            match tokio::time::timeout(
                REPORT_TIMEOUT,
                client.share_report(connection.request(state.clone())),
            )
            .await
            {
                Ok(Ok(_)) => {
                    self.reports.shared(&["ok"]).inc();
                    reported = state;
                }
                // A controller of an earlier build does not implement the report; the next
                // connection may reach a newer one.
                Ok(Err(status)) if status.code() == Code::Unimplemented => {
                    std::future::pending().await
                }
                Ok(Err(_)) => self.reports.shared(&["refused"]).inc(),
                Err(_) => self.reports.shared(&["timeout"]).inc(),
            }
        }
    }
}

/// Returns one row per kind of limit and tenant. If there are too many, those with the most
/// refusals and then the fullest are selected.
fn select_rows(limits: &[TenantLimitUsage]) -> Vec<ShareRow> {
    let mut rows: BTreeMap<(ShareKind, &str), ShareRow> = BTreeMap::new();
    for limit in limits {
        for usage in &limit.holders {
            let ShareHolder::Tenant(tenant) = &usage.holder else {
                continue;
            };
            if usage.used == 0 && usage.refused == 0 && usage.revoked == 0 {
                continue;
            }
            let row = rows.entry((limit.kind, tenant.as_str())).or_default();
            // Of several limits of a kind, the one nearest to its share counts, as in the metrics.
            let (used, max) = (u128::from(usage.used), u128::from(usage.max));
            if row.max == 0 || used * u128::from(row.max) > u128::from(row.used) * max {
                (row.used, row.max) = (usage.used, usage.max);
            }
            row.refused += usage.refused;
            row.revoked += usage.revoked;
        }
    }
    let named = rows.into_iter().map(|((kind, tenant), row)| ShareRow {
        limit: kind.label().into(),
        tenant: tenant.into(),
        ..row
    });
    let mut rows: Vec<ShareRow> = named.collect();
    if rows.len() > SHARE_ROWS_MAX {
        let fill = |row: &ShareRow| u128::from(row.used) * 1_000_000 / u128::from(row.max.max(1));
        rows.sort_by_cached_key(|row| std::cmp::Reverse((row.refused + row.revoked, fill(row))));
        rows.truncate(SHARE_ROWS_MAX);
        rows.sort_by(|a, b| (&a.limit, &a.tenant).cmp(&(&b.limit, &b.tenant)));
    }
    rows
}

/// Selects omitted resources, a limited number per tenant.
fn select_omitted(omitted: &[RefusedResource]) -> Vec<OmittedResource> {
    let mut named: BTreeMap<String, Vec<OmittedResource>> = BTreeMap::new();
    for r in omitted {
        let Some(tenant) = r.kind.owner_of(&r.name).map(|tenant| tenant.to_string()) else {
            continue;
        };
        let of_tenant = named.entry(tenant.clone()).or_default();
        if of_tenant.len() < OMITTED_PER_TENANT_MAX {
            let why = r.why[..r.why.floor_char_boundary(WHY_BYTES_MAX)].to_string();
            of_tenant.push(OmittedResource {
                tenant,
                kind: r.kind.label().into(),
                name: r.name.clone(),
                why,
            });
        }
    }
    named.into_values().flatten().take(OMITTED_MAX).collect()
}

#[cfg(test)]
mod tests {
    use canal_model::program::ResourceKind;
    use canal_runtime::{RevocationOrder, TenantLimit, TenantLimitConfig};

    use super::*;

    fn limit(kind: ShareKind, holders: Vec<(String, u64, u64)>) -> TenantLimitUsage {
        // Any capacity will do.
        const CAPACITY: u64 = 1_000_000;
        let limit = TenantLimit::new(TenantLimitConfig {
            kind,
            capacity: CAPACITY,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        });
        let mut held = Vec::new();
        for (name, used, refused) in holders {
            let holder = ShareHolder::Tenant(name.parse().unwrap());
            held.push(limit.take(&holder, used).unwrap());
            (0..refused).for_each(|_| assert!(limit.take(&holder, CAPACITY + 1).is_err()));
        }
        limit.usage()
    }

    #[test]
    fn rows_are_merged_by_kind_and_refusals_survive_the_limit() {
        let two = |used| limit(ShareKind::MetricSeries, vec![("alpha".into(), used, 2)]);
        let rows = select_rows(&[
            two(5),
            two(7),
            limit(ShareKind::GatewayConnections, vec![("idle".into(), 0, 0)]),
        ]);
        assert_eq!(
            rows.iter()
                .map(|r| (r.tenant.as_str(), r.used, r.refused))
                .collect::<Vec<_>>(),
            [("alpha", 7, 4)]
        );
        let many = (0..2 * SHARE_ROWS_MAX as u64)
            .map(|n| (format!("t{n}"), 1, u64::from(n == 0)))
            .collect();
        let rows = select_rows(&[limit(ShareKind::GatewayConnections, many)]);
        assert!(rows.len() == SHARE_ROWS_MAX && rows.iter().any(|r| r.tenant == "t0"));
    }

    #[test]
    fn omitted_resources_are_some_of_each_tenant() {
        let one = |tenant: &str, n: usize| {
            RefusedResource::for_want_of_room(
                ResourceKind::Table,
                format!("{tenant}/shop/s{n}@az1"),
                &"x".repeat(999),
            )
        };
        let all: Vec<_> = (0..100)
            .map(|n| one("alpha", n))
            .chain([one("beta", 0)])
            .collect();
        let reported = select_omitted(&all);
        assert_eq!(
            reported.iter().filter(|o| o.tenant == "alpha").count(),
            OMITTED_PER_TENANT_MAX
        );
        assert!(reported.iter().any(|o| o.tenant == "beta"
            && o.kind == "BucketTable"
            && o.why.len() == WHY_BYTES_MAX));
    }
}
