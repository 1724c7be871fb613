//! The agent's metrics, by name. `docs/operations/counters.md` says what each means.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_kit::metrics::{Counters, Family, Gauges, Registry, SharedCounter, SharedGauge};

use crate::content::Content;

/// Handles of all families.
#[derive(Clone)]
pub struct Counts {
    entries: Gauges,
    behind: SharedGauge,
    write_failures: Counters,
    omitted: Counters,
    packets: Counters,
    packets_seen: Arc<Mutex<BTreeMap<(&'static str, &'static str), u64>>>,
    reports: Counters,
    looks: Counters,
    look_micros: SharedCounter,
    owned: SharedGauge,
    repairs: SharedCounter,
}

impl Counts {
    /// Registers them.
    pub fn new(r: &Registry) -> Self {
        let counters = |name, help, labels| r.counters(Family::new(name, help, labels));
        let gauges = |name, help, labels| r.gauges(Family::new(name, help, labels));
        Self {
            entries: gauges("canal_redirector_map_entries", "Elements of the redirector's maps.", &["map"]),
            behind: gauges("canal_redirector_map_behind", "Elements that could not be written yet.", &[]).shared(&[]),
            write_failures: counters("canal_redirector_map_write_failures_total", "Elements that the kernel did not take.", &["map"]),
            omitted: counters(
                "canal_redirector_map_refused_total",
                "Entries refused beyond a tenant's share of a map.",
                &["map", "tenant"],
            ),
            packets: counters(
                "canal_redirector_packets_total",
                "Packets by what the replica's programs did with them.",
                &["program", "what"],
            ),
            packets_seen: Arc::default(),
            reports: counters("canal_redirector_reports_total", "Reports to the controller, by their outcome.", &["result"]),
            looks: counters("canal_redirector_looks_total", "Looks at the kernel's sockets for owned sessions, by outcome.", &["result"]),
            look_micros: counters("canal_redirector_look_microseconds_total", "Time that looks took.", &[]).shared(&[]),
            owned: gauges("canal_redirector_owned_sessions", "Sessions of services, as last looked at.", &[]).shared(&[]),
            repairs: counters("canal_redirector_repairs_total", "Programs that somebody removed and that were put again.", &[]).shared(&[]),
        }
    }

    pub(crate) fn entries(&self, c: &Content) {
        let shown = [
            ("canal_tables", c.tables.len()),
            ("canal_replicas", c.replicas.len()),
            ("canal_hosts", c.hosts.len()),
            ("canal_throttles", c.throttles.len()),
        ];
        shown.iter().for_each(|(map, n)| self.entries.shared(&[map]).set(clamp(*n)));
    }
    pub(crate) fn behind(&self, n: usize) {
        self.behind.set(clamp(n));
    }
    pub(crate) fn write_failed(&self, map: &str) {
        self.write_failures.shared(&[map]).inc();
    }
    pub(crate) fn omitted(&self, map: &str, tenant: &str) {
        self.omitted.shared(&[map, tenant]).inc();
    }
    /// The kernel's counters as they stand; they outlive the process, so the first look shows what passed while none ran.
    pub(crate) fn packets(&self, now: &[(&'static str, &'static str, u64)]) {
        let mut seen = self.packets_seen.lock().unwrap_or_else(PoisonError::into_inner);
        for (program, what, n) in now {
            let before = seen.insert((program, what), *n).unwrap_or(0);
            // New maps count from zero again.
            self.packets.shared(&[program, what]).add(n.checked_sub(before).unwrap_or(*n));
        }
    }
    pub(crate) fn report(&self, result: &str) {
        self.reports.shared(&[result]).inc();
    }
    pub(crate) fn look(&self, result: &str, micros: u64) {
        self.looks.shared(&[result]).inc();
        self.look_micros.add(micros);
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
