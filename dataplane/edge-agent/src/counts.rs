//! The metrics of the edge, by name. `docs/operations/counters.md` describes them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_model::program::Resource;
use canal_offload::reconcile::MapWrites;
use canal_runtime::metrics::{CounterFamily, GaugeFamily, MetricFamily, Registry, SharedGauge};

use crate::desired_maps::{EdgeMapContent, MapCapacity, OmittedEntry};

/// Handles of all metric families.
#[derive(Clone)]
pub struct EdgeCounters {
    registry: Registry,
    entries: GaugeFamily,
    limits: GaugeFamily,
    left_out: GaugeFamily,
    left_out_shown: Arc<Mutex<BTreeSet<(&'static str, &'static str)>>>,
    behind: SharedGauge,
    writes: CounterFamily,
    write_failures: CounterFamily,
    refused: CounterFamily,
    packets: CounterFamily,
    packets_seen: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    probes: CounterFamily,
    changes: CounterFamily,
    replicas: GaugeFamily,
    reports: CounterFamily,
    repairs: CounterFamily,
    /// Instructions that the verifier processed.
    verified: GaugeFamily,
    attached: SharedGauge,
}

/// Registers the counter of repairs, with a series for each kind of repair from the start.
fn repairs(r: &Registry) -> CounterFamily {
    let repairs = r.counters(MetricFamily::new(
        "canal_edge_repairs_total",
        "Programs and maps that were removed externally and reinstalled.",
        &["what"],
    ));
    for what in ["attachment", "pins", "elements"] {
        repairs.shared(&[what]);
    }
    repairs
}

impl EdgeCounters {
    /// Registers all metric families of the edge.
    pub fn new(r: &Registry) -> Self {
        let counters = |name, help, labels| r.counters(MetricFamily::new(name, help, labels));
        let gauges = |name, help, labels| r.gauges(MetricFamily::new(name, help, labels));
        Self {
            registry: r.clone(),
            entries: gauges(
                "canal_edge_map_entries",
                "Elements of the edge's maps.",
                &["map"],
            ),
            limits: gauges(
                "canal_edge_map_limit",
                "Maximum number of elements of a map.",
                &["map"],
            ),
            left_out: gauges(
                "canal_edge_map_entries_omitted",
                "Resources from the controller that are not in the maps.",
                &["map", "reason"],
            ),
            left_out_shown: Arc::default(),
            behind: gauges(
                "canal_edge_map_entries_pending",
                "Elements that could not be written yet.",
                &[],
            )
            .shared(&[]),
            writes: counters(
                "canal_edge_map_writes_total",
                "Elements written to maps and removed from them.",
                &["map", "operation"],
            ),
            write_failures: counters(
                "canal_edge_map_write_failures_total",
                "Elements that the kernel rejected.",
                &["map"],
            ),
            refused: counters(
                "canal_edge_map_refused_total",
                "Entries refused beyond a tenant's share of a map.",
                &["map", "tenant"],
            ),
            packets: counters(
                "canal_edge_packets_total",
                "Packets by the verdict of the edge's program.",
                &["what"],
            ),
            packets_seen: Arc::default(),
            probes: counters(
                "canal_edge_probes_total",
                "Readiness probes of replicas, by outcome.",
                &["result"],
            ),
            changes: counters(
                "canal_edge_replica_changes_total",
                "Replicas that this edge found down or up again.",
                &["to"],
            ),
            replicas: gauges(
                "canal_edge_replicas",
                "Replicas of this edge's AZ, by state.",
                &["state"],
            ),
            reports: counters(
                "canal_edge_reports_total",
                "Reports to the controller, by outcome.",
                &["result"],
            ),
            repairs: repairs(r),
            verified: gauges(
                "canal_edge_verified_instructions",
                "Instructions that the verifier processed.",
                &["program"],
            ),
            attached: gauges(
                "canal_edge_attached",
                "1 while the program is attached to the device.",
                &[],
            )
            .shared(&[]),
        }
    }

