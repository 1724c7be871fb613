//! Requests made from a tenant's own rules: for each match one that matches, and many that differ
//! from it in one part. They need not be sensible.

use canal_compiler::ir::{Ir, ServiceIr};
use canal_compiler::oracle::{OracleClient, OracleRequest, holds};
use canal_model::client_attributes::{ClientAttribute, is_client_attribute};
use canal_model::program::{
    AUTHORITY, HostMatch, HttpMatch, METHOD, PathMatch, RouteRule, TextMatch, ValueMatch,
};

/// Candidates for a regular expression, tried until one matches.
const PATHS: [&str; 12] = [
    "/", "/a", "/ab", "/a/b", "/b", "/a/x", "/ab/b", "/v1/x", "/api/7", "/re/42", "/a/b/c",
    "/x.html",
];
const VALUES: [&str; 8] = ["1", "", "2", "12", "1,2", "yes", "abc", "x1"];

/// Returns the requests in the order of services, rules and matches.
pub fn probes(ir: &Ir) -> Vec<OracleRequest> {
    ir.services.values().flat_map(of_service).collect()
}

fn of_service(service: &ServiceIr) -> Vec<OracleRequest> {
    let ports = service.service.ports.iter().map(|port| port.port);
    let mut found = Vec::new();
    for port in ports.clone().chain([1]) {
        found.push(request(service, port, "/".to_owned()));
        let rules = service.tables().flat_map(|table| table.rules());
        for rule in rules.filter(|rule| rule.parent_port.is_none_or(|own| own == port)) {
            for http in &rule.matches {
                let mut matching = build_matching(service, port, rule, http);
                // A condition on the namespace may name another one; then the rule matches nobody.
                if rule.consumer.is_some() {
                    matching.client.namespace.clone_from(&rule.consumer);
                }
                found.extend(build_variants(&matching));
                // A client of another namespace is routed by other rules, if there are some for one.
                if !service.consumers.is_empty() {
                    let others = service.consumers.keys().cloned().map(Some).chain([None]);
                    found.extend(others.map(|namespace| {
                        let mut other = matching.clone();
                        other.client.namespace = namespace;
                        other
                    }));
                }
                found.push(matching);
            }
        }
    }
    found
}

fn request(service: &ServiceIr, port: u16, target: String) -> OracleRequest {
    let key = service.service.key.clone();
    let host = key.name.to_string();
    OracleRequest {
        service: key,
        port,
        host,
        method: "GET".to_owned(),
        target,
        headers: Vec::new(),
        client: OracleClient::default(),
    }
}

/// Returns a request that matches, unless its regular expressions require words that are unknown
/// here.
fn build_matching(
    service: &ServiceIr,
    port: u16,
    rule: &RouteRule,
    http: &HttpMatch,
) -> OracleRequest {
    let path = match &http.path {
        PathMatch::Exact(path) | PathMatch::ElementPrefix(path) | PathMatch::StringPrefix(path) => {
            path.clone()
        }
        PathMatch::Regex(_) => fitting(&PATHS, |path| {
            // The other conditions are removed, so that only the pattern selects the path.
            let alone = HttpMatch {
                method: None,
                headers: Vec::new(),
                query: Vec::new(),
                ..http.clone()
            };
            holds(&[], &alone, &request(service, port, path.to_owned()))
        }),
    };
    let query: Vec<String> = http
        .query
        .iter()
        .map(|condition| format!("{}={}", condition.name, value(condition, http)))
        .collect();
    let target = if query.is_empty() {
        path
    } else {
        format!("{path}?{}", query.join("&"))
    };
    let mut matching = request(service, port, target);
    match rule.hosts.first() {
        Some(HostMatch::Exact(host)) => matching.host.clone_from(host),
        Some(HostMatch::Suffix(domain)) => matching.host = format!("any{domain}"),
        // The rule is for any host, so the one of `request` will do.
        None => {}
    }
    // A match without a method holds for any; `request` sets GET.
    if let Some(method) = &http.method {
        matching.method.clone_from(method);
    }
    for condition in &http.headers {
        let value = value(condition, http);
        match (condition.name.as_str(), &condition.value) {
            (name, _) if is_client_attribute(name) => set_attribute(&mut matching, name, value),
            // Methods and hosts are words; other values would make no valid request.
            (METHOD | AUTHORITY, _) if !is_word(&value) => {}
            (METHOD, _) => matching.method = value,
            (AUTHORITY, _) => matching.host = value,
            // A request without the header is one that matches.
            (_, TextMatch::Not(_)) => {}
            (name, _) => matching.headers.push((name.to_owned(), value)),
        }
    }
    matching
}

/// Gives the client of a request an attribute, unless no client can have it.
fn set_attribute(request: &mut OracleRequest, name: &str, value: String) {
    let client = &mut request.client;
    match ClientAttribute::of_name(name) {
        Some(ClientAttribute::Scheme) => client.is_tls = value == "https",
        Some(ClientAttribute::SourceNamespace) => client.namespace = value.parse().ok(),
        Some(ClientAttribute::SourceLabel(key)) => {
            client.labels.insert(key.to_owned(), value);
        }
        None => {}
    }
}

