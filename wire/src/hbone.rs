//! Constants and header fields of HBONE, compatible with Istio's ztunnel (CONNECT over HTTP/2 over
//! mTLS). No IO; `dataplane/hbone` does that.

/// Port for captured outbound connections, inside the pod's network namespace.
/// Istio and ztunnel use the same number.
pub const OUTBOUND_PORT: u16 = 15001;
/// Port for captured inbound plaintext; reserved and refused as a CONNECT target.
/// Istio and ztunnel use the same number.
pub const INBOUND_PLAINTEXT_PORT: u16 = 15006;
/// Port on which HBONE tunnels are accepted.
/// Istio and ztunnel use the same number, and peers of them dial it.
pub const HBONE_PORT: u16 = 15008;
/// Ports that no CONNECT may target, because they are the proxy's own (ztunnel's `illegal_ports`).
pub const ILLEGAL_PORTS: [u16; 3] = [OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, HBONE_PORT];
/// Socket mark of the proxy's own sockets in a pod's namespace; capture ignores marked sockets.
/// Istio and ztunnel use the same mark (1337).
pub const PROXY_MARK: u32 = 0x539;
/// Socket mark of the proxy's connections to the pod's applications. It keeps the replies inside
/// the pod's namespace, whatever source address the connection has.
/// It only has to differ from [`PROXY_MARK`], and follows it.
pub const DELIVERY_MARK: u32 = 0x53a;
/// All socket marks of the proxy in a pod's namespace.
pub const PROXY_MARKS: [u32; 2] = [PROXY_MARK, DELIVERY_MARK];

/// ALPN protocol of HBONE connections.
pub const ALPN: &[u8] = b"h2";
/// Initial HTTP/2 stream window, in bytes, on both sides. It grows with use.
/// HTTP/2's default is one byte less (RFC 9113 §6.9.2). docs/design/0009-flow-control.md explains
/// why it begins so small.
pub const STREAM_WINDOW: u32 = 64 << 10;
/// HTTP/2 connection window, in bytes. It never limits: otherwise streams that are not read would
/// stop the others of their connection.
pub const CONNECTION_WINDOW: u32 = 1 << 30;
/// Maximum stream window, in bytes: 512 MB/s at a round trip of 1 ms.
pub const STREAM_WINDOW_MAX: u32 = 512 << 10;
/// Maximum HTTP/2 frame size, in bytes. It is ztunnel's: peers that send frames of 1 MiB must be
/// understood.
pub const FRAME_SIZE: u32 = 1 << 20;
/// Client: maximum size of a header list, in bytes. It is ztunnel's; a response to a CONNECT has
/// few headers.
pub const CLIENT_HEADER_LIST: u32 = 16 << 10;
/// Server: maximum size of a header list, in bytes. It is ztunnel's; a CONNECT also carries
/// baggage and a trace context.
pub const SERVER_HEADER_LIST: u32 = 64 << 10;
/// Client: send buffer per stream, in bytes. It is less than ztunnel's 4 MiB, because it bounds
/// what a stream holds for a peer that does not read.
pub const CLIENT_SEND_BUFFER: usize = 256 << 10;
/// Server: send buffer per stream, in bytes. It is less than ztunnel's 400 KiB, for the reason of
/// [`CLIENT_SEND_BUFFER`].
pub const SERVER_SEND_BUFFER: usize = 256 << 10;
/// Client: maximum number of streams on one pooled connection.
/// ztunnel's pool has the same default.
pub const POOL_STREAMS_MAX: u32 = 100;
/// Client: maximum number of connections over which one worker spreads the streams of one identity
/// to one service. More connections are opened only if all of them are full ([`POOL_STREAMS_MAX`]).
/// All positions of the buckets (128) are taken by eight workers with so many. Nobody measured this
/// value.
pub const SPREAD_CONNECTIONS_MAX: u32 = 16;
/// Client: number of open streams that justifies the handshake of one more connection.
/// A second replica helps as soon as two streams run at once. Nobody measured this value.
pub const SPREAD_STREAMS_PER_CONNECTION: u32 = 2;
/// Client: rate of new streams per second that justifies the handshake of one more connection.
/// Short streams are seldom open at the same moment, and would all stay on one replica. Nobody
/// measured this value.
pub const SPREAD_RATE_PER_CONNECTION: u32 = 3;
/// Client: age in seconds (±20 %) after which a connection to a service takes no new streams.
/// A replica that was added gets connections of long-lived clients within it. Nobody measured this
/// value; a handshake every ten minutes costs little.
pub const SPREAD_AGE_SECONDS: u64 = 600;
/// Client: number of streams after which a connection to a service takes no new streams.
/// Reached before the age only at more than 167 streams a second. It is far below the 2^30 ids that
/// a client has on one connection (RFC 9113 §5.1.1).
pub const SPREAD_LIFETIME_STREAMS_MAX: u32 = 100_000;
/// Client: seconds without a stream after which all connections to a service except the first are
/// closed.
/// Nobody measured this value; a pause of a minute must not cost a handshake.
pub const SPREAD_IDLE_SECONDS: u64 = 60;
/// Server: maximum number of concurrent streams.
/// Twice what a client of Canal opens ([`POOL_STREAMS_MAX`]), which leaves room for other clients.
pub const SERVER_STREAMS_MAX: u32 = 200;

