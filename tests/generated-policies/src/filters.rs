//! Generates the filters of rules: header changes and rewrites. Most rules have none.

use canal_model::policy::gateway_api::{
    HttpHeader, HttpHeaderFilter, HttpPathModifier, HttpRouteFilter, HttpUrlRewriteFilter,
};
use canal_model::policy::istio::{HeaderOperations, Headers, HttpRewrite};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

use crate::vocabulary::{HOSTS, NAMES, PATHS, VALUES, words};

/// Names of changed headers: those of requests, and one in another spelling.
const CHANGED: [&str; 4] = ["x-a", "X-B", "x-c", "x_a"];

pub(crate) fn of_http_route() -> impl Strategy<Value = Vec<HttpRouteFilter>> {
    let rewrite = (option::of(words(&HOSTS[..3])), option::of(path_modifier()));
    let filters = (
        option::weighted(0.2, header_filter()),
        option::weighted(0.1, header_filter()),
        option::weighted(0.2, rewrite),
    );
    filters.prop_map(|(request, response, rewrite)| {
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
        [request, response, rewrite].into_iter().flatten().collect()
    })
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
    let rewrite = (option::of(words(&PATHS)), option::of(words(&HOSTS[..3])))
        .prop_map(|(uri, authority)| HttpRewrite { uri, authority });
    (
        option::weighted(0.2, headers),
        option::weighted(0.2, rewrite),
    )
}

fn operations() -> impl Strategy<Value = HeaderOperations> {
    let headers = || btree_map(words(&CHANGED), words(&VALUES), 0..2);
    (headers(), headers(), vec(words(&NAMES), 0..2))
        .prop_map(|(set, add, remove)| HeaderOperations { set, add, remove })
}
