//! Exports the use of limits that tenants share. It reads the limits at each scrape, stores
//! nothing, and lists a bounded number of holders.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::share::{ShareUsage, TenantLimitUsage};
use canal_model::share::ShareKind;

use super::series::OVERFLOW_LABEL;
use super::text;

/// Holders of one limit that are listed by name: half of them by use, half by refusals. The others
/// are summed.
/// Each limit has some series for each holder, so that thousands of tenants would fill a scrape.
/// Nobody measured this value.
pub const SHARE_HOLDERS_MAX: usize = 64;

const LABELS: &[&str] = &["limit", "tenant"];

/// Exported values of one holder of a kind of limit.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct ShareLine {
    used: u64,
    /// `None` in the sum of the unlisted holders.
    max: Option<u64>,
    refused: u64,
    revoked: u64,
}

impl ShareLine {
    /// Adds the same holder's use of another limit of the kind.
    fn merge(&mut self, usage: &ShareUsage) {
        // Cross multiplication compares the two quotients of use and maximum without division.
        let is_nearer = |used: u64, max: u64| {
            u128::from(used) * u128::from(self.max.unwrap_or(1))
                > u128::from(self.used) * u128::from(max)
        };
        if self.max.is_none() || is_nearer(usage.used, usage.max) {
            self.used = usage.used;
            self.max = Some(usage.max);
        }
        self.refused += usage.refused;
        self.revoked += usage.revoked;
    }

    fn add(&mut self, other: Self) {
        self.used += other.used;
        self.refused += other.refused;
        self.revoked += other.revoked;
    }
}

/// Exported values of one kind of limit.
#[derive(Debug, Default)]
struct Table {
    capacity: u64,
    rows: Vec<(String, ShareLine)>,
}

/// Selects the holders to list by name: the largest by use, then the largest by refusals. The
/// others are summed, together with `before`.
fn select_rows(all: BTreeMap<String, ShareLine>, before: ShareLine) -> Vec<(String, ShareLine)> {
    let mut rest: Vec<_> = all.into_iter().collect();
    let mut listed = Vec::new();
    // A holder with this name would create a second series with the same labels, so it is part of
    // the sum.
    let mut other = before;
    rest.retain(|(name, row)| {
        let is_other = name == OVERFLOW_LABEL;
        if is_other {
            other.add(*row);
        }
        !is_other
    });
    for key in [|row: &ShareLine| row.used, |row: &ShareLine| row.refused] {
        rest.sort_by_key(|(_, row)| std::cmp::Reverse(key(row)));
        listed.extend(rest.drain(..rest.len().min(SHARE_HOLDERS_MAX / 2)));
    }
    rest.iter().for_each(|(_, row)| other.add(*row));
    listed.sort_by(|a, b| a.0.cmp(&b.0));
    if other != ShareLine::default() {
        listed.push((OVERFLOW_LABEL.to_string(), other));
    }
    listed
}

fn tables(limits: &[TenantLimitUsage]) -> BTreeMap<ShareKind, Table> {
    let mut kinds: BTreeMap<ShareKind, (u64, ShareLine, BTreeMap<String, ShareLine>)> =
        BTreeMap::new();
    for usage in limits {
        let (capacity, before, rows) = kinds.entry(usage.kind).or_default();
        *capacity = (*capacity).max(usage.capacity);
        before.refused += usage.refused_before;
        before.revoked += usage.revoked_before;
        for holder in &usage.holders {
            rows.entry(holder.holder.to_string())
                .or_default()
                .merge(holder);
        }
    }
    kinds
        .into_iter()
        .map(|(kind, (capacity, before, rows))| {
            (
                kind,
                Table {
                    capacity,
                    rows: select_rows(rows, before),
                },
            )
        })
        .collect()
}

