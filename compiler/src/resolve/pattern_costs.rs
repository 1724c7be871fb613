//! The costs of a tenant's regular expressions. Each expression is measured once in a compile, since
//! measuring builds its automaton, and an object may have it on hundreds of Services. Start at
//! [`PatternCosts::measure`].

use std::collections::HashMap;

use crate::limits::{DELEGATION_COMPARISONS_PER_TENANT_MAX, REGEX_AUTOMATON_BYTES_MAX};
use crate::resource_budget::ResourceBudget;

/// Maximum bytes of the automata that are built to measure a tenant's expressions; those of expressions
/// that are refused count as the largest.
/// Nobody measured this value. It is more than all expressions need that fit into the default share
/// `routeTableBytes`.
pub(crate) const MEASURED_BYTES_MAX: usize = 1 << 30;

/// The costs that are known so far.
#[derive(Debug, Default)]
pub(crate) struct PatternCosts {
    costs: HashMap<String, Result<usize, String>>,
    bytes: usize,
    is_exhausted: bool,
}

impl PatternCosts {
    /// Returns the cost of a pattern, and calls `build` only if it is not known.
    pub(crate) fn measure(
        &mut self,
        pattern: &str,
        build: impl FnOnce() -> Result<usize, String>,
    ) -> Result<usize, String> {
        if let Some(cost) = self.costs.get(pattern) {
            return cost.clone();
        }
        if self.bytes >= MEASURED_BYTES_MAX {
            self.is_exhausted = true;
            return Err(format!(
                "the tenant's expressions before it are too many or too large: measuring them took {MEASURED_BYTES_MAX} bytes"
            ));
        }
        let cost = build();
        // An expression that is too large is built up to the limit.
        self.bytes += cost.as_ref().copied().unwrap_or(REGEX_AUTOMATON_BYTES_MAX);
        self.costs.insert(pattern.to_owned(), cost.clone());
        cost
    }

    /// Records in the tenant's budget what was measured, as a part of the work that a compile may
    /// cost.
    pub(crate) fn record(&self, budget: &mut ResourceBudget) {
        let bytes_per_comparison = MEASURED_BYTES_MAX / DELEGATION_COMPARISONS_PER_TENANT_MAX;
        budget.record_comparisons(self.bytes / bytes_per_comparison, self.is_exhausted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_measured_once_and_not_without_end() {
        let mut costs = PatternCosts::default();
        for _ in 0..3 {
            let mut built = 0;
            let mut measure = |pattern: &str, cost: Result<usize, String>| {
                costs.measure(pattern, || {
                    built += 1;
                    cost
                })
            };
            assert_eq!(measure("a", Ok(7)), Ok(7));
            assert_eq!(
                measure("(", Err("broken".to_owned())),
                Err("broken".to_owned())
            );
            assert!(built == 2 || built == 0);
        }
        assert_eq!(costs.bytes, 7 + REGEX_AUTOMATON_BYTES_MAX);
        assert_eq!(
            costs.measure("b", || Ok(MEASURED_BYTES_MAX)),
            Ok(MEASURED_BYTES_MAX)
        );
        assert!(!costs.is_exhausted);
        let beyond = costs.measure("c", || unreachable!("it is not measured"));
        assert!(beyond.unwrap_err().contains("too many or too large"));
        assert_eq!(costs.measure("a", || unreachable!("it is known")), Ok(7));
        assert!(costs.is_exhausted);
    }
}
