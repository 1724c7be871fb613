//! The requests of `canal explain URL`: those of clients outside the mesh, which arrive at a Gateway.
//! It parses them and formats the explanation as JSON. Start at [`explain_url`].

use std::net::IpAddr;

use canal_compiler::ir::Ir;
use canal_compiler::ir_ingress::GatewayIr;
use canal_compiler::oracle::{OracleClient, OracleRequest};
use canal_compiler::text;
use canal_explain::{
    ArrivalDescription, ArrivalExplanation, ArrivalOutcome, BackendTrace, ListenerTrace,
    explain_arrival,
};
use canal_model::ingress::gateway_object;
use serde_json::{Value, json};

use crate::exit::{ExitStatus, VerbError, VerbResult as Done};

use super::{ExplainArgs, format_match, format_step, parse_claims, parse_headers};

/// A URL that a client requests: of a request by `http` or `https`, of a connection by `tls` or `tcp`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RequestedUrl {
    scheme: UrlKind,
    /// Host without a port and without brackets.
    host: String,
    port: Option<u16>,
    /// Path and query.
    target: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UrlKind {
    Http,
    Https,
    /// A TLS connection whose bytes are not HTTP.
    Tls,
    /// A connection in plaintext whose bytes are not HTTP.
    Tcp,
}

impl UrlKind {
    fn is_tls(self) -> bool {
        matches!(self, Self::Https | Self::Tls)
    }

    fn default_port(self) -> Option<u16> {
        match self {
            Self::Http => Some(80),
            Self::Https | Self::Tls => Some(443),
            Self::Tcp => None,
        }
    }
}

/// Explains a request to a URL.
pub(super) fn explain_url(args: &ExplainArgs, ir: &Ir, url: &str) -> Done<ArrivalExplanation> {
    let url = parse_url(url)?;
    let gateway = select_gateway(args, ir, &url)?;
    let port = select_port(args, gateway, &url)?;
    // As curl does, a client sends no server name for an address.
    let of_url = || (url.host.parse::<IpAddr>().is_err()).then(|| url.host.clone());
    let server_name = match &args.sni {
        Some(name) => (!name.is_empty()).then(|| name.clone()),
        None => of_url(),
    };
    let arrival = ArrivalDescription {
        gateway: gateway.service.clone(),
        port,
        address: args.from_ip,
        is_tls: url.scheme.is_tls(),
        server_name: server_name.filter(|_| url.scheme.is_tls()),
        has_certificate: args.client_certificate,
        request: describe_request(args, gateway, port, &url)?,
        claims: parse_claims(args)?,
    };
    explain_arrival(ir, &arrival).ok_or_else(|| {
        let what = format!("there is no {}", text::gateway(&arrival.gateway));
        VerbError::new(ExitStatus::Missing, "--gateway", what, fix_gateway(ir))
    })
}

fn describe_request(
    args: &ExplainArgs,
    gateway: &GatewayIr,
    port: u16,
    url: &RequestedUrl,
) -> Done<Option<OracleRequest>> {
    if matches!(url.scheme, UrlKind::Tls | UrlKind::Tcp) {
        return Ok(None);
    }
    let bare = match url.host.contains(':') {
        true => format!("[{}]", url.host),
        false => url.host.clone(),
    };
    // Clients leave out the default port of the scheme.
    let of_url = match url
        .port
        .filter(|port| Some(*port) != url.scheme.default_port())
    {
        Some(port) => format!("{bare}:{port}"),
        None => bare,
    };
    Ok(Some(OracleRequest {
        service: gateway.service.clone(),
        port,
        host: args.host.clone().unwrap_or(of_url),
        method: args.method.clone(),
        target: url.target.clone(),
        headers: parse_headers(args)?,
        client: OracleClient::default(),
    }))
}

