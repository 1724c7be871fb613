//! The HTTP version in which a request goes to its endpoint.

use canal_model::program::AppProtocol;

use crate::head::{ClientProtocol, RequestInfo};

/// Decides the HTTP version towards the endpoint. `is_tls` says that the client uses TLS with the
/// gateway.
pub fn decide_version(
    protocol: AppProtocol,
    request: &RequestInfo,
    is_tls: bool,
) -> ClientProtocol {
    let is_http2 = match protocol {
        AppProtocol::Http2 | AppProtocol::Grpc => true,
        AppProtocol::Http1 => false,
        // A client that begins HTTP/2 in plaintext knows that its server speaks it. In TLS it agreed
        // on HTTP/2 with the gateway, which says nothing about the server.
        AppProtocol::Detect | AppProtocol::Tcp => {
            request.client_protocol == ClientProtocol::Http2 && (!is_tls || request.grpc)
        }
    };
    if is_http2 {
        ClientProtocol::Http2
    } else {
        ClientProtocol::Http11
    }
}

#[cfg(test)]
mod tests {
    use canal_h1::{Framing, RequestKind};

    use super::*;

    #[test]
    fn http2_of_tls_reaches_only_servers_that_declare_it() {
        use AppProtocol::{Detect, Grpc, Http1, Http2, Tcp};
        let version = |protocol, client_protocol, is_tls, grpc| {
            let request = RequestInfo {
                kind: RequestKind::Ordinary,
                framing: Framing::None,
                client_protocol,
                keep_alive: true,
                idempotent: true,
                grpc,
            };
            decide_version(protocol, &request, is_tls)
        };
        for (protocol, is_tls, grpc, expected) in [
            (Detect, false, false, ClientProtocol::Http2),
            (Detect, true, false, ClientProtocol::Http11),
            (Tcp, true, false, ClientProtocol::Http11),
            // No server of gRPC speaks HTTP/1.1.
            (Detect, true, true, ClientProtocol::Http2),
            (Http1, false, false, ClientProtocol::Http11),
            (Http2, true, false, ClientProtocol::Http2),
            (Grpc, true, true, ClientProtocol::Http2),
        ] {
            let found = version(protocol, ClientProtocol::Http2, is_tls, grpc);
            assert_eq!(found, expected, "{protocol:?} {is_tls} {grpc}");
        }
        let found = version(Http2, ClientProtocol::Http11, false, false);
        assert_eq!(found, ClientProtocol::Http2);
        let found = version(Detect, ClientProtocol::Http11, false, false);
        assert_eq!(found, ClientProtocol::Http11);
    }
}
