//! Fake replicas and edges: they subscribe and report as data planes do, and the tests read what
//! they hold.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use canal_model::program::{BucketTable, GatewayAddress, Resource, ResourceKind};
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{
    EdgeReportRequest, EdgeReportResponse, ReplicaProbe, ReplicaReportRequest,
    ReplicaReportResponse, ServiceOwnership,
};
use tonic::Status;
use tonic::transport::Channel;

use crate::fixture::{ControllerFixture, ManualSubscriber, Operator, wait_limit, with_token};

/// A fake replica: it subscribes and reports as a data plane does.
pub(super) struct FakeReplica {
    pub(super) token: &'static str,
    pub(super) client: FleetClient<Channel>,
    pub(super) subscriber: ManualSubscriber,
    pub(super) state: ReplicaReportRequest,
}

impl FakeReplica {
    pub(super) async fn launch(
        fixture: &ControllerFixture,
        token: &'static str,
        backend: &str,
        az: &str,
        underlay: &str,
    ) -> Self {
        let client = FleetClient::new(fixture.channel().await);
        let state = ReplicaReportRequest {
            backend: backend.into(),
            az: az.into(),
            underlay: underlay.into(),
            ..ReplicaReportRequest::default()
        };
        Self {
            token,
            client,
            subscriber: fixture.subscribe(token).await,
            state,
        }
    }

    pub(super) async fn report(&mut self) -> Result<ReplicaReportResponse, Status> {
        self.state.generation = self.subscriber.content;
        let answer = self
            .client
            .replica_report(with_token(self.state.clone(), self.token))
            .await
            .map(tonic::Response::into_inner);
        // What it will own is decided after this response.
        self.state.scanned_after = answer
            .as_ref()
            .ok()
            .and_then(|answer| answer.mark)
            .or(self.state.scanned_after);
        answer
    }

    /// Reconnects after a restart of the controller, with the resources that it holds.
    pub(super) async fn reconnect(&mut self, fixture: &ControllerFixture) {
        let (held, content) = (self.subscriber.resources.clone(), self.subscriber.content);
        self.client = FleetClient::new(fixture.channel().await);
        self.subscriber = ManualSubscriber::open(fixture.channel().await, self.token, held).await;
        self.subscriber.content = content;
    }

    /// Takes and acknowledges what comes, and reports.
    pub(super) async fn sync_and_report(&mut self) -> ReplicaReportResponse {
        self.subscriber.drain(Duration::from_millis(10)).await;
        self.report().await.unwrap()
    }
}

/// A fake edge: it subscribes and reports as a data plane does.
pub(super) struct FakeEdge {
    pub(super) token: &'static str,
    pub(super) client: FleetClient<Channel>,
    pub(super) subscriber: ManualSubscriber,
    pub(super) state: EdgeReportRequest,
}

impl FakeEdge {
    pub(super) async fn launch(
        fixture: &ControllerFixture,
        token: &'static str,
        az: &str,
        underlay: &str,
    ) -> Self {
        let client = FleetClient::new(fixture.channel().await);
        let state = EdgeReportRequest {
            az: az.into(),
            underlay: underlay.into(),
            ..EdgeReportRequest::default()
        };
        Self {
            token,
            client,
            subscriber: fixture.subscribe(token).await,
            state,
        }
    }

    pub(super) fn sees(&mut self, seen: &[(&str, bool)]) {
        self.state.seen = seen
            .iter()
            .map(|(replica, up)| ReplicaProbe {
                replica: replica.to_string(),
                up: *up,
            })
            .collect();
    }

    pub(super) async fn report(&mut self) -> Result<EdgeReportResponse, Status> {
        self.state.generation = self.subscriber.generation;
        self.client
            .edge_report(with_token(self.state.clone(), self.token))
            .await
            .map(tonic::Response::into_inner)
    }

    pub(super) async fn sync_and_report(&mut self) -> EdgeReportResponse {
        self.subscriber.drain(Duration::from_millis(10)).await;
        self.report().await.unwrap()
    }
}

pub(super) fn tables(subscriber: &ManualSubscriber) -> BTreeMap<String, BucketTable> {
    let of = |(key, (_, resource)): (&(ResourceKind, String), &(String, Resource))| match resource {
        Resource::Table(t) => Some((key.1.clone(), t.clone())),
        _ => None,
    };
    subscriber.resources.iter().filter_map(of).collect()
}

pub(super) fn addresses(subscriber: &ManualSubscriber) -> BTreeMap<String, GatewayAddress> {
    let of = |(key, (_, resource)): (&(ResourceKind, String), &(String, Resource))| match resource {
        Resource::Address(a) => Some((key.1.clone(), a.clone())),
        _ => None,
    };
    subscriber.resources.iter().filter_map(of).collect()
}

pub(super) fn heads(table: &BucketTable) -> BTreeSet<u16> {
    table
        .chains
        .iter()
        .filter_map(|c| c.first())
        .map(|n| n.get())
        .collect()
}

/// Lets all replicas and edges take responses and report until `done` holds.
pub(super) async fn report_until(
    replicas: &mut [&mut FakeReplica],
    edges: &mut [&mut FakeEdge],
    what: &str,
    done: impl Fn(&[&mut FakeReplica], &[&mut FakeEdge]) -> bool,
) {
    let until = Instant::now() + wait_limit();
    while !done(replicas, edges) {
        assert!(Instant::now() < until, "{what} did not come to be");
        for replica in replicas.iter_mut() {
            replica.sync_and_report().await;
        }
        for edge in edges.iter_mut() {
            edge.sync_and_report().await;
        }
    }
}

/// Lets all replicas and edges report until nothing is in motion.
pub(super) async fn wait_quiet(
    replicas: &mut [&mut FakeReplica],
    edges: &mut [&mut FakeEdge],
    root: &mut Operator,
) {
    let until = Instant::now() + wait_limit();
    let mut quiet = 0;
    while quiet < 3 {
        assert!(
            Instant::now() < until,
            "the fleet does not come to rest: {:?}",
            root.fleet().await
        );
        for replica in replicas.iter_mut() {
            replica.sync_and_report().await;
        }
        for edge in edges.iter_mut() {
            edge.sync_and_report().await;
        }
        let fleet = root.fleet().await.unwrap();
        assert_eq!(
            fleet.findings, [""; 0],
            "the linter agrees with the planner"
        );
        quiet = if fleet.tables_waiting == 0 && fleet.services.iter().all(|s| !s.migrating) {
            quiet + 1
        } else {
            0
        };
    }
}

/// Reports a session in every bucket of every service of which the replica has a table.
pub(super) fn owns_all(replica: &mut FakeReplica) {
    let own = tables(&replica.subscriber);
    replica.state.owned = own
        .values()
        .map(|t| ServiceOwnership {
            service: t.id.get(),
            table_version: t.version,
            buckets: vec![0xff; 16],
            sessions: 128,
        })
        .collect();
    replica.state.sessions = 128 * own.len() as u64;
}
