//! An HBONE client made of rustls and the h2 crate by hand, or of bytes alone, that may do everything wrong.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use canal_kit::sys::{self, ConnectOptions};
use canal_kit::testing::{Issued, TestCa};
use h2::client::SendRequest;
use http::{Method, Request};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::{Rig, identity};

type Versions = &'static [&'static rustls::SupportedProtocolVersion];
const TLS13: Versions = &[&rustls::version::TLS13];
pub const TLS12: Versions = &[&rustls::version::TLS12];

/// How the client shows itself.
pub struct Hello {
    pub certificate: Option<Issued>,
    pub alpn: &'static [&'static [u8]],
    pub versions: Versions,
}

impl Hello {
    /// As the tenant's gateway.
    pub fn gateway(rig: &Rig) -> Self {
        Self::of(&rig.ca, "ns/canal-system/sa/gateway")
    }
    pub fn of(ca: &TestCa, who: &str) -> Self {
        Self { certificate: Some(ca.issue_with(&identity(who), |_| {})), alpn: &[b"h2"], versions: TLS13 }
    }
}

/// Believes anyone: what the server shows is looked at by the kit's tests.
#[derive(Debug)]
struct Believe;

impl ServerCertVerifier for Believe {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}

/// TLS to the pod's HBONE port, from inside its namespace.
pub async fn tls(rig: &Rig, to: &str, hello: &Hello) -> std::io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(hello.versions).unwrap();
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(Believe));
    let mut config = match &hello.certificate {
        None => builder.with_no_client_auth(),
        Some(i) => {
            let chain = CertificateDer::pem_slice_iter(i.chain.as_bytes()).collect::<Result<Vec<_>, _>>().unwrap();
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(i.key.as_bytes()).unwrap()).unwrap()
        }
    };
    config.alpn_protocols = hello.alpn.iter().map(|a| a.to_vec()).collect();
    let to: SocketAddr = to.parse().unwrap();
    // The mark keeps the nft rules off; BPF does not look at a process outside the cgroup.
    let options = ConnectOptions { mark: Some(canal_wire::hbone::PROXY_MARK), ..ConnectOptions::default() };
    let tcp = sys::connect(Some(&rig.netns()), to, &options).await.map_err(|e| std::io::Error::other(e.to_string()))?;
    let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp).await
}

/// HTTP/2 on it; the connection's driver runs until it ends.
pub async fn h2(rig: &Rig, to: &str, hello: &Hello) -> SendRequest<Bytes> {
    let tls = tls(rig, to, hello).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(4 << 20).initial_connection_window_size(16 << 20).enable_push(false);
    let (send, connection) = builder.handshake(tls).await.unwrap();
    tokio::spawn(connection);
    send
}

/// An open tunnel, in h2's own hands.
pub struct Tunnel {
    pub send: h2::SendStream<Bytes>,
    pub recv: h2::RecvStream,
    pub headers: http::HeaderMap,
}

/// CONNECT; the tunnel or the status.
pub async fn connect(h2: &SendRequest<Bytes>, authority: &str, headers: &[(&'static str, &str)]) -> Result<Tunnel, u16> {
    let mut request = Request::builder().method(Method::CONNECT).uri(authority);
    for (k, v) in headers {
        request = request.header(*k, *v);
    }
    ask(h2, request.body(()).unwrap()).await
}

/// Any request; the stream or the status.
pub async fn ask(h2: &SendRequest<Bytes>, request: Request<()>) -> Result<Tunnel, u16> {
    let mut h2 = h2.clone().ready().await.unwrap();
    let (response, send) = h2.send_request(request, false).unwrap();
    let response = tokio::time::timeout(Duration::from_secs(15), response).await.expect("an answer in time").unwrap();
    let (parts, recv) = response.into_parts();
    if parts.status == 200 { Ok(Tunnel { send, recv, headers: parts.headers }) } else { Err(parts.status.as_u16()) }
}

impl Tunnel {
    pub fn send(&mut self, data: &'static [u8], end: bool) {
        self.send.send_data(Bytes::from_static(data), end).unwrap();
    }

    /// Everything until END_STREAM, or the reset's reason.
    pub async fn rest(&mut self) -> Result<Vec<u8>, h2::Reason> {
        let mut all = Vec::new();
        while let Some(chunk) = tokio::time::timeout(Duration::from_secs(15), self.recv.data()).await.expect("data in time") {
            let chunk = chunk.map_err(|e| e.reason().unwrap())?;
            let _ = self.recv.flow_control().release_capacity(chunk.len());
            all.extend_from_slice(&chunk);
        }
        Ok(all)
    }
}

/// The server's SETTINGS and first WINDOW_UPDATE as they are on the wire: `(settings in order, connection window increment)`.
pub async fn settings(rig: &Rig, to: &str, hello: &Hello) -> (Vec<(u16, u32)>, Option<u32>) {
    let mut t = tls(rig, to, hello).await.unwrap();
    t.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let (mut settings, mut window) = (Vec::new(), None);
    while settings.is_empty() || window.is_none() {
        let mut head = [0; 9];
        tokio::time::timeout(Duration::from_secs(5), t.read_exact(&mut head)).await.unwrap().unwrap();
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut body = vec![0; len];
        t.read_exact(&mut body).await.unwrap();
        match (head[3], head[4] & 1) {
            (4, 0) => {
                let one = |c: &[u8]| (u16::from_be_bytes([c[0], c[1]]), u32::from_be_bytes([c[2], c[3], c[4], c[5]]));
                settings = body.chunks(6).map(one).collect();
            }
            (8, _) => window = Some(u32::from_be_bytes([body[0], body[1], body[2], body[3]])),
            _ => {}
        }
    }
    (settings, window)
}