/// Header with the source of the tunnelled connection: `for="<ip:port>"` and, if a service is
/// targeted, `;host=<hostname>`.
pub const FORWARDED: &str = "forwarded";
/// Header that describes the source workload as `key=value` pairs.
pub const BAGGAGE: &str = "baggage";
/// Header with the W3C trace context, one per connection.
pub const TRACEPARENT: &str = "traceparent";

/// Header with the source's SPIFFE ID, on a tunnel that a gateway opens for one connection of one
/// source. It is trusted only from gateways.
pub const SOURCE: &str = "canal-source";

/// Header on the CONNECT of a tunnel that carries sequential HTTP/1.1 requests. It requests a
/// trailer of the same name with the number of bytes that had reached the application when it
/// closed.
pub const CLOSE_REPORT: &str = "canal-close-report";

/// Status for a denial by an authorization policy (ztunnel answers 401, not 403).
pub const STATUS_DENIED: u16 = 401;
/// Status for a request that is not CONNECT, a bad authority, or a destination that does not match
/// the dialled address.
pub const STATUS_BAD: u16 = 400;
/// Status for a destination that could not be connected, or whose workload is unknown.
pub const STATUS_UNAVAILABLE: u16 = 503;

/// Returns the value of `forwarded` (RFC 7239) for a connection from `source`, to the service
/// `host` if one is targeted.
pub fn forwarded(source: std::net::SocketAddr, host: Option<&str>) -> String {
    match host {
        Some(h) => format!("for=\"{source}\";host={h}"),
        None => format!("for=\"{source}\""),
    }
}

/// Parses the source address from a `forwarded` value in the form of [`forwarded`]. Callers use
/// only values of authenticated hops.
pub fn forwarded_for(value: &str) -> Option<std::net::SocketAddr> {
    let rest = value
        .split(';')
        .find_map(|p| p.trim().strip_prefix("for="))?;
    rest.trim_matches('"').parse().ok()
}

/// The contents of a `baggage` header that describes a workload; unknown fields stay empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Baggage {
    /// Name of the cluster, `k8s.cluster.name`.
    pub cluster: String,
    /// Name of the namespace, `k8s.namespace.name`.
    pub namespace: String,
    /// Name of the pod, `k8s.pod.name`.
    pub pod: String,
    /// Name of the service, `service.name`.
    pub service: String,
    /// Version of the service, `service.version`.
    pub version: String,
    /// Name of the AZ, `cloud.availability_zone`.
    pub az: String,
}

/// Maximum length of a `baggage` value, in bytes; a longer value is ignored.
/// It has six values. With 253 bytes each, the longest name of Kubernetes, and their keys they take
/// 1.6 KiB.
pub const BAGGAGE_BYTES_MAX: usize = 2048;

impl Baggage {
    /// Returns the header's value. Empty fields are left out, and so are values with characters
    /// that `baggage` reserves.
    pub fn encode(&self) -> String {
        let fields = [
            ("k8s.cluster.name", &self.cluster),
            ("k8s.namespace.name", &self.namespace),
            ("k8s.pod.name", &self.pod),
            ("service.name", &self.service),
            ("service.version", &self.version),
            ("cloud.availability_zone", &self.az),
        ];
        let mut out = String::new();
        for (k, v) in fields {
            if v.is_empty()
                || !v
                    .bytes()
                    .all(|b| b.is_ascii_graphic() && b != b',' && b != b';' && b != b'=')
            {
                continue;
            }
            if !out.is_empty() {
                out.push(',');
            }
            out.push_str(k);
            out.push('=');
            out.push_str(v);
        }
        out
    }

    /// Parses values of [`Baggage::encode`] and of ztunnel; unknown members are skipped. The result
    /// is informational and decides nothing.
    pub fn decode(value: &str) -> Self {
        let mut b = Self::default();
        if value.len() > BAGGAGE_BYTES_MAX {
            return b;
        }
        for member in value.split(',') {
            let Some((k, v)) = member.trim().split_once('=') else {
                continue;
            };
            // Properties of a member, after ';', are not used.
            let v = v.split(';').next().unwrap_or("").to_string();
            match k {
                "k8s.cluster.name" => b.cluster = v,
                "k8s.namespace.name" => b.namespace = v,
                "k8s.pod.name" | "k8s.deployment.name" | "k8s.job.name" | "k8s.cronjob.name" => {
                    b.pod = v
                }
                "service.name" => b.service = v,
                "service.version" => b.version = v,
                "cloud.availability_zone" => b.az = v,
                _ => {}
            }
        }
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_round_trips() {
        for s in ["10.1.1.2:4711", "[fd00::2]:80"] {
            let a = s.parse().unwrap();
            assert_eq!(forwarded_for(&forwarded(a, None)), Some(a));
            assert_eq!(
                forwarded_for(&forwarded(a, Some("reviews.bookinfo.svc.cluster.local"))),
                Some(a)
            );
        }
        assert_eq!(forwarded_for("for=unknown"), None);
        assert_eq!(forwarded_for(""), None);
    }

    #[test]
    fn baggage_round_trips_and_omits_illegal_values() {
        let b = Baggage {
            namespace: "bookinfo".into(),
            pod: "reviews-v1".into(),
            version: "a,b=c".into(),
            ..Default::default()
        };
        assert_eq!(
            b.encode(),
            "k8s.namespace.name=bookinfo,k8s.pod.name=reviews-v1"
        );
        let back = Baggage::decode(&b.encode());
        assert_eq!(
            (back.namespace, back.pod, back.version),
            (b.namespace, b.pod, String::new())
        );
        assert_eq!(Baggage::decode(&"x".repeat(3000)), Baggage::default());
    }
}
