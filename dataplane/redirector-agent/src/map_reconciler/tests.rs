//! Tests of the writes and their order, with maps in memory that can refuse a write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use canal_runtime::metrics::Registry;

use super::*;
use crate::desired_maps::tests::{replica, table_of, throttle};
use crate::desired_maps::{ContentRules, ControllerOrders, decide_content};

/// The maps in memory, and a log of the writes in their order.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) tables: BTreeMap<u32, u32>,
    pub(crate) replicas: BTreeMap<u16, RedirectorReplica>,
    pub(crate) hosts: BTreeMap<Ipv4Addr, u16>,
    pub(crate) throttles: BTreeMap<ThrottleScope, ThrottleRates>,
    pub(crate) own: Option<(u16, Option<Ipv4Addr>)>,
    pub(crate) log: Vec<String>,
    /// True if tables are refused, as if their map were full.
    pub(crate) full: bool,
}

#[derive(Clone, Default)]
pub(crate) struct SharedMemory(pub(crate) Arc<Mutex<Memory>>);

fn put<K: Ord + Copy, V: Copy>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    };
}

impl RedirectorMaps for SharedMemory {
    fn put_table(&mut self, service: u32, table: Option<&BucketTable>) -> Result<(), String> {
        let mut m = self.0.lock().unwrap();
        if m.full && table.is_some() {
            return Err("full".into());
        }
        m.log.push(format!(
            "{}table {service}",
            if table.is_some() { "+" } else { "-" }
        ));
        put(&mut m.tables, service, table.map(|t| t.version));
        Ok(())
    }
    fn put_replica(&mut self, number: u16, slot: Option<RedirectorReplica>) -> Result<(), String> {
        let mut m = self.0.lock().unwrap();
        m.log.push(format!(
            "{}replica {number}",
            if slot.is_some() { "+" } else { "-" }
        ));
        put(&mut m.replicas, number, slot);
        Ok(())
    }
    fn put_host(&mut self, host: Ipv4Addr, number: Option<u16>) -> Result<(), String> {
        put(&mut self.0.lock().unwrap().hosts, host, number);
        Ok(())
    }
    fn put_throttle(
        &mut self,
        scope: ThrottleScope,
        rates: Option<ThrottleRates>,
    ) -> Result<(), String> {
        put(&mut self.0.lock().unwrap().throttles, scope, rates);
        Ok(())
    }
    fn set_self(&mut self, number: u16, edge: Option<Ipv4Addr>) -> Result<(), String> {
        self.0.lock().unwrap().own = Some((number, edge));
        Ok(())
    }
    fn leftover_entries(&mut self) -> Result<LeftoverEntries, String> {
        let m = self.0.lock().unwrap();
        Ok(LeftoverEntries {
            tables: m.tables.keys().copied().collect(),
            versions: m
                .tables
                .iter()
                .map(|(id, version)| (*id, *version))
                .collect(),
            replicas: m.replicas.keys().copied().collect(),
            hosts: m.hosts.keys().copied().collect(),
            throttles: m.throttles.keys().copied().collect(),
        })
    }
    fn counts(&mut self) -> Result<Vec<(&'static str, &'static str, u64)>, String> {
        Ok(vec![("redirector", "new", 3)])
    }
    fn repair(&mut self) -> Result<bool, String> {
        Ok(false)
    }
    fn start_steering(&mut self) -> Result<(), String> {
        self.0.lock().unwrap().log.push("steering".into());
        Ok(())
    }
    fn receive(&mut self, edge: Ipv4Addr) -> Result<crate::receive::Receive, String> {
        Ok(crate::receive::Receive {
            cores: 2,
            ports: vec![40_000, 40_000 + u16::from(edge.octets()[3])],
        })
    }
    fn received_by_core(&mut self) -> Result<Vec<u64>, String> {
        Ok(vec![3, 4])
    }
    fn stop_steering(&mut self) {}
}

fn orders(hosts: &[&str]) -> ControllerOrders {
    let hosts: BTreeSet<Ipv4Addr> = hosts.iter().map(|h| h.parse().unwrap()).collect();
    ControllerOrders {
        number: 1,
        edge: None,
        hosts,
        drain: false,
    }
}

