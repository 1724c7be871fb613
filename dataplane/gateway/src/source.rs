//! Who sends: the verified party at the client's end of a connection, numbered per worker so that metrics find their series by number.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use hashbrown::HashMap;

use crate::snapshot::Party;

/// Parties a worker remembers; reaching it forgets all numbers, which costs look-ups and nothing else.
const SOURCES_MAX: usize = 10_000;

/// One party as a source.
#[derive(Debug)]
pub(crate) struct Source {
    /// Never reused by this worker.
    pub(crate) number: u32,
    pub(crate) party: Party,
}

/// The sources a worker has met.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    known: RefCell<HashMap<Party, Rc<Source>>>,
    last: Cell<u32>,
}

impl Sources {
    /// The number of `party`; its pod name does not count.
    pub(crate) fn of(&self, party: &Party) -> Rc<Source> {
        let party = Party { pod: String::new(), ..party.clone() };
        let mut known = self.known.borrow_mut();
        if let Some(source) = known.get(&party) {
            return source.clone();
        }
        if known.len() >= SOURCES_MAX {
            known.clear();
        }
        self.last.set(self.last.get() + 1);
        let source = Rc::new(Source { number: self.last.get(), party: party.clone() });
        known.insert(party, source.clone());
        source
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parties_keep_their_number_until_there_are_too_many() {
        let sources = Sources::default();
        let party = |n: usize| Party { workload: n.to_string(), pod: "p".into(), ..Party::unknown() };
        let first = sources.of(&party(0));
        assert_eq!(sources.of(&Party { pod: "other".into(), ..party(0) }).number, first.number);
        for n in 0..=SOURCES_MAX {
            sources.of(&party(n));
        }
        let again = sources.of(&party(0));
        assert!(again.number > first.number && again.party == first.party);
        assert!(sources.known.borrow().len() <= SOURCES_MAX);
    }
}
