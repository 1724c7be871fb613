//! HBONE's constants and header words as Istio's ztunnel speaks them (CONNECT over HTTP/2 over mTLS). No IO; `dataplane/kit` does that.

/// Captured outbound connections arrive here, inside the pod's network namespace.
pub const OUTBOUND_PORT: u16 = 15001;
/// Captured inbound plaintext; reserved, refused as a CONNECT target.
pub const INBOUND_PLAINTEXT_PORT: u16 = 15006;
/// HBONE.
pub const HBONE_PORT: u16 = 15008;
/// Ports no CONNECT may name: they are the proxy's own (ztunnel's `illegal_ports`).
pub const ILLEGAL_PORTS: [u16; 3] = [OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, HBONE_PORT];
/// The mark on the proxy's own sockets in a pod's namespace, so that capture leaves them alone.
pub const PROXY_MARK: u32 = 0x539;

/// ALPN of HBONE.
pub const ALPN: &[u8] = b"h2";
/// HTTP/2 stream window of a new connection, bytes, both sides. It grows with use.
pub const STREAM_WINDOW: u32 = 64 << 10;
/// HTTP/2 window of a new connection, bytes. Four streams' worth: equal windows can deadlock an app that reads stream A only after stream B.
pub const CONNECTION_WINDOW: u32 = 256 << 10;
/// The largest stream window, bytes: 512 MB/s at a round trip of 1 ms.
pub const STREAM_WINDOW_MAX: u32 = 512 << 10;
/// The largest window of a connection, bytes: with what waits to be sent, a connection holds less than 2 MiB for a peer that stalls.
pub const CONNECTION_WINDOW_MAX: u32 = 1536 << 10;
/// HTTP/2 max frame size, bytes.
pub const FRAME_SIZE: u32 = 1 << 20;
/// Client: max header list, bytes.
pub const CLIENT_HEADER_LIST: u32 = 16 << 10;
/// Server: max header list, bytes.
pub const SERVER_HEADER_LIST: u32 = 64 << 10;
/// Client: send buffer per stream, bytes.
pub const CLIENT_SEND_BUFFER: usize = 256 << 10;
/// Server: send buffer per stream, bytes.
pub const SERVER_SEND_BUFFER: usize = 256 << 10;
/// Client: streams on one pooled connection.
pub const POOL_STREAMS_MAX: u32 = 100;
/// Server: concurrent streams.
pub const SERVER_STREAMS_MAX: u32 = 200;

/// Where the tunnelled connection comes from: `for="<ip:port>"` and, if a service is targeted, `;host=<hostname>`.
pub const FORWARDED: &str = "forwarded";
/// Who the source workload is, `key=value` pairs.
pub const BAGGAGE: &str = "baggage";
/// W3C trace context, one per connection.
pub const TRACEPARENT: &str = "traceparent";

/// The source's SPIFFE ID, on a tunnel that a gateway opens for one connection of one source. Believed from gateways alone.
pub const SOURCE: &str = "canal-source";

/// Refused by an authorization policy (ztunnel answers 401, not 403).
pub const STATUS_DENIED: u16 = 401;
/// Not CONNECT, bad authority, or the destination does not match the address dialled.
pub const STATUS_BAD: u16 = 400;
/// The destination could not be connected, or its workload is unknown.
pub const STATUS_UNAVAILABLE: u16 = 503;

/// The value of `forwarded` (RFC 7239) for a connection from `source`, to the service `host` if one is targeted.
pub fn forwarded(source: std::net::SocketAddr, host: Option<&str>) -> String {
    match host {
        Some(h) => format!("for=\"{source}\";host={h}"),
        None => format!("for=\"{source}\""),
    }
}

/// The source address in a `forwarded` value as [`forwarded`] writes it. Only ever taken from an authenticated hop.
pub fn forwarded_for(value: &str) -> Option<std::net::SocketAddr> {
    let rest = value.split(';').find_map(|p| p.trim().strip_prefix("for="))?;
    rest.trim_matches('"').parse().ok()
}

/// What a `baggage` header says about a workload; fields that are not known stay empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Baggage {
    /// `k8s.cluster.name`
    pub cluster: String,
    /// `k8s.namespace.name`
    pub namespace: String,
    /// `k8s.pod.name`
    pub pod: String,
    /// `service.name`
    pub service: String,
    /// `service.version`
    pub version: String,
    /// `cloud.availability_zone`
    pub az: String,
}

/// Longest `baggage` value read, bytes; a longer one is ignored.
pub const BAGGAGE_BYTES_MAX: usize = 2048;

impl Baggage {
    /// The header's value; empty fields are left out.
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
            if v.is_empty() || !v.bytes().all(|b| b.is_ascii_graphic() && b != b',' && b != b';' && b != b'=') {
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

    /// Reads what [`Baggage::encode`] and ztunnel write; unknown members are skipped. Informational only: never decides anything.
    pub fn decode(value: &str) -> Self {
        let mut b = Self::default();
        if value.len() > BAGGAGE_BYTES_MAX {
            return b;
        }
        for member in value.split(',') {
            let Some((k, v)) = member.trim().split_once('=') else { continue };
            let v = v.split(';').next().unwrap_or("").to_string();
            match k {
                "k8s.cluster.name" => b.cluster = v,
                "k8s.namespace.name" => b.namespace = v,
                "k8s.pod.name" | "k8s.deployment.name" | "k8s.job.name" | "k8s.cronjob.name" => b.pod = v,
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
            assert_eq!(forwarded_for(&forwarded(a, Some("reviews.bookinfo.svc.cluster.local"))), Some(a));
        }
        assert_eq!(forwarded_for("for=unknown"), None);
        assert_eq!(forwarded_for(""), None);
    }

    #[test]
    fn baggage_round_trips_and_leaves_out_what_would_break_it() {
        let b = Baggage { namespace: "bookinfo".into(), pod: "reviews-v1".into(), version: "a,b=c".into(), ..Default::default() };
        assert_eq!(b.encode(), "k8s.namespace.name=bookinfo,k8s.pod.name=reviews-v1");
        let back = Baggage::decode(&b.encode());
        assert_eq!((back.namespace, back.pod, back.version), (b.namespace, b.pod, String::new()));
        assert_eq!(Baggage::decode(&"x".repeat(3000)), Baggage::default());
    }
}
