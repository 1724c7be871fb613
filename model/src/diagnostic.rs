//! Diagnostics: what is wrong with an object that a user wrote, at which position, and how to fix
//! it. `control/sources` and `compiler` produce them.

use std::fmt;
use std::sync::Arc;

use crate::diagnostic_code::DiagnosticCode;
use crate::policy::ObjectKey;

/// The severity of a diagnostic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Part of the object does not work as written and fails closed; `canal apply` refuses the
    /// object.
    Error,
    /// The object works as written, but perhaps not as intended.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        })
    }
}

/// A position in a file. Lines and columns count from 1; columns count characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceLocation {
    /// File name as the user wrote it, or `api`.
    pub file: Arc<str>,
    pub line: u32,
    pub column: u32,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// One diagnostic about an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Diagnostic {
    pub severity: Severity,
    /// What the diagnostic is about; scripts may rely on it.
    pub code: DiagnosticCode,
    /// Position of the field if it is known, else of the object's first line.
    pub origin: Option<SourceLocation>,
    /// Object concerned; `None` if the document does not even name its object.
    pub object: Option<ObjectKey>,
    /// Path of the field, e.g. `spec.rules[0].backendRefs[1].name`; empty for the object as a
    /// whole.
    pub field: String,
    /// Description of the problem: a sentence without a full stop.
    pub problem: String,
    /// Instruction that fixes the problem: a sentence without a full stop.
    pub fix: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(origin) = &self.origin {
            write!(f, "{origin}: ")?;
        }
        write!(f, "{}[{}]: ", self.severity, self.code)?;
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}; fix: {}", self.problem, self.fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagnostic_reads_as_one_line() {
        let diagnostic = Diagnostic {
            severity: Severity::Error,
            code: DiagnosticCode::UnsupportedField,
            origin: Some(SourceLocation {
                file: "routes.yaml".into(),
                line: 3,
                column: 7,
            }),
            object: Some("HTTPRoute bookinfo/reviews".parse().unwrap()),
            field: "spec.rules[0].filters".into(),
            problem: "filters are not supported in this version".into(),
            fix: "remove the field".into(),
        };
        assert_eq!(
            diagnostic.to_string(),
            "routes.yaml:3:7: error[CANAL0103]: HTTPRoute bookinfo/reviews: spec.rules[0].filters: filters are not supported in this version; fix: remove the field"
        );
    }
}
