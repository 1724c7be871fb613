//! Decides whether one match of a route gets every request that another one gets. The answer is
//! exact for texts; a regular expression covers an exact text that it matches, and itself.

use canal_ir::pattern;
use canal_model::program::{HostMatch, HttpMatch, PathMatch, TextMatch, ValueMatch};

/// Returns whether every request that `inner` matches is one that `outer` matches.
pub(crate) fn covers(outer: &HttpMatch, inner: &HttpMatch) -> bool {
    let has_method = outer.method.is_none() || outer.method == inner.method;
    has_method
        && covers_path(&outer.path, &inner.path)
        && covers_values(&outer.headers, &inner.headers)
        && covers_values(&outer.query, &inner.query)
}

/// Returns whether every host that is in `inner` is in `outer`; an empty list means any host.
pub(crate) fn covers_hosts(outer: &[HostMatch], inner: &[HostMatch]) -> bool {
    outer.is_empty()
        || (!inner.is_empty()
            && inner
                .iter()
                .all(|host| outer.iter().any(|other| covers_host(other, host))))
}

fn covers_host(outer: &HostMatch, inner: &HostMatch) -> bool {
    match (outer, inner) {
        (HostMatch::Exact(outer), HostMatch::Exact(inner)) => outer == inner,
        (HostMatch::Exact(_), HostMatch::Suffix(_)) => false,
        (HostMatch::Suffix(domain), HostMatch::Exact(name)) => {
            name.len() > domain.len() && name.ends_with(domain.as_str())
        }
        (HostMatch::Suffix(outer), HostMatch::Suffix(inner)) => inner.ends_with(outer.as_str()),
    }
}

/// Every condition of `outer` follows from one of `inner` on the same name.
fn covers_values(outer: &[ValueMatch], inner: &[ValueMatch]) -> bool {
    outer.iter().all(|condition| {
        let mut same_name = inner.iter().filter(|own| own.name == condition.name);
        same_name.any(|own| covers_text(&condition.value, &own.value))
    })
}

fn covers_text(outer: &TextMatch, inner: &TextMatch) -> bool {
    match (outer, inner) {
        // What is excluded says nothing about what is there.
        (TextMatch::Not(_), _) | (_, TextMatch::Not(_)) => outer == inner,
        (TextMatch::Present, _) => true,
        (TextMatch::Prefix(prefix), TextMatch::Exact(text) | TextMatch::Prefix(text)) => {
            text.starts_with(prefix.as_str())
        }
        (TextMatch::Regex(pattern), TextMatch::Exact(text)) => matches_whole(pattern, text),
        (TextMatch::Regex(pattern), _) if is_any(pattern) => true,
        (outer, inner) => outer == inner,
    }
}

fn covers_path(outer: &PathMatch, inner: &PathMatch) -> bool {
    match outer {
        PathMatch::Exact(_) => outer == inner,
        PathMatch::Regex(pattern) => {
            let is_matched = match inner {
                PathMatch::Exact(path) => matches_whole(pattern, path),
                _ => false,
            };
            is_any(pattern) || is_matched || outer == inner
        }
        PathMatch::ElementPrefix(prefix) => {
            let prefix = prefix.trim_end_matches('/');
            match inner {
                PathMatch::Exact(path) | PathMatch::ElementPrefix(path) => {
                    is_below(prefix, path.trim_end_matches('/')) || is_below(prefix, path)
                }
                PathMatch::StringPrefix(path) => {
                    let rest = path.strip_prefix(prefix);
                    prefix.is_empty() || rest.is_some_and(|rest| rest.starts_with('/'))
                }
                PathMatch::Regex(_) => prefix.is_empty(),
            }
        }
        PathMatch::StringPrefix(prefix) => match inner {
            _ if matches!(prefix.as_str(), "" | "/") => true,
            PathMatch::Exact(path) | PathMatch::StringPrefix(path) => {
                path.starts_with(prefix.as_str())
            }
            PathMatch::ElementPrefix(path) => {
                path.trim_end_matches('/').starts_with(prefix.as_str())
            }
            PathMatch::Regex(_) => false,
        },
    }
}

/// Returns whether a path is the prefix itself or continues it by whole elements. The prefix does
/// not end in a slash.
fn is_below(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns whether a regular expression is one of those that authors write for any text.
fn is_any(pattern: &str) -> bool {
    matches!(pattern, ".*" | "/.*" | "^.*$" | "^/.*$" | "(.*)" | "/(.*)")
}

fn matches_whole(pattern: &str, text: &str) -> bool {
    pattern::compile(pattern).is_some_and(|compiled| compiled.is_match(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_cover_as_the_router_compares_them() {
        let exact = |text: &str| PathMatch::Exact(text.to_owned());
        let element = |text: &str| PathMatch::ElementPrefix(text.to_owned());
        let string = |text: &str| PathMatch::StringPrefix(text.to_owned());
        let regex = |text: &str| PathMatch::Regex(text.to_owned());
        for (outer, inner, expected) in [
            (element("/"), regex("/a.*"), true),
            (element("/foo"), exact("/foo"), true),
            (element("/foo"), exact("/foo/"), true),
            (element("/foo/"), element("/foo"), true),
            (element("/foo"), exact("/foobar"), false),
            (element("/foo"), string("/foo"), false),
            (element("/foo"), string("/foo/"), true),
            (string("/foo"), element("/foo/bar"), true),
            (string("/foo/"), element("/foo"), false),
            (string("/"), regex(".*"), true),
            (exact("/foo"), element("/foo"), false),
            (regex("/a+"), exact("/aa"), true),
            (regex("/a+"), exact("/ab"), false),
            (regex("/.*"), element("/x"), true),
        ] {
            let found = covers_path(&outer, &inner);
            assert_eq!(found, expected, "{outer:?} covers {inner:?}");
        }
    }

    #[test]
    fn a_match_with_more_conditions_is_covered_by_one_with_fewer() {
        let value = |name: &str, value| ValueMatch {
            name: name.to_owned(),
            value,
        };
        let exact = value("x-user", TextMatch::Exact("jason".to_owned()));
        let prefix = value("x-user", TextMatch::Prefix("ja".to_owned()));
        let other = value("x-other", TextMatch::Present);
        let (one, both) = ([exact.clone()], [exact, other.clone()]);
        assert!(covers_values(&[], &one));
        assert!(covers_values(std::slice::from_ref(&prefix), &both));
        assert!(!covers_values(&one, &[prefix]));
        assert!(!covers_values(&[other], &one));
    }

    #[test]
    fn any_host_covers_each_and_none_covers_any() {
        let exact = HostMatch::Exact("a.example.com".to_owned());
        let domain = HostMatch::Suffix(".example.com".to_owned());
        assert!(covers_hosts(&[], std::slice::from_ref(&exact)));
        assert!(covers_hosts(
            std::slice::from_ref(&domain),
            std::slice::from_ref(&exact)
        ));
        assert!(!covers_hosts(std::slice::from_ref(&domain), &[]));
        assert!(!covers_hosts(&[exact], &[domain]));
    }
}
