//! Takes annotations that nothing reads out of a document, such as `kubectl.kubernetes.io/last-applied-configuration`, which repeats all of it:
//! their lines become empty, so that every other line keeps its number. What shares its line with anything else stays.

use canal_model::policy::READ_ANNOTATIONS;

use crate::tree::{self, Key, Node, Value};

/// The document without them, and its tree; `None`: nothing is to be taken out.
pub(crate) fn without_unread(text: &str, root: &Node) -> Option<(String, Node)> {
    let (key, annotations) = root.field("metadata")?.entry("annotations")?;
    let Value::Map(entries) = &annotations.value else { return None };
    let is_unread = |(key, _): &&(Key, Node)| !READ_ANNOTATIONS.contains(&key.name.as_str());
    let unread: Vec<&Key> = entries.iter().filter(is_unread).map(|(key, _)| key).collect();
    if unread.is_empty() {
        return None;
    }
    // Without the last of them the map would be null, so it goes with them.
    let gone = if unread.len() == entries.len() { vec![key] } else { unread };
    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
    for key in gone {
        blank(&mut lines, key)?;
    }
    let text = lines.concat();
    // Whatever styles, anchors and comments there are: what is left must say the same.
    let root_now = tree::parse(&text).ok()?;
    says_the_same(root, &root_now).then_some((text, root_now))
}

/// Empties the lines of an entry of a block map; `None`: it does not begin a line.
fn blank(lines: &mut [&str], key: &Key) -> Option<()> {
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

/// Whether two documents differ in nothing but annotations that nothing reads.
fn says_the_same(before: &Node, after: &Node) -> bool {
    let of = |root: &Node, keep: &dyn Fn(&str) -> bool| {
        let annotations = root.field("metadata").and_then(|m| m.field("annotations")).map(|a| a.value.clone());
        let Some(Value::Map(entries)) = annotations else { return Vec::new() };
        entries.into_iter().filter(|(key, _)| keep(&key.name)).collect::<Vec<_>>()
    };
    let read = of(before, &|name| READ_ANNOTATIONS.contains(&name));
    let left = of(after, &|_| true);
    is_same_map(&read, &left, &[]) && is_same(before, after, &["metadata", "annotations"])
}

/// Whether two values are equal wherever they stand, but for what `skip` leads to from here.
fn is_same(a: &Node, b: &Node, skip: &[&str]) -> bool {
    match (&a.value, &b.value) {
        (Value::Map(a), Value::Map(b)) => is_same_map(a, b, skip),
        (Value::List(a), Value::List(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b, &[])),
        (a, b) => a == b,
    }
}

fn is_same_map(a: &[(Key, Node)], b: &[(Key, Node)], skip: &[&str]) -> bool {
    let is_kept = |(key, _): &&(Key, Node)| skip != [key.name.as_str()];
    let (a, b): (Vec<_>, Vec<_>) = (a.iter().filter(is_kept).collect(), b.iter().filter(is_kept).collect());
    let inner = |name: &str| if skip.first() == Some(&name) { &skip[1..] } else { &[] };
    a.len() == b.len() && a.iter().zip(&b).all(|((x, a), (y, b))| x.name == y.name && is_same(a, b, inner(&x.name)))
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
            Some("metadata:\n  annotations:\n\n\n\n\n    canal.mesh/az: az1\n\n\n  name: x\nspec: 1\n"),
        );
        check("metadata:\n  name: x\n  annotations:\n    a: b\n    c: d", Some("metadata:\n  name: x\n\n\n"));
        check("metadata:\n  annotations:\n    a: b\n# a comment\n  name: x\n", Some("metadata:\n\n\n# a comment\n  name: x\n"));
    }

    #[test]
    fn what_is_read_or_cannot_be_cut_by_lines_stays() {
        for text in [
            "metadata:\n  name: x\n",
            "metadata:\n  annotations:\n    canal.mesh/az: az1\n",
            "metadata: {name: x, annotations: {note: y}}\n",
            "metadata:\n  annotations: {note: y}\n",
            "metadata:\n  annotations: []\n",
            // The label is the annotation's by an alias.
            "metadata:\n  annotations:\n    a: &v text\n  labels:\n    b: *v\n",
        ] {
            check(text, None);
        }
        check("metadata:\n  annotations: {note: y}\n  name: x\n", Some("metadata:\n\n  name: x\n"));
    }
}
