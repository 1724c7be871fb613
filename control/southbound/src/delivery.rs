//! Progress of one data plane: the generations that it was sent and that it acknowledged. The value
//! is a snapshot, which `subscribers` makes. The fleet uses it to decide when a bucket's head may
//! move.

use std::collections::BTreeMap;

use canal_model::ids::{Generation, TenantName};

/// Progress of a data plane, as acknowledged on its subscriber stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeliveryProgress {
    /// Every resource in scope up to this generation has been acknowledged.
    pub acked_through: Generation,
    /// Newest generation of which the data plane was sent a resource.
    pub content: Generation,
    /// Tenants of which the data plane refuses a resource, with the generation up to which it has
    /// all of theirs. [`DeliveryProgress::acked_through`] is that of the others.
    pub behind: BTreeMap<TenantName, Generation>,
}

impl DeliveryProgress {
    /// Returns the generation of which a data plane that reports `reported` serves everything. A
    /// data plane may have acknowledged resources that it does not serve yet. It receives nothing
    /// of generations outside its scope, so the reported generation is at most the last one that it
    /// was sent.
    pub fn served(&self, reported: Generation) -> Generation {
        match reported {
            Generation(0) => reported,
            // The data plane serves all that it was sent; later generations were out of its scope.
            _ if reported >= self.content => self.acked_through,
            _ => reported.min(self.acked_through),
        }
    }
}
