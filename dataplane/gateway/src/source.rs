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
