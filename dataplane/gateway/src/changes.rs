//! What judging changes of a request: the path in its normal form, tokens taken out, headers that only the gateway may say. Policies, the
//! authorizer and the endpoint all see the changed request.

/// Names that frame the message, manage the connection or say whose request it is: nobody changes them by policy.
const KEPT: [&str; 15] = [
    "host",
    "connection",
    "content-length",
    "expect",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-forwarded-client-cert",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-request-id",
];

/// What becomes of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Change {
    Removed,
    Set(Vec<u8>),
}

/// See the module. Empty in nearly all requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// The path without the query.
    pub(crate) path: Option<String>,
    /// `Some(None)`: there is no query any more.
    pub(crate) query: Option<Option<Vec<u8>>>,
    /// Lower-case names, each once.
    headers: Vec<(String, Change)>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.path.is_none() && self.query.is_none() && self.headers.is_empty()
    }

    fn change(&mut self, name: &str, change: Change) {
        let name = name.to_ascii_lowercase();
        if name.is_empty() || name.starts_with(':') || KEPT.contains(&name.as_str()) {
            return;
        }
        match self.headers.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = change,
            None => self.headers.push((name, change)),
        }
    }

    /// All values of a header go. Nothing happens to those that frame the message.
    pub(crate) fn remove(&mut self, name: &str) {
        self.change(name, Change::Removed);
    }

    /// The header's only value. A value that no header may have is not set.
    pub(crate) fn set(&mut self, name: &str, value: &[u8]) {
        let value = value.trim_ascii();
        let is_name = !name.is_empty() && http::HeaderName::from_bytes(name.as_bytes()).is_ok();
        match http::HeaderValue::from_bytes(value) {
            Ok(_) if is_name => self.change(name, Change::Set(value.to_vec())),
            _ => self.change(name, Change::Removed),
        }
    }

    /// The header's value if it was set here.
    pub(crate) fn value(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(known, _)| known == name).and_then(|(_, change)| match change {
            Change::Set(value) => Some(value.as_slice()),
            Change::Removed => None,
        })
    }

    /// Whether this says what the header is, whatever the client sent.
    pub(crate) fn says(&self, name: &str) -> bool {
        self.headers.iter().any(|(known, _)| known == name)
    }

    /// Headers that are removed (`None`) or set.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        self.headers.iter().map(|(name, change)| match change {
            Change::Removed => (name.as_str(), None),
            Change::Set(value) => (name.as_str(), Some(value.as_slice())),
        })
    }

    /// Path and query as they are forwarded, if they are not as they came.
    pub(crate) fn target(&self, path: &[u8], query: Option<&[u8]>) -> Option<Vec<u8>> {
        if self.path.is_none() && self.query.is_none() {
            return None;
        }
        let mut target = self.path.as_ref().map_or(path, |path| path.as_bytes()).to_vec();
        if let Some(query) = self.query.as_ref().map_or(query, Option::as_deref) {
            target.push(b'?');
            target.extend_from_slice(query);
        }
        Some(target)
    }

    /// Into a map of headers.
    pub(crate) fn apply(&self, headers: &mut http::HeaderMap) {
        for (name, value) in self.headers() {
            let Ok(name) = http::HeaderName::from_bytes(name.as_bytes()) else { continue };
            match value.map(http::HeaderValue::from_bytes) {
                Some(Ok(value)) => drop(headers.insert(name, value)),
                _ => drop(headers.remove(name)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_change_of_a_header_counts_and_framing_is_left_alone() {
        let mut changes = Changes::default();
        changes.set("X-User", b"a");
        changes.remove("x-user");
        changes.set("x-user", b"b");
        changes.set("Content-Length", b"0");
        changes.remove("Host");
        changes.set(":path", b"/x");
        changes.set("x-bad", b"a\r\nb: c");
        let all: Vec<_> = changes.headers().collect();
        assert_eq!(all, [("x-user", Some(&b"b"[..])), ("x-bad", None)]);
        assert_eq!((changes.value("x-user"), changes.says("x-bad"), changes.says("host")), (Some(&b"b"[..]), true, false));
    }

    #[test]
    fn targets_are_put_together_again() {
        let changes = |path: Option<&str>, query: Option<Option<&[u8]>>| Changes {
            path: path.map(Into::into),
            query: query.map(|q| q.map(<[u8]>::to_vec)),
            ..Changes::default()
        };
        let target = |c: Changes, query: Option<&[u8]>| c.target(b"/a//b", query).map(|t| String::from_utf8(t).unwrap());
        assert_eq!(target(changes(None, None), Some(b"x=1")), None);
        assert_eq!(target(changes(Some("/a/b"), None), Some(b"x=1")).as_deref(), Some("/a/b?x=1"));
        assert_eq!(target(changes(Some("/a/b"), Some(None)), Some(b"x=1")).as_deref(), Some("/a/b"));
        assert_eq!(target(changes(None, Some(Some(b"y"))), Some(b"x=1")).as_deref(), Some("/a//b?y"));
    }
}
