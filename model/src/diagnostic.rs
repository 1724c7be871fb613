//! What is wrong with something a user wrote, where it stands, and how to mend it. Who finds it: `control/sources` and `compiler`.

use std::fmt;
use std::sync::Arc;

use crate::policy::ObjectKey;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Something does not work as written and was made to fail closed; `canal apply` refuses it.
    Error,
    /// All works as written, but perhaps not as meant.
    Warning,
}

/// A place in a file. Lines and columns count from 1, columns in characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// As the user named it, or `api`.
    pub file: Arc<str>,
    pub line: u32,
    pub column: u32,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Diagnostic {
    pub severity: Severity,
    /// Of the field where known, else of the object's first line.
    pub origin: Option<Origin>,
    /// `None` when the document does not even name its object.
    pub object: Option<ObjectKey>,
    /// Path of the field, e.g. `spec.rules[0].backendRefs[1].name`; empty for the object as a whole.
    pub field: String,
    /// What is wrong; a sentence without a full stop.
    pub problem: String,
    /// What to write instead; a sentence without a full stop.
    pub mend: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(origin) = &self.origin {
            write!(f, "{origin}: ")?;
        }
        f.write_str(match self.severity {
            Severity::Error => "error: ",
            Severity::Warning => "warning: ",
        })?;
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}; {}", self.problem, self.mend)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagnostic_reads_as_one_line() {
        let diagnostic = Diagnostic {
            severity: Severity::Error,
            origin: Some(Origin { file: "routes.yaml".into(), line: 3, column: 7 }),
            object: Some("HTTPRoute bookinfo/reviews".parse().unwrap()),
            field: "spec.rules[0].filters".into(),
            problem: "filters are not in this version".into(),
            mend: "remove the field".into(),
        };
        assert_eq!(
            diagnostic.to_string(),
            "routes.yaml:3:7: error: HTTPRoute bookinfo/reviews: spec.rules[0].filters: filters are not in this version; remove the field"
        );
    }
}
