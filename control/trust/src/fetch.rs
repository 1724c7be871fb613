//! One HTTP request to a server outside the mesh, for a JWT key set or to an external CA. Its time
//! and the bytes of the response are bounded. Redirects are not followed, and connections are not
//! reused. The caller decides which servers may be contacted. Start at [`FetchClient::send`].

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Reason why there is no response. The name is a counter's label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(
        "{0} is not a usable address; fix: write http://host[:port]/path or https://host[:port]/path"
    )]
    Uri(String),
    #[error("{0} cannot be reached: {1}; fix: check the address, and that the server is up")]
    Connect(String, String),
    #[error("the TLS handshake with {0} failed: {1}; fix: check that its root is in --tls-roots")]
    Tls(String, String),
    #[error("no complete response within {0:?}; fix: check the server's load")]
    Timeout(Duration),
    #[error("the response was cut off: {0}; fix: check the server's log")]
    Broken(String),
    #[error("the response has more than {0} bytes; fix: serve a shorter document")]
    Bytes(usize),
    #[error(
        "the server redirects (status {0}); redirects are not followed; fix: configure the URL that it redirects to"
    )]
    Redirect(u16),
    #[error("the server answered with status {0}; fix: check the URL and the server's log")]
    Status(u16),
}

impl FetchError {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Uri(_) => "uri",
            Self::Connect(..) => "connect",
            Self::Tls(..) => "tls",
            Self::Timeout(_) => "timeout",
            Self::Broken(_) => "broken",
            Self::Bytes(_) => "bytes",
            Self::Redirect(_) => "redirect",
            Self::Status(_) => "status",
        }
    }

    /// True if the same request may succeed a moment later.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::Connect(..) | Self::Timeout(_) | Self::Broken(_) | Self::Status(500..)
        )
    }
}

/// One request, and the limits of its response.
pub(crate) struct FetchRequest<'a> {
    pub(crate) method: Method,
    pub(crate) uri: &'a Uri,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: Bytes,
    /// Maximum bytes of the response body.
    pub(crate) bytes: usize,
    /// Timeout of the request, including its response.
    pub(crate) time: Duration,
}

/// A complete response with a status of 2xx, or 304.
#[derive(Debug)]
pub(crate) struct FetchResponse {
    pub(crate) status: StatusCode,
    pub(crate) etag: Option<HeaderValue>,
    pub(crate) body: Bytes,
}

/// HTTP client with the roots that it trusts for https.
#[derive(Clone)]
pub struct FetchClient {
    tls: Arc<rustls::ClientConfig>,
}

impl FetchClient {
    /// Creates a client that trusts the roots in `pem` for https.
    ///
    /// # Errors
    /// The TLS library has no safe defaults, which is a fault of the build.
    pub fn new(pem: &[u8]) -> Result<Self, rustls::Error> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(CertificateDer::pem_slice_iter(pem).filter_map(Result::ok));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            tls: Arc::new(config),
        })
    }

    /// Creates a client that trusts the roots in a file. If the file cannot be read, no server is
    /// trusted, so https fails with `FetchError::Tls`.
    ///
    /// # Errors
    /// The same as of [`FetchClient::new`].
    pub fn of_file(path: &Path) -> Result<Self, rustls::Error> {
        let pem = std::fs::read(path).unwrap_or_else(|e| {
            tracing::warn!(path = %path.display(), error = %e, "trust: cannot read the roots for https, so no https server is trusted; fix: set --tls-roots");
            Vec::new()
        });
        Self::new(&pem)
    }

    /// Sends the request once.
    ///
    /// # Errors
    /// A [`FetchError`] if there is no complete response with an accepted status within the limits.
    pub(crate) async fn send(&self, ask: FetchRequest<'_>) -> Result<FetchResponse, FetchError> {
        let time = ask.time;
        tokio::time::timeout(time, self.exchange(ask))
            .await
            .unwrap_or(Err(FetchError::Timeout(time)))
    }

    async fn exchange(&self, ask: FetchRequest<'_>) -> Result<FetchResponse, FetchError> {
        let wrong = || FetchError::Uri(ask.uri.to_string());
        let (host, port) = host_and_port(ask.uri).ok_or_else(wrong)?;
        // The resolver and `ServerName` take an IPv6 address without brackets.
        let name = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_string();
        let connect =
            |e: std::io::Error| FetchError::Connect(format!("{host}:{port}"), e.to_string());
        let tcp = TcpStream::connect((name.as_str(), port))
            .await
            .map_err(connect)?;
        if ask.uri.scheme_str() != Some("https") {
            return over(TokioIo::new(tcp), ask).await;
        }
        let server = ServerName::try_from(name).map_err(|_| wrong())?;
        let tls = TlsConnector::from(self.tls.clone())
            .connect(server, tcp)
            .await;
        over(
            TokioIo::new(tls.map_err(|e| FetchError::Tls(host.into(), e.to_string()))?),
            ask,
        )
        .await
    }
}

