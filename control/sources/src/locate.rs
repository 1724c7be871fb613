//! Finds the position of a field in a document's text again, so that later checks of the object can
//! name the line.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, SourceLocation};
use canal_model::policy::{Document, ObjectKey};
use canal_yaml::path::{OwnedPathStep, steps};
use canal_yaml::tree::{Position, YamlNode, YamlValue, parse};

/// Returns the position of `field` (a path as in a diagnostic) in `text`, which begins at `start`.
///
/// If the field does not exist, the result is the position of its nearest existing parent; if
/// `text` cannot be parsed, it is `start`. The function parses `text` again; [`add_positions`]
/// parses it once for many diagnostics.
pub fn pinpoint(text: &str, start: &SourceLocation, field: &str) -> SourceLocation {
    FieldLocator::new(text, start).locate(field)
}

/// Adds the positions of their fields to diagnostics, which have only those of their objects. A
/// tenant can have thousands of diagnostics of one large object, so each text is parsed once for
/// consecutive ones.
pub fn add_positions(diagnostics: &mut [Diagnostic], documents: &[Arc<Document>]) {
    let named = diagnostics.iter().filter_map(|it| it.object.clone());
    let named: HashSet<ObjectKey> = named.collect();
    let documents = documents.iter().map(|it| (it.object.key(), it));
    // Two definitions of one object differ in their origins.
    let by_origin: HashMap<(ObjectKey, &SourceLocation), &Document> = documents
        .filter(|(key, _)| named.contains(key))
        .map(|(key, it)| ((key, &it.origin), it.as_ref()))
        .collect();
    let mut last: Option<(&Document, FieldLocator)> = None;
    for diagnostic in diagnostics.iter_mut().filter(|it| !it.field.is_empty()) {
        let (Some(origin), Some(object)) = (&diagnostic.origin, &diagnostic.object) else {
            continue;
        };
        let Some(&document) = by_origin.get(&(object.clone(), origin)) else {
            continue;
        };
        let same = last.take().filter(|(it, _)| std::ptr::eq(*it, document));
        let locator = || FieldLocator::new(&document.text, &document.origin);
        let (_, locator) = last.insert(same.unwrap_or_else(|| (document, locator())));
        diagnostic.origin = Some(locator.locate(&diagnostic.field));
    }
}

/// Finds the positions of the fields of one document, whose text it parses once.
struct FieldLocator {
    /// `None` if the text cannot be parsed.
    root: Option<YamlNode>,
    start: SourceLocation,
}

impl FieldLocator {
    fn new(text: &str, start: &SourceLocation) -> Self {
        Self {
            root: parse(text).ok(),
            start: start.clone(),
        }
    }

    /// Returns the position of `field` or of its nearest parent that exists, else that of the
    /// document.
    fn locate(&self, field: &str) -> SourceLocation {
        let at = self.root.as_ref().and_then(|root| nearest(root, field));
        at.map_or_else(|| self.start.clone(), |at| file_location(&self.start, at))
    }
}

/// Returns the position of `field` of an object that is a part of a document which begins at
/// `start`.
pub(crate) fn position_in(
    object: &YamlNode,
    start: &SourceLocation,
    field: &str,
) -> SourceLocation {
    file_location(start, nearest(object, field).unwrap_or(object.spot))
}

/// Returns the position of `field`, or of its nearest parent that exists.
fn nearest(root: &YamlNode, field: &str) -> Option<Position> {
    let (mut node, mut spot) = (root, None);
    for step in steps(field) {
        let Some((next, at)) = follow(node, &step) else {
            break;
        };
        node = next;
        spot = Some(at);
    }
    spot
}

fn follow<'t>(node: &'t YamlNode, step: &OwnedPathStep) -> Option<(&'t YamlNode, Position)> {
    match (step, &node.value) {
        (OwnedPathStep::Field(name), YamlValue::Map(_)) => {
            node.entry(name).map(|(key, value)| (value, key.spot))
        }
        (OwnedPathStep::Index(index), YamlValue::List(items)) => {
            items.get(*index).map(|item| (item, item.spot))
        }
        _ => None,
    }
}

/// Converts a position in a document that begins at `start` into a position in the file.
pub(crate) fn file_location(start: &SourceLocation, at: Position) -> SourceLocation {
    SourceLocation {
        file: start.file.clone(),
        line: start.line + at.line.saturating_sub(1),
        column: at.column.max(1),
    }
}

#[cfg(test)]
mod tests {
    use canal_model::diagnostic::Severity;
    use canal_model::diagnostic_code::DiagnosticCode;

    use super::*;

    #[test]
    fn each_diagnostic_of_a_large_object_gets_the_position_of_its_field() {
        let rules: String = (0..5_000).map(|n| format!("  - {{rule: {n}}}\n")).collect();
        let text = format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: a}}\nspec:\n  rules:\n{rules}"
        );
        let parsed = crate::parse(
            "a.yaml",
            &format!(
                "# Comment\n---\n{text}---\n{}",
                text.replace("name: a", "name: b")
            ),
        );
        let documents: Vec<Arc<Document>> = parsed.documents.into_iter().map(Arc::new).collect();
        assert_eq!(documents.len(), 2);
        let of = |document: &Document, field: String| Diagnostic {
            severity: Severity::Error,
            code: DiagnosticCode::InvalidValue,
            origin: Some(document.origin.clone()),
            object: Some(document.object.key()),
            field,
            problem: String::new(),
            fix: String::new(),
        };
        let mut diagnostics: Vec<Diagnostic> = (0..10_000)
            .map(|n| of(&documents[n / 5_000], format!("spec.rules[{}]", n % 5_000)))
            .collect();
        // A diagnostic without a field, and one of an object that is not among the documents.
        diagnostics.push(of(&documents[0], String::new()));
        let mut foreign = of(&documents[0], "spec".to_owned());
        foreign.object.as_mut().unwrap().name = "c".parse().unwrap();
        diagnostics.push(foreign);
        let before = diagnostics.clone();
        add_positions(&mut diagnostics, &documents);
        for (n, found) in diagnostics[..10_000].iter().enumerate() {
            let document = &documents[n / 5_000];
            let expected = pinpoint_line(document, n % 5_000);
            assert_eq!(found.origin.as_ref().unwrap().line, expected, "{n}");
        }
        assert_eq!(diagnostics[10_000..], before[10_000..]);
    }

    /// Returns the line of a rule in the test above: five lines of the document precede the first.
    fn pinpoint_line(document: &Document, rule: usize) -> u32 {
        document.origin.line + 5 + u32::try_from(rule).unwrap()
    }

    #[test]
    fn fields_are_found_again() {
        let text =
            "kind: X\nspec:\n  rules:\n  - name: a\n    matches: []\n  - name: b\n    \"x.y\": 1\n";
        let start = SourceLocation {
            file: "f.yaml".into(),
            line: 11,
            column: 1,
        };
        for (field, expected) in [
            ("spec.rules[1].name", "f.yaml:16:5"),
            ("spec.rules[1]", "f.yaml:16:5"),
            ("spec.rules[1][\"x.y\"]", "f.yaml:17:5"),
            ("spec.rules[0].matches[4].path", "f.yaml:15:5"),
            ("spec.hostnames", "f.yaml:12:1"),
            ("", "f.yaml:11:1"),
            ("nowhere", "f.yaml:11:1"),
        ] {
            assert_eq!(
                pinpoint(text, &start, field).to_string(),
                expected,
                "{field}"
            );
        }
        assert_eq!(pinpoint("a: [", &start, "a").to_string(), "f.yaml:11:1");
    }
}
