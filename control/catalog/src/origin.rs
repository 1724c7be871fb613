//! Where an object of policy comes from. The order of the sources is their precedence. No source is
//! read here.

/// A source of policy. The order is the precedence: of two objects with one key, that of the
/// smaller origin is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyOrigin {
    /// YAML files in a folder of the controller.
    Files,
    /// Objects that operators applied through the API.
    Api,
}

impl PolicyOrigin {
    /// Returns the name of the source in `canal get`, and as the label `from` of metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Api => "api",
        }
    }
}
