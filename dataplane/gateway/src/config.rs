//! How an engine is set up: addresses, limits, times. Values and their spelling only.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use canal_kit::sys::Sources;
use canal_model::ids::{AzName, ServiceKey};

/// A listener without TLS that is one service's: for benches, proxyless clients and tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plain {
    pub address: SocketAddr,
    pub service: ServiceKey,
    pub port: u16,
}

/// What makes an engine a replica of the cloud tier: it dials endpoints with the tenant's VNI as the socket's mark, and takes plain
/// connections to services' addresses inside the tier (`canal_wire::tier`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tier {
    /// Where plain connections are accepted; which service and port they are for is told by their local address alone, so that the
    /// kernel's redirector can send all of them to this one listener. Usually `[::]:15009`.
    pub plain: SocketAddr,
    /// Where endpoints are dialled from.
    pub sources: Sources,
}

/// A `--plain` value has not the form `ADDR:PORT=TENANT/NAMESPACE/SERVICE:PORT`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("plain listener {given:?}: {why}; write ADDRESS:PORT=TENANT/NAMESPACE/SERVICE:PORT, e.g. 127.0.0.1:8080=alpha/default/web:80")]
pub struct BadPlain {
    given: String,
    why: String,
}

impl FromStr for Plain {
    type Err = BadPlain;
    fn from_str(s: &str) -> Result<Self, BadPlain> {
        let bad = |why: String| BadPlain { given: s.into(), why };
        let (address, target) = s.split_once('=').ok_or_else(|| bad("there is no '='".into()))?;
        let (service, port) = target.rsplit_once(':').ok_or_else(|| bad("the service has no port".into()))?;
        Ok(Self {
            address: address.parse().map_err(|e| bad(format!("{address}: {e}")))?,
            service: service.parse().map_err(|e| bad(format!("{e}")))?,
            port: port.parse().ok().filter(|p| *p > 0).ok_or_else(|| bad(format!("port {port:?} is not 1 to 65535")))?,
        })
    }
}

/// What a test program does at each request, by its path.
pub type RequestHook = fn(&[u8]);

/// What applications are told of clients, beside `x-forwarded-for`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ForwardedHeaders {
    /// `x-forwarded-client-cert` names the client's verified identity. A client's own copy is removed either way.
    pub client_cert: bool,
    /// A client's own `x-forwarded-proto` reaches the application: for tenants whose ingress is a pod.
    pub keeps_proto: bool,
}

/// An engine's settings. `Default` listens nowhere.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// This replica's name; `Gateway` resources of that name say which addresses are whose.
    pub replica: String,
    /// Endpoints of the same AZ are preferred if set.
    pub az: Option<AzName>,
    /// 0: one per core.
    pub workers: usize,
    /// Pin workers to cores.
    pub pin: bool,
    /// Where HBONE is accepted; usually `[::]:15008`.
    pub hbone: Vec<SocketAddr>,
    pub plain: Vec<Plain>,
    /// `None`: not a replica of the cloud tier.
    pub tier: Option<Tier>,
    /// A test program's own code, called with the path of every request before it is routed. The shipped gateway has none.
    pub request_hook: Option<RequestHook>,
    pub forwarded: ForwardedHeaders,
    pub limits: Limits,
    pub times: Times,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            replica: String::new(),
            az: None,
            workers: 0,
            pin: true,
            hbone: Vec::new(),
            plain: Vec::new(),
            tier: None,
            request_hook: None,
            forwarded: ForwardedHeaders::default(),
            limits: Limits::default(),
            times: Times::default(),
        }
    }
}

/// Limits, each with a name in `canal_limit_*` or in a counter. Process-wide ones are split evenly over the workers.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Accepted TCP connections of the process. Above: closed at once.
    pub connections: u64,
    /// Accepted connections, and tunnels, of one tenant that the provider wrote no share for. Above: closed at accept; 503 to CONNECT.
    pub tenant_connections: u64,
    /// Accepted connections of the process that have neither proved an identity nor sent a whole request head. Above: the oldest of the
    /// tenant that has the most of them is closed.
    pub unauthenticated: u64,
    /// TLS handshakes under way in the process. Above: closed.
    pub handshakes: u64,
    /// Requests in flight in the process. Above: 503.
    pub requests: u64,
    /// Requests in flight of one tenant that the provider wrote no share for. Above: 429.
    pub tenant_requests: u64,
    /// Bytes that peers may have sent into HTTP/2 and HBONE windows beyond the first of each connection, in the process. Above: windows do
    /// not grow.
    pub buffer_bytes: u64,
    /// Bytes of request bodies that the process holds for external authorizers. Above: 503, and 429 for a tenant above its share.
    pub body_bytes: u64,
    /// HTTP/2 streams on one connection from a client.
    pub streams: u32,
    /// Bytes of a head, both versions. Above: 431.
    pub head_bytes: u32,
    /// Kept HTTP/1.1 connections per endpoint and worker; more are closed.
    pub idle_per_endpoint: usize,
    /// HTTP/2 connections per endpoint and worker.
    pub http2_per_endpoint: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 100_000,
            tenant_connections: 50_000,
            unauthenticated: 20_000,
            handshakes: 8_192,
            requests: 50_000,
            tenant_requests: 20_000,
            buffer_bytes: 1 << 30,
            body_bytes: 256 << 20,
            streams: 250,
            head_bytes: canal_h1::HEAD_BYTES_CAP as u32,
            idle_per_endpoint: 256,
            http2_per_endpoint: 4,
        }
    }
}

