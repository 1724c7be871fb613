//! What is spoken on a service port, from `appProtocol` (KEP-2433), else from the port's name as Istio reads it.

use canal_model::program::AppProtocol;

/// What a port says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spoken {
    Known(AppProtocol),
    /// `appProtocol` says something that Canal does not know; the first bytes decide.
    Unknown,
}

/// Reads `appProtocol` if there is one, else the part of the port's name before the first `-`.
pub(crate) fn spoken(app_protocol: Option<&str>, port_name: &str) -> Spoken {
    match app_protocol.filter(|said| !said.is_empty()) {
        Some(said) => match said.to_ascii_lowercase().as_str() {
            "kubernetes.io/h2c" => Spoken::Known(AppProtocol::Http2),
            "kubernetes.io/ws" => Spoken::Known(AppProtocol::Http1),
            "kubernetes.io/wss" => Spoken::Known(AppProtocol::Tcp),
            word => by_word(word).map_or(Spoken::Unknown, Spoken::Known),
        },
        None => Spoken::Known(by_name(port_name)),
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

/// Istio's protocol names. What Canal does not look into is opaque, above all where the server speaks first.
fn by_word(word: &str) -> Option<AppProtocol> {
    Some(match word {
        "http" => AppProtocol::Http1,
        "http2" | "h2c" | "grpc-web" => AppProtocol::Http2,
        "grpc" => AppProtocol::Grpc,
        "tcp" | "tls" | "https" | "redis" | "mongo" | "mysql" | "postgres" | "postgresql" | "amqp" | "kafka" | "smtp" => AppProtocol::Tcp,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_say_what_they_speak() {
        use AppProtocol::{Detect, Grpc, Http1, Http2, Tcp};
        for (app_protocol, name, expected) in [
            (None, "http", Spoken::Known(Http1)),
            (None, "http-web", Spoken::Known(Http1)),
            (None, "HTTP2-x", Spoken::Known(Http2)),
            (None, "httpx", Spoken::Known(Detect)),
            (None, "grpc", Spoken::Known(Grpc)),
            (None, "grpc-web", Spoken::Known(Http2)),
            (None, "grpc-web-x", Spoken::Known(Http2)),
            (None, "tls-x", Spoken::Known(Tcp)),
            (None, "https", Spoken::Known(Tcp)),
            (None, "mysql", Spoken::Known(Tcp)),
            (None, "", Spoken::Known(Detect)),
            (Some(""), "http", Spoken::Known(Http1)),
            (Some("HTTP"), "tcp", Spoken::Known(Http1)),
            (Some("kubernetes.io/h2c"), "http", Spoken::Known(Http2)),
            (Some("kubernetes.io/ws"), "", Spoken::Known(Http1)),
            (Some("kubernetes.io/wss"), "", Spoken::Known(Tcp)),
            (Some("redis"), "", Spoken::Known(Tcp)),
            (Some("example.com/own"), "http", Spoken::Unknown),
        ] {
            assert_eq!(spoken(app_protocol, name), expected, "{app_protocol:?} {name:?}");
        }
    }
}
