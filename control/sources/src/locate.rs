//! Finds the position of a field in a document's text again, so that later checks of the object can
//! name the line.

use canal_model::diagnostic::SourceLocation;
use canal_yaml::path::{OwnedPathStep, steps};
use canal_yaml::tree::{Position, YamlNode, YamlValue, parse};

/// Returns the position of `field` (a path as in a diagnostic) in `text`, which begins at `start`.
///
/// If the field does not exist, the result is the position of its nearest existing parent; if
/// `text` cannot be parsed, it is `start`. The function parses `text` again. It is meant for the
/// few diagnostics of a tenant, not for every object.
pub fn pinpoint(text: &str, start: &SourceLocation, field: &str) -> SourceLocation {
    let Ok(root) = parse(text) else {
        return start.clone();
    };
    nearest(&root, field).map_or_else(|| start.clone(), |at| file_location(start, at))
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
    use super::*;

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
