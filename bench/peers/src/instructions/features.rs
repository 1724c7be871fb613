//! Features of a route or service whose own cost per request is counted, each beside the same route
//! without it. Nothing is run here.

/// A feature, as YAML beside that of the plain service.
pub(crate) struct FeatureCase {
    pub(crate) name: &'static str,
    /// Further lines of the route's only rule.
    pub(crate) rule: &'static str,
    /// Further objects beside the service and its route.
    pub(crate) objects: &'static str,
    /// A header of the requests; empty for none.
    pub(crate) header: &'static str,
    /// Whether the objects have the service's rules, so that its HTTPRoute is left out.
    pub(crate) replaces_route: bool,
}

const fn of_rule(name: &'static str, rule: &'static str) -> FeatureCase {
    FeatureCase {
        name,
        rule,
        objects: "",
        header: "",
        replaces_route: false,
    }
}

const fn of_objects(name: &'static str, objects: &'static str) -> FeatureCase {
    FeatureCase {
        name,
        rule: "",
        objects,
        header: "",
        replaces_route: false,
    }
}

/// A VirtualService, which replaces the service's HTTPRoute: Canal does not merge both kinds.
const fn of_virtual_service(
    name: &'static str,
    objects: &'static str,
    header: &'static str,
) -> FeatureCase {
    FeatureCase {
        name,
        rule: "",
        objects,
        header,
        replaces_route: true,
    }
}

/// The features in the order of the table; the first is the route without any.
pub(crate) const FEATURES: [FeatureCase; 16] = [
    of_rule("nothing", ""),
    of_rule(
        "request headers: one set, one added, one removed",
        "    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-set, value: a}], add: [{name: x-add, value: b}], remove: [x-gone]}}]\n",
    ),
    of_rule(
        "response headers: one set, one added, one removed",
        "    filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: x-set, value: a}], add: [{name: x-add, value: b}], remove: [x-gone]}}]\n",
    ),
    of_rule(
        "the path's prefix replaced",
        "    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /v2}}}]\n",
    ),
    of_rule(
        "timeouts of request and backend",
        "    timeouts: {request: 10s, backendRequest: 5s}\n",
    ),
    of_rule(
        "two retries permitted, none needed",
        "    retry: {attempts: 2, codes: [503]}\n",
    ),
    of_rule(
        "a copy to a mirror, with its whole exchange",
        "    filters: [{type: RequestMirror, requestMirror: {backendRef: {name: s0, port: 80}}}]\n",
    ),
    of_rule(
        "ExternalAuth by HTTP, with the authorizer's whole exchange",
        "    filters: [{type: ExternalAuth, externalAuth: {protocol: HTTP, backendRef: {name: s0, port: 80}, http: {}}}]\n",
    ),
    FeatureCase {
        name: "CORS, for a request of another origin",
        rule: "    filters: [{type: CORS, cors: {allowOrigins: [\"https://a.example\"], allowMethods: [GET], exposeHeaders: [x-a]}}]\n",
        objects: "",
        header: "origin: https://a.example",
        replaces_route: false,
    },
    of_virtual_service(
        "the path rewritten by a regular expression",
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: s0, namespace: default}\nspec:\n  hosts: [s0]\n  http: [{rewrite: {uriRegexRewrite: {match: \"^/items/(.*)\", rewrite: \"/v2/\\\\1\"}}, route: [{destination: {host: s0}}]}]\n",
        "",
    ),
    of_virtual_service(
        "a header matched by a regular expression",
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: s0, namespace: default}\nspec:\n  hosts: [s0]\n  http: [{match: [{headers: {x-user: {regex: \"some.*\"}}}], route: [{destination: {host: s0}}]}]\n",
        "x-user: somebody",
    ),
    of_virtual_service(
        "a header that must be absent",
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: s0, namespace: default}\nspec:\n  hosts: [s0]\n  http: [{match: [{withoutHeaders: {x-gone: {}}}], route: [{destination: {host: s0}}]}]\n",
        "",
    ),
    of_objects(
        "least requests",
        "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: s0, namespace: default}\nspec: {host: s0, trafficPolicy: {loadBalancer: {simple: LEAST_REQUEST}}}\n",
    ),
    FeatureCase {
        name: "ring hash by a header",
        rule: "",
        objects: "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: s0, namespace: default}\nspec: {host: s0, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user}}}}\n",
        header: "x-user: somebody",
        replaces_route: false,
    },
    FeatureCase {
        name: "Maglev by a header",
        rule: "",
        objects: "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: s0, namespace: default}\nspec: {host: s0, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: x-user, maglev: {}}}}}\n",
        header: "x-user: somebody",
        replaces_route: false,
    },
    of_objects(
        "an ALLOW policy of a method and a path",
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: readers, namespace: default}\nspec:\n  targetRefs: [{kind: Service, group: \"\", name: s0}]\n  action: ALLOW\n  rules: [{to: [{operation: {methods: [GET], paths: [\"/items/*\"]}}]}]\n",
    ),
];
