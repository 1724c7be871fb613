//! Determines the protocol of a service port from `appProtocol` (KEP-2433), else from the port's
//! name as Istio interprets it.

use canal_model::program::AppProtocol;

/// The protocol that a port declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeclaredProtocol {
    Known(AppProtocol),
    /// `appProtocol` has a value that Canal does not know; protocol sniffing decides.
    Unknown,
}

/// Determines the protocol from `appProtocol` if it is set, else from the part of the port's name
/// before the first `-`.
pub(crate) fn declared_protocol(app_protocol: Option<&str>, port_name: &str) -> DeclaredProtocol {
    match app_protocol.filter(|protocol_name| !protocol_name.is_empty()) {
        Some(protocol_name) => match protocol_name.to_ascii_lowercase().as_str() {
            "kubernetes.io/h2c" => DeclaredProtocol::Known(AppProtocol::Http2),
            "kubernetes.io/ws" => DeclaredProtocol::Known(AppProtocol::Http1),
            "kubernetes.io/wss" => DeclaredProtocol::Known(AppProtocol::Tcp),
            word => by_word(word).map_or(DeclaredProtocol::Unknown, DeclaredProtocol::Known),
        },
        None => DeclaredProtocol::Known(by_name(port_name)),
    }
}

fn by_name(port_name: &str) -> AppProtocol {
    let name = port_name.to_ascii_lowercase();
    if name == "grpc-web" || name.starts_with("grpc-web-") {
        return AppProtocol::Http2;
    }
    let prefix = name.split('-').next().unwrap_or("");
    by_word(prefix).unwrap_or(AppProtocol::Detect)
}

/// Maps Istio's protocol names. Protocols that Canal does not parse are opaque, in particular those
/// where the server sends first.
fn by_word(word: &str) -> Option<AppProtocol> {
    Some(match word {
        "http" => AppProtocol::Http1,
        "http2" | "h2c" | "grpc-web" => AppProtocol::Http2,
        "grpc" => AppProtocol::Grpc,
        "tcp" | "tls" | "https" | "redis" | "mongo" | "mysql" | "postgres" | "postgresql"
        | "amqp" | "kafka" | "smtp" => AppProtocol::Tcp,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_declare_their_protocol() {
        use AppProtocol::{Detect, Grpc, Http1, Http2, Tcp};
        for (app_protocol, name, expected) in [
            (None, "http", DeclaredProtocol::Known(Http1)),
            (None, "http-web", DeclaredProtocol::Known(Http1)),
            (None, "HTTP2-x", DeclaredProtocol::Known(Http2)),
            (None, "httpx", DeclaredProtocol::Known(Detect)),
            (None, "grpc", DeclaredProtocol::Known(Grpc)),
            (None, "grpc-web", DeclaredProtocol::Known(Http2)),
            (None, "grpc-web-x", DeclaredProtocol::Known(Http2)),
            (None, "tls-x", DeclaredProtocol::Known(Tcp)),
            (None, "https", DeclaredProtocol::Known(Tcp)),
            (None, "mysql", DeclaredProtocol::Known(Tcp)),
            (None, "", DeclaredProtocol::Known(Detect)),
            (Some(""), "http", DeclaredProtocol::Known(Http1)),
            (Some("HTTP"), "tcp", DeclaredProtocol::Known(Http1)),
            (
                Some("kubernetes.io/h2c"),
                "http",
                DeclaredProtocol::Known(Http2),
            ),
            (Some("kubernetes.io/ws"), "", DeclaredProtocol::Known(Http1)),
            (Some("kubernetes.io/wss"), "", DeclaredProtocol::Known(Tcp)),
            (Some("redis"), "", DeclaredProtocol::Known(Tcp)),
            (Some("example.com/own"), "http", DeclaredProtocol::Unknown),
        ] {
            assert_eq!(
                declared_protocol(app_protocol, name),
                expected,
                "{app_protocol:?} {name:?}"
            );
        }
    }
}
