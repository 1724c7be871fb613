//! The controller's metrics as Prometheus text. They are few and change slowly, so one lock is
//! enough. Data planes have their own, faster kind. The table below names every metric of the
//! controller once.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

/// Name, type and help text of a metric. Each name occurs once in [`ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricDef {
    pub name: &'static str,
    kind: &'static str,
    help: &'static str,
}

macro_rules! metrics {
    ($($id:ident, $name:literal, $kind:literal, $help:literal;)*) => {
        $(pub const $id: MetricDef = MetricDef { name: $name, kind: $kind, help: $help };)*
        /// All metrics of the controller.
        const ALL: &[MetricDef] = &[$($id),*];
    };
}

metrics! {
    GENERATION, "canal_controller_generation", "gauge", "Newest generation that was assigned.";
    SUBSCRIBERS, "canal_controller_subscribers", "gauge", "Connected data planes by kind.";
    CONVERGED, "canal_controller_subscribers_converged", "gauge", "Connected data planes that acknowledged everything in their scope.";
    UNACKED_SECONDS, "canal_controller_unacked_seconds_max", "gauge", "Longest time that a data plane has left a response unanswered, in seconds.";
    STALE_SECONDS, "canal_controller_source_stale_seconds", "gauge", "Seconds since a tenant's files could last be read; 0 while they can.";
    RESOURCES, "canal_controller_resources", "gauge", "Resources by tenant and kind.";
    FINDINGS, "canal_controller_findings", "gauge", "Diagnostics by tenant and severity.";
    CONNECTIONS, "canal_controller_connections", "gauge", "Open TLS connections.";
    RESPONSES, "canal_controller_responses_total", "counter", "Responses sent to data planes by type.";
    BYTES, "canal_controller_response_bytes_total", "counter", "Bytes of responses sent to data planes by type.";
    ACKS, "canal_controller_acks_total", "counter", "Responses accepted by data planes.";
    NACKS, "canal_controller_nacks_total", "counter", "Responses refused by data planes.";
    SUBSCRIBERS_REFUSING, "canal_controller_subscribers_refusing", "gauge", "Data planes that have refused a resource for more than a minute.";
    ANSWERS_STALE, "canal_controller_stale_responses_total", "counter", "ACKs and NACKs for responses that were not outstanding.";
    BEHIND_LOG, "canal_controller_behind_log_total", "counter", "Comparisons of a data plane with a complete tenant because the tenant's change log begins too late.";
    COMPILES, "canal_controller_compile_seconds_count", "counter", "Compilations of one tenant.";
    COMPILE_SECONDS, "canal_controller_compile_seconds_sum", "counter", "Seconds spent compiling.";
    CHANGES, "canal_controller_changes_total", "counter", "Changes applied, by origin (files, api).";
    CERTIFICATES_ISSUED, "canal_controller_certificates_issued_total", "counter", "Certificates issued by the requester's kind.";
    CERTIFICATES_REFUSED, "canal_controller_certificates_refused_total", "counter", "Certificate requests refused by reason.";
    API_REQUESTS, "canal_controller_api_requests_total", "counter", "Requests of operators by verb and outcome.";
    STORE_ERRORS, "canal_controller_store_errors_total", "counter", "Writes that the store refused, by reason.";
    REFUSED, "canal_controller_refused_total", "counter", "Requests, streams and connections refused by reason.";
    FLEET_REPORTS, "canal_controller_fleet_reports_total", "counter", "Reports received, by their sender (replica, edge).";
    FLEET_REFUSALS, "canal_controller_fleet_reports_refused_total", "counter", "Reports refused by reason.";
    FLEET_REGISTRATIONS, "canal_controller_fleet_registrations_total", "counter", "Replicas registered.";
    FLEET_FORGOTTEN, "canal_controller_fleet_forgotten_total", "counter", "Replicas removed from the fleet; their numbers can be assigned again.";
    FLEET_PLANS, "canal_controller_fleet_plan_seconds_count", "counter", "Computations of a plan.";
    FLEET_PLAN_SECONDS, "canal_controller_fleet_plan_seconds_sum", "counter", "Seconds spent computing plans.";
    FLEET_PLANS_REFUSED, "canal_controller_fleet_plans_refused_total", "counter", "Plans that were not applied, or only in part, by reason.";
    FLEET_PUBLICATIONS, "canal_controller_fleet_publications_total", "counter", "Generations of the tier that were published to data planes.";
    FLEET_BUCKETS_MOVED, "canal_controller_fleet_buckets_moved_total", "counter", "Buckets whose head changed.";
    FLEET_BUCKETS_HELD, "canal_controller_fleet_bucket_moves_blocked_total", "counter", "Buckets that retained their head because their chain was full of owners.";
    FLEET_OWNERS_KEPT, "canal_controller_fleet_owners_retained_total", "counter", "Former heads that stayed in a chain for their sessions.";
    FLEET_AZS_CLOSED, "canal_controller_fleet_azs_closed_total", "counter", "AZs closed because their edges stopped reporting.";
    FLEET_PLAN, "canal_controller_fleet_plan", "gauge", "Number of the plan in force.";
    FLEET_REPLICAS, "canal_controller_fleet_replicas", "gauge", "Registered replicas by state.";
    FLEET_DOWN, "canal_controller_fleet_replicas_down", "gauge", "Registered replicas that are down.";
    FLEET_EDGES, "canal_controller_fleet_edges", "gauge", "Edges that report.";
    FLEET_CLOSED, "canal_controller_fleet_addresses_closed", "gauge", "Gateway addresses that accept no new sessions.";
    FLEET_WAITING, "canal_controller_fleet_tables_waiting", "gauge", "Bucket tables that wait until their new replicas have received the tenant.";
    FLEET_UNMET_CONSTRAINTS, "canal_controller_fleet_unmet_constraints", "gauge", "Constraints that the plan could not satisfy.";
    JWKS_FETCHES, "canal_controller_jwks_fetches_total", "counter", "Fetches of key sets by tenant and outcome.";
    EXTERNAL_CA, "canal_controller_external_ca_requests_total", "counter", "Certificates requested from external CAs, by outcome.";
    CA_FILES_REFUSED, "canal_controller_ca_files_refused_total", "counter", "CA files of a trust domain that were rejected, by reason.";
    CRL_FAILURES, "canal_controller_crl_failures_total", "counter", "Revocation lists that could not be renewed, by reason.";
    CA_NOT_AFTER, "canal_controller_ca_not_after_seconds", "gauge", "Earliest expiry of a certificate in a CA's chain, in seconds since 1970.";
    CA_FAULT, "canal_controller_ca_fault", "gauge", "1 while a trust domain's current CA files are not usable.";
    CA_REVOKED, "canal_controller_ca_revoked", "gauge", "Revoked certificates on a trust domain's list that have not expired.";
    CA_BLOCKED, "canal_controller_ca_blocked", "gauge", "Blocked identities, which get no certificates.";
    CA_ISSUED, "canal_controller_ca_issued", "gauge", "Certificates on record that have not expired.";
    CA_WAITING, "canal_controller_ca_rotation_waiting", "gauge", "Subscribers for which a root rotation waits.";
    SHARE_USED, "canal_share_used", "gauge", "Amount of a shared limit that each tenant uses; an empty name is the provider.";
    SHARE_MAX, "canal_share_max", "gauge", "Maximum of a limit for each tenant.";
    SHARE_REFUSED, "canal_share_refused_total", "counter", "Refusals because a share or the whole limit was full, by tenant.";
    SHARE_REVOKED, "canal_share_revoked_total", "counter", "Permits revoked from the largest holder because a limit was full, by tenant.";
    OBSERVATIONS, "canal_controller_observations", "gauge", "Open observations (taps, logs, dumps, metrics) of operators, by subject.";
    OBSERVED_BYTES, "canal_controller_observed_bytes_total", "counter", "Bytes of data planes' answers that were sent to operators, by subject.";
    OBSERVED_DROPPED, "canal_controller_observed_lines_dropped_total", "counter", "Lines left out of observations, by subject.";
    WITHHELD, "canal_controller_changes_withheld_total", "counter", "Changes to files that were not applied, by reason.";
}

