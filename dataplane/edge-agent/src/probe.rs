//! Probes every replica of the edge's AZ five times per second. [`crate::health`] decides what the
//! results mean.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::health::{ProbeResult, ReplicaHealth, decide_health};
use crate::map_reconciler::ProbeTarget;

/// Port, interval and timeout of probes.
#[derive(Debug, Clone, Copy)]
pub struct ProbeConfig {
    pub port: u16,
    pub pause: Duration,
    pub timeout: Duration,
}

/// The outcome of a probe, also the label `result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeOutcome {
    Ready,
    /// The answer is 503 and its body begins with `draining`.
    Draining,
    /// The answer is 503 and its body begins with `worker_stuck`: the process answers, but a part
    /// of its data path is stuck.
    Stuck,
    /// The replica gave any other answer.
    Unready,
    /// The connection was refused.
    Refused,
    Timeout,
    /// The connection failed for any other reason.
    Failed,
    /// The prober was not scheduled in time, so the replica may have answered.
    Late,
}

impl ProbeOutcome {
    /// Returns the value of the label `result`.
    pub fn name(self) -> &'static str {
        match self {
            ProbeOutcome::Ready => "ready",
            ProbeOutcome::Draining => "draining",
            ProbeOutcome::Stuck => "stuck",
            ProbeOutcome::Unready => "unready",
            ProbeOutcome::Refused => "refused",
            ProbeOutcome::Timeout => "timeout",
            ProbeOutcome::Failed => "failed",
            ProbeOutcome::Late => "late",
        }
    }

    /// Returns the meaning of the outcome for the replica's health.
    pub fn on_probe(self) -> ProbeResult {
        match self {
            ProbeOutcome::Ready | ProbeOutcome::Draining => ProbeResult::Alive,
            ProbeOutcome::Unready => ProbeResult::Unready,
            ProbeOutcome::Stuck
            | ProbeOutcome::Refused
            | ProbeOutcome::Timeout
            | ProbeOutcome::Failed => ProbeResult::Nothing,
            ProbeOutcome::Late => ProbeResult::Void,
        }
    }
}

/// Returns the outcome of a probe that was answered.
pub fn decide_outcome(status: u16, body: &[u8]) -> ProbeOutcome {
    match status {
        200 => ProbeOutcome::Ready,
        503 if body.starts_with(b"draining") => ProbeOutcome::Draining,
        503 if body.starts_with(b"worker_stuck") => ProbeOutcome::Stuck,
        _ => ProbeOutcome::Unready,
    }
}

/// Receives the outcome of every probe.
pub trait ProbeListener: Clone + Send + 'static {
    /// Called after each probe with the new state if it changed. It runs on the prober's own
    /// thread, so it should take microseconds.
    fn on_probe(&self, target: &ProbeTarget, outcome: ProbeOutcome, changed: Option<bool>);
}

/// Runs a probe task for each replica.
pub struct Prober<E> {
    rhythm: ProbeConfig,
    on_result: E,
    tasks: BTreeMap<ProbeTarget, JoinHandle<()>>,
}

impl<E: ProbeListener> Prober<E> {
    /// Creates a prober without targets.
    pub fn new(rhythm: ProbeConfig, ear: E) -> Self {
        Self {
            rhythm,
            on_result: ear,
            tasks: BTreeMap::new(),
        }
    }

