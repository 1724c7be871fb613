//! Calls from one sample to another over pooled HTTP/1.1 connections. It forwards the caller's
//! tracing headers and does not retry, so that a failure in the mesh is visible as a failure. Start
//! at [`UpstreamService`].

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;

use crate::pod::SERVED_BY;

/// Headers that an application in a mesh forwards, because they connect the hops of one request.
pub const PASSED_ON: [&str; 6] = [
    "x-request-id",
    "traceparent",
    "tracestate",
    "baggage",
    "end-user",
    "user-agent",
];
/// Timeout of a whole call. A person who runs the sample waits no longer for a page.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of an answer. The answers of other samples are small, so a larger one is an error.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Idle timeout of pooled connections. It is shorter than that of every server here, so that no
/// connection is closed under a request.
const POOL_IDLE: Duration = Duration::from_secs(15);

/// Another service, which is called by its URL.
#[derive(Debug, Clone)]
pub struct UpstreamService {
    base: String,
    host: Option<HeaderValue>,
    client: Client<HttpConnector, Empty<Bytes>>,
}

/// Reply of another service to a call.
#[derive(Debug, Clone)]
pub struct UpstreamReply {
    pub status: http::StatusCode,
    pub served_by: Option<String>,
    pub json: serde_json::Value,
}

impl UpstreamService {
    /// Creates a client for the service at `base`, which is like `http://10.96.0.11:9080`. `host`
    /// replaces the Host header.
    ///
    /// # Errors
    ///
    /// `base` is not a plain http URL, or `host` is not a header value.
    pub fn new(base: &str, host: Option<&str>) -> anyhow::Result<Self> {
        let base = base.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().with_context(|| {
            format!("{base:?} is not a URL; fix: write it like http://10.96.0.11:9080")
        })?;
        if uri.scheme_str() != Some("http") || uri.authority().is_none() {
            bail!("{base:?} is not a plain http URL; fix: write it like http://10.96.0.11:9080");
        }
        let host = host
            .map(HeaderValue::from_str)
            .transpose()
            .context("the Host to send is not a header value")?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CALL_TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(POOL_IDLE)
            .retry_canceled_requests(false)
            .build(connector);
        Ok(Self { base, host, client })
    }

    /// Creates a client from `$NAME_URL` (required) and `$NAME_HOST`.
    ///
    /// # Errors
    ///
    /// `$NAME_URL` is missing, or a value is wrong.
    pub fn from_env(name: &str) -> anyhow::Result<Self> {
        let url = std::env::var(format!("{name}_URL")).with_context(|| {
            format!(
                "${name}_URL is not set; fix: give the URL of that service, e.g. http://10.96.0.11:9080"
            )
        })?;
        Self::new(&url, std::env::var(format!("{name}_HOST")).ok().as_deref())
    }

    /// Sends GET for `path`, with the tracing headers of `incoming`.
    ///
    /// # Errors
    ///
    /// The call failed or did not end within 10 s.
    pub async fn get(&self, path: &str, incoming: &HeaderMap) -> anyhow::Result<UpstreamReply> {
        let call = self.get_unbounded(path, incoming);
        match tokio::time::timeout(CALL_TIMEOUT, call).await {
            Ok(reply) => reply.with_context(|| format!("GET {}{path}", self.base)),
            Err(_) => bail!(
                "GET {}{path}: no answer within {} s",
                self.base,
                CALL_TIMEOUT.as_secs()
            ),
        }
    }

    async fn get_unbounded(
        &self,
        path: &str,
        incoming: &HeaderMap,
    ) -> anyhow::Result<UpstreamReply> {
        let mut request = Request::get(format!("{}{path}", self.base)).body(Empty::new())?;
        for name in PASSED_ON {
            if let Some(value) = incoming.get(name) {
                request.headers_mut().insert(name, value.clone());
            }
        }
        if let Some(host) = &self.host {
            request.headers_mut().insert(header::HOST, host.clone());
        }
        let response = self.client.request(request).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|e| anyhow::anyhow!(e))?
            .to_bytes();
        let served_by = head
            .headers
            .get(SERVED_BY)
            .and_then(|v| v.to_str().ok())
            .map(str::to_owned);
        let json = serde_json::from_slice(&body).unwrap_or(serde_json::Value::Null);
        Ok(UpstreamReply {
            status: head.status,
            served_by,
            json,
        })
    }
}