/// All counters of the controller by metric and labels.
#[derive(Debug, Default)]
pub struct ControllerMetrics {
    values: Mutex<BTreeMap<(&'static str, String), f64>>,
}

impl ControllerMetrics {
    /// Adds `by` to a counter.
    pub fn add(&self, metric: MetricDef, labels: &[(&str, &str)], by: f64) {
        let key = (metric.name, label_text(labels));
        *self
            .values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(key)
            .or_insert(0.0) += by;
    }

    /// Adds one to a counter.
    pub fn count(&self, metric: MetricDef, labels: &[(&str, &str)]) {
        self.add(metric, labels, 1.0);
    }

    /// Counts a request, stream or connection that was refused, under the label value `reason`.
    pub fn refuse(&self, reason: &str) {
        self.count(REFUSED, &[("reason", reason)]);
    }

    /// Renders all metrics as Prometheus text (exposition format 0.0.4). `gauges` are the values at
    /// this moment.
    pub fn render(&self, gauges: &GaugeValues) -> String {
        let mut all = self
            .values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        all.extend(gauges.0.iter().map(|(k, v)| (k.clone(), *v)));
        let mut out = String::new();
        for m in ALL {
            // Writing to a String cannot fail.
            let _ = writeln!(
                out,
                "# HELP {} {}\n# TYPE {} {}",
                m.name, m.help, m.name, m.kind
            );
            let from = (m.name, String::new());
            for ((_, labels), value) in all
                .range(from..)
                .take_while(|((name, _), _)| *name == m.name)
            {
                let _ = writeln!(out, "{}{labels} {value}", m.name);
            }
        }
        out
    }
}

/// Gauge values that are read when the metrics are scraped.
#[derive(Debug, Default)]
pub struct GaugeValues(BTreeMap<(&'static str, String), f64>);

impl GaugeValues {
    /// Sets the value of a gauge.
    pub fn set(&mut self, metric: MetricDef, labels: &[(&str, &str)], value: f64) {
        self.0.insert((metric.name, label_text(labels)), value);
    }
}

/// Formats labels; backslashes, quotes and newlines in values are escaped.
fn label_text(labels: &[(&str, &str)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let parts: Vec<String> = labels
        .iter()
        .map(|(k, v)| {
            format!(
                "{k}=\"{}\"",
                v.replace('\\', "\\\\")
                    .replace('"', "\\\"")
                    .replace('\n', "\\n")
            )
        })
        .collect();
    format!("{{{}}}", parts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_render_once_each_with_their_labels() {
        let m = ControllerMetrics::default();
        m.count(NACKS, &[("type", "Service")]);
        m.add(NACKS, &[("type", "Service")], 2.0);
        m.count(REFUSED, &[("reason", "a\"b\\c\nd")]);
        let mut g = GaugeValues::default();
        g.set(GENERATION, &[], 7.0);
        let text = m.render(&g);
        for line in [
            "canal_controller_generation 7",
            "canal_controller_nacks_total{type=\"Service\"} 3",
            "canal_controller_refused_total{reason=\"a\\\"b\\\\c\\nd\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
        let names: std::collections::BTreeSet<_> = ALL.iter().map(|m| m.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert_eq!(text.matches("# TYPE ").count(), ALL.len());
    }
}