/// Returns the Gateway that the arguments name, or the one that has the URL's address, or the only
/// one.
fn select_gateway<'a>(args: &ExplainArgs, ir: &'a Ir, url: &RequestedUrl) -> Done<&'a GatewayIr> {
    let missing = |place: &str, what: String| {
        VerbError::new(ExitStatus::Missing, place, what, fix_gateway(ir))
    };
    if let Some(name) = &args.gateway {
        let mut found = ir.ingress.iter().filter(|it| is_named(it, name));
        return match (found.next(), found.next()) {
            (Some(gateway), None) => Ok(gateway),
            (None, _) => Err(missing("--gateway", format!("there is no Gateway {name}"))),
            (Some(_), Some(_)) => Err(VerbError::new(
                ExitStatus::Usage,
                "--gateway",
                format!("{name} is a Gateway of Gateway API and one of Istio"),
                format!("write Gateway/{name} or Gateway.networking.istio.io/{name}"),
            )),
        };
    }
    let at_address = url.host.parse().ok().and_then(|address: IpAddr| {
        let mut gateways = ir.ingress.iter();
        gateways.find(|it| it.addresses.contains(&address))
    });
    match (at_address, ir.ingress.as_slice()) {
        (Some(gateway), _) => Ok(gateway),
        (None, [gateway]) => Ok(gateway),
        (None, []) => Err(missing("URL", "the tenant has no Gateway".to_owned())),
        (None, _) => Err(VerbError::new(
            ExitStatus::Usage,
            "--gateway",
            "the tenant has several Gateways",
            fix_gateway(ir),
        )),
    }
}

/// Returns whether a Gateway has a name: `name`, `namespace/name` or `kind/namespace/name`. As with
/// kubectl, a name without a namespace is in `default`.
fn is_named(gateway: &GatewayIr, name: &str) -> bool {
    let Some((kind, own)) = gateway_object(&gateway.service) else {
        return false;
    };
    let namespace = gateway.service.namespace.as_str();
    match name.split('/').collect::<Vec<_>>().as_slice() {
        [name] => (namespace, own) == ("default", *name),
        [wanted, name] => (namespace, own) == (*wanted, *name),
        [wanted_kind, wanted, name] => {
            (kind.as_str(), namespace, own) == (*wanted_kind, *wanted, *name)
        }
        _ => false,
    }
}

fn fix_gateway(ir: &Ir) -> String {
    const NAMES_MAX: usize = 8;
    let names = ir.ingress.iter().map(|it| text::gateway(&it.service));
    let names: Vec<String> = names.take(NAMES_MAX).collect();
    match names.as_slice() {
        [] => "create a Gateway of Canal's class first".to_owned(),
        names => format!("name one with --gateway: {}", names.join(", ")),
    }
}

/// Returns the port of the URL, or of the listener that the arguments name.
fn select_port(args: &ExplainArgs, gateway: &GatewayIr, url: &RequestedUrl) -> Done<u16> {
    let usage =
        |place: &str, what: String, fix: &str| VerbError::new(ExitStatus::Usage, place, what, fix);
    let Some(name) = &args.listener else {
        let port = url.port.or(url.scheme.default_port());
        return port.ok_or_else(|| {
            usage(
                "URL",
                "a tcp:// URL has no default port".to_owned(),
                "write tcp://HOST:PORT, or name the listener with --listener",
            )
        });
    };
    let mut listeners = gateway.listeners.iter().map(|it| &it.listener);
    let Some(listener) = listeners.find(|it| it.name == *name) else {
        let names = gateway.listeners.iter();
        let names: Vec<&str> = names.map(|it| it.listener.name.as_str()).collect();
        return Err(VerbError::new(
            ExitStatus::Missing,
            "--listener",
            format!("{} has no listener {name}", text::gateway(&gateway.service)),
            format!("name one of {}", names.join(", ")),
        ));
    };
    match url.port {
        Some(port) if port != listener.port => Err(usage(
            "--listener",
            format!(
                "listener {name} has port {}, and the URL {port}",
                listener.port
            ),
            "leave out one of the two",
        )),
        _ => Ok(listener.port),
    }
}

