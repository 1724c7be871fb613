//! HTTP for operators: config dump, metrics, readiness, log level, quit, version, and routes that
//! the caller adds. Routes that change the process, or show tenants' configuration and requests,
//! are served only on a unix socket of the process's own user ([`serve_all`]). This server carries
//! no application traffic. hyper implements the protocol.

mod access;
mod body;
mod budget;
mod serve;

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ALLOW, HeaderValue};
use http::{Method, Request, Response, StatusCode};

use crate::drain::DrainTrigger;
use crate::logging::LogLevelHandle;
use crate::metrics::Registry;

pub use access::{HeadRefusal, decide_head};
pub use body::{Body, json, stream, text};
pub use budget::CONNECTIONS_MAX;
pub use serve::{
    AdminAddresses, AdminListenError, HEAD_TIMEOUT, SOCKET_NAME, WRITE_TIMEOUT, bind_socket, serve,
    serve_all, serve_socket,
};

type HandlerFuture = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;
type Handler = Arc<dyn Fn(Request<()>) -> HandlerFuture + Send + Sync>;

/// Listeners that serve a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// The route is served on TCP and on the socket: it changes nothing and shows nothing of a
    /// tenant's requests and policies.
    Anywhere,
    /// The route is served on the unix socket only.
    Socket,
}

/// A path with its method and handler.
#[derive(Clone)]
struct Route {
    method: Method,
    path: &'static str,
    reach: Reach,
    handler: Handler,
}

/// The routes of a listener. `/` lists them.
#[derive(Clone, Default)]
pub struct AdminRoutes {
    list: Vec<Route>,
}

impl AdminRoutes {
    /// Creates an empty set of routes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a route that is served on TCP too: it must change nothing and show nothing of tenants.
    /// The request body is not read.
    pub fn route<F, A>(self, method: Method, path: &'static str, answer: F) -> Self
    where
        F: Fn(Request<()>) -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        self.add(method, path, Reach::Anywhere, answer)
    }

    /// Adds a route that is served on the unix socket only.
    pub fn socket_route<F, A>(self, method: Method, path: &'static str, answer: F) -> Self
    where
        F: Fn(Request<()>) -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        self.add(method, path, Reach::Socket, answer)
    }

    fn add<F, A>(mut self, method: Method, path: &'static str, reach: Reach, answer: F) -> Self
    where
        F: Fn(Request<()>) -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        self.list.push(Route {
            method,
            path,
            reach,
            handler: Arc::new(move |r| Box::pin(answer(r))),
        });
        self
    }

    /// Adds `GET /config_dump`, which returns JSON, on the socket only.
    pub fn config_dump(self, dump: impl Fn() -> serde_json::Value + Send + Sync + 'static) -> Self {
        self.socket_route(Method::GET, "/config_dump", move |_| {
            ready(json(StatusCode::OK, &dump()))
        })
    }

    /// Adds `GET /metrics` and `GET /stats/prometheus`.
    pub fn metrics(self, registry: Registry) -> Self {
        let again = registry.clone();
        self.route(Method::GET, "/metrics", move |_| {
            ready(body::exposition(&registry))
        })
        .route(Method::GET, "/stats/prometheus", move |_| {
            ready(body::exposition(&again))
        })
    }

    /// Adds `GET /healthz/ready`: 200, or 503 with the reason.
    pub fn ready(self, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.route(Method::GET, "/healthz/ready", move |_| {
            ready(match check() {
                Ok(()) => text(StatusCode::OK, "ready\n"),
                Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            })
        })
    }

    /// Adds `GET /logging`, which shows the level, and `POST /logging?level=…`, which sets it. The
    /// latter is on the socket only.
    pub fn logging(self, level: LogLevelHandle) -> Self {
        let show = level.clone();
        self.route(Method::GET, "/logging", move |_| {
            ready(text(StatusCode::OK, format!("{}\n", show.get())))
        })
        .socket_route(Method::POST, "/logging", move |r| {
            ready(match query(&r, "level").map(|l| level.set(&l)) {
                Some(Ok(())) => text(StatusCode::OK, format!("{}\n", level.get())),
                Some(Err(e)) => text(StatusCode::BAD_REQUEST, format!("{e}\n")),
                None => text(StatusCode::BAD_REQUEST, "add ?level=, e.g. ?level=debug\n"),
            })
        })
    }