/// Writes the families of all limits.
pub(super) fn write(out: &mut String, limits: &[TenantLimitUsage]) {
    if limits.is_empty() {
        return;
    }
    let tables = tables(limits);
    let name = "canal_share_capacity";
    text::head(out, name, "Maximum of a limit that tenants share.", "gauge");
    for (kind, table) in &tables {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{name}{{limit=\"{}\"}} {}",
            kind.label(),
            table.capacity
        );
    }
    let mut family = |name: &str, help: &str, kind: &str, value: fn(&ShareLine) -> Option<u64>| {
        text::head(out, name, help, kind);
        for (kind, table) in &tables {
            for (holder, row) in &table.rows {
                // The sum of the unlisted holders has no maximum.
                let Some(value) = value(row) else { continue };
                out.push_str(name);
                text::labels(out, LABELS, &[kind.label(), holder], None);
                let _ = writeln!(out, " {value}");
            }
        }
    };
    family(
        "canal_share_used",
        "Amount of a shared limit that a tenant uses.",
        "gauge",
        |row| Some(row.used),
    );
    family(
        "canal_share_max",
        "A tenant's share of a shared limit.",
        "gauge",
        |row| row.max,
    );
    family(
        "canal_share_refused_total",
        "Refusals of a tenant by a shared limit.",
        "counter",
        |row| Some(row.refused),
    );
    family(
        "canal_share_revoked_total",
        "Permits of a tenant that were revoked because a shared limit was full.",
        "counter",
        |row| Some(row.revoked),
    );
}

#[cfg(test)]
mod tests {
    use crate::{RevocationOrder, ShareHolder, TenantLimit, TenantLimitConfig};
    use canal_model::share::ShareKind;

    use super::SHARE_HOLDERS_MAX;
    use crate::limits::show_shares;
    use crate::metrics::Registry;

    fn limit(kind: ShareKind, capacity: u64) -> TenantLimit {
        TenantLimit::new(TenantLimitConfig {
            kind,
            capacity,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        })
    }

    fn tenant(name: &str) -> ShareHolder {
        ShareHolder::Tenant(name.parse().unwrap())
    }

    #[test]
    fn a_scrape_shows_use_share_and_refusals_per_tenant() {
        let r = Registry::new();
        let connections = limit(ShareKind::GatewayConnections, 100);
        show_shares(&r, &connections);
        let _alpha = connections.take(&tenant("alpha"), 50).unwrap();
        let _beta = connections.take(&tenant("beta"), 7).unwrap();
        assert!(connections.take(&tenant("alpha"), 1).is_err());
        let text = r.render();
        for line in [
            "canal_share_capacity{limit=\"gateway_connections\"} 100",
            "canal_share_used{limit=\"gateway_connections\",tenant=\"alpha\"} 50",
            "canal_share_max{limit=\"gateway_connections\",tenant=\"alpha\"} 50",
            "canal_share_refused_total{limit=\"gateway_connections\",tenant=\"alpha\"} 1",
            "canal_share_revoked_total{limit=\"gateway_connections\",tenant=\"beta\"} 0",
            "canal_share_used{limit=\"gateway_connections\",tenant=\"beta\"} 7",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn limits_of_one_kind_are_one_family_and_the_fullest_counts() {
        let r = Registry::new();
        let (one, two) = (
            limit(ShareKind::EdgeMapEntries, 1000),
            limit(ShareKind::EdgeMapEntries, 100),
        );
        show_shares(&r, &one);
        show_shares(&r, &two);
        let (_a, _b) = (
            one.take(&tenant("alpha"), 30).unwrap(),
            two.take(&tenant("alpha"), 20).unwrap(),
        );
        let text = r.render();
        assert_eq!(text.matches("canal_share_used{").count(), 1, "{text}");
        assert!(
            text.contains("canal_share_used{limit=\"edge_map_entries\",tenant=\"alpha\"} 20\n"),
            "{text}"
        );
        assert!(
            text.contains("canal_share_max{limit=\"edge_map_entries\",tenant=\"alpha\"} 25\n"),
            "{text}"
        );
    }

    #[test]
    fn revocations_of_forgotten_holders_stay_in_the_sum() {
        let r = Registry::new();
        let places = limit(ShareKind::KeyServerUnauthenticated, 1);
        places.set_default_share("100%".parse().unwrap());
        show_shares(&r, &places);
        for n in 0..5000u32 {
            let network =
                ShareHolder::Network(format!("10.{}.{}.0/24", n / 256, n % 256).parse().unwrap());
            let _first = places.take_replacing(&network, 1).unwrap();
            let _second = places.take_replacing(&network, 1).unwrap();
        }
        let text = r.render();
        let revoked = text
            .lines()
            .filter(|l| l.starts_with("canal_share_revoked_total{"));
        assert_eq!(
            revoked
                .map(|l| l.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
                .sum::<u64>(),
            5000,
            "{text}"
        );
    }

    #[test]
    fn many_holders_are_listed_by_size_and_the_rest_is_summed() {
        let r = Registry::new();
        let connections = limit(ShareKind::GatewayConnections, 1_000_000);
        show_shares(&r, &connections);
        let mut permits: Vec<_> = (1..=500)
            .map(|n| connections.take(&tenant(&format!("t{n}")), n).unwrap())
            .collect();
        // This tenant is small, but it is refused, so it must be listed.
        assert!(connections.take(&tenant("t1"), 1_000_000).is_err());
        permits.push(connections.take(&tenant("other"), 3).unwrap());
        let text = r.render();
        let used: Vec<_> = text
            .lines()
            .filter(|l| l.starts_with("canal_share_used{"))
            .collect();
        assert_eq!(used.len(), SHARE_HOLDERS_MAX + 1);
        assert!(
            used.iter().any(|l| l.contains("\"t500\""))
                && used.iter().any(|l| l.contains("\"t1\"")),
            "{used:?}"
        );
        let sum: u64 = used
            .iter()
            .map(|l| l.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum();
        assert_eq!(sum, 500 * 501 / 2 + 3);
        assert_eq!(used.iter().filter(|l| l.contains("\"other\"")).count(), 1);
    }
}
