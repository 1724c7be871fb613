//! An external authorizer like one that an application team would write (Envoy's
//! `Authorization/Check`). It does what the request's `x-authz` header demands, and prints each
//! check request as a line of JSON. `/health` answers plain HTTP on the same port.
//!
//! `x-authz`: `deny` (403 with a body), `teapot` (418, a header and a body), `hang` (no answer),
//! `fail` (a gRPC error), else the default of the command line. An allowed request continues with
//! `x-authz-user` and without `x-authz-secret`.

use std::io::Write;
use std::time::Duration;

use clap::Args;
use http::{Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;
use tonic::{Code, Response, Status};

use crate::answer::{self, SampleResponse};
use crate::ext_authz::authorization_server::{Authorization, AuthorizationServer};
use crate::ext_authz::check_response::HttpResponse;
use crate::ext_authz::{
    CheckRequest, CheckResponse, DeniedHttpResponse, HeaderValue, HeaderValueOption, HttpRequest,
    HttpStatus, OkHttpResponse, RpcStatus,
};

/// Delay of `hang`: longer than any gateway waits.
const HANG: Duration = Duration::from_secs(3600);

/// Port and default decision of the authorizer.
#[derive(Debug, Clone, Args)]
pub struct AuthzArgs {
    /// Port to listen on, IPv4 and IPv6
    #[arg(long, env = "PORT", default_value_t = 9191)]
    pub port: u16,
    /// Deny requests without `x-authz: allow`
    #[arg(long)]
    pub strict: bool,
}

/// The authorizer with its default decision.
#[derive(Debug, Clone)]
pub struct SampleAuthorizer {
    strict: bool,
}

/// Answer to a check request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AuthzReply {
    Allow,
    Deny,
    Teapot,
    Hang,
    Fail,
}

fn decide_word(requested: Option<&str>, strict: bool) -> AuthzReply {
    match requested {
        Some("allow") => AuthzReply::Allow,
        Some("deny") => AuthzReply::Deny,
        Some("teapot") => AuthzReply::Teapot,
        Some("hang") => AuthzReply::Hang,
        Some("fail") => AuthzReply::Fail,
        _ if strict => AuthzReply::Deny,
        _ => AuthzReply::Allow,
    }
}

fn header(key: &str, value: &str) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: key.into(),
            value: value.into(),
        }),
    }
}

fn denied(status: i32, body: &str) -> CheckResponse {
    let denied = DeniedHttpResponse {
        status: Some(HttpStatus { code: status }),
        headers: vec![header("x-denied-by", "authz")],
        body: body.into(),
    };
    CheckResponse {
        status: Some(rpc(Code::PermissionDenied)),
        http_response: Some(HttpResponse::DeniedResponse(denied)),
    }
}

fn allowed(user: &str) -> CheckResponse {
    let ok = OkHttpResponse {
        headers: vec![header("x-authz-user", user)],
        headers_to_remove: vec!["x-authz-secret".into()],
        response_headers_to_add: vec![header("x-authz-seen", "yes")],
    };
    CheckResponse {
        status: Some(rpc(Code::Ok)),
        http_response: Some(HttpResponse::OkResponse(ok)),
    }
}

fn rpc(code: Code) -> RpcStatus {
    RpcStatus {
        code: code as i32,
        message: String::new(),
    }
}

impl SampleAuthorizer {
    /// Creates an authorizer with the settings of the command line.
    pub fn new(args: &AuthzArgs) -> Self {
        Self {
            strict: args.strict,
        }
    }

    /// Answers one HTTP request: `/health`, or a gRPC call.
    pub async fn answer(self, request: Request<Incoming>) -> SampleResponse {
        if request.uri().path() == "/health" {
            return answer::json(StatusCode::OK, &json!({ "status": "ok" }));
        }
        match tonic::codegen::Service::call(&mut AuthorizationServer::new(self), request).await {
            Ok(response) => response.map(answer::boxed),
            Err(never) => match never {},
        }
    }
}

/// Logs a check request and the reply to it.
fn log(principal: &str, http: &HttpRequest, word: AuthzReply) {
    let line = json!({
        "principal": principal, "method": http.method, "path": http.path, "host": http.host, "headers": http.headers,
        "body": if http.raw_body.is_empty() { http.body.clone() } else { String::from_utf8_lossy(&http.raw_body).into_owned() },
        "word": format!("{word:?}"),
    });
    // A log that cannot be written is no reason to deny.
    let _ = writeln!(std::io::stdout(), "{line}");
}

#[tonic::async_trait]
impl Authorization for SampleAuthorizer {
    async fn check(
        &self,
        request: tonic::Request<CheckRequest>,
    ) -> Result<Response<CheckResponse>, Status> {
        let attributes = request.into_inner().attributes.unwrap_or_default();
        let http = attributes
            .request
            .and_then(|request| request.http)
            .unwrap_or_default();
        let principal = attributes
            .source
            .map(|source| source.principal)
            .unwrap_or_default();
        let word = decide_word(http.headers.get("x-authz").map(String::as_str), self.strict);
        log(&principal, &http, word);
        match word {
            AuthzReply::Allow => Ok(Response::new(allowed(&principal))),
            AuthzReply::Deny => Ok(Response::new(denied(
                403,
                "the authorizer denied the request\n",
            ))),
            AuthzReply::Teapot => Ok(Response::new(denied(418, "short and stout\n"))),
            AuthzReply::Fail => Err(Status::internal("as requested")),
            AuthzReply::Hang => {
                tokio::time::sleep(HANG).await;
                Err(Status::deadline_exceeded("an hour"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_obeyed() {
        for (requested, strict, expected) in [
            (Some("deny"), false, AuthzReply::Deny),
            (Some("allow"), true, AuthzReply::Allow),
            (Some("teapot"), true, AuthzReply::Teapot),
            (Some("?"), true, AuthzReply::Deny),
            (None, false, AuthzReply::Allow),
            (None, true, AuthzReply::Deny),
        ] {
            assert_eq!(
                decide_word(requested, strict),
                expected,
                "{requested:?} {strict}"
            );
        }
    }
}
