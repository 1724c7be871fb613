//! Clients that run for as long as a change of the mesh takes, whatever the speed of the machine.
//! Start at [`load_while`].

use std::sync::atomic::{AtomicBool, Ordering};

use canal_timing::{assert_losses, is_timed};
use serde_json::Value;

use crate::Mesh;

/// Reports of one client's runs, in their order.
#[derive(Debug)]
pub struct ClientReports(Vec<Value>);

impl ClientReports {
    /// Returns the sum of a number over all runs.
    pub fn sum(&self, field: &str) -> u64 {
        self.0
            .iter()
            .filter_map(|report| report[field].as_u64())
            .sum()
    }

    /// Returns the number of an application's answers over all runs.
    pub fn served_by(&self, name: &str) -> u64 {
        self.0
            .iter()
            .filter_map(|report| report["served_by"][name].as_u64())
            .sum()
    }

    /// Checks that the clients lost no request. In the gate, where their timeouts are long, this is
    /// an assertion; the timing tier counts the losses.
    ///
    /// # Panics
    /// Panics in the gate if anything was lost, with the reports of the runs that lost it.
    #[track_caller]
    pub fn assert_none_lost(&self, name: &str) {
        let lossy: Vec<&Value> = self
            .0
            .iter()
            .filter(|report| report["ok"] != true)
            .collect();
        assert_losses(
            name,
            self.sum("failed") + self.sum("broken") + self.sum("unopened"),
            0,
        );
        assert!(is_timed() || lossy.is_empty(), "{name}: {lossy:?}");
        assert!(!self.0.is_empty(), "{name}: no client ran");
    }
}

/// Sets a flag when it is dropped, so that clients end when the change panics too.
struct SetOnDrop<'f>(&'f AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `change` while clients load the mesh. Each client is a host and a command that ends by
/// itself with a report in JSON; it is started again until the change is over. Returns the result
/// of the change and each client's reports.
pub fn load_while<T>(
    mesh: &Mesh,
    clients: &[(&str, Vec<&str>)],
    change: impl FnOnce() -> T,
) -> (T, Vec<ClientReports>) {
    let is_over = AtomicBool::new(false);
    let run = |host: &str, argv: &[&str]| {
        let mut reports = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            reports.push(mesh.run(host, argv).json());
        }
        ClientReports(reports)
    };
    let run = &run;
    std::thread::scope(|scope| {
        let running: Vec<_> = clients
            .iter()
            .map(|(host, argv)| scope.spawn(move || run(host, argv)))
            .collect();
        let ends = SetOnDrop(&is_over);
        let result = change();
        drop(ends);
        let reports = running.into_iter().map(|client| {
            client
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        (result, reports.collect())
    })
}
