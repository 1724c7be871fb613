//! The agent's metrics. `docs/operations/counters.md` defines each of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use canal_runtime::metrics::{
    CounterFamily, GaugeFamily, MetricFamily, Registry, SharedCounter, SharedGauge,
};

use canal_offload::reconcile::MapWrites;

use crate::desired_maps::RedirectorMapContent;

/// Handles of all metric families.
#[derive(Clone)]
pub struct RedirectorCounters {
    entries: GaugeFamily,
    behind: SharedGauge,
    writes: CounterFamily,
    write_failures: CounterFamily,
    omitted: CounterFamily,
    packets: CounterFamily,
    packets_seen: Arc<Mutex<BTreeMap<(&'static str, &'static str), u64>>>,
    received: CounterFamily,
    received_seen: Arc<Mutex<Vec<u64>>>,
    reports: CounterFamily,
    session_scans: CounterFamily,
    searches: CounterFamily,
    /// Duration of all scans in nanoseconds.
    scan_time: SharedCounter,
    owned: SharedGauge,
    repairs: SharedCounter,
}

impl RedirectorCounters {
    /// Registers all families in `r`.
    pub fn new(r: &Registry) -> Self {
        let counters = |name, help, labels| r.counters(MetricFamily::new(name, help, labels));
        let gauges = |name, help, labels| r.gauges(MetricFamily::new(name, help, labels));
        Self {
            entries: gauges(
                "canal_redirector_map_entries",
                "Elements of the redirector's maps.",
                &["map"],
            ),
            behind: gauges(
                "canal_redirector_map_entries_pending",
                "Elements that could not be written yet.",
                &[],
            )
            .shared(&[]),
            writes: counters(
                "canal_redirector_map_writes_total",
                "Elements written to maps and removed from them.",
                &["map", "operation"],
            ),
            write_failures: counters(
                "canal_redirector_map_write_failures_total",
                "Elements that the kernel rejected.",
                &["map"],
            ),
            omitted: counters(
                "canal_redirector_map_refused_total",
                "Entries refused beyond a tenant's share of a map.",
                &["map", "tenant"],
            ),
            packets: counters(
                "canal_redirector_packets_total",
                "Packets by the verdict of the replica's programs.",
                &["program", "what"],
            ),
            packets_seen: Arc::default(),
            received: counters(
                "canal_redirector_received_packets_total",
                "Packets of the tier that each core received.",
                &["core"],
            ),
            received_seen: Arc::default(),
            reports: counters(
                "canal_redirector_reports_total",
                "Reports to the controller, by outcome.",
                &["result"],
            ),
            session_scans: counters(
                "canal_redirector_session_scans_total",
                "Scans of the kernel's sockets for owned sessions, by outcome.",
                &["result"],
            ),
            searches: counters(
                "canal_redirector_session_searches_total",
                "Searches of the kernel's sockets for one client's sessions, by outcome.",
                &["result"],
            ),
            scan_time: r
                .seconds(MetricFamily::new(
                    "canal_redirector_session_scan_seconds_total",
                    "Time that session scans took.",
                    &[],
                ))
                .shared(&[]),
            owned: gauges(
                "canal_redirector_owned_sessions",
                "Open sessions of services at the last session scan.",
                &[],
            )
            .shared(&[]),
            repairs: counters(
                "canal_redirector_repairs_total",
                "Programs that were removed externally and reinstalled.",
                &[],
            )
            .shared(&[]),
        }
    }

    pub(crate) fn entries(&self, c: &RedirectorMapContent) {
        let shown = [
            ("canal_tables", c.tables.len()),
            ("canal_replicas", c.replicas.len()),
            ("canal_hosts", c.hosts.len()),
            ("canal_throttles", c.throttles.len()),
        ];
        shown
            .iter()
            .for_each(|(map, n)| self.entries.shared(&[map]).set(clamp(*n)));
    }
    pub(crate) fn pending_entries(&self, n: usize) {
        self.behind.set(clamp(n));
    }
    pub(crate) fn map_writes(&self, writes: &BTreeMap<&'static str, MapWrites>) {
        for (map, of_map) in writes {
            self.writes.shared(&[map, "put"]).add(of_map.put as u64);
            self.writes
                .shared(&[map, "remove"])
                .add(of_map.removed as u64);
        }
    }
    pub(crate) fn write_failed(&self, map: &str) {
        self.write_failures.shared(&[map]).inc();
    }
    pub(crate) fn omitted(&self, map: &str, tenant: &str) {
        self.omitted.shared(&[map, tenant]).inc();
    }
    /// Adds the kernel's packet counters. They outlive the process, so the first reading includes
    /// packets from while no process ran.
    pub(crate) fn packets(&self, now: &[(&'static str, &'static str, u64)]) {
        let mut seen = self
            .packets_seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (program, what, n) in now {
            let before = seen.insert((program, what), *n).unwrap_or(0);
            // New maps count from zero, so their value is the difference.
            self.packets
                .shared(&[program, what])
                .add(n.checked_sub(before).unwrap_or(*n));
        }
    }
    /// Adds the kernel's packet counters by core.
    pub(crate) fn received(&self, cores: &[u64]) {
        let mut seen = self
            .received_seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let known = seen.len().max(cores.len());
        seen.resize(known, 0);
        for (core, (before, now)) in seen.iter_mut().zip(cores).enumerate() {
            self.received
                .shared(&[&core.to_string()])
                .add(now.checked_sub(*before).unwrap_or(*now));
            *before = *now;
        }
    }
    /// Returns the counters of reports by label `result`.
    pub(crate) fn reports(&self) -> CounterFamily {
        self.reports.clone()
    }
    pub(crate) fn search(&self, result: &str) {
        self.searches.shared(&[result]).inc();
    }
    pub(crate) fn count_scan(&self, result: &str, took: Duration) {
        self.session_scans.shared(&[result]).inc();
        self.scan_time
            .add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
    pub(crate) fn owned(&self, sessions: u64) {
        self.owned.set(i64::try_from(sessions).unwrap_or(i64::MAX));
    }
    pub(crate) fn repaired(&self) {
        self.repairs.inc();
    }
}

fn clamp(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
