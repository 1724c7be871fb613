//! Finds a field in a document's text again, so that whoever judges the object later can still name the line.

use canal_model::diagnostic::Origin;

use crate::path::{OwnedStep, steps};
use crate::tree::{Node, Spot, Value, parse};

/// The place of `field` (a path as in a diagnostic) in `text`, which begins at `start`; of the nearest thing around it
/// if the field is not there, and `start` itself if the text cannot be read.
///
/// Reads the text anew: meant for the few diagnostics a tenant has, not for every object.
pub fn pinpoint(text: &str, start: &Origin, field: &str) -> Origin {
    let Ok(root) = parse(text) else { return start.clone() };
    let mut node = &root;
    let mut spot = None;
    for step in steps(field) {
        let Some((next, at)) = follow(node, &step) else { break };
        node = next;
        spot = Some(at);
    }
    spot.map_or_else(|| start.clone(), |at| place(start, at))
}

fn follow<'t>(node: &'t Node, step: &OwnedStep) -> Option<(&'t Node, Spot)> {
    match (step, &node.value) {
        (OwnedStep::Field(name), Value::Map(_)) => node.entry(name).map(|(key, value)| (value, key.spot)),
        (OwnedStep::Index(index), Value::List(items)) => items.get(*index).map(|item| (item, item.spot)),
        _ => None,
    }
}

/// A spot of a document as a place in its file.
pub(crate) fn place(start: &Origin, at: Spot) -> Origin {
    Origin { file: start.file.clone(), line: start.line + at.line.saturating_sub(1), column: at.column.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_again() {
        let text = "kind: X\nspec:\n  rules:\n  - name: a\n    matches: []\n  - name: b\n    \"x.y\": 1\n";
        let start = Origin { file: "f.yaml".into(), line: 11, column: 1 };
        for (field, expected) in [
            ("spec.rules[1].name", "f.yaml:16:5"),
            ("spec.rules[1]", "f.yaml:16:5"),
            ("spec.rules[1][\"x.y\"]", "f.yaml:17:5"),
            ("spec.rules[0].matches[4].path", "f.yaml:15:5"),
            ("spec.hostnames", "f.yaml:12:1"),
            ("", "f.yaml:11:1"),
            ("nowhere", "f.yaml:11:1"),
        ] {
            assert_eq!(pinpoint(text, &start, field).to_string(), expected, "{field}");
        }
        assert_eq!(pinpoint("a: [", &start, "a").to_string(), "f.yaml:11:1");
    }
}
