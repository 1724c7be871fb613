//! Clients that send raw bytes and read responses with their own parser, so that these tests do not
//! depend on the codec under test.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// A client's connection, with the bytes that were read and not consumed.
pub(crate) struct HttpClient<S = TcpStream> {
    pub(crate) stream: S,
    pub(crate) buffer: Vec<u8>,
}

/// A response that a client has read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// Trailer lines of a chunked body.
    pub(crate) trailers: Vec<String>,
}

impl ClientResponse {
    /// Returns the first value of a field.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.head.split("\r\n").skip(1).find_map(|l| {
            let (n, v) = l.split_once(':')?;
            n.eq_ignore_ascii_case(name).then(|| v.trim())
        })
    }
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl HttpClient {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        // The call fails on a connection that was already reset, which some tests want.
        let _ = stream.set_nodelay(true);
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    /// Sends one request on a new connection.
    pub(crate) async fn once(address: SocketAddr, request: &str) -> ClientResponse {
        let mut client = Self::connect(address).await;
        client.send(request.as_bytes()).await;
        let head = request.starts_with("HEAD");
        client.answer_to(head).await.expect("an answer")
    }

    /// Sends a GET of a path on a new connection.
    pub(crate) async fn get(address: SocketAddr, path: &str) -> ClientResponse {
        Self::once(
            address,
            &format!("GET {path} HTTP/1.1\r\nHost: web\r\n\r\n"),
        )
        .await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> HttpClient<S> {
    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        // A server that refuses early closes the connection; only its response matters.
        let _ = self.stream.write_all(bytes).await;
        let _ = self.stream.flush().await;
    }

    /// Reads the next response; `None` if the connection ends before its first byte.
    pub(crate) async fn answer(&mut self) -> Option<ClientResponse> {
        self.answer_to(false).await
    }

    pub(crate) async fn answer_to(&mut self, head_request: bool) -> Option<ClientResponse> {
        tokio::time::timeout(
            canal_timing::deadline(Duration::from_secs(20)),
            self.read_answer(head_request),
        )
        .await
        .expect("an answer within 20 s")
    }

    async fn read_answer(&mut self, head_request: bool) -> Option<ClientResponse> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more().await {
                assert!(
                    self.buffer.is_empty(),
                    "a torn head: {:?}",
                    String::from_utf8_lossy(&self.buffer)
                );
                return None;
            }
        };
        let head = String::from_utf8(self.buffer.drain(..end).collect()).unwrap();
        let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = ClientResponse {
            status,
            head,
            body: vec![],
            trailers: vec![],
        };
        if head_request || matches!(status, 100..=199 | 204 | 304) {
            return Some(answer);
        }
        if let Some(n) = answer
            .field("content-length")
            .map(|n| n.parse::<usize>().unwrap())
        {
            answer.body = self.exactly(n).await;
        } else if answer.field("transfer-encoding") == Some("chunked") {
            (answer.body, answer.trailers) = self.chunks().await;
        } else {
            while self.more().await {}
            answer.body = std::mem::take(&mut self.buffer);
        }
        Some(answer)
    }

    async fn chunks(&mut self) -> (Vec<u8>, Vec<String>) {
        let (mut body, mut trailers) = (Vec::new(), Vec::new());
        loop {
            let line = self.line().await;
            let size = usize::from_str_radix(line.split(';').next().unwrap(), 16).unwrap();
            if size == 0 {
                break;
            }
            body.extend(self.exactly(size).await);
            assert_eq!(self.line().await, "", "a chunk's end");
        }
        loop {
            let line = self.line().await;
            if line.is_empty() {
                return (body, trailers);
            }
            trailers.push(line);
        }
    }

    pub(crate) async fn line(&mut self) -> String {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..at + 2).collect();
                return String::from_utf8_lossy(&line[..at]).into_owned();
            }
            assert!(self.more().await, "the connection ended inside a body");
        }
    }

    pub(crate) async fn exactly(&mut self, n: usize) -> Vec<u8> {
        while self.buffer.len() < n {
            assert!(
                self.more().await,
                "the connection ended after {} of {n} bytes",
                self.buffer.len()
            );
        }
        self.buffer.drain(..n).collect()
    }

    /// Reads more bytes; false at the end, and at a reset.
    pub(crate) async fn more(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.buffer).await, Ok(1..))
    }

    /// Waits until the server closes. Returns `true` for an orderly end, `false` for a reset.
    pub(crate) async fn closed(&mut self) -> bool {
        let read = async {
            loop {
                match self.stream.read_buf(&mut self.buffer).await {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(_) => return false,
                }
            }
        };
        tokio::time::timeout(canal_timing::deadline(Duration::from_secs(20)), read)
            .await
            .expect("a close within 20 s")
    }
}