fn parse_url(text: &str) -> Done<RequestedUrl> {
    let usage = |what: &str| {
        let fix = "write http://HOST[:PORT]/PATH, https://…, tls://HOST[:PORT] or tcp://HOST:PORT";
        VerbError::new(ExitStatus::Usage, "URL", format!("{text:?} {what}"), fix)
    };
    let (scheme, rest) = text
        .split_once("://")
        .ok_or_else(|| usage("has no scheme"))?;
    let scheme = match scheme {
        "http" => UrlKind::Http,
        "https" => UrlKind::Https,
        "tls" => UrlKind::Tls,
        "tcp" => UrlKind::Tcp,
        _ => return Err(usage("has another scheme")),
    };
    // Clients do not send the fragment.
    let rest = rest.split('#').next().unwrap_or_default();
    // A query may follow the host without a path.
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, target) = rest.split_at(end);
    // RFC 9110 (§4.2.4) forbids clients to send a user name in a URL.
    if authority.contains('@') {
        return Err(usage("has a user name"));
    }
    let (host, port) = match authority.rsplit_once(':') {
        // In `[fd00::1]` the last colon belongs to the address.
        Some((host, port)) if !port.ends_with(']') => {
            let port = port.parse().map_err(|_| usage("has no valid port"))?;
            (host, Some(port))
        }
        _ => (authority, None),
    };
    // An IPv6 address has brackets in a URL (RFC 3986 §3.2.2).
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        return Err(usage("has no host"));
    }
    // Clients send an empty path as `/` (RFC 9112 §3.2.1).
    let target = match target.starts_with('/') {
        true => target.to_owned(),
        false => format!("/{target}"),
    };
    if matches!(scheme, UrlKind::Tls | UrlKind::Tcp) && target != "/" {
        return Err(usage(
            "has a path, which a connection without HTTP does not have",
        ));
    }
    Ok(RequestedUrl {
        scheme,
        host: host.to_owned(),
        port,
        target,
    })
}

pub(super) fn format_arrival(explained: &ArrivalExplanation) -> Value {
    let (outcome, status) = match &explained.outcome {
        ArrivalOutcome::Closed(_) => ("closed", None),
        ArrivalOutcome::LocalReply { status, .. } => ("localReply", Some(*status)),
        ArrivalOutcome::Answered(answer) => ("answered", Some(answer.status)),
        ArrivalOutcome::Forwarded => ("forwarded", None),
    };
    let listeners = explained.listeners.iter().map(format_listener);
    let others = explained.other_hosts.iter();
    let others = others.map(|(host, matches)| json!({ "host": host, "matches": matches }));
    json!({
        "gateway": explained.gateway,
        "addresses": explained.addresses,
        "listener": explained.listener,
        "listeners": listeners.collect::<Vec<_>>(),
        "tls": explained.tls,
        "filters": explained.filters,
        "rule": explained.rule.as_ref().map(ToString::to_string),
        "route": explained.route,
        "matches": explained.matches.iter().map(format_match).collect::<Vec<_>>(),
        "otherHosts": others.collect::<Vec<_>>(),
        "backends": explained.backends.iter().map(format_backend).collect::<Vec<_>>(),
        "steps": explained.steps.iter().map(format_step).collect::<Vec<_>>(),
        "outcome": outcome,
        "status": status,
        "result": explained.result(),
        "passes": explained.passes(),
    })
}

fn format_listener(listener: &ListenerTrace) -> Value {
    json!({
        "name": listener.name,
        "port": listener.port,
        "protocol": listener.protocol,
        "host": listener.host,
        "takesConnection": listener.is_chosen,
        "why": listener.why,
    })
}

fn format_backend(backend: &BackendTrace) -> Value {
    json!({
        "target": backend.target,
        "weight": backend.weight,
        "percent": backend.share,
        "changes": backend.changes,
        "endpoints": backend.endpoints,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_a_scheme_a_host_and_a_path() {
        let url = |scheme, host: &str, port, target: &str| RequestedUrl {
            scheme,
            host: host.to_owned(),
            port,
            target: target.to_owned(),
        };
        // A URL without a path has `/`, and the fragment (`#d`) is not sent.
        for (text, want) in [
            ("http://a", url(UrlKind::Http, "a", None, "/")),
            (
                "https://a:8443/b?c#d",
                url(UrlKind::Https, "a", Some(8443), "/b?c"),
            ),
            ("http://a?x=/y", url(UrlKind::Http, "a", None, "/?x=/y")),
            (
                "http://[fd00::1]:80/",
                url(UrlKind::Http, "fd00::1", Some(80), "/"),
            ),
            ("http://[fd00::1]", url(UrlKind::Http, "fd00::1", None, "/")),
            (
                "tls://db.example",
                url(UrlKind::Tls, "db.example", None, "/"),
            ),
            (
                "tcp://192.0.2.1:5432",
                url(UrlKind::Tcp, "192.0.2.1", Some(5432), "/"),
            ),
        ] {
            assert_eq!(parse_url(text).ok(), Some(want), "{text}");
        }
        // Each of these lacks a part, or has one that is not allowed.
        for text in [
            "a",
            "ftp://a",
            "http://",
            "http://u@a/",
            "http://a:b/",
            "tcp://a:1/x",
        ] {
            assert!(parse_url(text).is_err(), "{text}");
        }
    }
}
