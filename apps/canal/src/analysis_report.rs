//! The result of `canal analyze` as text, JSON and SARIF 2.1.0. It decides nothing about the
//! diagnostics. Start at [`AnalysisReport`].

use std::collections::BTreeMap;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::{CodeDescription, DiagnosticCode};
use serde_json::{Value, json};

/// The diagnostics of all tenants, sorted by position.
#[derive(Debug)]
pub(crate) struct AnalysisReport {
    diagnostics: Vec<Diagnostic>,
    /// Number of objects that were analyzed.
    objects: usize,
}

impl AnalysisReport {
    pub(crate) fn new(mut diagnostics: Vec<Diagnostic>, objects: usize) -> Self {
        diagnostics.sort_by(|a, b| {
            (&a.origin, a.severity, a.code, &a.field)
                .cmp(&(&b.origin, b.severity, b.code, &b.field))
        });
        diagnostics.dedup();
        Self {
            diagnostics,
            objects,
        }
    }

    pub(crate) fn count(&self, severity: Severity) -> usize {
        let all = self.diagnostics.iter();
        all.filter(|it| it.severity == severity).count()
    }

    /// Returns the lines for people: each diagnostic with its consequence and its fix, and a summary.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for diagnostic in &self.diagnostics {
            lines.push(headline(diagnostic));
            lines.push(format!("  why: {}", diagnostic.code.description().why));
            lines.push(format!("  fix: {}", diagnostic.fix));
        }
        let count = |number: usize, name: &str| match number {
            1 => format!("1 {name}"),
            _ => format!("{number} {name}s"),
        };
        lines.push(format!(
            "{}, {} in {}",
            count(self.count(Severity::Error), "error"),
            count(self.count(Severity::Warning), "warning"),
            count(self.objects, "object")
        ));
        lines
    }

    pub(crate) fn json(&self) -> Value {
        let diagnostics = self.diagnostics.iter().map(|diagnostic| {
            let CodeDescription {
                name,
                why,
                condition,
                ..
            } = diagnostic.code.description();
            let condition =
                condition.map(|(kind, reason)| json!({ "type": kind, "reason": reason }));
            let origin = diagnostic.origin.as_ref();
            json!({
                "code": diagnostic.code.to_string(),
                "name": name,
                "severity": diagnostic.severity.to_string(),
                "file": origin.map(|at| at.file.as_ref()).unwrap_or_default(),
                "line": origin.map_or(0, |at| at.line),
                "column": origin.map_or(0, |at| at.column),
                "object": diagnostic.object.as_ref().map(ToString::to_string).unwrap_or_default(),
                "field": diagnostic.field,
                "problem": diagnostic.problem,
                "why": why,
                "fix": diagnostic.fix,
                "condition": condition,
            })
        });
        json!({
            "diagnostics": diagnostics.collect::<Vec<_>>(),
            "errors": self.count(Severity::Error),
            "warnings": self.count(Severity::Warning),
            "objects": self.objects,
        })
    }

    /// Returns the log that SARIF 2.1.0 (OASIS) defines, with a rule for each code that occurs.
    pub(crate) fn sarif(&self) -> Value {
        let mut indexes: BTreeMap<DiagnosticCode, usize> = BTreeMap::new();
        for diagnostic in &self.diagnostics {
            indexes.insert(diagnostic.code, 0);
        }
        for (index, place) in indexes.values_mut().enumerate() {
            *place = index;
        }
        let rules: Vec<Value> = indexes.keys().map(|code| sarif_rule(*code)).collect();
        let results = self.diagnostics.iter().map(|diagnostic| {
            let index = indexes.get(&diagnostic.code);
            json!({
                "ruleId": diagnostic.code.to_string(),
                "ruleIndex": index,
                "level": diagnostic.severity.to_string(),
                "message": { "text": format!("{}. Fix: {}.", sentence(diagnostic), diagnostic.fix) },
                "locations": sarif_locations(diagnostic),
            })
        });
        json!({
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{
                "tool": { "driver": {
                    "name": "canal",
                    "version": env!("CARGO_PKG_VERSION"),
                    "rules": rules,
                }},
                // Columns count characters.
                "columnKind": "unicodeCodePoints",
                "results": results.collect::<Vec<_>>(),
            }],
        })
    }
}

