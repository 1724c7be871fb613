//! Generates the filters of rules: header changes and rewrites. Most rules have none.

use std::num::NonZeroU16;

use canal_model::policy::external_auth::{
    ForwardBodyConfig, GrpcAuthConfig, HttpAuthConfig, HttpExternalAuthFilter,
};
use canal_model::policy::gateway_api::{
    BackendRef, GrpcRouteFilter, HttpHeader, HttpHeaderFilter, HttpPathModifier,
    HttpRequestRedirectFilter, HttpRouteFilter, HttpUrlRewriteFilter, RouteBackendRef,
};
use canal_model::policy::istio::{
    HeaderOperations, Headers, HttpBody, HttpDirectResponse, HttpRedirect, HttpRewrite,
    UriRegexRewrite,
};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

use crate::vocabulary::{HOSTS, NAMES, PATHS, VALUES, words};
use crate::{cors, mirrors};

/// Names of changed headers: those of requests, and one in another spelling.
const CHANGED: [&str; 4] = ["x-a", "X-B", "x-c", "x_a"];

/// Adds filters to some backends of HTTPRoutes.
pub(crate) fn of_http_backend(
    backend_ref: impl Strategy<Value = BackendRef> + Clone,
) -> impl Strategy<Value = RouteBackendRef<HttpRouteFilter>> {
    // A wildcard is not a host that a request can be rewritten to.
    let rewrite = (option::of(words(&HOSTS[..3])), option::of(path_modifier()));
    let filters = (
        backend_ref.clone(),
        modifiers(),
        option::weighted(0.1, rewrite),
        // A redirect has the backend refused, so it is the rarest.
        option::weighted(0.02, redirect()),
        mirrors::of_filters(backend_ref),
    );
    filters.prop_map(
        |(backend, [request, response], rewrite, redirect, mirrors)| {
            let mut backend = RouteBackendRef::from(backend);
            let mirrors = mirrors.into_iter().map(|mirror| HttpRouteFilter {
                kind: "RequestMirror".to_owned(),
                request_mirror: Some(mirror),
                ..HttpRouteFilter::default()
            });
            let request = request.map(|headers| HttpRouteFilter {
                kind: "RequestHeaderModifier".to_owned(),
                request_header_modifier: Some(headers),
                ..HttpRouteFilter::default()
            });
            let response = response.map(|headers| HttpRouteFilter {
                kind: "ResponseHeaderModifier".to_owned(),
                response_header_modifier: Some(headers),
                ..HttpRouteFilter::default()
            });
            let rewrite = rewrite.map(|(hostname, path)| HttpRouteFilter {
                kind: "URLRewrite".to_owned(),
                url_rewrite: Some(HttpUrlRewriteFilter { hostname, path }),
                ..HttpRouteFilter::default()
            });
            // Such a backend is refused.
            let redirect = redirect.map(|redirect| HttpRouteFilter {
                kind: "RequestRedirect".to_owned(),
                request_redirect: Some(redirect),
                ..HttpRouteFilter::default()
            });
            let filters = [request, response, rewrite, redirect];
            backend.filters = filters.into_iter().flatten().chain(mirrors).collect();
            backend
        },
    )
}

/// Adds filters to some backends of GRPCRoutes.
pub(crate) fn of_grpc_backend(
    backend_ref: impl Strategy<Value = BackendRef>,
) -> impl Strategy<Value = RouteBackendRef<GrpcRouteFilter>> {
    (backend_ref, modifiers()).prop_map(|(backend, [request, response])| {
        let mut backend = RouteBackendRef::from(backend);
        let request = request.map(|headers| GrpcRouteFilter {
            kind: "RequestHeaderModifier".to_owned(),
            request_header_modifier: Some(headers),
            ..GrpcRouteFilter::default()
        });
        let response = response.map(|headers| GrpcRouteFilter {
            kind: "ResponseHeaderModifier".to_owned(),
            response_header_modifier: Some(headers),
            ..GrpcRouteFilter::default()
        });
        backend.filters = [request, response].into_iter().flatten().collect();
        backend
    })
}

/// Generates the changes of a backend's requests and responses; most have none.
fn modifiers() -> impl Strategy<Value = [Option<HttpHeaderFilter>; 2]> {
    let one = || option::weighted(0.15, header_filter());
    (one(), one()).prop_map(|(request, response)| [request, response])
}

/// Generates the header changes of a VirtualService's destination; most have none.
pub(crate) fn of_destination() -> impl Strategy<Value = Option<Headers>> + Clone {
    let host = option::weighted(0.2, words(&HOSTS[..3]));
    let headers = (operations(), operations(), host).prop_map(|(mut request, response, host)| {
        request
            .set
            .extend(host.map(|host| ("Host".to_owned(), host)));
        Headers { request, response }
    });
    option::weighted(0.15, headers)
}

