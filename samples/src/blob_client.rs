//! The client of [`crate::blob`]: downloads or uploads deterministic bytes and checks each of them.
//! It streams and never stores a whole body. Start at [`run`].

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use clap::{Args, ValueEnum};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use serde_json::{Value, json};
use tokio::time::Sleep;

use crate::answer::{self, SampleBody};
use crate::load::connection::{Dialed, Protocol, dial};
use canal_byte_pattern::{Checker, PatternBody};

/// Interval at which a paused body checks for the file that pauses it. Short against the seconds
/// for which tests pause a body.
const HOLD_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Direction and check of the transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BlobMode {
    /// GET it and compare
    Get,
    /// PUT it and compare the server's digest
    Put,
    /// POST it to /echo and compare the echoed bytes while it is sent
    Echo,
}

/// Announcement of the body's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BlobFraming {
    /// Content-Length
    Length,
    /// No length: chunked in HTTP/1.1
    Chunked,
    /// No length, and trailers at the end
    Trailers,
}

/// Server, and the body to transfer.
#[derive(Debug, Clone, Args)]
pub struct BlobClientArgs {
    /// URL of the server, e.g. http://10.96.0.30:8080
    pub url: String,
    /// Whether to send a body or to receive one
    #[arg(long, value_enum, default_value = "get")]
    pub mode: BlobMode,
    /// Number of bytes of the blob
    #[arg(long, default_value_t = 1 << 20)]
    pub size: u64,
    /// Number that selects the deterministic content
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// How the length is announced
    #[arg(long, value_enum, default_value = "length")]
    pub framing: BlobFraming,
    /// HTTP version that the client speaks
    #[arg(long, value_enum, default_value = "h1")]
    pub protocol: Protocol,
    /// Value of the Host header
    #[arg(long)]
    pub host: Option<String>,
    /// Create this file when half of the sent body has been produced, and send the rest when it has
    /// been removed
    #[arg(long)]
    pub hold_file: Option<PathBuf>,
}

