//! Open queries of operators for sessions, and the answers of edges and replicas. A query goes out
//! with the response to a report, and the answer comes with the next report. Nothing is stored once
//! the operator has the result. `session_finder` decides which queries are sent, and interprets the
//! answers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use canal_model::ids::{AzName, EdgeName, ReplicaName, ServiceId, TenantName};
use canal_wire::fleet::{FoundSession, FoundSessions, SessionPath, SessionQuery};
use canal_wire::tier::SESSION_QUERIES_MAX;
use tokio::sync::watch;

/// Maximum number of open queries of one tenant's operators.
/// It is a quarter of [`SESSION_QUERIES_MAX`], so that one tenant leaves some to others.
pub(crate) const TENANT_QUERIES_MAX: usize = 4;

/// All session queries that are open.
#[derive(Default)]
pub(crate) struct SessionQueries {
    state: Mutex<QueryState>,
    /// Number of answers that have arrived, for tasks that wait for the next.
    answers: watch::Sender<u64>,
}

#[derive(Default)]
struct QueryState {
    last: u64,
    open: BTreeMap<u64, PendingQuery>,
}

struct PendingQuery {
    tenant: TenantName,
    client: SocketAddr,
    recipients: QueryRecipients,
    replicas: BTreeMap<ReplicaName, Vec<FoundSession>>,
    edges: BTreeMap<EdgeName, SessionPath>,
}

/// Data planes to which a query is sent.
enum QueryRecipients {
    Replicas,
    /// Edges of this AZ, for the path to a service and port.
    Edges {
        az: AzName,
        service: ServiceId,
        port: u16,
    },
}

/// An open query; dropping the guard withdraws it.
pub(crate) struct QueryGuard<'a> {
    queries: &'a SessionQueries,
    id: u64,
}

impl Drop for QueryGuard<'_> {
    fn drop(&mut self) {
        self.queries.lock().open.remove(&self.id);
    }
}

impl QueryGuard<'_> {
    /// Returns the answers of replicas so far.
    pub(crate) fn replica_answers(&self) -> BTreeMap<ReplicaName, Vec<FoundSession>> {
        self.queries
            .lock()
            .open
            .get(&self.id)
            .map(|open| open.replicas.clone())
            .unwrap_or_default()
    }

    /// Returns the answers of edges so far.
    pub(crate) fn paths(&self) -> BTreeMap<EdgeName, SessionPath> {
        self.queries
            .lock()
            .open
            .get(&self.id)
            .map(|open| open.edges.clone())
            .unwrap_or_default()
    }
}

impl SessionQueries {
    fn lock(&self) -> MutexGuard<'_, QueryState> {
        // Every change leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a receiver of the number of answers, which changes with each of them.
    pub(crate) fn answers(&self) -> watch::Receiver<u64> {
        self.answers.subscribe()
    }