/// `backend_ref` are the backends of mirrors.
pub(crate) fn of_grpc_route(
    backend_ref: impl Strategy<Value = BackendRef>,
) -> impl Strategy<Value = Vec<GrpcRouteFilter>> {
    let filters = (
        option::weighted(0.2, header_filter()),
        option::weighted(0.1, header_filter()),
        mirrors::of_filters(backend_ref),
    );
    filters.prop_map(|(request, response, mirrors)| {
        let mirrors = mirrors.into_iter().map(|mirror| GrpcRouteFilter {
            kind: "RequestMirror".to_owned(),
            request_mirror: Some(mirror),
            ..GrpcRouteFilter::default()
        });
        let request = request.map(|headers| GrpcRouteFilter {
            kind: "RequestHeaderModifier".to_owned(),
            request_header_modifier: Some(headers),
            ..GrpcRouteFilter::default()
        });
        let response = response.map(|headers| GrpcRouteFilter {
            kind: "ResponseHeaderModifier".to_owned(),
            response_header_modifier: Some(headers),
            ..GrpcRouteFilter::default()
        });
        let others = [request, response].into_iter().flatten();
        others.chain(mirrors).collect()
    })
}

/// `backend_ref` are the backends of mirrors.
pub(crate) fn of_http_route(
    backend_ref: impl Strategy<Value = BackendRef> + Clone,
) -> impl Strategy<Value = Vec<HttpRouteFilter>> {
    // A wildcard is not a host that a request can be rewritten to.
    let rewrite = (option::of(words(&HOSTS[..3])), option::of(path_modifier()));
    // Filters are rare, so that most rules have few and a failing case stays readable.
    let filters = (
        option::weighted(0.2, header_filter()),
        option::weighted(0.1, header_filter()),
        option::weighted(0.2, rewrite),
        option::weighted(0.15, redirect()),
        option::weighted(0.1, cors::of_http_route()),
        mirrors::of_filters(backend_ref.clone()),
        option::weighted(0.1, external_auth(backend_ref)),
    );
    filters.prop_map(
        |(request, response, rewrite, redirect, cors, mirrors, auth)| {
            let auth = auth.map(|auth| HttpRouteFilter {
                kind: "ExternalAuth".to_owned(),
                external_auth: Some(auth),
                ..HttpRouteFilter::default()
            });
            let mirrors = mirrors.into_iter().map(|mirror| HttpRouteFilter {
                kind: "RequestMirror".to_owned(),
                request_mirror: Some(mirror),
                ..HttpRouteFilter::default()
            });
            let request = request.map(|headers| HttpRouteFilter {
                kind: "RequestHeaderModifier".to_owned(),
                request_header_modifier: Some(headers),
                ..HttpRouteFilter::default()
            });
            let response = response.map(|headers| HttpRouteFilter {
                kind: "ResponseHeaderModifier".to_owned(),
                response_header_modifier: Some(headers),
                ..HttpRouteFilter::default()
            });
            let rewrite = rewrite.map(|(hostname, path)| HttpRouteFilter {
                kind: "URLRewrite".to_owned(),
                url_rewrite: Some(HttpUrlRewriteFilter { hostname, path }),
                ..HttpRouteFilter::default()
            });
            let redirect = redirect.map(|redirect| HttpRouteFilter {
                kind: "RequestRedirect".to_owned(),
                request_redirect: Some(redirect),
                ..HttpRouteFilter::default()
            });
            // A rule with a redirect can have no rewrite.
            let rewrite = rewrite.filter(|_| redirect.is_none());
            let cors = cors.map(|cors| HttpRouteFilter {
                kind: "CORS".to_owned(),
                cors: Some(cors),
                ..HttpRouteFilter::default()
            });
            let others = [request, response, rewrite, redirect, cors, auth];
            others.into_iter().flatten().chain(mirrors).collect()
        },
    )
}

/// Generates authorizers of rules, some of which are broken.
fn external_auth(
    backend_ref: impl Strategy<Value = BackendRef>,
) -> impl Strategy<Value = HttpExternalAuthFilter> {
    let names = || vec(words(&NAMES), 0..2);
    let http = (option::of(words(&PATHS)), names(), names());
    let http = http.prop_map(
        |(path, allowed_headers, allowed_response_headers)| HttpAuthConfig {
            path: path.unwrap_or_default(),
            allowed_headers,
            allowed_response_headers,
        },
    );
    let grpc = names().prop_map(|allowed_headers| GrpcAuthConfig { allowed_headers });
    let body = (-1..2000i64).prop_map(|max_size| ForwardBodyConfig { max_size });
    (
        words(&["HTTP", "GRPC", "HTTP", "http"]),
        backend_ref,
        option::weighted(0.2, grpc),
        option::weighted(0.4, http),
        option::weighted(0.3, body),
    )
        .prop_map(
            |(protocol, backend_ref, grpc, http, forward_body)| HttpExternalAuthFilter {
                protocol,
                backend_ref,
                grpc,
                http,
                forward_body,
            },
        )
}

