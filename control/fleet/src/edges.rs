//! The edges of the AZs: which exist, what they report together, and which tables all of them have.
//! The edges of an AZ share one tunnel end, and any packet may pass through any of them. A property
//! of an AZ therefore holds only if it holds for all its edges that report. Pure. Start at
//! [`Edges`].

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use canal_model::ids::{AzName, EdgeName, Generation, ReplicaName};
use canal_store::StoredEdge;
use tokio::time::Instant;

/// One edge of the fleet: its row on disk, and its last report.
#[derive(Debug, Clone)]
pub(crate) struct EdgeMember {
    pub(crate) row: StoredEdge,
    pub(crate) generation: Generation,
    pub(crate) version: String,
    pub(crate) alive: bool,
    /// Time of the last report; `None` if there was none since the start.
    pub(super) last_report: Option<Instant>,
    pub(super) replicas_up: BTreeMap<ReplicaName, bool>,
    /// Every resource up to this generation has been acknowledged.
    pub(super) acked_through: Generation,
    /// Newest plan of which the edge has all tables.
    pub(super) plan: u32,
}

impl EdgeMember {
    pub(super) fn new(row: StoredEdge, alive: bool) -> Self {
        let (seen, version) = (BTreeMap::new(), String::new());
        Self {
            row,
            generation: Generation(0),
            version,
            alive,
            last_report: None,
            replicas_up: seen,
            acked_through: Generation(0),
            plan: 0,
        }
    }

    /// True if the edge is alive and has reported since the start.
    fn is_reporting(&self) -> bool {
        self.alive && self.last_report.is_some()
    }
}

/// Edges of all AZs by name.
#[derive(Debug, Default)]
pub(crate) struct Edges(BTreeMap<EdgeName, EdgeMember>);

impl Edges {
    pub(super) fn new(rows: impl IntoIterator<Item = StoredEdge>) -> Self {
        Self(
            rows.into_iter()
                .map(|row| (row.name.clone(), EdgeMember::new(row, true)))
                .collect(),
        )
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub(crate) fn values(&self) -> impl Iterator<Item = &EdgeMember> {
        self.0.values()
    }
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut EdgeMember> {
        self.0.values_mut()
    }
    pub(super) fn get_mut(&mut self, name: &EdgeName) -> Option<&mut EdgeMember> {
        self.0.get_mut(name)
    }
    pub(super) fn enter(&mut self, edge: EdgeMember) {
        self.0.insert(edge.row.name.clone(), edge);
    }
    pub(super) fn forget(&mut self, name: &EdgeName) {
        self.0.remove(name);
    }

    pub(crate) fn of_az<'a>(&'a self, az: &'a AzName) -> impl Iterator<Item = &'a EdgeMember> {
        self.0.values().filter(move |edge| edge.row.az == *az)
    }

    /// True if an edge of the AZ is alive; one is enough.
    pub(crate) fn is_alive(&self, az: &AzName) -> bool {
        self.of_az(az).any(|edge| edge.alive)
    }

    /// Returns the address to which replicas send traffic for tenants' nodes. It is that of an edge
    /// that is not alive, as long as there is no other.
    pub(crate) fn tunnel_end(&self, az: &AzName) -> Option<Ipv4Addr> {
        self.of_az(az)
            .max_by_key(|edge| edge.alive)
            .map(|edge| edge.row.tunnel_end())
    }

    /// Returns whether the AZ's edges see a replica up; `None` if no reporting edge probes it.
    pub(super) fn word(&self, az: &AzName, replica: &ReplicaName) -> Option<bool> {
        decide_word(
            self.of_az(az)
                .filter(|edge| edge.is_reporting())
                .filter_map(|edge| edge.replicas_up.get(replica))
                .copied(),
        )
    }

    /// True if an edge of the AZ reports.
    pub(super) fn is_any_reporting(&self, az: &AzName) -> bool {
        self.of_az(az).any(EdgeMember::is_reporting)
    }

    /// Returns the newest plan of which all edges of the AZ that are alive have all tables.
    pub(super) fn plan(&self, az: &AzName) -> Option<u32> {
        self.of_az(az)
            .filter(|edge| edge.alive)
            .map(|edge| edge.plan)
            .min()
    }
}

/// Combines what the edges of an AZ see of a replica. It is up as long as one edge reaches it:
/// redirectors then do not reset its sessions. An edge that does not reach it passes it over by
/// itself, which costs a redirection and no session.
fn decide_word(words: impl Iterator<Item = bool>) -> Option<bool> {
    words.fold(None, |all, up| Some(all.unwrap_or(false) || up))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_is_up_while_one_edge_reaches_it() {
        for (words, want) in [
            (vec![], None),
            (vec![true], Some(true)),
            (vec![false], Some(false)),
            (vec![false, true, false], Some(true)),
        ] {
            assert_eq!(decide_word(words.iter().copied()), want, "{words:?}");
        }
    }

    #[test]
    fn an_az_is_as_far_as_the_last_of_its_edges() {
        let az: AzName = "az1".parse().unwrap();
        let row = |name: &str, n| StoredEdge {
            name: name.parse().unwrap(),
            az: az.clone(),
            underlay: Ipv4Addr::new(250, 1, 0, n),
            anycast: Some(Ipv4Addr::new(250, 1, 255, 1)),
        };
        let mut edges = Edges::new([row("e1", 1), row("e2", 2)]);
        edges.get_mut(&"e1".parse().unwrap()).unwrap().plan = 7;
        assert_eq!(
            (edges.plan(&az), edges.tunnel_end(&az)),
            (Some(0), Some(Ipv4Addr::new(250, 1, 255, 1))),
            "e2 has not reported yet"
        );
        edges.get_mut(&"e2".parse().unwrap()).unwrap().alive = false;
        assert_eq!((edges.plan(&az), edges.is_alive(&az)), (Some(7), true));
        edges.get_mut(&"e1".parse().unwrap()).unwrap().alive = false;
        assert_eq!(
            (
                edges.plan(&az),
                edges.is_alive(&az),
                edges.tunnel_end(&az).is_some()
            ),
            (None, false, true)
        );
    }
}
