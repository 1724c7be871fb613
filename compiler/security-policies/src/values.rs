//! Parses single values of a policy with Istio's syntax: exact, `prefix*`, `*suffix`, `*`;
//! networks, ports, path templates.

use std::net::IpAddr;

use canal_model::authorization::{Attribute, AttributeMatch, VALUE_BYTES_MAX};
use canal_model::identity::Identity;
use canal_model::ids::{Namespace, ServiceAccount, TrustDomain};
use ipnet::IpNet;

use canal_oracle::authorization::normal_path;

/// Istio's name for the mesh's own trust domain.
const OWN_TRUST_DOMAIN: &str = "cluster.local";

/// The properties of the policy and tenant on which values depend.
#[derive(Clone, Copy)]
pub struct ValueContext<'a> {
    pub namespace: &'a Namespace,
    pub trust_domain: &'a TrustDomain,
}

/// A problem and its fix.
pub type ValueIssue = (String, &'static str);

/// A parsed value, with a warning if it is unusual but works.
pub type ValueResult = Result<(AttributeMatch, Option<ValueIssue>), ValueIssue>;

/// Parses a value for an attribute.
pub fn read(context: ValueContext<'_>, attribute: &Attribute, value: &str) -> ValueResult {
    if value.is_empty() {
        return Err((
            "the value is empty, and nothing would match it".into(),
            "write a value, or `*` for any",
        ));
    }
    if value.len() > VALUE_BYTES_MAX {
        return Err((
            format!(
                "the value has {} bytes, more than {VALUE_BYTES_MAX}",
                value.len()
            ),
            "write a shorter one",
        ));
    }
    match attribute {
        Attribute::SourceAddress | Attribute::RemoteAddress | Attribute::DestinationAddress => {
            network(value).map(plain)
        }
        Attribute::DestinationPort => port(value).map(plain),
        Attribute::SourceServiceAccount => account(context.namespace, value).map(plain),
        Attribute::SourcePrincipal => principal(context.trust_domain, value),
        Attribute::Path => path(value),
        // Istio lets such a star stand for any text. It cannot be compared here, and it must not
        // silently match nothing.
        Attribute::SourceNamespace
            if value.trim_matches('*').contains('*')
                || (value.len() > 1 && value.starts_with('*') && value.ends_with('*')) =>
        {
            Err((
                format!("{value:?}: only one `*`, at one end, stands for any text"),
                "write a prefix or a suffix",
            ))
        }
        // A value that no namespace can have must not silently match nothing.
        Attribute::SourceNamespace if !value.contains('*') && Namespace::new(value).is_err() => {
            Err((
                format!("{value:?} cannot name a namespace"),
                "use lower-case letters, digits and '-'",
            ))
        }
        Attribute::Host | Attribute::ServerName
            if value.contains(['/', '@']) || value.contains(char::is_whitespace) =>
        {
            Err((
                format!("{value:?} is not a host"),
                "write a name, without scheme and path",
            ))
        }
        // A principal is ISSUER/SUBJECT, so a value without a slash or `*` would match no token.
        Attribute::RequestPrincipal if !value.contains(['*', '/']) => Err((
            format!("{value:?} is not a request's principal"),
            "write issuer/subject",
        )),
        Attribute::Method => Ok(method(value)),
        // A header that is present but empty counts as present (Envoy's HeaderMatcher).
        Attribute::Header(_) if value == "*" => Ok(plain(AttributeMatch::Prefix(String::new()))),
        // The remaining attributes can have any text.
        _ => Ok(text(value)),
    }
}

fn plain(m: AttributeMatch) -> (AttributeMatch, Option<ValueIssue>) {
    (m, None)
}

fn text(value: &str) -> (AttributeMatch, Option<ValueIssue>) {
    let (m, rest) = if value == "*" {
        return plain(AttributeMatch::Present);
    } else if let Some(suffix) = value.strip_prefix('*') {
        (AttributeMatch::Suffix(suffix.to_owned()), suffix)
    } else if let Some(prefix) = value.strip_suffix('*') {
        (AttributeMatch::Prefix(prefix.to_owned()), prefix)
    } else {
        (AttributeMatch::Exact(value.to_owned()), value)
    };
    let odd = rest.contains('*').then(|| {
        let problem = format!(
            "{value:?}: only a `*` at one end stands for any text; the other is a plain character"
        );
        (problem, "write a prefix or a suffix")
    });
    (m, odd)
}

/// Parses a method. Methods are compared with their case, and all that clients send are in
/// capitals.
fn method(value: &str) -> (AttributeMatch, Option<ValueIssue>) {
    let (m, odd) = text(value);
    let lower = value.contains(|c: char| c.is_ascii_lowercase());
    let small = || {
        (
            format!("{value:?}: methods are case-sensitive, and clients send them in upper case"),
            "write it in upper case",
        )
    };
    (m, odd.or_else(|| lower.then(small)))
}

fn network(value: &str) -> Result<AttributeMatch, ValueIssue> {
    let net = value
        .parse::<IpNet>()
        .ok()
        .or_else(|| value.parse::<IpAddr>().ok().map(IpNet::from));
    let net = net.ok_or_else(|| {
        (
            format!("{value:?} is neither an address nor a range"),
            "write one such as 10.1.0.0/16 or fd00::1",
        )
    })?;
    Ok(AttributeMatch::Network(net.trunc()))
}

fn port(value: &str) -> Result<AttributeMatch, ValueIssue> {
    let port = value.parse::<u16>().ok().filter(|port| *port > 0);
    port.map(AttributeMatch::Port).ok_or_else(|| {
        (
            format!("{value:?} is not a port"),
            "write a number from 1 to 65535",
        )
    })
}

fn account(namespace: &Namespace, value: &str) -> Result<AttributeMatch, ValueIssue> {
    let (namespace, account) = match value.split_once('/') {
        Some((namespace, account)) => (Namespace::new(namespace).ok(), account),
        None => (Some(namespace.clone()), value),
    };
    match (namespace, ServiceAccount::new(account)) {
        (Some(namespace), Ok(account)) => {
            Ok(AttributeMatch::Exact(format!("{namespace}/{account}")))
        }
        _ => Err((
            format!("{value:?} is not a service account"),
            "write namespace/name, or the name of one in this namespace; no `*`",
        )),
    }
}

fn principal(own: &TrustDomain, value: &str) -> ValueResult {
    if value.starts_with("spiffe:") {
        return Err((
            format!("{value:?} begins with a scheme, but principals are compared without a scheme"),
            "remove `spiffe://`",
        ));
    }
    let written = match value.split_once('/') {
        Some((OWN_TRUST_DOMAIN, rest)) => format!("{own}/{rest}"),
        _ => value.to_owned(),
    };
    if written.len() > VALUE_BYTES_MAX {
        let problem = format!(
            "the value has {} bytes with the mesh's own trust domain, more than {VALUE_BYTES_MAX}",
            written.len()
        );
        return Err((problem, "write a shorter one"));
    }
    let (m, odd) = text(&written);
    if matches!(m, AttributeMatch::Exact(_))
        && format!("spiffe://{written}").parse::<Identity>().is_err()
    {
        return Err((
            format!("{value:?} is not an identity"),
            "write trust.domain/ns/NAMESPACE/sa/ACCOUNT",
        ));
    }
    Ok((m, odd))
}

/// Parses a trust domain to a match on the start of principals.
pub(crate) fn trust_domain(own: &TrustDomain, value: &str) -> Result<AttributeMatch, ValueIssue> {
    let written = if value == OWN_TRUST_DOMAIN {
        own.as_str()
    } else {
        value
    };
    let is_name = |name: &str| TrustDomain::new(name).is_ok();
    match written.strip_suffix('*') {
        Some("") => Ok(AttributeMatch::Present),
        Some(prefix) if is_name(&format!("{prefix}x")) => {
            Ok(AttributeMatch::Prefix(prefix.to_owned()))
        }
        None if is_name(written) => Ok(AttributeMatch::Prefix(format!("{written}/"))),
        _ => Err((
            format!("{value:?} is not a trust domain"),
            "write the full name, or a prefix and `*`",
        )),
    }
}

/// Parses a path. Requests' paths are compared in normalized form, so a path in any other form is
/// refused: it would match nothing.
fn path(value: &str) -> ValueResult {
    let (m, odd) = if value.contains(['{', '}']) {
        plain(template(value)?)
    } else {
        text(value)
    };
    let sample = match &m {
        AttributeMatch::Exact(path) => path.clone(),
        AttributeMatch::Prefix(start) => format!("{start}x"),
        AttributeMatch::Template(template) => template.replace("{**}", "x").replace("{*}", "x"),
        _ => return Ok((m, odd)),
    };
    if sample.is_ascii() && normal_path(&sample).as_ref() == Some(&sample) {
        return Ok((m, odd));
    }
    let problem = format!(
        "no request has the path {value:?}: paths are compared without query and in their normal form"
    );
    Err((
        problem,
        "begin with /; omit query, // and dot segments; %-escape only what needs it, in upper case",
    ))
}

/// Parses Istio's path templates: `{*}` is one segment; `{**}` is any number of segments, and the
/// last operator.
fn template(value: &str) -> Result<AttributeMatch, ValueIssue> {
    let mut segments = value.trim_matches('/').split('/').peekable();
    let mut rest_seen = false;
    let wrong = |why: &str| {
        Err((
            format!("{value:?}: {why}"),
            "write whole segments as {*}, and {**} once, after all others",
        ))
    };
    while let Some(segment) = segments.next() {
        match segment {
            "{*}" | "{**}" if rest_seen => return wrong("{**} is not the last operator"),
            "{*}" => {}
            "{**}" => rest_seen = true,
            plain if plain.contains(['{', '}']) => {
                return wrong("braces are around * or ** only, and fill a whole segment");
            }
            plain if plain.contains('*') => {
                return wrong("a `*` outside of braces has no meaning in a template");
            }
            "" if segments.peek().is_some() => return wrong("a segment is empty"),
            _ => {}
        }
    }
    Ok(AttributeMatch::Template(value.to_owned()))
}

/// Parses a key of `when`.
pub(crate) fn attribute(key: &str) -> Result<Attribute, ValueIssue> {
    const KEYS: &str = "write one of source.ip, remote.ip, source.namespace, source.principal, source.serviceAccount, request.headers[NAME], \
        request.auth.principal, request.auth.audiences, request.auth.presenter, request.auth.claims[NAME], destination.ip, destination.port, \
        connection.sni";
    Ok(match key {
        "source.ip" => Attribute::SourceAddress,
        "remote.ip" => Attribute::RemoteAddress,
        "source.namespace" => Attribute::SourceNamespace,
        "source.principal" => Attribute::SourcePrincipal,
        "source.serviceAccount" => Attribute::SourceServiceAccount,
        "request.auth.principal" => Attribute::RequestPrincipal,
        "request.auth.audiences" => Attribute::RequestAudience,
        "request.auth.presenter" => Attribute::RequestPresenter,
        "destination.ip" => Attribute::DestinationAddress,
        "destination.port" => Attribute::DestinationPort,
        "connection.sni" => Attribute::ServerName,
        _ => {
            if let Some(name) = key
                .strip_prefix("request.headers[")
                .and_then(|rest| rest.strip_suffix(']'))
            {
                return header(name).map(Attribute::Header);
            }
            if let Some(path) = key
                .strip_prefix("request.auth.claims[")
                .and_then(|rest| rest.strip_suffix(']'))
            {
                return claim(path.split("][")).map(Attribute::RequestClaim);
            }
            return Err((format!("{key:?} is not a condition key"), KEYS));
        }
    })
}

/// Validates the name of a header and returns it in lower case.
pub(crate) fn header(name: &str) -> Result<String, ValueIssue> {
    let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    let lower = name.to_ascii_lowercase();
    if matches!(lower.as_str(), "host" | ":authority" | ":method" | ":path") {
        return Err((
            format!("{name:?} is not available as a header"),
            "use hosts, methods or paths of `to.operation`",
        ));
    }
    if name.is_empty() || name.len() > VALUE_BYTES_MAX || !name.chars().all(is_token) {
        return Err((
            format!(
                "{:?} is not a header's name",
                name.chars().take(80).collect::<String>()
            ),
            "write a name such as x-token",
        ));
    }
    Ok(lower)
}

/// Validates the path of a claim.
pub(crate) fn claim<'a>(parts: impl Iterator<Item = &'a str>) -> Result<Vec<String>, ValueIssue> {
    let path: Vec<String> = parts.map(str::to_owned).collect();
    let is_good = |part: &String| {
        !part.is_empty() && part.len() <= VALUE_BYTES_MAX && !part.contains(['[', ']'])
    };
    if path.is_empty()
        || path.len() > canal_model::authorization::CLAIM_DEPTH_MAX
        || !path.iter().all(is_good)
    {
        return Err((
            "this is not the name of a claim".into(),
            "write its name, and those of nested claims after it, 16 at most",
        ));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe_match(attribute: Attribute, value: &str) -> String {
        let namespace = Namespace::new("shop").unwrap();
        let trust_domain = TrustDomain::new("alpha.example").unwrap();
        match read(
            ValueContext {
                namespace: &namespace,
                trust_domain: &trust_domain,
            },
            &attribute,
            value,
        ) {
            Ok((m, None)) => format!("{m:?}"),
            Ok((m, Some(_))) => format!("{m:?}, odd"),
            Err(_) => "refused".into(),
        }
    }

    fn check(cases: impl IntoIterator<Item = (Attribute, &'static str, &'static str)>) {
        for (attribute, value, want) in cases {
            assert_eq!(
                describe_match(attribute.clone(), value),
                want,
                "{attribute:?} {value:?}"
            );
        }
    }

    #[test]
    fn values_are_read_as_istio_does() {
        // `odd` marks values that are accepted with a warning, since they rarely mean what they
        // say.
        use Attribute as A;
        check([
            (A::Method, "GET", r#"Exact("GET")"#),
            (A::Method, "*", "Present"),
            (A::Method, "G*", r#"Prefix("G")"#),
            (A::Method, "*T", r#"Suffix("T")"#),
            // As in Istio, a star at the beginning outranks one at the end.
            (A::Method, "*E*", r#"Suffix("E*"), odd"#),
            (A::Method, "G*T", r#"Exact("G*T"), odd"#),
            (A::Method, "", "refused"),
            (A::Method, "get", r#"Exact("get"), odd"#),
            (A::Method, "Get*", r#"Prefix("Get"), odd"#),
            (A::Method, "M-SEARCH", r#"Exact("M-SEARCH")"#),
            (A::Header("x".into()), "*", r#"Prefix("")"#),
            // Bits behind the prefix length mean nothing.
            (A::SourceAddress, "10.1.2.3/8", "Network(10.0.0.0/8)"),
            (A::SourceAddress, "fd00::1", "Network(fd00::1/128)"),
            (A::RemoteAddress, "10.1.2", "refused"),
            (A::DestinationAddress, "*", "refused"),
            (A::DestinationPort, "80", "Port(80)"),
            (A::DestinationPort, "0", "refused"),
            (A::DestinationPort, "http", "refused"),
            (A::SourceServiceAccount, "web", r#"Exact("shop/web")"#),
            (
                A::SourceServiceAccount,
                "other/web",
                r#"Exact("other/web")"#,
            ),
            // A service account is compared as a whole.
            (A::SourceServiceAccount, "other/*", "refused"),
            (
                A::SourcePrincipal,
                "alpha.example/ns/a/sa/b",
                r#"Exact("alpha.example/ns/a/sa/b")"#,
            ),
            // `cluster.local` is Istio's name for the own trust domain, which is alpha.example
            // here.
            (
                A::SourcePrincipal,
                "cluster.local/ns/a/sa/b",
                r#"Exact("alpha.example/ns/a/sa/b")"#,
            ),
            (
                A::SourcePrincipal,
                "cluster.local/ns/a/*",
                r#"Prefix("alpha.example/ns/a/")"#,
            ),
            (A::SourcePrincipal, "*/sa/b", r#"Suffix("/sa/b")"#),
            // A principal without `*` must be a whole identity, or it would match none.
            (A::SourcePrincipal, "a/sa/b", "refused"),
            (A::SourceNamespace, "Shop", "refused"),
            (A::Host, "https://web", "refused"),
            (A::Host, "web/x", "refused"),
            (A::Host, "web:80", r#"Exact("web:80")"#),
            (A::ServerName, "a b", "refused"),
            (A::RequestPrincipal, "user", "refused"),
            (
                A::RequestPrincipal,
                "https://i/user",
                r#"Exact("https://i/user")"#,
            ),
            // Istio compares principals without a scheme.
            (A::SourcePrincipal, "spiffe://a/ns/b/sa/c", "refused"),
            (A::SourceNamespace, "a*b", "refused"),
            (A::SourceNamespace, "*a*", "refused"),
            (A::SourceNamespace, "*", "Present"),
            (A::SourceNamespace, "a*", r#"Prefix("a")"#),
        ]);
        assert_eq!(
            describe_match(A::Host, &"a".repeat(VALUE_BYTES_MAX + 1)),
            "refused"
        );
    }

    #[test]
    fn paths_are_read_as_istio_does() {
        use Attribute as A;
        check([
            (A::Path, "/a/{*}/b", r#"Template("/a/{*}/b")"#),
            (A::Path, "/a/{**}/b", r#"Template("/a/{**}/b")"#),
            (A::Path, "/a/{**}/{*}", "refused"),
            (A::Path, "/a{*}", "refused"),
            (A::Path, "/a/{b}", "refused"),
            (A::Path, "/a*/{*}", "refused"),
            (A::Path, "/a//{*}", "refused"),
            (A::Path, "/a/*", r#"Prefix("/a/")"#),
            (A::Path, "/", r#"Exact("/")"#),
            (A::Path, "/*", r#"Prefix("/")"#),
            (A::Path, "*", "Present"),
            (A::Path, "*.html", r#"Suffix(".html")"#),
            (A::Path, "/a.b/c;d/%20", r#"Exact("/a.b/c;d/%20")"#),
            (A::Path, "/a/", r#"Exact("/a/")"#),
            (A::Path, "/a/.*", r#"Prefix("/a/.")"#),
            (A::Path, "a", "refused"),
            (A::Path, "a*", "refused"),
            (A::Path, "/a?b=c", "refused"),
            (A::Path, "/a//b", "refused"),
            (A::Path, "/a/../b*", "refused"),
            (A::Path, "/%61", "refused"),
            (A::Path, "/a%2fb", "refused"),
            (A::Path, "/%c3%a9", "refused"),
            (A::Path, "/%C3%A9", r#"Exact("/%C3%A9")"#),
            (A::Path, "/\u{e9}", "refused"),
            (A::Path, "/a b", "refused"),
            (A::Path, "/a/./{*}", "refused"),
        ]);
    }

    #[test]
    fn trust_domains_begin_principals() {
        let own = TrustDomain::new("alpha.example").unwrap();
        for (value, want) in [
            ("beta.example", r#"Prefix("beta.example/")"#),
            ("cluster.local", r#"Prefix("alpha.example/")"#),
            ("beta*", r#"Prefix("beta")"#),
            ("beta.*", r#"Prefix("beta.")"#),
            ("*", "Present"),
            ("*.example", "refused"),
            ("a/b", "refused"),
            ("a/b*", "refused"),
            ("", "refused"),
        ] {
            assert_eq!(
                trust_domain(&own, value).map_or_else(|_| "refused".into(), |m| format!("{m:?}")),
                want,
                "{value:?}"
            );
        }
    }

    #[test]
    fn keys_of_conditions_are_istios() {
        for (key, want) in [
            ("source.ip", "SourceAddress"),
            ("request.headers[X-Token]", r#"Header("x-token")"#),
            ("request.headers[host]", "refused"),
            ("request.headers[a b]", "refused"),
            ("request.headers[]", "refused"),
            (
                "request.auth.claims[a][b.c]",
                r#"RequestClaim(["a", "b.c"])"#,
            ),
            ("request.auth.claims[]", "refused"),
            ("request.auth.claims", "refused"),
            ("experimental.envoy.filters.a[b]", "refused"),
            ("", "refused"),
        ] {
            let got = attribute(key).map_or_else(|_| "refused".into(), |a| format!("{a:?}"));
            assert_eq!(got, want, "{key}");
        }
        assert!(attribute(&format!("request.auth.claims[{}]", ["a"; 17].join("]["))).is_err());
    }
}
