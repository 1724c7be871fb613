//! Host names of listeners and routes: their form, and whether two of them have a name in common.

use canal_model::ids::ObjectName;
use canal_model::program::HostMatch;

/// Parses a host of a route: an exact name, or `*.` and a domain. The error is the problem, without
/// a full stop.
///
/// # Errors
/// Returns the problem if the text is an address, has a port, or is no lower-case name.
pub fn parse(written: &str) -> Result<HostMatch, String> {
    let refuse = |why: &str| {
        Err(format!(
            "{:?} {why}",
            // A diagnostic stays short, however long the name is.
            written.chars().take(80).collect::<String>()
        ))
    };
    if written.parse::<std::net::IpAddr>().is_ok() {
        return refuse("is an address, not a host name");
    }
    if written.contains(':') {
        return refuse("has a port, but hosts are compared without a port");
    }
    let (wildcard, name) = match written.strip_prefix("*.") {
        Some(domain) => (true, domain),
        None => (false, written),
    };
    if ObjectName::new(name).is_err() {
        return refuse("is not a lower-case host name, optionally with the prefix `*.`");
    }
    Ok(if wildcard {
        HostMatch::Suffix(format!(".{name}"))
    } else {
        HostMatch::Exact(name.to_owned())
    })
}

/// Returns whether there is a name that both hosts match. `None` in place of a host means every
/// host.
pub(crate) fn overlap(a: Option<&HostMatch>, b: Option<&HostMatch>) -> bool {
    match (a, b) {
        (None, _) | (_, None) => true,
        // Of two hosts that overlap, one contains the other.
        (Some(a), Some(b)) => contains(a, b) || contains(b, a),
    }
}

/// Returns whether every name that `inner` matches is one that `outer` matches. `None` in place of a
/// host means every host.
pub fn covers(outer: Option<&HostMatch>, inner: Option<&HostMatch>) -> bool {
    match (outer, inner) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(outer), Some(inner)) => contains(outer, inner),
    }
}

/// Returns whether every name that `inner` matches is one that `outer` matches.
fn contains(outer: &HostMatch, inner: &HostMatch) -> bool {
    match (outer, inner) {
        (HostMatch::Exact(outer), HostMatch::Exact(inner)) => outer == inner,
        (HostMatch::Exact(_), HostMatch::Suffix(_)) => false,
        (HostMatch::Suffix(domain), HostMatch::Exact(name)) => {
            name.len() > domain.len() && name.ends_with(domain.as_str())
        }
        (HostMatch::Suffix(outer), HostMatch::Suffix(inner)) => inner.ends_with(outer.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names() {
        for (written, expected) in [
            ("example.com", Some(HostMatch::Exact("example.com".into()))),
            (
                "*.example.com",
                Some(HostMatch::Suffix(".example.com".into())),
            ),
            ("*", None),
            ("a.*.com", None),
            ("Example.com", None),
            ("10.0.0.1", None),
            ("::1", None),
            ("example.com:80", None),
            ("", None),
        ] {
            assert_eq!(parse(written).ok(), expected, "{written:?}");
        }
    }

    /// The table of Gateway API's HTTPRouteSpec.hostnames, and its mirror image.
    #[test]
    fn hosts_overlap_if_one_contains_the_other() {
        for (listener, route, expected) in [
            ("", "", true),
            ("", "a.example.com", true),
            ("*.example.com", "", true),
            ("test.example.com", "test.example.com", true),
            ("test.example.com", "*.example.com", true),
            ("test.example.com", "test.example.net", false),
            ("test.example.com", "a.test.example.com", false),
            ("*.example.com", "test.example.com", true),
            ("*.example.com", "foo.test.example.com", true),
            ("*.example.com", "example.com", false),
            ("*.example.com", "*.example.com", true),
            ("*.example.com", "*.a.example.com", true),
            ("*.a.example.com", "*.b.example.com", false),
            ("*.example.com", "*.badexample.com", false),
        ] {
            let host = |text: &str| (!text.is_empty()).then(|| parse(text).unwrap());
            let (listener_host, route_host) = (host(listener), host(route));
            let found = [
                overlap(listener_host.as_ref(), route_host.as_ref()),
                overlap(route_host.as_ref(), listener_host.as_ref()),
            ];
            assert_eq!(found, [expected; 2], "{listener:?} {route:?}");
        }
    }
}
