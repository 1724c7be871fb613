//! An application that requests its X.509-SVID from the SPIFFE Workload API. It prints each answer,
//! and can write the newest one as PEM files. It checks only the format. Start at [`run`].

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream as StdUnixStream};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_stream::StreamExt;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint, Uri};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::workload::spiffe_workload_api_client::SpiffeWorkloadApiClient;
use crate::workload::{X509svid, X509svidRequest, X509svidResponse};

/// Endpoint of the Workload API, and when to end.
#[derive(Debug, Clone, Args)]
pub struct WorkloadClientArgs {
    /// unix:PATH, unix:@ABSTRACT, or tcp://IP:PORT (SPIFFE_Workload_Endpoint.md §4)
    #[arg(long, env = "SPIFFE_ENDPOINT_SOCKET")]
    pub socket: String,
    /// End after this many answers
    #[arg(short = 'n', long, default_value_t = 1)]
    pub answers: usize,
    /// ... or after this many seconds
    #[arg(short = 'd', long, default_value_t = 10)]
    pub seconds: u64,
    /// Directory for svid.pem, key.pem and bundle.pem of the newest answer
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Leave out the security header that browsers cannot send
    #[arg(long)]
    pub without_header: bool,
}

/// Requests the SVID. The JSON's `ok` is true if as many answers arrived as requested.
///
/// # Errors
///
/// The endpoint cannot be reached, an answer contains an unreadable certificate, or a file cannot
/// be written.
pub async fn run(args: &WorkloadClientArgs) -> anyhow::Result<Value> {
    let mut client = SpiffeWorkloadApiClient::new(connect(&args.socket).await?);
    let mut request = tonic::Request::new(X509svidRequest {});
    if !args.without_header {
        request
            .metadata_mut()
            .insert("workload.spiffe.io", MetadataValue::from_static("true"));
    }
    let started = Instant::now();
    let mut stream = match client.fetch_x509svid(request).await {
        Ok(response) => response.into_inner(),
        Err(status) => {
            return Ok(
                json!({ "ok": false, "code": format!("{:?}", status.code()), "message": status.message() }),
            );
        }
    };
    let (mut answers, mut refused) = (Vec::new(), Value::Null);
    while answers.len() < args.answers {
        let left = Duration::from_secs(args.seconds).saturating_sub(started.elapsed());
        match tokio::time::timeout(left, stream.next()).await {
            Ok(Some(Ok(answer))) => {
                answers.push(report(&answer, started)?);
                if let Some(out) = &args.out {
                    write(out, &answer)?;
                }
            }
            Ok(Some(Err(status))) => {
                refused =
                    json!({ "code": format!("{:?}", status.code()), "message": status.message() });
                break;
            }
            Ok(None) | Err(_) => break,
        }
    }
    Ok(json!({ "ok": answers.len() >= args.answers, "answers": answers, "refused": refused }))
}

async fn connect(socket: &str) -> anyhow::Result<Channel> {
    if let Some(address) = socket.strip_prefix("tcp://") {
        let endpoint =
            Endpoint::from_shared(format!("http://{address}")).context("not an address")?;
        return endpoint
            .connect()
            .await
            .with_context(|| format!("connect to {socket}"));
    }
    let Some(path) = socket.strip_prefix("unix:") else {
        bail!("{socket:?} is not a socket; fix: write unix:PATH, unix:@NAME or tcp://IP:PORT")
    };
    let path = path.strip_prefix("//").unwrap_or(path).to_owned();
    // The URL is used only for the :authority header.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint
        .connect_with_connector(UnixDialer(path))
        .await
        .with_context(|| format!("connect to {socket}"))
}

/// Connects to a Unix socket. A leading `@` marks an abstract name.
#[derive(Clone)]
struct UnixDialer(String);

impl tonic::codegen::Service<Uri> for UnixDialer {
    type Response = TokioIo<UnixStream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let path = self.0.clone();
        Box::pin(async move {
            let stream = match path.strip_prefix('@') {
                Some(name) => {
                    let stream =
                        StdUnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
                    stream.set_nonblocking(true)?;
                    UnixStream::from_std(stream)?
                }
                None => UnixStream::connect(&path).await?,
            };
            Ok(TokioIo::new(stream))
        })
    }
}

/// Splits a sequence of DER certificates.
fn certificates(mut der: &[u8]) -> anyhow::Result<Vec<&[u8]>> {
    let mut all = Vec::new();
    while !der.is_empty() {
        let (rest, _) =
            X509Certificate::from_der(der).context("a certificate that cannot be read")?;
        all.push(&der[..der.len() - rest.len()]);
        der = rest;
    }
    Ok(all)
}

fn report(answer: &X509svidResponse, started: Instant) -> anyhow::Result<Value> {
    let svids: anyhow::Result<Vec<Value>> = answer.svids.iter().map(svid).collect();
    let mut federated = serde_json::Map::new();
    for (domain, bundle) in &answer.federated_bundles {
        federated.insert(domain.clone(), certificates(bundle)?.len().into());
    }
    Ok(
        json!({ "ms": started.elapsed().as_millis() as u64, "svids": svids?, "federated": federated, "crls": answer.crl.len() }),
    )
}

fn svid(svid: &X509svid) -> anyhow::Result<Value> {
    let chain = certificates(&svid.x509_svid)?;
    let leaf = chain.first().context("an SVID without a certificate")?;
    let (_, leaf) = X509Certificate::from_der(leaf).context("a leaf that cannot be read")?;
    Ok(json!({
        "spiffe_id": svid.spiffe_id,
        "serial": leaf.raw_serial_as_string(),
        "not_after": leaf.validity().not_after.timestamp(),
        "chain": chain.len(),
        "roots": certificates(&svid.bundle)?.len(),
        "key_bytes": svid.x509_svid_key.len(),
    }))
}

/// Writes the first SVID as PEM files.
fn write(out: &Path, answer: &X509svidResponse) -> anyhow::Result<()> {
    let Some(svid) = answer.svids.first() else {
        return Ok(());
    };
    let pem = |kind: &str, der: &[u8]| {
        let text = STANDARD.encode(der);
        let lines: Vec<&str> = text
            .as_bytes()
            .chunks(64)
            .map(|line| str::from_utf8(line).unwrap_or_default())
            .collect();
        format!(
            "-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n",
            lines.join("\n")
        )
    };
    let all = |der: &[u8]| {
        Ok::<_, anyhow::Error>(
            certificates(der)?
                .into_iter()
                .map(|one| pem("CERTIFICATE", one))
                .collect::<String>(),
        )
    };
    std::fs::create_dir_all(out)?;
    for (name, text) in [
        ("svid.pem", all(&svid.x509_svid)?),
        ("bundle.pem", all(&svid.bundle)?),
        ("key.pem", pem("PRIVATE KEY", &svid.x509_svid_key)),
    ] {
        std::fs::write(out.join(name), text)
            .with_context(|| format!("write {name} to {}", out.display()))?;
    }
    Ok(())
}
