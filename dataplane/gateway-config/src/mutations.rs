//! Mutations of a request by routing and authorization: normalized path, removed tokens, headers
//! that only the gateway may set.
//!
//! The policies, external authorizers and the endpoint all see the mutated request. Start with
//! [`RequestMutations`].

use canal_model::route_filters::PROTECTED_REQUEST_HEADERS;

/// Returns whether a header's name is `name`, in any case and with `_` in the place of any `-`.
/// CGI, WSGI and PHP cannot tell them apart.
pub fn is_spelling_of(sent: &[u8], name: &[u8]) -> bool {
    let plain = |byte: u8| {
        if byte == b'_' {
            b'-'
        } else {
            byte.to_ascii_lowercase()
        }
    };
    sent.len() == name.len() && sent.iter().zip(name).all(|(a, b)| plain(*a) == plain(*b))
}

/// Mutation of one header: removal, or a new value.
#[derive(Debug, Clone, PartialEq, Eq)]
enum HeaderChange {
    Removed,
    Set(Vec<u8>),
}

/// Mutations of one request. They are empty for nearly all requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestMutations {
    /// New path, without the query.
    pub path: Option<String>,
    /// New query; `Some(None)` means that the query is removed.
    pub query: Option<Option<Vec<u8>>>,
    /// New host, with a port if there is one.
    pub host: Option<String>,
    /// Mutations by header name, in lower case, each name once.
    headers: Vec<(String, HeaderChange)>,
    /// Values that are added to those of a header, by its name in lower case.
    added: Vec<(String, Vec<u8>)>,
}

impl RequestMutations {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn change(&mut self, name: &str, change: HeaderChange) {
        let name = name.to_ascii_lowercase();
        if is_protected(&name) {
            return;
        }
        match self.headers.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = change,
            None => self.headers.push((name, change)),
        }
    }

    /// Removes all values of a header. Protected headers stay unchanged.
    pub fn remove(&mut self, name: &str) {
        self.change(name, HeaderChange::Removed);
    }

    /// Sets the only value of a header. An invalid value removes the header instead.
    pub fn set(&mut self, name: &str, value: &[u8]) {
        let value = value.trim_ascii();
        let is_name = !name.is_empty() && http::HeaderName::from_bytes(name.as_bytes()).is_ok();
        match http::HeaderValue::from_bytes(value) {
            Ok(_) if is_name => self.change(name, HeaderChange::Set(value.to_vec())),
            _ => self.change(name, HeaderChange::Removed),
        }
    }

    /// Adds a value to those of a header. Protected headers and invalid values stay out.
    pub fn add(&mut self, name: &str, value: &[u8]) {
        let name = name.to_ascii_lowercase();
        let is_valid = http::HeaderName::from_bytes(name.as_bytes()).is_ok()
            && http::HeaderValue::from_bytes(value).is_ok();
        if is_valid && !is_protected(&name) {
            self.added.push((name, value.trim_ascii().to_vec()));
        }
    }

    /// Returns the values that are added, with the header of each.
    pub fn added(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.added
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// Returns the header's value if it was set here.
    pub fn value(&self, name: &str) -> Option<&[u8]> {
        self.headers
            .iter()
            .find(|(known, _)| known == name)
            .and_then(|(_, change)| match change {
                HeaderChange::Set(value) => Some(value.as_slice()),
                HeaderChange::Removed => None,
            })
    }

    /// True if a mutation sets or removes the header, whatever the client sent.
    pub fn sets_or_removes(&self, name: &str) -> bool {
        self.headers.iter().any(|(known, _)| known == name)
    }

    /// True if a header that the client sent is another spelling, with `_` or with `-`, of one that
    /// a mutation determines. It is not forwarded, because an application might read it in its
    /// place.
    pub fn respells(&self, sent: &[u8]) -> bool {
        self.headers.iter().any(|(known, _)| {
            is_spelling_of(sent, known.as_bytes()) && !sent.eq_ignore_ascii_case(known.as_bytes())
        })
    }

    /// True if a mutation determines the header, or if the header is another spelling of such a
    /// one.
    pub fn determines(&self, name: &str) -> bool {
        self.sets_or_removes(name) || self.respells(name.as_bytes())
    }

    /// Returns the headers that are removed (`None`) or set.
    pub fn headers(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        self.headers.iter().map(|(name, change)| match change {
            HeaderChange::Removed => (name.as_str(), None),
            HeaderChange::Set(value) => (name.as_str(), Some(value.as_slice())),
        })
    }

    /// Returns path and query as they are forwarded, if they differ from the client's.
    pub fn target(&self, path: &[u8], query: Option<&[u8]>) -> Option<Vec<u8>> {
        if self.path.is_none() && self.query.is_none() {
            return None;
        }
        let mut target = self
            .path
            .as_ref()
            .map_or(path, |path| path.as_bytes())
            .to_vec();
        if let Some(query) = self.query.as_ref().map_or(query, Option::as_deref) {
            target.push(b'?');
            target.extend_from_slice(query);
        }
        Some(target)
    }

    /// Applies the header mutations to a map.
    pub fn apply(&self, headers: &mut http::HeaderMap) {
        if !self.headers.is_empty() {
            let other: Vec<http::HeaderName> = headers
                .keys()
                .filter(|name| self.respells(name.as_str().as_bytes()))
                .cloned()
                .collect();
            other.iter().for_each(|name| drop(headers.remove(name)));
        }
        for (name, value) in self.headers() {
            let Ok(name) = http::HeaderName::from_bytes(name.as_bytes()) else {
                continue;
            };
            match value.map(http::HeaderValue::from_bytes) {
                Some(Ok(value)) => drop(headers.insert(name, value)),
                _ => drop(headers.remove(name)),
            }
        }
        for (name, value) in self.added() {
            let name = http::HeaderName::from_bytes(name.as_bytes());
            if let (Ok(name), Ok(value)) = (name, http::HeaderValue::from_bytes(value)) {
                headers.append(name, value);
            }
        }
    }
}

