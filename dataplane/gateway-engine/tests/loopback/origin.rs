//! Endpoints: loopback servers that follow a script byte for byte, or echo.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::fixture::LOCALHOST;

/// A server whose tasks end with the test's runtime.
#[derive(Clone)]
pub(crate) struct OriginServer {
    pub(crate) address: SocketAddr,
    /// Number of connections accepted so far.
    pub(crate) connections: Arc<AtomicUsize>,
    /// Number of request heads read so far.
    pub(crate) requests: Arc<AtomicUsize>,
}

impl OriginServer {
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    /// Starts a server that calls `serve` with each connection.
    pub(crate) async fn each<F, R>(serve: F) -> Self
    where
        F: Fn(Peer) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        Self::at(LOCALHOST, serve).await
    }

    pub(crate) async fn at<F, R>(address: SocketAddr, serve: F) -> Self
    where
        F: Fn(Peer) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        Self::on(TcpListener::bind(address).await.unwrap(), serve)
    }

    pub(crate) fn on<F, R>(listener: TcpListener, serve: F) -> Self
    where
        F: Fn(Peer) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let origin = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            requests: Arc::default(),
        };
        let (connections, requests) = (origin.connections.clone(), origin.requests.clone());
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(Peer {
                    stream,
                    buffer: Vec::new(),
                    requests: requests.clone(),
                }));
            }
        });
        origin
    }

    /// Starts a server that responds to every complete request with `answer`, verbatim.
    pub(crate) async fn fixed(answer: &'static str) -> Self {
        Self::each(move |mut peer| async move {
            while peer.request().await.is_some() {
                peer.write(answer.as_bytes()).await;
            }
        })
        .await
    }

    /// Starts a server that responds with 200 and the request as it arrived: head and decoded body.
    pub(crate) async fn echo() -> Self {
        Self::each(|mut peer| async move {
            while let Some((head, body)) = peer.request().await {
                let text = [head.as_bytes(), &body].concat();
                peer.write(
                    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", text.len()).as_bytes(),
                )
                .await;
                peer.write(&text).await;
            }
        })
        .await
    }

    /// Starts a server that reads requests and answers them while the sender has `true`. It begins
    /// with `false`.
    pub(crate) async fn gated() -> (Self, watch::Sender<bool>) {
        let (release, released) = watch::channel(false);
        let origin = Self::each(move |mut peer| {
            let mut released = released.clone();
            async move {
                while peer.request().await.is_some()
                    && released.wait_for(|is_released| *is_released).await.is_ok()
                {
                    peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                        .await;
                }
            }
        })
        .await;
        (origin, release)
    }

    /// Starts a server that responds with 200 and its own name.
    pub(crate) async fn named(name: &'static str) -> Self {
        Self::each(move |mut peer| async move {
            while peer.request().await.is_some() {
                peer.write(
                    format!(
                        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{name}",
                        name.len()
                    )
                    .as_bytes(),
                )
                .await;
            }
        })
        .await
    }
}

/// One connection to an endpoint.
pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    pub(crate) buffer: Vec<u8>,
    requests: Arc<AtomicUsize>,
}

impl Peer {
    /// Reads one request: the head as text, the body decoded. `None` at the end of the connection.
    pub(crate) async fn request(&mut self) -> Option<(String, Vec<u8>)> {
        let head = self.head().await?;
        let body = self.body(&head).await?;
        Some((head, body))
    }

    /// Reads to the end of a head.
    pub(crate) async fn head(&mut self) -> Option<String> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            self.more().await?;
        };
        self.requests.fetch_add(1, Ordering::SeqCst);
        Some(String::from_utf8_lossy(&self.buffer.drain(..end).collect::<Vec<_>>()).into_owned())
    }

    async fn body(&mut self, head: &str) -> Option<Vec<u8>> {
        let lower = head.to_ascii_lowercase();
        if let Some(length) = lower.split("\r\ncontent-length: ").nth(1) {
            let n: usize = length.split("\r\n").next().unwrap().parse().unwrap();
            return self.exactly(n).await;
        }
        if !lower.contains("\r\ntransfer-encoding: chunked") {
            return Some(Vec::new());
        }
        let mut body = Vec::new();
        loop {
            let line = self.line().await?;
            let size = usize::from_str_radix(line.split(';').next().unwrap().trim(), 16).unwrap();
            if size == 0 {
                while !self.line().await?.is_empty() {}
                return Some(body);
            }
            body.extend(self.exactly(size).await?);
            assert_eq!(self.line().await?, "");
        }
    }

    /// Reads a line and returns it without its end.
    pub(crate) async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..at + 2).collect();
                return Some(String::from_utf8_lossy(&line[..at]).into_owned());
            }
            self.more().await?;
        }
    }

    pub(crate) async fn exactly(&mut self, n: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < n {
            self.more().await?;
        }
        Some(self.buffer.drain(..n).collect())
    }

    async fn more(&mut self) -> Option<()> {
        (self.stream.read_buf(&mut self.buffer).await.ok()? > 0).then_some(())
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        // A client that left early is checked by the test itself.
        let _ = self.stream.write_all(bytes).await;
    }
}

/// Returns bytes that depend on their position, so that any shift or loss is detected.
pub(crate) fn pattern(at: u64, n: usize) -> Vec<u8> {
    (at..at + n as u64)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

/// Returns an HTTP/2 frame (RFC 9113 §4.1), for endpoints that do what the h2 crate's server would
/// not.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}