#[test]
fn entries_of_an_earlier_process_stay_until_known_to_be_stale() {
    let memory = SharedMemory::default();
    {
        let mut m = memory.0.lock().unwrap();
        m.tables = [(7, 1), (8, 1)].into();
        m.hosts = [("250.1.0.9".parse().unwrap(), 0)].into();
        m.replicas = [
            (
                1,
                RedirectorReplica {
                    address: "250.1.0.1".parse().unwrap(),
                    up: true,
                },
            ),
            (
                9,
                RedirectorReplica {
                    address: "250.1.0.9".parse().unwrap(),
                    up: true,
                },
            ),
        ]
        .into();
        m.throttles = [(
            ThrottleScope::Tenant(1),
            ThrottleRates {
                sessions: Default::default(),
                packets: Default::default(),
                part: 0,
            },
        )]
        .into();
    }
    let az = "az1".parse().unwrap();
    let mut keeper = RedirectorReconciler::adopt(
        Box::new(memory.clone()),
        RedirectorCounters::new(&Registry::new()),
    )
    .unwrap();
    assert_eq!(memory.0.lock().unwrap().log, Vec::<String>::new());
    let all = [
        table_of("alpha/default/web", 7, "az1", 2, &[1]),
        replica("gw-1", 1, "250.1.0.1", true),
        throttle(None, None, 5),
    ];
    assert_eq!(
        keeper.reconcile(
            &decide_content(all.iter(), &az, None, &ContentRules::default()),
            true
        ),
        0
    );
    {
        let m = memory.0.lock().unwrap();
        assert_eq!(
            m.log,
            ["+replica 1", "+table 7", "-table 8", "-replica 9"],
            "new before old"
        );
        assert_eq!(
            (m.hosts.len(), m.own, m.throttles.len()),
            (1, None, 1),
            "the allowed senders are unknown before the first orders"
        );
    }
    assert_eq!(
        keeper.reconcile(
            &decide_content(
                all.iter(),
                &az,
                Some(&orders(&["250.1.0.1"])),
                &ContentRules::default()
            ),
            true
        ),
        0
    );
    let m = memory.0.lock().unwrap();
    assert_eq!(m.hosts, [("250.1.0.1".parse().unwrap(), 1)].into());
    assert_eq!(m.own, Some((1, None)));
    assert_eq!(m.log.len(), 4, "what is right stays untouched");
}

#[test]
fn writes_that_the_kernel_refused_are_retried() {
    let (memory, registry, az) = (
        SharedMemory::default(),
        Registry::new(),
        "az1".parse().unwrap(),
    );
    let mut keeper =
        RedirectorReconciler::adopt(Box::new(memory.clone()), RedirectorCounters::new(&registry))
            .unwrap();
    let content = decide_content(
        [table_of("alpha/default/web", 7, "az1", 2, &[1])].iter(),
        &az,
        None,
        &ContentRules::default(),
    );
    memory.0.lock().unwrap().full = true;
    assert_eq!(keeper.reconcile(&content, true), 1);
    assert!(
        registry
            .render()
            .contains("canal_redirector_map_write_failures_total{map=\"canal_tables\"} 1"),
        "{}",
        registry.render()
    );
    memory.0.lock().unwrap().full = false;
    assert_eq!(keeper.reconcile(&content, true), 0);
    let m = memory.0.lock().unwrap();
    assert_eq!(m.tables, [(7, 2)].into());
}

#[test]
fn a_state_from_disk_does_not_undo_newer_map_entries() {
    let (memory, az) = (SharedMemory::default(), "az1".parse().unwrap());
    memory.0.lock().unwrap().tables = [(7, 5), (8, 1), (9, 4)].into();
    let mut keeper = RedirectorReconciler::adopt(
        Box::new(memory.clone()),
        RedirectorCounters::new(&Registry::new()),
    )
    .unwrap();
    let all = [
        table_of("alpha/default/web", 7, "az1", 4, &[1]),
        table_of("alpha/default/db", 8, "az1", 2, &[1]),
    ];
    assert_eq!(
        keeper.reconcile(
            &decide_content(all.iter(), &az, None, &ContentRules::default()),
            false
        ),
        0
    );
    assert_eq!(
        memory.0.lock().unwrap().tables,
        [(7, 5), (8, 2), (9, 4)].into()
    );
    assert_eq!(
        keeper.reconcile(
            &decide_content(all.iter(), &az, None, &ContentRules::default()),
            true
        ),
        0
    );
    assert_eq!(
        memory.0.lock().unwrap().tables,
        [(7, 4), (8, 2)].into(),
        "the controller is right"
    );
}
