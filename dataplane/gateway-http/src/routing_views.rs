//! Requests and connections in the form in which rules match them, where that differs from what the
//! client sent. It routes nothing. Start with [`ChangedRequest`].

use canal_gateway_config::RequestMutations;
use canal_router::RoutableRequest;

/// A request as the filters of its listener changed it. Its host is the client's: no filter may change it.
pub struct ChangedRequest<'a, R> {
    pub request: &'a R,
    pub changes: &'a RequestMutations,
}

impl<R: RoutableRequest> RoutableRequest for ChangedRequest<'_, R> {
    fn host(&self) -> &[u8] {
        self.request.host()
    }
    fn method(&self) -> &[u8] {
        self.request.method()
    }
    fn path(&self) -> &[u8] {
        let changed = self.changes.path.as_deref();
        changed.map_or_else(|| self.request.path(), str::as_bytes)
    }
    fn query(&self) -> Option<&[u8]> {
        self.request.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        // What the client sent under a name that a change determines is not forwarded.
        if !self.changes.determines(name) {
            self.request.header(name, visit);
        } else if let Some(value) = self.changes.value(name) {
            visit(value);
        }
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        self.request.client_attribute(name)
    }
}

/// A connection whose bytes are relayed, as a rule sees it: it has the server name of a client with
/// TLS, which was passed through or terminated, and nothing else.
pub struct OpaqueConnection<'a>(pub &'a str);

impl RoutableRequest for OpaqueConnection<'_> {
    fn host(&self) -> &[u8] {
        self.0.as_bytes()
    }
    fn method(&self) -> &[u8] {
        b""
    }
    fn path(&self) -> &[u8] {
        b"/"
    }
    fn query(&self) -> Option<&[u8]> {
        None
    }
    fn header(&self, _: &str, _: &mut dyn FnMut(&[u8])) {}
}

/// A request with another path.
pub struct AtPath<'a, R> {
    pub request: &'a R,
    pub path: &'a str,
}

impl<R: RoutableRequest> RoutableRequest for AtPath<'_, R> {
    fn host(&self) -> &[u8] {
        self.request.host()
    }
    fn method(&self) -> &[u8] {
        self.request.method()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.request.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.request.header(name, visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sent;

    impl RoutableRequest for Sent {
        fn host(&self) -> &[u8] {
            b"www.example.com"
        }
        fn method(&self) -> &[u8] {
            b"GET"
        }
        fn path(&self) -> &[u8] {
            b"//a"
        }
        fn query(&self) -> Option<&[u8]> {
            Some(b"q")
        }
        fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
            if matches!(name, "x-user" | "x_user" | "x-other" | "x-gone" | "host") {
                visit(b"client");
            }
        }
    }

    #[test]
    fn headers_that_a_filter_sets_replace_those_of_the_client() {
        let mut changes = RequestMutations::default();
        changes.set("X-User", b"ann");
        changes.set("x-new", b"1");
        changes.set("host", b"other.example.com");
        changes.set(":authority", b"other.example.com");
        changes.remove("x-gone");
        changes.path = Some("/a".to_owned());
        let request = ChangedRequest {
            request: &Sent,
            changes: &changes,
        };
        for (name, values) in [
            ("x-user", &["ann"][..]),
            ("x_user", &[]),
            ("x-new", &["1"]),
            ("x-gone", &[]),
            ("x-other", &["client"]),
            ("host", &["client"]),
            (":authority", &[]),
        ] {
            let mut found = Vec::new();
            request.header(name, &mut |value| found.push(value.to_vec()));
            let expected: Vec<Vec<u8>> = values.iter().map(|it| it.as_bytes().to_vec()).collect();
            assert_eq!(found, expected, "{name}");
        }
        assert_eq!(request.host(), b"www.example.com");
        assert_eq!(request.method(), b"GET");
        assert_eq!(
            (request.path(), request.query()),
            (&b"/a"[..], Some(&b"q"[..]))
        );
    }
}