/// Returns `file:line:column: error[code]: object: field: problem`.
fn headline(diagnostic: &Diagnostic) -> String {
    let place = diagnostic.origin.as_ref();
    let place = place.map(|at| format!("{at}: ")).unwrap_or_default();
    format!(
        "{place}{}[{}]: {}",
        diagnostic.severity,
        diagnostic.code,
        sentence(diagnostic)
    )
}

/// Returns the object, the field and the problem.
fn sentence(diagnostic: &Diagnostic) -> String {
    let object = diagnostic.object.as_ref().map(ToString::to_string);
    let parts = [
        object.unwrap_or_default(),
        diagnostic.field.clone(),
        diagnostic.problem.clone(),
    ];
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(": ")
}

fn sarif_rule(code: DiagnosticCode) -> Value {
    let CodeDescription {
        name,
        title,
        why,
        fix,
        ..
    } = code.description();
    json!({
        "id": code.to_string(),
        "name": name,
        "shortDescription": { "text": title },
        "fullDescription": { "text": why },
        "help": { "text": fix },
    })
}

fn sarif_locations(diagnostic: &Diagnostic) -> Vec<Value> {
    let logical = diagnostic.object.as_ref().map(|object| {
        let name = match diagnostic.field.as_str() {
            "" => object.to_string(),
            field => format!("{object}: {field}"),
        };
        json!([{ "fullyQualifiedName": name }])
    });
    let physical = diagnostic.origin.as_ref().map(|at| {
        json!({
            "artifactLocation": { "uri": uri_of(&at.file) },
            "region": { "startLine": at.line, "startColumn": at.column },
        })
    });
    let mut location = serde_json::Map::new();
    location.extend(physical.map(|it| ("physicalLocation".to_owned(), it)));
    location.extend(logical.map(|it| ("logicalLocations".to_owned(), it)));
    match location.is_empty() {
        true => Vec::new(),
        false => vec![Value::Object(location)],
    }
}

/// Returns a path as a URI reference (RFC 3986).
fn uri_of(path: &str) -> String {
    let mut uri = String::from(if path.starts_with('/') { "file://" } else { "" });
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            uri.push(char::from(byte));
        } else {
            uri.push_str(&format!("%{byte:02X}"));
        }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> AnalysisReport {
        let found = canal_sources::parse("a b.yaml", "apiVersion: v1\nkind: Service\nbad: 1\n");
        AnalysisReport::new(found.diagnostics, 1)
    }

    #[test]
    fn text_says_what_why_and_how() {
        let lines = report().lines();
        assert!(lines[0].starts_with("a b.yaml:"), "{lines:?}");
        assert!(lines[0].contains(": error[CANAL0"), "{lines:?}");
        assert!(lines[1].starts_with("  why: "), "{lines:?}");
        assert!(lines[2].starts_with("  fix: "), "{lines:?}");
        assert!(lines.last().is_some_and(|it| it.ends_with("in 1 object")));
    }

    /// The properties that the schema of SARIF 2.1.0 requires, and the rules of its references.
    #[test]
    fn sarif_has_what_its_schema_requires() {
        let log = report().sarif();
        assert_eq!(log["version"], "2.1.0");
        let run = &log["runs"][0];
        let rules = run["tool"]["driver"]["rules"].as_array().unwrap();
        let results = run["results"].as_array().unwrap();
        assert!(!results.is_empty());
        for result in results {
            let index = usize::try_from(result["ruleIndex"].as_u64().unwrap()).unwrap();
            assert_eq!(rules[index]["id"], result["ruleId"]);
            assert!(["error", "warning"].contains(&result["level"].as_str().unwrap()));
            assert!(!result["message"]["text"].as_str().unwrap().is_empty());
            let place = &result["locations"][0]["physicalLocation"];
            assert_eq!(place["artifactLocation"]["uri"], "a%20b.yaml");
            assert!(place["region"]["startLine"].as_u64() >= Some(1));
        }
    }

    #[test]
    fn json_has_the_code_and_its_consequence() {
        let value = report().json();
        let first = &value["diagnostics"][0];
        assert_eq!(first["severity"], "error");
        assert!(first["code"].as_str().unwrap().starts_with("CANAL"));
        assert!(!first["why"].as_str().unwrap().is_empty());
        assert!(value["errors"].as_u64() >= Some(1));
    }
}