    /// Adds `POST /quitquitquit`, which starts the drain with `limit`, on the socket only.
    pub fn quit(self, trigger: Arc<DrainTrigger>, limit: Duration) -> Self {
        self.socket_route(Method::POST, "/quitquitquit", move |_| {
            trigger.drain(limit);
            ready(text(StatusCode::OK, "draining\n"))
        })
    }

    /// Adds `GET /version`, which returns the version as text.
    pub fn version(self, version: &'static str) -> Self {
        self.route(Method::GET, "/version", move |_| {
            ready(text(StatusCode::OK, format!("{version}\n")))
        })
    }

    fn answer(&self, request: Request<()>, reach: Reach) -> HandlerFuture {
        let path = request.uri().path().to_string();
        let here: Vec<_> = self.list.iter().filter(|r| r.path == path).collect();
        if let Some(route) = here.iter().find(|r| r.method == request.method()) {
            // Only the unix socket checks the peer's user, and such a route changes the process or
            // shows tenants' data.
            if route.reach == Reach::Socket && reach != Reach::Socket {
                let why = format!(
                    "{} {path} is not served on TCP; fix: use the process's unix socket, e.g. \
                     curl --unix-socket DATA-DIR/{SOCKET_NAME} http://localhost{path}\n",
                    route.method
                );
                return Box::pin(ready(text(StatusCode::FORBIDDEN, why)));
            }
            return (route.handler)(request);
        }
        // An unknown path gets the list of routes, so that an operator finds the right one without
        // documentation.
        let answer = if here.is_empty() {
            // `/` is the path of the list itself.
            let status = if path == "/" {
                StatusCode::OK
            } else {
                StatusCode::NOT_FOUND
            };
            let where_to = |r: &Route| {
                if r.reach == Reach::Socket {
                    " (unix socket)"
                } else {
                    ""
                }
            };
            text(
                status,
                self.list
                    .iter()
                    .map(|r| format!("{} {}{}\n", r.method, r.path, where_to(r)))
                    .collect::<String>(),
            )
        } else {
            let methods: Vec<_> = here.iter().map(|r| r.method.as_str()).collect();
            let mut r = text(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("use {}\n", methods.join(", ")),
            );
            // The conversion does not fail: methods have only characters that a header may have.
            if let Ok(allow) = HeaderValue::from_str(&methods.join(", ")) {
                r.headers_mut().insert(ALLOW, allow);
            }
            r
        };
        Box::pin(ready(answer))
    }
}

/// Returns the query parameter `name` of a request, percent-decoded.
pub fn query(request: &Request<()>, name: &str) -> Option<String> {
    let pairs = request
        .uri()
        .query()?
        .split('&')
        .map(|p| p.split_once('=').unwrap_or((p, "")));
    pairs
        .into_iter()
        .find(|(k, _)| *k == name)
        .map(|(_, v)| decode(v))
}

/// Decodes percent escapes (RFC 3986 §2.1), and `+` as a space like in HTML forms. Malformed
/// escapes are left unchanged.
fn decode(s: &str) -> String {
    let mut out = Vec::with_capacity(s.len());
    let mut rest = s.as_bytes();
    while let [c, tail @ ..] = rest {
        let escape = match (c, tail) {
            (b'%', [h, l, ..]) => (*h as char).to_digit(16).zip((*l as char).to_digit(16)),
            _ => None,
        };
        rest = match escape {
            Some((h, l)) => {
                // Two hexadecimal digits fit a byte.
                out.push((h * 16 + l) as u8);
                &tail[2..]
            }
            None => {
                out.push(if *c == b'+' { b' ' } else { *c });
                tail
            }
        };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests;