/// A body that stops half-way for as long as a file exists, so that a test can make a change in the
/// middle of a transfer.
struct HeldBody {
    body: PatternBody,
    half: u64,
    /// The file; `None` once it has been removed.
    file: Option<PathBuf>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Body for HeldBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        while let Some(file) = this
            .file
            .as_ref()
            .filter(|_| this.body.position() >= this.half)
        {
            match &mut this.pause {
                // Without the file the body cannot be paused, and the test that waits for it fails.
                None => drop(std::fs::write(file, "")),
                Some(pause) => ready!(pause.as_mut().poll(cx)),
            }
            if file.exists() {
                this.pause = Some(Box::pin(tokio::time::sleep(HOLD_POLL_INTERVAL)));
            } else {
                this.file = None;
            }
        }
        Pin::new(&mut this.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Transfers the body. The JSON's `ok` is true if every byte and trailer was right.
///
/// # Errors
///
/// The URL is wrong, the connect failed, or the transfer broke off.
pub async fn run(args: &BlobClientArgs) -> anyhow::Result<Value> {
    let base: Uri = args
        .url
        .parse()
        .with_context(|| format!("{:?} is not a URL", args.url))?;
    let authority = base
        .authority()
        .context("the URL has no host; fix: write it like http://10.96.0.30:8080")?
        .to_string();
    let started = Instant::now();
    let mut connection = dial(&authority, args.protocol)
        .await
        .map_err(|e| anyhow::anyhow!("connect to {authority}: {e}"))?;
    let response = send(args, &authority, &mut connection).await?;
    let (head, body) = response.into_parts();
    let verdict = match args.mode {
        BlobMode::Put => check_digest(args, body).await?,
        BlobMode::Get | BlobMode::Echo => check_bytes(args, body).await?,
    };
    let mut report = json!({
        "ok": head.status == 200 && verdict.right, "status": head.status.as_u16(), "mode": format!("{:?}", args.mode), "size": args.size,
        "length": verdict.length, "sha256": verdict.sha256, "differs_at": verdict.differs_at, "trailers": verdict.trailers,
        "elapsed_ms": started.elapsed().as_secs_f64() * 1e3,
    });
    report["mib_per_s"] =
        json!(verdict.length as f64 / (1 << 20) as f64 / started.elapsed().as_secs_f64());
    Ok(report)
}

/// Returns method, path and body of the request for a mode.
fn request(args: &BlobClientArgs) -> (&'static str, String, SampleBody) {
    let (seed, size) = (args.seed, args.size);
    let flag = match args.framing {
        BlobFraming::Length => "",
        BlobFraming::Chunked => "&chunked",
        BlobFraming::Trailers => "&trailers",
    };
    let body = || {
        let body = match args.framing {
            BlobFraming::Length => PatternBody::sized(seed, size),
            BlobFraming::Chunked => PatternBody::chunked(seed, size),
            BlobFraming::Trailers => PatternBody::with_trailers(seed, size),
        };
        answer::boxed(HeldBody {
            body,
            half: size / 2,
            file: args.hold_file.clone(),
            pause: None,
        })
    };
    match args.mode {
        BlobMode::Get => (
            "GET",
            format!("/blob?size={size}&seed={seed}{flag}"),
            answer::boxed(Empty::new()),
        ),
        BlobMode::Put => ("PUT", format!("/blob?seed={seed}"), body()),
        BlobMode::Echo => ("POST", "/echo".to_owned(), body()),
    }
}

async fn send(
    args: &BlobClientArgs,
    authority: &str,
    connection: &mut Dialed,
) -> anyhow::Result<Response<Incoming>> {
    let (method, path, body) = request(args);
    let host = args.host.as_deref().unwrap_or(authority);
    let uri = match args.protocol {
        Protocol::H1 => path,
        Protocol::H2 => format!("http://{host}{path}"),
    };
    let mut request = Request::builder().method(method).uri(uri).body(body)?;
    if args.protocol == Protocol::H1 {
        request
            .headers_mut()
            .insert(header::HOST, HeaderValue::from_str(host)?);
        request
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("te"));
    }
    // Servers send trailers only to clients that announce support for them (RFC 9110 §6.5.1),
    // whatever version the last hop uses.
    request
        .headers_mut()
        .insert(header::TE, HeaderValue::from_static("trailers"));
    if args.framing == BlobFraming::Trailers && args.mode != BlobMode::Get {
        request.headers_mut().insert(
            header::TRAILER,
            HeaderValue::from_static("x-length, x-sha256"),
        );
    }
    Ok(connection.send(request).await?)
}

struct BlobVerdict {
    right: bool,
    length: u64,
    sha256: String,
    differs_at: Option<u64>,
    trailers: Value,
}

async fn check_bytes(args: &BlobClientArgs, mut body: Incoming) -> anyhow::Result<BlobVerdict> {
    let mut checker = Checker::new(args.seed);
    let mut trailers = HeaderMap::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.with_context(|| format!("the body broke off after {} bytes", checker.length))?;
        match frame.into_data() {
            Ok(piece) => checker.take(&piece),
            Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
        }
    }
    let (length, differs_at) = (checker.length, checker.differs_at);
    let sha256 = checker.sha256();
    let announced = trailers.get("x-sha256").and_then(|v| v.to_str().ok());
    // The echo server does not announce trailers in HTTP/1.1, so trailers are required only where
    // the server creates them.
    let trailers_right = args.framing != BlobFraming::Trailers
        || args.mode == BlobMode::Echo
        || announced == Some(sha256.as_str());
    let right = length == args.size && differs_at.is_none() && trailers_right;
    Ok(BlobVerdict {
        right,
        length,
        differs_at,
        trailers: json!({ "x-sha256": announced }),
        sha256,
    })
}

async fn check_digest(args: &BlobClientArgs, body: Incoming) -> anyhow::Result<BlobVerdict> {
    let bytes = body
        .collect()
        .await
        .context("the answer broke off")?
        .to_bytes();
    let received: Value = serde_json::from_slice(&bytes)
        .with_context(|| format!("not JSON: {:?}", String::from_utf8_lossy(&bytes)))?;
    let (Some(length), Some(sha256)) = (received["length"].as_u64(), received["sha256"].as_str())
    else {
        bail!("the answer lacks length and sha256: {received}");
    };
    let trailers_right = args.framing != BlobFraming::Trailers
        || received["trailers"]["x-sha256"] == received["sha256"];
    Ok(BlobVerdict {
        right: length == args.size && received["as_pattern"] == true && trailers_right,
        length,
        sha256: sha256.to_owned(),
        differs_at: received["differs_at"].as_u64(),
        trailers: received["trailers"].clone(),
    })
}
