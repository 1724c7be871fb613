//! Envoy as a peer: one worker, and for each case the filters that do what the gateway does there.

use std::fmt::Write as _;

use canal_bench_peers::canal::JWKS;
use canal_bench_peers::origin::{ADDRESS as ORIGIN, PORT as ORIGIN_PORT};
use canal_bench_peers::process::{PROXY_CORE, PinnedProcess};

use super::{PeerFolders, loopback, write};
use crate::case::{ProxyCase, ROUTES, SERVICES};
use crate::tls_origin;

/// A port that no other proxy of this bench has.
const PORT: u16 = 18_084;
const API: &str = "type.googleapis.com/envoy.extensions";

pub(super) fn start(folders: &PeerFolders, case: ProxyCase) -> anyhow::Result<PinnedProcess> {
    let conf = write(&folders.dir, "envoy.yaml", &configuration(folders, case))?;
    let program = folders.envoy()?;
    let argv = [
        &program,
        "--concurrency",
        "1",
        "--use-dynamic-base-id",
        "-l",
        "error",
        "-c",
        &conf,
    ];
    let process = PinnedProcess::start(
        &argv,
        PROXY_CORE,
        loopback(PORT),
        &folders.dir.join("envoy.log"),
    )?;
    if case.is_large() {
        process.settle()?;
    }
    Ok(process)
}

fn configuration(folders: &PeerFolders, case: ProxyCase) -> String {
    let log = folders.dir.join("envoy-access.log");
    let (log, socket) = match case {
        ProxyCase::Policies => {
            let _ = std::fs::remove_file(&log);
            let file = format!(
                "{{\"@type\": {API}.access_loggers.file.v3.FileAccessLog, path: {}}}",
                log.display()
            );
            (
                format!("          access_log: [{{name: file, typed_config: {file}}}]\n"),
                String::new(),
            )
        }
        _ if case.is_tls() => (
            String::new(),
            format!(
                "      transport_socket: {}\n",
                socket(folders, "DownstreamTlsContext")
            ),
        ),
        _ => Default::default(),
    };
    let filters = if case == ProxyCase::Policies {
        policies()
    } else {
        String::new()
    };
    format!(
        "static_resources:\n  listeners:\n  - address: {{socket_address: {{address: 127.0.0.1, port_value: {PORT}}}}}\n    filter_chains:\n    - filters:\n      \
         - name: hcm\n        typed_config:\n          \"@type\": {API}.filters.network.http_connection_manager.v3.HttpConnectionManager\n          \
         codec_type: AUTO\n          stat_prefix: i\n{log}          route_config: {{virtual_hosts: [{}]}}\n          http_filters:\n{filters}          \
         - {{name: router, typed_config: {{\"@type\": {API}.filters.http.router.v3.Router}}}}\n{socket}  clusters:\n{}",
        hosts(case),
        clusters(folders, case)
    )
}

/// Returns the virtual hosts, as elements of a list.
fn hosts(case: ProxyCase) -> String {
    if !case.is_large() {
        return "{name: v, domains: [\"*\"], routes: [{match: {prefix: \"/\"}, route: {cluster: o}}]}".into();
    }
    let mut out = String::new();
    for n in 0..SERVICES {
        let _ = write!(out, "{{name: s{n}, domains: [\"s{n}\"], routes: [");
        for r in 1..ROUTES {
            let _ = write!(
                out,
                "{{match: {{path_separated_prefix: /api/v{r}/things}}, route: {{cluster: s{n}}}}}, "
            );
        }
        let _ = write!(
            out,
            "{{match: {{prefix: \"/\"}}, route: {{cluster: s{n}}}}}]}}, "
        );
    }
    out
}

