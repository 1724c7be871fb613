//! The order in which tenants' tables are built, one step at a time. It is pure: it counts steps,
//! builds nothing and reads no clock.
//!
//! Each build has a start and an end on a scale of steps, as in start-time fair queueing. A build
//! begins at the present position of the scale, or where the tenant's last one ends. The build with
//! the earliest end goes first. Short builds overtake long ones, and a tenant that always has
//! something to build falls behind all others. Start with [`BuildTurns::next`].

use std::collections::BTreeMap;

use canal_model::ids::TenantName;

/// One tenant's build.
#[derive(Debug)]
struct PendingBuild {
    start: u64,
    steps: u64,
    /// Steps that were not taken yet.
    left: u64,
}

impl PendingBuild {
    fn end(&self) -> u64 {
        self.start + self.steps
    }

    /// Returns whether the build holds tables that are not in use yet.
    fn has_begun(&self) -> bool {
        self.left < self.steps
    }
}

/// Builds that are not complete, one per tenant at most, and the position on the scale of steps.
#[derive(Debug, Default)]
pub(crate) struct BuildTurns {
    position: u64,
    turns: BTreeMap<TenantName, PendingBuild>,
    /// End of each tenant's last build, if it is later than the position.
    last_ends: BTreeMap<TenantName, u64>,
}

impl BuildTurns {
    /// Adds a tenant's build of this many steps. The tenant has no other one.
    pub(crate) fn add(&mut self, tenant: TenantName, steps: u64) {
        let start = self
            .last_ends
            .get(&tenant)
            .copied()
            .unwrap_or(0)
            .max(self.position);
        self.turns.insert(
            tenant,
            PendingBuild {
                start,
                steps,
                left: steps,
            },
        );
    }

    /// Returns the tenant whose build is to take the next step.
    ///
    /// A new build may overtake a started one only if it takes at most half of the steps that the
    /// started one still needs. Each unfinished build that was overtaken is then at least twice as
    /// long as the next one. So together they hold no more memory than twice the longest.
    pub(crate) fn next(&self) -> Option<&TenantName> {
        let shortest_rest = self
            .turns
            .values()
            .filter(|turn| turn.has_begun())
            .map(|turn| turn.left)
            .min();
        let may_go = |turn: &PendingBuild| {
            turn.has_begun() || shortest_rest.is_none_or(|left| turn.steps <= left / 2)
        };
        let first = self
            .turns
            .iter()
            .filter(|(_, turn)| may_go(turn))
            .min_by_key(|(tenant, turn)| (turn.end(), *tenant));
        first.map(|(tenant, _)| tenant)
    }

    /// Adds steps to a tenant's build.
    pub(crate) fn extend(&mut self, tenant: &TenantName, steps: u64) {
        if let Some(turn) = self.turns.get_mut(tenant) {
            turn.steps += steps;
            turn.left += steps;
        }
    }

    /// Records that a tenant's build takes a step.
    pub(crate) fn step(&mut self, tenant: &TenantName) {
        if let Some(turn) = self.turns.get_mut(tenant) {
            turn.left = turn.left.saturating_sub(1);
            self.position = self.position.max(turn.start);
        }
    }

    /// Ends a tenant's build, whether it is complete or dropped. Only the steps that were taken
    /// count against the tenant.
    pub(crate) fn end(&mut self, tenant: &TenantName) {
        if let Some(turn) = self.turns.remove(tenant) {
            self.last_ends
                .insert(tenant.clone(), turn.end() - turn.left);
        }
        if self.turns.is_empty() {
            // No tenant waits, so none is behind or ahead of the others.
            self.last_ends.clear();
        }
        let position = self.position;
        self.last_ends.retain(|_, end| *end > position);
    }
}

#[cfg(test)]
mod tests {
    //! Tests of the order of builds. They count steps and measure no time.

    use super::*;

    fn name(text: &str) -> TenantName {
        text.parse().unwrap()
    }

    /// Takes one step of the build whose turn it is, and returns its tenant. A build ends with its
    /// last step.
    fn take(turns: &mut BuildTurns) -> Option<String> {
        let tenant = turns.next()?.clone();
        turns.step(&tenant);
        if turns.turns[&tenant].left == 0 {
            turns.end(&tenant);
        }
        Some(tenant.to_string())
    }

    fn run(turns: &mut BuildTurns, steps: usize) -> Vec<String> {
        (0..steps).map_while(|_| take(turns)).collect()
    }

    #[test]
    fn short_builds_go_before_long_ones() {
        let mut turns = BuildTurns::default();
        for (tenant, steps) in [("long", 450), ("short", 3), ("middle", 20)] {
            turns.add(name(tenant), steps);
        }
        let order = run(&mut turns, 1000);
        assert_eq!(order.len(), 473);
        assert!(order[..3].iter().all(|tenant| tenant == "short"));
        assert!(order[3..23].iter().all(|tenant| tenant == "middle"));
        assert_eq!(turns.next(), None);
    }

    #[test]
    fn a_short_build_overtakes_a_long_one_that_has_begun() {
        let mut turns = BuildTurns::default();
        turns.add(name("long"), 100);
        assert_eq!(run(&mut turns, 10), vec!["long"; 10]);
        turns.add(name("short"), 5);
        assert_eq!(run(&mut turns, 5), vec!["short"; 5]);
        assert_eq!(run(&mut turns, 1000), vec!["long"; 90]);
    }

    #[test]
    fn a_second_build_starts_only_below_half_of_the_first_ones_rest() {
        let mut turns = BuildTurns::default();
        turns.add(name("a"), 100);
        run(&mut turns, 20);
        turns.add(name("b"), 41);
        assert_eq!(run(&mut turns, 1), ["a"], "41 is more than half of 80");
        turns.end(&name("b"));
        turns.add(name("b"), 39);
        assert_eq!(run(&mut turns, 39), vec!["b"; 39]);
        assert_eq!(turns.turns.len(), 1);
    }

    #[test]
    fn a_tenant_that_always_builds_gets_no_more_than_its_part() {
        let mut turns = BuildTurns::default();
        turns.add(name("greedy"), 20);
        turns.add(name("patient"), 100);
        let mut counts = BTreeMap::new();
        for _ in 0..1000 {
            let Some(tenant) = take(&mut turns) else {
                break;
            };
            *counts.entry(tenant.clone()).or_insert(0) += 1;
            if tenant == "greedy" && !turns.turns.contains_key(&name("greedy")) {
                turns.add(name("greedy"), 20);
            }
            if counts.get("patient") == Some(&100) {
                break;
            }
        }
        assert_eq!(counts["patient"], 100);
        assert!(counts["greedy"] <= 100, "{counts:?}");
    }

    #[test]
    fn a_tenant_without_builds_is_forgotten() {
        let mut turns = BuildTurns::default();
        turns.add(name("a"), 10);
        turns.add(name("b"), 2);
        run(&mut turns, 12);
        assert!(turns.turns.is_empty() && turns.last_ends.is_empty());
        turns.add(name("c"), 3);
        turns.add(name("a"), 2);
        assert_eq!(
            run(&mut turns, 2),
            vec!["a"; 2],
            "an old build no longer counts"
        );
    }
}
