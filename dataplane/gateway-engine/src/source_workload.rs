//! Sources of requests: the workloads at the clients' end, numbered per worker so that metrics find
//! their series by number.
//!
//! Start with [`SourceTable::of`].

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use canal_gateway_config::WorkloadLabels;
use hashbrown::HashMap;

/// Most sources that a worker remembers. At the limit it forgets all numbers, which costs only new
/// lookups. As many as a metric family may have label sets, of which a source is a part.
const SOURCES_MAX: usize = 10_000;

/// One workload as a source, with its number.
#[derive(Debug)]
pub(crate) struct SourceWorkload {
    /// Never reused by this worker.
    pub(crate) number: u32,
    pub(crate) party: WorkloadLabels,
}

/// Sources that a worker has seen.
#[derive(Debug, Default)]
pub(crate) struct SourceTable {
    sources: RefCell<HashMap<WorkloadLabels, Rc<SourceWorkload>>>,
    last: Cell<u32>,
}

impl SourceTable {
    /// Returns the source with these labels; the pod's name is ignored.
    pub(crate) fn of(&self, party: &WorkloadLabels) -> Rc<SourceWorkload> {
        let party = WorkloadLabels {
            pod: String::new(),
            ..party.clone()
        };
        let mut known = self.sources.borrow_mut();
        if let Some(source) = known.get(&party) {
            return source.clone();
        }
        if known.len() >= SOURCES_MAX {
            known.clear();
        }
        self.last.set(self.last.get() + 1);
        let source = Rc::new(SourceWorkload {
            number: self.last.get(),
            party: party.clone(),
        });
        known.insert(party, source.clone());
        source
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_have_stable_numbers_up_to_the_limit() {
        let sources = SourceTable::default();
        let party = |n: usize| WorkloadLabels {
            workload: n.to_string(),
            pod: "p".into(),
            ..WorkloadLabels::unknown()
        };
        let first = sources.of(&party(0));
        assert_eq!(
            sources
                .of(&WorkloadLabels {
                    pod: "other".into(),
                    ..party(0)
                })
                .number,
            first.number
        );
        for n in 0..=SOURCES_MAX {
            sources.of(&party(n));
        }
        let again = sources.of(&party(0));
        assert!(again.number > first.number && again.party == first.party);
        assert!(sources.sources.borrow().len() <= SOURCES_MAX);
    }
}