    /// Sets the replicas to probe. Tasks of replicas that stay are not disturbed; a task that
    /// panicked is restarted. Tasks are spawned on the calling runtime.
    pub fn follow(&mut self, targets: &BTreeMap<ProbeTarget, bool>) {
        self.tasks.retain(|target, task| {
            let stays = targets.contains_key(target) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        for (target, up) in targets {
            if !self.tasks.contains_key(target) {
                let probing = probe(
                    self.rhythm,
                    target.clone(),
                    ReplicaHealth::new(*up),
                    self.on_result.clone(),
                );
                self.tasks.insert(target.clone(), tokio::spawn(probing));
            }
        }
    }
}

impl<E> Drop for Prober<E> {
    fn drop(&mut self) {
        self.tasks.values().for_each(JoinHandle::abort);
    }
}

async fn probe<E: ProbeListener>(
    rhythm: ProbeConfig,
    target: ProbeTarget,
    mut health: ReplicaHealth,
    ear: E,
) {
    // A random start spreads the probes of an AZ over the interval.
    let jitter = rhythm.pause.mul_f64(rand::random::<f64>());
    let mut ticks = tokio::time::interval_at(Instant::now() + jitter, rhythm.pause);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut client = ProbeClient {
        address: SocketAddr::new(target.address.into(), rhythm.port),
        idle_connection: None,
    };
    loop {
        ticks.tick().await;
        let outcome = probe_once(&mut client, rhythm.timeout).await;
        let before = health.up;
        health = decide_health(health, outcome.on_probe());
        ear.on_probe(&target, outcome, (health.up != before).then_some(health.up));
    }
}

async fn probe_once(client: &mut ProbeClient, timeout: Duration) -> ProbeOutcome {
    let start = std::time::Instant::now();
    match tokio::time::timeout(timeout, client.send_probe()).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(ProbeError::Refused)) => ProbeOutcome::Refused,
        Ok(Err(ProbeError::Other)) => ProbeOutcome::Failed,
        Err(_) => {
            client.idle_connection = None;
            // A machine that woke this thread so late may also have delayed the answer.
            if start.elapsed() > timeout + timeout / 2 {
                ProbeOutcome::Late
            } else {
                ProbeOutcome::Timeout
            }
        }
    }
}

/// HTTP client for one replica's readiness endpoint, with one idle connection.
struct ProbeClient {
    address: SocketAddr,
    idle_connection: Option<SendRequest<Empty<Bytes>>>,
}

enum ProbeError {
    Refused,
    Other,
}

impl From<hyper::Error> for ProbeError {
    fn from(_: hyper::Error) -> Self {
        ProbeError::Other
    }
}

/// Bytes of a response body, at most. A connection with a longer body is not reused. A gateway's
/// readiness answer names what is missing, which is far shorter; the limit is for another program
/// that answers at the port.
const BODY_BYTES_MAX: usize = 4 << 10;

impl ProbeClient {
    async fn send_probe(&mut self) -> Result<ProbeOutcome, ProbeError> {
        if let Some(idle) = self.idle_connection.take()
            // The replica may have closed an idle connection normally, so only a failure on a new
            // connection counts.
            && let Ok(outcome) = self.send_probe_on(idle).await
        {
            return Ok(outcome);
        }
        let tcp = TcpStream::connect(self.address)
            .await
            .map_err(|e| match e.kind() {
                std::io::ErrorKind::ConnectionRefused => ProbeError::Refused,
                _ => ProbeError::Other,
            })?;
        let (send, connection) = handshake(TokioIo::new(tcp)).await?;
        // This task ends when `send` is dropped.
        tokio::spawn(connection);
        self.send_probe_on(send).await
    }

    async fn send_probe_on(
        &mut self,
        mut send: SendRequest<Empty<Bytes>>,
    ) -> Result<ProbeOutcome, ProbeError> {
        send.ready().await?;
        let request = http::Request::get("/healthz/ready")
            .header(http::header::HOST, self.address.to_string());
        // The path is valid and an address is a valid header value.
        let request = request.body(Empty::new()).map_err(|_| ProbeError::Other)?;
        let answer = send.send_request(request).await?;
        let status = answer.status().as_u16();
        let (body, whole) = read(answer.into_body()).await?;
        if whole {
            self.idle_connection = Some(send);
        }
        Ok(decide_outcome(status, &body))
    }
}

async fn read(mut body: Incoming) -> Result<(Vec<u8>, bool), ProbeError> {
    let mut all = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            all.extend_from_slice(&data);
        }
        if all.len() > BODY_BYTES_MAX {
            return Ok((all, false));
        }
    }
    Ok((all, true))
}

#[cfg(test)]
mod tests;
