//! The limits and timeouts of a gateway, with their defaults.
//!
//! Nothing is counted here. Start with [`GatewayLimits`].

use std::time::Duration;

/// Limits. Each has a name in `canal_limit_*` or in a counter. Limits of the process are divided
/// evenly among the workers.
#[derive(Debug, Clone)]
pub struct GatewayLimits {
    /// Accepted TCP connections of the process. Further ones are closed at once.
    pub connections: u64,
    /// Accepted connections, and also tunnels, of one tenant for which the provider set no share.
    /// Further connections are closed at accept; further CONNECTs get 503.
    pub tenant_connections: u64,
    /// Accepted connections of the process that have neither authenticated nor sent a complete
    /// request head. Beyond it, the oldest such connection of the tenant that has the most is
    /// closed.
    pub unauthenticated: u64,
    /// TLS handshakes in progress in the process. Further connections are closed.
    pub handshakes: u64,
    /// Requests in flight in the process. Further ones get 503.
    pub requests: u64,
    /// Requests in flight of one tenant for which the provider set no share. Further ones get 429.
    pub tenant_requests: u64,
    /// Bytes that streams of the process hold for readers that do not read. A tenant that needs
    /// more than its share loses the stream that has stalled for the longest time.
    pub buffer_bytes: u64,
    /// Bytes of request bodies that the process buffers for external authorizers. Beyond it,
    /// requests get 503, or 429 if the tenant exceeds its share.
    pub body_bytes: u64,
    /// HTTP/2 streams per client connection.
    pub streams: u32,
    /// Bytes of a request head in either HTTP version. Larger ones get 431.
    pub head_bytes: u32,
    /// Idle HTTP/1.1 connections per endpoint and worker. Further ones are closed.
    pub idle_per_endpoint: usize,
    /// HTTP/2 connections per endpoint and worker.
    pub http2_per_endpoint: usize,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        Self {
            // Each needs two files, one of them to an endpoint: 201,024 with `FILES_BESIDE`.
            connections: 100_000,
            // Half of all, so that one tenant leaves as many to the others.
            tenant_connections: 50_000,
            // A fifth of all: connections of clients that prove nothing displace no others.
            unauthenticated: 20_000,
            // Nobody measured this value; each takes at most the 10 s of a TLS handshake.
            handshakes: 8_192,
            // One for every second connection: the other half may be idle.
            requests: 50_000,
            // Below half of `requests`, so that two tenants cannot use all of it.
            tenant_requests: 20_000,
            // 16,384 streams that stall in their first window of 64 KiB.
            buffer_bytes: 1 << 30,
            // Each body counts twice, so 2,048 bodies of 64 KiB.
            body_bytes: 256 << 20,
            // RFC 9113 §6.5.2 recommends no less than 100. 250 windows of 256 KiB are 63 MiB that
            // one client can make a worker buffer.
            streams: 250,
            // The codec's tables store no longer head.
            head_bytes: canal_h1::HEAD_BYTES_CAP as u32,
            // Nobody measured this value. A request without an idle connection opens a new one.
            idle_per_endpoint: 256,
            // With `UPSTREAM_STREAMS_MAX` 1,000 requests to one endpoint at a time; more wait.
            http2_per_endpoint: 4,
        }
    }
}

/// Files that a process opens in addition to connections with clients and endpoints: listeners,
/// maps, logs, the controller. Nobody counted them all; each worker has some dozens.
const FILES_BESIDE: u64 = 1024;
/// Requests in flight for each copy of a request to a mirror. So copies use a tenth of the files
/// that requests may use.
const REQUESTS_PER_MIRRORED: u64 = 10;

impl GatewayLimits {
    /// Returns the most copies of requests that the process sends to mirrors at the same time. Their
    /// connections need files of those that [`GatewayLimits::files`] has for requests.
    pub fn mirrored_requests(&self) -> u64 {
        self.requests.div_ceil(REQUESTS_PER_MIRRORED)
    }

    /// Returns the open files that all connections need: one for each client, and one to an
    /// endpoint for it.
    pub fn files(&self) -> u64 {
        self.connections
            .saturating_mul(2)
            .saturating_add(FILES_BESIDE)
    }

