//! Finds one client's sessions for an operator. First the replicas report whether they have
//! sessions of the client. Then the edges of those replicas' AZs report the path on which they send
//! them. Everything is the data planes' state at that moment; only names come from the plan. Start
//! at [`find_sessions`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use canal_model::ids::{AzName, EdgeName, ReplicaName, ServiceId, TenantName};
use canal_wire::api;
use canal_wire::fleet::{FoundSession, SessionPath};
use canal_wire::tier::bucket;
use tokio::time::Instant;
use tonic::Status;

use crate::handle::FleetHandle;

/// Time to wait for replicas. They report at least once a second, and send the answer with one more
/// report.
/// These are two seconds at most, so replicas have twice the time that they need.
const REPLICAS_TIMEOUT: Duration = Duration::from_secs(4);
/// Time to wait for edges, which report five times a second.
/// An edge sends ten reports meanwhile, of which one suffices.
const EDGES_TIMEOUT: Duration = Duration::from_secs(2);
/// Time to wait for edges in all, after which sessions are shown without the paths of silent edges.
/// The command line waits 60 s for the answer, and the paths of each session are queried one after
/// the other. Nobody measured this value.
const ALL_EDGES_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of sessions of one client that are shown; the rest is left out. Nobody measured
/// this value.
const SHOWN_MAX: usize = 64;

/// A session of the tenant on one replica.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Owned {
    service: ServiceId,
    port: u16,
    replica: ReplicaName,
}

/// Names of the fleet's members and of the tenant's services, by what the answers contain.
struct FleetNames {
    /// Replicas that are up, with their AZs.
    replicas: BTreeMap<ReplicaName, AzName>,
    edges: BTreeMap<AzName, BTreeSet<EdgeName>>,
    numbers: BTreeMap<u32, ReplicaName>,
    /// Names of the tenant's services by ID.
    services: BTreeMap<ServiceId, String>,
}

impl FleetNames {
    fn of(fleet: &FleetHandle, tenant: &TenantName) -> Self {
        let plan = fleet.plan();
        let own = plan
            .services
            .iter()
            .filter(|(_, service)| service.key.tenant == *tenant);
        let services = own
            .map(|(id, service)| (*id, service.key.to_string()))
            .collect();
        let membership = fleet.membership();
        let reachable = membership
            .members()
            .values()
            .filter(|member| !member.gone && member.up);
        let replicas = reachable
            .map(|member| (member.row.name.clone(), member.row.az.clone()))
            .collect();
        let numbers = membership
            .members()
            .values()
            .map(|member| (u32::from(member.row.number.get()), member.row.name.clone()))
            .collect();
        let mut edges: BTreeMap<AzName, BTreeSet<EdgeName>> = BTreeMap::new();
        for edge in membership.edges().values().filter(|edge| edge.alive) {
            edges
                .entry(edge.row.az.clone())
                .or_default()
                .insert(edge.row.name.clone());
        }
        Self {
            replicas,
            edges,
            numbers,
            services,
        }
    }

    fn replica(&self, number: u32) -> String {
        self.numbers
            .get(&number)
            .map_or_else(|| format!("#{number}"), ToString::to_string)
    }
}

/// Finds the sessions of a tenant's client.
///
/// # Errors
/// `INVALID_ARGUMENT` if `client` is not an address with a port. `RESOURCE_EXHAUSTED` if too many
/// session queries are open.
pub async fn find_sessions(
    fleet: &FleetHandle,
    tenant: &TenantName,
    client: &str,
) -> Result<api::SessionsResponse, Status> {
    let client = parse_client(client)?;
    let names = FleetNames::of(fleet, tenant);
    let queries = &fleet.queries;
    let queried = queries
        .query_replicas(tenant, client)
        .ok_or_else(too_many)?;
    wait(fleet, REPLICAS_TIMEOUT, || {
        names
            .replicas
            .keys()
            .all(|name| queried.replica_answers().contains_key(name))
    })
    .await;
    let found = queried.replica_answers();
    // An open query goes out with every report and takes one of the tenant's slots, so it is
    // withdrawn before the edges are queried.
    drop(queried);
    let silent = names
        .replicas
        .keys()
        .filter(|name| !found.contains_key(*name))
        .map(ToString::to_string)
        .collect();
    let mut sessions = Vec::new();
    let until = Instant::now() + ALL_EDGES_TIMEOUT;
    for owned in decide_owned(&found, &names.services)
        .into_iter()
        .take(SHOWN_MAX)
    {
        // The replica may have left the fleet since it answered.
        let Some(az) = names.replicas.get(&owned.replica).cloned() else {
            continue;
        };
        let queried = queries
            .query_edges(tenant, client, az.clone(), (owned.service, owned.port))
            .ok_or_else(too_many)?;
        // An AZ whose edges do not report is shown without paths, and is not waited for.
        let edges = names.edges.get(&az).cloned().unwrap_or_default();
        let left = until.saturating_duration_since(Instant::now());
        wait(fleet, left.min(EDGES_TIMEOUT), || {
            edges.iter().all(|name| queried.paths().contains_key(name))
        })
        .await;
        sessions.push(api::ClientSession {
            // `decide_owned` returned only services that have a name.
            service: names
                .services
                .get(&owned.service)
                .cloned()
                .unwrap_or_default(),
            port: owned.port.into(),
            bucket: bucket(client, owned.port, owned.service) as u32,
            az: az.to_string(),
            owner: owned.replica.to_string(),
            paths: queried
                .paths()
                .iter()
                .map(|(edge, path)| edge_path(edge, path, &names))
                .collect(),
        });
    }
    Ok(api::SessionsResponse { sessions, silent })
}

