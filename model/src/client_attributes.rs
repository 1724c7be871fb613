//! Names of what a gateway knows of a request's client without any header. A match compares these
//! attributes as it does headers, under names that no header can have. Nothing is compared here.

/// Name of the scheme among the headers of a match: `https` if the client itself uses TLS with the
/// gateway, else `http`.
pub const SCHEME: &str = ":scheme";
/// Name of the namespace of the identity that the client proved. A client of another tenant has none,
/// because its namespaces are others of the same name.
pub const SOURCE_NAMESPACE: &str = ":source-namespace";
/// Beginning of the names of the labels of the client's workload; the label's key follows. The workload
/// has the client's address and the identity that it proved.
pub const SOURCE_LABEL: &str = ":source-label/";

/// An attribute of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAttribute<'a> {
    Scheme,
    SourceNamespace,
    /// The label with this key.
    SourceLabel(&'a str),
}

impl<'a> ClientAttribute<'a> {
    /// Returns the attribute with a name; `None` if the name is that of a header.
    pub fn of_name(name: &'a str) -> Option<Self> {
        match name {
            SCHEME => Some(Self::Scheme),
            SOURCE_NAMESPACE => Some(Self::SourceNamespace),
            _ => name.strip_prefix(SOURCE_LABEL).map(Self::SourceLabel),
        }
    }
}

/// Returns whether a name among the headers of a match is that of an attribute of the client.
pub fn is_client_attribute(name: &str) -> bool {
    ClientAttribute::of_name(name).is_some()
}
