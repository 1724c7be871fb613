//! Run time and run count of the tier's BPF programs as the kernel counts them. The counting costs some 20 ns a run and is off outside a bench.

use std::collections::BTreeMap;

use anyhow::Context;
use libbpf_rs::query::ProgInfoIter;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Counting, until dropped.
pub(crate) struct Counting {
    before: String,
}

impl Counting {
    pub(crate) fn begin() -> anyhow::Result<Self> {
        let before = std::fs::read_to_string(SWITCH).context(SWITCH)?;
        std::fs::write(SWITCH, "1").context(SWITCH)?;
        Ok(Self { before })
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if let Err(problem) = std::fs::write(SWITCH, &self.before) {
            eprintln!("{SWITCH} stays on: {problem}");
        }
    }
}

/// What a program did.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ran {
    pub(crate) runs: f64,
    pub(crate) ns: f64,
}

/// All programs of the tier by name, replicas and edges together.
pub(crate) fn all() -> BTreeMap<String, Ran> {
    let mut found: BTreeMap<String, Ran> = BTreeMap::new();
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

/// What happened between two looks.
pub(crate) fn between(before: &BTreeMap<String, Ran>, after: &BTreeMap<String, Ran>) -> BTreeMap<String, Ran> {
    let less = |(name, ran): (&String, &Ran)| {
        let old = before.get(name).copied().unwrap_or_default();
        (name.clone(), Ran { runs: ran.runs - old.runs, ns: ran.ns - old.ns })
    };
    after.iter().map(less).collect()
}