/// Returns whether a text can be a method and a host.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn value(condition: &ValueMatch, http: &HttpMatch) -> String {
    match &condition.value {
        TextMatch::Exact(text) => text.clone(),
        TextMatch::Prefix(text) => format!("{text}z"),
        TextMatch::Present => "here".to_owned(),
        TextMatch::Not(_) => "other".to_owned(),
        TextMatch::Regex(pattern) => {
            // The oracle decides whether a pattern matches, so the value is presented to it as a
            // path.
            let as_path = HttpMatch {
                path: PathMatch::Regex(pattern.clone()),
                method: None,
                headers: Vec::new(),
                query: Vec::new(),
                precedence: http.precedence.clone(),
            };
            let asked = |text: &str| OracleRequest {
                service: "alpha/any/any".parse().expect("a service's key"),
                port: 80,
                host: String::new(),
                method: String::new(),
                target: text.to_owned(),
                headers: Vec::new(),
                client: OracleClient::default(),
            };
            fitting(&VALUES, |text| holds(&[], &as_path, &asked(text)))
        }
    }
}

fn fitting(words: &[&str], fits: impl Fn(&str) -> bool) -> String {
    words
        .iter()
        .find(|word| fits(word))
        .copied()
        .unwrap_or(words[0])
        .to_owned()
}

/// Returns variants of the request that differ in one part each.
fn build_variants(matching: &OracleRequest) -> Vec<OracleRequest> {
    let mut found = Vec::new();
    let mut push_variant = |change: &dyn Fn(&mut OracleRequest)| {
        let mut other = matching.clone();
        change(&mut other);
        if other != *matching {
            found.push(other);
        }
    };
    let (path, query) = matching
        .target
        .split_once('?')
        .map_or((matching.target.as_str(), None), |(path, query)| {
            (path, Some(query))
        });
    let query_suffix = query.map(|query| format!("?{query}")).unwrap_or_default();
    // `/` has no character less, and is not varied.
    let shorter = path
        .strip_suffix(|_: char| true)
        .filter(|shorter| !shorter.is_empty())
        .unwrap_or("/");
    // A final slash, a character more, an element more, an empty element, letter case, and a
    // character less may each select another rule.
    for other in [
        format!("{path}/"),
        format!("{path}x"),
        format!("{path}/x"),
        format!("/{path}"),
        path.to_uppercase(),
        shorter.to_owned(),
    ] {
        push_variant(&|request| request.target = format!("{other}{query_suffix}"));
    }
    match query {
        // An empty query, a name without a value, and a repeated name may select differently.
        None => ["?", "?1", "?x-a=1&x-a=2"]
            .iter()
            .for_each(|asked| push_variant(&|request| request.target = format!("{path}{asked}"))),
        Some(query) => {
            let name = query.split(['=', '&']).next().unwrap_or_default();
            for other in [
                format!("{name}=other&{query}"),
                format!("{query}&{name}=other"),
                format!("&&{query}?"),
                name.to_owned(),
            ] {
                push_variant(&|request| request.target = format!("{path}?{other}"));
            }
        }
    }
    let upper = matching.host.to_uppercase();
    // A router must ignore letter case, a port and a final dot; the last two are other hosts.
    for other in [
        upper.clone(),
        format!("{upper}:80"),
        format!("{}.", matching.host),
        format!("x.{}", matching.host),
        format!("x{}", matching.host),
    ] {
        push_variant(&|request| request.host.clone_from(&other));
    }
    // Methods are compared with their case, and OPTIONS may be a preflight.
    for method in ["POST", "get", "OPTIONS"] {
        push_variant(&|request| request.method = method.to_owned());
    }
    // Each header is removed, renamed by letter case, given another value, and repeated after and
    // before.
    for at in 0..matching.headers.len() {
        push_variant(&|request| drop(request.headers.remove(at)));
        push_variant(&|request| request.headers[at].0.make_ascii_uppercase());
        push_variant(&|request| request.headers[at].1.push('z'));
        push_variant(&|request| {
            request
                .headers
                .push((matching.headers[at].0.to_uppercase(), "2".to_owned()))
        });
        push_variant(&|request| {
            request
                .headers
                .insert(0, (matching.headers[at].0.clone(), String::new()))
        });
    }
    push_variant(&|request| request.headers.push(("x-a".to_owned(), "1".to_owned())));
    vary_client(matching, &mut push_variant);
    found
}

/// Takes changes of a request, each of which makes a variant.
type VariantSink<'a> = dyn FnMut(&dyn Fn(&mut OracleRequest)) + 'a;

/// Passes changes of the client to `push_variant`: of its connection, namespace and labels.
fn vary_client(matching: &OracleRequest, push_variant: &mut VariantSink<'_>) {
    push_variant(&|request| request.client.is_tls ^= true);
    push_variant(&|request| request.client.namespace = None);
    push_variant(&|request| request.client.namespace = "other".parse().ok());
    // Each label is removed, and given another value.
    for key in matching.client.labels.keys() {
        push_variant(&|request| drop(request.client.labels.remove(key)));
        push_variant(&|request| {
            let labels = &mut request.client.labels;
            drop(labels.insert(key.clone(), "other".to_owned()))
        });
    }
}