    /// Queries all replicas for the client's sessions. `None` if as many queries are open as may
    /// be.
    pub(crate) fn query_replicas(
        &self,
        tenant: &TenantName,
        client: SocketAddr,
    ) -> Option<QueryGuard<'_>> {
        self.open_query(tenant, client, QueryRecipients::Replicas)
    }

    /// Queries the edges of an AZ for the path on which they send a session. `None` if as many
    /// queries are open as may be.
    pub(crate) fn query_edges(
        &self,
        tenant: &TenantName,
        client: SocketAddr,
        az: AzName,
        of: (ServiceId, u16),
    ) -> Option<QueryGuard<'_>> {
        self.open_query(
            tenant,
            client,
            QueryRecipients::Edges {
                az,
                service: of.0,
                port: of.1,
            },
        )
    }

    fn open_query(
        &self,
        tenant: &TenantName,
        client: SocketAddr,
        recipients: QueryRecipients,
    ) -> Option<QueryGuard<'_>> {
        let mut state = self.lock();
        let of_tenant = state
            .open
            .values()
            .filter(|open| open.tenant == *tenant)
            .count();
        if state.open.len() >= SESSION_QUERIES_MAX || of_tenant >= TENANT_QUERIES_MAX {
            return None;
        }
        state.last += 1;
        let id = state.last;
        let open = PendingQuery {
            tenant: tenant.clone(),
            client,
            recipients,
            replicas: BTreeMap::new(),
            edges: BTreeMap::new(),
        };
        state.open.insert(id, open);
        Some(QueryGuard { queries: self, id })
    }

    /// Returns the open queries for the orders of replicas.
    pub(super) fn of_replicas(&self) -> Vec<SessionQuery> {
        let state = self.lock();
        let open = state
            .open
            .iter()
            .filter(|(_, open)| matches!(open.recipients, QueryRecipients::Replicas));
        open.map(|(id, open)| SessionQuery {
            id: *id,
            client: open.client.to_string(),
            service: 0,
            port: 0,
        })
        .collect()
    }

    /// Returns the open queries for the orders of edges of this AZ.
    pub(super) fn of_edges(&self, of: &AzName) -> Vec<SessionQuery> {
        let state = self.lock();
        let query = |(id, open): (&u64, &PendingQuery)| match &open.recipients {
            QueryRecipients::Edges { az, service, port } if az == of => Some(SessionQuery {
                id: *id,
                client: open.client.to_string(),
                service: service.get(),
                port: u32::from(*port),
            }),
            _ => None,
        };
        state.open.iter().filter_map(query).collect()
    }

    /// Records a replica's answers; those to queries for edges are ignored.
    pub(super) fn record_replica_answers(&self, name: &ReplicaName, found: &[FoundSessions]) {
        if found.is_empty() {
            return;
        }
        let mut state = self.lock();
        for answer in found {
            if let Some(open) = state
                .open
                .get_mut(&answer.query)
                .filter(|open| matches!(open.recipients, QueryRecipients::Replicas))
            {
                open.replicas.insert(name.clone(), answer.sessions.clone());
            }
        }
        drop(state);
        self.answers.send_modify(|n| *n += 1);
    }

    /// Records an edge's answers; those to queries for replicas are ignored.
    pub(super) fn record_edge_answers(&self, name: &EdgeName, paths: &[SessionPath]) {
        if paths.is_empty() {
            return;
        }
        let mut state = self.lock();
        for path in paths {
            if let Some(open) = state
                .open
                .get_mut(&path.query)
                .filter(|open| matches!(open.recipients, QueryRecipients::Edges { .. }))
            {
                open.edges.insert(name.clone(), path.clone());
            }
        }
        drop(state);
        self.answers.send_modify(|n| *n += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_its_share_of_open_queries_and_a_dropped_one_is_withdrawn() {
        let queries = SessionQueries::default();
        let (alpha, beta) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
        let client = "10.1.1.9:4000".parse().unwrap();
        let mut open: Vec<_> = (0..TENANT_QUERIES_MAX)
            .map(|_| queries.query_replicas(&alpha, client).unwrap())
            .collect();
        assert!(
            queries.query_replicas(&alpha, client).is_none()
                && queries.query_replicas(&beta, client).is_some()
        );
        open.pop();
        assert_eq!(queries.of_replicas().len(), TENANT_QUERIES_MAX - 1);
        let az: AzName = "az1".parse().unwrap();
        let edges = queries
            .query_edges(&alpha, client, az.clone(), (ServiceId::new(7).unwrap(), 80))
            .unwrap();
        // Only the edges of the AZ that has the session are queried.
        let sent = queries.of_edges(&az);
        assert_eq!((sent.len(), sent[0].service, sent[0].port), (1, 7, 80));
        assert!(queries.of_edges(&"az2".parse().unwrap()).is_empty());
        queries.record_edge_answers(
            &"e1".parse().unwrap(),
            &[SessionPath {
                query: sent[0].id,
                bucket: 3,
                ..SessionPath::default()
            }],
        );
        assert_eq!(
            edges
                .paths()
                .values()
                .map(|path| path.bucket)
                .collect::<Vec<_>>(),
            [3]
        );
        queries.record_replica_answers(
            &"gw-1".parse().unwrap(),
            &[FoundSessions {
                query: sent[0].id,
                sessions: vec![FoundSession::default()],
            }],
        );
        assert!(
            edges.replica_answers().is_empty(),
            "a replica's answer to a query for edges is ignored"
        );
    }
}
