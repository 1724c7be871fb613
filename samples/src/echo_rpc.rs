//! The gRPC echo service: all four call types, with status codes and metadata on request. `/health`
//! answers plain HTTP on the same port.
//!
//! The `x-echo-*` metadata of a request is returned as initial metadata. Trailers contain
//! `x-served-by` and `x-pod`.

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{KeyAndValueRef, MetadataMap};
use tonic::{Code, Response, Status, Streaming};

use crate::answer::{self, SampleResponse};
use crate::pod::PodName;
use crate::proto::echo_server::{Echo, EchoServer};
use crate::proto::{EchoReply, EchoRequest, EchoSummary};
use canal_byte_pattern::hex;

/// Maximum size of a message in both directions, in bytes. Far above gRPC's default of 4 MiB, so
/// that no test of a large message fails here.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Maximum number of answers that wait for the client of one stream. It is small, so that
/// back-pressure reaches the sender.
const REPLIES_QUEUED: usize = 4;

/// The echo service of one pod.
#[derive(Debug, Clone)]
pub struct EchoService {
    pod: PodName,
}

type Replies = Pin<Box<dyn Stream<Item = Result<EchoReply, Status>> + Send>>;

impl EchoService {
    /// Creates a service that answers as `pod`.
    pub fn new(pod: PodName) -> Self {
        Self { pod }
    }

    /// Answers one HTTP request: `/health`, or a gRPC call.
    pub async fn answer(self, request: Request<Incoming>) -> SampleResponse {
        if request.uri().path() == "/health" {
            return answer::json(
                StatusCode::OK,
                &serde_json::json!({ "status": "ok", "pod": self.pod.name }),
            );
        }
        let mut server = EchoServer::new(self)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        match tonic::codegen::Service::call(&mut server, request).await {
            Ok(response) => response.map(answer::boxed),
            Err(never) => match never {},
        }
    }

    fn reply(&self, index: u32, payload: Vec<u8>) -> EchoReply {
        EchoReply {
            payload,
            index,
            served_by: self.pod.served_by(),
            pod: self.pod.name.clone(),
        }
    }

    /// Returns the `x-echo-*` metadata of the request, and the pod's headers.
    fn metadata(&self, received: &MetadataMap) -> MetadataMap {
        let mut headers = http::HeaderMap::new();
        for pair in received.iter() {
            let name = match pair {
                KeyAndValueRef::Ascii(key, _) => key.as_str(),
                KeyAndValueRef::Binary(key, _) => key.as_str(),
            };
            let wanted = received
                .as_ref()
                .get(name)
                .filter(|_| name.starts_with("x-echo-"));
            if let (Some(value), Ok(name)) = (wanted, http::HeaderName::from_bytes(name.as_bytes()))
            {
                headers.insert(name, value.clone());
            }
        }
        self.pod.sign(&mut headers);
        MetadataMap::from_headers(headers)
    }
}

/// Returns the status that a request demands; `None` for OK.
fn decide_status(request: &EchoRequest) -> Option<Status> {
    match request.status_code {
        0 => None,
        code => Some(Status::new(
            Code::from_i32(i32::try_from(code).unwrap_or(2)),
            request.status_message.clone(),
        )),
    }
}

async fn pause(ms: u32) {
    if ms > 0 {
        tokio::time::sleep(Duration::from_millis(ms.into())).await;
    }
}

#[tonic::async_trait]
impl Echo for EchoService {
    async fn unary(
        &self,
        request: tonic::Request<EchoRequest>,
    ) -> Result<Response<EchoReply>, Status> {
        let metadata = self.metadata(request.metadata());
        let request = request.into_inner();
        pause(request.delay_ms).await;
        if let Some(mut status) = decide_status(&request) {
            *status.metadata_mut() = metadata;
            return Err(status);
        }
        let mut response = Response::new(self.reply(0, request.payload));
        *response.metadata_mut() = metadata;
        Ok(response)
    }

    type ServerStreamStream = Replies;

    async fn server_stream(
        &self,
        request: tonic::Request<EchoRequest>,
    ) -> Result<Response<Replies>, Status> {
        let metadata = self.metadata(request.metadata());
        let request = request.into_inner();
        let (sender, receiver) = mpsc::channel(REPLIES_QUEUED);
        let service = self.clone();
        tokio::spawn(async move {
            pause(request.delay_ms).await;
            for index in 0..request.count {
                if index > 0 {
                    pause(request.interval_ms).await;
                }
                // An error means that the client has gone away.
                if sender
                    .send(Ok(service.reply(index, request.payload.clone())))
                    .await
                    .is_err()
                {
                    return;
                }
            }
            if let Some(status) = decide_status(&request) {
                let _ = sender.send(Err(status)).await;
            }
        });
        let mut response: Response<Replies> =
            Response::new(Box::pin(ReceiverStream::new(receiver)));
        *response.metadata_mut() = metadata;
        Ok(response)
    }

    async fn client_stream(
        &self,
        request: tonic::Request<Streaming<EchoRequest>>,
    ) -> Result<Response<EchoSummary>, Status> {
        let metadata = self.metadata(request.metadata());
        let mut messages = request.into_inner();
        let mut summary = EchoSummary {
            served_by: self.pod.served_by(),
            ..EchoSummary::default()
        };
        let mut digest = Sha256::new();
        while let Some(message) = messages.next().await {
            let message = message?;
            if let Some(status) = decide_status(&message) {
                return Err(status);
            }
            pause(message.delay_ms).await;
            summary.messages += 1;
            summary.bytes += message.payload.len() as u64;
            digest.update(&message.payload);
        }
        summary.sha256 = hex(&digest.finalize());
        let mut response = Response::new(summary);
        *response.metadata_mut() = metadata;
        Ok(response)
    }

    type BidiStream = Replies;

    async fn bidi(
        &self,
        request: tonic::Request<Streaming<EchoRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let metadata = self.metadata(request.metadata());
        let mut messages = request.into_inner();
        let (sender, receiver) = mpsc::channel(REPLIES_QUEUED);
        let service = self.clone();
        tokio::spawn(async move {
            let mut index = 0;
            while let Some(Ok(message)) = messages.next().await {
                pause(message.delay_ms).await;
                let status = decide_status(&message);
                let last = status.is_some();
                let reply = match status {
                    Some(status) => Err(status),
                    None => Ok(service.reply(index, message.payload)),
                };
                if sender.send(reply).await.is_err() || last {
                    return;
                }
                index += 1;
            }
        });
        let mut response: Response<Replies> =
            Response::new(Box::pin(ReceiverStream::new(receiver)));
        *response.metadata_mut() = metadata;
        Ok(response)
    }
}
