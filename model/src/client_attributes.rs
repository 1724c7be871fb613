//! Names of what a gateway knows of a request's client without any header. A match compares these
//! attributes as it does headers, under names that no header can have. Nothing is compared here.

/// Name of the scheme among the headers of a match: `https` if the client itself uses TLS with the
/// gateway, else `http`.
pub const SCHEME: &str = ":scheme";

/// Returns whether a name among the headers of a match is that of an attribute of the client.
pub fn is_client_attribute(name: &str) -> bool {
    name == SCHEME
}

/// Returns the name of an attribute for readers; `None` if the name is that of a header.
pub fn shown(name: &str) -> Option<&str> {
    match name {
        SCHEME => Some("scheme"),
        _ => None,
    }
}
