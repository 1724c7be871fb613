//! View of a request that the router needs. The gateway implements it once per protocol.

/// Returns what joins the lines of the header `name`, which is in lower case, to one value. RFC
/// 9110 §5.3 has a comma for lists, and RFC 9113 §8.2.3 has a semicolon for cookies.
pub fn line_separator(name: &str) -> &'static [u8] {
    if name == "cookie" { b"; " } else { b"," }
}

/// Request head as the router sees it. All bytes are as sent, except for a path that had to be
/// normalized.
pub trait RoutableRequest {
    /// Returns the requested host without port and brackets, in any case; empty if there is none.
    fn host(&self) -> &[u8];
    /// Returns the request's method.
    fn method(&self) -> &[u8];
    /// Returns the path without the query.
    fn path(&self) -> &[u8];
    /// Returns the query without its `?`.
    fn query(&self) -> Option<&[u8]>;
    /// Calls `visit` with each value of a header, in order. `name` is lower case.
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8]));
    /// Returns an attribute of the client (`canal_model::client_attributes`); `None` if it is not
    /// known, so that no condition on it holds.
    fn client_attribute(&self, _name: &str) -> Option<&[u8]> {
        None
    }
}
