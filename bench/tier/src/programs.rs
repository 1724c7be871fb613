//! Run time and run count of the tier's BPF programs as the kernel counts them. The counting costs
//! about 20 ns per run and is off outside a bench.

use std::collections::BTreeMap;

use anyhow::Context;
use libbpf_rs::query::ProgInfoIter;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Enables the kernel's counting until it is dropped.
pub(crate) struct RunCounter {
    before: String,
}

impl RunCounter {
    pub(crate) fn begin() -> anyhow::Result<Self> {
        let before = std::fs::read_to_string(SWITCH).context(SWITCH)?;
        std::fs::write(SWITCH, "1").context(SWITCH)?;
        Ok(Self { before })
    }
}

impl Drop for RunCounter {
    fn drop(&mut self) {
        if let Err(problem) = std::fs::write(SWITCH, &self.before) {
            eprintln!("{SWITCH} stays on: {problem}");
        }
    }
}

/// Run time and run count of a program.
#[derive(Clone, Copy, Default)]
pub(crate) struct ProgramCost {
    pub(crate) runs: f64,
    pub(crate) ns: f64,
}

/// Returns all programs of the tier by name, replicas and edges together.
pub(crate) fn all() -> BTreeMap<String, ProgramCost> {
    let mut found: BTreeMap<String, ProgramCost> = BTreeMap::new();
    for program in ProgInfoIter::default() {
        let name = program.name.to_string_lossy().into_owned();
        if name.starts_with("canal_") {
            let ran = found.entry(name).or_default();
            ran.runs += program.run_cnt as f64;
            ran.ns += program.run_time_ns as f64;
        }
    }
    found
}

/// Returns the differences between two reads.
pub(crate) fn between(
    before: &BTreeMap<String, ProgramCost>,
    after: &BTreeMap<String, ProgramCost>,
) -> BTreeMap<String, ProgramCost> {
    let less = |(name, ran): (&String, &ProgramCost)| {
        let old = before.get(name).copied().unwrap_or_default();
        (
            name.clone(),
            ProgramCost {
                runs: ran.runs - old.runs,
                ns: ran.ns - old.ns,
            },
        )
    };
    after.iter().map(less).collect()
}