    /// Sets the limits on metric series that the provider configured for tenants.
    pub(crate) fn set_shares(&self, resources: &[Arc<Resource>]) {
        self.registry
            .set_shares(resources.iter().filter_map(|resource| match &**resource {
                Resource::Tenant(tenant) => Some((&tenant.name, &tenant.shares)),
                _ => None,
            }));
    }

    pub(crate) fn entries(&self, c: &EdgeMapContent) {
        let shown = [
            ("canal_addresses", c.addresses.len()),
            ("canal_returns", c.returns.len()),
            ("canal_prefixes", c.prefixes.len()),
            ("canal_nodes", c.nodes.len()),
            ("canal_tables", c.tables.len()),
            ("canal_replicas", c.replicas.len()),
            ("canal_hosts", c.hosts.len()),
            ("canal_tunnels", c.tunnels.len()),
        ];
        shown
            .iter()
            .for_each(|(map, n)| set(&self.entries, &[map], *n));
    }
    pub(crate) fn map_capacity(&self, capacity: &MapCapacity) {
        let replicas = usize::from(canal_model::ids::ReplicaNumber::MAX);
        let shown = [
            ("canal_addresses", capacity.addresses),
            ("canal_returns", capacity.services),
            ("canal_prefixes", capacity.prefixes),
            ("canal_nodes", capacity.nodes),
            ("canal_tables", capacity.services),
            ("canal_replicas", replicas),
            ("canal_hosts", capacity.hosts),
        ];
        shown
            .iter()
            .for_each(|(map, n)| set(&self.limits, &[map], *n));
    }
    pub(crate) fn left_out(&self, all: &BTreeSet<OmittedEntry>) {
        let mut now = BTreeMap::new();
        for l in all {
            *now.entry((l.map, l.reason.name())).or_insert(0) += 1;
        }
        let mut shown = self
            .left_out_shown
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        shown.extend(now.keys());
        for (map, reason) in shown.iter() {
            set(
                &self.left_out,
                &[map, reason],
                now.get(&(*map, *reason)).copied().unwrap_or(0),
            );
        }
    }
    pub(crate) fn pending_entries(&self, n: usize) {
        self.behind.set(i64::try_from(n).unwrap_or(i64::MAX));
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
    /// Counts a refused entry. `tenant` is `None` for the tier's own entries.
    pub(crate) fn refused(&self, map: &str, tenant: Option<&TenantName>) {
        self.refused
            .shared(&[map, tenant.map_or("", TenantName::as_str)])
            .inc();
    }
    /// Adds the increase of the kernel's counters. They outlive the agent, so the first call
    /// includes packets that passed while none ran.
    pub(crate) fn packets(&self, now: &[(&'static str, u64)]) {
        let mut seen = self
            .packets_seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for (what, n) in now {
            let before = seen.insert(what, *n).unwrap_or(0);
            // The counters of new maps start at zero again.
            self.packets
                .shared(&[what])
                .add(n.checked_sub(before).unwrap_or(*n));
        }
    }
    pub(crate) fn probe(&self, result: &str) {
        self.probes.shared(&[result]).inc();
    }
    pub(crate) fn change(&self, up: bool) {
        self.changes.shared(&[if up { "up" } else { "down" }]).inc();
    }
    pub(crate) fn replicas(&self, up: usize, down: usize) {
        set(&self.replicas, &["up"], up);
        set(&self.replicas, &["down"], down);
    }
    /// Returns the counters of reports by label `result`.
    pub(crate) fn reports(&self) -> CounterFamily {
        self.reports.clone()
    }
    pub(crate) fn repair(&self, what: &str, n: usize) {
        self.repairs.shared(&[what]).add(n as u64);
    }
    pub(crate) fn verified(&self, program: &str, instructions: u32) {
        self.verified.shared(&[program]).set(instructions.into());
    }
    pub(crate) fn attached(&self, yes: bool) {
        self.attached.set(yes.into());
    }
}

fn set(gauges: &GaugeFamily, labels: &[&str], n: usize) {
    gauges
        .shared(labels)
        .set(i64::try_from(n).unwrap_or(i64::MAX));
}
