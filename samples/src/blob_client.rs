//! The client of [`crate::blob`]: fetches or uploads deterministic bytes and checks each of them. Streams; never holds a body.

use std::time::Instant;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::answer::{self, AnswerBody};
use crate::load::connection::{Dialed, Protocol, dial};
use crate::pattern::{Checker, PatternBody};

/// What to do with the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// GET it and compare
    Get,
    /// PUT it and compare the server's digest
    Put,
    /// POST it to /echo and compare what comes back while it is sent
    Echo,
}

/// How the length is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Framing {
    /// Content-Length
    Length,
    /// Without a length: chunked in HTTP/1.1
    Chunked,
    /// Without a length, and trailers at the end
    Trailers,
}

/// What to move and how.
#[derive(Debug, Clone, Args)]
pub struct BlobClientArgs {
    /// Server, e.g. http://10.96.0.30:8080
    pub url: String,
    /// What to do
    #[arg(long, value_enum, default_value = "get")]
    pub mode: Mode,
    /// Bytes
    #[arg(long, default_value_t = 1 << 20)]
    pub size: u64,
    /// Which deterministic stream
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// How the length is told
    #[arg(long, value_enum, default_value = "length")]
    pub framing: Framing,
    /// HTTP version to speak
    #[arg(long, value_enum, default_value = "h1")]
    pub protocol: Protocol,
    /// Host header
    #[arg(long)]
    pub host: Option<String>,
}

/// Moves the body. The JSON's `ok` tells whether every byte and trailer was right.
pub async fn run(args: &BlobClientArgs) -> anyhow::Result<Value> {
    let base: Uri = args.url.parse().with_context(|| format!("{:?} is not a URL", args.url))?;
    let authority = base.authority().context("the URL has no host: write it like http://10.96.0.30:8080")?.to_string();
    let started = Instant::now();
    let mut connection = dial(&authority, args.protocol).await.map_err(|e| anyhow::anyhow!("connect to {authority}: {e}"))?;
    let response = send(args, &authority, &mut connection).await?;
    let (head, body) = response.into_parts();
    let verdict = match args.mode {
        Mode::Put => judge_digest(args, body).await?,
        Mode::Get | Mode::Echo => judge_bytes(args, body).await?,
    };
    let mut report = json!({
        "ok": head.status == 200 && verdict.right, "status": head.status.as_u16(), "mode": format!("{:?}", args.mode), "size": args.size,
        "length": verdict.length, "sha256": verdict.sha256, "differs_at": verdict.differs_at, "trailers": verdict.trailers,
        "elapsed_ms": started.elapsed().as_secs_f64() * 1e3,
    });
    report["mib_per_s"] = json!(verdict.length as f64 / (1 << 20) as f64 / started.elapsed().as_secs_f64());
    Ok(report)
}

/// The request for a mode: method, path and body.
fn request(args: &BlobClientArgs) -> (&'static str, String, AnswerBody) {
    let (seed, size) = (args.seed, args.size);
    let flag = match args.framing {
        Framing::Length => "",
        Framing::Chunked => "&chunked",
        Framing::Trailers => "&trailers",
    };
    let body = || match args.framing {
        Framing::Length => answer::boxed(PatternBody::sized(seed, size)),
        Framing::Chunked => answer::boxed(PatternBody::chunked(seed, size)),
        Framing::Trailers => answer::boxed(PatternBody::with_trailers(seed, size)),
    };
    match args.mode {
        Mode::Get => ("GET", format!("/blob?size={size}&seed={seed}{flag}"), answer::boxed(Empty::new())),
        Mode::Put => ("PUT", format!("/blob?seed={seed}"), body()),
        Mode::Echo => ("POST", "/echo".to_owned(), body()),
    }
}

async fn send(args: &BlobClientArgs, authority: &str, connection: &mut Dialed) -> anyhow::Result<Response<Incoming>> {
    let (method, path, body) = request(args);
    let host = args.host.as_deref().unwrap_or(authority);
    let uri = match args.protocol {
        Protocol::H1 => path,
        Protocol::H2 => format!("http://{host}{path}"),
    };
    let mut request = Request::builder().method(method).uri(uri).body(body)?;
    if args.protocol == Protocol::H1 {
        request.headers_mut().insert(header::HOST, HeaderValue::from_str(host)?);
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
    // Trailers are only sent to who asked (RFC 9110 §6.5.1), whatever version the last hop speaks.
    request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
    if args.framing == Framing::Trailers && args.mode != Mode::Get {
        request.headers_mut().insert(header::TRAILER, HeaderValue::from_static("x-length, x-sha256"));
    }
    Ok(connection.send(request).await?)
}

struct Verdict {
    right: bool,
    length: u64,
    sha256: String,
    differs_at: Option<u64>,
    trailers: Value,
}

async fn judge_bytes(args: &BlobClientArgs, mut body: Incoming) -> anyhow::Result<Verdict> {
    let mut checker = Checker::new(args.seed);
    let mut trailers = HeaderMap::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.with_context(|| format!("the body broke off after {} bytes", checker.length))?;
        match frame.into_data() {
            Ok(piece) => checker.take(&piece),
            Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
        }
    }
    let (length, differs_at) = (checker.length, checker.differs_at);
    let sha256 = checker.sha256();
    let told = trailers.get("x-sha256").and_then(|v| v.to_str().ok());
    // The echo server does not announce trailers in HTTP/1.1, so they are due only where the server made them.
    let trailers_right = args.framing != Framing::Trailers || args.mode == Mode::Echo || told == Some(sha256.as_str());
    let right = length == args.size && differs_at.is_none() && trailers_right;
    Ok(Verdict { right, length, differs_at, trailers: json!({ "x-sha256": told }), sha256 })
}

async fn judge_digest(args: &BlobClientArgs, body: Incoming) -> anyhow::Result<Verdict> {
    let bytes = body.collect().await.context("the answer broke off")?.to_bytes();
    let said: Value = serde_json::from_slice(&bytes).with_context(|| format!("not JSON: {:?}", String::from_utf8_lossy(&bytes)))?;
    let (Some(length), Some(sha256)) = (said["length"].as_u64(), said["sha256"].as_str()) else {
        bail!("the answer lacks length and sha256: {said}");
    };
    let trailers_right = args.framing != Framing::Trailers || said["trailers"]["x-sha256"] == said["sha256"];
    Ok(Verdict {
        right: length == args.size && said["as_pattern"] == true && trailers_right,
        length,
        sha256: sha256.to_owned(),
        differs_at: said["differs_at"].as_u64(),
        trailers: said["trailers"].clone(),
    })
}
