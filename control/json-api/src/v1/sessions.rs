//! Views of a client's sessions and of the paths on which edges send them.

use canal_wire::api;
use serde::Serialize;

use super::objects::views;

/// The sessions of one client at the tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SessionListView {
    pub sessions: Vec<ClientSessionView>,
    /// Replicas that did not answer in time; they may have a session nevertheless.
    pub unanswered: Vec<String>,
}

impl From<&api::SessionsResponse> for SessionListView {
    fn from(found: &api::SessionsResponse) -> Self {
        Self {
            sessions: views(&found.sessions),
            unanswered: found.silent.clone(),
        }
    }
}

/// A session of the client with one service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClientSessionView {
    /// Name of the service, as `tenant/namespace/name`.
    pub service: String,
    pub port: u32,
    pub bucket: u32,
    pub az: String,
    /// Replica whose kernel has the session.
    pub owner: String,
    pub paths: Vec<EdgePathView>,
}

impl From<&api::ClientSession> for ClientSessionView {
    fn from(session: &api::ClientSession) -> Self {
        Self {
            service: session.service.clone(),
            port: session.port,
            bucket: session.bucket,
            az: session.az.clone(),
            owner: session.owner.clone(),
            paths: views(&session.paths),
        }
    }
}

/// The path of a session at one edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EdgePathView {
    pub edge: String,
    pub table_version: u32,
    /// Replicas of the bucket, the head first.
    pub chain: Vec<String>,
    /// Replica of the chain to which the edge sends; empty if none is up.
    pub replica: String,
    /// UDP source port of the tunnel; 0 means that each flow has its own.
    pub tunnel_port: u32,
}

impl From<&api::EdgePath> for EdgePathView {
    fn from(path: &api::EdgePath) -> Self {
        Self {
            edge: path.edge.clone(),
            table_version: path.table_version,
            chain: path.chain.clone(),
            replica: path.replica.clone(),
            tunnel_port: path.tunnel_port,
        }
    }
}
