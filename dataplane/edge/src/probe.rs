//! Asks every replica of the edge's AZ whether it is there, five times a second. What answers mean is decided in [`crate::health`].

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

use crate::health::{Health, Heard, decide_health};
use crate::keeper::Target;

/// Where and how often.
#[derive(Debug, Clone, Copy)]
pub struct Rhythm {
    pub port: u16,
    pub pause: Duration,
    pub timeout: Duration,
}

/// How a probe ended; the label `result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Ready,
    /// 503 whose body begins with `draining`.
    Draining,
    /// 503 whose body begins with `worker_stuck`: the process answers, and a part of its data path does not.
    Stuck,
    /// Any other answer.
    Unready,
    /// The connection was refused.
    Refused,
    Timeout,
    /// Any other failure of the connection.
    Failed,
    /// The prober was not scheduled in time: the replica may have answered.
    Late,
}

impl Outcome {
    /// The label.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Ready => "ready",
            Outcome::Draining => "draining",
            Outcome::Stuck => "stuck",
            Outcome::Unready => "unready",
            Outcome::Refused => "refused",
            Outcome::Timeout => "timeout",
            Outcome::Failed => "failed",
            Outcome::Late => "late",
        }
    }

    /// What it says about the replica.
    pub fn heard(self) -> Heard {
        match self {
            Outcome::Ready | Outcome::Draining => Heard::Alive,
            Outcome::Unready => Heard::Unready,
            Outcome::Stuck | Outcome::Refused | Outcome::Timeout | Outcome::Failed => Heard::Nothing,
            Outcome::Late => Heard::Void,
        }
    }
}

/// An answer's meaning.
pub fn decide_outcome(status: u16, body: &[u8]) -> Outcome {
    match status {
        200 => Outcome::Ready,
        503 if body.starts_with(b"draining") => Outcome::Draining,
        503 if body.starts_with(b"worker_stuck") => Outcome::Stuck,
        _ => Outcome::Unready,
    }
}

/// Told of every probe: the target, its outcome, and the health if it changed.
pub trait Ear: Clone + Send + 'static {
    /// After each probe; on the prober's own thread, so it should take microseconds.
    fn heard(&self, target: &Target, outcome: Outcome, changed: Option<bool>);
}

/// The replicas being probed.
pub struct Prober<E> {
    rhythm: Rhythm,
    ear: E,
    tasks: BTreeMap<Target, JoinHandle<()>>,
}

impl<E: Ear> Prober<E> {
    /// Nobody yet.
    pub fn new(rhythm: Rhythm, ear: E) -> Self {
        Self { rhythm, ear, tasks: BTreeMap::new() }
    }

    /// Probes these from now on; those probed already go on undisturbed, those whose task panicked begin again. Runs tasks on the calling
    /// runtime.
    pub fn follow(&mut self, targets: &BTreeMap<Target, bool>) {
        self.tasks.retain(|target, task| {
            let stays = targets.contains_key(target) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        for (target, up) in targets {
            if !self.tasks.contains_key(target) {
                let probing = probe(self.rhythm, target.clone(), Health::new(*up), self.ear.clone());
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

async fn probe<E: Ear>(rhythm: Rhythm, target: Target, mut health: Health, ear: E) {
    // Spread, so that an AZ's probes are no bursts.
    let jitter = rhythm.pause.mul_f64(rand::random::<f64>());
    let mut ticks = tokio::time::interval_at(Instant::now() + jitter, rhythm.pause);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut client = Client { address: SocketAddr::new(target.address.into(), rhythm.port), kept: None };
    loop {
        ticks.tick().await;
        let outcome = ask(&mut client, rhythm.timeout).await;
        let before = health.up;
        health = decide_health(health, outcome.heard());
        ear.heard(&target, outcome, (health.up != before).then_some(health.up));
    }
}

async fn ask(client: &mut Client, timeout: Duration) -> Outcome {
    let start = std::time::Instant::now();
    match tokio::time::timeout(timeout, client.ask()).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(Failure::Refused)) => Outcome::Refused,
        Ok(Err(Failure::Other)) => Outcome::Failed,
        Err(_) => {
            client.kept = None;
            // A machine that woke this thread so late may have kept the answer from it as well.
            if start.elapsed() > timeout + timeout / 2 { Outcome::Late } else { Outcome::Timeout }
        }
    }
}

/// A replica's readiness over one kept connection.
struct Client {
    address: SocketAddr,
    kept: Option<SendRequest<Empty<Bytes>>>,
}

enum Failure {
    Refused,
    Other,
}

impl From<hyper::Error> for Failure {
    fn from(_: hyper::Error) -> Self {
        Failure::Other
    }
}

/// More of a body is not read, and its connection not kept.
const BODY_BYTES_MAX: usize = 4 << 10;

impl Client {
    async fn ask(&mut self) -> Result<Outcome, Failure> {
        if let Some(kept) = self.kept.take()
            // A kept connection may have been closed in good order; only a new one's failure says something.
            && let Ok(outcome) = self.ask_on(kept).await
        {
            return Ok(outcome);
        }
        let tcp = TcpStream::connect(self.address).await.map_err(|e| match e.kind() {
            std::io::ErrorKind::ConnectionRefused => Failure::Refused,
            _ => Failure::Other,
        })?;
        let (send, connection) = handshake(TokioIo::new(tcp)).await?;
        // Ends when `send` is dropped.
        tokio::spawn(connection);
        self.ask_on(send).await
    }

    async fn ask_on(&mut self, mut send: SendRequest<Empty<Bytes>>) -> Result<Outcome, Failure> {
        send.ready().await?;
        let request = http::Request::get("/healthz/ready").header(http::header::HOST, self.address.to_string());
        // The path is right and an address is a right header value.
        let request = request.body(Empty::new()).map_err(|_| Failure::Other)?;
        let answer = send.send_request(request).await?;
        let status = answer.status().as_u16();
        let (body, whole) = read(answer.into_body()).await?;
        if whole {
            self.kept = Some(send);
        }
        Ok(decide_outcome(status, &body))
    }
}

async fn read(mut body: Incoming) -> Result<(Vec<u8>, bool), Failure> {
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
