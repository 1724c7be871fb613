//! Listens on both IP families, serves HTTP/1.1 and HTTP/2 without TLS, and stops gracefully on
//! SIGTERM or ctrl-c. The caller provides the handler. TCP samples use only [`bind`] and
//! [`stop_signal`]. Start at [`serve`].

use std::convert::Infallible;
use std::future::Future;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use http::Request;
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::answer::{self, SampleResponse};

/// Length of the kernel's queue of pending connections. Linux's default of `net.core.somaxconn`,
/// which caps it.
const BACKLOG: i32 = 4096;
/// Time that open connections get to finish after a stop signal. Short, because tests wait for it;
/// far below the 35 s after which a world kills a process.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after a failed accept (for example without free file descriptors), so that the loop does
/// not spin. Any pause that a person does not notice will do.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Opens a listener on `[::]:port` that also accepts IPv4 (v4-mapped). Port 0 selects a free one.
///
/// # Errors
///
/// The port is in use, or the process may not use it.
pub fn bind(port: u16) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let open = || -> std::io::Result<TcpListener> {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_only_v6(false)?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    open().with_context(|| {
        format!(
            "cannot listen on {address}; fix: stop the other process on port {port}, or choose another port with --port"
        )
    })
}

/// Returns a value that becomes `true` on SIGTERM or SIGINT.
///
/// # Errors
///
/// The signals cannot be watched.
pub fn stop_signal() -> anyhow::Result<watch::Receiver<bool>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate()).context("cannot watch SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("cannot watch SIGINT")?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        sender.send_replace(true);
        sender.closed().await;
    });
    Ok(receiver)
}

/// Waits for the stop signal.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which happens only while the runtime ends.
    let _ = stop.wait_for(|s| *s).await;
}

/// Serves HTTP on `listener` until `stop`, then lets open connections finish for 5 s.
///
/// # Errors
///
/// None at present: failed accepts are logged and retried.
pub async fn serve<F, Fut>(
    listener: TcpListener,
    mut stop: watch::Receiver<bool>,
    handler: F,
) -> anyhow::Result<()>
where
    F: Fn(Request<Incoming>, SocketAddr) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = SampleResponse> + Send + 'static,
{
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            () = stopped(&mut stop) => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    connections.spawn(serve_connection(stream, peer, stop.clone(), handler.clone()));
                }
                Err(problem) => {
                    eprintln!("canal-samples: accepting a connection failed: {problem}; retrying");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, drained).await.is_err() {
        eprintln!(
            "canal-samples: some connections were still open {} s after the stop signal; they are closed",
            GRACE.as_secs()
        );
    }
    Ok(())
}

/// Returns the head of a response, with the length that its body would have had.
fn without_body(answer: SampleResponse) -> SampleResponse {
    let (mut parts, body) = answer.into_parts();
    if let Some(length) = body.size_hint().exact() {
        parts
            .headers
            .entry(http::header::CONTENT_LENGTH)
            .or_insert(length.into());
    }
    SampleResponse::from_parts(parts, answer::boxed(http_body_util::Empty::new()))
}

async fn serve_connection<F, Fut>(
    stream: TcpStream,
    peer: SocketAddr,
    mut stop: watch::Receiver<bool>,
    handler: F,
) where
    F: Fn(Request<Incoming>, SocketAddr) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = SampleResponse> + Send + 'static,
{
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| {
        let head = request.method() == http::Method::HEAD;
        let answer = handler(request, peer);
        async move {
            let answer = answer.await;
            // For HEAD, hyper omits the body in HTTP/1.1 but sends it in HTTP/2.
            Ok::<_, Infallible>(if head { without_body(answer) } else { answer })
        }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let connection = server.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    // Broken connections are ignored: the clients count failures, the servers do not.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stopped(&mut stop) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