fn clusters(folders: &PeerFolders, case: ProxyCase) -> String {
    let cluster = |name: &str, address: &str, port: u16, more: &str| {
        format!(
            "  - name: {name}\n    type: STATIC\n{more}    load_assignment: {{cluster_name: {name}, endpoints: [{{lb_endpoints: [{{endpoint: {{address: \
             {{socket_address: {{address: {address}, port_value: {port}}}}}}}}}]}}]}}\n"
        )
    };
    let origin = ORIGIN.to_string();
    match case {
        ProxyCase::Mtls => {
            let http2 = format!(
                "\"@type\": {API}.upstreams.http.v3.HttpProtocolOptions, explicit_http_config: {{http2_protocol_options: {{}}}}"
            );
            let more = format!(
                "    transport_socket: {}\n    typed_extension_protocol_options: {{envoy.extensions.upstreams.http.v3.HttpProtocolOptions: {{{http2}}}}}\n",
                socket(folders, "UpstreamTlsContext")
            );
            cluster(
                "o",
                &tls_origin::ADDRESS.ip().to_string(),
                tls_origin::ADDRESS.port(),
                &more,
            )
        }
        _ if case.is_large() => (0..SERVICES)
            .map(|n| cluster(&format!("s{n}"), &origin, ORIGIN_PORT, ""))
            .collect(),
        _ => cluster("o", &origin, ORIGIN_PORT, ""),
    }
}

/// Returns the mutual TLS settings of one side.
fn socket(folders: &PeerFolders, context: &str) -> String {
    let [chain, key, authority] =
        ["peer.crt", "peer.key", "ca.pem"].map(|name| folders.certificates.file(name));
    let requirement = if context == "DownstreamTlsContext" {
        "require_client_certificate: true, "
    } else {
        ""
    };
    // Of TLS 1.3's ciphers Envoy accepts AES-256-GCM or AES-128-GCM as the client prefers, and has
    // no setting.
    format!(
        "{{name: tls, typed_config: {{\"@type\": {API}.transport_sockets.tls.v3.{context}, {requirement}common_tls_context: {{alpn_protocols: [h2], \
         tls_params: {{tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3}}, tls_certificates: [{{certificate_chain: \
         {{filename: {chain}}}, private_key: {{filename: {key}}}}}], validation_context: {{trusted_ca: {{filename: {authority}}}}}}}}}}}"
    )
}

/// Returns the same policies as `canal::policies`: a token is required and checked, one kind of
/// path is denied, another one is allowed. Validated tokens are cached, as in the gateway; Envoy's
/// default is to validate each again.
fn policies() -> String {
    let filter = |name: &str, kind: &str, rest: &str| {
        format!(
            "          - {{name: {name}, typed_config: {{\"@type\": {API}.filters.http.{kind}, {rest}}}}}\n"
        )
    };
    let token = filter(
        "envoy.filters.http.jwt_authn",
        "jwt_authn.v3.JwtAuthentication",
        &format!(
            "providers: {{bench: {{issuer: \"https://bench.example\", audiences: [bench], forward: true, payload_in_metadata: payload, \
             local_jwks: {{inline_string: '{JWKS}'}}, jwt_cache_config: {{jwt_cache_size: 100}}}}}}, \
             rules: [{{match: {{prefix: \"/\"}}, requires: {{provider_name: bench}}}}]"
        ),
    );
    let path = |kind: &str| format!("{{url_path: {{path: {{{kind}}}}}}}");
    let closed = format!(
        "{{or_rules: {{rules: [{}, {}]}}}}",
        path("prefix: /items/secret"),
        path("prefix: /admin/")
    );
    let deny = filter(
        "closed",
        "rbac.v3.RBAC",
        &format!(
            "rules: {{action: DENY, policies: {{closed: {{permissions: [{closed}], principals: [{{any: true}}]}}}}}}"
        ),
    );
    let get = "{header: {name: \":method\", string_match: {exact: GET}}}";
    let items = path("safe_regex: {regex: \"/items/[^/]+\"}");
    let issuer = "{metadata: {filter: envoy.filters.http.jwt_authn, path: [{key: payload}, {key: iss}], value: {string_match: {exact: \"https://bench.example\"}}}}";
    let allow = filter(
        "readers",
        "rbac.v3.RBAC",
        &format!(
            "rules: {{action: ALLOW, policies: {{readers: {{permissions: [{{and_rules: {{rules: [{get}, {items}]}}}}], principals: [{issuer}]}}}}}}"
        ),
    );
    token + &deny + &allow
}
