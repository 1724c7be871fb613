//! A TLS client without a mesh. It connects, verifies the server against the given roots and name,
//! presents its own certificate if it has one, and requests a page over HTTP/1.1. It reports the
//! negotiated parameters and the server's certificate chain. Start at [`run`].

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Maximum size of an answer, which is a page. It only keeps the client's memory small if the
/// server never stops.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Server to connect to, and the TLS settings.
#[derive(Debug, Clone, Args)]
pub struct TlsClientArgs {
    /// Address of the server, e.g. 10.101.0.10:443
    pub address: String,
    /// Name the server must prove; also its SNI and the Host header
    #[arg(long)]
    pub name: String,
    /// PEM file with the root certificates
    #[arg(long)]
    pub roots: PathBuf,
    /// PEM files of the own certificate chain and key
    #[arg(long, requires = "key")]
    pub cert: Option<PathBuf>,
    #[arg(long)]
    pub key: Option<PathBuf>,
    /// Path of the page to request
    #[arg(long, default_value = "/")]
    pub path: String,
    /// Offer no version but TLS 1.2
    #[arg(long)]
    pub tls12: bool,
    /// Number of connections, one after the other; the last one is reported
    #[arg(short = 'n', long, default_value_t = 1)]
    pub times: u32,
    /// Give up on a connection after this time
    #[arg(long, default_value_t = 10_000)]
    pub timeout_ms: u64,
}

/// Connects as often as requested. The JSON's `ok` is true if every connection got an answer with
/// status 200.
///
/// # Errors
///
/// A file with roots, certificates or the key is not readable, or it contains none.
pub async fn run(args: &TlsClientArgs) -> anyhow::Result<Value> {
    let config = Arc::new(config(args)?);
    let (mut last, mut failed, mut took) = (Value::Null, 0, Vec::new());
    for _ in 0..args.times {
        let started = Instant::now();
        let once = tokio::time::timeout(
            Duration::from_millis(args.timeout_ms),
            once(args, config.clone()),
        )
        .await;
        last = match once {
            Ok(Ok(report)) => report,
            Ok(Err(problem)) => json!({ "error": format!("{problem:#}") }),
            Err(_) => json!({ "error": "no answer in time" }),
        };
        took.push(started.elapsed().as_secs_f64() * 1e3);
        failed += u32::from(last["status"] != 200);
    }
    took.sort_by(f64::total_cmp);
    last["ok"] = (failed == 0).into();
    last["failed"] = failed.into();
    last["ms_max"] = took.last().copied().unwrap_or_default().into();
    Ok(last)
}

fn config(args: &TlsClientArgs) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for root in certificates(&args.roots)? {
        roots.add(root).context("an invalid root")?;
    }
    let versions: &[&rustls::SupportedProtocolVersion] = if args.tls12 {
        &[&rustls::version::TLS12]
    } else {
        &[&rustls::version::TLS13, &rustls::version::TLS12]
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)?
        .with_root_certificates(roots);
    let mut config = match (&args.cert, &args.key) {
        (Some(cert), Some(key)) => {
            let key = PrivateKeyDer::from_pem_file(key)
                .with_context(|| format!("no key in {}", key.display()))?;
            builder.with_client_auth_cert(certificates(cert)?, key)?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .with_context(|| format!("read {}", path.display()))?
        .collect();
    let all = all.with_context(|| format!("{} is not PEM", path.display()))?;
    if all.is_empty() {
        bail!("{} holds no certificate", path.display());
    }
    Ok(all)
}

async fn once(args: &TlsClientArgs, config: Arc<ClientConfig>) -> anyhow::Result<Value> {
    let name = ServerName::try_from(args.name.clone()).context("not a server name")?;
    let tcp = TcpStream::connect(&args.address)
        .await
        .with_context(|| format!("connect to {}", args.address))?;
    // With Nagle's algorithm small writes would wait for acknowledgments.
    tcp.set_nodelay(true)?;
    let mut stream = TlsConnector::from(config)
        .connect(name, tcp)
        .await
        .context("TLS")?;
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        args.path, args.name
    );
    stream.write_all(request.as_bytes()).await.context("send")?;
    let mut answer = Vec::new();
    let read = (&mut stream)
        // A server that never stops sending must not fill the memory.
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .await;
    // A read error after an answer is ignored; the answer's status decides.
    if answer.is_empty() {
        read.context("receive")?;
    }
    let text = String::from_utf8_lossy(&answer);
    // An answer that ends within its head has no body.
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse::<u16>().ok());
    let session = stream.get_ref().1;
    let chain: Vec<Value> = session
        .peer_certificates()
        .unwrap_or_default()
        .iter()
        .map(summarize_certificate)
        .collect();
    Ok(json!({
        "status": status, "body": body, "head": head,
        "version": session.protocol_version().map(|version| format!("{version:?}")),
        "suite": session.negotiated_cipher_suite().map(|suite| format!("{:?}", suite.suite())),
        "group": session.negotiated_key_exchange_group().map(|group| format!("{:?}", group.name())),
        "resumed": session.handshake_kind().map(|kind| format!("{kind:?}")),
        "chain": chain,
    }))
}

/// Summarizes a certificate as JSON.
fn summarize_certificate(der: &CertificateDer<'_>) -> Value {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else {
        return "unreadable".into();
    };
    let names = certificate
        .subject_alternative_name()
        .ok()
        .flatten()
        .map(|names| {
            let text = |name: &GeneralName<'_>| match name {
                GeneralName::DNSName(name) => format!("DNS:{name}"),
                GeneralName::URI(uri) => format!("URI:{uri}"),
                other => format!("{other:?}"),
            };
            names
                .value
                .general_names
                .iter()
                .map(text)
                .collect::<Vec<_>>()
        });
    json!({
        "subject": certificate.subject().to_string(),
        "issuer": certificate.issuer().to_string(),
        "serial": certificate.raw_serial_as_string(),
        "names": names,
        "key": certificate.public_key().algorithm.algorithm.to_id_string(),
    })
}