fn redirect() -> impl Strategy<Value = HttpRequestRedirectFilter> {
    (
        option::of(words(&["http", "https"])),
        option::of(words(&HOSTS[..3])),
        option::of(path_modifier()),
        option::of(port()),
        option::of(status()),
    )
        .prop_map(
            |(scheme, hostname, path, port, status_code)| HttpRequestRedirectFilter {
                scheme,
                hostname,
                path,
                port,
                status_code,
            },
        )
}

fn port() -> impl Strategy<Value = NonZeroU16> {
    prop::sample::select(vec![80, 443, 8080])
        .prop_map(|port| NonZeroU16::new(port).expect("a port"))
}

fn status() -> impl Strategy<Value = u16> {
    prop::sample::select(vec![301, 302, 303, 307, 308])
}

/// Returns the answer of a VirtualService's rule; most have none.
pub(crate) fn answer_of_virtual_service()
-> impl Strategy<Value = (Option<HttpRedirect>, Option<HttpDirectResponse>)> {
    // Istio permits a port, a rule that derives it, or neither.
    let port = prop_oneof![
        2 => Just((None, None)),
        1 => port().prop_map(|port| (Some(port), None)),
        1 => words(&["FROM_PROTOCOL_DEFAULT", "FROM_REQUEST_PORT"]).prop_map(|of| (None, Some(of))),
    ];
    let uri = (
        words(&PATHS),
        option::weighted(0.3, words(&["q=1", "", "a/b?c"])),
    );
    let uri = uri.prop_map(|(path, query)| match query {
        None => path,
        Some(query) => format!("{path}?{query}"),
    });
    let redirect = (
        option::of(uri),
        // The hosts without a wildcard.
        option::of(words(&HOSTS[..3])),
        port,
        option::of(words(&["http", "https"])),
        option::of(status()),
    );
    let redirect = redirect.prop_map(
        |(uri, authority, (port, derive_port), scheme, redirect_code)| HttpRedirect {
            uri,
            authority,
            port,
            derive_port,
            scheme,
            redirect_code,
        },
    );
    let direct = (
        prop::sample::select(vec![200, 404, 503]),
        option::of(words(&VALUES)),
    );
    let direct = direct.prop_map(|(status, string)| HttpDirectResponse {
        status,
        body: string.map(|string| HttpBody {
            string: Some(string),
            bytes: None,
        }),
    });
    prop_oneof![
        6 => Just((None, None)),
        1 => redirect.prop_map(|redirect| (Some(redirect), None)),
        1 => direct.prop_map(|direct| (None, Some(direct))),
    ]
}

fn header_filter() -> impl Strategy<Value = HttpHeaderFilter> {
    let header = || (words(&CHANGED), words(&VALUES));
    let headers = move || {
        vec(header(), 0..3).prop_map(|headers| {
            headers
                .into_iter()
                .map(|(name, value)| HttpHeader { name, value })
                .collect::<Vec<_>>()
        })
    };
    (headers(), headers(), vec(words(&NAMES), 0..2))
        .prop_map(|(set, add, remove)| HttpHeaderFilter { set, add, remove })
}

fn path_modifier() -> impl Strategy<Value = HttpPathModifier> {
    (words(&PATHS), any::<bool>()).prop_map(|(path, is_full)| {
        let kind = if is_full {
            "ReplaceFullPath"
        } else {
            "ReplacePrefixMatch"
        };
        HttpPathModifier {
            kind: kind.to_owned(),
            replace_full_path: is_full.then(|| path.clone()),
            replace_prefix_match: (!is_full).then_some(path),
        }
    })
}

pub(crate) fn of_virtual_service() -> impl Strategy<Value = (Option<Headers>, Option<HttpRewrite>)>
{
    let headers =
        (operations(), operations()).prop_map(|(request, response)| Headers { request, response });
    let rewrite = (
        option::of(words(&PATHS)),
        option::of(words(&HOSTS[..3])),
        option::weighted(0.3, regex_rewrite()),
    );
    let rewrite = rewrite.prop_map(|(uri, authority, regex)| HttpRewrite {
        // With both, the rule is refused.
        uri: uri.filter(|_| regex.is_none()),
        authority,
        uri_regex_rewrite: regex,
    });
    (
        option::weighted(0.2, headers),
        option::weighted(0.2, rewrite),
    )
}

/// Generates rewrites by regular expressions; the last one of each list is refused with some others.
fn regex_rewrite() -> impl Strategy<Value = UriRegexRewrite> {
    let patterns = words(&["/", "^/([^/]*)(/.*)?$", "[ab]*", "(?i)(B|%2f)", "a)|(b"]);
    let rewrites = words(&["/x", "-", r"\\", r"/\0", r"\2/\1"]);
    (patterns, rewrites).prop_map(|(pattern, rewrite)| UriRegexRewrite { pattern, rewrite })
}

fn operations() -> impl Strategy<Value = HeaderOperations> + Clone {
    let headers = || btree_map(words(&CHANGED), words(&VALUES), 0..2);
    (headers(), headers(), vec(words(&NAMES), 0..2))
        .prop_map(|(set, add, remove)| HeaderOperations { set, add, remove })
}
