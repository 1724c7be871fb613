//! The WebSocket client role: sends messages of given sizes, checks each echo, a ping and the
//! close, and prints JSON. Start at [`run`].

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use futures::{SinkExt, StreamExt};
use http::{HeaderValue, Uri};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Bytes, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use crate::load::histogram::LatencyHistogram;
use crate::pod::SERVED_BY;
use crate::ws::limits;
use canal_byte_pattern::fill;

/// Server, and the messages to send.
#[derive(Debug, Clone, Args)]
pub struct WsClientArgs {
    /// URL of the server, e.g. ws://10.96.0.40:8081/echo
    pub url: String,
    /// Number of messages to send
    #[arg(long, default_value_t = 10)]
    pub count: u32,
    /// Number of bytes per message
    #[arg(long, default_value_t = 64)]
    pub size: usize,
    /// Number of milliseconds between two messages
    #[arg(long, default_value_t = 0)]
    pub interval_ms: u64,
    /// Maximum wait for one echo
    #[arg(long, default_value_t = 10_000)]
    pub timeout_ms: u64,
    /// Value of the Host header
    #[arg(long)]
    pub host: Option<String>,
}

/// Results of one WebSocket session.
#[derive(Default)]
struct WsSession {
    echoed: u32,
    intact: bool,
    pong: bool,
    close_code: Option<u16>,
    rtt: LatencyHistogram,
}

/// Runs the session. The JSON's `ok` is true if all echoes were right and the close was clean.
///
/// # Errors
///
/// The URL is wrong, or the connect or the WebSocket handshake failed.
pub async fn run(args: &WsClientArgs) -> anyhow::Result<Value> {
    let (mut socket, served_by) = connect(args).await?;
    let mut session = WsSession {
        intact: true,
        ..WsSession::default()
    };
    let ended = converse(args, &mut socket, &mut session).await;
    let clean = ended.is_ok() && session.close_code == Some(1000);
    Ok(json!({
        "ok": clean && session.intact && session.pong && session.echoed == args.count,
        "sent": args.count, "echoed": session.echoed, "intact": session.intact, "pong": session.pong,
        "close_code": session.close_code, "served_by": served_by,
        "rtt_us": { "p50": session.rtt.quantile(0.5), "p99": session.rtt.quantile(0.99), "max": session.rtt.max() },
        "error": ended.err().map(|e| format!("{e:#}")),
    }))
}

async fn connect(
    args: &WsClientArgs,
) -> anyhow::Result<(WebSocketStream<TcpStream>, Option<String>)> {
    let uri: Uri = args
        .url
        .parse()
        .with_context(|| format!("{:?} is not a URL", args.url))?;
    let authority = uri
        .authority()
        .context("the URL has no host; fix: write it like ws://10.96.0.40:8081/")?;
    let port = authority.port_u16().unwrap_or(80);
    let host = authority.host().trim_matches(['[', ']']);
    let stream = within(args, TcpStream::connect((host, port)))
        .await?
        .with_context(|| format!("connect to {authority}"))?;
    stream.set_nodelay(true)?;
    let mut request = args.url.as_str().into_client_request()?;
    if let Some(host) = &args.host {
        request
            .headers_mut()
            .insert(http::header::HOST, HeaderValue::from_str(host)?);
    }
    let (socket, response) = within(
        args,
        client_async_with_config(request, stream, Some(limits())),
    )
    .await?
    .context("the WebSocket handshake was refused")?;
    let served_by = response
        .headers()
        .get(SERVED_BY)
        .and_then(|v| v.to_str().ok())
        .map(str::to_owned);
    Ok((socket, served_by))
}

async fn within<F: Future>(args: &WsClientArgs, work: F) -> anyhow::Result<F::Output> {
    tokio::time::timeout(Duration::from_millis(args.timeout_ms), work)
        .await
        .with_context(|| format!("no answer within {} ms", args.timeout_ms))
}

/// Returns text and binary messages in turn, because the echo must preserve both kinds.
fn message(args: &WsClientArgs, index: u32) -> Message {
    let bytes = fill(u64::from(index), 0, args.size);
    if index.is_multiple_of(2) {
        Message::Binary(bytes)
    } else {
        let text: String = bytes.iter().map(|b| char::from(b'a' + b % 26)).collect();
        Message::Text(text.into())
    }
}

async fn converse(
    args: &WsClientArgs,
    socket: &mut WebSocketStream<TcpStream>,
    session: &mut WsSession,
) -> anyhow::Result<()> {
    for index in 0..args.count {
        if index > 0 && args.interval_ms > 0 {
            tokio::time::sleep(Duration::from_millis(args.interval_ms)).await;
        }
        let sent = message(args, index);
        let started = Instant::now();
        socket.send(sent.clone()).await.context("send")?;
        let echoed = within(args, next(socket)).await??;
        session.rtt.record(started.elapsed());
        session.echoed += 1;
        session.intact &= echoed == sent;
    }
    let ping = Bytes::from_static(b"canal");
    socket
        .send(Message::Ping(ping.clone()))
        .await
        .context("ping")?;
    session.pong = within(args, next(socket)).await?? == Message::Pong(ping);
    let goodbye = CloseFrame {
        code: CloseCode::Normal,
        reason: "done".into(),
    };
    socket
        .send(Message::Close(Some(goodbye)))
        .await
        .context("close")?;
    while let Some(message) = within(args, socket.next()).await? {
        if let Message::Close(frame) = message? {
            session.close_code = frame.map(|f| f.code.into());
        }
    }
    Ok(())
}

async fn next(socket: &mut WebSocketStream<TcpStream>) -> anyhow::Result<Message> {
    match socket.next().await {
        Some(message) => Ok(message.context("receive")?),
        None => bail!("the server ended the session"),
    }
}