fn parse_client(text: &str) -> Result<SocketAddr, Status> {
    let client: SocketAddr = text.parse().map_err(|_| {
        // The operator chose this text; the error stays one line.
        let text: String = text.chars().take(80).collect();
        Status::invalid_argument(format!(
            "{text:?} is not a client address; fix: write ADDRESS:PORT, with an IPv6 address in brackets"
        ))
    })?;
    Ok(SocketAddr::new(client.ip().to_canonical(), client.port()))
}

fn too_many() -> Status {
    Status::resource_exhausted(
        "the maximum number of session queries is open; fix: retry in some seconds",
    )
}

/// Waits until `is_done` returns true, or the time is over.
async fn wait(fleet: &FleetHandle, limit: Duration, mut is_done: impl FnMut() -> bool) {
    let mut answers = fleet.queries.answers();
    let until = Instant::now() + limit;
    while !is_done() {
        if tokio::time::timeout_at(until, answers.changed())
            .await
            .is_err()
        {
            return;
        }
    }
}

/// Selects the tenant's sessions from those that replicas found: another tenant's client may have
/// the same address.
fn decide_owned(
    found: &BTreeMap<ReplicaName, Vec<FoundSession>>,
    services: &BTreeMap<ServiceId, String>,
) -> BTreeSet<Owned> {
    let of = |replica: &ReplicaName, session: &FoundSession| {
        let service = ServiceId::new(session.service)
            .ok()
            .filter(|service| services.contains_key(service))?;
        Some(Owned {
            service,
            port: u16::try_from(session.port).ok()?,
            replica: replica.clone(),
        })
    };
    found
        .iter()
        .flat_map(|(replica, sessions)| {
            sessions
                .iter()
                .filter_map(move |session| of(replica, session))
        })
        .collect()
}

fn edge_path(edge: &EdgeName, path: &SessionPath, names: &FleetNames) -> api::EdgePath {
    api::EdgePath {
        edge: edge.to_string(),
        table_version: path.table_version,
        chain: path
            .chain
            .iter()
            .map(|number| names.replica(*number))
            .collect(),
        replica: if path.replica == 0 {
            String::new()
        } else {
            names.replica(path.replica)
        },
        tunnel_port: path.tunnel_port,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_other_tenants_with_the_same_client_are_left_out() {
        let services = BTreeMap::from([(ServiceId::new(7).unwrap(), "alpha/shop/web".to_string())]);
        let session = |service, port| FoundSession { service, port };
        let found = BTreeMap::from([
            (
                "gw-1".parse().unwrap(),
                vec![
                    session(7, 80),
                    session(8, 80),
                    session(0, 80),
                    session(7, 70_000),
                ],
            ),
            ("gw-2".parse().unwrap(), vec![session(8, 443)]),
        ]);
        let owned: Vec<_> = decide_owned(&found, &services)
            .into_iter()
            .map(|o| (o.service.get(), o.port, o.replica.to_string()))
            .collect();
        assert_eq!(owned, [(7, 80, "gw-1".to_string())]);
    }

    #[test]
    fn a_client_is_an_address_and_a_port() {
        assert_eq!(
            parse_client("[::ffff:10.1.1.9]:4000").unwrap(),
            "10.1.1.9:4000".parse().unwrap()
        );
        for wrong in ["10.1.1.9", "fd00::9:4000", "web:80", ""] {
            assert!(
                parse_client(wrong)
                    .unwrap_err()
                    .message()
                    .contains("ADDRESS:PORT"),
                "{wrong}"
            );
        }
    }
}