/// Files that a process opens beside its clients' connections and those to endpoints: listeners, maps, logs, the controller.
const FILES_BESIDE: u64 = 1024;

impl Limits {
    /// Open files that all connections need: each client's, and one to an endpoint for it.
    pub fn files(&self) -> u64 {
        self.connections.saturating_mul(2).saturating_add(FILES_BESIDE)
    }

    /// The limits that `files` open files are enough for. A connection that is refused is counted; one without a file waits in the kernel
    /// and knows nothing. What is counted in connections shrinks with them, so that a tenant's share of few stays a share.
    pub fn within(self, files: u64) -> Self {
        let connections = self.connections.min(files.saturating_sub(FILES_BESIDE) / 2);
        let scaled = |limit: u64| match u128::from(limit) * u128::from(connections) / u128::from(self.connections.max(1)) {
            // A limit of nothing would shut everybody out for good.
            0 => limit.min(1),
            part => u64::try_from(part).unwrap_or(limit),
        };
        Self {
            connections,
            tenant_connections: scaled(self.tenant_connections),
            unauthenticated: scaled(self.unauthenticated),
            handshakes: scaled(self.handshakes),
            requests: scaled(self.requests),
            tenant_requests: scaled(self.tenant_requests),
            ..self
        }
    }
}

/// How long things may take. Each has a name in `canal_gateway_timeouts_total`.
#[derive(Debug, Clone)]
pub struct Times {
    /// A request's head, from its first byte (or from the accept) to its last.
    pub head: Duration,
    /// No request on a kept connection.
    pub idle: Duration,
    /// No byte from or to the client within a message.
    pub client: Duration,
    /// The beginning of a body that an authorizer is shown, from the head's end. A third of it before the first byte.
    pub shown_body: Duration,
    /// No byte from or to the upstream within an exchange; the wait for the answer too.
    pub upstream: Duration,
    /// No byte either way on a TCP relay or an upgraded connection.
    pub relay: Duration,
    /// How long a port of unknown protocol waits for the client's first byte before it counts as server-first.
    pub sniff: Duration,
    /// A kept connection to an endpoint is closed after.
    pub upstream_idle: Duration,
    /// When draining, a connection without a request is closed after.
    pub drain_idle: Duration,
    /// The last answer may take so long to be read by a client that is being refused.
    pub linger: Duration,
    /// An endpoint that could not be connected is left out for so long; doubled at each further failure up to 16 times that.
    pub ejection: Duration,
}

impl Default for Times {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self {
            head: s(10),
            idle: s(60),
            client: s(60),
            shown_body: s(15),
            upstream: s(300),
            relay: s(3600),
            sniff: Duration::from_millis(100),
            upstream_idle: s(60),
            drain_idle: s(2),
            linger: s(2),
            ejection: s(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_as_many_as_there_are_files_for() {
        let limits = Limits { connections: 10_000, ..Limits::default() };
        assert_eq!(limits.files(), 21_024);
        for (files, want) in [(u64::MAX, 10_000), (21_024, 10_000), (21_023, 9_999), (20_000, 9_488), (1_024, 0), (10, 0)] {
            assert_eq!(limits.clone().within(files).connections, want, "{files}");
        }
    }

    #[test]
    fn limits_in_connections_shrink_with_the_files() {
        let all =
            Limits { connections: 100_000, tenant_connections: 50_000, unauthenticated: 20_000, handshakes: 8_192, ..Limits::default() };
        let few = all.clone().within(20_000);
        assert_eq!((few.connections, few.tenant_connections, few.unauthenticated, few.handshakes), (9_488, 4_744, 1_897, 777));
        assert_eq!((few.requests, few.tenant_requests), (4_744, 1_897));
        assert_eq!(all.clone().within(u64::MAX).tenant_connections, 50_000);
        assert_eq!((all.clone().within(0).connections, all.within(0).handshakes), (0, 1));
    }

    #[test]
    fn plain_listeners_are_read_or_refused_with_the_reason() {
        let plain: Plain = "127.0.0.1:8080=alpha/default/web:80".parse().unwrap();
        assert_eq!((plain.address.port(), plain.service.to_string().as_str(), plain.port), (8080, "alpha/default/web", 80));
        assert!("[::1]:8080=alpha/default/web:80".parse::<Plain>().is_ok());
        for (bad, why) in [
            ("127.0.0.1:8080", "no '='"),
            ("8080=alpha/default/web:80", "8080: "),
            ("127.0.0.1:8080=alpha/web:80", "tenant/namespace/name"),
            ("127.0.0.1:8080=alpha/default/web", "no port"),
            ("127.0.0.1:8080=alpha/default/web:0", "not 1 to 65535"),
        ] {
            let error = bad.parse::<Plain>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("write ADDRESS"), "{bad}: {error}");
        }
    }
}
