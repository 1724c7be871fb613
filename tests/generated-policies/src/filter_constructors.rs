//! Constructors of filters as routes write them: one for each type of filter that is generated. It
//! generates nothing.

/// Builds filters for the rules of HTTPRoutes.
pub(crate) mod http {
    use canal_model::policy::cors::HttpCorsFilter;
    use canal_model::policy::external_auth::HttpExternalAuthFilter;
    use canal_model::policy::gateway_api::{
        HttpHeaderFilter, HttpRequestRedirectFilter, HttpRouteFilter, HttpUrlRewriteFilter,
    };
    use canal_model::policy::mirrors::HttpRequestMirrorFilter;

    pub(crate) fn request_headers(headers: HttpHeaderFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "RequestHeaderModifier".to_owned(),
            request_header_modifier: Some(headers),
            ..HttpRouteFilter::default()
        }
    }

    pub(crate) fn response_headers(headers: HttpHeaderFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "ResponseHeaderModifier".to_owned(),
            response_header_modifier: Some(headers),
            ..HttpRouteFilter::default()
        }
    }

    pub(crate) fn mirror(mirror: HttpRequestMirrorFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "RequestMirror".to_owned(),
            request_mirror: Some(mirror),
            ..HttpRouteFilter::default()
        }
    }

    pub(crate) fn url_rewrite(rewrite: HttpUrlRewriteFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "URLRewrite".to_owned(),
            url_rewrite: Some(rewrite),
            ..HttpRouteFilter::default()
        }
    }

    pub(crate) fn redirect(redirect: HttpRequestRedirectFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "RequestRedirect".to_owned(),
            request_redirect: Some(redirect),
            ..HttpRouteFilter::default()
        }
    }

    pub(crate) fn cors(cors: HttpCorsFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "CORS".to_owned(),
            cors: Some(cors),
            ..HttpRouteFilter::default()
        }
    }

    pub(crate) fn external_auth(auth: HttpExternalAuthFilter) -> HttpRouteFilter {
        HttpRouteFilter {
            kind: "ExternalAuth".to_owned(),
            external_auth: Some(auth),
            ..HttpRouteFilter::default()
        }
    }
}

/// Builds filters for the rules of GRPCRoutes.
pub(crate) mod grpc {
    use canal_model::policy::gateway_api::{GrpcRouteFilter, HttpHeaderFilter};
    use canal_model::policy::mirrors::HttpRequestMirrorFilter;

    pub(crate) fn request_headers(headers: HttpHeaderFilter) -> GrpcRouteFilter {
        GrpcRouteFilter {
            kind: "RequestHeaderModifier".to_owned(),
            request_header_modifier: Some(headers),
            ..GrpcRouteFilter::default()
        }
    }

    pub(crate) fn response_headers(headers: HttpHeaderFilter) -> GrpcRouteFilter {
        GrpcRouteFilter {
            kind: "ResponseHeaderModifier".to_owned(),
            response_header_modifier: Some(headers),
            ..GrpcRouteFilter::default()
        }
    }

    pub(crate) fn mirror(mirror: HttpRequestMirrorFilter) -> GrpcRouteFilter {
        GrpcRouteFilter {
            kind: "RequestMirror".to_owned(),
            request_mirror: Some(mirror),
            ..GrpcRouteFilter::default()
        }
    }
}
