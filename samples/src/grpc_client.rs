//! The gRPC client role: makes calls of one type and prints the result as JSON. It checks the
//! result (`ok`) and does not retry. Start at [`run`].

use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio_stream::StreamExt;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::echo_rpc::MESSAGE_BYTES_MAX;
use crate::proto::echo_client::EchoClient;
use crate::proto::{EchoReply, EchoRequest};
use canal_byte_pattern::{fill, hex};

/// Type of the gRPC call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GrpcCallMode {
    Unary,
    ServerStream,
    ClientStream,
    Bidi,
}

/// Server, call and expected result.
#[derive(Debug, Clone, Args)]
pub struct GrpcClientArgs {
    /// Address of the server, e.g. 10.96.0.20:9000 or [fd00::20]:9000
    pub address: String,
    /// Kind of call: unary or a stream
    #[arg(long, value_enum, default_value = "unary")]
    pub mode: GrpcCallMode,
    /// Messages to send (client-stream, bidi) or to request (server-stream); calls to make (unary)
    #[arg(long, default_value_t = 1)]
    pub count: u32,
    /// Bytes of payload in each message
    #[arg(long, default_value_t = 32)]
    pub size: usize,
    /// Milliseconds between messages of a stream
    #[arg(long, default_value_t = 0)]
    pub interval_ms: u32,
    /// gRPC status code to request from the server; the call is ok if it ends with this code
    #[arg(long, default_value_t = 0)]
    pub status: u32,
    /// Message that goes with --status
    #[arg(long, default_value = "asked for")]
    pub status_message: String,
    /// Milliseconds the server waits before it answers
    #[arg(long, default_value_t = 0)]
    pub delay_ms: u32,
    /// Deadline of the whole call, sent as grpc-timeout
    #[arg(long, default_value_t = 30_000)]
    pub timeout_ms: u64,
    /// Value of the :authority header
    #[arg(long)]
    pub authority: Option<String>,
    /// Metadata, as name=value; names starting with x-echo- come back
    #[arg(long = "metadata", value_name = "NAME=VALUE")]
    pub metadata: Vec<String>,
}

/// Result of one gRPC call.
#[derive(Debug, Default)]
struct GrpcOutcome {
    messages: u64,
    bytes: u64,
    intact: bool,
    served_by: String,
    pod: String,
    headers: Option<MetadataMap>,
    trailers: Option<MetadataMap>,
}

/// Makes the call. The JSON's `ok` is true if status, count and bytes were as requested.
///
/// # Errors
///
/// The value of --status is too large.
pub async fn run(args: &GrpcClientArgs) -> anyhow::Result<Value> {
    let started = Instant::now();
    let result = match connect(args).await {
        Ok(client) => call(args, client).await,
        Err(problem) => Err(Status::unavailable(format!("connect: {problem:#}"))),
    };
    let (status, outcome) = match result {
        Ok(outcome) => (Status::new(Code::Ok, ""), outcome),
        Err(status) => (as_grpc(status), GrpcOutcome::default()),
    };
    let requested = Code::from_i32(
        i32::try_from(args.status).context("--status is too large: gRPC codes are 0 to 16")?,
    );
    let is_complete = match requested {
        Code::Ok => outcome.intact && outcome.messages == u64::from(args.count),
        _ => status.message() == args.status_message,
    };
    let trailers = outcome.trailers.as_ref().or(Some(status.metadata()));
    Ok(json!({
        "ok": status.code() == requested && is_complete,
        "mode": format!("{:?}", args.mode),
        "status": status.code() as i32,
        "message": status.message(),
        "messages": outcome.messages,
        "bytes": outcome.bytes,
        "intact": outcome.intact,
        "served_by": outcome.served_by,
        "pod": outcome.pod,
        "headers": outcome.headers.as_ref().map(metadata_json),
        "trailers": trailers.map(metadata_json),
        "elapsed_ms": started.elapsed().as_secs_f64() * 1e3,
    }))
}

/// Maps tonic's CANCELLED for its own expired deadline to DEADLINE_EXCEEDED, which is gRPC's code
/// (statuscodes.md).
fn as_grpc(status: Status) -> Status {
    match (status.code(), status.message()) {
        (Code::Cancelled, "Timeout expired") => {
            Status::deadline_exceeded("the deadline passed at the client")
        }
        _ => status,
    }
}

async fn connect(args: &GrpcClientArgs) -> anyhow::Result<EchoClient<Channel>> {
    let mut endpoint = Endpoint::from_shared(format!("http://{}", args.address))
        .with_context(|| {
            format!(
                "{:?} is not an address; fix: write it like 10.96.0.20:9000",
                args.address
            )
        })?
        .connect_timeout(Duration::from_millis(args.timeout_ms));
    if let Some(authority) = &args.authority {
        endpoint = endpoint.origin(
            format!("http://{authority}")
                .parse()
                .context("--authority is not host[:port]")?,
        );
    }
    let channel = endpoint.connect().await?;
    Ok(EchoClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX))
}