/// True for a name that no mutation may change.
fn is_protected(name: &str) -> bool {
    let is_own = || {
        PROTECTED_REQUEST_HEADERS
            .iter()
            .any(|own| is_spelling_of(name.as_bytes(), own.as_bytes()))
    };
    name.is_empty() || name.starts_with(':') || is_own()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_change_of_a_header_counts_and_framing_is_left_alone() {
        let mut changes = RequestMutations::default();
        changes.set("X-User", b"a");
        changes.remove("x-user");
        changes.set("x-user", b"b");
        changes.set("Content-Length", b"0");
        changes.remove("Host");
        changes.set("x_forwarded_for", b"192.0.2.1");
        changes.set(":path", b"/x");
        changes.set("x-bad", b"a\r\nb: c");
        let all: Vec<_> = changes.headers().collect();
        assert_eq!(all, [("x-user", Some(&b"b"[..])), ("x-bad", None)]);
        assert_eq!(
            (
                changes.value("x-user"),
                changes.sets_or_removes("x-bad"),
                changes.sets_or_removes("host")
            ),
            (Some(&b"b"[..]), true, false)
        );
    }

    #[test]
    fn another_spelling_of_a_changed_header_is_not_forwarded() {
        let mut changes = RequestMutations::default();
        changes.set("x-user-id", b"a");
        changes.remove("x_token");
        let mut sent = http::HeaderMap::new();
        for name in [
            "x_user-id",
            "x_user_id",
            "x-user-id",
            "x_userid",
            "x-token",
            "x_token",
            "x_other",
        ] {
            sent.append(
                http::HeaderName::from_static(name),
                http::HeaderValue::from_static("b"),
            );
        }
        changes.apply(&mut sent);
        let mut left: Vec<_> = sent
            .iter()
            .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
            .collect();
        left.sort();
        assert_eq!(left, ["x-user-id=a", "x_other=b", "x_userid=b"]);
    }

    #[test]
    fn targets_are_put_together_again() {
        let changes = |path: Option<&str>, query: Option<Option<&[u8]>>| RequestMutations {
            path: path.map(Into::into),
            query: query.map(|q| q.map(<[u8]>::to_vec)),
            ..RequestMutations::default()
        };
        let target = |c: RequestMutations, query: Option<&[u8]>| {
            c.target(b"/a//b", query)
                .map(|t| String::from_utf8(t).unwrap())
        };
        assert_eq!(target(changes(None, None), Some(b"x=1")), None);
        assert_eq!(
            target(changes(Some("/a/b"), None), Some(b"x=1")).as_deref(),
            Some("/a/b?x=1")
        );
        assert_eq!(
            target(changes(Some("/a/b"), Some(None)), Some(b"x=1")).as_deref(),
            Some("/a/b")
        );
        assert_eq!(
            target(changes(None, Some(Some(b"y"))), Some(b"x=1")).as_deref(),
            Some("/a//b?y")
        );
    }
}