/// Returns the host and port that a URI names; `None` if no request can be sent to it.
pub(crate) fn host_and_port(uri: &Uri) -> Option<(&str, u16)> {
    let port = match uri.scheme_str()? {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    // Credentials in a URI would be sent to whichever server answers.
    let authority = uri
        .authority()
        .filter(|a| !a.as_str().contains('@') && !a.host().is_empty())?;
    Some((authority.host(), authority.port_u16().unwrap_or(port)))
}

/// Sends the request on a connection and reads the response.
async fn over<S>(stream: TokioIo<S>, ask: FetchRequest<'_>) -> Result<FetchResponse, FetchError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let broken = |e: hyper::Error| FetchError::Broken(e.to_string());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream)
        .await
        .map_err(broken)?;
    let driver = tokio::spawn(connection);
    let path = ask.uri.path_and_query().map_or("/", |p| p.as_str());
    let host = ask.uri.authority().map(|a| a.as_str()).unwrap_or_default();
    let mut request = Request::builder()
        .method(ask.method)
        .uri(path)
        .header(header::HOST, host)
        .header(header::CONNECTION, "close");
    for (name, value) in ask.headers {
        request = request.header(name, value);
    }
    let request = request
        .body(Full::new(ask.body))
        .map_err(|_| FetchError::Uri(ask.uri.to_string()))?;
    let done = answer(
        sender.send_request(request).await.map_err(broken),
        ask.bytes,
    )
    .await;
    // The connection is not reused.
    driver.abort();
    done
}

/// Checks the status and reads the body of a response.
async fn answer(
    response: Result<http::Response<hyper::body::Incoming>, FetchError>,
    bytes: usize,
) -> Result<FetchResponse, FetchError> {
    let (head, body) = response?.into_parts();
    let status = head.status;
    if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
        return Err(FetchError::Redirect(status.as_u16()));
    }
    if !status.is_success() && status != StatusCode::NOT_MODIFIED {
        return Err(FetchError::Status(status.as_u16()));
    }
    let read = Limited::new(body, bytes).collect().await.map_err(|e| {
        match e.downcast::<LengthLimitError>() {
            Ok(_) => FetchError::Bytes(bytes),
            Err(e) => FetchError::Broken(e.to_string()),
        }
    })?;
    Ok(FetchResponse {
        status,
        etag: head.headers.get(header::ETAG).cloned(),
        body: read.to_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn places() {
        for (uri, want) in [
            ("http://a.example/x", Some(("a.example", 80))),
            ("https://a.example", Some(("a.example", 443))),
            ("https://127.0.0.1:8443/x?y", Some(("127.0.0.1", 8443))),
            ("http://[::1]:7/", Some(("[::1]", 7))),
            ("ftp://a.example/x", None),
            ("https://user:word@a.example/", None),
            ("/x", None),
        ] {
            assert_eq!(host_and_port(&uri.parse().unwrap()), want, "{uri}");
        }
    }

    /// Starts a server that answers each connection with `text` and then stays silent.
    async fn server(text: String) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut tcp, _)) = listener.accept().await {
                let mut head = [0; 2048];
                let _ = tcp.read(&mut head).await;
                let _ = tcp.write_all(text.as_bytes()).await;
                open.push(tcp);
            }
        });
        address
    }

    #[tokio::test]
    async fn answers_and_faults() {
        let ok = |body: &str| {
            format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\netag: \"1\"\r\n\r\n{body}",
                body.len()
            )
        };
        let cases: [(&str, String, Result<&str, &str>); 9] = [
            ("whole", ok("abc"), Ok("abc")),
            (
                "unchanged",
                "HTTP/1.1 304 Not Modified\r\n\r\n".into(),
                Ok(""),
            ),
            // `64` is the expected length here, not the body.
            ("at the limit", ok(&"x".repeat(64)), Ok("64")),
            ("over the limit", ok(&"x".repeat(65)), Err("bytes")),
            (
                "a redirect",
                "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
                    .into(),
                Err("redirect"),
            ),
            (
                "a refusal",
                "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into(),
                Err("status"),
            ),
            (
                "not HTTP",
                "hello, who are you?\r\n\r\n".into(),
                Err("broken"),
            ),
            (
                "half a body",
                "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab".into(),
                Err("timeout"),
            ),
            ("silence", String::new(), Err("timeout")),
        ];
        let client = FetchClient::new(b"").unwrap();
        fn get_request(uri: &Uri) -> FetchRequest<'_> {
            let (method, headers, body) = (Method::GET, Vec::new(), Bytes::new());
            FetchRequest {
                method,
                uri,
                headers,
                body,
                // The limit of 64 bytes is that of the cases at the limit and over it.
                bytes: 64,
                // 300 ms on a quiet machine: only the two cases of a timeout wait for its end.
                time: canal_timing::slack() * Duration::from_millis(300),
            }
        }
        for (what, text, want) in cases {
            let uri: Uri = format!("http://{}/keys", server(text).await)
                .parse()
                .unwrap();
            match (client.send(get_request(&uri)).await, want) {
                (Ok(got), Ok("64")) => assert_eq!(got.body.len(), 64, "{what}"),
                (Ok(got), Ok(body)) => assert_eq!(&got.body[..], body.as_bytes(), "{what}"),
                (Err(e), Err(name)) => assert_eq!(e.name(), name, "{what}: {e}"),
                (got, want) => panic!("{what}: got {got:?}, wanted {want:?}"),
            }
        }
        let plain = server(ok("abc")).await;
        // Port 1 has no listener.
        for (uri, name) in [
            (format!("https://{plain}/"), "tls"),
            ("http://127.0.0.1:1/".into(), "connect"),
            ("ftp://a/x".into(), "uri"),
        ] {
            let uri: Uri = uri.parse().unwrap();
            assert_eq!(
                client.send(get_request(&uri)).await.unwrap_err().name(),
                name,
                "{uri}"
            );
        }
    }
}