    /// Reduces the limits to what `files` open files permit. A refused connection is counted; one
    /// without a file would wait unnoticed in the kernel. Limits that relate to connections are
    /// reduced in proportion, so that a tenant's share remains a share.
    pub fn within(self, files: u64) -> Self {
        let connections = self.connections.min(files.saturating_sub(FILES_BESIDE) / 2);
        let scaled = |limit: u64| match u128::from(limit) * u128::from(connections)
            / u128::from(self.connections.max(1))
        {
            // A limit of zero would refuse everything permanently.
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

/// Timeouts. Each has a name in `canal_gateway_timeouts_total`.
#[derive(Debug, Clone)]
pub struct GatewayTimeouts {
    /// Time for a request's head, from its first byte (or from the accept) to its last.
    pub head: Duration,
    /// Time without a request on an idle client connection.
    pub idle: Duration,
    /// Time without a byte from or to the client within a message.
    pub client: Duration,
    /// Time for the beginning of a body that an authorizer needs, from the end of the head. A third
    /// of it applies until the first byte.
    pub shown_body: Duration,
    /// Time without a byte from or to the upstream within an exchange, including the wait for the
    /// response.
    pub upstream: Duration,
    /// Time without a byte in either direction on a TCP relay or an upgraded connection.
    pub relay: Duration,
    /// Time that a port of undeclared protocol waits for the client's first byte before it treats
    /// the protocol as server-first.
    pub sniff: Duration,
    /// Time after which an idle connection to an endpoint is closed.
    pub upstream_idle: Duration,
    /// Time after which a connection without a request is closed while the worker drains.
    pub drain_idle: Duration,
    /// Time that a refused client has to read the last response.
    pub linger: Duration,
    /// Time for which an endpoint is ejected after a failed connect. It doubles with each further
    /// failure, up to 16 times this value.
    pub ejection: Duration,
}

impl Default for GatewayTimeouts {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self {
            // As a TLS handshake has; a client that sends a head byte by byte gets no longer.
            head: s(10),
            // A browser or pool that pauses for less keeps its connection.
            idle: s(60),
            // nginx's default (`client_body_timeout`, `send_timeout`).
            client: s(60),
            // Less than `client`: the body holds bytes of a budget that all tenants share.
            shown_body: s(15),
            // Envoy's default of `stream_idle_timeout`.
            upstream: s(300),
            // Envoy's default of the TCP proxy's `idle_timeout`.
            relay: s(3600),
            // Every connection of a protocol in which the server speaks first waits as long.
            sniff: Duration::from_millis(100),
            // nginx's default of an upstream's `keepalive_timeout`.
            upstream_idle: s(60),
            // Enough for a client in use to send one more request, which tells it to close.
            drain_idle: s(4),
            // Several round trips; a client that reads the response closes at once.
            linger: s(2),
            // Short, because one failed connect may be a restart; it doubles.
            ejection: s(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_as_many_as_there_are_files_for() {
        let limits = GatewayLimits {
            connections: 10_000,
            ..GatewayLimits::default()
        };
        assert_eq!(limits.files(), 21_024);
        for (files, want) in [
            (u64::MAX, 10_000),
            (21_024, 10_000),
            (21_023, 9_999),
            (20_000, 9_488),
            (1_024, 0),
            (10, 0),
        ] {
            assert_eq!(limits.clone().within(files).connections, want, "{files}");
        }
    }

    #[test]
    fn limits_in_connections_shrink_with_the_files() {
        let all = GatewayLimits {
            connections: 100_000,
            tenant_connections: 50_000,
            unauthenticated: 20_000,
            handshakes: 8_192,
            ..GatewayLimits::default()
        };
        let few = all.clone().within(20_000);
        assert_eq!(
            (
                few.connections,
                few.tenant_connections,
                few.unauthenticated,
                few.handshakes
            ),
            (9_488, 4_744, 1_897, 777)
        );
        assert_eq!((few.requests, few.tenant_requests), (4_744, 1_897));
        assert_eq!(all.clone().within(u64::MAX).tenant_connections, 50_000);
        assert_eq!(
            (all.clone().within(0).connections, all.within(0).handshakes),
            (0, 1)
        );
    }
}