async fn call(args: &GrpcClientArgs, client: EchoClient<Channel>) -> Result<GrpcOutcome, Status> {
    match args.mode {
        GrpcCallMode::Unary => unary(args, client).await,
        GrpcCallMode::ServerStream => server_stream(args, client).await,
        GrpcCallMode::ClientStream => client_stream(args, client).await,
        GrpcCallMode::Bidi => bidi(args, client).await,
    }
}

fn message(args: &GrpcClientArgs, index: u32) -> EchoRequest {
    EchoRequest {
        payload: fill(u64::from(index), 0, args.size).to_vec(),
        count: args.count,
        interval_ms: args.interval_ms,
        status_code: args.status,
        status_message: args.status_message.clone(),
        delay_ms: args.delay_ms,
    }
}

/// Returns all messages of a stream. Only the last one requests the status, so that the earlier
/// ones are answered.
fn messages(
    args: &GrpcClientArgs,
) -> impl tokio_stream::Stream<Item = EchoRequest> + Send + 'static {
    let (args, count) = (args.clone(), args.count);
    tokio_stream::iter(0..count).then(move |index| {
        let mut next = message(&args, index);
        if index + 1 < count {
            next.status_code = 0;
        }
        async move {
            if index > 0 && next.interval_ms > 0 {
                tokio::time::sleep(Duration::from_millis(next.interval_ms.into())).await;
            }
            next
        }
    })
}

fn request<T>(args: &GrpcClientArgs, message: T) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_millis(args.timeout_ms));
    for pair in &args.metadata {
        let parts = pair.split_once('=').and_then(|(name, value)| {
            Some((
                MetadataKey::from_bytes(name.as_bytes()).ok()?,
                MetadataValue::try_from(value).ok()?,
            ))
        });
        let (name, value) = parts.ok_or_else(|| {
            Status::invalid_argument(format!(
                "--metadata {pair:?} has no =; fix: write it as name=value"
            ))
        })?;
        request.metadata_mut().insert(name, value);
    }
    Ok(request)
}

async fn unary(
    args: &GrpcClientArgs,
    mut client: EchoClient<Channel>,
) -> Result<GrpcOutcome, Status> {
    let mut outcome = GrpcOutcome {
        intact: true,
        ..GrpcOutcome::default()
    };
    for index in 0..args.count {
        let response = client.unary(request(args, message(args, index))?).await?;
        outcome.headers = Some(response.metadata().clone());
        outcome.take(args, u64::from(index), response.into_inner());
    }
    Ok(outcome)
}

async fn server_stream(
    args: &GrpcClientArgs,
    mut client: EchoClient<Channel>,
) -> Result<GrpcOutcome, Status> {
    let response = client
        .server_stream(request(args, message(args, 0))?)
        .await?;
    let mut outcome = GrpcOutcome {
        intact: true,
        headers: Some(response.metadata().clone()),
        ..GrpcOutcome::default()
    };
    let mut replies = response.into_inner();
    while let Some(reply) = replies.message().await? {
        outcome.intact &= u64::from(reply.index) == outcome.messages;
        outcome.take(args, 0, reply);
    }
    outcome.trailers = replies.trailers().await?;
    Ok(outcome)
}

async fn client_stream(
    args: &GrpcClientArgs,
    mut client: EchoClient<Channel>,
) -> Result<GrpcOutcome, Status> {
    let response = client.client_stream(request(args, messages(args))?).await?;
    let headers = response.metadata().clone();
    let summary = response.into_inner();
    let mut digest = Sha256::new();
    for index in 0..args.count {
        digest.update(fill(u64::from(index), 0, args.size));
    }
    Ok(GrpcOutcome {
        messages: summary.messages,
        bytes: summary.bytes,
        intact: summary.sha256 == hex(&digest.finalize()),
        served_by: summary.served_by,
        headers: Some(headers),
        ..GrpcOutcome::default()
    })
}

async fn bidi(
    args: &GrpcClientArgs,
    mut client: EchoClient<Channel>,
) -> Result<GrpcOutcome, Status> {
    let response = client.bidi(request(args, messages(args))?).await?;
    let mut outcome = GrpcOutcome {
        intact: true,
        headers: Some(response.metadata().clone()),
        ..GrpcOutcome::default()
    };
    let mut replies = response.into_inner();
    while let Some(reply) = replies.message().await? {
        outcome.intact &= u64::from(reply.index) == outcome.messages;
        let index = outcome.messages;
        outcome.take(args, index, reply);
    }
    outcome.trailers = replies.trailers().await?;
    Ok(outcome)
}

impl GrpcOutcome {
    /// Counts a reply that must echo message `index`.
    fn take(&mut self, args: &GrpcClientArgs, index: u64, reply: EchoReply) {
        self.intact &= reply.payload == fill(index, 0, args.size);
        self.messages += 1;
        self.bytes += reply.payload.len() as u64;
        (self.served_by, self.pod) = (reply.served_by, reply.pod);
    }
}

fn metadata_json(metadata: &MetadataMap) -> Value {
    let pairs = metadata.as_ref().iter().map(|(name, value)| {
        let text = value
            .to_str()
            .map_or_else(|_| format!("{value:?}"), str::to_owned);
        (name.to_string(), Value::from(text))
    });
    Value::Object(pairs.collect())
}
