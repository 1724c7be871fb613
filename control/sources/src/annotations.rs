//! Removes annotations that no component reads from a document, such as
//! `kubectl.kubernetes.io/last-applied-configuration`, which repeats the whole object.
//!
//! Their lines become empty, so every other line keeps its number. An annotation that shares a line
//! with something else is not removed.

use canal_model::policy::READ_ANNOTATIONS;
use canal_yaml::tree::{self, YamlKey, YamlNode, YamlValue};

/// Returns the document without unread annotations and its new tree, or `None` if nothing can be
/// removed.
pub(crate) fn without_unread(text: &str, root: &YamlNode) -> Option<(String, YamlNode)> {
    let (key, annotations) = root.field("metadata")?.entry("annotations")?;
    let YamlValue::Map(entries) = &annotations.value else {
        return None;
    };
    let is_unread =
        |(key, _): &&(YamlKey, YamlNode)| !READ_ANNOTATIONS.contains(&key.name.as_str());
    let unread: Vec<&YamlKey> = entries
        .iter()
        .filter(is_unread)
        .map(|(key, _)| key)
        .collect();
    if unread.is_empty() {
        return None;
    }
    // A map without entries would be null, so the `annotations` key is removed together with its
    // last entry.
    let gone = if unread.len() == entries.len() {
        vec![key]
    } else {
        unread
    };
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    for key in gone {
        blank(&mut lines, key)?;
    }
    let text = lines.concat();
    // Anchors, quoting styles and comments make cutting by lines unsafe, so the new tree is
    // compared with the old one.
    let root_now = tree::parse(&text).ok()?;
    is_equivalent(root, &root_now).then_some((text, root_now))
}

/// Empties the lines of one entry of a block map. Returns `None` if the entry does not begin a
/// line.
fn blank(lines: &mut [&str], key: &YamlKey) -> Option<()> {
    let first = usize::try_from(key.spot.line).ok()?.checked_sub(1)?;
    let indent = usize::try_from(key.spot.column).ok()?.checked_sub(1)?;
    let indent_of = |line: &str| line.len() - line.trim_start_matches(' ').len();
    if indent_of(lines.get(first)?) != indent {
        return None;
    }
    for (at, line) in lines.iter_mut().enumerate().skip(first) {
        if at > first && !line.trim().is_empty() && indent_of(line) <= indent {
            break;
        }
        *line = if line.ends_with('\n') { "\n" } else { "" };
    }
    Some(())
}

/// Returns true if the two documents differ only in annotations that no component reads.
fn is_equivalent(before: &YamlNode, after: &YamlNode) -> bool {
    let of = |root: &YamlNode, keep: &dyn Fn(&str) -> bool| {
        let annotations = root
            .field("metadata")
            .and_then(|m| m.field("annotations"))
            .map(|a| a.value.clone());
        let Some(YamlValue::Map(entries)) = annotations else {
            return Vec::new();
        };
        entries
            .into_iter()
            .filter(|(key, _)| keep(&key.name))
            .collect::<Vec<_>>()
    };
    let read = of(before, &|name| READ_ANNOTATIONS.contains(&name));
    let left = of(after, &|_| true);
    is_same_map(&read, &left, &[]) && is_same(before, after, &["metadata", "annotations"])
}

/// Returns true if two values are equal apart from their positions and apart from the field that
/// the path `skip` leads to.
fn is_same(a: &YamlNode, b: &YamlNode, skip: &[&str]) -> bool {
    match (&a.value, &b.value) {
        (YamlValue::Map(a), YamlValue::Map(b)) => is_same_map(a, b, skip),
        (YamlValue::List(a), YamlValue::List(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b, &[]))
        }
        (a, b) => a == b,
    }
}

fn is_same_map(a: &[(YamlKey, YamlNode)], b: &[(YamlKey, YamlNode)], skip: &[&str]) -> bool {
    let is_kept = |(key, _): &&(YamlKey, YamlNode)| skip != [key.name.as_str()];
    let (a, b): (Vec<_>, Vec<_>) = (
        a.iter().filter(is_kept).collect(),
        b.iter().filter(is_kept).collect(),
    );
    let inner = |name: &str| {
        if skip.first() == Some(&name) {
            &skip[1..]
        } else {
            &[]
        }
    };
    a.len() == b.len()
        && a.iter()
            .zip(&b)
            .all(|((x, a), (y, b))| x.name == y.name && is_same(a, b, inner(&x.name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<&str>) {
        let got = without_unread(text, &tree::parse(text).unwrap()).map(|(text, _)| text);
        assert_eq!(got.as_deref(), expected, "{text:?}");
    }

    #[test]
    fn lines_of_unread_annotations_become_empty() {
        check(
            "metadata:\n  annotations:\n    a.b/c: |\n      {\"x\": 1}\n\n      # text\n    canal.mesh/az: az1\n    d: 'e\n      f'\n  name: x\nspec: 1\n",
            Some(
                "metadata:\n  annotations:\n\n\n\n\n    canal.mesh/az: az1\n\n\n  name: x\nspec: 1\n",
            ),
        );
        check(
            "metadata:\n  name: x\n  annotations:\n    a: b\n    c: d",
            Some("metadata:\n  name: x\n\n\n"),
        );
        check(
            "metadata:\n  annotations:\n    a: b\n# a comment\n  name: x\n",
            Some("metadata:\n\n\n# a comment\n  name: x\n"),
        );
    }

    #[test]
    fn known_and_inline_annotations_stay() {
        for text in [
            "metadata:\n  name: x\n",
            "metadata:\n  annotations:\n    canal.mesh/az: az1\n",
            "metadata: {name: x, annotations: {note: y}}\n",
            "metadata:\n  annotations: {note: y}\n",
            "metadata:\n  annotations: []\n",
            // An alias makes the label depend on the annotation's anchor.
            "metadata:\n  annotations:\n    a: &v text\n  labels:\n    b: *v\n",
        ] {
            check(text, None);
        }
        check(
            "metadata:\n  annotations: {note: y}\n  name: x\n",
            Some("metadata:\n\n  name: x\n"),
        );
    }
}
